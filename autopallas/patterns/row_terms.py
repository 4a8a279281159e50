"""Reads values of a row of scores as sums of terms: logarithms of sums of exponentials, and what else is added.

``log(sum over S of exp(x))`` is one kind of term.  A subtracted maximum is another one, which cancels however often it
was subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from autopallas.graph import Ref
from autopallas.graph.labels import Atom, Dimension
from autopallas.numerics.casts import keeps_range, rounds, widens
from autopallas.patterns.advice import EPSILON, OVER_THE_KEYS, SAME_SUM, SINK, STOP_EARLIER
from autopallas.patterns.expressions import Expression, Scope
from autopallas.patterns.key_axis import DEEPEST, KeyAxis
from autopallas.patterns.logarithms_of_sums import is_logaddexp
from autopallas.patterns.match import Mismatch
from autopallas.patterns.softmax_terms import Exponential, Factor, LogSumExp, SeveralBlocks, Term

__all__ = ["MOST_TERMS", "RowTerms"]

MOST_TERMS = 32
"""Most terms of one sum of logarithms; a longer sum is a term of its own."""
_HELD = 2**15
"""Largest number of keys for which every floating dtype holds a sum of exponentials that are at most 1 each."""


class RowTerms(KeyAxis):
    """Reads row values of one site."""

    def __init__(self, scope: Scope, axis: tuple[Atom, ...], offset: int):
        super().__init__(scope, axis, offset)
        self.note: Mismatch | None = None  # why a denominator could not be read
        self.unshifted = False  # whether some exponential was read without a subtracted maximum
        self.rounded = False  # whether some exponential is relative to a maximum in a narrower dtype
        self.joins = False  # whether sums relative to maxima of their own are read as those of other blocks of keys
        self.apart = False  # whether one was
        self.opens = False  # whether row values of other blocks' scores are read too, as where two blocks are joined

    def exponential(self, ref: Ref, depth: int = 0) -> Exponential:
        """Pulls summands back to an exponential of the scores."""
        raise NotImplementedError

    # ------------------------------------------------------------------ row values

    def linear(self, ref: Ref, depth: int = 0) -> list[Term]:
        """Returns a row value as a sum of terms."""
        ref = self.space.canonical(ref)
        number = self.scope.number(ref)
        if number is not None:
            return [Term(float(number), "constant", None)]
        itself = [Term(1.0, "value", ref)]
        if not (self.opens or self.scope.depends(ref.value)) or depth > DEEPEST:
            return itself
        terms = self.remembered("linear", ref, lambda: self._summands(ref, depth + 1), self.opens)
        return itself if terms is None else list(terms)

    def _summands(self, ref: Ref, depth: int) -> list[Term] | None:
        """Returns the terms that a row value is the sum of, or None where it is a term of its own."""
        name, operands = self.scope.name(ref), self.space.operands(ref)
        if operands is None:
            return None
        if name in ("add", "add_any", "sub"):
            sign = -1 if name == "sub" else 1
            left, right = (self.linear(operand, depth) for operand in operands)
            terms = self.combine([*left, *(t.scaled(sign) for t in right)])
            return terms if len(terms) <= MOST_TERMS else None
        if name == "neg":
            return [t.scaled(-1) for t in self.linear(operands[0], depth)]
        if name == "convert_element_type" and self._widens(ref, operands[0]):
            return self.linear(operands[0], depth)
        if name == "log":
            return self.log(operands[0], depth)
        if name == "custom_jvp_call" and (node := self.scope.node(ref)) and is_logaddexp(node.equation):
            return self._joined(operands, depth)
        if name in ("mul", "div"):
            for position in (0, 1) if name == "mul" else (0,):
                number = self.scope.number(operands[1 - position])
                if number:
                    factor = number if name == "mul" else 1 / number
                    return [t.scaled(factor) for t in self.linear(operands[position], depth)]
        if name == "max":  # jax.nn.softmax guards against an empty axis with max(-inf, m)
            for position in (0, 1):
                if self.scope.number(operands[position]) == -math.inf:
                    return self.linear(operands[1 - position], depth)
        return None

    def log(self, ref: Ref, depth: int = 0) -> list[Term]:
        """Returns the logarithm of a row factor as a sum of terms."""
        ref = self.space.canonical(ref)
        number = self.scope.number(ref)
        if number is not None and number > 0:
            return [Term(math.log(number), "constant", None)]
        if not (self.opens or self.scope.depends(ref.value)) or depth > DEEPEST:
            return [Term(1.0, "log", ref)]
        return list(self.remembered("log", ref, lambda: self._log(ref, depth + 1), self.opens))

    def _joined(self, operands: Sequence[Ref], depth: int) -> list[Term] | None:
        """Returns the logarithm of the sum of the exponentials of row values; None where it is no normaliser.

        What does not depend on the scores may be the logarithm of a sum over other keys.
        """
        outer, self.opens = self.opens, True
        try:
            return self._log_of_sum([self.linear(operand, depth) for operand in operands])
        except SeveralBlocks:
            raise
        except Mismatch:
            return None
        finally:
            self.opens = outer

    def _log(self, ref: Ref, depth: int) -> list[Term]:
        name, operands, node = self.scope.name(ref), self.space.operands(ref), self.scope.node(ref)
        itself = [Term(1.0, "log", ref)]
        if operands is not None and node is not None:
            if name == "convert_element_type" and self._rounds(ref, operands[0]):
                terms = self.log(operands[0], depth)
                if self._keeps_range(ref, operands[0]) or self._is_bounded(terms) or self._sums_in(ref, operands[0]):
                    return terms
                raise Mismatch(
                    f"the denominator is cast to {self.scope.dtype(ref)}, which may not hold it",
                    advice="Subtract the maximum of the scores before the exponential, or leave the denominator in the "
                    "dtype in which it is summed.",
                )
            if name == "abs":  # jax.scipy.special.logsumexp takes abs of a sum that is positive anyway
                inner = self.log(operands[0], depth)
                return inner if all(map(_positive, inner)) else itself
            if name == "exp":
                return self.linear(operands[0], depth)
            if name in ("mul", "div"):
                sign = 1 if name == "mul" else -1
                left, right = (self.log(operand, depth) for operand in operands)
                terms = self.combine([*left, *(t.scaled(sign) for t in right)])
                return terms if len(terms) <= MOST_TERMS else itself
            if name == "integer_pow":
                return [t.scaled(node.params["y"]) for t in self.log(operands[0], depth)]
            if name in ("add", "add_any") and any(self.scope.number(operand) == 0 for operand in operands):
                (other,) = [o for o in operands if self.scope.number(o) != 0]  # two zeros would sum to a known number
                return self.log(other, depth)
            if name in ("add", "add_any", "max"):
                if (found := self._unchanged(name, operands, depth)) is not None:
                    return found
            if name in ("add", "add_any"):
                try:
                    return self._log_of_sum([self.log(o, depth) for o in operands])
                except Mismatch as mismatch:
                    self.note = mismatch.with_traceback(None)
            if name == "max":
                self.note = Mismatch("there is a floor under the denominator", advice=EPSILON)
            if name == "stop_gradient":
                self.note = Mismatch("the gradient is stopped inside the softmax", advice=STOP_EARLIER)
        if name == "reduce_sum":
            found = self._log_of_reduction(ref)
            return found if self.scope.depends(ref.value) else self._relative(found, ref)
        if name == "dot_general":
            found = self._log_of_dot(ref)
            if found is not None:
                return found
        return itself

    def _unchanged(self, name: str, operands: Sequence[Ref], depth: int) -> list[Term] | None:
        """Returns the logarithm of a sum of exponentials combined with a number too small to matter; None otherwise.

        One of the exponentials is 1 where the maximum is subtracted. Adding less than half a unit in the last place of
        1 then has no effect, nor has a floor below 1.
        """
        for ref, other in (operands, operands[::-1]):
            number = self.scope.number(other)
            double = self.scope.dtype(ref) == np.float64
            if number is None or not 0 <= number < (1.0 if name == "max" else 2.0 ** (-54 if double else -25)):
                continue
            terms = self.log(ref, depth)
            shift = [t for t in terms if t.kind != "logsumexp"]
            if len(shift) == 1 and len(terms) == 2 and shift[0].kind == "value" and shift[0].coefficient == -1:
                (inner,) = (t.inner for t in terms if t.kind == "logsumexp")
                if not inner.weights and not inner.extras and self._is_maximum(shift[0].value, inner.argument):
                    return terms
        return None

    def _sums_in(self, result: Ref, total: Ref) -> bool:
        """Returns whether a cast returns a sum to the narrow dtype of its summands, which JAX widens to add them. In
        that dtype the summands overflow too."""
        if self.scope.name(total) != "reduce_sum":
            return False
        summands = self.space.canonical(self.reduced(total))
        inner = self.space.operands(summands) or []
        return any(self.scope.dtype(x) == self.scope.dtype(result) for x in (summands, *inner))

    def _is_bounded(self, terms: Sequence[Term]) -> bool:
        """Returns whether terms are the logarithm of a sum of exponentials that are at most 1, and not too many."""
        sums = [t.inner for t in terms if t.kind == "logsumexp"]
        weighted = any(x.extras or any(w.kind in ("multiply", "divide") for w in x.weights) for x in sums)
        return not (self.unshifted or weighted or self.space.extent(self.axis) > _HELD)

    def _is_maximum(self, row: Ref, argument: Expression, about: bool = False) -> bool:
        """Returns whether a row value is the maximum of some values over the keys. With ``about``, rounding is allowed,
        and so is 0 instead of an infinite maximum."""
        keeps = self._rounds if about else self._widens
        row = self.space.canonical(row)
        rounded = False
        for _ in range(DEEPEST):
            name, operands = self.scope.name(row), self.space.operands(row) or []
            kept = [o for o in operands if name != "max" or self.scope.number(o) != -math.inf]
            if about and name == "select_n" and len(operands) == 3 and self.scope.name(operands[0]) == "is_finite":
                kept = operands[2:]
            elif name == "convert_element_type":
                if not (keeps(row, operands[0]) and self._keeps_range(row, operands[0])):
                    return False
                rounded |= not self._widens(row, operands[0])
            elif name not in ("stop_gradient", "max") or len(kept) != 1:
                break
            (row,) = kept
        if self.scope.name(row) != "reduce_max":
            return False
        try:
            found = self._equal(self.reduced(row), argument)
        except Mismatch:
            return False
        self.rounded |= found and rounded
        return found

    def _equal(self, a: Expression, b: Expression) -> bool:
        """Returns whether two values are the same, or the same mask of the same values with equal numbers as fills."""
        if self.scope.key(a) == self.scope.key(b):
            return True
        if not isinstance(a, Ref) or not isinstance(b, Ref):
            return False
        a, b = self.space.canonical(a), self.space.canonical(b)
        if self.scope.name(a) != "select_n" or self.scope.name(b) != "select_n":
            return False
        cases = zip(self.space.operands(a) or [], self.space.operands(b) or [], strict=True)
        return all(
            self.scope.key(x) == self.scope.key(y) or self.scope.number(x) == self.scope.number(y) is not None
            for x, y in cases
        )

    # ------------------------------------------------------------------ logarithms of sums

    def _log_of_sum(self, summands: Sequence[list[Term]]) -> list[Term]:
        """Returns log(a + b) where one summand is a normaliser and the others, relative to it, do not depend on the
        scores."""
        if self.joins:
            summands = [self.combine(part for t in terms for part in self._of_another_block(t)) for terms in summands]
        normalisers = [
            i for i, terms in enumerate(summands) if any(t.kind == "logsumexp" and self.depends(t) for t in terms)
        ]
        if len(normalisers) > 1:
            raise SeveralBlocks
        if not normalisers:  # take the normaliser of another block of keys
            normalisers = [i for i, terms in enumerate(summands) if any(t.kind == "logsumexp" for t in terms)][:1]
        if not normalisers:
            raise Mismatch("a sum in the denominator lacks a normaliser", advice=SAME_SUM)
        terms = summands[normalisers[0]]
        found = [t for t in terms if t.kind == "logsumexp"]
        if len(found) != 1 or found[0].coefficient != 1:
            raise Mismatch("the normaliser is not understood", advice=SAME_SUM)
        shift = [t for t in terms if t.kind != "logsumexp"]
        extras: list[tuple[Term, ...]] = []
        for i, other in enumerate(summands):
            if i == normalisers[0]:
                continue
            extra = self.combine([*other, *(t.scaled(-1) for t in shift)])
            if any(self.depends(t) for t in extra):
                raise Mismatch(
                    "an epsilon (or another function of the row) is added to the denominator", advice=EPSILON
                )
            if any(t.kind == "log" for t in extra):
                raise Mismatch("what is added to the denominator is not known to be positive", advice=SINK)
            extras.append(tuple(extra))
        inner = found[0].inner
        merged = LogSumExp(inner.argument, inner.weights, (*inner.extras, *extras))
        return [*shift, Term(1.0, "logsumexp", merged)]

    def _log_of_reduction(self, ref: Ref) -> list[Term]:
        """Returns the log of a sum over the keys, or over the keys and sink columns beside them."""
        node = self.scope.node(ref)
        assert node is not None
        axes, source = tuple(node.params["axes"]), node.inputs[0]
        shape = self.scope.graph.shape(source)
        kept = iter(ref.view)
        view: list[Dimension | None] = [None if d in axes else next(kept) for d in range(len(shape))]

        def with_axes(dimensions: Iterable[Dimension]) -> Ref:
            left = iter(dimensions)
            return Ref(source, tuple(next(left) if d is None else d for d in view))

        sizes, labels = [shape[d] for d in axes], self.space.resolve(self.axis)
        pieces: list[tuple[Ref, tuple[Atom, ...]]]
        if math.prod(sizes) == self.space.extent(labels):
            groups = self.space.cut(labels, [n for n in sizes if n != 1])
            if groups is None:
                return [Term(1.0, "log", ref)]
            left = iter(groups)
            pieces = [(with_axes((0, ()) if n == 1 else next(left) for n in sizes), self.axis)]
        else:
            segments = self.segments(source, axes[0]) if len(axes) == 1 else None
            if not segments:
                others = self.space.inside(ref, sizes)
                terms = self._another_block(with_axes(others), [a for _, atoms in others for a in atoms])
                if terms is None:
                    raise Mismatch(
                        "the softmax runs over another axis, or over more than the keys", advice=OVER_THE_KEYS
                    )
                return terms
            pieces, start = [], 0
            for size in segments:
                mine = size == self.space.extent(labels) and start == self.offset
                atoms = labels if mine else self.space.fresh(size)
                pieces.append((with_axes([(start, atoms)]), atoms))
                start += size
        summands = []
        for piece, atoms in pieces:
            if not atoms:
                summands.append(self._column(piece))
                continue
            outer, self.axis = self.axis, atoms
            try:
                found = self.exponential(piece)
            finally:
                self.axis = outer
            summands.append([*found.rows, Term(1.0, "logsumexp", LogSumExp(found.argument, tuple(found.weights)))])
        return summands[0] if len(summands) == 1 else self._log_of_sum(summands)

    def _of_another_block(self, term: Term) -> list[Term]:
        """Returns a term, or the terms of a sum of exponentials of other scores that are relative to numbers of the row
        of their own."""
        known = term.kind == "log" and term.coefficient == 1 and self.scope.name(term.value) == "reduce_sum"
        if not self.joins or not known:
            return [term]
        try:
            return self._relative(self._log_of_reduction(term.value), term.value)
        except Mismatch:
            return [term]

    def _relative(self, found: Sequence[Term], total: Ref) -> list[Term]:
        """Returns the logarithm of a sum of exponentials of other scores, with what is subtracted from all scores of a
        row as a term of its own."""
        row, terms = self.space.atoms(total), []
        for part in found:
            while part.kind == "logsumexp" and isinstance(part.inner.argument, Ref):
                argument = part.inner.argument
                operands = self.space.operands(argument) if self.scope.name(argument) == "sub" else None
                if not operands or not self.space.atoms(operands[1]) <= row:
                    break
                self.apart = True
                terms += [t.scaled(-part.coefficient) for t in self.linear(operands[1])]
                inner = replace(part.inner, argument=self.space.canonical(operands[0]))
                part = part._replace(expression=inner)
            terms.append(part)
        return terms

    def _another_block(self, ref: Ref, axis: Sequence[Atom]) -> list[Term] | None:
        """Returns the logarithm of a sum of exponentials of other scores over an axis; None where the sum is another
        one."""
        outer, self.axis = self.axis, tuple(axis)
        before = self.unshifted
        try:
            found = self.exponential(ref)
        except Mismatch:
            return None
        finally:
            self.axis, self.unshifted = outer, before  # the other block's own proof says whether it is shifted
        if self.scope.reads_score(found.argument):
            return None
        return [*found.rows, Term(1.0, "logsumexp", LogSumExp(found.argument, tuple(found.weights)))]

    def _column(self, ref: Ref) -> list[Term]:
        """Returns the logarithm of a single column beside the keys (a sink), which is an exponential without S."""
        ref = self.space.canonical(ref)
        operands = self.space.operands(ref)
        while self.scope.name(ref) == "convert_element_type" and operands and self._rounds(ref, operands[0]):
            ref = operands[0]
            operands = self.space.operands(ref)
        if self.scope.name(ref) != "exp" or operands is None:
            raise Mismatch("a column beside the keys is not an exponential", advice=SINK)
        rows: list[Term] = []
        at = operands[0]
        while self.scope.depends(at.value):
            inner = self.space.operands(at)
            if inner and self.scope.name(at) == "convert_element_type" and self._rounds(at, inner[0]):
                at = inner[0]
            elif inner and self.scope.name(at) == "sub" and self.scope.depends(inner[1].value):
                rows += [t.scaled(-1) for t in self.linear(inner[1])]
                at = inner[0]
            else:
                raise Mismatch(f"a column beside the keys passes through {self.scope.name(at)}", advice=SINK)
        return [*rows, *self.linear(at)]

    def _log_of_dot(self, ref: Ref) -> list[Term] | None:
        """Returns the log of a sum over the keys that is spelled as a dot, with a constant or with weights of keys."""
        node = self.scope.node(ref)
        assert node is not None
        (contracting, _), _ = node.params["dimension_numbers"]
        sizes = [self.scope.graph.shape(node.inputs[0])[d] for d in contracting]
        labels = self.space.resolve(self.axis)
        if not sizes or math.prod(sizes) != self.space.extent(labels):
            return None
        groups = self.space.cut(labels, [n for n in sizes if n != 1])
        if groups is None:
            return None
        left = iter(groups)
        a, b, _ = self.space.dot(ref, [(0, ()) if n == 1 else next(left) for n in sizes])
        for weights, constant in ((a, b), (b, a)):
            number = self.scope.number(self.space.canonical(constant))
            if number is not None and number > 0:
                found = self.exponential(weights)
                inner = LogSumExp(found.argument, tuple(found.weights))
                return [*found.rows, Term(math.log(number), "constant", None), Term(1.0, "logsumexp", inner)]
        for weights, further in ((a, b), (b, a)):
            if self.carries_scores(weights) and not self.scope.depends(further.value):
                found = self.exponential(weights)
                factor = Factor("multiply", further, found.is_normalised)
                inner = LogSumExp(found.argument, (*found.weights, factor))
                return [*found.rows, Term(1.0, "logsumexp", inner)]
        return None

    # ------------------------------------------------------------------ sums of terms

    def combine(self, terms: Iterable[Term]) -> list[Term]:
        """Adds up equal terms and drops those that cancel."""
        sums: dict[Hashable, Term] = {}
        for term in terms:
            key = (term.kind, self.term_key(term))
            before = sums.get(key)
            sums[key] = term if before is None else term._replace(coefficient=before.coefficient + term.coefficient)
        return [t for t in sums.values() if abs(t.coefficient) > 1e-12]  # equal terms cancel exactly

    def term_key(self, term: Term) -> Hashable:
        inner = term.expression
        if inner is None:
            return None
        if isinstance(inner, Ref):
            return self.scope.key(inner)
        return (
            self.scope.key(inner.argument),
            tuple(sorted((self.factor_key(w) for w in inner.weights), key=repr)),
            tuple(sorted(([(t.coefficient, t.kind, self.term_key(t)) for t in e] for e in inner.extras), key=repr)),
        ).__repr__()

    def factor_key(self, factor: Factor) -> tuple[str, Hashable]:
        return factor.kind, self.scope.key(factor.source)

    def depends(self, term: Term) -> bool:
        """Returns whether a term is computed from the scores."""
        expression = term.expression
        if expression is None:
            return False
        return self.scope.reads_score(expression.argument if isinstance(expression, LogSumExp) else expression)

    # ------------------------------------------------------------------ casts

    def _rounds(self, result: Ref, operand: Ref) -> bool:
        """Returns whether the proof reads through a cast of a factor."""
        return rounds(self.scope.graph.dtype(operand.value), self.scope.graph.dtype(result.value))

    def _widens(self, result: Ref, operand: Ref) -> bool:
        """Returns whether a cast keeps every value."""
        return widens(self.scope.graph.dtype(operand.value), self.scope.graph.dtype(result.value))

    def _keeps_range(self, result: Ref, operand: Ref) -> bool:
        """Returns whether a cast makes no finite number infinite, apart from rounding."""
        return keeps_range(self.scope.graph.dtype(operand.value), self.scope.graph.dtype(result.value))


def _positive(term: Term) -> bool:
    """Returns whether a term is the logarithm of a value that is known to be positive."""
    if term.kind != "logsumexp":
        return term.kind == "value" or term.kind == "constant"
    return all(w.kind in ("where", "unless") for w in term.inner.weights)
