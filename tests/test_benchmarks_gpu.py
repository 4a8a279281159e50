"""The command ``python -m benchmarks gpu``: what it calls wrong, what it writes, and when it stops."""

from __future__ import annotations

import csv
import json
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from benchmarks import cli, gpu
from benchmarks.gpu import FIELDS
from benchmarks.gpu_benchmark import Check, Timed

KEY = ("pallas_gpu", "forward", "bfloat16", "G8 M/G256", "large")


def check(name, function):
    return Check(name, "float32", "forward", function, lambda x: x * 2, lambda: (jnp.arange(8.0),), 1e-3)


def unstable():
    calls = iter(range(1000))
    import jax

    def add(x):
        return jax.pure_callback(lambda x: np.asarray(x * 2 + 1e-4 * (next(calls) % 2), x.dtype), x, x)

    return add


def fails(x):
    raise ValueError("no such layout")


@pytest.fixture
def operation(monkeypatch):
    timed = Timed(
        "N8", "float32", "forward", {"xla": lambda x: x * 2, "matmul": lambda x: x, "ours": lambda x: x + x,
        "broken": fails}, {"ours": BlockSizes(64), "broken": BlockSizes(128)}, (jnp.arange(8.0),), 1e3, KEY, 64.0, 8,
    )  # fmt: skip
    offered = SimpleNamespace(
        IMPLEMENTATION="pallas_gpu",
        checks=lambda small: iter([check("good", lambda x: x + x), check("wrong", lambda x: x * 2.1)]),
        stressed=lambda small: iter([check("unstable", unstable()), check("failing", fails)]),
        timed=lambda small: iter([timed]),
    )
    monkeypatch.setitem(sys.modules, "benchmarks.gpu_fake", offered)
    return offered


def run(tmp_path, *more):
    return cli.main(["gpu", "--op", "fake", "--dry-run", "--output", str(tmp_path), "--repetitions", "4", *more])


def test_faults_are_counted_and_every_row_is_written(operation, tmp_path, capsys):
    assert run(tmp_path, "--seconds", "0.05") == 1
    rows = {
        row["shape"] + str(row["candidate"]): row for row in json.loads((tmp_path / "fake-dry-run.json").read_text())
    }
    assert rows["goodautopallas"]["differing"] == 0
    assert rows["goodautopallas"]["max_error"] <= 1e-6
    assert rows["wrongautopallas"]["max_error"] > 1e-2
    assert rows["unstableautopallas"]["differing"] in (1, 2, 3)
    assert "no such layout" in rows["failingautopallas"]["failure"]
    assert rows["N8ours"]["block_sizes"] == BlockSizes(64).to_dict()
    assert rows["N8ours"]["microseconds"] > 0
    assert rows["N8matmul"]["part"] == "ceiling"
    assert "no such layout" in rows["N8broken"]["failure"]
    assert all(row["evidence"] == "simulated" for row in rows.values()), "nothing was measured on a GPU"
    with (tmp_path / "fake-dry-run.csv").open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(rows)
    assert tuple(written[0]) == FIELDS
    assert "4 faults" in capsys.readouterr().out  # wrong, unstable, failing, broken


def test_what_there_is_no_time_for_is_named(operation, tmp_path, capsys):
    assert run(tmp_path, "--minutes", "0") == 0
    said = capsys.readouterr().out
    assert "not run: correctness: good" in said
    assert "not run: time: N8 forward" in said
    assert not list(tmp_path.iterdir())


def test_without_an_h100_it_says_so(capsys):
    assert cli.main(["gpu", "--op", "grouped_matmul"]) == 2
    assert "this needs a Hopper GPU" in capsys.readouterr().out


def test_an_estimate_does_not_replace_a_measured_row(monkeypatch, capsys):
    from autopallas.kernels.grouped_matmul import tuned_block_sizes as tables
    from autopallas.tuning.table import Row

    measured = Row(BlockSizes(64), 1.0, 2.0, 3, 4, "measured", "2026-11-21", "jax 0.12")
    estimated = Row(BlockSizes(128), 5.0, 6.0, 7, 8, "estimated", "2026-11-21", "jax 0.12")
    monkeypatch.setattr(tables.TABLE, "rows", {"NVIDIA H100": {KEY: measured}})
    gpu._write_table("grouped_matmul", "NVIDIA H100", {KEY: estimated}, True)
    assert "estimated" not in capsys.readouterr().out


def test_grouped_matmul_has_cases_of_every_bucket_of_interest():
    from autopallas.sites.device import Device
    from benchmarks import gpu_grouped_matmul

    with Device("gpu", "NVIDIA H100 80GB HBM3").targeted():
        cases = [case for case in gpu_grouped_matmul.timed(False) if case.key is not None]
    assert [case.name for case in cases[::2]][:2] == ["M8192 K4096 N4096 G8", "M32768 K2048 N1408 G64"]
    assert len({case.key for case in cases}) == len(cases)
    assert all({"xla", "matmul"} <= set(case.candidates) for case in cases)
    assert all(case.block_sizes for case in cases)
    assert {c.dtype for c in gpu_grouped_matmul.checks(False)} == {"bfloat16", "float16"}
