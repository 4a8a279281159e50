"""Writes a loop as one over chunks of steps, which multiplies the rows of a chunk at once: products of slices before
the steps of the chunk, products that results alone follow from after them, and those that are added up, which it adds
once for each chunk."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from autopallas import compat
from autopallas.compat import ClosedJaxpr, Var
from autopallas.kernels.respelling.added_products import Term, elements_of, factors_of, rows_of, sums_of, total
from autopallas.kernels.respelling.chunks import Arrays, by_chunks
from autopallas.kernels.respelling.indexed_loops import chosen, loop_in
from autopallas.kernels.respelling.plain_steps import at_a_time
from autopallas.kernels.respelling.prefetched_slices import scan_ahead
from autopallas.kernels.respelling.shared_factors import SharedFactors, Taken
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["LARGE", "LEAST_STEPS", "multiplied_by_chunks"]

_ROWS, _ROWS_LARGE = 128, 512
"""Rows that one product of a chunk takes, and a product with large matrices: these are read, and written where they are
added to, once for all of them."""
LEAST_STEPS = 8
LARGE = 2**18
"""Elements of all sums of a loop, or of what all of its steps multiply by, from which on matrices are large."""


def multiplied_by_chunks(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    """Returns what the loop of a respelling computes."""
    loop = loop_in(spec)
    every = sums_of(loop)
    sums = {i: every[i] for i in spec.numbers("sums")}
    taken = Taken(spec.numbers("before"), spec.numbers("after"))
    factors = SharedFactors(loop)
    parts = factors.parted(sums, factors_of(sums), taken)
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
        after = [x + total(terms, values, x.dtype) for x, terms in zip(before, sums.values(), strict=True)]
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


def _steps(factors: SharedFactors, sums: Mapping[int, tuple[Term, ...]], taken: Taken) -> int:
    """Returns the number of steps of a chunk."""
    length = factors.loop.length
    rows = [rows_of(term.product) for terms in sums.values() for term in terms]
    rows += map(factors.rows, factors.products(taken))
    if not rows:
        return length
    most = (
        _ROWS_LARGE
        if max(elements_of(factors.loop, sums), factors.elements(factors.products(taken))) >= LARGE
        else _ROWS
    )
    size = max(most // max(1, min(rows)), LEAST_STEPS)
    return length if 2 * size >= length else size


def _wide(dtype: np.dtype) -> np.dtype:
    return jnp.promote_types(dtype, jnp.float32)
