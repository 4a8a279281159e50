"""A scan that a program computes, and the gradients of it, by the numbers of the values that they read and give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopallas.kernels.respelling.lanes import Layout

__all__ = ["Backward", "Forward"]


@dataclass(frozen=True, slots=True)
class Forward:
    """``h[t] = a[t] h[t-1] + b[t]``, where ``h[0] = b[0]``; or ``h[t] = a[t] h[t-1]``, where ``h[0] = a[0]``.

    Attributes:
      decay, given, result: the numbers of a, b and h; of products no b.
      axis: the axis of time.
      shifted: whether it is written with shifts of all steps, and not as ``lax.associative_scan`` has it.
      layouts: of each input, which of the result's axes it has.
    """

    decay: int
    given: int | None
    result: int
    axis: int
    shifted: bool
    layouts: tuple[Layout, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        """What is scanned."""
        return (self.decay,) if self.given is None else (self.decay, self.given)

    def axis_of(self, place: int) -> int:
        """Returns the axis of the steps in one of the inputs."""
        return self.layouts[place].index(self.axis)

    def at(self, image: Mapping[int, int]) -> Forward:
        """Returns the same scan of other values."""
        given = None if self.given is None else image[self.given]
        return replace(self, decay=image[self.decay], given=given, result=image[self.result])


@dataclass(frozen=True, slots=True)
class Backward:
    """The gradients of a scan: ``g[t] = d[t] + a[t+1] g[t+1]``, of b, and ``g[t] h[t-1]``, of a, where products begin
    after a one.

    Attributes:
      scan: the scan.
      cotangent: the number of d, h's cotangent.
      reads_result: whether what is scanned is at hand; else it is computed once more.
      of_given: the number of b's gradient.
      of_decay: the number of a's gradient; None if the program does not compute it.
      products: the products of a, and their cotangent, of whose gradient a's is the sum with the scan's; None where a
        has the scan's alone.
      layouts: of the cotangents, which of the axes of h they have; and of each of the results, which is a sum over the
        axes that it lacks.
      added: what is added to each of the results, None where nothing is, and which of the axes of h that has.
    """

    scan: Forward
    cotangent: int
    reads_result: bool
    of_given: int | None
    of_decay: int | None
    products: tuple[Forward, int] | None = None
    layouts: tuple[tuple[Layout, ...], tuple[Layout, ...]] = ((), ())
    added: tuple[tuple[int | None, Layout], ...] = ()

    @property
    def results(self) -> tuple[int, ...]:
        return tuple(n for n in (self.of_given, self.of_decay) if n is not None)

    @property
    def cotangents(self) -> tuple[int, ...]:
        """The cotangents of the scan and of the products."""
        return (self.cotangent,) if self.products is None else (self.cotangent, self.products[1])

    @property
    def scanned(self) -> tuple[int, ...]:
        """The results of both."""
        return (self.scan.result,) if self.products is None else (self.scan.result, self.products[0].result)

    @property
    def reads(self) -> tuple[int, ...]:
        """What the gradients are computed from, and what is added to them."""
        own = (*self.scan.inputs, *self.cotangents, *(self.scanned if self.reads_result else ()))
        return (*own, *(n for n, _ in self.added if n is not None))
