"""Every test runs on the CPU and without any setting of the machine's user.  TEST_PLATFORMS names another platform for
JAX: `TEST_PLATFORMS=cuda python -m pytest tests/kernels/test_gpu_device.py` runs what needs a GPU on one.

There are three tiers (``--tier``).  All tests take most of an hour on two cores, for they compile thousands of
programs.  ``make test`` runs a choice, made once and for all by names: on one line of JAX "fast", a few cases of each
parametrized test; on the other "compatibility", one case of some tests of each module.  ``make nightly`` runs all cases
on both, and the tests marked ``nightly``, which take longest.
"""

import atexit
import contextlib
import ctypes
import gc
import hashlib
import math
import os
import shutil
import tempfile
from collections import defaultdict

import pytest

os.environ["JAX_PLATFORMS"] = os.environ.get("TEST_PLATFORMS", "cpu")
for _name in [name for name in os.environ if name.startswith("AUTOPALLAS_")]:
    del os.environ[_name]

# Tuning results of the machine's user must not decide what a test sees, nor tests' what the user gets.
os.environ["AUTOPALLAS_CACHE_DIR"] = tempfile.mkdtemp(prefix="autopallas-test-cache-")
atexit.register(shutil.rmtree, os.environ["AUTOPALLAS_CACHE_DIR"], ignore_errors=True)

# Compilation takes most of a test's time.  LLVM's optimisations are more than half of that; they change how fast a
# program is, which no test measures, not what it computes or how much memory XLA plans for it.
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}".strip()

import jax  # noqa: E402  (after what it reads)
from support import tiers  # noqa: E402

from autopallas.tuning import duration  # noqa: E402

duration.LEAST_SECONDS_ON_CPUS = math.inf  # no test waits for a quick search, or depends on how fast this machine is

# What only compiles, for devices that are not here, is `make check-tpu` and `make check-gpu`.
if os.environ.get("FULL_GRID") != "1":
    collect_ignore_glob = ["kernels/*/test_*_compile.py", "tuning/test_tables_tpu_compile.py"]

CASES = {"fast": 2, "compatibility": 1}
"""How many cases of a parametrized test a tier has."""
ONE_CASE = {"cli", "court", "custom", "faults", "fuzz", "kernels", "recognition", "sharding", "training"}
"""Folders whose tests take longest, with interpreted kernels, several devices or processes, train steps or many
spellings: one case each."""
TESTS = {"compatibility": 3}
"""How many tests of a module a tier has."""


def pytest_configure(config):
    tiers.tier = config.getoption("tier")


def pytest_addoption(parser):
    parser.addoption(
        "--tier",
        choices=["fast", "compatibility", "nightly"],
        default="nightly",
        help="which cases of parametrized tests run: a few, fewer, or all (nightly, the default)",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    tier = config.getoption("tier")
    if tier == "nightly":
        return
    modules = defaultdict(lambda: defaultdict(list))
    for item in items:
        if item.get_closest_marker("nightly") is None:
            modules[item.path][item.nodeid.partition("[")[0]].append(item)
    chosen = set()
    for tests in modules.values():
        for test in _some(tests, TESTS.get(tier)):
            cases = {item.nodeid: item for item in tests[test]}
            first = next(iter(cases.values()))
            long = not ONE_CASE.isdisjoint(first.path.parts)
            every = tier == "fast" and first.get_closest_marker("every_case") is not None
            chosen.update(cases if every else _some(cases, 1 if long else CASES[tier]))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def _some(names, most):
    """So many of these names, the same on every machine, which do not follow the order of a grid."""
    return sorted(names, key=lambda name: hashlib.sha256(name.rpartition("/")[2].encode()).digest())[:most]


@pytest.fixture(autouse=True, scope="module")
def _memory():
    """Gives the memory of a module's programs back.

    One process that runs all modules would need 12 GB; and each compiled program has memory mappings of its own, of
    which Linux grants a process 65,530: behind them XLA's compiler crashes.
    """
    yield
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # the C library of Linux keeps what is freed, unless told
        ctypes.CDLL(None).malloc_trim(0)
