"""Numbers values: equal computations get one number, across all nested bodies.

The constants of a loop keep their outer number inside, and so do the operands of a branch; a checkpoint's recomputation
is the same value as what it recomputes.  In a scan a number stands for a family of values, one per index of the scanned
axis: if one scan stacks values and another reads them slice by slice (a forward scan's residuals, in the backward),
they are one family under one number.

Numbers grow from operands to results, so a smaller number never depends on a larger one.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Protocol

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from autopallas import compat, jaxprs
from autopallas.compat import JaxprEqn, Literal, ShapedArray, Var
from autopallas.graph.custom_rules import CUSTOM_RULES, is_elementwise_call, same_rule
from autopallas.graph.equal_loops import Loop, Loops, loops
from autopallas.graph.equation_keys import MERGED, EquationKeys, Node
from autopallas.graph.flatten import Body, Child, flatten, may_hold_bodies
from autopallas.graph.keys import (
    branch_key,
    chosen_key,
    enters_mesh,
    literal_key,
    spec_key,
    spread_over_all,
    stacked_key,
)
from autopallas.graph.loop_slices import (
    counters,
    counting,
    folded,
    placed,
    repeated,
    selects,
    slice_read,
    summed_slices,
)
from autopallas.graph.rule_indices import is_whole
from autopallas.graph.steps import Steps
from autopallas.numerics.casts import counts_exactly

_TRANSPARENT = jaxprs.CHECKPOINTS | {"jit", "pjit"}
"""Equations whose results are their body's results (an inner jit only if it has shardings of its own)."""
_IDENTITY = frozenset({"copy", "copy_p", "name", "optimization_barrier", "pvary", "pcast"})
_MAY_BE_KNOWN = _IDENTITY | {
    "convert_element_type", "reduce_precision", "squeeze", "reshape", "lt", "select_n", "gather",
}  # fmt: skip
"""Primitives that may give one of their operands, a literal, or a slice that a loop reads."""
_PLACES = frozenset({"dynamic_update_slice", "scatter", "scatter-add"})
"""Primitives that may put a value at the number of a loop's step."""


class Outside(Protocol):
    """Interface for questions about what the inputs of a part of a program are in the program."""

    def ask(self, place: int, question: str, *more: int) -> bool:
        """Answers a question about the input at a place."""


class Graph(EquationKeys):
    """All computations of a tree of bodies.

    Attributes:
      root: the outermost body.
      nodes: the computations, operands before results.
      avals: per number, the abstract value (shape, dtype).
      literals: numbers of scalar literals, with their values.
      constants: numbers of captured arrays, with the arrays.
      definitions: per number, the node that computes it (absent for inputs, literals and constants).
      users: per number, the nodes that read it; if it enters a body under its own number, the nodes in that body.
      returned: numbers that leave a body as its result (not a checkpoint's, which are the same values outside).
      elements: numbers of what a scan reads step by step.
      inner: for the results of a custom rule's call, the numbers of the same values in its primal body;
        ``outer`` is the way back.
      counters: numbers that count the steps of a loop, with the number of steps and of the loops around.
      supposed: numbers of values that were looked up and that the program lacks: what a loop would stack, transposes.
      furthers: numbers of values that the program lacks, and that a site gives or another form of a loop has.
      frames: per body, what governs the meaning of its equations; equal computations in different frames differ.
      numbers: per body, the number of each of its variables.
      positions: per body, for each number that has a variable there: (position of the equation that first defines it,
        the variable); inputs have position -1.
      holders: per body, the body and the position of the equation that holds it.
      survivors: per set of values that are not to be computed, those that still are, once asked for.
      readers: per number, how many equations that the program needs read it, and one more for a result of the program;
        of a program with plain bodies alone, once it was asked what the program computes.
      has_plain_bodies: whether every inner body is evaluated once, as part of the body around it: those of checkpoints
        and of custom rules are, those of loops, branches and shard_map are not.
      replaced: the values that sites found so far give, of operations that were looked for before.
      respelt: the values that respellings found so far give.
      read: the values that those sites read.
      reads: per value that those sites give, the values from which it is computed there.
      objective, named: what replacements are to improve, and the operations and kinds of sites that are asked for by
        name: some kinds are looked for under one objective alone, or by name.
      notes: by name, what a pattern found out about each of the values, once asked for.
      written: equations that the program may lack and that are looked up in it, by what they compute.
      outside: of a part of a program, per input: whom to ask what it is in the program, and its place there.
      steps: how many steps patterns have taken, and how many they may take.
    """

    def __init__(self, root: Body):
        self.root = root
        several_meshes = "reshard" in self.primitives and any(
            enters_mesh(equation) for body in root.walk() for equation in body.equations
        )
        super().__init__(several_meshes)
        self.nodes: list[Node] = []
        self.constants: dict[int, jax.Array] = {}
        self.users: dict[int, list[Node]] = defaultdict(list)
        self.returned: set[int] = set()
        self.elements: set[int] = set()
        self.inner: dict[int, int] = {}
        self.outer: dict[int, list[int]] = {}
        self.counters: dict[int, tuple[int, int]] = {}
        self.supposed: set[int] = set()
        self.furthers: set[int] = set()
        self.frames: dict[Body, tuple[int, ...]] = {}
        self.numbers: dict[Body, dict[Var, int]] = {}
        self.positions: dict[Body, dict[int, tuple[int, Var]]] = {}
        self._table: dict[Hashable, tuple[int, ...]] = {}
        self._occurrences: dict[int, list[tuple[Body, int]]] | None = None
        self._having: dict[int, list[Body]] | None = None
        self._meshes: dict[Hashable, int] = {}
        self._ruled: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Per frame of a custom rule's body, that around all rules, which whole numbers, without derivatives, have."""
        self._loops = Loops(self._read, self.held)
        self._slices: dict[tuple[int, int], int] = {}
        """Array of each slice, by the slice and the number of loops around it."""
        self.holders: dict[Body, tuple[Body, int]] = {}
        self.survivors: dict[frozenset[int], frozenset[int]] = {}
        self.readers: dict[int, int] = {}
        self.has_plain_bodies = True
        self.replaced: frozenset[int] = frozenset()
        self.respelt: set[int] = set()
        self.read: frozenset[int] = frozenset()
        self.reads: dict[int, tuple[int, ...]] = {}
        self.notes: dict[str, Sequence[Hashable]] = {}
        self.written: dict[Hashable, JaxprEqn] = {}
        self.objective = ""
        self.named: frozenset[str] = frozenset()
        self.outside: dict[int, tuple[Outside, int]] = {}
        self.returned.update(self._add(root, [self._new(v.aval) for v in root.invars], frame=()))
        for body in self.numbers:
            for position, children in body.children.items():
                self.holders.update((child.body, (body, position)) for child in children)
        self.steps = Steps(len(self.nodes))

    @functools.cached_property
    def primitives(self) -> frozenset[str]:
        """Names of the primitives of all equations, those of functions with rules of their own included."""
        found: set[Primitive] = set()
        todo = [(body.equations, False) for body in self.root.walk()]
        while todo:
            equations, in_rule = todo.pop()
            found.update([equation.primitive for equation in equations])
            for equation in equations:
                if not jaxprs.is_leaf(equation) and (in_rule or not may_hold_bodies(equation)):  # others' are walked
                    todo += [(jaxprs.open_jaxpr(body)[0].eqns, True) for _, _, body in jaxprs.bodies(equation)]
        return frozenset([primitive.name for primitive in found])

    def further(self, aval: ShapedArray) -> int:
        """Returns a number for a value that the program lacks, which one site gives and another reads, or which another
        form of a loop has."""
        number = self._new(aval)
        self.furthers.add(number)
        return number

    def further_result(
        self, equation: JaxprEqn, operands: list[int], frame: tuple[int, ...], number: int | None = None
    ) -> int:
        """Returns the number of the result of an equation that the program lacks, and that a loop's other form has.

        Args:
          equation: the equation, of one result.
          operands: the numbers of its operands, which may be :meth:`further` ones.
          frame: that of the loop's body.
          number: of the result, where the program computes it in another way.
        """
        if number is None:
            found = self.find(equation, operands, frame)
            if found is not None:
                return found[0]
            number = self.further(equation.outvars[0].aval)
            self.definitions[number] = Node(equation, tuple(operands), (number,), self.root)
        key = self.key_here(equation, operands, frame)
        if key is not None and not self.furthers.isdisjoint(operands):  # others would take it for one that is computed
            self._table[key] = (number,)
        return number

    def name(self, number: int) -> str | None:
        """Returns the name of the primitive that computes a value, or None."""
        node = self.definitions.get(number)
        return None if node is None else node.name

    def occurrences(self, number: int) -> list[tuple[Body, int]]:
        """Returns (body, position) of every equation, in every body, that computes this value itself."""
        if self._occurrences is None:
            self._occurrences = defaultdict(list)
            for body, numbers in self.numbers.items():
                for position, equation in enumerate(body.equations):
                    for variable in equation.outvars if computes(body, position) else ():
                        self._occurrences[numbers[variable]].append((body, position))
        return self._occurrences.get(number, [])

    def bodies_with(self, number: int) -> list[Body]:
        """Returns the bodies that have a variable for this value, from outside inwards."""
        if self._having is None:
            self._having = defaultdict(list)
            for body, positions in self.positions.items():
                for held in positions:
                    self._having[held].append(body)
        return self._having.get(number, [])

    # ------------------------------------------------------------------ construction

    def _new(self, aval: ShapedArray) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _literal(self, literal: Literal) -> int:
        key = literal_key(literal)
        if key not in self._table:
            number = self._new(literal.aval)
            self._table[key] = (number,)
            self.literals[number] = np.asarray(literal.val)
        return self._table[key][0]

    def _constant(self, variable: Var, value: jax.Array) -> int:
        key = ("constant", id(value))
        if key not in self._table:
            number = self._new(variable.aval)
            self._table[key] = (number,)
            self.constants[number] = value
        return self._table[key][0]

    def _add(self, body: Body, inputs: list[int], frame: tuple[int, ...]) -> list[int]:
        """Numbers a body whose inputs have the given numbers; returns the numbers of its results.

        ``frame`` separates what must not be merged: a custom rule governs the derivative of its body, and inside a
        shard_map an equation without operands (axis_index) has another meaning than outside.
        """
        self.frames[body] = frame
        numbers = self.numbers[body] = {}
        positions = self.positions[body] = {}

        constants = [self._constant(v, value) for v, value in zip(body.constvars, body.consts, strict=True)]
        for variable, number in zip((*body.constvars, *body.invars), (*constants, *inputs), strict=True):
            numbers[variable] = number
            positions.setdefault(number, (-1, variable))
        for position, equation in enumerate(body.equations):
            operands = [self._literal(a) if isinstance(a, Literal) else numbers[a] for a in equation.invars]
            held = body.children.get(position)
            if held is None:
                results = self._equation(body, equation, operands, frame)
            else:
                results = self._holding(body, equation, operands, held, frame)
            for variable, number in zip(equation.outvars, results, strict=True):
                numbers[variable] = number
                if number not in positions:
                    positions[number] = position, variable
        return [self._literal(a) if isinstance(a, Literal) else numbers[a] for a in body.outvars]

    def _equation(self, body: Body, equation: JaxprEqn, operands: list[int], frame: tuple[int, ...]) -> Sequence[int]:
        """Numbers an equation that holds no bodies; returns the numbers of its results."""
        same = self._same(equation, operands)
        if same is not None:
            return same
        key = None if compat.has_side_effects(equation) else self.key_here(equation, operands, frame)
        if key is not None and (known := self._known(key, equation)) is not None:
            return known
        if body.transposed and is_elementwise_call(equation):
            computed = self._computed(equation, operands, frame)
            if computed is not None:
                return computed
        first = len(self.avals)
        self.avals += [v.aval for v in equation.outvars]
        outputs = tuple(range(first, len(self.avals)))
        if key is not None:
            self._table.setdefault(key, outputs)
        self._node(equation, tuple(operands), outputs, body)
        return outputs

    def _computed(self, call: JaxprEqn, operands: list[int], frame: tuple[int, ...]) -> list[int] | None:
        """Returns the number of what a function with its own derivative computes, where a forward has that in the place
        of the call, as some versions of JAX do, and a checkpoint's recomputation has the call.

        One operation, such as the ``max(x, 0)`` of a ``relu``, stands for other functions too.
        """
        body = flatten(call.params["call_jaxpr"])
        if len(body.equations) < 2:
            return None
        results = [number for number in self._loops.follow(body, operands, frame) if number is not None]
        return results if len(results) == 1 else None

    def _same(self, equation: JaxprEqn, operands: list[int]) -> list[int] | None:
        """Returns the numbers of an equation's results if these are known values: its operands, a scalar that was made
        an array of one element (to leave a shard_map) and is made a scalar again, a literal, or a slice."""
        if equation.primitive.name not in _MAY_BE_KNOWN:
            return None
        if is_identity(equation):
            return operands
        if equation.primitive.name in ("squeeze", "reshape") and equation.outvars[0].aval.shape == ():
            node = self.definitions.get(operands[0])
            if node is not None and node.name in ("broadcast_in_dim", "reshape") and not self.shape(node.inputs[0]):
                return [node.inputs[0]]
        cast = self._folded(equation, operands)
        if cast is not None:
            return [cast]
        always = folded(self, equation, operands)
        if always is not None:
            aval = equation.outvars[0].aval
            return [self._literal(Literal(np.bool_(always), aval)) if isinstance(always, bool) else always]
        read = slice_read(self, equation, operands)
        return None if read is None else [self._element(read[0], equation.outvars[0].aval, self.counters[read[1]][1])]

    def _folded(self, equation: JaxprEqn, operands: Sequence[int]) -> int | None:
        """Returns the literal that the cast of a literal equals, since JAX omits the cast where it traces anew."""
        if equation.primitive.name != "convert_element_type" or operands[0] not in self.literals:
            return None
        aval, value = equation.outvars[0].aval, self.literals[operands[0]]
        to_complex = aval.dtype.kind == "c"
        if value.dtype.kind == "c" and not to_complex:
            return None
        with np.errstate(all="ignore"):  # what the dtype cannot hold, numpy warns of
            value = value.astype(self.dtype(operands[0]))  # a Python number has more digits
            cast = value.astype(aval.dtype)
            kept = cast == value if to_complex else cast.astype(value.dtype) == value
        not_a_number = value != value and cast != cast  # NaN stays NaN, but as a whole number
        return self._literal(Literal(cast, aval)) if kept or not_a_number or _is_rounded(cast, value) else None

    # ------------------------------------------------------------------ looking up

    def find(self, equation: JaxprEqn, operands: list[int], frame: tuple[int, ...]) -> list[int] | None:
        """Returns the numbers of an equation's results if the program computes them, else None."""
        same = self._same(equation, operands)
        if same is not None:
            return same
        key = self.key_here(equation, operands, frame)
        found = None if key is None else self._known(key, equation)
        return None if found is None or not self.supposed.isdisjoint(found) else list(found)

    def _known(self, key: Hashable, equation: JaxprEqn) -> tuple[int, ...] | None:
        """Returns the numbers under a key.  Functions with their own derivative must have equal derivatives."""
        found = self._table.get(key)
        if found is not None and is_elementwise_call(equation):
            return found if same_rule(self.definitions[found[0]].equation, equation) else None
        return found

    def _read(
        self, atom: Literal | JaxprEqn, operands: Sequence[int | None], frame: tuple[int, ...]
    ) -> list[int] | None:
        if not isinstance(atom, Literal):
            known = [number for number in operands if number is not None]
            if len(known) == len(operands):
                return None if compat.has_side_effects(atom) else self.find(atom, known, frame)
            selected = None if operands[0] is None else selects(self, atom, operands)
            return None if selected is None else [selected]
        number = self.find_literal(atom)
        return None if number is None else [number]

    def held(
        self, equation: JaxprEqn, children: Sequence[Child], operands: Sequence[int | None], frame: tuple[int, ...]
    ) -> Sequence[int | None] | None:
        """Returns the numbers of the results of an equation that holds bodies, as far as the program has them."""
        inner, name = children[0].body, equation.primitive.name
        if len(children) == 1 and _is_transparent(equation):
            return self._loops.follow(inner, operands, frame)
        if compat.has_side_effects(equation):
            return None
        keys: list[Hashable]
        if name == "scan":
            constants, carried = compat.scan_parts(equation)
            last = constants + carried
            slices = [self._slice(number, loops(inner)) for number in operands[last:]]
            given = [*operands[:constants], *(None for _ in range(carried)), *slices]
            for i in counters(self, equation, inner, operands[constants:last]):
                dtype, length = inner.invars[constants + i].aval.dtype, int(equation.params["length"])
                given[constants + i] = self._table.get(("counter", dtype, length, loops(inner)), (None,))[0]
            loop, pairs = self._loops.alike(equation, inner, frame, given, operands[constants:last])
            for here, there in pairs.items():
                given[constants + here] = loop.within[there] if loop is not None else None
            results = self._loops.follow(inner, given, frame)
            ends = [None if n is None else self._loops.end(n) for n in given[constants:last]]
            stacked: list[int | None] = []
            for number, variable in zip(results[carried:], equation.outvars[carried:], strict=True):
                if number is None:
                    stacked.append(None)
                    continue
                whole = self._whole(equation, operands, inner, number, frame)
                key = stacked_key(equation, inner, number, frame)
                if whole is None and key not in self._table:  # no loop stacks it, but its value in a step is known
                    whole = self._new(variable.aval)
                    self._table[key] = (whole,)
                    self._table["element", whole, loops(inner)] = (number,)
                    self.supposed.add(whole)
                stacked.append(self._table[key][0] if whole is None else whole)
            return [*ends, *stacked]
        if name == "cond" and operands[0] is not None:
            own = [n for n in operands if n is not None]
            branches = []
            for child in children:
                found = [(branch_key(equation, own, child, n), n) for n in operands[1:]]
                given = [self._table.get(key, (number,))[0] for key, number in found]
                branches.append(self._loops.follow(child.body, given, frame))
            keys = [chosen_key(equation, own, list(given)) for given in zip(*branches, strict=True)]
            return [self._table.get(key, (None,))[0] for key in keys]
        return None

    def find_literal(self, literal: Literal) -> int | None:
        """Returns the number of a literal, if the program has it."""
        found = self._table.get(literal_key(literal))
        return None if found is None else found[0]

    def _element(self, stacked: int, aval: ShapedArray, depth: int) -> int:
        """Returns the family of slices of a value along its leading axis, in loops with as many loops around them: a
        loop and one inside it that read the same array are at different slices of it."""
        key = ("element", stacked, depth)
        node = self.definitions.get(stacked)
        if node is not None and node.name == "iota" and not aval.shape and aval.dtype.kind in "iu":
            length = self.shape(stacked)[0]
            if counts_exactly(self.dtype(stacked), length):
                return self._counter(aval, length, depth)
        if key not in self._table:
            self._table[key] = (self._new(aval),)
        number = self._table[key][0]
        self.elements.add(number)
        self._slices.setdefault((number, depth), stacked)
        return number

    def _slice(self, stacked: int | None, depth: int) -> int | None:
        """Returns the same as :meth:`_element` if the program has it, else None."""
        node = None if stacked is None else self.definitions.get(stacked)
        if node is not None and stacked is not None and node.name == "iota" and len(self.shape(stacked)) == 1:
            length, dtype = self.shape(stacked)[0], self.dtype(stacked)
            if counts_exactly(dtype, length) and ("counter", dtype, length, depth) in self._table:
                return self._table["counter", dtype, length, depth][0]
        return self._table.get(("element", stacked, depth), (None,))[0]

    def _counter(self, aval: ShapedArray, length: int, depth: int) -> int:
        """Returns the number of the step in a loop of so many steps, with as many loops around it."""
        key = ("counter", aval.dtype, length, depth)
        if key not in self._table:
            self._table[key] = (self._new(aval),)
            self.counters[self._table[key][0]] = length, depth
        return self._table[key][0]

    def _node(
        self,
        equation: JaxprEqn,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        body: Body,
        shared: Container[int] = (),
    ) -> None:
        node = Node(equation, inputs, outputs, body)
        self.nodes.append(node)
        for number in {n for i, n in enumerate(inputs) if i not in shared} if shared else {*inputs}:
            self.users[number].append(node)
        for number in outputs:
            if number not in inputs:  # a loop may stack all slices of an array that it reads
                self.definitions.setdefault(number, node)

    def needs(self, node: Node) -> set[int]:
        """Returns the values that a computation always needs: its operands, and all results of a custom_jvp function's
        body."""
        if node.name != "custom_jvp_call":
            return set(node.inputs)
        return {*node.inputs, *(self.inner[n] for n in node.outputs if n in self.inner)}

    def kept(self, node: Node, results: Sequence[int], read: Container[int] = ()) -> Sequence[int]:
        """Those of a computation's results that it computes even if only the others are read; and those ``read``."""
        if node.name not in CUSTOM_RULES or node.name == "custom_jvp_call":
            return results
        return [n for n in results if n in read]

    def results_needed(self, node: Node, read: Iterable[int]) -> list[int]:
        """Returns the results of a custom_vjp function's body that a call needs if those of its results are read."""
        if node.name not in CUSTOM_RULES or node.name == "custom_jvp_call":
            return []
        return [self.inner[n] for n in read if n in self.inner]

    def key_here(
        self, equation: JaxprEqn, operands: Sequence[int], frame: tuple[int, ...]
    ) -> tuple[Hashable, ...] | None:
        if operands and equation.primitive.name in _PLACES:
            if (slice_of := placed(self, equation, operands)) is not None:
                aval = equation.outvars[0].aval
                return "placed", frame, slice_of, tuple(aval.shape), aval.dtype
        if frame in self._ruled and is_whole(equation):
            frame = self._ruled[frame]
        return super().key_here(equation, operands, frame)

    @staticmethod
    def keeps_operands(name: str) -> bool:
        """Returns whether equations of a primitive that compute the same read the same values, and no other equation
        computes that."""
        return name not in MERGED and name not in _PLACES and name not in _MAY_BE_KNOWN

    def suppose(self, equation: JaxprEqn, operands: list[int], frame: tuple[int, ...]) -> list[int] | None:
        """Returns a number for a transpose that the program lacks, since the program may have what follows it."""
        key = self.key_here(equation, operands, frame)
        if equation.primitive.name != "transpose" or key is None:
            return None
        if key in self._table:
            return list(self._table[key])
        number = self._new(equation.outvars[0].aval)
        self._table[key] = (number,)
        self.definitions[number] = Node(equation, tuple(operands), (number,), self.root)
        self.supposed.add(number)
        return [number]

    def _holding(
        self, body: Body, equation: JaxprEqn, operands: list[int], children: Sequence[Child], frame: tuple[int, ...]
    ) -> list[int]:
        """Numbers an equation that holds bodies.  A value that enters a body unchanged keeps its number, and so does
        one that a body gives and another body of its kind is given."""
        name = equation.primitive.name
        if len(children) == 1 and _is_transparent(equation):
            return self._add(children[0].body, operands, frame)
        self.has_plain_bodies &= name in CUSTOM_RULES and len(children) == 1
        inside = self._inside(equation, frame)
        shared: set[int] = set()  # positions of operands that the bodies read under their own number
        entering: list[list[int]] = []
        leaving: list[list[int]] = []
        for child in children:
            given = self._entering(equation, operands, child, inside, shared)
            numbers = [self._new(v.aval) if n is None else n for v, n in zip(child.body.invars, given, strict=True)]
            leaving.append(self._add(child.body, numbers, inside))
            self.returned.update(leaving[-1])
            entering.append(numbers)
        if name == "scan":
            outputs = self._after_steps(equation, operands, children[0].body, entering[0], leaving[0], inside)
        else:
            outputs = self._leaving(equation, operands, children, leaving, inside)
        if name in CUSTOM_RULES and len(children) == 1:
            self.inner.update(zip(outputs, leaving[0], strict=True))
            for output, result in zip(outputs, leaving[0], strict=True):
                self.outer.setdefault(result, []).append(output)
        self._node(equation, tuple(operands), outputs, body, shared)
        return list(outputs)

    def _inside(self, equation: JaxprEqn, frame: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the frame of the bodies that an equation holds."""
        name = equation.primitive.name
        if name in CUSTOM_RULES:
            inside = (*frame, id(equation))
            self._ruled[inside] = self._ruled.get(frame, frame)
            return inside
        if name == "shard_map":
            mesh = equation.params["mesh"], frozenset(equation.params["newly_manual_axes"])
            return (*frame, self._meshes.setdefault(mesh, len(self._meshes)))
        return frame

    def _entering(
        self, equation: JaxprEqn, operands: list[int], child: Child, inside: tuple[int, ...], shared: set[int]
    ) -> list[int | None]:
        """Returns the numbers of a body's inputs, None for a new one; records the positions of ``shared`` operands."""
        name, inner = equation.primitive.name, child.body
        given: list[int | None] = [None] * len(inner.invars)
        start = 0
        if name == "scan":
            constants, carried = compat.scan_parts(equation)
            given[:constants] = operands[:constants]
            for i in range(constants + carried, len(operands)):
                given[i] = self._element(operands[i], inner.invars[i].aval, loops(inner))
            starts = operands[constants : constants + carried]
            for i in counters(self, equation, inner, starts):
                aval, length = inner.invars[constants + i].aval, int(equation.params["length"])
                given[constants + i] = self._counter(aval, length, loops(inner))
            loop, pairs = self._loops.alike(equation, inner, inside, given, starts)
            if loop is not None:
                given[constants : constants + carried] = [
                    loop.within[pairs[i]] if i in pairs else given[constants + i] for i in range(carried)
                ]
        elif name == "while":
            condition, constants = equation.params["cond_nconsts"], equation.params["body_nconsts"]
            start, count = (0, condition) if child.parameter == "cond_jaxpr" else (condition, constants)
            given[:count] = operands[start : start + count]
            shared.update(range(start, start + count))
        elif name == "cond":
            start = 1
            keys = [branch_key(equation, operands, child, number) for number in operands[1:]]
            given = [self._table.get(key, (number,))[0] for key, number in zip(keys, operands[1:], strict=True)]
        elif name == "shard_map":
            for i, (number, spec) in enumerate(zip(operands, equation.params["in_specs"], strict=True)):
                given[i] = self._part(number, spec, inner.invars[i].aval, inside)
        elif name in CUSTOM_RULES and len(inner.invars) == len(operands):
            return list(operands)  # the call reads them too: its rule does
        if name != "while":
            shared.update(start + i for i, number in enumerate(given) if number == operands[start + i])
        return given

    def _leaving(
        self,
        equation: JaxprEqn,
        operands: list[int],
        children: Sequence[Child],
        results: list[list[int]],
        inside: tuple[int, ...],
    ) -> tuple[int, ...]:
        """Returns the numbers of the results of an equation whose bodies give ``results``.

        Equal results get one number.  For each, records the number under which another body of the same kind finds it.
        """
        name = equation.primitive.name
        if name not in ("cond", "shard_map"):
            return tuple(self._new(v.aval) for v in equation.outvars)
        outputs: list[int] = []
        for i, variable in enumerate(equation.outvars):
            given = [r[i] for r in results]
            if name == "cond":
                whole: Hashable = chosen_key(equation, operands, given)
            else:
                spec = spec_key(equation.params["out_specs"][i])
                exact = equation.params["check_vma"] or spread_over_all(equation, i)
                whole = ("spread", given[0], inside, spec, None if exact else (id(equation), i))
            if whole not in self._table:
                self._table[whole] = (self._new(variable.aval),)
            outputs.append(self._table[whole][0])
            if name == "cond":
                for child, number in zip(children, given, strict=True):
                    self._table[branch_key(equation, operands, child, outputs[i])] = (number,)
            elif exact:
                self._table["part", outputs[i], inside, spec] = (given[0],)
        return tuple(outputs)

    def _after_steps(
        self,
        equation: JaxprEqn,
        operands: list[int],
        body: Body,
        inputs: list[int],
        results: list[int],
        inside: tuple[int, ...],
    ) -> tuple[int, ...]:
        """Does the same for a scan: what it carries to the end, and what it stacks."""
        constants, carried = compat.scan_parts(equation)
        within, depth = inputs[constants : constants + carried], loops(body)
        outputs: list[int] = []
        for i, variable in enumerate(equation.outvars):
            number = results[i]
            if i < carried:
                known = self._loops.end(within[i])
                summed = None
                if known is None:
                    summed = summed_slices(self, operands[constants + i], within[i], number)
                if summed is None or self.counters[summed[0]] != (equation.params["length"], depth):
                    outputs.append(self._new(variable.aval) if known is None else known)
                    continue
                _, number, axis = summed
                key = stacked_key(equation, body, number, inside)
                if axis:  # along another axis than that along which a loop stacks
                    key = "stacked along", axis, key
            else:
                whole = self._whole(equation, operands, body, number, inside)
                if whole is not None:
                    outputs.append(whole)
                    continue
                # What a loop stacks is identified by its value in a step, the length, and how many loops are around it.
                key = stacked_key(equation, body, number, inside)
                axis = 0
            if key not in self._table:
                self._table[key] = (self._new(variable.aval),)
            outputs.append(self._table[key][0])
            self.supposed.discard(outputs[i])
            if not axis:
                self._table["element", outputs[i], depth] = (number,)
        starts = operands[constants : constants + carried]
        read = [*inputs[:constants], *inputs[constants + carried :]]
        self._loops.add(equation, body, inside, read, Loop(starts, within, results[:carried], outputs[:carried]))
        return tuple(outputs)

    def _whole(
        self,
        equation: JaxprEqn,
        operands: Sequence[int | None],
        body: Body,
        number: int,
        frame: tuple[int, ...],
    ) -> int | None:
        """Returns what a scan stacks if it is all slices of an array that it reads, or the numbers of all steps."""
        length = equation.params["length"]
        source = self._slices.get((number, loops(body)))
        if source is not None and source in operands:
            return source
        made = repeated(self, number, length) if number not in self.counters else None
        counter = number if made is None else made[0]
        if self.counters.get(counter) != (length, loops(body)):
            return None
        (steps,) = self._equation(body, counting(self, self.dtype(counter), length), [], frame)
        return steps if made is None else self._equation(body, made[1], [steps], frame)[0]

    def _part(self, number: int, spec: PartitionSpec, aval: ShapedArray, inside: tuple[int, ...]) -> int:
        """Returns what each device of a mesh has of a value: the whole, if the value is the same on all devices."""
        key = ("part", number, inside, spec_key(spec))
        if key not in self._table:
            self._table[key] = (number if spec_key(spec) == spec_key(()) else self._new(aval),)
        return self._table[key][0]


def _is_rounded(cast: np.ndarray, value: np.ndarray) -> bool:
    """Returns whether a number was rounded to a float of half of its bits as every device rounds it: once, and neither
    to an infinity nor to a number so small that some flush it to zero."""
    if cast.itemsize < 2 or 2 * cast.itemsize != value.itemsize:
        return False
    if not (jnp.issubdtype(cast.dtype, jnp.floating) and jnp.issubdtype(value.dtype, jnp.floating)):
        return False
    least = float(jnp.finfo(cast.dtype).smallest_normal)
    return least <= abs(float(cast)) < math.inf and least <= abs(float(value))


def _is_transparent(equation: JaxprEqn) -> bool:
    """Returns whether an equation's results are those of the one body that it holds."""
    return equation.primitive.name in _TRANSPARENT and not compat.has_side_effects(equation)


def computes(body: Body, position: int) -> bool:
    """Returns whether an equation's results are its own, and not those of a body that it holds, nor its operand with
    another type."""
    name = body.equations[position].primitive.name
    return name not in jaxprs.VARYING and (position not in body.children or name in CUSTOM_RULES)


def is_identity(equation: JaxprEqn) -> bool:
    """Returns whether the results of an equation are its operands."""
    name = equation.primitive.name
    if name in _IDENTITY:
        return True
    if name == "convert_element_type":
        return bool(equation.invars[0].aval.dtype == equation.outvars[0].aval.dtype)
    if name == "reduce_precision":
        own = jnp.finfo(equation.invars[0].aval.dtype)
        return (equation.params["exponent_bits"], equation.params["mantissa_bits"]) == (own.nexp, own.nmant)
    return False
