"""Turns a proved softmax into the description of an attention: roles of labels, programs, operands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import jaxprs
from autopallas.compat import Dtype
from autopallas.graph import Body, Graph, Node, Ref, Space
from autopallas.graph.labels import Atom
from autopallas.kernels.attention.site import AttentionSite
from autopallas.kernels.attention.site_parts import RowProgram, RowStatistic, RowTerm, ScoreTerm
from autopallas.kernels.attention.spec import Weight
from autopallas.kernels.attention.sum_site import AttentionSum
from autopallas.numerics.casts import kind_of, rounds
from autopallas.patterns.advice import (
    ASSUME_FINITE,
    BETWEEN_PRODUCTS,
    EINSUM,
    FLOATS,
    MASK_SCORES,
    NORMALISE,
    OVER_THE_KEYS,
    PRODUCTS_APART,
    SAME_SUM,
    SAME_VALUES,
)
from autopallas.patterns.attention.row_factor import RowFactor
from autopallas.patterns.attention.score_terms import Product, added
from autopallas.patterns.carry import Carrier
from autopallas.patterns.expressions import Apply, Expression, Scope, computed_from, precision_of
from autopallas.patterns.match import Mismatch
from autopallas.patterns.program_builder import ProgramBuilder
from autopallas.patterns.softmax import Softmax
from autopallas.patterns.softmax_terms import Exponential, Factor, LogSumExp, SeveralBlocks, Term
from autopallas.sites.elementwise import Constant, ElementwiseProgram
from autopallas.sites.index_notation import Operand, Positions, View

__all__ = ["ProvedAttention"]

_DEEPEST = 64
"""Most selections, one within the other, that are looked at as masks."""
_SHARED = 8
"""Number of the probabilities' elements that share one of a random mask at least, for it to be a side input."""
_SOURCES = (Operand, Positions)
"""What a side input or a number of each row is read from."""
_RANDOM = frozenset({"random_bits", "threefry2x32", "random_unwrap", "rng_bit_generator", "rng_uniform"})


@dataclass(eq=False)
class ProvedAttention:
    """A contraction over keys whose weights are proved to be a softmax; :meth:`assemble` describes it as a site."""

    softmax: Softmax
    second: Node
    """Contraction of probabilities and values."""
    side: int
    """Which operand of the second contraction the probabilities are."""
    query_first: bool
    """Whether the queries are the first operand of the first contraction."""
    root: int
    """Value that is the site's result: of the second contraction, or of a division that follows it."""
    top: Ref
    score: Ref
    query: Ref
    key: Ref
    value: Ref
    weights_dtype: Dtype
    """Dtype of the probabilities as the second contraction reads them."""
    key_axis: tuple[Atom, ...]
    head_axis: list[Atom]
    candidates: Sequence[Product]
    """Further products under the exponential."""
    found: Exponential
    normaliser: LogSumExp
    rest: list[Term]
    """Terms beside the normaliser, none of which depends on the scores."""
    row: RowFactor | None
    """Factor of the result, if that is a function of the row's scores."""
    assume_finite: bool
    fixed: Mapping[Atom, int] = field(default_factory=dict)
    """Index of each label of which one index alone is read: the result, and what the site is told of, lack it."""
    terms: tuple[Product, ...] = ()
    """Candidates that are added to the scores, and belong to the site as its operands."""

    @property
    def scope(self) -> Scope:
        return self.softmax.scope

    @property
    def graph(self) -> Graph:
        return self.softmax.scope.graph

    @property
    def space(self) -> Space:
        return self.softmax.space

    @property
    def body(self) -> Body:
        """Body in which the result is first computed."""
        return self.graph.definitions[self.root].body

    @property
    def homes(self) -> tuple[Body, ...]:
        """All bodies in which the result is computed."""
        return tuple(dict.fromkeys(body for body, _ in self.graph.occurrences(self.root)))

    @property
    def location(self) -> str:
        return jaxprs.location(self.second.equation)

    @property
    def assumptions(self) -> tuple[str, ...]:
        return self.softmax.assumed(self.normaliser.argument, self.normaliser.weights)

    def settle(self) -> None:
        """Assembles the site until no label is refined any more.

        Raises:
          Mismatch: the site cannot be described, or something is assumed that must not be.
        """
        before = -1
        while self.space.refinements != before:
            before = self.space.refinements
            self.assembled = self.assemble()
        if self.assumptions and not self.assume_finite:
            raise Mismatch(
                f"it is not known that {self.assumptions[0]}, and assume_finite is off", advice=ASSUME_FINITE
            )
        self._add_terms()

    def _add_terms(self) -> None:
        """Makes further products that are added to the scores operands of the site, if the site can be described with
        them."""
        terms = self._added()
        while terms:
            self.terms, before = terms, -1
            with suppress(Mismatch):
                while self.space.refinements != before:
                    before = self.space.refinements
                    assembled = self.assemble()
                self.assembled = assembled
                return
            terms = terms[:-1]
        self.terms = ()

    def _added(self) -> tuple[Product, ...]:
        graph, space = self.graph, self.space
        if self.row is not None or not self.candidates:
            return ()
        found = added(self.scope, self.found.argument, space.canonical(self.score), self.candidates)
        query_axis, _ = self._roles()
        rows, keys = set(query_axis), set(space.resolve(self.key_axis))
        precision = precision_of(graph, graph.definitions[self.score.value])
        terms: list[Product] = []
        for position, scale in found.items():
            term = self.candidates[position]
            query, key = (space.atoms(space.canonical(ref)) for ref in (term.query, term.key))
            with suppress(Mismatch):
                alike = precision_of(graph, graph.definitions[term.ref.value]) == precision
                alike &= all(
                    graph.dtype(a.value) == graph.dtype(b.value)
                    for a, b in ((term.ref, self.score), (term.query, self.query), (term.key, self.key))
                )
                read = self.scope.depends(term.query.value) or self.scope.depends(term.key.value)
                alike &= abs(scale) == 1 or graph.dtype(term.query.value) != np.float16  # float16 overflows early
                if alike and not read and rows <= query and keys <= key and not (rows & key or keys & query):
                    terms.append(replace(term, scale=scale))
        return tuple(terms)

    @property
    def products(self) -> tuple[tuple[Ref, bool, Ref, Ref], ...]:
        """Products whose sum the scores are: (product, whether its first operand is the queries, queries, keys)."""
        own = (self.score, self.query_first, self.query, self.key)
        return (own, *((term.ref, term.query_first, term.query, term.key) for term in self.terms))

    def _roles(self) -> tuple[tuple[Atom, ...], tuple[Atom, ...]]:
        """Returns (labels of T, labels of Dv), after checking that every label has a role."""
        space = self.space
        before = -1
        while space.refinements != before:  # undoing one operand's layout may divide an axis of another
            before = space.refinements
            value = space.atoms(space.canonical(self.value))
            query, key = set[Atom](), set[Atom]()
            for _, _, queries, keys_of in self.products:
                query |= space.atoms(space.canonical(queries))
                key |= space.atoms(space.canonical(keys_of))
        keys, heads = set(space.resolve(self.key_axis)), set(space.resolve(self.head_axis))
        heads.update(a for term in self.terms for a in space.resolve(term.head_axis))
        result = [a for _, atoms in self.top.view for a in space.resolve(atoms)]
        weights = space.atoms(self.score) | {a for a in result if a not in value}
        value_at = space.canonical(self.value).value
        if not keys <= value:
            raise Mismatch(
                "the values do not carry the key axis",
                value_at,
                advice="Give the values one row per key: the second product sums probabilities times values over the "
                "keys.",
            )
        if not keys <= key or keys & query:
            raise Mismatch("the contracted axis is not the key axis of the scores", advice=OVER_THE_KEYS)
        if self._of_queries((value & query) - key, query, key, value):
            if (key & set(result)) - value - query:  # what is taken for keys has rows of queries
                raise Mismatch("the scores of several heads are mixed before the softmax", advice=BETWEEN_PRODUCTS)
            raise Mismatch("the values depend on the query", value_at, advice=SAME_VALUES)
        if value_at == self.score.value:
            raise Mismatch("the scores and the values are parts of one product", value_at, advice=PRODUCTS_APART)
        if self.scope.depends(value_at):
            raise Mismatch("the values depend on the scores", value_at, advice=SAME_VALUES)
        if len(result) != len(set(result)):
            raise Mismatch("the result has an axis twice", advice=EINSUM)
        value_axis = tuple(a for a in result if a in value and a not in weights and a not in key and a not in query)
        rest = (query | key | value | weights) - keys - heads - set(value_axis)
        if missing := rest - set(result) - self.fixed.keys():
            pairs = [("values", self.value), ("scores", self.score)]
            for _, _, queries, keys_of in self.products:
                pairs += [("queries", queries), ("keys", keys_of)]
            for name, ref in pairs:
                at = space.canonical(ref)
                if lost := space.atoms(at) & missing:
                    size = space.extent(tuple(lost))
                    raise Mismatch(
                        f"an axis of the {name}, of size {size}, is missing from the result", at.value, advice=EINSUM
                    )
            raise Mismatch("an axis of the operands is missing from the result", advice=EINSUM)
        # One of the axes that only the queries have is T, and the others are groups of heads. Parts of one axis (the
        # height and width of an image) stay together.
        rows = [a for a in result if a in query and a not in key and a not in value]
        by_origin: dict[Atom, list[Atom]] = {}
        for atom in rows:
            by_origin.setdefault(space.origin(atom), []).append(atom)
        longest = max(by_origin.values(), key=lambda atoms: math.prod(space.sizes[a] for a in atoms), default=[])
        return tuple(longest), value_axis

    def _of_values_alone(self, axis: Sequence[Atom], sources: Iterable[object]) -> tuple[Atom, ...]:
        """Returns the labels of Dv without those along which a side input varies: these are of batches, which queries
        and keys share."""
        views = [s.view if isinstance(s, Operand) else (s.dimension,) for s in sources if isinstance(s, _SOURCES)]
        varying = {atom for view in views for _, atoms in view for atom in self.space.resolve(atoms)}
        return tuple(atom for atom in axis if atom not in varying)

    def _of_queries(self, shared: Set[Atom], query: Set[Atom], key: Set[Atom], value: Set[Atom]) -> bool:
        """Returns whether the labels that values share with queries, and that keys lack, are more than groups of heads.

        Groups are a part of the axis of heads, or one beside a longer axis of queries.
        """
        space = self.space
        heads = {space.origin(a) for a in key}
        apart = [a for a in shared if space.origin(a) not in heads]
        rows = query - key - value - set(space.resolve(self.head_axis))
        return math.prod(space.sizes[a] for a in apart) > math.prod(space.sizes[a] for a in rows)

    # ------------------------------------------------------------------ the site

    def assemble(
        self,
        pinned_roles: Mapping[int, int | None] = MappingProxyType({}),
        pinned_sides: frozenset[int] = frozenset(),
        further: tuple[Body, ...] = (),
        across: bool = False,
    ) -> tuple[AttentionSite | AttentionSum, Carrier]:
        """Describes the site, and collects what it reads.

        ``pinned_roles`` and ``pinned_sides`` are the values to take as queries, keys, values (then further queries and
        keys) and as side inputs. ``further`` are bodies, besides the site's own, in which the operands must be at hand,
        or be brought ``across`` loops.
        """
        carrier = self._carrier(pinned_sides, further, across)
        read = self._read_roles(carrier, pinned_roles)
        labels = Labels(self.space, fixed=self.fixed)
        site = self._described(carrier, read, labels, bool(further))
        return replace(site, sizes=labels.sizes()), carrier

    def _role_refs(self) -> list[tuple[Ref, str]]:
        """Returns the uses of the operands that have a role, in the order of their roles, with what they are called."""
        named = [(self.query, "queries"), (self.key, "keys"), (self.value, "values")]
        for term in self.terms:
            named += [(term.query, "queries"), (term.key, "keys")]
        return named

    def _carrier(self, pinned_sides: frozenset[int], further: tuple[Body, ...], across: bool) -> Carrier:
        """Returns what collects the operands of the site."""
        query_axis, _ = self._roles()
        axes = query_axis, self.space.resolve(self.key_axis)
        absorbed = [term.ref for term in self.terms]
        bodies = (self.body, *further)
        roles = len(self._role_refs())
        return Carrier(self.scope, bodies, axes, self.score, pinned_sides, across, self.homes, roles, absorbed)

    def _read_roles(self, carrier: Carrier, pinned_roles: Mapping[int, int | None]) -> list[Operand]:
        """Adds the operands that have a role; returns how they are read."""
        return [carrier.role(ref, pinned_roles.get(role), name) for role, (ref, name) in enumerate(self._role_refs())]

    def _described(
        self, carrier: Carrier, read: Sequence[Operand], labels: Labels, differentiated: bool
    ) -> AttentionSite:
        """Describes the site without the sizes of its labels, and collects its side inputs."""
        graph, space = self.graph, self.space
        query_axis, value_axis = self._roles()
        key_axis = space.resolve(self.key_axis)
        query, key, value, *others = read
        argument, weights, inner_weights = self._masks()
        score = ProgramBuilder(carrier).build(argument)
        if score.dtype.kind == "c" or not jnp.issubdtype(score.dtype, jnp.floating):
            raise Mismatch(f"the argument of the exponential has dtype {score.dtype}", advice=FLOATS)
        rows = None if self.row is None else self.row.program(carrier, lambda w: self._weight(carrier, w))
        live = self._live(argument)
        live_program = None
        if live and (rows is None or all(s == score for s in rows.statistics if isinstance(s, ElementwiseProgram))):
            with carrier.optional():
                live_program = ProgramBuilder(carrier).conjunction(live)
        finished = [self._weight(carrier, w) for w in weights]
        inner = [self._weight(carrier, w) for w in inner_weights]
        sinks = tuple(self._terms(carrier, extra) for extra in self.normaliser.extras)
        factors = self._terms(carrier, self.rest)
        for term in factors:
            if term.kind == "log" and term.coefficient != int(term.coefficient):
                raise Mismatch("a factor of the result enters with a fractional power", advice=NORMALISE)
        self._no_dropout(carrier, (*inner, *finished))
        if self._reads_terms(carrier.operands[carrier.roles :]):
            raise Mismatch(
                "a product that is added to the scores enters the probabilities in another way too",
                advice="Add the product to the scores and read it nowhere else: compute what masks or weights the "
                "scores apart from it.",
            )
        if differentiated and rows is not None and rows.follows_maximum:
            raise Mismatch(
                "a gradient runs through the maximum of a row, which does not cancel",
                advice="Subtract jax.lax.stop_gradient of the maximum, or use jax.nn.softmax, which does.",
            )
        first = graph.definitions[self.score.value]
        terms = (*(term for extra in sinks for term in extra), *factors)
        sources = [*carrier.sides, *(term.source for term in terms), *(rows.inputs if rows is not None else ())]
        value_axis = self._of_values_alone(value_axis, sources)
        return AttentionSite(
            sizes=(),
            query=labels.operand(query),
            key=labels.operand(key),
            value=labels.operand(value),
            query_labels=labels.atoms(query_axis),
            key_labels=labels.atoms(key_axis),
            head_labels=labels.atoms(self.head_axis),
            value_labels=labels.atoms(value_axis),
            result=labels.view(space.view(self.top.view)),
            rows=labels.apart(self.top.view, value_axis),
            types=(),
            score_dtype=graph.dtype(self.score.value),
            result_dtype=graph.dtype(self.root),
            score=score,
            terms=tuple(
                ScoreTerm(labels.operand(q), labels.operand(k), labels.atoms(term.head_axis), term.scale)
                for term, q, k in zip(self.terms, others[::2], others[1::2], strict=True)
            ),
            sides=tuple(labels.source(s) for s in carrier.sides),
            inner_weights=tuple(inner),
            weights=tuple(finished),
            sinks=tuple(tuple(labels.term(t) for t in terms) for terms in sinks),
            factors=tuple(labels.term(t) for t in factors),
            row_program=None if rows is None else labels.rows(rows),
            live=live_program,
            score_precision=precision_of(graph, first),
            value_precision=precision_of(graph, self.second),
            weights_dtype=self.weights_dtype,
            assume_finite=self.assume_finite,
        )

    def _reads_terms(self, operands: Sequence[int]) -> bool:
        """Returns whether a side input is computed from a product that is a part of the scores."""
        known = {term.ref.value: True for term in self.terms}
        return bool(known) and any(computed_from(self.graph, n, known, min(known)) for n in operands)

    def _masks(self) -> tuple[Expression, list[Factor], list[Factor]]:
        """Returns the argument with the normaliser's masks as -inf, the factors after it, and the factors within it.

        A mask on numerator and normaliser alike is a score of -inf. If it is applied after the division too, it only
        acts there on rows without any live key, where it turns 0 / 0 into 0.
        """
        inner = list(self.normaliser.weights)
        keys = [self.softmax.factor_key(w) for w in inner]
        outer: list[Factor] = []
        for weight in self.found.weights:
            own = self.softmax.factor_key(weight)
            if own in keys:
                keys.remove(own)
                if weight.kind in ("where", "unless") and weight.after_normalisation:
                    outer.append(weight)
            else:
                outer.append(weight)
        if keys:
            raise Mismatch("the normaliser is masked and the numerator is not", advice=SAME_SUM)
        argument = self.found.argument
        for weight in inner:
            if weight.kind in ("where", "unless"):
                dtype = self.scope.dtype(argument)
                nothing = Constant(-math.inf, dtype)
                cases = (nothing, argument) if weight.kind == "where" else (argument, nothing)
                argument = Apply(lax.select_n_p, {}, (weight.source, *cases), dtype)
        return argument, outer, [w for w in inner if w.kind in ("multiply", "divide")]

    def _weight(self, carrier: Carrier, factor: Factor) -> Weight:
        builder = ProgramBuilder(carrier)
        if factor.kind in ("where", "unless") and kind_of(self.graph.dtype(factor.source.value)) != "b":
            raise Mismatch("a mask on the probabilities is not boolean", advice=MASK_SCORES)
        if factor.kind == "where":
            return Weight("where", builder.build(factor.source))
        if factor.kind == "unless":
            return Weight("where", builder.build_not(factor.source))
        if factor.kind == "divide":
            return Weight("multiply", builder.build_reciprocal(factor.source))
        return Weight("multiply", builder.build(factor.source))

    def _terms(self, carrier: Carrier, terms: Sequence[Term]) -> tuple[RowTerm, ...]:
        found = []
        for term in terms:
            if term.kind == "constant":
                found.append(RowTerm(term.coefficient, "constant"))
            elif term.kind in ("value", "log"):
                found.append(RowTerm(term.coefficient, term.kind, carrier.source(term.value)))
            else:
                raise SeveralBlocks
        return tuple(found)

    def _live(self, expression: Expression, depth: int = 0) -> list[tuple[Ref, bool]]:
        """Returns masks that must all hold for a key to have weight: those of selections directly under the
        exponential."""
        if depth > _DEEPEST:
            return []
        name: str | None
        arguments: Sequence[Expression] | None
        match expression:
            case Ref():
                ref = self.space.canonical(expression)
                if not self.scope.depends(ref.value) or ref.value == self.scope.score:
                    return []
                name, arguments, dtype = self.scope.name(ref), self.space.operands(ref), self.graph.dtype(ref.value)
            case Apply():
                name, dtype = expression.primitive.name, expression.dtype
                arguments = list(expression.arguments)
            case _:
                return []
        if arguments is None:
            return []
        if name == "convert_element_type":
            return self._live(arguments[0], depth + 1) if rounds(self.scope.dtype(arguments[0]), dtype) else []
        if name == "mul" and isinstance(arguments[1], Constant) and arguments[1].value >= 0.5:  # the log 2 of exp2
            return self._live(arguments[0], depth + 1)
        if name == "select_n" and len(arguments) == 3 and isinstance(mask := arguments[0], Ref):
            _, if_false, if_true = arguments
            if kind_of(self.scope.dtype(mask)) == "b" and not self.scope.depends(mask.value):
                if self._dead(if_false, dtype):
                    return [(mask, True), *self._live(if_true, depth + 1)]
                if self._dead(if_true, dtype):
                    return [(mask, False), *self._live(if_false, depth + 1)]
        return []

    def _dead(self, fill: Expression, dtype: Dtype) -> bool:
        """Returns whether the exponential of this score is exactly 0 beside any real score: -inf, or near the dtype's
        least."""
        if isinstance(fill, Constant):
            number: float | None = float(fill.value)
        else:
            number = self.scope.number(fill) if isinstance(fill, Ref) else None
        if number is None or not rounds(dtype, dtype):
            return False
        least = float(jnp.finfo(dtype).min)
        return number == -math.inf or (dtype.name != "float16" and number <= 0.3 * least)

    def _no_dropout(self, carrier: Carrier, weights: Sequence[Weight]) -> None:
        """Refuses dropout: random weights of the probabilities that are drawn where the probabilities are.

        They would have to be carried as an array like the scores. What many sequences or heads share is smaller, and a
        side input like any other; so are a random mask of the scores, and one that a loop is handed.
        """
        keys = set(self.space.resolve(self.key_axis))
        scores = self.space.extent(tuple(self.space.atoms(self.score)))
        for position in dict.fromkeys(position for weight in weights for position in weight.program.sides):
            source = carrier.sides[position]
            if isinstance(source, Operand) and set(source.labels) & keys:
                large = _SHARED * self.space.extent(source.labels) > scores
                if large and self._drawn_here(carrier.operands[source.position]):
                    raise Mismatch(
                        "dropout is active on the probabilities",
                        advice="Dropout on the probabilities keeps all of them in memory. If the model allows it, set "
                        "its rate to 0, or drop parts of the attention's output instead.",
                    )

    def _drawn_here(self, value: int) -> bool:
        """Returns whether a value is computed from random numbers that are drawn in the body of the site."""
        seen: set[int] = set()
        todo = [value]
        for _ in range(200):
            if not todo:
                return False
            number = todo.pop()
            node = self.graph.definitions.get(number)
            if node is None or number in seen or node.body is not self.body:
                continue
            seen.add(number)
            if node.name in _RANDOM:
                return True
            if not (node.name == "dot_general" or kind_of(self.graph.dtype(number)) == "-"):
                todo += node.inputs
        return False


class Labels:
    """Renumbers atoms densely, in order of appearance, so that equal sites have equal descriptions."""

    def __init__(
        self,
        space: Space,
        same: Mapping[Atom, Atom] = MappingProxyType({}),
        fixed: Mapping[Atom, int] = MappingProxyType({}),
    ):
        self._space, self._same, self._fixed = space, same, fixed
        self._number: dict[Atom, int] = {}

    def atoms(self, atoms: Sequence[Atom]) -> tuple[int, ...]:
        found = (self._same.get(a, a) for a in self._space.resolve(atoms))
        return tuple(self._number.setdefault(a, len(self._number)) for a in found)

    def view(self, view: View) -> View:
        return tuple((offset, self.atoms(atoms)) for offset, atoms in view)

    def apart(self, view: View, without: Set[Atom] | Sequence[Atom]) -> View:
        """Returns one dimension for each atom of a view, except some."""
        atoms = (a for _, own in view for a in self._space.resolve(own) if a not in without)
        return tuple((0, self.atoms((a,))) for a in atoms)

    def operand(self, operand: Operand) -> Operand:
        view = self.view(operand.view)
        atoms = dict.fromkeys(a for _, own in operand.view for a in self._space.resolve(own) if a in self._fixed)
        return Operand(operand.position, view, tuple((self._number[a], self._fixed[a]) for a in atoms))

    def source(self, source: Operand | Positions) -> Operand | Positions:
        if isinstance(source, Operand):
            return self.operand(source)
        if not self._fixed.keys().isdisjoint(self._space.resolve(source.dimension[1])):
            raise Mismatch("positions are counted along an axis of which one index is read", advice=EINSUM)
        return Positions((source.dimension[0], self.atoms(source.dimension[1])), source.dtype)

    def term(self, term: RowTerm) -> RowTerm:
        return term if term.source is None else replace(term, source=self.source(term.source))

    def rows(self, rows: RowProgram) -> RowProgram:
        inputs = (x if isinstance(x, RowStatistic) else self.source(x) for x in rows.inputs)
        return replace(rows, inputs=tuple(inputs))

    def sizes(self) -> tuple[int, ...]:
        return tuple(self._space.sizes[a] for a in self._number)
