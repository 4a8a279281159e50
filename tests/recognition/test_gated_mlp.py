"""Gated MLPs in any spelling: found, with their backward, and right; what resembles one is left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare, in_float64, measured, optimized_like_a_user, optimized_step, with_gradients

import autopallas
from autopallas.sites.operation import operation_named

K, H, N = 10, 14, 9


def array(*shape, seed=0, dtype=jnp.float32, scale=1.0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape) * scale, dtype)


X, GATE, UP, DOWN = array(2, 5, K), array(K, H, seed=1), array(K, H, seed=2), array(H, N, seed=3)
BOTH = array(K, 2 * H, seed=4)
ROWS = array(300, K)
"""More rows than the smallest block has, and no multiple of it."""
SIDE = array(H, seed=5), array(H, seed=6)


def halves(act):
    def program(x, both, down):
        gate, up = jnp.split(x @ both, 2, -1)
        return (act(gate) * up) @ down

    return program, (X, BOTH, DOWN)


def interleaved(x, both, bias, down):
    """Every other column, both bounded, as in a public model."""
    units = x @ both + bias
    gate, up = jnp.minimum(units[..., ::2], 7.0), jnp.clip(units[..., 1::2], -7.0, 7.0)
    return (gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)) @ down


def side_by_side(x, both, down):
    units = (x @ both).reshape(2, 5, H, 2)
    return (jax.nn.silu(units[..., 0]) * units[..., 1]) @ down


def stacked(x, both, down):
    units = jnp.einsum("btd,dgf->gbtf", x, both.reshape(K, 2, H))
    return jnp.einsum("btf,fd->btd", jax.nn.relu(units[0]) ** 2 * units[1], down)


def by_heads(x, gate, up, down):
    units = jnp.einsum("btd,dhf->bhtf", x, gate.reshape(K, 2, H // 2))
    units = jax.nn.silu(units) * jnp.einsum("dhf,btd->bhtf", up.reshape(K, 2, H // 2), x)
    return jnp.einsum("bhtf,hfd->btd", units, down.reshape(2, H // 2, N))


def written_out(x, gate, up, down):
    gate, up = x @ gate, x @ up
    return (up / (1 + jnp.exp(-gate)) * gate) @ down


def layers(x, gate, up, down):
    def layer(x, own):
        gate, up = own
        return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down[:, :1] * 0.1, None

    return lax.scan(layer, x, (jnp.stack([gate, 2 * gate]), jnp.stack([up, -up])))[0]


def in_float32(x, gate, up, down):
    units = jax.nn.silu((x @ gate).astype(jnp.float32)).astype(x.dtype) * (x @ up)
    return units @ down


PLAIN = (X, GATE, UP, DOWN)
SPELLINGS = {
    "silu": (lambda x, g, u, d: (jax.nn.silu(x @ g) * (x @ u)) @ d, PLAIN),
    "halves": halves(jax.nn.gelu),
    "alternating": (interleaved, (X, BOTH, array(2 * H, seed=7), DOWN)),
    "biases": (
        lambda x, g, u, d, a, b: (jax.nn.gelu(x @ g + a, approximate=False) * (x @ u + b)) @ d,
        (*PLAIN, *SIDE),
    ),
    "relu": (lambda x, g, u, d: ((x @ u) * jax.nn.relu(x @ g)) @ d, PLAIN),
    "sigmoid": (lambda x, g, u, d: jax.nn.sigmoid(x @ g) * (x @ u), PLAIN[:3] + PLAIN[3:]),
    "learnt": (lambda x, g, u, d, b: ((x @ g) * jax.nn.sigmoid(b[0] * (x @ g)) * (x @ u)) @ d, (*PLAIN, SIDE[0])),
    "side by side": (side_by_side, (X, BOTH, DOWN)),
    "stacked": (stacked, (X, BOTH, DOWN)),
    "heads": (by_heads, PLAIN),
    "written out": (written_out, PLAIN),
    "transposed": (lambda x, g, u, d: (jax.nn.silu(x @ g.T) * (x @ u.T)) @ d.T, (X, GATE.T, UP.T, DOWN.T)),
    "checkpoint": (jax.checkpoint(lambda x, g, u, d: (jax.nn.silu(x @ g) * (x @ u)) @ d), PLAIN),
    "scan": (layers, PLAIN),
    "examples": (
        jax.vmap(lambda x, g, u, d: (jax.nn.silu(x @ g) * (x @ u)) @ d, (0, None, None, None)),
        PLAIN,
    ),
    "models": (
        jax.vmap(lambda x, g, u, d: (jax.nn.silu(x @ g) * (x @ u)) @ d),
        (X, *(jnp.stack([a, -a]) for a in PLAIN[1:])),
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_found_with_its_backward_and_right(name):
    program, arguments = SPELLINGS[name]
    outcome = compare(program, arguments)
    assert outcome.complaints == []
    assert outcome.counts("gated_mlp") == 1, outcome.reasons()
    report = autopallas.explain(optimized_like_a_user(with_gradients(program, arguments)), *arguments)
    assert [site.direction for site in report.sites if site.op == "gated_mlp"] == ["forward+backward"]


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_a_precision_that_is_asked_for_reaches_the_kernel(precision):
    with jax.default_matmul_precision(precision):
        outcome = compare(SPELLINGS["written out"][0], PLAIN)
    assert outcome.complaints == []
    assert outcome.counts("gated_mlp") == 1, outcome.reasons()


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (jnp.bfloat16, 1),
        (jnp.float16, 1),
        (jnp.float32, 1000),
        (jnp.bfloat16, 30),
        (jnp.bfloat16, 1000),
        (jnp.float16, 30),
    ],
)
def test_numbers_are_right_at_every_scale_of_activations(dtype, scale):
    x = array(3, 7, K, dtype=dtype, scale=scale)
    weights = [array(*a.shape, seed=n, dtype=dtype, scale=a.shape[0] ** -0.5) for n, a in enumerate(PLAIN[1:])]
    outcome = compare(in_float32, (x, *weights))
    assert outcome.complaints == []
    assert outcome.counts("gated_mlp") == 1


def cast_one_by_one(narrow):
    """A train step of layers with weights in float32 that cast what they read themselves, as Flax's do with a dtype:
    the cotangents of what both projections read are added up in float32."""

    def dense(x, w):
        return x.astype(narrow) @ w.astype(narrow)

    def loss(x, gate, up, down):
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return jnp.mean(dense(jax.nn.silu(dense(x, gate)) * dense(x, up), down).astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, (0, 1, 2, 3))


def test_layers_that_cast_what_they_read_one_by_one_are_found_and_no_further_from_the_truth():
    arguments = (array(64, 32), array(32, 48, seed=1), array(32, 48, seed=2), array(48, 24, seed=3))
    step = cast_one_by_one(jnp.bfloat16)
    optimized = autopallas.optimize(step, objective="always", ops="gated_mlp", strict=True)
    ours, theirs = optimized(*arguments), jax.jit(step)(*arguments)
    (site,) = optimized.report().sites
    assert (site.verdict, site.direction) == ("applied", "forward+backward")
    for own, other, truth in zip(*map(jax.tree.leaves, (ours, theirs, in_float64(step, arguments))), strict=True):
        largest = np.abs(truth).max()
        error, before = (np.abs(np.asarray(x, np.float64) - truth).max() / largest for x in (own, other))
        assert own.dtype == other.dtype
        assert error <= 2 * before + 2**-9, "a rounding to bfloat16 of the largest number"


def test_sums_of_widened_cotangents_stay_where_the_narrow_sum_may_be_infinite():
    """Two cotangents of 40,000 are 80,000 in float32, and infinite in float16."""
    arguments = (array(64, 32), array(32, 48, seed=1), array(32, 48, seed=2), array(48, 24, seed=3))
    report = autopallas.explain(
        autopallas.optimize(cast_one_by_one(jnp.float16), objective="always", ops="gated_mlp"), *arguments
    )
    assert not report.sites


def test_blocks_of_rows_give_what_all_rows_give():
    from autopallas.kernels.gated_mlp import gated_mlp
    from autopallas.kernels.gated_mlp.operation import OPERATION

    rows = OPERATION.part("block_sizes").BlockSizes

    def both(size, gate, up, down, bias, models):
        weights = [w if models == 1 else jnp.stack([w, 2 * w])[:, None][:, 0] for w in (gate, up, down)]

        def loss(*given):
            sizes = rows(rows=size)
            return gated_mlp(*given, gate_bias=bias, block_sizes=sizes, activation="gelu", implementation="xla").sum()

        x = ROWS if models == 1 else jnp.broadcast_to(ROWS, (2, *ROWS.shape))
        return jax.value_and_grad(loss, (0, 1, 2, 3))(x, *weights)

    for models in (1, 2):
        whole, parts = (both(size, *PLAIN[1:], SIDE[0], models) for size in (512, 256))
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize(
    "act",
    [lambda g: jnp.sqrt(jnp.abs(g)), lambda g: 1 / g, lambda g: jnp.log(g * g)],
    ids=["sqrt", "reciprocal", "log"],
)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "with a bias"])
def test_rows_that_fill_up_a_block_add_nothing_where_zeros_have_no_derivative(act, biased):
    from autopallas.kernels.gated_mlp import gated_mlp
    from autopallas.kernels.gated_mlp.operation import OPERATION

    rows = OPERATION.part("block_sizes").BlockSizes

    def loss(size, *given):
        *given, bias = given
        sizes = rows(rows=size)
        bias = bias if biased else None
        return gated_mlp(*given, gate_bias=bias, block_sizes=sizes, activation=act, implementation="xla").sum()

    given = (ROWS, GATE, UP, DOWN, 0 * SIDE[0])  # with a bias of 0, rows of zeros stay what they are
    whole, parts = (jax.value_and_grad(loss, (1, 2, 3, 4, 5))(size, *given) for size in (512, 256))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(a).max())


def test_a_backward_stores_no_hidden_units_but_those_of_a_block():
    rows, width, wide = 2048, 32, 128
    arguments = [jnp.ones(shape) for shape in ((rows, width), (width, wide), (width, wide), (wide, width))]

    def loss(x, gate, up, down):
        return jnp.sum(jnp.square((jax.nn.silu(x @ gate) * (x @ up)) @ down))

    original = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    ours = autopallas.optimize(jax.grad(loss, (0, 1, 2, 3)), objective="always", strict=True)
    used = [f.lower(*arguments).compile().memory_analysis().temp_size_in_bytes for f in (jax.jit(ours), original)]
    assert used[0] < used[1] / 2


REFUSED = {
    "bilinear": (lambda x, g, u, d: ((x @ g) * (x @ u + 1)) @ d, "neither of the two projections is activated"),
    "both": (lambda x, g, u, d: (jnp.tanh(x @ g) * jax.nn.sigmoid(x @ u)) @ d, "both projections are activated"),
    "gate needed": (lambda x, g, u, d: ((jax.nn.silu(x @ g) * (x @ u)) @ d, x @ g), "also used by"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_a_near_miss_with_a_reason(name):
    program, reason = REFUSED[name]
    outcome = compare(program, PLAIN, gradients=name == "bilinear")
    assert outcome.counts("gated_mlp") == 0 or name == "gate needed"
    if name != "gate needed":
        assert any(reason in one for one in outcome.reasons())
        assert all(miss.advice for miss in outcome.report.near_misses)


def with_adapter(x, w, a, b):
    return x @ w + 2.0 * (x @ a) @ b


ADAPTERS = (array(K, 2, seed=10), array(2, H, seed=11), array(K, 2, seed=12), array(2, H, seed=13))
ADAPTED = {
    "both": lambda x, g, u, d, a, b, e, f: (jax.nn.silu(with_adapter(x, g, a, b)) * with_adapter(x, u, e, f)) @ d,
    "gate": lambda x, g, u, d, a, b, e, f: (jax.nn.silu(with_adapter(x, g, a, b)) * (x @ u)) @ d,
    "other": lambda x, g, u, d, a, b, e, f: (jax.nn.silu(x @ g) * with_adapter(x, u, e, f)) @ d,
}


@pytest.mark.parametrize("name", ADAPTED)
def test_projections_with_adapters_are_a_near_miss(name):
    outcome = compare(ADAPTED[name], (*PLAIN, *ADAPTERS))
    assert outcome.complaints == []
    assert outcome.counts("gated_mlp") == 0
    (miss,) = outcome.report.near_misses
    assert "adds up several products" in miss.reason
    assert "test_gated_mlp.py" in miss.location


def test_adapters_that_are_added_to_the_weights_are_none():
    def merged(x, g, u, d, a, b, e, f):
        return (jax.nn.silu(x @ (g + 2.0 * a @ b)) * (x @ (u + 2.0 * e @ f))) @ d

    outcome = compare(merged, (*PLAIN, *ADAPTERS))
    assert outcome.complaints == []
    assert outcome.counts("gated_mlp") == 1
    assert not outcome.report.near_misses


def lstm(x, weight, state):
    i, f, o, c = jnp.split(x @ weight, 4, -1)
    state = jax.nn.sigmoid(f) * state + jax.nn.sigmoid(i) * jnp.tanh(c)
    return jax.nn.sigmoid(o) * jnp.tanh(state)


LOOK_ALIKES = {
    "one projection": (lambda x, g: jax.nn.silu(x @ g), (X, GATE)),
    "another input": (lambda x, y, g, u: jax.nn.silu(x @ g) * (y @ u), (X, X + 1, GATE, UP)),
    "a gate for each row": (lambda x, g, u: jax.nn.sigmoid(x @ g[:, :1]) * (x @ u), (X, GATE, UP)),
    "a cell": (lstm, (X, array(K, 4 * H, seed=8), array(H, seed=9))),
    "softmax": (lambda x, g, u: jax.nn.softmax(x @ g) * (x @ u), (X, GATE, UP)),
    "a condition": (lambda x, y, g, u: jax.nn.silu(x @ g + y @ u) * (x @ u), (X, X + 1, GATE, UP)),
    "two layers": (lambda x, g, a, b: jax.nn.silu(x @ g) * (jnp.tanh(x @ a) @ b + x @ a @ b), (X, GATE, *ADAPTERS[:2])),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_what_resembles_one_is_left_alone(name):
    program, arguments = LOOK_ALIKES[name]
    report = autopallas.explain(optimized_like_a_user(with_gradients(program, arguments)), *arguments)
    assert report.counts()["gated_mlp"] == 0
    assert [miss for miss in report.near_misses if miss.op == "gated_mlp"] == []


def train_step(function, arguments):
    """What an optimized train step gives, its report, and what float64 gives."""
    step, given, report = optimized_step(function, arguments)
    return given, report, in_float64(step, arguments)


LAYERS = tuple(array(3, *shape, seed=9, scale=0.1) for shape in ((K, H), (K, H), (H, K)))
REACHED = jnp.concatenate([array(4, K), jnp.zeros((2, K))])  # rows of zeros: every rectifier stands where it has a kink


def in_a_loop(act, around=lambda f: f):
    def program(x, *weights):
        def layer(x, own):
            gate, up, down = own
            return x + (act(x @ gate) * (x @ up)) @ down, None

        return lax.scan(around(layer), x, weights)[0]

    return program


def one_by_one(x, *weights):
    @jax.checkpoint
    def layer(x, gate, up, down):
        return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down

    for i in range(3):
        x = layer(x, *(w[i] for w in weights))
    return x


def counted(x, *weights):
    def layer(i, x):
        gate, up, down = (lax.dynamic_index_in_dim(w, i, keepdims=False) for w in weights)
        return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down

    return lax.fori_loop(0, 3, layer, x)


@pytest.mark.parametrize(
    ("function", "sites"),
    [
        (in_a_loop(jax.nn.relu), 1),
        (in_a_loop(jax.nn.relu, jax.checkpoint), 1),
        (in_a_loop(lambda z: jnp.square(jax.nn.relu(z))), 1),
        (in_a_loop(lambda z: jnp.maximum(z, 0.0)), 1),
        (one_by_one, 3),
        (counted, 1),
    ],
    ids=["relu", "relu, checkpoint", "squared relu", "maximum", "checkpoints of parts", "counted"],
)
def test_layers_of_a_train_step_are_found_with_their_backward(function, sites):
    given, report, true = train_step(function, (REACHED, *LAYERS))
    found = [site for site in report.sites if site.op == "gated_mlp"]
    assert [site.direction for site in found] == ["forward+backward"] * sites, report.near_misses
    for error, _ in measured(given, true):
        assert error < 2e-5


def test_layers_that_are_counted_are_found_under_vmap():
    stacked = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), (REACHED, *LAYERS))
    given, report, true = train_step(jax.vmap(counted), stacked)
    assert report.counts()["gated_mlp"] == 1
    for error, _ in measured(given, true):
        assert error < 2e-5


def residual_of_a_differential_equation(points, weight, last):
    def u(x):
        return jnp.tanh(x @ weight) @ last

    along = jnp.zeros_like(points).at[:, 0].set(1)

    def first(x):
        return jax.jvp(u, (x,), (along,))[1]

    return u(points) * first(points) + jax.jvp(first, (points,), (along,))[1]


def recurrent_unit(x, keep, new, last):
    kept = jax.nn.sigmoid(x @ keep)
    return (kept * jnp.tanh(x @ new) + 1).sum(-1)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (residual_of_a_differential_equation, (array(6, 3), array(3, H), array(H, 2))),
        (recurrent_unit, PLAIN),
    ],
    ids=["derivatives", "recurrent unit"],
)
def test_what_no_reader_would_call_nearly_one_is_no_near_miss(function, arguments):
    for program in (function, with_gradients(function, arguments)):
        optimized = optimized_like_a_user(program)
        jax.make_jaxpr(lambda *args: optimized(*args))(*arguments)  # noqa: B023
        assert [miss for miss in optimized.report().near_misses if miss.op == "gated_mlp"] == []


@pytest.mark.parametrize("joined", [False, True])
def test_projections_beside_those_of_attention_are_a_near_miss(joined):
    """One product gives queries, keys, values, gate and up; attention and hidden units may be projected together."""

    def block(x, every, last):
        q, k, v, units = jnp.split(x @ every, [K, 2 * K, 3 * K], -1)
        attended = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)) @ v
        gate, up = jnp.split(units, 2, -1)
        hidden = jax.nn.silu(gate) * up
        if joined:
            return jnp.concatenate([attended, hidden], -1) @ last
        return attended @ last[:K] + hidden @ last[K:]

    arguments = X, array(K, 3 * K + 2 * H), array(K + H, N)
    for program in (block, with_gradients(block, arguments)):
        outcome = compare(program, arguments, gradients=False)
        assert outcome.complaints == []
        assert (outcome.counts("attention"), outcome.counts("gated_mlp")) == (1, 0)
        reasons = [miss.reason for miss in outcome.report.near_misses if miss.op == "gated_mlp"]
        assert reasons == ["the product that gives the projections gives something else too"]


def test_gates_that_are_joined_are_no_near_miss():
    """Two gates of a recurrent unit, of which no more is made than one array."""

    def unit(x, both, last):
        keep, new = jnp.split(x @ both, 2, -1)
        return jnp.concatenate([x, jax.nn.sigmoid(keep) * jnp.tanh(new)], -1) @ last

    outcome = compare(unit, (X, BOTH, array(K + H, N)))
    assert outcome.complaints == []
    assert [miss for miss in outcome.report.near_misses if miss.op == "gated_mlp"] == []


def test_other_sites_stay_where_it_is_found_and_not_applied():
    """Products whose results are transposed, as gradients of its weights are, are respelt all the same."""
    program = with_gradients(SPELLINGS["silu"][0], PLAIN)
    chosen = autopallas.optimize(program, objective="always", strict=True, ops=("respelling",))
    wanted = autopallas.explain(chosen, *PLAIN).counts()
    denied = autopallas.optimize(program, objective="always", strict=True, ops=("-gated_mlp",))
    assert wanted["respelling"] == autopallas.explain(denied, *PLAIN).counts()["respelling"] > 0
    report = autopallas.explain(autopallas.optimize(program), *PLAIN)
    assert {site.op for site in report.sites} == {"gated_mlp", "respelling"}


def test_it_is_found_where_all_that_the_program_gives_is_a_loss():
    """The loss is another site, whose activations are computed all the same."""
    program, arguments = SPELLINGS["silu"][0], (*PLAIN, array(N, 12, seed=9))

    def loss(*arguments):
        return jax.nn.logsumexp(program(*arguments[:4]) @ arguments[4], axis=-1).mean()

    outcome = compare(loss, arguments, gradients=False)
    assert outcome.complaints == []
    assert (outcome.counts("gated_mlp"), outcome.counts("cross_entropy")) == (1, 1)


def test_its_first_step_waits_for_a_measurement_only_where_memory_counts():
    operation = operation_named("gated_mlp")
    assert not operation.may_gain("xla", "time", operation.sample)
    assert operation.may_gain("xla", "memory", operation.sample)
    assert operation_named("attention").may_gain("xla", "time", operation.sample)
