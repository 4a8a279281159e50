"""How steps come to the rows of an array: what a table says is what the loop does, for any positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import examples

from autopallas.graph.array_slices import Place
from autopallas.graph.tables import Access, table_of

ROWS = 7
PRIME = 1_000_003


def mixed(number):
    return int(number) * 31 % PRIME


def as_written(accesses, first, length, reverse):
    """What a loop reads, in order, and the array after it."""
    array, read = first.copy(), [1]
    for t in range(length):
        versions = [array]
        for place, version, kind in accesses:
            at = place.positions[length - 1 - t if reverse else t]
            if kind == "read":
                read.append((read[-1] * 7 + int(versions[version][at])) % PRIME)
                continue
            new = versions[version].copy()
            new[at] = mixed(read[-1]) + (new[at] if kind == "add" else 0)
            versions.append(new)
        array = versions[-1]
    return read, array


def by_rows(table, accesses, first, length):
    """The same from rows that are carried, as the table says."""
    read, found = [1], first.copy()
    rows = [0 if lag <= table.summed else first[table.before(lag).positions[0]] for lag in range(1, table.depth + 1)]
    order = range(length)[::-1] if table.reverse else range(length)
    for t in order:
        new = first[table.place(table.summed).positions[t]]
        own = [0, *rows]
        own[table.summed] = own[table.summed] + new if table.summed else new
        versions = [own]
        for place, version, kind in accesses:
            lag = table.lags[place]
            if kind == "read":
                read.append((read[-1] * 7 + int(versions[version][lag])) % PRIME)
                continue
            after = list(versions[version])
            after[lag] = mixed(read[-1]) + (after[lag] if kind == "add" else 0)
            versions.append(after)
        found[table.place(table.last).positions[t]] = versions[-1][table.last]
        rows = versions[-1][: table.depth]
    for lag in range(table.last, 0, -1):
        at = table.after(lag).positions[0]
        found[at] = rows[lag - 1] + (found[at] if lag <= table.summed else 0)
    return read, found


def positions(draw, length):
    """Positions as programs have them: affine in the number of the step, counted from the end, clamped or wrapped."""
    start, by = draw(st.integers(-4, ROWS)), draw(st.sampled_from([1, 1, 1, -1, 2, 0]))
    values = start + by * np.arange(length)
    form = draw(st.sampled_from(["wrapped", "wrapped", "clamped", "any"]))
    if form == "any":
        return tuple(draw(st.lists(st.integers(0, ROWS - 1), min_size=length, max_size=length)))
    return tuple(int(x) for x in (values % ROWS if form == "wrapped" else np.clip(values, 0, ROWS - 1)))


@st.composite
def loops(draw):
    length, reverse = draw(st.integers(0, ROWS)), draw(st.booleans())
    base = positions(draw, length)
    accesses, version = [], 0
    for _ in range(draw(st.integers(1, 5))):
        lag = draw(st.integers(-3, 3))
        by = int(np.sign(base[1] - base[0])) if length > 1 else 1
        shifted = np.asarray(base, int) - lag * by
        place = positions(draw, length) if draw(st.integers(0, 9)) == 0 else tuple(
            int(x) for x in (shifted % ROWS if draw(st.booleans()) else np.clip(shifted, 0, ROWS - 1))
        )  # fmt: skip
        kind = draw(st.sampled_from(["read", "read", "set", "add"]))
        accesses.append(Access(Place(0, place), draw(st.integers(0, version)) if kind == "read" else version, kind))
        version += kind != "read"
    return accesses, length, reverse


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(loops(), st.booleans())
def test_rows_that_are_carried_are_what_the_loop_reads_and_writes(loop, late):
    accesses, length, reverse = loop
    table = table_of(accesses, length, reverse, True, late)
    if table is None:
        return
    first = np.arange(100, 100 + ROWS)
    wanted, found = as_written(accesses, first, length, reverse), by_rows(table, accesses, first, length)
    assert wanted[0] == found[0]
    np.testing.assert_array_equal(wanted[1], found[1])


def access(positions, kind, version=0):
    return Access(Place(0, tuple(positions)), version, kind)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lag", [1, 2, 4])
def test_what_an_earlier_step_wrote_is_read_with_a_lag(lag, reverse):
    numbers = range(lag, ROWS)
    own = [access((n - lag for n in numbers), "read"), access(numbers, "set")]
    if reverse:  # the steps come to the rows from the last to the first
        own = [access((n + lag for n in range(ROWS - lag)), "read"), access(range(ROWS - lag), "set")]
    table = table_of(own, ROWS - lag, reverse, True)
    assert lag >= ROWS - lag or (table.depth, table.summed, table.last) == (lag, 0, 0)
    assert (table is None) == (lag >= ROWS - lag)


def test_what_later_steps_read_is_summed_until_then():
    own = [access(range(1, ROWS), "read"), access(range(1, ROWS), "set"), access(range(ROWS - 1), "add", 1)]
    table = table_of(own, ROWS - 1, True, True)
    assert (table.depth, table.summed, table.last) == (1, 1, 1)
    assert table.before(1).positions == (ROWS - 1,)
    assert table.after(1).positions == (0,)
    table = table_of(own, ROWS - 1, True, True, late=False)
    assert (table.depth, table.summed, table.last) == (1, 0, 1)


REFUSED = {
    "a row that is read before its own step writes it, and after": [
        access([0, 1, 2, 3], "set"), access([1, 2, 3, 3], "read", 1),
    ],
    "rows that are written twice": [access([0, 1, 0, 1], "set")],
    "a row for all steps": [access([0, 1, 2, 3], "set"), access([0, 0, 0, 0], "read", 1)],
    "the row that the last step will write, which the first one wrote": [
        access([0, 1, 2, 3], "set"), access([3, 0, 1, 2], "set", 1),
    ],
    "another axis": [access([0, 1, 2, 3], "set"), Access(Place(1, (0, 1, 2, 3)), 1, "read")],
    "mirrored": [access([0, 1, 2, 3], "set"), access([3, 2, 1, 0], "read", 1)],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_rows_are_no_table(name):
    assert table_of(REFUSED[name], 4, False, True) is None


def test_a_row_that_wraps_is_read_before_the_last_step_writes_it():
    own = [access([3, 0, 1, 2], "read"), access([0, 1, 2, 3], "set")]
    assert table_of(own, 4, False, True).depth == 1
    assert table_of(own, 4, False, in_turn=False) is None


def test_lags_are_bounded():
    own = [access(range(40), "read"), access(range(20, 60), "set")]
    assert table_of(own, 40, False, True) is None
