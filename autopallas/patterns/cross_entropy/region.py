"""Reads what logits flow into: one set of axis labels, and every end of the flow as a statistic or a product."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jax import lax

from autopallas import compat, jaxprs
from autopallas.compat import Dtype, is_transposed
from autopallas.graph import Graph, Node, Ref
from autopallas.graph.equal_loops import loops
from autopallas.graph.labels import Atom, Dimension, View
from autopallas.patterns.advice import (
    EMPTY,
    LOGITS_APART,
    LOGITS_ONCE,
    LOSS_PER_ROW,
    LOSSES_OF_A_RULE,
    NO_FURTHER_PRODUCT,
    NO_LOOP,
    OWN_DERIVATIVE,
    OWN_LOGITS,
    PRECISION,
    WHOLE_COLUMNS,
    WHOLE_ROWS,
)
from autopallas.patterns.cross_entropy.cancelled_gradients import is_zero
from autopallas.patterns.cross_entropy.flows import Flow, Flows
from autopallas.patterns.cross_entropy.further_sums import summed_further
from autopallas.patterns.cross_entropy.intent import Intent, changes
from autopallas.patterns.cross_entropy.labelled_logits import HeadLogits, LabelledLogits
from autopallas.patterns.cross_entropy.row_statistics import CANCELS, MASK_LOGITS, WEIGHTED, RowStatistics
from autopallas.patterns.derivatives import DERIVATIVES, further_derivative
from autopallas.patterns.expressions import (
    Apply,
    Computed,
    Expression,
    computed_from,
    operation,
    parts_of,
    precision_of,
)
from autopallas.patterns.indexing import picked
from autopallas.patterns.match import Mismatch

__all__ = ["Region", "Terminal"]

_DEEPEST = 128
"""Most operations on one path from statistics to a number per row."""
_NEAR = 64
"""Most values among which a maximum's gradient, and what is computed for it alone, is looked for."""


@dataclass(slots=True)
class Terminal:
    """One end of the flow.

    Attributes:
      node: the computation.
      result: the number of its result.
      view: the dimensions of the result.
      kind: "rows" for a function of statistics, or the kind of a product.
      expression: a function of statistics and numbers per row; or the tile values of the product.
      batch: labels of rows over which a product is not summed: there is one product for each example.
      head: for a product, the head whose weight or activations it is with.
      level: the pass over the logits in which it can be computed; the first pass is 1.
    """

    node: Node
    result: int
    view: View
    kind: Literal["statistics", "rows", "columns", "column_sum", "values"]
    expression: Expression
    batch: frozenset[Atom] = frozenset()
    level: int = 1
    head: int = 0


class Region(LabelledLogits):
    """Holds the values of the logits' size around one contraction, or around several whose results are read together.

    Attributes:
      inside: numbers of these values.
      others: further contractions whose results are logits, each with the values into which they flow.
      asked: values inside that the program returns, and that a pass may write.
      parted: results of other sites that wait for results of this one: a pass that waits for them must not compute what
        they wait for.
      may_cancel: whether it may be assumed that what cancels is finite.
      cancelled: values inside that are zero, since what comes back to the maximum of a row adds up to nothing.
      further: the logits of the others, seen under the labels of the first one's; filled by :meth:`read`.
      terminals: the ends of the flow, operands before results; filled by :meth:`read`.
      intent: signs of what the logits are for.
      shared: values inside that flow together with other logits too: gradients of picked elements.
      other: for a region in which rows and columns have changed places, the region that has them as they were. Where a
        loss takes statistics of rows and of columns, as contrastive losses do, each kind is read in a region of its
        own, for which the other's statistics are numbers at hand.
    """

    def __init__(
        self,
        graph: Graph,
        dot: Node,
        inside: set[int],
        ends: Sequence[Node],
        flows: Flows,
        other: Region | None = None,
        shared: Set[int] = frozenset(),
        others: Sequence[tuple[Node, Set[int]]] = (),
        own: Set[int] = frozenset(),
    ):
        super().__init__(graph, dot, inside, ends, others, own, None if other is None else other.side)
        self._flows = flows
        self.asked: frozenset[int] = frozenset()
        self.parted: frozenset[int] = frozenset()
        self.may_cancel = False
        self.cancelled: frozenset[int] = frozenset()
        self._idle: frozenset[int] = frozenset()
        """The results of what is computed for cancelled values alone."""
        self._waiting: dict[int, bool] = {}
        self.other, self.shared = other, shared
        self.terminals: list[Terminal] = []
        self._levels: dict[int, int] = {} if other is None else other._levels
        read = [number for node in (dot, *(node for node, _ in others)) for number in node.inputs]
        self.intent = Intent(graph, inside, ends, self.touches, read, loops(dot.body))
        self.anchored = any(self._anchor(node) for node in ends)
        if self.anchored:
            self._flow: Flow = flows.add(self.every, inside, ends) if other is None else other._flow
            self.scope.follows = self._flow.follows
            self.scope.further = frozenset(self.every[1:])

    @cached_property
    def turned(self) -> Region | None:
        """Region in which rows and columns have changed places; None where no column's exponentials are summed."""
        if self.others:
            return None
        found = Region(self.graph, self.dot, self.inside, self.ends, self._flows, self)
        return found if found.anchored else None

    @property
    def regions(self) -> list[Region]:
        """This region, and the turned one if an end was read in it."""
        return [region for region in self._asked_for if region is self or region.terminals]

    @property
    def _asked_for(self) -> list[Region]:
        """This region, and the turned one once it was asked for."""
        turned: Region | None = self.__dict__.get("turned")
        return [self] if turned is None else [self, turned]

    @property
    def given(self) -> frozenset[int]:
        """Results of the turned region that do not depend on those of this one."""
        return frozenset(t.result for region in self.regions[1:] for t in region.terminals if t.level == 1)

    @property
    def location(self) -> str:
        return jaxprs.location(self.dot.equation)

    @property
    def every(self) -> tuple[int, ...]:
        """Numbers of the logits of all contractions."""
        return (self.logits, *(node.outputs[0] for node, _ in self.others))

    @property
    def understood(self) -> bool:
        """Whether it was found how the logits of the other contractions are read together with the first one's."""
        return len(self.further) == len(self.others)

    @property
    def heads(self) -> list[HeadLogits]:
        """Logits of the first contraction, and of the others."""
        return [HeadLogits(self.score, self.x, self.w, self.hidden), *self.further]

    @property
    def products(self) -> list[Terminal]:
        return [t for t in self.terminals if t.kind != "statistics"]

    # ------------------------------------------------------------------ the ends of the flow

    def read(self) -> None:
        """Reads every end.

        Raises:
          Mismatch: one is neither a statistic nor a product.
        """
        if 0 in (*self.graph.shape(self.dot.inputs[0]), *self.graph.shape(self.dot.inputs[1])):
            raise Mismatch("an axis of the contraction has no elements", advice=EMPTY)
        self._join()
        around = loops(self.graph.definitions[self.logits].body)
        pieces = any(
            self._is_piece(head.w) and not changes(self.graph, self.space.canonical(head.x).value, around)
            for head in self.heads
        )
        if pieces and not self.intent.has_a_head_for_each_step(around):
            raise Mismatch("the program computes its logits in pieces of the vocabulary already", advice=NO_LOOP)
        if any(loops(node.body) > around for node in self.ends):
            raise Mismatch("the logits are computed once and read inside a loop", advice=NO_LOOP)
        self.cancelled = self._idle = frozenset()
        self._read_ends()
        if self.may_cancel and self._cancel():
            self._read_ends()
        terminals = [t for region in self.regions for t in region.terminals if t.kind == "statistics"]
        if not any(_computes(t.expression, "exp_sum") for t in terminals):
            if any(region.algebra.weighs for region in self.regions):
                raise Mismatch(WEIGHTED, advice=MASK_LOGITS)
            raise Mismatch("nothing sums the exponentials of the logits", advice=LOSS_PER_ROW)

    def _read_ends(self) -> None:
        """Reads every end that is not idle."""
        before = -1
        while self.refinements != before:
            before = self.refinements
            self._levels.clear()
            for region in self._asked_for:
                region.start()
            ends = [node for node in self.ends if not node.outputs or not self._idle.issuperset(node.outputs)]
            for node in ends:  # values aligned by the logits tell how to align scatters
                with contextlib.suppress(Mismatch):
                    self._aligned(self._source(node))
            for node in ends:
                region, terminal = self._end(node)
                region.terminals.append(terminal)
                self._levels[terminal.result] = terminal.level
                self._levels.update(dict.fromkeys(node.outputs, terminal.level))
            for region in self.regions:
                region._out_of_rules()
            self._written_out()
        if self.cancelled:
            self.algebra.assumptions[CANCELS] = None

    def _cancel(self) -> bool:
        """Finds gradients that come back to the maximum of each row and add up to zero, and what is computed for these
        alone; returns whether there are any."""
        graph = self.graph
        cancelled: set[int] = set()
        for number in sorted(self.inside):
            if graph.name(number) == "eq":
                todo, followed = list(graph.users[number]), 0
                while todo and followed < _NEAR:
                    user, followed = todo.pop(), followed + 1
                    if user.name == "convert_element_type":
                        todo += graph.users[user.outputs[0]]
                    elif user.name == "mul" and user.outputs[0] in self.inside:
                        with contextlib.suppress(Mismatch):
                            if self._is_cancelled(self._aligned(user.outputs[0])):
                                cancelled.update(user.outputs)
        self.cancelled = frozenset(cancelled)
        idle, waiting = set(cancelled), [n for number in cancelled for n in graph.definitions[number].inputs]
        while waiting and len(idle) < len(cancelled) + _NEAR:
            number = waiting.pop()
            node = graph.definitions.get(number)
            read = {n for user in graph.users[number] for n in user.outputs}
            if node is not None and number not in idle and number not in graph.returned and read <= idle:
                idle.add(number)
                waiting += node.inputs
        self._idle = frozenset(idle)
        return bool(cancelled)

    def _is_cancelled(self, tile: Ref) -> bool:
        """Returns whether a tile value is a number per row that is zero, times a mask of the elements that are equal to
        the maximum of exactly these values."""
        for mask, number in itertools.permutations(map(self.space.canonical, self.space.operands(tile) or ())):
            if not self.algebra.carries_axis(mask) or self.algebra.carries_axis(number):
                continue
            while self.scope.name(mask) == "convert_element_type" and (operands := self.space.operands(mask)):
                mask = self.space.canonical(operands[0])
            if self.algebra.greatest(mask) is not None and is_zero(self.algebra, number):
                return True
        return False

    @property
    def refinements(self) -> int:
        """Number of refinements of labels so far."""
        return sum(region.space.refinements for region in self._asked_for)

    def start(self) -> None:
        """Forgets what was read."""
        self.terminals = []
        self.algebra = RowStatistics(self.scope, self.vocabulary, self.wide, self.counted)
        self.algebra.touches, self.algebra.result_of = self.touches, self._result_of
        self.algebra.cancelled = self.cancelled

    def _end(self, node: Node) -> tuple[Region, Terminal]:
        """Reads an end under the labels of rows or, where that puts it in an earlier pass, of columns.

        Raises:
          Mismatch: it is neither a statistic nor a product.
        """
        found: Terminal | None = None
        reason: Mismatch | None = None
        try:
            found = self._terminal(node)
            found.level = self._level(found)
        except Mismatch as mismatch:
            reason = mismatch
        if found is not None and (found.level == 1 and found.kind == "statistics" or found.kind in ("rows", "columns")):
            return self, found
        if node.name != "dot_general" and (turned := self.turned) is not None:
            if "algebra" not in turned.__dict__:
                turned.start()
            with contextlib.suppress(Mismatch):
                other = turned._terminal(node)
                other.level = turned._level(other)
                if other.kind == "statistics" and (found is None or other.level < found.level or other.level == 1):
                    return turned, other
        if found is None:
            assert reason is not None
            raise reason
        return self, found

    def _is_piece(self, operand: Ref) -> bool:
        """Returns whether an operand is an element of an array that a loop goes through, or is picked by one index.

        Rows of an embedding that many indices pick, as those of sampled labels or of the items of a batch, are no piece
        of it.
        """
        value = self.space.canonical(operand).value
        node = self.graph.definitions.get(value)
        if node is not None and node.name in ("dynamic_slice", "gather"):
            return node.name == "dynamic_slice" or math.prod(self.graph.shape(node.inputs[1])[:-1]) == 1
        return value in self.graph.elements and value not in self.graph.definitions

    def _out_of_rules(self) -> None:
        """Replaces the results of reductions in the body of a custom rule by the results of the rule's call."""
        for call in {id(n): n for n in map(self.graph.definitions.get, self.graph.inner) if n is not None}.values():
            position = next(i for i, e in enumerate(call.body.equations) if e is call.equation)
            bodies = {body for child in call.body.children[position] for body in child.body.walk()}
            within = [t for t in self.terminals if t.node.body in bodies]
            if not within:
                continue
            if any(t.kind != "statistics" for t in within):
                raise Mismatch("the logits' gradient is computed inside a custom rule", advice=OWN_DERIVATIVE)
            level = max(t.level for t in within)
            reached = {t.result: Ref(t.result, t.view) for t in within}
            for number in call.outputs:
                if number not in self.inside and self.touches(self.graph.inner[number]):
                    try:
                        at = self._aligned(number, reached)
                    except Mismatch as mismatch:
                        where = jaxprs.location(call.equation)
                        raise Mismatch(
                            f"a function with a derivative of its own adds up losses of several rows, at {where}",
                            advice=LOSSES_OF_A_RULE,
                        ) from mismatch
                    found = self._substituted(at, level)
                    self.terminals.append(Terminal(call, number, at.view, "statistics", found, level=level))
                    self._levels[number] = level
            self.terminals = [t for t in self.terminals if t not in within]

    def _written_out(self) -> None:
        """Reads the values of the logits' size that are asked for, as the gradient of soft labels may be.

        A pass that forms the logits' gradient writes them too, so that neither that gradient nor the logits are stored.
        Nothing is to be gained without products, nor where the program asks for the logits themselves or for values
        computed from them before any statistic.
        """
        if not any(t.kind in ("rows", "columns") for t in self.terminals):
            return
        for number in sorted(self.asked):
            with contextlib.suppress(Mismatch):
                at = self._aligned(number)
                found = Terminal(self.graph.definitions[number], number, at.view, "values", at)
                found.level = self._level(found)
                if found.level > 1:
                    self.terminals.append(found)

    def _result_of(self, ref: Ref) -> Expression | None:
        ref = self.space.canonical(ref)
        if not set(self.resolved(self.rows)) <= self.space.atoms(ref):
            return None  # summed over rows too, while the expression is about one row
        own = next((t for t in self.terminals if t.result == ref.value and t.kind == "statistics"), None)
        return own.expression if own is not None and self.space.same(ref, Ref(own.result, own.view)) else None

    @property
    def wide(self) -> Dtype:
        """Dtype of statistics."""
        return np.dtype(np.float64 if self.doubled or self.graph.dtype(self.logits) == np.float64 else np.float32)

    @cached_property
    def doubled(self) -> bool:
        """Whether narrower logits become float64 on the way."""
        own = self.graph.dtype(self.logits)
        return own != np.float64 and any(self.graph.dtype(number) == np.float64 for number in self.inside)

    def _source(self, node: Node) -> int:
        """Returns the value inside that an end reads."""
        inside = [i for i in node.inputs if i in self.inside]
        if node.name == "dot_general" and inside:  # both operands of a sum of products may be inside
            return inside[0]
        if len(set(inside)) != 1 or (node.name == "gather" and inside[0] != node.inputs[0]):
            raise Mismatch(
                f"the logits are also used by {node.name} at {jaxprs.location(node.equation)}", advice=LOGITS_APART
            )
        return inside[0]

    def _terminal(self, node: Node) -> Terminal:
        at = self._aligned(self._source(node))
        vocabulary, rows = set(self.resolved(self.vocabulary)), set(self.resolved(self.rows))
        if node.name in ("reduce_sum", "reduce_max", "argmax"):
            axes = set(node.params["axes"])
            reduced = {a for d in axes for a in self.resolved(at.view[d][1])}
            kept = tuple(dimension for d, dimension in enumerate(at.view) if d not in axes)
            if node.name == "reduce_sum" and reduced <= (free := rows - self.apart):
                whole, dimensions, left = summed_further(self.graph, self.space, node, kept, free - reduced)
                batch = frozenset(left | (rows & self.apart))
                summed = Terminal(whole, whole.outputs[0], dimensions, "column_sum", at, batch)
                if left != free or self._level(summed) > 1:  # of one row there is nothing to sum
                    return summed
            if reduced and reduced <= rows:
                where = jaxprs.location(node.equation)
                raise Mismatch(
                    f"the same logits are normalised along another axis too, by {node.name} at {where}",
                    advice=WHOLE_COLUMNS,
                )
            if not vocabulary <= reduced:
                raise Mismatch(
                    f"{node.name} runs over a part of the logits at {jaxprs.location(node.equation)}", advice=WHOLE_ROWS
                )
            if node.name == "reduce_sum":
                return Terminal(node, node.outputs[0], kept, "statistics", self.algebra.total(at))
            if reduced != vocabulary:
                raise Mismatch(
                    f"{node.name} runs over rows too at {jaxprs.location(node.equation)}",
                    advice="Reduce the logits over the vocabulary alone, and combine what that gives for several rows "
                    "afterwards.",
                )
            if node.name == "reduce_max":
                return Terminal(node, node.outputs[0], kept, "statistics", self.algebra.maximum(at))
            if tuple(a for d in sorted(axes) for a in self.resolved(at.view[d][1])) != self.resolved(self.vocabulary):
                raise Mismatch(
                    "argmax counts in another order",
                    advice="Take the argmax along the vocabulary as one axis, jnp.argmax(logits, -1), in the order of "
                    "the weight's columns.",
                )
            return Terminal(node, node.outputs[0], kept, "statistics", self.algebra.argmax(at))
        if node.name == "gather":
            pick = picked(self.scope, at, node, self.vocabulary)
            fill = node.params["fill_value"]
            found = self.algebra.element(at, pick, None if fill is None else float(fill))
            return Terminal(node, node.outputs[0], pick.view, "statistics", found)
        if node.name == "dot_general":
            return self._product(node, at)
        if node.name == "pad" and (node.body.transposed or is_transposed(node.equation)):
            where = jaxprs.location(node.equation)
            raise Mismatch(f"the loss reads a part of an array, whose gradient is padded at {where}", advice=OWN_LOGITS)
        raise Mismatch(
            f"the logits are also used by {node.name} at {jaxprs.location(node.equation)}", advice=LOGITS_APART
        )

    def _product(self, node: Node, at: Ref) -> Terminal:
        """Reads dlogits times the weight, its transpose times the activations, or a sum of products with something
        else."""
        contracting, batch = node.params["dimension_numbers"]
        side = 0 if node.inputs[0] == at.value else 1
        reduced = {a for d in contracting[side] for a in self.resolved(at.view[d][1])}
        vocabulary, rows = set(self.resolved(self.vocabulary)), set(self.resolved(self.rows))
        kind: Literal["rows", "columns"]
        if vocabulary <= reduced and len(self.graph.shape(node.inputs[1 - side])) == len(
            (*contracting[1 - side], *batch[1 - side])
        ):
            return self._sum_of_products(node, at, side)
        if vocabulary <= reduced <= vocabulary | self.apart:  # over the heads of one product too, such as codebooks
            kind = "rows"
        elif reduced <= rows - self.apart:  # of one row there is nothing to sum
            kind = "columns"
        else:
            raise Mismatch(
                f"the logits are contracted over another axis at {jaxprs.location(node.equation)}",
                advice="Contract the logits, or their gradient, over the whole vocabulary or over whole rows.",
            )
        pairs = zip((*contracting[side], *batch[side]), (*contracting[1 - side], *batch[1 - side]), strict=True)
        shared = {o: at.view[d] for d, o in pairs}
        partners = [head.w if kind == "rows" else head.x for head in self.heads]
        read = (
            self._hidden_of(node.inputs[1 - side], shared, partner, head.hidden)
            for partner, head in zip(partners, self.heads, strict=True)
        )
        number, hidden = next(((n, hidden) for n, hidden in enumerate(read) if hidden is not None), (0, None))
        if hidden is None:
            if not (node.body.transposed or is_transposed(node.equation)):
                where = jaxprs.location(node.equation)
                raise Mismatch(
                    f"a product of the forward reads what is computed from the logits, at {where}",
                    advice=NO_FURTHER_PRODUCT,
                )
            reason = "the logits' gradient is multiplied by something else than the weight or the activations"
            if (derivative := further_derivative(self.graph, node, [self.dot])) is not None:
                raise Mismatch(f"{reason}, in {derivative}", advice=DERIVATIVES)
            raise Mismatch(reason, advice=LOSS_PER_ROW)
        if precision_of(self.graph, node) != precision_of(self.graph, self.dot):
            raise Mismatch("the products of the backward ask for another precision than the forward", advice=PRECISION)
        first = [at.view[d] for d in batch[side]]
        own = [dimension for d, dimension in enumerate(at.view) if d not in (*contracting[side], *batch[side])]
        others = list(hidden)
        view = (*first, *own, *others) if side == 0 else (*first, *others, *own)
        apart = frozenset(rows - reduced if kind == "columns" else ())
        return Terminal(node, node.outputs[0], view, kind, at, apart, head=number)

    def _hidden_of(
        self, other: int, shared: Mapping[int, Dimension], partner: Ref, labels: Sequence[Atom]
    ) -> list[Dimension] | None:
        """Returns the dimensions of a factor beside those that it shares with the logits' gradient; None where the
        factor is not the head's ``partner``."""
        space, shape = self.space, self.graph.shape(other)
        free = [d for d in range(len(shape)) if d not in shared]
        if other == partner.value:
            hidden = {d: partner.view[d] for d in free}
        else:
            groups = space.cut(labels, [shape[d] for d in free if shape[d] != 1])
            if groups is None:
                return None
            left = iter(groups)
            hidden = {d: (0, ()) if shape[d] == 1 else next(left) for d in free}
        read = Ref(other, tuple({**hidden, **shared}[d] for d in range(len(shape))))
        return list(hidden.values()) if space.same(space.canonical(read), space.canonical(partner)) else None

    def _sum_of_products(self, node: Node, at: Ref, side: int) -> Terminal:
        """Reads a contraction over the vocabulary as a sum of an elementwise product.

        The other factor has no axis of its own, such as labels as one-hot rows, or probabilities.
        """
        view, read = self._factors(node, at, side)
        return Terminal(node, node.outputs[0], view, "statistics", self.algebra.total_of_products(at, read))

    # ------------------------------------------------------------------ passes

    def touches(self, value: int) -> bool:
        """Returns whether a value is computed from the logits or from a scatter inside."""
        return bool(self._flow.sources(value))

    def level_of(self, value: int, whole: bool = False) -> int:
        """Returns the last pass whose results a number per row depends on; 0 if there is none.

        With ``whole``, the region is one pass, and the turned region's pass comes before it.
        """
        levels = self._levels
        if whole and (given := self.given):
            return max((1 for source in self._flow.sources(value) if source not in given), default=0)
        if value not in levels:
            sources = [-1 if number is None else number for number in self._flow.sources(value)]
            if any(number not in levels for number in sources):
                raise Mismatch(
                    "numbers per row are computed from the logits in a way that is not understood", advice=LOSS_PER_ROW
                )
            levels[value] = max((levels[number] for number in sources), default=0)
        return levels[value]

    def _level(self, terminal: Terminal) -> int:
        """Returns the pass of a terminal. It comes one after the passes whose results its tile values read, but may be
        the same one where only its function of statistics reads them."""
        if terminal.kind != "statistics":
            return 1 + max((self.level_of(ref.value) for ref in self.algebra.leaves(terminal.expression)), default=0)
        level = 1
        for computed in _statistics(terminal.expression):
            parts = [computed.argument, *([computed.label] if computed.label is not None else [])]
            for part in parts:
                for ref in self.algebra.leaves(part):
                    level = max(level, 1 + self.level_of(ref.value))
        outer = self.outer(terminal.expression)
        level = max([level, *(self.level_of(ref.value) + self._waits(ref.value) for ref in outer)])
        terminal.level = level
        try:
            terminal.expression = self._substituted(terminal.expression, level)
        except Mismatch:
            level += 1
        return level

    def _waits(self, value: int) -> bool:
        """Returns whether a value is computed from results of a site that waits for this one's."""
        if not self.parted:
            return False
        if not self._waiting:
            self._waiting = dict.fromkeys(self.parted, True)
        return computed_from(self.graph, value, self._waiting, min(self.parted))

    def outer(self, expression: Expression) -> list[Ref]:
        """Returns the numbers per row that a function of statistics reads beside them."""
        parts = (part for part in parts_of(expression) if isinstance(part, Ref))
        return [ref for ref in parts if self.touches(self.space.canonical(ref).value)]

    def _substituted(self, expression: Expression, level: int) -> Expression:
        """Replaces results of the same pass by their own functions of statistics."""

        def step(value: Ref) -> tuple[Expression, bool]:
            ref = self.space.canonical(value)
            if self.level_of(ref.value) < level:
                return value, False
            return self._one_step(ref), self._result_of(ref) is None

        return self._replaced(expression, step)

    def expressed(self, expression: Expression) -> Expression:
        """Expresses a number per row by statistics of the logits and numbers that do not depend on them.

        Raises:
          Mismatch: that is impossible, or a statistic needs a pass of its own.
        """

        def step(value: Ref) -> tuple[Expression, bool]:
            ref = self.space.canonical(value)
            return (self._one_step(ref), True) if self.level_of(ref.value, whole=True) > 0 else (value, False)

        found = self._replaced(expression, step)
        for computed in _statistics(found):
            parts = [computed.argument, *([computed.label] if computed.label is not None else [])]
            if any(self.algebra.leaves(part) for part in parts):
                raise Mismatch("a statistic needs the logits a second time", advice=LOGITS_ONCE)
        return found

    def _replaced(self, expression: Expression, step: Callable[[Ref], tuple[Expression, bool]]) -> Expression:
        """Replaces each value in an expression by what ``step`` gives for it, which also tells whether to go on with
        that.

        Shared parts are replaced once.

        Raises:
          Mismatch: the expression is made of too many operations.
        """
        values: dict[Ref, Expression] = {}
        applied: dict[int, tuple[Apply, Expression]] = {}

        def replaced(part: Expression, depth: int) -> Expression:
            if depth > _DEEPEST:
                raise Mismatch(
                    f"numbers per row are computed from the logits by more than {_DEEPEST} operations",
                    advice=LOSS_PER_ROW,
                )
            if isinstance(part, Ref):
                if part not in values:
                    found, further = step(part)
                    values[part] = replaced(found, depth + 1) if further else found
                return values[part]
            if not isinstance(part, Apply):
                return part
            if id(part) not in applied:
                arguments = tuple(replaced(a, depth + 1) for a in part.arguments)
                applied[id(part)] = part, Apply(part.primitive, part.params, arguments, part.dtype)
            return applied[id(part)][1]

        return replaced(expression, 0)

    def _one_step(self, ref: Ref) -> Expression:
        """Returns a number per row as a function of the numbers from which it is computed."""
        own = self._result_of(ref)
        if own is not None:
            return self.algebra.convert(own, self.graph.dtype(ref.value))
        node, operands = self.scope.node(ref), self.space.operands(ref)
        if node is None or operands is None or node.equation.effects:
            raise Mismatch("numbers per row are not computed elementwise", advice=LOSS_PER_ROW)
        dtype = self.graph.dtype(ref.value)
        if node.name == "dot_general":  # a dot without contraction is a product
            factors = tuple(self.algebra.convert(operand, dtype) for operand in operands)
            return Apply(lax.mul_p, compat.multiplication_params(), factors, dtype)
        return Apply(*operation(node), tuple(operands), dtype)


def _statistics(expression: Expression) -> list[Computed]:
    return [part for part in parts_of(expression) if isinstance(part, Computed)]


def _computes(expression: Expression, kind: str) -> bool:
    return any(found.kind == kind for found in _statistics(expression))
