"""RMSNorm and LayerNorm in the spellings of public code: found, with their backward, and right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import (
    compare,
    compiled,
    in_float64,
    measured,
    optimized_like_a_user,
    optimized_step,
    with_gradients,
)

import autopallas

WIDTH = 33


def array(*shape, dtype=jnp.float32, seed=0, scale=1.0, offset=0.0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape) * scale + offset, dtype)


def mean(x):
    return jnp.mean(x, -1, keepdims=True)


def scaled_apart(x, g, b, var=lambda x: x.var(-1, keepdims=True), shift=lambda b, moved: b - moved):
    inverse = lax.rsqrt(var(x) + 1e-3) * g
    return x * inverse + shift(b, mean(x) * inverse)


def in_float32(norm):
    return lambda x, g, b: norm(x.astype(jnp.float32), 1.0, 0.0).astype(x.dtype) * g


RMS = {
    "rsqrt": lambda x, g, b: x * lax.rsqrt(mean(jnp.square(x)) + 1e-6) * g,
    "divided": lambda x, g, b: g * x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6),
    "norm": lambda x, g, b: x / (jnp.linalg.norm(x, axis=-1, keepdims=True) * WIDTH**-0.5 + 1e-6) * g,
    "einsum": lambda x, g, b: x * lax.rsqrt(jnp.einsum("...d,...d->...", x, x) / WIDTH + 1e-6)[..., None] * (1 + g),
    "power": lambda x, g, b: x * jnp.power(mean(x * x) + 1e-6, -0.5) * g + b,
    "in float32": in_float32(lambda x, g, b: x * lax.rsqrt(mean(x * x) + 1e-6)),
}
LAYER = {
    "var": lambda x, g, b: (x - mean(x)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b,
    "fast variance": lambda x, g, b: (
        (x - mean(x)) * (lax.rsqrt(jnp.maximum(0, mean(x * x) - mean(x) ** 2) + 1e-5) * g) + b
    ),
    "std": lambda x, g, b: g * (x - mean(x)) / (x.std(-1, keepdims=True) + 1e-5) + b,
    "standardize": lambda x, g, b: jax.nn.standardize(x) * g + b,
    "centred once": lambda x, g, b: (lambda c: c * lax.rsqrt(mean(c * c) + 1e-5))(x - mean(x)) * g + b,
    "a floor under the variance": lambda x, g, b: (
        (x - mean(x)) * lax.rsqrt(jnp.maximum(x.var(-1, keepdims=True), 1e-5)) * g + b
    ),
    "a floor under the deviation": lambda x, g, b: (x - mean(x)) / jnp.clip(x.std(-1, keepdims=True), 1e-5) * g + b,
    "in float32": in_float32(lambda x, g, b: (x - mean(x)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)),
    "scaled apart": scaled_apart,
    "scaled apart, fast variance": lambda x, g, b: scaled_apart(x, g, b, lambda x: mean(x * x) - mean(x) ** 2),
    "scaled apart, negative mean": lambda x, g, b: scaled_apart(x, g, b, shift=lambda b, moved: -moved + b),
}
SPELLINGS = [("rms_norm", name) for name in RMS] + [("layer_norm", name) for name in LAYER]


def spelling(op, name):
    return (RMS if op == "rms_norm" else LAYER)[name]


def operands(dtype, scale=1.0, offset=0.0, weights=None):
    weights = dtype if weights is None else weights
    x = array(2, 7, WIDTH, dtype=dtype, scale=scale, offset=offset)
    return x, array(WIDTH, dtype=weights, seed=1), array(WIDTH, dtype=weights, seed=2)


@pytest.mark.parametrize(
    ("op", "name", "dtype"),
    # The number that makes a norm the root of a mean is rounded in bfloat16: the rows are multiplied by another one.
    [(*s, dtype) for s in SPELLINGS for dtype in ("float32", "bfloat16") if (s[1], dtype) != ("norm", "bfloat16")],
)
def test_every_spelling_is_found_with_its_backward(op, name, dtype):
    outcome = compare(spelling(op, name), operands(dtype))
    assert outcome.complaints == []
    assert outcome.counts(op) == 1
    step = with_gradients(spelling(op, name), operands(dtype))
    optimized = autopallas.optimize(step, objective="always", strict=True)
    given, expected = optimized(*operands(dtype)), step(*operands(dtype))
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        limit = (1e-5 if dtype == "float32" else 4e-2) * max(1, np.abs(np.asarray(b, np.float64)).max())
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=0, atol=limit)
    assert [(site.op, site.direction) for site in optimized.report().sites] == [(op, "forward+backward")]


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize(
    ("dtype", "weights"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")]
)
def test_dtypes_may_differ_and_numbers_may_be_large(dtype, weights, scale):
    for op, norms in (("rms_norm", RMS), ("layer_norm", LAYER)):
        outcome = compare(norms["in float32"], operands(dtype, scale, scale / 2, weights))
        assert outcome.complaints == []
        assert outcome.counts(op) == 1


@pytest.mark.parametrize(
    ("op", "name"), [("rms_norm", "rsqrt"), ("layer_norm", "var"), ("layer_norm", "fast variance")]
)
def test_rows_of_zeros_infinities_and_nan_are_as_in_the_original(op, name):
    x, g, b = operands("float32")
    x = x.at[0, 0].set(0.0).at[0, 1, 3].set(jnp.inf).at[1, 2, 0].set(jnp.nan)
    function = spelling(op, name)
    optimized = autopallas.optimize(function, objective="always", strict=True)
    given, expected = optimized(x, g, b), function(x, g, b)
    np.testing.assert_array_equal(np.isfinite(given), np.isfinite(expected))
    np.testing.assert_allclose(given[np.isfinite(expected)], expected[np.isfinite(expected)], rtol=1e-4, atol=1e-5)
    assert optimized.report().counts()[op] == 1


@pytest.mark.parametrize(("op", "name"), [("rms_norm", "rsqrt"), ("layer_norm", "var")])
def test_transforms_around_a_train_step(op, name):
    norm = spelling(op, name)

    def layer(x, weights):
        g, b, w = weights
        return x + jnp.tanh(norm(x, g, b) @ w)

    sizes = (WIDTH,), (WIDTH,), (WIDTH, WIDTH)
    layers = [tuple(array(*size, seed=9 * n + i, scale=0.3) for i, size in enumerate(sizes)) for n in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    x = array(4, 5, WIDTH)
    programs = {
        "scan": lambda x, s: lax.scan(lambda x, one: (layer(x, one), None), x, s)[0],
        "checkpoint": lambda x, s: lax.scan(lambda x, one: (jax.checkpoint(layer)(x, one), None), x, s)[0],
        "vmap": lambda x, s: jax.vmap(lambda x: layer(x, jax.tree.map(lambda w: w[0], s)))(x),
        "vmap of weights": lambda x, s: jax.vmap(layer)(x[:3], s),
    }
    for form, program in programs.items():
        outcome = compare(program, (x, stacked))
        assert outcome.complaints == [], form
        assert outcome.counts(op) == 1, form


@pytest.mark.parametrize("name", ["var", "std", "standardize", "centred once", "fast variance"])
def test_a_train_step_in_bfloat16_that_normalises_in_float32(name):
    """The cotangents of the float32 rows meet inside of the site, in the order in which JAX adds them up."""

    def program(x, g, b):
        return LAYER[name](x.astype(jnp.float32), 1.0, 0.0).astype(x.dtype) * g + b

    arguments = operands("bfloat16")
    step, given, report = optimized_step(program, arguments)
    (site,) = (site for site in report.sites if site.op == "layer_norm")
    assert site.direction == "forward+backward"
    true = in_float64(step, arguments)
    own = measured(compiled(step)(*arguments), true)
    for (error, _), (original, _) in zip(measured(given, true), own, strict=True):
        assert error < max(2e-2, 2 * original)


def test_a_norm_of_heads_before_attention_is_one_of_its_own():
    q = array(2, 6, 24)

    def heads(q, g):
        q = q.reshape(2, 6, 4, 6)
        return (q * lax.rsqrt(mean(q * q) + 1e-6) * g).transpose(0, 2, 1, 3)

    outcome = compare(heads, (q, array(6, seed=1)))
    assert outcome.complaints == []
    assert outcome.counts("rms_norm") == 1


LOOK_ALIKES = {
    "another axis": lambda x, g: x * lax.rsqrt(jnp.mean(x * x, -2, keepdims=True) + 1e-6) * g,
    "other rows": lambda x, g: x * lax.rsqrt(mean(x * x) + 1e-6)[::-1] * g,
    "another array": lambda x, g: jnp.sin(x) * lax.rsqrt(mean(x * x) + 1e-6) * g,
    "N - 1": lambda x, g: (x - mean(x)) / jnp.sqrt(x.var(-1, keepdims=True, ddof=1) + 1e-5) * g,
    "not centred": lambda x, g: x / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * g,
    "centred, mean square": lambda x, g: (x - mean(x)) / jnp.sqrt(mean(x * x) + 1e-5) * g,
    "a cube root": lambda x, g: x * jnp.power(mean(x * x) + 1e-6, -1 / 3) * g,
    "absolute values": lambda x, g: x / (mean(jnp.abs(x)) + 1e-6) * g,
    "a floor and an epsilon": lambda x, g: x / (jnp.maximum(jnp.sqrt(mean(x * x)), 1e-3) + 1e-3) * g,
    "the mean of a part": lambda x, g: x * lax.rsqrt(mean(x[..., :16] ** 2) + 1e-6) * g,
    "squared mean": lambda x, g: x * lax.rsqrt(mean(x) ** 2 + 1e-6) * g,
    "less epsilon": lambda x, g: x * lax.rsqrt(mean(x * x) - 1e-6) * g,
    "random columns": lambda x, g: x * lax.rsqrt(mean((x * g) ** 2) + 1e-6),
    "a difference of means, and nothing added": lambda x, g: (
        (x - mean(x)) / jnp.sqrt(jnp.maximum(mean(x * x) - mean(x) ** 2, 0)) * g
    ),
    "epsilon twice": lambda x, g: x / (jnp.sqrt(mean(x * x) + 1e-6) + 1e-6) * g,
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_left_alone(name):
    args = array(2, 7, WIDTH, offset=0.5), array(WIDTH, seed=1)
    outcome = compare(LOOK_ALIKES[name], args)
    assert outcome.complaints == []
    assert outcome.counts("rms_norm") + outcome.counts("layer_norm") == 0


@pytest.mark.parametrize("power", [-0.5, 0.5 + 0j, 2.5, 1 + 2j])
def test_powers_of_complex_numbers_are_left_alone(power):
    def scaled(x, y):
        z = x + 1j * y
        z = z * (mean(z * z) + 1e-6) ** power
        return z.real + z.imag

    outcome = compare(scaled, (array(2, 7, WIDTH), array(2, 7, WIDTH, seed=1)))
    assert outcome.complaints == []
    assert outcome.counts("rms_norm") + outcome.counts("layer_norm") == 0


def test_squares_in_float16_are_left_alone_and_it_is_said_why():
    x, g, _ = operands("float16", scale=300.0)
    outcome = compare(RMS["rsqrt"], (x, g, g), gradients=False)
    assert outcome.counts("rms_norm") == 0
    assert any("float16" in reason for reason in outcome.reasons())


def test_a_factor_of_the_rows_is_a_near_miss_that_says_so():
    report = autopallas.explain(autopallas.optimize(LOOK_ALIKES["N - 1"]), array(2, 7, WIDTH), array(WIDTH))
    assert any("N - 1" in miss.reason for miss in report.near_misses if miss.op == "layer_norm")


def test_what_is_used_elsewhere_keeps_the_norm():
    def both(x, g):
        root = lax.rsqrt(mean(x * x) + 1e-6)
        return x * root * g, root

    outcome = compare(both, (array(3, WIDTH), array(WIDTH)))
    assert outcome.complaints == []
    assert outcome.counts("rms_norm") == 0
    assert any("also used" in reason or "used elsewhere" in reason for reason in outcome.reasons())


@pytest.mark.parametrize("further", [
    lambda x, inverse, t: x * inverse,
    lambda x, inverse, t: -t * inverse,
    lambda x, inverse, t: jnp.sum(-t * inverse, -1),
], ids=["rows", "cotangent", "sum"])  # fmt: skip
def test_what_leads_to_a_gradient_and_is_used_elsewhere_keeps_the_norm(further):
    x, g, b = operands("float32")
    t = array(2, 7, WIDTH, seed=3)

    def step(x, g, b, t):
        gradients = jax.grad(lambda *own: jnp.sum(scaled_apart(*own) * t), (0, 1, 2))(x, g, b)
        return gradients, further(x, lax.rsqrt(x.var(-1, keepdims=True) + 1e-3) * g, t)

    optimized = autopallas.optimize(step, objective="always", strict=True, ops=["layer_norm"])
    for a, b_ in zip(jax.tree.leaves(optimized(x, g, b, t)), jax.tree.leaves(step(x, g, b, t)), strict=True):
        np.testing.assert_allclose(a, b_, rtol=1e-5, atol=1e-5)
    assert optimized.report().counts().get("layer_norm", 0) == 0


def test_nothing_is_replaced_without_evidence():
    optimized = autopallas.optimize(RMS["rsqrt"])
    report = autopallas.explain(optimized, *operands("float32"))
    (site,) = report.sites
    assert (site.op, site.verdict) == ("rms_norm", "kept")


@pytest.mark.parametrize("normalise", [
    lambda x, g: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g,
    lambda x, g: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * g,
], ids=["rms", "layer"])  # fmt: skip
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)], ids=str)
def test_several_cotangents_of_one_normalisation(normalise, wanted):
    """A Jacobian, and gradients of examples that share what is normalised."""
    x, g, y = array(5, 4, seed=0), array(4, seed=1), array(3, 5, 4, seed=2)

    def jacobian(x, g, y):
        return jax.jacrev(normalise, wanted)(x, g)

    def of_examples(x, g, y):
        return jax.vmap(lambda one: jax.grad(lambda *a: jnp.sin(normalise(*a) * one).sum(), wanted)(x, g))(y)

    for program in (jacobian, of_examples):
        optimized = optimized_like_a_user(program)
        for a, b in zip(jax.tree.leaves(optimized(x, g, y)), jax.tree.leaves(program(x, g, y)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert sum(optimized.report().counts().values()) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [lambda x: 4.0 * x, lambda x: x.astype(jnp.bfloat16), jnp.transpose])
def test_rows_that_something_else_reads_too_after_they_were_scaled_or_cast(make, dtype):
    def loss(x, scale):
        rows = make(x)
        variance = jnp.mean(jnp.square(rows.astype(jnp.float32)), -1, keepdims=True)
        h = (rows * lax.rsqrt(variance + 1e-6)).astype(rows.dtype) * scale
        return jnp.sum(jnp.sin(rows + h).astype(jnp.float32))

    x, scale = array(8, 8, seed=1).astype(dtype), 1 + array(8, seed=2).astype(dtype) / 9
    compared = compare(jax.value_and_grad(loss, (0, 1)), (x, scale), gradients=False, dtype="bfloat16")
    assert compared.complaints == []
    assert [(site.op, site.direction) for site in compared.report.sites] == [("rms_norm", "forward+backward")]


def rms_repeated(x, g, b):
    """The scale and the mean have the shape of the rows, as in a public library."""
    squares = jnp.broadcast_to(mean(x * x), x.shape)
    return x * jnp.broadcast_to(g, x.shape) * lax.rsqrt(squares + 1e-6) + 0 * b


def layer_repeated(x, g, b):
    factor = jnp.broadcast_to(g, x.shape) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return factor * (x - mean(x)) + jnp.broadcast_to(b, x.shape)


@pytest.mark.parametrize("loop", ["microbatches", "data alone", "recurrent", "checkpoint", "nested", "branch"])
@pytest.mark.parametrize(("op", "norm"), [("rms_norm", rms_repeated), ("layer_norm", layer_repeated)])
def test_a_scale_that_is_repeated_for_each_row_and_shared_by_the_steps_of_a_loop(op, norm, loop):
    """JAX moves the repetition out of the loop, and leaves its transpose, a sum over rows, in the loop's backward."""
    x, w = array(3, 2, 5, WIDTH), array(WIDTH, WIDTH, seed=1, scale=WIDTH**-0.5)
    g, b = array(WIDTH, seed=2, offset=1.0), array(WIDTH, seed=3)

    def loss(w, g, b):
        def add(total, x):
            return total + jnp.sin(norm(x if loop == "data alone" else jnp.tanh(x @ w), g, b)).sum(), None

        def change(c, x):
            return norm(c @ w, g, b) + x, None

        def change_twice(c, x):
            return lax.scan(lambda c, _: (norm(c @ w, g, b), None), c + x, None, length=2)[0], None

        def change_perhaps(c, x):
            return lax.cond(x[0, 0, 0] > 0, lambda c: norm(c @ w, g, b) + x, lambda c: c, c), None

        if loop in ("microbatches", "data alone"):
            return lax.scan(add, jnp.float32(0), x)[0]
        step = {
            "recurrent": change, "checkpoint": jax.checkpoint(change), "nested": change_twice, "branch": change_perhaps
        }[loop]  # fmt: skip
        return jnp.sin(lax.scan(step, x[0], x)[0]).sum()

    arguments = (w, g, b)
    compared = compare(jax.value_and_grad(loss, (0, 1, 2)), arguments, gradients=False)
    assert compared.complaints == []
    (site,) = [site for site in compared.report.sites if site.op == op]
    assert (site.verdict, site.direction) == ("applied", "forward+backward")


def no_mean(x, g, b):
    """RMSNorm as Flax has it, which subtracts a mean that is zero."""
    zeros, squares = jnp.zeros(x.shape[:-1]), jnp.mean(jnp.square(x), -1)
    return (x - zeros[..., None]) * (lax.rsqrt(squares[..., None] + 1e-6) * g)


@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize(
    ("op", "norm"), [("rms_norm", no_mean), ("layer_norm", lambda x, g, b: no_mean(x - mean(x), g, b) + b)]
)
def test_a_step_on_each_device_in_which_constants_are_subtracted(op, norm, varying):
    """On a manual mesh a constant has a type of its own, of which JAX's derivative of a subtraction takes note."""
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    w, g, b = array(WIDTH, WIDTH, seed=1, scale=WIDTH**-0.5), array(WIDTH, seed=2, offset=1.0), array(WIDTH, seed=3)
    everywhere = jax.sharding.PartitionSpec()

    def step(w, g, b, x):
        return jax.value_and_grad(lambda w, g, b: jnp.sin(norm(x @ w, g, b) @ w).sum(), (0, 1, 2))(w, g, b)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=varying)
    optimized, arguments = optimized_like_a_user(mapped), (w, g, b, array(2, 5, WIDTH))
    given = compiled(optimized)(*arguments)
    assert max(error[0] for error in measured(given, in_float64(step, arguments))) < 5e-5
    (site,) = [site for site in optimized.report().sites if site.op == op]
    assert (site.verdict, site.direction) == ("applied", "forward+backward")


@pytest.mark.parametrize(
    "total",
    [
        lambda x: jax.lax.dot_general(x, x, (((1,), (1,)), ((0,), (0,))), preferred_element_type=jnp.bfloat16),
        lambda x: jax.lax.reduce_sum((x * x).astype(jnp.bfloat16), (1,)),
    ],
    ids=["by a product", "of narrower squares"],
)
def test_rows_whose_squares_are_summed_in_fewer_digits_are_left_alone(total):
    def norm(x):
        return x * jax.lax.rsqrt(total(x).astype(jnp.float32)[:, None] / x.shape[1] + 1e-6)

    assert not autopallas.explain(norm, jnp.ones((8, 32))).sites
