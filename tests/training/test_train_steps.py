"""Whole train steps: optimizers, libraries, donation, effects, memory; and the same sites wherever optimize stands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.nn import softmax
from support.checks import absolute_errors, arrays, check, replaced, right
from support.compare import compiled, optimized_like_a_user

from training.catalogue import L, T, W, attend, deep, layer, loss_of, qkv


def model(w, x):
    return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


def sgd(w, x):
    value, gradient = jax.value_and_grad(loss_of(model))(w, x)
    return w - 0.1 * gradient, value


def same(given, expected, tolerance=2e-5):
    error, mean, largest = absolute_errors(given, expected)
    assert error <= tolerance * largest, f"max absolute error {error:.2e}, mean {mean:.2e}, values up to {largest:.2e}"


def fast(function):
    return compiled(lambda *args: function(*args))


# --- Where optimize stands -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [layer, jax.checkpoint(layer)], ids=["plain", "checkpoint"])
def test_the_same_sites_inside_outside_and_around_jit(body):
    w, x = deep()

    def two(w, x):
        return lax.scan(lambda x, w: (body(body(x, w), w), None), x, w)[0]

    inner = optimized_like_a_user(loss_of(two))
    outer = optimized_like_a_user(jax.grad(loss_of(two)))
    around = optimized_like_a_user(jax.jit(jax.grad(loss_of(two))))
    results = [compiled(f)(w, x) for f in (jax.grad(inner), lambda *a: outer(*a), lambda *a: around(*a))]
    right(results[0], jax.grad(loss_of(two)), (w, x), "float32")
    same(results[1], results[0])
    same(results[2], results[0])
    assert [f.report().counts()["attention"] for f in (inner, outer, around)] == [2, 2, 2]
    names = [
        sorted({name for name, _ in arrays(jax.make_jaxpr(f)(w, x)) if name.startswith("autopallas")})
        for f in (jax.grad(inner), outer, around)
    ]
    assert names[0] == names[1] == names[2] == ["autopallas_site", "autopallas_site_backward"]


# --- Optimizers ------------------------------------------------------------------------------------------------------


def stepped(transformation, accumulate=1):
    """An optax train step, whose updates are left out of the comparison: Adam makes steps of rounding errors."""
    import optax

    transformation = transformation(optax)
    if accumulate > 1:
        transformation = optax.MultiSteps(transformation, accumulate)

    def step(w, state, x):
        value, gradient = jax.value_and_grad(loss_of(model))(w, x)
        updates, state = transformation.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value

    return step, transformation


OPTIMIZERS = {
    "sgd": lambda optax: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda optax: optax.adamw(1e-3),
    "clipped_adamw": lambda optax: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3)),
    "lion_with_a_schedule": lambda optax: optax.lion(optax.cosine_decay_schedule(1e-3, 10)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_optax(name):
    pytest.importorskip("optax", reason="optax is not installed")
    step, transformation = stepped(OPTIMIZERS[name])
    w, x = deep()
    args = w, transformation.init(w), x
    optimized = optimized_like_a_user(jax.jit(step))
    given, expected = fast(optimized)(*args), fast(step)(*args)
    assert replaced(optimized.report()) == ["forward+backward"]
    same(given, expected, 1e-4)


def test_optax_accumulates_over_steps():
    pytest.importorskip("optax", reason="optax is not installed")
    step, transformation = stepped(OPTIMIZERS["sgd"], accumulate=2)
    w, x = deep()
    optimized = optimized_like_a_user(jax.jit(step))
    states = []
    for function in (optimized, jax.jit(step)):
        state = (w, transformation.init(w))
        for i in range(3):
            *state, _ = function(*state, x * (i + 1))
        states.append(state)
    assert replaced(optimized.report()) == ["forward+backward"]
    same(states[0][0], states[1][0], 1e-4)


# --- Libraries -------------------------------------------------------------------------------------------------------


def test_a_step_of_flax_nnx():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    optax = pytest.importorskip("optax", reason="optax is not installed")
    attention = nnx.MultiHeadAttention(2, W, decode=False, deterministic=True, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(attention, optax.sgd(0.1), wrt=nnx.Param)
    graph, state = nnx.split((attention, optimizer))

    def step(state, x):
        attention, optimizer = nnx.merge(graph, state)
        value, gradient = nnx.value_and_grad(lambda m: jnp.sum(jnp.sin(m(x))))(attention)
        optimizer.update(attention, gradient)
        return value, nnx.state((attention, optimizer))

    optimized = optimized_like_a_user(step)
    args = state, deep()[1]
    given = fast(optimized)(*args)
    assert replaced(optimized.report()) == ["forward+backward"]
    same(given, fast(step)(*args))


def test_a_step_of_haiku():
    hk = pytest.importorskip("haiku", reason="haiku is not installed")
    network = hk.without_apply_rng(
        hk.transform(lambda x: hk.MultiHeadAttention(2, W // 2, w_init=hk.initializers.RandomNormal())(x, x, x))
    )
    x = deep()[1]
    parameters = network.init(jax.random.key(0), x)

    def step(parameters, x):
        value, gradient = jax.value_and_grad(loss_of(network.apply))(parameters, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradient), value

    check(step, (parameters, x), sizes=(T, T))


def test_a_step_of_equinox():
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    attention = eqx.nn.MultiheadAttention(2, W, key=jax.random.key(0))
    arrays_of, rest = eqx.partition(attention, eqx.is_array)

    def step(parameters, x):
        def loss(parameters):
            attention = eqx.combine(parameters, rest)
            return jnp.sum(jnp.sin(jax.vmap(lambda x: attention(x, x, x))(x)))

        value, gradient = eqx.filter_value_and_grad(loss)(parameters)
        return eqx.apply_updates(parameters, jax.tree.map(lambda g: -0.1 * g, gradient)), value

    optimized = optimized_like_a_user(step)
    args = arrays_of, deep()[1]
    same(fast(optimized)(*args), fast(step)(*args))
    assert replaced(optimized.report()) == ["forward+backward"]


# --- What must stay --------------------------------------------------------------------------------------------------


def own_rule(q, k, v):
    """An attention whose user wants another derivative: of the values only, and twice as large."""
    function = jax.custom_vjp(attend)

    def backward(residuals, cotangent):
        q, k, p = residuals
        return jnp.zeros_like(q), jnp.zeros_like(k), 2 * (p.mT @ cotangent)

    def forward(q, k, v):
        p = softmax(q @ k.mT * 0.5)
        return p @ v, (q, k, p)

    function.defvjp(forward, backward)
    return function(q, k, v)


def test_a_users_own_derivative_stays():
    gradient = jax.value_and_grad(loss_of(own_rule), argnums=(0, 1, 2))
    optimized = optimized_like_a_user(gradient)
    (_, given), (_, expected) = fast(optimized)(*qkv()), fast(gradient)(*qkv())
    assert "forward+backward" not in replaced(optimized.report())
    assert float(jnp.max(jnp.abs(given[0]))) == 0
    same(given, expected)


def test_a_users_own_derivative_of_the_scores_stays():
    @jax.custom_vjp
    def clipped(s):
        return s

    clipped.defvjp(lambda s: (s, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))
    gradient = jax.value_and_grad(loss_of(lambda q, k, v: softmax(clipped(q @ k.mT)) @ v), argnums=(0, 1, 2))
    optimized = optimized_like_a_user(gradient)
    same(fast(optimized)(*qkv()), fast(gradient)(*qkv()))
    assert "forward+backward" not in replaced(optimized.report())


def test_a_rectifier_of_the_scores_in_a_scan_is_right():
    """Some versions of JAX leave a plain maximum in the loop's body, of which the derivative is another."""

    def body(x, w):
        return x + softmax(jax.nn.relu((x @ w[0]) @ (x @ w[1]).mT)) @ (x @ w[2]), None

    gradient = jax.value_and_grad(loss_of(lambda w, x: lax.scan(body, x, w)[0]), argnums=(0, 1))
    w, x = deep()
    w = w.at[:, 1].multiply(jnp.arange(W) % 2)
    optimized = optimized_like_a_user(gradient)
    right(fast(optimized)(w, x), gradient, (w, x), "float32")
    assert replaced(optimized.report()) in ([], ["forward+backward"])
    assert len(optimized.report().near_misses) + len(replaced(optimized.report())) == 1


def test_a_backward_that_is_only_partly_there_keeps_both_directions():
    def partly(q, k, v):
        def loss(q, k, v):
            s = q @ k.mT * 0.5
            p = softmax(s)
            return jnp.sum(jnp.sin(p @ v)), p

        gradient, p = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return gradient, jnp.max(p)

    optimized = optimized_like_a_user(partly)
    same(fast(optimized)(*qkv()), fast(partly)(*qkv()))
    report = optimized.report()
    assert replaced(report) == []
    (reason,) = [miss.reason for miss in report.near_misses]
    assert "probabilities" in reason


def test_a_gradient_of_a_gradient_is_right():
    def penalty(q, k, v):
        return jnp.sum(jax.grad(loss_of(attend))(q, k, v) ** 2)

    gradient = jax.value_and_grad(penalty, argnums=(0, 1, 2))
    optimized = optimized_like_a_user(gradient)
    right(fast(optimized)(*qkv()), gradient, qkv(), "float32")


def test_a_penalty_on_the_entropy_is_right():
    def loss(q, k, v):
        log_p = jax.nn.log_softmax(q @ k.mT * 0.5)
        p = jnp.exp(log_p)
        return jnp.sum(jnp.sin(p @ v)) + 0.1 * jnp.sum(p * log_p)

    gradient = jax.value_and_grad(loss, argnums=(0, 1, 2))
    optimized = optimized_like_a_user(gradient)
    right(fast(optimized)(*qkv()), gradient, qkv(), "float32")
    assert replaced(optimized.report()) == []


# --- Effects, donation, names ----------------------------------------------------------------------------------------


def test_donated_parameters_are_consumed():
    w, x = deep()
    step = optimized_like_a_user(jax.jit(sgd, donate_argnums=0))
    expected = jax.jit(sgd)(w, x)
    given = jnp.array(w)
    same(step(given, x), expected)
    assert given.is_deleted()
    assert not x.is_deleted()
    assert replaced(step.report()) == ["forward+backward"]
    assert "tf.aliasing_output" in step.lower(w, x).as_text()


def test_debug_prints_in_forward_and_backward_survive(capfd):
    @jax.custom_vjp
    def noisy(x):
        return x

    def backward(_, g):
        jax.debug.print("backward")
        return (g,)

    noisy.defvjp(lambda x: (x, None), backward)

    def loss(q, k, v):
        jax.debug.print("forward")
        return jnp.sum(jnp.sin(noisy(attend(q, k, v))))

    step = optimized_like_a_user(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    same(step(*qkv()), jax.value_and_grad(loss, argnums=(0, 1, 2))(*qkv()))
    jax.effects_barrier()
    assert replaced(step.report()) == ["forward+backward"]
    printed = capfd.readouterr().out.split()
    assert printed.count("forward") == printed.count("backward") == 2


def test_ordered_callbacks_keep_their_order():
    seen = []

    def note(name):
        io_callback(lambda: seen.append(name), None, ordered=True)

    def step(w, x):
        note("start")
        value, gradient = jax.value_and_grad(loss_of(model))(w, x)
        note("after the gradient")
        w = w - 0.1 * gradient
        note("end")
        return w, value

    optimized = optimized_like_a_user(step)
    same(fast(optimized)(*deep()), sgd(*deep()))
    jax.effects_barrier()
    assert seen == ["start", "after the gradient", "end"]
    assert replaced(optimized.report()) == ["forward+backward"]


def test_a_callback_between_the_layers_of_a_scan():
    seen = []

    def body(x, w):
        x = layer(x, w)
        jax.debug.callback(lambda norm: seen.append(float(norm)), jnp.sum(x**2), ordered=True)
        return x, None

    gradient = jax.value_and_grad(loss_of(lambda w, x: lax.scan(body, x, w)[0]))
    optimized = optimized_like_a_user(gradient)
    same(fast(optimized)(*deep()), fast(gradient)(*deep()))
    jax.effects_barrier()
    assert replaced(optimized.report()) == ["forward+backward"]
    assert len(seen) == 2 * L
    np.testing.assert_allclose(seen[:L], seen[L:], rtol=1e-4)


def test_named_scopes_reach_the_compiled_program():
    def named(w, x):
        with jax.named_scope("our_model"):
            return model(w, x)

    step = optimized_like_a_user(jax.value_and_grad(loss_of(named)))
    text = step.lower(*deep()).as_text(debug_info=True)
    assert "transpose(jvp(our_model))" in text
    assert "autopallas_attention" in text


# --- Memory ----------------------------------------------------------------------------------------------------------


def _temporary(function, length):
    q, k, v = (jax.ShapeDtypeStruct((1, 1, length, 8), jnp.float32) for _ in range(3))
    return compiled(lambda *args: function(*args)).lower(q, k, v).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("body", ["flat", "scan", "checkpointed_scan"])
def test_temporary_memory_grows_with_the_length_not_with_its_square(body):
    def deeper(q, k, v):
        one = {"flat": None, "scan": attend, "checkpointed_scan": jax.checkpoint(attend)}[body]
        if one is None:
            return attend(q, k, v)
        return lax.scan(lambda q, _: (q + one(q, k, v), None), q, None, length=3)[0]

    step = jax.jit(jax.value_and_grad(loss_of(deeper), argnums=(0, 1, 2)))
    short, long = 512, 1024
    original = [_temporary(step, n) for n in (short, long)]
    # Under "always" the tiles are those of a table, whose rows differ in size from length to length.
    optimized = [_temporary(optimized_like_a_user(step, objective="memory"), n) for n in (short, long)]
    assert original[1] > 3.5 * original[0]
    assert optimized[1] < 2.5 * optimized[0]
    assert optimized[1] < 0.3 * original[1]
