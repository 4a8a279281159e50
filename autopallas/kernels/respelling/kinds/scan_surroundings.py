"""Scans of what the program expands, or of whose results it reads less: their steps compute that too.

State-space models write ``a = exp(dt[..., None] * A)`` for all steps, with 16 or more numbers for each of dt's, and
scan it; of stacked states a product with one vector for each step is read.  Arrays of all steps are written and read
again, from main memory where they are large.  Here each step is given what its slices are computed from, computes them,
and gives what is read; what is summed over the steps, as gradients of A are, is added up in the loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat
from autopallas.graph import Graph, Node
from autopallas.graph.prices import price
from autopallas.kernels.example import decaying
from autopallas.kernels.respelling.indexed_loops import IndexedLoop, loop_in, loop_of, results_of, without_known_values
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.kinds import gates_of_slices
from autopallas.kernels.respelling.loop_surroundings import Around, around
from autopallas.kernels.respelling.plain_steps import at_a_time
from autopallas.kernels.respelling.shared_factors import SharedFactors
from autopallas.kernels.respelling.spec import RespellingSpec
from autopallas.kernels.respelling.step_evaluation import SUMMED, run_step
from autopallas.kernels.respelling.step_results import Written, empty, whole_of, with_step
from autopallas.numerics.casts import is_floating

__all__ = ["KIND"]

_LEAST_ELEMENTS = 2**15
"""Smaller arrays stay in caches."""
_LEAST_STEP = 256
"""Elements of a step, of the largest array, below which starting its equations takes longer than they."""
_MOST = 40
"""Highest price of what the steps compute of their slices, in products of two numbers for each element of the largest
array: a program that holds the gradient computes it twice.  Train steps gained 1.2 where it was an exponential and a
tanh (some 35), and took 1.07 times as long where it was two exponentials, a tanh and a logarithm (some 70)."""
_FEW_ROWS = 32
"""Rows up to which a step's product with a weight is worth taking out of the loop."""
_MANY, _NARROW = 64, 2048
"""Steps from which rows of the table say many, and elements of a step below which they say narrow."""


def _match(graph: Graph, node: Node) -> Found | None:
    length = int(node.equation.params["length"])
    if length < 2:
        return None
    constants, carried = compat.scan_parts(node.equation)
    whole, slices = node.inputs[: constants + carried], node.inputs[constants + carried :]
    results, kept = results_of(graph, node)
    stacked = [n for n, i in zip(results, kept, strict=True) if i >= carried]
    if not results or not slices or not graph.literals.keys().isdisjoint(slices):
        return None
    sizes = [math.prod(graph.shape(n)) for n in (*slices, *stacked)]
    if max(sizes) < max(_LEAST_ELEMENTS, _LEAST_STEP * length):
        return None
    if not all(_is_wide(graph, n) for n in (*slices, *results)):
        return None
    place = loop_of(graph, node)
    if place is None:
        return None
    fixed = tuple(dict.fromkeys(n for n in whole if n not in graph.literals))
    found = around(graph, slices, stacked, 0, fixed, size=max(sizes), body=node.body)
    if found is None:
        return None
    beside, operands, read = found
    if sum(price(e) * e.outvars[0].aval.size for e in beside.before.jaxpr.eqns) > _MOST * beside.elements:
        return None
    at = {number: position for position, number in enumerate(operands)}
    given = [at[n] if n in at else np.asarray(graph.literals[n], graph.dtype(n)) for n in whole]
    given += range(len(operands), len(operands) + len(slices))
    loop = without_known_values(replace(place[0], operands=tuple(given)))
    ends = tuple(n for n, i in zip(results, kept, strict=True) if i < carried)
    own = ("around", beside), ("loop", loop), ("results", kept)
    return Found(own, operands, (*ends, *read))


def _is_wide(graph: Graph, number: int) -> bool:
    """Returns whether a value has 32 bits or more: results of 16 bits are updated in place by some compilers alone."""
    dtype = graph.dtype(number)
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and (dtype.itemsize >= 4 or not is_floating(dtype))


# ---------------------------------------------------------------------- what is computed


def _parts(spec: RespellingSpec) -> tuple[IndexedLoop, Around, list[int], list[int]]:
    """Returns the loop, what it can compute beside, and which of its results are read: of what it carries in the end,
    and of what it stacks."""
    loop, kept = loop_in(spec), cast("tuple[int, ...]", spec["results"])
    return (
        loop,
        cast(Around, spec["around"]),
        [i for i in kept if i < loop.carried],
        [i for i in kept if i >= loop.carried],
    )


def _original(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    loop, beside, ends, stacked = _parts(spec)
    found = loop.as_written([*operands, *compat.jaxpr_as_fun(beside.before)(*operands)])
    after = compat.jaxpr_as_fun(beside.after)(*(found[i] for i in stacked), *operands)
    return [*(found[i] for i in ends), *after]


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    loop, beside, ends, stacked = _parts(spec)
    run = compat.jaxpr_as_fun(loop.step)
    fixed = loop.operands[: loop.constants + loop.carried]
    whole = [operands[x] if isinstance(x, int) else jnp.asarray(x) for x in fixed]
    constants, first = whole[: loop.constants], whole[loop.constants :]
    types = spec.results[len(ends) :]

    def step(state: tuple[list[jax.Array], Written], t: jax.Array) -> tuple[tuple[list[jax.Array], Written], None]:
        carried, written = state
        given = zip(operands, beside.axes, strict=True)
        own = [x if at is None else lax.dynamic_slice_in_dim(x, t, 1, at) for x, at in given]
        slices = [lax.squeeze(x, [0]) for x in run_step(beside.before, beside.steps_before, own)]
        found = run(*constants, *carried, *slices)
        stacks = [lax.expand_dims(found[i], [0]) for i in stacked]
        results = run_step(beside.after, beside.steps_after, [*stacks, *own])
        written = [with_step(x, one, t, at) for x, one, at in zip(written, results, beside.results, strict=True)]
        return (list(found[: loop.carried]), written), None

    begin = [empty(shape, dtype, at) for (shape, dtype), at in zip(types, beside.results, strict=True)]
    numbers = jnp.arange(loop.length, dtype=jnp.int32)
    (last, written), _ = lax.scan(
        step, (first, begin), numbers, reverse=loop.reverse, unroll=at_a_time(loop.unroll, loop.length)
    )
    return [
        *(last[i] for i in ends),
        *(whole_of(x).astype(dtype) for x, (_, dtype) in zip(written, types, strict=True)),
    ]


# ---------------------------------------------------------------------- evidence


def _gains_more_inside(spec: RespellingSpec) -> bool:
    """Returns whether steps multiply few rows where they need not, or compute gates of slices."""
    loop = loop_in(spec)
    return bool(SharedFactors(loop).taken_out((), (), _FEW_ROWS)) or bool(gates_of_slices.read_in_parts(loop))


def _feature(spec: RespellingSpec) -> str:
    """Returns what the steps compute besides, and whether they are few, many, or many of few numbers each."""
    loop, beside, _, _ = _parts(spec)
    does = [name for name, own in (("expand", beside.steps_before), ("reduce", beside.steps_after)) if own]
    does += ["sum"] if SUMMED in beside.results else []
    narrow = beside.elements < _NARROW * loop.length
    return f"{', '.join(does)}, {'few' if loop.length < _MANY else 'many narrow' if narrow else 'many'} steps"


def _fill(spec: RespellingSpec, random: np.random.Generator, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return decaying(arrays)


def _selective(inside: bool, *given: jax.Array) -> jax.Array:
    """Computes a selective scan as public code writes it, with the states read in the loop or after it."""
    x, dt, rate, write, read = given
    dt = jax.nn.softplus(dt)
    slices = jnp.exp(-dt[..., None] * jnp.exp(rate)), (dt * x)[..., None] * write[:, None], read

    def step(h: jax.Array, own: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h = own[0] * h + own[1]
        return h, h @ own[2] if inside else h

    found: jax.Array = lax.scan(step, jnp.zeros_like(rate), slices)[1]
    return found if inside else jnp.einsum("tdn,tn->td", found, read)


def _gradients(*given: jax.Array) -> tuple[jax.Array, ...]:
    """Computes the gradients of that, of states that are at hand, as JAX's transpose does."""
    x, dt, rate, write, read, states, cotangent = given
    dt, rate = jax.nn.softplus(dt), jnp.exp(rate)
    decay = jnp.exp(-dt[..., None] * rate)

    def step(gradient: jax.Array, own: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        a, c, d, before = own
        gradient = gradient + d[:, None] * c
        return a * gradient, (gradient, gradient * before)

    slices = decay, read, cotangent, states
    of_given, of_decay = lax.scan(step, jnp.zeros_like(rate), slices, reverse=True)[1]
    of_product = jnp.einsum("tdn,tn->td", of_given, write)
    of_exponent = -of_decay * decay
    of_dt = (of_exponent * rate).sum(-1) + of_product * x
    return of_product * dt, of_dt, jnp.einsum("tdn,td->dn", of_exponent, dt), jnp.einsum("tdn,td->tn", of_given, dt * x)


def _samples() -> Iterator[tuple[str, Sample]]:
    shapes = [(32, 128, 16), (64, 128, 16), (256, 32, 16), (32, 1024, 16), (256, 256, 16), (2048, 32, 16)]
    shapes += [(32, 8192, 16), (1024, 512, 16), (8192, 32, 16)]
    for steps, width, states in shapes:
        own = [(steps, width)] * 2 + [(width, states)] + [(steps, states)] * 2
        types = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in own)
        name = f"{steps}x{width}x{states}"
        yield f"states-{name}", Sample(partial(_selective, True), types)
        yield f"states-{name}-read-after", Sample(partial(_selective, False), types)
        more = (jax.ShapeDtypeStruct((steps, width, states), jnp.float32), types[0])
        yield f"gradients-{name}", Sample(_gradients, (*types, *more))


KIND = Kind(
    name="scan_surroundings",
    primitives=("scan",),
    numerics="reordered",
    instead="a loop whose steps compute their slices, and what is read of their results",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=1.5,  # one of 1.37 with AVX-512 takes 1.4 times as long with AVX2
    gives_way=_gains_more_inside,
    fill=_fill,
)
