"""What is computed again on GPUs and TPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import autopallas
from autopallas import pipeline
from autopallas.compile import gpu, tpu
from autopallas.rewrite.rematerialisation.rematerialise import rematerialise
from autopallas.sites.device import Device
from tests.rematerialisation.test_rematerialisation import exactly, parameters, step_of

GPU = Device("gpu", "NVIDIA H100 80GB HBM3")
TPU = Device("tpu", "TPU v5 lite")
LAYERS, ROWS, WIDTH = 4, 1024, 512


def layers(weights, x):
    """The loss of MLPs of which each is a round of a scan: [layers, width, 4 * width] and back, [rows, width]."""

    def layer(x, weights):
        up, down = weights
        y = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return x + jax.nn.gelu(y @ up) @ down, None

    return jnp.mean(jnp.square(lax.scan(layer, x, weights)[0].astype(jnp.float32)))


def example(dtype=jnp.bfloat16):
    weights = jnp.zeros((LAYERS, WIDTH, 4 * WIDTH), dtype), jnp.zeros((LAYERS, 4 * WIDTH, WIDTH), dtype)
    return weights, jnp.zeros((ROWS, WIDTH), dtype)


def told(device, function, *arguments, **options):
    with device.targeted():
        return autopallas.explain(autopallas.optimize(function, **options), *arguments).rematerialised


@pytest.mark.parametrize("device", [GPU, TPU], ids=["gpu", "tpu"])
def test_stacks_are_made_less_where_memory_is_asked_for(device):
    step = jax.value_and_grad(layers)
    assert told(device, step, *example(), objective="memory")
    assert told(device, step, *example(), ops="rematerialisation")
    assert not told(device, step, *example())
    assert not told(device, step, *example(), objective="memory", ops="-rematerialisation")


def test_outside_of_loops_the_compiler_for_tpus_does_so_itself():
    arguments, step = parameters(), step_of(jax.nn.gelu)
    assert told(GPU, step, *arguments, objective="memory")
    assert not told(TPU, step, *arguments, objective="memory")


def test_a_pass_that_fails_says_nothing_of_what_scans_stack(monkeypatch):
    def broken(program, extent, platform):
        raise KeyError("broken for stacks")

    monkeypatch.setattr(pipeline, "rematerialise", broken)
    run = autopallas.optimize(jax.value_and_grad(layers), ops="rematerialisation", strict=False)
    with TPU.targeted(), pytest.warns(UserWarning, match="broken for stacks"):
        report = autopallas.explain(run, *example())
    assert report.notes == ()
    assert any("broken for stacks" in failure.error for failure in report.failures)


def test_of_other_devices_nothing_is_known():
    step = jax.value_and_grad(layers)
    with Device("metal", "M1").targeted():
        report = autopallas.explain(autopallas.optimize(step, objective="memory"), *example())
    assert not report.rematerialised
    assert any("nothing is known of metal" in note for note in report.notes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_behind_barriers_values_are_the_same(dtype):
    """They are as near to the exact ones, within a half, since what is fused otherwise is rounded otherwise."""
    arguments, step = parameters(dtype), step_of(jax.nn.gelu)
    found, records = rematerialise(jax.make_jaxpr(step)(*arguments), platform="gpu")
    assert records
    names = [equation.primitive.name for equation in found.eqns]
    assert "optimization_barrier" in names
    assert "cond" not in names
    given, wanted, exact = jaxpr_as_fun(found)(*jax.tree.leaves(arguments)), step(*arguments), exactly(step, *arguments)
    for a, b, c in zip(*map(jax.tree.leaves, (given, wanted, exact)), strict=True):
        ours, theirs = (float(np.max(np.abs(np.asarray(x, np.float64) - c))) for x in (a, b))
        assert ours <= 1.5 * theirs + 1e-6 * np.abs(c).max()


def test_where_the_compiler_spreads_arrays_over_devices():
    """Stacks are less on each device, and no more is sent between them."""
    environment = dict(os.environ)
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "tests.rematerialisation.spread"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    original, found = json.loads(done.stdout.splitlines()[-1]).values()
    assert original["arrays"] == 0
    assert found["arrays"] > 0
    assert found["bytes"] < 0.7 * original["bytes"]
    assert all(count <= original["sent"].get(kind, 0) for kind, count in found["sent"].items())
    # Sums over parts are added in another order: a few roundings of float32, through four layers and their backward.
    assert found["error"] <= 2e-5


class TestCompiled:
    """Temporary memory of train steps, as the devices' own compilers plan it."""

    @pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing()))
    @pytest.mark.parametrize("looped", [True, False], ids=["scan", "unrolled"])
    def test_gpu(self, looped):
        step = jax.value_and_grad(layers) if looped else step_of(jax.nn.gelu)
        with gpu.Compiler() as compiler:
            self.judge(compiler, step, example() if looped else parameters())

    @pytest.mark.skipif(tpu.missing() is not None, reason=str(tpu.missing()))
    def test_tpu(self):
        with tpu.Compiler("tpu-v5e") as compiler:
            self.judge(compiler, jax.value_and_grad(layers), example())

    @staticmethod
    def judge(compiler, step, arguments):
        both = step, autopallas.optimize(step, ops="rematerialisation")
        original, optimized = (compiler.compile(function, arguments) for function in both)
        assert original.failure is None
        assert optimized.failure is None
        assert optimized.temporary_bytes < 0.7 * original.temporary_bytes
