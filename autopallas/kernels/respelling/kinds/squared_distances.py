"""Sums of squared differences between all pairs of rows, and their gradients, as matrix products.

``((x[:, None] - y[None]) ** 2).sum(-1)`` takes a step for every pair and column.  Multiplied out, its terms are sums of
products of arrays that lack an axis: the squares of x, those of y, and twice a matrix product.  The same holds of the
gradients, and of weighted squares.  (One product alone, ``(x[:, None] * y[None]).sum(-1)``, is a ``broadcast_product``
where XLA does not compute it as a matrix product by itself.)

Multiplied out, the result is the difference of numbers that may be much larger than it: of rows that are close to each
other and far from zero little is left, and a distance of a row to itself is a rounding in place of zero.  That is for
the user to decide, so this kind is looked for where ``ops`` names it alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.compat import ArrayFunction
from autopallas.graph import Graph, Node
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.spec import Plain, RespellingSpec

__all__ = ["KIND"]

Tree: TypeAlias = "tuple[Any, ...]"
"""("number", n), ("operand", position, axes), (function, tree) or (function, tree, tree)."""
Terms: TypeAlias = "dict[tuple[int, ...], int]"
"""The factor of each product of operands, which are given by their sorted positions."""

_DEEPEST, _MOST_TERMS, _MOST_FACTORS, _LARGEST = 12, 6, 3, 8
_FUNCTIONS: Mapping[str, ArrayFunction] = {
    "add": jnp.add,
    "add_any": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "neg": jnp.negative,
}


# ---------------------------------------------------------------------- recognition


class _Reader:
    """Reads the tree of what is summed.

    Attributes:
      operands: the numbers of the operands, each with the axes of the sum's that its own stand for.
    """

    def __init__(self, graph: Graph, shape: tuple[int, ...]):
        self.graph, self.shape = graph, shape
        self.operands: dict[tuple[int, tuple[int, ...]], int] = {}
        self._known: dict[int, Tree | None] = {}

    def tree(self, number: int, depth: int = 0) -> Tree | None:
        """Returns the tree of a value; None if it has none, or one that is too deep, or an operand has all axes."""
        if number not in self._known:
            self.graph.steps.spend(1)
            self._known[number] = (
                self._number(number) or self._inner(number, depth) or self._operand(number, range(len(self.shape)))
            )
        return self._known[number]

    def _number(self, number: int) -> Tree | None:
        value = np.asarray(self.graph.literals.get(number, math.nan))
        whole = value.ndim == 0 and abs(value) <= _LARGEST and value == int(value)
        return ("number", int(value)) if whole else None

    def _inner(self, number: int, depth: int) -> Tree | None:
        node = self.graph.definitions.get(number)
        if node is None or depth == _DEEPEST:
            return None
        params = node.equation.params
        if node.name == "broadcast_in_dim":
            (given,) = node.inputs
            return self._number(given) or self._operand(given, params["broadcast_dimensions"])
        power = params["y"] if node.name == "integer_pow" else 2 if node.name == "square" else None
        if node.name not in _FUNCTIONS and power not in (1, 2):
            return None
        trees = [self.tree(n, depth + 1) for n in node.inputs]
        if None in trees:
            return None
        if power is None:
            return (node.name, *trees)
        return trees[0] if power == 1 else ("mul", trees[0], trees[0])

    def _operand(self, number: int, places: Sequence[int]) -> Tree | None:
        own = self.graph.shape(number)
        if len(own) != len(places):
            return None
        axes = tuple(int(p) if size > 1 else -1 for p, size in zip(places, own, strict=True))
        if all(axis in axes or size == 1 for axis, size in enumerate(self.shape)):
            return None
        return "operand", self.operands.setdefault((number, axes), len(self.operands)), axes


def _match(graph: Graph, node: Node) -> Found | None:
    (summed,) = node.inputs
    if summed in graph.literals or str(graph.dtype(summed)) not in ("float32", "float64"):
        return None
    shape, reduced = graph.shape(summed), tuple(sorted(int(axis) for axis in node.equation.params["axes"]))
    if 0 in shape or not reduced or len(shape) > 8:
        return None
    reader = _Reader(graph, shape)
    tree = reader.tree(summed)
    if tree is None or tree[0] in ("operand", "number"):
        return None
    terms = _terms(tree)
    operands = tuple(number for number, _ in reader.operands)
    if terms is None or len(terms) < 2 or any(graph.dtype(n) != graph.dtype(summed) for n in operands):
        return None
    axes = [frozenset(a for a in axes if a >= 0) for _, axes in reader.operands]
    if not any(_is_product([axes[i] for i in term], reduced) for term in terms):
        return None
    parameters = (("axes", reduced), ("shape", shape), ("tree", cast(Plain, tree)))
    return Found(parameters, operands, node.outputs)


def _is_product(factors: Sequence[frozenset[int]], reduced: Sequence[int]) -> bool:
    """Returns whether a term is a matrix product: each of two factors has an axis that the other lacks and that stays,
    or is summed over with the other."""
    kept = [factor - set(reduced) for factor in factors]
    shared = frozenset.intersection(*factors) & set(reduced) if len(factors) > 1 else frozenset()
    return bool(shared) and any(a - b and b - a for a, b in itertools.combinations(kept, 2))


def _terms(tree: Tree) -> Terms | None:
    """Multiplies a tree out; None if there are too many terms or factors."""
    if tree[0] == "number":
        return {(): tree[1]}
    if tree[0] == "operand":
        return {(tree[1],): 1}
    parts = [_terms(part) for part in tree[1:]]
    if None in parts:
        return None
    first, *rest = cast("list[Terms]", parts)
    if tree[0] == "neg":
        return {term: -factor for term, factor in first.items()}
    (second,) = rest
    if tree[0] == "mul":
        pairs = itertools.product(first.items(), second.items())
        products = [(tuple(sorted((*a, *b))), m * n) for (a, m), (b, n) in pairs]
    else:
        sign = -1 if tree[0] == "sub" else 1
        products = [*first.items(), *((term, sign * factor) for term, factor in second.items())]
    sums: Terms = {}
    for term, factor in products:
        sums[term] = sums.get(term, 0) + factor
    sums = {term: factor for term, factor in sums.items() if factor}
    small = len(sums) <= _MOST_TERMS and all(len(term) <= _MOST_FACTORS for term in sums)
    return sums if small else None


# ---------------------------------------------------------------------- the two ways


def _original(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    shape = cast("tuple[int, ...]", spec["shape"])

    def value(tree: Tree) -> jax.Array | int:
        if tree[0] == "number":
            return cast(int, tree[1])
        if tree[0] == "operand":
            return _spread(operands[tree[1]], tree[2], shape)
        computed: jax.Array = _FUNCTIONS[tree[0]](*map(value, tree[1:]))
        return computed

    summed = value(cast(Tree, spec["tree"]))
    return [jnp.sum(jnp.asarray(summed), cast("tuple[int, ...]", spec["axes"]))]


def _spread(x: jax.Array, axes: Sequence[int], shape: Sequence[int]) -> jax.Array:
    kept = [axis for axis in axes if axis >= 0]
    return lax.broadcast_in_dim(lax.squeeze(x, [i for i, axis in enumerate(axes) if axis < 0]), shape, kept)


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    shape, reduced = (cast("tuple[int, ...]", spec[name]) for name in ("shape", "axes"))
    tree = cast(Tree, spec["tree"])
    given = dict(_operands_of(tree))
    stay = [axis for axis in range(len(shape)) if axis not in reduced]
    total: jax.Array | None = None
    for term, factor in cast(Terms, _terms(tree)).items():
        arrays = [lax.squeeze(operands[i], [n for n, axis in enumerate(given[i]) if axis < 0]) for i in term]
        axes = [[axis for axis in given[i] if axis >= 0] for i in term]
        held = {axis for own in axes for axis in own}
        left = [axis for axis in stay if axis in held]
        factor *= math.prod(shape[axis] for axis in reduced if axis not in held)
        product = _product(arrays, axes, left) if term else jnp.ones((), spec.results[0][1])
        part = lax.broadcast_in_dim(product, [shape[a] for a in stay], [stay.index(a) for a in left])
        part = part if factor == 1 else part * factor
        total = part if total is None else total + part
    result = cast(jax.Array, total)
    # Where nothing but a rounding is left of a square, it is not negative.
    return [jnp.maximum(result, 0) if tree[0] == "mul" and tree[1] == tree[2] else result]


def _product(arrays: Sequence[jax.Array], axes: Sequence[Sequence[int]], left: Sequence[int]) -> jax.Array:
    """Returns the sum of products over all axes but those that are left."""
    operands = [part for array, own in zip(arrays, axes, strict=True) for part in (array, list(own))]
    product: jax.Array = jnp.einsum(*operands, list(left), precision=lax.Precision.HIGHEST)
    return product


def _operands_of(tree: Tree) -> Iterator[tuple[int, tuple[int, ...]]]:
    if tree[0] == "operand":
        yield tree[1], tree[2]
    elif tree[0] != "number":
        for part in tree[1:]:
            yield from _operands_of(part)


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns over how many numbers the sums are, and whether an axis of all operands stays."""
    shape, axes = (cast("tuple[int, ...]", spec[name]) for name in ("shape", "axes"))
    count = math.prod(shape[axis] for axis in axes)
    length = next((f"up to {limit}" for limit in (4, 16, 64) if count <= limit), "more")
    held = (own for _, own in _operands_of(cast(Tree, spec["tree"])))
    batched = frozenset.intersection(*map(frozenset, held)) - {-1, *axes}
    return f"sums of {length}{', batched' if batched else ''}"


def _samples() -> Iterator[tuple[str, Sample]]:
    def distances(x: jax.Array, y: jax.Array) -> jax.Array:
        return ((x[:, None] - y[None]) ** 2).sum(-1)

    def gradient(x: jax.Array, y: jax.Array, g: jax.Array) -> jax.Array:
        return (g[..., None] * (2.0 * (x[:, None] - y[None]))).sum(1)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    for n, m in ((64, 64), (256, 128), (1024, 512), (4096, 2048)):
        for d in (3, 16, 64, 256):
            yield f"{n}x{m}x{d}", Sample(distances, (array(n, d), array(m, d)))
    for n, m, d in ((256, 256, 3), (1024, 1024, 64), (4096, 512, 64)):
        yield f"{n}x{m}x{d}-gradient", Sample(gradient, (array(n, d), array(m, d), array(n, m)))


KIND = Kind(
    name="squared_distances",
    primitives=("reduce_sum",),
    numerics="tolerance",
    instead="the squares multiplied out, as matrix products",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    assumptions=("all operands are finite, and no product of theirs overflows",),
    on_request=True,
)
