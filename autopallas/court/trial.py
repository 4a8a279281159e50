"""The court: compares a kernel with its reference in every respect in which kernels go wrong."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Array, ArrayFunction, Dtype, PyTree
from autopallas.court.case import (
    LARGEST,
    Case,
    Inputs,
    Types,
    dtype_variants,
    number_variants,
    size_variants,
    special_variants,
)
from autopallas.court.hearing import Finding, Gives, Heard, Reference, differing_runs, hear, with_gradients
from autopallas.court.verdict import Failure, Tally, Verdict
from autopallas.errors import one_line
from autopallas.numerics.classes import Numerics

__all__ = ["DTYPES", "QUESTIONS", "judge"]

DTYPES: tuple[Dtype, ...] = tuple(jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16))
QUESTIONS = ("sizes", "dtypes", "magnitudes", "special values", "runs", "without jit", "vmap", "devices")

_EXAMPLES = 3
"""Size of the axis over which vmap maps."""
_SHRINKS = 24
"""How many smaller cases are tried to find the smallest one that fails."""

Way: TypeAlias = tuple[Hashable, ...]
"""A way of running both functions: () as they are, ("vmap", axes) mapped."""


class _Dropped(Exception):
    """Raised for a case that the reference does not accept."""


class _Refused(Exception):
    """Raised for a case that the kernel does not accept."""


def judge(
    kernel: ArrayFunction,
    reference: ArrayFunction,
    arguments: Sequence[PyTree],
    *,
    inputs: Inputs | None = None,
    dtypes: Sequence[Dtype] = DTYPES,
    questions: Sequence[str] = QUESTIONS,
    gradients: bool = True,
    runs: int = 10,
    seconds: float = 300.0,
    names: tuple[str, str] = ("the kernel", "the reference"),
    numerics: Numerics = "tolerance",
    special: ArrayFunction | None = None,
    progress: Callable[[str], None] | None = None,
) -> Verdict:
    """Puts a kernel on trial.

    Both functions are called with the same arguments and have to give the same results, as far as the tolerances of
    this package allow: for the largest value of an array, and for the norm of each row.  A kernel that raises for sizes
    or dtypes other than the given ones refuses them, which is reported and no fault.

    Args:
      kernel: the function in question.
      reference: what it has to compute, in plain JAX.
      arguments: types of positional arguments, which may be nested.  Axes of equal size are taken to be one axis, so
        give axes that may differ different sizes.
      inputs: ``inputs(types, seed)`` gives flat arguments where random numbers make no sense; without it, integers are
        0 or 1.
      dtypes: those that floating-point arguments are also tried in.
      questions: which of :data:`QUESTIONS` to ask.
      gradients: whether to compare gradients, if both functions have them.
      runs: how often each of two sets of arguments is repeated, to find races.
      seconds: wall time after which no further case is begun; each question has a share of it.
      names: the names of both functions in the verdict.
      numerics: the class of numerics that the kernel claims; the results of one that is "identical" are compared with
        the compiled reference's bit by bit as well.
      special: takes the kernel's place where an argument has a NaN or an infinity, or so large a number that it makes
        one, or where the reference itself makes one of finite numbers and the kernel another: the kernel as it is used
        where values are not assumed to be finite.
      progress: called with a line of text before each case.

    Returns:
      The verdict.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from autopallas.court.trial import judge
      >>> x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
      >>> verdict = judge(lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x), axis=-1, keepdims=True), jax.nn.softmax, [x],
      ...                 questions=["magnitudes"])
      >>> verdict.ok, "NaN or infinite elements where the reference has none" in verdict.smallest.findings[0]
      (False, True)
    """
    begin = time.monotonic()
    trial = _Trial(kernel, reference, arguments, inputs, gradients, numerics, special, begin + seconds)
    tallies = {name: Tally() for name in QUESTIONS if name in questions}
    left_out: dict[str, int] = {}
    for number, (question, tally) in enumerate(tallies.items()):
        now = time.monotonic()
        until = now + (trial.deadline - now) / (len(tallies) - number)  # a share of the time that is left
        for asked in trial.questions(question, dtypes, runs):
            if time.monotonic() > until:
                left_out[question] = left_out.get(question, 0) + 1
                continue
            if progress is not None:
                progress(f"{question}: {asked}")
            trial.ask(question, asked, tally, names[1])
    if left_out:
        counts = ", ".join(f"{count} of {question}" for question, count in left_out.items())
        trial.notes[f"cases that were not heard, since {seconds:g} seconds were over: {counts}"] = None
    trial.note_what_was_not_judged()
    smallest = min(trial.failed, key=lambda f: f.asked.case.size, default=None)
    return Verdict(
        *names,
        tallies,
        failures=tuple(f.as_failure() for f in trial.failed),
        smallest=None if smallest is None else trial.shrunk(smallest).as_failure(),
        refused=tuple(trial.refused),
        notes=tuple(trial.notes),
        seconds=time.monotonic() - begin,
    )


@dataclass(frozen=True)
class _Asked:
    """One case, and how it is heard."""

    case: Case
    how: Callable[[Case, Way], Heard]
    way: Way = ()

    def hear(self) -> Heard:
        return self.how(self.case, self.way)

    def __str__(self) -> str:
        mapped = f", mapped along {self.way[1]}" if self.way else ""
        return f"{self.case}{mapped}"


@dataclass(frozen=True)
class _Failed:
    question: str
    asked: _Asked
    findings: tuple[Finding, ...]

    def as_failure(self) -> Failure:
        said = tuple(map(str, self.findings))
        return Failure(self.question, str(self.asked), said, self.asked.case.size)


class _Trial:
    """Both functions, compiled once for each set of types."""

    def __init__(
        self,
        kernel: ArrayFunction,
        reference: ArrayFunction,
        arguments: Sequence[PyTree],
        inputs: Inputs | None,
        gradients: bool,
        numerics: Numerics,
        special: ArrayFunction | None,
        deadline: float,
    ):
        leaves, structure = jax.tree.flatten(tuple(arguments))
        self.types: Types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        self._kernel = lambda *given: kernel(*jax.tree.unflatten(structure, given))
        other = kernel if special is None else special
        self._special = lambda *given: other(*jax.tree.unflatten(structure, given))
        self._reference = lambda *given: reference(*jax.tree.unflatten(structure, given))
        self._direct = kernel if hasattr(kernel, "lower") else jax.jit(kernel)
        self._structure = structure
        self._inputs, self._numerics = inputs, numerics
        self._references: dict[Hashable, tuple[Reference, tuple[int, ...]] | Exception] = {}
        self._kernels: dict[Hashable, Gives | Exception] = {}
        self.deadline = deadline
        self.notes: dict[str, None] = {}
        self.failed: list[_Failed] = []
        self.refused: dict[str, None] = {}
        self._hidden = self._undecided = 0
        self._has_gradient = gradients and self._differentiable()

    # ------------------------------------------------------------------ the questions

    def questions(self, question: str, dtypes: Sequence[Dtype], runs: int) -> Iterator[_Asked]:
        """Yields the cases of a question."""
        sizes = dict(size_variants(self.types))
        odd = sizes.get("odd sizes", self.types)
        given, few = Case(self.types), [Case(self.types), Case(odd, seed=1)]
        match question:
            case "sizes":
                yield from (_Asked(Case(types), self._heard) for types in sizes.values())
            case "dtypes":
                for types in (self.types, odd):
                    yield from (_Asked(Case(other), self._heard) for other in dtype_variants(types, dtypes))
            case "magnitudes":
                yield from (
                    _Asked(replace(own, numbers=n), self._heard) for own in few for n in number_variants(own.types)
                )
            case "special values":
                yield from (
                    _Asked(replace(own, numbers=n), self._heard) for own in few for n in special_variants(own.types)
                )
            case "runs":
                yield from (_Asked(own, functools.partial(self._runs, runs=runs)) for own in few)
            case "without jit":
                yield _Asked(given, self._without_jit)
            case "vmap":
                for own in few:
                    every = tuple(0 for _ in own.types)
                    first = tuple(0 if i == 0 else None for i in every)
                    yield from (_Asked(own, self._heard, ("vmap", axes)) for axes in dict.fromkeys((every, first)))
            case "devices":
                yield from self._divided()

    def _divided(self) -> Iterator[_Asked]:
        count = min(4, len(jax.devices()))
        if count < 2:
            self.notes["not divided over devices, since there is only one"] = None
            return
        rounded = {n: -(-n // count) * count for kind in self.types for n in kind.shape if n > 1}
        types = tuple(jax.ShapeDtypeStruct(tuple(rounded.get(n, n) for n in t.shape), t.dtype) for t in self.types)
        for size in sorted({n for kind in types for n in kind.shape if n > 1}):
            yield _Asked(Case(types), functools.partial(self._on_devices, size=size, count=count))

    def ask(self, question: str, asked: _Asked, tally: Tally, reference: str) -> None:
        """Hears a case, and counts and keeps what came of it; ``reference`` is the reference's name."""
        try:
            heard = asked.hear()
        except _Dropped as error:
            tally.dropped += 1
            if asked.case.types == self.types:
                self.notes[f"{reference} does not accept {asked}: {error}"] = None
            return
        except _Refused as error:
            tally.refused += 1
            self.refused[f"{asked.case}: {error}"] = None
            if question == "sizes" and asked.case.types == self.types:
                finding = Finding("the call", "type", float("inf"), 0.0, f"raises {error}")
                self.failed.append(_Failed(question, asked, (finding,)))
                tally.failed += 1
            return
        tally.heard += 1
        tally.maximum, tally.row = max(tally.maximum, heard.maximum), max(tally.row, heard.row)
        self._hidden += heard.hidden
        self._undecided += heard.undecided
        if heard.findings:
            tally.failed += 1
            self.failed.append(_Failed(question, asked, heard.findings))

    def note_what_was_not_judged(self) -> None:
        """Adds to the notes which results of all cases say nothing of the kernel."""
        if self._hidden:
            self.notes[f"{self._hidden} NaNs of the reference are numbers in the kernel's results"] = None
        if self._undecided:
            said = f"{self._undecided} results were not judged, since the reference itself has no digit in them"
            self.notes[said] = None

    # ------------------------------------------------------------------ how a case is heard

    def _heard(self, case: Case, way: Way) -> Heard:
        reference, kernel, arguments = self._prepared(case, way)
        heard = hear(reference, kernel, arguments)
        if any(f.kind == "non-finite" for f in heard.findings) and not _all_finite(reference(*arguments)):
            reference, kernel, arguments = self._prepared(case, way, special=True)
            heard = hear(reference, kernel, arguments)
        if case.numbers.special != LARGEST:
            return heard
        # Beside the largest number, where gradients cancel, what is left of any rounding is larger than they are.
        findings = [f for f in heard.findings if f.kind in ("type", "non-finite") or not f.what.startswith("gradient")]
        return replace(heard, findings=tuple(findings))

    def _runs(self, case: Case, way: Way, runs: int) -> Heard:
        reference, kernel, arguments = self._prepared(case, way)
        others = self._arguments(replace(case, seed=case.seed + 100), way)
        return Heard(tuple(differing_runs(kernel, reference.names, (arguments, others), runs)))

    def _without_jit(self, case: Case, way: Way) -> Heard:
        reference, _, arguments = self._prepared(case, way, gradients=False)
        given = [jnp.asarray(x) for x in arguments]
        try:
            return hear(reference, with_gradients(self._kernel, ()), given)
        except Exception as error:
            raise _Refused(one_line(error)) from error

    def _on_devices(self, case: Case, way: Way, size: int, count: int) -> Heard:
        """Divides the first axis of one size of each argument over devices."""
        reference, _, arguments = self._prepared(case, way, gradients=False)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("devices",))
        placed = []
        for x in arguments:
            spec: list[str | None] = [None] * np.ndim(x)
            if size in np.shape(x):
                spec[np.shape(x).index(size)] = "devices"
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            placed.append(jax.device_put(x, sharding))

        def kernel(*_: object) -> list[jax.Array]:
            found = jax.tree.leaves(self._direct(*jax.tree.unflatten(self._structure, placed)))
            return [jnp.asarray(np.asarray(x)) for x in found]

        try:
            return hear(reference, kernel, arguments)
        except Exception as error:
            raise _Refused(one_line(error)) from error

    # ------------------------------------------------------------------ both functions for some types

    def _prepared(
        self, case: Case, way: Way, gradients: bool = True, special: bool = False
    ) -> tuple[Reference, Gives, list[np.ndarray]]:
        """Returns the reference, the compiled kernel and the arguments of a case.

        Raises:
          _Dropped, _Refused: one of the functions does not accept it.
        """
        gradients = gradients and self._has_gradient
        arguments = self._arguments(case, way)
        reference, active = self._reference_of(case, way, gradients, arguments)
        special = special or case.numbers.special is not None
        key = (case.types, way, gradients, special)
        if key not in self._kernels:
            try:
                mapped = with_gradients(_mapped(self._special if special else self._kernel, way), active)
                self._kernels[key] = jax.jit(mapped).lower(*arguments).compile()
            except Exception as error:
                self._kernels[key] = error
        kernel = self._kernels[key]
        if isinstance(kernel, Exception):
            raise _Refused(one_line(kernel)) from kernel
        return reference, kernel, arguments

    def _reference_of(
        self, case: Case, way: Way, gradients: bool, arguments: Sequence[np.ndarray]
    ) -> tuple[Reference, tuple[int, ...]]:
        key = (case.types, way, gradients)
        if key not in self._references:
            try:
                self._references[key] = self._new_reference(way, gradients, arguments)
            except Exception as error:
                self._references[key] = error
        found = self._references[key]
        if isinstance(found, Exception):
            raise _Dropped(one_line(found)) from found
        return found

    def _new_reference(
        self, way: Way, gradients: bool, arguments: Sequence[np.ndarray]
    ) -> tuple[Reference, tuple[int, ...]]:
        function = _mapped(self._reference, way)
        active = self._active() if gradients else ()
        results = jax.tree.leaves(jax.eval_shape(function, *arguments))
        names = [f"result {i}" for i, _ in enumerate(results)] + [f"gradient of argument {i}" for i in active]
        flags = [*(False for _ in results), *(True for _ in active)]
        reference = Reference.of(with_gradients(function, active), arguments, names, flags, self._numerics)
        reference(*arguments)  # what it cannot compile or run, such as an empty reduction, is no case
        reference.exactly(*arguments)
        return reference, active

    def _active(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.types) if jnp.issubdtype(kind.dtype, jnp.floating))

    def _arguments(self, case: Case, way: Way) -> list[np.ndarray]:
        try:
            if not way:
                return case.arguments(self._inputs)
            several = [replace(case, seed=case.seed + n).arguments(self._inputs) for n in range(_EXAMPLES)]
        except Exception as error:
            raise _Dropped(one_line(error)) from error
        axes = way[1]
        assert isinstance(axes, tuple)
        pairs = zip(axes, zip(*several, strict=True), strict=True)
        return [examples[0] if axis is None else np.stack(examples) for axis, examples in pairs]

    def _differentiable(self) -> bool:
        """Returns whether both functions have gradients; where only the reference does, a note says so."""
        active = self._active()
        if not active:
            return False
        with contextlib.suppress(Exception):
            jax.eval_shape(with_gradients(self._reference, active), *self.types)
            try:
                jax.eval_shape(with_gradients(self._kernel, active), *self.types)
            except Exception as error:
                with contextlib.suppress(Exception):
                    jax.eval_shape(self._kernel, *self.types)
                    self.notes[f"no gradients were compared, since the kernel has none: {one_line(error)}"] = None
                return False
            return True
        self.notes["no gradients were compared, since the reference has none"] = None
        return False

    # ------------------------------------------------------------------ the smallest case

    def shrunk(self, failed: _Failed) -> _Failed:
        """Makes the arguments of a failing case smaller, as long as it fails in the same way."""
        kinds = {finding.kind for finding in failed.findings}
        smaller, tries = True, 0
        while smaller and tries < _SHRINKS:
            smaller = False
            for types in _smaller(failed.asked.case.types):
                if tries == _SHRINKS or time.monotonic() > self.deadline:
                    return failed
                tries += 1
                asked = replace(failed.asked, case=replace(failed.asked.case, types=types))
                try:
                    findings = asked.hear().findings
                except (_Dropped, _Refused):
                    continue
                if kinds & {finding.kind for finding in findings}:
                    failed, smaller = _Failed(failed.question, asked, findings), True
                    break
        return failed


def _all_finite(arrays: Sequence[Array]) -> bool:
    floats = (x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact))
    return all(bool(jnp.all(jnp.isfinite(x))) for x in floats)


def _smaller(types: Types) -> Iterator[Types]:
    sizes = sorted({n for kind in types for n in kind.shape if n > 1}, reverse=True)
    for n in sizes:
        for m in dict.fromkeys((1, n // 2, n - 1)):
            if m < n and m not in sizes:  # or axes that differ would become one
                yield tuple(jax.ShapeDtypeStruct(tuple(m if k == n else k for k in t.shape), t.dtype) for t in types)


def _mapped(function: ArrayFunction, way: Way) -> ArrayFunction:
    if not way:
        return function
    axes = way[1]
    assert isinstance(axes, tuple)
    mapped: ArrayFunction = jax.vmap(function, in_axes=axes)
    return mapped
