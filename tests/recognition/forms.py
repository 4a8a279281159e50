"""Which sites of the corpus are found in which form; ``python -m recognition.forms`` (in tests/) prints the table."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from autopallas.options import resolve
from autopallas.pipeline import rewrite

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import corpus
    from corpus.forms import programs

__all__ = ["CASES", "EXPECTED", "GOALS", "MODULES", "found"]

MODULES = {"flax.nnx": "flax", "haiku": "haiku", "optax": "optax"}
_DENSE = {"dense einsum, combine by weights"}
"""Spellings of a mixture of experts in which every expert computes every token: the whole is one site."""

GOALS = {
    "attention": 0.99,
    "cross_entropy": 0.97,
    "gated_mlp": 0.97,
    "grouped_matmul": 0.93,
    "layer_norm": 0.97,
    "rms_norm": 0.97,
}
"""The least part of its sites that is to be found of an operation in any form."""


def _matmuls(site: Any) -> int:
    """The corpus counts a mixture of experts once; where it is sparse, each of its matmuls is a site: two, or three
    with a gate."""
    if site.attrs["style"] in _DENSE:
        return int(site.count)
    return int(site.count) * (3 if site.attrs.get("inner_glu") else 2)


EXPECTED = {
    "attention": lambda case: case.count("attention"),
    "cross_entropy": lambda case: case.count("ce"),
    "gated_mlp": lambda case: case.count("glu"),
    "grouped_matmul": lambda case: sum(_matmuls(site) for site in case.sites if site.op == "gmm"),
    "layer_norm": lambda case: case.count("ln"),
    "rms_norm": lambda case: case.count("rms"),
}
"""How many sites of each operation a case has."""

CASES = {
    case.name: case
    for case in corpus.cases(kind="forward")
    if case.origin != "negative"
    and any(count(case) for count in EXPECTED.values())
    and importlib.util.find_spec(MODULES.get(case.library, "jax")) is not None
}
"""The programs whose libraries are installed."""

_OPTIONS = resolve({"objective": "always", "strict": True})


def found(case: Any) -> Iterator[tuple[str, str, int, int, list[str]]]:
    """(operation, form, sites found, sites that there are, reasons of near misses) of one program."""
    wanted = {op: count(case) for op, count in EXPECTED.items() if count(case)}
    for form, function, args in programs(case):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = jax.make_jaxpr(function)(*args)
        _, report = rewrite(program, _OPTIONS, probes=False)
        reasons = [f"{miss.op}: {miss.reason}" for miss in report.near_misses]
        for op, count in wanted.items():
            yield op, form, report.counts()[op], count, reasons


def _main() -> int:
    table: dict[str, dict[str, list[int]]] = {}
    for name, case in CASES.items():
        for op, form, sites, wanted, reasons in found(case):
            cell = table.setdefault(form, {}).setdefault(op, [0, 0])
            cell[0] += min(sites, wanted)
            cell[1] += wanted
            if sites != wanted:
                print(f"{name}, {form}: {op} {sites} of {wanted}; {'; '.join(reasons)}", file=sys.stderr)
    print(f"| form | {' | '.join(EXPECTED)} |\n|{' --- |' * (1 + len(EXPECTED))}")
    for form, row in table.items():
        print(f"| {form} | {' | '.join(f'{row[op][0]} of {row[op][1]}' for op in EXPECTED)} |")
    return int(any(row[op][0] < GOALS[op] * row[op][1] for row in table.values() for op in EXPECTED))


if __name__ == "__main__":
    raise SystemExit(_main())
