"""Makes tables of journals: one to read, and the rows of the tuned tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopallas.sites.device import Device
from autopallas.sites.operation import operation_named
from autopallas.tuning.table import Key, Row, table_device
from benchmarks.gpu_benchmark import ORIGINAL, Timed
from benchmarks.gpu_session.journal import Identity
from benchmarks.gpu_session.tasks import OPERATIONS, Task, tasks

__all__ = ["Tuned", "summary", "tuned_rows"]

Rows = Iterable[Mapping[str, Any]]


def _latest(rows: Rows, identity: Identity | None) -> list[Mapping[str, Any]]:
    """Returns the last row of each task, candidate and version of the kernels, on one device."""
    found = {}
    for row in rows:
        if identity is None or row["device"] == identity.device:
            name = row.get("candidate") or row.get("program") or ""
            found[row.get("task") or row.get("of") or row["part"], name, row["part"], row["kernel_version"]] = row
    return list(found.values())


def summary(rows: Rows, identity: Identity) -> str:
    """Returns the rows of a device as text: what is wrong, times with the share of each kernel, and errors."""
    latest = _latest(rows, identity)
    lines = [f"# {identity.device}, JAX {identity.jax}, commit {identity.commit or 'unknown'}", ""]
    wrong = [row for row in latest if row.get("wrong")]
    lines += [f"{len(latest)} rows, {len(wrong)} faults", ""]
    for row in wrong:
        what = row.get("failure") or f"row error {row.get('row_error')}, {row.get('differing')} repetitions differ"
        lines.append(f"- {_name(row)} {row.get('candidate') or row.get('program')}: {str(what)[:400]}")
    lines += ["", "| Case | Candidate | us | TFLOP/s | Clock | Ours is times as fast | Kernels, us |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in latest:
        if row["part"] in ("time", "ceiling"):
            kernels = ", ".join(f"{name} {took:.4g}" for name, took in row.get("kernels", {}).items())
            took = row.get("microseconds") or str(row.get("failure", ""))[:120]
            rate = row.get("teraflops") or ""
            if row.get("gigabytes_per_second"):
                rate = f"{row['gigabytes_per_second']} GB/s"
            cells = (
                _name(row),
                row["candidate"],
                took,
                rate,
                row.get("clock", ""),
                row.get("times_as_fast", ""),
                kernels,
            )
            lines.append("| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    lines += ["", "| Case | Part | Error | Error of a row | Repetitions | Differing |", "|---|---|---|---|---|---|"]
    for row in latest:
        if row["part"] in ("correctness", "repetition"):
            values = (row.get(name, "") for name in ("max_error", "row_error", "repetitions", "differing"))
            texts = (f"{v:.2g}" if isinstance(v, float) else str(v) for v in values)
            lines.append(f"| {_name(row)} | {row['part']} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def _name(row: Mapping[str, Any]) -> str:
    return str(row.get("task") or row.get("of") or row["part"])


@dataclass
class Tuned:
    """Rows for the tuned tables.

    Attributes:
      rows: by (operation, the table's device), then by key.
      cases: the case that each row was measured with, in the same order of keys.
      notes: what was measured and has no row, and where cases share a key, in words.
    """

    rows: dict[tuple[str, str], dict[Key, Row[Any]]] = field(default_factory=lambda: defaultdict(dict))
    cases: dict[tuple[str, str, Key], str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, operation: str, device: str, case: str, key: Key, row: Row[Any]) -> None:
        """Adds a row; of two cases that have one key, what depends on more than that, the lesser gain is kept."""
        known, place = self.rows[operation, device].get(key), (operation, device, key)
        if known is not None:
            told = f"{self.cases[place]} ({known.speedup:.3g}x), {case} ({row.speedup:.3g}x)"
            self.notes.append(
                f"{operation}, {' '.join(key)}: several cases have this key, the least gain counts: {told}"
            )
            if known.speedup <= row.speedup:
                return
        self.rows[operation, device][key] = row
        self.cases[place] = case


def tuned_rows(rows: Sequence[Mapping[str, Any]]) -> Tuned:
    """Returns rows for the tuned tables: of each implementation of a case that was timed, beside the same original.

    A case gives rows where it has keys, the kernels have their present version, and the original was timed too, beside
    whatever version: that it could not run says nothing of how much is gained.  Where it gave other results than our
    kernel, only other implementations have rows.
    """
    from autopallas.tuning.key import kernel_version

    found = Tuned()
    for kind in sorted({row["device"] for row in rows if row["evidence"] == "measured"}):
        device = Device("gpu", kind)
        measured = [row for row in _latest(rows, Identity("", "", kind)) if row["evidence"] == "measured"]
        versions = {name: kernel_version(name) for name in OPERATIONS}
        named: dict[tuple[str, str], Mapping[str, Any]] = {}
        originals: dict[tuple[str, str], Mapping[str, Any]] = {}
        older: dict[tuple[str, str], str] = {}
        for row in measured:
            if row.get("task") and row.get("microseconds"):
                if row["kernel_version"] == versions.get(row["kernel"]):
                    named[row["task"], row["candidate"]] = row
                elif row["candidate"] == ORIGINAL:
                    originals[row["task"], row["candidate"]] = row
                elif row.get("ours"):
                    older[row["task"], row["candidate"]] = row["kernel"]
        lacking = Counter(operation for place, operation in older.items() if place not in named)
        found.notes += [f"{name}: {n} times are of another version of the kernels" for name, n in lacking.items()]
        for task in tasks(False, device):
            if task.kind == "time" and task.case is not None and (task.case.key or task.case.peers):
                _add_case(found, task, task.case, table_device(device), originals | named)
    return found


def _add_case(
    found: Tuned, task: Task, case: Timed, device: str, named: Mapping[tuple[str, str], Mapping[str, Any]]
) -> None:
    beside = task.name.replace(" time ", " original ")
    timed = {n: row for n in case.candidates if (row := named.get((task.name, n)) or named.get((beside, n)))}
    ours = {n: timed[n] for n in case.block_sizes if n in timed}
    original = timed.get(ORIGINAL)
    if original is None or original.get("best") not in ours:
        if ours:
            found.notes.append(f"{task.name}: no rows, since the original was not timed")
        return
    best_beside, original_us = ours[original["best"]], original["microseconds"]
    if best_beside["kernel_version"] == original["kernel_version"]:  # they were timed in turns
        original_us = _digits(best_beside["microseconds"] * original["times_as_fast"])

    def add(key: Key, row: Mapping[str, Any], sizes: Any) -> None:
        known = Row(
            sizes, row["microseconds"], original_us, row["temporary_bytes"], original["temporary_bytes"], "measured",
            row["date"], f"jax {row['jax']}", batch=case.batch,
        )  # fmt: skip
        found.add(task.operation, device, f"{case.name} {case.direction}", key, known)

    if original.get("wrong"):
        found.notes.append(f"{task.name}: no row of our kernel, since the original's results were others")
    elif case.key is not None:
        best = min(ours, key=lambda name: float(ours[name]["microseconds"]))
        add(case.key, ours[best], _sizes(task.operation, case.key[0], case.block_sizes[best]))
    for name, peer in case.peers.items():
        if name in timed:
            add(peer.key, timed[name], _sizes(task.operation, peer.key[0], peer.block_sizes))


def _sizes(operation: str, implementation: str, block_sizes: Any) -> Any:
    """Returns block sizes as the table has them: the default where an implementation reads none."""
    own = operation_named(operation)
    return block_sizes if own.reads_block_sizes(implementation) else own.part("block_sizes").BlockSizes.get_default()


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
