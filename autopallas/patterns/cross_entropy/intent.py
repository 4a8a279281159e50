"""Tells what the author of a program means with logits: a loss, scores of attention, or a piece of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import cached_property

from autopallas.compat import is_transposed
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.equal_loops import loops
from autopallas.graph.labels import is_product
from autopallas.graph.parts import MOST_PARTS
from autopallas.numerics.casts import kind_of
from autopallas.patterns.forward import LAYOUT

__all__ = ["Intent", "changes", "origin", "takes_logarithm"]

_MOST_OF_LABELS = 256
"""Most values among which labels are looked for."""
_LONGEST_STRIPE = 40
"""Most values from which a mask of columns is computed."""
_COUNTS = ELEMENTWISE | LAYOUT | {"iota"}
_RESTATED = LAYOUT | {"copy", "convert_element_type"}
_BOUNDS = frozenset({"add", "clamp", "convert_element_type", "max", "min"})
"""What keeps the argument of a logarithm away from 0."""
_FURTHEST = 8
"""Most equations that only restate a value through which the value is followed."""


def origin(graph: Graph, number: int) -> int:
    """Returns the value from which layout operations and casts make another."""
    for _ in range(_FURTHEST):
        definition = graph.definitions.get(number)
        if definition is None or definition.name not in _RESTATED or len(definition.inputs) != 1:
            break
        (number,) = definition.inputs
    return number


def takes_logarithm(graph: Graph, node: Node) -> bool:
    """Returns whether the logarithm of a sum, or of several, is taken, as for a softmax that is compared with other
    probabilities."""
    if node.name != "reduce_sum":
        return False
    value = node.outputs[0]
    for _ in range(4 + MOST_PARTS):  # logits that are put together have a sum for each part
        users = [u for u in graph.users[value] if len(u.outputs) == 1]
        if any(u.name == "log" for u in users):
            return True
        following = next((u for u in users if u.name in ("abs", "add", "broadcast_in_dim", "reshape")), None)
        if following is None:
            return False
        value = following.outputs[0]
    return False


class Intent:
    """Signs in the flow of some logits of what they are for.

    Attributes:
      inside: numbers of the values of the logits' size.
      ends: the computations that read them.
      touches: tells whether a value is computed from the logits.
      read: the operands of the products that give the logits.
      around: how many loops are around these products.
    """

    def __init__(
        self,
        graph: Graph,
        inside: Set[int],
        ends: Sequence[Node],
        touches: Callable[[int], bool],
        read: Sequence[int],
        around: int,
    ):
        self.graph, self.inside, self.ends, self.touches, self.read = graph, inside, ends, touches, read
        self.around = around

    @property
    def labelled(self) -> bool:
        """Whether labels pick from the logits, so that the program's author meant a loss.

        A router's choice is no label: it is computed from the logits themselves.  Nor is it a loss where each step of a
        loop normalises all of the logits, as Sinkhorn's iterations do.
        """
        once = (node for node in self.ends if loops(node.body) <= self.around)
        return (
            self._has_labels
            or any(takes_logarithm(self.graph, node) for node in once)
            or any(map(self._is_logarithm_of_shares, self.inside))
        )

    def _is_logarithm_of_shares(self, number: int) -> bool:
        """Returns whether a value is the logarithm of quotients of each row, as of probabilities and a small number."""
        node = self.graph.definitions.get(number)
        if node is None or node.name != "log":
            return False
        for _ in range(_FURTHEST):
            node = next((d for i in node.inputs if i in self.inside and (d := self.graph.definitions.get(i))), None)
            if node is None or node.name not in _BOUNDS:
                break
        return node is not None and node.name == "div" and node.inputs[1] not in self.inside

    @cached_property
    def _has_labels(self) -> bool:
        inner = (node for number in self.inside if (node := self.graph.definitions.get(number)) is not None)
        picks = (n for n in self.ends if n.name in ("gather", "scatter-add", "scatter") and n.inputs[0] in self.inside)
        return (
            any(not self.touches(n.inputs[1]) for n in picks)
            or any(node.name == "scatter-add" and not self.touches(node.inputs[1]) for node in inner)
            or any(self._compares_labels(number) for number in self.inside)
        )

    @property
    def attends(self) -> bool:
        """Whether the forward multiplies values of the logits' size by a matrix, as probabilities by values, and no
        labels pick from them: then they are scores, and their exponentials are no loss."""
        return not self._has_labels and any(map(self._multiplies, self.ends))

    def _multiplies(self, node: Node) -> bool:
        """Returns whether an end is a product with a matrix that no derivative made."""
        if node.name != "dot_general" or is_product(node) or node.body.transposed or is_transposed(node.equation):
            return False
        contracting, batch = node.params["dimension_numbers"]
        shapes = (self.graph.shape(number) for number in node.inputs)
        free = [len(shape) > len((*c, *b)) for shape, c, b in zip(shapes, contracting, batch, strict=True)]
        return all(free) or any(own and self._is_read(n) for own, n in zip(free, node.inputs, strict=True))

    def _is_read(self, number: int) -> bool:
        """Returns whether a matrix is one that gives the logits, as a memory that one query for each example reads."""
        own = {origin(self.graph, n) for n in self.read}
        return number not in self.inside and origin(self.graph, number) in own

    def _compares_labels(self, value: int) -> bool:
        node = self.graph.definitions.get(value)
        if node is None or node.name not in ("mul", "select_n"):
            return False
        for operand in node.inputs:
            for _ in range(4):
                inner = self.graph.definitions.get(operand)
                if inner is None:
                    break
                if inner.name == "eq" and operand not in self.inside:
                    whole = kind_of(self.graph.dtype(inner.inputs[0])) in "iu"
                    return whole and not self.touches(operand) and not self._is_stripe(operand)
                if len(inner.inputs) != 1:
                    break
                operand = inner.inputs[0]
        return False

    def _is_stripe(self, value: int) -> bool:
        """Returns whether a value is the same in all rows, and computed from positions and numbers in the source alone,
        as a mask of every other column is: such a comparison compares no labels."""
        graph = self.graph
        if sum(n > 1 for n in graph.shape(value)) > 1:
            return False
        todo, seen = [value], set[int]()
        while todo:
            number = todo.pop()
            if number in seen or number in graph.literals:
                continue
            seen.add(number)
            node = graph.definitions.get(number)
            if node is None or len(seen) > _LONGEST_STRIPE or node.name not in _COUNTS:
                return False
            todo += node.inputs
        return True

    def has_a_head_for_each_step(self, around: int) -> bool:
        """Returns whether each step of the loop has labels of its own, or all steps have the same: then its weight is
        another head, such as that of a codebook or of an ensemble's member, and no piece of the vocabulary, whose
        labels are counted from where it begins."""
        held = [self.graph.definitions[number] for number in self.inside if number in self.graph.definitions]
        todo = [i for node in (*held, *self.ends) for i in node.inputs if i not in self.inside]
        seen: set[int] = set()
        same = counted = False
        while todo and len(seen) < _MOST_OF_LABELS:
            number = todo.pop()
            if number in seen or self.touches(number):
                continue
            seen.add(number)
            node = self.graph.definitions.get(number)
            if node is not None:
                todo += node.inputs
            elif kind_of(self.graph.dtype(number)) in "iu" and number not in self.graph.literals:
                if not changes(self.graph, number, around):
                    same = same or bool(self.graph.shape(number))
                elif number in self.graph.elements and self.graph.shape(number):
                    return True
                else:
                    counted = True
        return same and not counted and not todo


def changes(graph: Graph, value: int, around: int) -> bool:
    """Returns whether a value differs from step to step of the innermost of ``around`` loops."""
    return around > 0 and not any(loops(body) < around for body in graph.bodies_with(value))
