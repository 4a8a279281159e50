"""What the package of an operation offers by name: its public function, imported or made when it is first asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from autopallas.compat import ArrayFunction

__all__ = ["public_functions"]


def public_functions(package: str) -> Callable[[str], ArrayFunction]:
    """Returns the ``__getattr__`` of the package of an operation: it knows the function of the operation's name, which
    the package's module ``api`` has, or follows from its declaration."""

    def __getattr__(name: str) -> ArrayFunction:
        if name != package.rpartition(".")[2]:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if importlib.util.find_spec(f"{package}.api") is not None:
            function: ArrayFunction = getattr(importlib.import_module(f"{package}.api"), name)
            return function
        from autopallas.kernels.declared_function import function_named

        return function_named(name)

    return __getattr__
