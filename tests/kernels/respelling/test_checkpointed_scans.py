"""Loops that stack much for their backward: what is computed again in chunks, what stays, and why."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from support.compare import compare

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.kernels.respelling.kinds import kind_named
from autopallas.patterns import find
from autopallas.sites.device import Device

T, B, H = 64, 8, 48
KIND = ("scan_checkpoint",)


def random(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / 4, dtype)


def optimized(function, **options):
    return autopallas.optimize(function, **{"objective": "always", "ops": KIND, "strict": True} | options)


def recognised(function, *arguments):
    return find(Graph(flatten(jax.make_jaxpr(function)(*arguments))), KIND, True)


def pairs(function, *arguments):
    return [dict(match.spec.parameters)["pair"] for match in recognised(function, *arguments)[0]]


def reasons(function, *arguments):
    matches, misses = recognised(function, *arguments)
    assert matches == []
    return [miss.reason for miss in misses]


def temporary(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def near(given, wanted):
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.complex128) for x in (a, b))
        # XLA fuses what stands around otherwise, and a loss is a sum in which much cancels.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 1e-3))


def judged(function, *arguments, argnums=(0, 1), sites=1, has_aux=False):
    """Compares value and gradients with the original's, and returns the pairs that were found."""
    step = jax.value_and_grad(function, argnums, has_aux=has_aux)
    run = optimized(step)
    near(run(*arguments), jax.jit(step)(*arguments))
    assert run.report().counts()["respelling"] == sites
    return pairs(step, *arguments)


def loss_of(step, first=None, **options):
    """The loss of a loop with ``step(w, h, x) -> h``."""

    def loss(w, x):
        def one(h, x):
            h = step(w, h, x)
            return h, jnp.cos(h)

        start = jnp.zeros_like(x[0]) if first is None else first(x)
        return jnp.sum(jnp.sin(lax.scan(one, start, x, **options)[1]))

    return loss


def rnn(w, h, x):
    return jnp.tanh(jnp.sin(jnp.tanh(h @ w + x) @ w) + x)


def lstm(w, x):
    def step(carried, x):
        h, c = carried
        i, f, g, o = jnp.split(x @ w[0] + h @ w[1], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    first = jnp.zeros_like(x[0])
    return jnp.sum(jnp.sin(lax.scan(step, (first, first), x)[1]))


def gru(w, x):
    def step(h, x):
        z, r = jnp.split(jax.nn.sigmoid(x @ w[0][:, : 2 * H] + h @ w[1][:, : 2 * H]), 2, -1)
        h = (1 - z) * jnp.tanh(x @ w[0][:, 2 * H :] + (r * h) @ w[1][:, 2 * H :]) + z * h
        return h, h

    h, states = lax.scan(step, jnp.zeros_like(x[0]), x)
    return jnp.sum(jnp.sin(states)) + jnp.sum(h**2)


def rotated(w, x):
    def step(h, x):
        h = jnp.exp(1j * w[0]) * h / (1 + jnp.abs(h)) + x
        return h, jnp.real(h) * jnp.imag(h)

    return jnp.sum(jnp.sin(lax.scan(step, x[0] + 0j, x)[1]))


W, X = random(H, H) / 2, random(T, B, H, seed=1)
LSTM = (random(H, 4 * H), random(H, 4 * H, seed=2)), X
GRU = (random(H, 3 * H), random(H, 3 * H, seed=2)), X


# ---------------------------------------------------------------------- what is found


@pytest.mark.parametrize("length", [T, 67])
def test_an_lstm_computes_its_gates_again_with_less_memory(length):
    arguments = LSTM[0], random(length, B, H, seed=1)
    step = jax.value_and_grad(lstm, (0, 1))
    result = compare(step, arguments, gradients=False, ops=KIND)
    assert result.complaints == []
    assert result.counts("respelling") == 1
    assert temporary(optimized(step), *arguments) < 0.5 * temporary(step, *arguments)
    (pair,) = pairs(step, *arguments)
    assert (length % pair.chunk == 0) == (length == T)
    near(optimized(step)(*arguments), jax.jit(step)(*arguments))


STEPS = {
    "tanh": (loss_of(rnn), W, X),
    "odd": (loss_of(rnn), W, random(101, B, H, seed=1)),
    "a reversed loop": (loss_of(rnn, reverse=True), W, X),
    "a reversed loop, odd": (loss_of(rnn, reverse=True), W, random(101, B, H, seed=1)),
    "unrolled": (loss_of(rnn, unroll=5), W, X),
    "gru": (gru, *GRU),
    "a branch": (
        loss_of(lambda w, h, x: lax.cond(jnp.sum(h) > 0, lambda: rnn(w, h, x), lambda: jnp.sin(h) - x)), W, X,
    ),
    "a loop in a step": (
        loss_of(lambda w, h, x: lax.fori_loop(0, 3, lambda i, h: rnn(w, h, x * i), h)), W, X,
    ),
    "a checkpoint in a step": (loss_of(jax.checkpoint(lambda w, h, x: rnn(w, rnn(w, h, x), x))), W, random(256, B, H)),
    "complex": (rotated, W, X),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_all_kinds(name):
    (pair,) = judged(*STEPS[name])
    assert pair.length == len(STEPS[name][2])


def test_several_carries_with_counters_of_several_dtypes():
    def loss(w, x):
        def step(carried, x):
            h, wide, number, largest, flag = carried
            h = jnp.tanh(h @ w.astype(jnp.bfloat16) + x.astype(jnp.bfloat16) * jnp.sin(number).astype(jnp.bfloat16))
            h = jnp.where(flag, h, -h)
            wide = wide * 0.9 + h.astype(jnp.float32) ** 2
            largest = jnp.maximum(largest, wide.max())
            return (h, wide, number + 3, largest, ~flag), (wide * h.astype(jnp.float32), number)

        first = jnp.zeros((B, H), jnp.bfloat16), jnp.zeros((B, H)), jnp.int32(0), jnp.float32(-9), jnp.bool_(True)
        (_, _, number, largest, flag), (found, numbers) = lax.scan(step, first, x)
        return jnp.sum(jnp.sin(found)) + largest, (number, numbers, flag)

    judged(loss, W, X, has_aux=True)


def test_a_loop_without_slices():
    def loss(w, h):
        def step(h, _):
            slope = jnp.tanh(h @ w)
            return h + 0.1 * slope + 0.05 * jnp.sin(slope @ w), None

        return jnp.sum(lax.scan(step, h, None, length=T)[0] ** 2)

    judged(loss, W, X[0])


# ---------------------------------------------------------------------- where it stands


def layers_over_time(w, x):
    def layer(x, w):
        return lax.scan(lambda h, x: (rnn(w, h, x), jnp.cos(rnn(w, h, x))), jnp.zeros_like(x[0]), x)[1], None

    return jnp.sum(jnp.sin(lax.scan(layer, x, w)[0]))


def time_over_layers(w, x):
    def step(states, x):
        def layer(x, given):
            h = rnn(given[1], given[0], x)
            return h, h

        x, states = lax.scan(layer, x, (states, w))
        return states, x

    return jnp.sum(jnp.sin(lax.scan(step, jnp.zeros((3, B, H)), x)[1]))


SURROUNDINGS = {
    "time in layers": (jax.value_and_grad(layers_over_time, (0, 1)), random(3, H, H)),
    "layers in time": (jax.value_and_grad(time_over_layers, (0, 1)), random(3, H, H)),
    "vmap within": (
        jax.value_and_grad(
            lambda w, x: jnp.sum(jax.vmap(loss_of(lambda w, h, x: jnp.tanh(w.T @ h + x)), (None, 1))(w, x)), (0, 1)
        ), W,
    ),
    "vmap of gradients": (jax.vmap(jax.value_and_grad(loss_of(lambda w, h, x: jnp.tanh(w.T @ h + x))), (None, 1)), W),
    "a checkpoint around": (jax.value_and_grad(jax.checkpoint(loss_of(rnn)), (0, 1)), W),
    "jit within jit": (jax.jit(jax.value_and_grad(jax.jit(loss_of(rnn)), (0, 1))), W),
    "steps of descent": (
        lambda w, x: lax.fori_loop(0, 3, lambda i, w: w - 0.01 * jax.grad(loss_of(rnn))(w, x), w), W,
    ),
    "a branch": (
        jax.value_and_grad(lambda w, x: lax.cond(w[0, 0] > -9, lambda: loss_of(rnn)(w, x), lambda: x.sum()), (0, 1)), W,
    ),
    "jacobian": (jax.jacrev(lambda w, x: jnp.stack([loss_of(rnn)(w, x), loss_of(rnn)(w, -x)])), W),
}  # fmt: skip


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings(name):
    function, w = SURROUNDINGS[name]
    run = optimized(function)
    near(run(w, X), jax.jit(function)(w, X))
    assert run.report().counts()["respelling"] >= 1


def test_transformations_around_the_optimized_function():
    """Gradients are taken of values alone, or of gradients; a batch is added."""
    loss = loss_of(rnn)
    step = jax.grad(loss)
    xs = jnp.stack([X, -X])
    near(jax.jit(jax.value_and_grad(optimized(loss)))(W, X), jax.jit(jax.value_and_grad(loss))(W, X))
    near(jax.jit(jax.vmap(optimized(step), (None, 0)))(W, xs), jax.jit(jax.vmap(step, (None, 0)))(W, xs))
    direction = random(H, H, seed=5)
    for moved in (
        lambda f: lambda w: jax.jvp(lambda w: f(w, X), (w,), (direction,))[1],
        lambda f: jax.grad(lambda w: jnp.vdot(f(w, X), direction)),
    ):
        given, wanted = (np.asarray(jax.jit(moved(f))(W)) for f in (optimized(step), step))
        np.testing.assert_allclose(given, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())  # sums in another order


def test_forward_derivatives_around_a_loop_that_carries_integers():
    """The two passes are sites, and what the one gives the other has integers, which have no tangents."""

    def loss(w, x):
        def step(carry, x):
            h, count = carry
            h = jnp.tanh(h @ w + x) * (1 + 0.1 / count)
            return (h, count + 1), h

        return jnp.sum(jnp.sin(lax.scan(step, (jnp.zeros_like(x[0]), jnp.int32(1)), x)[1]))

    step = jax.grad(loss)
    run, direction = optimized(step), random(H, H, seed=5)
    given, wanted = (jax.jvp(lambda w, f=f: f(w, X), (W,), (direction,)) for f in (run, jax.jit(step)))
    assert run.report().counts()["respelling"] == 1
    for a, b in zip(given, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())  # sums in another order


def test_a_batch_around_what_was_decided_by_a_measurement_needs_less_memory_too():
    step = jax.value_and_grad(lstm, (0, 1))
    run = autopallas.optimize(step, objective="memory", autotune=False, strict=True)
    xs = jnp.stack([X, -X])
    given, wanted = (jax.vmap(f, (None, 0)) for f in (run, step))
    near(jax.jit(given)(LSTM[0], xs), jax.jit(wanted)(LSTM[0], xs))
    assert temporary(given, LSTM[0], xs) < 0.5 * temporary(wanted, LSTM[0], xs)


def test_two_layers_are_two_sites():
    def loss(w, x):
        for one in w:
            x = lax.scan(lambda h, x, one=one: (rnn(one, h, x), jnp.cos(h)), jnp.zeros_like(x[0]), x)[1]
        return jnp.sum(jnp.sin(x))

    assert len(judged(loss, random(2, H, H), X, sites=2)) == 2


def test_on_each_device_of_a_mesh():
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    inner = jax.value_and_grad(loss_of(rnn))
    specs = PartitionSpec(), PartitionSpec(None, "d")
    step = jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    run = optimized(step)
    near(run(W, X), jax.jit(step)(W, X))
    assert run.report().counts()["respelling"] == 1


# ---------------------------------------------------------------------- what is kept


def test_what_is_read_elsewhere_too_is_stacked():
    """One of the stacks is a result of the program; the others are not."""

    def loss(w, x):
        def step(h, x):
            h = rnn(w, h, x)
            return h, (h, jnp.sin(h @ w) * jnp.exp(h))

        h, (states, found) = lax.scan(step, jnp.zeros_like(x[0]), x)
        return jnp.sum(jnp.sin(states) * found) + h.sum(), states

    (pair,) = judged(loss, W, X, has_aux=True)
    assert len(pair.needed) == 3


def added_slices(w, x):
    """A loop whose backward stacks the cotangents that it is given as slices."""

    def step(h, now):
        h = now[1] * h + 1
        return h, h + now[0]

    return jnp.sum(jnp.sin(lax.scan(step, jnp.zeros_like(x[0]), (x, w))[1]))


def test_what_the_backward_stacks_of_its_slices_is_no_result_of_it():
    judged(added_slices, *(random(2 * T, B, H, seed=n) for n in range(2)))


def test_a_smoother_is_a_pair_though_nothing_is_differentiated():
    def smooth(a, x):
        def forward(mean, x):
            predicted = a[0] * mean
            mean = predicted + 0.3 * (x - predicted)
            return mean, (mean, predicted)

        def backward(smoothed, given):
            smoothed = given[0] + 0.2 * (smoothed - given[1])
            return smoothed, smoothed

        last, stacks = lax.scan(forward, x[0], x)
        return lax.scan(backward, last, stacks, reverse=True)[1]

    run = optimized(smooth)
    near(run(W, X), jax.jit(smooth)(W, X))
    assert run.report().counts()["respelling"] == 1


def two_backwards(w, x):
    values, pull = jax.vjp(lambda w: lax.scan(lambda h, x: (rnn(w, h, x), jnp.cos(h)), x[0], x)[1], w)
    return pull(values), pull(jnp.cos(values))


def all_returned(w, x):
    return lax.scan(lambda h, x: (h + w[0] * jnp.cos(x), h), x[0], x)


def read_again(w, x):
    last, stacks = all_returned(w, x)
    return lax.scan(lambda h, s: (h * s, None), last, stacks, reverse=True)[0], stacks


def large_state(w, x):
    def step(m, x):
        m = jnp.roll(m.at[0].set(jnp.tanh(m[0] + x) * jnp.sin(m[1])), 1, 0)
        return m, m[0]

    return jnp.sum(jnp.sin(lax.scan(step, jnp.broadcast_to(w[:, None, :1], (H, B, H)) + x[0], x)[1]))


def printing(w, h, x):
    jax.debug.callback(lambda _: None, h[0, 0])
    return rnn(w, h, x)


def with_keys(w, x):
    def step(carried, x):
        h, key = carried
        key, own = jax.random.split(key)
        h = rnn(w, h, x) * jax.random.bernoulli(own, 0.8, h.shape)
        return (h, key), jnp.cos(h)

    return jnp.sum(jnp.sin(lax.scan(step, (x[0], jax.random.key(0)), x)[1]))


REFUSED = {
    "effects": (jax.grad(loss_of(printing)), X, "a step has an effect beside its results, so that it cannot run again"),
    "two backwards": (two_backwards, X, "what the loop stacks for its backward is needed elsewhere too"),
    "a result": (read_again, random(T, 2 * B, H), "what the loop stacks for its backward is needed elsewhere too"),
    "few steps": (jax.grad(loss_of(rnn)), random(15, 64, H), "a loop of 15 steps has too few of them for chunks"),
    "a large state": (jax.grad(large_state), X, "and to compute them again in chunks would take"),
    "keys": (jax.grad(with_keys), X, "a loop carries or reads numbers of less than 16 bits, or keys of random numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_or_would_gain_little_stays_with_a_reason(name):
    function, x, reason = REFUSED[name]
    assert any(reason in found for found in reasons(function, W, x))


@pytest.mark.parametrize("length", [0, 1])
def test_loops_of_no_step_or_one_are_no_misses(length):
    assert reasons(jax.grad(loss_of(rnn, first=lambda x: jnp.zeros((B, H)))), W, X[:length]) == []


def test_what_is_stacked_and_small_is_no_miss():
    assert reasons(jax.grad(loss_of(rnn)), W[:4, :4], X[:, :2, :4]) == []


def test_a_loop_that_depends_on_data_for_its_length_is_left_alone():
    def run(w, x):
        return lax.while_loop(lambda h: jnp.sum(h) < 9, lambda h: rnn(w, h, x[0]) + 1, x[0])

    assert reasons(run, W, X) == []


def test_it_is_looked_for_where_memory_is_asked_for_or_by_name():
    step = jax.value_and_grad(lstm, (0, 1))

    def kinds(**options):
        sites = autopallas.explain(autopallas.optimize(step, autotune=False, **options), *LSTM).sites
        return {site.kind: site.verdict for site in sites if site.op == "respelling"}

    assert "scan_checkpoint" not in kinds(objective="time")
    assert "scan_checkpoint" not in kinds(objective="always")
    assert kinds(objective="memory")["scan_checkpoint"] == "applied"
    assert "scan_checkpoint" not in kinds(objective="memory", ops="-scan_checkpoint")
    assert kinds(objective="time", ops=KIND) == {"scan_checkpoint": "kept"}  # it takes longer


@pytest.mark.parametrize(
    "kind, steps, batch, width, verdict",
    [
        ("TPU v5 lite", 512, 64, 512, "applied"),
        ("TPU v5 lite", 512, 64, 16, "kept"),
        ("TPU v5 lite", 32, 4, 8, "kept"),
        ("TPU v4", 512, 64, 512, "kept"),
    ],
    ids=["v5e", "small", "smallest", "without rows"],
)
def test_on_tpus_rows_of_loops_with_large_stacks_decide(kind, steps, batch, width, verdict):
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (*2 * [(width, 4 * width)], (steps, batch, width))]
    with Device("tpu", kind).targeted():
        run = autopallas.optimize(jax.value_and_grad(lstm, (0, 1)), objective="memory")
        report = autopallas.explain(run, types[:2], types[2])
    assert [site.verdict for site in report.sites if site.kind == "scan_checkpoint"] == [verdict]


def test_a_site_reports_what_it_costs_and_saves():
    step = jax.value_and_grad(lstm, (0, 1))
    run = autopallas.optimize(step, objective="memory", autotune=False, strict=True)
    run(*LSTM)
    (site,) = (site for site in run.report().sites if site.kind == "scan_checkpoint")
    assert site.verdict == "applied"
    assert "x the original's speed" in site.reason
    assert "x its temporary memory" in site.reason


def test_what_is_measured_is_the_pair_at_once():
    """Apart, its passes would compute the loop twice in the original."""
    ((match,), _) = recognised(jax.value_and_grad(lstm, (0, 1)), *LSTM)
    assert len(match.then) == 1
    kind = kind_named("scan_checkpoint")
    own = [random(*t.shape, seed=i) for i, t in enumerate(match.measured.original.in_avals)]
    original = jax.jit(lambda *own: kind.original(match.measured.spec, *own))
    respelt = jax.jit(lambda *own: kind.respelt(match.measured.spec, *own))
    near(respelt(*own), original(*own))
    scans = [e for e in match.measured.original.eqns if e.primitive.name == "scan"]
    assert len(scans) == 2
    assert temporary(respelt, *own) < 0.5 * temporary(original, *own)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [64, 67])
def test_each_pass_equals_its_original(reverse, length):
    """Where one of the passes runs as it is written, the other one still fits."""
    step = jax.value_and_grad(loss_of(rnn, reverse=reverse))
    ((match,), _) = recognised(step, W, random(length, B, H))
    kind = kind_named("scan_checkpoint")
    for part in match.passes:
        own = [random(*t.shape, seed=i) for i, t in enumerate(part.original.in_avals)]
        original, respelt = (
            jax.jit(lambda *x, f=f, s=part.spec: f(s, *x))(*own) for f in (kind.original, kind.respelt)
        )
        near(respelt, original)
