"""Finds the weights of all experts that a program reads beside the mixture too, such as for a loss of balance.

The gradient of such a loss is added to that of the mixture before both come back to the choice, so that the program has
no gradient of what the weights are made of that is the mixture's alone. The mixture then has the weights themselves as
an operand, and their gradient as a result. That gradient is zero for experts that are not chosen, where the program has
a number that means nothing: the weights are zero there whatever they are made of, so that their derivative takes no
notice of it. :func:`returns_to_choice` proves that nothing but this derivative reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from autopallas import array_types, compat
from autopallas.compat import ClosedJaxpr
from autopallas.graph import Body, Graph, Ref
from autopallas.graph.custom_rules import is_elementwise_call
from autopallas.graph.edit import surviving
from autopallas.graph.labels import Atom, View
from autopallas.kernels.mixture_of_experts.steps import Gathered
from autopallas.patterns.backward import Lookup
from autopallas.patterns.expressions import Scope
from autopallas.patterns.forward import Forward, Merged, differentiable
from autopallas.patterns.mixture_of_experts.choice import Choices
from autopallas.patterns.mixture_of_experts.readers import read
from autopallas.patterns.mixture_of_experts.reading import Reading
from autopallas.patterns.mixture_of_experts.refusals import DENSE
from autopallas.sites.index_notation import Operand
from autopallas.sites.index_notation import read as array_of
from autopallas.sites.index_notation import write as laid_out

__all__ = ["SharedWeights", "returns_to_choice", "shared_weights", "with_chosen"]

_VISITED = 64
"""Most values between a mixture's sum and the weights that something else reads."""
_SUMMED = 16
"""Most sums of cotangents, one after the other."""


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Weights of all experts, zero for those that are not chosen, that something else reads too.

    Attributes:
      number: the number of the weights.
      view: their axes, under labels.
      expert: labels of experts.
      chosen: the numbers of the arrays that tell which experts are chosen, each with its axes.
      sizes: the size of each label.
    """

    number: int
    view: View
    expert: tuple[Atom, ...]
    chosen: tuple[tuple[int, View], ...]
    sizes: tuple[int, ...]

    def of_chosen(self, weights: jax.Array, arrays: Sequence[jax.Array]) -> jax.Array:
        """Returns the weights where an expert is chosen, and zero elsewhere, where they are zero."""
        sizes, tokens = self.sizes, [x for _, atoms in self.view for x in atoms if x not in self.expert]
        groups = [[x] for x in tokens]
        positions = jnp.arange(math.prod(sizes[x] for x in self.expert), dtype=jnp.int32)
        mask: jax.Array | None = None
        for (_, view), array in zip(self.chosen, arrays, strict=True):
            several = [x for _, atoms in view for x in atoms if x not in tokens]
            index = array_of(Operand(0, view), [array], sizes, [*groups, several])
            index = index if index.dtype.itemsize >= 4 else index.astype(jnp.int32)
            own = jnp.any(index[..., None] == positions.astype(index.dtype), -2)
            mask = own if mask is None else mask | own
        assert mask is not None
        mask = jnp.broadcast_to(mask, [*(sizes[x] for x in tokens), len(positions)])
        mask = laid_out(mask, self.view, sizes, [*groups, self.expert])
        return lax.select(mask, weights, jnp.zeros_like(weights))


def shared_weights(
    graph: Graph, root: int, is_weight: Callable[[int], bool], is_shared: Callable[[int], bool]
) -> list[SharedWeights]:
    """Returns the weights of a sum over experts that something else reads too.

    Args:
      graph: the program.
      root: the number of the sum.
      is_weight: tells whether a value is computed from the choice of experts and not from what they compute.
      is_shared: tells whether something beside the mixture reads such a value.
    """
    reading = read(graph, root)
    if reading is None or reading.what != DENSE or reading.slots or reading.within or reading.picked:
        return []
    space = reading.scope.space
    gathered = [step.source for step in reading.steps if isinstance(step, Gathered) and not step.source.fixed]
    todo = [Ref(reading.arrays[source.position], source.view) for source in gathered]
    found: list[tuple[Ref, Choices]] = []
    seen: set[int] = set()
    while todo and len(seen) < _VISITED:
        ref = space.canonical(todo.pop())
        if ref.value in seen or not is_weight(ref.value):
            continue
        seen.add(ref.value)
        if not is_shared(ref.value):
            todo += space.uses(ref) or []
        elif (choices := _proved(reading, ref)) is not None:
            found.append((ref, choices))
    return [weights for ref, choices in found if (weights := _described(reading.scope, ref, choices)) is not None]


def _proved(reading: Reading, ref: Ref) -> Choices | None:
    """Returns the choices that tell where weights may differ from zero."""
    choices = Choices(reading.scope, reading.expert)
    choices.search(ref)
    if not choices.found or any(choice.within is not None for choice in choices.found):
        return None
    return choices if choices.off(ref) == 0 else None


def _described(scope: Scope, ref: Ref, choices: Choices) -> SharedWeights | None:
    """Describes weights, once no label is refined any more; returns None where they are read in part, or along a
    diagonal."""
    space, graph = scope.space, scope.graph
    expert, view = space.resolve(choices.expert), space.view(ref.view)
    whole = all(
        offset == 0 and space.extent(atoms) == size
        for (offset, atoms), size in zip(view, graph.shape(ref.value), strict=True)
    )
    chosen: dict[tuple[int, View], None] = {}
    for choice in choices.found:
        index = space.canonical(choice.index)
        chosen[index.value, space.view(index.view)] = None
    names: dict[Atom, int] = {}
    for own in (view, *(own for _, own in chosen)):
        atoms = [x for _, parts in own for x in parts]
        if len(set(atoms)) != len(atoms) or own is not view and set(atoms) & set(expert):
            return None
        for atom in atoms:
            names.setdefault(atom, len(names))
    if not whole or not set(expert) <= {x for _, parts in view for x in parts}:
        return None

    def named(own: View) -> View:
        return tuple((offset, tuple(names[x] for x in parts)) for offset, parts in own)

    arrays = tuple((number, named(own)) for number, own in chosen)
    sizes = tuple(space.sizes[atom] for atom in names)
    return SharedWeights(ref.value, named(view), tuple(names[x] for x in expert), arrays, sizes)


def with_chosen(
    graph: Graph, program: ClosedJaxpr, operands: Sequence[int], shared: Sequence[SharedWeights]
) -> tuple[list[int], ClosedJaxpr]:
    """Returns the operands and the program of a site that reads weights where an expert is chosen alone.

    The program computes what it computed; it has the arrays that tell the choices as further operands.
    """
    chosen = dict.fromkeys(number for weights in shared for number, _ in weights.chosen)
    every = [*operands, *(number for number in chosen if number not in operands)]
    run, count = compat.jaxpr_as_fun(program), len(operands)

    def read_where_chosen(*arrays: jax.Array) -> jax.Array:
        given = list(arrays[:count])
        for weights in shared:
            own = [arrays[every.index(number)] for number, _ in weights.chosen]
            for place, number in enumerate(operands):
                if number == weights.number:
                    given[place] = weights.of_chosen(given[place], own)
        (result,) = run(*given)
        return result

    avals = [*program.in_avals, *(graph.avals[number] for number in every[count:])]
    with array_types.on_mesh_of(avals):
        return every, compat.make_jaxpr(read_where_chosen, *map(array_types.typed_like, avals))


def returns_to_choice(
    graph: Graph, lookup: Lookup, body: Body, number: int, gradient: int, inside: Callable[[int], bool]
) -> bool:
    """Returns whether a gradient of weights goes on to the derivative of these weights, and to nothing else.

    Args:
      graph, lookup: the program.
      body: the body that computes the weights.
      number: the weights.
      gradient: what the program computes as a part of their gradient, or all of it.
      inside: tells which values the weights are made of by the choice.
    """
    alive = surviving(graph)
    for kind in (Merged, Forward):
        made = kind(graph, body, number, inside)
        wanted = [i for i, use in enumerate(made.uses) if differentiable(use)] if made.complete else []
        if not wanted or any(is_elementwise_call(equation) for equation in made.equations):
            return False  # a derivative of its own may read what has no weight
        found = lookup.backwards(made, wanted)
        gradients = {number for backward in found for number in backward.gradients}
        reached = _added_to(graph, alive, gradient, {backward.cotangent for backward in found})
        if gradients and reached and reached.isdisjoint(surviving(graph, gradients)):
            return True
    return False


def _added_to(graph: Graph, alive: frozenset[int], gradient: int, ends: set[int]) -> set[int]:
    """Returns a gradient and the sums of cotangents that it is a term of, up to those in ``ends``; nothing where
    something else reads one of these."""
    found, todo = {gradient}, [gradient]
    while todo:
        number = todo.pop()
        graph.steps.spend()
        if number in graph.returned or len(found) > _SUMMED:
            return set()
        for user in graph.users[number]:
            if alive.isdisjoint(user.outputs) and not user.equation.effects:
                continue
            if user.name == "add_any":
                todo += [output for output in user.outputs if output not in found]
                found.update(user.outputs)
            elif number not in ends:
                return set()
    return found
