"""Turns one site into functions that can run on their own: the original, each candidate, and the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas import compat, jaxprs
from autopallas.compat import ArrayFunction, JaxprLike, PyTree, Shaped, Var
from autopallas.numerics.compare import tolerance_of
from autopallas.numerics.rounding import gradient_function, sources_of
from autopallas.sites import random_keys
from autopallas.sites.calls import kernel_backward, kernel_forward, replaced_at
from autopallas.sites.spec import BlockSizes
from autopallas.sites.workload import SiteWorkload
from autopallas.tuning.measure import Difference

__all__ = ["Trial"]

Arrays: TypeAlias = Sequence[jax.Array]

_DIFFERENT_INTEGERS = 0.02
"""Limit for the mean difference of integers; some, such as the position of a maximum, may differ by rounding."""


@dataclass(frozen=True)
class Trial:
    """The passes of one match with inputs to run them on.

    Attributes:
      passes: the matches.
      arguments: for each pass, (operands, cotangents of its results if the program holds its backward).
      repeats: number of times that it is computed in one call, one after the other; where it is more than one, all
        arguments and results have an axis of that size in front.
    """

    passes: tuple[SiteWorkload, ...]
    arguments: tuple[tuple[Sequence[Shaped], Sequence[Shaped]], ...]
    repeats: int = 1

    @staticmethod
    def of(match: SiteWorkload, seed: int = 0) -> Trial:
        """Returns the trial of a match on the example inputs of its operation.

        Raises:
          ImportError: the operation has no example inputs.
        """
        examples = match.site.operation.part("example")
        repeats = examples.repeats(match.site) if hasattr(examples, "repeats") and len(match.passes) == 1 else 1
        leading = (repeats,) if repeats > 1 else ()
        arguments = []
        for number, part in enumerate(match.passes):
            given, made = (
                [jax.ShapeDtypeStruct((*leading, *t.shape), t.dtype) for t in avals]
                for avals in (part.original.in_avals, part.original.out_avals)
            )
            operands = examples.operands(part.site, given, seed + number)
            random = np.random.default_rng(seed + number)
            cotangents = []
            if part.backwards:
                for kind in made:
                    cotangents.append(random.standard_normal(kind.shape, np.float32).astype(kind.dtype))
            arguments.append(([jnp.asarray(x) for x in operands], [jnp.asarray(x) for x in cotangents]))
        trial = Trial(tuple(match.passes), tuple(arguments), repeats)
        for (own, _), places in zip(arguments, trial._shared, strict=True):
            own[:] = [x if place is None else arguments[0][0][place] for x, place in zip(own, places, strict=True)]
        return trial

    @staticmethod
    def abstract(match: SiteWorkload) -> Trial:
        """Returns a trial of a match with shapes and dtypes instead of inputs, to compile with."""

        def types(avals: Sequence[Shaped]) -> list[jax.ShapeDtypeStruct]:
            return [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in avals]

        arguments = [
            (types(part.original.in_avals), types(part.original.out_avals) if part.backwards else [])
            for part in match.passes
        ]
        return Trial(tuple(match.passes), tuple(arguments))

    @staticmethod
    def bytes_needed(match: SiteWorkload) -> int:
        """Returns the bytes that the inputs and results of all passes take."""
        types = [t for part in match.passes for t in (*part.original.in_avals, *part.original.out_avals)]
        return sum(t.size * t.dtype.itemsize for t in types)

    # ------------------------------------------------------------------ the ways to compute it

    def original(self) -> ArrayFunction:
        """Returns what the program computes as it stands: results and gradients of all passes, as one flat list."""

        def one(part: SiteWorkload, operands: Arrays, cotangents: Arrays) -> list[jax.Array]:
            run = _original(part)
            if not part.backwards:
                return list(run(*operands))
            active = _active(part)

            def varied(*chosen: jax.Array) -> PyTree:
                return run(*replaced_at(operands, active, chosen))

            results, pull = jax.vjp(varied, *(operands[i] for i in active))
            return [*results, *_of_values(part, active, pull(list(cotangents)))]

        return self._all(one)

    def kernel(self, implementation: str, block_sizes: BlockSizes | None) -> ArrayFunction:
        """Returns the same function by an implementation."""

        def one(part: SiteWorkload, operands: Arrays, cotangents: Arrays) -> list[jax.Array]:
            results, residuals = kernel_forward(part.site, implementation, block_sizes)(*operands)
            if not part.backwards:
                return list(results)
            active = _active(part)
            pull = kernel_backward(part.site, implementation, block_sizes, active)
            return [*results, *_of_values(part, active, pull(operands, results, residuals, cotangents))]

        return self._all(one)

    def _all(self, one: Callable[[SiteWorkload, Arrays, Arrays], list[jax.Array]]) -> ArrayFunction:
        shared = self._shared

        def run(*arguments: tuple[Arrays, Arrays]) -> list[jax.Array]:
            results: list[jax.Array] = []
            for part, places, (own, cotangents) in zip(self.passes, shared, arguments, strict=True):
                operands = [
                    x if place is None else arguments[0][0][place] for x, place in zip(own, places, strict=True)
                ]
                found = one(part, operands, cotangents)
                read = getattr(part.site.operation.module("example"), "read", None)
                found = found if read is None else read(part.site, found, operands)
                results += map(random_keys.data, found)
            return results

        if self.repeats == 1:
            return run
        return lambda *arguments: jax.lax.map(lambda each: run(*each), arguments)

    @property
    def _shared(self) -> list[list[int | None]]:
        """Returns, per pass and operand, the place of the same value among the first pass's operands, if it is there.

        What several passes compute from one value, such as the logits, the original computes once.  So is what it
        reads of a value at one place for two uses of it, such as one slice.
        """
        numbers = [getattr(part, "operands", None) or () for part in self.passes]
        first = {number: place for place, number in reversed([*enumerate(numbers[0])])}
        found: list[list[int | None]] = []
        for order, (own, part) in enumerate(zip(numbers, self.passes, strict=True)):
            known = order > 0 and len(own) == len(part.original.in_avals)
            found.append([first.get(n) for n in own] if known else [None] * len(part.original.in_avals))
        found[0] = [None if place == i else place for i, place in enumerate(_places_read(self.passes[0]))]
        return found

    # ------------------------------------------------------------------ what is right

    @property
    def adds_up_roundings(self) -> bool:
        """Whether a loop of the original carries floats of 16 bits from step to step.

        Their roundings add up to more than any tolerance of one result: what is right is not told by such a loop.
        """
        return any(_carries_few_bits(part.original) for part in self.passes)

    @functools.cached_property
    def _limits(self) -> tuple[tuple[bool, float], ...]:
        """Whether each result is an integer, and how far it may be from the reference."""
        limits = []
        for number, part in enumerate(self.passes):
            types = [*part.original.out_avals]
            found = sources_of(part.original)
            if part.backwards:
                active = tuple(positions[0] for positions in _uses(part, _active(part)))
                types += [part.original.in_avals[i] for i in active]
                arguments = [*part.original.in_avals, *part.original.out_avals]
                abstract = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in arguments]
                found += sources_of(compat.make_jaxpr(gradient_function(part.original, active), *abstract))
            own = getattr(part, "own_results", None)
            values = len(part.original.out_avals) if own is None else own
            for position, (kind, source) in enumerate(zip(types, found, strict=True)):
                gradient = number > 0 or position >= values
                floating = jnp.issubdtype(kind.dtype, jnp.inexact)
                limits.append((not floating, tolerance_of(kind.dtype, replace(source, gradient=gradient))))
        return tuple(limits)

    def fault(self, found: Sequence[Difference] | None, original: Sequence[Difference] | None) -> str | None:
        """Returns what is wrong with a candidate; None if it is within the tolerance or twice the original's error.

        Args:
          found: the candidate's difference from the reference, for each result.
          original: the original's difference from the reference.
        """
        if found is None:
            return "it was not compared"
        allowed = original or [Difference(0.0, 0.0)] * len(found)
        for position, ((integer, limit), own, base) in enumerate(zip(self._limits, found, allowed, strict=True)):
            if integer:
                wrong = own.mean > max(_DIFFERENT_INTEGERS, 2 * base.mean)
            else:
                wrong = own.maximum > max(limit, 2 * base.maximum)
            if wrong or own.maximum != own.maximum:
                return f"result {position} differs from the reference by {own.maximum:.2g} of its largest value"
        return None


def _carries_few_bits(body: JaxprLike) -> bool:
    for equation in jaxprs.every_equation(body):
        if equation.primitive.name in ("scan", "while"):
            carried = compat.scan_parts(equation)[1] if equation.primitive.name == "scan" else None
            types = [v.aval.dtype for v in equation.outvars[:carried]]
            if any(jnp.issubdtype(dtype, np.floating) and dtype.itemsize == 2 for dtype in types):
                return True
    return False


def _places_read(part: SiteWorkload) -> list[int]:
    """Returns, for each operand, the place at which the original reads it: another one where that is the same value,
    and the original reads both of its uses there."""
    jaxpr, _ = jaxprs.open_jaxpr(part.original)
    numbers = getattr(part, "operands", None) or ()
    if len(numbers) != len(jaxpr.invars):
        return [*range(len(jaxpr.invars))]
    atoms = [*(a for equation in jaxpr.eqns for a in equation.invars), *jaxpr.outvars]
    read = {atom for atom in atoms if isinstance(atom, Var)}
    first = {n: i for i, (n, v) in reversed([*enumerate(zip(numbers, jaxpr.invars, strict=True))]) if v in read}
    return [i if v in read else first.get(n, i) for i, (n, v) in enumerate(zip(numbers, jaxpr.invars, strict=True))]


def _original(part: SiteWorkload) -> ArrayFunction:
    """Returns the original of a pass, or what the operation's example inputs have measured in its place."""
    examples = part.site.operation.part("example")
    standing = examples.original(part.site) if hasattr(examples, "original") else None
    return compat.jaxpr_as_fun(part.original) if standing is None else standing


def _active(part: SiteWorkload) -> tuple[int, ...]:
    """Returns the positions of the operands whose gradients the program computes."""
    return tuple(sorted({position for backward in part.backwards for position, _ in backward.gradients}))


def _uses(part: SiteWorkload, active: Sequence[int]) -> list[list[int]]:
    """Groups positions of operands that are uses of one value, where the site has several."""
    values: Sequence[int] = getattr(part.site, "uses", None) or _places_read(part)
    found: dict[int, list[int]] = {}
    for position in active:
        found.setdefault(values[position], []).append(position)
    return list(found.values())


def _of_values(part: SiteWorkload, active: Sequence[int], gradients: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the gradient of each value: the sum over its uses, which is all that the program is owed."""
    given = dict(zip(active, gradients, strict=True))
    return [functools.reduce(jnp.add, (given[p] for p in positions)) for positions in _uses(part, active)]
