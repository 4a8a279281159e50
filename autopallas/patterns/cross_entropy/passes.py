"""Turns what was read around some logits into descriptions of passes over them: operands, programs, results."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import groupby

import jax.numpy as jnp
from jax import lax

from autopallas.compat import Dtype
from autopallas.graph import Body, Ref
from autopallas.graph.extract import jaxpr_of, nodes_between
from autopallas.graph.labels import Atom, View
from autopallas.kernels.cross_entropy.site import CrossEntropySite
from autopallas.kernels.cross_entropy.site_parts import HeadSource, Result
from autopallas.kernels.cross_entropy.spec import Product, Statistic
from autopallas.numerics.casts import kind_of
from autopallas.patterns.advice import (
    LOGITS_APART,
    LOGITS_ONCE,
    LOSS_PER_ROW,
    SAME_HEADS,
    SIDE_DTYPES,
    SIDE_EFFECTS,
    WHOLE_COLUMNS,
    WHOLE_GRADIENT,
)
from autopallas.patterns.attention.site import Labels
from autopallas.patterns.carry import Carrier, fewest_side_elements
from autopallas.patterns.cross_entropy.region import Region, Terminal
from autopallas.patterns.expressions import Computed, Expression, Position, precision_of
from autopallas.patterns.match import Match, Mismatch
from autopallas.patterns.program_builder import ProgramBuilder, Register
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Index, Input, Side
from autopallas.sites.index_notation import Operand

__all__ = ["passes"]

_HEADS = 2**19
_NEAR = 32
"""Most values among which an exchange between devices is looked for."""
_FROM_HERE = 2**20
"""First placeholder positions of side inputs. Until the number of side inputs is known, the logits of further head h
are side input ``_HEADS + h``, and statistic k (in a product: finished number k) is side input ``_FROM_HERE + k``."""


def passes(region: Region, given: Set[int] = frozenset()) -> list[Match]:
    """Returns the passes over the logits, in order; the first one takes the statistics of the forward.

    Where everything between statistics and products is computed row by row, one pass does it all, except in regions
    that are ``parted`` by other sites. Results in ``given`` that another site computes, from nothing but a scatter that
    several logits share, are left to that site.

    Raises:
      Mismatch: an operand is not at hand where a pass would stand.
    """
    given = frozenset(number for number in given if not region.scope.depends(number))
    before = -1
    found: list[Match] = []
    while region.refinements != before:
        before = region.refinements
        own = [t for t in region.terminals if t.result not in given]
        whole = _Pass(region, own, one=True) if _in_one(region) else None
        if whole is not None:
            with contextlib.suppress(Mismatch):
                found = [*_in_order(region.regions[1:], given), whole.match()]
                continue
        found = _in_order(region.regions, given)
    sums = [number for number, match in enumerate(found) if _sums_exponentials(match)]
    if not sums or sums[0] > 0 and not _exchanges_maxima(region):
        raise Mismatch("the first pass over the logits does not sum their exponentials", advice=LOSS_PER_ROW)
    return _rounded_alike(region, found)


def _rounded_alike(region: Region, found: list[Match]) -> list[Match]:
    """Has all passes round the logits where one has to, or reads a label that the rounded logits decide.

    What a pass gives for a row, such as the logarithm of its sum, is that of the logits which the others read: an
    exponential of their difference would multiply a rounding that one of them leaves out.
    """
    if len(found) < 2 or not any(_has_to_round(region, match) for match in found):
        return found
    return [replace(match, site=replace(_site(match), rounded=True)) for match in found]


def _has_to_round(region: Region, match: Match) -> bool:
    integers = (n for n in match.operands if jnp.issubdtype(region.graph.dtype(n), jnp.integer))
    return _site(match).spec.has_to_round or any(map(region.touches, integers))


def _site(match: Match) -> CrossEntropySite:
    assert isinstance(match.site, CrossEntropySite)
    return match.site


def _sums_exponentials(match: Match) -> bool:
    return any(s.kind == "exp_sum" for s in _site(match).statistics)


def _exchanges_maxima(region: Region) -> bool:
    """Returns whether devices that have a part of the vocabulary each exchange the maxima of the rows, which are then
    subtracted: the sums of exponentials need a pass of their own."""
    maxima = [t.result for t in region.terminals if t.node.name == "reduce_max"]
    todo, seen = list(maxima), set(maxima)
    while todo and len(seen) < _NEAR:
        for user in region.graph.users[todo.pop()]:
            if user.name in ("pmax", "all_gather"):
                return True
            new = [number for number in user.outputs if number not in seen and number not in region.inside]
            seen.update(new)
            todo += new
    return False


def _in_order(regions: Sequence[Region], given: Set[int]) -> list[Match]:
    """Builds the passes of regions over the same logits, one for each level and body of their ends."""
    ends = [(t.level, _place(region, t), i, t) for i, region in enumerate(regions) for t in region.terminals]
    ends = [end for end in ends if end[-1].result not in given]
    groups = groupby(sorted(ends, key=lambda end: end[:3]), key=lambda end: end[:3])
    return [_pass(regions[key[2]], [t for *_, t in terminals]) for key, terminals in groups]


def _pass(region: Region, terminals: Sequence[Terminal]) -> Match:
    """Builds one of several passes, from values of its body or also from values that the body of the logits can hand
    over."""
    size = math.prod(region.graph.shape(region.logits))
    return fewest_side_elements(region.graph, lambda across: _Pass(region, terminals, across=across).match(), size)


def _in_one(region: Region) -> bool:
    """Returns whether statistics and products are computed in the same body, once."""
    held = {body for t in region.terminals for body, _ in region.graph.occurrences(t.result)}
    before = all(t.level == 1 for other in region.regions[1:] for t in other.terminals)
    return len(held) == 1 and bool(region.products) and before and not region.parted


def _place(region: Region, terminal: Terminal) -> int:
    """Numbers the body of a terminal."""
    return list(region.graph.numbers).index(terminal.node.body)


class _Pass:
    """Builds one pass from the terminals of one level in one body, or from all terminals (``one``)."""

    def __init__(self, region: Region, terminals: Sequence[Terminal], one: bool = False, across: bool = False):
        self.one = one
        self.finish: list[ElementwiseProgram] = []
        self.region, self.graph, self.space = region, region.graph, region.space
        self.terminals = terminals
        self.results = tuple(dict.fromkeys(t.result for t in terminals))
        self.clipped: list[int] = []
        self.statistics: list[Statistic] = []
        self.products: list[Product] = []
        self._known: dict[Hashable, int] = {}
        batches = {t.batch for t in terminals if t.kind in ("columns", "column_sum")}
        if len(batches) > 1:
            raise Mismatch("the products of the backward are summed over different rows", advice=WHOLE_GRADIENT)
        batch = next(iter(batches), region.apart)
        self.rows = tuple(a for a in region.resolved(region.rows) if a not in batch)
        self.batch = tuple(a for a in region.resolved(region.rows) if a in batch)
        axes = self.rows, region.resolved(region.vocabulary)
        self.homes = tuple(dict.fromkeys(b for b, _ in self.graph.occurrences(region.logits))) if across else ()
        self.carrier = Carrier(region.scope, self._bodies(), axes, region.score, across=across, homes=self.homes)
        self.carrier.roles = 2 * len(region.heads)

    def _bodies(self) -> tuple[Body, ...]:
        held = (body for number in self.results for body, _ in self.graph.occurrences(number))
        return tuple(dict.fromkeys(held))

    def match(self) -> Match:
        region, carrier = self.region, self.carrier
        heads = [(carrier.role(head.x), carrier.role(head.w)) for head in region.heads]
        (x, w), *further = heads
        sources: list[tuple[ElementwiseProgram | int, View, Dtype]] = []
        for terminal in self.terminals:
            dtype = self.graph.dtype(terminal.result)
            sources.append((self._source(terminal), terminal.view, dtype))
        counts = len(carrier.sides), len(further)
        labels = Labels(self.space)
        site = CrossEntropySite(
            sizes=(),
            rows=labels.operand(x),
            weight=labels.operand(w),
            row_labels=labels.atoms(self.rows),
            vocabulary_labels=labels.atoms(region.resolved(region.vocabulary)),
            hidden_labels=labels.atoms(self._hidden(w, region.hidden)),
            results=tuple(
                Result(
                    _placed(s, *counts) if isinstance(s, ElementwiseProgram) else s,
                    labels.view(self.space.view(view)),
                    dtype,
                )
                for s, view, dtype in sources
            ),
            residual=tuple((0, labels.atoms((a,))) for a in (*self.batch, *self.rows)),
            types=(),
            logit_dtype=self.graph.dtype(region.logits),
            statistics=tuple(replace(s, program=_placed(s.program, *counts)) for s in self.statistics),
            finish=tuple(_placed(p, *counts) for p in self.finish),
            products=tuple(replace(p, program=_placed(p.program, *counts)) for p in self.products),
            sides=(
                *(labels.source(s) for s in carrier.sides),
                *(
                    HeadSource(
                        labels.operand(rows),
                        labels.operand(weight),
                        labels.atoms(self._hidden(weight, head.hidden)),
                        self.graph.dtype(head.score.value),
                    )
                    for (rows, weight), head in zip(further, region.further, strict=True)
                ),
            ),
            clipped=tuple(self.clipped),
            batch_labels=labels.atoms(self.batch),
            precision=precision_of(self.graph, region.dot),
            doubled=region.doubled,
        )
        for number in carrier.operands:
            if not region.touches(number):
                continue
            if region.level_of(number, whole=self.one) >= (1 if self.one else self.terminals[0].level):
                raise Mismatch("a pass over the logits would need its own results", advice=LOGITS_ONCE)
        self._refuse_circles(carrier.operands)
        nodes, free = nodes_between(self.graph, carrier.operands, self.results)
        for number in free:
            carrier.further(number)
        if any(n.equation.effects for n in nodes):
            raise Mismatch("the equations have side effects", advice=SIDE_EFFECTS)
        operands = tuple(carrier.operands)
        site = replace(
            site,
            sizes=labels.sizes(),
            types=tuple(self.graph.dtype(number) for number in operands),
            has_custom_rule=any(number in self.graph.inner for n in nodes for number in n.outputs),
        )
        return Match(
            op="cross_entropy",
            site=site,
            direction="forward",
            operands=operands,
            results=tuple(t.result for t in self.terminals),
            equations=tuple(nodes),
            original=jaxpr_of(self.graph, nodes, operands, [t.result for t in self.terminals]),
            body=self.terminals[0].node.body,
            homes=self.homes,
            location=region.location,
        )

    def _refuse_circles(self, operands: Sequence[int]) -> None:
        """Refuses operands that only come out of a checkpoint into which results of the pass go."""
        for body in self._bodies():
            known = self.graph.positions[body]
            first = min((known[n][0] for n in self.results if n in known), default=0)
            if any(n in known and known[n][0] > first and known[n][0] in body.children for n in operands):
                raise Mismatch(
                    "the activations are computed again only where the logits' gradient is read",
                    advice="Let the checkpoint's policy recompute the head's product (do not save it), or leave the "
                    "head outside of the checkpoint.",
                )

    def _hidden(self, w: Operand, atoms: Sequence[Atom]) -> tuple[Atom, ...]:
        """Returns the labels of a head's D, in the order in which its weight has them; what it repeats comes last."""
        hidden = dict.fromkeys(self.region.resolved(atoms))
        return (*(a for a in w.labels if a in hidden), *(a for a in hidden if a not in w.labels))

    # ------------------------------------------------------------------ programs

    def _source(self, terminal: Terminal) -> ElementwiseProgram | int:
        if terminal.kind == "statistics":
            expression = terminal.expression
            return _RowBuilder(self).build(self.region.expressed(expression) if self.one else expression)
        program = _TileBuilder(self.region, self.carrier, self).build(terminal.expression)
        dtype = self.graph.dtype(terminal.result)
        if terminal.kind == "rows" and not set(self.batch) <= {a for _, own in terminal.view for a in own}:
            dtype = self.region.wide  # the sum over the batch is rounded once
        product = Product(terminal.kind, program, dtype, terminal.head)
        if product not in self.products:
            self.products.append(product)
        return self.products.index(product)

    def statistic(self, computed: Computed) -> int:
        """Returns the position of a statistic; adds it if it is new."""
        key = self.region.scope.key(computed)
        if key not in self._known:
            if computed.kind == "exp_sum":
                self.statistic(Computed("max", computed.argument, computed.dtype))
            program = _TileBuilder(self.region, self.carrier).build(computed.argument)
            label = None if computed.label is None else self._label(computed)
            kind = computed.kind.removeprefix("clipped_")
            found = Statistic(kind, program, label)  # type: ignore[arg-type]
            if found not in self.statistics:
                self.statistics.append(found)
            self._known[key] = self.statistics.index(found)
        return self._known[key]

    def finished(self, number: Expression) -> int:
        """Returns the position of a number per row that is computed from statistics within the pass; adds it if it is
        new."""
        program = _RowBuilder(self).build(self.region.expressed(number))
        if program not in self.finish:
            self.finish.append(program)
        return self.finish.index(program)

    def _label(self, computed: Computed) -> int:
        """Returns the side input with the labels of a pick; adds another one where the labels are clipped to the
        vocabulary."""
        assert isinstance(computed.label, Ref)
        source = self.carrier.source(computed.label)
        position = self.carrier.side(source)
        if computed.kind == "pick":
            return position
        known = next((i for i in self.clipped if self.carrier.sides[i] == source), None)
        if known is None:
            self.carrier.sides.append(source)
            known = len(self.carrier.sides) - 1
            self.clipped.append(known)
        return known


class _TileBuilder(ProgramBuilder):
    """Builds programs of tile values: row numbers that depend on the logits become side inputs, scatters are written
    out.

    ``owner`` is the pass, for the program of a product: a pass that does everything computes such numbers itself.
    """

    def __init__(self, region: Region, carrier: Carrier, owner: _Pass | None = None):
        super().__init__(carrier)
        self.region, self.owner = region, owner
        self.whole = set(region.counted) == set(region.resolved(carrier.axes[0]))
        """Whether the pass has all rows that share a weight."""

    def _written(self, expression: Expression) -> Register:
        match expression:
            case Position():
                if expression.axis == "query" and not self.whole:
                    raise Mismatch(
                        "labels of columns are compared with rows of which each has a product of its own",
                        advice=WHOLE_COLUMNS,
                    )
                return self._input(Index(expression.axis, expression.dtype))
            case Ref():
                ref = self.scope.space.canonical(expression)
                if ref.value in self.scope.further:
                    return self._logits(ref)
                if ref.value != self.scope.score and self.region.touches(ref.value):
                    if not self.region.algebra.carries_axis(ref) or self.region.algebra.of_column(ref):
                        return self._side(expression)
                    if self.scope.name(ref) == "scatter-add":
                        return self._register(self.region.algebra.spread(ref))
                    if ref.value in self.region.cancelled:
                        return self._input(Constant(0.0, self.scope.graph.dtype(ref.value)))
                    compared = self.region.algebra.greatest(ref)
                    if compared is not None:
                        return self._greatest(ref, compared)
                    if self.region.algebra.is_rounded_otherwise(ref):
                        raise Mismatch(
                            "logits of 16 bits are compared with a maximum that is rounded otherwise",
                            advice=LOGITS_ONCE,
                        )
                    return self._elementwise(ref, self.scope.graph.dtype(ref.value))
        return super()._written(expression)

    def _logits(self, ref: Ref) -> Register:
        """Reads the logits of a further head."""
        for number, head in enumerate(self.region.further):
            if head.score.value == ref.value and self.scope.space.same(ref, self.scope.space.canonical(head.score)):
                return self._input(Side(_HEADS + number, self.scope.graph.dtype(ref.value)))
        raise Mismatch("the logits of a head enter the program in two layouts", advice=SAME_HEADS)

    def _greatest(self, ref: Ref, compared: Ref) -> Register:
        """Marks the position where a row is greatest.

        A recomputed value may differ by a rounding from the maximum that it was. Where the row has only one greatest
        element, the program therefore compares positions.
        """
        plain = self._elementwise(ref, self.scope.graph.dtype(ref.value))
        if self.owner is None or not self.owner.one:
            if self.scope.space.canonical(compared).value != self.scope.score:
                raise Mismatch(
                    "the gradient of a maximum needs the logits in the pass that finds it", advice=LOGITS_ONCE
                )
            return plain
        wide, index, boolean = self.region.wide, jnp.dtype(jnp.int32), jnp.dtype(bool)
        ties, argmax = (
            self._input(Side(_FROM_HERE + self.owner.finished(Computed(kind, compared, dtype)), dtype))
            for kind, dtype in (("ties", wide), ("argmax", index))
        )
        single = self._emit(lax.eq_p, (), (ties, self._input(Constant(1.0, wide))), boolean)
        here = self._emit(lax.eq_p, (), (self._input(Index("key", index)), argmax), boolean)
        return self._emit(lax.select_n_p, (), (single, plain, here), boolean)

    def _value(self, ref: Ref) -> int:
        return self.scope.space.canonical(ref).value

    def _side(self, ref: Ref) -> Register:
        dtype = self.scope.graph.dtype(ref.value)
        whole = self.owner is not None and self.owner.one
        if self.owner is not None and whole and self.region.level_of(self._value(ref), whole=True) > 0:
            return self._input(Side(_FROM_HERE + self.owner.finished(ref), dtype))
        if not (kind_of(dtype) in "iub" or jnp.issubdtype(dtype, jnp.floating)):
            raise Mismatch(f"a side input has the dtype {dtype}", advice=SIDE_DTYPES)
        return self._input(Side(self.carrier.side(self.carrier.source(ref)), dtype))


class _RowBuilder(_TileBuilder):
    """Builds programs of numbers per row, from statistics and side inputs without the vocabulary."""

    def __init__(self, owner: _Pass):
        super().__init__(owner.region, owner.carrier)
        self.taken_by = owner

    def _written(self, expression: Expression) -> Register:
        match expression:
            case Computed():
                position = self.taken_by.statistic(expression)
                kind = self.taken_by.statistics[position].kind
                dtype = jnp.dtype(jnp.int32) if kind == "argmax" else self.region.wide
                return self._input(Side(_FROM_HERE + position, dtype))
            case Ref():
                if self.scope.number(expression) is None:
                    if self.region.algebra.carries_axis(self.scope.space.canonical(expression)):
                        raise Mismatch("values of the logits' size are not reduced", advice=LOGITS_APART)
                    return self._side(expression)
        return super()._written(expression)


def _placed(program: ElementwiseProgram, sides: int, heads: int) -> ElementwiseProgram:
    """Moves the logits of further heads behind the other side inputs of a program, and statistics behind both."""

    def moved() -> Iterator[Input]:
        for i in program.inputs:
            if not isinstance(i, Side) or i.position < _HEADS:
                yield i
            elif i.position < _FROM_HERE:
                yield replace(i, position=i.position - _HEADS + sides)
            else:
                yield replace(i, position=i.position - _FROM_HERE + sides + heads)

    return replace(program, inputs=tuple(moved()))
