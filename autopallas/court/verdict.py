"""The outcome of a trial, as data and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

__all__ = ["Failure", "Tally", "Verdict"]

_WIDTH = 100
_SHOWN = 5
"""Largest number of failures, refusals and notes to print in full."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A case in which the kernel was wrong.

    Attributes:
      question: what the case was about: "sizes", "special values" and so on.
      case: the arguments in words.
      findings: what was wrong, a sentence for each result and respect.
      size: how many elements all arguments have.
    """

    question: str
    case: str
    findings: tuple[str, ...]
    size: int


@dataclass(slots=True)
class Tally:
    """Counts of one question: cases heard, failed, refused by the kernel, and not accepted by the reference; and the
    largest errors, of arrays relative to their largest value and of rows relative to their norm."""

    heard: int = 0
    failed: int = 0
    refused: int = 0
    dropped: int = 0
    maximum: float = 0.0
    row: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """The verdict on a kernel.

    Attributes:
      kernel, reference: their names.
      tallies: by question.
      failures: the failing cases.
      smallest: the smallest failing case that was found, or None.
      refused: for each case that the kernel does not accept, the error; it is not wrong there.
      notes: what the verdict does not cover, and why.
      seconds: how long the trial took.
    """

    kernel: str
    reference: str
    tallies: Mapping[str, Tally]
    failures: tuple[Failure, ...] = ()
    smallest: Failure | None = None
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def heard(self) -> int:
        """How many cases were heard."""
        return sum(tally.heard for tally in self.tallies.values())

    @property
    def ok(self) -> bool:
        """Whether at least one case was heard, and the kernel was right in all of them."""
        return not self.failures and self.heard > 0

    def to_dict(self) -> dict[str, object]:
        """Returns the verdict as plain data."""
        data = {**asdict(self), "tallies": {name: asdict(tally) for name, tally in self.tallies.items()}}
        return {"ok": self.ok, "heard": self.heard} | data

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(verdict: Verdict) -> list[str]:
    failed = sum(tally.failed for tally in verdict.tallies.values())
    if failed:
        head = f"{verdict.kernel} is wrong in {failed} of {verdict.heard} cases, compared with {verdict.reference}."
    elif verdict.heard:
        head = f"{verdict.kernel} agrees with {verdict.reference} in all {verdict.heard} cases."
    else:
        head = f"{verdict.kernel} was not heard in any case."
    lines = [*_wrapped(head, ""), ""]
    lines.append(f"{'question':<16}{'cases':>7}{'wrong':>7}{'refused':>9}{'largest error':>15}{'worst row':>11}")
    for name, tally in verdict.tallies.items():
        figures = f"{tally.maximum:>15.1e}{tally.row:>11.1e}" if tally.heard else f"{'-':>15}{'-':>11}"
        lines.append(f"{name:<16}{tally.heard:>7}{tally.failed:>7}{tally.refused:>9}{figures}")
    if verdict.smallest is not None:
        lines += ["", *_failure("Smallest failing case", verdict.smallest)]
    shown = [failure for failure in verdict.failures if failure != verdict.smallest]
    for failure in shown[:_SHOWN]:
        lines += ["", *_failure("Failing case", failure)]
    if len(shown) > _SHOWN:
        lines += ["", f"... and {len(shown) - _SHOWN} more failing cases"]
    for title, items in (("Refused", verdict.refused), ("Note", verdict.notes)):
        for item in items[:_SHOWN]:
            lines += ["", *_wrapped(f"{title}: {item}", "  ")]
        if len(items) > _SHOWN:
            lines += [f"... and {len(items) - _SHOWN} more of these"]
    return lines


def _failure(title: str, failure: Failure) -> list[str]:
    lines = _wrapped(f"{title} ({failure.question}): {failure.case}", "  ")
    for finding in failure.findings[:_SHOWN]:
        lines += [f"  {line}" for line in _wrapped(finding, "  ")]
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), _WIDTH, subsequent_indent=indent, break_long_words=False)
