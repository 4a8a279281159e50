"""Keys of equations: equal where equations compute the same from the same values."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from autopallas import array_types, compat, jaxprs
from autopallas.compat import Dtype, JaxprEqn, Params, ShapedArray
from autopallas.graph.custom_rules import called_program, is_elementwise_call
from autopallas.graph.flatten import Body
from autopallas.graph.keys import hashable

__all__ = ["MERGED", "EquationKeys", "Node"]

_IGNORED = frozenset({"sharding", "out_sharding", "weak_type", "name", "ft_in", "ft_out"})
"""Parameters that do not change the value."""
_UPDATES = frozenset({"scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"})
"""Scatters whose names tell how they update; their update jaxprs are traced anew in each context, and add nothing."""
_UPDATE = frozenset({"update_jaxpr", "update_consts"})
_COMMUTATIVE = frozenset({"add", "mul", "add_any", "max", "min", "and", "or", "xor", "eq", "ne"})
MERGED = frozenset({"broadcast_in_dim", "transpose", "unstack"})
"""Primitives that are merged with others of their kind that give their operand."""


class Node:
    """One computation: a primitive applied to numbered values.  ``equation`` is its first occurrence, in ``body``."""

    __slots__ = ("body", "equation", "inputs", "name", "outputs", "params")

    def __init__(self, equation: JaxprEqn, inputs: tuple[int, ...], outputs: tuple[int, ...], body: Body):
        name = equation.primitive.name
        self.name = jaxprs.operation_name(equation) if name == "scatter" else name
        self.equation, self.inputs, self.outputs, self.body = equation, inputs, outputs, body
        self.params: Params = equation.params


class EquationKeys:
    """Keys of the equations of numbered values.

    Args:
      several_meshes: whether equal equations may stand on different meshes.

    Attributes:
      avals: per number, the abstract value (shape, dtype).
      literals: numbers of scalar literals, with their values.
      definitions: per number, the node that computes it.
    """

    def __init__(self, several_meshes: bool):
        self.avals: list[ShapedArray] = []
        self.literals: dict[int, np.ndarray] = {}
        self.definitions: dict[int, Node] = {}
        self._several_meshes = several_meshes
        self._said: dict[int, tuple[Params, int | None]] = {}
        """By the identity of an equation's parameters, which calls of one function share: (parameters, number)."""
        self._meanings: list[Hashable] = [()]
        """By these numbers, the keys of parameters, which are long to compare."""
        self._numbered: dict[Hashable, int] = {(): 0}

    def shape(self, number: int) -> tuple[int, ...]:
        return tuple(self.avals[number].shape)

    def dtype(self, number: int) -> Dtype:
        return self.avals[number].dtype

    def key(self, equation: JaxprEqn, operands: Sequence[int], frame: tuple[int, ...]) -> Hashable | None:
        """Returns a key that is equal for equations that compute the same from the same, or None.

        Of equations without operands, those of other programs have the same key.
        """
        found = self.key_here(equation, operands, frame)
        if found is None or type(found[3]) is not int:
            return found
        return *found[:3], self._meanings[found[3]], *found[4:]

    def key_here(
        self, equation: JaxprEqn, operands: Sequence[int], frame: tuple[int, ...]
    ) -> tuple[Hashable, ...] | None:
        """Returns a key as :meth:`key` does, which is quicker to compare and stands for nothing in other programs."""
        name = equation.primitive.name
        params: Hashable = self.parameters(equation) if equation.params else 0
        if params is None:
            return None
        if operands and name in MERGED:
            if name == "broadcast_in_dim":
                operands, shape, dimensions = self._broadcast(equation, operands)
                params = shape, dimensions
            elif name == "transpose":
                repeated = self.as_broadcast(equation, operands)
                if repeated is not None:
                    return self.key_here(repeated[0], [repeated[1]], frame)
                operands, params = self._transpose(equation, operands[0])
            else:
                operands, params = self._unstack(equation, operands[0])
        ordered = sorted(operands) if name in _COMMUTATIVE else operands
        results = equation.outvars
        if len(results) == 1 and type(aval := results[0].aval) is ShapedArray:
            types: tuple[Hashable, ...] = ((aval.shape, aval.dtype),)
        else:
            types = tuple([(v.aval.shape, v.aval.dtype) for v in results if hasattr(v.aval, "shape")])
        mesh: Hashable = ()
        if self._several_meshes and all(number in self.literals for number in operands):  # otherwise the operands tell
            mesh = tuple(array_types.axis_types(v.aval) for v in equation.outvars)
        if name.startswith("random_"):
            mesh = mesh, compat.draws_by_position(equation)
        return name, frame, tuple(ordered), params, types, mesh

    def parameters(self, equation: JaxprEqn) -> int | None:
        """Returns a number for what an equation's parameters mean; None if they cannot be compared."""
        given = equation.params
        known = self._said.get(id(given))
        if known is not None:
            return known[1]
        said: Hashable
        if is_elementwise_call(equation):
            said = called_program(equation)
        else:
            left_out = _IGNORED | _UPDATE if equation.primitive.name in _UPDATES else _IGNORED
            said = tuple([(name, given[name]) for name in sorted(given) if name not in left_out])
        if not _can_be_hashed(said) and not _can_be_hashed(said := hashable(said)):
            self._said[id(given)] = given, None
            return None
        number = self._numbered.setdefault(said, len(self._meanings))
        if number == len(self._meanings):
            self._meanings.append(said)
        self._said[id(given)] = given, number
        return number

    def _broadcast(
        self, equation: JaxprEqn, operands: Sequence[int]
    ) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
        """Merges a broadcast with the broadcast that is its operand: vmap makes two where grad makes one."""
        number, dimensions = operands[0], [int(d) for d in equation.params["broadcast_dimensions"]]
        while (node := self.definitions.get(number)) is not None and node.name == "broadcast_in_dim":
            if len(node.inputs) > 1 or len(operands) > 1:
                break
            number, dimensions = node.inputs[0], [dimensions[int(d)] for d in node.params["broadcast_dimensions"]]
        return [number, *operands[1:]], tuple(equation.params["shape"]), tuple(dimensions)

    def _transpose(self, equation: JaxprEqn, number: int) -> tuple[list[int], tuple[int, ...]]:
        """Merges a transpose with the transpose that is its operand.

        A transpose that undoes another does not get the operand's number, since what a site gives may be in between.
        """
        order = [int(d) for d in equation.params["permutation"]]
        while (node := self.definitions.get(number)) is not None and node.name == "transpose":
            number, order = node.inputs[0], [int(node.params["permutation"][d]) for d in order]
        return [number], tuple(order)

    def as_broadcast(self, equation: JaxprEqn, operands: Sequence[int]) -> tuple[JaxprEqn, int] | None:
        """Returns (the broadcast, its operand) that equals the transpose of a broadcast, or None."""
        (number,), order = self._transpose(equation, operands[0])
        node = self.definitions.get(number)
        if node is None or node.name != "broadcast_in_dim" or len(node.inputs) != 1:
            return None
        (source,), shape, dimensions = self._broadcast(node.equation, node.inputs)
        places = [order.index(d) for d in dimensions]
        if places != sorted(places):
            return None
        params = node.params | {"shape": tuple(shape[d] for d in order), "broadcast_dimensions": tuple(places)}
        return node.equation.replace(outvars=equation.outvars, params=params), source

    def _unstack(self, equation: JaxprEqn, number: int) -> tuple[Sequence[int], Hashable]:
        """Does the same for parts along an axis: returns the source, its axis, and the order of the other axes."""
        axis, node = int(equation.params["axis"]), self.definitions.get(number)
        order = tuple(range(len(self.shape(number))))
        if node is not None and node.name == "transpose":
            (number,), order = self._transpose(node.equation, node.inputs[0])
        return [number], (order[axis], (*order[:axis], *order[axis + 1 :]))


def _can_be_hashed(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
