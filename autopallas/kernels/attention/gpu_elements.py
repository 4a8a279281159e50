"""Evaluates elementwise functions on the tiles of a GPU kernel: traced on scalars, evaluated on values of four kinds.

A score program and its derivative are elementwise, so that both are traced for one element, without any shape, and then
evaluated on whole tiles.  A value that is the same along an axis of the tile stays a vector, or a scalar, until it
is combined with a larger one, because registers are scarce in these kernels.  It also avoids broadcasts and reductions
for which Mosaic's layouts have no rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat
from autopallas.compat import ArrayFunction, ClosedJaxpr, Dtype, Jaxpr, JaxprEqn, JaxprLike, PyTree, Var
from autopallas.compat import Literal as JaxprLiteral
from autopallas.kernels.attention.schedule import TilePrograms
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tile_values import Tile, exponentials_vjp, heights, logits, weighted, weighted_vjp
from autopallas.kernels.gpu import mosaic
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Score

__all__ = ["Elements", "Value", "backward_elements", "forward_elements", "primitives", "scale_of"]

Array: TypeAlias = jax.Array
Kind: TypeAlias = Literal["scalar", "along_0", "along_1", "tile"]
F32, I32 = np.dtype(np.float32), np.dtype(np.int32)


class Value(NamedTuple):
    """A scalar, a number for each row of a tile ("along_0") or for each of its columns ("along_1"), or a whole tile."""

    kind: Kind
    array: Array

    def widened(self, kind: Kind, shape: tuple[int, int]) -> Array:
        """Returns the array of the value as one of another kind."""
        if self.kind == kind:
            return self.array
        size = {"along_0": shape[:1], "along_1": shape[1:], "tile": shape}[kind]
        if self.kind == "scalar":
            return lax.broadcast_in_dim(jnp.asarray(self.array), size, ())
        plgpu = mosaic()
        found = lax.broadcast_in_dim(self.array, shape, (0 if self.kind == "along_0" else 1,))
        tile: Array = plgpu.layout_cast(found, plgpu.Layout.WGMMA)
        return tile


def _joined(kinds: Sequence[Kind]) -> Kind:
    wider = {k for k in kinds if k != "scalar"}
    return "scalar" if not wider else wider.pop() if len(wider) == 1 else "tile"


@dataclass(frozen=True, slots=True)
class Elements:
    """A function of named scalars, to be evaluated on a tile.

    Attributes:
      names: names of its arguments.
      jaxpr: the function; every equation is elementwise.
      tree: structure of its result.
    """

    names: tuple[str, ...]
    jaxpr: ClosedJaxpr
    tree: jax.tree_util.PyTreeDef

    def on(self, shape: tuple[int, int], known: Mapping[str, Value]) -> Evaluation:
        """Evaluates everything that depends only on known arguments; ``given`` adds the others."""
        return Evaluation(self, shape).given(known)


@dataclass(slots=True)
class Evaluation:
    """Values of a function's variables on one tile, as far as its arguments are known."""

    elements: Elements
    shape: tuple[int, int]
    found: dict[Var | JaxprLiteral, Value] = field(default_factory=dict)

    def given(self, known: Mapping[str, Value]) -> Evaluation:
        closed = self.elements.jaxpr
        for variable, name in zip(closed.jaxpr.invars, self.elements.names, strict=True):
            if name in known:
                self.found[variable] = known[name]
        for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            self.found[variable] = Value("scalar", value)
        self._run(closed.jaxpr)
        return self

    def renewed(self, positions: Mapping[str, Value]) -> None:
        """Forgets integers and booleans, such as masks, that would fill registers; they are computed anew where needed.

        ``positions`` are those that are known, in a form that the compiler does not recognise as the same.
        """
        names = dict(zip(self.elements.names, self.elements.jaxpr.jaxpr.invars, strict=True))
        arguments = {*self.elements.jaxpr.jaxpr.invars, *self.elements.jaxpr.jaxpr.constvars}
        kept = {v: x for v, x in self.found.items() if v in arguments or jnp.issubdtype(x.array.dtype, jnp.floating)}
        self.found = kept | {names[name]: value for name, value in positions.items()}

    def result(self) -> PyTree:
        """Returns the function's result, with None for what is not known yet."""
        read = [self._read(v) for v in self.elements.jaxpr.jaxpr.outvars]
        return jax.tree.unflatten(self.elements.tree, read)

    def _read(self, variable: Var | JaxprLiteral) -> Value | None:
        if hasattr(variable, "val"):
            return Value("scalar", cast(Array, np.asarray(variable.val, variable.aval.dtype)))
        return self.found.get(variable)

    def _run(self, jaxpr: Jaxpr) -> None:
        for equation in jaxpr.eqns:
            if all(variable in self.found for variable in equation.outvars):
                continue
            operands = [self._read(v) for v in equation.invars]
            if any(x is None for x in operands):
                continue
            values = [x for x in operands if x is not None]
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            results = self._called(inner, values) if inner is not None else [self._apply(equation, values)]
            self.found.update(zip(equation.outvars, results, strict=True))

    def _called(self, inner: JaxprLike, values: list[Value]) -> list[Value]:
        jaxpr, consts = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
        self.found.update(zip(jaxpr.invars, values, strict=True))
        self.found.update((v, Value("scalar", c)) for v, c in zip(jaxpr.constvars, consts, strict=True))
        for equation in jaxpr.eqns:
            for variable in equation.outvars:  # the same body may be called twice
                self.found.pop(variable, None)
        self._run(jaxpr)
        results = [self._read(v) for v in jaxpr.outvars]
        return [r for r in results if r is not None]

    def _apply(self, equation: JaxprEqn, values: list[Value]) -> Value:
        name = equation.primitive.name
        if name in _NOTHING:
            return values[0]
        kind = _joined([v.kind for v in values])
        arrays = [v.array if kind == "scalar" else v.widened(kind, self.shape) for v in values]
        if kind == "scalar":
            arrays = [jnp.asarray(a) for a in arrays]
        if name == "add_any":
            return Value(kind, lax.add(*arrays))
        if name == "integer_pow" and equation.params["y"] < -1:  # as in the derivative of a quotient; Mosaic has none
            return Value(kind, 1 / lax.integer_pow(arrays[0], -equation.params["y"]))
        return Value(kind, equation.primitive.bind(*arrays, **equation.params))


_NOTHING = frozenset(
    ["broadcast_in_dim", "copy", "copy_p", "stop_gradient", "optimization_barrier", "reduce_sum", "reshape"]
)
"""Primitives that return a scalar unchanged."""


# ---------------------------------------------------------------------- the functions


@cache
def forward_elements(spec: AttentionSpec, programs: TilePrograms) -> dict[str, Elements]:
    """Returns the functions that the forward evaluates on a tile of scores.

    These are the "logit"; the weights "inner" and "outer", functions of "e"; with inner ones the "height" of "x"; and,
    with ``where`` weights, whether a key is "kept".
    """

    def here(sides: Sequence[Array], query: Array, key: Array) -> Tile:
        return Tile(query, key, tuple(sides))

    found = {
        "logit": _traced(
            spec,
            lambda score, query, key, *sides: logits(spec, programs, score, here(sides, query, key)),
            ("score",),
            (spec.score_dtype,),
        )
    }
    for name, weights in (("inner", programs.inner_weights), ("outer", programs.weights)):
        if weights:
            found[name] = _traced(
                spec,
                lambda e, query, key, *sides, weights=weights: weighted(weights, e, here(sides, query, key)),
                ("e",),
                (F32,),
            )
    if programs.inner_weights:

        def height(x: Array, query: Array, key: Array, *sides: Array) -> Array:
            return heights(spec, programs.inner_weights, x, here(sides, query, key))

        found["height"] = _traced(spec, height, ("x",), (F32,))
    if any(w.kind == "where" for w in programs.weights):

        def kept(query: Array, key: Array, *sides: Array) -> Array:
            found = jnp.ones((), bool)
            for weight in programs.weights:
                if weight.kind == "where":
                    found = found & weight.program.evaluate(None, query, key, sides)
            return found

        found["kept"] = _traced(spec, kept, (), ())
    return found


@cache
def backward_elements(spec: AttentionSpec, programs: TilePrograms) -> Elements:
    """Returns the function of "score", the row's "shift" and "delta", and "dp" that the backward evaluates.

    Its result is (p, dscore, the gradients of floating side inputs).

    The formulas are those of ``xla.backward``.
    """

    def element(
        score: Array, shift: Array, delta: Array, dp: Array, query: Array, key: Array, *sides: Array
    ) -> tuple[Array, Array, tuple[Array, ...]]:
        here = Tile(query, key, sides)

        def from_score(score: Array, floating: tuple[Array, ...]) -> Array:
            return logits(spec, programs, score, here.with_floating(spec, floating))

        x, logits_vjp = jax.vjp(from_score, score, here.floating(spec))
        p_normal, pull = exponentials_vjp(spec, programs.inner_weights, x, shift, here)
        p, outer_vjp = weighted_vjp(spec, programs.weights, p_normal, here)
        dp_normal, outer_sides = outer_vjp(dp)
        dx, inner_sides = pull(dp_normal - delta)
        dscore, score_sides = logits_vjp(dx.astype(x.dtype))
        parts = [part for part in (score_sides, inner_sides, outer_sides) if part]
        dsides = tuple(sum(x.astype(F32) for x in group) for group in zip(*parts, strict=True))
        return p, dscore, dsides

    return _traced(spec, element, ("score", "shift", "delta", "dp"), (spec.score_dtype, F32, F32, F32))


def _traced(
    spec: AttentionSpec, function: ArrayFunction, names: tuple[str, ...], dtypes: tuple[Dtype, ...]
) -> Elements:
    """Traces a function of these arguments, the positions and the side inputs for one element."""
    names = (*names, "query", "key", *(f"side{n}" for n in range(len(spec.sides))))
    types = [jax.ShapeDtypeStruct((), d) for d in (*dtypes, I32, I32, *(s.dtype for s in spec.sides))]
    with jax.enable_x64(False):
        closed, shape = compat.make_jaxpr_and_shapes(function, *types)
    return Elements(names, closed, jax.tree.structure(shape))


def primitives(spec: AttentionSpec) -> frozenset[str]:
    """Returns the primitives that the elementwise functions need, forward and backward, on any tile."""
    programs = TilePrograms(spec.score, spec.inner_weights, spec.weights, False)
    elements = [*forward_elements(spec, programs).values(), backward_elements(spec, programs)]

    def of(jaxpr: JaxprLike) -> set[str]:
        found: set[str] = set()
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            found |= of(inner) if inner is not None else {equation.primitive.name}
        return found

    names = frozenset().union(*(of(e.jaxpr) for e in elements))
    return names - _NOTHING - {"add_any"}


def scale_of(program: ElementwiseProgram) -> float | None:
    """Returns the positive factor of float32 scores, if a program only multiplies by it; 1.0 if it does nothing."""
    inputs = program.inputs
    if not all(isinstance(i, (Score, Constant)) and i.dtype == F32 for i in inputs):
        return None
    if not program.instructions:
        return 1.0 if isinstance(inputs[program.result], Score) else None
    instruction = program.instructions[0]
    if len(program.instructions) > 1 or program.result != len(inputs) or instruction.primitive.name not in _SCALES:
        return None
    first, second = (inputs[n] for n in instruction.arguments)
    if isinstance(first, Score) and isinstance(second, Constant):
        factor = second.value if instruction.primitive.name == "mul" else 1 / second.value if second.value else 0.0
    elif isinstance(first, Constant) and isinstance(second, Score) and instruction.primitive.name == "mul":
        factor = first.value
    else:
        return None
    return float(factor) if 0 < factor < float("inf") else None


_SCALES = ("mul", "div")
