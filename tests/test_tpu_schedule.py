"""The comparison of simulated schedules: what is counted, and what is asked of the kernels."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from autopallas.compile.tpu import GENERATIONS, Compilation, Operation
from autopallas.sites.declared import declared_named
from benchmarks import tpu_declared, tpu_memory, tpu_schedule
from benchmarks.tpu_candidates import Candidate, recurrences


def row(candidate, cycles, part=0.7, kernel="grouped_matmul", device="TPU v5e"):
    return {"device": device, "kernel": kernel, "direction": "forward", "candidate": candidate, "cycles": cycles,
            "fraction_of_peak": part, "block_sizes": [8, 128], "failure": None if cycles else "no room"}  # fmt: skip


def holding(*rows):
    return [holds for _, holds in tpu_schedule.verdicts(rows)]


def test_the_best_of_ours_is_compared_with_the_best_of_each_other():
    rows = [row("ours", 200), row("ours", 104), row("megablox", 100), row("megablox", 300), row("matmul", 1)]
    assert holding(*rows) == [True, True]
    assert holding(*rows[:1], *rows[2:]) == [False, True], "twice the cycles of the best"


def test_a_kernel_that_matmuls_bound_must_come_near_their_peak():
    assert holding(row("ours", 100, 0.59)) == [False]
    assert holding(row("ours", 100, 0.59, "attention")) == [False]
    assert holding(row("ours", 100, 0.3, "attention", "TPU v6e")) == []


def test_what_skips_its_work_says_nothing_and_what_fails_is_not_passed_over():
    assert holding(row("ours", 100), row("megablox", 10, part=1.9)) == [True]
    assert holding(row("ours", None)) == [False]


def test_cycles_are_those_of_the_kernels_or_of_everything_where_there_are_none():
    operations = (
        Operation("a_rows.1", True, 8, 1000, 1),
        Operation("b.1", True, 8, 50, 2),
        Operation("c", False, 0, 7, 1),
    )
    found = Compilation(GENERATIONS["tpu-v5e"], operations=operations)
    assert tpu_schedule._simulated(found, "rows", 10)["cycles"] == 1000
    assert tpu_schedule._simulated(found, "", 10)["cycles"] == 1100
    plain = Compilation(GENERATIONS["tpu-v5e"], operations=operations[2:])
    assert tpu_schedule._simulated(plain, "", 65666 * 7)["cycles"] == 7


@pytest.mark.skipif(importlib.util.find_spec("jax.experimental.pallas.ops") is None, reason="JAX has no TPU kernels")
def test_every_operation_has_candidates_of_ours_and_of_others():
    of_jax = {"attention": {"flash_attention", "splash_attention"}, "grouped_matmul": {"megablox"}}
    for operation in ("attention", "grouped_matmul", "cross_entropy"):
        found = list(tpu_schedule.candidates([operation]))
        assert all(isinstance(c, Candidate) for c in found)
        assert {c.name for c in found} == {"ours", "matmul"} | of_jax.get(operation, set())


def test_declared_operations_are_compared_with_xla_where_they_are_used():
    """Everything counts, and no verdict hangs on it: whether a kernel is used is for rows to decide."""
    for operation in tpu_declared.operations():
        found = list(tpu_declared.candidates(operation))
        names = ["ours", "xla"] + [tpu_declared.WITH_THE_SUM] * bool(declared_named(operation).further)
        assert [(c.name, c.direction) for c in found] == [
            (name, direction) for direction in ("forward", "forward+backward") for name in names
        ]
        assert all(c.work["*"] > 0 for c in found)
    fused = Operation("a", True, 8, 1000, 1), Operation("c", False, 0, 7, 1)
    found = Compilation(GENERATIONS["tpu-v5e"], operations=fused)
    assert tpu_schedule._simulated(found, "*", 10)["cycles"] == 1007
    assert holding(row("ours", 200, 0.3, "other"), row("xla", 100, 0.6, "other")) == []


def test_recurrences_are_compared_with_the_loop_and_with_chunks_of_plain_jax():
    for full, names in ((False, ["ours", "xla"]), (True, ["ours", "chunks"] * 2 + ["xla"])):
        found = list(recurrences(512, 2, 32, full))
        assert [c.name for c in found] == names * 2
        assert all(c.work["*"] > 0 for c in found)
    assert holding(row("ours", 200, 0.1, "recurrence"), row("chunks", 100, 0.2, "recurrence")) == []


def test_the_recorded_rows_hold_what_is_asked():
    rows = json.loads(Path(tpu_schedule.RESULTS).read_text())
    assert {r["evidence"] for r in rows} == {"simulated"}
    assert {r["device"] for r in rows} >= {"TPU v5e", "TPU v6e"}
    assert not [text for text, holds in tpu_schedule.verdicts(rows) if not holds]


def test_the_recorded_train_step_needs_a_tenth_of_the_memory():
    rows = json.loads(Path(tpu_memory.RESULTS).read_text())
    assert rows
    assert all(map(tpu_memory.holds, rows))
    assert not tpu_memory.holds({**rows[0], "temporary_bytes": rows[0]["original_bytes"] // 9})
    assert not tpu_memory.holds({**rows[0], "kernels": 0})


def test_the_table_has_the_best_of_each_and_what_failed():
    rows = [row("ours", 200), row("ours", 104), row("megablox", 100), row("matmul", None)]
    _, ours, megablox, failed = tpu_schedule.table(rows)
    assert ours.startswith("TPU v5e")
    assert "104" in ours
    assert megablox.endswith("1.04x")
    assert "matmul" in failed
    assert "not simulated: no room" in failed
