"""Finds what a program makes of weights that it stores in 8 bits before it multiplies them: casts, and scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from autopallas.compat import Dtype
from autopallas.graph import Body, Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.extract import jaxpr_of, nodes_between
from autopallas.graph.labels import Ref
from autopallas.kernels.grouped_matmul.site import GroupedMatmulSite
from autopallas.numerics.casts import is_quantised
from autopallas.patterns.expressions import Scope, operation
from autopallas.patterns.match import Match, Mismatch
from autopallas.sites.elementwise import (
    Constant,
    ElementwiseProgram,
    Input,
    Instruction,
    Score,
    Side,
    parameters,
    traced,
)
from autopallas.sites.index_notation import Labels, Operand, Source, View

__all__ = ["STORED_DTYPES", "cast_program", "with_widening"]

STORED_DTYPES = frozenset({"float8_e4m3fn", "float8_e5m2"})
"""Floats of 8 bits all of which are numbers of bfloat16, float16 and float32."""

_LONGEST = 12
"""Most operations on a weight."""


class _OtherWeights(Exception):
    """Raised where weights are not made of such that are stored; the message says why, for debugging."""


def cast_program(source: Dtype, target: Dtype) -> ElementwiseProgram:
    """Returns the program of a cast of weights."""
    return traced(lambda weight: jax.lax.convert_element_type(weight, target), Score(source))


def with_widening(graph: Graph, match: Match, alive: frozenset[int]) -> Match:
    """Returns a grouped matmul that reads weights as they are stored, where the program computes those that it
    multiplies, element by element, from one array of 8 bits, from scales and from known numbers.

    Scales are repeated along axes of the weights. All of it is computed where the product is, and nothing but grouped
    matmuls reads it, or it would be computed besides.
    """
    site = match.site
    assert isinstance(site, GroupedMatmulSite)
    number = match.operands[site.second.position]
    if site.widening is not None or is_quantised(graph.dtype(number)):
        return match
    labels = [own for _, own in site.second.view]
    if any(len(own) != 1 for own in labels) or 1 in graph.shape(number):
        return match
    reader = _Reader(graph, match.body, number, [label for (label,) in labels])
    try:
        program = reader.program()
    except (Mismatch, _OtherWeights):
        return match
    stored, scales = reader.stored.value, [scale.value for scale in reader.scales]
    if not _is_read_by_products(graph, number, stored, scales, alive):
        return match
    operands = [*match.operands, *scales]
    operands[site.second.position] = stored
    nodes, captured = nodes_between(graph, operands, match.results)
    if captured:
        return match
    site, views = reader.divided(site)
    return replace(
        match,
        site=replace(
            site,
            second=Operand(site.second.position, views[0]),
            types=tuple(graph.dtype(operand) for operand in operands),
            widening=program,
            scales=tuple(Operand(len(match.operands) + i, view) for i, view in enumerate(views[1:])),
        ),
        operands=tuple(operands),
        equations=tuple(nodes),
        original=jaxpr_of(graph, nodes, operands, match.results),
    )


def _is_read_by_products(graph: Graph, number: int, stored: int, scales: Sequence[int], alive: frozenset[int]) -> bool:
    """Returns whether grouped matmuls alone read what is made of the stored weights."""
    nodes, _ = nodes_between(graph, (stored, *scales), [number])
    own = {id(node) for node in nodes}
    made = {stored}
    for node in nodes:
        if made.isdisjoint(node.inputs):
            continue
        made.update(node.outputs)
        if not graph.returned.isdisjoint(node.outputs):
            return False
        for user in (user for output in node.outputs for user in graph.users[output]):
            if user.equation.effects or not alive.isdisjoint(user.outputs):
                if id(user) not in own and user.name != "ragged_dot_general":
                    return False
    return True


class _Reader:
    """Reads weights back to the array of 8 bits.

    Attributes:
      stored: that array as the weights read it, once it is known.
      scales: the scales as they read those.
    """

    def __init__(self, graph: Graph, body: Body, number: int, labels: Sequence[int]):
        self.graph = graph
        self.stored = Ref(-1, ())
        self.scales: list[Ref] = []
        self._places = graph.positions[body]
        self._scope = Scope(graph)
        self._weights = self._scope.space.full(number)
        self._labels = {atom: label for (_, (atom,)), label in zip(self._weights.view, labels, strict=True)}
        self._inputs: dict[Input, int] = {}
        self._lines: list[tuple[Node, list[tuple[bool, int]]]] = []
        self._registers: dict[Ref, tuple[bool, int]] = {}
        self._narrow: dict[int, bool] = {}

    def program(self) -> ElementwiseProgram:
        """Returns the program of the weights.

        Raises:
          _OtherWeights: they are not computed as such a program computes them.
        """
        is_line, result = self._register(self._weights)
        if not is_line:
            raise _OtherWeights("nothing becomes of the weights")
        instructions = []
        for node, registers in self._lines:
            primitive, params = operation(node)
            arguments = tuple(len(self._inputs) + n if line else n for line, n in registers)
            dtype = np.dtype(self.graph.dtype(node.outputs[0]))
            instructions.append(Instruction(primitive, parameters(params), arguments, dtype))
        program = ElementwiseProgram(tuple(self._inputs), tuple(instructions), len(self._inputs) + result)
        try:
            hash(program)
        except TypeError:
            raise _OtherWeights("a parameter is no plain value") from None
        return program

    def _register(self, ref: Ref) -> tuple[bool, int]:
        """Returns what computes a value: (whether it is a line, the number of the line or of the input)."""
        at = self._undone(ref)
        if at not in self._registers:
            self._registers[at] = self._read(at)
        return self._registers[at]

    def _undone(self, ref: Ref) -> Ref:
        """Returns the same elements in the array that is read whole before most layout operations, of those that the
        product's body has."""
        found = last = ref
        for at in self._scope.space.chain(ref):
            if last.value != at.value and self._places.get(last.value, (-1,))[0] < 0:
                break
            last = at
            if self._is_whole(at):
                found = at
        return found

    def _is_whole(self, at: Ref) -> bool:
        space = self._scope.space
        dimensions = zip(space.view(at.view), self.graph.shape(at.value), strict=True)
        return all(not offset and space.extent(atoms) == size for (offset, atoms), size in dimensions)

    def _read(self, at: Ref) -> tuple[bool, int]:
        graph, value = self.graph, at.value
        dtype = np.dtype(graph.dtype(value))
        if dtype.name in STORED_DTYPES:
            space = self._scope.space
            if self.stored.value >= 0 and not space.same(self.stored, at):
                raise _OtherWeights("there are two arrays of 8 bits")
            if space.atoms(at) != space.atoms(self._weights) or not self._is_whole(at):
                raise _OtherWeights("the array of 8 bits is repeated, or a part is read")
            self.stored = at
            return self._input(Score(dtype))
        if self._is_narrow(at, _LONGEST):
            operands = self._scope.space.uses(at)
            assert operands is not None
            self._lines.append((graph.definitions[value], [self._register(operand) for operand in operands]))
            return True, len(self._lines) - 1
        if (known := self._scope.number(at)) is not None:
            kind = int if dtype.kind in "iu" else bool if dtype.kind == "b" else float
            return self._input(Constant(kind(known), dtype))
        if value not in self._places:
            raise _OtherWeights("a scale is not there where the product is")
        if not self._is_whole(at):
            raise _OtherWeights("a part of a scale is read")
        known_as = (i for i, scale in enumerate(self.scales) if self._scope.space.same(scale, at))
        if (position := next(known_as, None)) is None:
            position = len(self.scales)
            self.scales.append(at)
        return self._input(Side(position, dtype))

    def _input(self, given: Input) -> tuple[bool, int]:
        return False, self._inputs.setdefault(given, len(self._inputs))

    def _is_narrow(self, at: Ref, deepest: int) -> bool:
        """Returns whether a value is computed here, element by element and in few steps, from an array of 8 bits."""
        value = at.value
        if self.graph.dtype(value).name in STORED_DTYPES:
            return True
        if value not in self._narrow:
            self._narrow[value] = self._steps_from_narrow(at, deepest)
        return self._narrow[value]

    def _steps_from_narrow(self, at: Ref, deepest: int) -> bool:
        node = self.graph.definitions.get(at.value)
        if node is None or node.name not in ELEMENTWISE or len(node.outputs) != 1 or node.equation.effects:
            return False
        if deepest == 0 or self._places.get(at.value, (-1,))[0] < 0:
            return False
        operands = self._scope.space.uses(at)
        return operands is not None and any(self._is_narrow(self._undone(o), deepest - 1) for o in operands)

    def divided(self, site: GroupedMatmulSite) -> tuple[GroupedMatmulSite, list[View]]:
        """Returns the site with labels divided as scales of blocks divide them, and the views of the stored weights and
        of the scales under these labels."""
        space = self._scope.space
        labels: dict[int, int] = {}  # by the space's
        parts: dict[int, Labels] = {}  # by the site's
        sizes = list(site.sizes)
        for atom, label in self._labels.items():
            own = space.resolve((atom,))
            if own != (atom,):
                parts[label] = tuple(range(len(sizes), len(sizes) + len(own)))
                sizes += [space.sizes[part] for part in own]
            labels.update(zip(own, parts.get(label, (label,)), strict=True))

        def split(given: Labels) -> Labels:
            return tuple(part for label in given for part in parts.get(label, (label,)))

        def view(given: View) -> View:
            return tuple((offset, split(own)) for offset, own in given)

        def change(source: Source) -> Source:
            return replace(source, view=view(source.view)) if isinstance(source, Operand) else source

        found = replace(
            site.with_sources(change),
            sizes=tuple(sizes),
            result=view(site.result),
            row_labels=split(site.row_labels),
            contracting_labels=split(site.contracting_labels),
            column_labels=split(site.column_labels),
            group_labels=split(site.group_labels),
            batch_labels=split(site.batch_labels),
        )
        views = [
            tuple((0, tuple(labels[a] for a in own)) for _, own in space.view(ref.view)) for ref in self._read_whole
        ]
        return found, views

    @property
    def _read_whole(self) -> tuple[Ref, ...]:
        return self.stored, *self.scales
