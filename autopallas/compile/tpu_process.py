"""The child process of :mod:`autopallas.compile.tpu`: ``python tpu_process.py TOPOLOGY``.

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
from typing import Any, TypeAlias

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?[\]})]) ([a-z][\w\-]*)\(([^()]*)")
_ARRAY = re.compile(r"\b([a-z]+(\d*)\w*)\[([\d,]*)\](\{[^}]*\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_VMEM = re.compile(r'"used_scoped_memory_configs":\[([^\]]*)\]')
_VMEM_SIZE = re.compile(r'"memory_space":"1","offset":"\d+","size":"(\d+)"')
_CYCLES = re.compile(r'"bundle_analysis_data":\{"estimated_cycles":"(\d+)"')
_KERNEL_BYTES = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_NUMBER = re.compile(r" constant\((-?\d+)\)")
_INDEX = re.compile(r"\bindex=(\d+)")
_CALLED = re.compile(r"\b(?:to_apply|true_computation|false_computation|called_computations=\{?)=?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Ran out of memory", "exceeded scoped vmem limit")
_KERNEL = 'custom_call_target="tpu_custom_call"'
_MOVES_NOTHING = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call call-start async-start".split()
)
_READS_A_PART = frozenset(("gather", "slice", "dynamic-slice"))

Instruction: TypeAlias = tuple[str, str, str, str, str]
"""(name, type of the result, kind, operands, the whole line)"""


class Module:
    """The text of a compiled module: instructions as (name, type, kind, operands, line), by computation."""

    def __init__(self, text: str):
        self._bodies: dict[str, dict[str, Instruction]] = {}
        self._entry = ""
        current = None
        for line in text.splitlines():
            if heading := _COMPUTATION.match(line):
                current = self._bodies.setdefault(heading[2], {})
                self._entry = heading[2] if heading[1] else self._entry
            elif current is not None and (found := _INSTRUCTION.match(line)):
                current[found[1]] = (found[1], found[2], found[3], found[4], line)

    def operations(self) -> list[dict[str, object]]:
        """Returns the operations that have VMEM or cycles, with how often loops run them."""
        found = []
        for runs, _, (name, _, _, _, line) in self._run(self._entry, 1):
            vmem, cycles = _VMEM.search(line), _CYCLES.search(line)
            size = sum(map(int, _VMEM_SIZE.findall(vmem[1]))) if vmem else 0
            kernel = _KERNEL in line
            if cycles or size or kernel:
                count = int(cycles[1]) if cycles else None
                found.append({"name": name, "kernel": kernel, "vmem_bytes": size, "cycles": count, "runs": runs})
        return found

    def traffic(self) -> int:
        """Counts the bytes that operations read from and write to main memory, but not for arrays kept in VMEM.

        For a kernel its own statement counts; for operations that may read a part of an operand, only the result.
        """
        total = 0
        for runs, body, (_, result, kind, operands, line) in self._run(self._entry, 1):
            if kind in _MOVES_NOTHING or kind.endswith(("-done", "-update")):
                continue
            if _KERNEL in line and (known := _KERNEL_BYTES.search(line)):
                total += runs * int(known[1])
                continue
            if kind.endswith("-start"):  # its type has source and destination
                ends = sorted(_sizes(result), reverse=True)[:2]
                total += runs * min((size for size, _ in ends), default=0) * sum(main for _, main in ends)
                continue
            read = [] if kind in _READS_A_PART else [body[n][1] for n in _OPERAND.findall(operands) if n in body]
            total += runs * sum(size for each in (result, *read) for size, main in _sizes(each) if main)
        return total

    def _run(self, name: str, runs: int, depth: int = 0) -> Iterator[tuple[int, dict[str, Instruction], Instruction]]:
        body = self._bodies.get(name, {}) if depth < 32 else {}
        for instruction in body.values():
            _, _, kind, _, line = instruction
            yield runs, body, instruction
            if kind == "while" and (inner := _BODY.search(line)):
                trips = _TRIPS.search(line)
                count = int(trips[1]) if trips else self._counted(body, instruction, inner[1])
                yield from self._run(inner[1], runs * count, depth + 1)
            elif kind == "conditional" and (branches := _BRANCHES.search(line)):
                for branch in branches[1].split(","):
                    yield from self._run(branch.strip().lstrip("%"), runs, depth + 1)
            elif kind in ("call", "conditional"):
                for called in _CALLED.findall(line):
                    yield from self._run(called, runs, depth + 1)

    def _counted(self, around: dict[str, Instruction], loop: Instruction, body: str) -> int:
        """Returns how often a loop runs that counts up to a constant in steps of one; 1 where it is not seen to.

        The compiler does not state it of every loop.
        """
        condition = _CONDITION.search(loop[4])
        inside, within = self._bodies.get(body, {}), self._bodies.get(condition[1], {}) if condition else {}
        compared, stepped = _root(within), _root(inside)
        given = around.get(_names(loop)[0]) if _names(loop) else None
        if compared is None or stepped is None or given is None or "direction=LT" not in compared[4]:
            return 1
        counter, limit = (_source(within, name) for name in _names(compared))
        place = _INDEX.search(counter[4]) if counter is not None and counter[2] == "get-tuple-element" else None
        if place is None or given[2] != "tuple" or stepped[2] != "tuple":
            return 1
        first = _source(around, _names(given)[int(place[1])])
        after = _source(inside, _names(stepped)[int(place[1])])
        added = [] if after is None or after[2] != "add" else [_source(inside, name) for name in _names(after)]
        is_next = any(_number(x) == 1 for x in added) and any(
            x is not None and x[2] == "get-tuple-element" and _INDEX.findall(x[4])[:1] == [place[1]] for x in added
        )
        start, end = _number(first), _number(limit)
        return max(end - start, 1) if is_next and start is not None and end is not None else 1


def _root(body: dict[str, Instruction]) -> Instruction | None:
    """Returns what a computation returns."""
    return next((x for x in body.values() if x[4].lstrip().startswith("ROOT ")), None)


def _names(instruction: Instruction) -> list[str]:
    return _OPERAND.findall(instruction[3])


def _source(body: dict[str, Instruction], name: str) -> Instruction | None:
    """Returns what makes a value, behind copies of it."""
    found = body.get(name)
    for _ in range(8):
        if found is None or found[2] != "copy" or not _names(found):
            break
        found = body.get(_names(found)[0])
    return found


def _number(instruction: Instruction | None) -> int | None:
    """Returns the value of a whole number that is a constant."""
    found = None if instruction is None else _NUMBER.search(instruction[4])
    return int(found[1]) if found else None


def _sizes(types: str) -> list[tuple[int, bool]]:
    """Returns the bytes of each array of a type, and whether its layout says that it is in main memory."""
    found = []
    for name, bits, shape, layout in _ARRAY.findall(types):
        elements = math.prod(int(n) for n in shape.split(",") if n)
        found.append((-(-elements * (8 if name == "pred" else int(bits or 0)) // 8), "S(" not in layout))
    return found


def main(topology: str) -> None:
    # Keeps what libraries print out of the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import jax
    import numpy as np
    from jax import export
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("device",)), PartitionSpec())

    def compiled(path: str) -> dict[str, object]:
        with open(path, "rb") as file:
            module = export.deserialize(bytearray(file.read()))
        types = [jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=sharding) for t in module.in_avals]
        done: Any = jax.jit(module.call).lower(*types).compile()
        memory, costs, text = done.memory_analysis(), done.cost_analysis() or {}, Module(done.as_text())

        def counted(name: str) -> int:
            count = float(costs.get(name, 0.0))
            return int(count) if math.isfinite(count) and count > 0 else 0

        return {
            "temporary_bytes": int(memory.temp_size_in_bytes),
            "argument_bytes": int(memory.argument_size_in_bytes),
            "output_bytes": int(memory.output_size_in_bytes),
            # The first counts arrays in VMEM too; the second counts all of an operand that a fusion reads in part.
            "bytes_accessed": min(counted("bytes accessed"), text.traffic()),
            "operations_counted": counted("flops"),
            "operations": text.operations(),
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
