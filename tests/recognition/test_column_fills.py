"""Numbers that are written into columns of logits or scores are masks: found in any spelling, and right."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.nn import log_softmax, softmax
from support.catalogue import array, registry
from support.compare import compare, optimized_like_a_user, with_gradients

import autopallas
from autopallas.graph import flatten, select_fills

N, D, V, LEFT = 12, 5, 33, 28
"""Rows, features, columns, and the columns that are no padding."""
LABELS = jnp.arange(N) % LEFT


def arguments(dtype=jnp.float32):
    """Rows x [N, D] and weights w [D, V]."""
    return [array(*shape, dtype=dtype, seed=seed, scale=0.8) for seed, shape in enumerate(((N, D), (D, V)), 1)]


def loss_of(z):
    return -jnp.take_along_axis(log_softmax(z.astype(jnp.float32), -1), LABELS[: len(z), None], -1).mean()


LOSSES, found = registry()


@found
def a_padded_vocabulary(x, w):
    return loss_of((x @ w).at[:, LEFT:].set(-1e9))


@found
def a_padded_vocabulary_of_infinities(x, w):
    return loss_of((x @ w).at[..., LEFT:].set(-jnp.inf))


@found
def columns_in_the_middle(x, w):
    return loss_of((x @ w).at[:, 20:22].set(-1e4))


@found
def one_column(x, w):
    return loss_of((x @ w).at[:, 30].set(-jnp.inf))


@found
def the_last_column(x, w):
    return loss_of((x @ w).at[:, -1].set(-jnp.inf))


@found
def several_writes(x, w):
    return loss_of((x @ w).at[:, LEFT:].set(-jnp.inf).at[:, 30].set(-1e30).at[:, 17].set(0.5))


@found
def a_slice_that_is_updated(x, w):
    return loss_of(lax.dynamic_update_slice(x @ w, jnp.full((N, V - LEFT), -1e9, x.dtype), (0, LEFT)))


@found
def a_slice_that_is_clamped(x, w):
    return loss_of(lax.dynamic_update_slice(x @ w, jnp.full((N, 5), -1e9, x.dtype), (0, V)))


@found
def a_column_that_data_tell(x, w):
    return loss_of((x @ w).at[:, jnp.argmax(x[0]) + LEFT].set(-jnp.inf))


@found
def a_column_that_data_tell_out_of_range(x, w):
    return loss_of((x @ w).at[:, jnp.argmax(x[0]) + V].set(-jnp.inf))


@found
def a_number_that_data_tell(x, w):
    return loss_of((x @ w).at[:, LEFT:].set(lax.stop_gradient(x[0, 0]) - 9))


IDS = [30, 29, 30, -1]


@found
def columns_of_an_array(x, w):
    return loss_of((x @ w).at[:, jnp.array(IDS)].set(-jnp.inf))


@found
def columns_of_a_numpy_array(x, w):
    return loss_of((x @ w).at[..., np.array(IDS)].set(-1e9))


@found
def columns_of_an_array_that_are_written_twice(x, w):
    return loss_of((x @ w).at[:, jnp.array(IDS)].set(-1e4).at[:, jnp.array([28, 30])].set(-1e9))


@found
def columns_of_an_array_that_data_tell(x, w):
    return loss_of((x @ w).at[:, jnp.argsort(x[0]) + LEFT].set(-1e9))


@found
def columns_of_an_array_that_data_tell_twice(x, w):
    return loss_of((x @ w).at[:, jnp.argsort(x[0]) // 2 + LEFT].set(-jnp.inf))


@found
def columns_of_an_array_out_of_range(x, w):
    return loss_of((x @ w).at[:, jnp.argsort(x[0]) + V - 2].set(-jnp.inf))


@found
def columns_of_an_array_that_are_clipped(x, w):
    return loss_of((x @ w).at[:, jnp.argsort(x[0]) + V - 2].set(-jnp.inf, mode="clip"))


@found
def columns_of_an_array_of_capped_logits(x, w):
    return loss_of((5 * jnp.tanh((x @ w) / 5)).at[:, jnp.array(IDS)].set(0.25))


@found
def columns_of_an_array_of_sequences(x, w):
    z = (x.reshape(2, -1, D) @ w).astype(jnp.float32).at[..., jnp.array(IDS)].set(-1e9)
    return -jnp.take_along_axis(log_softmax(z), LABELS.reshape(2, -1, 1), -1).mean()


@found
def columns_of_an_array_of_each_row(x, w):
    def of_row(row, label):
        return -log_softmax((row @ w).astype(jnp.float32).at[jnp.array(IDS)].set(-1e9))[label]

    return jax.vmap(of_row)(x, LABELS).mean()


@found
def columns_of_an_array_checkpointed(x, w):
    return jax.checkpoint(columns_of_an_array)(x, w)


@found
def columns_of_an_array_in_chunks(x, w):
    def chunk(total, rows):
        return total + loss_of((rows @ w).at[:, jnp.array(IDS)].set(-1e9)), None

    return lax.scan(chunk, 0.0, x.reshape(3, -1, D))[0]


@found
def columns_of_an_array_in_checkpointed_chunks(x, w):
    def chunk(total, rows):
        return total + loss_of((rows @ w).at[:, jnp.array(IDS)].set(-1e9)), None

    return lax.scan(jax.checkpoint(chunk), 0.0, x.reshape(3, -1, D))[0]


@found
def rows(x, w):
    return loss_of((x @ w).at[3].set(0.0))


@found
def capped_before(x, w):
    return loss_of((5 * jnp.tanh((x @ w) / 5)).at[:, LEFT:].set(-1e9))


@found
def each_row_by_itself(x, w):
    def of_row(row, label):
        return -log_softmax((row @ w).astype(jnp.float32).at[LEFT:].set(-1e9))[label]

    return jax.vmap(of_row)(x, LABELS).mean()


@found
def checkpointed(x, w):
    return jax.checkpoint(a_padded_vocabulary)(x, w)


@found
def in_chunks(x, w):
    def chunk(total, rows):
        return total + loss_of((rows @ w).at[:, LEFT:].set(-1e9)), None

    return lax.scan(chunk, 0.0, x.reshape(3, -1, D))[0]


@found
def in_checkpointed_chunks(x, w):
    def chunk(total, rows):
        return total + loss_of((rows @ w).at[:, LEFT:].set(-1e9)), None

    return lax.scan(jax.checkpoint(chunk), 0.0, x.reshape(3, -1, D))[0]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_found_and_right(name):
    compared = compare(LOSSES[name], arguments(), gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_found_and_right_in_a_train_step(name, dtype):
    args = arguments(dtype)
    compared = compare(jax.value_and_grad(LOSSES[name], (0, 1)), args, gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


def test_columns_of_an_array_on_devices():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = jax.P("rows"), jax.P()
    step = jax.shard_map(
        lambda x, w: jax.value_and_grad(lambda x, w: lax.pmean(columns_of_an_array(x, w), "rows"), (0, 1))(x, w),
        mesh=mesh,
        in_specs=(rows, everywhere),
        out_specs=(everywhere, (rows, everywhere)),
    )
    optimized = optimized_like_a_user(step)
    given, expected = (jax.tree.leaves(jax.jit(f)(*arguments())) for f in (optimized, step))
    assert optimized.report().counts()["cross_entropy"] == 1
    for one, other in zip(given, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_an_array_of_columns_leaves_no_array_of_numbers_of_writes():
    """JAX's derivative numbers the writes in an array of the logits' size."""
    optimized = optimized_like_a_user(jax.value_and_grad(columns_of_an_array, (0, 1)))
    program = jax.make_jaxpr(optimized)(*arguments())
    outer = {e.outvars[0].aval.str_short() for e in program.eqns if e.primitive.name in ("scatter", "eq")}
    assert f"uint32[{N},{V}]" not in outer


def test_an_attention_with_an_array_of_columns_is_found_and_right():
    def attend(q, k, v):
        scores = jnp.einsum("btnd,bsnd->bnts", q, k).at[..., jnp.array([0, 3, 3])].set(-1e9)
        return jnp.einsum("bnts,bsnd->btnd", softmax(scores / 2, -1), v)

    args = [array(2, n, 3, 4, seed=seed) for seed, n in enumerate((6, 9, 9))]
    compared = compare(with_gradients(attend, args), args, gradients=False)
    assert compared.complaints == []
    assert compared.counts("attention") == 1


SCORES, found_score = registry()


@found_score
def the_first_key(s):
    return s.at[..., 0].set(-jnp.inf)


@found_score
def the_last_keys(s):
    return s.at[:, :, :, 7:].set(-1e9)


@found_score
def the_first_key_of_scores_with_a_bias(s):
    return (s + jnp.arange(s.shape[-1])).at[..., 0].set(jnp.finfo(s.dtype).min)


@pytest.mark.parametrize("name", SCORES)
def test_an_attention_is_found_and_right(name):
    def attend(q, k, v):
        scores = SCORES[name](jnp.einsum("btnd,bsnd->bnts", q, k) / 2)
        return jnp.einsum("bnts,bsnd->btnd", softmax(scores, -1), v)

    args = [array(2, n, 3, 4, seed=seed) for seed, n in enumerate((6, 9, 9))]
    for function in (attend, with_gradients(attend, args)):
        compared = compare(function, args, gradients=False)
        assert compared.complaints == []
        assert compared.counts("attention") == 1


OTHERS, other = registry()


@other
def an_array(x, w):
    return loss_of((x @ w).at[:, LEFT:].set(x[:, : V - LEFT] * 2))


@other
def an_array_in_columns_of_an_array(x, w):
    return loss_of((x @ w).at[:, jnp.array(IDS[:1] + [2, 2])].set(x[:, :3] * 2))


@other
def a_number_of_another_body_in_columns_of_an_array(x, w):
    """JAX moves what is written out of the loop, and the loop has no such number."""
    number = lax.stop_gradient(w[0, 0]) - 9

    def chunk(total, rows):
        return total + loss_of((rows @ w).at[:, jnp.array(IDS)].set(number)), None

    return lax.scan(jax.checkpoint(chunk), 0.0, x.reshape(3, -1, D))[0]


@other
def columns_of_an_array_of_two_axes(x, w):
    return loss_of((x @ w).at[:, jnp.array([[30, 29], [30, -1]])].set(-1e9))


@other
def rows_of_an_array(x, w):
    return loss_of((x @ w).at[jnp.array([1, 4, 4])].set(-1e9))


@other
def numbers_with_a_gradient_in_columns_of_an_array(x, w):
    return loss_of((x @ w).at[:, jnp.array(IDS)].set(x[0, 0]))


@other
def zeros_that_are_chosen_by_a_scattered_count(x, w):
    """Looks like the derivative of a scatter, but the numbers of the writes are not those that are compared."""
    z, ids = x @ w, jnp.array([30, 29, 30])
    numbers = jnp.zeros(V, jnp.uint32).at[ids].set(jnp.arange(3, dtype=jnp.uint32) * 0 + 1)
    kept = jnp.where(numbers == 0, z, 0.0)
    return loss_of(kept.at[:, ids].add(jnp.where(numbers[ids] == 1, -4.0, 0.0)))


@other
def a_part_of_a_column(x, w):
    return loss_of((x @ w).at[2:7, LEFT].set(-1e9))


@other
def a_column_of_each_row(x, w):
    return loss_of((x @ w).at[jnp.arange(N), jnp.arange(N) + 20].set(-1e9))


@other
def numbers_that_are_added(x, w):
    return loss_of((x @ w).at[:, LEFT:].add(-1e9))


@other
def numbers_with_a_gradient(x, w):
    return loss_of((x @ w).at[:, LEFT:].set(x[0, 0]))


@pytest.mark.parametrize("name", OTHERS)
def test_what_looks_alike_is_right(name):
    for function in (OTHERS[name], jax.value_and_grad(OTHERS[name], (0, 1))):
        assert compare(function, arguments(), gradients=False).complaints == []


@pytest.mark.parametrize("negative", [True, False])
@pytest.mark.parametrize("index", [-V - 7, -7, -1, 0, LEFT, V + 7])
def test_a_slice_that_data_tell_is_where_the_program_has_it(index, negative):
    def loss(x, w, first):
        padding = jnp.full((N, 5), -1e9, x.dtype)
        return loss_of(lax.dynamic_update_slice(x @ w, padding, (0, first), allow_negative_indices=negative))

    args = [*arguments(), jnp.int32(index)]
    optimized = autopallas.optimize(loss, objective="always")
    assert jnp.allclose(jax.jit(loss)(*args), optimized(*args), rtol=1e-5)
    assert optimized.report().counts()["cross_entropy"] == 1


def test_writes_far_from_a_softmax_stay():
    def program(x, w):
        return jnp.exp(x).sum() + (x @ w).at[:, LEFT:].set(0.0).sum()

    args = arguments()
    body = select_fills(flatten(jax.make_jaxpr(program)(*args)))
    assert "scatter" in {e.primitive.name for e in body.equations}


def test_a_mesh():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, w = arguments()
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows")))
        step = jax.value_and_grad(a_padded_vocabulary, (0, 1))
        optimized = autopallas.optimize(step, objective="always")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            expected, given = jax.jit(step)(x, w), optimized(x, w)
        assert jnp.allclose(expected[0], given[0], rtol=1e-5)
        for one, other in zip(expected[1], given[1], strict=True):
            assert jnp.allclose(one, other, atol=1e-5)
