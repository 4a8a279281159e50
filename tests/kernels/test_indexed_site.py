"""What follows from how a site reads its operands and writes its results, for a site of no operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import pytest

from autopallas.kernels.attention.site import AttentionSite
from autopallas.kernels.cross_entropy.site import CrossEntropySite
from autopallas.kernels.grouped_matmul.site import GroupedMatmulSite
from autopallas.kernels.mixture_of_experts.site import ExpertsSite
from autopallas.sites.calls import replaced_at, under_vmaps, vjp_at
from autopallas.sites.declared import DeclaredSite
from autopallas.sites.division import Division, PositionOperand, ShardableAxes
from autopallas.sites.index_notation import Operand, Positions, Reader, fill, layout, sources_in
from autopallas.sites.indexed_site import IndexedSite

FLOAT, INT = np.dtype(np.float32), np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class Bias(Reader):
    """What is read beside x: an operand, positions, or neither."""

    source: Operand | Positions | None
    scale: float = 1.0


@dataclass(frozen=True)
class Site(IndexedSite):
    """x [B, N] plus biases, [N] each; each row's maximum is saved."""

    VIEWS: ClassVar[tuple[str, ...]] = ("result", "rows")

    sizes: tuple[int, ...]
    types: tuple[np.dtype, ...]
    x: Operand
    biases: tuple[Bias, ...]
    result: tuple
    rows: tuple
    batch_labels: tuple[int, ...] = (0,)

    @property
    def residuals(self):
        return ((self.rows, FLOAT),)

    def shardable_labels(self):
        return frozenset((*self.batch_labels, 1))

    def fields_under_vmap(self, axes, label):
        return {"batch_labels": (*label, *self.batch_labels)}


@pytest.mark.parametrize(
    "labels, order",
    [
        ((0, 1, 2, 3, 4), (0, 1, 2, 3)),
        ((0, 3, 1, 2, 4), (0, 2, 1, 3)),
        ((4, 3, 1, 2, 0), (3, 2, 1, 0)),
        ((3, 1, 2, 4), (0, 2, 1, 3)),  # the first group is absent
        ((3, 0, 4), (2, 0, 1, 3)),  # an absent group follows the one before it
        ((3, 1, 5, 2, 0, 4), (2, 1, 0, 3)),  # a label of extent 1 does not count
        ((1, 3, 2, 0, 4), (0, 1, 2, 3)),  # a group with another between its labels
        ((3, 2, 1, 0, 4), (0, 1, 2, 3)),  # a group whose labels have another order
    ],
)
def test_the_order_in_memory_is_that_of_whole_groups(labels, order):
    sizes = (2, 8, 4, 16, 64, 1)
    assert layout(labels, sizes, ((0,), (1, 2), (3,), (4,))) == order


def view(*labels):
    return tuple((0, (label,)) for label in labels)


BIASES = (Bias(Operand(1, view(1)), 2.0), Bias(None), Bias(Positions((3, (1,)), INT)))
SITE = Site((4, 6), (FLOAT, FLOAT), Operand(0, view(0, 1)), BIASES, view(0, 1), view(0))


def test_sources_are_found_in_tuples_and_in_parts_in_the_order_of_the_fields():
    assert SITE.sources == (SITE.x, BIASES[0].source, BIASES[2].source)
    assert list(sources_in((BIASES[1], (SITE.x, ((BIASES[2],),)), "x", 7))) == [SITE.x, BIASES[2].source]
    assert SITE.with_sources(lambda source: source) == SITE


def test_only_sources_change_where_sources_are_replaced():
    moved = SITE.with_sources(lambda source: Operand(5, view(1)))
    assert moved.biases == (Bias(Operand(5, view(1)), 2.0), Bias(None), Bias(Operand(5, view(1))))
    assert (moved.result, moved.sizes, moved.types) == (SITE.result, SITE.sizes, SITE.types)


def test_vmap_puts_its_axis_in_front_of_what_has_it_and_of_all_results_and_residuals():
    site = SITE.batched([None, 0], 5)
    assert site.sizes == (4, 6, 5)
    assert site.x == SITE.x
    assert site.biases == (Bias(Operand(1, view(2, 1)), 2.0), *BIASES[1:])
    assert (site.result, site.rows) == (view(2, 0, 1), view(2, 0))
    assert site.batch_labels == (2, 0)
    assert site.residual_types() == (jax.ShapeDtypeStruct((5, 4), FLOAT),)


def test_an_axis_of_size_1_is_a_dimension_without_a_label():
    site = SITE.batched([0, None], 1)
    assert (site.sizes, site.batch_labels) == (SITE.sizes, SITE.batch_labels)
    assert site.x.view == ((0, ()), *SITE.x.view)
    assert site.residual_types() == (jax.ShapeDtypeStruct((1, 4), FLOAT),)


def test_every_use_of_an_operand_has_its_labels_and_positions_are_none():
    wanted = ShardableAxes((SITE.x, Operand(1, view(1))), (view(0, 1),), (view(0),), frozenset((0, 1)), (frozenset(),))
    assert SITE.shardable_axes() == wanted


def test_a_device_reads_positions_along_a_divided_label_from_one_more_operand():
    site, further = SITE.per_device(Division((("x", 2),), ((1, ("x",)),)))
    assert site.sizes == (4, 3)
    assert further == (PositionOperand((1,), INT, 3),)
    assert site.biases[2] == Bias(Operand(2, view(1)))
    assert site.types == (FLOAT, FLOAT, INT)
    assert SITE.standalone(Division((("x", 2),), ((1, ("x",)),))) == site


def test_positions_stay_where_their_label_is_whole():
    site, further = SITE.per_device(Division((("x", 2),), ((0, ("x",)),)))
    assert (site.sizes, site.biases, site.types, further) == ((2, 6), BIASES, SITE.types, ())


@pytest.mark.parametrize("kind", [AttentionSite, CrossEntropySite, DeclaredSite, ExpertsSite, GroupedMatmulSite])
def test_vmap_and_division_are_derived_for_all_sites(kind):
    """None has a rule of its own for what all have in common."""
    assert issubclass(kind, IndexedSite)
    assert {"residual_types", "per_device"}.isdisjoint(vars(kind))
    assert set(kind.VIEWS) <= set(kind.__dataclass_fields__)


def test_derivatives_by_some_arrays_leave_the_others_constant():
    arrays = [np.float32(2), np.float32(3), np.float32(5)]
    value, pull = vjp_at(lambda given: given[0] * given[1] * given[2], arrays, (2, 0))
    assert (float(value), [float(x) for x in pull(np.float32(1))]) == (30, [6, 15])
    value, pull, rest = vjp_at(lambda given: (given[0] ** 2, given[1:]), arrays, (0,), has_aux=True)
    assert (float(value), [float(x) for x in pull(np.float32(1))], rest) == (4, [4], arrays[1:])
    assert replaced_at(arrays, (1,), (7,)) == [2, 7, 5]


def test_the_last_vmap_is_the_outermost():
    x, y = np.arange(6.0, dtype=np.float32).reshape(3, 2), np.float32(1)
    run = under_vmaps(lambda x, y: (x + y, y), (((0, None), 2), ((0, None), 3)))
    total, shared = run(x, y)
    np.testing.assert_array_equal(total, x + 1)
    assert shared.shape == (3, 2)


def test_an_operand_without_axes_is_filled():
    """As the scale of a loss is, on example inputs to measure with."""
    operands = [np.full((), 7.0, np.float32), np.zeros((2, 3), np.float32)]
    groups, sizes = ((0,), (1,)), (2, 3)
    fill(Operand(0, ()), np.ones((1, 1), np.float32), operands, sizes, groups)
    fill(Operand(1, ((0, (0,)), (0, (1,)))), np.ones((2, 3), np.float32), operands, sizes, groups)
    assert [x.shape for x in operands] == [(), (2, 3)]
    assert all((x == 1).all() for x in operands)
