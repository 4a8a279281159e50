"""The garbage collector while a function is traced, and afterwards."""

from __future__ import annotations

import gc
import weakref

import jax
import pytest
from support.catalogue import array

from autopallas.gc_pause import paused, rare
from transforms.test_transforms import attend, optimized

T, S, D = 5, 7, 3


@pytest.fixture(scope="module")
def qkv():
    return array(1, 2, T, D, seed=1), array(1, 2, S, D, seed=2), array(1, 2, S, D, seed=3)


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_left_as_it_was(qkv, collects):
    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        optimized(require={"attention": 1}).trace(*qkv)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()


def test_collections_are_rare_while_a_function_is_traced_and_as_before_afterwards(qkv):
    was, thresholds = gc.isenabled(), gc.get_threshold()
    gc.enable()
    gc.set_threshold(700, 10, 10)
    counts = []

    def function(*qkv):
        before = gc.get_stats()[0]["collections"]
        assert [[] for _ in range(7000)]
        counts.append(gc.get_stats()[0]["collections"] - before)
        return attend(*qkv)

    try:
        jax.jit(lambda *qkv: function(*qkv)).trace(*qkv)
        optimized(function).trace(*qkv)
        assert gc.get_threshold() == (700, 10, 10)
        with pytest.raises(ZeroDivisionError):
            optimized(lambda *qkv: 1 // 0).trace(*qkv)
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*thresholds)
        (gc.enable if was else gc.disable)()
    as_written, traced = counts
    assert traced <= 1 < as_written


def test_rare_collections_leave_thresholds_that_are_higher_or_that_are_set_meanwhile():
    thresholds = gc.get_threshold()
    try:
        for given in ((0, 10, 10), (50_000, 5, 5)):
            gc.set_threshold(*given)
            with rare():
                assert gc.get_threshold()[0] == given[0]
        gc.set_threshold(700, 10, 10)
        with rare():
            gc.set_threshold(900, 10, 10)
        assert gc.get_threshold()[0] == 900
    finally:
        gc.set_threshold(*thresholds)


def test_what_is_made_in_a_pause_of_the_collector_is_not_gone_through_right_after_it():
    was, (threshold, *_) = gc.isenabled(), gc.get_threshold()
    gc.enable()
    try:
        gc.collect()  # so that none is due already
        before = gc.get_stats()[0]["collections"]
        with paused():
            kept = [[] for _ in range(100 * threshold)]
        after = [[] for _ in range(threshold // 2)]
        assert gc.get_stats()[0]["collections"] == before
        assert kept  # alive until here
        assert after
    finally:
        (gc.enable if was else gc.disable)()


def test_a_pause_of_the_collector_leaves_cycles_to_the_next_full_collection_and_what_is_frozen_frozen():
    class Node:
        pass

    with paused():
        node = Node()
        node.itself = node
        gone = weakref.ref(node)
        del node
    gc.collect()
    assert gone() is None
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with paused():
            pass
        assert gc.get_freeze_count() == frozen > 0
    finally:
        gc.unfreeze()
