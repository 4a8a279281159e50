"""Where block sizes come from, and in which order."""

from __future__ import annotations

import threading
from dataclasses import replace

import jax
import numpy as np
import pytest
from places import attend, entry_for, gradient, key_for, match_of, qkv

import autopallas
from autopallas.autotune import tuner as module
from autopallas.autotune.tuner import Tuner
from autopallas.errors import AutopallasWarning, UnsupportedError
from autopallas.kernels.attention import xla
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.options import resolve
from autopallas.sites.device import Device
from autopallas.tuning import processor
from autopallas.tuning.coverage import stated
from autopallas.tuning.entry import Entry
from autopallas.tuning.evidence import Evidence
from autopallas.tuning.key import key_of
from autopallas.tuning.row import Row


def traced(function, *operands, **options):
    """(the one site, the report's counters)."""
    optimized = autopallas.optimize(function, strict=True, **options)
    optimized.trace(*operands)
    (site,) = optimized.report().sites
    return site, optimized.report().tuning


@pytest.fixture
def searches(monkeypatch):
    """The searches that are begun; each finds 40 x 48, three times as fast as the original."""
    begun = []

    def search(match, implementation, key, first, seconds, known, quick, yardstick):
        begun.append((match, first, seconds, known))
        entry = entry_for(match, BlockSizes(40, 48))
        row = replace(entry.row, evidence="quickly measured") if quick else entry.row
        return replace(entry, row=stated(row, match, Device.current()))

    monkeypatch.setattr(module, "search", search)
    return begun


# --- the order -------------------------------------------------------------------------------------------------------


def test_the_cache_wins_over_the_table(user_cache, searches):
    operands = qkv(300, "float32")
    site, _ = traced(attend, *operands)
    assert site.block_sizes_from == "table"
    user_cache.put(entry_for(match_of(attend, *operands), BlockSizes(64, 128)))
    site, counts = traced(attend, *operands, autotune=True)
    assert site.block_sizes == {"query_block": 64, "key_block": 128}
    assert site.block_sizes_from == "cache"
    assert site.verdict == "applied"
    assert site.measured["original_us"] == 30.0
    assert counts == {"searches": 0, "cache_hits": 1}


def test_the_tables_exact_row_wins_over_a_search(searches, monkeypatch):
    monkeypatch.setattr(processor, "vector_extensions", lambda: "avx2")  # with which that row was measured
    site, counts = traced(attend, *qkv(300, "float32"), autotune=True)
    assert site.block_sizes_from == "table"
    assert counts == {"searches": 0, "cache_hits": 0}
    assert not searches


def test_a_search_wins_over_the_nearest_row(searches):
    operands = qkv(8, "float32", keys=200)
    site, _ = traced(attend, *operands)
    assert site.block_sizes_from == "nearest"
    assert site.verdict == "kept"
    site, counts = traced(attend, *operands, autotune=True)
    assert site.block_sizes_from == "autotune"
    assert site.block_sizes == {"query_block": 8, "key_block": 48}, "made valid for the shape"
    assert site.verdict == "applied"
    assert counts == {"searches": 1, "cache_hits": 0}


def test_the_default_is_last(searches):
    site, _ = traced(attend, *qkv())
    assert site.block_sizes_from == "default"
    assert site.verdict == "kept"


def test_an_estimated_row_starts_a_search(searches, monkeypatch):
    from autopallas.kernels.attention import tuned_block_sizes

    find = tuned_block_sizes.find

    def estimated(*arguments):
        found = find(*arguments)
        return replace(found, row=replace(found.row, evidence="estimated"))

    monkeypatch.setattr(tuned_block_sizes, "find", estimated)
    operands = qkv(300, "float32")
    assert traced(attend, *operands)[0].verdict == "kept"
    assert traced(attend, *operands, autotune=True)[0].block_sizes_from == "autotune"


def test_a_cached_result_that_says_the_kernel_is_slower_keeps_the_original(user_cache):
    operands = qkv()
    user_cache.put(entry_for(match_of(attend, *operands), BlockSizes(64, 64), kernel_us=30.0, original_us=20.0))
    site, _ = traced(attend, *operands)
    assert (site.verdict, site.block_sizes_from) == ("kept", "cache")


def test_evidence_of_a_site_does_not_license_what_vmap_makes_of_it(user_cache):
    operands = qkv()
    user_cache.put(entry_for(match_of(attend, *operands), BlockSizes(64, 64), kernel_us=10.0, original_us=30.0))
    assert traced(attend, *operands)[0].verdict == "applied"
    several = [np.stack([x, 2 * x, -x]) for x in operands]
    for function in (attend, gradient):
        own = autopallas.optimize(function)
        # Compiled both: a processor with 16-bit arithmetic rounds each equation that is run by itself.
        found, wanted = jax.vmap(own)(*several), jax.jit(jax.vmap(function))(*several)
        assert {site.verdict for site in own.report().sites} == {"kept"}
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, wanted)
    own = autopallas.optimize(attend, objective="always")
    jax.vmap(own)(*several)
    assert own.report().sites[0].verdict == "applied"


@pytest.mark.parametrize(
    ("platform", "asked", "searches"),
    [
        ("cpu", None, False),
        ("gpu", None, True),
        ("tpu", None, True),
        ("cpu", "1", True),
        ("gpu", "0", False),
        ("tpu", "0", False),
    ],
)
def test_searches_are_on_for_accelerators_and_off_for_cpus(monkeypatch, platform, asked, searches):
    if asked is not None:
        monkeypatch.setenv("AUTOPALLAS_AUTOTUNE", asked)
    assert Tuner(Device(platform, "some kind"), resolve({}))._may_search is searches


# --- quick searches --------------------------------------------------------------------------------------------------


@pytest.fixture
def long(monkeypatch):
    """Every original takes long."""
    monkeypatch.setattr(module, "takes_long", lambda match, platform: True)


def test_what_takes_long_on_a_cpu_is_searched_for_quickly_unasked(searches, long, user_cache):
    site, counts = traced(attend, *qkv())
    assert (site.verdict, site.block_sizes_from) == ("applied", "autotune")
    assert site.reason.startswith("quickly measured: 3.00x")
    assert counts == {"searches": 1, "cache_hits": 0}
    assert searches[0][2] == 3.0, "seconds"
    site, counts = traced(attend, *qkv())
    assert (site.verdict, site.block_sizes_from) == ("applied", "cache")
    assert counts == {"searches": 0, "cache_hits": 1}
    site, counts = traced(attend, *qkv(), autotune=True)
    assert counts == {"searches": 1, "cache_hits": 1}, "who asks for a search gets a whole one"
    assert site.reason.startswith("measured: 3.00x")


@pytest.mark.parametrize(
    "options",
    [{"autotune": False}, {"objective": "always"}, {"explain": True}],
    ids=["switched off", "no evidence needed", "explained"],
)
def test_a_quick_search_is_left_out(searches, long, user_cache, options):
    explained = options.pop("explain", False)
    if explained:
        autopallas.explain(attend, *qkv())
    else:
        traced(attend, *qkv(), **options)
    assert not searches


def test_a_quick_search_is_left_out_of_what_takes_no_time(searches, user_cache):
    site, _ = traced(attend, *qkv())
    assert site.verdict == "kept"
    assert not searches


def test_quick_searches_of_one_program_share_ten_seconds(searches, long, user_cache, monkeypatch):
    now = [0.0]

    def monotonic():
        now[0] += 1.5  # two readings around each search
        return now[0]

    monkeypatch.setattr(module.time, "monotonic", monotonic)

    def layers(*heads):
        return [attend(q, k, v) for q, k, v in heads]

    autopallas.optimize(layers, strict=True).trace(*map(qkv, range(8, 80, 8)))
    assert [round(seconds, 1) for _, _, seconds, _ in searches] == [3.0, 3.0, 3.0, 3.0, 3.0, 2.5, 1.0]


@pytest.mark.parametrize(
    ("platform", "budget", "evidence"),
    [("cpu", 3.0, "quickly measured"), ("gpu", 15.0, "quickly measured"), ("tpu", 30.0, "measured")],
)
def test_searches_that_nobody_asked_for_are_quick_on_cpus_and_gpus(
    searches, long, user_cache, monkeypatch, platform, budget, evidence
):
    monkeypatch.setattr(Device, "here", True)
    monkeypatch.setattr(xla, "GAINS_ON", {})
    tuner = Tuner(Device(platform, "some kind"), resolve({}), runs=True)
    choice = tuner.choose(match_of(attend, *qkv(8)), "xla")
    ((_, _, seconds, _),) = searches
    assert seconds == budget
    assert choice.row.evidence == evidence


@pytest.mark.parametrize(
    ("platform", "asked", "seconds"),
    [
        ("tpu", None, [30.0, 29.0, None]),
        ("tpu", True, [30.0, 30.0, 30.0]),
        ("gpu", None, [30.0, None, None]),
        ("gpu", True, [30.0, 30.0, 30.0]),
    ],
)
def test_searches_of_one_program_on_an_accelerator_share_a_time_unless_they_are_asked_for(
    searches, long, user_cache, monkeypatch, platform, asked, seconds
):
    """Each takes longer than its budget, as a step that has begun is not broken off."""
    monkeypatch.setattr(xla, "GAINS_ON", {})
    now = iter(range(0, 1000, 31))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    tuner = Tuner(Device(platform, "some kind"), resolve({"autotune": asked}))
    for length in (8, 16, 24):
        tuner.choose(match_of(attend, *qkv(length)), "xla")
    assert [own[2] for own in searches] == [one for one in seconds if one is not None]


def test_what_takes_no_time_on_an_accelerator_is_not_searched_for(searches, user_cache):
    for asked, count in ((None, 0), (True, 1)):
        Tuner(Device("gpu", "some kind"), resolve({"autotune": asked})).choose(match_of(attend, *qkv()), "xla")
        assert len(searches) == count


def test_small_rewrites_are_searched_for_unasked_on_cpus_alone(searches, long, user_cache):
    """On accelerators a row of the table brings them."""

    def picked(table, labels):
        return jax.nn.one_hot(labels, len(table), dtype=table.dtype) @ table

    match = match_of(picked, np.ones((64, 32), np.float32), np.zeros(16, np.int32), ops=("respelling",))
    assert match.op == "respelling"
    for platform, asked, count in (("gpu", None, 0), ("tpu", None, 0), ("gpu", True, 1)):
        Tuner(Device(platform, "some kind"), resolve({"autotune": asked})).choose(match, "xla")
        assert len(searches) == count


@pytest.mark.parametrize(
    ("microseconds", "gain", "bytes_", "licensed"),
    [
        (6000, 1.2, 5, False),
        (6000, 1.3, 5, True),
        (20000, 1.2, 5, True),
        (20000, 1.1, 5, False),
        (6000, 1.28, 50, False),
    ],
)
def test_what_a_quick_search_found_licenses_by_a_margin(microseconds, gain, bytes_, licensed):
    row = Row(BlockSizes(8, 8), microseconds / gain, microseconds, bytes_, 10, "quickly measured", "2026-11-23", "")
    assert Evidence.of(row, "time").licenses is licensed


def test_processes_that_compile_together_do_not_search(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not Tuner(Device("gpu", "some kind"), resolve({"autotune": True}))._may_search


# --- keys ------------------------------------------------------------------------------------------------------------


def test_lengths_of_one_bucket_share_a_result_and_others_do_not():
    keys = [key_for(match_of(attend, *qkv(n))).digest for n in (129, 200, 256, 257)]
    assert keys[0] == keys[1] == keys[2] != keys[3]


def test_a_key_depends_on_all_that_speed_depends_on(monkeypatch):
    match = match_of(attend, *qkv())
    base = key_for(match).digest
    others = {
        "implementation": key_for(match, "pallas_gpu").digest,
        "direction": key_for(match_of(gradient, *qkv())).digest,
        "dtype": key_for(match_of(attend, *qkv(dtype="bfloat16"))).digest,
        "mask": key_for(match_of(lambda q, k, v: jax.nn.softmax(q @ k.T / 8) @ v, *qkv())).digest,
        "scale": key_for(match_of(lambda q, k, v: jax.nn.softmax(q @ k.T / 4) @ v, *qkv())).digest,
        "kind of device": key_of(match, "xla", Device("cpu", "another")).digest,
        "platform": key_of(match, "xla", Device("gpu", "cpu")).digest,
        "head size": key_for(match_of(attend, *(x[:, :32] for x in qkv()))).digest,
    }
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))):
        others["mesh"] = key_for(match_of(attend, *qkv())).digest
    with jax.default_matmul_precision("highest"):
        others["precision"] = key_for(match).digest
    for name, change in {
        "flags": lambda patch: patch.setenv("XLA_FLAGS", "--xla_something"),
        "versions": lambda patch: patch.setattr("autopallas.compat.versions", lambda: {"jax": "1", "jaxlib": "1"}),
        "processors": lambda patch: patch.setattr("os.cpu_count", lambda: 999),
    }.items():
        with monkeypatch.context() as patch:
            change(patch)
            others[name] = key_for(match).digest
    assert key_for(match).digest == base
    assert len({base, *others.values()}) == len(others) + 1


def test_another_version_of_the_kernels_has_another_key(monkeypatch):
    match = match_of(attend, *qkv())
    base = key_for(match).digest
    monkeypatch.setattr("autopallas.tuning.key.kernel_version", lambda op: "another")
    assert key_for(match).digest != base


# --- when a search is allowed ----------------------------------------------------------------------------------------


def test_on_a_cpu_a_search_has_to_be_asked_for(searches, monkeypatch):
    assert traced(attend, *qkv())[1]["searches"] == 0
    monkeypatch.setenv("AUTOPALLAS_AUTOTUNE", "1")
    assert traced(attend, *qkv(), tune_seconds=7.0)[1]["searches"] == 1
    assert [seconds for _, _, seconds, _ in searches] == [7.0]
    monkeypatch.setenv("AUTOPALLAS_AUTOTUNE", "0")
    assert traced(attend, *qkv(400))[1]["searches"] == 0


def test_explain_runs_nothing(searches):
    autopallas.explain(autopallas.optimize(attend, autotune=True), *qkv())
    with autopallas.options(autotune=True):
        autopallas.explain(attend, *qkv())
    assert not searches


def test_several_processes_neither_search_nor_read_what_the_others_may_not_have(searches, user_cache, monkeypatch):
    operands = qkv()
    user_cache.put(entry_for(match_of(attend, *operands), BlockSizes(64, 64)))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    site, counts = traced(attend, *operands, autotune=True)
    assert site.block_sizes_from == "default"
    assert counts == {"searches": 0, "cache_hits": 0}
    assert not searches


# --- what becomes of a result ----------------------------------------------------------------------------------------


def test_a_second_run_does_not_search(searches):
    assert traced(attend, *qkv(), autotune=True)[1] == {"searches": 1, "cache_hits": 0}
    site, counts = traced(attend, *qkv(), autotune=True)
    assert counts == {"searches": 0, "cache_hits": 1}
    assert site.block_sizes_from == "cache"
    assert len(searches) == 1


def test_equal_sites_share_one_search(searches):
    def three(q, k, v):
        return attend(attend(attend(q, k, v), k, v), k, v)

    optimized = autopallas.optimize(three, autotune=True, strict=True)
    optimized.trace(*qkv())
    assert optimized.report().counts()["attention"] == 3
    assert optimized.report().tuning == {"searches": 1, "cache_hits": 0}


def test_threads_that_want_the_same_share_one_search(searches):
    threads = [threading.Thread(target=traced, args=(attend, *qkv()), kwargs={"autotune": True}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(searches) == 1


def test_an_implementation_that_failed_is_not_used_again_and_the_reason_is_told(user_cache, searches):
    operands = qkv()
    match = match_of(attend, *operands)
    user_cache.put(Entry(key_for(match).description, "failed", reason="compile: no such instruction"))
    site, counts = traced(attend, *operands, autotune=True, objective="always")
    assert site.verdict == "kept"
    assert site.attempts == (("xla", "tune", "compile: no such instruction"),)
    assert counts == {"searches": 0, "cache_hits": 1}
    with pytest.raises(UnsupportedError, match="no such instruction"):
        traced(attend, *operands, implementation="xla")


def test_an_unfinished_search_is_taken_up_again_only_with_more_seconds(user_cache, searches):
    operands = qkv()
    unfinished = Entry(key_for(match_of(attend, *operands)).description, "unfinished", reason="too slow", seconds=10.0)
    user_cache.put(unfinished)
    site, counts = traced(attend, *operands, autotune=True, tune_seconds=10.0)
    assert site.block_sizes_from == "default"
    assert "too slow" in site.reason
    assert counts == {"searches": 0, "cache_hits": 1}
    assert traced(attend, *operands, autotune=True, tune_seconds=11.0)[0].block_sizes_from == "autotune"
    assert searches[0][3] == unfinished


def test_a_search_that_raises_costs_the_search_only(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(module, "search", broken)
    optimized = autopallas.optimize(attend, autotune=True, objective="always")
    with pytest.warns(AutopallasWarning, match="on fire"):
        result = optimized(*qkv())
    np.testing.assert_allclose(np.float32(result), np.float32(attend(*qkv())), atol=4e-3)
    assert optimized.report().sites[0].verdict == "applied"
    with pytest.raises(RuntimeError, match="on fire"):
        traced(attend, *qkv(600), autotune=True)


def test_block_sizes_of_another_operation_in_the_cache_are_ignored(user_cache, searches):
    operands = qkv()
    entry = entry_for(match_of(attend, *operands), BlockSizes(64, 64))
    user_cache.put(replace(entry, block_sizes={"rows_block": 8}))
    with pytest.warns(AutopallasWarning, match="block sizes"):
        site, counts = traced(attend, *operands)
    assert site.block_sizes_from == "default"
    assert counts["cache_hits"] == 0


def test_absurd_block_sizes_in_the_cache_still_give_the_right_result(user_cache):
    operands = qkv()
    user_cache.put(entry_for(match_of(attend, *operands), BlockSizes(2**31 - 1, 1)))
    optimized = autopallas.optimize(attend, strict=True)
    result = optimized(*operands)
    assert optimized.report().sites[0].block_sizes_from == "cache"
    np.testing.assert_allclose(np.float32(result), np.float32(attend(*operands)), atol=4e-3)


def test_the_environment_can_change_the_folder_between_traces(searches, monkeypatch, tmp_path):
    for folder in ("one", "two", "one"):
        monkeypatch.setenv("AUTOPALLAS_CACHE_DIR", str(tmp_path / folder))
        traced(attend, *qkv(), autotune=True)
    assert len(searches) == 2


def test_without_any_result_on_disk_no_key_is_computed(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a key was computed")

    monkeypatch.setattr(module, "key_of", refuse)
    traced(attend, *qkv())
