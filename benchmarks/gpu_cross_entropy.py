"""Cross-entropy on a GPU: what is checked, repeated and timed.

Letters: N rows (tokens), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import autopallas
from autopallas.kernels.cross_entropy import pallas_gpu
from autopallas.kernels.cross_entropy.block_sizes import WHOLE, BlockSizes
from autopallas.kernels.cross_entropy.cases import ORIGINALS, in_direction, types
from autopallas.kernels.cross_entropy.tuned_block_sizes import table_key
from autopallas.sites.device import Device
from benchmarks.case import DIRECTIONS, Case, Direction
from benchmarks.cross_entropy import kernel, spec
from benchmarks.gpu_benchmark import MATMUL, ORIGINAL, Check, Peer, Timed

IMPLEMENTATION = "pallas_gpu"

_CHECKED = ((4096, 1024, 32000), (1000, 200, 5003), (513, 2560, 50257), (1, 64, 300))
_TIMED = ((32768, 2560, 128256, 3), (8192, 4096, 32000, 2), (4096, 2048, 50304, 1))
_SMALL = ((70, 72, 300),)
_PART = 8192
_TOLERANCE = {"bfloat16": 4e-2, "float16": 1e-2}


def case_of(n: int, d: int, v: int, dtype: str, direction: Direction) -> Case:
    return Case("cross_entropy", direction, dtype, "plain", (("N", n), ("D", d), ("V", v)))


def operands(case: Case) -> tuple[Any, ...]:
    """Random activations and weights of logits of about 1, labels in range, a cotangent."""
    found = []
    for number, t in enumerate(types(case)):
        key = jax.random.key(number)
        if jnp.issubdtype(t.dtype, jnp.integer):
            found.append(jax.random.randint(key, t.shape, 0, case.size("V"), t.dtype))
        else:
            scale = case.size("D") ** -0.5 if number == 1 else 1.0
            found.append((jax.random.normal(key, t.shape, jnp.bfloat16) * scale).astype(t.dtype))
    return tuple(found)


def exact(case: Case, *given: Any) -> Any:
    """As it is written, in float32 at the highest precision."""
    wide = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in given]
    with jax.default_matmul_precision("highest"):
        return in_direction(case, ORIGINALS[case.mask])(*wide)


def _check(case: Case, small: bool, kept: int = 0) -> Check:
    """Of what users run, or of a kernel that keeps the logits of so many rows."""
    function: Callable[..., Any]
    if kept:
        function = kernel(case, IMPLEMENTATION, BlockSizes(kept, WHOLE))
    elif small:  # the interpreter's callbacks have an order, which a replaced site cannot have
        function = kernel(case, IMPLEMENTATION, BlockSizes(WHOLE, 128))
    else:
        function = autopallas.optimize(
            in_direction(case, ORIGINALS[case.mask]),
            implementation=IMPLEMENTATION,
            objective="always",
            autotune=False,
            strict=True,
        )
    name = f"{case.shape}, logits of {kept} rows kept" if kept else case.shape
    return Check(name, case.dtype, case.direction, function, partial(exact, case), partial(operands, case),
                 _TOLERANCE[case.dtype])  # fmt: skip


def smoke(small: bool) -> Iterator[Check]:
    """The statistics alone, and with the gradients, of logits that are computed again and of those that are kept."""
    shape = _SMALL[0] if small else (513, 256, 1003)
    for direction in DIRECTIONS[-1:] if small else DIRECTIONS:
        yield _check(case_of(*shape, "bfloat16", direction), small)
    yield _check(case_of(*shape, "bfloat16", "forward+backward"), small, 256)


def checks(small: bool) -> Iterator[Check]:
    """The grid: every shape, both dtypes, both directions."""
    for shape in _SMALL if small else _CHECKED:
        for dtype in ("bfloat16",) if small else ("bfloat16", "float16"):
            for direction in DIRECTIONS[-1:] if small else DIRECTIONS:
                yield _check(case_of(*shape, dtype, direction), small)
            if not small:
                yield _check(case_of(*shape, dtype, "forward+backward"), small, 256)


def stressed(small: bool) -> Iterator[Check]:
    """A large one and one with tails of every axis."""
    for shape in _SMALL if small else ((4096, 1024, 32000), (1000, 200, 5003)):
        for direction in DIRECTIONS[-1:] if small else DIRECTIONS:
            yield _check(case_of(*shape, "bfloat16", direction), small)
        if not small:
            yield _check(case_of(*shape, "bfloat16", "forward+backward"), small, 512)


def timed(small: bool) -> Iterator[Timed]:
    """Forward, and a train step's loss with its gradients."""
    for n, d, v, count in tuple((*s, 1) for s in _SMALL) if small else _TIMED:
        for direction in DIRECTIONS[:1] if small else DIRECTIONS[::-1]:
            yield _timed(case_of(n, d, v, "bfloat16", direction), count)


def _timed(case: Case, count: int) -> Timed:
    described = spec(case)
    sizes = {str(tuple(c.to_dict().values())): c for c in pallas_gpu.candidates(described, Device.current())[:count]}
    # Logits; in a train step dx and dW, for which their gradient is stored and read twice.
    train = case.direction == "forward+backward"
    products, stored = (3, 3) if train else (1, 0)
    n, d, v = (case.size(letter) for letter in "NDV")
    again = next((name for name, c in sizes.items() if c.vocabulary_block < v), "")
    candidates = {ORIGINAL: in_direction(case, ORIGINALS[case.mask]), MATMUL: partial(_products, case)}
    streaming = BlockSizes(WHOLE, _PART).fitted(described)
    candidates["streaming"] = kernel(case, "xla", streaming)
    candidates |= {f"pallas_gpu {name}": kernel(case, IMPLEMENTATION, choice) for name, choice in sizes.items()}
    return Timed(
        name=case.shape,
        dtype=case.dtype,
        direction=case.direction,
        candidates=candidates,
        block_sizes={f"pallas_gpu {name}": choice for name, choice in sizes.items()},
        arguments=partial(operands, case),
        operations=2.0 * n * d * v * products,
        key=table_key(described, IMPLEMENTATION, case.direction),
        bytes_moved=2.0 * d * (n + v) * products + 2.0 * n * v * stored,
        lean=(f"pallas_gpu {again}", 4 / 3) if train and again else None,  # it multiplies the logits twice
        peers={"streaming": Peer(table_key(described, "xla", case.direction), streaming)},
        priority=(11 if train else 10) if (n, d, v) == _TIMED[0][:3] else 100,
    )


def _products(case: Case, x: Any, w: Any, *rest: Any) -> Any:
    """The matrix products alone, part by part: logits, and in a train step dx and dW."""
    part = min(_PART, w.shape[1])
    parts = w.shape[1] // part

    def step(total: Any, i: Any) -> Any:
        own = jax.lax.dynamic_slice_in_dim(w, i * part, part, axis=1)
        z = x @ own
        if case.direction == "forward":
            return total + jnp.max(z.astype(jnp.float32), axis=1, keepdims=True), None
        return total + (z @ own.T).astype(jnp.float32), x.T @ z

    start = jnp.zeros((x.shape[0], 1 if case.direction == "forward" else x.shape[1]), jnp.float32)
    return jax.lax.scan(step, start, jnp.arange(parts))
