"""Optimized functions that are exported, compiled ahead of time, or cached, and used in another process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import serialize_executable

import autopallas

pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")

ROOT = Path(__file__).parents[2]

BLOCKER = """
import pickle, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "autopallas":
            raise ImportError("there is no autopallas here")

sys.meta_path.insert(0, Blocker())
folder = sys.argv[1]
with open(f"{folder}/arguments.pickle", "rb") as file:
    arguments = pickle.load(file)
"""
RUN_EXPORTED = """
from jax import export
with open(f"{folder}/step.exported", "rb") as file:
    step = export.deserialize(bytearray(file.read()))
results = step.call(*arguments)
"""
RUN_COMPILED = """
from jax.experimental import serialize_executable
with open(f"{folder}/step.compiled", "rb") as file:
    results = serialize_executable.deserialize_and_load(*pickle.load(file))(*arguments)
"""
KEEP = """
import jax, numpy as np
assert not any(name.partition(".")[0] == "autopallas" for name in sys.modules)
with open(f"{folder}/results.pickle", "wb") as file:
    pickle.dump([np.asarray(x) for x in jax.tree.leaves(results)], file)
"""
SECOND_START = """
import collections, sys
import jax, jax.numpy as jnp, autopallas
from jax import monitoring
counts = collections.Counter()
monitoring.register_event_listener(lambda name, **_: counts.update([name.rpartition("/")[2]]))

@autopallas.optimize(objective="always", require={"attention": 1})
def step(q, k, v):
    return jax.grad(lambda q: jnp.sum(jax.nn.softmax(q @ k.T / 8.0) @ v))(q)

x = jnp.ones((48, 16))
jax.block_until_ready(step(x, x, x))
print(counts["cache_hits"], counts["cache_misses"], sum(one.seconds for one in step.report().trace) > 0)
"""


def loss(q, k, v, w, labels):
    scores = q @ k.T / 8.0
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -jnp.inf)
    logits = (jax.nn.softmax(scores) @ v) @ w
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


STEP = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))


@pytest.fixture(scope="module")
def arguments():
    random = np.random.default_rng(0)
    floats = [random.standard_normal(s).astype(np.float32) for s in ((40, 16), (40, 16), (40, 16), (16, 64))]
    return [*floats, random.integers(0, 64, 40).astype(np.int32)]


@pytest.fixture
def folder(tmp_path, arguments):
    (tmp_path / "arguments.pickle").write_bytes(pickle.dumps(arguments))
    return tmp_path


def without_autopallas(code, folder):
    """Runs code in a process that cannot import autopallas, and returns its results."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER + code + KEEP, str(folder)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return pickle.loads((folder / "results.pickle").read_bytes())


def same(found, arguments):
    for x, y in zip(found, jax.tree.leaves(jax.jit(STEP)(*arguments)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


def test_a_step_exported_for_three_platforms_runs_in_a_process_without_autopallas(folder, arguments):
    step = autopallas.optimize(STEP, objective="always", require={"attention": 1, "cross_entropy": 1})
    exported = export.export(jax.jit(step), platforms=["cpu", "tpu", "cuda"])(*arguments)
    assert exported.platforms == ("cpu", "tpu", "cuda")
    assert "tpu_custom_call" in exported.mlir_module(), "the TPU's kernels are in it"
    (folder / "step.exported").write_bytes(exported.serialize())
    same(without_autopallas(RUN_EXPORTED, folder), arguments)


def test_what_is_compiled_ahead_of_time_runs_in_a_process_without_autopallas(folder, arguments):
    step = autopallas.optimize(STEP, objective="always", require={"attention": 1, "cross_entropy": 1})
    compiled = step.lower(*arguments).compile()
    (folder / "step.compiled").write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    same(without_autopallas(RUN_COMPILED, folder), arguments)


def test_a_second_start_finds_everything_in_jaxs_compilation_cache(tmp_path):
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "AUTOPALLAS_CACHE_DIR": str(tmp_path / "tuning"),
        "PYTHONPATH": str(ROOT),
    }

    def start():
        done = subprocess.run(
            [sys.executable, "-c", SECOND_START], env=os.environ | settings, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        hits, misses, told = done.stdout.split()
        assert told == "True", "the report says what each start pays for the passes"
        return int(hits), int(misses)

    hits, misses = start()
    assert misses > 0
    assert start() == (hits + misses, 0)
