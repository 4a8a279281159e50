"""The command ``python -m benchmarks gpu --all``: what it calls wrong, what it keeps, and what may hang or die."""

from __future__ import annotations

import json
import tarfile
import threading
import time
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopallas import compat
from autopallas.compile.gpu import H100
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.tuned_block_sizes import TABLE
from autopallas.kernels.gpu import too_few_threads
from autopallas.sites.interpret import mode
from autopallas.sites.operation import operation_named, operation_names
from autopallas.tuning import table_files
from autopallas.tuning.key import kernel_version
from autopallas.workbench.cases import only_match
from benchmarks import cli
from benchmarks.gpu_attention import _named, _spec
from benchmarks.gpu_benchmark import ORIGINAL
from benchmarks.gpu_declared import DECLARED, DeclaredGpuBenchmark
from benchmarks.gpu_session import command, session, worker
from benchmarks.gpu_session.errors import ROW_TOLERANCE, compared, same_bits
from benchmarks.gpu_session.journal import ARCHIVE, JOURNAL, Identity, Journal, read
from benchmarks.gpu_session.session import Plan, Session
from benchmarks.gpu_session.summary import summary, tuned_rows
from benchmarks.gpu_session.tasks import LAST_FIRST, OPERATIONS, of_kernels, tasks

MISSING = compat.missing_mosaic_gpu()
needs_mosaic = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
REASON = MISSING or too_few_threads()
needs_interpreter = pytest.mark.skipif(REASON is not None, reason=str(REASON))
IDENTITY = Identity("abc", "0.11.2", H100.kind)
VERSIONS = {"attention": "1", "grouped_matmul": "1", "cross_entropy": "1"}


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("extra, wrong", [(0, False), (1, True)])
def test_one_key_too_many_is_wrong_where_the_largest_error_says_nothing(extra, wrong):
    random, length = np.random.default_rng(0), 1024
    query, key, value = (random.standard_normal((length, 128), np.float32) for _ in range(3))
    row = np.arange(length)

    def attention(mask):
        scores = np.where(mask, query @ key.T / np.sqrt(128), -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        return jnp.asarray(weights / weights.sum(1, keepdims=True) @ value)

    wanted = attention(row[:, None] >= row)
    found = attention(row[:, None] + extra * (row[:, None] >= 256) >= row)
    errors = compared([found.astype(jnp.bfloat16)], [wanted])
    assert errors.largest <= 4e-2 or errors.total <= 4e-2
    assert (errors.row > ROW_TOLERANCE) is wrong


def test_not_finite_numbers_have_to_be_where_they_are_wanted():
    good = jnp.array([[1.0, jnp.nan], [jnp.inf, 2.0]])
    assert compared([good], [good]).row == 0.0
    assert compared([jnp.array([[1.0, jnp.nan], [-jnp.inf, 2.0]])], [good]).row > 1e20
    assert compared([jnp.array([[jnp.nan, 1.0]])], [jnp.array([[1.0, 1.0]])]).row > 1e20
    assert compared([jnp.float32(1.0)], [jnp.float32(2.0)]).row == pytest.approx(0.5)


def test_what_should_be_zero_is_measured_by_the_other_results():
    """The gradient of a query that sees one key is 0, and what is found is rounding."""
    wanted = [jnp.ones((1, 64)), jnp.zeros((1, 64)), jnp.ones((1, 64))]
    assert compared([wanted[0], wanted[1] + 1e-5, wanted[2]], wanted).row < ROW_TOLERANCE
    assert compared([wanted[0], wanted[1] + 1e-2, wanted[2]], wanted).row > ROW_TOLERANCE


def test_bits_are_compared_and_not_numbers():
    nan = jnp.array([jnp.nan, 0.0], jnp.bfloat16)
    assert bool(same_bits([nan], [nan]))
    assert not bool(same_bits([nan], [nan * jnp.bfloat16(-1)])), "zeros of both signs are equal"


# ---------------------------------------------------------------------- the journal


def row(**known):
    return {"kernel": "attention", "kernel_version": "1", "commit": "abc", "jax": "0.11.2", "device": H100.kind} | known


def test_a_journal_goes_on_behind_a_line_that_was_cut_off(tmp_path):
    journal = Journal.opened(tmp_path)
    journal.add(row(task="a"))
    with open(tmp_path / JOURNAL, "a") as file:
        file.write('{"task": "cut')
    again = Journal.opened(tmp_path)
    again.add(row(task="b"))
    assert [r["task"] for r in read(tmp_path / JOURNAL)] == ["a", "b"]


def test_rows_of_another_call_are_taken_over_once(tmp_path):
    other = Journal.opened(tmp_path / "other")
    other.add(row(task="a"))
    for _ in range(2):
        journal = Journal.opened(tmp_path / "own", [tmp_path / "other" / JOURNAL])
        assert [r["task"] for r in journal.rows] == ["a"]
    assert len(read(tmp_path / "own" / JOURNAL)) == 1


def test_rows_of_other_kernels_are_kept_and_not_reused(tmp_path):
    journal = Journal.opened(tmp_path)
    for changed in ({}, {"kernel_version": "0"}, {"jax": "0.12"}, {"device": "NVIDIA H200"}, {"commit": "older"}):
        journal.add(row(**changed))
    reused = list(journal.reusable(IDENTITY, VERSIONS))
    assert [r["commit"] for r in reused] == ["abc", "older"]
    assert len(read(tmp_path / JOURNAL)) == 5


@pytest.mark.parametrize(
    "changed, said", [({}, None), ({"commit": ""}, None), ({"jax": "0.12"}, "JAX 0.12"), ({"commit": "f"}, "commit f")]
)
def test_a_journal_of_another_commit_or_jax_is_named(tmp_path, changed, said):
    journal = Journal.opened(tmp_path)
    journal.add(row(**changed))
    found = journal.stranger(IDENTITY)
    assert found is None if said is None else said in found


# ---------------------------------------------------------------------- children that hang or die


class Scripted:
    """A child whose candidates named "hangs", "dies" and "poisons" do so."""

    started = 0
    environments: ClassVar[list] = []

    def __init__(self, mode, environ, log):
        Scripted.started += 1
        Scripted.environments.append(environ)

    def ask(self, request, until):
        for name in request["names"]:
            yield {"event": "begin", "name": name}
            if "hangs" in name or "dies" in name:
                yield {"event": "late" if "hangs" in name else "died"}
                return
            if "poisons" in name:
                yield {"event": "row", "candidate": name, "failure": "CUDA_ERROR_ILLEGAL_ADDRESS", "wrong": True}
                yield {"event": "done", "sick": True}
                return
        for name in request["names"]:
            yield {
                "event": "row", "candidate": name, "microseconds": 10.0, "clock": "loop",
                "ours": name.startswith("pallas_gpu"), "wrong": False, "times_as_fast": 3.0, "temporary_bytes": 5,
                "best": next((n for n in request["names"] if n.startswith("pallas_gpu")), None),
                "block_sizes": {"query_block": 128, "key_block": 128},
            }  # fmt: skip
        yield {"event": "done", "sick": False}

    def end(self):
        pass


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setattr(session, "Child", Scripted)
    monkeypatch.setattr(session, "clocks", dict)

    def made(seconds=1000.0, versions=VERSIONS):
        plan = Plan(False, (0, 2), time.monotonic() + seconds, 1, 3, 1.0, tmp_path, False)
        return Session(plan, Journal.opened(tmp_path), IDENTITY, versions, say=lambda line: None)

    return made


def case_of(names):
    task = next(t for t in tasks(False, H100) if t.kind == "time" and t.operation == "attention")
    return replace(task, case=replace(task.case, candidates=dict.fromkeys(names, lambda x: x)))


def test_what_hangs_dies_or_breaks_the_device_costs_its_own_row_alone(run):
    own, Scripted.started = run(), 0
    names = ["matmul", "pallas_gpu hangs", "cudnn dies", "pallas_gpu poisons", "pallas_gpu good"]
    own.run([case_of(names)], [])
    rows = {r["candidate"]: r for r in own.journal.rows if "candidate" in r}
    assert "not done after" in rows["pallas_gpu hangs"]["failure"]
    assert "ended" in rows["cudnn dies"]["failure"]
    assert "ILLEGAL" in rows["pallas_gpu poisons"]["failure"]
    assert rows["matmul"]["microseconds"] == rows["pallas_gpu good"]["microseconds"] == 10.0
    assert Scripted.started == 4
    assert [name.rpartition(": ")[2] for name in own.faults] == ["pallas_gpu hangs", "pallas_gpu poisons"]


def test_what_times_is_alone_on_the_device_and_has_xla_choose_its_products(run):
    own, Scripted.environments = run(), []
    own.run([replace(case_of(["matmul"]), stage=0), case_of(["matmul"])], [])
    checks, times = Scripted.environments
    assert checks["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "autotune_level=0" in checks["XLA_FLAGS"]
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in times
    assert "autotune_level" not in times.get("XLA_FLAGS", "")


def test_a_call_that_shares_the_device_leaves_memory_and_waits_longer_for_its_turn(run, tmp_path):
    own, Scripted.environments, requests = run(), [], []
    own.plan = replace(own.plan, shared=True, loops=True)

    class Asked(Scripted):
        def ask(self, request, until):
            requests.append((request, until - time.monotonic()))
            yield from super().ask(request, until)

    session.Child = Asked  # the fixture sets it back
    own.run([case_of(["matmul"])], [])
    ((request, seconds),) = requests
    assert request["lock"] == str(tmp_path / "device.lock")
    assert request["profile"] is False
    assert seconds > 400
    (times,) = Scripted.environments
    assert times["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "autotune_level" not in times.get("XLA_FLAGS", "")


def test_candidates_can_be_chosen_and_of_ours_one_stays():
    names = ["xla", "matmul", "pallas_gpu (128, 128)", "pallas_gpu (128, 128, persistent)", "cudnn", "streaming"]
    task = case_of(names)
    task = replace(task, case=replace(task.case, block_sizes={n: n for n in names if n.startswith("pallas")}))
    chosen = [list(task.limited(words).case.candidates) for words in (["persistent", "cudnn"], ["mat"])]
    assert chosen[0] == ["xla", "pallas_gpu (128, 128, persistent)", "cudnn", "streaming"]
    assert chosen[1] == ["xla", "matmul", "pallas_gpu (128, 128)", "streaming"]


def test_turns_exclude_each_other(tmp_path):
    """A second turn begins when the first has ended; without a lock nobody waits."""
    order, lock = [], str(tmp_path / "device.lock")

    def second():
        with worker._turn({"lock": lock}):
            order.append("second")

    with worker._turn({"lock": lock}):
        other = threading.Thread(target=second)
        other.start()
        with worker._turn({"lock": ""}):
            order.append("without")
        time.sleep(0.2)
        order.append("first")
    other.join()
    assert order == ["without", "first", "second"]


def test_kernels_of_two_operations_whose_cases_have_one_name_are_told_apart(monkeypatch):
    """LayerNorm and RMSNorm have cases of the same name; what is kept compiled of one is not timed for the other."""
    monkeypatch.setattr(worker, "_KEPT", {})
    rows, x = [], np.arange(8.0, dtype=np.float32)
    for operation, factor in (("layer_norm", 1.0), ("rms_norm", 2.0)):
        functions = {ORIGINAL: lambda x, factor=factor: x * factor, "pallas_gpu": lambda x, factor=factor: factor * x}
        case = replace(
            case_of([]).case, candidates=functions, block_sizes={"pallas_gpu": BlockSizes(64, 64)}, arguments=(x,)
        )
        task = replace(case_of([]), operation=operation, case=case)
        request = {"names": list(functions), "lock": "", "profile": False, "seconds": 0.01}
        worker._Timing(task, case, request, lambda event, content: rows.append((event, content))).run()
    errors = [content["row_error"] for event, content in rows if event == "row" and "row_error" in content]
    assert errors == [0.0, 0.0]


def test_a_later_call_runs_what_has_no_row_yet(run):
    names = ["matmul", "pallas_gpu good"]
    run().run([case_of(names[:1])], [])
    again = run()
    again.run([case_of(names)], [])
    assert [r["candidate"] for r in again.journal.rows if "candidate" in r] == names
    other = run(versions=VERSIONS | {"attention": "2"})
    other.run([case_of(names)], [])
    assert [r["candidate"] for r in other.journal.rows if "candidate" in r] == [*names, *names]


def test_without_time_nothing_is_begun_and_it_is_said(run):
    own = run(seconds=0.0)
    own.run([case_of(["matmul"])], [])
    assert len(own.skipped) == 1
    assert not [r for r in own.journal.rows if "candidate" in r]


def test_a_fault_in_the_first_stage_ends_the_call(run):
    own = run()
    own.run([replace(case_of(["pallas_gpu hangs"]), stage=0), case_of(["matmul"])], [])
    assert "matmul" not in {r.get("candidate") for r in own.journal.rows}
    assert (own.journal.folder / ARCHIVE).exists()


def test_tables_come_from_the_journal_of_the_present_kernels(run, tmp_path, capsys):
    versions = {op: kernel_version(op) for op in VERSIONS}
    own = run(versions=versions)
    chosen = [t for t in tasks(False, H100) if "B1 T16384 N16 D128 causal bfloat16 forward" in t.name]
    own.run([t for t in chosen if t.stage == 2 and "+" not in t.name], [])
    ((place, found),) = tuned_rows(own.journal.rows).rows.items()
    assert place == ("attention", "NVIDIA H100")
    assert {key[:2] for key in found} == {("pallas_gpu", "forward"), ("cudnn", "forward")}
    for tuned in found.values():
        assert (tuned.kernel_us, tuned.original_us, tuned.evidence) == (10.0, 30.0, "measured")
    assert cli.main(["gpu", "--tables", str(tmp_path)]) == 0
    assert "10.0,30.0" in capsys.readouterr().out
    old = tuned_rows([r | {"kernel_version": "older"} for r in own.journal.rows])
    assert not old.rows
    assert old.notes == ["attention: 3 times are of another version of the kernels"]
    assert "10.0 |" in summary(own.journal.rows, IDENTITY)


def timed(task, candidate, microseconds, **more):
    """A row of a journal, of the present kernels."""
    operation = task.split()[1]
    return row(
        kernel=operation, kernel_version=kernel_version(operation), evidence="measured", date="2026-11-27", task=task,
        part="time", candidate=candidate, microseconds=microseconds, temporary_bytes=5, **more,
    )  # fmt: skip


CAUSAL = "attention {} B4 T4096 N16 D{} causal bfloat16 forward"


def of_case(name, ours, cudnn, original=None, times_as_fast=10.0, **more):
    best = min(ours, key=ours.get)
    sizes = {"query_block": 128, "key_block": 128}
    found = [timed(f"2 {name.format('time')}", n, us, ours=True, block_sizes=sizes) for n, us in ours.items()]
    found.append(timed(f"2 {name.format('time')}", "cudnn implementation", cudnn, ours=False))
    if original is not None:
        task = f"2 {name.format('original')}"
        found.append(timed(task, "xla", original, best=best, times_as_fast=times_as_fast, **more))
    return found


def test_each_implementation_has_a_row_beside_the_same_original():
    ours = {"pallas_gpu (128, 128)": 200.0, "pallas_gpu (128, 64)": 300.0}
    found = tuned_rows(of_case(CAUSAL.replace("D{}", "D128"), ours, 100.0, 9999.0))
    rows = {key[0]: row for key, row in found.rows["attention", "NVIDIA H100"].items()}
    assert {name: (row.kernel_us, row.original_us) for name, row in rows.items()} == {
        "pallas_gpu": (200.0, 2000.0), "cudnn": (100.0, 2000.0),
    }, "the original by its ratio to what was timed beside it"  # fmt: skip
    assert not found.notes
    assert rows["cudnn"].block_sizes == rows["cudnn"].block_sizes.get_default()


def test_a_faster_schedule_becomes_the_row_that_sites_take(monkeypatch, tmp_path):
    """The row of a journal, written into the table's file and read from there, gives a site its block sizes."""
    names = ["(128, 128, persistent)", "(128, 128)", "(128, 128, sections)"]
    (case,) = [t.case for t in tasks(False, H100) if t.name == f"2 {CAUSAL.format('time', 128)}"]
    assert [name for name in case.candidates if name.startswith("pallas_gpu")] == [f"pallas_gpu {n}" for n in names]
    monkeypatch.setattr(table_files, "DATA", tmp_path)
    spec = _spec(4, 4096, 16, 128, "causal")
    for fastest in names:
        ours = {f"pallas_gpu {name}": 300.0 - 50 * (name == fastest) for name in names}
        found = tuned_rows(of_case(CAUSAL.replace("D{}", "D128"), ours, 100.0, 9999.0)).rows["attention", "NVIDIA H100"]
        text = TABLE.files.write("NVIDIA H100", found).read_text()
        assert ("schedule" in text.splitlines()[0]) == (fastest != "(128, 128)")
        with H100.targeted():
            assert _named(TABLE.infer_block_sizes(spec, H100, "pallas_gpu")) == fastest
            few = replace(spec, batch=1, key_heads=2)
            assert TABLE.infer_block_sizes(few, H100, "pallas_gpu").schedule == ""


@pytest.mark.parametrize("original, more, kept, said", [
    (None, {}, set(), "the original was not timed"),
    (9999.0, {"wrong": True}, {"cudnn"}, "the original's results were others"),
])  # fmt: skip
def test_what_has_no_row_is_named(original, more, kept, said):
    found = tuned_rows(of_case(CAUSAL.replace("D{}", "D128"), {"pallas_gpu (128, 128)": 9.0}, 5.0, original, **more))
    assert {key[0] for rows in found.rows.values() for key in rows} == kept
    assert said in found.notes[0]


@pytest.mark.parametrize("gains", [(4.0, 3.0), (3.0, 4.0)])
def test_of_cases_with_one_key_the_lesser_gain_counts_and_it_is_said(gains):
    """States of 128 x 64 and 128 x 128 are in one bucket."""
    names = ["T4096 B4 H16 N128 P64 shared", "T4096 B4 H16 N128 P128 scalar"]
    rows = []
    for name, gain in zip(names, gains, strict=True):
        time, original = (f"2 recurrence {kind} {name} bfloat16 forward" for kind in ("time", "original"))
        sizes = {"forward": "chunked", "backward": "chunked", "chunk": 64}
        rows += [timed(time, "pallas_gpu", 10.0, ours=True, block_sizes=sizes)]
        rows += [timed(original, "xla", 99.0, best="pallas_gpu", times_as_fast=gain)]
    found = tuned_rows(rows)
    ((key, kept),) = found.rows["recurrence", "NVIDIA H100"].items()
    assert (kept.speedup, kept.batch, key[:2]) == (3.0, 64, ("pallas_gpu", "forward"))
    assert all(name in found.notes[0] for name in names)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_case_is_filed_as_the_site_that_its_original_is(operation):
    cases = [t.case for t in tasks(False, H100) if t.operation == operation and t.kind == "time" and t.stage == 2]
    cases = [case for case in cases if case.key is not None]
    assert cases
    tables = operation_named(operation).part("tuned_block_sizes")
    for case in cases:
        match = only_match(case.candidates[ORIGINAL], jax.eval_shape(case.arguments), operation)
        for key in (case.key, *(peer.key for peer in case.peers.values())):
            assert tables.table_key(match.spec, key[0], match.direction) == key, case.name


# ---------------------------------------------------------------------- the list of tasks


def test_an_original_that_was_timed_beside_older_kernels_counts_by_its_own_time():
    """It is XLA's program alone; a ratio to kernels that are no more says nothing."""
    rows = of_case(CAUSAL.replace("D{}", "D128"), {"pallas_gpu (128, 128)": 200.0}, 100.0, 9000.0)
    rows[-1] = rows[-1] | {"kernel_version": "older"}
    found = tuned_rows(rows).rows["attention", "NVIDIA H100"].values()
    assert {(row.kernel_us, row.original_us) for row in found} == {(200.0, 9000.0), (100.0, 9000.0)}


def test_every_operation_with_a_gpu_kernel_is_measured():
    """Those without a benchmark of their own by their declaration: checked, repeated and timed, value and gradient."""
    found = tasks(False, H100)
    assert set(OPERATIONS) == {name for name in operation_names() if operation_named(name).has("pallas_gpu")}
    for operation in OPERATIONS:
        own = [task for task in found if task.operation == operation]
        assert {task.stage for task in own if task.kind == "check"} == {0, 3, 4}, operation
        headlines = {task.case.direction for task in own if task.stage == 2 and task.kind == "time"}
        assert headlines >= {"forward"}, operation
        for task in own:
            wanted = task.operation in DECLARED and task.check is not None
            assert not wanted or task.check.direction == "forward+backward", task.name


def test_what_is_compiled_ahead_has_no_products_of_xla():
    """XLA chooses their algorithms by timing them while it compiles."""
    timed = [task for task in tasks(False, H100) if task.kind == "time"]
    ahead = {task.operation for task in timed if of_kernels(task)}
    assert ahead & set(DECLARED) == {"rms_norm", "layer_norm"}


@needs_interpreter
@pytest.mark.parametrize("operation", DECLARED)
def test_declared_arguments_are_those_of_the_case_and_products_stay_small(operation):
    (check,) = DeclaredGpuBenchmark.of(operation).smoke(True)
    arguments = check.arguments()
    wanted = check.reference(*arguments)
    with mode(True):
        types = jax.eval_shape(check.function, *arguments)
    assert jax.tree.structure(types) == jax.tree.structure(wanted)
    assert all(a.shape == b.shape for a, b in zip(jax.tree.leaves(types), jax.tree.leaves(wanted), strict=True))
    assert 0.01 < float(jnp.std(wanted[0])) < 10


def test_tasks_have_names_of_their_own_and_headlines_come_first():
    found = tasks(False, H100)
    names = [task.name for task in found]
    assert len(set(names)) == len(names)
    assert [task.stage for task in found] == sorted(task.stage for task in found)
    headlines = [task for task in found if task.stage == 2]
    kinds = [task.kind for task in headlines]
    assert kinds == sorted(kinds, key=["copy", "time", "original"].index), "XLA's originals come last"
    assert {t.case.direction for t in headlines if t.operation == "grouped_matmul"} >= {"forward", "dlhs", "drhs"}
    for task in headlines:
        if task.case is not None:
            assert not set(of_kernels(task)) & set(LAST_FIRST)
    repeated = " ".join(task.name for task in found if task.stage == 3)
    assert all(word in repeated for word in ("D256", "(192, 128)", "persistent", "float16", "NaN", "segments", "bias"))


# ---------------------------------------------------------------------- the command


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["gpu", "--all", "--output", str(tmp_path / "file" / "folder")]) == 2
    assert len(capsys.readouterr().out.splitlines()) == 1


class Answering:
    """A child of a device."""

    told = MappingProxyType({"platform": "gpu", "kind": "NVIDIA A100-SXM4-40GB", "capability": "8.0"})

    def __init__(self, *_):
        pass

    def ask(self, request, until):
        yield {"event": "row", **self.told}
        yield {"event": "done", "sick": False}

    def end(self):
        pass


def test_without_a_hopper_gpu_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "Child", Answering)
    assert cli.main(["gpu", "--all", "--output", str(tmp_path)]) == 2
    (said,) = capsys.readouterr().out.splitlines()
    assert "needs a Hopper GPU" in said
    assert "A100" in said


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA GH200 480GB"])
def test_a_journal_of_another_commit_is_refused_unless_it_is_asked_for(monkeypatch, tmp_path, capsys, kind):
    monkeypatch.setattr(command, "Child", Answering)
    monkeypatch.setattr(Answering, "told", {"platform": "gpu", "kind": kind, "capability": "9.0"})
    Journal.opened(tmp_path).add(row(jax=command.jax.__version__))
    given = ["gpu", "--all", "--output", str(tmp_path), "--commit", "other", "--stages", "0", "--minutes", "0"]
    assert cli.main(given) == 2
    (said,) = capsys.readouterr().out.splitlines()
    assert "rows of commit abc, and this is other" in said
    assert cli.main([*given, "--other-commits"]) == 0
    assert len(read(tmp_path / JOURNAL)) > 1


def dry_run(folder, *more):
    status = cli.main(["gpu", "--all", "--dry-run", "--output", str(folder), "--seconds", "0.1", *more])
    with tarfile.open(folder / ARCHIVE) as archive:
        lines = archive.extractfile(JOURNAL).read().decode().splitlines()
        return status, [json.loads(line) for line in lines], archive.extractfile("summary.md").read().decode()


@needs_mosaic
def test_a_dry_run_goes_through_the_stages(tmp_path):
    """A choice of tasks; the whole one is for the nightly tier."""
    filters = ["--filter", "copy", "--filter", "0 check", "--stages", "0,1,2"]
    status, rows, text = dry_run(tmp_path, "--op", "cross_entropy", *filters)
    assert status == 0, text
    assert {r["part"] for r in rows} >= {"device", "correctness", "ceiling", "compile", "clocks"}
    assert all(r["evidence"] == "simulated" for r in rows)
    compiled = [r for r in rows if r["part"] == "compile"]
    assert compiled
    assert not [r for r in compiled if r["failure"]]


@needs_mosaic
@pytest.mark.nightly
def test_the_whole_dry_run_finds_no_fault(tmp_path):
    status, rows, text = dry_run(tmp_path, "--minutes", "10")
    assert status == 0, text
    assert {r["kernel"] for r in rows} >= set(OPERATIONS)
