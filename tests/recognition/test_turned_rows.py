"""Rotary embedding behind a normalisation of queries or keys is part of its site."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare, compiled, in_float64, measured, optimized_like_a_user, optimized_step

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.patterns import find

B, T, H, D = 2, 6, 4, 16


def array(*shape, dtype=jnp.float32, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape) * scale, dtype)


def rms(x, g):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * g


def layer(x, g):
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    return (centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * g


NORMS = {"rms_norm": rms, "layer_norm": layer}


def angles(columns=D, length=T):
    frequencies = 1.0 / 100.0 ** (jnp.arange(0, columns, 2) / columns)
    return jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies


def by_halves(x, cos, sin):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def rotate_half(x):
    return jnp.concatenate([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)


def heads_last(t):
    return t[:, None]


def halves(n, t):
    return by_halves(n, jnp.cos(heads_last(t)), jnp.sin(heads_last(t)))


def rotated_half(n, t):
    t = jnp.concatenate([t, t], -1)[None, :, None]
    return n * jnp.cos(t) + rotate_half(n) * jnp.sin(t)


def rolled(n, t):
    cos, sin = jnp.cos(t), jnp.sin(t)
    cos, sin = jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)
    return n * heads_last(cos) + jnp.roll(n, D // 2, -1) * heads_last(sin)


def strided(n, t):
    a, b, cos, sin = n[..., ::2], n[..., 1::2], jnp.cos(heads_last(t)), jnp.sin(heads_last(t))
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(n.shape)


def unstacked(n, t):
    pairs = n.reshape(*n.shape[:-1], -1, 2)
    a, b, cos, sin = pairs[..., 0], pairs[..., 1], jnp.cos(heads_last(t)), jnp.sin(heads_last(t))
    return jnp.concatenate([(a * cos - b * sin)[..., None], (a * sin + b * cos)[..., None]], -1).reshape(n.shape)


def rotate_every_two(n, t):
    cos, sin = (jnp.repeat(f(t), 2, -1)[None, :, None] for f in (jnp.cos, jnp.sin))
    other = jnp.stack([-n[..., 1::2], n[..., ::2]], -1).reshape(n.shape)
    return n * cos + other * sin


def complex_numbers(n, t):
    pairs = n.astype(jnp.float32).reshape(*n.shape[:-1], -1, 2)
    turns = lax.complex(jnp.cos(heads_last(t)), jnp.sin(heads_last(t)))
    turned = lax.complex(pairs[..., 0], pairs[..., 1]) * turns
    return jnp.stack([jnp.real(turned), jnp.imag(turned)], -1).reshape(n.shape).astype(n.dtype)


def complex_halves(n, t):
    a, b = jnp.split(n.astype(jnp.float32), 2, -1)
    turned = lax.complex(a, b) * lax.complex(jnp.cos(heads_last(t)), jnp.sin(heads_last(t)))
    return jnp.concatenate([turned.real, turned.imag], -1).astype(n.dtype)


def backwards(n, t):
    a, b = jnp.split(n, 2, -1)
    cos, sin = jnp.cos(heads_last(t)), jnp.sin(heads_last(t))
    return jnp.concatenate([a * cos + b * sin, b * cos - a * sin], -1)


def first_columns(n, t):
    return jnp.concatenate([halves(n[..., : D // 2], t[:, : D // 4]), n[..., D // 2 :]], -1)


def last_columns(n, t):
    return jnp.concatenate([n[..., : D // 4], strided(n[..., D // 4 :], t[:, : 3 * D // 8])], -1)


def heads_first(n, t):
    return by_halves(n.transpose(0, 2, 1, 3), jnp.cos(t), jnp.sin(t))


def heads_first_by_batch(n, t):
    t = jnp.stack([t, 2 * t])[:, None]
    return by_halves(n.transpose(0, 2, 1, 3), jnp.cos(t), jnp.sin(t))


def positions_of_a_batch(n, t):
    t = jnp.stack([t, 2 * t])[:, :, None]
    return by_halves(n, jnp.cos(t), jnp.sin(t))


def one_position(n, t):
    return by_halves(n, jnp.cos(t[3]), jnp.sin(t[3]))


def in_float32(n, t):
    return halves(n.astype(jnp.float32), t).astype(n.dtype)


def narrow_tables(n, t):
    t = jnp.concatenate([t, t], -1)
    return n * heads_last(jnp.cos(t).astype(n.dtype)) + rotate_half(n) * heads_last(jnp.sin(t).astype(n.dtype))


def one_table(n, t):
    table = jnp.stack([jnp.cos(t), jnp.sin(t)], -1)[:, None]
    return by_halves(n, table[..., 0], table[..., 1])


def mapped(n, t):
    def of_head(rows):  # [T, D]
        return by_halves(rows, jnp.cos(t), jnp.sin(t))

    return jax.vmap(jax.vmap(of_head, 1, 1))(n)


def cosines_in_reverse(n, t):
    return by_halves(n, jnp.cos(heads_last(t))[..., ::-1], jnp.sin(heads_last(t)))


def moved(n, t):
    return halves(n, t).transpose(0, 2, 1, 3).astype(jnp.bfloat16)


TURNS = {
    own.__name__: own
    for own in (
        halves, rotated_half, rolled, strided, unstacked, rotate_every_two, complex_numbers, complex_halves, backwards,
        first_columns, last_columns, heads_first, heads_first_by_batch, positions_of_a_batch, one_position, in_float32,
        narrow_tables, one_table, mapped, cosines_in_reverse, moved,
    )
}  # fmt: skip


def program_of(op, turn):
    return lambda x, g: turn(NORMS[op](x, g), angles())


def sites_of(report):
    """Of each norm: its operation, its direction, and whether its rows are turned."""
    norms = [site for site in report.sites if site.op in NORMS]
    return [(site.op, site.direction, site.spec["cos_dtype"] is not None) for site in norms]


def operands(dtype="float32", scale=1.0):
    return array(B, T, H, D, dtype=dtype, scale=scale), array(D, dtype=dtype, seed=1)


def check(program, arguments, expected, limit=5e-6):
    """It is right in value and in gradients, with the sites that are expected in both."""
    outcome = compare(program, arguments)
    assert outcome.complaints == []
    assert sites_of(outcome.report) == [(op, "forward", turned) for op, turned in expected]
    step, given, report = optimized_step(program, arguments)
    assert sites_of(report) == [(op, "forward+backward", turned) for op, turned in expected]
    true = in_float64(step, arguments)
    for (error, _), (own, _) in zip(measured(given, true), measured(compiled(step)(*arguments), true), strict=True):
        assert error <= max(limit, 2 * own)


@pytest.mark.parametrize("name", TURNS)
def test_every_spelling_is_one_site(name):
    check(program_of("rms_norm", TURNS[name]), operands(), [("rms_norm", True)])


@pytest.mark.parametrize("name", ["halves", "complex_numbers", "first_columns"])
def test_behind_a_layer_norm_too(name):
    check(program_of("layer_norm", TURNS[name]), operands(), [("layer_norm", True)])


@pytest.mark.parametrize("dtype, scale", [("bfloat16", 1.0), ("bfloat16", 1000.0), ("float16", 30.0), ("float32", 1e3)])
@pytest.mark.parametrize("name", ["halves", "in_float32", "narrow_tables", "complex_numbers"])
def test_in_other_dtypes_and_at_other_scales(name, dtype, scale):
    limit = {"bfloat16": 3e-2, "float16": 5e-3, "float32": 5e-6}[dtype]
    check(program_of("rms_norm", TURNS[name]), operands(dtype, scale), [("rms_norm", True)], limit)


@pytest.mark.parametrize("shape", [(T, D), (T, 1, D), (1, T, 1, D), (B, T, 1, D), (T, D // 2), (T, H, D // 2)])
def test_cosines_and_sines_that_are_given(shape):
    """Of whole rows of them nothing says that both halves are equal."""

    def program(x, g, cos, sin):
        cos, sin = (lax.stop_gradient(t[:, None] if t.ndim == 2 else t) for t in (cos, sin))
        n = rms(x, g)
        return n * cos + rotate_half(n) * sin if cos.shape[-1] == D else by_halves(n, cos, sin)

    arguments = (*operands(), array(*shape, seed=2), array(*shape, seed=3))
    outcome = compare(program, arguments, gradients=False)
    assert outcome.complaints == []
    ((_, _, turned),) = sites_of(outcome.report)
    assert turned
    (site,) = outcome.report.sites
    assert site.spec["own_of_pair"] == (2 if shape[-1] == D else 1)

    def step(x, g, cos, sin):
        return jax.value_and_grad(lambda x, g: jnp.sum(jnp.sin(program(x, g, cos, sin))), (0, 1))(x, g)

    optimized = optimized_like_a_user(step)
    true, found = in_float64(step, arguments), optimized(*arguments)
    assert sites_of(optimized.report()) == [("rms_norm", "forward+backward", True)]
    assert all(error <= 5e-6 for error, _ in measured(found, true))


def test_weights_of_each_head():
    def program(x, g):
        return halves(rms(x, g), angles())

    check(program, (array(B, T, H, D), array(H, D, seed=1)), [("rms_norm", True)])


def attention_of(x, weights, turn=halves):
    """Grouped queries: as many keys as there are pairs of heads of queries."""
    wq, wk, gq, gk, wo = weights
    length = x.shape[0]
    q, k = ((x @ w).reshape(length, -1, D) for w in (wq, wk))
    q, k = (turn(rms(rows, g), angles(length=length)) for rows, g in ((q, gq), (k, gk)))
    k = jnp.repeat(k, q.shape[1] // k.shape[1], 1)
    return x + jnp.tanh(q * k).reshape(length, -1) @ wo


def weights_of(layers):
    sizes = (24, H * D), (24, H * D // 2), (D,), (D,), (H * D, 24)
    return [array(layers, *size, seed=i, scale=0.3) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("form", ["unrolled", "checkpoint", "scan", "scan of checkpoints", "vmap"])
def test_queries_and_keys_of_layers(form):
    body = jax.checkpoint(attention_of) if "checkpoint" in form else attention_of

    def program(x, weights):
        if "scan" in form:
            return lax.scan(lambda x, one: (body(x, one), None), x, weights)[0]
        if form == "vmap":
            return jax.vmap(lambda x: body(x, [w[0] for w in weights]))(jnp.stack([x, 2 * x]))
        for layer in range(3):
            x = body(x, [w[layer] for w in weights])
        return x

    count = 6 if form in ("unrolled", "checkpoint") else 2
    check(program, (array(T, 24), weights_of(3)), [("rms_norm", True)] * count, 2e-5)


def test_layers_that_turn_otherwise_are_not_taken_for_each_other():
    turns = [halves, backwards, strided, first_columns]

    def program(x, weights):
        for layer, turn in enumerate(turns):
            x = attention_of(x, [w[layer] for w in weights], turn)
        return x

    arguments = array(T, 24), weights_of(len(turns))
    check(program, arguments, [("rms_norm", True)] * (2 * len(turns)), 2e-5)
    report = autopallas.explain(program, *arguments)
    found = {tuple(site.spec[n] for n in ("neighbours", "first_adds", "angles")) for site in report.sites}
    assert found == {(False, False, 8), (False, True, 8), (True, False, 8), (False, False, 4)}


def test_mapped_and_differentiated_twice():
    program = program_of("rms_norm", halves)
    x, g = operands()
    optimized = optimized_like_a_user(program)
    batched = jnp.stack([x, 2 * x, -x]), jnp.stack([g, -g, g])

    def gradients(function):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), (0, 1))

    for axes in ((0, None), (0, 0), (None, 0)):
        given = tuple(b if axis == 0 else a for a, b, axis in zip((x, g), batched, axes, strict=True))
        for form in (lambda function: function, gradients):
            ours, theirs = (jax.vmap(form(function), axes)(*given) for function in (optimized, program))
            for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    twice = [jax.grad(lambda x, f=f: jnp.sum(gradients(f)(x, g)[0] ** 2))(x) for f in (optimized, program)]
    np.testing.assert_allclose(*twice, rtol=1e-3, atol=1e-4)


def test_cosines_that_are_mapped_too():
    def program(x, g, cos, sin):
        return by_halves(rms(x, g), cos[:, None], sin[:, None])

    x, g = operands()
    cos, sin = array(3, T, D // 2, seed=2), array(3, T, D // 2, seed=3)
    ours, theirs = (jax.vmap(f, (None, None, 0, 0))(x, g, cos, sin) for f in (optimized_like_a_user(program), program))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gradients_of_cosines_from_outside_are_right():
    """The program that is optimized has none; what is differentiated through it may."""

    def program(x, g, cos, sin):
        return by_halves(rms(x, g), cos[:, None], sin[:, None])

    def loss(function):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), (0, 1, 2, 3))

    optimized = optimized_like_a_user(program)
    arguments = (*operands(), array(T, D // 2, seed=2), array(T, D // 2, seed=3))
    for a, b in zip(loss(optimized)(*arguments), loss(program)(*arguments), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def mixed_signs(n, t):
    a, b = jnp.split(n, 2, -1)
    cos, sin = jnp.cos(heads_last(t)), jnp.sin(heads_last(t))
    turned = jnp.concatenate([a[..., :4] * cos[..., :4] - b[..., :4] * sin[..., :4],
                              a[..., 4:] * cos[..., 4:] + b[..., 4:] * sin[..., 4:]], -1)  # fmt: skip
    return jnp.concatenate([turned, b * cos + a * sin], -1)


def half_turned(n, t):
    a, b = jnp.split(n, 2, -1)
    cos, sin = jnp.cos(heads_last(t)), jnp.sin(heads_last(t))
    return jnp.concatenate([a * cos - b * sin, b * cos], -1)


def turned_by_sums(n, t):
    a, b = jnp.split(n, 2, -1)
    cos, sin = jnp.cos(heads_last(t)), jnp.sin(heads_last(t))
    return jnp.concatenate([a * cos - b * sin + a, b * cos + a * sin], -1)


def four_arrays(n, t):
    a, b = jnp.split(n, 2, -1)
    t, u = heads_last(t), heads_last(3 * t)
    return jnp.concatenate([a * jnp.cos(t) - b * jnp.sin(t), b * jnp.cos(u) + a * jnp.sin(u)], -1)


def in_reverse_order(n, t):
    return n * heads_last(jnp.concatenate([jnp.cos(t)] * 2, -1)) + n[..., ::-1] * heads_last(
        jnp.concatenate([jnp.sin(t)] * 2, -1)
    )


def by_rows_of_neighbours(n, t):
    a, b = jnp.split(n, 2, -1)
    b = jnp.roll(b, 1, 1)
    cos, sin = jnp.cos(heads_last(t)), jnp.sin(heads_last(t))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def by_the_rows_themselves(n, t):
    t = heads_last(t) + n[..., :1]
    return by_halves(n, jnp.cos(t), jnp.sin(t))


def among_heads(n, t):
    a, b = jnp.split(n, 2, 2)
    cos, sin = jnp.cos(t[:, :1, None]), jnp.sin(t[:, :1, None])
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], 2)


def with_an_addition(n, t):
    a, b = jnp.split(n, 2, -1)
    cos, sin = jnp.cos(heads_last(t)), jnp.sin(heads_last(t))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin + 1.0], -1)


def a_part_of_the_rows(n, t):
    return halves(n, t)[:, 1:]


def swapped_halves(n, t):
    a, b = jnp.split(n, 2, -1)
    cos, sin = jnp.cos(heads_last(t)), jnp.sin(heads_last(t))
    return jnp.concatenate([b * cos - a * sin, a * cos + b * sin], -1)


def squared(n, t):
    return halves(n * n, t)


REFUSED = {
    own.__name__: own
    for own in (
        mixed_signs, half_turned, turned_by_sums, four_arrays, in_reverse_order,
        by_rows_of_neighbours, by_the_rows_themselves, among_heads, with_an_addition, swapped_halves, squared,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_of_other_computations_the_norm_alone_is_the_site(name):
    check(program_of("rms_norm", REFUSED[name]), operands(), [("rms_norm", False)])


def test_rows_that_are_read_before_they_are_turned_are_a_result():
    def program(x, g):
        n = rms(x, g)
        return n, halves(n, angles())

    check(program, operands(), [("rms_norm", False)])


def test_quantised_rows_are_not_turned():
    def program(x, g):
        return halves(rms(x, g).astype(jnp.float8_e4m3fn).astype(jnp.float32), angles())

    outcome = compare(program, operands(), gradients=False)
    assert outcome.complaints == []
    assert sites_of(outcome.report) == [("rms_norm", "forward", False)]


def test_angles_that_are_trained_stay_outside():
    def program(x, g, frequencies):
        t = jnp.arange(T, dtype=jnp.float32)[:, None] * frequencies
        return halves(rms(x, g), t)

    arguments = (*operands(), jnp.abs(array(D // 2, seed=2)))
    step, given, report = optimized_step(program, arguments)
    assert sites_of(report) == [("rms_norm", "forward+backward", False)]
    true = in_float64(step, arguments)
    for (error, _), (own, _) in zip(measured(given, true), measured(compiled(step)(*arguments), true), strict=True):
        assert error <= max(5e-6, 2 * own)


def test_of_rows_turned_in_two_ways_both_are_sites():
    def program(x, g):
        n = rms(x, g)
        return halves(n, angles()) + jnp.tanh(strided(n, 2 * angles()))

    outcome = compare(program, operands())
    assert outcome.complaints == []
    assert {turned for _, _, turned in sites_of(outcome.report)} <= {True, False}


def test_without_evidence_it_stays_as_it_is():
    for op in NORMS:
        report = autopallas.explain(autopallas.optimize(program_of(op, halves)), *operands())
        assert [(site.op, site.verdict) for site in report.sites] == [(op, "kept")]


@pytest.mark.parametrize("layers, turned", [(32, 64), (33, 0)])
def test_searches_among_many_layers_end(layers, turned):
    """Each layer's cotangents may be those of any other one, until what only that layer has is met."""

    def program(x, weights):
        for layer in range(layers):
            x = attention_of(x, [w[layer] for w in weights])
        return jnp.sum(jnp.sin(x))

    traced = jax.make_jaxpr(jax.grad(program, 1))(array(T, 24), weights_of(layers))
    graph = Graph(flatten(traced))
    matches, _ = find(graph, ("rms_norm",), True)
    assert [match.spec.turns for match in matches] == [turned > 0] * (2 * layers)
    assert graph.steps.spent < 60 * len(graph.nodes)
