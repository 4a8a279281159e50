"""Holds the equations of a matched forward, as programs that are differentiated to find its backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ArrayFunction, ClosedJaxpr, JaxprAtom, JaxprEqn, Literal, Var
from autopallas.graph import Body, Graph, Node
from autopallas.graph.body_links import may_be_given
from autopallas.graph.custom_rules import is_elementwise_call, rule_key
from autopallas.graph.extract import closed
from autopallas.graph.keys import literal_key
from autopallas.graph.numbering import is_identity
from autopallas.graph.one_example import OneExample
from autopallas.patterns.inlined_rules import inlined_call

__all__ = [
    "COPIES",
    "LAYOUT",
    "Dissolved",
    "DissolvedApart",
    "Forward",
    "Merged",
    "PerExample",
    "PerExampleOfTwo",
    "Rectified",
    "RectifiedApart",
    "Use",
    "differentiable",
    "in_backward",
    "rectified",
]

LAYOUT = frozenset({"transpose", "reshape", "broadcast_in_dim", "squeeze", "expand_dims"})

COPIES = LAYOUT | {"convert_element_type"}
"""Primitives whose result has the elements of the operand, in another dtype or layout."""

_RECTIFIED_WITHIN = frozenset({"scan", "jit", "pjit", "closed_call"})


@dataclass(frozen=True, slots=True)
class Use:
    """One place where the forward reads a value that is not its own."""

    equation: int
    position: int
    variable: Var
    number: int


def pullback(function: ArrayFunction, wanted: Sequence[int]) -> ArrayFunction:
    """Returns ``jax.vjp`` of a function with one result, from (cotangent, arguments) to the cotangents of the arguments
    in ``wanted``."""

    def pulled(cotangent: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        def varied(*chosen: jax.Array) -> jax.Array:
            filled = list(inputs)
            for i, x in zip(wanted, chosen, strict=True):
                filled[i] = x
            result: jax.Array = function(*filled)
            return result

        cotangents: tuple[jax.Array, ...] = jax.vjp(varied, *(inputs[i] for i in wanted))[1](cotangent)
        return cotangents

    return pulled


class Forward:
    """Holds the equations of a site in its body, from ``root`` back to operands that are not ``inside``.

    An equation that holds bodies may be among them, as a whole, only if its primitive is in ``calls``. With
    ``repeats``, so are those outside of the body that repeat a value for each row, or change its layout: JAX moves them
    out of a loop, and leaves their transposes in the loop's backward.
    """

    dissolved = False
    """Whether functions with a derivative of their own are looked up by what they compute, as in a loop."""
    _shape: Hashable | None = None

    def __init__(
        self,
        graph: Graph,
        body: Body,
        root: int,
        inside: Callable[[int], bool],
        calls: frozenset[str] = frozenset(),
        repeats: bool = False,
    ):
        self.graph, self.body, self._repeats, self._inside = graph, body, repeats, inside
        numbers = graph.numbers[body]
        self._defined = body.defined
        self.root = graph.positions[body][root][1]
        wanted: dict[tuple[int, int], JaxprEqn] = {}
        todo = [self.root]
        hoisted: dict[Var, list[JaxprEqn]] = {}
        self.complete = True
        while todo:
            variable = todo.pop()
            position = self._defined.get(variable)
            if position is None and (made := self._made_of_literals(variable) or self._moved_out(variable)):
                hoisted[variable] = made
                continue
            called = position is not None and body.equations[position].primitive.name in calls
            if position is None or (position in body.children and not called):
                self.complete = False  # part of the site lies in another body
                return
            equation, part = body.equations[position], 0
            if is_identity(equation):  # a barrier may hold several values, only one of which belongs to the site
                part = equation.outvars.index(variable)
                equation = equation.replace(invars=[equation.invars[part]], outvars=[variable])
            if (position, part) in wanted:
                continue
            equation = wanted[position, part] = self._with_literals(equation)
            for atom in equation.invars:
                if isinstance(atom, Var) and inside(numbers[atom]):
                    todo.append(atom)
        self.equations = [e for made in hoisted.values() for e in made] + [wanted[place] for place in sorted(wanted)]
        self.positions = [position for position, _ in sorted(wanted)]
        own = {v for e in self.equations for v in e.outvars}
        self.uses = [
            Use(i, k, atom, numbers[atom])
            for i, e in enumerate(self.equations)
            for k, atom in enumerate(e.invars)
            if isinstance(atom, Var) and atom not in own
        ]
        self.own = {numbers[v] for v in own} - self._constants(numbers) - self._copies(numbers)
        self._completed()

    def _completed(self) -> None:
        """Changes what was collected, if all of the site lies in its body; for kinds of forwards."""

    def _made_of_literals(self, variable: Var) -> list[JaxprEqn]:
        """Returns the equations of a value that the body is given and that is made of literals alone; none for other
        values."""
        node = self.graph.definitions.get(self.graph.numbers[self.body][variable])
        if node is None or len(node.outputs) != 1 or jaxprs.bodies(node.equation):
            return []
        found: list[JaxprEqn] = []
        atoms: list[JaxprAtom] = []
        for number in node.inputs:
            aval = self.graph.avals[number]
            if number in self.graph.literals and not aval.shape:
                atoms.append(Literal(self.graph.literals[number][()], aval))
                continue
            inner = Var(aval)
            self.graph.numbers[self.body].setdefault(inner, number)
            if not (made := self._made_of_literals(inner)):
                return []
            found += made
            atoms.append(inner)
        return [*found, node.equation.replace(invars=atoms, outvars=[variable])]

    def _moved_out(self, variable: Var) -> list[JaxprEqn]:
        """Returns the equations of a value that the body is given and that is another layout of a value which the body
        lacks and can be given too; none for other values."""
        graph, numbers = self.graph, self.graph.numbers[self.body]
        node = graph.definitions.get(numbers[variable])
        if not self._repeats or node is None or node.name not in LAYOUT or len(node.inputs) != 1:
            return []
        (number,) = node.inputs
        if number in graph.literals or not may_be_given(graph, number, self.body):
            return []
        known = graph.positions[self.body].get(number)
        inner = Var(graph.avals[number]) if known is None else known[1]
        numbers.setdefault(inner, number)
        earlier = self._moved_out(inner) if known is None and self._inside(number) else []
        return [*earlier, node.equation.replace(invars=[inner], outvars=[variable])]

    def _constants(self, numbers: dict[Var, int]) -> set[int]:
        """Returns the values that are made of literals alone: where they are needed elsewhere too, they are
        recomputed."""
        found: set[int] = set()
        for equation in self.equations:
            if all(isinstance(atom, Literal) or numbers[atom] in found for atom in equation.invars):
                found.update(numbers[v] for v in equation.outvars)
        return found

    def _copies(self, numbers: dict[Var, int]) -> set[int]:
        """Returns the values that are operands in another dtype or layout, except the result: where they are needed
        elsewhere too, they are computed there as they were."""
        own = {v for e in self.equations for v in e.outvars}
        found: set[Var] = set()
        for equation in self.equations:
            if equation.primitive.name in COPIES and equation.outvars[0] is not self.root:
                read = equation.invars[0]
                if isinstance(read, Var) and (read in found or read not in own):
                    found.add(equation.outvars[0])
        return {numbers[v] for v in found if v in numbers}

    def _with_literals(self, equation: JaxprEqn) -> JaxprEqn:
        """Returns an equation with known scalars as literals: a value that is no operand needs no use."""
        known, numbers = self.graph.literals, self.graph.numbers[self.body]
        if not any(isinstance(atom, Var) and numbers[atom] in known for atom in equation.invars):
            return equation
        atoms = [
            Literal(known[numbers[atom]][()], atom.aval)
            if isinstance(atom, Var) and numbers[atom] in known and not atom.aval.shape
            else atom
            for atom in equation.invars
        ]
        return equation.replace(invars=atoms)

    def shape(self) -> Hashable:
        """Returns a key that is equal for forwards that do the same to other values, and so have the same
        derivative."""
        if self._shape is None:
            self._shape = self._lines()
        return self._shape

    def _lines(self) -> Hashable:
        places: dict[Var, int] = {}
        lines: list[Hashable] = []
        for equation in self.equations:
            atoms: tuple[Hashable, ...] = tuple(
                (a.aval, literal_key(a)) if isinstance(a, Literal) else places.get(a, a.aval) for a in equation.invars
            )
            key = self.graph.key_here(equation, (), ())
            lines.append((id(equation) if key is None else key, rule_key(equation), atoms))
            places.update({v: len(places) + k for k, v in enumerate(equation.outvars)})
        return tuple(lines)

    def types(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of the uses as the derivative takes them."""
        return [array_types.typed_like(use.variable.aval) for use in self.uses]

    def known(self, inputs: Sequence[Var], equations: Sequence[JaxprEqn]) -> dict[Var, int]:
        """Returns the numbers of variables of a derivative with the given equations, whose inputs are the uses."""
        return {variable: use.number for variable, use in zip(inputs, self.uses, strict=True)}

    def pulled(self, program: ClosedJaxpr, wanted: Sequence[int]) -> ArrayFunction:
        """Returns the derivative of the program: a function from the cotangent and the uses to the cotangents of those
        in ``wanted``."""
        return pullback(lambda *inputs: compat.jaxpr_as_fun(program)(*inputs)[0], wanted)

    @functools.cached_property
    def differentiated(self) -> frozenset[int]:
        """Positions of the equations whose results may have a cotangent: not of those behind ``stop_gradient``, or of
        which only comparisons and whole numbers are made."""
        found: set[int] = set()
        wanted: set[JaxprAtom] = {self.root}
        for position, equation in reversed([*enumerate(self.equations)]):
            if any(v in wanted and jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in equation.outvars):
                found.add(position)
                if equation.primitive.name != "stop_gradient":
                    wanted.update(atom for atom in equation.invars if isinstance(atom, Var))
        return frozenset(found)

    def jaxpr(self) -> ClosedJaxpr:
        """Returns the program from the uses, each an input of its own, to the result."""
        inputs = [Var(use.variable.aval) for use in self.uses]
        return closed(inputs, [self.root], self.over(inputs))

    def over(self, inputs: Sequence[JaxprAtom]) -> list[JaxprEqn]:
        """Returns the equations with other variables for the uses."""
        return self._replaced({(u.equation, u.position): x for u, x in zip(self.uses, inputs, strict=True)})

    def _replaced(self, given: dict[tuple[int, int], JaxprAtom]) -> list[JaxprEqn]:
        return [
            e.replace(invars=[given.get((i, k), atom) for k, atom in enumerate(e.invars)])
            for i, e in enumerate(self.equations)
        ]

    def steps_back(self, use: Use) -> Iterator[JaxprEqn]:
        """Yields the layout equations from which the value of a use comes, the last first."""
        variable = use.variable
        while (position := self._defined.get(variable)) is not None:
            equation = self.body.equations[position]
            if equation.primitive.name not in LAYOUT or not isinstance(equation.invars[0], Var):
                if not (is_identity(equation) and isinstance(equation.invars[0], Var)):
                    return
            yield equation
            variable = equation.invars[0]


class PerExample(Forward):
    """A forward of examples that a ``vmap`` made, each of which has gradients of its own of what all of them read.

    Its derivative is that of one example, mapped over all.
    """

    def __init__(self, forward: Forward, example: OneExample):
        self.__dict__.update(forward.__dict__)
        self.dissolved = forward.dissolved
        self.every, self.example = forward, example

    @property
    def shared(self) -> tuple[int, ...]:
        """The uses that all examples read."""
        return tuple(i for i, axis in enumerate(self.example.axes) if axis is None)

    def shape(self) -> Hashable:
        return self.every.shape(), self.example.axis, self.example.axes, self.example.alone

    def over(self, inputs: Sequence[JaxprAtom]) -> list[JaxprEqn]:
        return self.every.over(inputs)

    def pulled(self, program: ClosedJaxpr, wanted: Sequence[int]) -> ArrayFunction:
        one, axes = self.example, self.example.axes
        function = jax.vmap(
            pullback(one, wanted), in_axes=(one.axis, *axes), out_axes=tuple(axes[i] or 0 for i in wanted)
        )
        return function

    def types(self) -> list[jax.ShapeDtypeStruct]:
        return [
            found
            if axis is None
            else jax.ShapeDtypeStruct((*found.shape[:axis], *found.shape[axis + 1 :]), found.dtype)
            for found, axis in zip(super().types(), self.example.alone, strict=True)
        ]

    def known(self, inputs: Sequence[Var], equations: Sequence[JaxprEqn]) -> dict[Var, int]:
        found = super().known(inputs, equations)
        for variable, use, axis in zip(inputs, self.uses, self.example.alone, strict=True):
            if axis is not None:  # the program has it with the axis of size 1
                del found[variable]
                shape = use.variable.aval.shape
                added = (e.outvars[0] for e in equations if [*e.invars] == [variable] and e.primitive.name in LAYOUT)
                found.update((v, use.number) for v in added if v.aval.shape == shape)
                if (before := self._without(use, axis)) is not None:
                    found[variable] = before
        return found

    def _without(self, use: Use, axis: int) -> int | None:
        """Returns the value from which a use is made by one axis of size 1, if the program has it."""
        node = self.graph.definitions.get(use.number)
        if node is None or node.name != "broadcast_in_dim":
            return None
        (source,), shape = node.inputs, node.params["shape"]
        dimensions = [int(d) for d in node.params["broadcast_dimensions"]]
        rest = (*shape[:axis], *shape[axis + 1 :])
        if axis in dimensions:
            return None
        moved = tuple(d - (d > axis) for d in dimensions)
        if self.graph.shape(source) == rest and moved == tuple(range(len(rest))):
            return source
        aval = array_types.array_type(rest, self.graph.dtype(source), [use.variable.aval])
        params = node.params | {"shape": rest, "broadcast_dimensions": moved}
        equation = node.equation.replace(params=params, outvars=[Var(aval)])
        results = self.graph.find(equation, [source], self.graph.frames[self.body])
        return None if results is None else results[0]


class PerExampleOfTwo(PerExample):
    """A forward of examples along two axes, as those of models and of their seeds, that two ``vmap`` made."""

    def __init__(self, forward: Forward, example: OneExample, inner: OneExample):
        super().__init__(forward, example)
        self.inner = inner

    @staticmethod
    def of(forward: Forward) -> PerExampleOfTwo | None:
        """Returns the forward as one of examples along the first two axes of its result; None where it is none."""
        shape = forward.root.aval.shape
        if len(shape) < 2 or min(shape[:2]) < 2:
            return None
        outer = OneExample.of(forward.jaxpr(), 0)
        if outer is None or any(own is not None for own in outer.alone):
            return None
        types = [
            jax.ShapeDtypeStruct(x.shape if d is None else (*x.shape[:d], *x.shape[d + 1 :]), x.dtype)
            for x, d in zip(forward.types(), outer.axes, strict=True)
        ]
        inner = OneExample.of(compat.make_jaxpr(outer, *types), 0)
        moved = inner is not None and ({*outer.axes} | {*inner.axes}) - {0, None}
        if inner is None or not moved or any(own is not None for own in inner.alone):
            return None
        return PerExampleOfTwo(forward, outer, inner)

    @property
    def shared(self) -> tuple[int, ...]:
        return tuple(i for i, axis in enumerate(self.inner.axes) if axis is None or self.example.axes[i] is None)

    def shape(self) -> Hashable:
        return super().shape(), self.inner.axes

    def pulled(self, program: ClosedJaxpr, wanted: Sequence[int]) -> ArrayFunction:
        function = pullback(self.inner, wanted)
        for one in (self.inner, self.example):
            out = tuple(one.axes[i] or 0 for i in wanted)
            function = jax.vmap(function, in_axes=(one.axis, *one.axes), out_axes=out)
        return function


class Merged(Forward):
    """A forward with one use for all places that read a value: its cotangent is the sum of theirs."""

    def _completed(self) -> None:
        super()._completed()
        self._places = self.uses
        firsts: dict[int, Use] = {}
        for use in self._places:
            firsts.setdefault(use.number, use)
        self.uses = list(firsts.values())

    def _lines(self) -> Hashable:
        order = {use.number: i for i, use in enumerate(self.uses)}
        return super()._lines(), tuple((u.equation, u.position, order[u.number]) for u in self._places)

    def over(self, inputs: Sequence[JaxprAtom]) -> list[JaxprEqn]:
        numbered = {u.number: x for u, x in zip(self.uses, inputs, strict=True)}
        given = {(u.equation, u.position): numbered[u.number] for u in self._places}
        return self._replaced(given)


class _Rules(Forward):
    """Takes each ``max(x, 0)`` for ``jax.nn.relu``, and what ``jax.nn.softplus`` and ``jax.nn.relu6`` compute for calls
    of these.

    In a loop that is differentiated, JAX replaces a function with a derivative of its own by what it computes. The
    derivative still follows the function's rule, there or where a checkpoint recomputes the function.
    """

    differs = False
    """Whether the forward has functions with a derivative of their own."""

    def _completed(self) -> None:
        super()._completed()
        before = self.equations
        self.equations = [self._called(rectified(e)) for e in before]
        within = any(a is not b for a, b in zip(before, self.equations, strict=True) if jaxprs.bodies(a))
        self.differs = within or any(is_elementwise_call(e) for e in self.equations)

    def _called(self, equation: JaxprEqn) -> JaxprEqn:
        """Replaces the last equation of a softplus or a relu6 by its call, where this site computes its operand too."""
        numbers = self.graph.numbers[self.body]
        node = self.graph.definitions.get(numbers.get(equation.outvars[0], -1))
        found = None if node is None else inlined_call(self.graph, node)
        if found is None or found[1][0] not in self.own:
            return equation
        call, (x, *_) = found
        operand = next(v for e in self.equations for v in e.outvars if numbers.get(v) == x)
        return call.replace(invars=[operand, *call.invars[1:]], outvars=equation.outvars)


class Rectified(_Rules, Merged):
    """A merged forward that takes each ``max(x, 0)`` for ``jax.nn.relu``."""


class Dissolved(Rectified):
    """A rectified forward whose derivative, too, reads what such functions compute, and not the results of their
    calls."""

    dissolved = True


class RectifiedApart(_Rules):
    """A rectified forward with one use per place that reads a value: the program may add them up in another order."""


class DissolvedApart(RectifiedApart):
    """A rectified forward with one use per place whose derivative is that of :class:`Dissolved`."""

    dissolved = True


def rectified(equation: JaxprEqn) -> JaxprEqn:
    """Replaces ``max(x, 0)`` by the rectifier that it may have been; in an equation with a body, does so within the
    body."""
    name = equation.primitive.name
    if name in _RECTIFIED_WITHIN:
        params = dict(equation.params)
        for parameter, position, body in jaxprs.bodies(equation):
            jaxpr, constants = jaxprs.open_jaxpr(body)
            equations = [rectified(e) for e in jaxpr.eqns]
            if position is None and any(a is not b for a, b in zip(jaxpr.eqns, equations, strict=True)):
                given = jaxpr.constvars, constants, jaxpr.invars, jaxpr.outvars
                params[parameter] = jaxprs.rebuild(body, *given, equations)
        changed = any(params[name] is not value for name, value in equation.params.items())
        return equation.replace(params=params) if changed else equation
    if equation.primitive.name != "max" or len(equation.invars) != 2:
        return equation
    x, zero = equation.invars
    if not isinstance(x, Var) or not isinstance(zero, Literal) or zero.val != 0 or x.aval != equation.outvars[0].aval:
        return equation
    program, _ = jaxprs.open_jaxpr(compat.make_jaxpr(jax.nn.relu, array_types.typed_like(x.aval)))
    calls = [e for e in program.eqns if is_elementwise_call(e)]
    return calls[0].replace(invars=[x], outvars=equation.outvars) if len(program.eqns) == len(calls) == 1 else equation


def differentiable(use: Use) -> bool:
    """Returns whether a use can have a cotangent."""
    return bool(jnp.issubdtype(use.variable.aval.dtype, jnp.floating))


def in_backward(node: Node) -> bool:
    """Returns whether reverse-mode differentiation made a node, or the body that has it."""
    return node.body.transposed or compat.is_transposed(node.equation)
