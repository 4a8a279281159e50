"""``autopallas doctor``."""

from __future__ import annotations

import json

import jax
import pytest

from autopallas.environment import OPERATIONS
from autopallas.sites.operation import IMPLEMENTATIONS, operation_named
from autopallas.tuning import processor


def test_it_tells_versions_devices_implementations_cache_and_environment(command, monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOPALLAS_OBJECTIVE", "memory")
    monkeypatch.setenv("AUTOPALLAS_CACHE_DIR", str(tmp_path / "cache"))
    status, out, _ = command("doctor", "--json")
    told = json.loads(out)
    assert (status, told["problems"]) == (0, [])
    assert told["versions"]["jax"] == jax.__version__
    assert told["machine"]["vector_extensions"] == processor.vector_extensions()
    assert told["devices"] == [{"platform": "cpu", "kind": "cpu", "count": jax.device_count()}]
    assert told["cache"] == {"folder": str(tmp_path / "cache" / "tuning"), "results": 0, "bytes": 0, "writable": True}
    assert told["environment"]["variables"]["AUTOPALLAS_OBJECTIVE"] == "memory"
    assert told["environment"]["options"] == {"objective": "memory"}


def test_each_implementation_is_usable_or_has_a_reason(command):
    _, out, _ = command("doctor", "--json")
    operations = json.loads(out)["operations"]
    assert set(operations) == set(OPERATIONS)
    for op in ("attention", "cross_entropy", "grouped_matmul"):
        answers = operations[op]["implementations"]
        assert set(answers) == set(filter(operation_named(op).has, IMPLEMENTATIONS))
        assert answers["xla"]["usable"], "the CPU's implementation"
        assert operations[op]["order"][0] == "xla"
        assert all(bool(answer["reason"]) != answer["usable"] for answer in answers.values())


def test_the_text_fits_80_columns_and_has_the_reasons(command):
    status, out, _ = command("doctor")
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    flat = " ".join(out.split())
    for part in (
        f"vector extensions: {processor.vector_extensions() or 'unknown'}",
        "No problems found.",
        "xla usable, asked first",
        "pallas_gpu not usable: ",
    ):
        assert part in flat, out


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("AUTOPALLAS_OBJECTIV", "time", "did you mean AUTOPALLAS_OBJECTIVE?"),
        ("AUTOPALLAS_OBJECTIVE", "speed", "'speed'"),
        ("AUTOPALLAS_CACHE_DIR", "/dev/null/cache", "cannot be"),
        ("AUTOPALLAS_CACHE_DIR", __file__, "which is not a folder"),
    ],
)
def test_what_is_wrong_is_said_in_the_end_with_status_1(command, monkeypatch, name, value, problem):
    monkeypatch.setenv(name, value)
    status, out, err = command("doctor")
    assert (status, err) == (1, "")
    problems = out.partition("Problems:")[2]
    assert problem in " ".join(problems.split())
    assert problems.count("\n- ") == 1, "once, and not for each implementation"


def test_a_platform_that_does_not_exist_is_a_problem_not_a_traceback(command, monkeypatch):
    def none():
        raise RuntimeError("Unable to initialize backend 'absent': it is not known")

    monkeypatch.setattr(jax, "devices", none)
    status, out, err = command("doctor", "--json")
    assert (status, err) == (1, "")
    assert "JAX finds no device: " in json.loads(out)["problems"][0]
