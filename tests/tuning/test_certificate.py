"""The certificate of a lockfile: a digest, the same for a program wherever it is made, another for another program."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas
from autopallas import compat
from autopallas.cli import main
from autopallas.errors import OptionError, RequirementError
from autopallas.optimized import Optimized
from autopallas.sites.device import Device
from autopallas.tuning.certificate import digest_of, setting
from autopallas.tuning.lock import Lock

MODULE = """
import jax, jax.numpy as jnp

def attend(x):
    scores = x @ x.T / 8
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1) @ x

def step(w, x):
    def loss(w):
        return jnp.sum(attend(x * w[0]) ** 2), jnp.argmax(x, axis=-1)
    return jax.value_and_grad(loss, has_aux=True)(w)
"""
CHILD = """
import socket, sys
socket.gethostname = lambda: sys.argv[1]
import jax, jax.numpy as jnp
import certified, autopallas
w, x = jnp.ones((64, 64)), jnp.ones((200, 64))
if sys.argv[1] != "first":  # other programs come before, and warm JAX's caches
    jax.jit(certified.step)(w, x)
    autopallas.optimize(certified.attend, objective="always")(x)
    jax.make_jaxpr(certified.step)(jnp.ones((32, 32)), jnp.ones((7, 32)))
step = autopallas.optimize(certified.step, lock=sys.argv[2], require="lockfile")
step(w, x)
print(step.report().counts())
"""
SHAPES = "f32[64,64],f32[200,64]"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes the module in a folder of its own, and gives the folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def write(text=MODULE):
        (tmp_path / "certified.py").write_text(text)
        importlib.invalidate_caches()
        sys.modules.pop("certified", None)
        for cached in tmp_path.glob("__pycache__/*"):
            cached.unlink()
        jax.clear_caches()
        return importlib.import_module("certified")

    yield write
    sys.modules.pop("certified", None)


def run(capsys, *arguments):
    status = main(arguments)
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def locked(capsys, *further):
    arguments = ("lock", "certified:step", "--shapes", SHAPES, "--objective", "always", "-o", "sites.lock", *further)
    status, printed = run(capsys, *arguments)
    assert status == 0, printed
    return Lock.from_json(Path("sites.lock").read_text())


def arrays():
    return jnp.ones((64, 64)), jnp.ones((200, 64))


def test_a_lockfile_certifies_the_program_in_four_processes_whatever_they_did_before(module, capsys, tmp_path):
    module()
    lock = locked(capsys)
    assert [site.verdict for site in lock.sites] == ["applied"] * 2
    assert {site.op: site.numerics for site in lock.sites} == {"attention": "tolerance", "respelling": "identical"}
    assert list(lock.digests) == [setting(Device.current(), compat.versions())]
    moved = tmp_path / "elsewhere" / "deeper"
    moved.mkdir(parents=True)
    (moved / "certified.py").write_text("# moved down\n\n\n" + MODULE.replace("def attend(x):", "def attend(x):  #"))
    children = []
    for number, name in enumerate(("first", "second", "third", "fourth")):
        folder = moved if number % 2 else tmp_path
        root = Path(autopallas.__file__).parent.parent
        environment = os.environ | {
            "PYTHONPATH": f"{folder}{os.pathsep}{root}",
            "PYTHONHASHSEED": str(number),
            "AUTOPALLAS_CACHE_DIR": str(tmp_path / f"cache{number}"),
            "HOSTNAME": name,
        }
        command = [sys.executable, "-c", CHILD, name, str(tmp_path / "sites.lock")]
        children.append(
            subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    for child in children:
        printed, _ = child.communicate(timeout=300)
        assert child.returncode == 0, printed.decode()
        assert "'attention': 1" in printed.decode()


def test_a_program_that_was_changed_is_not_certified_and_check_says_so(module, capsys):
    module()
    locked(capsys)
    assert run(capsys, "check", "sites.lock")[0] == 0
    changed = module(MODULE.replace("** 2", "** 4"))  # outside of the sites, which all hold
    status, printed = run(capsys, "check", "sites.lock")
    assert status == 1
    assert "2 of 2 applied sites hold" in printed
    assert "its digest is sha256:" in printed
    step = autopallas.optimize(changed.step, lock="sites.lock", require="lockfile")
    with pytest.raises(RequirementError, match=r"does not certify this program: its digest is .*autopallas check"):
        step(*arrays())
    autopallas.optimize(changed.step, lock="sites.lock")(*arrays())


def test_other_arguments_and_other_settings_are_not_certified(module, capsys):
    own = module()
    lock = locked(capsys)
    step = autopallas.optimize(own.step, lock="sites.lock", require="lockfile")
    step(*arrays())
    with pytest.raises(RequirementError, match=r"f32.64,64.,f32.200,64."):
        step(jnp.ones((64, 64)), jnp.ones((201, 64)))
    Path("sites.lock").write_text(replace(lock, digests={"TPU v5e, jax 0.1": "sha256:0"}).to_json())
    with pytest.raises(RequirementError, match=r"no digest for cpu.*only for TPU v5e, jax 0.1"):
        autopallas.optimize(own.step, lock="sites.lock", require="lockfile")(*arrays())
    status, printed = run(capsys, "check", "sites.lock", "--json")
    assert status == 0
    assert json.loads(printed)["digest"] == {
        "compared": False, "same": False, "reason": "it was locked for TPU v5e, jax 0.1"
    }  # fmt: skip


def test_a_sites_block_sizes_are_part_of_the_digest(module, capsys):
    own = module()
    lock = locked(capsys)
    sizes = {"query_block": 40, "key_block": 48}
    sites = [replace(site, block_sizes=sizes) if site.op == "attention" else site for site in lock.sites]
    Path("sites.lock").write_text(replace(lock, sites=tuple(sites)).to_json())
    with pytest.raises(RequirementError, match="digest"):
        autopallas.optimize(own.step, lock="sites.lock", require="lockfile")(*arrays())


def test_locking_again_keeps_the_digests_of_other_settings_while_the_sites_are_the_same(module, capsys):
    module()
    lock = locked(capsys)
    other = {"TPU v5e, jax 0.1": "sha256:0"}
    Path("sites.lock").write_text(replace(lock, digests=other).to_json())
    assert locked(capsys).digests == {**other, **lock.digests}
    assert locked(capsys, "--deny", "function:attend").digests.keys() == lock.digests.keys()


def test_a_lockfile_pins_numerics_and_places(module, capsys):
    own = module()
    lock = locked(capsys, "--numerics", "identical", "--deny", "scope:experiment")
    assert (lock.numerics, lock.deny) == ("identical", ("scope:experiment",))
    assert {site.verdict for site in lock.sites if site.numerics != "identical"} == {"kept"}
    assert [site.op for site in lock.sites if site.verdict == "applied"] == ["respelling"]
    loose = [
        replace(site, verdict="applied", implementation="xla", numerics="tolerance", block_sizes={})
        for site in lock.sites
    ]
    Path("sites.lock").write_text(replace(lock, sites=tuple(loose), deny=("function:step",)).to_json())
    step = autopallas.optimize(own.step, lock="sites.lock")
    step(*arrays())
    reasons = [site.reason for site in step.report().sites]
    assert all("denied by function:step (lockfile sites.lock)" in reason for reason in reasons), reasons
    Path("sites.lock").write_text(replace(lock, sites=tuple(loose), deny=()).to_json())
    step = autopallas.optimize(own.step, lock="sites.lock")
    step(*arrays())
    attention = next(site for site in step.report().sites if site.op == "attention")
    assert attention.verdict == "kept"
    assert "identical" in attention.attempts[0][2]


def test_require_lockfile_without_a_lockfile_is_refused():
    with pytest.raises(OptionError, match="lock=PATH"):
        autopallas.optimize(lambda x: x + 1, require="lockfile")(1.0)


def digest(function, *arguments):
    with autopallas.options(objective="always"):
        optimized = Optimized(function, {})
        return digest_of(optimized.trace(*arguments).jaxpr)


def test_captured_arrays_count_and_names_and_scopes_do_not():
    x = jnp.ones((4, 4))

    def program(scope, value, name):
        captured = jnp.full((4, 4), value)

        def function(x):
            with jax.named_scope(scope):
                return jnp.where(x > 0, x, captured)

        function.__name__ = name
        return digest(function, x)

    assert program("a", 1.0, "f") == program("b", 1.0, "g")
    assert program("a", 1.0, "f") != program("a", 2.0, "f")


def test_a_kernel_for_tpus_has_the_same_digest_on_other_lines(tmp_path):
    from autopallas.tuning.certificate import normalized

    def kernel(lines):
        namespace = {}
        text = "\n" * lines + (
            "import jax\nfrom jax.experimental import pallas as pl\n"
            "def body(x, y):\n    y[...] = x[...] * 2\n"
            "def double(x):\n    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)\n"
        )
        file = tmp_path / f"kernel{lines}.py"
        file.write_text(text)
        exec(compile(text, str(file), "exec"), namespace)
        traced = jax.jit(namespace["double"]).trace(jax.ShapeDtypeStruct((8, 128), np.float32))
        return traced.lower(lowering_platforms=("tpu",)).as_text()

    assert kernel(0) != kernel(7)
    assert normalized(kernel(0)) == normalized(kernel(7))
    assert normalized(kernel(0)) != normalized(kernel(0).replace("8x128", "16x128"))
