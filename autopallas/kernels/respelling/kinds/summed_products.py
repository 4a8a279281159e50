"""Loops that multiply few rows in each step where no step has to: recurrent networks, and the backwards of these.

The backward of a recurrent network multiplies a few rows, one for each example, and adds the product, of the size of
the weight, to what it carries: T steps read and write T such matrices for the work of a few rows each.  Its steps read
weights for the gradients of their inputs, which no step waits for, and those of the network read them for products of
their inputs.  Here a loop over chunks of steps multiplies the rows of a chunk at once: products of slices before the
steps of the chunk, products that results alone follow from after them, and those that are added up, which it adds once
for each chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import jax

from autopallas import jaxprs
from autopallas.compat import JaxprEqn
from autopallas.graph import Graph, Node, flatten
from autopallas.kernels.respelling.added_products import (
    Term,
    elements_of,
    factors_of,
    is_padded,
    may_add_products,
    rows_of,
    sums_of,
)
from autopallas.kernels.respelling.indexed_loops import (
    IndexedLoop,
    as_written,
    loop_in,
    loop_of,
    results_of,
    with_small_weights,
    without_known_values,
)
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.kinds import elementwise, one_hot, scan_checkpoint, unrolled_scan
from autopallas.kernels.respelling.networks import (
    float32_types,
    gru_loss,
    gru_loss_of_products,
    lstm,
    lstm_loss,
    solver,
)
from autopallas.kernels.respelling.plain_steps import is_plain, without_checkpoints
from autopallas.kernels.respelling.products_by_chunks import LARGE, LEAST_STEPS, multiplied_by_chunks
from autopallas.kernels.respelling.shared_factors import SharedFactors, Taken, has_shared_factors
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND"]

_MOST_ROWS, _MOST_ROWS_LARGE, _MOST_ROWS_PADDED = 8, 32, 16
"""Rows of one step, where the matrices are large, and where each step puts its product among zeros, as the gradient of
a weight's slice does.  With more, the product takes longer than to read and write the matrix, and stacks cost more than
they gain: train steps of LSTMs with 64 rows took 1.0 to 1.15 times as long, of GRUs with slices of weights and 32 to
128 1.0 to 1.3."""
_LEAST_ELEMENTS, _VERY_LARGE = 2**15, 2**20
"""Elements of all sums of a loop, or of what all of its steps multiply by: below the first they stay in caches near by,
and from the second on rows of the table say very large of the latter, which are but read."""
_LEAST_SHARE = 0.1
"""Part of the multiplications of a step's products that those must have which need not wait."""
_WORTH: Mapping[str, int] = {"lgamma": 100, "digamma": 100, "polygamma": 100}
_WORTH_OTHERWISE = 10
"""Elements of these that cost as much in a step as one of a function that has no vector form.  Of a solver with 8 rows
of 512 units under a checkpoint, such an element of a sum took 0.4 nanoseconds, a sine 4, and a polygamma 70."""


def _match(graph: Graph, node: Node) -> Found | None:
    named = KIND.name in graph.named
    if int(node.equation.params["length"]) < LEAST_STEPS and not named:
        return None
    least = 0 if named else _LEAST_ELEMENTS // 4  # a step may multiply by several, as for four gates
    if not (may_add_products(node.equation) or has_shared_factors(node.equation, _MOST_ROWS_LARGE, least)):
        return None
    if (graph.objective == "memory" or scan_checkpoint.KIND.name in graph.named) and not named:
        return None  # a loop that stacks less of its results goes before one that adds them up faster
    place = loop_of(graph, node)
    if place is None:
        return None
    loop, numbers = place
    loop = replace(loop, step=without_checkpoints(loop.step))
    results, kept = results_of(graph, node)
    sums = {i: terms for i, terms in sums_of(loop).items() if i in kept}
    if sums and not (named or _is_worth_it(loop, sums)):
        sums = {}
    factors = SharedFactors(loop)
    taken = _taken(factors, sums, named)
    if not sums and not taken and not _makes_weights(factors, named):
        return None
    own = (
        ("after", taken.after), ("before", taken.before), ("loop", without_known_values(loop)), ("results", kept),
        ("sums", tuple(sums)),
    )  # fmt: skip
    return Found(own, numbers, results)


def _is_worth_it(loop: IndexedLoop, sums: dict[int, tuple[Term, ...]]) -> bool:
    """Returns whether the products are of few rows and large, and a part of the step's work that counts."""
    terms = [term for own in sums.values() for term in own]
    elements = elements_of(loop, sums)
    if elements < _LEAST_ELEMENTS or not is_plain(loop.step):
        return False
    most = _MOST_ROWS_PADDED if any(map(is_padded, terms)) else _MOST_ROWS_LARGE if elements >= LARGE else _MOST_ROWS
    if max(rows_of(term.product) for term in terms) > most:
        return False
    return _are_a_part(loop, [term.product for term in terms]) and not _gains_more_inside(loop, elements)


def _taken(factors: SharedFactors, sums: dict[int, tuple[Term, ...]], named: bool) -> Taken:
    """Returns the products that are taken out of a loop's step: none, where that is not worth it."""
    loop = factors.loop
    if not is_plain(loop.step):
        return Taken()
    found = factors.taken_out(sums, factors_of(sums), _MOST_ROWS_LARGE)
    if not found or named:
        return found
    products = factors.products(found)
    elements = factors.elements(products)
    if elements < _LEAST_ELEMENTS or (elements < LARGE and max(map(factors.rows, products)) > _MOST_ROWS):
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
    work = sum(work_of(e) for e in step.eqns if e.primitive.name == "dot_general")
    return sum(map(work_of, products)) >= _LEAST_SHARE * work


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


def work_of(product: JaxprEqn) -> int:
    return rows_of(product) * int(product.outvars[0].aval.size)


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns what is computed for many steps at once, or once, how many rows these products multiply or sum up in a
    step, and whether they are large or parts of what is added.

    Products of one row are elementwise to a compiler, which adds two of them to a matrix as fast as one.
    """
    loop, chosen_sums = loop_in(spec), spec.numbers("sums")
    taken = Taken(spec.numbers("before"), spec.numbers("after"))
    every = sums_of(loop)
    terms = [term for i in chosen_sums for term in every[i]]
    factors = SharedFactors(loop)
    made = [] if chosen_sums else factors.of_parts()
    products = factors.products(taken) or made
    rows = max([rows_of(term.product) for term in terms] or map(factors.rows, products))
    elements = elements_of(loop, chosen_sums) or factors.elements(products)
    size = "large" if elements >= LARGE else "small"
    if not chosen_sums and elements >= _VERY_LARGE:
        size = "very large"
    parts = ", in parts" if any(map(is_padded, terms)) else ""
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
        yield f"gru-{rows}x{width}", Sample(jax.grad(gru_loss, (1, 2)), types, place=-1)
        yield f"gru-inputs-{rows}x{width}", Sample(jax.grad(gru_loss, (0, 1, 2)), types, place=-1)
        yield f"gru-forward-{rows}x{width}", Sample(gru_loss, types)
        given = float32_types((128, rows, 3 * width), (width, 3 * width))
        yield f"gru-of-products-{rows}x{width}", Sample(gru_loss_of_products, given)
    for rows, width in itertools.product((1, 8), (128, 256)):
        own = float32_types((rows, width), (width, 4 * width), (4 * width, width))
        yield f"solver-{rows}x{width}", Sample(solver, own)


KIND = Kind(
    name="summed_products",
    primitives=("scan",),
    numerics="reordered",
    instead="a loop over chunks of steps, which multiplies the rows of a chunk at once",
    match=_match,
    original=as_written,
    respelt=multiplied_by_chunks,
    feature=_feature,
    samples=_samples,
    may_round_sums=True,
    elsewhere_from=2.0,  # sums of one row gain 1.9 with JAX 0.10 and take twice as long with 0.12
    maps_alike=True,
    gives_way=lambda spec: not spec["sums"] and loop_in(spec).unroll >= unrolled_scan.LEAST_UNROLL,
    fill=lambda spec, random, arrays: with_small_weights(spec, arrays),
)
