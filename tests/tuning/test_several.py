"""Which of several implementations of a site is taken: the best by evidence, whatever the platform's order."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from places import CPU, attend, key_for, match_of, qkv

import autopallas
from autopallas.autotune import tuner as module
from autopallas.errors import AutopallasWarning
from autopallas.kernels.attention import reference, tuned_block_sizes, xla
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.operation import OPERATION
from autopallas.sites.operation import Unsupported
from autopallas.tuning import processor
from autopallas.tuning.entry import Entry
from autopallas.tuning.row import running_jax
from autopallas.tuning.table import Row
from autopallas.workbench import tune

SIZES = BlockSizes(64, 64)


@pytest.fixture(autouse=True)
def two(monkeypatch):
    """A CPU with two implementations, the vector extensions of planted rows, and tables that know nothing of them."""
    monkeypatch.setattr(processor, "vector_extensions", lambda: "avx2")
    monkeypatch.setitem(OPERATION.order, "cpu", ("xla", "reference"))
    monkeypatch.setattr(tuned_block_sizes.TABLE, "rows", {})


def row(speed=2.0, memory=2.0, evidence="measured"):
    """A kernel that is ``speed`` times as fast as the original, which needs ``memory`` times its memory."""
    return Row(SIZES, 100.0, 100.0 * speed, 1000, int(1000 * memory), evidence, "2026-11-21", running_jax())


def result(match, name, found):
    """What a search of the past found."""
    sizes = SIZES.to_dict()
    return Entry(key_for(match, name).description, "tuned", sizes, replace(found, block_sizes=sizes), seconds=30.0)


@pytest.fixture
def plant(monkeypatch):
    """``plant(xla=row, reference=row)`` puts rows of the site into the table."""

    def planted(**rows):
        spec = match_of(attend, *qkv()).spec
        keys = {tuned_block_sizes.table_key(spec, name, "forward"): found for name, found in rows.items()}
        monkeypatch.setattr(tuned_block_sizes.TABLE, "rows", {"cpu": keys})

    return planted


@pytest.fixture
def searches(monkeypatch):
    """(name, seconds) of each search that is begun; the reference is found to be the faster one."""
    begun = []

    def search(match, implementation, key, first, seconds, known, quick, yardstick):
        begun.append((implementation, seconds))
        return result(match, implementation, row({"xla": 2.0, "reference": 3.0}[implementation]))

    monkeypatch.setattr(module, "search", search)
    return begun


def site_of(**options):
    optimized = autopallas.optimize(attend, **options)
    optimized.trace(*qkv())
    (site,) = optimized.report().sites
    return site


@pytest.mark.parametrize(("first", "second", "wins"), [(2.0, 3.0, "reference"), (3.0, 2.0, "xla"), (2.0, 2.0, "xla")])
def test_the_faster_one_is_taken_and_equal_ones_in_the_platforms_order(plant, first, second, wins):
    plant(xla=row(first), reference=row(second))
    site = site_of()
    assert (site.verdict, site.implementation, site.measured["original_us"]) == (
        "applied",
        wins,
        max(first, second) * 100,
    )


def test_times_count_relative_to_the_original_that_they_were_measured_beside(plant):
    slow_day = replace(row(), kernel_us=300.0, original_us=900.0)
    plant(xla=row(2.0), reference=slow_day)
    assert site_of().implementation == "reference"


def test_under_memory_the_leaner_one_is_taken_unless_it_is_too_slow(plant):
    plant(xla=row(3.0, memory=2.0), reference=row(1.0, memory=4.0))
    assert site_of().implementation == "xla"
    assert site_of(objective="memory").implementation == "reference"
    plant(xla=row(3.0, memory=2.0), reference=row(0.5, memory=4.0))
    assert site_of(objective="memory").implementation == "xla"


def test_the_cache_and_the_table_count_alike(plant, user_cache):
    plant(xla=row(2.0))
    user_cache.put(result(match_of(attend, *qkv()), "reference", row(2.5)))
    site = site_of()
    assert (site.implementation, site.block_sizes_from) == ("reference", "cache")


@pytest.mark.parametrize("objective", ["time", "memory", "always"])
def test_one_with_evidence_comes_before_one_without(plant, objective):
    plant(reference=row(1.5))
    site = site_of(objective=objective)
    assert (site.verdict, site.implementation) == ("applied", "reference")


def test_an_estimate_and_a_neighbours_row_are_no_evidence(plant):
    plant(xla=row(9.0, evidence="estimated"), reference=row(1.5))
    assert site_of().implementation == "reference"
    plant(xla=row(9.0, evidence="estimated"))
    site = site_of()
    assert (site.verdict, site.implementation) == ("kept", "xla")
    assert "only an estimate" in site.reason


def test_what_is_simulated_has_to_gain_more(plant):
    plant(xla=row(2.0, evidence="simulated"), reference=row(1.6))
    assert site_of().implementation == "reference"
    plant(xla=row(2.2, evidence="simulated"), reference=row(1.6))
    assert site_of().implementation == "xla"
    plant(xla=row(1.25, evidence="simulated"), reference=row(0.9))
    assert site_of().verdict == "kept"


def test_without_any_evidence_the_platforms_order_and_the_evidence_rule_hold():
    site = site_of()
    assert (site.verdict, site.implementation) == ("kept", "xla")
    assert "nothing was measured" in site.reason
    assert site_of(objective="always").implementation == "xla"


def test_a_site_without_evidence_says_how_to_measure_it(plant):
    assert "AUTOPALLAS_AUTOTUNE=1 measures it" in site_of().reason
    plant(xla=row(9.0, evidence="estimated"))
    assert "AUTOPALLAS_AUTOTUNE=1 measures it" in site_of().reason


def test_where_the_best_loses_to_the_original_that_stays(plant):
    plant(xla=row(0.5), reference=row(0.9))
    site = site_of()
    assert (site.verdict, site.implementation) == ("kept", "reference")


def test_the_report_tells_which_ones_were_considered_and_why_the_first_won(plant):
    assert site_of().reason.endswith("; in the platform's order: xla, reference")
    plant(xla=row(2.0), reference=row(3.0))
    assert site_of().reason.endswith("; in the order of evidence: reference 3.00x, xla 2.00x")
    plant(reference=row(3.0, memory=4.0, evidence="simulated"))
    site = site_of(objective="memory")
    assert site.reason.endswith("; in the order of evidence: reference 0.25x memory (simulated), xla (none)")


def test_where_the_best_fails_the_next_is_taken(plant, monkeypatch):
    plant(xla=row(2.0), reference=row(3.0))

    def broken(*arguments):
        raise RuntimeError("not today")

    monkeypatch.setattr(reference, "forward", broken)
    optimized = autopallas.optimize(attend)
    with pytest.warns(AutopallasWarning, match="not today"):
        result = optimized(*qkv())
    np.testing.assert_allclose(np.float32(result), np.float32(attend(*qkv())), atol=4e-3)
    (site,) = optimized.report().sites
    assert (site.verdict, site.implementation) == ("applied", "xla")
    assert [attempt[:2] for attempt in site.attempts] == [("reference", "trace")]


def test_where_the_next_of_one_that_fails_does_not_gain_the_original_stays(plant, monkeypatch):
    plant(xla=row(0.5), reference=row(3.0))

    def broken(*arguments):
        raise RuntimeError("not today")

    monkeypatch.setattr(reference, "forward", broken)
    with pytest.warns(AutopallasWarning, match="not today"):
        assert site_of().verdict == "kept"


def test_one_that_no_search_could_make_work_or_that_does_not_support_the_site_is_passed_over(
    plant, user_cache, monkeypatch
):
    plant(reference=row(2.0))
    failed = Entry(key_for(match_of(attend, *qkv())).description, "failed", reason="compile: no such instruction")
    user_cache.put(failed)
    site = site_of()
    assert (site.implementation, site.attempts) == ("reference", (("xla", "tune", "compile: no such instruction"),))
    user_cache.clear()
    monkeypatch.setattr(xla, "supports", lambda spec, device: Unsupported("not on Sundays"))
    site = site_of()
    assert (site.implementation, site.attempts) == ("reference", (("xla", "supports", "not on Sundays"),))


@pytest.mark.parametrize("names", [("xla", "reference"), ("reference", "xla"), "xla", "reference"])
def test_what_is_asked_for_by_name_is_tried_in_that_order(plant, names, monkeypatch):
    plant(xla=row(2.0), reference=row(3.0))
    looked_up = []
    genuine = module.of_table
    monkeypatch.setattr(
        module, "of_table", lambda match, name, *rest: looked_up.append(name) or genuine(match, name, *rest)
    )
    wanted = names if isinstance(names, str) else names[0]
    assert site_of(implementation=names).implementation == wanted
    assert looked_up == [wanted], "the others are not looked at"


def test_a_search_covers_all_within_the_seconds_of_one(searches):
    site = site_of(autotune=True, tune_seconds=20.0)
    assert (site.verdict, site.implementation, site.block_sizes_from) == ("applied", "reference", "autotune")
    assert [name for name, _ in searches] == ["xla", "reference"]
    assert searches[0][1] == 10.0
    assert 10.0 <= searches[1][1] <= 20.0, "its part, and what was left over"
    assert site_of(autotune=True, tune_seconds=20.0).block_sizes_from == "cache"
    assert len(searches) == 2


def test_a_search_covers_only_what_has_no_evidence(plant, searches):
    plant(xla=row(4.0))
    assert site_of(autotune=True, tune_seconds=20.0).implementation == "xla"
    assert searches == [("reference", 20.0)]


def test_a_search_that_takes_too_long_leaves_the_next_its_part(searches, monkeypatch):
    clock = itertools.count(0.0, 100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    site_of(autotune=True, tune_seconds=20.0)
    assert searches == [("xla", 10.0), ("reference", 10.0)]


def test_a_shared_search_that_came_to_nothing_is_not_begun_again(monkeypatch):
    begun = []

    def search(match, implementation, key, first, seconds, known, quick, yardstick):
        begun.append((implementation, seconds))
        return Entry(key.description, "unfinished", reason="too slow", seconds=seconds)

    monkeypatch.setattr(module, "search", search)
    for _ in range(2):
        assert "too slow" in site_of(autotune=True, tune_seconds=20.0).reason
    assert len(begun) == 2
    site_of(autotune=True, tune_seconds=60.0)
    assert len(begun) == 4
    assert site_of(autotune=True, tune_seconds=60.0, implementation="xla").implementation == "xla"
    assert begun[-1] == ("xla", 60.0), "by itself it has all of the seconds"


def test_tuning_ahead_of_time_covers_all_and_shows_the_best(monkeypatch, searches):
    rows = {"xla": row(3.0, memory=2.0), "reference": row(2.0, memory=4.0)}

    def search(match, implementation, key, first, seconds, known, observe, alone):
        return result(match, implementation, rows[implementation])

    monkeypatch.setattr(tune, "search", search)
    subject = tune.Subject(match_of(attend, *qkv()), "here")
    for objective, best in (("time", "xla"), ("memory", "reference")):
        outcome = tune.tune(subject, tune.Target(CPU), 7.0, objective=objective)
        assert outcome.implementation == best
        assert {key[0] for key in outcome.rows("attention")} == {"xla", "reference"}
    assert site_of(autotune=True).implementation == "xla"
    assert site_of(autotune=True, objective="memory").implementation == "reference"
    assert not searches


def test_tuning_ahead_of_time_tells_why_one_was_passed_over(monkeypatch):
    def search(match, implementation, key, first, seconds, known, observe, alone):
        if implementation == "reference":
            return Entry(key.description, "failed", reason="no such instruction")
        return result(match, implementation, row())

    monkeypatch.setattr(tune, "search", search)
    outcome = tune.tune(tune.Subject(match_of(attend, *qkv()), "here"), tune.Target(CPU), 7.0)
    assert outcome.implementation == "xla"
    assert outcome.reasons == ("reference: no such instruction",)
    assert not outcome.others
