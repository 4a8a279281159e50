"""Defines expressions over one site's values: the program's own values, and a few that only the pattern forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from autopallas import compat
from autopallas.compat import Dtype, Params
from autopallas.graph import Graph, Node, Ref, Space
from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call, rule_of
from autopallas.graph.labels import View, is_product
from autopallas.patterns.advice import OWN_DERIVATIVE, PRECISION
from autopallas.patterns.match import Mismatch
from autopallas.sites.elementwise import Axis, Constant, custom_p


@dataclass(frozen=True, slots=True)
class Apply:
    """An elementwise equation applied to operands other than the program's, as left after terms were taken out."""

    primitive: Primitive
    params: Params
    arguments: tuple[Expression, ...]
    dtype: Dtype


@dataclass(frozen=True, slots=True)
class Position:
    """The position along an axis of the site."""

    axis: Axis
    dtype: Dtype


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A number per row that a kernel computes from the tile values ``argument``; ``label`` is the position of a
    pick."""

    kind: str
    argument: Expression
    dtype: Dtype
    label: Expression | None = None


_LONGEST_CONSTANT = 2**24
"""Most elements of a captured array that is looked into."""
_DEEPEST = 64
"""Most operations on one path of a scalar that is folded."""

Expression: TypeAlias = Ref | Apply | Constant | Position | Computed


class Scope:
    """Holds the values of one site and answers small questions about them.

    Attributes:
      graph, space: the program, and the site's axis labels.
      score: the number of the value that holds the scores, once known.
      further: numbers of values that count as scores too: other products that are read together with them.
      follows: tells whether a value is computed from the scores, if that is known already; None if not.
      given: numbers of the results of other sites with the same scores, which do not count as computed from them.
    """

    def __init__(self, graph: Graph, through: bool = False, space: Space | None = None):
        self.graph = graph
        self.space = Space(graph, through) if space is None else space
        self.score: int | None = None
        self.further: frozenset[int] = frozenset()
        self.follows: Callable[[int], bool] | None = None
        self.given: frozenset[int] = frozenset()
        self._depends: dict[int, bool] = {}
        self._keys: dict[int, tuple[Apply, int, Hashable]] = {}
        self._forms: dict[Hashable, int] = {}
        self._numbers: dict[int, float | int | None] = {}

    def go_on(self, graph: Graph) -> None:
        """Asks ``graph`` from now on, instead of a graph that notes what is asked."""
        self.graph = self.space.graph = graph

    def node(self, ref: Ref) -> Node | None:
        return self.graph.definitions.get(ref.value)

    def name(self, ref: Ref) -> str | None:
        """Returns the primitive that computes a value; a dot without contraction counts as a product."""
        node = self.node(ref)
        if node is None:
            return None
        return "mul" if is_product(node) else node.name

    def depends(self, value: int) -> bool:
        """Returns whether a value is computed from the scores."""
        if self.score is None:
            return False
        scores = (self.score, *self.further)
        first = min(scores)
        if value < first:
            return False
        if self.follows is not None:
            return self.follows(value)
        self._depends |= dict.fromkeys(self.given, False) | dict.fromkeys(scores, True)
        return computed_from(self.graph, value, self._depends, first)

    def is_score(self, value: int) -> bool:
        """Returns whether a value holds scores themselves."""
        return value == self.score or value in self.further

    def mentions_score(self, expression: Expression) -> bool:
        return any(
            isinstance(part, Computed) or isinstance(part, Ref) and self.depends(part.value)
            for part in parts_of(expression)
        )

    def reads_score(self, expression: Expression) -> bool:
        """Returns whether the elements that an expression reads come from scores.

        In a value that holds scores side by side with other elements, the others do not count.
        """
        return any(
            isinstance(part, Computed) or isinstance(part, Ref) and self._element_depends(part)
            for part in parts_of(expression)
        )

    def _element_depends(self, ref: Ref) -> bool:
        seen: set[tuple[int, View]] = set()
        todo = [ref]
        while todo:
            at = self.space.canonical(todo.pop())
            key = at.value, self.space.view(at.view)
            if key in seen or not self.depends(at.value):
                continue
            seen.add(key)
            operands = None if self.is_score(at.value) else self.space.operands(at)
            if operands is None:
                return True
            todo += operands
        return False

    def key(self, expression: Expression) -> Hashable:
        """Returns a key that is equal for expressions that compute the same; it is valid until a label is refined."""
        match expression:
            case Ref():
                ref = self.space.canonical(expression)
                return ref.value, self.space.view(ref.view)
            case Apply():
                return self._form(expression)
            case Computed():
                label = None if expression.label is None else self.key(expression.label)
                return "computed", expression.kind, self.key(expression.argument), label
            case _:
                return expression

    def _form(self, expression: Apply) -> Hashable:
        """Numbers the forms of applied equations, so that a shared part is looked at only once."""
        known = self._keys.get(id(expression))
        if known is None or known[1] != self.space.refinements:
            params = repr(sorted(expression.params.items(), key=lambda item: item[0])) if expression.params else ""
            own = (expression.primitive.name, params, str(expression.dtype))
            form = (*own, *(self.key(a) for a in expression.arguments))
            number = self._forms.setdefault(form, len(self._forms))
            known = self._keys[id(expression)] = expression, self.space.refinements, ("applied", number)
        return known[2]

    def dtype(self, expression: Expression) -> Dtype:
        return self.graph.dtype(expression.value) if isinstance(expression, Ref) else expression.dtype

    def exponential(self, ref: Ref) -> tuple[Ref, float] | None:
        """Returns (x, c) if a value is ``exp(c x)`` with a positive constant c."""
        name = self.name(ref)
        operands = self.space.operands(ref) if name in ("exp", "exp2", "pow") else None
        if operands is None:
            return None
        if name == "pow":
            base = self.number(operands[0])
            return None if base is None or not 1 < base < math.inf else (operands[1], math.log(base))
        return operands[0], 1.0 if name == "exp" else math.log(2)

    def number(self, ref: Ref) -> float | int | None:
        """Returns the value of a scalar that is known when tracing (arithmetic on literals included), or None.

        Numbers of integer types are returned as integers, since a float does not hold all those of 64 bits.
        """
        return self._fold(self.space.canonical(ref).value, depth=0)

    def captured(self, ref: Ref) -> np.ndarray | None:
        """Returns the elements of a captured array, if they can be looked at."""
        constant = self.graph.constants.get(ref.value)
        if constant is None or compat.is_tracer(constant) or np.size(constant) > _LONGEST_CONSTANT:
            return None
        return np.asarray(constant)

    def _fold(self, value: int, depth: int) -> float | int | None:
        if value not in self._numbers:
            self._numbers[value] = self._folded(value, depth)
        return self._numbers[value]

    def _folded(self, value: int, depth: int) -> float | int | None:
        graph = self.graph
        if value in graph.literals:
            return _scalar(graph.literals[value])
        if value in graph.constants:
            constant = graph.constants[value]
            return None if compat.is_tracer(constant) or np.size(constant) != 1 else _scalar(np.asarray(constant))
        node = graph.definitions.get(value)
        if node is None or depth > _DEEPEST or math.prod(graph.shape(value)) != 1:
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
            return _cast(np.asarray(fold(node.params, *typed)), graph.dtype(value))


def parts_of(expression: Expression) -> Iterator[Expression]:
    """Yields an expression and everything it is applied to, each once; does not enter the argument of a statistic."""
    seen: set[int] = set()
    todo = [expression]
    while todo:
        part = todo.pop()
        if isinstance(part, Apply):
            if id(part) in seen:
                continue
            seen.add(id(part))
            todo += part.arguments[::-1]
        yield part


def computed_from(graph: Graph, value: int, known: dict[int, bool], first: int) -> bool:
    """Returns whether a value is computed from values that ``known`` maps to True; none of those comes before
    ``first``.

    Adds each answer to ``known``, so that each value of a program is looked at once. Earlier operands are looked at
    first: what is computed from a value is, mostly, soon found to be, without a look at all that lies between.
    """

    def operands(number: int) -> Iterator[int]:
        node = graph.definitions.get(number) if number >= first else None
        return iter(sorted(i for i in (node.inputs if node is not None else ()) if i >= first))

    path = [] if value in known else [(value, operands(value))]
    while path:
        number, rest = path[-1]
        following = next((i for i in rest if known.get(i, True)), None)
        if following is None:
            known[number] = False
            path.pop()
        elif following in known:
            known.update((one, True) for one, _ in path)
            break
        else:
            path.append((following, operands(following)))
    return known[value]


def operation(node: Node) -> tuple[Primitive, Params]:
    """Returns the primitive and the parameters of an elementwise computation.

    Raises:
      Mismatch: it calls a function whose derivative is not elementwise.
    """
    if not is_elementwise_call(node.equation):
        return node.equation.primitive, node.params
    rule = rule_of(node.equation)
    if rule is None:
        raise Mismatch("a function with a derivative of its own cannot be carried", advice=OWN_DERIVATIVE)
    return custom_p, {"value": rule.value, "tangent": rule.tangent}


def _cast(value: np.ndarray, dtype: Dtype) -> float | int | None:
    """Casts a scalar; None where platforms differ, as for a float that an integer type does not hold."""
    if dtype.kind in "iu" and value.dtype.kind not in "iub":
        if not jnp.iinfo(dtype).min <= float(value) <= jnp.iinfo(dtype).max:
            return None
    return _scalar(value.astype(dtype))


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divides two scalars; whole numbers exactly, rounded towards 0."""
    if a.dtype.kind not in "iu":
        return np.asarray(a / b)
    quotient, rest = np.divmod(a, b)
    return np.asarray(quotient + ((rest != 0) & ((rest < 0) != (a < 0))), a.dtype)


def _scalar(value: np.ndarray) -> float | int | None:
    if value.size != 1 or not (value.dtype.kind in "fiub" or jnp.issubdtype(value.dtype, jnp.floating)):
        return None
    return int(value.reshape(())) if value.dtype.kind in "iub" else float(value.reshape(()))


_FOLDS: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "mul": lambda _, a, b: a * b,
    "div": lambda _, a, b: _divided(a, b),
    "neg": lambda _, a: -a,
    "gt": lambda _, a, b: a > b,
    "ge": lambda _, a, b: a >= b,
    "lt": lambda _, a, b: a < b,
    "le": lambda _, a, b: a <= b,
    "eq": lambda _, a, b: a == b,
    "ne": lambda _, a, b: a != b,
    "max": lambda _, a, b: np.maximum(a, b),
    "min": lambda _, a, b: np.minimum(a, b),
    "sqrt": lambda _, a: np.sqrt(a),
    "rsqrt": lambda _, a: 1 / np.sqrt(a),
    "square": lambda _, a: a * a,
    "exp": lambda _, a: np.exp(a),
    "log": lambda _, a: np.log(a),
    "pow": lambda _, a, b: np.power(a, b),
    "integer_pow": lambda params, a: a ** params["y"] if a.dtype.kind in "iu" else a.astype(np.float64) ** params["y"],
    "convert_element_type": lambda _, a: a,
}
"""Scalar arithmetic in numpy: while JAX is tracing, operations of JAX would be traced."""
assert _FOLDS.keys() <= ELEMENTWISE


def precision_of(graph: Graph, node: Node) -> str | None:
    """Returns the precision that a contraction asks for, or None for the default."""
    if node.name != "dot_general":
        return None
    precision = node.params["precision"]
    if precision is None:
        return None
    given = precision if isinstance(precision, tuple) else (precision,)
    names = {getattr(p, "name", str(p)) for p in given}
    dtypes = {graph.dtype(operand).name for operand in node.inputs}
    if len(names) == 1 and dtypes == {_ACCUMULATES_IN_FLOAT32.get(*names)}:
        return None
    if len(names) != 1 or not names <= {"DEFAULT", "HIGH", "HIGHEST"}:
        raise Mismatch(f"a contraction asks for the precision {precision}", advice=PRECISION)
    (name,) = names
    return None if name == "DEFAULT" else name


_ACCUMULATES_IN_FLOAT32 = {"BF16_BF16_F32": "bfloat16", "F16_F16_F32": "float16"}
"""Algorithms that are what kernels do with operands of the given dtype."""
