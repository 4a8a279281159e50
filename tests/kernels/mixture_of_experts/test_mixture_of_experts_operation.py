"""Mixtures of experts are a part of the grouped matmul: selected, filed and kept as that is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import autopallas
from autopallas.environment import OPERATIONS
from autopallas.kernels.grouped_matmul.operation import OPERATION as GROUPED_MATMUL
from autopallas.kernels.mixture_of_experts.operation import OPERATION
from autopallas.sites.operation import operation_folders, operation_named, operation_names
from autopallas.tuning import key
from autopallas.workbench.cases import cases_of


def test_a_part_is_not_an_operation_of_its_own():
    assert OPERATION.name == "grouped_matmul"
    assert "mixture_of_experts" not in operation_names()
    assert "mixture_of_experts" not in OPERATIONS
    assert cases_of("mixture_of_experts") is None
    with pytest.raises(autopallas.OptionError):
        autopallas.optimize(lambda x: x, ops=("mixture_of_experts",))


def test_the_folders_of_an_operation_are_its_own_and_those_of_its_parts():
    assert operation_folders("grouped_matmul") == ("grouped_matmul", "mixture_of_experts")
    assert operation_folders("attention") == ("attention",)
    assert operation_folders("mixture_of_experts") == ()
    assert operation_named("grouped_matmul") is GROUPED_MATMUL
    assert operation_named("mixture_of_experts") is OPERATION


def test_a_part_has_the_order_of_its_operation():
    assert (OPERATION.order, OPERATION.priority) == (GROUPED_MATMUL.order, GROUPED_MATMUL.priority)


def test_its_cases_are_variants_of_the_operation():
    cases = cases_of("grouped_matmul")
    assert list(cases.ORIGINALS) == ["uneven", "even", "dense"]
    assert {case.mask for case in cases.table_grid()} == {"uneven", "dense"}
    assert {case.mask for case in cases.table_grid("tpu")} == {"even"}
    assert {case.kernel for case in cases.table_grid()} == {"grouped_matmul"}


def test_another_version_of_a_part_is_another_version_of_the_operation(tmp_path, monkeypatch):
    package = Path(autopallas.__file__).parent
    for room in ("sites", "kernels"):
        shutil.copytree(package / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(key, "__file__", str(tmp_path / "tuning" / "key.py"))
    monkeypatch.setattr(key, "_version_of_module", key._version_of_module.__wrapped__)  # a module that changes
    version = key._version_of_modules.__wrapped__
    before = {op: version(op) for op in ("grouped_matmul", "attention")}
    assert before["grouped_matmul"] == key.kernel_version("grouped_matmul")
    module = tmp_path / "kernels" / "mixture_of_experts" / "sorted_rows.py"
    module.write_text(module.read_text() + "\n# A comment.\n")
    assert version("grouped_matmul") == before["grouped_matmul"]
    module.write_text(module.read_text() + "\nMORE = 1\n")
    assert version("grouped_matmul") != before["grouped_matmul"]
    assert version("attention") == before["attention"]
