"""The TPU's compiler takes the kernels of recurrences, on a machine without a TPU: run by ``make check-tpu``."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest

from autopallas.compile.tpu import GENERATIONS, Compiler, missing
from autopallas.kernels import tpu
from autopallas.kernels.recurrence.chunks import Recurrence, chunked
from autopallas.kernels.recurrence.tpu_kernels import Layout, by_kernels

pytestmark = pytest.mark.skipif(
    os.environ.get("FULL_GRID") != "1" or missing() is not None, reason="make check-tpu runs it, with the compiler"
)

SIZES = {  # T, G, H, J, N, P, C
    "one chunk": (50, 1, 2, 2, 64, 64, 64),
    "eight heads": (2048, 1, 8, 8, 64, 64, 128),
    "shared keys": (1024, 2, 16, 1, 128, 64, 128),
    "odd sizes": (300, 3, 5, 5, 40, 72, 32),
    "odd heads that share keys": (300, 2, 7, 1, 96, 136, 64),
    "one head": (512, 1, 1, 1, 128, 256, 256),
    "short chunks": (100, 2, 3, 3, 16, 8, 8),
}


@pytest.fixture(scope="module", params=GENERATIONS)
def compiler(request):
    with Compiler(request.param) as compiler:
        yield compiler


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("name", SIZES)
def test_every_generation_compiles_them(compiler, name, before):
    steps, groups, heads, keys, rows, columns, chunk = SIZES[name]
    lead = (steps, groups)
    shapes = [(*lead, heads), (*lead, keys, rows), (*lead, heads, columns), (*lead, keys, rows)]
    shapes += [(groups, heads, rows, columns), *[(*lead, heads)] * before]
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def forward(*given):
        return chunked(Recurrence(*given), chunk, before, by_kernels)

    def backward(*given):
        return jax.vjp(forward, *given[2:])[1](given[:2])

    budget = tpu.generation(compiler.target.device).budget
    layout = Layout(chunk, rows, columns)
    block = layout.heads_of_block(heads if keys == 1 < heads else groups * heads, budget)
    check(compiler, forward, backward, types, layout, block)


KINDS = {  # decays of rows, the delta rule; N, P, C
    "channel": (True, False, 64, 64, 64),
    "delta": (False, True, 64, 64, 64),
    "channel, delta": (True, True, 128, 64, 32),
    "odd": (True, True, 40, 24, 16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_generation_compiles_decays_of_rows_and_delta_rules(compiler, kind):
    by_channel, delta, rows, columns, chunk = KINDS[kind]
    lead = (300, 1, 4)
    shapes = [(*lead, rows) if by_channel else lead, (*lead, rows), (*lead, columns), (*lead, rows)]
    shapes += [(1, 4, rows, columns), *[(*lead, rows)] * delta]
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def forward(*given):
        return chunked(Recurrence(*given[:5], probe=given[5] if delta else None), chunk, False, by_kernels)

    def backward(*given):
        return jax.vjp(forward, *given[2:])[1](given[:2])

    layout = Layout(chunk, rows, columns, by_channel, delta)
    block = layout.heads_of_block(4, tpu.generation(compiler.target.device).budget)
    check(compiler, forward, backward, types, layout, block)


def check(compiler, forward, backward, types, layout, block):
    with compiler.target.device.targeted():
        results = jax.eval_shape(forward, *types)
        found = {"forward": compiler.compile(forward, types)}
        found["backward"] = compiler.compile(backward, [*results, *types])
    for direction, names in (("forward", ("forward",)), ("backward", ("states", "backward"))):
        assert found[direction].failure is None
        kernels = {o.name.split(".")[0]: o for o in found[direction].operations if o.kernel}
        assert kernels.keys() == {f"autopallas_recurrence_{name}" for name in names}
        for name in names:
            kernel = kernels[f"autopallas_recurrence_{name}"]
            assert kernel.vmem_bytes <= 1.25 * layout.vmem_bytes(block, name)
