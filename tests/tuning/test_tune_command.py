"""``python -m autopallas tune``: every site of a program has a result afterwards, and the program does not search."""

from __future__ import annotations

import csv
import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from places import attend_all

import autopallas
from autopallas.autotune.search import Tried, _Search
from autopallas.cli import CommandError, main
from autopallas.cli.program import function_of, shapes_of
from autopallas.kernels.attention import attention, tuned_block_sizes, xla
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.sites.device import Device
from autopallas.sites.operation import operation_named
from autopallas.tuning import table_files
from autopallas.tuning.cache import Cache
from autopallas.tuning.direct import recorded
from autopallas.tuning.entry import Entry
from autopallas.tuning.key import key_of
from autopallas.tuning.table import Row
from autopallas.workbench import remeasure, tune

pytestmark = pytest.mark.usefixtures("compiled_once")

SHAPES = "f16[150,64], f16[150,64], f16[150,64]"


ATTENTION = "f16[1,40,2,16], f16[1,40,2,16], f16[1,40,2,16]"


def two(query, key, value):
    return attend_all(attend_all(query, key, value), key, value)


optimized = autopallas.optimize(two)


replaced = autopallas.optimize(two, objective="always")


def around(query, key, value):
    return replaced(query, key, value) + 1


def nothing(query, key, value):
    return query + key * value


def norm(x):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def untraceable(query, key, value):
    raise ValueError("not today")


@pytest.fixture(autouse=True)
def _few_candidates(monkeypatch):
    monkeypatch.setattr(BlockSizes, "candidates", classmethod(lambda cls, spec: ()))


def run(capsys, *arguments: str, status: int = 0) -> str:
    assert main(["tune", *arguments]) == status
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def refused(capsys, *arguments: str) -> str:
    """The one line that says why."""
    with pytest.raises(SystemExit) as exit:
        raise SystemExit(main(["tune", *arguments]))
    assert exit.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    return printed.err


def test_afterwards_the_program_has_results_and_does_not_search(capsys):
    results = json.loads(run(capsys, f"{__name__}:optimized", "--shapes", SHAPES, "--json"))
    assert [(r["op"], r["implementation"], r["searched"]) for r in results] == [("attention", "xla", True)] * 2
    program = autopallas.optimize(two, autotune=True, strict=True)
    program.lower(*(jnp.zeros((150, 64), jnp.float16),) * 3)
    assert program.report().tuning == {"searches": 0, "cache_hits": 1}
    assert {site.block_sizes_from for site in program.report().sites} == {"cache"}

    shown = run(capsys, f"{__name__}:two", "--shapes", SHAPES)
    assert shown.count("known before") == 2
    assert "places.py" in shown
    assert run(capsys, f"{__name__}:two", "--shapes", SHAPES, "--again").count("searched for now") == 2


def test_sites_of_optimized_functions_that_a_program_calls_are_its_own(capsys, no_search):
    assert run(capsys, f"{__name__}:around", "--shapes", SHAPES).count("places.py") == 2


def test_a_site_without_result_is_told_with_the_reason(capsys, monkeypatch):
    monkeypatch.setattr(_Search, "run", lambda self, candidates: (None, None, "no power"))
    assert "nothing was found: xla: no power" in run(capsys, f"{__name__}:two", "--shapes", SHAPES)


def test_a_program_without_sites_has_another_status(capsys):
    assert "no known computation" in run(capsys, f"{__name__}:nothing", "--shapes", SHAPES, status=1)
    assert json.loads(run(capsys, f"{__name__}:nothing", "--shapes", SHAPES, "--json", status=1)) == []


@pytest.mark.parametrize(
    ("program", "shapes", "reason"),
    [
        ("no_colon", SHAPES, "no operation (attention, "),
        ("attention", SHAPES, "query [B, T, N, D]"),
        ("attention", "f32[1,8,2,4],f32[1,8,2,4],f32[1,9,2,4]", "must be alike"),
        ("grouped_matmul", "f32[8,4],f32[2,5,4]", "agree in inner size"),
        ("cross_entropy", "f32[8,4],f32[4,9],i32[7]", "i32[8]"),
        ("no_such_module:f", SHAPES, "no module no_such_module"),
        (f"{__name__}:absent", SHAPES, "has no absent"),
        (f"{__name__}:SHAPES", SHAPES, "is no function; its type is str"),
        (f"{__name__}:untraceable", SHAPES, "not today"),
        (f"{__name__}:two", "f16[150,64]", "cannot be traced"),
        (f"{__name__}:two", "f17[150,64]", "f17"),
        (f"{__name__}:two", "f16[150,64", "it ends where , or ] belongs"),
        (f"{__name__}:two", "f16[150,,64]", ", is no size"),
        (f"{__name__}:two", "{a: f16[2], a: f16[3]}", "the entry a is there twice"),
        (f"{__name__}:two", "{(: f16[2]}", "there is ( where the name of an entry belongs"),
        (f"{__name__}:two", "f64[150,64]", "JAX_ENABLE_X64"),
    ],
)
def test_bad_input_is_told_in_one_line(capsys, program, shapes, reason):
    assert reason in refused(capsys, program, "--shapes", shapes)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "name an operation"),
        (["attention", "--from", "report.json"], "one of them"),
        ([f"{__name__}:two"], "needs its arguments"),
        ([f"{__name__}:two", "--shapes", SHAPES, "--variant", "causal"], "--variant is of operations"),
        (["attention", "--variant", "diagonal"], "full, causal, window"),
        (["attention", "--filter", ""], "--filter is empty"),
        (["attention", "--filter", "causal", "--filter", " "], "--filter is empty"),
        (["attention", "--filter", "T7"], "no case of attention's table is selected"),
        (["attention", "--shapes", ATTENTION, "--filter", "T256"], "--filter selects cases of the table"),
        (["--from", "no/such/report.json"], "No such file"),
        (["--from", "report.json", "--shapes", SHAPES], "takes no --shapes"),
        (["attention", "--target", "h100"], "this machine has cpu, not h100"),
        (["attention", "--target", "gpu"], "only TPUs need not be there"),
        (["attention", "--target", "tpu-v1"], "invalid choice: 'tpu-v1'"),
        (["attention", "--objective", "beauty"], "invalid choice: 'beauty'"),
        (["attention", "--processes", "3"], "--processes is of rows that are measured for --table"),
        (["attention", "--processes", "0", "--table"], "not a whole number above 0"),
        (["attention", "--processes", "²", "--table"], "not a whole number above 0"),
    ],
)
def test_what_does_not_go_together_is_told_in_one_line(capsys, arguments, reason):
    assert reason in refused(capsys, *arguments)


@pytest.mark.parametrize("budget", ["0", "-1", "nan", "soon"])
def test_a_bad_budget_is_told_in_one_line(capsys, budget):
    line = refused(capsys, f"{__name__}:two", "--shapes", SHAPES, "--budget", budget)
    assert f"--budget: {budget} is not a number of seconds above 0" in line


# --- operations ------------------------------------------------------------------------------------------------------


def test_an_operation_is_tuned_in_both_directions_and_its_function_finds_the_results(capsys, tmp_path):
    arguments = ("attention", "--shapes", ATTENTION, "--variant", "causal", "--output", str(tmp_path / "raw"))
    results = json.loads(run(capsys, *arguments, "--json"))
    assert [(r["direction"], r["implementation"], r["evidence"]) for r in results] == [
        ("forward", "xla", "measured"),
        ("forward+backward", "xla", "measured"),
    ]
    assert len(list(Cache.current().entries())) == 4, "for programs, and for calls of attention"
    x = jnp.zeros((1, 40, 2, 16), jnp.float16)
    with recorded() as calls:
        jax.eval_shape(lambda x: attention(x, x, x, is_causal=True), x)
    for call, name in calls:
        assert Cache.current().get(key_of(call, name, Device.current())) is not None

    rows = json.loads((tmp_path / "raw" / "results.json").read_text())
    with open(tmp_path / "raw" / "results.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(rows) >= 2
    assert {row["outcome"] for row in rows} == {"raced"}
    for row, line in zip(rows, table, strict=True):
        assert json.loads(line["block_sizes"]) == row["block_sizes"]
        assert float(line["kernel_us"]) == row["kernel_us"] > 0
        assert (row["device"], row["dtype"], row["bucket"], row["invariants"]) == ("cpu", "float16", "T256", "causal")


def test_a_failure_is_among_the_raw_results(capsys, tmp_path, monkeypatch):
    def broken(spec, block_sizes, *operands):
        raise NotImplementedError("no such layout")

    monkeypatch.setattr(xla, "forward", broken)
    three_heads = ATTENTION.replace(",2,16]", ",3,16]")  # which xla_heads does not take
    arguments = ("attention", "--shapes", three_heads, "--direction", "forward", "--output", str(tmp_path))
    assert "nothing was found: xla: none of" in run(capsys, *arguments)
    (row,) = json.loads((tmp_path / "results.json").read_text())
    assert (row["outcome"], row["best_for"], row["kernel_us"]) == ("lower", "", None)
    assert "no such layout" in row["error"]


def test_a_result_that_is_not_finite_is_among_the_raw_results(capsys, tmp_path, monkeypatch):
    genuine = xla.forward

    def wrong(spec, block_sizes, operands):
        return jax.tree.map(lambda x: x * jnp.asarray(jnp.nan, x.dtype), genuine(spec, block_sizes, operands))

    monkeypatch.setattr(xla, "forward", wrong)
    three_heads = ATTENTION.replace(",2,16]", ",3,16]")
    run(capsys, "attention", "--shapes", three_heads, "--direction", "forward", "--output", str(tmp_path))
    (row,) = json.loads((tmp_path / "results.json").read_text())
    assert (row["outcome"], row["difference"]) == ("compare", "inf")


@pytest.fixture
def no_search(monkeypatch):
    """Searches that find what they are told at once; what was searched for."""
    begun = []

    def search(match, implementation, key, first, seconds, known=None, observe=None, alone=False):
        begun.append((str(match.spec), seconds))
        sizes = first.to_dict()
        fast, lean = (Row(sizes | {"query_block": n}, n, 99.0, n, 999, "measured", "2026-11-21", "jax") for n in (8, 4))
        observe([Tried(fast.block_sizes, row=fast), Tried(lean.block_sizes, row=lean)])
        return Entry(key.description, "tuned", fast.block_sizes, fast, "", (), seconds, lean)

    monkeypatch.setattr(tune, "search", search)
    return begun


def test_without_shapes_the_tables_grid_is_tuned(capsys, no_search):
    arguments = ("attention", "--filter", "B1 T256 causal", "--filter", "B1 T1024 full", "--budget", "7", "--json")
    results = json.loads(run(capsys, *arguments))
    assert len(results) == 8, "two places, each in two dtypes and two directions"
    assert {seconds for _, seconds in no_search} == {7.0}
    assert {r["location"].split()[3] for r in results} == {"causal", "full"}


def test_the_objective_is_shown_and_both_are_kept(capsys, no_search):
    arguments = ("attention", "--shapes", ATTENTION, "--direction", "forward", "--json")
    (time,) = json.loads(run(capsys, *arguments))
    (memory,) = json.loads(run(capsys, *arguments, "--objective", "memory"))
    assert (time["block_sizes"]["query_block"], memory["block_sizes"]["query_block"]) == (8, 4)
    assert (time["searched"], memory["searched"]) == (True, False)


def test_the_table_is_written_with_the_rows_that_were_found(capsys, no_search, tmp_path, monkeypatch):
    before = tuned_block_sizes.TABLE.files.read("cpu")
    shutil.copytree(table_files.DATA, tmp_path / "data")
    monkeypatch.setattr(table_files, "DATA", tmp_path / "data")
    arguments = ("attention", "--filter", "B1 T256 causal float32", "--direction", "forward")
    assert "wrote 2 rows" in run(capsys, *arguments, "--table")
    written = tuned_block_sizes.TABLE.files.read("cpu")
    key = ("xla", "forward", "float32", "T256", "causal")
    lean = (*key[:4], "causal, least memory")
    new = [(k, row.block_sizes.query_block) for k, row in written if row not in [old for _, old in before]]
    assert new == [(key, 8), (lean, 4)]
    assert [item for item in written if item[0] not in (key, lean)] == [item for item in before if item[0] != key]


def test_rows_of_several_processes_have_their_median_and_lower_quartile(capsys, tmp_path, monkeypatch):
    shutil.copytree(table_files.DATA, tmp_path / "data")
    monkeypatch.setattr(table_files, "DATA", tmp_path / "data")
    shapes = ", ".join(["f32[2,40,2,16]"] * 3)
    arguments = ("attention", "--shapes", shapes, "--direction", "forward", "--table", "--processes", "2")
    before = tuned_block_sizes.TABLE.files.read("cpu")
    assert "wrote" in run(capsys, *arguments)
    written = [(key, row) for key, row in tuned_block_sizes.TABLE.files.read("cpu") if (key, row) not in before]
    ((key, row),) = [(key, row) for key, row in written if not key[4].endswith("least memory")]
    assert key == ("xla", "forward", "float32", "T256", "full, batched")
    assert (row.processes, row.batch) == (2, 2)
    assert row.lower_gain > 0
    assert row.assured_gain == min(row.lower_gain, row.speedup)


def test_a_further_process_that_fails_is_told_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(remeasure.sys, "executable", "false")
    shapes = ", ".join(["f32[1,40,2,16]"] * 3)
    arguments = ("attention", "--shapes", shapes, "--direction", "forward", "--table", "--processes", "2")
    assert main(["tune", *arguments]) == 2
    assert "a further process could not measure: status 1" in capsys.readouterr().err


def test_an_operation_without_a_table_is_named(capsys, monkeypatch):
    def search(match, implementation, key, first, seconds, known=None, observe=None, alone=False):
        row = Row(first.to_dict(), 8.0, 99.0, 8, 999, "measured", "2026-11-21", "jax")
        return Entry(key.description, "tuned", row.block_sizes, row, "", (), seconds)

    monkeypatch.setattr(tune, "search", search)
    monkeypatch.setattr(operation_named("rms_norm").part("tuned_block_sizes"), "TABLE", {})
    shown = run(capsys, f"{__name__}:norm", "--shapes", "f32[64,256]", "--table")
    assert "wrote none of 1 rows: rms_norm has no table" in shown


# --- saved reports ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [False, True], ids=["one report", "a list of them"])
def test_every_site_of_a_saved_report_is_tuned_for_the_program(capsys, tmp_path, listed):
    operands = (jnp.zeros((150, 64), jnp.float16),) * 3
    text = autopallas.explain(two, *operands).to_json()
    file = tmp_path / "report.json"
    file.write_text(f"[{text}]" if listed else text)
    results = json.loads(run(capsys, "--from", str(file), "--json"))
    assert [(r["op"], r["implementation"], r["searched"]) for r in results] == [("attention", "xla", True)] * 2
    assert "places.py" in results[0]["location"]
    program = autopallas.optimize(two, autotune=True, strict=True)
    program.lower(*operands)
    assert program.report().tuning == {"searches": 0, "cache_hits": 1}


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[]x", '{"schema_version": 99}', '{"sites": 3}', "[" * 100_000, "\x00"]
)
def test_a_file_that_is_no_report_is_told_in_one_line(capsys, tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    assert "is no report" in refused(capsys, "--from", str(tmp_path / "report.json"))


def test_a_site_that_cannot_be_made_anew_is_told(capsys, tmp_path):
    report = json.loads(autopallas.explain(attend_all, *(jnp.zeros((150, 64)),) * 3).to_json())
    report["sites"][0]["encoded"]["passes"][0]["site"]["is"] = "Popen"
    (tmp_path / "report.json").write_text(json.dumps(report))
    shown = refused(capsys, "--from", str(tmp_path / "report.json"))
    assert "none of its 1 sites can be made anew" in shown
    assert "nothing in a site is called 'Popen'" in shown


# --- the rest --------------------------------------------------------------------------------------------------------


def test_shapes_are_read_as_they_are_written_in_jaxprs():
    wanted = [((8, 1024), "bfloat16"), ((), "int32"), ((3,), "bool")]
    assert [(s.shape, s.dtype.name) for s in shapes_of("bf16[8, 1024] ,i32[], bool[3]")] == wanted
    assert shapes_of("") == ()


def test_attributes_of_a_module_are_followed():
    assert function_of("jax:nn.softmax") is jax.nn.softmax
    with pytest.raises(CommandError):
        function_of("jax:nn.no_such_function")
