"""Recurrences ``h[t] = a[t] h[t-1] + b[t]`` that are written with ``lax.associative_scan`` or by doubling by hand, and
their gradients.

On a device with many processors the scan's tree of log T levels is worth its work; a CPU computes each level slice by
slice, and writes T steps some times over.  A loop over the steps reads and writes each step once.  Where the program
expands what it scans, and reduces what comes of it, as state-space models do, the loop does that too, in each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat
from autopallas.compat import Dtype
from autopallas.graph import Graph, Node
from autopallas.kernels.example import is_float
from autopallas.kernels.respelling.around import Around, around
from autopallas.kernels.respelling.doubling import Backward, Forward, scans_of
from autopallas.kernels.respelling.exact_sums import Sums, added_exactly, stepped_exactly
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.spec import ArrayType, Parameters, RespellingSpec
from autopallas.kernels.respelling.stepwise import SUMMED, run_step

__all__ = ["KIND"]

_Written: TypeAlias = list["jax.Array | Sums"]
"""What the steps have written so far: arrays with slices, and sums."""


def _match(graph: Graph, node: Node) -> Found | None:
    scan = scans_of(graph).get(node.outputs[0])
    if scan is None:
        return None
    if isinstance(scan, Forward):
        return _with_around(graph, scan, (), (scan.decay, scan.given), (scan.result,))
    forward = scan.scan
    wanted = tuple(name for name, n in (("given", scan.of_given), ("decay", scan.of_decay)) if n is not None)
    read = (forward.result,) if scan.reads_result else ()
    operands = (forward.decay, forward.given, scan.cotangent, *read)
    return _with_around(graph, forward, wanted, operands, scan.results)


def _results(scan: Forward | Backward) -> tuple[int, ...]:
    return (scan.result,) if isinstance(scan, Forward) else scan.results


def _with_around(
    graph: Graph, scan: Forward, wanted: tuple[str, ...], operands: tuple[int, ...], results: tuple[int, ...]
) -> Found:
    """Returns a scan, or its gradients, with what the loop can compute beside it."""
    known = {n for scan in scans_of(graph).values() for n in _results(scan)}
    found = around(graph, operands, results, scan.axis, operands[3:], known)
    own: Parameters = (("axis", scan.axis), ("gradients", wanted))
    if scan.shifted:
        own += (("shifted", True),)
    if found is None:
        return Found(own, operands, results)
    return Found((("around", found[0]), *own), found[1], found[2])


def _accumulated(dtype: Dtype) -> Dtype:
    """Returns the dtype in which a recurrence is computed: 32 bits where the program has 16."""
    return jnp.promote_types(dtype, jnp.float32)


def _states(decay: jax.Array, given: jax.Array) -> jax.Array:
    """Computes the recurrence along the first axis."""
    wide = _accumulated(given.dtype)

    def step(state: Sums, own: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Sums, jax.Array]:
        later, a, b = own
        state = stepped_exactly(state, jnp.where(later, a.astype(wide), 0), b.astype(wide))
        return state, state[0].astype(given.dtype)

    later = jnp.arange(given.shape[0]) > 0  # the first decay is not read, and may be anything
    zeros = jnp.zeros(given.shape[1:], wide)
    return lax.scan(step, (zeros, zeros), (later, decay, given))[1]


def _gradients(decay: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Computes the gradient of ``given`` along the first axis."""
    wide = _accumulated(cotangent.dtype)

    def step(
        passed: tuple[Sums, jax.Array], own: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[Sums, jax.Array], jax.Array]:
        gradient, following = passed
        a, d = own
        gradient = stepped_exactly(gradient, following, d.astype(wide))
        return (gradient, a.astype(wide)), gradient[0].astype(cotangent.dtype)

    zeros = jnp.zeros(cotangent.shape[1:], wide)
    return lax.scan(step, ((zeros, zeros), zeros), (decay, cotangent), reverse=True)[1]


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    axis, wanted = cast(int, spec["axis"]), cast(tuple[str, ...], spec["gradients"])
    beside = _around(spec)
    if beside is not None:
        return _looped(beside, axis, wanted, spec.results, operands)
    moved = [jnp.moveaxis(x, axis, 0) for x in operands]
    if not wanted:
        return [jnp.moveaxis(_states(*moved), 0, axis)]
    decay, given, cotangent, *result = moved
    gradient = _gradients(decay, cotangent)
    found = {"given": gradient}
    if "decay" in wanted:
        (states,) = result or [_states(decay, given)]
        found["decay"] = jnp.concatenate([jnp.zeros_like(states[:1]), gradient[1:] * states[:-1]])
    return [jnp.moveaxis(found[name], 0, axis) for name in wanted]


def _around(spec: RespellingSpec) -> Around | None:
    return cast("Around | None", dict(spec.parameters).get("around"))


def _looped(
    beside: Around, axis: int, wanted: Sequence[str], types: Sequence[ArrayType], operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """Computes a scan, or its gradients, with what lies around it, in a loop that writes slices of its results."""
    whole = beside.before.out_avals
    shape, dtype = list(whole[0].shape), whole[-1].dtype
    count, wide = shape[axis], _accumulated(dtype)
    shape[axis] = 1
    numbers = jnp.arange(count, dtype=jnp.int32)

    def slices(t: jax.Array) -> list[jax.Array]:
        given = zip(operands, beside.axes, strict=True)
        return [x if at is None else lax.dynamic_slice_in_dim(x, t, 1, at) for x, at in given]

    def after(found: Sequence[jax.Array], own: Sequence[jax.Array], written: _Written, t: jax.Array) -> _Written:
        results = run_step(beside.after, beside.steps_after, [*found, *own])
        return [_with(x, one, t, at) for x, one, at in zip(written, results, beside.results, strict=True)]

    def forward(state: Sums, own: Sequence[jax.Array], t: jax.Array) -> Sums:
        decay, given, *_ = run_step(beside.before, beside.steps_before, own)
        kept = jnp.where(t > 0, decay.astype(wide), 0)  # the first decay is not read, and may be anything
        return stepped_exactly(state, kept, given.astype(wide))

    def step(carried: tuple[Sums, _Written], t: jax.Array) -> tuple[tuple[Sums, _Written], None]:
        state, written = carried
        own = slices(t)
        state = forward(state, own, t)
        return (state, after([state[0].astype(dtype)], own, written, t)), None

    def states() -> jax.Array:
        def step(carried: tuple[Sums, jax.Array], t: jax.Array) -> tuple[tuple[Sums, jax.Array], None]:
            state = forward(carried[0], slices(t), t)
            return (state, lax.dynamic_update_slice_in_dim(carried[1], state[0].astype(dtype), t, axis)), None

        found: jax.Array = lax.scan(step, ((zeros, zeros), jnp.zeros(whole[0].shape, dtype)), numbers)[0][1]
        return found

    zeros = jnp.zeros(shape, wide)
    first = [_empty(own, kind, at) for (own, kind), at in zip(types, beside.results, strict=True)]
    if not wanted:
        (_, written), _ = lax.scan(step, ((zeros, zeros), first), numbers)
        return [_whole(x).astype(kind) for x, (_, kind) in zip(written, types, strict=True)]
    known = operands[0] if len(whole) == 4 else states() if "decay" in wanted else None

    def back(carried: tuple[Sums, jax.Array, _Written], t: jax.Array) -> tuple[tuple[Sums, jax.Array, _Written], None]:
        gradient, following, written = carried
        own = slices(t)
        decay, _, cotangent, *_ = run_step(beside.before, beside.steps_before, own)
        gradient = stepped_exactly(gradient, following, cotangent.astype(wide))
        narrow = gradient[0].astype(dtype)
        found = [narrow] if "given" in wanted else []
        if known is not None and "decay" in wanted:
            before = lax.dynamic_slice_in_dim(known, jnp.maximum(t - 1, 0), 1, axis)
            found.append(jnp.where(t > 0, narrow * before, 0))
        return (gradient, decay.astype(wide), after(found, own, written, t)), None

    last, _ = lax.scan(back, ((zeros, zeros), zeros, first), numbers, reverse=True)
    return [_whole(x).astype(kind) for x, (_, kind) in zip(last[2], types, strict=True)]


def _empty(shape: Sequence[int], dtype: Dtype, axis: int) -> jax.Array | Sums:
    """Returns an array of zeros for what the steps give; a sum of floats has what rounding lost beside it."""
    if axis != SUMMED or not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.zeros(shape, dtype)
    zeros = jnp.zeros(shape, _accumulated(dtype))
    return zeros, zeros


def _whole(written: jax.Array | Sums) -> jax.Array:
    return written[0] if isinstance(written, tuple) else written


def _with(written: jax.Array | Sums, own: jax.Array, t: jax.Array, axis: int) -> jax.Array | Sums:
    """Returns an array with what step t gives."""
    if isinstance(written, tuple):
        return added_exactly(*written, own.astype(written[0].dtype))
    if axis == SUMMED:
        return written + own.astype(written.dtype)
    return lax.dynamic_update_slice_in_dim(written, own, t, axis)


def _combined(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Composes two steps, the left one first."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def _scan(axis: int, decay: jax.Array, given: jax.Array) -> jax.Array:
    found: jax.Array = lax.associative_scan(_combined, (decay, given), axis=axis)[1]
    return found


def _shifted(axis: int, decay: jax.Array, given: jax.Array) -> jax.Array:
    """Computes the same by shifts of all steps by 1, 2, 4, ... (Hillis and Steele, 1986)."""
    count = decay.shape[axis]
    by = 1
    while by < count:
        kept, filled = (lax.slice_in_dim(decay, 0, stop, axis=axis) for stop in (count - by, by))
        before = lax.slice_in_dim(given, 0, count - by, axis=axis)
        earlier = (
            jnp.concatenate([jnp.ones_like(filled), kept], axis),
            jnp.concatenate([jnp.zeros_like(filled), before], axis),
        )
        decay, given = _combined(earlier, (decay, given))
        by *= 2
    return given


def _original(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    beside = _around(spec)
    if beside is None:
        return _plain(spec, *operands)
    found = _plain(spec, *compat.jaxpr_as_fun(beside.before)(*operands))
    return compat.jaxpr_as_fun(beside.after)(*found, *operands)


def _plain(spec: RespellingSpec, decay: jax.Array, given: jax.Array, *rest: jax.Array) -> list[jax.Array]:
    axis, wanted = cast(int, spec["axis"]), cast(tuple[str, ...], spec["gradients"])
    scan = _shifted if dict(spec.parameters).get("shifted") else _scan
    if not wanted:
        return [scan(axis, decay, given)]
    found = dict(zip(("decay", "given"), jax.vjp(lambda a, b: scan(axis, a, b), decay, given)[1](rest[0]), strict=True))
    return [found[name] for name in wanted]


def _assumptions(spec: RespellingSpec) -> tuple[str, ...]:
    """Returns that nothing overflows: an infinite product of decays times a state of 0 is NaN in the original, and an
    infinite state times a decay of 0 in the loop.  Shifts multiply the first decay by the zeros that they fill with."""
    shifted = dict(spec.parameters).get("shifted")
    return (f"no state and no product of decays overflows{', and the first decay is finite' if shifted else ''}",)


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns what is computed, and whether there are few steps or many."""
    axis, beside = cast(int, spec["axis"]), _around(spec)
    shape, dtype = spec.operands[0] if beside is None else (beside.before.out_avals[0].shape, spec.widest_dtype)
    steps = "few" if shape[axis] < 64 else "many" if math.prod(shape) >= 16 * shape[axis] else "many narrow"
    where = "first" if axis == 0 else "last" if axis == len(shape) - 1 else "middle"
    where += " axis" if beside is None else " axis, expanded"
    of = "gradients" if spec["gradients"] else "states"
    of += " by shifts" if dict(spec.parameters).get("shifted") else ""
    kind = "complex numbers" if jnp.issubdtype(dtype, jnp.complexfloating) else "floats"
    return f"{of} of {kind}, {steps} steps, {where}"


def _fill(spec: RespellingSpec, random: np.random.Generator, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Makes the numbers small of which a loop computes decays, such as exponentials: the states would overflow."""
    if _around(spec) is None:
        return list(arrays)
    return [(array * 0.1).astype(array.dtype) if is_float(array.dtype) else array for array in arrays]


def _samples() -> Iterator[tuple[str, Sample]]:
    shapes: Sequence[tuple[tuple[int, ...], int]] = (
        ((32, 16), 0), ((1024, 16), 0), ((2, 512, 16), 1), ((16, 1024), 1),
        ((32, 4096), 0), ((256, 512), 0), ((4096, 32), 0), ((4, 1024, 32), 1), ((128, 1024), 1),
        ((32, 65536), 0), ((1024, 128, 16), 0), ((4096, 512), 0), ((2, 1024, 1024), 1), ((2048, 1024), 1),
    )  # fmt: skip
    for shape, axis in shapes:
        for dtype in (jnp.float32, jnp.complex64):
            if dtype == jnp.complex64 and (len(shape) > 2 or axis):
                continue
            name = f"{'x'.join(map(str, shape))}-{axis}-{jnp.dtype(dtype).name}"
            one = jax.ShapeDtypeStruct(shape, dtype)

            def forward(a: jax.Array, b: jax.Array, axis: int = axis) -> jax.Array:
                return _scan(axis, jnp.tanh(a), jnp.tanh(b))

            def gradients(a: jax.Array, b: jax.Array, d: jax.Array, axis: int = axis) -> tuple[jax.Array, jax.Array]:
                a, b, d = jnp.tanh(a), jnp.tanh(b), jnp.tanh(d)
                found: tuple[jax.Array, jax.Array] = jax.vjp(lambda a, b: _scan(axis, a, b), a, b)[1](d)
                return found

            yield f"states-{name}", Sample(forward, (one, one))
            yield f"gradients-{name}", Sample(gradients, (one, one, one))
    for shape in ((1024, 16), (256, 512), (4096, 32), (2048, 1024)):
        one = jax.ShapeDtypeStruct(shape, jnp.float32)

        def doubled(a: jax.Array, b: jax.Array) -> jax.Array:
            return _shifted(0, jnp.tanh(a), jnp.tanh(b))

        def of_doubled(a: jax.Array, b: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
            a, b, d = jnp.tanh(a), jnp.tanh(b), jnp.tanh(d)
            found: tuple[jax.Array, jax.Array] = jax.vjp(lambda a, b: _shifted(0, a, b), a, b)[1](d)
            return found

        name = "x".join(map(str, shape))
        yield f"states-{name}-shifted", Sample(doubled, (one, one))
        yield f"gradients-{name}-shifted", Sample(of_doubled, (one, one, one))
    for batch, steps, width, state in ((1, 256, 64, 16), (2, 1024, 256, 16), (1, 2048, 1536, 16)):
        several = [(batch, steps, width), (batch, steps, width), (width, state), *[(batch, steps, state)] * 2]
        types = tuple(jax.ShapeDtypeStruct(own, jnp.float32) for own in several)
        name = f"{batch}x{steps}x{width}x{state}-expanded"
        yield f"states-{name}", Sample(lambda *x: _expanded(*x)[0], types)
        if batch * steps * width <= 2**19:
            yield f"states-read-{name}", Sample(_expanded, types)

        def pulled(*given: jax.Array) -> tuple[jax.Array, ...]:
            *own, cotangent = given
            found: tuple[jax.Array, ...] = jax.vjp(lambda *x: _expanded(*x)[0], *own)[1](cotangent)
            return found[:-1]

        yield f"gradients-{name}", Sample(pulled, (*types, types[0]))


def _expanded(
    width: jax.Array, x: jax.Array, rate: jax.Array, write: jax.Array, read: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes a state-space model whose states have an axis more than what it is given (arXiv:2312.00752)."""
    decay = jnp.exp(-jax.nn.softplus(width)[..., None] * jnp.exp(rate))
    states = _scan(1, decay, x[..., None] * write[..., None, :])
    return jnp.einsum("btdn,btn->btd", states, read), states


KIND = Kind(
    name="associative_scan",
    primitives=("add", "add_any"),
    numerics="reordered",
    assumptions=_assumptions,
    instead="a loop over the steps",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    fill=_fill,
)
