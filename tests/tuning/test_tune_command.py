"""``python -m autopallas tune``: every site of a program has a result afterwards, and the program does not search."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from places import attend_all

import autopallas
from autopallas.cli import CommandError, main
from autopallas.cli.program import function_of, shapes_of
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.tuning.search import _Search

SHAPES = "f16[150,64], f16[150,64], f16[150,64]"


def two(query, key, value):
    return attend_all(attend_all(query, key, value), key, value)


optimized = autopallas.optimize(two)


def nothing(query, key, value):
    return query + key * value


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


def test_a_site_without_result_is_told_with_the_reason(capsys, monkeypatch):
    monkeypatch.setattr(_Search, "run", lambda self, candidates: (None, None, "no power"))
    assert "nothing was found: xla: no power" in run(capsys, f"{__name__}:two", "--shapes", SHAPES)


def test_a_program_without_sites_has_another_status(capsys):
    assert "no known computation" in run(capsys, f"{__name__}:nothing", "--shapes", SHAPES, status=1)
    assert json.loads(run(capsys, f"{__name__}:nothing", "--shapes", SHAPES, "--json", status=1)) == []


@pytest.mark.parametrize(
    ("program", "shapes", "reason"),
    [
        ("no_colon", SHAPES, "MODULE:FUNCTION"),
        ("no_such_module:f", SHAPES, "no module no_such_module"),
        (f"{__name__}:absent", SHAPES, "has no absent"),
        (f"{__name__}:SHAPES", SHAPES, "not a function"),
        (f"{__name__}:untraceable", SHAPES, "not today"),
        (f"{__name__}:two", "f16[150,64]", "cannot be traced"),
        (f"{__name__}:two", "f17[150,64]", "f17"),
        (f"{__name__}:two", "f16[150,64", "there is the end where , or ] belongs"),
        (f"{__name__}:two", "f16[150,,64]", ", is no size"),
        (f"{__name__}:two", "f64[150,64]", "JAX_ENABLE_X64"),
    ],
)
def test_bad_input_is_told_in_one_line(capsys, program, shapes, reason):
    assert reason in refused(capsys, program, "--shapes", shapes)


@pytest.mark.parametrize("budget", ["0", "-1", "nan", "soon"])
def test_a_bad_budget_is_told_in_one_line(capsys, budget):
    assert "--budget" in refused(capsys, f"{__name__}:two", "--shapes", SHAPES, "--budget", budget)


def test_shapes_are_read_as_they_are_written_in_jaxprs():
    wanted = [((8, 1024), "bfloat16"), ((), "int32"), ((3,), "bool")]
    assert [(s.shape, s.dtype.name) for s in shapes_of("bf16[8, 1024] ,i32[], bool[3]")] == wanted
    assert shapes_of("") == ()


def test_attributes_of_a_module_are_followed():
    assert function_of("jax:nn.softmax") is jax.nn.softmax
    with pytest.raises(CommandError):
        function_of("jax:nn.no_such_function")
