"""Tunes before a program runs: sites of a program, a saved report or a table's grid, for this device or for TPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax

from autopallas.autotune.search import Tried, search
from autopallas.compile.tpu import GENERATIONS, Compiler, Generation, missing
from autopallas.progress import Progress
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, operation_named
from autopallas.sites.spec import BlockSizes, Sizes
from autopallas.sites.workload import SiteWorkload, to_measure
from autopallas.tuning.cache import Cache
from autopallas.tuning.coverage import form_of
from autopallas.tuning.direct import Call, recorded
from autopallas.tuning.entry import Entry
from autopallas.tuning.evidence import Evidence
from autopallas.tuning.key import key_of
from autopallas.tuning.table import LEAST_MEMORY, Key, Row, of_form, table_device
from autopallas.workbench.cases import Case, cases_of, match_of
from autopallas.workbench.ranking import ranked
from autopallas.workbench.trial_log import Result, results_of

__all__ = ["TARGETS", "Outcome", "Subject", "Target", "TargetError", "of_case", "target_of", "tune"]

TARGETS = ("cpu", "gpu", "h100", *GENERATIONS)


class TargetError(ValueError):
    """Raised if a target cannot be tuned for here; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """Device to tune for: this machine's device, or a generation of TPUs that is not present."""

    device: Device
    generation: Generation | None = None


def target_of(name: str | None) -> Target:
    """Returns the target of a name; None: this machine's device.

    Raises:
      TargetError: it is not this machine's device, and cannot be tuned for without it.
    """
    here = Device.current()
    if name is None:
        return Target(here)
    own = table_device(here)
    if name in GENERATIONS:
        generation = GENERATIONS[name]
        if table_device(generation.device) == own:
            return Target(here)
        if (reason := missing()) is not None:
            kind = table_device(generation.device)
            raise TargetError(f"this machine has no {kind}, and to compile for one: {reason}")
        return Target(generation.device, generation)
    if name in {"cpu": (here.platform,), "gpu": (here.platform,), "h100": ("h100",) * (own == "NVIDIA H100")}[name]:
        return Target(here)
    raise TargetError(f"this machine has {here.kind}, not {name}; only TPUs need not be there")


@dataclass(frozen=True, eq=False)
class Subject:
    """A site to tune for.

    Attributes:
      match: the site, or what stands for one.
      label: its place, or a description.
      case: set if it also stands for an operation's own function, whose calls then find the result.
    """

    match: SiteWorkload
    label: str
    case: Case | None = None


def of_case(case: Case) -> Subject:
    """Returns the site of a case.

    Raises:
      ValueError: it is not recognised.
    """
    return Subject(match_of(case), str(case), case)


@dataclass(frozen=True)
class Outcome:
    """The result of tuning a subject.

    Attributes:
      implementation: the best for the objective; None if none works.
      time, memory: rows with block sizes by name; ``memory`` only if it is another one.
      searched: whether it was searched for now.
      digest: that of the entry in the cache; empty for what is not kept there.
      reasons: why implementations were passed over.
      results: every configuration of every implementation that was tried.
      key: its place in the table.
      others: the outcomes of the other implementations that work.
      note: what the rows do not say about how they were obtained.
    """

    implementation: str | None = None
    time: Row[Sizes] | None = None
    memory: Row[Sizes] | None = None
    searched: bool = False
    digest: str = ""
    reasons: tuple[str, ...] = ()
    results: tuple[Result, ...] = field(default=())
    key: Key | None = None
    others: tuple[Outcome, ...] = ()
    note: str = ""

    def row(self, objective: str) -> Row[Sizes] | None:
        """Returns the row that is best for an objective."""
        return self.memory if objective == "memory" and self.memory is not None else self.time

    def rows(self, op: str) -> dict[Key, Row[BlockSizes]]:
        """Returns the rows for the operation's table."""
        if self.key is None or self.time is None:
            return {}
        kind = operation_named(op).part("block_sizes").BlockSizes
        found = {self.key: self.time}
        if self.memory is not None:
            found[(*self.key[:4], self.key[4] + LEAST_MEMORY)] = self.memory
        rows = {key: row.of(kind(**row.block_sizes)) for key, row in found.items()}
        for other in self.others:
            rows |= other.rows(op)
        return rows


def tune(
    subject: Subject,
    target: Target,
    budget: float,
    again: bool = False,
    compiler: Compiler | None = None,
    objective: str = "time",
    only: Mapping[Key, Sizes] | None = None,
) -> Outcome:
    """Finds the best block sizes of every implementation that supports a subject, the best implementation first.

    For a target that is not present, only the first implementation that works is compiled, in the platform's order.

    Args:
      subject: the site.
      target: the device to tune for.
      budget: seconds for each implementation.
      again: whether to search even if the cache has a result.
      compiler: the compiler for a target that is not present.
      objective: the objective by which implementations are compared.
      only: block sizes by their rows' keys: these alone are measured, and what has no such key is passed over.
    """
    match, reasons, results = to_measure(subject.match), [], []
    working: list[Outcome] = []
    tables = operation_named(match.op).part("tuned_block_sizes")
    for name, answer in match.site.operation.candidates(match.spec, target.device, None):
        if not isinstance(answer, Supported):
            reasons.append(f"{name}: {answer.reason}")
            continue
        place = of_form(tables.table_key(match.spec, name, match.direction), form_of(match, target.device))
        first = tables.infer_block_sizes(match.spec, target.device, name, match.direction)
        if only is not None:
            if place not in only:
                continue
            first = operation_named(match.op).part("block_sizes").BlockSizes(**only[place])
        tried: Sequence[Tried]
        if compiler is not None:
            with Progress(f"autopallas: tuning {match.op}") as say:
                ranking = ranked(match, name, first, compiler, budget, say)
            time, memory, reason, searched, digest = ranking.time, ranking.memory, ranking.reason, True, ""
            tried, note = ranking.tried, ranking.note
        else:
            entry, searched, tried = _entry(subject, name, target.device, budget, first, again, only is not None)
            time = None if entry.row is None else entry.row.of(entry.block_sizes or {})
            memory, reason, digest, note = entry.lean, entry.reason, entry.digest, ""
        results += results_of(match.op, place, table_device(target.device), match.spec, tried, time, memory)
        if time is not None:
            working.append(Outcome(name, time, memory, searched, digest, key=place, note=note))
            if compiler is not None:
                break
        else:
            reasons.append(f"{name}: {reason}")

    def rank(outcome: Outcome) -> tuple[float, ...]:
        evidence = Evidence.of(outcome.row(objective), objective)
        return () if evidence is None else evidence.rank

    best, *others = sorted(working, key=rank, reverse=True) or [Outcome()]
    return dataclasses.replace(best, reasons=tuple(reasons), results=tuple(results), others=tuple(others))


def _entry(
    subject: Subject, name: str, device: Device, budget: float, first: BlockSizes, again: bool, alone: bool
) -> tuple[Entry, bool, Sequence[Tried]]:
    """Returns (one implementation's result on this device, whether it was searched for now, how far each came)."""
    match, cache = to_measure(subject.match), Cache.current()
    key = key_of(match, name, device)
    known = cache.get(key)
    if known is not None and not again and (known.outcome != "unfinished" or known.seconds >= budget):
        entry, searched, tried = known, False, _remembered(known)
    else:
        found: list[Tried] = []
        earlier = None if again else known
        entry = search(match, name, key, first, budget, earlier, observe=found.extend, alone=alone)
        cache.put(entry)
        searched, tried = True, found
    if subject.case is not None and entry.outcome == "tuned":
        for call in _direct_calls(subject.case, name, match.direction):
            other = key_of(call, name, device)
            if other.description["bucket"] == key.description["bucket"]:
                cache.put(dataclasses.replace(entry, key=other.description))
    return entry, searched, tried


def _direct_calls(case: Case, implementation: str, direction: str) -> list[Call]:
    """Returns the calls that the operation's own function makes for the same case."""
    offered = cases_of(case.kernel)
    function = None if offered is None else offered.direct(case)
    if offered is None or function is None:
        return []
    types = offered.types(dataclasses.replace(case, direction="forward"))
    with recorded() as calls:
        jax.eval_shape(lambda *operands: function(*operands), *types)  # a new function, never traced before
    return [call for call, name in calls if name == implementation and call.direction == direction]


def _remembered(entry: Entry) -> list[Tried]:
    """Returns how far each candidate came that an entry records."""
    tried = [Tried(r.block_sizes, r.stage, r.error) for r in entry.rejected]
    if entry.row is not None:
        tried.insert(0, Tried(entry.block_sizes or {}, row=entry.row))
    if entry.lean is not None:
        tried.insert(1, Tried(entry.lean.block_sizes, row=entry.lean))
    return tried
