"""One process of a program over a mesh of several processes; run as ``python -m sharding.peers``.

Arguments: the address, how many processes, which of them this is, and with what: see ``SCENARIOS``.  Prints one line of
JSON: per case the largest error against one device, what became of the sites, and a digest of the lowered program.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import autopallas
from autopallas import compat
from autopallas.sharding import processes, shard_sites
from autopallas.tuning import distributed
from sharding import cases

CHOSEN = ["attention backward: data and heads", "spelled loss backward: tokens and vocabulary", "train step: tensor"]


UNANSWERED = "it is run by several processes together: a process did not answer"


def array(x, sharding):
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def run(name, mesh):
    function, make, specs, _ = cases.CASES[name]
    plain = make()
    args = jax.tree.map(lambda x, spec: array(x, NamedSharding(mesh, spec)), plain, specs)
    expected = jax.tree.leaves(jax.jit(cases.on_one_device(function))(*plain))
    optimized = autopallas.optimize(jax.jit(function), objective="always")
    errors = []
    for given, wanted in zip(jax.tree.leaves(optimized(*args)), map(np.asarray, expected), strict=True):
        parts = [np.abs(np.asarray(s.data) - wanted[s.index]) for s in given.addressable_shards]
        errors.append(float(max(map(np.max, parts)) / np.max(np.abs(wanted))))
    return {
        "error": max(errors),
        "verdicts": [[site.op, site.verdict, site.reason] for site in optimized.report().sites],
        "program": hashlib.sha256(optimized.lower(*args).as_text().encode()).hexdigest(),
    }


def alike(last):
    return CHOSEN


def failing(last):
    """The last process cannot find out how the program is divided."""

    def fails(*_):
        raise RuntimeError("no such dialect")

    if last:
        shard_sites.propagated = fails
    return CHOSEN[:1]


def absent(last):
    """The last process has autopallas switched off, so that it does not answer."""
    if last:
        autopallas.optimize = lambda function, **_: Plain(function)
    distributed.PROBE_SECONDS = 1.0
    return CHOSEN[:1]


def lowered(last):
    """The last process alone lowers a program, and then all call it; nobody can verify it."""
    processes.LOOK_SECONDS = 1.0
    name = CHOSEN[0]
    function, make, specs, _ = cases.CASES[name]
    mesh = jax.make_mesh(cases.meshes(), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    args = jax.tree.map(lambda x, spec: array(x, NamedSharding(mesh, spec)), make(), specs)
    if last:
        optimized = autopallas.optimize(jax.jit(function), objective="always")
        optimized.lower(*args)
        assert [site.reason for site in optimized.report().sites] == [UNANSWERED]
    compat.distributed_store()[0].wait_at_barrier("lowered", 60_000)
    with pytest.raises(ValueError, match="spread over several"):
        autopallas.verify(function, *args)
    return CHOSEN[:1]


class Plain:
    """A jit function with an empty report."""

    def __init__(self, function):
        self._function, self.lower = function, function.lower

    def __call__(self, *args):
        return self._function(*args)

    def report(self):
        return autopallas.Report()


SCENARIOS = {"alike": alike, "failing": failing, "absent": absent, "lowered": lowered}


def main(address: str, processes: int, number: int, scenario: str) -> None:
    jax.distributed.initialize(address, processes, number)
    warnings.simplefilter("ignore")
    chosen = SCENARIOS[scenario](number == processes - 1)
    mesh = jax.make_mesh(cases.meshes(), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    found = {name: run(name, mesh) for name in chosen}
    if scenario == "alike":
        typed = jax.make_mesh(cases.meshes(), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
        found["explicit axes"] = run(CHOSEN[0], typed)
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
