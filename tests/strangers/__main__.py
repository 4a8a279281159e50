"""Other projects' tests, as their source distributions ship them, with ``jax.jit`` as it is and optimized.

``python -m tests.strangers FOLDER`` downloads what FOLDER does not have yet.  It fails where a test's outcome differs,
or where no site was replaced.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]

MODULES = {
    "jax": ["tests/nn_test.py", "tests/lax_control_flow_test.py", "tests/custom_api_test.py", "tests/ragged_test.py"],
    "flax": [
        "tests/linen/linen_attention_test.py",
        "tests/linen/linen_linear_test.py",
        "tests/linen/linen_transforms_test.py",
        "tests/nnx/nn/attention_test.py",
        "tests/nnx/nn/linear_test.py",
        "tests/nnx/transforms_test.py",
        "tests/core/design/core_attention_test.py",
        "examples/gemma/transformer_test.py",
        "examples/gemma/modules_test.py",
    ],
    "optax": [
        "optax/losses/_classification_test.py",
        "optax/losses/_self_supervised_test.py",
        "optax/losses/_ranking_test.py",
        "optax/losses/_smoothing_test.py",
        "optax/_src/transform_test.py",
        "optax/_src/update_test.py",
    ],
}
"""The test modules that are run, of those projects whose distribution has them."""


def unpacked(name: str, folder: Path) -> Path | None:
    """The source distribution of the installed version, or None where there is none to be had."""
    version = importlib.metadata.version(name)
    place = folder / f"{name}-{version}"
    if not place.exists():
        archive = folder / f"{name}-{version}.tar.gz"
        if not archive.exists():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name]
            if subprocess.run([*pip, "--dest", str(folder), f"{name}=={version}"], check=False).returncode:
                return None
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
    return place


def outcomes(place: Path, modules: list[str], optimized: bool, arguments: list[str]) -> tuple[dict[str, str], int]:
    """({test: outcome}, number of replaced sites)."""
    results = place / f"results-{'optimized' if optimized else 'plain'}.xml"
    results.unlink(missing_ok=True)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "PYTHONPATH": str(HERE),
        "STRANGERS": "optimized" if optimized else "",
        "AUTOPALLAS_CACHE_DIR": str(place / "cache"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.strangers.plugin", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", "--tb=short", "--continue-on-collection-errors", f"--junitxml={results}"]
    command += [*arguments, *modules]
    told = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    if not results.exists():
        raise SystemExit(f"pytest did not run in {place}:\n{told.stdout[-3000:]}{told.stderr[-3000:]}")
    (place / f"output-{'optimized' if optimized else 'plain'}.txt").write_text(told.stdout, encoding="utf-8")
    found = {}
    for case in ET.parse(results).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}::{case.get('name')}"] = kinds[0] if kinds else "passed"
    applied = re.search(r"applied sites: (\d+)", told.stdout)
    return found, int(applied[1]) if applied else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the distributions are kept")
    parser.add_argument("--only", action="append", help="a project; all if not given")
    parser.add_argument("--module", action="append", help="a part of a module's path; all modules if not given")
    parser.add_argument("arguments", nargs="*", help="further arguments of pytest, after --")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    total, different = 0, 0
    for name in given.only or MODULES:
        place = unpacked(name, given.folder.resolve())
        modules = [m for m in MODULES[name] if place is not None and (place / m).exists()]
        modules = [m for m in modules if not given.module or any(part in m for part in given.module)]
        if place is None or not modules:
            print(f"{name}: no test modules in its source distribution")
            continue
        plain, _ = outcomes(place, modules, False, given.arguments)
        ours, applied = outcomes(place, modules, True, given.arguments)
        passed = [sum(outcome == "passed" for outcome in found.values()) for found in (plain, ours)]
        print(f"{name}: {passed[0]} of {len(plain)} pass as they are, {passed[1]} optimized; {applied} applied sites")
        for test in sorted(plain.keys() | ours.keys()):
            if plain.get(test) != ours.get(test):
                different += 1
                print(f"  {test}: {plain.get(test)} as it is, {ours.get(test)} optimized")
        total += applied
    print(f"{total} applied sites, {different} differences")
    return int(different > 0 or total == 0)


if __name__ == "__main__":
    sys.exit(main())
