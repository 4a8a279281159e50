"""The child process of :mod:`autopallas.compile.gpu`: ``python gpu_process.py TARGET DUMP``.

It reads names of files with serialized modules, as JSON strings, one to a line, compiles each for the GPU that the file
TARGET describes, and answers with a line of JSON.  DUMP is the folder into which Mosaic GPU was told to write its
output.  It imports nothing of autopallas.  A program with a kernel of an earlier one is answered with "repeated": only
a new process writes that kernel down.
"""

from __future__ import annotations

import collections
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

_COUNTED = (
    "HGMMA", "HMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "LDL", "STL", "LDS", "STS", "STSM", "LDSM", "LDG", "STG",
    "MUFU", "USETMAXREG",
)  # fmt: skip
_OPERATION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]+)")
_SERIALIZED = re.compile(r"\((C75\d\d)\)(?=[^\n]*(?:Performance Loss|serialized))")
"""Other remarks of these numbers, such as C7519, report additions of the compiler that cost nothing."""
_LAUNCH = re.compile(r"dynamic_shared_memory_size (%\w+)")
_FIRST_PASSES = 4 * 2**20
"""Size of the beginning of Mosaic's log of passes that contains the launch; the whole log is ten times as long."""
_KERNEL = re.compile(r'custom_call_target="mosaic_gpu')
_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')
"""What Mosaic tells a kernel by that it has compiled before: such a one it does not write down again."""
_COPY = re.compile(r" = [a-z]+(\d*)\w*\[([\d,]*)\]\S* (?:transpose|copy)\(")
"""An instruction that only moves an array: bits of a number, none for a boolean, and the array's shape."""


def kernels(folder: Path) -> list[dict[str, object]]:
    """Returns what was written about each kernel."""
    found = []
    for log in sorted(folder.glob("*.ptxas")):
        said = log.read_text(errors="replace")
        listing = log.with_suffix(".sass_ctrl")
        sass = listing.read_text(errors="replace") if listing.exists() else ""
        operations = collections.Counter(_OPERATION.findall(sass))
        found.append(
            {
                "name": re.sub(r"_\d+$", "", log.stem),
                "registers": max(map(int, re.findall(r"Used (\d+) registers", said)), default=0),
                "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
                "stack_bytes": sum(map(int, re.findall(r"(\d+) bytes stack frame", said))),
                "shared_bytes": _shared(log.with_suffix(".mlir-passes.log")),
                "instructions": sum(operations.values()),
                "operations": {name: operations[name] for name in _COUNTED if operations[name]},
                "warnings": sorted(set(_SERIALIZED.findall(said))),
                "listing": sass,
            }
        )
    return found


def _shared(passes: Path) -> int:
    """Returns the dynamic shared memory that the kernel's launch asks for; 0 if it is not found."""
    if not passes.exists():
        return 0
    with open(passes, errors="replace") as file:
        text = file.read(_FIRST_PASSES)
    launch = _LAUNCH.search(text)
    size = re.search(rf"{re.escape(launch[1])} = arith\.constant (\d+)", text) if launch else None
    return int(size[1]) if size else 0


def copied_bytes(program: str) -> int:
    """Returns the bytes that transposes and copies of an optimized program write."""
    total = 0
    for bits, shape in _COPY.findall(program):
        total += max(1, int(bits or 8) // 8) * math.prod(int(n) for n in shape.split(",") if n)
    return total


def main(target: str, dump: str) -> None:
    # Keeps what libraries print out of the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import jax
    from jax import export
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    described = Path(target).read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=described, topology="1x1x1")
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("device",)), PartitionSpec())

    known: set[str] = set()

    def compiled(path: str) -> dict[str, object]:
        shutil.rmtree(dump, ignore_errors=True)
        os.makedirs(dump)
        module = export.deserialize(bytearray(Path(path).read_bytes()))
        types = [jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=sharding) for t in module.in_avals]
        done: Any = jax.jit(module.call).lower(*types).compile()
        memory, text = done.memory_analysis(), done.as_text()
        hashes = set(_HASH.findall(text))
        if hashes & known:
            return {"repeated": True}
        known.update(hashes)
        return {
            "temporary_bytes": int(memory.temp_size_in_bytes),
            "argument_bytes": int(memory.argument_size_in_bytes),
            "output_bytes": int(memory.output_size_in_bytes),
            "copied_bytes": copied_bytes(text),
            "calls": len(_KERNEL.findall(text)),
            "kernels": kernels(Path(dump)),
        }

    for line in sys.stdin:
        try:
            answer = compiled(json.loads(line))
        except Exception as error:
            answer = {"failure": f"{type(error).__name__}: {error}"[:4000]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
