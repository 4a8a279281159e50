"""What the package of a declared operation offers by name: its public function, made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable

from autopallas.compat import ArrayFunction

__all__ = ["public_functions"]


def public_functions(package: str) -> Callable[[str], ArrayFunction]:
    """Returns the ``__getattr__`` of the package of a declared operation: it knows the function of the operation's
    name."""

    def __getattr__(name: str) -> ArrayFunction:
        if name != package.rpartition(".")[2]:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from autopallas.kernels.declared_function import function_named

        return function_named(name)

    return __getattr__
