"""Compares what a kernel gives for one case with what the reference gives, result by result and row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from autopallas import compat
from autopallas.compat import Array, ArrayFunction, ClosedJaxpr
from autopallas.numerics.classes import Numerics
from autopallas.numerics.compare import compare, tolerance
from autopallas.numerics.oracle import Oracle
from autopallas.numerics.promote import in_float64, quiet
from autopallas.numerics.rows import row_errors

__all__ = ["Finding", "Heard", "Reference", "cotangent", "differing_runs", "hear", "with_gradients"]

Gives = Callable[..., list[jax.Array]]

_NO_DIGIT = 0.2
"""Limit of an array's error from which on it tells nothing: the reference itself is off by half of that."""
_SAMPLES = 4
"""How often the reference runs on arguments a rounding away, where a result would be in breach otherwise."""
_ROUNDED_SAMPLES = (8, 20)
"""How often its steps are a rounding away then: more often while the error is near its limit."""
_NEAR = 8
"""Ratio of an error to its limit up to which further samples may decide: their largest error grows slowly."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with one result of a kernel.

    Attributes:
      what: the result, such as "result 0" or "gradient of argument 1".
      kind: in what respect: its type, NaN or infinite where the reference is not, the largest error of the array, the
        error of a row, runs that differ, or other bits where they have to be the reference's.
      error, allowed: the error and its limit; for runs and bits, the share of bytes that differ.
      row: the row in question, if one is.
    """

    what: str
    kind: Literal["type", "non-finite", "maximum", "row", "runs", "bits"]
    error: float
    allowed: float
    said: str
    row: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.what} {self.said}"


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of one comparison: the findings, the largest errors that were judged, how many NaNs of the reference
    are missing, and how many results could not be judged, since the reference itself has no digit in them."""

    findings: tuple[Finding, ...]
    maximum: float = 0.0
    row: float = 0.0
    hidden: int = 0
    undecided: int = 0


class Reference:
    """The reference for arguments of certain types: compiled in its own precision, and as float64 oracle.

    Args:
      gives: returns a list of results.
      gradients: for each result, whether it is a gradient.
      numerics: the class that a kernel claims; "identical" is compared bit by bit.
    """

    def __init__(
        self,
        gives: Gives,
        program: ClosedJaxpr,
        names: Sequence[str],
        gradients: Sequence[bool],
        numerics: Numerics = "tolerance",
    ):
        self.names, self.gradients, self.numerics = tuple(names), tuple(gradients), numerics
        self._run = jax.jit(gives)
        self._oracle, self._rounding_oracle = Oracle(program), Oracle(program, rounds=True)

    @staticmethod
    def of(
        gives: Gives,
        arguments: Sequence[Array],
        names: Sequence[str],
        gradients: Sequence[bool],
        numerics: Numerics = "tolerance",
    ) -> Reference:
        """Traces a reference for arguments."""
        return Reference(gives, compat.make_jaxpr(gives, *arguments), names, gradients, numerics)

    def __call__(self, *arguments: Array) -> list[Array]:
        with quiet():
            return list(self._run(*arguments))

    def rounded(self, arguments: Sequence[Array], plain: Sequence[Array], seed: int) -> list[Array]:
        """Returns the oracle's results with a rounding in each of the reference's steps, in the dtypes of ``plain``."""
        results = self._rounding_oracle(*arguments, seed=seed)
        with np.errstate(over="ignore"):
            return [np.asarray(x).astype(own.dtype) for x, own in zip(results, plain, strict=True)]

    def exactly(self, *arguments: Array) -> list[Array]:
        """Returns the results of the float64 oracle."""
        return list(self._oracle(*arguments))


def hear(reference: Reference, kernel: Gives, arguments: Sequence[Array]) -> Heard:
    """Compares a kernel with its reference on one set of arguments.

    Args:
      reference: the reference.
      kernel: returns as many results; compiled or not.
      arguments: the arguments of both.

    Raises:
      Exception: what the kernel raises.
    """
    plain, exact = reference(*arguments), reference.exactly(*arguments)
    found = list(kernel(*arguments))
    findings: list[Finding] = []
    samples: list[list[Array]] = []
    maximum = row = 0.0
    hidden = undecided = 0
    if len(found) != len(plain):
        said = f"are {len(found)} where the reference gives {len(plain)}"
        return Heard((Finding("the results", "type", float("inf"), 0.0, said),))
    for i, (what, gradient) in enumerate(zip(reference.names, reference.gradients, strict=True)):
        mine, theirs = _type(found[i]), _type(plain[i])
        if mine != theirs:
            findings.append(Finding(what, "type", float("inf"), 0.0, f"is {mine} where the reference's is {theirs}"))
            continue
        verdict = _judged(what, gradient, plain[i], found[i], exact[i], ())
        for count in _ROUNDED_SAMPLES if jnp.issubdtype(plain[i].dtype, jnp.inexact) else ():
            breach = _breach(verdict)
            if breach <= 1 or (count > _ROUNDED_SAMPLES[0] and breach > _NEAR):
                break
            while len(samples) < _SAMPLES + count:
                seed, moved = len(samples), len(samples) < _SAMPLES
                sample = reference(*_perturbed(arguments, seed)) if moved else reference.rounded(arguments, plain, seed)
                samples.append(sample)
            verdict = _judged(what, gradient, plain[i], found[i], exact[i], [sample[i] for sample in samples])
        findings += verdict.findings
        if reference.numerics == "identical" and (share := _unlike(found[i], plain[i])):
            said = f"has other bits than the reference's in {share:.2%} of its bytes, and claims to be identical"
            findings.append(Finding(what, "bits", share, 0.0, said))
        if not verdict.undecided:
            maximum, row = max(maximum, verdict.maximum), max(row, verdict.row)
        hidden, undecided = hidden + verdict.hidden, undecided + verdict.undecided
    return Heard(tuple(findings), maximum, row, hidden, undecided)


def _breach(heard: Heard) -> float:
    """Returns the largest ratio of an error to its limit; of what is not an error, zero."""
    ratios = [f.error / f.allowed for f in heard.findings if f.kind in ("maximum", "row")]
    return max((float("inf") if ratio != ratio else ratio for ratio in ratios), default=0.0)


def _type(x: Array) -> str:
    return f"{x.dtype}[{','.join(map(str, np.shape(x)))}]"


def _judged(what: str, gradient: bool, plain: Array, found: Array, exact: Array, perturbed: Sequence[Array]) -> Heard:
    floating = jnp.issubdtype(plain.dtype, jnp.inexact)
    allowed = tolerance(plain.dtype, gradient) if floating else 0.0
    whole = compare(what, plain, found, exact, allowed, perturbed)
    findings: list[Finding] = []
    error = whole.rewritten.max_relative
    if whole.non_finite:
        said = f"has {whole.non_finite} NaN or infinite elements where the reference has none"
        findings.append(Finding(what, "non-finite", float(whole.non_finite), 0.0, said))
    if error > whole.allowed or error != error:
        said = f"is off by {error:.2g} of its largest value; {whole.allowed:.2g} is allowed"
        if not floating:
            said = f"differs in {error:.2%} of its elements"
        findings.append(Finding(what, "maximum", error, whole.allowed, said))
    rows = row_errors(found, plain, exact, allowed, perturbed) if floating else None
    if rows is not None and not rows.ok:
        said = f"is off by {rows.error:.2g} of its norm in row {list(rows.row)}; {rows.allowed:.2g} is allowed"
        findings.append(Finding(what, "row", rows.error, rows.allowed, said, rows.row))
    undecided = floating and whole.allowed >= _NO_DIGIT
    if undecided:
        findings = [finding for finding in findings if finding.kind == "non-finite"]
    hidden = int(np.sum(np.isnan(in_float64(plain)) & ~np.isnan(in_float64(found)))) if floating else 0
    worst = 0.0 if rows is None else rows.error
    return Heard(tuple(findings), error, worst, hidden, int(undecided))


def _perturbed(arguments: Sequence[Array], seed: int) -> list[Array]:
    """Moves every float by at most one unit in its last place."""
    random = np.random.default_rng(seed)
    moved: list[Array] = []
    for x in arguments:
        given = np.asarray(x)
        if jnp.issubdtype(given.dtype, np.floating):
            step = float(jnp.finfo(given.dtype).eps) * random.choice([-1.0, 1.0], given.shape)
            with np.errstate(over="ignore", invalid="ignore"):
                given = (given.astype(np.float64) * (1 + step)).astype(given.dtype)
        moved.append(given)
    return moved


def differing_runs(run: Gives, names: Sequence[str], several: Sequence[Sequence[Array]], runs: int) -> list[Finding]:
    """Runs a kernel again and again on several sets of arguments in turn, and compares all runs bit by bit.

    Args:
      run: the compiled kernel.
      names: names of its results.
      several: sets of arguments of the same types; taking turns shows what is left over from the run before.
      runs: how often each set is run.
    """
    first = [[np.asarray(x) for x in run(*arguments)] for arguments in several]
    for _ in range(runs - 1):
        for arguments, wanted in zip(several, first, strict=True):
            for what, x, y in zip(names, run(*arguments), wanted, strict=True):
                again = np.asarray(x)
                if again.tobytes() != y.tobytes():
                    share = float(np.mean(_bits(again) != _bits(y)))
                    said = f"differs between runs of the same arguments, in {share:.2%} of its bytes"
                    return [Finding(what, "runs", share, 0.0, said)]
    return []


def _unlike(found: Array, wanted: Array) -> float:
    """Returns the share of bytes that differ; a NaN is a NaN."""
    mine, theirs = (np.where(x == x, x, np.zeros_like(x)) for x in (np.asarray(found), np.asarray(wanted)))
    nans = np.array_equal(np.isnan(in_float64(found)), np.isnan(in_float64(wanted)))
    share = float(np.mean(_bits(mine) != _bits(theirs))) if mine.size else 0.0
    return share or float(not nans)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.frombuffer(x.tobytes(), np.uint8)


def with_gradients(function: ArrayFunction, active: Sequence[int]) -> Gives:
    """Returns a function that gives the results of another one as a list, and then the gradients of the arguments at
    the positions ``active``, for fixed cotangents; without active arguments, only the results."""

    def results(*arguments: jax.Array) -> list[jax.Array]:
        return [jnp.asarray(x) for x in jax.tree.leaves(function(*arguments))]

    def run(*arguments: jax.Array) -> list[jax.Array]:
        found = results(*arguments)
        if not active:
            return found

        def varied(*chosen: jax.Array) -> list[jax.Array]:
            given = dict(zip(active, chosen, strict=True))
            own = results(*(given.get(i, x) for i, x in enumerate(arguments)))
            return [x for x in own if jnp.issubdtype(x.dtype, jnp.inexact)]

        values, pull = jax.vjp(varied, *(arguments[i] for i in active))
        return [*found, *pull([cotangent(x) for x in values])]

    return run


def cotangent(value: jax.Array) -> jax.Array:
    """Returns numbers between -1 and 1 of a value's type, none of which is its neighbour."""
    return jnp.cos(jnp.arange(value.size, dtype=jnp.float32)).reshape(value.shape).astype(value.dtype)
