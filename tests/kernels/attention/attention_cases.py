"""The cases of attention that every implementation has to compute, and what they are compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.kernels.attention import reference
from autopallas.kernels.attention.operands import Cotangents, Gradients, Operands, Results
from autopallas.kernels.attention.programs import causal, traced
from autopallas.kernels.attention.spec import AttentionSpec, SideSpec, Weight
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Index, Instruction, Score, Side

F32, I32, BOOL = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.bool_)
QUERY, KEY, SCORE = Index("query", I32), Index("key", I32), Score(F32)
LOW = np.float32(-1e30)


def side(position: int, dtype: Any = F32) -> Side:
    return Side(position, np.dtype(dtype))


@dataclass(frozen=True)
class Case:
    """One attention: sizes, the elementwise parts, and how its side inputs are drawn."""

    name: str
    batch: int = 2
    key_heads: int = 2
    groups: int = 1
    query_length: int = 24
    key_length: int = 32
    head_size: int = 8
    value_head_size: int = 8
    score: ElementwiseProgram | None = None
    live: ElementwiseProgram | None = None
    sides: tuple[SideSpec, ...] = ()
    inner_weights: tuple[Weight, ...] = ()
    weights: tuple[Weight, ...] = ()
    sink: tuple[bool, bool, bool, bool, bool] | None = None
    draw: str = ""
    """How side inputs are drawn, one letter each: "n" normal, "p" positive, "m" mask, "l" lengths, "s" segments, "z"
    zero at every other key, "v" mostly positive, and some zero or negative, "t" near the least that float32 can be."""
    size: float = 1.0
    """Factor of the queries."""
    cotangent: float = 1.0
    """Factor of the result's cotangent."""
    undefined_rows: bool = False
    """Whether some rows are NaN."""

    def spec(self, dtype: Any = F32, **changes: Any) -> AttentionSpec:
        dtype = np.dtype(dtype)
        score = self.score if self.score is not None else traced(lambda s: s * np.float32(0.3), SCORE)
        changes = {"weights_dtype": dtype} | changes
        return AttentionSpec(
            self.batch, self.key_heads, self.groups, self.query_length, self.key_length, self.head_size,
            self.value_head_size, dtype, dtype, dtype, F32, dtype, score, sides=self.sides,
            inner_weights=self.inner_weights, weights=self.weights, sink=self.sink, live=self.live, **changes,
        )  # fmt: skip

    def operands(self, dtype: Any = F32) -> tuple[Any, ...]:
        """query, key, value, sides, sink, dout."""
        random = np.random.default_rng(len(self.name))
        b, k, g, t, s = sizes = (self.batch, self.key_heads, self.groups, self.query_length, self.key_length)

        def normal(*shape: int, scale: float = 1.0) -> jax.Array:
            return jnp.asarray(random.standard_normal(shape, np.float32) * scale, dtype)

        sides = []
        for letter, x in zip(self.draw, self.sides, strict=True):
            shape = tuple(n if v else 1 for n, v in zip(sizes, x.varies, strict=True))
            values: Any = {
                "n": lambda shape=shape: random.standard_normal(shape),
                "p": lambda shape=shape: random.uniform(0.5, 1.5, shape),
                "m": lambda shape=shape: random.uniform(size=shape) < 0.6,
                "z": lambda shape=shape: random.uniform(0.5, 1.5, shape) * (np.arange(shape[-1]) % 2),
                "v": lambda shape=shape: random.choice([0.0, 3.0, 5.0, -0.5], shape, p=[0.4, 0.3, 0.2, 0.1]),
                "t": lambda shape=shape: random.uniform(0.5, 1.5, shape) * 1e-36,
                "l": lambda shape=shape: random.integers(1, s, shape),
                "s": lambda shape=shape: np.sort(random.integers(0, 3, shape), axis=-1 if shape[-1] > 1 else -2),
            }[letter]()
            sides.append(jnp.asarray(values, x.dtype))
        sink = None
        if self.sink is not None:
            shape = tuple(n if v else 1 for n, v in zip(sizes, self.sink, strict=True))
            sink = jnp.asarray(random.standard_normal(shape), jnp.float32)
        return (
            normal(b, k, g, t, self.head_size, scale=self.size),
            normal(b, k, s, self.head_size),
            normal(b, k, s, self.value_head_size),
            tuple(sides),
            sink,
            normal(b, k, g, t, self.value_head_size, scale=self.cotangent),
        )


def _masked(condition: Any, *inputs: Any, fill: Any = LOW) -> ElementwiseProgram:
    return traced(lambda s, *rest: jnp.where(condition(*rest), s * np.float32(0.3), fill), SCORE, *inputs)


def _varies(letters: str) -> tuple[bool, bool, bool, bool, bool]:
    b, k, g, t, s = (axis in letters for axis in "BKGTS")
    return b, k, g, t, s


def _causal(i: Any, j: Any) -> Any:
    return i >= j


def _window(i: Any, j: Any) -> Any:
    return (i >= j) & (i - j < 7)


def _prefix(i: Any, j: Any) -> Any:
    return (i >= j) | (j < 9)


def _dilated(i: Any, j: Any) -> Any:
    return (i >= j) & ((i - j) % 3 == 0)


def _late(i: Any, j: Any) -> Any:
    return i - 5 >= j  # the first five rows see nothing


def _static(name: str, condition: Any, fill: Any = LOW, **rest: Any) -> Case:
    live = traced(condition, QUERY, KEY)
    return Case(name, score=_masked(condition, QUERY, KEY, fill=fill), live=live, **rest)


_MASK_BTS = SideSpec(BOOL, _varies("BTS"))
_BIAS = SideSpec(F32, _varies("KGTS"))

CASES = (
    Case("full"),
    Case("full with odd sizes", query_length=37, key_length=29, head_size=5, value_head_size=11),
    Case("one query", query_length=1, key_length=41),
    Case("one key", query_length=13, key_length=1),
    Case("grouped queries", key_heads=2, groups=3, query_length=19, key_length=31, value_head_size=4),
    Case("one head of one example", batch=1, key_heads=1, query_length=17),
    _static("causal", _causal, query_length=32),
    _static("causal with a fill of -inf", _causal, -np.inf, query_length=41, key_length=41, groups=2),
    _static("causal with more keys", _causal, query_length=16, key_length=48),
    _static("causal with more queries", _causal, query_length=48, key_length=16),
    _static("causal with an offset", lambda i, j: i + 24 >= j, query_length=24, key_length=48),
    _static("sliding window", _window, -np.inf, query_length=41, key_length=41),
    _static("prefix", _prefix, query_length=32, key_length=32),
    _static("dilated", _dilated, query_length=32, key_length=32),
    _static("blocks", lambda i, j: i // 8 == j // 8, query_length=32, key_length=32),
    _static("rows without keys, finite fill", _late, np.float32(-1e9)),
    _static("rows without keys, fill -inf", _late, -np.inf, undefined_rows=True),
    Case("causal, low fill", score=_masked(_causal, QUERY, KEY, fill=np.float32(-1e9)), query_length=32),
    Case(
        "sliding window, added",
        score=traced(
            lambda s, i, j: s * np.float32(0.3) + jnp.where(_window(i, j), np.float32(0), np.float32(-1e9)),
            SCORE, QUERY, KEY,
        ),
        query_length=41, key_length=41,
    ),
    Case(
        "mask as a side input",
        score=_masked(lambda m: m, side(0, bool)), live=ElementwiseProgram((side(0, bool),), (), 0),
        sides=(_MASK_BTS,), draw="m",
    ),
    Case(
        "lengths", score=_masked(lambda j, n: j < n, KEY, side(0, I32), fill=-np.inf),
        live=traced(lambda j, n: j < n, KEY, side(0, I32)), sides=(SideSpec(I32, _varies("B")),), draw="l",
    ),
    Case(
        "segments and causal",
        score=_masked(lambda i, j, a, b: (i >= j) & (a == b), QUERY, KEY, side(0, I32), side(1, I32)),
        live=traced(lambda i, j, a, b: (i >= j) & (a == b), QUERY, KEY, side(0, I32), side(1, I32)),
        sides=(SideSpec(I32, _varies("BT")), SideSpec(I32, _varies("BS"))), draw="ss",
        query_length=32,
    ),
    Case("bias", score=traced(lambda s, b: s + b, SCORE, side(0)), sides=(_BIAS,), draw="n", groups=2,
         query_length=19, key_length=21),
    Case(
        "biases of every shape",
        score=traced(lambda s, a, b, c, d: s * a + b - c * d, SCORE, *(side(n) for n in range(4))),
        sides=tuple(SideSpec(F32, _varies(v)) for v in ("", "BS", "KT", "TS")), draw="pnnn", groups=2,
        key_length=16,
    ),
    Case(
        "temperatures of rows and heads",
        score=traced(lambda s, a, b: s / a / jnp.sqrt(b), SCORE, side(0), side(1)),
        sides=(SideSpec(F32, _varies("T")), SideSpec(F32, _varies("KG"))), draw="pp", groups=2, key_length=19,
    ),
    Case(
        "soft cap and position bias",
        score=traced(
            lambda s, i, j, slope: jnp.tanh(s / np.float32(5)) * np.float32(5) - slope * (i - j).astype(F32),
            SCORE, QUERY, KEY, side(0),
        ),
        sides=(SideSpec(F32, _varies("K")),), draw="p",
    ),
    Case("sink", sink=_varies("KG"), groups=2, query_length=19, key_length=23),
    _static("sink and rows without keys", _late, -np.inf, sink=_varies("B")),
    Case(
        "probabilities masked again",
        score=_masked(_late, QUERY, KEY, fill=-np.inf), live=traced(_late, QUERY, KEY),
        weights=(Weight("where", traced(_late, QUERY, KEY)),),
    ),
    Case(
        "probabilities multiplied",
        weights=(Weight("multiply", traced(lambda w: w, side(0))),), sides=(SideSpec(F32, _varies("BTS")),), draw="n",
    ),
    Case(
        "weights inside the sum",
        inner_weights=(
            Weight("multiply", traced(lambda w: w, side(0))),
            Weight("where", traced(lambda i, j: (i + j) % 2 == 0, QUERY, KEY)),
        ),
        sides=(SideSpec(F32, _varies("S")),), draw="p", sink=_varies("KT"),
    ),
    Case(
        "weights of zero inside the sum beside huge exponentials",
        score=traced(lambda s, j: s * np.float32(0.05) + np.float32(90) * (j % 2 == 0), SCORE, KEY),
        inner_weights=(Weight("multiply", traced(lambda w: w, side(0))),),
        sides=(SideSpec(F32, _varies("S")),), draw="z", cotangent=0.01,
    ),
    Case(
        "negative weights inside the sum, a mask and a sink",
        score=traced(
            lambda s, i, j: jnp.where(i >= j, s * np.float32(0.3) + np.float32(4) * (j % 3), -np.inf), SCORE, QUERY, KEY
        ),
        live=traced(_causal, QUERY, KEY), inner_weights=(Weight("multiply", traced(lambda w: w, side(0))),),
        sides=(SideSpec(F32, _varies("BTS")),), draw="v", sink=_varies("KT"), query_length=29,
    ),
    Case(
        "tiny weights inside the sum",
        inner_weights=(Weight("multiply", traced(lambda w: w, side(0))),),
        sides=(SideSpec(F32, _varies("TS")),), draw="t", cotangent=0.01,
    ),
    Case("large logits", size=200.0),
)  # fmt: skip


def promoted(program: ElementwiseProgram) -> ElementwiseProgram:
    """The same program with every float a float64."""

    def wide(dtype: Any) -> Any:
        floating = jnp.issubdtype(dtype, jnp.floating)
        return np.dtype(np.float64) if floating else np.dtype(dtype)

    def instruction(i: Instruction) -> Instruction:
        params = tuple((k, wide(v) if k == "new_dtype" else v) for k, v in i.params)
        return Instruction(i.primitive, params, i.arguments, wide(i.dtype))

    inputs = tuple(replace(i, dtype=wide(i.dtype)) for i in program.inputs)
    inputs = tuple(replace(i, value=i.value) if isinstance(i, Constant) else i for i in inputs)
    return ElementwiseProgram(inputs, tuple(map(instruction, program.instructions)), program.result)


def promoted_spec(spec: AttentionSpec) -> AttentionSpec:
    double = np.dtype(np.float64)

    def weights(given: tuple[Weight, ...]) -> tuple[Weight, ...]:
        return tuple(Weight(w.kind, promoted(w.program)) for w in given)

    return replace(
        spec, query_dtype=double, key_dtype=double, value_dtype=double, score_dtype=double, result_dtype=double,
        score=promoted(spec.score), inner_weights=weights(spec.inner_weights), weights=weights(spec.weights),
        sides=tuple(replace(s, dtype=double) if s.differentiable else s for s in spec.sides),
        live=None if spec.live is None else promoted(spec.live), weights_dtype=double, score_gradient_dtype=None,
        statistics=None
        if spec.statistics is None
        else tuple(weights(s) if isinstance(s, tuple) else promoted(s) for s in spec.statistics),
    )  # fmt: skip


@cache
def oracle(case: Case, dtype: Any) -> dict[str, np.ndarray]:
    """Result, logsumexp and gradients in float64, by the plain formula."""
    return oracle_of(case, dtype, case.operands(dtype))


def oracle_of(case: Case, dtype: Any, given: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """The same, of other operands than the case's, the cotangent last."""
    with jax.enable_x64(True):

        def wide(x: Any) -> Any:
            return jnp.asarray(np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x)

        query, key, value, sides, sink, dout = jax.tree.map(wide, given)
        spec = promoted_spec(case.spec(dtype))

        @jax.jit
        def run(operands: Operands) -> Any:
            found = reference.forward(spec, None, operands)
            return found, reference.backward(spec, None, operands, found.residuals, Cotangents(dout))

        return named(*run(Operands(query, key, value, sides, sink)))


def named(results: Results, gradients: Gradients) -> dict[str, np.ndarray]:
    """Everything that an implementation returns, by name."""
    out, (logsumexp,), _ = results
    dquery, dkey, dvalue, dsides, dsink = gradients
    found = {"out": out, "logsumexp": logsumexp, "dquery": dquery, "dkey": dkey, "dvalue": dvalue, "dsink": dsink}
    found |= {f"dside{n}": d for n, d in enumerate(dsides)}
    return {name: np.asarray(x, np.float64) for name, x in found.items() if x is not None}


__all__ = [
    "CASES",
    "KEY",
    "QUERY",
    "SCORE",
    "Case",
    "causal",
    "named",
    "oracle",
    "oracle_of",
    "promoted",
    "promoted_spec",
    "side",
]
