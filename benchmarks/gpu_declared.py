"""A declared operation on a GPU: what is checked, repeated and timed, all of it by its declaration.

Sizes are those of its sample: with fewer rows where it is checked, and with many more in the headlines, so that what is
read and written does not stay in the GPU's cache.  Variants are checked, repeated and timed as the sample is.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopallas
from autopallas.sites.declared import DeclaredOperation, declared_named, declared_names
from autopallas.sites.declared_call import operand_names
from autopallas.sites.spec import NoBlockSizes
from autopallas.tuning.table import Key
from autopallas.workbench.cases import DIRECTIONS, PLAIN, Case, DeclaredCases, Direction, only_match
from benchmarks.gpu_benchmark import ORIGINAL, Check, GpuBenchmark, Timed

__all__ = ["DECLARED", "DeclaredGpuBenchmark", "offered"]

_TOLERANCE = {"bfloat16": 4e-2, "float16": 1e-2}
_MANY, _MORE = 16, 4
"""How many times as many rows as the sample a headline has, and what programs often have."""
_SMALL_ROWS, _SMALL = 12, 128
"""The largest sizes of a dry run: of rows, and of every other letter."""
_ODD_ROWS = 1001
_FIRST_PRIORITY = 20
"""Behind the headlines of the operations that have a benchmark of their own."""


def _gated_mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """In the dtype of its operands throughout; a reference has products in float32, which takes XLA longer."""
    (x,), (gate,), (up,), (down,) = x, gate, up, down
    return ((jax.nn.silu(x @ gate) * (x @ up)) @ down)[None]


_WRITTEN: Mapping[str, Callable[..., jax.Array]] = {"gated_mlp": _gated_mlp}
"""Originals as people write them, where a sample's reference is no such program; of the sample's operands."""


@dataclass(frozen=True)
class DeclaredGpuBenchmark:
    """What the module ``benchmarks.gpu_<operation>`` offers, for a declared operation."""

    operation: DeclaredOperation

    IMPLEMENTATION = "pallas_gpu"

    @staticmethod
    def of(name: str) -> DeclaredGpuBenchmark:
        return DeclaredGpuBenchmark(declared_named(name))

    def cases(self, variant: str = PLAIN) -> DeclaredCases:
        """The cases of the sample, or of a variant."""
        return DeclaredCases(self.operation, variant)

    @property
    def variants(self) -> tuple[str, ...]:
        """The sample and the variants, by their names."""
        return PLAIN, *self.operation.variants

    def smoke(self, small: bool) -> Iterator[Check]:
        """Value and gradients of an odd number of rows."""
        yield self._check(self._case(_ODD_ROWS, "bfloat16", small), small)

    def checks(self, small: bool) -> Iterator[Check]:
        """The sample's rows and an odd number of them, in both dtypes."""
        for variant in self.variants:
            for rows in self._checked_rows(variant, small):
                for dtype in ("float16",) if small else ("bfloat16", "float16"):
                    yield self._check(self._case(rows, dtype, small, variant=variant), small)

    def stressed(self, small: bool) -> Iterator[Check]:
        """The sample, whose blocks go through several tiles each, and an odd number of rows."""
        for variant in self.variants:
            for rows in self._checked_rows(variant, small):
                yield self._check(self._case(rows, "bfloat16", small, variant=variant), small)

    def timed(self, small: bool) -> Iterator[Timed]:
        """A headline with many rows, a case with fewer, and the sample."""
        for place, variant in enumerate(self.variants):
            first = _FIRST_PRIORITY + len(DIRECTIONS) * (DECLARED.index(self.operation.name) + len(DECLARED) * place)
            for times in (1,) if small else (_MANY, _MORE, 1):
                for number, direction in enumerate(DIRECTIONS[:1] if small else DIRECTIONS):
                    case = self._case(self._rows(variant) * times, "bfloat16", small, direction, variant)
                    yield self._timed(case, first + number if times == _MANY else 100, small)

    # ------------------------------------------------------------------ one case

    @property
    def _row(self) -> str:
        """The last letter of the rows."""
        return self.operation.rows.split()[-1]

    def _rows(self, variant: str = PLAIN) -> int:
        """How many rows the sample has, or a variant."""
        return self.operation.letters(self.cases(variant).sample)[self._row]

    def _checked_rows(self, variant: str, small: bool) -> tuple[int, ...]:
        """How many rows are checked: sizes of a variant depend on each other, so that none of them is odd."""
        return (self._rows(variant),) if small or variant != PLAIN else (self._rows(), _ODD_ROWS)

    def _case(
        self,
        rows: int,
        dtype: str,
        small: bool,
        direction: Direction = "forward+backward",
        variant: str = PLAIN,
    ) -> Case:
        """So many rows, and otherwise the sample; in a dry run, sizes that are quickly interpreted."""
        sizes = self.operation.letters(self.cases(variant).sample) | {self._row: rows}
        if small:
            sizes = {x: min(n, _SMALL_ROWS - rows % 2 if x == self._row else _SMALL) for x, n in sizes.items()}
        return Case(self.operation.name, direction, dtype, variant, tuple(self.operation.fitted_sizes(sizes).items()))

    def _own(self, case: Case) -> Callable[..., Any]:
        """The kernel called by its name, in the direction of the case."""
        cases = self.cases(case.mask)
        direct = cases.direct(case)
        assert direct is not None
        return cases.in_direction(case, partial(direct, implementation=self.IMPLEMENTATION))

    def _original(self, case: Case) -> Callable[..., Any]:
        """What is timed as the original, in the direction of the case."""
        cases = self.cases(case.mask)
        return cases.in_direction(case, _WRITTEN.get(self.operation.name, cases.ORIGINALS[case.mask]))

    def _key(self, case: Case) -> Key | None:
        """The table's of the site that the original is, where the operation has a table."""
        if not self.operation.has("tuned_block_sizes"):
            return None
        match = only_match(self._original(case), self.cases(case.mask).types(case), self.operation.name)
        tables = self.operation.part("tuned_block_sizes")
        return tables.table_key(match.spec, self.IMPLEMENTATION, match.direction)

    def _exact(self, case: Case, *given: jax.Array) -> Any:
        """The reference in float32 at the highest precision."""
        wide = [x.astype(jnp.float32) for x in given]
        with jax.default_matmul_precision("highest"):
            cases = self.cases(case.mask)
            return cases.in_direction(case, cases.ORIGINALS[case.mask])(*wide)

    def _arguments(self, case: Case) -> tuple[jax.Array, ...]:
        """Normally distributed numbers; those of matrices are small by as much as their products sum."""
        sample = self.cases(case.mask).sample
        has = (n for n in operand_names(self.operation) if getattr(sample, f"{n}_dtype") is not None)
        letters, rows, found = [self.operation.operands[n].split() for n in has], self.operation.rows.split(), []
        for number, kind in enumerate(self.cases(case.mask).types(case)):
            own = letters[number] if 0 < number < len(letters) and self.operation.contracts else []
            inner = [n for letter, n in zip(own, kind.shape, strict=False) if letter not in rows]
            scale = inner[0] ** -0.5 if len(inner) > 1 else 1.0
            array = jax.random.normal(jax.random.key(number), kind.shape, jnp.bfloat16) * scale
            found.append(array.astype(kind.dtype))
        return tuple(found)

    def _check(self, case: Case, small: bool) -> Check:
        function = self._own(case)
        if not small:  # the interpreter's callbacks have an order, which a replaced site cannot have
            cases = self.cases(case.mask)
            original = cases.in_direction(case, cases.ORIGINALS[case.mask])
            function = autopallas.optimize(
                original, implementation=self.IMPLEMENTATION, objective="always", autotune=False, strict=True
            )
        return Check(case.shape, case.dtype, case.direction, function, partial(self._exact, case),
                     partial(self._arguments, case), _TOLERANCE[case.dtype])  # fmt: skip

    def _timed(self, case: Case, priority: int, small: bool) -> Timed:
        original, written = self._original(case), self.operation.name in _WRITTEN
        own = self._own(case)
        if written and not small:
            own = autopallas.optimize(
                original, implementation=self.IMPLEMENTATION, objective="always", autotune=False, strict=True
            )
        types = self.cases(case.mask).types(case)
        counted = jax.jit(original).lower(*types).cost_analysis()
        read_and_written = (*types, *jax.tree.leaves(jax.eval_shape(original, *types)))
        return Timed(
            name=f"{case.shape} as written" if written else case.shape,
            dtype=case.dtype,
            direction=case.direction,
            candidates={ORIGINAL: original, self.IMPLEMENTATION: own},
            block_sizes={self.IMPLEMENTATION: NoBlockSizes()},
            arguments=partial(self._arguments, case),
            operations=float((counted or {}).get("flops", 0.0)),
            key=self._key(case),
            bytes_moved=float(sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in read_and_written)),
            priority=priority,
        )


DECLARED = tuple(sorted(declared_names(DeclaredGpuBenchmark.IMPLEMENTATION)))
"""The declared operations that have a Pallas GPU kernel."""


def offered(operation: str) -> GpuBenchmark:
    """Returns the benchmark of an operation: its own module here, or what follows from its declaration."""
    if operation in DECLARED:
        return DeclaredGpuBenchmark.of(operation)
    found: GpuBenchmark = importlib.import_module(f"benchmarks.gpu_{operation}")  # type: ignore[assignment]
    return found
