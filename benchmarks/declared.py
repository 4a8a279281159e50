"""The benchmark of an operation that has no module of its own here: all of it follows from its cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopallas
from autopallas import compat
from autopallas.numerics.oracle import Oracle
from autopallas.sites.declared import DeclaredOperation, declared_named
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported
from autopallas.sites.spec import BlockSizes
from autopallas.tuning.direct import block_sizes_for
from autopallas.workbench.cases import Cases, cases_of, match_of
from benchmarks.case import AUTOPALLAS, ORIGINAL, Candidate, Case, Chosen, chosen_by

ORACLE_LIMIT = 2**26
"""How many elements the arguments may have for a float64 result to be computed."""


@dataclass(frozen=True, slots=True)
class DeclaredBenchmark:
    """What the module of an operation offers, for a declared operation."""

    operation: DeclaredOperation

    @staticmethod
    def of(name: str) -> DeclaredBenchmark:
        return DeclaredBenchmark(declared_named(name))

    @property
    def cases(self) -> Cases:
        found = cases_of(self.operation.name)
        assert found is not None
        return found

    def original(self, case: Case) -> Callable[..., Any]:
        """The operation's reference."""
        return self.cases.ORIGINALS[case.mask]

    def in_direction(self, case: Case, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function like the original, as a function of all the case's arguments."""
        return self.cases.in_direction(case, function)

    def candidates(self, case: Case) -> dict[str, Candidate]:
        """The original, the original under ``autopallas.optimize``, and the operation's own function by each
        implementation that this platform tries and that supports the case."""
        original = self.original(case)
        optimized = autopallas.optimize(original, objective="always", strict=True)

        found = {
            ORIGINAL: Candidate(self.in_direction(case, original), lambda: Chosen(ORIGINAL)),
            AUTOPALLAS: Candidate(self.in_direction(case, optimized), lambda: chosen_by(optimized)),
        }
        direct, spec, device = self.cases.direct(case), match_of(case).spec, Device.current()
        for name, answer in self.operation.candidates(spec, device, None) if direct is not None else ():
            if isinstance(answer, Supported):
                function = self.in_direction(case, partial(direct, implementation=name))
                sizes = block_sizes_for(self.operation.name, spec, device, name, None)
                found[f"{name}, called"] = Candidate(
                    function, partial(_chosen, name, sizes[case.direction != "forward"])
                )
        return found

    def arguments(self, case: Case) -> tuple[jax.Array, ...]:
        """Normally distributed numbers; zeros for what has no floating dtype."""
        random = np.random.default_rng(0)

        def array(kind: jax.ShapeDtypeStruct) -> jax.Array:
            if not jnp.issubdtype(kind.dtype, jnp.floating):
                return jnp.zeros(kind.shape, kind.dtype)
            return jnp.asarray(random.standard_normal(kind.shape, np.float32), kind.dtype)

        return tuple(array(kind) for kind in self.cases.types(case))

    def operations(self, case: Case) -> float:
        """As many as XLA counts in the original, before it optimizes it."""
        function = self.in_direction(case, self.original(case))
        counted = jax.jit(function).lower(*self.cases.types(case)).cost_analysis()
        return float((counted or {}).get("flops", 0.0))

    def oracle(self, case: Case, arguments: tuple[Any, ...]) -> Any:
        """The original's result in float64, or None for large cases."""
        if sum(x.size for x in arguments) > ORACLE_LIMIT:
            return None
        function = self.in_direction(case, self.original(case))
        structure = jax.tree.structure(jax.eval_shape(function, *arguments))
        return jax.tree.unflatten(structure, Oracle(compat.make_jaxpr(function, *arguments))(*arguments))

    def grid(self, name: str) -> tuple[Case, ...]:
        """The cases: "standard" is what ``autopallas tune`` takes, "quick" what of it has the first dtype, and "wide"
        has a fourth and four times as many rows beside it."""
        standard = self.cases.table_grid()
        if name == "quick":
            return tuple(case for case in standard if case.dtype == standard[0].dtype)
        if name == "wide":
            letter = self.operation.rows.split()[-1]
            factors = ((1, 1), (1, 4), (4, 1))
            return tuple(_resized(case, letter, *factor) for factor in factors for case in standard)
        if name in ("standard", "table"):
            return standard
        raise ValueError(f"no grid is called {name!r}")


def _chosen(name: str, sizes: BlockSizes) -> Chosen:
    return Chosen(name, sizes.to_dict())


def _resized(case: Case, letter: str, times: int, over: int) -> Case:
    sizes = tuple((own, max(1, n * times // over) if own == letter else n) for own, n in case.sizes)
    return replace(case, sizes=sizes)
