"""Logits and softmax cross-entropy: the spelling that is measured, and the cases.

Letters: N rows (tokens), D hidden size, V vocabulary.  Activations are [N, D], the weight is [D, V].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopallas
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.cases import ORIGINALS, in_direction, table_grid
from autopallas.kernels.cross_entropy.operands import Operands
from autopallas.kernels.cross_entropy.operation import OPERATION
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Product, SideSpec, Statistic
from autopallas.kernels.cross_entropy.tuned_block_sizes import infer_block_sizes
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Index, Score, Side, traced
from benchmarks.case import AUTOPALLAS, ORIGINAL, Candidate, Case, Chosen, Direction, chosen_by

ORACLE_LIMIT = 2048 * 32000
"""How many logits there may be for a float64 result to be computed: some seconds of NumPy."""

KERNEL = "kernel"
"""The candidate that is the implementation itself, without recognition."""


def original(case: Case) -> Callable[..., Any]:
    """The forward computation as people write it."""
    return ORIGINALS[case.mask]


def candidates(case: Case) -> dict[str, Candidate]:
    """The original, the whole of it under ``autopallas.optimize`` as a train step would be, and the kernel itself."""
    function = in_direction(case, original(case))
    optimized = autopallas.optimize(function, objective="always", strict=True)

    device = Device.current()
    name = OPERATION.requested(None, device)[-1]
    sizes = infer_block_sizes(spec(case), device, name, case.direction)
    return {
        ORIGINAL: Candidate(function, lambda: Chosen(ORIGINAL)),
        AUTOPALLAS: Candidate(optimized, lambda: chosen_by(optimized)),
        KERNEL: Candidate(kernel(case, name, sizes), lambda: Chosen(name, sizes.to_dict())),
    }


def spec(case: Case) -> CrossEntropySpec:
    """What the kernel is asked for: statistics, and in a train step the gradients for a known cotangent with them."""
    dtype, f32, int32 = np.dtype(case.dtype), np.dtype(np.float32), np.dtype(np.int32)
    score = Score(dtype)
    logits = traced(lambda z: z.astype(f32), score)
    statistics = (Statistic("max", logits), Statistic("exp_sum", logits), Statistic("pick", logits, 0))
    if case.mask == "accuracy":
        statistics += (Statistic("argmax", logits),)
    n, d, v = (case.size(letter) for letter in "NDV")
    forward = CrossEntropySpec(
        n, d, v, dtype, dtype, dtype, False, statistics, (SideSpec(int32, (True, False)), SideSpec(f32, (False, False)))
    )
    if case.direction == "forward":
        return forward
    logsumexp = traced(lambda m, s: m + jnp.log(s), Side(2, f32), Side(3, f32))

    def gradient(z: Any, key: Any, label: Any, weight: Any, lse: Any) -> Any:
        p = jnp.exp(z.astype(f32) - lse) * weight
        return (p - jnp.where(key == label, weight, f32.type(0))).astype(dtype)

    inputs = (score, Index("key", int32), Side(0, int32), Side(1, f32), Side(len(forward.sides), f32))
    dlogits = traced(gradient, *inputs)
    products = (Product("rows", dlogits, dtype), Product("columns", dlogits, dtype))
    return replace(forward, finish=(logsumexp,), products=products)


def kernel(case: Case, implementation: str, block_sizes: BlockSizes) -> Callable[..., Any]:
    """What a replaced site runs, as a function of all the case's arguments."""
    module, asked = OPERATION.implementation(implementation), spec(case)
    assert module is not None

    def run(x: jax.Array, w: jax.Array, labels: jax.Array, cotangent: Any = 1.0) -> Any:
        weight = jnp.reshape(jnp.asarray(cotangent, jnp.float32) / asked.rows, (1, 1))
        statistics, products = module.forward(asked, block_sizes, Operands(x, w, (labels[:, None], weight)))
        maximum, total, picked, *argmax = statistics
        loss = jnp.mean(maximum + jnp.log(total) - picked)
        right = [jnp.mean((index == labels).astype(jnp.float32)) for index in argmax]
        if not products:
            return (loss, *right) if right else loss
        return loss, *right, products

    return run


def arguments(case: Case) -> tuple[jax.Array, ...]:
    """Activations, weight, labels, and last the loss's cotangent where there is a backward pass."""
    rows, hidden, vocabulary = (case.size(letter) for letter in "NDV")
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, hidden), np.float32)
    w = random.standard_normal((hidden, vocabulary), np.float32) / np.float32(np.sqrt(hidden))
    given = [jnp.asarray(x, case.dtype), jnp.asarray(w, case.dtype), jnp.asarray(random.integers(0, vocabulary, rows))]
    given[2] = given[2].astype(jnp.int32)
    if case.direction == "forward+backward":
        given.append(jnp.float32(1.0))
    return tuple(given)


def operations(case: Case) -> float:
    """Two for each logit and hidden position; three times that with the backward pass."""
    forward = 2.0 * case.size("N") * case.size("D") * case.size("V")
    return forward * (3 if case.direction == "forward+backward" else 1)


def oracle(case: Case, arguments: tuple[Any, ...]) -> Any:
    """The result in float64, of the arguments as they were rounded to the case's dtype; block of rows by block."""
    if case.size("N") * case.size("V") > ORACLE_LIMIT:
        return None
    x, w = (np.asarray(a).astype(np.float64) for a in arguments[:2])
    labels = np.asarray(arguments[2])
    losses, right, dx, dw = [], [], np.empty_like(x), np.zeros_like(w)
    for start in range(0, len(x), 256):
        rows, label = slice(start, start + 256), labels[start : start + 256]
        logits = x[rows] @ w
        right.append(logits.argmax(axis=1) == label)
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        total = p.sum(axis=1)
        picked = logits[np.arange(len(label)), label]
        losses.append(logits.max(axis=1) + np.log(total) - picked)
        if case.direction == "forward+backward":
            p /= total[:, None]
            p[np.arange(len(label)), label] -= 1
            p *= float(arguments[3]) / len(x)
            dx[rows] = p @ w.T
            dw += x[rows].T @ p
    loss: tuple[Any, ...] = (np.concatenate(losses).mean(),)
    if case.mask == "accuracy":
        loss += (np.concatenate(right).mean(),)
    if case.direction == "forward+backward":
        return *loss, (dx, dw)
    return loss if len(loss) > 1 else loss[0]


def grid(name: str) -> tuple[Case, ...]:
    """The cases.

    "quick" is a sample; "standard" is checked in for the CPU; "wide" adds sizes; "table" has a case for each row of the
    tuned table.
    """
    directions: tuple[Direction, ...] = ("forward", "forward+backward")
    dtypes = ("float32", "bfloat16")
    if name == "quick":
        return tuple(_case("forward+backward", d, 512, 512, 8192) for d in dtypes)
    if name in ("standard", "wide"):
        sizes = [(512, 512, 8192), (2048, 512, 32000)]
        sizes += [(2048, 512, 8192), (8192, 256, 32000)] if name == "wide" else []
        return (
            *(_case(direction, d, *size) for direction in directions for d in dtypes for size in sizes),
            *(_case("forward+backward", d, 2048, 512, 128000) for d in dtypes),
            *(_case(direction, "float32", 2048, 512, 32000, "accuracy") for direction in directions),
        )
    if name == "table":
        return table_grid()
    raise ValueError(f"no grid is called {name!r}")


def _case(direction: Direction, dtype: str, rows: int, hidden: int, vocabulary: int, mask: str = "plain") -> Case:
    return Case("cross_entropy", direction, dtype, mask, (("N", rows), ("D", hidden), ("V", vocabulary)))
