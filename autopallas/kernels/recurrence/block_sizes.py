"""Forms in which a recurrence may run: the block sizes of its implementation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from autopallas.kernels.recurrence.spec import RecurrenceSpec
from autopallas.sites.spec import Sizes

__all__ = ["BlockSizes", "Form"]

Form: TypeAlias = Literal["scan", "hoisted", "chunked"]
"""The loop as it is, the loop without what it need not do step by step, or chunks of steps in matrix products."""


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """A form for the forward, one for the backward, and the number of steps of a chunk.

    The backward of a "scan" or "hoisted" form is that of JAX.  With a "chunked" backward any form of the forward keeps
    nothing but its operands.
    """

    forward: Form
    backward: Form
    chunk: int = 64

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if getattr(self, name) not in get_args(Form):
                raise ValueError(f"{name} must be one of {', '.join(get_args(Form))}, not {getattr(self, name)!r}")
        if not isinstance(self.chunk, int) or isinstance(self.chunk, bool) or self.chunk < 1:
            raise ValueError(f"chunk must be a positive integer, not {self.chunk!r}")

    @classmethod
    def get_default(cls) -> BlockSizes:
        """Returns chunks of 64 steps."""
        return cls("chunked", "chunked", 64)

    def fitted(self, spec: RecurrenceSpec) -> BlockSizes:
        """Returns the same, valid for the spec: a state that is no matrix has no chunks."""
        if not spec.is_matrix:
            return BlockSizes("hoisted", "hoisted", 1)
        return replace(
            self, chunk=min(1 << (self.chunk - 1).bit_length(), 1 << (spec.steps * spec.substeps - 1).bit_length())
        )

    def temporary_bytes(self, spec: RecurrenceSpec, direction: str = "forward") -> int:
        """Estimates the temporary memory: sequences of keys, queries, values and decays, and states of chunks."""
        heads, size = spec.groups * spec.heads, spec.accumulation_dtype.itemsize
        row, steps = spec.rows + spec.columns, spec.steps * spec.substeps
        states = steps // self.chunk * spec.rows * spec.columns if "chunked" in (self.forward, self.backward) else 0
        times = 2 if direction == "forward" else 4
        return size * heads * (times * steps * (row + self.chunk) + states)

    @classmethod
    def candidates(cls, spec: RecurrenceSpec) -> tuple[BlockSizes, ...]:
        """Returns what a search should try, best guess first."""
        if not spec.is_matrix:
            return (cls("hoisted", "hoisted", 1),)
        sizes = (64, 32, 128) if spec.decay == "scalar" and not spec.delta else (32, 16, 64)
        forwards: tuple[Form, ...] = ("hoisted" if spec.products else "scan", "chunked")
        found = [cls(form, "chunked", size) for size in sizes for form in forwards]
        return tuple(dict.fromkeys(sizes.fitted(spec) for sizes in found))

    def to_dict(self) -> Sizes:
        return {"forward": self.forward, "backward": self.backward, "chunk": self.chunk}
