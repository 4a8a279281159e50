"""Hypothesis: attention in any layout, under any mask, amid other operations, is found and computes what it did."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.catalogue import array
from support.compare import compare
from support.tiers import examples

quick = settings(
    max_examples=examples(15), deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
lengths = st.sampled_from([1, 2, 3, 5, 8])


@st.composite
def layouts(draw):
    """An einsum pair with all axes in random order, and arrays to go with it."""
    sizes = {axis: draw(lengths) for axis in "bhtsd"} | {"t": draw(st.sampled_from([2, 3, 7]))}
    sizes["s"], sizes["d"] = draw(st.sampled_from([2, 5, 7])), draw(st.sampled_from([2, 3, 7]))
    key_axes = draw(st.sampled_from(["bhsd", "bsd", "sd"]))
    order = lambda axes: "".join(draw(st.permutations(axes)))  # noqa: E731
    q, k, v = order("bhtd"), order(key_axes), order(key_axes.replace("d", "e"))
    scores, out = order("bhts"), order("bhte")
    sizes["e"] = draw(st.sampled_from([2, 4]))
    arrays = [array(*(sizes[a] for a in axes), seed=i) for i, axes in enumerate((q, k, v))]
    operands = (f"{q},{k}->{scores}", f"{scores},{v}->{out}")
    if draw(st.booleans()):
        operands = (f"{k},{q}->{scores}", operands[1])
    return operands, scores.index("s"), arrays


@quick
@given(layouts(), st.sampled_from([1.0, 0.3, -0.5]))
def test_einsum_with_axes_in_any_order(layout, scale):
    (first, second), axis, (q, k, v) = layout

    def function(q, k, v):
        operands = (q, k) if "t" in first.split(",")[0] else (k, q)
        p = jax.nn.softmax(jnp.einsum(first, *operands) * scale, axis=axis)
        return jnp.einsum(second, p, v)

    compared = compare(function, [q, k, v], gradients=False)
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()


@st.composite
def masks(draw):
    """A random boolean expression over positions, lengths and segments, as a function of (row, column, lengths)."""
    leaves = [
        lambda row, column, n: column <= row,
        lambda row, column, n: column < n,
        lambda row, column, n: row // 2 == column // 2,
        lambda row, column, n: jnp.abs(row - column) < 3,
        lambda row, column, n: (row + column) % 3 != 0,
        lambda row, column, n: column == 0,
    ]
    leaf = st.sampled_from(leaves)
    tree = st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(st.just("and"), inner, inner),
            st.tuples(st.just("or"), inner, inner),
            st.tuples(st.just("not"), inner),
        ),
        max_leaves=4,
    )
    expression = draw(tree)

    def evaluate(node, *positions):
        if callable(node):
            return node(*positions)
        parts = [evaluate(n, *positions) for n in node[1:]]
        return {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "not": lambda a: ~a}[node[0]](*parts)

    return lambda *positions: evaluate(expression, *positions)


@quick
@given(
    masks(),
    st.sampled_from([-jnp.inf, -1e9, float(np.finfo(np.float32).min), -1e4]),
    st.sampled_from(["where", "add", "softmax"]),
    st.integers(1, 9),
)
def test_any_mask_by_positions_is_exact(mask, fill, how, length):
    q, k, v = array(2, 7, 3, seed=1), array(2, 9, 3, seed=2), array(2, 9, 3, seed=3)

    def function(q, k, v, n):
        keep = mask(jnp.arange(7)[:, None], jnp.arange(9)[None], n)
        s = q @ k.mT
        if how == "softmax":
            return jax.nn.softmax(s, where=keep) @ v
        if how == "add":
            return jax.nn.softmax(s + jnp.where(keep, 0.0, fill)) @ v
        return jax.nn.softmax(jnp.where(keep, s, fill)) @ v

    compared = compare(function, [q, k, v, jnp.int32(length)], gradients=False)
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()


STEPS = {
    "scale": lambda s, a: s * 0.7,
    "shift": lambda s, a: s + 1.5,
    "bias": lambda s, a: s + a["bias"],
    "key_bias": lambda s, a: s - a["keys"],
    "query_factor": lambda s, a: s * a["queries"][:, None],
    "cap": lambda s, a: 3 * jnp.tanh(s / 3),
    "square": lambda s, a: jnp.sign(s) * s * s * 0.3,
    "clip": lambda s, a: jnp.clip(s, -2, 2),
    "triangle": lambda s, a: jnp.where(jnp.tri(*s.shape[-2:], dtype=bool), s, -1e9),
    "round": lambda s, a: s.astype(jnp.bfloat16).astype(jnp.float32),
    "row_maximum": lambda s, a: s - jax.lax.stop_gradient(s.max(-1, keepdims=True)),
    "sine": lambda s, a: jnp.sin(s) + s,
}
LAST = ("triangle", "row_maximum")
"""Steps after which only steps of this kind come: -1e9 is no number to square, and a row's maximum must cancel."""


@quick
@given(st.lists(st.sampled_from([s for s in STEPS if s not in LAST]), max_size=4), st.sets(st.sampled_from(LAST)))
def test_any_elementwise_program_between_is_exact_in_value_and_gradient(steps, last):
    arguments = [array(2, 5, 3, seed=1), array(2, 6, 3, seed=2), array(2, 6, 3, seed=3)]
    extra = {"bias": array(5, 6, seed=4), "keys": array(6, seed=5), "queries": array(5, seed=6)}

    def function(q, k, v, extra):
        s = q @ k.mT
        for step in itertools.chain(steps, sorted(last, reverse=True)):
            s = STEPS[step](s, extra)
        return jax.nn.softmax(s) @ v

    dtype = "bfloat16" if "round" in steps else "float32"
    compared = compare(function, [*arguments, extra], dtype=dtype)
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()


@quick
@given(
    st.lists(st.sampled_from(["before", "after", "bf16", "scan", "checkpoint", "jit", "vmap", "residual"]), max_size=3)
)
def test_any_surroundings_keep_a_site(wrappers):
    def function(q, k, v):
        return jax.nn.softmax(q @ k.mT * 0.5) @ v

    def wrapped(kind, inner):
        return {
            "before": lambda q, k, v: inner(jnp.sin(q), k * 2, v),
            "after": lambda q, k, v: jnp.tanh(inner(q, k, v)) * 2,
            "bf16": lambda q, k, v: inner(q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), v),
            "scan": lambda q, k, v: jax.lax.scan(lambda c, _: (c + inner(c, k, v), None), q, None, length=2)[0],
            "checkpoint": jax.checkpoint(inner),
            "jit": jax.jit(inner),
            "vmap": lambda q, k, v: jax.vmap(inner)(q, k, v),
            "residual": lambda q, k, v: q + inner(q, k, v),
        }[kind]

    rank = 2
    for kind in wrappers:
        function = wrapped(kind, function)
        rank += kind == "vmap"
    shape = (2,) * (rank - 2)
    arguments = [array(*shape, 5, 3, seed=i) for i in range(3)]
    compared = compare(function, arguments, dtype="bfloat16" if "bf16" in wrappers else "float32")
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()
