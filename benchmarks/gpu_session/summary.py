"""Makes tables of journals: one to read, and the rows of the tuned tables."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopallas.sites.device import Device
from autopallas.tuning.table import Key, Row, table_device
from benchmarks.gpu_session.journal import Identity
from benchmarks.gpu_session.tasks import tasks

__all__ = ["summary", "tuned_rows"]

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


def tuned_rows(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[Key, Row[Any]]]:
    """Returns rows for the tuned tables, by (operation, the table's device).

    A case gives one where it has a key, the kernels have their present version, and the original was timed too: that
    it could not run says nothing of how much is gained.
    """
    from autopallas.tuning.key import kernel_version

    found: dict[tuple[str, str], dict[Key, Row[Any]]] = defaultdict(dict)
    for kind in sorted({row["device"] for row in rows if row["evidence"] == "measured"}):
        device = Device("gpu", kind)
        measured = [row for row in _latest(rows, Identity("", "", kind)) if row["evidence"] == "measured"]
        named = {(row.get("task"), row.get("candidate")): row for row in measured if row.get("microseconds")}
        for task in tasks(False, device):
            case = task.case
            if task.kind != "time" or case is None or case.key is None:
                continue
            version = kernel_version(task.operation)
            ours = [named[task.name, name] for name in case.block_sizes if (task.name, name) in named]
            ours = [row for row in ours if row["kernel_version"] == version]
            original = named.get((task.name.replace(" time ", " original "), "xla"))
            if not ours or original is None or original["kernel_version"] != version or original.get("wrong"):
                continue
            best = min(ours, key=lambda row: float(row["microseconds"]))
            sizes = importlib.import_module(f"autopallas.kernels.{task.operation}.tuned_block_sizes").BlockSizes
            found[task.operation, table_device(device)][case.key] = Row(
                sizes(**best["block_sizes"]),
                best["microseconds"],
                float(f"{best['microseconds'] * original['times_as_fast']:.4g}"),
                best["temporary_bytes"],
                original["temporary_bytes"],
                "measured",
                best["date"],
                f"jax {best['jax']}",
            )
    return dict(found)
