"""Products of many small matrices and vectors, as sums of elementwise products.

Rotations, rigid transforms and covariances are matrices of 2 to 10 rows, of which a program has thousands.  XLA's CPU
compiler loops over them, and has a routine for each product that takes longer than the product.  Summed over the few
elements of the contracted axis, elementwise products run on vectors that hold elements of many matrices.

Such sums are kept apart from what is around them, as a product itself is: XLA would fuse them with what computes their
operands, and compute that anew for each element that is read.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import Dtype, JaxprEqn
from autopallas.kernels.respelling.contractions import Axes, Contraction, numbers_in
from autopallas.kernels.respelling.fusion_barrier import unfused
from autopallas.kernels.respelling.kind import Kind, Sample, of_equation
from autopallas.kernels.respelling.spec import Plain, RespellingSpec

__all__ = ["KIND"]

_DTYPES = frozenset(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))
_PRECISIONS = {one.name: one for one in (lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST)}

_LEAST_BATCH = 64
_LONGEST_SUM = 16
"""Elements of the contracted axes up to which each has a term."""
_MOST_WORK = 1024
"""Multiplications of one product up to which matrices are small."""
_LITTLE_WORK = 96
"""Multiplications up to which they take longer as they are, though XLA computes them on vectors."""
_VECTOR = 8
"""Elements of an axis from which XLA computes products on vectors."""


class _Product(Contraction):
    """A product, and the way in which XLA computes it."""

    __slots__ = ()

    @property
    def is_small(self) -> bool:
        """Whether there are many products, each of them small, and none that XLA computes as fast."""
        if self.count < _LEAST_BATCH or 0 in (*self.shapes[0], *self.shapes[1]):
            return False
        if not 1 < self.terms <= _LONGEST_SUM or self.work > _MOST_WORK:
            return False
        if self.rows == self.columns == 1:
            return False  # which XLA computes as a sum, together with what is around it
        if 1 in (self.rows, self.columns):
            return self._has_short_rows
        if self.has_long_rows:
            return self.work <= _LITTLE_WORK or self.has_rows_of_both and self.terms <= _VECTOR
        return self.has_long_sums or 2 < self._longest < _VECTOR

    @property
    def has_long_rows(self) -> bool:
        """Whether XLA computes a product of matrices on vectors."""
        return self.free[0] < self.summed[0] and self._longest >= _VECTOR

    @property
    def has_rows_of_both(self) -> bool:
        """Whether rows of the first operand meet rows of the second."""
        return self.free[0] < self.summed[0] and self.free[1] < self.summed[1]

    @property
    def has_long_sums(self) -> bool:
        """Whether XLA calls a routine for each product of matrices that it does not compute on vectors."""
        return self.terms >= 4 and max(self.rows, self.columns) >= 4

    @property
    def _longest(self) -> int:
        return max(self.rows, self.terms, self.columns)

    @property
    def has_rows_of_matrix(self) -> bool:
        """Whether a vector meets rows of a matrix, and not its columns."""
        matrix = self._matrix
        return self.free[matrix] < self.summed[matrix]

    @property
    def _matrix(self) -> int:
        """Which operand of a product with vectors is the matrix."""
        return 0 if self.columns == 1 else 1

    @property
    def _has_short_rows(self) -> bool:
        """Whether the matrix of a product with vectors has a short last axis."""
        matrix = self._matrix
        last = len(self.shapes[matrix]) - 1
        return last in self.batch[matrix] or self.shapes[matrix][last] < _VECTOR

    @property
    def is_batch_last(self) -> bool:
        """Whether the shared axes of both operands are their last, in the same order."""
        ranks = map(len, self.shapes)
        return all(own == tuple(range(rank - len(own), rank)) for own, rank in zip(self.batch, ranks, strict=True))

    @property
    def is_batch_first(self) -> bool:
        """Whether the shared axes of both operands are their first, in the same order."""
        return all(own == tuple(range(len(own))) for own in self.batch)


def _parameters(equation: JaxprEqn) -> Mapping[str, Plain] | None:
    """Returns the parameters of a product of many small matrices."""
    params, types = equation.params, [variable.aval for variable in (*equation.invars, *equation.outvars)]
    contracted, _ = params["dimension_numbers"]
    if math.prod(types[0].shape[axis] for axis in contracted[0]) > _LONGEST_SUM:  # as in most products
        return None
    first, second, result = (t.dtype for t in types)
    if first != second or first not in _DTYPES or result not in _DTYPES:
        return None
    if jnp.promote_types(first, result) != result or params.get("out_sharding") is not None:
        return None  # rounded before it is multiplied; divided among devices as it asks for
    precision = params["precision"]
    if precision is not None:
        if not isinstance(precision, tuple) or any(one not in _PRECISIONS.values() for one in precision):
            return None  # an algorithm that is asked for
        precision = tuple(one.name for one in precision)
    product = _Product.of([t.shape for t in types[:2]], params["dimension_numbers"])
    if not product.is_small:
        return None
    return {"batch": product.batch, "precision": precision, "summed": product.summed}


# ---------------------------------------------------------------------- the two ways


def _original(spec: RespellingSpec, first: jax.Array, second: jax.Array) -> list[jax.Array]:
    numbers = numbers_in(spec)
    names = cast("tuple[str, str] | None", spec["precision"])
    precision = None if names is None else tuple(_PRECISIONS[name] for name in names)
    ((_, dtype),) = spec.results
    return [lax.dot_general(first, second, numbers, cast(lax.Precision, precision), preferred_element_type=dtype)]


def _respelt(spec: RespellingSpec, first: jax.Array, second: jax.Array) -> list[jax.Array]:
    product, ((_, dtype),) = _Product.in_spec(spec), spec.results
    accumulation = jnp.promote_types(dtype, jnp.float32)
    places = list(itertools.product(*map(range, product.sizes(product.summed))))

    def summed(places: Sequence[Axes], *operands: jax.Array) -> jax.Array:
        total: jax.Array | None = None
        for place in places:
            left, right = (_spread(product, i, x, place, accumulation) for i, x in enumerate(operands))
            total = left * right if total is None else total + left * right
        return cast(jax.Array, total).astype(dtype)

    result = unfused(functools.partial(summed, places), functools.partial(summed, places[:1]), first, second)
    if product.is_batch_last:
        count, own = len(product.batch[0]), result.ndim - len(product.batch[0])
        result = lax.transpose(result, (*range(own, own + count), *range(own)))
    return [result]


def _spread(product: _Product, i: int, x: jax.Array, place: Sequence[int], dtype: Dtype) -> jax.Array:
    """Returns the slice of an operand at one place of the contracted axes, with the axes that its product has: the
    shared ones, those of the first operand and those of the second, or the shared ones last if they are."""
    summed, batch, free = product.summed[i], product.batch[i], product.free[i]
    for axis, index in sorted(zip(summed, place, strict=True), reverse=True):
        x = lax.index_in_dim(x, index, axis, keepdims=False)
    left = [axis for axis in range(len(product.shapes[i])) if axis not in summed]
    groups = (free, batch) if product.is_batch_last else (batch, free)
    order = [left.index(axis) for group in groups for axis in group]
    x = x if order == sorted(order) else lax.transpose(x, order)
    first, second = map(len, product.free)
    shared = 0 if product.is_batch_last else len(batch)
    ones = range(shared + first, shared + first + second) if i == 0 else range(shared, shared + first)
    return lax.expand_dims(x, list(ones)).astype(dtype)


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns how much one product is, and which of XLA's ways the original takes."""
    product = _Product.in_spec(spec)
    rows, columns = product.rows, product.columns
    is_matrix = 1 not in (rows, columns)
    limits = (_LITTLE_WORK, _MOST_WORK) if is_matrix else (8, 32, _MOST_WORK)
    work = next(limit for limit in limits if product.work <= limit)
    axes = "" if product.is_batch_first else ", batch last" if product.is_batch_last else ", axes in another order"
    axes += ", several axes" if any(len(own) > 1 for own in (*product.free, *product.summed)) else ""
    if not is_matrix:
        met = "rows" if product.has_rows_of_matrix else "columns"
        return f"{met} with vectors, up to {work} multiplications{axes}"
    if product.has_long_rows:
        form = f"long rows{' of both' if product.has_rows_of_both else ''}"
    else:
        form = "long sums" if product.has_long_sums else "short sums"
    return f"matrices, {form}, up to {work} multiplications{axes}"


_SPELLINGS = {
    "": "nik,nkj->nij", "right": "nik,njk->nij", "left": "nki,nkj->nij", "last": "ikn,kjn->ijn",
    "vector": "nik,nk->ni", "vector-left": "nki,nk->ni",
}  # fmt: skip
"""By which operand is transposed, whether the batch is last, and what is a vector."""
_FORMS = (
    (3, 3, 3, ""), (3, 3, 3, "left"), (3, 3, 50, "right"), (4, 4, 4, ""), (6, 4, 4, "left"),
    (7, 7, 7, ""), (10, 10, 10, "left"), (2, 2, 8, ""), (2, 3, 16, ""), (3, 8, 4, "right"), (9, 8, 4, "right"),
    (3, 3, 3, "last"), (4, 4, 4, "last"), (2, 2, 1, "vector"), (2, 2, 1, "vector-left"), (3, 3, 1, "vector"),
    (3, 3, 1, "vector-left"), (7, 7, 1, "vector"), (7, 7, 1, "vector-left"),
)  # fmt: skip


def _samples() -> Iterator[tuple[str, Sample]]:
    for elements, (rows, terms, columns, form) in itertools.product((2**12, 2**15, 2**19, 2**22), _FORMS):
        count = elements // max(rows * terms, terms * columns, rows * columns)
        if count < _LEAST_BATCH:
            continue
        letters = {"n": count, "i": rows, "k": terms, "j": columns}
        sizes = "x".join(str(letters[letter]) for letter in "nikj" if letter in _SPELLINGS[form])
        yield f"{sizes}{'-' * bool(form)}{form}", _sample(_SPELLINGS[form], letters)


def _sample(spelling: str, letters: Mapping[str, int]) -> Sample:
    """Returns a product as ``einsum`` spells it."""

    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(spelling, x, y)

    operands = spelling.partition("->")[0].split(",")
    shapes = (tuple(letters[letter] for letter in own) for own in operands)
    return Sample(function, tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


KIND = Kind(
    name="batched_product",
    primitives=("dot_general",),
    numerics="reordered",
    instead="a sum of elementwise products over the contracted axis",
    match=of_equation(_parameters),
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    may_round_sums=True,
    elsewhere_from=4.0,
    in_loops=True,
)
