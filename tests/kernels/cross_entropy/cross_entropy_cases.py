"""The cases of cross-entropy that every implementation has to compute, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.kernels.cross_entropy import reference
from autopallas.kernels.cross_entropy.operands import Operands
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Product, SideSpec, Statistic
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Index, Score, Side, traced

F32, F64, I32, BOOL = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int32), np.dtype(np.bool_)
BF16 = np.dtype(jnp.bfloat16)
KEY = Index("key", I32)
LABELS, ROW, COLUMN, FULL = (True, False), (True, False), (False, True), (True, True)
LOSS = ("max", "exp_sum", "pick")
KINDS = (*LOSS, "sum", "argmax", "ties")


@dataclass(frozen=True)
class Case:
    """One cross-entropy: sizes, the logit program, and how operands and side inputs are drawn.

    Side input 0 holds the labels; ``sides`` are those behind it, which ``logit`` takes after the logits, in float32.
    """

    name: str
    rows: int = 32
    hidden: int = 9
    vocabulary: int = 48
    vocabulary_major: bool = False
    logit: Callable[..., Any] = lambda z: z
    sides: tuple[SideSpec, ...] = ()
    draw: str = ""
    """How these side inputs are drawn, one letter each: "n" normal, "v" 0 or -inf, "p" positive with sum 1, "r" bool
    by rows, "x" normal with a NaN and two infinities."""
    kinds: tuple[str, ...] = KINDS
    labels: tuple[int, int] = (0, 48)
    size: float = 1.0
    """Factor of the activations."""
    whole: bool = False
    """Whether activations and weights are small whole numbers, so that logits are exact and there are ties."""

    def program(self, logit_dtype: Any = F32) -> ElementwiseProgram:
        inputs = [Side(1 + n, s.dtype) for n, s in enumerate(self.sides)]
        return traced(lambda z, *rest: self.logit(z.astype(F32), *rest), Score(np.dtype(logit_dtype)), *inputs)

    def spec(self, dtype: Any = F32, weight_dtype: Any = None, logit_dtype: Any = F32) -> CrossEntropySpec:
        """Statistics alone."""
        program = self.program(logit_dtype)
        statistics = tuple(Statistic(k, program, 0 if k == "pick" else None) for k in self.kinds)  # type: ignore[arg-type]
        return CrossEntropySpec(
            self.rows, self.hidden, self.vocabulary, np.dtype(dtype), np.dtype(weight_dtype or dtype),
            np.dtype(logit_dtype), self.vocabulary_major, statistics, (SideSpec(I32, LABELS), *self.sides),
        )  # fmt: skip

    def with_products(self, spec: CrossEntropySpec, form: str) -> CrossEntropySpec:
        """Gradients of the mean loss: formed with the statistics ("finish"), or from a logsumexp that is a side input.

        In both forms the logsumexp has the number that follows the sides of the statistics.
        """
        program, position = spec.statistics[0].program, len(spec.sides)

        def gradient(z: Any, key: Any, label: Any, *rest: Any) -> Any:
            *sides, logsumexp = rest
            p = jnp.exp(self.logit(z.astype(F32), *sides) - logsumexp)
            return (p - (key == label)) * np.float32(1 / 16)

        inputs = [Score(spec.logit_dtype), KEY, Side(0, I32)]
        inputs += [Side(1 + n, s.dtype) for n, s in enumerate(self.sides)] + [Side(position, F32)]
        g = traced(gradient, *inputs)
        products = (
            Product("rows", g, spec.row_dtype), Product("columns", g, spec.weight_dtype), Product("column_sum", g, F32),
        )  # fmt: skip
        if form == "finish":
            statistics = tuple(Statistic(k, program, 0 if k == "pick" else None) for k in ("max", "exp_sum", "pick"))  # type: ignore[arg-type]
            finish = traced(lambda m, s: m + jnp.log(s), Side(position, F32), Side(position + 1, F32))
            return replace(spec, statistics=statistics, finish=(finish,), products=products)
        return replace(spec, statistics=(), sides=(*spec.sides, SideSpec(F32, ROW)), products=products)

    def operands(self, dtype: Any = F32, weight_dtype: Any = None) -> tuple[Any, ...]:
        """x, w, sides, and a cotangent for each statistic."""
        random = np.random.default_rng(len(self.name))
        x, w = random.standard_normal((self.rows, self.hidden)), random.standard_normal((self.hidden, self.vocabulary))
        if self.whole:
            x, w = np.rint(x), np.rint(w)
        sides = [jnp.asarray(random.integers(*self.labels, (self.rows, 1)), I32)]
        for letter, side in zip(self.draw, self.sides, strict=True):
            shape = tuple(n if v else 1 for n, v in zip((self.rows, self.vocabulary), side.varies, strict=True))
            values = random.standard_normal(shape)
            if letter == "v":
                values = np.where(values < 1, 0.0, -np.inf)
            elif letter == "p":
                values = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
            elif letter == "r":
                values = np.arange(self.rows)[:, None] % 5 != 2
            elif letter == "x":
                values[3, [7, 40]], values[9, [11, 50]], values[20] = np.nan, np.inf, -np.inf
            sides.append(jnp.asarray(values, side.dtype))
        # As in a logsumexp, whose value does not depend on the shift, no cotangent for the maximum of a loss.
        none = ("argmax", "ties", "max") if self.kinds == LOSS else ("argmax", "ties")
        cotangents = tuple(
            None if kind in none else jnp.asarray(random.standard_normal(self.rows), F32) for kind in self.kinds
        )
        w = w.T if self.vocabulary_major else w
        return jnp.asarray(x * self.size, dtype), jnp.asarray(w, weight_dtype or dtype), tuple(sides), cotangents


def capped(z: Any) -> Any:
    return jnp.tanh(z / np.float32(3)) * np.float32(3)


ODD: dict[str, Any] = {"rows": 37, "vocabulary": 53, "labels": (0, 53)}

CASES = (
    Case("plain", kinds=LOSS),
    Case("odd sizes", **ODD),
    Case("embedding table", vocabulary_major=True, kinds=LOSS),
    Case("odd embedding table", vocabulary_major=True, kinds=LOSS, **ODD),
    Case("one row", rows=1, kinds=LOSS),
    Case("one position", vocabulary=1, labels=(0, 1), kinds=LOSS),
    Case("smaller than a block", rows=5, vocabulary=7, labels=(0, 7), kinds=LOSS),
    Case("labels out of range", kinds=("pick", "sum"), **ODD | {"labels": (-40, 90)}),
    Case("equal labels", labels=(7, 8), kinds=LOSS),
    Case("scale", logit=lambda z: z * np.float32(0.125), kinds=LOSS),
    Case("soft cap", logit=capped, vocabulary_major=True, kinds=LOSS),
    Case("bias", logit=lambda z, b: z + b, sides=(SideSpec(F32, COLUMN),), draw="n"),
    Case("row factor and bias", logit=lambda z, t, b: z * t + b.astype(F32), draw="nn",
         sides=(SideSpec(F32, ROW), SideSpec(BF16, COLUMN))),
    Case("vocabulary mask", logit=lambda z, m: z + m, sides=(SideSpec(F32, COLUMN),), draw="v",
         kinds=("max", "exp_sum", "pick", "argmax")),
    Case("soft labels", logit=lambda z, q: z * q, sides=(SideSpec(F32, FULL),), draw="p", kinds=("sum",)),
    Case("N x V bias", logit=lambda z, b: z + b, sides=(SideSpec(F32, FULL),), draw="n", vocabulary_major=True,
         **ODD),
    Case("rows without positions", logit=lambda z, r: jnp.where(r, z, -jnp.inf), sides=(SideSpec(BOOL, ROW),), draw="r",
         kinds=("max", "exp_sum", "pick", "argmax", "ties")),
    Case("ties", whole=True, **ODD),
    Case("NaN and infinities", logit=lambda z, b: z + b, sides=(SideSpec(F32, FULL),), draw="x", **ODD),
    Case("activations of 30", size=30.0, kinds=LOSS),
    Case("activations of 1000", size=1000.0, vocabulary_major=True, kinds=LOSS),
)  # fmt: skip


def _wide(dtype: Any) -> Any:
    return F64 if jnp.issubdtype(dtype, jnp.floating) else np.dtype(dtype)


def promoted(program: ElementwiseProgram) -> ElementwiseProgram:
    """The same program with every float a float64."""
    inputs = tuple(
        replace(i, dtype=_wide(i.dtype), value=i.value) if isinstance(i, Constant) else replace(i, dtype=_wide(i.dtype))
        for i in program.inputs
    )
    instructions = tuple(
        replace(
            i, dtype=_wide(i.dtype), params=tuple((k, _wide(v) if k == "new_dtype" else v) for k, v in i.params)
        )
        for i in program.instructions
    )  # fmt: skip
    return ElementwiseProgram(inputs, instructions, program.result)


def promoted_spec(spec: CrossEntropySpec) -> CrossEntropySpec:
    return replace(
        spec, row_dtype=F64, weight_dtype=F64, logit_dtype=F64,
        statistics=tuple(replace(s, program=promoted(s.program)) for s in spec.statistics),
        sides=tuple(replace(s, dtype=_wide(s.dtype)) for s in spec.sides),
        finish=tuple(map(promoted, spec.finish)),
        products=tuple(replace(p, program=promoted(p.program), dtype=F64) for p in spec.products),
    )  # fmt: skip


def wide(operands: Any) -> Any:
    """The same arrays with every float a float64."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x), _wide(x.dtype)), operands)


@cache
def oracle(case: Case, dtype: Any, weight_dtype: Any, logit_dtype: Any) -> dict[str, np.ndarray]:
    """Statistics, gradients and products in float64, by the plain formulas."""
    with jax.enable_x64(True):
        spec = promoted_spec(case.spec(dtype, weight_dtype, logit_dtype))
        return computed(reference, None, case, spec, wide(case.operands(dtype, weight_dtype)))


def computed(module: Any, sizes: Any, case: Case, spec: CrossEntropySpec, operands: Any) -> dict[str, np.ndarray]:
    """Everything that an implementation makes of a case, by name.

    The reference runs operation by operation: a compiler may skip roundings to 16 bits, and compute logits anew, in
    another way, that are compared with their maximum.
    """
    x, w, sides, cotangents = operands
    wanted = (True,) * (2 + len(sides))

    @(lambda f: f if module is reference else jax.jit(f))
    def run(x: Any, w: Any, sides: Any) -> Any:
        operands = Operands(x, w, sides)
        found = module.forward(spec, sizes, operands)
        assert found.products == ()
        return found.statistics, module.backward(spec, sizes, operands, found.residuals, cotangents, wanted)

    statistics, (dx, dw, dsides) = run(x, w, sides)
    found = {}
    for statistic, value in zip(spec.statistics, statistics, strict=True):
        assert value.shape == (spec.rows,)
        assert value.dtype == (np.int32 if statistic.kind == "argmax" else spec.accumulation_dtype)
        found[statistic.kind] = value
    for name, gradient, operand in zip(("dx", "dw"), (dx, dw), (x, w), strict=True):
        assert (gradient.shape, gradient.dtype) == (operand.shape, operand.dtype)
        found[name] = gradient
    for n, (gradient, operand, side) in enumerate(zip(dsides, sides, spec.sides, strict=True)):
        assert (gradient is not None) == side.differentiable
        if gradient is not None:
            assert (gradient.shape, gradient.dtype) == (operand.shape, operand.dtype)
            found[f"dside{n}"] = gradient
    return {name: np.asarray(value, np.float64) for name, value in found.items()}
