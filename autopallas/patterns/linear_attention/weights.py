"""Reads what scores are multiplied by: a causal mask, numbers, and decays between the steps.

A decay is the exponential of a sum that is linear in the positions t and s, or in a sequence at t and at s; both with
opposite signs, so that only the steps between them count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from autopallas.graph import Ref
from autopallas.graph.labels import Atom, View
from autopallas.kernels.linear_attention.operation import DecayForm
from autopallas.patterns.expressions import Scope
from autopallas.patterns.linear_attention.captured import captured_steps
from autopallas.patterns.linear_attention.exponents import Term, added
from autopallas.patterns.linear_attention.factors import Factor, FactorReader, OwnFactor, Product
from autopallas.patterns.linear_attention.masks import COMPARISONS, MaskReader, Seen, Triangle
from autopallas.patterns.linear_attention.steps import BothSteps, Role, Unread

__all__ = ["Weights", "read_weights"]

_MOST = 256
"""Most values that are looked at to find a mask."""


class Weights(NamedTuple):
    """Everything that scores are multiplied by.

    Attributes:
      seen: which pairs of steps are left.
      steps: the labels of the steps t.
      factor: a number.
      form, rate: how scores decay, as the operation's spec has it.
      decay: the array that tells the decays, under the labels of t where it varies with the steps.
      rounding: the relative error with which it holds them, where it is a captured one.
      of_t, of_s: arrays that vary with one of both steps at most.
    """

    seen: Seen
    steps: tuple[Atom, ...]
    factor: float = 1.0
    form: DecayForm | None = None
    rate: float = 1.0
    decay: Ref | None = None
    rounding: float = 0.0
    of_t: OwnFactor | None = None
    of_s: OwnFactor | None = None


def read_weights(scope: Scope, factors: Sequence[Factor], keys: Sequence[Atom]) -> Weights:
    """Returns what several factors of scores are together.

    Args:
      scope: the site's values.
      factors: what scores are multiplied by.
      keys: the labels of the steps s that are seen.

    Raises:
      Unread: they are no weights.
    """
    masks = MaskReader(scope, keys)
    steps = _steps(masks, [factor.ref for factor in factors])
    if steps is None:
        raise Unread
    reader = FactorReader(BothSteps(masks, steps))
    try:
        return _together(reader.steps, reader.product(factors), True)
    except Unread as unread:  # exponentials may be no decays, but arrays of one step each
        reader.decays_alone = False
        with suppress(Unread):
            return _together(reader.steps, reader.product(factors), False)
        raise unread


def _steps(masks: MaskReader, refs: Iterable[Ref]) -> tuple[Atom, ...] | None:
    """Returns the labels of the steps t that the first mask has, among values from which factors are computed."""
    space, graph = masks.space, masks.graph
    todo = [*refs]
    known: set[tuple[int, View]] = set()
    while todo and len(known) < _MOST:
        ref = space.canonical(todo.pop(0))
        key = ref.value, space.view(ref.view)
        if key in known or masks.scope.number(ref) is not None:
            continue
        known.add(key)
        name = masks.scope.name(ref)
        found: Triangle | tuple[Atom, ...] | None = None
        if name is None:
            found = captured_steps(masks, ref)
        elif name in COMPARISONS:
            found = masks.mask(ref)
        if found is not None:
            return space.resolve(found.steps if isinstance(found, Triangle) else found)
        if name == "cumsum":
            todo.append(Ref(graph.definitions[ref.value].inputs[0], ref.view))
        else:
            todo += space.operands(ref) or ()
    return None


def _together(steps: BothSteps, product: Product, decays_alone: bool) -> Weights:
    """Returns what a product is, if it is a mask with decays."""
    if not product.seen:
        raise Unread
    seen = product.seen[0]
    if any(other != seen for other in product.seen):
        seen = _both(product.seen)
    if any(other != seen and not _holds(other, seen) for other in product.hidden):
        raise Unread("decays are hidden by another mask than the scores")
    factor, terms = _without_counts(steps, product, seen)
    weights = Weights(seen, steps.space.resolve(steps.steps), factor)
    for own in product.arrays:
        at = "of_s" if "s" in steps.roles(own.ref) else "of_t"
        if getattr(weights, at) is not None:
            raise Unread("several arrays are factors of the same step")
        weights = weights._replace(of_t=own) if at == "of_t" else weights._replace(of_s=own)
    if not decays_alone and weights.of_t is not None and weights.of_s is not None:
        # Such exponentials may be far apart from one, and their products near to it.
        raise Unread("exponentials at both steps are no decays between them")
    if not math.isfinite(factor) or factor == 0:
        raise Unread("a factor is zero or not finite")
    if not terms:
        return weights
    kinds = {(term.kind, term.base) for term in terms}
    if kinds == {("array", False)}:
        return _of_sums(steps, weights, terms)
    if len(terms) != 1:
        raise Unread("they decay by several arrays")
    (term,) = terms
    sign = -1.0 if seen.reverse else 1.0
    match term.kind:
        case "position":
            form: DecayForm = "number" if term.array is None else "powers" if term.base else "rates"
            if form == "powers" and abs(term.coefficient) != 1:
                raise Unread("a decay is raised to a multiple of the number of steps between t and s")
            return weights._replace(form=form, rate=sign * term.coefficient, decay=term.array)
        case "captured":
            return weights._replace(form="captured", rate=term.coefficient, decay=term.array, rounding=term.rounding)
        case "segment":
            if term.role != ("s" if seen.reverse else "t"):
                raise Unread("running sums of decays have the steps that the mask hides")
            assert term.array is not None
            array = _at_t(steps, term.array, term.role)
            return weights._replace(form="steps", rate=term.coefficient, decay=array)
        case _:
            raise Unread("they decay by several arrays")


def _both(masks: Sequence[Seen]) -> Seen:
    """Returns the one of several masks whose pairs of steps all have."""
    for seen in masks:
        if all(other == seen or _holds(other, seen) for other in masks):
            return seen
    raise Unread("several masks hide steps on both sides")


def _of_sums(steps: BothSteps, weights: Weights, terms: Sequence[Term]) -> Weights:
    """Returns decays of which a sequence at t and at s tells the logarithms."""
    found = {role: [term for term in terms if term.role == role] for role in ("t", "s", "")}
    if found[""] or len(found["t"]) != 1 or len(found["s"]) != 1:
        raise Unread("exponents of decays are no differences of a sequence at both steps")
    (of_t,), (of_s,) = found["t"], found["s"]
    assert of_t.array is not None
    assert of_s.array is not None
    array = steps.space.canonical(of_t.array)
    if of_t.coefficient != -of_s.coefficient or not steps.space.same(_at_t(steps, of_s.array, "s"), array):
        raise Unread("exponents of decays are no differences of one sequence at both steps")
    rate = -of_t.coefficient if weights.seen.reverse else of_t.coefficient
    return weights._replace(form="sums", rate=rate, decay=array)


def _at_t(steps: BothSteps, ref: Ref, role: Role) -> Ref:
    """Returns a sequence at t that is read at t or s."""
    ref = steps.space.canonical(ref)
    if role == "t":
        return ref
    names = dict(zip(steps.keys, steps.space.resolve(steps.steps), strict=True))
    view = ((start, tuple(names.get(a, a) for a in own)) for start, own in steps.space.view(ref.view))
    return Ref(ref.value, tuple(view))


def _without_counts(steps: BothSteps, product: Product, seen: Seen) -> tuple[float, list[Term]]:
    """Returns the number and the other terms of a product, with what is counted as differences of t and s."""
    factor, rest = product.number, [t for t in product.terms if t.kind not in ("position", "distance", "later")]
    groups: dict[object, list[Term]] = {}
    for term in product.terms:
        if term.kind in ("position", "distance", "later"):
            key = None if term.array is None else (steps.scope.key(term.array), term.base)
            groups.setdefault(key, []).extend(_placed(term, seen))
    for own in groups.values():
        of_t, of_s, offset = added(own)
        array, base = own[0].array, own[0].base
        if array is None:
            factor *= math.exp(offset) if abs(offset) < 80 else math.inf
        elif offset:
            raise Unread("a decay has a further step than those between t and s")
        if of_t != -of_s:
            raise Unread("decays depend on something else than the number of steps between t and s")
        if of_t:
            rest.append(Term("position", of_t, "t", array=array, base=base))
    return factor, rest


def _placed(term: Term, seen: Seen) -> list[Term]:
    """Returns a distance as a difference of positions."""
    if term.kind == "position":
        return [term]
    later: Role = "s" if seen.reverse else "t"
    if seen.strict is None or (term.kind == "later" and term.role != later):
        raise Unread("decays count steps that the mask hides")
    sign = -1.0 if later == "s" else 1.0
    coefficient = term.coefficient * sign
    return [
        replace(term, kind="position", coefficient=coefficient, role="t"),
        replace(term, kind="position", coefficient=-coefficient, role="s"),
    ]


def _holds(mask: Seen, other: Seen) -> bool:
    """Returns whether a mask has all pairs of steps that another one has."""
    if mask.reverse != other.reverse:
        return False
    return mask.offset <= other.offset if mask.reverse else mask.offset >= other.offset
