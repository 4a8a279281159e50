"""Recognises normalisations of rows, whatever their spelling, as polynomials of a tile and of the moments of its rows.

A value is read as ``P * q**e * scale + shift``. ``P`` is a polynomial of x, of the row's mean of x, of its mean of
``x * x``, and of a root of one of those. ``q`` is such a polynomial without x; scale and shift do not vary with the
rows. A sum over the columns takes each power of x to a moment. So ``E[(x - m)**2]`` and ``E[x**2] - m**2`` are one
polynomial, and so are a scale before and after the product with the reciprocal root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autopallas import jaxprs
from autopallas.compat import Var
from autopallas.faults import contained
from autopallas.graph import Graph, Node, Ref, Space
from autopallas.graph.edit import surviving
from autopallas.graph.labels import Atom
from autopallas.graph.proof_cache import ProofCache
from autopallas.numerics.casts import rounds
from autopallas.patterns.backward import LAYOUT
from autopallas.patterns.declared_match import declared_match
from autopallas.patterns.escapes import complete
from autopallas.patterns.expressions import Scope
from autopallas.patterns.match import Match, Mismatch, NearMiss, bounded
from autopallas.sites.spec import Spec

__all__ = ["Normalisation", "found_normalisations", "normalisations"]

_DEEPEST = 48
"""Most operations on one path that are read."""
_MOST_TERMS = 24
_MOST_TILES = 12
"""Most values among which x is looked for."""
_MOST_USERS = 24
"""Most values after a root among which the normalisation is looked for."""
_WAYS = 6
"""Most rounds in which shorter ways to take a normalisation are tried."""
_CLOSE = 2e-7
"""Largest relative difference of factors that count as equal: constants such as 1 / N are rounded to float32."""
_ABOUT_ONE = 1e-6
"""Largest relative difference from 1 of a factor of the whole result."""
_NEARLY_ONE = 0.6, 1.7
"""Bounds of a factor that is worth reporting, as of a variance over N - 1."""

_ROOTS = frozenset({"rsqrt", "sqrt", "pow"})
_MADE_OF_ROWS = frozenset({"convert_element_type", "mul", "div", "sub", "add", "square", "integer_pow", "pow"})
_STEPS = LAYOUT | {"mul", "div", "add", "add_any", "sub", "neg", "convert_element_type"}

_GAIN = "the rows are multiplied by a further number, as with a variance over N - 1"
_PLAIN = (
    "Divide by jnp.sqrt(jnp.mean(x * x) + epsilon) or by jnp.sqrt(jnp.var(x) + epsilon), and put the number into the "
    "scale."
)
_FLOAT16 = "the squares are computed in float16, which does not hold those of numbers beyond 256"
_CANCELS = (
    "the variance is a difference of two means, which may be rounded to 0 or below, and nothing is added to it: such a "
    "row is not finite"
)
_POSITIVE = "Add a small number to the variance, or compute it from the centred rows: jnp.var(x, -1)."
_WIDE = "Cast the rows to float32 before they are squared, and the result back to float16."

Monomial = tuple[int, int, int, int]
"""Exponents of x, of the mean of x, of the mean of x * x, and of the root."""
Polynomial = dict[Monomial, float]

_ONE: Monomial = (0, 0, 0, 0)
_X: Monomial = (1, 0, 0, 0)
_MEAN: Monomial = (0, 1, 0, 0)
_MEAN_OF_MEAN: Monomial = (0, 2, 0, 0)
_SQUARE: Monomial = (0, 0, 1, 0)
_ROOT: Monomial = (0, 0, 0, 1)


class _Unlike(Exception):
    """Raised where a value is no part of a normalisation; the message says why, for debugging."""


@dataclass(frozen=True)
class Normalisation:
    """``(x - centre) * scale / sqrt(moment + epsilon) + shift`` along the columns, where a program computes it.

    Attributes:
      result: the node that gives it.
      centred: whether the mean is subtracted, and the moment is the variance; else it is the mean of squares.
      epsilon: what is added to the moment, or to the root if ``outside``.
      x, scale, shift: uses of values; the latter two do not vary with the rows.
      dimensions: the labels of each axis of the result.
      columns: the labels along which it is normalised.
      sizes: the sizes of all labels.
      earlier: scale and shift before layout operations, for a body that has these values and lacks the later ones.
    """

    result: Node
    centred: bool
    epsilon: float
    outside: bool
    x: Ref
    scale: Ref | None
    shift: Ref | None
    dimensions: tuple[tuple[Atom, ...], ...]
    columns: tuple[Atom, ...]
    sizes: dict[Atom, int]
    earlier: tuple[Ref | None, Ref | None]

    def at(self, graph: Graph, image: Mapping[int, int]) -> Normalisation:
        """Returns the same normalisation of corresponding values."""
        x, scale, shift = (
            None if ref is None else Ref(image[ref.value], ref.view) for ref in (self.x, self.scale, self.shift)
        )
        assert x is not None
        result = graph.definitions[image[self.result.outputs[0]]]
        return replace(self, result=result, x=x, scale=scale, shift=shift, earlier=(scale, shift))


def normalisations(graph: Graph) -> tuple[list[tuple[Normalisation, ...]], dict[int, tuple[bool, str, str]]]:
    """Finds the normalisations of a graph, and why near misses are none; keeps both in the graph.

    Each normalisation comes in several ways: with everything it is scaled by and everything added, then with less. A
    scale stays outside if the program computes another gradient of it than the sum over all rows, such as one per
    example. The reasons for near misses are keyed by the number of a root; each is (whether what the root is part of is
    centred, the reason, the advice).
    """
    if "normalisations" not in graph.notes:
        found: dict[int, tuple[Normalisation, ...]] = {}
        reasons: dict[int, tuple[bool, str, str]] = {}
        alive = surviving(graph)
        given = {graph.numbers[graph.root][v] for v in graph.root.outvars if isinstance(v, Var)}
        others: ProofCache[_Outcome] = ProofCache(graph, [(n in alive, n in given) for n in range(len(graph.avals))])
        for node in graph.nodes:
            if node.name in _ROOTS and node.outputs[0] in alive:
                with contained(node):
                    search = _Search(graph, node, alive, given)
                    try:
                        with bounded(graph):
                            outcome = _outcome(search, others)
                    except Mismatch as mismatch:  # out of steps
                        outcome = _Outcome((), (search.centred, mismatch.reason, mismatch.advice))
                    if outcome.reason is not None:
                        reasons[node.outputs[0]] = outcome.reason
                    elif outcome.ways:
                        found.setdefault(outcome.ways[0].result.outputs[0], outcome.ways)
        graph.notes["normalisations"] = [tuple(found.values()), tuple(reasons.items())]
    ways_of, reasons_of = graph.notes["normalisations"]
    return list(ways_of), dict(reasons_of)  # type: ignore[call-overload]


class _Outcome(NamedTuple):
    """Outcome of a search: the ways to take a normalisation; or, for a near miss, whether it is centred, the reason and
    the advice."""

    ways: tuple[Normalisation, ...]
    reason: tuple[bool, str, str] | None = None


def _outcome(search: _Search, others: ProofCache[_Outcome]) -> _Outcome:
    """Returns the outcome of a search; takes it over from another root of the same form where there is one."""
    graph = search.graph
    for outcome, image in others.like(search.root, None):
        return outcome._replace(ways=tuple(one.at(graph, image) for one in outcome.ways))

    def proof(watched: Graph) -> _Outcome:
        search.graph = watched
        try:
            return _Outcome(search.found())
        except Mismatch as mismatch:
            return _Outcome((), (search.centred, mismatch.reason, mismatch.advice))

    return others.prove(search.root, None, proof)


def found_normalisations(
    graph: Graph, op: str, spec: Callable[..., Spec], centred: bool
) -> tuple[list[Match], list[NearMiss]]:
    """Finds the normalisations of one operation, with their backwards.

    Args:
      graph: the program.
      op: a declared operation of rows B and M and columns N, with operands x, scale and shift, which vary along B.
      spec: makes its spec.
      centred: whether it subtracts the mean.
    """
    found, reasons = normalisations(graph)
    misses = [
        NearMiss(op, jaxprs.location(graph.definitions[number].equation), reason, number, advice)
        for number, (nearly_centred, reason, advice) in reasons.items()
        if nearly_centred == centred
    ]
    chosen = [ways for ways in found if ways[0].centred == centred]
    for _ in range(_WAYS):
        sites: list[tuple[Match, Node]] = []
        for one in (ways[0] for ways in chosen):
            with contained(one.result):
                match = _match(graph, op, spec, one)
                if match is not None:
                    sites.append((match, one.result))
        matches, missed = complete(graph, sites)
        incomplete = {miss.value for miss in missed}
        if not any(len(ways) > 1 and ways[0].result.outputs[0] in incomplete for ways in chosen):
            break
        chosen = [ways[1:] or ways if ways[0].result.outputs[0] in incomplete else ways for ways in chosen]
    return matches, [*misses, *missed]


def _match(graph: Graph, op: str, spec: Callable[..., Spec], one: Normalisation) -> Match | None:
    operands = {"x": one.x, "scale": one.scale, "shift": one.shift}
    dtypes = {f"{name}_dtype": None if ref is None else graph.dtype(ref.value) for name, ref in operands.items()}
    sizes = {"batch": 0, "rows": 0, "columns": 0}  # filled in from the site
    dtypes["result_dtype"] = graph.dtype(one.result.outputs[0])
    form = spec(**sizes, **dtypes, epsilon=one.epsilon, outside=one.outside)
    every = [atom for own in one.dimensions for atom in own]
    shared = {atom for ref in (one.scale, one.shift) if ref is not None for _, own in ref.view for atom in own}
    rows = [atom for atom in every if atom not in one.columns]
    letters = {
        "B": [atom for atom in rows if atom in shared],
        "M": [atom for atom in rows if atom not in shared],
        "N": list(one.columns),
    }
    return declared_match(graph, op, form, one.result, operands, letters, one.dimensions, one.sizes)


# ---------------------------------------------------------------------- polynomials


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for one, p in a.items():
        for other, q in b.items():
            monomial = (one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3])
            result[monomial] = result.get(monomial, 0.0) + p * q
    if len(result) > _MOST_TERMS or any(m[0] > 2 for m in result):
        raise _Unlike("the rows are normalised by other numbers than their mean and their mean square")
    return _tidy(result)


def _sum(a: Polynomial, b: Polynomial, sign: float = 1.0) -> Polynomial:
    result = dict(a)
    for monomial, q in b.items():
        result[monomial] = result.get(monomial, 0.0) + sign * q
    return _tidy(result)


def _tidy(polynomial: Polynomial) -> Polynomial:
    """Drops terms that cancelled up to rounding."""
    largest = max(map(abs, polynomial.values()), default=0.0)
    return {m: c for m, c in polynomial.items() if abs(c) > 1e-7 * largest or m == _ONE and c}


def _number(polynomial: Polynomial) -> float | None:
    if any(m != _ONE for m in polynomial):
        return None
    return polynomial.get(_ONE, 0.0)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= _CLOSE * max(abs(a), abs(b))


def _moment(polynomial: Polynomial) -> tuple[bool, float, float] | None:
    """Returns (centred, factor, added) if a polynomial is ``factor * moment + added`` with a positive factor."""
    rest = dict(polynomial)
    factor, mean, added = (rest.pop(m, 0.0) for m in (_SQUARE, _MEAN_OF_MEAN, _ONE))
    if rest or factor <= 0 or not (mean == 0 or _near(-mean, factor)):
        return None
    return mean != 0, factor, added


@dataclass(frozen=True)
class _Form:
    """Value of the form ``numerator * base**exponent * scale + shift``."""

    numerator: Polynomial
    base: tuple[tuple[Monomial, float], ...] = ()
    exponent: float = 0.0
    scale: Ref | None = None
    shift: Ref | None = None

    @property
    def plain(self) -> bool:
        """Whether it is a polynomial."""
        return not self.exponent and self.scale is None and self.shift is None


class _Reader:
    """Reads values of one site as forms.

    Attributes:
      x: the number of the tile that is normalised, before casts.
      columns, rows: the labels of both.
      reads: the uses by which equations read x, by number of the value that they read.
    """

    def __init__(self, scope: Scope, x: int, columns: Sequence[Atom], rows: Sequence[Atom]):
        self.scope, self.space, self.graph = scope, scope.space, scope.graph
        self.x, self.columns, self.rows = x, tuple(columns), frozenset(rows)
        self.reads: dict[int, Ref] = {}
        self._view: object = None
        self._root: Polynomial | None = None
        self._known: dict[object, _Form] = {}
        self._cancels = False  # whether the square of the mean is subtracted from the mean of the squares

    def form(self, ref: Ref, depth: int = 0) -> _Form:
        """Reads a use of a value as a form.

        Raises:
          _Unlike: the value has no such form.
        """
        if depth > _DEEPEST:
            raise _Unlike(f"more than {_DEEPEST} operations make the normalisation")
        at = _seen(self.space, ref, self.x)
        if at.value == self.x:
            view = self.space.view(at.view)
            if self._view not in (None, view):
                raise _Unlike("the rows are normalised by numbers of other rows")
            self._view = view
            self.reads.setdefault(ref.value, ref)
            return _Form({_X: 1.0})
        key = at.value, self.space.view(at.view)
        if key not in self._known:
            value = self.scope.number(at)
            if value is not None:
                if not math.isfinite(value):
                    raise _Unlike("a number that is not finite is part of it")
                self._known[key] = _Form({_ONE: float(value)})
            elif self._is_shared(at) and not self._is_moment(at):
                self._known[key] = _Form({_ONE: 1.0}, scale=self._source(ref))
            else:
                self._known[key] = self._read(at, depth)
        return self._known[key]

    def _is_shared(self, at: Ref) -> bool:
        """Returns whether several rows share a value: all of them, or those of one sequence, say."""
        return not self.rows or not self.rows <= self.space.atoms(at)

    def _source(self, ref: Ref) -> Ref:
        """Returns the same elements before they were repeated for each row. A program has the cotangent there, for
        whatever comes before may stand outside of a loop or a checkpoint."""
        fewest = len(self.space.atoms(self.space.canonical(ref)))
        return next(at for at in self.space.chain(ref) if len(self.space.atoms(at)) == fewest)

    def _read(self, at: Ref, depth: int) -> _Form:
        name = self.scope.name(at)
        if name in ("reduce_sum", "dot_general"):
            return self._summed(at, depth)
        operands = self.space.uses(at)
        if operands is None or not operands:
            raise _Unlike("the rows are combined with something else")
        if name == "select_n":
            case = self.scope.number(operands[0])
            if case is None:
                raise _Unlike("a mask chooses between the rows and something else")
            return self.form(operands[1 + int(case)], depth + 1)
        return self._combined(at, name or "", operands, [self.form(operand, depth + 1) for operand in operands])

    def _is_moment(self, at: Ref) -> bool:
        """Returns whether a value without row labels is computed from the only row there is."""
        return not self.rows and at.value > self.x

    def _combined(self, at: Ref, name: str, operands: Sequence[Ref], forms: list[_Form]) -> _Form:
        match name:
            case "convert_element_type":
                source, target = (self.graph.dtype(r.value) for r in (operands[0], at))
                if not rounds(source, target):
                    raise _Unlike(f"it is cast from {source} to {target}")
                if not self.space.atoms(at) & set(self.columns) and target.itemsize < self.graph.dtype(self.x).itemsize:
                    raise _Unlike("a number of the rows is rounded more than they are")
                return self._squared(at, forms[0])
            case "add" | "add_any" | "sub":
                return self._added(forms[0], forms[1], -1.0 if name == "sub" else 1.0)
            case "neg":
                return self._times(forms[0], _Form({_ONE: -1.0}))
            case "mul":
                return self._squared(at, self._times(forms[0], forms[1]))
            case "div":
                return self._times(forms[0], self._power(forms[1], -1.0))
            case "square":
                return self._squared(at, self._times(forms[0], forms[0]))
            case "integer_pow":
                exponent = self.graph.definitions[at.value].params["y"]
                if exponent == 2:
                    return self._squared(at, self._times(forms[0], forms[0]))
                return self._power(forms[0], float(exponent))
            case "pow":
                number = _number(forms[1].numerator) if forms[1].plain else None
                if number == 2:
                    return self._squared(at, self._times(forms[0], forms[0]))
                return self._power(forms[0], math.nan if number is None else number)
            case "sqrt":
                return self._power(forms[0], 0.5)
            case "rsqrt":
                return self._power(forms[0], -0.5)
            case "max":  # a variance is not below 0
                for one, other in (forms, forms[::-1]):
                    moment = _moment(one.numerator) if one.plain else None
                    if moment is not None and moment[2] >= 0 and other.plain and _number(other.numerator) == 0.0:
                        return one
        raise _Unlike(f"the rows pass through {name}")

    def _squared(self, at: Ref, form: _Form) -> _Form:
        """Returns the form; raises Mismatch if it holds squares, of x or of its mean, or means of squares in
        float16."""
        squared = any(m[0] == 2 or m[1] == 2 or m[2] for m in form.numerator)
        if squared and self.graph.dtype(at.value) == np.float16:
            raise Mismatch(_FLOAT16, advice=_WIDE)
        return form

    def _added(self, a: _Form, b: _Form, sign: float) -> _Form:
        if (a.base, a.exponent, a.scale) == (b.base, b.exponent, b.scale) and None in (a.shift, b.shift):
            if b.shift is not None and sign < 0:
                raise _Unlike("something that does not vary with the rows is subtracted")
            squares, means = ({m for m in (_SQUARE, _MEAN_OF_MEAN) if m in form.numerator} for form in (a, b))
            self._cancels |= bool(squares and means) and squares != means
            return replace(a, numerator=_sum(a.numerator, b.numerator, sign), shift=a.shift or b.shift)
        for one, other, own in ((a, b, 1.0), (b, a, sign)):  # a number per column is added to what varies with the rows
            alone = not other.exponent and other.shift is None and other.numerator == {_ONE: 1.0}
            if alone and other.scale is not None and one.shift is None and one.exponent:
                if other is b and sign < 0:
                    raise _Unlike("something that does not vary with the rows is subtracted")
                return replace(one, numerator=_sum({}, one.numerator, own), shift=other.scale)
        raise _Unlike("two different things are added to it")

    def _times(self, a: _Form, b: _Form) -> _Form:
        if a.shift is not None or b.shift is not None:
            raise _Unlike("it is multiplied by something after something was added")
        if a.scale is not None and b.scale is not None:
            raise _Unlike("it is multiplied by several things that do not vary with the rows")
        if a.exponent and b.exponent and a.base != b.base:
            raise _Unlike("the rows are divided by two different numbers")
        base, exponent = a.base or b.base, a.exponent + b.exponent
        return _Form(_product(a.numerator, b.numerator), base if exponent else (), exponent, a.scale or b.scale)

    def _power(self, form: _Form, exponent: float) -> _Form:
        """Raises a row number, or a known number, to the power 1/2, -1/2 or -1."""
        if exponent not in (0.5, -0.5, -1.0) or form.scale is not None or form.shift is not None:
            raise _Unlike("something else than a root or a reciprocal is taken")
        number = _number(form.numerator)
        if form.exponent:
            if number is None or number <= 0:
                raise _Unlike("a root is taken of more than one number of the row")
            return _Form({_ONE: number**exponent}, form.base, form.exponent * exponent)
        if number is not None:
            if number <= 0:
                raise _Unlike("a root is taken of a number that is not positive")
            return _Form({_ONE: number**exponent})
        if any(m[0] for m in form.numerator):
            raise _Unlike("a root or a reciprocal is taken of the rows themselves")
        if exponent == 0.5:
            if self._root not in (None, form.numerator) or _ROOT in form.numerator:
                raise _Unlike("several different roots are taken")
            self._root = form.numerator
            return _Form({_ROOT: 1.0})
        if exponent == -1.0 and form.numerator.keys() == {_ROOT}:
            assert self._root is not None
            return _Form({_ONE: 1 / form.numerator[_ROOT]}, tuple(sorted(self._root.items())), -0.5)
        return _Form({_ONE: 1.0}, tuple(sorted(form.numerator.items())), exponent)

    def _summed(self, at: Ref, depth: int) -> _Form:
        """Reads a sum over the columns, of one value or of the product of two."""
        node = self.graph.definitions[at.value]
        dimensions = [(0, (atom,)) for atom in self.columns]
        if node.name == "reduce_sum":
            shape, axes, kept = self.graph.shape(node.inputs[0]), node.params["axes"], iter(at.view)
            summed = [d for d in sorted(axes) if shape[d] != 1]
            if [shape[d] for d in summed] != [self.space.sizes[atom] for atom in self.columns]:
                raise _Unlike("it is summed over other columns than those that it has")
            gone = dict(zip(summed, dimensions, strict=True))
            view = tuple(gone.get(d, (0, ())) if d in axes else next(kept) for d in range(len(shape)))
            form = self.form(Ref(node.inputs[0], view), depth + 1)
        else:
            shape = self.graph.shape(node.inputs[0])
            axes = node.params["dimension_numbers"][0][0]
            if [shape[d] for d in axes] != [self.space.sizes[atom] for atom in self.columns]:
                raise _Unlike("a product is summed over other columns than those that it has")
            left, right, _ = self.space.dot(at, dimensions)
            form = self._squared(at, self._times(self.form(left, depth + 1), self.form(right, depth + 1)))
        if not form.plain:
            raise _Unlike("something is summed that was normalised before")
        count = math.prod(self.space.sizes[atom] for atom in self.columns)
        result: Polynomial = {}
        for (power, *others), coefficient in form.numerator.items():
            monomial = (0, others[0] + (power == 1), others[1] + (power == 2), others[2])
            result[monomial] = result.get(monomial, 0.0) + coefficient * count
        return _Form(_tidy(result))

    def conclusion(self, form: _Form) -> tuple[bool, float, bool, float]:
        """Returns (centred, epsilon, outside, gain) of a form that normalises x.

        Raises:
          _Unlike: it does something else.
        """
        numerator, base = dict(form.numerator), dict(form.base)
        gain, mean = numerator.pop(_X, 0.0), numerator.pop(_MEAN, 0.0)
        if numerator or gain == 0 or not (mean == 0 or _near(-mean, gain)):
            raise _Unlike("the rows are not just centred and scaled")
        outside, epsilon = False, 0.0
        if form.exponent == -1.0 and _ROOT in base and self._root is not None:
            factor, epsilon, outside = base.pop(_ROOT), base.pop(_ONE, 0.0), True
            if base or factor <= 0:
                raise _Unlike("the rows are divided by another number than the root of a mean")
            base, gain, epsilon = self._root, gain / factor, epsilon / factor
        elif form.exponent != -0.5:
            raise _Unlike("the rows are divided by another number than the root of a mean")
        moment = _moment(base)
        if moment is None or moment[0] != (mean != 0):
            raise _Unlike("the rows are divided by another number than the root of a mean")
        centred, factor, added = moment
        if outside and added:
            raise _Unlike("something is added both to the mean and to its root")
        gain /= math.sqrt(factor)
        epsilon = epsilon / math.sqrt(factor) if outside else added / factor
        if epsilon < 0:
            raise _Unlike("a positive number is subtracted from the mean")
        if self._cancels and centred and not epsilon:
            raise Mismatch(_CANCELS, advice=_POSITIVE)
        return centred, epsilon, outside, gain


# ---------------------------------------------------------------------- where normalisations are


@dataclass
class _Search:
    """Looks for the normalisation that one root is part of."""

    graph: Graph
    root: Node
    alive: frozenset[int]
    given: Set[int]
    """Numbers of the program's results."""
    centred: bool = False
    """Whether the near miss subtracts its mean."""
    _subtracts: bool = False
    _reason: Mismatch | None = None

    def found(self) -> tuple[Normalisation, ...]:
        """Returns the normalisation with everything scaled and added after it, then with less; nothing where nothing
        resembles a normalisation.

        Raises:
          Mismatch: something resembles one, with the reason why it is none.
        """
        if not self._is_root():
            return ()
        for x, axes in dict.fromkeys(self._candidates()):
            read = dict(self._behind(x, axes))
            if read:
                return self._whole(read)
        if self._reason is not None:
            raise self._reason
        return ()

    def _is_root(self) -> bool:
        if self.root.name != "pow":
            return True
        exponent = self.graph.literals.get(self.root.inputs[1])
        return exponent is not None and abs(float(exponent)) == 0.5

    def _candidates(self) -> Iterator[tuple[int, frozenset[int]]]:
        """Yields (value, its summed dimensions) of tiles whose moments the root's operand may hold, the innermost
        first."""
        scope = Scope(self.graph)
        space = scope.space
        todo, seen = [space.full(self.root.inputs[0])], 0
        while todo and seen < _MOST_USERS:
            seen += 1
            at = space.canonical(todo.pop())
            if (contraction := space.contraction(at)) is not None and scope.name(at) == "dot_general":
                left, _, dimensions = contraction
                yield from self._inner(scope, left, frozenset(a for _, atoms in dimensions for a in atoms))
                return
            if scope.name(at) == "reduce_sum":
                operand, dimensions = space.reduced(at)
                yield from self._inner(scope, operand, frozenset(a for _, atoms in dimensions for a in atoms))
                return
            todo += [o for o in (space.operands(at) or [])[::-1] if scope.number(o) is None]

    def _inner(self, scope: Scope, ref: Ref, columns: frozenset[Atom]) -> Iterator[tuple[int, frozenset[int]]]:
        space = scope.space
        path: list[Ref] = []
        at: Ref | None = ref
        while at is not None and len(path) < _MOST_TILES:
            read, at = at, space.canonical(at)
            if scope.name(at) != "convert_element_type":
                path += [at, read] if read != at else [at]
            operands = space.uses(at) or []
            carrying = [o for o in operands if space.atoms(o) & columns]
            alike = carrying and all(space.same(carrying[0], other) for other in carrying)
            if scope.name(at) in ("mul", "div"):  # rows times one number each, as after another norm, are x themselves
                others = [o for o in operands if not space.atoms(o) & columns]
                alike = alike and all(scope.number(o) is not None for o in others)
            at = carrying[0] if alike and scope.name(at) in _MADE_OF_ROWS else None
        for at in path[::-1]:
            atoms = [space.resolve(own) for _, own in at.view]
            axes = frozenset(d for d, own in enumerate(atoms) if own and set(own) <= columns)
            if axes and math.prod(self.graph.shape(at.value)[d] for d in axes) == space.extent(sorted(columns)):
                yield at.value, axes

    def _behind(self, x: int, axes: frozenset[int]) -> Iterator[tuple[int, Normalisation]]:
        """Yields (number, normalisation) for the values after the root that are normalisations of x, in order.

        Values that turn out otherwise are not followed: in a deep program, that would lead through all of it.
        """
        waiting = {n: user for user in self.graph.users[self.root.outputs[0]] for n in user.outputs[:1]}
        seen: set[int] = set()
        while waiting and len(seen) < _MOST_USERS:
            number = min(waiting)
            node = waiting.pop(number)
            seen.add(number)
            if node.name not in _STEPS or number not in self.alive or len(node.outputs) != 1:
                continue
            try:
                found = self._read(node, x, axes)
            except _Unlike:
                continue
            except Mismatch as mismatch:
                if self._reason is None:
                    self._reason, self.centred = mismatch, self._subtracts
                continue
            if found is not None:
                yield number, found
            waiting.update({n: u for u in self.graph.users[number] for n in u.outputs[:1] if n not in seen})

    def _read(self, node: Node, x: int, axes: frozenset[int]) -> Normalisation | None:
        """Reads what a node computes as a normalisation of x; returns None for layout, for other sizes, and where
        neither x nor other rows are used.

        Raises:
          _Unlike: the value is no normalisation of x.
        """
        graph, shape = self.graph, self.graph.shape(node.outputs[0])
        if node.name in LAYOUT or math.prod(shape) != math.prod(graph.shape(x)) or 0 in shape:
            return None
        scope = Scope(graph)
        space = scope.space
        result = space.full(node.outputs[0])
        several = math.prod(shape) > math.prod(graph.shape(x)[d] for d in axes)
        at = _use(scope, result, x, several)
        if at is None:
            return None
        columns = [atom for d in sorted(axes) for atom in space.resolve(at.view[d][1])]
        dimensions = tuple(space.resolve(own) for _, own in result.view)
        every = [atom for own in dimensions for atom in own]
        if not columns or every[len(every) - len(columns) :] != columns:
            raise _Unlike("it is normalised along other axes than the last ones")
        reader = _Reader(scope, x, columns, [atom for atom in every if atom not in columns])
        before = space.refinements
        form = reader.form(result)
        if space.refinements != before:
            raise _Unlike("an axis of it is cut in two")
        centred, epsilon, outside, gain = reader.conclusion(form)
        self._subtracts = centred
        if not _NEARLY_ONE[0] < gain < _NEARLY_ONE[1]:
            raise _Unlike("the rows are divided by their norm, not by the root of a mean")
        if abs(gain - 1) > _ABOUT_ONE:
            raise Mismatch(_GAIN, advice=_PLAIN)
        read = [*reader.reads.values()]
        use = read[0] if len(read) == 1 else at

        def viewed(ref: Ref | None, before: bool = False) -> Ref | None:
            ref = space.canonical(ref) if ref is not None and before else ref
            return None if ref is None else Ref(ref.value, space.view(ref.view))

        scale, shift = viewed(form.scale), viewed(form.shift)
        earlier = viewed(form.scale, True), viewed(form.shift, True)
        rows = Ref(use.value, space.view(use.view))
        return Normalisation(
            node, centred, epsilon, outside, rows, scale, shift, dimensions, tuple(columns), dict(space.sizes), earlier
        )

    def _whole(self, read: dict[int, Normalisation]) -> tuple[Normalisation, ...]:
        """Follows a chain of normalisations, each the only thing computed from the one before; returns them from the
        last to the first.

        A cast to a wider dtype at the end is left out, since whatever comes next reads through it.
        """
        number = min(read)
        ways = [read[number]]
        while number not in self.given:
            further = self._next(number) & read.keys()
            if len(further) != 1:
                break
            (number,) = further
            node = read[number].result
            before, after = (self.graph.dtype(n) for n in (node.inputs[0], number))
            if node.name != "convert_element_type" or after.itemsize < before.itemsize:
                ways.append(read[number])
        found: list[Normalisation] = []
        for one in ways[::-1]:
            found.append(one)
            if one.earlier != (one.scale, one.shift):
                found.append(replace(one, scale=one.earlier[0], shift=one.earlier[1]))
        return tuple(found)

    def _next(self, number: int) -> set[int]:
        """Returns what is computed from a value, looking through layout operations."""
        found: set[int] = set()
        todo = [number]
        while todo and len(found) < _MOST_USERS:
            for user in self.graph.users[todo.pop()]:
                if user.name in LAYOUT:
                    todo += user.outputs[:1]
                else:
                    found.update(user.outputs[:1])
        return found


def _use(scope: Scope, result: Ref, x: int, several: bool) -> Ref | None:
    """Finds the use of a value from which a result of one row, or of ``several``, is computed element by element.

    Raises:
      _Unlike: several rows are computed from the rows of another value, such as a cotangent.
    """
    space = scope.space
    every = space.atoms(result)
    todo, seen = [result], 0
    while todo and seen < 2 * _MOST_USERS:
        seen += 1
        at = _seen(space, todo.pop(), x)
        if at.value == x:
            return at
        operands = space.uses(at) if at.value > x else None
        if operands is None and several and every <= space.atoms(at) and scope.number(at) is None:
            raise _Unlike("the rows are combined with something else")
        todo += (operands or [])[::-1]
    return None


def _seen(space: Space, ref: Ref, value: int) -> Ref:
    """Returns the same elements before layout operations, but goes back no further than a certain value."""
    for at in space.chain(ref):
        if at.value == value:
            return at
    return space.canonical(ref)
