"""Reads one ``ragged_dot_general`` equation as a grouped matmul."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp

from autopallas import jaxprs
from autopallas.compat import Var
from autopallas.graph import Graph, Node
from autopallas.graph.extract import closed
from autopallas.kernels.grouped_matmul.site import GroupedMatmulSite
from autopallas.numerics.casts import is_quantised
from autopallas.patterns.advice import EMPTY, FLOATS, GROUP_SIZES, PRECISION
from autopallas.patterns.grouped_matmul.widening import STORED_DTYPES, cast_program
from autopallas.patterns.match import Match, Mismatch
from autopallas.sites.index_notation import Label, Operand, View

__all__ = ["precision", "ragged_dot"]

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


def ragged_dot(graph: Graph, node: Node, assume_finite: bool) -> Match:
    """Builds the site of one equation.

    Raises:
      Mismatch: the equation is of a kind that is no grouped matmul.
    """
    site = _site(graph, node, assume_finite)
    inputs = [Var(graph.avals[number]) for number in node.inputs]  # one each, though two operands may be the same value
    outputs = [Var(graph.avals[number]) for number in node.outputs]
    return Match(
        op="grouped_matmul",
        site=site,
        direction="forward",
        operands=node.inputs,
        results=node.outputs,
        equations=(node,),
        original=closed(inputs, outputs, [node.equation.replace(invars=inputs, outvars=outputs)]),
        body=node.body,
        location=jaxprs.location(node.equation),
    )


class _Labels:
    """Hands out labels of axes, and keeps their sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def new(self, size: int) -> Label:
        self.sizes.append(size)
        return len(self.sizes) - 1


def _site(graph: Graph, node: Node, assume_finite: bool) -> GroupedMatmulSite:
    numbers = node.params["ragged_dot_dimension_numbers"]
    (left_contracting, right_contracting), (left_batch, right_batch) = (
        tuple(tuple(int(d) for d in dims) for dims in pair) for pair in numbers.dot_dimension_numbers
    )
    ragged = int(numbers.lhs_ragged_dimensions[0])
    _check(graph, node, ragged)
    if ragged in left_batch:
        raise Mismatch(
            "the ragged axis is a batch axis of the product",
            advice="Give the rows an axis of their own, as the first axis of jax.lax.ragged_dot is: the axis that the "
            "group sizes divide is no batch axis.",
        )

    labels = _Labels()
    left_shape, right_shape, sizes_shape = (graph.shape(number) for number in node.inputs)
    left = [labels.new(n) for n in left_shape]
    right: list[Label] = []
    for d, n in enumerate(right_shape):
        if d in right_contracting:
            right.append(left[left_contracting[right_contracting.index(d)]])
        elif d in right_batch:
            right.append(left[left_batch[right_batch.index(d)]])
        else:
            right.append(labels.new(n))
    row = left[ragged]
    batch = [left[d] for d in left_batch]
    left_free = [label for d, label in enumerate(left) if d not in (*left_contracting, *left_batch)]
    right_free = [label for d, label in enumerate(right) if d not in (*right_contracting, *right_batch)]
    contracted = [label for d, label in enumerate(left) if d in left_contracting]
    if ragged in left_contracting:
        if len(left_contracting) > 1:
            raise Mismatch(
                "the product sums over more than the ragged axis",
                advice="Sum over the rows of each group alone, as the derivative of jax.lax.ragged_dot does.",
            )
        group = labels.new(sizes_shape[-1])
        use, inner, outer = "drhs", left_free, right_free
        result = [group, *batch, *left_free, *right_free]
        outside = batch
    else:
        group = right[int(numbers.rhs_group_dimensions[0])]
        columns = [label for label in right_free if label != group]
        result = [*batch, *left_free, *columns]
        outside = [*batch, *left_free[: left_free.index(row)]]
        batch = [*batch, *(label for label in left_free if label != row)]
        # Depends on how the matrices are stored, so that none has to be transposed.
        transposed = bool(columns) and right.index(contracted[0]) > right.index(columns[0])
        use, inner, outer = ("dlhs", columns, contracted) if transposed else ("forward", contracted, columns)
    counted = [*outside, group] if len(sizes_shape) > 1 else [group]
    site = GroupedMatmulSite(
        use=use,  # type: ignore[arg-type]
        sizes=tuple(labels.sizes),
        first=Operand(0, _view(left)),
        second=Operand(1, _view(right)),
        group_sizes=Operand(2, _view(counted)),
        row_labels=(row,),
        contracting_labels=tuple(inner),
        column_labels=tuple(outer),
        group_labels=(group,),
        batch_labels=tuple(batch),
        result=_view(result),
        types=tuple(graph.dtype(number) for number in node.inputs),
        result_dtype=graph.dtype(node.outputs[0]),
        precision=precision(node),
        assume_finite=assume_finite,
    )
    if use == "drhs" or not is_quantised(graph.dtype(node.inputs[1])):
        return site
    # All of its numbers are numbers of the dtype in which they are multiplied.
    return replace(site, widening=cast_program(graph.dtype(node.inputs[1]), site.spec.second_dtype))


def _check(graph: Graph, node: Node, ragged: int) -> None:
    if node.params["group_offset"] is not None:
        raise Mismatch("a group offset is given, which no kernel knows", advice=GROUP_SIZES)
    for number in (*node.inputs[:2], *node.outputs):
        narrow = number in node.inputs[:2] and graph.dtype(number).name in STORED_DTYPES
        if graph.dtype(number).name not in _FLOATS and not narrow:
            raise Mismatch(f"an array is of dtype {graph.dtype(number)}", advice=FLOATS)
        if 0 in graph.shape(number):
            raise Mismatch("an array is empty", advice=EMPTY)
    rows, dtype = graph.shape(node.inputs[0])[ragged], graph.dtype(node.inputs[2])
    if jnp.iinfo(dtype).max < rows:
        raise Mismatch(f"group sizes of dtype {dtype} cannot count {rows} rows", advice=GROUP_SIZES)


def _view(labels: Sequence[Label]) -> View:
    return tuple((0, (label,)) for label in labels)


def precision(node: Node) -> str | None:
    """Returns the precision that is asked for, or None for the default."""
    given = node.params["precision"]
    if given is None:
        return None
    names = {getattr(p, "name", str(p)) for p in (given if isinstance(given, tuple) else (given,))}
    if len(names) != 1 or not names <= {"DEFAULT", "HIGH", "HIGHEST"}:
        raise Mismatch(f"the product asks for the precision {given}", advice=PRECISION)
    (name,) = names
    return None if name == "DEFAULT" else name
