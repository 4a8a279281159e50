"""``autopallas run`` on training scripts of libraries, as they are: the same losses, with kernels."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize(
    ("name", "needs", "arguments", "sites"),
    [
        ("train_flax", ("flax", "optax"), ["--steps", "3"], {"attention": 2, "cross_entropy": 1}),
        ("train_haiku", ("haiku", "optax"), [], {"attention": 2, "cross_entropy": 1}),
        ("train_scan", (), [], {"attention": 1, "cross_entropy": 1}),
    ],
)
def test_a_training_script_gives_the_same_losses_with_its_sites_replaced(process, name, needs, arguments, sites):
    if missing := [package for package in needs if importlib.util.find_spec(package) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    script = str(SCRIPTS / f"{name}.py")
    plain = process(script, *arguments, python=("-B",))
    ours = process("run", "--objective", "always", "--strict", "--report", "report.json", script, *arguments)
    assert plain.returncode == ours.returncode == 0, plain.stderr + ours.stderr
    losses, wanted = ([float(x) for x in re.findall(r"loss (\S+)", out.stdout)] for out in (ours, plain))
    assert len(losses) == 3
    assert losses == pytest.approx(wanted, abs=2e-4), "printed with four decimals"
    reports = json.loads((process.folder / "report.json").read_text())
    found = Counter(site["op"] for report in reports for site in report["sites"] if site["verdict"] == "applied")
    both = {site["direction"] for report in reports for site in report["sites"] if site["op"] in sites}
    assert {op: found[op] for op in sites} == sites
    assert both == {"forward+backward"}
