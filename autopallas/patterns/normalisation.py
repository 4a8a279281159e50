"""Describes a normalisation of rows in a program, and how its rows are turned where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopallas.graph import Graph, Node, Ref
from autopallas.graph.labels import Atom
from autopallas.patterns.row_forms import Conclusion

__all__ = ["Normalisation", "Turn", "ends_with"]


@dataclass(frozen=True)
class Turn:
    """Pairs (p, q) of columns become ``(p * cos - q * sin, q * cos + p * sin)``, as in rotary embedding.

    Attributes:
      cos, sin: uses of values that vary along labels of rows, along ``angle``, and along ``pair`` where the two columns
        of a pair have numbers of their own.
      pair, angle: the labels of the two columns of a pair, and of the pairs.
      start: the first column that is turned.
      neighbours: whether the two columns of a pair are neighbours, and not half of the turned columns apart.
      first_adds, second_subtracts: whether the sine's products have other signs than above.
    """

    cos: Ref
    sin: Ref
    pair: tuple[Atom, ...]
    angle: tuple[Atom, ...]
    start: int
    neighbours: bool
    first_adds: bool
    second_subtracts: bool

    @property
    def atoms(self) -> frozenset[Atom]:
        """The labels along which it varies."""
        return _atoms(self.cos) | _atoms(self.sin)

    def at(self, image: Mapping[int, int]) -> Turn:
        """Returns the same turn by corresponding values."""
        cos, sin = (Ref(image[ref.value], ref.view) for ref in (self.cos, self.sin))
        return replace(self, cos=cos, sin=sin)


@dataclass(frozen=True)
class Normalisation:
    """``gain * (x - centre) / sqrt(factor * moment + epsilon) * scale + shift`` along the columns, where a program
    computes it.

    Attributes:
      result: the node that gives it.
      numbers: what else it consists of.
      x, scale, shift: uses of values; the latter two do not vary with the rows.
      dimensions: the labels of each axis of the result.
      columns: the labels along which it is normalised.
      sizes: the sizes of all labels.
      earlier: scale and shift before layout operations, for a body that has these values and lacks the later ones.
      turn: how columns of each row are rotated behind it, if they are.
    """

    result: Node
    numbers: Conclusion
    x: Ref
    scale: Ref | None
    shift: Ref | None
    dimensions: tuple[tuple[Atom, ...], ...]
    columns: tuple[Atom, ...]
    sizes: dict[Atom, int]
    earlier: tuple[Ref | None, Ref | None]
    turn: Turn | None = None

    @property
    def strided(self) -> bool:
        """Whether other axes of the result come after its columns."""
        return not ends_with(self.dimensions, self.columns)

    @property
    def of_columns(self) -> bool:
        """Whether each column has a scale or a shift of its own."""
        return any(ref is not None and not _atoms(ref).isdisjoint(self.columns) for ref in (self.scale, self.shift))

    @property
    def of_one_axis(self) -> bool:
        """Whether the columns are one axis of the result."""
        return sum(not set(own).isdisjoint(self.columns) for own in self.dimensions) == 1

    def at(self, graph: Graph, image: Mapping[int, int]) -> Normalisation:
        """Returns the same normalisation of corresponding values."""
        x, scale, shift = (
            None if ref is None else Ref(image[ref.value], ref.view) for ref in (self.x, self.scale, self.shift)
        )
        assert x is not None
        result = graph.definitions[image[self.result.outputs[0]]]
        turn = None if self.turn is None else self.turn.at(image)
        return replace(self, result=result, x=x, scale=scale, shift=shift, earlier=(scale, shift), turn=turn)


def _atoms(ref: Ref) -> frozenset[Atom]:
    return frozenset(atom for _, own in ref.view for atom in own)


def ends_with(dimensions: Sequence[Sequence[Atom]], columns: Sequence[Atom]) -> bool:
    every = [atom for own in dimensions for atom in own]
    return every[len(every) - len(columns) :] == [*columns]
