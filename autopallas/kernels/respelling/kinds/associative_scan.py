"""Recurrences ``h[t] = a[t] h[t-1] + b[t]`` that are written with ``lax.associative_scan``, and their gradients.

On a device with many processors the scan's tree of log T levels is worth its work; a CPU computes each level slice by
slice, and writes T steps some times over.  A loop over the steps reads and writes each step once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.graph import Graph, Node
from autopallas.kernels.respelling.doubling import Forward, scans_of
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND"]


def _match(graph: Graph, node: Node) -> Found | None:
    scan = scans_of(graph).get(node.outputs[0])
    if scan is None:
        return None
    if isinstance(scan, Forward):
        return Found((("axis", scan.axis), ("gradients", ())), (scan.decay, scan.given), (scan.result,))
    forward = scan.scan
    wanted = tuple(name for name, n in (("given", scan.of_given), ("decay", scan.of_decay)) if n is not None)
    read = (forward.result,) if scan.reads_result else ()
    operands = (forward.decay, forward.given, scan.cotangent, *read)
    return Found((("axis", forward.axis), ("gradients", wanted)), operands, scan.results)


def _accumulated(x: jax.Array) -> jnp.dtype:
    """Returns the dtype in which a recurrence is computed: 32 bits where the program has 16."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _states(decay: jax.Array, given: jax.Array) -> jax.Array:
    """Computes the recurrence along the first axis."""
    wide = _accumulated(given)

    def step(state: jax.Array, own: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        later, a, b = own
        state = jnp.where(later, a.astype(wide) * state, 0) + b.astype(wide)
        return state, state.astype(given.dtype)

    later = jnp.arange(given.shape[0]) > 0  # the first decay is not read, and may be anything
    return lax.scan(step, jnp.zeros(given.shape[1:], wide), (later, decay, given))[1]


def _gradients(decay: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Computes the gradient of ``given`` along the first axis."""
    wide = _accumulated(cotangent)

    def step(passed: jax.Array, own: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        later, a, d = own
        gradient = d.astype(wide) + passed
        return jnp.where(later, a.astype(wide) * gradient, 0), gradient.astype(cotangent.dtype)

    later = jnp.arange(cotangent.shape[0]) > 0
    return lax.scan(step, jnp.zeros(cotangent.shape[1:], wide), (later, decay, cotangent), reverse=True)[1]


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    axis, wanted = cast(int, spec["axis"]), cast(tuple[str, ...], spec["gradients"])
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


def _combined(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Composes two steps, the left one first."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def _scan(axis: int, decay: jax.Array, given: jax.Array) -> jax.Array:
    found: jax.Array = lax.associative_scan(_combined, (decay, given), axis=axis)[1]
    return found


def _original(spec: RespellingSpec, decay: jax.Array, given: jax.Array, *rest: jax.Array) -> list[jax.Array]:
    axis, wanted = cast(int, spec["axis"]), cast(tuple[str, ...], spec["gradients"])
    if not wanted:
        return [_scan(axis, decay, given)]
    found = dict(
        zip(("decay", "given"), jax.vjp(lambda a, b: _scan(axis, a, b), decay, given)[1](rest[0]), strict=True)
    )
    return [found[name] for name in wanted]


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns what is computed, and whether there are few steps or many."""
    shape, dtype = spec.operands[0]
    axis = cast(int, spec["axis"])
    steps = "few" if shape[axis] < 64 else "many"
    where = "first" if axis == 0 else "last" if axis == len(shape) - 1 else "middle"
    of = "gradients" if spec["gradients"] else "states"
    kind = "complex numbers" if jnp.issubdtype(dtype, jnp.complexfloating) else "floats"
    return f"{of} of {kind}, {steps} steps, {where} axis"


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


KIND = Kind(
    name="associative_scan",
    primitives=("add", "add_any"),
    numerics="reordered",
    instead="a loop over the steps",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=dict(_samples()),
)
