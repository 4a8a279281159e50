"""Linear attention with decays between the steps: which spellings are found, which are refused, what is computed."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import compare, with_gradients

import autopallas
from autopallas.kernels.linear_attention import linear_attention
from autopallas.sites.operation import operation_named

B, T, H, N, P = 2, 70, 3, 8, 6


def scores(q, k):
    return jnp.einsum("bthn,bshn->bhts", q, k)


def weighted(s, v):
    return jnp.einsum("bhts,bshp->bthp", s, v)


def attended(q, k, v, weights):
    return weighted(scores(q, k) * weights, v)


def steps():
    return jnp.arange(T)[:, None], jnp.arange(T)[None]


def causal(offset=0):
    return jnp.tril(jnp.ones((T, T), bool), offset)


def heads(x):
    return x[:, None, None]


# ------------------------------------------------ one decay for all steps; spellings of q, k, v, and one decay per head


def powers(q, k, v, gamma):
    t, s = steps()
    return attended(q, k, v, jnp.where(t >= s, heads(gamma) ** (t - s), 0))


def powers_multiplied(q, k, v, gamma):
    t, s = steps()
    return attended(q, k, v, heads(gamma) ** jnp.maximum(t - s, 0) * (t >= s).astype(jnp.float32))


def powers_without_what_is_no_number(q, k, v, gamma):
    t, s = steps()
    weights = heads(gamma) ** (t - s) * (t >= s)
    return attended(q, k, v, jnp.where(jnp.isnan(weights), 0, weights))


def powers_of_hidden_exponents(q, k, v, gamma):
    distance = jnp.where(causal(), steps()[0] - steps()[1], 0)
    return attended(q, k, v, heads(gamma) ** distance * causal())


def masked_after_decay(q, k, v, gamma):
    t, s = steps()
    return weighted(jnp.where(t >= s, scores(q, k) * jnp.exp(-heads(gamma) * jnp.abs(t - s)), 0), v)


def rates_in_a_mask(q, k, v, slopes):
    t, s = steps()
    distance = t - s
    return attended(q, k, v, jnp.exp(jnp.where(distance >= 0, -heads(slopes) * distance, -jnp.inf)))


def rates_at_each_step(q, k, v, slopes):
    at = heads(slopes) * jnp.arange(T, dtype=jnp.float32)[None, :, None]
    return attended(q, k, v, jnp.tril(jnp.exp(at.swapaxes(1, 2) - at)))


def rates_as_logarithms(q, k, v, gamma):
    t, s = steps()
    logs = jnp.log(gamma)[:, None, None] * (t - s).astype(jnp.float32)
    return attended(q, k, v, jnp.exp(jnp.where(causal(), logs, -1e9)))


def added_mask_in_the_exponent(q, k, v, slopes):
    t, s = steps()
    return attended(q, k, v, jnp.exp(heads(slopes) * (s - t) + jnp.where(causal(), 0, -jnp.inf)))


def number(q, k, v, _):
    t, s = steps()
    return attended(q, k, v, jnp.where(t >= s, 0.9 ** (t - s).astype(jnp.float32), 0))


def number_and_scale(q, k, v, _):
    t, s = steps()
    return weighted(jnp.tril(scores(q, k) / 3 * jnp.exp2((s - t) / 8.0)), v)


def from_the_last(q, k, v, gamma):
    t, s = steps()
    return attended(q, k, v, jnp.where(s >= t, heads(gamma) ** (s - t), 0))


def without_own_step(q, k, v, gamma):
    t, s = steps()
    return attended(q, k, v, jnp.where(t > s, heads(gamma) ** (t - s), 0))


def normalised(q, k, v, gamma):
    t, s = steps()
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    weights = scores(q, k) * jnp.where(t >= s, heads(gamma) ** (t - s), 0)
    return weighted(weights, v) / (weights.sum(-1).transpose(0, 2, 1)[..., None] + 1e-6)


def one_head_mapped(q, k, v, gamma):
    def one(q, k, v, gamma):
        t, s = steps()
        return (q @ k.T * jnp.where(t >= s, gamma ** (t - s), 0)) @ v

    gamma = jax.lax.stop_gradient(gamma)
    return jax.vmap(jax.vmap(one, (1, 1, 1, 0), 1), (0, 0, 0, None))(q, k, v, gamma)


def made_of_heads(q, k, v, _):
    return powers(q, k, v, 1 - 2.0 ** (-5 - jnp.arange(H, dtype=jnp.float32)))


_STEPS = np.subtract.outer(np.arange(T), np.arange(T))
_CAPTURED = np.where(_STEPS >= 0, np.array([0.9, 0.97, 0.8])[:, None, None] ** np.maximum(_STEPS, 0), 0)


def captured(q, k, v, _):
    return attended(q, k, v, _CAPTURED.astype(np.float32))


def captured_transposed(q, k, v, _):
    return attended(q, k, v, np.swapaxes(_CAPTURED, 1, 2).astype(np.float32))


def captured_differences(q, k, v, gamma):
    return attended(q, k, v, jnp.where(causal(), heads(gamma) ** _STEPS.astype(np.float32), 0))


def captured_triangle(q, k, v, _):
    return attended(q, k, v, np.tril(np.ones((T, T), np.float32)))


def captured_selection(q, k, v, _):
    return weighted(jnp.where(np.tril(np.ones((T, T), bool), -1), scores(q, k), 0), v)


OF_HEADS = [
    powers, powers_multiplied, powers_without_what_is_no_number, powers_of_hidden_exponents, masked_after_decay,
    rates_in_a_mask, rates_at_each_step, rates_as_logarithms, added_mask_in_the_exponent, number, number_and_scale,
    from_the_last, without_own_step, normalised, one_head_mapped, made_of_heads, captured, captured_transposed,
    captured_differences, captured_triangle, captured_selection,
]  # fmt: skip


# ------------------------------------------------ decays of each step; spellings of q, k, v and logarithms [B, H, T]


def sums(q, k, v, logs):
    sums = jnp.cumsum(logs, -1)
    difference = sums[..., :, None] - sums[..., None, :]
    return attended(q, k, v, jnp.exp(jnp.where(causal(), difference, -jnp.inf)))


def sums_masked_after(q, k, v, logs):
    sums = jnp.cumsum(logs, -1)
    return attended(q, k, v, jnp.tril(jnp.exp(sums[..., :, None] - sums[..., None, :])))


def sums_of_negated(q, k, v, logs):
    sums = jnp.cumsum(-logs, -1)
    return weighted(jnp.where(causal(), scores(q, k) * jnp.exp(-sums[..., :, None] + sums[..., None, :]), 0), v)


def sums_from_the_last(q, k, v, logs):
    sums = jnp.cumsum(logs, -1)
    return attended(q, k, v, jnp.triu(jnp.exp(sums[..., None, :] - sums[..., :, None])))


def segments_of(logs):
    repeated = jnp.where(causal(-1), jnp.repeat(logs[..., None], T, -1), 0)
    return jnp.where(causal(), jnp.cumsum(repeated, -2), -jnp.inf)


def segments(q, k, v, logs):
    return jnp.einsum("bthn,bshn,bhts,bshp->bthp", q, k, jnp.exp(segments_of(logs)), v)


def segments_of_shared_scores(q, k, v, logs):
    return jnp.einsum("btn,bsn,bhts,bshp->bthp", q[:, :, 0], k[:, :, 0], jnp.exp(segments_of(logs)), v)


def segments_by_product(q, k, v, logs):
    masked = logs[..., None] * causal(-1).astype(logs.dtype)
    return attended(q, k, v, jnp.where(causal(), jnp.exp(jnp.cumsum(masked, axis=-2)), 0))


OF_STEPS = [
    sums, sums_masked_after, sums_of_negated, sums_from_the_last, segments, segments_of_shared_scores,
    segments_by_product,
]  # fmt: skip


def operands(of_steps, dtype="float32", scale=1.0):
    random = np.random.default_rng(0)
    arrays = [scale * random.standard_normal((B, T, H, width)) for width in (N, N, P)]
    decay = -random.uniform(0, 0.5, (B, H, T)) if of_steps else random.uniform(0.6, 1.0, H)
    return (*(jnp.asarray(x, dtype) for x in arrays), jnp.asarray(decay, "float32"))


def found(function, arguments, **options):
    report = autopallas.explain(autopallas.optimize(function, **options), *arguments)
    return report, [(site.op, site.direction) for site in report.sites if site.op == "linear_attention"]


EVERY = [*((f, False) for f in OF_HEADS), *((f, True) for f in OF_STEPS)]


@pytest.mark.parametrize(("spelling", "of_steps"), EVERY, ids=lambda x: getattr(x, "__name__", None))
def test_spellings_are_found_and_right_in_value_and_gradient(spelling, of_steps):
    arguments = operands(of_steps)
    outcome = compare(spelling, arguments)
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 1
    # The gradients inside are one site with the forward.
    assert found(with_gradients(spelling, arguments), arguments)[1] == [("linear_attention", "forward+backward")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("spelling", "of_steps"), [(powers, False), (captured, False), (sums, True), (segments, True)])
def test_sixteen_bits(spelling, of_steps, dtype):
    outcome = compare(spelling, operands(of_steps, dtype, 0.5))
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 1


@pytest.mark.parametrize("magnitude", [1e-4, 3.0, 100.0])
@pytest.mark.parametrize("spelling", [sums, segments])
def test_decays_that_leave_nothing_or_nearly_all(spelling, magnitude):
    q, k, v, logs = operands(True)
    outcome = compare(spelling, (q, k, v, magnitude * logs))
    assert outcome.complaints == []


@pytest.mark.parametrize("spelling", [sums, segments])
def test_decays_above_one(spelling):
    """What grows within a chunk stays finite as long as it does in the program."""
    q, k, v, logs = operands(True)
    outcome = compare(spelling, (q, k, v, jnp.where(jnp.arange(T) % 20 < 9, -4 * logs, 4 * logs)))
    assert outcome.complaints == []


def test_what_grows_over_a_short_sequence_stays_finite_as_in_the_program():
    """The chunk has as many steps as the sequence, of which no two are that far apart."""

    def short(q, k, v, gamma):
        t, s = jnp.arange(12)[:, None], jnp.arange(12)[None]
        return attended(q, k, v, jnp.where(t >= s, heads(gamma) ** jnp.maximum(t - s, 0), 0))

    q, k, v, _ = operands(False)
    q, k, v = (x[:, :12] for x in (q, k, v))
    # The eleventh power is 6e36, and the twelfth is infinite.
    outcome = compare(short, (1e-3 * q, k, v, jnp.full(H, 2200.0)))
    assert outcome.complaints == []


def test_steps_of_which_nothing_is_left():
    q, k, v, logs = operands(True)
    outcome = compare(segments, (q, k, v, jnp.where(jnp.arange(T) % 13 == 5, -1e30, logs)))
    assert outcome.complaints == []


def test_the_first_step_s_own_decay_is_not_read():
    q, k, v, logs = operands(True)
    for spelling, first in ((segments, 1e4), (sums, 1e3)):
        outcome = compare(spelling, (q, k, v, logs.at[..., 0].set(first)))
        assert outcome.complaints == []


def test_negative_decays_and_none():
    q, k, v, _ = operands(False)
    outcome = compare(powers_multiplied, (q, k, v, jnp.asarray([-0.9, 0.5, 0.0], jnp.float32)))
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 1


def test_layers_share_a_mask():
    """In a train step, the mask's gradient is not needed."""

    def layers(q, k, v, gamma):
        t, s = steps()
        weights = jnp.where(t >= s, heads(jax.lax.stop_gradient(gamma)) ** (t - s), 0)
        for _ in range(2):
            v = v + 0.1 * attended(q, k, v, weights)
        return v

    arguments = operands(False)
    outcome = compare(layers, arguments)
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 2
    assert found(with_gradients(layers, arguments), arguments)[1] == [("linear_attention", "forward+backward")] * 2


@pytest.mark.parametrize("inside", [False, True])
def test_in_a_loop_over_layers_with_checkpoints(inside):
    def layers(q, k, v, logs):
        def weights():
            sums = jnp.cumsum(logs, -1)
            return jnp.exp(jnp.where(causal(), sums[..., :, None] - sums[..., None, :], -jnp.inf))

        outside = None if inside else weights()

        def layer(x, w):
            own = weights() if inside else outside
            return x + 0.1 * attended(q * w, k, x, own), None

        return jax.lax.scan(jax.checkpoint(layer), v, jnp.ones((3, N)))[0]

    arguments = operands(True)
    outcome = compare(layers, arguments)
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == (1 if inside else outcome.counts("linear_attention"))


def test_gradients_without_the_forward():
    q, k, v, gamma = operands(False)
    gradient = jax.grad(lambda q, k, v: jnp.sum(powers(q, k, v, gamma) * v[..., :1]), (0, 1))
    _, sites = found(gradient, (q, k, v))
    assert sites == [("linear_attention", "forward")] * 2
    outcome = compare(lambda q, k, v: gradient(q, k, v), (q, k, v), gradients=False)
    assert outcome.complaints == []


def of_chunks(q, k, v, logs, segments, size=10):
    """State space duality: attention within chunks, and states from chunk to chunk, each by segments of logarithms."""
    split = lambda x: x.reshape(x.shape[0], T // size, size, *x.shape[2:])  # noqa: E731
    q, k, v, logs = split(q), split(k), split(v), split(logs.swapaxes(1, 2)).transpose(0, 3, 1, 2)
    within = jnp.einsum("bcthn,bcshn,bhcts,bcshp->bcthp", q, k, jnp.exp(segments(logs)), v)
    sums = jnp.cumsum(logs, -1)
    states = jnp.einsum("bcshn,bhcs,bcshp->bchpn", k, jnp.exp(sums[..., -1:] - sums), v)
    states = jnp.concatenate([jnp.zeros_like(states[:, :1]), states], 1)
    between = jnp.exp(segments(jnp.pad(sums[..., -1], ((0, 0), (0, 0), (1, 0)))))
    states = jnp.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
    return (within + jnp.einsum("bcthn,bchpn,bhct->bcthp", q, states, jnp.exp(sums))).reshape(v.shape[0], T, H, P)


def segments_by_differences(logs):
    sums = jnp.cumsum(logs, -1)
    seen = jnp.tril(jnp.ones((logs.shape[-1],) * 2, bool))
    return jnp.where(seen, sums[..., :, None] - sums[..., None, :], -jnp.inf)


def segments_by_repetition(logs):
    every = jnp.ones((logs.shape[-1],) * 2, bool)
    repeated = jnp.where(jnp.tril(every, -1), jnp.repeat(logs[..., None], logs.shape[-1], -1), 0)
    return jnp.where(jnp.tril(every), jnp.cumsum(repeated, -2), -jnp.inf)


@pytest.mark.parametrize("segments", [segments_by_differences, segments_by_repetition])
@pytest.mark.parametrize("shared", [False, True])
def test_chunks_that_also_make_states_have_their_backward(segments, shared):
    def program(q, k, v, logs):
        if shared:  # heads share queries and keys, and projections give everything
            q, k = (jnp.broadcast_to(jnp.sin(x[:, :, :1]), x.shape) for x in (q, k))
            v, logs = jnp.tanh(v), -jax.nn.softplus(logs)
        return of_chunks(q, k, v, logs, segments)

    arguments = operands(True)
    outcome = compare(program, arguments)
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 1
    assert found(with_gradients(program, arguments), arguments)[1] == [("linear_attention", "forward+backward")]


def test_chunks_whose_weights_are_needed_elsewhere_are_left_alone():
    def program(q, k, v, logs):
        kept = []

        def segments(logs):
            kept.append(segments_by_differences(logs))
            return kept[-1]

        return of_chunks(q, k, v, logs, segments), jnp.exp(kept[0])

    arguments = operands(True)
    outcome = compare(program, arguments)
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 0


def test_no_first_step_waits_for_a_measurement_of_one_chunk():
    operation = operation_named("linear_attention")
    assert operation.may_gain("xla", "time", operation.sample)
    assert not operation.may_gain("xla", "time", replace(operation.sample, steps=64))


# ---------------------------------------------------------------------- refusals


def transposed_exponent(q, k, v, gamma):
    t, s = steps()
    return attended(q, k, v, jnp.where(t >= s, heads(gamma) ** jnp.maximum(s - t, 0), 0))


def of_sums_of_positions(q, k, v, gamma):
    t, s = steps()
    return attended(q, k, v, jnp.where(t >= s, heads(gamma) ** (t + s), 0))


def of_twice_the_distance(q, k, v, gamma):
    t, s = steps()
    return attended(q, k, v, jnp.where(t >= s, heads(gamma) ** (t - s // 2), 0))


def one_step_more(q, k, v, gamma):
    t, s = steps()
    return attended(q, k, v, jnp.where(t >= s, heads(gamma) ** (t - s + 1), 0))


def of_different_heads(q, k, v, gamma):
    t, s = steps()
    at_t, at_s = heads(gamma) * t, heads(gamma[::-1]) * s
    return attended(q, k, v, jnp.where(t >= s, jnp.exp(at_s - at_t), 0))


def added_to_scores(q, k, v, gamma):
    t, s = steps()
    return weighted(jnp.where(t >= s, scores(q, k) + heads(gamma) ** (t - s), 0), v)


def two_decays(q, k, v, gamma):
    t, s = steps()
    weights = heads(gamma) ** (t - s) * jnp.exp(-heads(gamma**2) * (t - s))
    return attended(q, k, v, jnp.where(t >= s, weights, 0))


def window(q, k, v, gamma):
    t, s = steps()
    return attended(q, k, v, jnp.where((t >= s) & (t - s < 9), heads(gamma) ** (t - s), 0))


def full(q, k, v, gamma):
    t, s = steps()
    return attended(q, k, v, heads(gamma) ** jnp.abs(t - s))


def of_squared_distances(q, k, v, gamma):
    t, s = steps()
    return attended(q, k, v, jnp.where(t >= s, heads(gamma) ** ((t - s) ** 2), 0))


def without_own_step_in_the_mask_alone(q, k, v, gamma):
    """What a strict mask hides is one here, and not zero."""
    t, s = steps()
    return attended(q, k, v, jnp.where(t > s, heads(gamma) ** (t - s), 1))


def rates_that_vary(q, k, v, gamma):
    t, s = steps()
    return attended(q, k, v, jnp.where(t >= s, jnp.exp(-(q[0, :, 0, :1] ** 2) * (t - s)), 0))


def captured_otherwise(q, k, v, gamma):
    other = _CAPTURED.astype(np.float32)
    other[1, 40, 3] *= 1.01
    return attended(q, k, v, other)


def captured_with_a_hidden_number(q, k, v, gamma):
    other = _CAPTURED.astype(np.float32)
    other[1, 3, 40] = 1e-6
    return attended(q, k, v, other)


def captured_in_fewer_bits(q, k, v, gamma):
    return attended(q, k, v, jnp.asarray(_CAPTURED, jnp.bfloat16).astype(jnp.float32))


def decays_also_added(q, k, v, gamma):
    t, s = steps()
    weights = jnp.where(t >= s, heads(gamma) ** (t - s), 0)
    return attended(q, k, v, weights), jnp.sin(weights)


def returned_weights(q, k, v, gamma):
    t, s = steps()
    weights = jnp.where(t >= s, heads(gamma) ** (t - s), 0)
    return attended(q, k, v, weights), weights


def of_half_the_distance_rounded_down(q, k, v, gamma):
    t, s = steps()
    return attended(q, k, v, jnp.where(t >= s, 0.9 ** (0.5 * (t - s)).astype(jnp.int32), 0))


def rates_of_half_the_distance_rounded_down(q, k, v, gamma):
    t, s = steps()
    distance = ((t - s) * 0.5).astype(jnp.int32).astype(jnp.float32)
    return attended(q, k, v, jnp.where(t >= s, jnp.exp(-0.1 * distance), 0))


def of_a_quantised_exponent(q, k, v, gamma):
    t, s = steps()
    exponent = (-0.03 * (t - s)).astype(jnp.float8_e4m3fn).astype(jnp.float32)
    return attended(q, k, v, jnp.where(t >= s, jnp.exp(exponent), 0))


def of_many_terms(q, k, v, gamma):
    """Of 2**18: more are refused than are looked at one by one."""
    t, s = steps()
    exponent = -1e-9 * (t - s)
    for _ in range(18):
        exponent = exponent + exponent
    return attended(q, k, v, jnp.where(t >= s, jnp.exp(exponent), 0))


OTHERS_OF_HEADS = [
    transposed_exponent, of_sums_of_positions, of_twice_the_distance, one_step_more, of_different_heads,
    added_to_scores, two_decays, window, full, of_squared_distances, without_own_step_in_the_mask_alone,
    rates_that_vary, captured_otherwise, captured_with_a_hidden_number, captured_in_fewer_bits, decays_also_added,
    returned_weights, of_half_the_distance_rounded_down, rates_of_half_the_distance_rounded_down,
    of_a_quantised_exponent, of_many_terms,
]  # fmt: skip


def sums_along_heads(q, k, v, logs):
    sums = jnp.cumsum(logs, 1)
    return attended(q, k, v, jnp.tril(jnp.exp((sums[..., :, None] - sums[:, ::-1, None, :]) * 0.01)))


def of_another_sequence(q, k, v, logs):
    first, second = jnp.cumsum(logs, -1), jnp.cumsum(logs * 0.9, -1)
    return attended(q, k, v, jnp.tril(jnp.exp(first[..., :, None] - second[..., None, :])))


def of_a_shifted_sequence(q, k, v, logs):
    sums = jnp.cumsum(logs, -1)
    return attended(q, k, v, jnp.tril(jnp.exp(sums[..., :, None] - jnp.roll(sums, 1, -1)[..., None, :])))


def of_a_reversed_sequence(q, k, v, logs):
    sums = jnp.cumsum(logs, -1) * 0.1
    return attended(q, k, v, jnp.tril(jnp.exp(sums[..., :, None] - sums[..., None, ::-1])))


def added_sequences(q, k, v, logs):
    sums = jnp.cumsum(logs, -1) * 0.1
    return attended(q, k, v, jnp.tril(jnp.exp(sums[..., :, None] + sums[..., None, :])))


def twice_at_one_step(q, k, v, logs):
    sums = jnp.cumsum(logs, -1) * 0.1
    return attended(q, k, v, jnp.tril(jnp.exp(2 * sums[..., :, None] - sums[..., None, :])))


def segments_with_the_first_step(q, k, v, logs):
    masked = jnp.where(causal(), logs[..., None], 0)
    return attended(q, k, v, jnp.where(causal(), jnp.exp(jnp.cumsum(masked, -2)), 0))


def segments_from_the_last(q, k, v, logs):
    masked = jnp.where(causal(-1), logs[..., None], 0)
    return attended(q, k, v, jnp.where(causal(), jnp.exp(jax.lax.cumsum(masked, axis=2, reverse=True)), 0))


def segments_along_the_other_axis(q, k, v, logs):
    masked = jnp.where(causal(-1), logs[..., None], 0)
    return attended(q, k, v, jnp.where(causal(), jnp.exp(jnp.cumsum(masked, -1)), 0))


def segments_of_the_other_step(q, k, v, logs):
    masked = jnp.where(causal(-1), logs[..., None, :], 0)
    return attended(q, k, v, jnp.where(causal(), jnp.exp(jnp.cumsum(masked, -2)), 0))


def of_an_argument(q, k, v, logs):
    weights = jnp.broadcast_to(logs[0, 0, 0], (T, T)) * logs[0, 0][None] * logs[0, 1][:, None]
    return attended(q, k, v, jnp.tril(jnp.sin(weights)))


OTHERS_OF_STEPS = [
    sums_along_heads, of_another_sequence, of_a_shifted_sequence, of_a_reversed_sequence, added_sequences,
    twice_at_one_step, segments_with_the_first_step, segments_from_the_last, segments_along_the_other_axis,
    segments_of_the_other_step, of_an_argument,
]  # fmt: skip

EVERY_OTHER = [*((f, False) for f in OTHERS_OF_HEADS), *((f, True) for f in OTHERS_OF_STEPS)]


@pytest.mark.parametrize(("program", "of_steps"), EVERY_OTHER, ids=lambda x: getattr(x, "__name__", None))
def test_what_looks_alike_is_left_alone(program, of_steps):
    outcome = compare(program, operands(of_steps))
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 0


def test_a_captured_array_that_changes_is_read_again():
    decays = np.tril(0.9 ** np.abs(np.subtract.outer(np.arange(T), np.arange(T)))).astype(np.float32)
    q, k, v, _ = operands(False)
    counts = []
    for changed in (False, True):
        if changed:
            decays[3, 1] = 5
        outcome = compare(lambda q, k, v: attended(q, k, v, decays), (q, k, v), gradients=False)
        assert outcome.complaints == []
        counts.append(outcome.counts("linear_attention"))
    assert counts == [1, 0]


REFUSED = {
    of_sums_of_positions: "decays depend on something else than the number of steps between t and s",
    one_step_more: "a decay is raised to the number of steps between t and s and a further number",
    two_decays: "they decay by several arrays",
    captured_otherwise: "a captured array that is no mask and no power of one decay",
    captured_in_fewer_bits: "decays are captured in a narrower type than the result's",
    of_another_sequence: "no differences of one sequence at both steps",
    segments_with_the_first_step: "running sums of decays have other steps than those after s up to t",
    decays_also_added: "also used by sin",
}


@pytest.mark.parametrize("program", REFUSED, ids=lambda f: f.__name__)
def test_near_misses_say_what_differs(program):
    report, sites = found(program, operands(program in OTHERS_OF_STEPS), objective="always")
    assert sites == []
    assert [REFUSED[program] in miss.reason for miss in report.near_misses] == [True]
    (miss,) = report.near_misses
    assert miss.advice
    assert "test_decayed_linear_attention.py" in miss.location


def test_the_public_function_computes_all_decays():
    random = np.random.default_rng(0)
    q, k = (np.abs(random.standard_normal((2, 70, 5))) for _ in range(2))
    v = random.standard_normal((2, 70, 4))
    logs = -random.uniform(0, 0.4, (2, 70))
    each = np.array([-0.3, -0.02])
    sums = np.cumsum(logs, 1)
    t, s = np.arange(70)[:, None], np.arange(70)[None]
    of_forms = {
        "number": ({}, -0.1, -0.1 * np.abs(t - s)[None]),
        "rates": ({"decay": each}, 0.5, 0.5 * each[:, None, None] * np.abs(t - s)),
        "powers": ({"decay": np.exp(each)}, 1.0, each[:, None, None] * np.abs(t - s)),
        "captured": ({"decay": np.exp(7 * each)}, 1 / 7, each[:, None, None] * np.abs(t - s)),
        "steps": ({"log_decays": logs}, 1.0, -np.abs(sums[:, :, None] - sums[:, None])),
        "sums": ({"log_decays": sums}, 1.0, -np.abs(sums[:, :, None] - sums[:, None])),
    }
    for (form, (given, rate, exponents)), reverse, strict, normalised in itertools.product(
        of_forms.items(), *[(False, True)] * 3
    ):
        mask = np.tril(np.ones((70, 70)), -1 if strict else 0)
        weights = 0.5 * np.einsum("btn,bsn->bts", q, k) * (mask.T if reverse else mask) * np.exp(exponents)
        true = weights @ v / (0.1 + weights.sum(-1, keepdims=True) if normalised else 1)
        for implementation in ("xla", "reference"):
            result = linear_attention(
                *(jnp.asarray(x, jnp.float32) for x in (q, k, v)),
                **{name: jnp.asarray(x, jnp.float32) for name, x in given.items()},
                factor=0.5,
                reverse=reverse,
                strict=strict,
                normalised=normalised,
                epsilon=0.1,
                decay_form=form,
                rate=rate,
                implementation=implementation,
            )
            np.testing.assert_allclose(result, true, rtol=2e-5, atol=2e-5 * np.abs(true).max())
