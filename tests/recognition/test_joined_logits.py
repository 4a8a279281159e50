"""Losses of logits that are put together from a product and from other numbers of each row, or from two products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.nn import log_softmax, logsumexp, one_hot, softmax
from jax.sharding import PartitionSpec as P
from support.catalogue import array, registry
from support.compare import compare, differs, optimized_like_a_user, with_gradients

import autopallas

N, D, Q = 6, 5, 9
EACH = jnp.arange(N)
FIRST = jnp.zeros(N, jnp.int32)
LABELS = jnp.array([0, 9, 3, 1, 0, 5])


def arguments(dtype=jnp.float32):
    """Rows x [N, D], others of the same number y [N, D], a table of further ones [Q, D]."""
    return [array(n, D, dtype=dtype, seed=seed, scale=0.8) for seed, n in enumerate((N, N, Q), 1)]


def beside(x, y, queue):
    return jnp.concatenate([jnp.einsum("nd,nd->n", x, y)[:, None], x @ queue.T], 1)


def with_integer_labels(z, labels):
    """As optax has it."""
    z -= lax.stop_gradient(z.max(-1, keepdims=True))
    return jnp.log(jnp.exp(z).sum(-1)) - jnp.take_along_axis(z, labels[:, None], -1)[:, 0]


FOUND, found = registry()


@found
def positive_first(x, y, queue):
    z = beside(x, lax.stop_gradient(y), lax.stop_gradient(queue)) / 0.2
    return -log_softmax(z)[:, 0].mean()


@found
def integer_labels(x, y, queue):
    return with_integer_labels(beside(x, y, queue) * 2, FIRST).mean()


@found
def labels_anywhere(x, y, queue):
    return with_integer_labels(beside(x, y, queue), LABELS).mean()


@found
def labels_out_of_range(x, y, queue):
    picked = jnp.take_along_axis(log_softmax(beside(x, y, queue)), (LABELS + 2)[:, None], 1, "fill")
    return -jnp.nan_to_num(picked).mean()


@found
def clipped_labels(x, y, queue):
    return -jnp.take_along_axis(log_softmax(beside(x, y, queue)), (LABELS + 4)[:, None], 1, "clip").mean()


@found
def one_hot_labels(x, y, queue):
    return -(one_hot(LABELS, Q + 1) * log_softmax(beside(x, y, queue), -1)).sum(-1).mean()


@found
def positive_last(x, y, queue):
    z = jnp.concatenate([jnp.einsum("nd,qd->nq", x, queue), (x * y).sum(-1, keepdims=True)], 1)
    return (logsumexp(z, 1) - z[:, -1]).mean()


@found
def own_among_the_others_masked(x, y, queue):
    z = x @ y.T
    others = jnp.where(jnp.eye(N, dtype=bool), -jnp.inf, z)
    return (logsumexp(jnp.concatenate([jnp.diag(z)[:, None], others], 1), 1) - jnp.diag(z)).mean() + queue.sum()


@found
def a_row_number_of_the_table(x, y, queue):
    """A class without a weight of its own."""
    z = jnp.concatenate([jnp.full((N, 1), 0.3) + y[:, :1], x @ queue.T], -1)
    return with_integer_labels(z, LABELS).mean()


@found
def along_the_first_axis(x, y, queue):
    z = jnp.concatenate([queue @ x.T, (x * y).sum(-1)[None]], 0)
    return -log_softmax(z, 0)[LABELS, EACH].mean()


@found
def smoothed_and_counted(x, y, queue):
    z = beside(x, y, queue)
    logs = log_softmax(z)
    right = (jnp.argmax(z, -1) == FIRST).mean()
    return -(0.9 * logs[:, 0] + 0.1 * logs.mean(-1)).mean(), right


@found
def three_parts(x, y, queue):
    z = jnp.concatenate([(x * y).sum(-1, keepdims=True), x @ queue.T * 0.5, y[:, :2]], 1)
    return with_integer_labels(z, LABELS).mean()


@found
def checkpointed(x, y, queue):
    loss = jax.checkpoint(lambda x, y, queue: with_integer_labels(beside(x, y, queue), FIRST).mean())
    return loss(x, y, queue)


@found
def for_each_example(x, y, queue):
    def example(x, y, label):
        z = jnp.concatenate([jnp.dot(x, y)[None], queue @ x])
        return logsumexp(z) - z[label]

    return jax.vmap(example)(x, y, LABELS).mean()


@pytest.mark.parametrize("name", FOUND)
def test_is_found_and_right(name):
    compared = compare(FOUND[name], arguments(), gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


def step(function, args):
    def loss(*args):
        value = function(*args)
        return value if isinstance(value, tuple) else (value, ())

    return compare(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), args, gradients=False)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", FOUND)
def test_is_found_and_right_in_a_train_step(name, dtype):
    compared = step(FOUND[name], arguments(dtype))
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


def test_steps_over_batches():
    def steps(x, y, queue):
        def one(total, batch):
            value, gradients = jax.value_and_grad(lambda *a: integer_labels(*a), (0, 1, 2))(*batch, queue)
            return total + value, gradients

        return lax.scan(one, 0.0, (jnp.stack([x, y]), jnp.stack([y, x])))

    compared = compare(steps, arguments(), gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


def test_logits_of_two_products():
    def loss(x, y, queue):
        a, b = jnp.eye(N) * 1e9, jnp.concatenate([x @ y.T, x @ x.T], 1)
        z = b - jnp.concatenate([jnp.zeros_like(a), a], 1)
        return -log_softmax(z)[EACH, EACH].mean() + queue.sum()

    assert step(loss, arguments()).complaints == []


def test_the_first_of_equal_logits_is_the_largest():
    def where(x, y, queue):
        z = jnp.concatenate([x @ queue.T, (x @ queue.T).max(-1, keepdims=True)], 1)
        return jnp.argmax(z, -1), jnp.argmax(z[:, ::-1], -1), logsumexp(z, -1)

    x, y, queue = arguments()
    for infected in (x, x.at[1].set(jnp.nan)):
        assert compare(where, [infected, y, queue], gradients=False, assume_finite=False).complaints == []


# --- What looks alike ------------------------------------------------------------------------------------------------


def with_a_sink(x, y, queue):
    """Attention: what is put beside the scores takes a part of the weights."""
    z = jnp.concatenate([x @ queue.T, y[:, :1]], 1)
    return softmax(z)[:, :-1] @ queue


def over_two_blocks(x, y, queue):
    z = jnp.concatenate([x @ queue.T, x @ y.T], 1)
    return softmax(z) @ jnp.concatenate([queue, y])


def weights_are_given(x, y, queue):
    return softmax(beside(x, y, queue))


def logits_are_given(x, y, queue):
    z = beside(x, y, queue)
    return with_integer_labels(z, LABELS).mean(), z


@pytest.mark.parametrize(
    ("function", "attentions"), [(with_a_sink, 1), (over_two_blocks, 1), (weights_are_given, 0), (logits_are_given, 0)]
)
def test_what_looks_alike_is_no_loss(function, attentions):
    compared = compare(function, arguments())
    assert compared.complaints == []
    assert (compared.counts(), compared.counts("cross_entropy")) == (attentions, 0)


def test_a_sink_is_found_where_a_checkpoint_computes_it_again():
    def layers(x, y, queue):
        attend = jax.checkpoint(lambda x: x + with_a_sink(x, y, queue))
        return lax.scan(lambda x, _: (attend(x), None), x, length=3)[0]

    args = arguments()
    compared = compare(with_gradients(layers, args), args, gradients=False)
    assert compared.complaints == []
    assert compared.counts() == 1


def test_on_several_devices():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    args = arguments()

    def loss(x, y, queue):
        return lax.pmean(integer_labels(x, y, queue), "rows")

    def step(*args):
        return lax.pmean(jax.value_and_grad(integer_labels, (0, 1, 2))(*args), "rows")

    specs = (P("rows"), P("rows"), P())
    for function, out_specs, found in ((loss, P(), 1), (step, (P(), (P(), P(), P())), 1)):
        spread = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        optimized = optimized_like_a_user(spread)
        for given, wanted in zip(jax.tree.leaves(optimized(*args)), jax.tree.leaves(spread(*args)), strict=True):
            assert jnp.allclose(given, wanted, rtol=1e-5, atol=1e-6)  # a few roundings; the oracle runs no meshes
        assert optimized.report().counts()["cross_entropy"] == found


def test_a_backward_in_another_body_is_a_near_miss():
    """What is needed of the joined logits leaves the map for the one of the backward."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.shard_map(
        lambda *args: lax.pmean(positive_first(*args), "rows"),
        mesh=mesh,
        in_specs=(P("rows"), P("rows"), P()),
        out_specs=P(),
    )
    report = autopallas.explain(jax.value_and_grad(spread, (0, 1, 2)), *arguments())
    assert [miss.op for miss in report.near_misses] == ["cross_entropy"]


def test_nothing_raises_where_jax_folds_constants():
    """What is put in place of a part has no constants then either, which would be no part of its equations."""
    before = jax.config.eager_constant_folding
    jax.config.update("eager_constant_folding", True)
    try:
        assert differs(labels_anywhere, arguments()) == []
    finally:
        jax.config.update("eager_constant_folding", before)


@pytest.mark.every_case
@pytest.mark.parametrize(("labels", "count"), [(P("a"), 1), (P(), 0)], ids=["divided", "whole"])
def test_rows_that_their_types_divide(labels, count):
    """Labels that no device has a part of cannot tell which of the picked elements exist."""

    def loss(x, w, v, y):
        z = jnp.concatenate([x @ w, x @ v], -1)
        return jnp.mean(jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, y[:, None], -1)[:, 0])

    mesh = jax.sharding.AbstractMesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    arrays = ((24, 32), jnp.float32, P("a")), ((32, 200), jnp.float32, P()), ((32, 50), jnp.float32, P())
    args = [
        jax.ShapeDtypeStruct(*one, sharding=jax.NamedSharding(mesh, spec))
        for *one, spec in (*arrays, ((24,), jnp.int32, labels))
    ]
    report = autopallas.explain(autopallas.optimize(loss, objective="always", strict=True), *args)
    assert report.failures == ()
    assert report.counts()["cross_entropy"] == count
