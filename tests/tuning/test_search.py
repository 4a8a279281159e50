"""The search: what is wrong or fails is never chosen, the budget is kept, and it works wherever JAX traces."""

from __future__ import annotations

import itertools
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from places import attend, attend_all, gradient, key_for, match_of, qkv

import autopallas
from autopallas.autotune import search as module
from autopallas.autotune.search import ORIGINAL, search
from autopallas.autotune.trial import Trial
from autopallas.kernels.attention import example as attention_example
from autopallas.kernels.attention import xla
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes as LossBlockSizes
from autopallas.kernels.recurrence.block_sizes import BlockSizes as ChunkSizes
from autopallas.kernels.recurrence.cases import retention
from autopallas.patterns import Match
from autopallas.sites.index_notation import Operand, read
from autopallas.tuning.entry import parse
from autopallas.tuning.measure import Failure, Measurement, Timing

pytestmark = pytest.mark.usefixtures("compiled_once")

FIRST = BlockSizes(200, 200)
ONLY_THE_FIRST = classmethod(lambda cls, spec: ())
CANDIDATES = [BlockSizes(*pair) for pair in ((200, 200), (128, 200), (128, 128))]


def searched(match: Match, seconds: float = 60.0, **options):
    entry = search(match, "xla", key_for(match), FIRST, seconds, **options)
    assert parse(entry.to_json(), key_for(match)).outcome == entry.outcome, "what was found can be kept"
    return entry


def planted(monkeypatch, name: str, faults):
    """Spoils a kernel function for some block sizes: ``faults`` maps these to a function of its results."""
    genuine = getattr(xla, name)

    def kernel(spec, block_sizes, *arguments, **more):
        results = genuine(spec, block_sizes, *arguments, **more)
        fault = faults.get(block_sizes)
        return results if fault is None else fault(*results)

    monkeypatch.setattr(xla, name, kernel)


def watched(monkeypatch):
    """The candidates that are compiled."""
    tried = []
    genuine = module._Search._screened

    def screened(self, sizes, *rest):
        tried.append(sizes)
        return genuine(self, sizes, *rest)

    monkeypatch.setattr(module._Search, "_screened", screened)
    return tried


@pytest.fixture
def timings(monkeypatch):
    """Times that are given by name in the race, instead of measured; what is right is still compared."""
    given = {}
    genuine = module.measure

    def measure(candidates, *arguments, **options):
        if ORIGINAL not in candidates:
            return genuine(candidates, *arguments, **options)
        bytes_of = given.get("bytes", {})
        found = {
            name: Timing(wall=given.get(name, (1.0, 1.0, 1.0)), temporary_bytes=bytes_of.get(name, 64))
            for name in candidates
        }
        return Measurement(found, ORIGINAL)

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "_CLOSE", 1e9)
    return given


# --- what is chosen --------------------------------------------------------------------------------------------------


def test_a_search_finds_block_sizes_with_what_they_and_the_original_cost():
    entry = searched(match_of(attend, *qkv()))
    assert entry.outcome == "tuned"
    assert entry.sizes_for(BlockSizes) in CANDIDATES
    assert entry.row.kernel_us > 0
    assert entry.row.original_us > 0
    assert entry.row.evidence == "measured"
    assert entry.rejected == ()


def test_the_fastest_and_steadiest_candidate_is_chosen(timings):
    for sizes in CANDIDATES:
        timings[str(sizes)] = (3.0, 3.0, 3.0)
    timings[str(CANDIDATES[0])] = (1.0, 1.0, 9.0)
    timings[str(CANDIDATES[1])] = (2.0, 2.0, 2.0)
    timings[ORIGINAL] = (8.0, 8.0, 8.0)
    entry = searched(match_of(attend, *qkv()))
    assert entry.sizes_for(BlockSizes) == CANDIDATES[1]
    assert entry.row.original_us / entry.row.kernel_us == pytest.approx(4.0, rel=1e-3)


def test_one_result_serves_both_objectives(timings, user_cache):
    """The fastest, and the one of least memory that is not too slow, are kept; each objective gets its own."""
    fast, lean, slow = map(str, CANDIDATES)
    timings |= {fast: (1.0,) * 3, lean: (2.5,) * 3, slow: (2.7,) * 3, ORIGINAL: (2.0,) * 3}
    timings["bytes"] = {fast: 900, lean: 300, slow: 100, ORIGINAL: 1000}
    match = match_of(attend, *qkv())
    entry = searched(match)
    assert entry.serving("time").sizes_for(BlockSizes) == CANDIDATES[0]
    assert entry.serving("memory").sizes_for(BlockSizes) == CANDIDATES[1], "1.35 times as slow is too slow"
    assert entry.serving("memory").row.kernel_bytes == 300
    user_cache.put(entry)
    for objective, wanted in (("time", CANDIDATES[0]), ("memory", CANDIDATES[1])):
        optimized = autopallas.optimize(attend, objective=objective, strict=True)
        optimized.lower(*qkv())
        (site,) = optimized.report().sites
        assert (site.verdict, site.block_sizes_from, site.block_sizes) == ("applied", "cache", wanted.to_dict())


def test_the_candidate_of_least_memory_is_in_the_race_though_others_are_faster(monkeypatch):
    monkeypatch.setattr(module, "_FINALISTS", 1)

    def works(seconds, temporary_bytes):
        return module._Works(None, Timing(wall=(seconds,), temporary_bytes=temporary_bytes))

    every = {
        CANDIDATES[0]: works(1.0, 900),
        CANDIDATES[1]: works(1.2, 300),
        CANDIDATES[2]: works(9.0, 100),
    }
    search = module._Search(match_of(attend, *qkv()), "xla", 1e3, lambda: 0.0, print)
    assert search._finalists(every, original_seconds=1.0) == CANDIDATES[:2]


def test_searches_for_a_site_share_what_its_candidates_are_compared_with(monkeypatch):
    made = []
    for name in ("original", "kernel"):
        function = getattr(Trial, name)
        monkeypatch.setattr(Trial, name, lambda self, *a, f=function, n=name: made.append((n, *a[:1])) or f(self, *a))
    match, yardstick = match_of(attend, *qkv()), module.Yardstick()
    for name in ("xla", "xla_heads"):
        entry = search(match, name, key_for(match, name), FIRST, 60.0, yardstick=yardstick)
        assert entry.outcome in ("tuned", "failed"), entry.reason
    assert made.count(("original",)) == made.count(("kernel", "reference")) + made.count(("kernel", "oracle")) == 1
    assert yardstick.problem == ""


@pytest.fixture
def runs(monkeypatch):
    """The runs of the original."""
    calls = []
    original = Trial.original

    def counted(self):
        function = original(self)

        def run(*arguments):
            jax.debug.callback(lambda: calls.append(1))
            return function(*arguments)

        return run

    monkeypatch.setattr(Trial, "original", counted)
    return calls


def test_a_long_original_is_run_few_times_by_a_quick_search(monkeypatch, runs):
    """Once for its result, once timed, and then only in turns with the candidate."""
    monkeypatch.setattr(module, "_LONG_SECONDS", 0.0)
    rounds, measure = [], module.measure

    def watched(candidates, *arguments, **options):
        found = measure(candidates, *arguments, **options)
        rounds.extend(found[ORIGINAL].wall if ORIGINAL in candidates else ())
        return found

    monkeypatch.setattr(module, "measure", watched)
    match = match_of(attend, *qkv())
    entry = search(match, "xla", key_for(match), FIRST, 60.0, quick=True)
    jax.effects_barrier()
    assert (entry.outcome, entry.row.evidence) == ("tuned", "quickly measured")
    assert len(runs) == 2 + len(rounds)


@pytest.mark.parametrize("fault", [None, lambda o, *more: (o + 1, *more), lambda o, *more: (o * jnp.nan, *more)])
def test_an_original_that_fills_the_budget_runs_once_beside_one_candidate(monkeypatch, runs, fault):
    """And what it gives is still compared."""
    monkeypatch.setattr(module, "_LONG_SECONDS", 0.0)
    planted(monkeypatch, "forward", {FIRST: fault})
    compiled = watched(monkeypatch)
    match = match_of(attend, *qkv())
    entry = search(match, "xla", key_for(match), FIRST, 1e-9, quick=True)
    jax.effects_barrier()
    assert (len(runs), compiled) == (1, [FIRST])
    if fault is None:
        assert (entry.outcome, entry.row.evidence) == ("tuned", "quickly measured")
        assert entry.row.kernel_bytes > 0
        assert entry.row.original_bytes > 0
    else:
        assert (entry.outcome, entry.row) == ("unfinished", None)  # another candidate is left
        assert [r.stage for r in entry.rejected] == ["compare"]


def test_a_quick_search_without_time_for_turns_counts_less_of_the_gain(monkeypatch):
    monkeypatch.setattr(module, "_LONG_SECONDS", 0.0)
    monkeypatch.setattr(module._Search, "_finalists", lambda self, works, original_seconds: [])
    rows = []
    make = module._row
    monkeypatch.setattr(module, "_row", lambda *a: rows.append((make(*a[:-1]), make(*a))) or rows[-1][1])
    match = match_of(attend, *qkv())
    entry = search(match, "xla", key_for(match), FIRST, 60.0, quick=True)
    ((whole, counted),) = rows
    assert counted.speedup == pytest.approx(module._SINGLE_RUN_SHARE * whole.speedup, rel=1e-2)
    assert entry.row.original_us == counted.original_us


def test_every_candidate_is_told_how_far_it_came(monkeypatch, timings):
    planted(monkeypatch, "forward", {CANDIDATES[0]: fails_at_lowering})
    estimate = BlockSizes.temporary_bytes
    monkeypatch.setattr(
        BlockSizes, "temporary_bytes", lambda self, *a: 2**60 if self == CANDIDATES[1] else estimate(self, *a)
    )
    told = []
    searched(match_of(attend, *qkv()), observe=told.extend)
    assert [dict(one.block_sizes) for one in told] == [sizes.to_dict() for sizes in CANDIDATES]
    assert [one.stage for one in told] == ["lower", "memory", ""]
    assert "no such layout" in told[0].error
    assert told[2].row is not None
    assert told[2].difference < 1e-2


@pytest.mark.parametrize(
    ("original", "verdict"),
    [((2.0, 2.0, 2.0), "applied"), ((0.5, 0.5, 0.5), "kept"), ((1.01, 1.01, 1.01), "kept")],
    ids=["kernel is faster", "original is faster", "spread hides the gain"],
)
def test_the_original_is_a_candidate(timings, original, verdict):
    for sizes in CANDIDATES:
        timings[str(sizes)] = (1.0, 1.0, 1.2)
    timings[ORIGINAL] = original
    optimized = autopallas.optimize(attend, autotune=True, strict=True)
    optimized.lower(*qkv())
    (site,) = optimized.report().sites
    assert (site.verdict, site.block_sizes_from) == (verdict, "autotune")


# --- what is never chosen --------------------------------------------------------------------------------------------


def test_a_wrong_candidate_is_never_chosen_and_is_remembered(monkeypatch, timings):
    wrong = CANDIDATES[:2]
    planted(monkeypatch, "forward", {sizes: lambda out, *numbers: (out * 1.05, *numbers) for sizes in wrong})
    timings |= {str(sizes): (0.1, 0.1, 0.1) for sizes in wrong}
    entry = searched(match_of(attend, *qkv()))
    assert entry.sizes_for(BlockSizes) == CANDIDATES[2]
    assert [dict(r.block_sizes) for r in entry.rejected] == [sizes.to_dict() for sizes in wrong]
    assert {r.stage for r in entry.rejected} == {"compare"}


def test_a_candidate_whose_gradient_is_wrong_is_never_chosen(monkeypatch, timings):
    wrong = CANDIDATES[:2]
    planted(monkeypatch, "backward", {sizes: lambda dq, *rest: (dq * 1.1, *rest) for sizes in wrong})
    entry = searched(match_of(gradient, *qkv(dtype="bfloat16")))
    assert entry.key["direction"] == "forward+backward"
    assert entry.sizes_for(BlockSizes) == CANDIDATES[2]
    assert {r.stage for r in entry.rejected} == {"compare"}


def test_a_value_that_is_used_several_times_has_one_gradient(monkeypatch):
    """A fast variance reads x three times, each with a cotangent of its own; the kernel writes their sum to one."""

    def norm(x, scale, shift):
        mean = jnp.mean(x, -1, keepdims=True)
        variance = jnp.maximum(0.0, jnp.mean(lax.square(x), -1, keepdims=True) - lax.square(mean))
        return (x - mean) * (lax.rsqrt(variance + 1e-5) * scale) + shift

    def step(x, scale, shift, cotangent):
        out, pull = jax.vjp(norm, x, scale, shift)
        return out, pull(cotangent)

    numbers = jnp.ones((16, 32))
    match = match_of(step, numbers, numbers[0], numbers[0], numbers)
    assert len(set(match.site.uses)) < len(match.site.uses)
    trial = Trial.of(match)
    found, original = (f(*trial.arguments) for f in (trial.kernel("xla", None), trial.original()))
    assert len(found) == len(original) == 4  # the result, and three gradients
    for one, other in zip(found, original, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)  # a sum over 16 rows in float32


def test_one_array_stands_for_two_uses_that_the_original_reads_at_one_place():
    def loss(z):  # rows and columns of the logits are one slice
        first = z[:32]
        return jnp.mean(jax.nn.logsumexp(first @ first.T, 1))

    match = match_of(jax.grad(loss), jnp.zeros((64, 16)))
    assert match.operands[0] == match.operands[1]
    trial = Trial.of(match)
    original, kernel = (
        [np.asarray(x) for x in run(*trial.arguments)]
        for run in (trial.original(), trial.kernel("xla", LossBlockSizes(32, 32)))
    )
    assert len(original) == len(kernel)
    for expected, found in zip(original, kernel, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())  # sums over 32 rows


def rounding_loop():
    def loss(*arrays):
        return jnp.sum(retention(*arrays).astype(jnp.float32) ** 2)

    random = np.random.default_rng(0)
    shapes = [(384, 1, 2, 16)] * 3 + [(384, 1, 2)]
    arrays = [jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    return match_of(jax.grad(loss, (0, 1, 2, 3)), *arrays), ChunkSizes("chunked", "chunked", 32)


def test_a_loop_that_rounds_each_step_to_few_bits_does_not_tell_what_is_right():
    match, chunks = rounding_loop()
    assert Trial.of(match).adds_up_roundings
    entry = search(match, "xla", key_for(match), chunks, 60.0)
    assert "compare" not in [r.stage for r in entry.rejected]
    assert entry.outcome == "tuned"


@pytest.mark.parametrize("quick, reason", [(True, "than a quick search has"), (False, "in float64 needs about")])
def test_float64_is_left_out_where_time_or_memory_are_short(monkeypatch, quick, reason):
    match, chunks = rounding_loop()
    monkeypatch.setattr(module, "Oracle", None)
    monkeypatch.setattr(module, "free_bytes", lambda: None if quick else 1_000_000)
    entry = search(match, "xla", key_for(match), chunks, 60.0, quick=quick)
    assert entry.outcome == "unfinished"
    assert reason in entry.reason


def test_a_loop_in_float32_tells_what_is_right():
    match = match_of(lambda *arrays: retention(*arrays), *(jnp.ones((64, 1, 2, 16)),) * 3, jnp.ones((64, 1, 2)))
    assert not Trial.of(match).adds_up_roundings


def test_nan_is_wrong(monkeypatch):
    planted(monkeypatch, "forward", {sizes: lambda out, *numbers: (out * jnp.nan, *numbers) for sizes in CANDIDATES})
    assert searched(match_of(attend, *qkv())).outcome == "failed"


def test_what_was_wrong_is_not_tried_again(monkeypatch):
    planted(monkeypatch, "forward", {sizes: lambda out, *numbers: (out * 2, *numbers) for sizes in CANDIDATES[:2]})
    match = match_of(attend, *qkv())
    first = searched(match)
    monkeypatch.undo()
    tried = watched(monkeypatch)
    again = searched(match, known=first)
    assert tried == CANDIDATES[2:]
    assert len(again.rejected) == 2


def fails_at_lowering(out, *numbers):
    raise NotImplementedError("no such layout")


def fails_at_compiling(out, *numbers):
    return jax.ffi.ffi_call("autopallas_no_such_target", jax.ShapeDtypeStruct(out.shape, out.dtype))(out), *numbers


def fails_at_running(out, *numbers):
    def broken(x):
        raise ValueError("illegal address")

    return jax.pure_callback(broken, jax.ShapeDtypeStruct(out.shape, out.dtype), out), *numbers


def needs_memory(out, *numbers):
    return out + jnp.sort(jnp.sin(jnp.arange(50_000_000, dtype=jnp.float32)))[0].astype(out.dtype) * 0, *numbers


@pytest.mark.parametrize(
    ("fault", "stage"),
    [
        (fails_at_lowering, "lower"),
        (fails_at_compiling, "compile"),
        (fails_at_running, "run"),
        (needs_memory, "memory"),
    ],
)
def test_a_candidate_that_fails_leaves_the_others_in_the_race(monkeypatch, fault, stage):
    planted(monkeypatch, "forward", dict.fromkeys(CANDIDATES[:2], fault))
    monkeypatch.setattr(module, "free_bytes", lambda: 150_000_000)
    entry = searched(match_of(attend, *qkv()))
    assert entry.outcome == "tuned"
    assert entry.sizes_for(BlockSizes) in CANDIDATES[2:]
    assert [r.stage for r in entry.rejected] == [stage] * 2


@pytest.mark.parametrize(("fault", "outcome"), [(fails_at_lowering, "failed"), (needs_memory, "unfinished")])
def test_where_all_candidates_fail_the_original_stays_and_the_failure_is_remembered(
    monkeypatch, user_cache, fault, outcome
):
    planted(monkeypatch, "forward", dict.fromkeys(CANDIDATES, fault))
    monkeypatch.setattr(module, "free_bytes", lambda: 150_000_000)
    optimized = autopallas.optimize(attend, autotune=True, strict=True)
    result = optimized(*qkv())
    np.testing.assert_array_equal(result, jax.jit(attend)(*qkv()))
    assert optimized.report().sites[0].verdict == "kept"
    (entry,) = user_cache.entries()
    assert entry.outcome == outcome
    optimized.clear_cache()
    optimized(*qkv())
    assert optimized.report().tuning == {"searches": 0, "cache_hits": 1}


def test_a_device_that_breaks_is_no_failure_of_the_kernels(monkeypatch):
    genuine, broken = module.measure, []

    def measure(*arguments, **options):
        if broken:
            return Measurement({"it": Timing(failure=Failure("run", "the device is lost"))})
        broken.append(True)
        return genuine(*arguments, **options)

    monkeypatch.setattr(module, "measure", measure)
    entry = searched(match_of(attend, *qkv()))
    assert entry.outcome == "unfinished"
    assert "device is lost" in entry.reason


def test_nothing_is_run_that_free_memory_cannot_hold(monkeypatch):
    ran = []
    monkeypatch.setattr(module, "measure", lambda *a, **k: ran.append(a))
    monkeypatch.setattr(module, "free_bytes", lambda: 100_000)
    entry = searched(match_of(attend, *qkv()))
    assert entry.outcome == "unfinished"
    monkeypatch.setattr(module, "free_bytes", lambda: 400_000)  # inputs and results fit, the scores do not
    assert "free" in searched(match_of(attend, *qkv(300))).reason
    assert not ran


def test_a_quick_search_runs_no_original_that_free_memory_cannot_hold(monkeypatch):
    ran = []
    monkeypatch.setattr(module._Search, "_once", lambda *a, **k: ran.append(a))
    match = match_of(attend, *qkv(1024))
    free = Trial.bytes_needed(match) + 3_000_000  # candidates fit, the scores do not
    monkeypatch.setattr(module, "free_bytes", lambda: free)
    entry = searched(match, quick=True)
    assert entry.outcome == "unfinished"
    assert f"{free} are free" in entry.reason
    assert not ran


def test_candidates_are_pruned_by_the_estimate(monkeypatch):
    big = CANDIDATES[0]
    estimate = BlockSizes.temporary_bytes
    monkeypatch.setattr(BlockSizes, "temporary_bytes", lambda self, *a: 2**60 if self == big else estimate(self, *a))
    tried = []
    monkeypatch.setattr(module._Search, "run", lambda self, candidates: tried.extend(candidates) or (None, None, "no"))
    searched(match_of(attend, *qkv()))
    assert tried == CANDIDATES[1:]


# --- the budget ------------------------------------------------------------------------------------------------------


def test_no_candidate_is_begun_after_the_budget(monkeypatch):
    ticks = itertools.count(0.0, 1.0)  # a second passes whenever one looks
    tried = watched(monkeypatch)
    entry = searched(match_of(attend, *qkv()), seconds=5.0, clock=lambda: next(ticks))
    assert 0 < len(tried) < len(CANDIDATES)
    assert entry.outcome in ("tuned", "unfinished")


def test_a_budget_that_is_used_up_at_once_gives_no_result_and_no_failure():
    ticks = itertools.count(0.0, 100.0)
    entry = searched(match_of(attend, *qkv()), seconds=30.0, clock=lambda: next(ticks))
    assert entry.outcome == "unfinished"
    assert "budget of 30 seconds" in entry.reason


def test_what_cannot_be_timed_within_the_budget_is_not(monkeypatch):
    genuine = module.measure

    def slow(candidates, *arguments, **options):
        assert ORIGINAL not in candidates, "no race"
        timing = genuine(candidates, *arguments, **options)["it"]
        return Measurement({"it": Timing(wall=(20.0,), differences=timing.differences)})

    monkeypatch.setattr(module, "measure", slow)
    entry = searched(match_of(attend, *qkv()), seconds=60.0)
    assert (entry.outcome, entry.rejected) == ("unfinished", ())


# --- inputs ----------------------------------------------------------------------------------------------------------


def fused(x, bias, lengths):
    """One array with queries, keys and values, a bias, and lengths."""
    q, k, v = x[..., :64], x[..., 64:128], x[..., 128:]
    scores = jnp.einsum("btnd,bsnd->bnts", q, k) / 8 + bias
    shown = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(jnp.where(shown[:, None, None], scores, -1e9), -1), v)


def test_example_inputs_are_read_back_by_the_site_as_they_were_given():
    operands = (jnp.zeros((2, 40, 3, 192)), jnp.zeros((3, 40, 40)), jnp.zeros(2, jnp.int32))
    match = match_of(fused, *operands)
    site, types = match.site, match.original.in_avals
    arrays = attention_example.operands(site, types)
    assert [(a.shape, a.dtype) for a in arrays] == [(t.shape, t.dtype) for t in types]
    query, key, value, sides, _ = attention_example.example(site.spec)
    b, k, g, t, s = site.axes
    for source, groups, wanted in (
        (site.query, (b, k, g, t, site.head_labels), query),
        (site.key, (b, k, s, site.head_labels), key),
        (site.value, (b, k, s, site.value_labels), value),
        *((source, site.axes, side) for source, side in zip(site.sides, sides, strict=True)),
    ):
        if isinstance(source, Operand):
            np.testing.assert_array_equal(read(source, arrays, site.sizes, groups), wanted)
    assert any(a.dtype == np.int32 and set(a.ravel()) == {30} for a in arrays), "three quarters of the keys are real"


def loss(x, w, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], 1).mean()


def test_example_labels_are_in_the_vocabulary():
    match = match_of(loss, jnp.zeros((40, 16)), jnp.zeros((16, 300)), jnp.zeros(40, jnp.int32))
    arrays = [np.asarray(x) for x in Trial.of(match).arguments[0][0]]
    (labels,) = (a for a in arrays if a.dtype == np.int32)
    assert len(set(labels.ravel())) > 10
    assert labels.min() >= 0
    assert labels.max() < 300
    assert all(np.isfinite(a).all() for a in arrays)


def test_example_group_sizes_add_up_and_differ():
    def experts(lhs, rhs, sizes):
        return jax.lax.ragged_dot(lhs, rhs, sizes)

    match = match_of(experts, jnp.zeros((64, 16)), jnp.zeros((4, 16, 8)), jnp.zeros(4, jnp.int32))
    (sizes,) = (np.asarray(x) for x in Trial.of(match).arguments[0][0] if x.dtype == jnp.int32)
    assert sizes.sum() == 64
    assert len(set(sizes.ravel())) > 1


def test_example_segments_are_in_order_and_several():
    def packed(q, k, v, segments):
        same = segments[:, None] == segments[None, :]
        return jax.nn.softmax(jnp.where(same, q @ k.T / 8, -1e30)) @ v

    match = match_of(packed, *qkv(40, "float32"), jnp.zeros(40, jnp.int32))
    segments = [np.asarray(x) for x in Trial.of(match).arguments[0][0] if x.dtype == jnp.int32]
    assert segments
    for ids in segments:
        assert (np.diff(ids) >= 0).all()
        assert len(set(ids)) > 1


def test_the_passes_of_a_loss_and_its_gradient_are_searched_together(monkeypatch):
    monkeypatch.setattr(LossBlockSizes, "candidates", ONLY_THE_FIRST)
    step = jax.value_and_grad(loss, argnums=(0, 1))
    match = match_of(step, jnp.zeros((40, 16)), jnp.zeros((16, 3000)), jnp.zeros(40, jnp.int32))
    entry = search(match, "xla", key_for(match), LossBlockSizes(40, 3000), 60.0)
    assert entry.outcome == "tuned"
    assert entry.key["direction"] == "forward+backward"
    kinds = {product["kind"] for spec in entry.key["specs"] for product in spec["products"]}
    assert kinds == {"rows", "columns"}, "the gradients were computed"


# --- where it works --------------------------------------------------------------------------------------------------


def layers(q, k, v):
    return jax.lax.scan(lambda x, _: (attend_all(x, k, v).astype(x.dtype), None), q, None, length=2)[0]


def sharded(f):
    """The same inside shard_map, on the one device there is."""
    mesh, everywhere = jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec()
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=everywhere, out_specs=everywhere))


USES = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda q, k, v: jnp.sum(f(q, k, v).astype(jnp.float32))),
    "vmap": lambda f: lambda *a: jax.vmap(f)(*(jnp.stack([x, x]) for x in a)),
    "scan": lambda f: lambda q, k, v: jax.lax.scan(lambda x, _: (f(x, k, v), None), q, None, length=2)[0],
    "shard_map": sharded,
}


@pytest.mark.parametrize(("use", "function"), [*((use, attend_all) for use in USES), ("jit", layers)])
def test_a_search_works_while_jax_is_tracing(use, function, monkeypatch):
    monkeypatch.setattr(BlockSizes, "candidates", ONLY_THE_FIRST)
    operands = qkv(40)
    optimized = autopallas.optimize(function, autotune=True, objective="always", strict=True)
    found = USES[use](optimized)(*operands)
    wanted = USES[use](function)(*operands)
    np.testing.assert_allclose(np.float32(found), np.float32(wanted), atol=1e-2)
    (site,) = optimized.report().sites
    assert site.block_sizes_from in ("autotune", "cache")
    assert optimized.report().tuning["searches"] + optimized.report().tuning["cache_hits"] == 1


def test_a_search_works_in_another_thread(monkeypatch):
    monkeypatch.setattr(BlockSizes, "candidates", ONLY_THE_FIRST)
    reports = []

    def work():
        optimized = autopallas.optimize(attend_all, autotune=True, strict=True)
        jax.block_until_ready(optimized(*qkv(40)))
        reports.append(optimized.report())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert reports[0].tuning["searches"] == 1
    assert reports[0].sites[0].block_sizes_from == "autotune"


def test_a_search_has_the_numeric_setting_of_the_caller(monkeypatch):
    monkeypatch.setattr(BlockSizes, "candidates", ONLY_THE_FIRST)
    with jax.enable_x64(True):
        operands = tuple(jnp.asarray(np.asarray(x), jnp.float64) for x in qkv(40, "float32"))
        optimized = autopallas.optimize(attend_all, autotune=True, strict=True)
        optimized(*operands)
        assert optimized.report().sites[0].block_sizes_from == "autotune"


# --- progress --------------------------------------------------------------------------------------------------------


def test_progress_is_shown_on_a_terminal_and_nowhere_else(monkeypatch, capsys):
    monkeypatch.setattr(module._Search, "run", lambda self, candidates: self.say("candidate 1") or (None, None, "no"))
    searched(match_of(attend, *qkv()))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("autopallas.progress._bars", lambda: None)  # as without rich
    searched(match_of(attend, *qkv()))
    shown = capsys.readouterr().err
    assert "tuning attention: candidate 1" in shown
    assert shown.endswith("\x1b[K"), "the line is gone afterwards"
