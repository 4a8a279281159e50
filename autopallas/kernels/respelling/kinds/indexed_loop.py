"""Loops under ``jax.grad`` that index arrays at their own step: each step gives slices, not whole arrays.

What JAX makes of ``fori_loop(0, T, lambda i, h: f(h, x[i]), h)`` when it is differentiated adds an array of x's shape
to x's gradient in each step, of which all but one slice is zero: T steps cost O(T^2).  The same holds where ``x[i]`` is
read in a scan that counts its steps.  Where a loop sets ``results.at[i]``, each step of its backward reads a slice of
the results' gradient and sets it to zero, for which XLA copies the array; and so it does where a step sets ``x[i + 1]``
and stacks the ``x[i]`` that it read, as it does for a backward.

The forward of a loop that sets ``results.at[i]`` stacks, beside what its backward needs, the positions of all slices,
and tests each of them.  XLA copies nothing there, but with JAX 0.10 it compiles a loop as one function only where its
arrays are few and small: elsewhere each step calls some ten small ones, of which half are about positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat, jaxprs
from autopallas.compat import JaxprEqn, Literal, Var
from autopallas.graph import Graph, Node
from autopallas.graph.indexed_arrays import Plan
from autopallas.kernels.respelling.indexed_loops import as_written, chosen, loop_in, loop_of, results_of, with_plan
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.kinds import scan_checkpoint
from autopallas.kernels.respelling.networks import float32_types
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND"]

_ADDITIONS = frozenset({"add", "add_any"})
_PLACED = frozenset({"dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "add_any", "jit", "pjit"})
"""Primitives that may give an array that is zero but for a slice."""
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
_SETS = {"dynamic_update_slice": 1, "scatter": 2}
"""Primitives that set slices, and the positions of what these are set to."""


def _match(graph: Graph, node: Node) -> Found | None:
    equation = node.equation
    if int(equation.params["length"]) < 2 or not _is_of_slices(equation):
        return None
    place = loop_of(graph, node)
    if place is None:
        return None
    loop, numbers = place
    found = with_plan(graph, loop)
    results, kept = results_of(graph, node)
    if found is None or not results:
        return None
    loop, plan = found
    if _only_sets(plan) and scan_checkpoint.goes_before(graph, KIND.name):
        return None
    return Found((("loop", loop), ("results", kept)), numbers, results)


def _is_of_slices(equation: JaxprEqn) -> bool:
    """Returns whether a scan's step adds to a carried array what may be zero but for a slice, or sets a slice of one to
    what may be zero, or beside results that it stacks: a quick look."""
    jaxpr, _ = jaxprs.open_jaxpr(equation.params["jaxpr"])
    constants, carried = compat.scan_parts(equation)
    carries = {v for v in jaxpr.invars[constants : constants + carried] if getattr(v.aval, "shape", ())}
    given_zeros, stacks = set(jaxpr.invars[:constants]), len(jaxpr.outvars) > carried
    made: dict[Var, str] = {}
    for e in jaxpr.eqns:
        array = e.invars[0] if e.invars else None
        if e.primitive.name in _SETS and isinstance(array, Var) and array in carries:
            update = e.invars[_SETS[e.primitive.name]]
            if isinstance(update, Literal) or update in given_zeros or made.get(update) == "broadcast_in_dim":
                return True
            if stacks:
                return True
        if e.primitive.name in _ADDITIONS:
            given = [v for v in e.invars if isinstance(v, Var)]
            if any(v in carries for v in given) and any(made.get(v) in _PLACED for v in given):
                return True
        made.update(dict.fromkeys(e.outvars, e.primitive.name))
    return False


# ---------------------------------------------------------------------- what is computed


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    return chosen(spec, loop_in(spec).by_slices(operands))


def _fill(spec: RespellingSpec, random: np.random.Generator, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the arrays with the positions that the program has."""
    known = dict(loop_in(spec).known)
    return [known.get(i, array) for i, array in enumerate(arrays)]


# ---------------------------------------------------------------------- evidence


def _only_sets(plan: Plan) -> bool:
    """Returns whether a loop copies no array in each step, so that another kind may gain more."""
    return not (plan.whole_sums or plan.clears or plan.stacks)


def _feature(spec: RespellingSpec) -> str:
    """Returns whether the loop has few steps or many, and whether it only adds up slices, as where ``x[i]`` is read and
    nothing is set: a slice that each step adds once XLA adds to its place alone."""
    loop = loop_in(spec)
    steps = "few steps" if loop.length < 64 else "many steps"
    if _only_sets(loop.plan):
        multiplies = any(equation.primitive.name in _PRODUCTS for equation in jaxprs.every_equation(loop.step))
        return f"{steps}, set{' with products' if multiplies else ''}"
    if loop.tables:
        return steps if loop.plan.whole_sums or loop.plan.clears else f"{steps}, stacked"
    return f"{steps}, {'one sum' if sum(len(places) for _, places in loop.sums) == 1 else 'sums'} alone"


def _samples() -> Iterator[tuple[str, Sample]]:
    sizes = ((16, 512), (16, 65536), (16, 2**20), (256, 32), (2048, 16), (1024, 512), (1024, 4096))
    cases = [(dtype, *size) for dtype in (jnp.float32, jnp.bfloat16) for size in sizes]
    for dtype, length, width in cases:

        def function(decay: jax.Array, x: jax.Array, length: int = length) -> tuple[jax.Array, jax.Array]:
            def loss(decay: jax.Array, x: jax.Array) -> jax.Array:
                def step(i: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                    state, results = carried
                    state = decay * state + x[i]
                    return state, results.at[i].set(state)

                first = jnp.zeros(x.shape[1:], x.dtype), jnp.zeros_like(x)
                return jnp.sum(jnp.sin(lax.fori_loop(0, length, step, first)[1].astype(jnp.float32)))

            found: tuple[jax.Array, jax.Array] = jax.grad(loss, (0, 1))(decay, x)
            return found

        def reading(decay: jax.Array, x: jax.Array, length: int = length) -> tuple[jax.Array, jax.Array]:
            def loss(decay: jax.Array, x: jax.Array) -> jax.Array:
                state = lax.fori_loop(0, length, lambda i, state: decay * state + x[i], jnp.zeros(x.shape[1:], x.dtype))
                return jnp.sum(jnp.sin(state.astype(jnp.float32)))

            found: tuple[jax.Array, jax.Array] = jax.grad(loss, (0, 1))(decay, x)
            return found

        def stacking(decay: jax.Array, x: jax.Array, length: int = length) -> tuple[jax.Array, jax.Array]:
            def step(states: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
                return states.at[i + 1].set(states[i] + decay * jnp.tanh(states[i])), states[i]

            return lax.scan(step, x, jnp.arange(length - 1))

        types = jax.ShapeDtypeStruct((width,), dtype), jax.ShapeDtypeStruct((length, width), dtype)
        own = "" if dtype == jnp.float32 else "bfloat16-"
        yield f"{own}{length}x{width}", Sample(function, types, place=0)  # the forward gives way, and comes last
        yield f"{own}{length}x{width}-reading", Sample(reading, types)
        yield f"{own}{length}x{width}-stacking", Sample(stacking, types)
    for length, width in (*sizes, (16, 2048)):
        own_types = float32_types((width,), (length, width))
        yield f"{length}x{width}-setting", Sample(_forward(jnp.multiply), own_types)
    few = (16, 8, 64), (16, 32, 256), (16, 64, 1024), (16, 256, 1024)
    for length, batch, width in (*few, (128, 1, 64), (256, 2, 64), (2048, 1, 16), (1024, 8, 64), (2048, 8, 256)):
        own_types = float32_types((width, width), (length, batch, width))
        yield f"{length}x{batch}x{width}-setting", Sample(_forward(jnp.matmul), own_types)


def _forward(product: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[jax.Array, jax.Array], list[jax.Array]]:
    """Returns the forward of a loop that sets ``results.at[i]``, with what its backward needs."""

    def function(weight: jax.Array, x: jax.Array) -> list[jax.Array]:
        def run(weight: jax.Array, x: jax.Array) -> jax.Array:
            def step(i: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                state, results = carried
                state = jnp.tanh(product(state, weight) + x[i])
                return state, results.at[i].set(state)

            found: jax.Array = lax.fori_loop(0, len(x), step, (jnp.zeros_like(x[0]), jnp.zeros_like(x)))[1]
            return found

        results, pull = jax.vjp(run, weight, x)
        return [results, *jax.tree.leaves(pull)]

    return function


KIND = Kind(
    name="indexed_loop",
    primitives=("scan",),
    numerics="reordered",
    instead="a loop that is given slices and gives slices, and the arrays put together after it",
    match=_match,
    original=as_written,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    gives_way=lambda spec: _only_sets(loop_in(spec).plan),
    keeps_steps=True,
    fill=_fill,
    elsewhere_from=2.0,  # one of 1.6 with JAX 0.10 takes 1.2 times as long with 0.12
)
