"""The text of a random program as it grows: lines, arguments, names that are still free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .choices import Choices

__all__ = ["FLOATS", "Argument", "Writer"]

FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Argument:
    """An array that is handed to the program."""

    name: str
    kind: str
    shape: tuple[int, ...]
    rest: str
    """What the function that makes it, of the name ``kind``, takes after the shape."""

    @property
    def text(self) -> str:
        """The call that makes it, of a numpy generator ``draw``."""
        return f"{self.kind}(draw, {self.shape}, {self.rest})"


@dataclass
class Writer:
    """Lines of a program, and what they need."""

    choices: Choices
    x64: bool = False
    lines: list[str] = field(default_factory=list)
    arguments: list[Argument] = field(default_factory=list)
    features: set[str] = field(default_factory=set)
    busy: float = 1.0
    """A factor of how often something is done to a value: a fault shows best where nothing else stands in its way."""
    gathers: bool = False
    """Whether rows of logits are gathered by numbers that differ from example to example."""
    windows: bool = False
    """Whether rows of logits are taken in windows, in reverse, or twice."""
    _indent: int = 1
    _counts: dict[str, int] = field(default_factory=dict)

    def line(self, text: str) -> None:
        """Adds a line at the current depth."""
        self.lines.append("    " * self._indent + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """What is written within belongs to ``head``, which ends with a colon."""
        self.line(head)
        self._indent += 1
        yield
        self._indent -= 1

    def fresh(self, name: str) -> str:
        """A name that no other line uses."""
        self._counts[name] = count = self._counts.get(name, 0) + 1
        return name if count == 1 else f"{name}{count}"

    def set(self, name: str, value: str) -> str:
        """Gives a value a name of its own, and returns the name."""
        own = self.fresh(name)
        self.line(f"{own} = {value}")
        return own

    # ------------------------------------------------------------------ arguments

    def normal(
        self, name: str, shape: tuple[int, ...], dtype: str = "float32", scale: float = 1.0, offset: float = 0.0
    ) -> str:
        """A floating argument."""
        return self._argument(name, "normal", shape, f"{dtype!r}, {scale}, {offset}")

    def integers(self, name: str, shape: tuple[int, ...], low: int, high: int, dtype: str = "int32") -> str:
        """An argument with whole numbers from ``low`` to ``high``, the latter included."""
        return self._argument(name, "integers", shape, f"{low}, {high}, {dtype!r}")

    def mask(self, name: str, shape: tuple[int, ...], dtype: str = "bool", empty: bool = False) -> str:
        """An argument that says which keys count; with ``empty`` in some rows none does."""
        return self._argument(name, "mask", shape, f"{dtype!r}, empty={empty}")

    def _argument(self, name: str, kind: str, shape: tuple[int, ...], rest: str) -> str:
        own = self.fresh(name)
        self.arguments.append(Argument(own, kind, shape, rest))
        return own

    # ------------------------------------------------------------------ dtypes

    def dtype(self, name: str, often: float = 0.4) -> str:
        """A floating dtype."""
        return self.choices.pick(name, FLOATS + (("float64",) if self.x64 else ()), often)

    def cast(self, name: str, value: str, often: float = 0.2) -> str:
        """A cast of a value, or none; there and back too."""
        options = {"none": "", **{d: f".astype(jnp.{d})" for d in FLOATS[1:] + FLOATS[:1]}}
        options["bfloat16 and back"] = ".astype(jnp.bfloat16).astype(jnp.float32)"
        if self.x64:
            options["float64"] = ".astype(jnp.float64)"
        chosen = self.choices.pick(name, options, often if often == 1 else often * self.busy)
        if chosen:
            self.features.add("cast")
        return value + chosen
