"""Tries to read one contraction as the second one of an attention: the product of probabilities and values."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import jax.numpy as jnp

from autopallas import jaxprs
from autopallas.compat import Var
from autopallas.graph import Graph, Node, Ref
from autopallas.graph.equal_loops import loops
from autopallas.graph.labels import Atom, Dimension
from autopallas.numerics.casts import rounds
from autopallas.patterns.advice import (
    BETWEEN_PRODUCTS,
    FLOATS,
    NO_LOOP_OVER_KEYS,
    NORMALISE,
    OVER_THE_KEYS,
    OWN_DERIVATIVE,
    OWN_DTYPE,
    SAME_SUM,
)
from autopallas.patterns.attention.blocks import BlockDraft, blocks, sum_with
from autopallas.patterns.attention.draft import AttentionDraft, axes_of
from autopallas.patterns.attention.maps import SumDraft, summands, with_weights
from autopallas.patterns.attention.row_factor import RowFactor, row_factor
from autopallas.patterns.attention.score_terms import Product
from autopallas.patterns.expressions import Scope
from autopallas.patterns.forward import LAYOUT, in_backward
from autopallas.patterns.match import Mismatch
from autopallas.patterns.softmax import Softmax
from autopallas.patterns.softmax_terms import (
    Exponential,
    InBlocks,
    KeysOfEachQuery,
    LogSumExp,
    NoNormaliser,
    SeveralBlocks,
    SeveralMaps,
    Term,
)

__all__ = ["CUSTOM_RULES", "PASSING", "Attempt", "Settled", "holds_softmax"]

CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
_MOST_BEHIND = 512
"""Most uses behind probabilities among which the product of queries and keys is looked for, the nearest first.

There are chains of any length of what is multiplied, whose links would each look at all before; no score program is as
long."""
_MOST_PRODUCTS = 16
"""Most products under an exponential among which the scores are looked for, the nearest first.

Gates of a recurrence whose steps are written one after the other are exponentials of a product each, behind which lie
those of all steps before; no score adds up as many products."""
_MOST_READERS = 32
"""Most values behind a maximum among whose readers a further maximum is looked for."""
PASSING = LAYOUT | {"copy", "name", "optimization_barrier"}
"""Primitives whose result has the elements of the operand, in the same dtype."""
_HANDED_ON = PASSING | {"convert_element_type", "stop_gradient"}
Settled: TypeAlias = Mapping[int, Mapping[tuple[int, ...], int]]
"""Per number of scores whose outcome is known, the axes along which the keys of each site run, and its result."""


class Attempt:
    """One try to read a contraction as the second one of an attention."""

    def __init__(
        self,
        graph: Graph,
        reach: list[tuple[bool, bool]],
        assume_finite: bool,
        settled: Settled,
    ):
        self.graph, self.reach, self.assume_finite = graph, reach, assume_finite
        self.settled = settled
        """Scores whose outcome is known already: what else is computed from them is their backward, or a softmax along
        another axis."""
        self.scope = Scope(graph)
        self.query_first = True
        self.has_values = True
        """Whether what is multiplied with the weights has an axis that these lack; True before that is known."""
        self.is_batched_alike = True
        """Whether queries and keys have axes of the batch, if values have: a matrix that all examples share gives
        features, as those of linear attention, and no scores."""
        self.is_plain = True
        """Whether the weights are no more than masked exponentials; features that a flow scales and shifts by
        exponentials are more."""
        self._chosen: int | None = None  # among several contractions under the exponential, the one taken as scores
        self._others: list[int] = []
        self._joins = False  # whether what is proved is one of several blocks of keys
        self._further: list[Product] = []  # the other contractions, which may be added to the scores

    def draft(self, node: Node, side: int) -> AttentionDraft | None:
        """Returns a proved site, or None where there is not even a product of queries and keys.

        Raises:
          Mismatch: it looks like an attention and is not, or cannot be proved to be.
        """
        try:
            found = self._with_division(node, side)
            if found is None and self.scope.score is None:
                with contextlib.suppress(SeveralMaps):
                    return self._as_a_sum(node, side)
            return found if found is None else self._with_other_blocks(node, found)
        except Mismatch as mismatch:
            first = self.scope
            told: Mismatch = mismatch
            if isinstance(mismatch, (SeveralBlocks, NoNormaliser)):
                try:
                    return self._in_blocks(node)
                except KeysOfEachQuery as apart:
                    told = apart
                except Mismatch:
                    pass
            if isinstance(mismatch, SeveralMaps):
                with contextlib.suppress(SeveralMaps):
                    return self._as_a_sum(node, side)
                self.scope = first
                raise
            for other in self._others:
                self._chosen = other
                self.scope = Scope(self.graph)
                with contextlib.suppress(Mismatch):
                    return self._with_division(node, side)
            self.scope = first
            raise told from None

    def _with_division(self, node: Node, side: int) -> AttentionDraft | None:
        try:
            return self._match(node, side, node.outputs[0], ())
        except NoNormaliser:
            later = self._division_after(node.outputs[0])
            if later is None:
                raise
        root, steps = later
        self.scope = Scope(self.graph)
        return self._match(node, side, root, steps)

    def _division_after(self, value: int) -> tuple[int, list[tuple[int, int | None]]] | None:
        """Finds the division or product that first uses the second contraction: (its value, [(sign, operand)] down to
        it)."""
        graph = self.graph
        steps: list[tuple[int, int | None]] = []
        for _ in range(12):
            users = graph.users[value]
            if not users:
                return None
            user = users[0]  # other users, such as the backward, are escapes until they are explained
            if user.name in PASSING:
                value = user.outputs[0]
            elif user.name == "convert_element_type" and rounds(graph.dtype(value), graph.dtype(user.outputs[0])):
                value = user.outputs[0]
                steps.append((0, None))
            elif user.name == "div" and user.inputs[0] == value:
                return user.outputs[0], [(-1, 1), *steps]
            elif user.name == "mul":
                return user.outputs[0], [(1, 1 - user.inputs.index(value)), *steps]
            else:
                return None
        return None

    def _in_blocks(self, node: Node) -> AttentionDraft | None:
        """Reads one softmax over several blocks of keys, whose products with values are added up."""
        root = sum_with(self.graph, self.reach, node.outputs[0])
        divided = self._division_after(root)
        drafts: list[AttentionDraft] | None = None
        for top in (root, *(() if divided is None else (divided[0],))):
            with contextlib.suppress(NoNormaliser):
                drafts = self._block_proofs(top)
                break
        if drafts is None:
            raise SeveralBlocks
        if any(draft.score.value in self.settled for draft in drafts):
            return None
        draft = BlockDraft.of(drafts)
        draft.settle()
        self.scope.score = draft.score.value
        return draft

    def _with_other_blocks(self, node: Node, found: AttentionDraft) -> AttentionDraft | None:
        """Returns the attention over several blocks of keys of which a proved one is a part, whose result is weighed by
        its own normaliser before others are added; the proved one where it is no such part."""
        root = sum_with(self.graph, self.reach, node.outputs[0])
        if root == node.outputs[0]:
            return found
        with contextlib.suppress(Mismatch):
            scope = Scope(self.graph)
            parts = blocks(scope, self.reach, scope.space.full(root))
            factors = [ref for part in parts if part.node is node for _, ref in part.outside]
            if len(parts) > 1 and any(found.scope.depends(ref.value) for ref in factors):
                return self._in_blocks(node)
        return found

    def _block_proofs(self, root: int) -> list[AttentionDraft]:
        scope = Scope(self.graph)
        top = scope.space.full(root)
        drafts = []
        found = blocks(scope, self.reach, top)
        if len(found) < 2:
            raise SeveralBlocks
        for block in found:
            attempt = Attempt(self.graph, self.reach, self.assume_finite, {})
            attempt.scope = Scope(self.graph, space=scope.space)
            attempt._joins = True
            draft = attempt.proof(block.node, block.side, root, top, block.contraction, block.outside)
            if draft is None:
                raise SeveralBlocks
            drafts.append(draft)
        return drafts

    def _as_a_sum(self, node: Node, side: int) -> AttentionDraft | None:
        """Reads a sum of softmaxes, whose product with the values is a sum of attentions.

        Raises:
          SeveralMaps: something that is added is no softmax.
          Mismatch: something else about the sum cannot be described.
        """
        self.is_plain = False
        scope = Scope(self.graph)
        root = node.outputs[0]
        top = scope.space.full(root)
        contraction = scope.space.contraction(scope.space.canonical(top))
        if contraction is None or node.name != "dot_general":
            raise SeveralMaps
        drafts, signs = [], []
        keys = [atom for _, atoms in contraction[2] for atom in atoms]
        for summand in summands(scope, contraction[0] if side == 0 else contraction[1], keys):
            attempt = Attempt(self.graph, self.reach, self.assume_finite, {})
            attempt.scope = Scope(self.graph, space=scope.space)
            own = with_weights(contraction, side, summand.weights)
            draft = attempt.proof(node, side, root, top, own, summand.outside, dict(summand.fixed))
            if draft is None:
                raise SeveralMaps
            self.scope.score = self.scope.score or draft.score.value
            drafts.append(draft)
            signs.append(summand.sign)
        if len(drafts) < 2:
            raise SeveralMaps
        if any(draft.score.value in self.settled for draft in drafts):
            return None
        whole = SumDraft.of(drafts)
        whole.signs = tuple(signs)
        whole.settle()
        return whole

    # ------------------------------------------------------------------ the proof

    def _match(
        self, node: Node, side: int, root: int, steps: Sequence[tuple[int, int | None]]
    ) -> AttentionDraft | None:
        space = self.scope.space
        top = space.full(root)
        outside: list[tuple[int, Ref]] = []
        at = top
        for sign, other in steps:
            operands = space.operands(space.canonical(at))
            assert operands is not None
            if other is None:
                at = operands[0]
            else:
                outside.append((sign, operands[other]))
                at = operands[1 - other]
        at = space.canonical(at)
        if at.value != node.outputs[0]:
            return None
        contraction = space.contraction(at)
        draft = None if contraction is None else self.proof(node, side, root, top, contraction, outside)
        if draft is not None:
            draft.settle()
        return draft

    def proof(
        self,
        node: Node,
        side: int,
        root: int,
        top: Ref,
        contraction: tuple[Ref, Ref, list[Dimension]],
        outside: Sequence[tuple[int, Ref]],
        fixed: Mapping[Atom, int] = MappingProxyType({}),
    ) -> AttentionDraft | None:
        """Proves that one operand of a contraction is a softmax; returns None where there are no scores.

        ``outside`` are the values that multiply (1) or divide (-1) the product, ``fixed`` the index of each label of
        which one index is read.
        """
        scope, space, graph = self.scope, self.scope.space, self.graph
        weights, value = contraction[:2] if side == 0 else contraction[1::-1]
        weights = space.canonical(weights)
        self.has_values = not space.atoms(value) <= space.atoms(weights)
        contracted = space.resolve([a for _, atoms in contraction[2] for a in atoms])
        if not contracted:
            return None
        softmax, key_axis = self._softmax_along(weights, contracted)
        scores = self._score_contraction(softmax, weights, value)
        if scores is None:
            return None
        score, query, key, head_axis = scores
        batch = (space.atoms(weights) & space.atoms(value)) - set(key_axis)
        self.is_batched_alike = not batch or all(batch & space.atoms(operand) for operand in (query, key))
        further = self._further
        scope.score = score.value
        if score.value in self.settled:
            axes = axes_of(space, score, key_axis)
            if in_backward(node) or not axes or axes in self.settled[score.value]:
                return None
            scope.given = frozenset(self.settled[score.value].values())
        self._check_scores(score, contraction[2])
        for number in (value.value, root):
            if jnp.issubdtype(graph.dtype(number), jnp.complexfloating):
                raise Mismatch(f"the values, or their sums, are of dtype {graph.dtype(number)}", advice=FLOATS)
        found = softmax.exponential(weights)
        if any(factor.kind in ("multiply", "divide") for factor in found.weights):
            self.is_plain = False
        for sign, factor in outside:
            found.rows += [t.scaled(sign) for t in softmax.log(factor)]
        normaliser, rest, row = self._prove(softmax, found)
        if softmax.scaled_behind and max(graph.dtype(n).itemsize for n in (value.value, root)) > 2:
            raise Mismatch(
                "scores of 16-bit numbers are scaled after their maximum is subtracted, for a result with more digits",
                advice="Scale the scores before the maximum is taken: jax.nn.softmax(scores * scale).",
            )
        return AttentionDraft(
            softmax=softmax,
            second=node,
            side=side,
            query_first=self.query_first,
            root=root,
            top=top,
            score=score,
            query=query,
            key=key,
            value=value,
            weights_dtype=graph.dtype(weights.value),
            key_axis=key_axis,
            head_axis=[a for _, atoms in head_axis for a in atoms],
            candidates=further,
            found=found,
            normaliser=normaliser,
            rest=rest,
            row=row,
            assume_finite=self.assume_finite,
            fixed=fixed,
        )

    def _softmax_along(self, weights: Ref, contracted: Sequence[Atom]) -> tuple[Softmax, tuple[Atom, ...]]:
        """Returns a softmax over the axes that are contracted, and these in the weights' order: a sum over merged axes
        runs in that order."""
        space = self.scope.space
        layout = [a for _, atoms in space.view(weights.view) for a in atoms]
        key_axis = tuple(sorted(contracted, key=lambda a: layout.index(a) if a in layout else len(layout)))
        offset = next((o for o, atoms in weights.view if set(space.resolve(atoms)) & set(space.resolve(key_axis))), 0)
        softmax = Softmax(self.scope, key_axis, offset)
        softmax.joins = self._joins
        return softmax, key_axis

    def _check_scores(self, score: Ref, contracted: Sequence[Dimension]) -> None:
        """Raises Mismatch unless the scores are floats and the second contraction sums over the keys alone."""
        dtype = self.graph.dtype(score.value)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise Mismatch(f"the scores are of dtype {dtype}", advice=FLOATS)
        if len(contracted) > 1 and not self._only_keys(contracted, score):
            self.has_values = False  # the weights have an axis of their own, as where they weigh matrices of experts
            raise Mismatch(
                "the second contraction runs over more than the key axis",
                advice="Sum over the keys alone in the product of probabilities and values; sum over other axes "
                "afterwards.",
            )

    def _only_keys(self, contracted: Sequence[Dimension], score: Ref) -> bool:
        """Returns whether every contracted dimension is an axis of the scores."""
        atoms = self.scope.space.atoms(score)
        return all(set(self.scope.space.resolve(a)) <= atoms for _, a in contracted)

    def _score_contraction(
        self, softmax: Softmax, weights: Ref, value: Ref
    ) -> tuple[Ref, Ref, Ref, list[Dimension]] | None:
        """Finds the contraction that gives the scores: (scores, queries, keys, contracted).

        It lies under the exponential, since a product of probabilities with something else belongs to a backward. Among
        several, the one that sums over the most elements is tried first, but after all others one whose keys differ
        between rows that share the values: a bias that is a product of one vector for each query and key.
        """
        space = self.scope.space
        found: list[tuple[tuple[bool, int, int], Ref, Ref, Ref, list[Dimension]]] = []
        obstacle: tuple[int, Mismatch] | None = None  # what hides the scores, if nothing is found
        first: dict[int, bool] = {}  # whether the queries are the first operand
        seen: set[Hashable] = set()
        todo = deque([(weights, False)])
        while todo and len(seen) <= _MOST_BEHIND and len(found) < _MOST_PRODUCTS:
            ref, under = todo.popleft()
            ref = space.canonical(ref)
            key = (ref.value, space.view(ref.view), under)
            if key in seen or not softmax.carries_axis(ref) or not self.reach[ref.value][0]:
                continue
            seen.add(key)
            contraction = space.contraction(ref)
            if contraction is not None:
                a, b, contracted = contraction
                first_source, second_source = space.canonical(a), space.canonical(b)
                axis = set(space.resolve(softmax.axis))  # keys behind a reshape have just split it
                left, right = space.atoms(first_source) & axis, space.atoms(second_source) & axis
                if under and left != right:
                    query, keys = (b, a) if right < left else (a, b)
                    first[ref.value] = not right < left
                    size = space.extent([x for _, atoms in contracted for x in atoms])
                    sources = (first_source, second_source) if right < left else (second_source, first_source)
                    labels = space.atoms(sources[0]) - space.atoms(sources[1]) - axis
                    fits = labels <= space.atoms(space.canonical(value))
                    found.append(((fits, size, -len(found)), ref, query, keys, contracted))
                elif under:
                    shared = "the probabilities are contracted over an axis that queries and keys share"
                    obstacle = ref.value, Mismatch(shared, advice=OVER_THE_KEYS)
                continue
            under = under or self.scope.exponential(ref) is not None
            operands, node = space.operands(ref), self.scope.node(ref)
            if obstacle is None and operands is None and node is not None and node.name not in _REDUCTIONS:
                if under or holds_softmax(node):
                    through = f"the scores pass through {node.name}"
                    obstacle = ref.value, Mismatch(through, advice=BETWEEN_PRODUCTS)
                    if node.name in CUSTOM_RULES:
                        own = f"{through}, which has a derivative of its own"
                        obstacle = ref.value, Mismatch(own, advice=OWN_DERIVATIVE)
                    elif node.name == "concatenate" and self._joins_products(node):
                        obstacle = ref.value, SeveralBlocks()
            todo += [(operand, under) for operand in operands or []]
        if not found and obstacle is not None:
            self.scope.score, mismatch = obstacle
            raise mismatch
        if not found and todo:
            self.scope.score = weights.value
            raise Mismatch(
                f"the {_MOST_BEHIND} values nearest to the weights hold no product of queries and keys, and further "
                "ones are not looked at",
                advice=BETWEEN_PRODUCTS,
            )
        if not found:
            return None
        found.sort(key=lambda f: f[0], reverse=True)
        if self._chosen is None:
            self._others = list(dict.fromkeys(f[1].value for f in found[1:]))
        _, ref, query, keys, contracted = next((f for f in found if f[1].value == self._chosen), found[0])
        self.query_first = first[ref.value]
        self._further = [
            Product(space.canonical(other), q, k, first[other.value], tuple(a for _, atoms in d for a in atoms))
            for _, other, q, k, d in found
            if other.value != ref.value
        ]
        return space.canonical(ref), query, keys, contracted

    def _joins_products(self, node: Node) -> bool:
        """Returns whether scores of several blocks of keys become one array."""
        return sum(self.reach[number][0] for number in node.inputs) > 1

    def _prove(self, softmax: Softmax, found: Exponential) -> tuple[LogSumExp, list[Term], RowFactor | None]:
        """Returns the normaliser, the terms beside it, none of which depends on the scores, and a further factor of the
        rows."""
        if softmax.added_behind:
            raise Mismatch(
                "something is added to the scores after their maximum is subtracted, which may be that of a mask",
                advice="Add it before the maximum is taken: jax.nn.softmax(scores + added).",
            )
        try:
            exact = self._prove_exact(softmax, found)
            if not found.guarded:
                return *exact, None
            if softmax.may_be_nothing_but_fills(exact[0]):
                raise Mismatch(
                    "a row whose keys are hidden after the maximum is subtracted is set to 0",
                    advice="Mask the scores, with -inf, before their maximum is taken: jax.nn.softmax(scores, "
                    "where=mask).",
                )
            if softmax.overflows:
                raise Mismatch(
                    "a row of nothing but a mask's fill has a maximum that is infinite in a narrower dtype",
                    advice=OWN_DTYPE,
                )
            factor = row_factor(softmax, found)
            assert factor is not None
        except Mismatch as mismatch:
            try:
                factor = None if found.guarded else row_factor(softmax, found)
            except Mismatch:
                factor = None
            if factor is None:
                raise mismatch from None
        return factor.normaliser, [], factor

    def _is_running_maximum(self, ref: Ref) -> bool:
        """Returns whether a value is the larger one of what a loop carries and something else."""
        node = self.graph.definitions.get(self.scope.space.canonical(ref).value)
        if node is None or node.name != "max" or not loops(node.body):
            return False
        carried = {self.graph.numbers[node.body][variable] for variable in node.body.invars}
        return not carried.isdisjoint(node.inputs)

    def _is_joined_maximum(self, ref: Ref) -> bool:
        """Returns whether a value is the maximum of a block of keys, which enters that of all blocks, or the latter."""
        number = self.scope.space.canonical(ref).value
        while self.graph.name(number) in _HANDED_ON:
            number = self.graph.definitions[number].inputs[0]
        return self._enters_maximum(number) or self._is_of_maxima(number)

    def _enters_maximum(self, number: int) -> bool:
        """Returns whether a further maximum is taken of a value, or of what a loop stacks of it."""
        graph = self.graph
        todo, seen = deque([number]), set[int]()
        while todo and len(seen) < _MOST_READERS:
            number = todo.popleft()
            if number in seen:
                continue
            seen.add(number)
            body = graph.definitions[number].body if number in graph.definitions else graph.root
            while body in graph.holders:  # a checkpoint's result is the value inside, a loop's is another
                inner, (body, position) = body, graph.holders[body]
                given = zip(inner.outvars, body.equations[position].outvars, strict=False)
                own, outer = graph.numbers[inner], graph.numbers[body]
                todo += [outer[v] for atom, v in given if isinstance(atom, Var) and own[atom] == number]
            for user in graph.users[number]:
                if user.name in ("max", "reduce_max"):
                    return True
                if user.name in _HANDED_ON:
                    todo += user.outputs
        return False

    def _is_of_maxima(self, number: int) -> bool:
        """Returns whether a value is the maximum of maxima, or of what a loop has stacked."""
        maxima = 0
        for _ in range(_MOST_READERS):
            node = self.graph.definitions.get(number)
            if node is None or node.name == "scan":
                return maxima == 1 and node is not None
            if node.name == "reduce_max":
                maxima += 1
            elif node.name not in _HANDED_ON:
                break
            number = node.inputs[0]
        return maxima > 1

    def _prove_exact(self, softmax: Softmax, found: Exponential) -> tuple[LogSumExp, list[Term]]:
        """Returns the normaliser, and the terms beside it, of weights that are a softmax and nothing else."""
        terms = softmax.combine(found.rows)
        normalisers = [t for t in terms if t.kind == "logsumexp" and softmax.depends(t)]
        if not normalisers:
            if softmax.note is not None:
                raise NoNormaliser(softmax.note.reason, advice=softmax.note.advice)
            if any(t.kind == "log" and softmax.depends(t) for t in terms):
                raise NoNormaliser("the denominator is not a sum over the keys", advice=NORMALISE)
            if any(t.kind == "value" and self._is_running_maximum(t.value) for t in terms):
                raise InBlocks(
                    "the program goes through the keys block by block already, with a running maximum",
                    advice=NO_LOOP_OVER_KEYS,
                )
            if any(t.kind == "value" and t.coefficient == -1 and self._is_joined_maximum(t.value) for t in terms):
                raise InBlocks(
                    "the program goes through the keys block by block already, and joins the blocks' maxima and sums "
                    "afterwards",
                    advice=NO_LOOP_OVER_KEYS,
                )
            raise NoNormaliser("nothing normalises over the keys", advice=SAME_SUM)
        if len(normalisers) > 1:
            raise Mismatch("the normaliser sums something else than the numerator", advice=SAME_SUM)
        inner = normalisers[0].inner
        if abs(normalisers[0].coefficient + 1) > 1e-12:
            raise Mismatch("the normaliser enters with another power than -1", advice=SAME_SUM)
        if self.scope.key(inner.argument) != self.scope.key(found.argument):
            raise Mismatch("the normaliser sums something else than the numerator", advice=SAME_SUM)
        rest = [t for t in terms if t is not normalisers[0]]
        if any(softmax.depends(t) for t in rest):
            raise softmax.note or Mismatch(
                "a function of the row of scores remains beside the normaliser", advice=SAME_SUM
            )
        return inner, rest


def holds_softmax(node: Node) -> bool:
    """Returns whether a custom rule's body could compute a softmax."""
    if node.name not in CUSTOM_RULES:
        return False
    inner = (body for _, _, body in jaxprs.bodies(node.equation))
    return {"exp", "reduce_sum"} <= {equation.primitive.name for equation in jaxprs.every_equation(*inner)}
