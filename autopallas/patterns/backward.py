"""Finds the backward of a matched forward, without any backward pattern.

The matched forward is differentiated with ``jax.vjp``, and the resulting equations are looked up in the graph. JAX's
autodiff is deterministic, so a program that holds the backward holds these very equations, whatever the spelling of the
forward and the version of JAX. Only the cotangent is unknown: each value is tried for which the graph holds the first
equation that reads the cotangent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
from jax.typing import ArrayLike

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ArrayFunction, ClosedJaxpr, JaxprAtom, JaxprEqn, Literal, Var
from autopallas.graph import Body, Graph, Node, flatten
from autopallas.graph.custom_rules import is_elementwise_call
from autopallas.graph.extract import closed
from autopallas.graph.flatten import Child
from autopallas.graph.numbering import is_identity
from autopallas.graph.one_example import OneExample
from autopallas.patterns.forward import Forward, PerExample, PerExampleOfTwo, Use

__all__ = ["Backward", "Level", "Lookup"]

_ANY = -1
"""Key of all nodes, in the place of the number of a value that they read."""
_MOST_TERMS = 16
"""Most cotangents of one value that are compared whatever the order is in which they are added up."""
_MANY = 8
"""Number of equations above which those that do the same are told apart by what reads their results."""
_FURTHER = 4
"""How many equations behind one are looked at for that."""
_NOT_NEEDED = frozenset({"add_any", "scan"})
"""Equations of a backward that a program may lack: other sums and loops hold the same."""
_STARTS = 8
"""Most values that are tried as the cotangent with which a backward loop starts."""


@dataclass(frozen=True, slots=True)
class Level:
    """An operand before some of its layout operations: its number, and the number of its cotangent."""

    operand: int
    cotangent: int


@dataclass(slots=True)
class Backward:
    """One backward of a forward.

    Attributes:
      cotangent: number of the result's cotangent.
      levels: per use whose cotangent the program computes, the pairs of operand and cotangent: first the use itself,
        then the values from which it comes by layout operations alone, as far back as the program has their cotangents.
      mapped: how many cotangents there are, along a leading axis of each cotangent; None for one without that axis.
      spread: per use that all examples of a ``vmap`` share, each with a cotangent of its own: the axis along which
        these lie.
      lacking: the uses whose cotangent follows from the result's and is none of the program's.
      moved: per use whose cotangent has the axes of a ``vmap``'s examples at other places than the use itself has them:
        the order of the use's axes in the cotangent.
    """

    cotangent: int
    levels: dict[int, list[Level]] = field(default_factory=dict)
    mapped: int | None = None
    spread: dict[int, int] = field(default_factory=dict)
    lacking: frozenset[int] = frozenset()
    moved: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def gradients(self) -> list[int]:
        """Numbers of the cotangents of the uses themselves."""
        return [levels[0].cotangent for levels in self.levels.values()]


class Lookup:
    """Looks equations up in a graph, by an index of the nodes by what they do; :meth:`of` gives the graph's own."""

    @staticmethod
    def of(graph: Graph) -> Lookup:
        """Returns the lookup of a graph, which all patterns share."""
        if "lookup" not in graph.notes:
            graph.notes["lookup"] = (Lookup(graph),)
        (lookup,) = graph.notes["lookup"]
        assert isinstance(lookup, Lookup)
        return lookup

    def __init__(self, graph: Graph):
        self.graph = graph
        self._index: dict[Hashable, dict[int, list[Node]]] = {}
        self._derivatives: dict[Hashable, _Derivative] = {}
        self._children: dict[int, list[Child]] = {}
        """Bodies that equations of derivatives hold, by the identity of the equation."""
        self._transposes: dict[Hashable, Body] = {}
        self._known_readers: dict[Hashable, tuple[JaxprEqn, dict[int, list[Node]]]] = {}
        """By the identity of an equation, and the frame."""
        self._named: dict[str, list[Node]] = {}
        for node in graph.nodes:
            self._named.setdefault(node.equation.primitive.name, []).append(node)
            repeated = graph.as_broadcast(node.equation, node.inputs) if node.name == "transpose" else None
            if repeated is not None:
                equation, operand = repeated
                same = Node(equation, (operand,), node.outputs, node.body)
                self._named.setdefault(equation.primitive.name, []).append(same)

    @functools.cached_property
    def _sizes(self) -> dict[Hashable, dict[int, None]]:
        """By the type of the elements along the first axis of a value: the sizes of such axes."""
        found: dict[Hashable, dict[int, None]] = {}
        for aval in self.graph.avals:
            own: tuple[int, ...] = getattr(aval, "shape", ())
            if own:
                found.setdefault((tuple(own[1:]), aval.dtype), {})[int(own[0])] = None
        return found

    def _readers(self, equation: JaxprEqn, frame: tuple[int, ...]) -> dict[int, list[Node]]:
        """Returns the nodes that do what an equation does, by the values they read; the key ``_ANY`` gives all of
        them."""
        for node in self._named.pop(equation.primitive.name, ()):
            key = self.graph.key_here(node.equation, (), self.graph.frames[node.body])
            readers = self._index.setdefault(key, {})
            for number in {*node.inputs, _ANY}:
                readers.setdefault(number, []).append(node)
        known = self._known_readers.get((id(equation), frame))
        if known is None or known[0] is not equation:
            readers = self._index.get(self.graph.key_here(equation, (), frame), {})
            known = self._known_readers[id(equation), frame] = equation, readers
        return known[1]

    def backwards(self, forward: Forward, wanted: Sequence[int]) -> list[Backward]:
        """Finds every backward of ``forward`` in the program, with the cotangents of those uses in ``wanted`` that it
        computes."""
        found = self._backwards(forward, wanted, None)
        for size in () if found or isinstance(forward, PerExample) else self._many(forward):
            found += self._backwards(forward, wanted, size)
        return found

    def _many(self, forward: Forward) -> list[int]:
        """Returns numbers of cotangents that one forward may have, since a Jacobian has a row for each."""
        sizes = self._sizes.get((tuple(forward.root.aval.shape), forward.root.aval.dtype), {})
        return list(sizes)[:4]

    def _backwards(self, forward: Forward, wanted: Sequence[int], mapped: int | None) -> list[Backward]:
        graph, frame = self.graph, self.graph.frames[forward.body]
        try:
            derivative = self._derivative(forward, wanted, mapped)
        except NotImplementedError:
            if mapped is None:
                raise
            return []  # JAX cannot map some equation of the derivative, so no program holds the mapped one
        cotangent, *inputs = derivative.body.invars
        known = forward.known(inputs, derivative.body.equations)
        followed: dict[int, dict[Var, int]] = {}  # per candidate, the values that were found with it
        found: dict[int, Backward] = {}
        tied: set[int] = set()  # cotangents that meet values of the site; one only added up may be any site's
        root = graph.numbers[forward.body][forward.root]
        inner = forward.own - {root}  # one factor of a product is not the other's cotangent
        for path in derivative.paths:
            started = self._cotangents(path.equations, known, cotangent, frame) if path.of_site else ()
            for candidate in dict.fromkeys(c for c in (*found, *started) if c not in inner):
                numbers = followed.setdefault(candidate, {cotangent: candidate})
                numbers.update(known)
                if not self._follow(path.equations, numbers, frame) or path.result not in numbers:
                    continue
                if numbers[path.result] in graph.supposed or numbers[path.result] == root:
                    continue
                backward = found.setdefault(candidate, Backward(candidate, mapped=mapped))
                backward.levels[path.use] = [Level(forward.uses[path.use].number, numbers[path.result])]
                if path.of_site:
                    tied.add(candidate)
        flowing = {path.use for path in derivative.paths if path.flows}
        for backward in found.values():
            backward.lacking = frozenset(flowing - backward.levels.keys())
            backward.spread = {i: axis for i, axis in derivative.spread.items() if i in backward.levels}
            backward.moved = {i: axes for i, axes in derivative.moved.items() if i in backward.levels}
            for i, levels in backward.levels.items():
                if i not in backward.spread and i not in backward.moved:
                    self._extend(forward, forward.uses[i], levels, frame, mapped)
        parts = _parts_of_others(forward, found, followed)
        shape = tuple(cotangent.aval.shape)
        return [b for c, b in found.items() if c in tied and c not in parts and graph.shape(c) == shape]

    def per_example(self, forward: Forward, wanted: Sequence[int]) -> Iterator[tuple[PerExample, list[int]]]:
        """Yields the forward as one of examples, each time with the uses that may have a cotangent then: where the
        program has an array for each of the uses in ``wanted`` that all examples share, with as many as these are; and
        where some of the others have the examples along another axis than the result, or two axes of examples, as of
        models and of their seeds."""
        sizes: dict[int, None] = {}
        for i in wanted:
            aval = forward.uses[i].variable.aval
            sizes.update(self._sizes.get((tuple(aval.shape), aval.dtype), {}))
            if 1 in aval.shape:  # of all examples, in the place of whose axis it has one of size 1
                rest = list(aval.shape)
                rest.remove(1)
                sizes.update(self._sizes.get((tuple(rest), aval.dtype), {}))
        for axis in (axis for axis, size in enumerate(forward.root.aval.shape) if size > 1 and size in sizes):
            example = OneExample.of(forward.jaxpr(), axis)
            if example is not None and any(example.axes[i] is None for i in wanted):
                yield PerExample(forward, example), [*wanted]
                break
        for axis in (axis for axis, size in enumerate(forward.root.aval.shape) if size > 1):
            example = OneExample.of(forward.jaxpr(), axis)
            own = [] if example is None else [i for i in wanted if example.axes[i] is not None]
            if example is not None and {example.axes[i] for i in own} - {axis}:
                yield PerExample(forward, example), own
                break
        if (pair := PerExampleOfTwo.of(forward)) is not None:
            own = [i for i in wanted if pair.example.axes[i] is not None and pair.inner.axes[i] is not None]
            if own:
                yield pair, own

    def _derivative(self, forward: Forward, wanted: Sequence[int], mapped: int | None) -> _Derivative:
        """Returns the equations of ``jax.vjp``, from (cotangent, uses) to the cotangents of the uses in ``wanted``;
        mapped over that many cotangents unless ``mapped`` is None."""
        key = (forward.shape(), tuple(wanted), mapped, array_types.axis_types(forward.root.aval), forward.dissolved)
        known = self._derivatives.get(key)  # looked up once: the key is long
        if known is None:
            program = forward.jaxpr()
            if any(position in forward.body.children for position in forward.positions):
                program = jaxprs.without_dead_code(program)  # drops what loops stack for their own derivative

            pulled = forward.pulled(program, wanted)
            avals = [forward.root.aval, *(u.variable.aval for u in forward.uses)]
            shapes = [array_types.cotangent_like(forward.root.aval), *forward.types()]
            if mapped is not None:
                pulled = jax.vmap(pulled, in_axes=(0, *(None for _ in forward.uses)))
                shapes[0] = jax.ShapeDtypeStruct((mapped, *shapes[0].shape), shapes[0].dtype)
            with array_types.on_mesh_of(avals), compat.at_width(jaxprs.is_wide(program)):
                derivative = compat.make_jaxpr(pulled, *shapes)
                if forward.dissolved:
                    derivative = compat.make_jaxpr(_without_rules(derivative), *shapes)
                pattern = flatten(derivative, forward.body.path)
                self._children.update((id(pattern.equations[i]), own) for i, own in pattern.children.items())
                shared = forward.shared if isinstance(forward, PerExample) else ()
                axes = forward.example.axes if isinstance(forward, PerExample) else ()
                twice = isinstance(forward, PerExampleOfTwo)
                known = self._derivatives[key] = _Derivative(pattern, wanted, shared, axes, twice)
        return known

    def _extend(
        self, forward: Forward, use: Use, levels: list[Level], frame: tuple[int, ...], mapped: int | None
    ) -> None:
        """Follows a use back through layout operations, from the last of its ``levels``, for as long as the program
        transposes them too."""
        numbers = self.graph.numbers[forward.body]
        met = levels[-1].operand == use.number
        for equation in forward.steps_back(use):
            before = equation.invars[0]
            assert isinstance(before, Var)
            if is_identity(equation):
                continue
            if not met:
                met = numbers[before] == levels[-1].operand
                continue
            pattern = self._transposed(equation, mapped)
            found = {pattern.invars[0]: levels[-1].cotangent}
            result = pattern.outvars[0]
            if not self._follow(pattern.equations, found, frame) or not isinstance(result, Var) or result not in found:
                return
            if found[result] in self.graph.supposed:
                return
            levels.append(Level(numbers[before], found[result]))

    def add_up(self, forward: Forward, backward: Backward, among: Sequence[int]) -> None:
        """Merges the uses that read one value where the program adds up their cotangents.

        Their sum is the value's own cotangent there, of which kernels know more than of the parts: if a sink is part of
        a maximum, say, the part through the maximum cancels.
        """
        levels = backward.levels
        todo = [use for use in levels if use in among]
        places: dict[int, list[int]] = {}  # per operand, the uses that come from it
        while todo:
            use = todo.pop()
            for level in levels[use]:
                for other in places.setdefault(level.operand, []):
                    steps = levels.get(other, ())
                    ends = [step.cotangent for step in steps if step.operand == level.operand]
                    alike = ends and other != use and backward.spread.get(other) == backward.spread.get(use)
                    alike = alike and backward.moved.keys().isdisjoint((use, other))
                    total = self._sum(level.cotangent, ends[0]) if alike else None
                    if total is not None:
                        break
                else:
                    places[level.operand].append(use)
                    continue
                del levels[other]
                levels[use] = [Level(level.operand, total)]
                frame = self.graph.frames[forward.body]
                if use not in backward.spread and use not in backward.moved:
                    self._extend(forward, forward.uses[use], levels[use], frame, backward.mapped)
                todo.append(use)
                break

    def _sum(self, a: int, b: int) -> int | None:
        """Returns the value that is the sum of two cotangents, if the program has it."""
        for node in self.graph.users[a]:
            self.graph.steps.spend()
            if node.name in ("add_any", "add") and sorted(node.inputs) == sorted((a, b)):
                return node.outputs[0]
        return None

    def _transposed(self, equation: JaxprEqn, mapped: int | None) -> Body:
        """Returns the equations of the transpose of a layout operation."""
        before, after = equation.invars[0].aval, equation.outvars[0].aval
        key = (self.graph.key_here(equation, (), ()), before.shape, before.dtype, mapped, array_types.axis_types(after))
        if key not in self._transposes:
            operand = equation.invars[0]
            assert isinstance(operand, Var)
            step = compat.jaxpr_as_fun(closed([operand], equation.outvars, [equation]))
            transpose = jax.linear_transpose(lambda x: step(x)[0], array_types.typed_like(before))
            kind = array_types.cotangent_like(after)
            if mapped is not None:
                kind = jax.ShapeDtypeStruct((mapped, *after.shape), after.dtype)
            pull: ArrayFunction = lambda ct: transpose(ct)[0]  # noqa: E731
            pull = pull if mapped is None else jax.vmap(pull)
            with array_types.on_mesh_of([after]):
                self._transposes[key] = flatten(compat.make_jaxpr(pull, kind))
        return self._transposes[key]

    def _follow(self, equations: Sequence[JaxprEqn], numbers: dict[Var, int], frame: tuple[int, ...]) -> bool:
        """Adds the numbers of all variables to ``numbers``; returns False at an equation that is not in the program.

        If there is a loop among the equations, missing ones are skipped: the program may lack results of the loop, and
        what only those need.
        """
        loops = any(self._is_loop(equation) for equation in equations) if self._children else False
        open_sums: dict[Var, list[int]] = {}
        for equation in equations:
            if equation.outvars[0] in numbers and len(equation.outvars) == 1:
                continue
            operands = self._read(equation, numbers)
            results: Sequence[int | None] | None = None
            self.graph.steps.spend()
            if loops and self._is_loop(equation):
                given = [self._atom(atom, numbers) for atom in equation.invars]
                results = self.graph.held(equation, self._children[id(equation)], given, frame)
            elif operands is not None:
                results = self.graph.find(equation, operands, frame) or self.graph.suppose(equation, operands, frame)
            if results is None and equation.primitive.name == "add_any":
                results = self._summed(equation, numbers, open_sums)
            if results is None and (loops or equation.outvars[0] in open_sums):
                continue
            if results is None:
                return False
            numbers.update((v, n) for v, n in zip(equation.outvars, results, strict=True) if n is not None)
        return True

    def _summed(
        self, equation: JaxprEqn, numbers: dict[Var, int], open_sums: dict[Var, list[int]]
    ) -> Sequence[int] | None:
        """Returns the value that is the sum of the same cotangents, added up in another order: where a value is read
        inside of a function that is called, JAX adds up what comes from there first.

        A sum that the program lacks is kept in ``open_sums``, with the numbers of what is added up, for the next one.
        """
        terms: list[int] = []
        for atom in equation.invars:
            known = self._atom(atom, numbers)
            if known is not None:
                terms += self._terms(known)
            elif isinstance(atom, Var) and atom in open_sums:
                terms += open_sums[atom]
            else:
                return None
            if len(terms) > _MOST_TERMS:
                return None
        total, wanted = terms[0], sorted(terms)
        for _ in range(_MOST_TERMS):
            self.graph.steps.spend()
            following = next((n.outputs[0] for n in self.graph.users[total] if n.name == "add_any"), None)
            if following is None:
                break
            total = following
            if sorted(self._terms(total)) == wanted:
                return [total]
        (result,) = equation.outvars
        open_sums[result] = terms
        return None

    def _terms(self, number: int) -> list[int]:
        """Returns the values of which a value is the sum of cotangents; the value itself where it is none, or a long
        one."""
        found: list[int] = []
        todo = [number]
        while todo:
            own = todo.pop()
            node = self.graph.definitions.get(own)
            if node is not None and node.name == "add_any":
                todo += node.inputs
            else:
                found.append(own)
            if len(found) + len(todo) > _MOST_TERMS:
                return [number]
        return found

    def _results(self, equation: JaxprEqn, operands: list[int], frame: tuple[int, ...]) -> Sequence[int | None] | None:
        """Returns the numbers of an equation's results, if the program has them; for a loop, those that it has."""
        if not self._is_loop(equation):
            return self.graph.find(equation, operands, frame)
        return self.graph.held(equation, self._children[id(equation)], operands, frame)

    def _is_loop(self, equation: JaxprEqn) -> bool:
        return equation.primitive.name == "scan" and id(equation) in self._children

    def _atom(self, atom: Var | Literal, numbers: dict[Var, int]) -> int | None:
        return self.graph.find_literal(atom) if isinstance(atom, Literal) else numbers.get(atom)

    def _read(self, equation: JaxprEqn, numbers: dict[Var, int]) -> list[int] | None:
        operands: list[int] = []
        for atom in equation.invars:
            number = self.graph.find_literal(atom) if isinstance(atom, Literal) else numbers.get(atom)
            if number is None:
                return None
            operands.append(number)
        return operands

    def _cotangents(
        self, equations: Sequence[JaxprEqn], numbers: dict[Var, int], cotangent: Var, frame: tuple[int, ...]
    ) -> list[int]:
        """Returns the values that may be the cotangent: those with which the first equation that reads it is in the
        program.  Adds to ``numbers`` the values that are found before it."""
        aliases = {cotangent}
        for at, equation in enumerate(equations):
            if equation.outvars[0] in numbers and len(equation.outvars) == 1:
                continue  # found without the cotangent
            reads = [isinstance(a, Var) and a in aliases for a in equation.invars]
            if True in reads:
                if is_identity(equation):
                    aliases.update(equation.outvars)
                    continue
                return self._candidates(equations, at, reads, numbers, frame)
            operands = self._read(equation, numbers)
            results = None if operands is None else self._results(equation, operands, frame)
            if results is None:
                return []
            numbers.update((v, n) for v, n in zip(equation.outvars, results, strict=True) if n is not None)
        return []

    def _candidates(
        self,
        equations: Sequence[JaxprEqn],
        at: int,
        unknown: Sequence[bool],
        numbers: dict[Var, int],
        frame: tuple[int, ...],
        further: int = _FURTHER,
    ) -> list[int]:
        """Returns the values with which an equation is in the program that reads one unknown value.

        Args:
          equations: all that have to be in the program.
          at: which of them it is.
          unknown: which of its operands is the unknown value.
          numbers: those of what is known.
          frame: that of the equations.
          further: how many equations behind it may be looked at, where many of the program's do the same.
        """
        equation = equations[at]
        if equation.primitive.name == "scan":
            return self._started(equation, unknown)
        wanted: list[int | None] = []
        for atom, missing in zip(equation.invars, unknown, strict=True):
            number = None
            if not missing:
                number = self.graph.find_literal(atom) if isinstance(atom, Literal) else numbers.get(atom)
                if number is None:
                    return []
            wanted.append(number)
        found: dict[int, None] = {}
        readers = self._readers(equation, frame)
        rarest = min((number for number in wanted if number is not None), default=_ANY,
                     key=lambda number: len(readers.get(number, ())))  # fmt: skip
        nodes: Sequence[Node] = readers.get(rarest, ())
        if further and len(nodes) > _MANY:
            few = self._read_later(equations, at, numbers, frame, further - 1)
            nodes = nodes if few is None else few
        for node in nodes:
            self.graph.steps.spend()
            orders = [node.inputs, node.inputs[::-1]] if len(node.inputs) == 2 else [node.inputs]
            for inputs in orders:
                if all(w is None or w == i for w, i in zip(wanted, inputs, strict=True)):
                    values = {i for w, i in zip(wanted, inputs, strict=True) if w is None}
                    if len(values) == 1:
                        found[values.pop()] = None
        return list(found)

    def _read_later(
        self, equations: Sequence[JaxprEqn], at: int, numbers: dict[Var, int], frame: tuple[int, ...], further: int
    ) -> list[Node] | None:
        """Returns the few nodes whose result a later equation can read, which has to be in the program too; None where
        there are many.

        Sites that share their parameters, as the layers of an unrolled loop do, have the same equations up to one that
        reads a value of one site alone.
        """
        equation, *later = equations[at:]
        name, (result, *more) = equation.primitive.name, equation.outvars
        if more or not self.graph.keeps_operands(name) or self._children and any(map(self._is_loop, equations)):
            return None
        for after, follows in enumerate(later, at + 1):
            reads = [atom is result for atom in follows.invars]
            others = (a for a, own in zip(follows.invars, reads, strict=True) if not own)
            needed = follows.primitive.name not in _NOT_NEEDED and self.graph.keeps_operands(follows.primitive.name)
            if True not in reads or not needed or is_identity(follows):
                continue
            if len(follows.outvars) == 1 and all(isinstance(a, Literal) or a in numbers for a in others):
                found = self._candidates(equations, after, reads, numbers, frame, further)
                if len(found) <= _MANY:
                    nodes = [self.graph.definitions[n] for n in found if n in self.graph.definitions]
                    return [n for n in nodes if n.name == name and len(n.inputs) == len(equation.invars)]
        return None

    def _started(self, equation: JaxprEqn, unknown: Sequence[bool]) -> list[int]:
        """Returns the values of the cotangent's type that such loops of the program read."""
        place = unknown.index(True)
        aval, kind = equation.invars[place].aval, (equation.params["length"], equation.params["reverse"])
        found: dict[int, None] = {}
        for node in self.graph.nodes:
            if node.name == "scan" and (node.params["length"], node.params["reverse"]) == kind:
                self.graph.steps.spend()
                same = (i for i in node.inputs if self.graph.avals[i].shape == aval.shape)
                found |= dict.fromkeys(i for i in same if self.graph.dtype(i) == aval.dtype)
        return list(found)[:_STARTS]


def _parts_of_others(
    forward: Forward, found: Mapping[int, Backward], followed: Mapping[int, Mapping[Var, int]]
) -> set[int]:
    """Returns the cotangents of the backwards that give nothing but what the forward computes, or the way to what
    another backward gives.

    Where ``x * scale - mean * scale`` is normalised, rows times the scale are what the rows' gradient would be if the
    rows were the cotangent; and the negative cotangent times the scale leads to the gradient of the mean.
    """
    parts: set[int] = set()
    for candidate, backward in found.items():
        given = set(backward.gradients) - forward.own
        larger = (c for c, other in found.items() if len(other.levels) > len(backward.levels))
        if not given or any(given.issubset(followed[c].values()) for c in larger):
            parts.add(candidate)
    return parts


class _Path(NamedTuple):
    """The equations of a derivative that lead to the cotangent of one use."""

    use: int
    result: Var
    equations: Sequence[JaxprEqn]
    of_site: bool
    """Whether a value of the site is read on the way.  One that only adds cotangents up identifies no site."""
    flows: bool
    """Whether the cotangent follows from the result's, and is not zero whatever that is."""


class _Derivative:
    """A derivative, from (cotangent, uses) to cotangents of ``wanted`` uses: its paths, those of the site first.

    ``spread`` gives, for each use in ``shared``, the axis along which its cotangents of all examples lie. Where all
    uses have examples of their own, along ``axes``, or along two axes each, ``twice``, ``moved`` gives the order of the
    axes of each use whose cotangent has them at other places.
    """

    def __init__(
        self,
        body: Body,
        wanted: Sequence[int],
        shared: Sequence[int] = (),
        axes: Sequence[int | None] = (),
        twice: bool = False,
    ):
        self.body = body
        self.spread: dict[int, int] = {}
        self.moved: dict[int, tuple[int, ...]] = {}
        cotangent, *others = body.invars
        given = set(others)
        paths = []
        for i, result in zip(wanted, body.outvars, strict=True):
            if i in shared:
                result, self.spread[i] = _before_moved(body, result, 0)
            elif twice:
                result, order = _before_transposes(body, result, 2)
                if list(order) != sorted(order):
                    self.moved[i] = order
            elif axes and (own := axes[i]) is not None and not {*shared} & {*wanted}:
                before, there = _before_moved(body, result, own)
                if there != own:
                    result, self.moved[i] = _before_transposes(body, result, 1)
                    assert result is before
            if isinstance(result, Var):
                path = _leading_to(body.equations, result)
                read = {atom for e in path for atom in e.invars if isinstance(atom, Var)}
                flows = result is cotangent or cotangent in read
                paths.append(_Path(i, result, path, not read.isdisjoint(given), flows))
        self.paths = sorted(paths, key=lambda path: not path.of_site)


def _before_moved(body: Body, result: JaxprAtom, to: int) -> tuple[JaxprAtom, int]:
    """Returns a value as it was before one of its axes was moved to the place ``to``, and that axis."""
    position = body.defined.get(result) if isinstance(result, Var) else None
    if position is not None and body.equations[position].primitive.name == "transpose":
        order = body.equations[position].params["permutation"]
        others = [*order[:to], *order[to + 1 :]]
        if order[to] != to and sorted(others) == others:
            return body.equations[position].invars[0], int(order[to])
    return result, to


def _before_transposes(body: Body, result: JaxprAtom, most: int) -> tuple[JaxprAtom, tuple[int, ...]]:
    """Returns a value as it was before its last transposes, ``most`` of them, and the order of the axes it has
    afterwards that gives those before."""
    order = tuple(range(len(result.aval.shape)))
    for _ in range(most):
        position = body.defined.get(result) if isinstance(result, Var) else None
        if position is None or body.equations[position].primitive.name != "transpose":
            break
        permutation = [int(d) for d in body.equations[position].params["permutation"]]
        order = tuple(order[permutation.index(d)] for d in range(len(permutation)))
        result = body.equations[position].invars[0]
    return result, order


def _leading_to(equations: Sequence[JaxprEqn], result: Var) -> list[JaxprEqn]:
    """Returns the equations on which a result depends, in order."""
    needed = {result}
    kept: list[JaxprEqn] = []
    for equation in reversed(equations):
        if any(v in needed for v in equation.outvars):
            kept.append(equation)
            needed.update(a for a in equation.invars if isinstance(a, Var))
    return kept[::-1]


def _without_rules(program: ClosedJaxpr) -> Callable[..., list[ArrayLike]]:
    """Returns a function that computes what a program does, without custom derivatives of elementwise functions."""
    jaxpr, constants = jaxprs.open_jaxpr(program)

    def run(*args: jax.Array) -> list[ArrayLike]:
        values: dict[Var, ArrayLike] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *args), strict=True))

        def read(atom: JaxprAtom) -> ArrayLike:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            if is_elementwise_call(equation):
                results = compat.jaxpr_as_fun(equation.params["call_jaxpr"])(*map(read, equation.invars))
            else:
                inputs = list(dict.fromkeys(a for a in equation.invars if isinstance(a, Var)))
                results = compat.jaxpr_as_fun(closed(inputs, equation.outvars, [equation]))(*map(read, inputs))
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    return run
