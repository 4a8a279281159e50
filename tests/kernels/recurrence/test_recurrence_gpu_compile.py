"""The GPU's compiler takes the kernels of recurrences, on a machine without a GPU: run by ``make check-gpu``."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest

import autopallas
from autopallas.compile.gpu import H100, Compiler, missing
from autopallas.kernels.recurrence.cases import in_direction, retention, types
from autopallas.kernels.recurrence.chunks import Recurrence, chunked
from autopallas.kernels.recurrence.pallas_gpu import of_chunks
from autopallas.workbench.cases import Case

pytestmark = pytest.mark.skipif(
    os.environ.get("FULL_GRID") != "1" or missing() is not None,
    reason=f"make check-gpu runs it, with the compiler ({missing() or 'which is here'})",
)

PRODUCTS = {"states": 4, "results": 4, "gradients": 12}
"""Fewest wgmma of each kernel: 16 steps or rows at a time, of which a chunk has 64, or a state."""


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("rows, columns", [(64, 64), (128, 64), (64, 128), (128, 128)])
def test_the_compiler_takes_them_without_spills(rows, columns, shared):
    steps, groups, heads = 4096, 8, 16

    def kind(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    of_rows = kind(steps, groups, 1 if shared else heads, rows)
    value, state = kind(steps, groups, heads, columns), kind(groups, heads, rows, columns)
    given = Recurrence(kind(steps, groups, heads), of_rows, value, of_rows, state)

    def loss(given, of_value, of_state):
        y, last = chunked(given, 64, False, of_chunks)
        return jnp.sum(y * of_value) + jnp.sum(last * of_state)

    with H100.targeted(), Compiler() as compiler:
        found = compiler.compile(jax.value_and_grad(loss), [given, value, state])
    print("", *found.kernels, f"temporary memory {found.temporary_bytes}", sep="\n  ")
    assert found.faults() == ()
    assert {kernel.name.rpartition("_")[2] for kernel in found.kernels} == PRODUCTS.keys()
    for kernel in found.kernels:
        assert kernel.operations["HGMMA"] >= PRODUCTS[kernel.name.rpartition("_")[2]]


def test_a_replaced_loop_takes_less_memory_than_the_loop():
    """With gradients: the loop keeps the states of all steps, and the kernels those at the beginnings of chunks."""
    sizes = (("T", 1024), ("B", 4), ("H", 8), ("N", 128), ("P", 128))
    case = Case("recurrence", "forward+backward", "bfloat16", "scalar", sizes)
    original = in_direction(case, retention)
    replaced = autopallas.optimize(original, implementation="pallas_gpu", objective="always", strict=True)
    with H100.targeted(), Compiler() as compiler:
        found = compiler.compile(replaced, types(case))
        plain = compiler.compile(original, types(case))
    print(
        "", *found.kernels, f"temporary memory {found.temporary_bytes}, the loop's {plain.temporary_bytes}", sep="\n  "
    )
    assert found.faults() == ()
    assert found.temporary_bytes < plain.temporary_bytes / 16


@pytest.mark.parametrize("direction, states", [("forward", 1), ("forward+backward", 2)])
def test_nothing_is_copied_around_the_kernels(direction, states):
    """They read and write what the program has; only the numbers of each step, small beside it, are XLA's."""
    steps, groups, heads, rows, columns = 4096, 4, 16, 128, 128
    sizes = (("T", steps), ("B", groups), ("H", heads), ("N", rows), ("P", columns))
    case = Case("recurrence", direction, "bfloat16", "scalar", sizes)
    replaced = autopallas.optimize(
        in_direction(case, retention), implementation="pallas_gpu", objective="always", strict=True
    )
    with H100.targeted(), Compiler() as compiler:
        found = compiler.compile(replaced, types(case))
    print(f"temporary memory {found.temporary_bytes}, copied {found.copied_bytes}")
    assert found.faults() == ()
    numbers = steps * groups * heads * 4
    assert found.copied_bytes < 4 * numbers
    stored = states * steps // 64 * groups * heads * rows * columns * 2
    assert found.temporary_bytes < stored + 40 * numbers
