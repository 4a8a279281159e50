"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import autopallas

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(autopallas.__path__, "autopallas.") if "__main__" not in module.name
)


@pytest.mark.every_case
@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} needs what is not installed: {error}")
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
