"""Logits and softmax cross-entropy as people write them, at the sizes of the tuned table.

Letters: N rows (tokens), D hidden size, V vocabulary.  Activations are [N, D], the weight is [D, V].
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from autopallas.compat import ArrayFunction, PyTree, Shaped
from autopallas.kernels.cross_entropy.example import plain
from autopallas.workbench.cases import DIRECTIONS, Case, Direction

__all__ = ["ORIGINALS", "accuracy", "case_of", "direct", "in_direction", "plain", "table_grid", "types"]


def accuracy(x: jax.Array, w: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the same, and how often the greatest logit is the label's."""
    logits = (x @ w).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    right = jnp.argmax(logits, axis=-1) == labels
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked), jnp.mean(right.astype(jnp.float32))


ORIGINALS: dict[str, ArrayFunction] = {"plain": plain, "accuracy": accuracy}


def in_direction(case: Case, function: ArrayFunction) -> ArrayFunction:
    """Returns the function itself, or with the gradients for activations and weight from a cotangent, its last
    argument."""
    if case.direction == "forward":
        return function

    def forward_and_backward(x: jax.Array, w: jax.Array, labels: jax.Array, cotangent: jax.Array) -> PyTree:
        vjp: ArrayFunction = jax.vjp  # whose results are two, or three with has_aux
        loss, pull_back, *rest = vjp(lambda x, w: function(x, w, labels), x, w, has_aux=case.mask == "accuracy")
        return loss, *rest, pull_back(cotangent)

    return forward_and_backward


def types(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Activations, weight, labels, and last the loss's cotangent where there is a backward pass."""
    rows, hidden, vocabulary = (case.size(letter) for letter in "NDV")
    dtype = jnp.dtype(case.dtype)
    given = [jax.ShapeDtypeStruct((rows, hidden), dtype), jax.ShapeDtypeStruct((hidden, vocabulary), dtype)]
    given.append(jax.ShapeDtypeStruct((rows,), jnp.dtype(jnp.int32)))
    if case.direction == "forward+backward":
        given.append(jax.ShapeDtypeStruct((), jnp.dtype(jnp.float32)))
    return tuple(given)


def case_of(types: Sequence[Shaped], variant: str, direction: Direction) -> Case:
    """Returns the case of x [N, D], w [D, V] and, if given, labels [N]."""
    if [len(getattr(t, "shape", (0,) * 9)) for t in types] not in ([2, 2], [2, 2, 1]):
        raise ValueError("cross_entropy takes x [N, D], w [D, V] and int32 labels [N]")
    (rows, hidden), (weight_hidden, vocabulary) = types[0].shape, types[1].shape
    if hidden != weight_hidden or types[0].dtype != types[1].dtype:
        raise ValueError("x and w must agree in hidden size and dtype")
    if len(types) == 3 and (types[2].shape != (rows,) or types[2].dtype != jnp.int32):
        raise ValueError(f"the labels must be i32[{rows}], one for each row of x")
    sizes = (("N", rows), ("D", hidden), ("V", vocabulary))
    return Case("cross_entropy", direction, types[0].dtype.name, variant, sizes)


def direct(case: Case) -> ArrayFunction | None:
    """``cross_entropy``."""
    from autopallas.kernels.cross_entropy.api import cross_entropy

    return cross_entropy if case.mask == "plain" else None


def table_grid(platform: str = "cpu") -> tuple[Case, ...]:
    """Returns a case for each row of the tuned table.  A smaller hidden size where there are many rows."""
    if platform == "tpu":
        large = (("N", 8192), ("D", 4096), ("V", 131072))
        return tuple(Case("cross_entropy", direction, "bfloat16", "plain", large) for direction in DIRECTIONS)
    sizes = [(2048, 512, 1024), (512, 512, 8192), (2048, 512, 8192), (8192, 256, 8192)]
    sizes += [(512, 512, 32000), (2048, 512, 32000), (8192, 256, 32000), (512, 512, 128000), (2048, 512, 128000)]
    return tuple(
        Case("cross_entropy", direction, d, mask, (("N", n), ("D", hidden), ("V", v)))
        for direction in DIRECTIONS
        for d in ("float32", "bfloat16")
        for n, hidden, v in sizes
        for mask in (("plain", "accuracy") if (n, hidden, v) == (2048, 512, 32000) else ("plain",))
    )
