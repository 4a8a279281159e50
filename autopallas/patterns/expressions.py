"""Expressions over one site's values: the program's own values, and a few that only the pattern forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from autopallas import compat
from autopallas.graph import Graph, Node, Ref, Space
from autopallas.graph.labels import ELEMENTWISE, is_product
from autopallas.program import Constant

Dtype: TypeAlias = np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Apply:
    """An elementwise equation applied to other operands than the program's: what is left after taking terms out."""

    primitive: Primitive
    params: dict[str, Any]
    arguments: tuple[Expression, ...]
    dtype: Dtype


Expression: TypeAlias = Ref | Apply | Constant


class Scope:
    """The values of one site, and small questions about them.

    Attributes:
      graph, space: the program, and the site's axis labels.
      score: the number of the value that holds the scores, once known.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.space = Space(graph)
        self.score: int | None = None
        self._depends: dict[int, bool] = {}

    def node(self, ref: Ref) -> Node | None:
        return self.graph.definitions.get(ref.value)

    def name(self, ref: Ref) -> str | None:
        """The primitive that computes a value; a dot without contraction counts as the product that it is."""
        node = self.node(ref)
        if node is None:
            return None
        return "mul" if is_product(node) else node.name

    def depends(self, value: int) -> bool:
        """Whether a value is computed from the scores.  Numbers grow from operands to results."""
        if self.score is None or value < self.score:
            return False
        if value == self.score:
            return True
        known = self._depends.get(value)
        if known is None:
            node = self.graph.definitions.get(value)
            known = self._depends[value] = node is not None and any(self.depends(i) for i in node.inputs)
        return known

    def mentions_score(self, expression: Expression) -> bool:
        match expression:
            case Ref():
                return self.depends(expression.value)
            case Apply():
                return any(self.mentions_score(a) for a in expression.arguments)
            case _:
                return False

    def key(self, expression: Expression) -> Any:
        """Equal for expressions that compute the same.  Valid once no label is refined any more."""
        match expression:
            case Ref():
                ref = self.space.canonical(expression)
                return ref.value, self.space.view(ref.view)
            case Apply():
                return (expression.primitive.name, *(self.key(a) for a in expression.arguments))
            case _:
                return expression

    def number(self, ref: Ref) -> float | None:
        """The value of a scalar that is known when tracing (arithmetic on literals included), or None."""
        return self._fold(self.space.canonical(ref).value, depth=0)

    def _fold(self, value: int, depth: int) -> float | None:
        graph = self.graph
        if value in graph.literals:
            return _scalar(graph.literals[value])
        if value in graph.constants:
            constant = graph.constants[value]
            return None if compat.is_tracer(constant) or np.size(constant) != 1 else _scalar(np.asarray(constant))
        node = graph.definitions.get(value)
        if node is None or depth > 20 or math.prod(graph.shape(value)) != 1:
            return None
        if node.name in ("reshape", "broadcast_in_dim", "squeeze", "copy") and len(node.inputs) == 1:
            return self._fold(node.inputs[0], depth + 1)
        fold = _FOLDS.get(node.name)
        if fold is None or any(graph.shape(i) not in ((), graph.shape(value)) for i in node.inputs):
            return None
        arguments = [self._fold(i, depth + 1) for i in node.inputs]
        if any(a is None for a in arguments):
            return None
        typed = [np.asarray(a, graph.dtype(i)) for a, i in zip(arguments, node.inputs, strict=True)]
        with np.errstate(all="ignore"):
            return _scalar(np.asarray(fold(node.params, *typed)).astype(graph.dtype(value)))


def conversion_params(dtype: Dtype) -> dict[str, Any]:
    """The parameters of a cast."""
    return {"new_dtype": dtype, "sharding": None, "weak_type": False}


def _scalar(value: np.ndarray[Any, Any]) -> float | None:
    if value.size != 1 or not (value.dtype.kind in "fiub" or jnp.issubdtype(value.dtype, jnp.floating)):
        return None
    return float(value.reshape(()))


_FOLDS: dict[str, Callable[..., Any]] = {
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "mul": lambda _, a, b: a * b,
    "div": lambda _, a, b: a / b if np.issubdtype(a.dtype, np.inexact) else np.trunc(a / b),
    "neg": lambda _, a: -a,
    "max": lambda _, a, b: np.maximum(a, b),
    "min": lambda _, a, b: np.minimum(a, b),
    "sqrt": lambda _, a: np.sqrt(a),
    "rsqrt": lambda _, a: 1 / np.sqrt(a),
    "square": lambda _, a: a * a,
    "exp": lambda _, a: np.exp(a),
    "log": lambda _, a: np.log(a),
    "pow": lambda _, a, b: np.power(a, b),
    "integer_pow": lambda params, a: np.power(a.astype(np.float64), params["y"]),
    "convert_element_type": lambda _, a: a,
}
"""Scalar arithmetic in numpy: while JAX is tracing, its own would be traced."""
assert _FOLDS.keys() <= ELEMENTWISE
