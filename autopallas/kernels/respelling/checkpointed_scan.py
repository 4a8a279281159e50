"""Pairs of a loop and the reversed loop that reads what each of its steps leaves: only chunks of that ever exist.

A train step stacks, in a loop, what the reversed loop of its backward reads step by step: T steps cost T times the
values of one.  Here the loop keeps what it carries at the beginnings of chunks of c steps.  The backward takes chunk by
chunk from the last: it runs the chunk's steps again, and then the reversed steps.  That costs T / c times what is
carried, c times the values of one step, and the steps of the loop once more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal as OneOf
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr
from autopallas.graph.program_digests import bits, digest
from autopallas.kernels.respelling.chunks import Arrays, Chunk, by_chunks
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["CheckpointedScan", "Loop", "Part", "key_of", "pair_as_written", "pair_in"]

Part: TypeAlias = OneOf["forward", "backward", "both"]
"""What a site computes of a pair; both together are what is measured."""

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop.

    Attributes:
      step: from constants, carried values and slices to carried values and results.
      constants, carried: how many of each there are; the rest are slices.
      reverse: whether the last slices come first.
      unroll: steps that are compiled as one.
      literals: (position, value) of the operands that are no arrays of the program.
      zeros: positions of constants that are zero in each element.
    """

    step: ClosedJaxpr = field(compare=False)
    constants: int
    carried: int
    reverse: bool
    unroll: int
    literals: tuple[tuple[int, np.ndarray], ...] = field(default=(), compare=False)
    zeros: frozenset[int] = frozenset()

    @property
    def operands(self) -> int:
        """Number of operands, literals included."""
        return len(self.step.jaxpr.invars)

    def filled(self, given: Sequence[jax.Array], left_out: Collection[int] = ()) -> Arrays:
        """Returns all operands but those of the positions ``left_out``, of those that are no literals."""
        literals, rest = dict(self.literals), iter(given)
        return [
            jnp.asarray(literals[i]) if i in literals else next(rest) for i in range(self.operands) if i not in left_out
        ]

    def step_giving(self, results: Sequence[int]) -> ClosedJaxpr:
        """Returns a step without dead code, from all that it is given to the results of some places."""
        jaxpr, captured = jaxprs.open_jaxpr(self.step)
        chosen = [jaxpr.outvars[i] for i in results]
        program = jaxprs.rebuild(self.step, jaxpr.constvars, captured, jaxpr.invars, chosen, jaxpr.eqns)
        return jaxprs.without_dead_code(program)

    def giving(self, results: Sequence[int], constants: Sequence[jax.Array]) -> Callable[[Arrays, Arrays], Arrays]:
        """Returns a step without dead code, from carried values and slices to the results of some places."""
        run = compat.jaxpr_as_fun(self.step_giving(results))
        return lambda carried, slices: list(run(*constants, *carried, *slices))

    def run(
        self, results: Sequence[int], constants: Sequence[jax.Array], first: Arrays, slices: Arrays, length: int
    ) -> tuple[Arrays, Arrays]:
        """Returns what some steps carry on, and what they stack at the places ``results`` among the results."""
        count = self.carried
        step = self.giving((*range(count), *(count + i for i in results)), constants)

        def one(carried: Arrays, own: Arrays) -> tuple[Arrays, Arrays]:
            found = step(carried, own)
            return found[:count], found[count:]

        return _scan(one, first, slices, length, self.reverse, self.unroll)


def _scan(
    step: Callable[[Arrays, Arrays], tuple[Arrays, Arrays]],
    first: Arrays,
    slices: Arrays,
    length: int,
    reverse: bool,
    unroll: int = 1,
) -> tuple[Arrays, Arrays]:
    found: tuple[Arrays, Arrays] = lax.scan(step, first, slices, length, reverse, unroll=min(unroll, length))
    return found


@dataclass(frozen=True, repr=False)
class CheckpointedScan:
    """A loop, the reversed loop of its backward, and the chunks in which they run.

    Attributes:
      key: equal for equal pairs, which jaxprs are not.
      forward, backward: the loops; one of them is reversed.
      length: the number of steps of both.
      chunk: the number of steps of a chunk; the last chunk, in the loop's order, may have fewer.
      residuals: (place among what the loop stacks, place among the slices of the reversed one) of what is not stacked.
      needed: which of the loop's results, carried and stacked, the program needs beside these.
      given: which of the reversed loop's results the program needs.
    """

    key: str
    forward: Loop = field(compare=False)
    backward: Loop = field(compare=False)
    length: int
    chunk: int
    residuals: tuple[tuple[int, int], ...]
    needed: tuple[int, ...]
    given: tuple[int, ...]

    def __repr__(self) -> str:
        count = len(dict(self.residuals))
        return f"{self.length} steps in chunks of {self.chunk}, {count} values of each step not stacked, {self.key}"

    @property
    def elements(self) -> int:
        """Number of elements of what is never stacked, all steps together."""
        outputs = self.forward.step.out_avals[self.forward.carried :]
        return self.length * sum(int(outputs[place].size) for place in dict(self.residuals))

    @property
    def chunks(self) -> int:
        """Number of chunks, a shorter last one included."""
        return -(-self.length // self.chunk)

    @property
    def has_products(self) -> bool:
        """Whether a step of the loop has matrix products or convolutions."""
        return any(equation.primitive.name in _PRODUCTS for equation in jaxprs.every_equation(self.forward.step))

    @property
    def own_slices(self) -> tuple[int, ...]:
        """Places of the reversed loop's slices that are no residuals."""
        left_out = {place for _, place in self.residuals}
        first = self.backward.constants + self.backward.carried
        return tuple(i for i in range(self.backward.operands - first) if i not in left_out)

    def as_written(self, part: Part, operands: Sequence[jax.Array]) -> Arrays:
        """Returns the results as the program computes them: all residuals are stacked."""
        match part:
            case "forward":
                found, states = self._whole_forward(operands, range(self.forward.carried), ())
                return [*found, *(state[np.asarray(self._beginnings)] for state in states)]
            case "backward":
                return self._backward_of_whole(operands)
            case "both":
                count = self.forward_operands
                found, stacks = self._whole_forward(operands[:count], (), tuple(dict(self.residuals)))
                backward = self.backward
                rest = backward.filled(operands[count:], self._residual_positions)
                return [*found, *self._whole_backward(rest, dict(zip(dict(self.residuals), stacks, strict=True)))]

    def by_chunks(self, part: Part, operands: Sequence[jax.Array]) -> Arrays:
        """Returns the same without stacking the residuals."""
        match part:
            case "forward":
                found, starts = self._chunked_forward(operands)
                return [*found, *starts]
            case "backward":
                return self._chunked_backward(operands)
            case "both":
                found, starts = self._chunked_forward(operands[: self.forward_operands])
                return [*found, *self._chunked_backward(self.after_forward(operands, starts))]

    # ------------------------------------------------------------------ operands

    def _is_first(self, position: int) -> bool:
        """Returns whether an operand of the loop is a first carried value."""
        return self.forward.constants <= position < self.forward.constants + self.forward.carried

    @property
    def forward_operands(self) -> int:
        """Number of operands of the loop."""
        return self.forward.operands - len(self.forward.literals)

    @property
    def _residual_positions(self) -> frozenset[int]:
        first = self.backward.constants + self.backward.carried
        return frozenset(first + place for _, place in self.residuals)

    def after_forward(self, operands: Sequence[jax.Array], starts: Sequence[jax.Array]) -> Arrays:
        """Returns the backward's operands of those of both, and of what the loop carries where chunks begin."""
        count, literals = self.forward_operands, dict(self.forward.literals)
        filled = enumerate(self.forward.filled(operands[:count]))
        again = [x for i, x in filled if i not in literals and not self._is_first(i)]
        return [*again, *starts, *operands[count:]]

    def read_again(self, operands: Sequence[jax.Array]) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """Splits the backward's operands into the loop's constants, its slices, what it carries at the beginnings of
        chunks, and the reversed loop's operands without residuals."""
        forward = self.forward
        firsts = range(forward.constants, forward.constants + forward.carried)
        again = forward.operands - forward.carried - sum(not self._is_first(i) for i, _ in forward.literals)
        filled = forward.filled(operands[:again], firsts)
        starts = list(operands[again : again + forward.carried])
        rest = self.backward.filled(operands[again + forward.carried :], self._residual_positions)
        return filled[: forward.constants], filled[forward.constants :], starts, rest

    # ------------------------------------------------------------------ chunks

    @property
    def _beginnings(self) -> list[int]:
        """Positions of the slices with which chunks begin, in the order of slices."""
        steps = range(0, self.length, self.chunk)
        return [self.length - 1 - i for i in reversed(steps)] if self.forward.reverse else list(steps)

    def _by_chunks(
        self, chunk: Chunk, first: Arrays, slices: tuple[Arrays, ...], starts: Sequence[jax.Array], backward: bool
    ) -> tuple[Arrays, Arrays]:
        """Runs all chunks, from the first one or backward."""
        return by_chunks(
            chunk, first, slices, starts, self.length, self.chunk, reverse=self.forward.reverse, backward=backward
        )

    def _chunked_forward(self, operands: Sequence[jax.Array]) -> tuple[Arrays, Arrays]:
        """Returns the needed results, and what is carried at the beginning of each chunk."""
        forward = self.forward
        given = forward.filled(operands)
        last = forward.constants + forward.carried
        stacked = [i - forward.carried for i in self.needed if i >= forward.carried]

        def chunk(carried: Arrays, own: tuple[Arrays, ...], length: int) -> tuple[Arrays, Arrays]:
            ends, found = forward.run(stacked, given[: forward.constants], carried, own[0], length)
            return ends, [*(x[None] for x in carried), *found]

        ends, found = self._by_chunks(chunk, given[forward.constants : last], (given[last:],), (), backward=False)
        starts = found[: forward.carried]
        results = iter(found[forward.carried :])
        return [ends[i] if i < forward.carried else next(results) for i in self.needed], starts

    def _chunked_backward(self, operands: Sequence[jax.Array]) -> Arrays:
        forward, backward = self.forward, self.backward
        constants, slices, starts, rest = self.read_again(operands)
        last = backward.constants + backward.carried
        stacked = [i - backward.carried for i in self.given if i >= backward.carried]
        places = tuple(dict(self.residuals))

        def chunk(carried: Arrays, own: tuple[Arrays, ...], length: int) -> tuple[Arrays, Arrays]:
            again, read, start = own
            _, found = forward.run(places, constants, start, again, length)
            every = self.with_residuals(read, dict(zip(places, found, strict=True)))
            return backward.run(stacked, rest[: backward.constants], carried, every, length)

        ends, found = self._by_chunks(
            chunk, rest[backward.constants : last], (slices, rest[last:]), starts, backward=True
        )
        return self.chosen(ends, found)

    # ------------------------------------------------------------------ all steps at once

    def _whole_forward(
        self, operands: Sequence[jax.Array], states: Sequence[int], further: Sequence[int]
    ) -> tuple[Arrays, Arrays]:
        """Returns the needed results, and for each step the carried values ``states`` before it and the results
        ``further``."""
        forward = self.forward
        given = forward.filled(operands)
        last = forward.constants + forward.carried
        stacked = [i for i in self.needed if i >= forward.carried]
        every = (*range(forward.carried), *stacked, *(forward.carried + i for i in further))
        step = forward.giving(every, given[: forward.constants])

        def one(carried: Arrays, own: Arrays) -> tuple[Arrays, Arrays]:
            found = step(carried, own)
            return found[: forward.carried], [*found[forward.carried :], *(carried[i] for i in states)]

        ends, found = _scan(
            one, given[forward.constants : last], given[last:], self.length, forward.reverse, forward.unroll
        )
        results = iter(found[: len(stacked)])
        needed = [ends[i] if i < forward.carried else next(results) for i in self.needed]
        return needed, found[len(stacked) :]

    def _backward_of_whole(self, operands: Sequence[jax.Array]) -> Arrays:
        """Computes the backward from the beginnings of chunks, with all residuals."""
        constants, slices, starts, rest = self.read_again(operands)
        places = tuple(dict(self.residuals))

        def chunk(carried: Arrays, own: tuple[Arrays, ...], length: int) -> tuple[Arrays, Arrays]:
            again, start = own
            return [], self.forward.run(places, constants, start, again, length)[1]

        _, stacks = self._by_chunks(chunk, [], (slices,), starts, backward=False)
        return self._whole_backward(rest, dict(zip(places, stacks, strict=True)))

    def _whole_backward(self, rest: Arrays, stacks: dict[int, jax.Array]) -> Arrays:
        backward = self.backward
        last = backward.constants + backward.carried
        stacked = [i - backward.carried for i in self.given if i >= backward.carried]
        every = self.with_residuals(rest[last:], stacks)
        first = rest[backward.constants : last]
        return self.chosen(*backward.run(stacked, rest[: backward.constants], first, every, self.length))

    def with_residuals(self, own: Sequence[jax.Array], stacks: dict[int, jax.Array]) -> Arrays:
        """Returns all slices of the reversed loop."""
        found = dict(zip(self.own_slices, own, strict=True))
        found.update({place: stacks[source] for source, place in self.residuals})
        return [found[i] for i in range(len(found))]

    def chosen(self, ends: Arrays, found: Arrays) -> Arrays:
        """Returns the reversed loop's results that the program needs."""
        results = iter(found)
        return [ends[i] if i < self.backward.carried else next(results) for i in self.given]


def key_of(pair: CheckpointedScan) -> str:
    """Returns a key that is equal for pairs of equal steps and parameters."""
    further = repr((pair.length, pair.chunk, pair.residuals, pair.needed, pair.given)).encode()
    for loop in (pair.forward, pair.backward):
        further += repr((loop.constants, loop.carried, loop.reverse, loop.unroll, sorted(loop.zeros))).encode()
        for position, array in loop.literals:
            further += str(position).encode() + bits(array)
    return digest([pair.forward.step, pair.backward.step], further)


def pair_in(spec: RespellingSpec) -> CheckpointedScan:
    """Returns the loops of a spec."""
    return cast(CheckpointedScan, spec["pair"])


def pair_as_written(spec: RespellingSpec, *operands: jax.Array) -> Arrays:
    """Computes a spec's part of its loops as the program has it."""
    return pair_in(spec).as_written(cast(Part, spec["part"]), operands)
