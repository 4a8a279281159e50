"""What the constants of the model were fitted to, and what they were judged by afterwards.

The machine code of these kernels was read once, with JAX 0.11.2 and ptxas 13.0.88, and is kept as :class:`Code`: that
of this package at the commit whose kernels a review estimated (e24747c), and that of tokamax 0.0.17 with the block
sizes of its own table for the H100, whose times are measured (``data/autotuning/nvidia_h100_80gb_hbm3``, medians). The
review's figures are the middles of its ranges, and estimates themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from benchmarks.gpu_model import cases
from benchmarks.gpu_model.model import Case, Code, Part, Tiles

__all__ = ["Anchor", "anchors", "codes"]

Role: TypeAlias = Literal["fitted", "held out", "missed"]

_FILE = Path(__file__).with_name("anchors.json")
_REVIEW, _TOKAMAX = "e24747c", "tokamax"
_LENGTHS = (2048, 4096, 8192, 16384)


class Anchor(NamedTuple):
    """A case with a known rate.

    Attributes:
      case: what is estimated.
      teraflops: the figure.
      measured: whether it was measured; else a review estimated it.
      role: "fitted" to, "held out", or "missed": a review's estimate that the model contradicts.
    """

    case: Case
    teraflops: float
    measured: bool
    role: Role


@cache
def codes() -> dict[str, Code]:
    """Returns the recorded kernels by name."""
    found = json.loads(_FILE.read_text())
    return {
        name: Code(tuple(Part(*part) for part in code["loops"]), Part(*code["tile"]) if code["tile"] else None,
                   code["registers"], code["shared_bytes"])
        for name, code in found.items()
    }  # fmt: skip


def anchors() -> Iterator[Anchor]:
    """Yields all anchors."""
    yield from _of_the_review()
    yield from _of_tokamax()


def _of_the_review() -> Iterator[Anchor]:
    found = codes()
    for length, batch, mask, head, heads, keys, figure, copied in (
        (16384, 1, "full", 128, 16, 128, 560, 520), (16384, 1, "causal", 128, 16, 128, 530, 465),
        (4096, 4, "causal", 128, 16, 128, 470, 340), (4096, 4, "full", 64, 16, 128, 395, None),
        (4096, 4, "causal", 64, 16, 128, 320, None), (16384, 1, "full", 256, 8, 64, 550, None),
        (16384, 1, "causal", 256, 8, 64, 475, None),
    ):  # fmt: skip
        for copies, rate in ((0, figure), (4, copied)):
            if rate is not None:
                name = (
                    f"{_REVIEW} forward B{batch} T{length} N{heads} D{head} {mask}{', four transposes' * bool(copies)}"
                )
                case = cases.attention(
                    name, [found[f"{_REVIEW} forward {head} {mask}"]], (batch, length, heads, head), mask == "causal",
                    keys=keys, copies=copies, two_stages=head == 256,
                )  # fmt: skip
                yield Anchor(case, rate, False, "fitted")
    for length, batch, mask, head, heads, names, rows, keys, figure, role in (
        (16384, 1, "full", 128, 16, ("query", "key_value"), 128, 64, 415, "fitted"),
        (16384, 1, "causal", 128, 16, ("query", "key", "value"), 128, 64, 350, "fitted"),
        (4096, 4, "causal", 128, 16, ("query", "key", "value"), 128, 64, 335, "missed"),
        (4096, 4, "causal", 64, 16, ("query", "key_value"), 128, 64, 235, "missed"),
        (16384, 1, "causal", 256, 8, ("query", "key", "value"), 64, 32, 140, "fitted"),
    ):  # fmt: skip
        own = [found[f"{_REVIEW} backward {head} {mask} {name}"] for name in names]
        name = f"{_REVIEW} backward B{batch} T{length} N{heads} D{head} {mask}"
        shape = batch, length, heads, head
        case = cases.attention(
            name, own, shape, mask == "causal", rows=rows, keys=keys, warpgroups=rows // 64, backward=True
        )
        yield Anchor(case, figure, False, role)  # type: ignore[arg-type]
    large, many = (8192, 4096, 4096, 8), (32768, 2048, 1408, 64)
    forward, drhs = found[f"{_REVIEW} grouped_matmul forward"], found[f"{_REVIEW} grouped_matmul drhs"]
    narrow = found[f"{_REVIEW} grouped_matmul forward, N 1408"]
    for case, figure in (
        (cases.grouped_matmul(f"{_REVIEW} grouped matmul forward G8", forward, large, row_tiles=68), 535),
        (cases.grouped_matmul(f"{_REVIEW} grouped matmul forward G64", narrow, many, row_tiles=320), 440),
        (cases.grouped_matmul(f"{_REVIEW} grouped matmul drhs G8", drhs, large), 500),
        (cases.grouped_matmul(f"{_REVIEW} grouped matmul drhs G64", drhs, many), 430),
    ):
        yield Anchor(case, figure, False, "fitted")
    shape = 32768, 2560, 128256
    statistics, values = (found[f"{_REVIEW} cross_entropy {name}"] for name in ("statistics", "values"))
    yield Anchor(cases.cross_entropy(f"{_REVIEW} cross-entropy forward", statistics, shape), 555, False, "fitted")
    step = cases.train_step(f"{_REVIEW} cross-entropy train step", statistics, values, shape)
    yield Anchor(step, 450, False, "fitted")


def _of_tokamax() -> Iterator[Anchor]:
    found = codes()
    # Rows of a block, keys of a pass, TFLOP/s at each length, and those lengths that the constants were fitted to.
    for head, mask, rows, keys, rates, fitted in (
        (128, "full", 128, 128, (606, 652, 671, 682), (16384,)),
        (128, "causal", 128, 128, (492, 568, 620, 637), (4096, 16384)),
        (256, "full", 128, 64, (654, 698, 720, 733), (16384,)),
        (256, "causal", 128, 64, (514, 580, 627, 650), (16384,)),
        (64, "full", 256, 128, (None, 512, 528, 521), (4096,)),
        (64, "causal", 128, 256, (None, 413, 465, 502), (4096,)),
    ):
        for length, rate in zip(_LENGTHS, rates, strict=True):
            if rate is not None:
                shape = 16384 // length, length, 2048 // head, head
                name = f"{_TOKAMAX} forward B{shape[0]} T{length} N{shape[2]} D{head} {mask}"
                case = cases.attention(
                    name, [found[f"{_TOKAMAX} forward {head} {mask}"]], shape, mask == "causal", rows=rows, keys=keys
                )
                yield Anchor(case, rate, True, "fitted" if length in fitted else "held out")
    for head, mask, rows, rates, fitted in (
        (128, "full", 128, (454, 483, 488, 492), (4096, 16384)),
        (128, "causal", 128, (361, 408, 438, 452), (4096, 16384)),
        (64, "full", 256, (None, 352, 359, 361), (4096,)),
        (64, "causal", 128, (None, 286, None, None), (4096,)),
        (256, "causal", 64, (None, 143, 150, 155), (4096, 16384)),
    ):
        own = [found[f"{_TOKAMAX} backward {head} {mask} {name}"] for name in ("query", "key_value")]
        for length, rate in zip(_LENGTHS, rates, strict=True):
            if rate is not None:
                shape = 16384 // length, length, 2048 // head, head
                name = f"{_TOKAMAX} backward B{shape[0]} T{length} N{shape[2]} D{head} {mask}"
                groups = 1 if head == 256 else 2
                case = cases.attention(
                    name, own, shape, mask == "causal", rows=rows, keys=64, warpgroups=groups, backward=True
                )
                yield Anchor(case, rate, True, "fitted" if length in fitted else "held out")
    # One warpgroup per block multiplies 128 x 64 x 128 in a step, and loads for itself.
    work = Tiles(found[f"{_TOKAMAX} ragged_dot"], 68 * 224, 32, 2 * 128 * (128 + 64), 1)
    case = Case(f"{_TOKAMAX} ragged_dot M8192 K4096 N14336 G8", 2.0 * 8192 * 4096 * 14336, (work,))
    yield Anchor(case, 461, True, "fitted")
