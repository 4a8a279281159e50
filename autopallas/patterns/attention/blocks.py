"""Reads one softmax over several blocks of keys: scores side by side in one array, blocks that share maximum and sum,
or blocks with a maximum and a sum each that are joined afterwards.

Each block's product with its values is an attention whose normaliser sums over the other blocks too. Where the blocks
agree on that, they are one attention over concatenated keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.compat import Dtype, Primitive
from autopallas.graph import Body, Graph, Node, Ref
from autopallas.graph.labels import Atom, Dimension
from autopallas.kernels.attention.site import AttentionSite
from autopallas.kernels.attention.site_parts import Joined, KeyBlock
from autopallas.numerics.casts import keeps_range, rounds
from autopallas.patterns.advice import FLOATS, NORMALISE
from autopallas.patterns.attention.draft import AttentionDraft
from autopallas.patterns.attention.joint_drafts import SeveralDraft
from autopallas.patterns.attention.site import Labels
from autopallas.patterns.carry import Carrier
from autopallas.patterns.expressions import Apply, Expression, Scope, precision_of
from autopallas.patterns.forward import LAYOUT, Forward
from autopallas.patterns.match import Mismatch
from autopallas.patterns.program_builder import InstructionParams, ProgramBuilder, Register
from autopallas.patterns.softmax import Softmax
from autopallas.patterns.softmax_terms import KeysOfEachQuery, SeveralBlocks, Term
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Index, Input, Instruction, Side
from autopallas.sites.index_notation import Operand, Positions

__all__ = ["Block", "BlockDraft", "blocks", "sum_with"]

_MOST = 16
"""Most blocks of one softmax."""
_FURTHEST = 64
"""Most equations between a product with values and the sum of all such products."""


@dataclass(frozen=True, slots=True)
class Block:
    """A product of probabilities and values, or the part of one that belongs to a block of keys.

    Attributes:
      node: the contraction.
      side: which of its operands the probabilities are.
      contraction: both operands and the dimensions that are contracted.
      outside: what multiplies (1) or divides (-1) it afterwards.
    """

    node: Node
    side: int
    contraction: tuple[Ref, Ref, list[Dimension]]
    outside: tuple[tuple[int, Ref], ...]


def sum_with(graph: Graph, reach: Sequence[tuple[bool, bool]], value: int) -> int:
    """Returns the last sum of products of probabilities and values that includes a product; by default the product
    itself."""
    found = value
    for _ in range(_FURTHEST):
        users = graph.users[value]
        if not users:
            break
        user = users[0]
        if user.name in ("add", "add_any"):
            others = [number for number in user.inputs if number != value and number not in graph.literals]
            if not all(_of_products(graph, reach, number) for number in others):
                break
            value = user.outputs[0]
            found = value if others else found
        elif user.name in LAYOUT or user.name in ("convert_element_type", "div", "mul"):
            value = user.outputs[0]
        else:
            break
    return found


def _of_products(graph: Graph, reach: Sequence[tuple[bool, bool]], value: int) -> bool:
    """Returns whether a value is a product of probabilities and values, a multiple of one, or the sum of one and
    something else."""
    todo = [value]
    for _ in range(_FURTHEST):
        node = graph.definitions.get(todo.pop()) if todo else None
        if node is None:
            if not todo:
                return False
        elif node.name == "dot_general":
            if any(reach[number][1] for number in node.inputs):
                return True
        elif node.name == "mul":  # factors of rows stand on either side
            todo += node.inputs
        elif node.name in LAYOUT or node.name in ("convert_element_type", "div", "add", "add_any"):
            todo.append(node.inputs[0])
    return False


def blocks(scope: Scope, reach: Sequence[tuple[bool, bool]], top: Ref) -> list[Block]:
    """Returns the products whose sum a value is.

    Raises:
      Mismatch: the value is something else.
    """
    space, graph = scope.space, scope.graph
    found: list[Block] = []

    def add(ref: Ref, outside: tuple[tuple[int, Ref], ...], depth: int) -> None:
        ref = space.canonical(ref)
        if depth > _FURTHEST or len(found) > _MOST:
            raise SeveralBlocks
        contraction = space.contraction(ref)
        if contraction is not None and graph.name(ref.value) == "dot_general":
            side = 0 if reach[contraction[0].value][1] else 1
            node = graph.definitions[ref.value]
            found.extend(Block(node, side, part, outside) for part in _parts(scope, ref, contraction, side))
            return
        name, operands = scope.name(ref), space.operands(ref)
        if operands is None:
            raise SeveralBlocks
        if name in ("add", "add_any"):
            for operand in operands:
                if scope.number(operand) != 0:  # Python's sum begins with 0
                    add(operand, outside, depth + 1)
        elif name == "convert_element_type" and rounds(graph.dtype(operands[0].value), graph.dtype(ref.value)):
            add(operands[0], outside, depth + 1)
        elif name == "div":
            add(operands[0], (*outside, (-1, operands[1])), depth + 1)
        elif name == "mul":
            i = next((i for i, operand in enumerate(operands) if _of_products(graph, reach, operand.value)), 0)
            add(operands[i], (*outside, (1, operands[1 - i])), depth + 1)
        else:
            raise SeveralBlocks

    add(top, (), 0)
    return found


def _parts(
    scope: Scope, ref: Ref, contraction: tuple[Ref, Ref, list[Dimension]], side: int
) -> Iterator[tuple[Ref, Ref, list[Dimension]]]:
    """Yields a contraction, or one contraction for each piece that its probabilities are concatenated from."""
    space = scope.space
    dimensions = contraction[2]
    if len(dimensions) == 1 and len(key := space.resolve(dimensions[0][1])) == 1:
        weights = space.canonical(contraction[0] if side == 0 else contraction[1])
        axes = [i for i, (_, atoms) in enumerate(weights.view) if space.resolve(atoms) == key]
        first, end, inside = 0, 0, []
        if axes:
            first = weights.view[axes[0]][0]
            end = first + space.extent(key)
            start = 0
            for size in Softmax(scope, (), 0).segments(weights.value, axes[0]) or ():
                if first <= start and start + size <= end:
                    inside.append((start - first, size))
                start += size
        if 1 < len(inside) <= _MOST and sum(size for _, size in inside) == end - first:
            labels = space.inside(Ref(ref.value, (*ref.view, dimensions[0])), [size for _, size in inside])
            for (start, _), (_, atoms) in zip(inside, labels, strict=True):
                yield space.dot(ref, [(start, atoms)])
            return
    yield contraction


class BlockDraft(SeveralDraft):
    """Treats attentions over blocks of keys, each with a normaliser that sums over the others, as one."""

    @property
    def assumptions(self) -> tuple[str, ...]:
        if self._shifted():
            for part in self.parts:
                part.softmax.unshifted = False
        return tuple(
            dict.fromkeys(
                said
                for part in self.parts
                for said in part.softmax.assumed(part.normaliser.argument, part.normaliser.weights)
            )
        )

    # ------------------------------------------------------------------ the proof

    def _agree(self) -> tuple[tuple[Term, ...], ...]:
        """Returns the sinks of all blocks, after checking that each one's normaliser sums over all of them.

        Raises:
          Mismatch: one does not.
        """
        first = self.parts[0]
        precision = precision_of(self.graph, self.graph.definitions[first.score.value])
        own = [_named(part, part.found.argument) for part in self.parts]
        sinks: list[tuple[tuple[Term, ...], ...]] = []
        for i, part in enumerate(self.parts):
            same = (
                _queries(part) == _queries(first)
                and self.graph.dtype(part.score.value) == self.graph.dtype(first.score.value)
                and self.graph.dtype(part.key.value) == self.graph.dtype(first.key.value)
                and self.graph.dtype(part.value.value) == self.graph.dtype(first.value.value)
                and precision_of(self.graph, self.graph.definitions[part.score.value]) == precision
                and precision_of(self.graph, part.second) == precision_of(self.graph, first.second)
                and part.weights_dtype == first.weights_dtype
                and part.row is None
                and _keys(part, part.rest) == _keys(first, first.rest)
            )
            others, rest, todo = [], [], list(part.normaliser.extras)
            while todo:
                extra = todo.pop(0)
                if len(extra) == 1 and extra[0].kind == "logsumexp" and extra[0].coefficient == 1:
                    inner = extra[0].inner
                    if inner.weights:
                        raise SeveralBlocks
                    others.append(_named(part, inner.argument))
                    todo += inner.extras
                else:
                    rest.append(extra)
            wanted = own[:i] + own[i + 1 :]
            if not same or sorted(map(repr, others)) != sorted(map(repr, wanted)):
                raise SeveralBlocks
            if any(term.kind == "logsumexp" for extra in rest for term in extra):
                raise SeveralBlocks
            sinks.append(tuple(rest))
        named = [[_keys(part, extra) for extra in rest] for part, rest in zip(self.parts, sinks, strict=True)]
        if any(sorted(map(repr, x)) != sorted(map(repr, named[0])) for x in named):
            raise SeveralBlocks
        if len({repr(name) for name in own}) < len(own):
            raise SeveralBlocks
        return sinks[0]

    def _shifted(self) -> bool:
        """Returns whether each block's exponentials are relative to a number as large as the maximum over all
        blocks."""
        own = {repr(_named(part, part.found.argument)) for part in self.parts}
        for part in self.parts:
            shifts = [t.value for t in part.found.rows if t.kind == "value" and t.coefficient == -1]
            if not any(own <= self._bounded(shift) for shift in shifts):
                return False
        return True

    def _bounded(self, ref: Ref, depth: int = 0) -> set[str]:
        """Returns the names of the blocks of scores whose common maximum a row value is, up to rounding."""
        space, part = self.space, self.parts[0]
        ref = space.canonical(ref)
        name, operands = part.scope.name(ref), space.operands(ref) or []
        if depth > _FURTHEST:
            return set()
        if name == "reduce_max":
            operand, _ = space.reduced(ref)
            (axis, *others) = self.graph.definitions[ref.value].params["axes"]
            sizes = None if others else part.softmax.segments(operand.value, axis)
            if not sizes:
                return {repr(_named(part, operand))}
            found: set[str] = set()
            for i, size in enumerate(sizes):
                own = (sum(sizes[:i]), space.fresh(size))
                piece = Ref(operand.value, tuple(own if d == axis else x for d, x in enumerate(operand.view)))
                found |= self._bounded(piece, depth + 1) if size == 1 else {repr(_named(part, piece))}
            return found
        if name == "select_n" and len(operands) == 3 and part.scope.name(operands[0]) == "is_finite":
            return self._bounded(operands[2], depth + 1)
        if name == "convert_element_type":
            source, target = part.scope.dtype(operands[0]), part.scope.dtype(ref)
            if not (rounds(source, target) and keeps_range(source, target)):
                return set()
        elif name not in ("stop_gradient", "max"):
            return set()
        bounds = [self._bounded(operand, depth + 1) for operand in operands if part.scope.number(operand) != -math.inf]
        return set().union(*bounds) if all(bounds) else set()  # something else may be greater than all scores

    def assemble(
        self,
        pinned_roles: Mapping[int, int | None] = MappingProxyType({}),
        pinned_sides: frozenset[int] = frozenset(),
        further: tuple[Body, ...] = (),
        across: bool = False,
    ) -> tuple[AttentionSite, Carrier]:
        graph, space, first = self.graph, self.space, self.parts[0]
        before = -1
        while space.refinements != before:
            before = space.refinements
            roles = [part._roles() for part in self.parts]
        sinks = self._agree()
        if any(role != roles[0] for role in roles):
            raise KeysOfEachQuery
        query_axis, value_axis = roles[0]
        heads = [space.resolve(part.head_axis) for part in self.parts]
        uses = [first.query, *(ref for part in self.parts for ref in (part.key, part.value))]
        operands: list[int] = []
        carriers = [
            Carrier(
                part.scope,
                (self.body, *further),
                (query_axis, space.resolve(part.key_axis)),
                part.score,
                pinned_sides,
                across,
                self.homes,
                len(uses),
            )
            for part in self.parts
        ]
        for carrier in carriers:
            carrier.operands = operands
        query, *read = self._read(carriers[0], uses, pinned_roles)
        for carrier in carriers:
            carrier.roles = len(operands)
        programs = self._score_programs(carriers)
        keys = [space.resolve(part.key_axis) for part in self.parts]
        row_sinks = tuple(first._terms(carriers[0], extra) for extra in sinks)
        factors = first._terms(carriers[0], first.rest)
        if any(term.kind == "log" and term.coefficient != int(term.coefficient) for term in factors):
            raise Mismatch("a factor of the result enters with a fractional power", advice=NORMALISE)
        lengths = [space.extent(axis) for axis in keys]
        if sum(space.extent(axis) for axis in heads) != len(heads) * space.extent(heads[0]):
            raise SeveralBlocks
        score, sides = _combined(graph, operands, programs, [c.sides for c in carriers], keys, lengths)
        terms = (*(term for extra in row_sinks for term in extra), *factors)
        sources = [*(side for carrier in carriers for side in carrier.sides), *(term.source for term in terms)]
        value_axis = first._of_values_alone(value_axis, sources)
        labels = Labels(space, {a: b for other in heads for a, b in zip(other, heads[0], strict=True)})

        def written(side: Operand | Positions | Joined) -> Operand | Positions | Joined:
            if not isinstance(side, Joined):
                return labels.source(side)
            return Joined(tuple(None if part is None else labels.source(part) for part in side.parts))

        site = AttentionSite(
            sizes=(),
            query=labels.operand(query),
            key=labels.operand(read[0]),
            value=labels.operand(read[1]),
            query_labels=labels.atoms(query_axis),
            key_labels=labels.atoms(keys[0]),
            head_labels=labels.atoms(heads[0]),
            value_labels=labels.atoms(value_axis),
            result=labels.view(space.view(self.top.view)),
            rows=labels.apart(self.top.view, value_axis),
            types=(),
            score_dtype=graph.dtype(first.score.value),
            result_dtype=graph.dtype(self.root),
            score=score,
            blocks=tuple(
                KeyBlock(labels.operand(k), labels.operand(v), labels.atoms(axis))
                for k, v, axis in zip(read[2::2], read[3::2], keys[1:], strict=True)
            ),
            sides=tuple(map(written, sides)),
            sinks=tuple(tuple(labels.term(t) for t in terms) for terms in row_sinks),
            factors=tuple(labels.term(t) for t in factors),
            score_precision=precision_of(graph, graph.definitions[first.score.value]),
            value_precision=precision_of(graph, first.second),
            weights_dtype=first.weights_dtype,
            assume_finite=self.assume_finite,
        )
        return replace(site, sizes=labels.sizes()), carriers[0]

    def _score_programs(self, carriers: Sequence[Carrier]) -> list[ElementwiseProgram]:
        """Builds the score program of each block, all of one floating-point dtype."""
        programs = []
        for part, carrier in zip(self.parts, carriers, strict=True):
            argument, outer, inner = part._masks()
            if outer or inner:
                raise SeveralBlocks
            programs.append(ProgramBuilder(carrier).build(argument))
        dtype = programs[0].dtype
        if dtype.kind == "c" or not jnp.issubdtype(dtype, jnp.floating) or any(p.dtype != dtype for p in programs):
            raise Mismatch(f"the argument of the exponential has dtype {dtype}", advice=FLOATS)
        return programs

    def _read(self, carrier: Carrier, uses: Sequence[Ref], pinned_roles: Mapping[int, int | None]) -> list[Operand]:
        """Reads queries, keys and values as operands, and notes their places."""
        names = ("queries", *("keys", "values") * len(self.parts))
        self._places = []
        read: list[Operand] = []
        for role, (ref, name) in enumerate(zip(uses, names, strict=True)):
            pinned = pinned_roles.get(role)
            found = carrier.role(ref, pinned, name)
            earlier = [i for i in range(role) if pinned is not None and pinned_roles.get(i) == pinned]
            if earlier:  # its cotangent is that of the operand that all of them read
                carrier.operands.pop()
                found = Operand(self._places[earlier[0]], found.view)
            self._places.append(found.position)
            read.append(found)
        return read

    # ------------------------------------------------------------------ the backward

    def role_uses(self, forward: Forward) -> list[list[int]]:
        uses = self._uses(forward)
        assert uses is not None
        query = list(dict.fromkeys(uses[::3]))
        others = [(uses[i + 1], uses[i + 2]) for i in range(0, len(uses), 3)]
        return [query, *([use] for pair in others for use in pair)]


def _queries(part: AttentionDraft) -> Hashable:
    """Returns a key to compare the queries of blocks by, whatever the labels of the contracted axis are called."""
    space = part.space
    heads = {a: ("head", i, space.sizes[a]) for i, a in enumerate(space.resolve(part.head_axis))}
    ref = space.canonical(part.query)
    return ref.value, tuple((o, tuple(heads.get(a, a) for a in space.resolve(atoms))) for o, atoms in ref.view)


def _keys(part: AttentionDraft, terms: Sequence[Term]) -> list[tuple[float, str, str]]:
    """Returns a key to compare terms by."""
    return sorted(((t.coefficient, t.kind, repr(part.softmax.term_key(t))) for t in terms), key=repr)


def _named(part: AttentionDraft, expression: Expression) -> Hashable:
    """Returns a key that is equal for expressions that compute the same, whatever labels the result lacks are
    called."""
    scope, space = part.scope, part.space
    rows = {a for _, atoms in part.top.view for a in space.resolve(atoms)}
    names: dict[Atom, tuple[str, int, int]] = {}

    def named(expression: Expression, depth: int) -> Hashable:
        if depth > _FURTHEST:
            raise SeveralBlocks
        match expression:
            case Ref():
                ref = space.canonical(expression)
                view = []
                for offset, atoms in ref.view:
                    own = [
                        a if a in rows else names.setdefault(a, ("key", len(names), space.sizes[a]))
                        for a in space.resolve(atoms)
                    ]
                    view.append((offset, tuple(own)))
                return ref.value, tuple(view)
            case Apply():
                params = repr(sorted(expression.params.items(), key=lambda item: item[0]))
                arguments = [named(argument, depth + 1) for argument in expression.arguments]
                return expression.primitive.name, params, str(expression.dtype), tuple(arguments)
            case Constant():
                return "constant", repr(expression.value), str(expression.dtype)
        raise SeveralBlocks

    return scope.score is not None and named(expression, 0)


# ---------------------------------------------------------------------- one program for all blocks


def _combined(
    graph: Graph,
    operands: Sequence[int],
    programs: Sequence[ElementwiseProgram],
    sides: Sequence[Sequence[Operand | Positions]],
    keys: Sequence[Sequence[Atom]],
    lengths: Sequence[int],
) -> tuple[ElementwiseProgram, list[Operand | Positions | Joined]]:
    """Builds one program over positions in the concatenated keys, and its side inputs."""
    count = len(programs)
    joined: list[list[Operand | Positions | None]] = []
    plain: list[Operand | Positions] = []
    places: list[list[tuple[bool, int]]] = []

    def kind(side: Operand | Positions, axis: Sequence[Atom]) -> Hashable:
        dtype = side.dtype if isinstance(side, Positions) else graph.dtype(operands[side.position])
        return dtype, frozenset(side.labels) - set(axis)

    for i, (own, axis) in enumerate(zip(sides, keys, strict=True)):
        found = []
        for side in own:
            if not set(side.labels) & set(axis):
                if side not in plain:
                    plain.append(side)
                found.append((False, plain.index(side)))
                continue
            fitting = [
                j
                for j, slots in enumerate(joined)
                if slots[i] is None
                and all(kind(s, keys[k]) == kind(side, axis) for k, s in enumerate(slots) if s is not None)
            ]
            if not fitting:
                joined.append([None] * count)
                fitting = [len(joined) - 1]
            joined[fitting[0]][i] = side
            found.append((True, fitting[0]))
        places.append(found)
    numbers = [[n if is_joined else len(joined) + n for is_joined, n in found] for found in places]
    start, moved = 0, []
    for program, own_numbers, length in zip(programs, numbers, lengths, strict=True):
        moved.append(replace(program, inputs=tuple(_moved(x, own_numbers, start) for x in program.inputs)))
        start += length
    every: list[Operand | Positions | Joined] = [*(Joined(tuple(slots)) for slots in joined), *plain]
    return _selected(moved, lengths), every


def _moved(given: Input, numbers: Sequence[int], start: int) -> Input:
    """Turns an input of a block's program into an input of the program of all blocks."""
    if isinstance(given, Side):
        return Side(numbers[given.position], given.dtype)
    if isinstance(given, Index) and given.axis == "key" and start:
        if given.stride != 1 or given.extent != 2**31 - 1 or given.dtype.kind != "i":
            raise SeveralBlocks
        return replace(given, offset=given.offset - start)
    return given


def _selected(programs: Sequence[ElementwiseProgram], lengths: Sequence[int]) -> ElementwiseProgram:
    """Selects, for each key, the program of the block that it is in."""
    if all(program == programs[0] for program in programs):
        return programs[0]
    inputs: dict[Input, int] = {}
    lines: list[tuple[Primitive, InstructionParams, tuple[Register, ...], Dtype]] = []

    def load(given: Input) -> Register:
        return "input", inputs.setdefault(given, len(inputs))

    def emit(
        primitive: Primitive, params: InstructionParams, arguments: tuple[Register, ...], dtype: Dtype
    ) -> Register:
        lines.append((primitive, params, arguments, dtype))
        return "line", len(lines) - 1

    results = [
        program.run(load, lambda line, arguments: emit(line.primitive, line.params, tuple(arguments), line.dtype))
        for program in programs
    ]
    whole = np.dtype(np.int32)
    chosen, end = results[-1], sum(lengths) - lengths[-1]
    for result, length in zip(results[-2::-1], lengths[-2::-1], strict=True):
        before = emit(lax.lt_p, (), (load(Index("key", whole)), load(Constant(end, whole))), np.dtype(bool))
        chosen = emit(lax.select_n_p, (), (before, chosen, result), programs[0].dtype)
        end -= length

    def number(register: Register) -> int:
        where, position = register
        return int(position if where == "input" else len(inputs) + position)

    instructions = tuple(Instruction(p, params, tuple(map(number, a)), d) for p, params, a, d in lines)
    return ElementwiseProgram(tuple(inputs), instructions, number(chosen))
