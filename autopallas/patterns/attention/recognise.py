"""Finds softmax attention in any spelling: ``out[.., t, d] = sum_S softmax_S(x[.., t, S]) v[S, d]``, x a program of q
k^T.

The anchors are the two contractions. A contraction over S, one side of which comes from an exponential of another
contraction, is pulled apart. :mod:`autopallas.patterns.softmax` proves the softmax, and
:mod:`autopallas.patterns.carry` carries the elementwise program from the scores to x over unchanged.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

import jax.numpy as jnp

from autopallas import compat, jaxprs
from autopallas.compat import JaxprEqn, JaxprLike
from autopallas.faults import contained
from autopallas.graph import Graph, Node, Ref
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.edit import surviving
from autopallas.graph.labels import Atom, Dimension, is_product
from autopallas.graph.proof_cache import ProofCache
from autopallas.numerics.casts import rounds
from autopallas.patterns.advice import (
    BETWEEN_PRODUCTS,
    FLOATS,
    NORMALISE,
    OVER_THE_KEYS,
    OWN_DERIVATIVE,
    OWN_DTYPE,
    SAME_SUM,
)
from autopallas.patterns.attention.blocks import BlockDraft, blocks, sum_with
from autopallas.patterns.attention.draft import AttentionDraft, Escape, Proved, axes_of, escape_of, match_of
from autopallas.patterns.attention.few_keys import few_keys
from autopallas.patterns.attention.maps import SumDraft, summands, with_weights
from autopallas.patterns.attention.other_weights import other_weights
from autopallas.patterns.attention.resemblance import Normalised
from autopallas.patterns.attention.row_factor import RowFactor, row_factor
from autopallas.patterns.attention.score_terms import Product
from autopallas.patterns.attention.taken_over import TakenOver
from autopallas.patterns.backward import Lookup, Search, settle
from autopallas.patterns.examples import of_examples
from autopallas.patterns.expressions import Scope
from autopallas.patterns.forward import PerExample
from autopallas.patterns.match import Match, Mismatch, NearMiss, bounded, describe_reason
from autopallas.patterns.softmax import Softmax
from autopallas.patterns.softmax_terms import Exponential, LogSumExp, NoNormaliser, SeveralBlocks, SeveralMaps, Term

_RANDOM = frozenset({"random_bits", "threefry2x32", "random_unwrap", "rng_bit_generator", "rng_uniform"})
_CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
_MOST_BEHIND = 512
"""Most uses behind probabilities among which the product of queries and keys is looked for, the nearest first.

There are chains of any length of what is multiplied, whose links would each look at all before; no score program is as
long."""
_LAYOUT = frozenset({"transpose", "reshape", "broadcast_in_dim", "squeeze", "copy", "name", "optimization_barrier"})

_SHARED = "several softmaxes read its scores, which the program computes once"

_Place: TypeAlias = tuple[int, tuple[int, ...]]
"""The number of scores, and the axes of these along which keys run."""
_Settled: TypeAlias = Mapping[int, Mapping[tuple[int, ...], int]]
"""Per number of scores whose outcome is known, the axes along which the keys of each site run, and its result."""


def find(graph: Graph, assume_finite: bool = True) -> tuple[list[Match], list[NearMiss]]:
    """Finds every attention in a graph, and the near misses: one outcome for each product of queries and keys, or one
    for each axis of it along which a softmax runs, as where both sides attend to each other."""
    reach = _reach(graph)
    alive = surviving(graph)
    matches: dict[_Place, Match] = {}
    drafts: dict[_Place, AttentionDraft | TakenOver] = {}
    misses: dict[int, NearMiss] = {}
    settled: dict[int, dict[tuple[int, ...], int]] = {}
    sums: set[int] = set()

    def missed(score: int, node: Node, location: str, reason: str, advice: str) -> None:
        """Records a miss, unless the score has one; a contraction's miss replaces that of a sum, which may be the
        normaliser's."""
        if score not in misses or (score in sums and node.name != "reduce_sum"):
            misses[score] = NearMiss("attention", location, reason, score, advice)
            (sums.add if node.name == "reduce_sum" else sums.discard)(score)

    proofs = _Proofs(graph, reach, assume_finite)
    normalised = Normalised(graph, reach, _THROUGH, _holds_softmax)
    for node in graph.nodes:
        if node.name not in ("dot_general", "reduce_sum"):
            continue
        for side in (0, 1):
            if not reach[node.inputs[side if node.name == "dot_general" else 0]][1]:
                continue
            with contained(node):
                outcome = proofs.at(node, side, settled)
                proved, reason, operand, advice = outcome.proved, outcome.reason, outcome.operand, outcome.advice
                if proved is not None:
                    place = proved.score, proved.axes
                    try:
                        matches[place] = match_of(graph, proved, node, alive)
                    except Escape as escape:
                        if place not in drafts:
                            drafts[place] = proofs.draft(outcome, node, side, settled)
                        missed(proved.score, node, jaxprs.location(node.equation), escape.reason, escape.advice)
                    except Mismatch as mismatch:
                        reason, operand, advice = mismatch.reason, mismatch.operand, mismatch.advice
                    if place in matches or place in drafts:
                        settled.setdefault(proved.score, {})[proved.axes] = proved.root
                if reason is not None and outcome.score is not None and not _in_backward(node):
                    if proved is None and not _resembles(outcome, node, side, normalised):
                        continue
                    reason = describe_reason(graph, reason, operand)
                    missed(outcome.score, node, jaxprs.location(node.equation), reason, advice)
    waiting = {place: draft for place, draft in drafts.items() if place not in matches}
    with contained():
        _with_backward(graph, waiting, matches, misses)
    found = Counter(score for score, _ in matches)
    ordered = [
        replace(match, shared=_SHARED * (found[place[0]] > 1))
        for place, match in sorted(matches.items(), key=lambda item: item[0])
    ]
    missed_at = [miss for score, miss in misses.items() if score not in found and score in alive]
    with contained():
        missed_at += few_keys(graph, alive)
    with contained():
        missed_at += other_weights(graph, alive)
    return ordered, missed_at


def _resembles(outcome: _Outcome, node: Node, side: int, normalised: Normalised) -> bool:
    """Returns whether what is no attention is nearly one: values have an axis that the scores lack, and a sum of
    exponentials normalises; or nothing but that sum is missing, which may stand after the second contraction."""
    if not outcome.values:
        return False
    return outcome.bare and node.name == "dot_general" or node.inputs[side if len(node.inputs) > 1 else 0] in normalised


def _in_backward(node: Node) -> bool:
    """Returns whether a contraction belongs to a derivative, where it may contract the gradient of a loss's or router's
    softmax."""
    return node.body.transposed or compat.is_transposed(node.equation)


def _with_backward(
    graph: Graph,
    drafts: dict[_Place, AttentionDraft | TakenOver],
    matches: dict[_Place, Match],
    misses: dict[int, NearMiss],
) -> None:
    """Settles the sites whose intermediate values are used elsewhere: by their own backward, or the site is a near
    miss."""
    searches: dict[_Place, Search] = {}
    for place, draft in drafts.items():
        with contained(draft.second):
            if (search := draft.search()) is not None:
                search.by_example = True
                searches[place] = search
    if not searches:
        return
    lookup = Lookup.of(graph)
    given = {number for match in matches.values() for number in match.results}
    derivatives = (number for node in graph.nodes if _in_backward(node) for number in node.outputs)
    given_up = frozenset([*derivatives, *(search.root for search in searches.values())])
    first = True
    while searches:
        complete = settle(graph, lookup, list(searches.values()), given)
        further: dict[_Place, Search] = {}
        for place, search in searches.items():
            score, _ = place
            if search in complete:
                with contained(drafts[place].second):
                    try:
                        match = drafts[place].match_with(search)
                        if isinstance(search.forward, PerExample):
                            match = of_examples(match, search.forward, search.found)
                        matches[place] = match
                        given |= search.replaced()
                    except Mismatch as mismatch:
                        if first:
                            reason = describe_reason(graph, mismatch.reason, mismatch.operand)
                            misses[score] = replace(misses[score], reason=reason, advice=mismatch.advice)
                        if search.give_way():
                            further[place] = search
            elif first:
                rows = math.prod(graph.shape(score)) // drafts[place].proved.keys
                escape = _used_in_forward(graph, search, given_up, rows)
                if escape is not None:
                    misses[score] = replace(misses[score], reason=escape.reason, advice=escape.advice)
                elif search.found:
                    reason = f"only a part of its backward was recognised; {misses[score].reason}"
                    misses[score] = replace(misses[score], reason=reason)
        searches, first = further, False


def _used_in_forward(graph: Graph, search: Search, given: Set[int], rows: int) -> Escape | None:
    """Returns the escape of a value that the program needs for something else than the sites that were looked at and
    derivatives, whose values are ``given``; None where there is none."""
    alive = surviving(graph, given)
    own = search.forward.own
    for number in sorted((own - {search.root}) & alive):
        for user in graph.users[number]:
            if own.isdisjoint(user.outputs) and not alive.isdisjoint(user.outputs):
                return escape_of(graph, number, rows, user)
    return None


def _reach(graph: Graph) -> list[tuple[bool, bool]]:
    """Returns, per value, whether it comes from a contraction, and whether from an exponential of such a value.

    The way may lead through elementwise operations, layout and reductions. A contraction starts anew.
    """
    reach = [(False, False)] * len(graph.avals)
    for node in graph.nodes:
        name = node.name
        contraction = exponential = False
        if name == "dot_general" and not is_product(node):
            contraction = True
        elif name == "dot_general" or name in _THROUGH:
            for i in node.inputs:
                contraction |= reach[i][0]
                exponential |= reach[i][1]
            if contraction and not exponential:
                exponential = name in ("exp", "exp2", "pow") or _holds_softmax(node)
        if name == "reduce_sum" and not contraction and _sums_product(graph, node):
            contraction, exponential = True, False
        if contraction or exponential:
            for output in node.outputs:
                reach[output] = contraction, exponential
    return reach


_THROUGH = ELEMENTWISE | _LAYOUT | _CUSTOM_RULES | {
    "concatenate", "slice", "split", "expand_dims", "sharding_constraint", "reduce_sum", "reduce_max", "reduce_min",
    "reduce_precision", "pvary", "pcast", "reshard", "copy_p", "layout_constraint", "tile", "cumsum", "gather", "sort",
    "dynamic_slice", "argmax", "pure_callback",
}  # fmt: skip


def _holds_softmax(node: Node) -> bool:
    """Returns whether a custom rule's body could compute a softmax."""
    if node.name not in _CUSTOM_RULES:
        return False
    names = {inner.primitive.name for body in jaxprs.bodies(node.equation) for inner in _equations(body[2])}
    return "exp" in names and "reduce_sum" in names


def _equations(body: JaxprLike) -> Iterator[JaxprEqn]:
    for equation in jaxprs.open_jaxpr(body)[0].eqns:
        yield equation
        for inner in jaxprs.bodies(equation):
            yield from _equations(inner[2])


def _sums_product(graph: Graph, node: Node) -> bool:
    value = node.inputs[0]
    for _ in range(4):
        inner = graph.definitions.get(value)
        if inner is None:
            return False
        if inner.name == "mul" or is_product(inner):
            return True
        if inner.name != "convert_element_type":
            return False
        value = inner.inputs[0]
    return False


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """Outcome of a try to read a contraction as the second one of an attention: a proof, or the reason why there is
    none.

    Attributes:
      score: the number of what looks like scores, if anything does.
      operand: the number of the value that a reason is about, if it is about one.
      draft: the proof itself, where it was not taken over from another place.
      advice: what to write instead of what a reason is about.
      model: where it was taken over, the proof and the values here that correspond to those there.
      values: whether what is multiplied with weights has an axis that these lack, as values have.
      bare: whether all that fails is that no sum over the keys was found, of scores of two batched operands.
    """

    score: int | None
    proved: Proved | None = None
    reason: str | None = None
    operand: int | None = None
    draft: AttentionDraft | None = None
    advice: str = ""
    model: tuple[AttentionDraft, Mapping[int, int]] | None = None
    values: bool = True
    bare: bool = False

    def at(self, image: Mapping[int, int]) -> _Outcome:
        """Returns the same outcome with corresponding values."""
        score = None if self.score is None else image[self.score]
        operand = None if self.operand is None else image.get(self.operand)
        proved = None if self.proved is None else self.proved.at(image)
        model = None if self.draft is None else (self.draft, image)
        return replace(self, score=score, proved=proved, operand=operand, draft=None, model=model)


class _Proofs:
    """Tries contractions, and remembers the outcomes for others of the same form."""

    def __init__(self, graph: Graph, reach: list[tuple[bool, bool]], assume_finite: bool):
        self.graph, self.reach, self.assume_finite = graph, reach, assume_finite
        self._known: ProofCache[tuple[_Outcome, Hashable]] = ProofCache(graph, reach)

    def at(self, node: Node, side: int, settled: _Settled) -> _Outcome:
        def known(outcome: _Outcome) -> Hashable:
            if outcome.score not in settled:
                return False
            return True if _in_backward(node) else object()  # what other sites give is not compared

        for (outcome, before), image in self._known.like(node, side):
            here = outcome.at(image)
            if known(here) == before:
                return here

        def proof(graph: Graph) -> tuple[_Outcome, Hashable]:
            outcome = self.anew(graph, node, side, settled)
            return outcome, known(outcome)

        outcome, _ = self._known.prove(node, side, proof)
        if outcome.draft is not None:
            outcome.draft.go_on(self.graph)
        return outcome

    def draft(self, outcome: _Outcome, node: Node, side: int, settled: _Settled) -> AttentionDraft | TakenOver:
        """Returns the draft of a proved outcome, of which the site and its backward are made."""
        if outcome.draft is not None:
            return outcome.draft
        before = {score: dict(sites) for score, sites in settled.items()}

        def anew() -> AttentionDraft:
            draft = self.anew(self.graph, node, side, before).draft
            assert draft is not None
            return draft

        if outcome.model is None or outcome.proved is None or type(outcome.model[0]) is not AttentionDraft:
            return anew()
        return TakenOver(self.graph, *outcome.model, node, outcome.proved, anew)

    def anew(self, graph: Graph, node: Node, side: int, settled: _Settled) -> _Outcome:
        """Returns the outcome of a try that takes nothing over from other places."""
        attempt = _Attempt(graph, self.reach, self.assume_finite, settled)
        try:
            with bounded(graph):
                draft = attempt.draft(node, side)
        except Mismatch as mismatch:
            return _Outcome(
                attempt.scope.score,
                reason=mismatch.reason,
                operand=mismatch.operand,
                advice=mismatch.advice,
                values=attempt.has_values,
                bare=isinstance(mismatch, NoNormaliser) and attempt.is_batched_alike,
            )
        return _Outcome(attempt.scope.score, None if draft is None else draft.proved, draft=draft)


class _Attempt:
    """One try to read a contraction as the second one of an attention."""

    def __init__(
        self,
        graph: Graph,
        reach: list[tuple[bool, bool]],
        assume_finite: bool,
        settled: _Settled,
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
            if isinstance(mismatch, (SeveralBlocks, NoNormaliser)):
                with contextlib.suppress(Mismatch):
                    return self._in_blocks(node)
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
            raise mismatch from None

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
            if user.name in _LAYOUT:
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
            attempt = _Attempt(self.graph, self.reach, self.assume_finite, {})
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
        scope = Scope(self.graph)
        root = node.outputs[0]
        top = scope.space.full(root)
        contraction = scope.space.contraction(scope.space.canonical(top))
        if contraction is None or node.name != "dot_general":
            raise SeveralMaps
        drafts, signs = [], []
        keys = [atom for _, atoms in contraction[2] for atom in atoms]
        for summand in summands(scope, contraction[0] if side == 0 else contraction[1], keys):
            attempt = _Attempt(self.graph, self.reach, self.assume_finite, {})
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
        # Keep the axes in the weights' order, since a sum over merged axes runs in that order.
        layout = [a for _, atoms in space.view(weights.view) for a in atoms]
        key_axis = tuple(sorted(contracted, key=lambda a: layout.index(a) if a in layout else len(layout)))
        offset = next((o for o, atoms in weights.view if set(space.resolve(atoms)) & set(space.resolve(key_axis))), 0)
        softmax = Softmax(scope, key_axis, offset)
        softmax.joins = self._joins
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
            if _in_backward(node) or not axes or axes in self.settled[score.value]:
                return None
            scope.given = frozenset(self.settled[score.value].values())
        if not jnp.issubdtype(graph.dtype(score.value), jnp.floating):
            raise Mismatch(f"the scores are of dtype {graph.dtype(score.value)}", advice=FLOATS)
        if len(contraction[2]) > 1 and not self._only_keys(contraction[2], score):
            self.has_values = False  # the weights have an axis of their own, as where they weigh matrices of experts
            raise Mismatch(
                "the second contraction runs over more than the key axis",
                advice="Sum over the keys alone in the product of probabilities and values; sum over other axes "
                "afterwards.",
            )
        found = softmax.exponential(weights)
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
        while todo and len(seen) <= _MOST_BEHIND:
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
                if under or _holds_softmax(node):
                    through = f"the scores pass through {node.name}"
                    obstacle = ref.value, Mismatch(through, advice=BETWEEN_PRODUCTS)
                    if node.name in _CUSTOM_RULES:
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

    def _prove_exact(self, softmax: Softmax, found: Exponential) -> tuple[LogSumExp, list[Term]]:
        """Returns the normaliser, and the terms beside it, of weights that are a softmax and nothing else."""
        terms = softmax.combine(found.rows)
        normalisers = [t for t in terms if t.kind == "logsumexp" and softmax.depends(t)]
        if not normalisers:
            if softmax.note is not None:
                raise NoNormaliser(softmax.note.reason, advice=softmax.note.advice)
            if any(t.kind == "log" and softmax.depends(t) for t in terms):
                raise NoNormaliser("the denominator is not a sum over the keys", advice=NORMALISE)
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
