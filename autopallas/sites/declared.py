"""Declared operations: everything that their folder lacks has a default derived from the declaration.

A declaration names the operands and their axes by letters, as einsum does, and gives the computation in plain JAX.
From these follow the site (how it reads and writes a program's arrays, ``vmap``, sharding, the derivative), the
implementations "xla" and "reference", search inputs, and empty tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import PyTree, Shaped
from autopallas.numerics.classes import Numerics
from autopallas.sites.calls import mapped, vjp_at
from autopallas.sites.device import Device
from autopallas.sites.division import ShardableAxes
from autopallas.sites.index_notation import Label, Labels, Operand, View, read, write
from autopallas.sites.indexed_site import IndexedSite
from autopallas.sites.operation import Kernel, Operation, Supported, Unsupported, operation_named, operation_names
from autopallas.sites.spec import BlockSizes, BlockSizesClass, Dtype, NoBlockSizes, Spec

if TYPE_CHECKING:
    from autopallas.tuning.row import Bucket, Rows

__all__ = [
    "MAPPED",
    "DeclaredOperation",
    "DeclaredSite",
    "Differentiated",
    "Labels",
    "Result",
    "declared_named",
    "declared_names",
]

Arrays: TypeAlias = Mapping[str, jax.Array]
Result: TypeAlias = jax.Array | tuple[jax.Array, ...]
"""The result of a site, or its result and its further ones."""

MAPPED = "*"
"""Stands among a site's letters for axes that implementations lack and are mapped over."""


@dataclass(frozen=True, slots=True)
class DeclaredOperation(Operation):
    """An operation with a declaration.

    An implementation in its own module offers ``supports(spec, device)``, ``forward(spec, block_sizes, operands)`` and
    ``backward(spec, block_sizes, operands, cotangent, wanted)``, which returns the cotangents of the operands named in
    ``wanted``.  ``operands`` maps names to canonical arrays: one axis for each letter, of size 1 where an operand does
    not vary along it.  At a site with further results, ``forward`` and the reference return a tuple, ``cotangent`` is
    one, and the ``operands`` of ``backward`` have the further results too, by their names.

    Attributes:
      reference: the computation in plain JAX, ``reference(spec, **operands)``; it casts its result to
        ``spec.result_dtype``.
      operands: the letters of each operand's axes, such as ``{"x": "B M N", "scale": "B N"}``.
      result: the letters of the result.
      sizes: the field of the spec that holds the size of each letter, such as ``{"M": "rows"}``.
      rows: the letters along which sites are computed independently: ``vmap`` adds its axis to the first, which each
        operand has therefore, and any may be sharded over devices.
      sample: a typical spec.
      further: the letters of further results, by name, each of which a site may lack, as it may lack operands: the spec
        has a field ``<name>_dtype``, which is None there.
      stands_for: for a letter of the result, the letter whose axis it is at sites of which no operand has it.
      variants: typical specs of other sites that are measured and checked beside the sample, such as with operands that
        it lacks, by a word for each.
      measured_sizes: sizes of the letters at which rows of the tuned table are measured, beside the sample's.
      untrained: operands of which train steps have no gradients, as they are measured.
      fitted_sizes: where sizes of letters depend on each other, turns any into ones that a site with these letters may
        have, and leaves such as they are.
      block_sizes: the class of its block sizes, if the declaration has them and not a module.
      mapped: whether ``vmap`` maps implementations instead of adding to the rows; their derivative is then JAX's.
      differentiable: whether implementations have a derivative; if not, the original's is used.
    """

    reference: Callable[..., Result] = field(kw_only=True)
    operands: Mapping[str, str] = field(kw_only=True)
    result: str = field(kw_only=True)
    sizes: Mapping[str, str] = field(kw_only=True)
    rows: str = field(kw_only=True)
    sample: Spec = field(kw_only=True)
    further: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    stands_for: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    variants: Mapping[str, Spec] = field(default_factory=dict, kw_only=True)
    measured_sizes: tuple[Mapping[str, int], ...] = field(default=(), kw_only=True)
    untrained: tuple[str, ...] = field(default=(), kw_only=True)
    fitted_sizes: Callable[[Mapping[str, int]], Mapping[str, int]] = field(default=dict, kw_only=True)
    block_sizes: BlockSizesClass = field(default=cast(BlockSizesClass, NoBlockSizes), kw_only=True)
    mapped: bool = field(default=False, kw_only=True)
    differentiable: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        lacking = [name for name, letters in self.operands.items() if self.first_row not in ("", *letters.split())]
        if lacking and not self.mapped:
            raise ValueError(
                f"{self.name}: {', '.join(lacking)} lacks the letter {self.first_row}; each operand has the first "
                'letter of rows, to which vmap adds its axis: begin rows with one that all have, such as B in "B N"'
            )

    @property
    def first_row(self) -> str:
        """First letter of ``rows``, or an empty string."""
        return next(iter(self.rows.split()), "")

    @property
    def contracts(self) -> bool:
        """Whether it sums over letters that its result lacks, as products of matrices do."""
        return not set(self.letters(self.sample)) <= set(self.result.split())

    def letters(self, spec: Spec) -> dict[str, int]:
        """Returns the sizes of the letters that the operands or results of a site with this spec have, in order."""
        has = (own for name, own in self.operands.items() if getattr(spec, f"{name}_dtype") is not None)
        own = set(" ".join([self.result, *has]).split())
        return {letter: getattr(spec, name) for letter, name in self.sizes.items() if letter in own}

    def module(self, name: str) -> object | None:
        """Returns a module of the operation's folder, or its default."""
        found = Operation.module(self, name)
        return self.default(name) if found is None else found

    def default(self, name: str) -> object | None:
        """Returns what stands in for a module that the operation's folder lacks."""
        if name in ("reference", "xla"):
            return Differentiated(f"{self.package}.{name}", self._by_reference)
        if name == "tuned_block_sizes":
            return _NoTable(self.part("block_sizes").BlockSizes)
        defaults: dict[str, object] = {
            "block_sizes": SimpleNamespace(BlockSizes=self.block_sizes),
            "example": SimpleNamespace(operands=_normal),
        }
        return defaults.get(name)

    def _by_reference(self, spec: Spec, block_sizes: BlockSizes | None, operands: Arrays) -> Result:
        return self.reference(spec, **{name: x for name, x in operands.items() if name not in self.further})

    def has(self, name: str) -> bool:
        return name in ("reference", "xla") or Operation.has(self, name)

    def only_restates(self, name: str) -> bool:
        return name == "reference" or (name == "xla" and not Operation.has(self, name))

    def shape(self, spec: Spec, operand: str) -> tuple[int, ...]:
        """Returns the shape of a canonical operand that varies along all its letters."""
        return self.extents(spec, self.operands[operand])

    def extents(self, spec: Spec, letters: str) -> tuple[int, ...]:
        """Returns the sizes of letters."""
        return tuple(getattr(spec, self.sizes[letter]) for letter in letters.split())

    def program(self) -> tuple[Callable[..., Result], tuple[jax.ShapeDtypeStruct, ...]]:
        """Returns a program that computes the operation, and its argument types: the reference of the sample."""
        dtypes: dict[str, Dtype | None] = {name: getattr(self.sample, f"{name}_dtype") for name in self.operands}
        given = {n: jax.ShapeDtypeStruct(self.shape(self.sample, n), d) for n, d in dtypes.items() if d is not None}

        def program(*arrays: jax.Array) -> Result:
            return self.reference(self.sample, **dict(zip(given, arrays, strict=True)))

        return program, tuple(given.values())


def declared_named(name: str) -> DeclaredOperation:
    """Returns the declared operation of a name."""
    found = operation_named(name)
    assert isinstance(found, DeclaredOperation)
    return found


def declared_names(implementation: str = "reference") -> tuple[str, ...]:
    """Returns the names of the declared operations that have an implementation."""
    found = (operation_named(name) for name in operation_names())
    return tuple(own.name for own in found if isinstance(own, DeclaredOperation) and own.has(implementation))


@dataclass(frozen=True)
class DeclaredSite(IndexedSite):
    """A site in a program that computes a declared operation.

    Attributes:
      op: the operation's name.
      form: the spec; its sizes are those of the labels.
      sizes: the size of each label.
      operands: how each canonical operand is read, by name.
      letters: the labels of each letter, and of :data:`MAPPED`.
      result: the view of the result.
      uses: for each array passed to the site, the number of its value, which the positions in ``operands`` refer to.
        Several arrays have one value where a program's backward distinguishes the uses of a value.
      read_at: for each value, the position of the array from which it is read, where that is not its first use: under
        ``vmap`` one use may have the axis, and another not.
      further: the view of each further result, by name.
    """

    op: str
    form: Spec
    sizes: tuple[int, ...]
    operands: tuple[tuple[str, Operand], ...]
    letters: tuple[tuple[str, Labels], ...]
    result: View
    uses: tuple[int, ...]
    read_at: tuple[int, ...] = ()
    further: tuple[tuple[str, View], ...] = ()

    @property
    def operation(self) -> DeclaredOperation:
        found = self.form.operation or operation_named(self.op)
        assert isinstance(found, DeclaredOperation)
        return found

    @cached_property
    def spec(self) -> Spec:
        """Canonical description, which kernels and tables know."""
        extents = {letter: self.extent(labels) for letter, labels in self.letters}
        return replace(self.form, **{name: extents[letter] for letter, name in self.operation.sizes.items()})

    @property
    def has_backward(self) -> bool:
        return self.operation.differentiable

    @property
    def result_views(self) -> tuple[View, ...]:
        return (self.result, *(view for _, view in self.further))

    @property
    def types(self) -> tuple[Dtype, ...]:  # type: ignore[override]  # here not a field: the form has them
        """The dtype of each array passed to the site."""
        of_values = {own.position: getattr(self.form, f"{name}_dtype") for name, own in self.operands}
        return tuple(of_values[value] for value in self.uses)

    # ------------------------------------------------------------------ to canonical arrays and back

    @property
    def _mapped(self) -> Labels:
        """Labels of the axes over which implementations are mapped, the outermost first."""
        return dict(self.letters).get(MAPPED, ())

    def _groups(self, letters: str) -> list[Labels]:
        """Returns the labels of each axis of a canonical array; those over which implementations are mapped come
        first."""
        labels = dict(self.letters)
        return [*((label,) for label in self._mapped), *(labels[letter] for letter in letters.split())]

    def _values(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns one array for each value."""
        return [operands[position] for position in self._positions()]

    def _positions(self) -> tuple[int, ...]:
        """Returns the position at which each value is read."""
        return self.read_at or tuple(self.uses.index(value) for value in range(max(self.uses) + 1))

    def _canonical(self, values: Sequence[jax.Array]) -> dict[str, jax.Array]:
        axes = self.operation.operands
        return {name: read(own, values, self.sizes, self._groups(axes[name])) for name, own in self.operands}

    def _as_large_as_the_result(self, operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Broadcasts operands so that at least one varies along each axis of the result: there may be a cotangent for
        each index of an axis along which no operand varies."""
        letters = self.operation.operands
        for letter in self.operation.result.split():
            size = getattr(self.spec, self.operation.sizes[letter])
            having = [name for name in operands if letter in letters[name].split()]
            axes = {name: letters[name].split().index(letter) for name in having}
            if axes and all(operands[name].shape[axis] != size for name, axis in axes.items()):
                name, axis = next(iter(axes.items()))
                shape = (*operands[name].shape[:axis], size, *operands[name].shape[axis + 1 :])
                operands = operands | {name: jnp.broadcast_to(operands[name], shape)}
        return operands

    # ------------------------------------------------------------------ what the site primitive runs

    def forward(
        self, kernel: Kernel, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Returns (the program's results, no residuals)."""
        return self._results(kernel, block_sizes, self._values(operands)), ()

    def _results(
        self, kernel: Kernel, block_sizes: BlockSizes | None, values: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        def run(canonical: Arrays) -> tuple[jax.Array, ...]:
            found: Result = kernel.forward(self.spec, block_sizes, canonical)
            return tuple(found) if self.further else (cast(jax.Array, found),)

        found = mapped(run, len(self._mapped))(self._canonical(values))
        return tuple(
            write(x, view, self.sizes, self._groups(letters))
            for x, view, letters in zip(found, *self._given, strict=True)
        )

    @property
    def _given(self) -> tuple[tuple[View, ...], tuple[str, ...]]:
        """The views and the letters of the results."""
        letters = (self.operation.further[name] for name, _ in self.further)
        return self.result_views, (self.operation.result, *letters)

    def _canonical_results(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns canonical arrays for arrays of the types of the results."""
        return [
            read(Operand(0, view), (x,), self.sizes, self._groups(letters))
            for x, view, letters in zip(arrays, *self._given, strict=True)
        ]

    def backward(
        self,
        kernel: Kernel,
        block_sizes: BlockSizes | None,
        operands: Sequence[jax.Array],
        results: Sequence[jax.Array],
        residuals: Sequence[jax.Array],
        cotangents: Sequence[jax.Array],
        active: Sequence[int],
    ) -> tuple[jax.Array, ...]:
        """Returns cotangents.  Of several uses of one value, the first gets the whole and the others get zeros."""
        values = self._values(operands)
        wanted = list(dict.fromkeys(self.uses[position] for position in active))

        def prepare(values: Sequence[jax.Array]) -> dict[str, jax.Array]:
            return self._as_large_as_the_result(self._canonical(values))

        given: PyTree = tuple(cotangents)
        if self.operation.mapped:
            _, pull = vjp_at(functools.partial(self._results, kernel, block_sizes), values, wanted)
        else:
            canonical, pull = vjp_at(prepare, values, wanted)
            of_results: PyTree = tuple(self._canonical_results(cotangents))
            known = canonical
            if self.further:
                further = self._canonical_results(results)[1:]
                known = canonical | dict(zip(dict(self.further), further, strict=True))
            else:
                (of_results,) = of_results
            names = frozenset(name for name, own in self.operands if own.position in wanted)
            gradients = kernel.backward(self.spec, block_sizes, known, of_results, names)
            given = {name: gradients[name] if name in names else jnp.zeros_like(x) for name, x in canonical.items()}
        found = dict(zip(wanted, pull(given), strict=True))
        return tuple(
            found.pop(self.uses[position]) if self.uses[position] in found else jnp.zeros_like(operands[position])
            for position in active
        )

    # ------------------------------------------------------------------ on several devices, and under vmap

    def shardable_labels(self) -> frozenset[Label]:
        """Returns those of the rows, since each is computed without the others."""
        return frozenset(label for group in self._groups(self.operation.rows) for label in group)

    def shardable_axes(self) -> ShardableAxes:
        """Returns the labels of each array passed to the site: its uses of one value read that in the same way."""
        reads = (
            Operand(position, own.view)
            for position, value in enumerate(self.uses)
            for _, own in self.operands
            if own.position == value and (not self.read_at or self.read_at[value] == position)
        )
        whole = "" if self.operation.rows else f"{self.op} has no rule for it"
        return replace(super().shardable_axes(), operands=tuple(reads), whole=whole)

    def fields_under_vmap(self, axes: Sequence[int | None], label: Labels) -> Mapping[str, object]:
        """Adds the label to the first of the rows, or to the axes over which implementations are mapped."""
        first = MAPPED if self.operation.mapped else self.operation.first_row
        letters = dict(self.letters)
        letters[first] = (*label, *letters.get(first, ()))
        return {"letters": tuple(letters.items())}

    def spread(self, axes: Mapping[int, int], of_one: Set[int], labels: Labels) -> DeclaredSite:
        """Returns the site that reads some values with the labels, which are among the first of the rows there."""
        letters = {letter: tuple(label for label in own if label not in labels) for letter, own in self.letters}
        values = {self.uses[position]: axis for position, axis in axes.items()}
        moved = replace(self, letters=tuple(letters.items()))
        found = super(DeclaredSite, moved).spread(values, {self.uses[position] for position in of_one}, labels)
        assert found is not None
        return replace(found, **found.fields_under_vmap((), labels))  # type: ignore[arg-type]

    def batched(self, axes: Sequence[int | None], size: int) -> DeclaredSite:
        """Returns the site under vmap, which reads each value from a use that has the axis, if any has."""
        positions = [
            next((p for p, used in enumerate(self.uses) if used == value and axes[p] is not None), before)
            for value, before in enumerate(self._positions())
        ]
        found = super().batched([axes[p] for p in positions], size)
        further = tuple((name, (found.result[0], *view)) for name, view in self.further)
        return replace(found, read_at=tuple(positions), further=further)


class Differentiated:
    """Implementation that consists of a function in JAX, with JAX's derivative of it.

    Its results are within the tolerance of the original's.

    Args:
      name: name of the implementation, after that of a package.
      compute: ``compute(spec, block_sizes, operands)`` gives the result.
    """

    NUMERICS: Numerics = "tolerance"

    def __init__(self, name: str, compute: Callable[[Spec, BlockSizes | None, Arrays], Result]):
        self.__name__ = name  # as a module has one
        self._compute = compute

    def supports(self, spec: Spec, device: Device) -> Supported | Unsupported:
        return Supported()

    def forward(self, spec: Spec, block_sizes: BlockSizes | None, operands: Arrays) -> Result:
        return self._compute(spec, block_sizes, operands)

    def backward(
        self,
        spec: Spec,
        block_sizes: BlockSizes | None,
        operands: Arrays,
        cotangent: Result,
        wanted: frozenset[str],
    ) -> Arrays:
        def varied(chosen: Arrays) -> Result:
            return self._compute(spec, block_sizes, {**operands, **chosen})

        _, pull = jax.vjp(varied, {name: operands[name] for name in sorted(wanted)})
        found: Arrays
        (found,) = pull(cotangent)
        return found


class _NoTable:
    """Tuned block sizes of an operation for which nothing was measured.

    Args:
      block_sizes: the class of its block sizes.
    """

    BUCKETS: tuple[Bucket, ...] = ()
    TABLE: Mapping[str, Rows] = {}

    def __init__(self, block_sizes: BlockSizesClass):
        self._block_sizes = block_sizes

    def find(self, *_: object) -> None:
        return None

    def infer_block_sizes(self, spec: Spec, *_: object) -> BlockSizes:
        return self._block_sizes.candidates(spec)[0]

    def table_key(self, spec: Spec, implementation: str, direction: str) -> tuple[str, str, str, str, str]:
        return implementation, direction, str(spec.widest_dtype), "", ""


def _normal(site: DeclaredSite, types: Sequence[Shaped], key: int = 0) -> list[np.ndarray]:
    """Returns inputs for a search: normally distributed numbers, or zeros for dtypes that are not floating."""
    random = np.random.default_rng(key)
    values: list[np.ndarray] = []
    for kind in (types[site.uses.index(value)] for value in range(max(site.uses) + 1)):
        floating = jnp.issubdtype(kind.dtype, jnp.floating)
        given = random.standard_normal(kind.shape, np.float32) if floating else np.zeros(kind.shape)
        values.append(np.asarray(given, kind.dtype))
    return [values[value] for value in site.uses]
