"""Offers the samples of all kinds as cases, to measure rows of the tables on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from autopallas.compat import ArrayFunction, Shaped
from autopallas.kernels.respelling.kind import Sample
from autopallas.kernels.respelling.kinds import kind_named, kind_names
from autopallas.kernels.respelling.operation import OPERATION
from autopallas.workbench.cases import Case, Direction

__all__ = ["ORIGINALS", "case_of", "direct", "in_direction", "place", "table_grid", "types"]

_SAMPLES: Mapping[str, Sample] = {
    f"{name}:{sample}": given for name in kind_names() for sample, given in kind_named(name).samples()
}
ORIGINALS: Mapping[str, ArrayFunction] = {name: sample.function for name, sample in _SAMPLES.items()}


_ON_TPUS = ("scan_checkpoint:elementwise_1024x16384", "scan_checkpoint:lstm_512x32x256")
"""Samples with rows of TPUs: their stacks are too large for VMEM."""


def table_grid(platform: str = "cpu") -> tuple[Case, ...]:
    """Returns a case for each row of the tuned table of a platform."""
    chosen = {"cpu": tuple(_SAMPLES), "tpu": _ON_TPUS}.get(platform, ())
    return tuple(_case(name, _SAMPLES[name].arguments) for name in chosen)


def _case(name: str, given: Sequence[Shaped]) -> Case:
    sizes = ((letter, size) for t in given[:1] for letter, size in zip("ABCDEFGH", t.shape, strict=False))
    return Case(OPERATION.name, "forward", given[0].dtype.name, name, tuple(sizes))


def types(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of the arguments."""
    return _SAMPLES[case.mask].arguments


def place(case: Case) -> int | None:
    """Returns which of the sites of a sample's kind is measured; None where there is one."""
    return _SAMPLES[case.mask].place


def in_direction(case: Case, function: ArrayFunction) -> ArrayFunction:
    """Returns the function: gradients are samples of their own."""
    return function


def case_of(given: Sequence[Shaped], variant: str, direction: Direction) -> Case:
    """Returns the case of a sample's arguments.

    Raises:
      ValueError: they are of no sample, or a backward is asked for.
    """
    wanted = _SAMPLES[variant].arguments
    if direction != "forward" or [(t.shape, t.dtype) for t in given] != [(t.shape, t.dtype) for t in wanted]:
        shapes = ", ".join(f"{t.dtype.name}[{','.join(map(str, t.shape))}]" for t in wanted)
        raise ValueError(f"{variant} is measured forward, at {shapes}")
    return _case(variant, wanted)


def direct(case: Case) -> ArrayFunction | None:
    """Returns None: no function computes a respelling directly."""
    return None
