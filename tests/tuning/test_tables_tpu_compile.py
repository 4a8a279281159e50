"""Every row that the tables have for a TPU compiles there, at the size it stands for: run by ``make check-tpu``."""

from __future__ import annotations

import importlib
import os

import pytest
from test_tables import TUNED

from autopallas.autotune.trial import Trial
from autopallas.compile.tpu import GENERATIONS, Compiler, missing
from autopallas.tuning.table import LEAST_MEMORY, table_device
from autopallas.workbench.cases import cases_of, match_of

pytestmark = pytest.mark.skipif(
    os.environ.get("FULL_GRID") != "1" or missing() is not None, reason="make check-tpu runs it, with the compiler"
)


@pytest.mark.parametrize("op", TUNED)
@pytest.mark.parametrize("target", GENERATIONS)
def test_rows_for_tpus_compile(op, target):
    tables = importlib.import_module(f"autopallas.kernels.{op}.tuned_block_sizes")
    generation = GENERATIONS[target]
    left = {key: row for key, row in tables.TABLE.get(table_device(generation.device), {}).items() if key[0] != "xla"}
    with Compiler(target) as compiler:
        for case in cases_of(op).table_grid("tpu") if left else ():
            match = match_of(case)
            for key in [k for k in left if _fast(k) == tables.table_key(match.spec, k[0], match.direction)]:
                trial = Trial.abstract(match)
                with generation.device.targeted():
                    found = compiler.compile(trial.kernel(key[0], left.pop(key).block_sizes), trial.arguments)
                assert found.failure is None, key
    assert not left, "rows of no case of the table"


def _fast(key):
    return (*key[:4], key[4].removesuffix(LEAST_MEMORY))
