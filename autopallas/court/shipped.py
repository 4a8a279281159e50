"""Lists the kernels of this package that run on this machine, as they are used: by an optimized function."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from autopallas.compat import ArrayFunction
from autopallas.court.case import Inputs
from autopallas.sites.device import Device
from autopallas.sites.operation import Unsupported, implementation_names, operation_named, operation_names
from autopallas.workbench.cases import Case, Cases, cases_of, match_of

__all__ = ["Shipped", "shipped"]

Types: TypeAlias = tuple[jax.ShapeDtypeStruct, ...]
Shipped: TypeAlias = tuple[ArrayFunction, ArrayFunction, Types, Inputs | None, tuple[str, str], ArrayFunction]
"""(kernel, reference, types of the arguments, inputs, both names, the kernel where values may not be finite)."""

_SIZES: Mapping[str, tuple[Mapping[str, int], ...]] = {
    "attention": ({"B": 2, "T": 24, "N": 3, "D": 8}, {"B": 1, "T": 24, "N": 4, "D": 8}),
    "cross_entropy": ({"N": 12, "D": 8, "V": 40},),
    "grouped_matmul": ({"M": 24, "K": 6, "N": 10, "G": 4},),
    "recurrence": ({"T": 96, "B": 2, "H": 3, "N": 32, "P": 40},),
}
"""Sizes of cases; different ones, so that no two axes are taken for one."""
_OTHERS = (2, 12, 16, 10, 6, 8)
"""Sizes of the letters of any other operation, in their order."""


def shipped(
    optimize: ArrayFunction, operations: Sequence[str] | None = None, interpret: bool = False
) -> Iterator[Shipped]:
    """Yields every kernel of this package that runs here: each variant of each operation by each implementation.

    The kernel is the variant as people write it, optimized, with the implementation demanded; the reference is the
    variant as it is written.  A case in which no site is replaced counts as refused.

    Args:
      optimize: :func:`autopallas.optimize`.
      operations: names of operations; by default all.
      interpret: whether to include the TPU kernels where there is no TPU; AUTOPALLAS_INTERPRET=1 lets them run there.
    """
    for name in operations or operation_names():
        offered = cases_of(name)
        if offered is None:
            continue
        known: set[tuple[str, str]] = set()
        for case in _cases(name, offered):
            function, types = offered.ORIGINALS[case.mask], offered.types(case)
            for implementation in _implementations(case, interpret):
                if (case.mask, implementation) in known:
                    continue
                known.add((case.mask, implementation))
                kernel, special = (
                    _kernel(optimize, function, name, implementation, assumed) for assumed in (True, False)
                )
                names = (f"{name} {case.mask} by {implementation}", f"{case.mask} as it is written")
                yield kernel, function, types, functools.partial(_inputs, name), names, special


def _cases(name: str, offered: Cases) -> Iterator[Case]:
    """Yields small cases of every variant, forward; of samples, whose sizes are given, the smallest of each form."""
    grid = offered.table_grid()
    if operation_named(name).kinds:
        smallest: dict[str, Case] = {}
        for case in sorted(grid, key=lambda case: sum(t.size for t in offered.types(case))):
            smallest.setdefault(re.sub(r"\d+", "", case.mask), case)
        yield from smallest.values()
        return
    for variant in offered.ORIGINALS:
        given = next((case for case in grid if case.mask == variant), grid[0])
        letters = [letter for letter, _ in given.sizes]
        for sizes in _SIZES.get(name, (dict(zip(letters, _OTHERS, strict=False)),)):
            own = tuple((letter, sizes[letter]) for letter in letters if letter in sizes)
            yield replace(given, mask=variant, direction="forward", dtype="float32", sizes=own)


def _implementations(case: Case, interpret: bool) -> Iterator[str]:
    """Yields the implementations that support a case here."""
    try:
        match = match_of(case)
    except ValueError:
        return
    operation, device = match.site.operation, Device.current()
    order = operation.order.get(device.platform, ())
    further = ("pallas_tpu",) if interpret and device.platform != "tpu" else ()
    for name in implementation_names():
        known = name in (*order, *further) or operation.provided(name) is not None
        if not known or not operation.has(name):
            continue
        if not isinstance(operation.supports(name, match.spec, device), Unsupported):
            yield name


def _kernel(
    optimize: ArrayFunction, function: ArrayFunction, name: str, implementation: str, finite: bool
) -> ArrayFunction:
    """Returns the optimized function, which raises where it would not use the implementation; ``finite`` tells whether
    values are assumed to be finite."""
    demanded = {} if operation_named(name).kinds else {"implementation": implementation}
    optimized: ArrayFunction = optimize(
        _fresh(function),
        ops=(name,),
        objective="always",
        require={name: 1},
        autotune=False,
        assume_finite=finite,
        **demanded,
    )
    return optimized


def _fresh(function: ArrayFunction) -> ArrayFunction:
    """Returns a function of its own, so that nothing is shared with the reference."""

    def program(*arguments: jax.Array) -> object:
        return function(*arguments)

    return program


def _inputs(name: str, types: Sequence[jax.ShapeDtypeStruct], seed: int) -> Sequence[ArrayLike]:
    """Returns arguments of a variant: floats are normal; integers are what the operation takes them for."""
    random = np.random.default_rng(seed)
    integers: Callable[[jax.ShapeDtypeStruct], np.ndarray] = functools.partial(_integers, name, types, random)
    found: list[ArrayLike] = []
    for kind in types:
        if jnp.issubdtype(kind.dtype, jnp.inexact):
            found.append(np.asarray(random.standard_normal(kind.shape), kind.dtype))
        elif kind.dtype == np.bool_:
            found.append(random.random(kind.shape) < 0.8)
        else:
            found.append(integers(kind).astype(kind.dtype))
    return found


def _integers(
    name: str, types: Sequence[jax.ShapeDtypeStruct], random: np.random.Generator, kind: jax.ShapeDtypeStruct
) -> np.ndarray:
    """Returns group sizes that add up to the rows, numbers of experts, labels, or lengths."""
    rows = types[0].shape[0]
    if name == "grouped_matmul" and len(types) == 3:
        groups = kind.shape[0]
        return np.asarray(random.multinomial(rows, np.full(groups, 1 / groups)) if groups else np.zeros(0, np.int64))
    most = 4
    if name in ("grouped_matmul", "cross_entropy"):  # experts, or labels
        most = types[1].shape[0 if name == "grouped_matmul" else 1]
    elif name == "attention":  # lengths
        most = types[1].shape[1] + 1
    return np.asarray(random.integers(0, max(1, most), kind.shape))
