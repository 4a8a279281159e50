"""Finds rows in the checked-in tables; all operations share this code.

A table is ``device -> {(implementation, direction, dtype, bucket, invariants): Row}``.  Buckets are ordered ranges of
sizes, never exact shapes; the first one that contains the sizes wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar, cast

from autopallas.sites.device import Device
from autopallas.sites.operation import Operation
from autopallas.sites.spec import BlockSizes, SiteSpec
from autopallas.tuning.row import DEVICES, LEAST_MEMORY, MEMORY_SLOWDOWN, Bucket, Evidence, Key, Row, Rows
from autopallas.tuning.table_files import Files

__all__ = [
    "DEVICES",
    "LEAST_MEMORY",
    "MEMORY_SLOWDOWN",
    "Bucket",
    "Evidence",
    "Found",
    "Key",
    "Row",
    "Rows",
    "Table",
    "bucket_of",
    "lookup",
    "of_form",
    "table_device",
]

_GENERIC = "NVIDIA"
_HOPPERS = ("NVIDIA H100", "NVIDIA H200", "NVIDIA GH200")
_KIN_FROM = 1.5
"""Smallest gain with which a measured row of one Hopper GPU holds for another.

They have the same processors, and memory of different speed.  Of ten cases that were measured on an H100 and on an
H200, the gain on the second was 0.86 to 1.37 of that on the first, and more of four loops.
"""
_TPUS = {"TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e", "TPU7x": "TPU v7x"}
"""Names in tables of devices that JAX calls otherwise."""


def table_device(device: Device) -> str:
    """Returns the table's name of a device.  All CPUs share one, and so do all H100s.

    Each other Hopper GPU has its own rows; those of another one serve where it has none (:func:`lookup`).

    Example:
      >>> table_device(Device("tpu", "TPU v5 lite")), table_device(Device("gpu", "NVIDIA H100 80GB HBM3"))
      ('TPU v5e', 'NVIDIA H100')
    """
    if device.platform == "cpu":
        return "cpu"
    if device.platform == "gpu":
        words = device.kind.split()
        named = next((name for name in _HOPPERS if name.split()[1] in words), None)
        return named or ("NVIDIA" if "NVIDIA" in words else device.kind)
    return _TPUS.get(device.kind, device.kind)


def bucket_of(sizes: Mapping[str, int], buckets: Sequence[Bucket]) -> Bucket | None:
    """Returns the first bucket that contains the sizes."""
    return next((b for b in buckets if sizes in b), None)


@dataclass(frozen=True, slots=True)
class Found:
    """A row, and whether its bucket is the requested one ("table") or the "nearest" that has a row.

    Attributes:
      own_form: whether it was measured for originals of the requested form (:class:`~.coverage.Conditions`).
      owner: the device whose row it is, as tables name it.
    """

    row: Row[BlockSizes]
    bucket: str
    source: Literal["table", "nearest"]
    own_form: bool = False
    owner: str = ""


def lookup(
    table: Mapping[str, Rows],
    device: str,
    key: Key,
    buckets: Sequence[Bucket],
    objective: str = "time",
    form: str = "",
) -> Found | None:
    """Returns the row of ``key``, else that of the nearest bucket in the order of ``buckets``, all else equal, or None.

    Hopper GPUs serve each other with their rows, where one has none of its own; one that was measured and gains much is
    as good as an own one.

    Of two equally near buckets the smaller one, that is, the earlier, is taken.

    Args:
      table: the rows.
      device: the device, as :func:`table_device` names it.
      key: where the table files the requested spec.
      buckets: the buckets, in order.
      objective: under "memory", the row of least memory is taken, if there is one beside that of least time.
      form: a row of this bucket whose invariants end so comes before all others.
    """
    if form:
        own = lookup({device: table.get(device, {})}, device, of_form(key, form), (), objective)
        if own is not None:
            return replace(own, own_form=True)
    implementation, direction, dtype, bucket, invariants = key
    endings = (LEAST_MEMORY, "") if objective == "memory" else ("",)
    names = [b.name for b in buckets]
    here = names.index(bucket) if bucket in names else None
    order = [bucket] if here is None else sorted(names, key=lambda n: (abs(names.index(n) - here), names.index(n)))
    kin = _HOPPERS if device in _HOPPERS else ()
    owners = dict.fromkeys((device, *kin, _GENERIC) if device.startswith(_GENERIC) else (device,))

    def found(owner: str, name: str) -> Found | None:
        rows = table.get(owner, {})
        places = ((implementation, direction, dtype, name, invariants + ending) for ending in endings)
        row = next((rows[place] for place in places if place in rows), None)
        if row is None:
            return None
        own = owner == device and owner != _GENERIC
        holds = own or (owner in kin and row.evidence == "measured" and row.assured_gain >= _KIN_FROM)
        return Found(row, name, "table" if holds and name == bucket else "nearest", owner=owner)

    exact = [answer for owner in owners if (answer := found(owner, bucket)) is not None and answer.source == "table"]
    exact.sort(key=lambda answer: answer.row.evidence == "estimated")
    near = (answer for owner in owners for name in order if (answer := found(owner, name)) is not None)
    return exact[0] if exact else next(near, None)


def of_form(key: Key, form: str) -> Key:
    """Returns the key of rows that were measured for originals of a form; without one the key itself.

    Example:
      >>> of_form(("xla", "forward", "float32", "T512", "full"), "batched")[-1]
      'full, batched'
    """
    return (*key[:4], f"{key[4]}, {form}") if form else key


S = TypeVar("S", bound=SiteSpec)
B = TypeVar("B", bound=BlockSizes)


class Table(Mapping[str, Rows], Generic[S, B]):
    """The rows of one operation by device, as its files have them, and the block sizes that follow from them.

    An operation declares one in its module ``tuned_block_sizes``::

        TABLE = Table(OPERATION, BUCKETS, filed, BlockSizes)

    Block sizes are those of the row that is found, else the first of the implementation's ``candidates(spec, device)``,
    else the default, each fitted to the spec.  An implementation that knows better has a function
    ``default_block_sizes(spec, device, known)``, whose ``known`` is the row's block sizes or None.

    Args:
      operation: the operation that the rows belong to.
      buckets: the buckets, in order; the last takes what no other does.
      filed: ``filed(spec, implementation, direction)`` gives (direction, sizes, invariants): the direction in which
        such a spec was measured, the sizes that the buckets bound, and what else its rows depend on.
      block_sizes: the class of the operation's block sizes.
    """

    def __init__(
        self,
        operation: Operation,
        buckets: Sequence[Bucket],
        filed: Callable[[S, str, str], tuple[str, Mapping[str, int], str]],
        block_sizes: type[B],
    ):
        self.operation = operation
        self.buckets = buckets
        self._filed = filed
        self._block_sizes = block_sizes
        self.files = Files(operation.name, block_sizes, buckets)
        self.rows: Mapping[str, Rows] = self.files

    def __getitem__(self, device: str) -> Rows:
        return self.rows[device]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def key(self, spec: S, implementation: str, direction: str) -> Key:
        """Returns the key under which the table files a spec."""
        direction, sizes, invariants = self._filed(spec, implementation, direction)
        bucket = bucket_of(sizes, self.buckets)
        assert bucket is not None, "the buckets take everything"
        return implementation, direction, spec.widest_dtype.name, bucket.name, invariants

    def find(
        self,
        spec: S,
        device: Device,
        implementation: str | None = None,
        direction: str = "forward",
        objective: str = "time",
        form: str = "",
    ) -> Found | None:
        """Returns the row for a spec: its own bucket's, else the nearest one's, else None."""
        name = implementation or self.operation.usual(device)
        return lookup(self, table_device(device), self.key(spec, name, direction), self.buckets, objective, form)

    def infer_block_sizes(
        self,
        spec: S,
        device: Device,
        implementation: str | None = None,
        direction: str = "forward",
        objective: str = "time",
        form: str = "",
    ) -> B:
        """Returns block sizes from the table, or the default; they are valid for the shape in any case."""
        name = implementation or self.operation.usual(device)
        found = self.find(spec, device, name, direction, objective, form)
        known: BlockSizes | None = None if found is None else found.row.block_sizes
        if (default := self.operation.hook(name, "default_block_sizes")) is not None:
            return cast(B, default(spec, device, known))
        if known is None and (candidates := self.operation.hook(name, "candidates")) is not None:
            known = candidates(spec, device)[0]
        return self._guess(spec) if known is None else cast(B, known.fitted(spec))

    def _guess(self, spec: S) -> B:
        """Returns block sizes for a spec of which nothing is known."""
        return cast(B, self._block_sizes.get_default().fitted(spec))
