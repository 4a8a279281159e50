"""An operation called as a function takes its block sizes from where a site's come from."""

from __future__ import annotations

import importlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from places import CPU

import autopallas
from autopallas.kernels.attention import attention
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.tuned_block_sizes import infer_block_sizes
from autopallas.kernels.cross_entropy import cross_entropy
from autopallas.kernels.grouped_matmul import grouped_matmul
from autopallas.tuning.coverage import form_of
from autopallas.tuning.direct import recorded
from autopallas.tuning.entry import Entry
from autopallas.tuning.key import key_of
from autopallas.tuning.table import Row

X = jnp.ones((1, 300, 2, 16), jnp.float32)
CALLS = {
    "attention": (attention, (X, X, X)),
    "cross_entropy": (cross_entropy, (jnp.ones((40, 16)), jnp.ones((16, 300)), jnp.zeros(40, jnp.int32))),
    "grouped_matmul": (grouped_matmul, (jnp.ones((40, 8)), jnp.ones((4, 8, 8)), jnp.full(4, 10))),
}


def row(sizes) -> Row:
    return Row(sizes, 10.0, 30.0, 100, 200, "measured", "2026-11-21", "jax")


def asked(op: str):
    """What a call of the operation asks for, forward and with gradients."""
    function, operands = CALLS[op]
    with recorded() as calls:
        jax.eval_shape(lambda *operands: function(*operands), *operands)
    assert [(call.direction, name) for call, name in calls] == [("forward", "xla"), ("forward+backward", "xla")]
    return [call for call, _ in calls]


def entry(call, sizes, lean=None) -> Entry:
    key = key_of(call, "xla", CPU)
    return Entry(key.description, "tuned", sizes, row(sizes), lean=None if lean is None else row(lean))


def used(monkeypatch, op: str, gradient: bool = False, **options):
    """The block sizes with which the kernel is called."""
    kernel, seen = importlib.import_module(f"autopallas.kernels.{op}.xla"), []
    genuine = kernel.forward

    def forward(spec, block_sizes, *rest):
        seen.append(block_sizes.to_dict())
        return genuine(spec, block_sizes, *rest)

    monkeypatch.setattr(kernel, "forward", forward)
    function, operands = CALLS[op]

    def call(*operands):
        return function(*operands, **options)

    if gradient:
        jax.eval_shape(jax.grad(lambda *a: jnp.sum(jax.tree.leaves(call(*a))[0])), *operands)
    else:
        jax.eval_shape(call, *operands)
    monkeypatch.setattr(kernel, "forward", genuine)
    return seen[0]


SIZES = {
    "attention": {"query_block": 64, "key_block": 128},
    "cross_entropy": {"rows_block": 16, "vocabulary_block": 24},
    "grouped_matmul": None,
}


@pytest.mark.parametrize("op", CALLS)
def test_the_cache_is_read_in_both_directions(op, monkeypatch, user_cache):
    default = used(monkeypatch, op)
    sizes = SIZES[op] or default | {"row_block": 8}
    forward, backward = asked(op)
    user_cache.put(entry(forward, sizes))
    assert used(monkeypatch, op) == sizes != default
    assert used(monkeypatch, op, gradient=True) != sizes
    user_cache.put(entry(backward, sizes))
    assert used(monkeypatch, op, gradient=True) == sizes


def test_what_the_caller_gives_wins_over_the_cache_and_the_cache_over_the_table(monkeypatch, user_cache):
    (forward, _) = asked("attention")
    table = infer_block_sizes(forward.spec, CPU, "xla", form=form_of(forward, CPU))
    assert used(monkeypatch, "attention") == table.to_dict()
    user_cache.put(entry(forward, SIZES["attention"]))
    given = BlockSizes(32, 32)
    assert used(monkeypatch, "attention") == SIZES["attention"]
    assert used(monkeypatch, "attention", block_sizes=given) == given.to_dict()


def test_the_objective_in_force_picks(monkeypatch, user_cache):
    (forward, _) = asked("attention")
    lean = {"query_block": 16, "key_block": 16}
    user_cache.put(entry(forward, SIZES["attention"], lean))
    with autopallas.options(objective="memory"):
        assert used(monkeypatch, "attention") == lean
    assert used(monkeypatch, "attention") == SIZES["attention"]


def test_a_result_that_failed_leaves_the_table(monkeypatch, user_cache):
    (forward, _) = asked("attention")
    table = used(monkeypatch, "attention")
    user_cache.put(replace(entry(forward, SIZES["attention"]), outcome="failed", block_sizes=None, row=None))
    assert used(monkeypatch, "attention") == table
