"""The child process of :mod:`autopallas.tuning.ahead_of_time`: ``python tpu_compiler.py TOPOLOGY``.

It reads names of files with serialized modules, as JSON strings, one to a line, compiles each for one device of the
topology, and answers with a line of JSON.  It imports nothing of autopallas.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*?[\]})] ([a-z][\w\-]*)\(")
_VMEM = re.compile(r'"used_scoped_memory_configs":\[([^\]]*)\]')
_VMEM_SIZE = re.compile(r'"memory_space":"1","offset":"\d+","size":"(\d+)"')
_CYCLES = re.compile(r'"bundle_analysis_data":\{"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_CALLED = re.compile(r"\b(?:to_apply|true_computation|false_computation|called_computations=\{?)=?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Ran out of memory", "exceeded scoped vmem limit")


def operations(text: str) -> list[dict[str, Any]]:
    """The operations of a compiled module's text that have VMEM or cycles, with how often loops run them."""
    bodies: dict[str, list[tuple[str, str, str]]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if heading := _COMPUTATION.match(line):
            current = bodies.setdefault(heading[2], [])
            entry = heading[2] if heading[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.append((found[1], found[2], line))

    def walk(name: str, runs: int, depth: int = 0) -> Iterator[dict[str, Any]]:
        for instruction, kind, line in bodies.get(name, ()) if depth < 32 else ():
            vmem, cycles = _VMEM.search(line), _CYCLES.search(line)
            size = sum(map(int, _VMEM_SIZE.findall(vmem[1]))) if vmem else 0
            kernel = 'custom_call_target="tpu_custom_call"' in line
            if cycles or size or kernel:
                count = int(cycles[1]) if cycles else None
                yield {"name": instruction, "kernel": kernel, "vmem_bytes": size, "cycles": count, "runs": runs}
            if kind == "while" and (body := _BODY.search(line)):
                trips = _TRIPS.search(line)
                yield from walk(body[1], runs * (int(trips[1]) if trips else 1), depth + 1)
            elif kind == "conditional" and (branches := _BRANCHES.search(line)):
                for branch in branches[1].split(","):
                    yield from walk(branch.strip().lstrip("%"), runs, depth + 1)
            elif kind in ("call", "conditional"):
                for called in _CALLED.findall(line):
                    yield from walk(called, runs, depth + 1)

    return list(walk(entry, 1))


def main(topology: str) -> None:
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import jax
    import numpy as np
    from jax import export
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("device",)), PartitionSpec())

    def compiled(path: str) -> dict[str, Any]:
        with open(path, "rb") as file:
            module = export.deserialize(bytearray(file.read()))
        types = [jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=sharding) for t in module.in_avals]
        done: Any = jax.jit(module.call).lower(*types).compile()
        memory, costs = done.memory_analysis(), done.cost_analysis() or {}

        def counted(name: str) -> int:
            count = float(costs.get(name, 0.0))
            return int(count) if math.isfinite(count) and count > 0 else 0

        return {
            "temporary_bytes": int(memory.temp_size_in_bytes),
            "argument_bytes": int(memory.argument_size_in_bytes),
            "output_bytes": int(memory.output_size_in_bytes),
            "bytes_accessed": counted("bytes accessed"),
            "operations_counted": counted("flops"),
            "operations": operations(done.as_text()),
        }

    for line in sys.stdin:
        try:
            answer = compiled(json.loads(line))
        except Exception as error:
            said = str(error)
            stage = "memory" if any(sign in said for sign in _OUT_OF_MEMORY) else "compile"
            answer = {"stage": stage, "failure": f"{type(error).__name__}: {said}"[:4000]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
