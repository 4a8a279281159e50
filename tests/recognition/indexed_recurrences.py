"""Recurrences written as loops that index arrays at a counter, and loops that index in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.recognition.recurrences import Found, Refused

__all__ = ["FOUND", "REFUSED", "P", "T", "filtered", "indexed", "state_space_loop"]

T, N, P = 37, 8, 12
"""Steps, rows and columns of a state.  No chunk divides T."""

Array = Any
_random = np.random.default_rng(7)


def normal(*shape: int) -> Array:
    return jnp.asarray(_random.standard_normal(shape), jnp.float32)


gate, k, v, q = normal(T), normal(T, N), normal(T, P), normal(T, N)
FOUND: dict[str, Found] = {}
REFUSED: dict[str, Refused] = {}


def found(*arguments: Array, trained: bool = True) -> Callable[..., Any]:
    def entered(function: Callable[..., Array]) -> Callable[..., Array]:
        FOUND[function.__name__] = Found(function, arguments, "scalar", trained)
        return function

    return entered


def refused(*arguments: Array, reason: str) -> Callable[..., Any]:
    def entered(function: Callable[..., Array]) -> Callable[..., Array]:
        REFUSED[function.__name__] = Refused(function, arguments, reason)
        return function

    return entered


def updated(state: Array, gate: Array, k: Array, v: Array) -> Array:
    return jax.nn.sigmoid(gate) * state + k[:, None] * v[None, :]


def indexed(
    read: Callable[[Array, Array], Array] = lambda x, i: x[i],
    write: Callable[[Array, Array, Array], Array] = lambda y, i, row: y.at[i].set(row),
    of_step: Callable[[Array], Array] = lambda i: i,
    bounds: tuple[int, int] = (0, T),
) -> Callable[..., Array]:
    """A state space model as a ``fori_loop``; ``of_step`` says which slices a step reads and writes."""

    def run(gate: Array, k: Array, v: Array, q: Array, y: Array) -> Array:
        def step(i: Array, carried: Any) -> Any:
            state, y = carried
            at = of_step(i)
            state = updated(state, read(gate, at), read(k, at), read(v, at))
            return state, write(y, at, read(q, at) @ state)

        return lax.fori_loop(*bounds, step, (jnp.zeros((k.shape[-1], v.shape[-1])), y))[1]

    return run


def filtered(loop: Callable[..., Array]) -> Callable[..., Array]:
    return lambda gate, k, v, q: loop(gate, k, v, q, jnp.zeros((T, P)))


@found(gate, k, v, q)
def state_space_loop(gate: Array, k: Array, v: Array, q: Array) -> Array:
    return filtered(indexed())(gate, k, v, q)


@found(gate, k, v, q)
def counted_by_a_scan(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """A scan over the numbers of the steps, which stacks its results."""

    def step(state: Array, i: Array) -> Any:
        state = updated(state, gate[i], k[i], v[i])
        return state, q[i] @ state

    return lax.scan(step, jnp.zeros((N, P)), jnp.arange(T))[1]


@found(gate, k, v, q)
def counted_by_a_scan_that_writes(gate: Array, k: Array, v: Array, q: Array) -> Array:
    def step(carried: Any, i: Array) -> Any:
        state, y = carried
        state = updated(state, gate[i], k[i], v[i])
        return (state, y.at[i].set(q[i] @ state)), None

    return lax.scan(step, (jnp.zeros((N, P)), jnp.zeros((T, P))), jnp.arange(T))[0][1]


@found(gate, k, v, q)
def reversed_scan_over_numbers(gate: Array, k: Array, v: Array, q: Array) -> Array:
    def step(state: Array, i: Array) -> Any:
        state = updated(state, gate[i], k[i], v[i])
        return state, q[i] @ state

    return lax.scan(step, jnp.zeros((N, P)), jnp.arange(T), reverse=True)[1]


@found(gate, k, v, q)
def from_the_last_to_the_first(gate: Array, k: Array, v: Array, q: Array) -> Array:
    return filtered(indexed(of_step=lambda i: T - 1 - i))(gate, k, v, q)


@found(gate, k, v, q)
def counted_from_the_end(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """By negative numbers."""
    return filtered(indexed(of_step=lambda i: i - T))(gate, k, v, q)


@found(gate, k, v, q)
def dynamic_index(gate: Array, k: Array, v: Array, q: Array) -> Array:
    read = lambda x, i: lax.dynamic_index_in_dim(x, i, 0, keepdims=False)  # noqa: E731
    write = lambda y, i, row: lax.dynamic_update_index_in_dim(y, row, i, 0)  # noqa: E731
    return filtered(indexed(read, write))(gate, k, v, q)


@found(gate, k, v, q)
def dynamic_slices(gate: Array, k: Array, v: Array, q: Array) -> Array:
    def read(x: Array, i: Array) -> Array:
        return lax.dynamic_slice(x, (i, *[0] * (x.ndim - 1)), (1, *x.shape[1:])).reshape(x.shape[1:])

    write = lambda y, i, row: lax.dynamic_update_slice(y, row[None], (i, 0))  # noqa: E731
    return filtered(indexed(read, write))(gate, k, v, q)


@found(gate, k.T, v.T, q.T)
def columns(gate: Array, k: Array, v: Array, q: Array) -> Array:
    def step(i: Array, carried: Any) -> Any:
        state, y = carried
        state = updated(state, gate[i], k[:, i], v[:, i])
        return state, y.at[:, i].set(q[:, i] @ state)

    return lax.fori_loop(0, T, step, (jnp.zeros((N, P)), jnp.zeros((P, T))))[1]


@found(gate, k, v, q)
def into_an_empty_buffer(gate: Array, k: Array, v: Array, q: Array) -> Array:
    return indexed()(gate, k, v, q, lax.empty((T, P), jnp.float32))


@found(gate, k, v, q, normal(T, P))
def into_a_buffer_that_is_given(gate: Array, k: Array, v: Array, q: Array, y: Array) -> Array:
    return indexed()(gate, k, v, q, y)


@found(gate, k, v, q, normal(T + 3, P))
def into_a_part_of_a_buffer(gate: Array, k: Array, v: Array, q: Array, y: Array) -> Array:
    return indexed(bounds=(2, T))(gate, k, v, q, y)


@found(gate, k, v, q, normal(T, P))
def added_to_a_buffer(gate: Array, k: Array, v: Array, q: Array, y: Array) -> Array:
    return indexed(write=lambda y, i, row: y.at[i].add(row))(gate, k, v, q, y)


@found(gate, k, v, q, normal(T, P))
def added_by_reading(gate: Array, k: Array, v: Array, q: Array, y: Array) -> Array:
    return indexed(write=lambda y, i, row: y.at[i].set(y[i] + row))(gate, k, v, q, y)


@found(gate, k, v, q)
def in_place_of_what_is_read(gate: Array, k: Array, v: Array, q: Array) -> Array:
    def step(i: Array, carried: Any) -> Any:
        state, v = carried
        state = updated(state, gate[i], k[i], v[i])
        return state, v.at[i].set(q[i] @ state)

    return lax.fori_loop(0, T, step, (jnp.zeros((N, P)), v))[1]


@found(gate, k, v, q)
def two_taps(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """Each step reads two neighbouring rows; there is one row more than there are steps."""

    def step(i: Array, carried: Any) -> Any:
        state, y = carried
        state = updated(state, gate[i], k[i], v[i] + 0.5 * v[i + 1])
        return state, y.at[i].set(q[i] @ state)

    return lax.fori_loop(0, T - 1, step, (jnp.zeros((N, P)), jnp.zeros((T - 1, P))))[1]


@found(gate, k, v, q)
def the_row_before(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """``x[i - 1]``, which is the last row in the first step."""

    def step(i: Array, carried: Any) -> Any:
        state, y = carried
        state = updated(state, gate[i], k[i], v[i] - v[i - 1])
        return state, y.at[i].set(q[i] @ state)

    return lax.fori_loop(0, T, step, (jnp.zeros((N, P)), jnp.zeros((T, P))))[1]


@found(gate, k, v, q)
def past_the_end(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """``x[i + 3]``, which is clamped in the last steps."""

    def step(i: Array, carried: Any) -> Any:
        state, y = carried
        row = lax.dynamic_slice(v, (i + 3, 0), (1, P))[0]
        state = updated(state, gate[i], k[i], row)
        return state, y.at[i].set(q[i] @ state)

    return lax.fori_loop(0, T, step, (jnp.zeros((N, P)), jnp.zeros((T, P))))[1]


@found(gate, k, v, q)
def rows_that_are_read_twice(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """Their cotangents are added to the whole gradient one by one."""

    def step(i: Array, carried: Any) -> Any:
        state, y = carried
        state = updated(state, gate[i], k[i], v[i])
        return state, y.at[i].set((q[i] + k[i]) @ state + v[i] * gate[i])

    return lax.fori_loop(0, T, step, (jnp.zeros((N, P)), jnp.zeros((T, P))))[1]


@found(gate, k, v, q)
def every_other_row(gate: Array, k: Array, v: Array, q: Array) -> Array:
    def step(i: Array, carried: Any) -> Any:
        state, y = carried
        state = updated(state, gate[2 * i], k[2 * i], v[2 * i + 1])
        return state, y.at[i].set(q[i] @ state)

    return lax.fori_loop(0, T // 2, step, (jnp.zeros((N, P)), jnp.zeros((T // 2, P))))[1]


@found(gate, k, v, q, trained=False)
def while_below(gate: Array, k: Array, v: Array, q: Array) -> Array:
    def step(carried: Any) -> Any:
        i, state, y = carried
        state = updated(state, gate[i], k[i], v[i])
        return i + 1, state, y.at[i].set(q[i] @ state)

    return lax.while_loop(lambda c: c[0] < T, step, (0, jnp.zeros((N, P)), jnp.zeros((T, P))))[2]


@found(gate, k, v, q, trained=False)
def while_above(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """The counter runs down, and the limit is carried."""

    def step(carried: Any) -> Any:
        i, least, state, y = carried
        state = updated(state, gate[i], k[i], v[i])
        return i - 1, least, state, y.at[i].set(q[i] @ state)

    return lax.while_loop(lambda c: c[1] <= c[0], step, (T - 1, 0, jnp.zeros((N, P)), jnp.zeros((T, P))))[3]


@found(gate, k, v, q)
def arrays_that_are_carried(gate: Array, k: Array, v: Array, q: Array) -> Array:
    def step(i: Array, carried: Any) -> Any:
        state, y, k, v = carried
        state = updated(state, gate[i], k[i], v[i])
        return state, y.at[i].set(q[i] @ state), k, v

    return lax.fori_loop(0, T, step, (jnp.zeros((N, P)), jnp.zeros((T, P)), k, v))[1]


@found(gate, k, v, q)
def a_counter_of_its_own(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """That runs down, in a scan that is given slices too."""

    def step(carried: Any, own: Any) -> Any:
        i, state, y = carried
        gate, k = own
        state = updated(state, gate, k, v[i])
        return (i - 1, state, y.at[i].set(q[i] @ state)), None

    first = jnp.int32(T - 1), jnp.zeros((N, P)), jnp.zeros((T, P))
    return lax.scan(step, first, (gate, k))[0][2]


@found(gate, k, v, q)
def a_step_in_a_checkpoint(gate: Array, k: Array, v: Array, q: Array) -> Array:
    @jax.checkpoint
    def step(carried: Any, i: Array) -> Any:
        state, y = carried
        state = updated(state, gate[i], k[i], v[i])
        return (state, y.at[i].set(jnp.tanh(q[i] @ state))), None

    return lax.scan(step, (jnp.zeros((N, P)), jnp.zeros((T, P))), jnp.arange(T))[0][1]


@found(gate, k, v, q)
def decays_that_depend_on_the_counter(gate: Array, k: Array, v: Array, q: Array) -> Array:
    def step(i: Array, carried: Any) -> Any:
        state, y = carried
        state = updated(state, gate[i] - 0.1 * i, k[i], v[i])
        return state, y.at[i].set(q[i] @ state)

    return lax.fori_loop(0, T, step, (jnp.zeros((N, P)), jnp.zeros((T, P))))[1]


@found(jnp.stack([gate] * 2), jnp.stack([k, -k]), jnp.stack([v] * 2), jnp.stack([q] * 2))
def mapped(gate: Array, k: Array, v: Array, q: Array) -> Array:
    return jax.vmap(filtered(indexed()))(gate, k, v, q)


def states(
    bounds: tuple[int, int] = (0, T),
    of_step: Callable[[Array], tuple[Array, Array, Array]] = lambda i: (i, i, i + 1),
    read: Callable[[Array, Array], Array] = lambda x, i: x[i],
    write: Callable[[Array, Array, Array], Array] = lambda y, i, row: y.at[i].set(row),
) -> Callable[..., Array]:
    """A state space model that keeps all states in a buffer; ``of_step`` says which slices a step reads, and where in
    the buffer it reads and writes."""

    def run(gate: Array, k: Array, v: Array, q: Array, first: Array) -> Array:
        def step(i: Array, carried: Any) -> Any:
            s, y = carried
            at, before, after = of_step(i)
            state = updated(read(s, before).reshape(N, P), gate[at], k[at], v[at])
            return write(s, after, state), y.at[at].set(q[at] @ state)

        return lax.fori_loop(*bounds, step, (first, jnp.zeros((T, P))))[1]

    return run


@found(gate, k, v, q)
def states_in_a_buffer(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """With one row more than there are steps."""
    return states()(gate, k, v, q, jnp.zeros((T + 1, N, P)))


@found(gate, k, v, q, normal(T + 1, N, P))
def states_in_a_buffer_that_is_given(gate: Array, k: Array, v: Array, q: Array, first: Array) -> Array:
    return states()(gate, k, v, q, first)


@found(gate, k, v, q, normal(T, N, P))
def states_of_which_the_last_comes_first(gate: Array, k: Array, v: Array, q: Array, first: Array) -> Array:
    """``s[i - 1]`` is the last row of the buffer in the first step, before that is written."""
    of_step = lambda i: (i, i - 1, i)  # noqa: E731
    return states((0, T), of_step)(gate, k, v, q, first)


@found(gate, k, v, q)
def states_from_the_last_to_the_first(gate: Array, k: Array, v: Array, q: Array) -> Array:
    of_step = lambda i: (T - 1 - i, T - i, T - 1 - i)  # noqa: E731
    return states((0, T), of_step)(gate, k, v, q, jnp.zeros((T + 1, N, P)).at[T].set(v[0]))


@found(gate, k, v, q)
def states_by_dynamic_slices(gate: Array, k: Array, v: Array, q: Array) -> Array:
    read = lambda x, i: lax.dynamic_slice(x, (i, 0, 0), (1, *x.shape[1:]))  # noqa: E731
    write = lambda y, i, row: lax.dynamic_update_slice(y, row[None], (i, 0, 0))  # noqa: E731
    return states(read=read, write=write)(gate, k, v, q, jnp.zeros((T + 1, N, P)))


@found(gate, k.T, v.T, q.T)
def states_along_another_axis(gate: Array, k: Array, v: Array, q: Array) -> Array:
    read = lambda x, i: x[:, i]  # noqa: E731
    write = lambda y, i, row: y.at[:, i].set(row)  # noqa: E731
    return states(read=read, write=write)(gate, k.T, v.T, q.T, jnp.zeros((N, T + 1, P)))


@found(gate, k, v, q)
def states_that_are_read_twice(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """Each reading adds to the whole of the cotangent on its own."""

    def step(i: Array, carried: Any) -> Any:
        s, y = carried
        state = updated(s[i], gate[i], k[i], v[i]) + 0.1 * s[i]
        return s.at[i + 1].set(state), y.at[i].set(q[i] @ state)

    return lax.fori_loop(0, T, step, (jnp.zeros((T + 1, N, P)), jnp.zeros((T, P))))[1]


@found(gate, k, v, q)
def states_that_are_read_when_written(gate: Array, k: Array, v: Array, q: Array) -> Array:
    def step(i: Array, carried: Any) -> Any:
        s, y = carried
        s = s.at[i + 1].set(updated(s[i], gate[i], k[i], v[i]))
        return s, y.at[i].set(q[i] @ s[i + 1])

    return lax.fori_loop(0, T, step, (jnp.zeros((T + 1, N, P)), jnp.zeros((T, P))))[1]


@found(gate, k, v, q)
def results_that_are_read_when_written(gate: Array, k: Array, v: Array, q: Array) -> Array:
    def step(i: Array, carried: Any) -> Any:
        state, y = carried
        state = updated(state, gate[i], k[i], v[i])
        y = y.at[i].set(q[i] @ state)
        return state, y.at[i].set(jnp.tanh(y[i]))

    return lax.fori_loop(0, T, step, (jnp.zeros((N, P)), jnp.zeros((T, P))))[1]


@found(jnp.repeat(gate, 2), k, v, q)
def every_other_row_between_others(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """Reads each other element and writes each other row, of which the others stay as they were."""

    def step(i: Array, carried: Any) -> Any:
        state, y = carried
        state = updated(state, gate[2 * i + 1], k[T - 1 - i], v[i])
        return state, y.at[2 * i].set(q[i] @ state)

    return lax.fori_loop(0, T, step, (jnp.zeros((N, P)), jnp.ones((2 * T, P))))[1]


@found(gate, k, v, q)
def rows_in_two_rounds(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """Each other row, and then those between."""
    return filtered(indexed(write=lambda y, i, row: y.at[(2 * i) % T].set(row)))(gate, k, v, q)


@refused(gate, k, v, q, reason="not written by whole rows")
def rows_of_which_one_is_written_in_two_rounds(gate: Array, k: Array, v: Array, q: Array) -> Array:
    return filtered(indexed(write=lambda y, i, row: y.at[(2 * i) % (T - 1)].set(row)))(gate, k, v, q)


@refused(gate, k, v, q, reason="not written by whole rows")
def every_other_row_past_the_end(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """Half of what is written is dropped."""
    return filtered(indexed(write=lambda y, i, row: y.at[2 * i].set(row)))(gate, k, v, q)


@refused(gate, k, v, q, reason="not written by whole rows")
def every_other_row_and_then_the_last(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """Slices that would lie past the end are moved to it."""
    write = lambda y, i, row: lax.dynamic_update_slice(y, row[None], (2 * i, 0))  # noqa: E731
    return filtered(indexed(write=write))(gate, k, v, q)


@refused(gate, k, v, q, reason="not written by whole rows")
def every_other_row_is_read_before_it_is_written(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """What a step reads is written by a step at another distance, or not at all."""
    write = lambda y, i, row: y.at[2 * i].set(row + y[i])  # noqa: E731
    return into_twice_as_many_rows(write)(gate, k, v, q)


def into_twice_as_many_rows(write: Callable[[Array, Array, Array], Array]) -> Callable[..., Array]:
    return lambda gate, k, v, q: indexed(write=write)(gate, k, v, q, jnp.ones((2 * T, P)))


@refused(gate, k, v, q, reason="depends on each other")
def two_states_before(gate: Array, k: Array, v: Array, q: Array) -> Array:
    """What a step reads of two steps before it is a state that another one computes."""

    def step(i: Array, carried: Any) -> Any:
        s, y = carried
        state = updated(s[i + 1], gate[i], k[i], v[i]) - 0.2 * s[i]
        return s.at[i + 2].set(state), y.at[i].set(q[i] @ state)

    return lax.fori_loop(0, T, step, (jnp.zeros((T + 2, N, P)), jnp.zeros((T, P))))[1]


@refused(gate, k, v, q, reason="not written by whole rows")
def the_state_of_half_the_steps(gate: Array, k: Array, v: Array, q: Array) -> Array:
    return states(of_step=lambda i: (i, i // 2, i + 1))(gate, k, v, q, jnp.zeros((T + 1, N, P)))


@refused(gate, k, v, q, reason="not written by whole rows")
def rows_that_are_written_twice(gate: Array, k: Array, v: Array, q: Array) -> Array:
    return filtered(indexed(write=lambda y, i, row: y.at[i // 2].set(row)))(gate, k, v, q)


@refused(gate, k, v, q, reason="not written by whole rows")
def neighbouring_rows_written(gate: Array, k: Array, v: Array, q: Array) -> Array:
    write = lambda y, i, row: y.at[i].set(row).at[i - 1].set(-row)  # noqa: E731
    return filtered(indexed(write=write))(gate, k, v, q)


@refused(gate, k, v, q, reason="not written by whole rows")
def where_the_data_say(gate: Array, k: Array, v: Array, q: Array) -> Array:
    write = lambda y, i, row: y.at[jnp.argmax(v[i])].set(row)  # noqa: E731
    return filtered(indexed(write=write))(gate, k, v, q)


@refused(gate, k, v, q, reason="not written by whole rows")
def written_at_times(gate: Array, k: Array, v: Array, q: Array) -> Array:
    write = lambda y, i, row: jnp.where(gate[i] > 0, y.at[i].set(row), y)  # noqa: E731
    return filtered(indexed(write=write))(gate, k, v, q)


@refused(gate, k, v, q, reason="not written by whole rows")
def all_rows_are_read(gate: Array, k: Array, v: Array, q: Array) -> Array:
    write = lambda y, i, row: y.at[i].set(row + y.mean(0))  # noqa: E731
    return filtered(indexed(write=write))(gate, k, v, q)


@refused(gate, k, v, q, reason="not written by whole rows")
def parts_of_rows(gate: Array, k: Array, v: Array, q: Array) -> Array:
    return filtered(indexed(write=lambda y, i, row: y.at[i, : P - 1].set(row[1:])))(gate, k, v, q)


@refused(gate, k, v, q, reason="not written by whole rows")
def a_row_for_all_steps(gate: Array, k: Array, v: Array, q: Array) -> Array:
    return filtered(indexed(write=lambda y, i, row: y.at[3].set(row + y[3])))(gate, k, v, q)


@refused(gate, k, v, q, reason="how often it runs is not known")
def until_the_data_say(gate: Array, k: Array, v: Array, q: Array) -> Array:
    def step(carried: Any) -> Any:
        i, state, y = carried
        state = updated(state, gate[i], k[i], v[i])
        return i + 1, state, y.at[i].set(q[i] @ state)

    going = lambda c: (c[0] < T) & (jnp.abs(c[1]).max() < 50)  # noqa: E731
    return lax.while_loop(going, step, (0, jnp.zeros((N, P)), jnp.zeros((T, P))))[2]


@refused(gate, k, v, q, jnp.int32(T - 2), reason="how often it runs is not known")
def as_often_as_is_given(gate: Array, k: Array, v: Array, q: Array, length: Array) -> Array:
    return indexed(bounds=(0, length))(gate, k, v, q, jnp.zeros((T, P)))


@refused(gate, k, v, q, reason="logistic of the carried value")
def a_gate_that_reads_the_state(gate: Array, k: Array, v: Array, q: Array) -> Array:
    def step(i: Array, carried: Any) -> Any:
        state, y = carried
        state = updated(state, gate[i] + state.mean(), k[i], v[i])
        return state, y.at[i].set(q[i] @ state)

    return lax.fori_loop(0, T, step, (jnp.zeros((N, P)), jnp.zeros((T, P))))[1]


@refused(gate, k, v, q, reason="depends on each other")
def a_gate_that_reads_what_was_written(gate: Array, k: Array, v: Array, q: Array) -> Array:
    def step(i: Array, carried: Any) -> Any:
        state, y = carried
        state = updated(state, gate[i] + y[i - 1].mean(), k[i], v[i])
        return state, y.at[i].set(q[i] @ state)

    return lax.fori_loop(0, T, step, (jnp.zeros((N, P)), jnp.zeros((T, P))))[1]
