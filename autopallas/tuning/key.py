"""Computes the key of a tuning result: everything that the best block sizes depend on, as plain data, and its hash."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import jax

from autopallas import compat
from autopallas.sites.device import Device
from autopallas.sites.operation import operation_folders, operation_named
from autopallas.sites.spec import Sizes
from autopallas.sites.workload import Workload
from autopallas.tuning import processor
from autopallas.version import __version__

__all__ = ["EXACT_UP_TO", "Description", "TuningKey", "canonical", "digest_of", "key_of", "syntax"]

EXACT_UP_TO = 128
"""Largest size, such as a head size or a number of heads, that stands for itself; longer ones share a power of two."""

_PERFORMANCE_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


class Description(TypedDict, total=False):
    """Fields that a key is computed from, in JSON's types; a probe's key has more of them than a tuning result's."""

    operation: str
    implementation: str
    direction: str
    specs: list[dict[str, object]]
    bucket: list[str]
    kernel_version: str
    platform: str
    device_kind: str
    runtime: str
    versions: dict[str, str]
    flags: dict[str, str]
    block_sizes: Sizes | None
    types: list[list[str]]
    site: str


@dataclass(frozen=True, slots=True)
class TuningKey:
    """Identifies what a result was, or is to be, found for.

    Attributes:
      digest: SHA-256 of the description, in hexadecimal.
      description: JSON's types only.
    """

    digest: str
    description: Description


def canonical(description: Mapping[str, object]) -> str:
    """Returns equal text for equal descriptions, whatever the order of their parts."""
    return json.dumps(description, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(description: Mapping[str, object]) -> str:
    """Returns the name under which a result is kept."""
    return hashlib.sha256(canonical(description).encode()).hexdigest()


def key_of(match: Workload, implementation: str, device: Device) -> TuningKey:
    """Returns the key of one implementation of a site on a device, in this process's setting.

    Args:
      match: the site, as recognised.
      implementation: the implementation's name.
      device: where it will run.

    Returns:
      The key.  Sites whose sizes are in the same buckets, and that are equal otherwise, share it.
    """
    tables = operation_named(match.op).part("tuned_block_sizes")
    description: Description = {
        "operation": match.op,
        "implementation": implementation,
        "direction": match.direction,
        "specs": [_bucketed(part.spec.to_dict()) for part in match.passes],
        "bucket": list(tables.table_key(match.spec, implementation, match.direction)[2:]),
        "kernel_version": f"{kernel_version(match.op)} {version_of_provided(match.op, implementation)}".rstrip(),
        "platform": device.platform,
        "device_kind": device.kind,
        "runtime": _runtime(device.platform),
        "versions": {name: text for name, text in compat.versions().items() if name != "python"},
        "flags": _flags() | {"mesh": _mesh(match)},
    }
    return TuningKey(digest_of(description), description)


def _bucketed(spec: Mapping[str, object]) -> dict[str, object]:
    """Replaces each long size in a spec by the power of two at or above it."""

    def bucket(value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool) and value > EXACT_UP_TO:
            return 1 << (value - 1).bit_length()
        return value

    return {name: bucket(value) for name, value in spec.items()}


def kernel_version(operation: str) -> str:
    """Returns a hash of what an operation's kernels do, including those of its parts and those of a user's pattern."""
    own, outside = _version_of_modules(operation), operation_named(operation).version
    return hashlib.sha256(f"{own} {outside}".encode()).hexdigest()[:16] if outside else own


def version_of_provided(operation: str, implementation: str) -> str:
    """Returns the module and version of an implementation that another package brings; empty for any other."""
    brought = operation_named(operation).provided(implementation)
    return "" if brought is None else f"{brought.module} {brought.version}"


@functools.lru_cache(maxsize=64)
def _version_of_modules(operation: str) -> str:
    """Returns a hash of the source of kernels' modules, without comments; a table of block sizes is not included."""
    package = Path(__file__).parents[1]
    paths = [*(package / "sites").glob("*.py"), *(package / "kernels").glob("*.py")]
    for folder in operation_folders(operation):
        paths += (package / "kernels" / folder).rglob("*.py")
    total = hashlib.sha256(__version__.encode())
    for path in sorted(paths):
        if path.name != "tuned_block_sizes.py":
            total.update(_version_of_module(path))
    return total.hexdigest()[:16]


@functools.lru_cache(maxsize=1024)
def _version_of_module(path: Path) -> bytes:
    """Returns a hash of the source of one module: most are part of every operation."""
    return hashlib.sha256(b"\n%s\n%s" % (path.name.encode(), _without_comments(path.read_bytes()))).digest()


def _without_comments(source: bytes) -> bytes:
    """Returns source without comments and empty lines.  A first step waits for this, and hundreds of modules would take
    much longer to parse: a comment with a quotation mark at the end of a line stays."""
    kept = (line if b'"' in line or b"'" in line else line.partition(b"  #")[0] for line in source.splitlines())
    return b"\n".join(line for line in map(bytes.rstrip, kept) if line and not line.lstrip().startswith(b"#"))


def syntax(source: str) -> str:
    """Returns a module's syntax without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _runtime(platform: str) -> str:
    """Returns what stands between the compiler and the device: the driver's version, or on a CPU the number of
    processors and their vector extensions."""
    if platform == "cpu":
        return f"{os.cpu_count()} processors, {processor.vector_extensions() or 'unknown vector extensions'}"
    return " ".join(str(getattr(jax.devices()[0].client, "platform_version", "")).split())


def _mesh(match: Workload) -> str:
    """Returns the kinds of mesh axes in the operands' types: under explicit sharding a search may not be possible."""
    types = (kind for part in match.passes for kind in part.original.in_avals)
    meshes = (getattr(getattr(kind, "sharding", None), "mesh", None) for kind in types)
    return " ".join(sorted({str(mesh.axis_types) for mesh in meshes if mesh is not None and not mesh.empty}))


def _flags() -> dict[str, str]:
    """Returns settings outside of the spec that change how fast a kernel is, or what it computes."""
    found = {name: os.environ.get(name, "") for name in _PERFORMANCE_VARIABLES}
    x64, precision = compat.numeric_setting()
    found |= {"jax_enable_x64": str(x64), "jax_default_matmul_precision": str(precision)}
    found["AUTOPALLAS_INTERPRET"] = os.environ.get("AUTOPALLAS_INTERPRET", "")
    return found
