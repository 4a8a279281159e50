"""Runs a script or a module as ``python`` does: with the same ``__main__``, arguments, tracebacks and exit status."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import TypeAlias

from autopallas.cli import CommandError

__all__ = ["Program", "module", "script"]


class Program:
    """Code that is to run as ``__main__``.

    Attributes:
      code: a function that returns the compiled code: a syntax error is the program's own.
      arguments: ``sys.argv``.
      folder: the first entry of ``sys.path``.
      names: what the module holds before it runs.
    """

    def __init__(
        self, code: Callable[[], types.CodeType], arguments: Sequence[str], folder: str, names: dict[str, object]
    ):
        self.code, self.arguments, self.folder, self.names = code, list(arguments), folder, names

    def run(self) -> int:
        """Runs it, in this process, to its end.

        Returns:
          0; exceptions of the program pass through, and are printed without the frames of this package.
        """
        main = types.ModuleType("__main__")
        main.__dict__.update({"__annotations__": {}, "__builtins__": __builtins__} | self.names)
        # `python -m` put the launcher's own folder there, which is not the program's.
        sys.path[:1] = [self.folder]
        sys.argv[:] = self.arguments
        sys.modules["__main__"] = main
        try:
            exec(self.code(), main.__dict__)
        except BaseException:
            sys.excepthook = _cleaned(sys.excepthook)
            raise
        return 0


def script(path: str, arguments: Sequence[str]) -> Program:
    """Returns the program in a file.

    Args:
      path: the file, as it was given.
      arguments: what follows it on the command line.

    Raises:
      CommandError: there is no such file, or it cannot be read.
    """
    if os.path.isdir(path):
        raise CommandError(f"{path} is a folder; give a script, or a module with -m")
    full = os.path.abspath(path)
    try:
        with io.open_code(full) as file:
            source = file.read()
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror or error}") from None
    if b"\0" in source:
        raise CommandError(f"{path} is no Python script: it holds a null byte")
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    names = {"__file__": full, "__loader__": loader, "__cached__": None, "__spec__": None, "__package__": None}
    folder = os.path.dirname(os.path.realpath(path))
    return Program(lambda: compile(source, full, "exec", dont_inherit=True), [path, *arguments], folder, names)


def module(name: str, arguments: Sequence[str]) -> Program:
    """Returns the program of a module, or of a package with a ``__main__``, by its name.

    Args:
      name: the name, as after ``python -m``; modules of the current folder come first.
      arguments: what follows it on the command line.

    Raises:
      CommandError: there is no such module, or it cannot be run.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise CommandError(f"{name!r} is no module's name")
    here = os.getcwd()
    sys.path[:1] = [here]
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
            if spec is None:
                raise CommandError(f"{name} is a package without __main__, which cannot be run")
    except (ImportError, AttributeError, ValueError) as error:
        raise CommandError(f"the module {name} cannot be found: {error}") from None
    loader = None if spec is None else spec.loader
    if spec is None or loader is None:
        raise CommandError(f"there is no module {name}; run the command in its folder, or name that in PYTHONPATH")
    if not hasattr(loader, "get_code"):
        raise CommandError(f"the module {name} has no code that could be run")
    names: dict[str, object] = {
        "__file__": spec.origin,
        "__loader__": loader,
        "__cached__": spec.cached,
        "__spec__": spec,
        "__package__": spec.parent,
    }
    get_code, full = loader.get_code, spec.name
    return Program(lambda: get_code(full), [spec.origin or name, *arguments], here, names)


# ---------------------------------------------------------------------- tracebacks


Hook: TypeAlias = Callable[[type[BaseException], BaseException, types.TracebackType | None], object]


def _cleaned(hook: Hook) -> Hook:
    """Returns an exception hook that shows errors as if this package had not been there."""

    def shown(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> object:
        seen: set[int] = set()
        todo: list[BaseException | None] = [error]
        while todo:
            one = todo.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            one.__traceback__ = _without_ours(one.__traceback__)
            todo += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
        return hook(kind, error, _without_ours(trace))

    return shown


def _without_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback without the frames of this package and of what started it."""
    from autopallas.own_frames import without  # which imports JAX, as the program has by then

    begin = trace
    while trace is not None:
        if trace.tb_frame.f_code is Program.run.__code__:
            begin = trace.tb_next
        trace = trace.tb_next
    return without(begin)
