"""Defines cases: one computation at one size, spelled as people write it, to measure tables and benchmarks on.

An operation that can be tuned by its name has a module ``cases``, with what :class:`Cases` lists; so may its parts,
which add variants of their own.  A declared one without that module has cases by its declaration, also of its variants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from autopallas import compat
from autopallas.compat import ArrayFunction, Dtype, PyTree, Shaped
from autopallas.custom.operation import PatternOperation
from autopallas.graph import Graph, flatten
from autopallas.patterns import Match, find
from autopallas.sites.declared import DeclaredOperation, DeclaredSite, Result
from autopallas.sites.declared_call import operand_names, parameters, shape_in_letters, site_of
from autopallas.sites.operation import operation_folders, operation_named, registered
from autopallas.sites.spec import Spec

__all__ = [
    "DIRECTIONS",
    "Case",
    "Cases",
    "DeclaredCases",
    "Direction",
    "cases_of",
    "match_of",
    "only_match",
    "with_gradients",
]

Direction: TypeAlias = Literal["forward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward+backward")


@dataclass(frozen=True, slots=True)
class Case:
    """One computation at one size.  ``sizes`` are named by the operation's letters, in display order."""

    kernel: str
    direction: Direction
    dtype: str
    mask: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def shape(self) -> str:
        return " ".join(f"{letter}{size}" for letter, size in self.sizes)

    def __str__(self) -> str:
        return f"{self.kernel} {self.direction} {self.dtype} {self.mask} {self.shape}"

    def size(self, letter: str) -> int:
        return dict(self.sizes)[letter]

    def selected_by(self, words: str) -> bool:
        """Returns whether every word of ``words`` is a word of this case: "forward causal T2048"."""
        return set(words.split()) <= set(str(self).split())


def with_gradients(case: Case, function: ArrayFunction, first: int | None = None) -> ArrayFunction:
    """Returns a function as it is for a forward case, or with the gradients of its arguments from a cotangent, its last
    one: those of the ``first`` arguments, of all but the last ones if that is negative, or of all."""
    if case.direction == "forward":
        return function

    def forward_and_backward(*arguments: jax.Array) -> PyTree:
        *operands, cotangent = arguments
        trained = operands[:first]
        held = operands[len(trained) :]
        output, pull_back = jax.vjp(lambda *trained: function(*trained, *held), *trained)
        return output, pull_back(cotangent)

    return forward_and_backward


class Cases(Protocol):
    """Interface of an operation's module ``cases``."""

    @property
    def ORIGINALS(self) -> Mapping[str, ArrayFunction]:
        """Forward computation as people write it, by variant (:attr:`Case.mask`); the first is the plain one."""

    def table_grid(self, platform: str = "cpu") -> tuple[Case, ...]:
        """Returns a case for each row of the tuned table: the simulated rows of TPUs, or the measured ones."""

    def types(self, case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the types of all arguments; if there is a backward pass, the result's cotangent comes last."""

    def in_direction(self, case: Case, function: ArrayFunction) -> ArrayFunction:
        """Turns a function like an original into one of all the case's arguments, with gradients if it has them."""

    def case_of(self, types: Sequence[Shaped], variant: str, direction: Direction) -> Case:
        """Returns the case of arguments, without a cotangent.  Raises ValueError if they are not the operation's."""

    def direct(self, case: Case) -> ArrayFunction | None:
        """Returns the operation's own function, of the original's arguments; None if it has no such variant."""


@dataclass(frozen=True, slots=True)
class _Together:
    """The cases of an operation and of its parts, each of which has its variants."""

    each: tuple[Cases, ...]

    @property
    def ORIGINALS(self) -> Mapping[str, ArrayFunction]:
        return {variant: function for cases in self.each for variant, function in cases.ORIGINALS.items()}

    def _of(self, variant: str) -> Cases:
        return next((cases for cases in self.each if variant in cases.ORIGINALS), self.each[0])

    def table_grid(self, platform: str = "cpu") -> tuple[Case, ...]:
        return tuple(case for cases in self.each for case in cases.table_grid(platform))

    def types(self, case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self._of(case.mask).types(case)

    def in_direction(self, case: Case, function: ArrayFunction) -> ArrayFunction:
        return self._of(case.mask).in_direction(case, function)

    def case_of(self, types: Sequence[Shaped], variant: str, direction: Direction) -> Case:
        return self._of(variant).case_of(types, variant, direction)

    def direct(self, case: Case) -> ArrayFunction | None:
        return self._of(case.mask).direct(case)


PLAIN = "plain"
"""The first variant of a declared operation: its sample."""


@dataclass(frozen=True, slots=True)
class DeclaredCases:
    """The cases of a declared operation, or of one of its variants: its reference, of the operands and the parameters
    of a sample.

    What has the dtype of the result in the sample has that of the case.
    """

    operation: DeclaredOperation
    variant: str = PLAIN

    @property
    def sample(self) -> Spec:
        """The sample of the variant."""
        return self.operation.sample if self.variant == PLAIN else self.operation.variants[self.variant]

    @property
    def ORIGINALS(self) -> Mapping[str, ArrayFunction]:
        return {self.variant: self._original}

    def _original(self, *arrays: jax.Array) -> Result:
        spec = self._site(arrays).spec
        return self.operation.reference(spec, **dict(zip(self._names(), arrays, strict=True)))

    def _names(self) -> list[str]:
        """The operands that the sample has."""
        return [name for name in operand_names(self.operation) if self._dtype(name) is not None]

    def _dtype(self, name: str) -> Dtype | None:
        dtype: Dtype | None = getattr(self.sample, f"{name}_dtype")
        return dtype

    def _site(self, arrays: Sequence[Shaped]) -> DeclaredSite:
        values = {name: getattr(self.sample, name) for name in parameters(self.operation)}
        return site_of(self.operation, dict(zip(self._names(), arrays, strict=True)), values)

    def _spec(self, case: Case) -> Spec:
        """The sample with the sizes and the dtype of a case."""
        own = self._dtype("result")
        names = [f"{name}_dtype" for name in (*self._names(), "result") if self._dtype(name) == own]
        sizes = {self.operation.sizes[letter]: size for letter, size in case.sizes}
        return replace(self.sample, **sizes, **dict.fromkeys(names, np.dtype(case.dtype)))

    def table_grid(self, platform: str = "cpu") -> tuple[Case, ...]:
        """Returns the sizes of the sample and those to measure, in both directions, in float32 and bfloat16 where the
        result is floating; of a custom pattern, whose reference may be another one in another dtype, in its own
        dtype."""
        own = str(self._dtype("result"))
        several = jnp.issubdtype(own, jnp.floating) and not isinstance(self.operation, PatternOperation)
        dtypes = ("float32", "bfloat16") if several else (own,)
        letters = self.operation.letters(self.sample)
        further = (letters | {letter: own[letter] for letter in letters} for own in self.operation.measured_sizes)
        return tuple(
            Case(self.operation.name, direction, d, self.variant, tuple(sizes.items()))
            for sizes in (letters, *further)
            for direction in DIRECTIONS
            for d in dtypes
        )

    def types(self, case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
        spec = self._spec(case)
        types = [
            jax.ShapeDtypeStruct(self.operation.shape(spec, name), getattr(spec, f"{name}_dtype"))
            for name in self._names()
        ]
        if case.direction == "forward":
            return tuple(types)
        return (*types, jax.eval_shape(self._original, *types))

    def in_direction(self, case: Case, function: ArrayFunction) -> ArrayFunction:
        if case.direction == "forward":
            return function

        trained = [name not in self.operation.untrained for name in self._names()]

        def forward_and_backward(*arguments: jax.Array) -> PyTree:
            *operands, cotangent = arguments
            active = [i for i, x in enumerate(operands) if trained[i] and jnp.issubdtype(x.dtype, jnp.floating)]

            def of_active(*chosen: jax.Array) -> PyTree:
                given = dict(zip(active, chosen, strict=True))
                return function(*(given.get(i, x) for i, x in enumerate(operands)))

            output, pull_back = jax.vjp(of_active, *(operands[i] for i in active))
            return output, pull_back(cotangent)

        return forward_and_backward

    def case_of(self, types: Sequence[Shaped], variant: str, direction: Direction) -> Case:
        names = self._names()
        if len(types) != len(names):
            shapes = (f"{n} {shape_in_letters(self.operation, self.operation.operands[n])}" for n in names)
            raise ValueError(f"{self.operation.name} takes {', '.join(shapes)}")
        try:
            spec = self._site(types).spec
        except TypeError as error:
            raise ValueError(str(error)) from None
        dtype: Dtype = getattr(spec, "result_dtype")  # noqa: B009 (every spec has it, their base has not)
        sizes = tuple(self.operation.letters(spec).items())
        case = Case(self.operation.name, direction, str(dtype), variant, sizes)
        for name, wanted in zip(names, self.types(case), strict=False):
            if getattr(spec, f"{name}_dtype") != wanted.dtype:
                raise ValueError(f"{name} must be {wanted.dtype} where the result is {dtype}")
        return case

    def direct(self, case: Case) -> ArrayFunction | None:
        from autopallas.kernels.declared_function import public_function

        values = {name: getattr(self.sample, name) for name in parameters(self.operation)}
        function = public_function(self.operation)

        def called(*arrays: jax.Array, **more: object) -> PyTree:
            return function(**dict(zip(self._names(), arrays, strict=True)), **values, **more)

        return called


def cases_of(operation: str) -> Cases | None:
    """Returns the cases of an operation and its parts by the operation's name, or None if it has none."""
    found = tuple(_modules(operation))
    return found[0] if len(found) == 1 else _Together(found) if found else None


def _modules(operation: str) -> Iterator[Cases]:
    without_folder = (own.name for own in registered() if own.name == operation)
    for folder in operation_folders(operation) or without_folder:
        own = operation_named(folder)
        cases = cast("Cases | None", own.module("cases"))
        if cases is not None:
            yield cases
        elif isinstance(own, DeclaredOperation):
            yield DeclaredCases(own)
            yield from (DeclaredCases(own, variant) for variant in own.variants)


def match_of(case: Case) -> Match:
    """Returns the one site of a case, as the pipeline sees it.

    Raises:
      ValueError: no site is recognised, or several are.
    """
    offered = cases_of(case.kernel)
    assert offered is not None
    function = offered.in_direction(case, offered.ORIGINALS[case.mask])
    kind = case.mask.partition(":")[0]
    wanted = kind if kind in operation_named(case.kernel).kinds else case.kernel
    place: Callable[[Case], int | None] = getattr(offered, "place", lambda case: None)
    try:
        return only_match(function, offered.types(case), wanted, place(case))
    except ValueError as error:
        raise ValueError(f"{case}: {error}") from None


def only_match(
    function: ArrayFunction, types: Sequence[jax.ShapeDtypeStruct], wanted: str, place: int | None = None
) -> Match:
    """Returns the one site of a function that is of an operation, or of a kind of sites; or which of them it is.

    Raises:
      ValueError: no site is recognised, or several are.
    """
    matches, misses = find(Graph(flatten(compat.make_jaxpr(function, *types))), (wanted,), True)
    if matches and place is not None:
        return matches[place]
    if len(matches) != 1:
        raise ValueError(f"{len(matches)} sites were recognised, not one: {[m.reason for m in misses]}")
    return matches[0]
