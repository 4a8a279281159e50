"""Causal linear attention: which spellings are found, which are refused and why, and what is computed instead."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import compare, with_gradients

import autopallas

T, N, P = 37, 8, 6


def positive(x):
    return jax.nn.elu(x) + 1


def causal(steps=T, offset=0):
    return jnp.tril(jnp.ones((steps, steps), bool), offset)


def scores(q, k):
    return jnp.einsum("bthn,bshn->bhts", q, k)


def weighted(s, v):
    return jnp.einsum("bhts,bshp->bthp", s, v)


# ---------------------------------------------------------------------- spellings, of q, k [B, T, H, N], v [B, T, H, P]


def selected(q, k, v):
    return weighted(jnp.where(causal(), scores(q, k), 0), v)


def lower_triangle(q, k, v):
    return weighted(jnp.tril(scores(q, k)), v)


def multiplied(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    s = (q * 0.25) @ k.swapaxes(-1, -2) * jnp.tril(jnp.ones((T, T)))
    return (s @ v).transpose(0, 2, 1, 3)


def inverted(q, k, v):
    later = jnp.arange(T)[:, None] < jnp.arange(T)[None]
    return weighted(jnp.where(later, 0.0, scores(q, k) / 3), v)


def without_own_step(q, k, v):
    return weighted(jnp.tril(scores(q, k), -1), v)


def from_the_last(q, k, v):
    return weighted(jnp.triu(scores(q, k)) * -2, v)


def after_own_step(q, k, v):
    steps = jnp.arange(T)
    return weighted(scores(q, k) * (steps[None] > steps[:, None]), v)


def counted_from_one(q, k, v):
    t, s = (jax.lax.broadcasted_iota(jnp.float32, (T, T), axis) + 1 for axis in (0, 1))
    return weighted(jnp.where(jnp.logical_not(s > t), scores(q, k), 0), v)


def one_head_mapped(q, k, v):
    def one(q, k, v):
        return jnp.tril(q @ k.T) @ v

    return jax.vmap(jax.vmap(one, 1, 1))(q, k, v)


def of_shared_keys(q, k, v):
    return weighted(jnp.tril(jnp.einsum("bthn,bsn->bhts", q, k[:, :, 0])), v)


def of_shared_values(q, k, v):
    return jnp.einsum("bhts,bsp->bthp", jnp.tril(scores(q, k)), v[:, :, 0])


def summed_by_hand(q, k, v):
    s = jnp.sum(q[:, :, None] * k[:, None], -1)  # [B, T, S, H]
    s = jnp.where(causal()[None, :, :, None], s, 0)
    return jnp.sum(s[..., None] * v[:, None], 2)


def normalised_before(q, k, v):
    s = jnp.where(causal(), scores(positive(q), positive(k)), 0)
    return weighted(s / (jnp.sum(s, -1, keepdims=True) + 1e-6), v)


def normalised_after(q, k, v):
    s = jnp.where(causal(), scores(positive(q), positive(k)), 0)
    return weighted(s, v) / jnp.sum(s, -1).transpose(0, 2, 1)[..., None]


def by_magnitudes_before(q, k, v):
    """Sums of one sign, on both sides of the least magnitude: what cancels has no digits to compare."""
    s = jnp.tril(scores(positive(q), -0.01 * positive(k)))
    return weighted(s / jnp.maximum(jnp.abs(jnp.sum(s, -1, keepdims=True)), 1), v)


def by_magnitudes_after(q, k, v):
    s = jnp.where(causal(), scores(positive(q), -0.01 * positive(k)), 0)
    return weighted(s, v) / jnp.maximum(1.0, jnp.abs(s.sum(-1))).transpose(0, 2, 1)[..., None]


def by_magnitudes_without_a_least_one(q, k, v):
    s = jnp.tril(scores(positive(q), -positive(k)))
    return weighted(s / jnp.abs(1e-3 + jnp.sum(s, -1, keepdims=True)), v)


def by_sums_that_are_clipped(q, k, v):
    s = jnp.tril(scores(positive(q), positive(k)))
    return weighted(s, v) / jnp.clip(jnp.sum(s, -1) + 1, 20.0).transpose(0, 2, 1)[..., None]


def running_sums(q, k, v):
    states = jnp.cumsum(jnp.einsum("bthn,bthp->bthnp", k, v), axis=1)
    return jnp.einsum("bthn,bthnp->bthp", q, states)


def running_sums_by_hand(q, k, v):
    states = jnp.cumsum(k[..., :, None] * v[..., None, :] * 0.5, 1)
    return jnp.sum(q[..., None] * states, -2)


def running_sums_from_the_last(q, k, v):
    states = jax.lax.cumsum(jnp.einsum("bthn,bthp->bthpn", k, v), axis=1, reverse=True)
    return jnp.einsum("bthpn,bthn->bthp", states, q)


def running_sums_of_shared_queries(q, k, v):
    states = jnp.cumsum(k[..., :, None] * v[..., None, :], 1)
    return jnp.einsum("btn,bthnp->bthp", q[:, :, 0], states)


def both_running_sums(q, k, v):
    q, k = positive(q), positive(k)
    states = jnp.cumsum(jnp.einsum("bthn,bthp->bthnp", k, v), axis=1)
    total = jnp.einsum("bthn,bthn->bth", q, jnp.cumsum(k, axis=1))
    return jnp.einsum("bthn,bthnp->bthp", q, states) / total[..., None]


SPELLINGS = [
    selected, lower_triangle, multiplied, inverted, without_own_step, from_the_last, after_own_step, counted_from_one,
    one_head_mapped, of_shared_keys, of_shared_values, summed_by_hand, normalised_before, normalised_after,
    by_magnitudes_before, by_magnitudes_after, by_magnitudes_without_a_least_one, by_sums_that_are_clipped,
    running_sums, running_sums_by_hand, running_sums_from_the_last, running_sums_of_shared_queries, both_running_sums,
]  # fmt: skip


def operands(dtype="float32", steps=T, scale=1.0, offset=0.0):
    random = np.random.default_rng(0)
    shapes = [(2, steps, 3, width) for width in (N, N, P)]
    return tuple(jnp.asarray(scale * random.standard_normal(shape) + offset, dtype) for shape in shapes)


def found(function, arguments, **options):
    report = autopallas.explain(autopallas.optimize(function, **options), *arguments)
    return report, [(site.op, site.direction) for site in report.sites if site.op == "linear_attention"]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_spellings_are_found_and_right_in_value_and_gradient(spelling):
    arguments = operands()
    outcome = compare(spelling, arguments)
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 1
    # The gradients inside are one site with the forward.
    assert found(with_gradients(spelling, arguments), arguments)[1] == [("linear_attention", "forward+backward")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "spelling", [selected, normalised_before, by_magnitudes_before, running_sums], ids=lambda f: f.__name__
)
def test_sixteen_bits(spelling, dtype):
    outcome = compare(spelling, operands(dtype, scale=0.5))
    assert outcome.complaints == []
    overflows = (
        spelling in (normalised_before, by_magnitudes_before) and dtype == "float16"
    )  # a sum that is cast to it may
    assert outcome.counts("linear_attention") == (not overflows)


@pytest.mark.parametrize(("scale", "offset"), [(30.0, 0.0), (1.0, 100.0), (1e-3, 0.0)])
@pytest.mark.parametrize("spelling", [selected, normalised_before, normalised_after, by_magnitudes_after, running_sums])
def test_large_offsets_and_scales(spelling, scale, offset):
    outcome = compare(spelling, operands(scale=scale, offset=offset))
    assert outcome.complaints == []


@pytest.mark.parametrize("spelling", [normalised_before, normalised_after])
@pytest.mark.parametrize("last", [1e6, 1e30])
def test_early_steps_are_exact_where_later_values_are_far_larger(spelling, last):
    q, k, v = operands()
    v = v.at[:, -1].multiply(last)
    optimized = autopallas.optimize(spelling, objective="always", strict=True)
    early, expected = (np.asarray(run(q, k, v))[:, :-1] for run in (optimized, jax.jit(spelling)))
    np.testing.assert_allclose(early, expected, rtol=1e-4, atol=1e-5)
    assert optimized.report().counts()["linear_attention"] == 1


@pytest.mark.parametrize("steps", [2, 63, 64, 65, 200])
def test_steps_that_no_chunk_divides(steps):
    def both(q, k, v):
        s = jnp.tril(scores(q, k))
        return weighted(s, v), running_sums(q, k, v)

    outcome = compare(both, operands(steps=steps))
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 2


def test_in_loops_over_layers_with_checkpoints():
    def layers(q, k, v):
        def layer(x, w):
            return x + 0.1 * weighted(jnp.tril(scores(x * w, k)), v @ w[:P, None] * jnp.ones(N)), None

        return jax.lax.scan(jax.checkpoint(layer), q, jnp.ones((3, N)))[0]

    arguments = operands()
    outcome = compare(layers, arguments)
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 1
    assert found(with_gradients(layers, arguments), arguments)[1] == [("linear_attention", "forward+backward")]


def test_one_gradient_of_three_is_a_site_of_its_own():
    """Of the forward nothing is needed."""
    q, k, v = operands()
    gradient = jax.grad(lambda q, k, v: jnp.sum(running_sums(q, k, v) * v))
    _, sites = found(gradient, (q, k, v))
    assert sites == [("linear_attention", "forward")]


# ---------------------------------------------------------------------- refusals


def multiplied_by_an_array(q, k, v):
    return weighted(jnp.where(causal(), scores(q, k) * jnp.cos(q[0, :, 0, :1] * k[0, None, :, 0, 0]), 0), v)


def seeing_the_next_step(q, k, v):
    return weighted(jnp.tril(scores(q, k), 1), v)


def of_three_arrays(q, k, v):
    states = jnp.cumsum((k[..., :, None] * v[..., None, :]) * k[..., :1, None], 1)
    return jnp.einsum("bthn,bthnp->bthp", q, states)


def divided_by_magnitudes_and_more(q, k, v):
    s = jnp.tril(scores(q, k))
    return weighted(s / (1 + jnp.abs(jnp.sum(s, -1, keepdims=True))), v)


def divided_by_magnitudes_or_what_each_row_has(q, k, v):
    s = jnp.tril(scores(q, k))
    least = jnp.exp(-jnp.max(s, -1, keepdims=True))
    return weighted(s / jnp.maximum(jnp.abs(jnp.sum(s, -1, keepdims=True)), least), v)


REFUSED = {
    divided_by_magnitudes_and_more: "divided or multiplied by what is computed from all of a row",
    divided_by_magnitudes_or_what_each_row_has: "divided or multiplied by what is computed from all of a row",
    multiplied_by_an_array: "multiplied by something else than numbers, decays between steps and one causal mask",
    seeing_the_next_step: "each step sees the steps up to 1 steps away from it",
    of_three_arrays: "the outer products of keys and values are multiplied by a third array",
}


@pytest.mark.parametrize("program", REFUSED, ids=lambda f: f.__name__)
def test_near_misses_say_what_differs(program):
    report, sites = found(program, operands(), objective="always")
    assert sites == []
    assert [REFUSED[program] in miss.reason for miss in report.near_misses] == [True]
    (miss,) = report.near_misses
    assert miss.advice
    assert "test_linear_attention.py" in miss.location


def not_causal(q, k, v):
    return weighted(scores(q, k), v)


def windowed(q, k, v):
    steps = jnp.arange(T)
    near = jnp.abs(steps[:, None] - steps[None]) < 5
    return weighted(jnp.where(near, scores(q, k), 0), v)


def masked_with_ones(q, k, v):
    return weighted(jnp.where(causal(), scores(q, k), 1), v)


def masked_by_padding(q, k, v):
    return weighted(jnp.where(v[:, None, None, :, 0, 0] > 0, scores(q, k), 0), v)


def masked_over_parts_of_steps(q, k, v):
    """Steps see those that are not later within their own block of 37, of two blocks of the keys."""
    two = jnp.concatenate([k, k * 2], 1), jnp.concatenate([v, v], 1)
    s = jnp.einsum("bthn,bcshn->bhtcs", q, two[0].reshape(2, 2, T, 3, N))
    s = jnp.where(causal()[:, None], s, 0)
    return jnp.einsum("bhtcs,bcshp->bthp", s, two[1].reshape(2, 2, T, 3, P))


def masked_by_steps_of_the_other_kind(q, k, v):
    steps = jnp.arange(T)
    return weighted(jnp.where((steps <= 20)[None], scores(q, k), 0), v)


def wrapped_around(q, k, v):
    """Of unsigned numbers, 0 - 1 is the largest."""
    t, s = (jax.lax.broadcasted_iota(jnp.uint8, (T, T), axis) for axis in (0, 1))
    return weighted(jnp.where(t - jnp.uint8(1) >= s, scores(q, k), 0), v)


def squared(q, k, v):
    return weighted(jnp.tril(scores(q, k)) ** 2, v)


def normalised_by_absolutes(q, k, v):
    s = jnp.tril(scores(q, k))
    return weighted(s / jnp.sum(jnp.abs(s), -1, keepdims=True), v)


def normalised_by_another_mask(q, k, v):
    s = jnp.tril(scores(q, k))
    return weighted(s / (1 + jnp.sum(jnp.tril(s, -1) ** 2, -1, keepdims=True)), v)


def sums_along_heads(q, k, v):
    states = jnp.cumsum(jnp.einsum("bthn,bthp->bthnp", k, v), axis=2)
    return jnp.einsum("bthn,bthnp->btnp", q, states)


def sums_of_sums(q, k, v):
    states = jnp.cumsum(k[..., :, None] + v[..., None, :], 1)
    return jnp.einsum("bthn,bthnp->bthp", q, states)


def masked_parameters(q, k, v):
    return jnp.einsum("ts,bshp->bthp", jnp.tril(q[0, :, 0, 0][:, None] * jnp.ones((T, T))), v)


def through(*dtypes):
    """Casts from one type to the next."""

    def cast(x):
        for dtype in dtypes:
            x = x.astype(dtype)
        return x

    return cast


def quantised_scores(q, k, v):
    return weighted(jnp.tril(through("float8_e4m3fn", "float32")(scores(q, k))), v)


def quantised_outer_products(q, k, v):
    states = jnp.cumsum(through("float8_e5m2", "float32")(k[..., :, None] * v[..., None, :]), 1)
    return jnp.einsum("bthn,bthnp->bthp", q, states)


def divided_by_whole_numbers(q, k, v):
    s = jnp.tril(scores(positive(q), positive(k)))
    return weighted(s / through("int32", "float32")(jnp.sum(s, -1, keepdims=True)), v)


def divided_by_quantised_sums(q, k, v):
    s = jnp.tril(scores(positive(q), positive(k)))
    return weighted(s / through("float8_e5m2", "float32")(jnp.sum(s, -1, keepdims=True)), v)


def infinite_in_half_precision(q, k, v):
    return weighted(jnp.tril(through("float16", "float32")(scores(q * 1e3, k * 1e3))), v)


OTHERS = [
    not_causal, windowed, masked_with_ones, masked_by_padding, masked_over_parts_of_steps,
    masked_by_steps_of_the_other_kind, wrapped_around, squared, normalised_by_absolutes, normalised_by_another_mask,
    sums_along_heads, sums_of_sums, masked_parameters, quantised_scores, quantised_outer_products,
    divided_by_whole_numbers, divided_by_quantised_sums, infinite_in_half_precision,
]  # fmt: skip


@pytest.mark.parametrize("program", OTHERS, ids=lambda f: f.__name__)
def test_what_looks_alike_is_left_alone(program):
    outcome = compare(program, operands())
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 0


def test_quantised_operands_are_read_behind_their_casts():
    def of_wide(q, k, v):
        q, k, v = (x.astype("float32") for x in (q, k, v))
        return weighted(jnp.tril(scores(q, k)), v)

    outcome = compare(of_wide, [x.astype("float8_e4m3fn") for x in operands()], gradients=False, dtype="float32")
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 1


def test_a_site_is_found_where_its_operand_is_read_many_times_between():
    """The cotangents of its uses lie so many additions apart."""

    def program(x):
        s = jnp.tril(x @ x.T)
        others = sum(jnp.sin(x * i).sum() for i in range(950))
        return jnp.sin(s @ x).sum() + others

    x = operands()[0][0, :, 0]
    optimized = autopallas.optimize(jax.grad(program), objective="always", strict=True)
    report = autopallas.explain(optimized, x)
    assert [site.direction for site in report.sites if site.op == "linear_attention"] == ["forward+backward"]


def test_without_the_assumption_that_numbers_are_finite():
    assert found(selected, operands(), assume_finite=False)[1] == []


def with_axes(letters, offset, upper, strange):
    """Attention whose arrays have their axes in the given orders; a strange mask lacks a few pairs of steps."""
    of_query, of_key, of_value, of_scores, of_result = letters

    def program(q, k, v):
        given = (q, "bthn", of_query), (k, "bshn", of_key), (v, "bshp", of_value)
        q, k, v = (jnp.transpose(x, [axes.index(a) for a in own]) for x, axes, own in given)
        s = jnp.einsum(f"{of_query},{of_key}->{of_scores}", q, k)
        mask = causal(offset=offset)
        mask = mask.T if upper else mask
        if strange:
            mask &= jnp.arange(T)[:, None] + jnp.arange(T)[None] != 18
        mask = mask if of_scores.index("t") < of_scores.index("s") else mask.T
        s = jnp.where(mask.reshape([T if a in "ts" else 1 for a in of_scores]), s, 0)
        return jnp.einsum(f"{of_scores},{of_value}->{of_result}", s, v)

    return program


def test_random_layouts_masks_and_planted_differences():
    random = np.random.default_rng(3)
    for _ in range(12):
        letters = ["".join(random.permutation(list(axes))) for axes in ("bthn", "bshn", "bshp", "bhts", "bthp")]
        offset, upper, strange = int(random.integers(-1, 1)), bool(random.integers(2)), bool(random.integers(2))
        outcome = compare(with_axes(letters, offset, upper, strange), operands())
        assert outcome.complaints == []
        assert outcome.counts("linear_attention") == (not strange), (letters, offset, upper)


def test_the_public_function_computes_all_of_its_forms():
    from autopallas.kernels.linear_attention import linear_attention

    random = np.random.default_rng(0)
    q, k = (np.abs(random.standard_normal((2, 70, 5))) for _ in range(2))
    v = random.standard_normal((2, 70, 4))
    divisors = {
        (): lambda total: 1,
        (("normalised", True),): lambda total: total,
        (("normalised", True), ("least", 20.0)): lambda total: np.maximum(total, 20),
        (("normalised", True), ("magnitudes", True), ("least", 20.0), ("factor", -0.5)): lambda total: np.maximum(
            -total, 20
        ),
    }
    for reverse, strict, (more, divided_by) in itertools.product((False, True), (False, True), divisors.items()):
        mask = np.tril(np.ones((70, 70)), -1 if strict else 0)
        factor = dict(more).get("factor", 0.5)
        s = factor * np.einsum("btn,bsn->bts", q, k) * (mask.T if reverse else mask)
        true = s @ v / divided_by(0.1 + s.sum(-1, keepdims=True))
        for spelling, implementation in itertools.product(("scores", "states"), ("xla", "reference")):
            given = linear_attention(
                *(jnp.asarray(x, jnp.float32) for x in (q, k, v)),
                **{"factor": 0.5, "epsilon": 0.1, "reverse": reverse, "strict": strict} | dict(more),
                spelling=spelling,
                implementation=implementation,
            )
            np.testing.assert_allclose(given, true, rtol=2e-5, atol=2e-5 * np.abs(true).max())
