"""Loops that multiply few rows in each step where no step has to: recurrent networks, and the backwards of these.

The backward of a recurrent network multiplies a few rows, one for each example, and adds the product, of the size of
the weight, to what it carries: T steps read and write T such matrices for the work of a few rows each.  Its steps read
weights for the gradients of their inputs, which no step waits for, and those of the network read them for products of
their inputs.  Here a loop over chunks of steps multiplies the rows of a chunk at once: products of slices before the
steps of the chunk, products that results alone follow from after them, and those that are added up, which it adds once
for each chunk.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprAtom, JaxprEqn, Literal, Var
from autopallas.graph import Graph, Node, flatten
from autopallas.kernels.respelling.chunks import Arrays, by_chunks
from autopallas.kernels.respelling.indexed import (
    IndexedLoop,
    as_written,
    chosen,
    key_of,
    loop_in,
    loop_of,
    results_of,
    with_small_weights,
)
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.kinds import elementwise, one_hot, scan_checkpoint, unrolled_scan
from autopallas.kernels.respelling.networks import float32_types, lstm, lstm_loss
from autopallas.kernels.respelling.plain_steps import at_a_time, is_plain, without_checkpoints
from autopallas.kernels.respelling.shared_factors import SharedFactors, Taken, has_shared_factors
from autopallas.kernels.respelling.slices_ahead import scan_ahead
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND"]

_ROWS, _ROWS_LARGE = 128, 512
"""Rows that one product of a chunk takes, and a product with large matrices: these are read, and written where they are
added to, once for all of them."""
_MOST_ROWS, _MOST_ROWS_LARGE, _MOST_ROWS_PADDED = 8, 32, 16
"""Rows of one step, where the matrices are large, and where each step puts its product among zeros, as the gradient of
a weight's slice does.  With more, the product takes longer than to read and write the matrix, and stacks cost more than
they gain: train steps of LSTMs with 64 rows took 1.0 to 1.15 times as long, of GRUs with slices of weights and 32 to
128 1.0 to 1.3."""
_LEAST_STEPS = 8
_LEAST_ELEMENTS, _LARGE, _VERY_LARGE = 2**15, 2**18, 2**20
"""Elements of all sums of a loop, or of what all of its steps multiply by: below the first they stay in caches near by,
from the second on rows of the table say large, and from the third on very large of the latter, which are but read."""
_LEAST_SHARE = 0.1
"""Part of the multiplications of a step's products that those must have which need not wait."""
_WORTH: Mapping[str, int] = {"lgamma": 100, "digamma": 100, "polygamma": 100}
_WORTH_OTHERWISE = 10
"""Elements of these that cost as much in a step as one of a function that has no vector form.  Of a solver with 8 rows
of 512 units under a checkpoint, such an element of a sum took 0.4 nanoseconds, a sine 4, and a polygamma 70."""
_ADDITIONS = frozenset({"add", "add_any"})
_TURNS = frozenset({"transpose", "reshape", "slice", "split", "squeeze", "expand_dims"})


_Turn: TypeAlias = tuple[JaxprEqn, int]
"""An equation, and which of its results is used, or which of the operands that it concatenates the value is."""


@dataclass(frozen=True, slots=True)
class _Term:
    """A product that a step adds to what it carries.

    Attributes:
      product: its equation.
      turns: what is done to its result before it is added: transpositions, reshapes, slices, zeros or other products
        around it and casts to wider numbers.
    """

    product: JaxprEqn
    turns: tuple[_Turn, ...]


def _match(graph: Graph, node: Node) -> Found | None:
    named = KIND.name in graph.named
    if int(node.equation.params["length"]) < _LEAST_STEPS and not named:
        return None
    least = 0 if named else _LEAST_ELEMENTS // 4  # a step may multiply by several, as for four gates
    if not (_adds_products(node.equation) or has_shared_factors(node.equation, _MOST_ROWS_LARGE, least)):
        return None
    if (graph.objective == "memory" or scan_checkpoint.KIND.name in graph.named) and not named:
        return None  # a loop that stacks less of its results goes before one that adds them up faster
    place = loop_of(graph, node)
    if place is None:
        return None
    loop, numbers = place
    loop = replace(loop, step=without_checkpoints(loop.step))
    results, kept = results_of(graph, node)
    sums = {i: terms for i, terms in _sums(loop).items() if i in kept}
    if sums and not (named or _is_worth_it(loop, sums)):
        sums = {}
    factors = SharedFactors(loop)
    taken = _taken(factors, sums, named)
    if not sums and not taken and not _makes_weights(factors, named):
        return None
    loop = replace(loop, known=(), zeros=frozenset())
    own = (
        ("after", taken.after), ("before", taken.before), ("loop", replace(loop, key=key_of(loop))), ("results", kept),
        ("sums", tuple(sums)),
    )  # fmt: skip
    return Found(own, numbers, results)


def _adds_products(equation: JaxprEqn) -> bool:
    """Returns whether a scan's step may add a product to a carried array: a quick look."""
    jaxpr, _ = jaxprs.open_jaxpr(equation.params["jaxpr"])
    constants, carried = compat.scan_parts(equation)
    carries = set(jaxpr.invars[constants : constants + carried])
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    todo = [v for v in jaxpr.outvars[:carried] if isinstance(v, Var) and len(getattr(v.aval, "shape", ())) >= 2]
    seen = set(todo)
    while todo:
        last = made.get(todo.pop())
        if last is not None and last.primitive.name in _ADDITIONS:
            inputs = {v for v in last.invars if isinstance(v, Var)}
            if inputs & carries:
                return True
            todo += inputs - seen  # what is added up in many ways is looked at once
            seen |= inputs
    return False


def _sums(loop: IndexedLoop) -> dict[int, tuple[_Term, ...]]:
    """Returns the terms of each carried value to which steps add nothing but products, and which they do not read."""
    step, _ = jaxprs.open_jaxpr(loop.step)
    made = {v: e for e in step.eqns for v in e.outvars}
    uses: dict[Var, int] = {}
    for atom in (*(v for e in step.eqns for v in e.invars), *step.outvars):
        if isinstance(atom, Var):
            uses[atom] = uses.get(atom, 0) + 1
    constants = {*step.constvars, *step.invars[: loop.constants]}
    found = {}
    for i in range(loop.carried):
        before, after = step.invars[loop.constants + i], step.outvars[i]
        terms = _terms(before, after, made, uses, constants)
        if terms:
            found[i] = terms
    return found


def _terms(
    before: Var, after: JaxprAtom, made: dict[Var, JaxprEqn], uses: dict[Var, int], constants: set[Var]
) -> tuple[_Term, ...] | None:
    """Returns the products whose sum with ``before`` is ``after``, or None where that is anything else."""
    if not jnp.issubdtype(before.aval.dtype, jnp.floating) or uses.get(before) != 1:
        return None
    todo, terms, has_before = [after], list[_Term](), False
    while todo:
        atom = todo.pop()
        if atom is before:
            has_before = True
            continue
        if not isinstance(atom, Var) or uses[atom] != 1 or atom.aval.dtype != before.aval.dtype:
            return None
        equation = made.get(atom)
        if equation is not None and equation.primitive.name in _ADDITIONS:
            if any(v.aval.shape != atom.aval.shape for v in equation.invars):
                return None
            todo += equation.invars
            continue
        found = _of(atom, made, uses, constants, ())
        if found is None:
            return None
        terms += found
    return tuple(terms) if has_before else None


def _of(
    atom: Var, made: dict[Var, JaxprEqn], uses: dict[Var, int], constants: set[Var], turned: tuple[_Turn, ...]
) -> list[_Term] | None:
    """Returns the products that a value is put together of, turned and cast to wider numbers, or None.

    Args:
      atom: the value.
      made, uses, constants: the equations of a step's values, how often these are read, and what all steps share.
      turned: what is done to the value before it is added, the last of it first.
    """
    turns = list(turned)
    while (equation := made.get(atom)) is not None and uses.get(atom) == 1:
        name = equation.primitive.name
        if name == "dot_general":
            steps = all(isinstance(v, Var) and v not in constants for v in equation.invars)
            floats = all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (*equation.invars, atom))
            narrowed = any(v.aval.dtype.itemsize > atom.aval.dtype.itemsize for v in equation.invars)
            return [_Term(equation, tuple(reversed(turns)))] if steps and floats and not narrowed else None
        if name == "concatenate":
            if not all(isinstance(v, Var) for v in equation.invars):
                return None
            parts = [
                _of(cast(Var, v), made, uses, constants, (*turns, (equation, i))) for i, v in enumerate(equation.invars)
            ]
            return None if None in parts else [term for part in parts for term in part or ()]
        given = equation.invars[0] if equation.invars else None
        if not isinstance(given, Var) or not (name in _TURNS or _widens(equation) or _pads_with_zeros(equation)):
            return None
        turns.append((equation, equation.outvars.index(atom)))
        atom = given
    return None


def _widens(equation: JaxprEqn) -> bool:
    """Returns whether an equation casts floating numbers to a dtype that has all of them."""
    if equation.primitive.name != "convert_element_type":
        return False
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    return jnp.issubdtype(before, jnp.floating) and jnp.promote_types(before, after) == after


def _pads_with_zeros(equation: JaxprEqn) -> bool:
    """Returns whether an equation puts an array among zeros, as the gradient of a slice does."""
    if equation.primitive.name != "pad":
        return False
    value = equation.invars[1]
    return isinstance(value, Literal) and not np.any(np.asarray(value.val))


def _is_worth_it(loop: IndexedLoop, sums: dict[int, tuple[_Term, ...]]) -> bool:
    """Returns whether the products are of few rows and large, and a part of the step's work that counts."""
    terms = [term for own in sums.values() for term in own]
    elements = _elements(loop, sums)
    if elements < _LEAST_ELEMENTS or not is_plain(loop.step):
        return False
    most = _MOST_ROWS_PADDED if any(map(_is_padded, terms)) else _MOST_ROWS_LARGE if elements >= _LARGE else _MOST_ROWS
    if max(_rows(term.product) for term in terms) > most:
        return False
    return _are_a_part(loop, [term.product for term in terms]) and not _gains_more_inside(loop, elements)


def _taken(factors: SharedFactors, sums: dict[int, tuple[_Term, ...]], named: bool) -> Taken:
    """Returns the products that are taken out of a loop's step: none, where that is not worth it."""
    loop = factors.loop
    if not is_plain(loop.step):
        return Taken()
    found = factors.taken_out(sums, _read(sums), _MOST_ROWS_LARGE)
    if not found or named:
        return found
    products = factors.products(found)
    elements = factors.elements(products)
    if elements < _LEAST_ELEMENTS or (elements < _LARGE and max(map(factors.rows, products)) > _MOST_ROWS):
        return Taken()
    return found if _are_a_part(loop, products) and not _gains_more_inside(loop, elements) else Taken()


def _makes_weights(factors: SharedFactors, named: bool) -> bool:
    """Returns whether each step takes large parts of what all steps share, or puts such together, and multiplies few
    rows by them."""
    products = factors.of_parts()
    if not products or not is_plain(factors.loop.step):
        return False
    elements, few = factors.elements(products), max(map(factors.rows, products)) <= _MOST_ROWS_LARGE
    return named or (few and elements >= _LEAST_ELEMENTS and not _gains_more_inside(factors.loop, elements))


def _are_a_part(loop: IndexedLoop, products: Sequence[JaxprEqn]) -> bool:
    """Returns whether products are a part of the work of a step that counts."""
    step, _ = jaxprs.open_jaxpr(loop.step)
    work = sum(_work(e) for e in step.eqns if e.primitive.name == "dot_general")
    return sum(map(_work, products)) >= _LEAST_SHARE * work


def _read(sums: Mapping[int, tuple[_Term, ...]]) -> list[Var]:
    """Returns what products that are added up multiply."""
    products = [term.product for terms in sums.values() for term in terms]
    return [v for product in products for v in product.invars if isinstance(v, Var)]


def _gains_more_inside(loop: IndexedLoop, elements: int) -> bool:
    """Returns whether a step, of which nothing is respelt where the loop is, multiplies by one-hot matrices that it
    makes, or computes so many elements of functions without a vector form that they cost more than products with so
    many."""
    graph, cost = Graph(flatten(loop.step)), 0
    for node in graph.nodes:
        if node.name in one_hot.KIND.primitives and one_hot.KIND.match(graph, node) is not None:
            return True
        if node.name in elementwise.KIND.primitives and elementwise.KIND.match(graph, node) is not None:
            size = math.prod(graph.shape(node.outputs[0]))
            cost += size * _WORTH.get(node.name, _WORTH_OTHERWISE)
    return cost > elements


def _is_padded(term: _Term) -> bool:
    """Returns whether each step puts the product among zeros."""
    return any(equation.primitive.name == "pad" for equation, _ in term.turns)


def _elements(loop: IndexedLoop, sums: Iterable[int]) -> int:
    return sum(math.prod(loop.step.out_avals[i].shape) for i in sums)


def _rows(product: JaxprEqn) -> int:
    """Returns how many products of two numbers each element of a product of matrices sums up."""
    (contracted, _), _ = product.params["dimension_numbers"]
    return math.prod(product.invars[0].aval.shape[axis] for axis in contracted)


def _work(product: JaxprEqn) -> int:
    return _rows(product) * int(product.outvars[0].aval.size)


# ---------------------------------------------------------------------- what is computed


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    loop = loop_in(spec)
    every = _sums(loop)
    sums = {i: every[i] for i in spec.numbers("sums")}
    taken = Taken(spec.numbers("before"), spec.numbers("after"))
    factors = SharedFactors(loop)
    parts = factors.parted(sums, _read(sums), taken)
    given, last = loop.given(operands), loop.constants + loop.carried
    shared, first, slices = given[: loop.constants], given[loop.constants : last], given[last:]
    shared = [*shared, *compat.jaxpr_as_fun(parts.shared)(*shared)]
    run = compat.jaxpr_as_fun(parts.step)
    kept, results = len(parts.kept), len(parts.results)

    def one(carried: Arrays, own: Arrays, made: Arrays) -> tuple[Arrays, Arrays]:
        found = run(*shared, *carried, *own, *made)
        return list(found[:kept]), list(found[kept:])

    def of_all(program: ClosedJaxpr, *stacks: jax.Array) -> list[jax.Array]:
        if not program.jaxpr.outvars:
            return []
        return list(jax.vmap(partial(compat.jaxpr_as_fun(program), *shared))(*stacks))

    def chunk(carried: Arrays, own: tuple[Arrays, ...], length: int) -> tuple[Arrays, Arrays]:
        begin, before = carried[:kept], carried[kept:]
        made = of_all(parts.before, *own[0])
        unroll = at_a_time(loop.unroll, length)
        ends, found = scan_ahead(one, begin, own[0], made, length, reverse=loop.reverse, unroll=unroll)
        stacks = found[results:]
        values = dict(zip((*parts.slices, *parts.given, *parts.stacked), (*own[0], *made, *stacks), strict=True))
        values.update(zip(parts.later, of_all(parts.after, *own[0], *made, *stacks), strict=True))
        after = [x + _total(terms, values, x.dtype) for x, terms in zip(before, sums.values(), strict=True)]
        computed = dict(zip(parts.results, found, strict=False))
        return [*ends, *after], [
            computed[i] if i in computed else values[cast(Var, v)] for i, v in enumerate(parts.outputs)
        ]

    begin = [*(first[i] for i in parts.kept), *(first[i].astype(_wide(first[i].dtype)) for i in sums)]
    size = _steps(factors, sums, taken)
    if size < loop.length:
        ends, stacks = by_chunks(chunk, begin, (slices,), (), loop.length, size, reverse=loop.reverse, backward=False)
    else:
        ends, stacks = chunk(begin, (slices,), loop.length)
    found = dict(zip((*parts.kept, *sums), ends, strict=True))
    return chosen(spec, [*(found[i].astype(first[i].dtype) for i in range(loop.carried)), *stacks])


def _steps(factors: SharedFactors, sums: Mapping[int, tuple[_Term, ...]], taken: Taken) -> int:
    """Returns the number of steps of a chunk."""
    length = factors.loop.length
    rows = [_rows(term.product) for terms in sums.values() for term in terms]
    rows += map(factors.rows, factors.products(taken))
    if not rows:
        return length
    most = (
        _ROWS_LARGE
        if max(_elements(factors.loop, sums), factors.elements(factors.products(taken))) >= _LARGE
        else _ROWS
    )
    size = max(most // max(1, min(rows)), _LEAST_STEPS)
    return length if 2 * size >= length else size


def _total(terms: Sequence[_Term], values: dict[Var, jax.Array], dtype: np.dtype) -> jax.Array:
    """Returns the sum of products over the steps of a chunk; products alike are one, of the rows of all."""
    alike: dict[str, list[_Term]] = {}
    for term in terms:
        alike.setdefault(_form(term), []).append(term)
    found = []
    for own in alike.values():
        left, right = ([values[cast(Var, term.product.invars[side])] for term in own] for side in (0, 1))
        x = _product(own[0].product, _joined(left, dtype), _joined(right, dtype))
        for equation, result in own[0].turns:
            if equation.primitive.name != "convert_element_type":
                x = _turned(equation, x, result)
        found.append(x)
    return functools.reduce(operator.add, found)


def _form(term: _Term) -> str:
    """Returns a text that is equal for products of operands of equal shapes that are taken and turned alike."""
    equations = ((term.product, 0), *term.turns)
    return str([(e.primitive.name, i, [v.aval.shape for v in e.invars], e.params) for e, i in equations])


def _joined(parts: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
    """Returns the rows of all steps, and of several products, in the dtype of their sum: not every compiler for CPUs
    multiplies numbers of 16 bits and sums them up in 32."""
    whole = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    return whole.astype(dtype)


def _product(equation: JaxprEqn, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns a step's product summed over the steps, which are the first axes of the operands."""
    contracted, batch = equation.params["dimension_numbers"]
    numbers = _later(contracted, True), _later(batch, False)
    found: jax.Array = lax.dot_general(left, right, numbers, precision=equation.params["precision"])
    return found


def _later(axes: tuple[Sequence[int], Sequence[int]], contracts: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the axes of two operands behind a first axis of steps, which is one of them where it is contracted."""
    left, right = (((0,) if contracts else ()) + tuple(axis + 1 for axis in own) for own in axes)
    return left, right


def _turned(equation: JaxprEqn, x: jax.Array, place: int) -> jax.Array:
    """Returns an array as an equation turns, reshapes, cuts or pads it, whose own may be narrower; one of those that it
    concatenates with zeros in the place of the others."""
    if equation.primitive.name == "concatenate":
        axis, sizes = (
            equation.params["dimension"],
            [v.aval.shape[equation.params["dimension"]] for v in equation.invars],
        )
        around = [(0, 0, 0)] * x.ndim
        around[axis] = sum(sizes[:place]), sum(sizes[place + 1 :]), 0
        return lax.pad(x, jnp.zeros((), x.dtype), around)
    params = equation.primitive.get_bind_params(equation.params)
    more = [jnp.zeros((), x.dtype)] if equation.primitive.name == "pad" else []
    found = equation.primitive.bind(x, *more, **params)
    return cast(jax.Array, found[place] if equation.primitive.multiple_results else found)


def _wide(dtype: np.dtype) -> np.dtype:
    return jnp.promote_types(dtype, jnp.float32)


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns what is computed for many steps at once, or once, how many rows these products multiply or sum up in a
    step, and whether they are large or parts of what is added.

    Products of one row are elementwise to a compiler, which adds two of them to a matrix as fast as one.
    """
    loop, chosen_sums = loop_in(spec), spec.numbers("sums")
    taken = Taken(spec.numbers("before"), spec.numbers("after"))
    every = _sums(loop)
    terms = [term for i in chosen_sums for term in every[i]]
    factors = SharedFactors(loop)
    made = [] if chosen_sums else factors.of_parts()
    products = factors.products(taken) or made
    rows = max([_rows(term.product) for term in terms] or map(factors.rows, products))
    elements = _elements(loop, chosen_sums) or factors.elements(products)
    size = "large" if elements >= _LARGE else "small"
    if not chosen_sums and elements >= _VERY_LARGE:
        size = "very large"
    parts = ", in parts" if any(map(_is_padded, terms)) else ""
    several = ", twice" if rows == 1 and not parts and len(terms) > len(chosen_sums) else ""
    few = next((text for most, text in _FEW if rows <= most), "33 rows or more")
    has = (chosen_sums, taken.before, taken.after, made)
    what = [name for name, own in zip(_WHAT, has, strict=True) if own]
    return f"{size} {' and '.join(what)} of {few}{several}{parts}"


_WHAT = ("sums", "products before", "products after", "weights that steps make")
_FEW = ((1, "1 row"), (8, "2 to 8 rows"), (16, "9 to 16 rows"), (32, "17 to 32 rows"))


def _samples() -> Iterator[tuple[str, Sample]]:
    """Yields LSTMs, and their gradients by weights and by all arguments, the same of a GRU whose gates read slices of
    weights, such a GRU of inputs that were multiplied before, and gradients of a solver of differential equations.  The
    last site is the backward's."""
    sizes = itertools.chain(itertools.product((1, 2, 8, 16, 32), (256, 512)), itertools.product((1, 8), (128, 1024)))
    for rows, width in sizes:
        types = float32_types((32 if width == 1024 else 128, rows, width), *[(width, 4 * width)] * 2)
        yield f"lstm-forward-{rows}x{width}", Sample(lstm_loss, types)
        yield f"lstm-{rows}x{width}", Sample(jax.grad(lstm_loss, (1, 2)), types, place=-1)
        yield f"lstm-inputs-{rows}x{width}", Sample(lstm, types, place=-1)
    for rows, width in itertools.product((1, 8, 16), (128, 256)):
        types = float32_types((128, rows, width), *[(width, 3 * width)] * 2)
        yield f"gru-{rows}x{width}", Sample(jax.grad(_gru, (1, 2)), types, place=-1)
        yield f"gru-inputs-{rows}x{width}", Sample(jax.grad(_gru, (0, 1, 2)), types, place=-1)
        yield f"gru-forward-{rows}x{width}", Sample(_gru, types)
        given = float32_types((128, rows, 3 * width), (width, 3 * width))
        yield f"gru-of-products-{rows}x{width}", Sample(_gru_of_products, given)
    for rows, width in itertools.product((1, 8), (128, 256)):
        own = float32_types((rows, width), (width, 4 * width), (4 * width, width))
        yield f"solver-{rows}x{width}", Sample(_solver, own)


def _gru(x: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
    """Returns a loss of a GRU; x is [time, batch, width], w and u are [width, 3 width]."""
    width = x.shape[-1]

    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        reset = jax.nn.sigmoid(x @ w[:, :width] + h @ u[:, :width])
        keep = jax.nn.sigmoid(x @ w[:, width : 2 * width] + h @ u[:, width : 2 * width])
        h = keep * h + (1 - keep) * jnp.tanh(x @ w[:, 2 * width :] + reset * (h @ u[:, 2 * width :]))
        return h, h

    return jnp.sum(jnp.sin(lax.scan(step, jnp.zeros_like(x[0]), x)[1]))


def _gru_of_products(z: jax.Array, u: jax.Array) -> jax.Array:
    """Returns a loss of a GRU whose inputs were multiplied before; z is [time, batch, 3 width], u [width, 3 width]."""
    width = len(u)

    def step(h: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        reset, keep = (jax.nn.sigmoid(z[:, i : i + width] + h @ u[:, i : i + width]) for i in (0, width))
        h = keep * h + (1 - keep) * jnp.tanh(z[:, 2 * width :] + reset * (h @ u[:, 2 * width :]))
        return h, h

    return jnp.sum(jnp.sin(lax.scan(step, jnp.zeros((z.shape[1], width)), z)[1]))


def _solver(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """Returns gradients of Heun's method for a network of two layers; x is [batch, width]."""

    def loss(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        def slope(x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ w) @ v

        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            first = slope(x)
            return x + 0.05 * (first + slope(x + 0.1 * first)), None

        return jnp.sum(jnp.sin(lax.scan(step, x, None, 32)[0]))

    found: tuple[jax.Array, ...] = jax.grad(loss, (0, 1, 2))(x, w, v)
    return found


KIND = Kind(
    name="summed_products",
    primitives=("scan",),
    numerics="reordered",
    instead="a loop over chunks of steps, which multiplies the rows of a chunk at once",
    match=_match,
    original=as_written,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    may_round_sums=True,
    elsewhere_from=1.3,  # of one row, 1.36 with JAX 0.10 and 0.86 with 0.12
    maps_alike=True,
    gives_way=lambda spec: not spec["sums"] and loop_in(spec).unroll >= unrolled_scan.LEAST_UNROLL,
    fill=lambda spec, random, arrays: with_small_weights(spec, arrays),
)
