"""``python -m benchmarks.fills``: what causal masks with finite fills cost beside one with -inf.

All are computed by the same implementation with the same block sizes; what is compared are the masks.  A ratio of 1.1
says that a mask takes 1.1 times the processor time of -inf, by the median of ratios that are formed within rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopallas
from autopallas.kernels.attention.cases import in_direction, square
from autopallas.tuning import measure
from benchmarks import environment
from benchmarks.attention import arguments
from benchmarks.case import DIRECTIONS, Case

RESULTS = Path(__file__).parent / "results" / "fills-cpu.json"
BASELINE = "where -inf"
UNMASKED = "no mask"
MOST = 1.1
"""How many times the processor time of -inf a fill may take."""


def _seen(scores: jax.Array) -> jax.Array:
    return jnp.tril(jnp.ones(scores.shape[-2:], bool))


MASKS: dict[str, Callable[[jax.Array], jax.Array]] = {
    BASELINE: lambda s: jnp.where(_seen(s), s, -jnp.inf),
    "where -1e9": lambda s: jnp.where(_seen(s), s, -1e9),
    "add -1e9": lambda s: s + jnp.where(_seen(s), 0.0, -1e9).astype(s.dtype),
    "add -1e10, by arithmetic": lambda s: s + (1.0 - _seen(s).astype(s.dtype)) * -1e10,
    "add the least number": lambda s: s + jnp.where(_seen(s), 0.0, jnp.finfo(s.dtype).min).astype(s.dtype),
    "add -inf": lambda s: s + jnp.where(_seen(s), 0.0, -jnp.inf).astype(s.dtype),
    UNMASKED: lambda s: s,
}


def attention(name: str) -> Callable[..., jax.Array]:
    """Attention with one of the masks, replaced whatever the tables say."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(MASKS[name](scores), axis=-1), value)

    optimized: Callable[..., jax.Array] = autopallas.optimize(attend, objective="always", strict=True)
    return optimized


def rows(case: Case, names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """What each mask costs beside -inf in one case."""
    candidates = {name: in_direction(case, attention(name)) for name in names}
    measured = measure(candidates, arguments(case), baseline=BASELINE, repetitions=rounds, seconds=600.0)
    found = []
    for name in names:
        timing, ratio = measured[name], measured.ratio(name, clock="cpu")
        inverse = None if ratio is None else [1 / x for x in (ratio.median, ratio.upper, ratio.lower)]
        cpu = timing.spread("cpu")
        found.append({
            "mask": name, "direction": case.direction, "shape": case.shape, "dtype": case.dtype,
            "cpu_seconds": cpu and float(f"{cpu.median:.4g}"), "rounds": len(timing.cpu),
            "cpu_ratio": inverse and [round(x, 3) for x in inverse],
            "failure": timing.failure and str(timing.failure), "load": round(os.getloadavg()[0], 2),
            "processor": environment.processor(), "versions": environment.versions(), "flags": environment.flags(),
            "date": datetime.date.today().isoformat(),
        })  # fmt: skip
    return found


def main(given: Sequence[str]) -> int:
    """Runs the command line; 1 where a fill takes more time than asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fills", description=__doc__)
    parser.add_argument("--lengths", nargs="*", type=int, default=[2048, 4096])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--masks", nargs="*", choices=list(MASKS), default=list(MASKS))
    parser.add_argument("--directions", nargs="*", choices=DIRECTIONS, default=DIRECTIONS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, help=f"a file for the rows, as JSON, such as {RESULTS.name}")
    options = parser.parse_args(given)
    environment.restart_with_allocator_settings()
    names = [BASELINE, *(name for name in options.masks if name != BASELINE)]
    every = []
    for direction in options.directions:
        for length in options.lengths:
            case = square(direction, options.dtype, "causal", length, heads=options.heads)
            for row in rows(case, names, options.rounds):
                every.append(row)
                median, lower, upper = row["cpu_ratio"] or [float("nan")] * 3
                print(f"{case}  {row['mask']:28} {median:.2f} [{lower:.2f}, {upper:.2f}] {row['failure'] or ''}")
            if options.output:
                options.output.write_text("[\n" + ",\n".join(map(json.dumps, every)) + "\n]\n")
    return int(not all(row["cpu_ratio"] and row["cpu_ratio"][0] <= MOST for row in every if row["mask"] != UNMASKED))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
