"""Programs under automatic sharding: replaced in parts, with equal results and nothing more sent between devices."""

import functools
import json
import os
import subprocess
import sys

import pytest

from partition.cases import CASES

FEW = ["attention backward: data and heads", "loss backward: tokens and vocabulary", "train step: gathered tensor"]


@functools.cache
def found(devices, chosen=()):
    environment = dict(os.environ)
    environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "partition.cases", *chosen],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def complaints(name, outcome):
    sites = CASES[name][3]
    wrong = []
    # Sums over parts are added in another order: a few roundings of float32, through two layers and their backward.
    if not outcome["error"] <= 2e-5:
        wrong.append(f"error {outcome['error']:.1e}")
    if sites is not None and outcome["applied"] != sites:
        wrong.append(f"{outcome['applied']} of {sites} sites replaced: {outcome['kept']}")
    if sites == 0 and not outcome["kept"]:
        wrong.append("a site that is left alone is not reported")
    before, after = outcome["original"], outcome["rewritten"]
    wrong += [
        f"{after[kind]} {kind} in place of {before.get(kind, 0)}" for kind in after if after[kind] > before.get(kind, 0)
    ]
    return wrong


@pytest.mark.parametrize("name", CASES)
def test_on_eight_devices(name):
    assert complaints(name, found(8)[name]) == []


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", FEW)
def test_on_fewer_devices(devices, name):
    assert complaints(name, found(devices, tuple(FEW))[name]) == []
