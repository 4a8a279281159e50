"""Products of which a loss reads some columns, and something else others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.nn import log_softmax, logsumexp, softmax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.catalogue import array, registry
from support.compare import compare, with_gradients

import autopallas
from autopallas import compat
from autopallas.options import resolve
from autopallas.passes import Passes
from autopallas.pipeline import find_sites

B, T, D, V = 2, 5, 4, 7
LABELS = jnp.arange(B * T).reshape(B, T) % V


def arguments(dtype=jnp.float32):
    """States [B, T, D], weights of V logits and two further columns, and a bias of each column."""
    return [
        array(B, T, D, dtype=dtype, seed=1),
        array(D, V + 2, dtype=dtype, seed=2),
        array(V + 2, dtype=dtype, seed=3),
    ]


def picked(z, labels=LABELS):
    return jnp.take_along_axis(log_softmax(z), labels[..., None], -1)[..., 0]


FOUND, found = registry()


@found
def actor_and_critic(x, w, b):
    z = x @ w + b
    return -picked(z[..., :V]).mean() + jnp.square(z[..., V] - jnp.tanh(z[..., V + 1])).mean()


@found
def logits_in_the_middle(x, w, b):
    z = jnp.einsum("dv,btd->btv", w, x) + b
    logits = z[..., 1:-1]
    labelled = jnp.take_along_axis(logits, LABELS[..., None], -1)[..., 0]
    return (logsumexp(logits, -1) - labelled).mean() + jnp.sin(z[..., :1]).mean() + (z[..., -1] ** 2).mean()


@found
def columns_first(x, w, b):
    z = jnp.einsum("dv,btd->vbt", w, x)
    return -picked(jnp.moveaxis(z[:V], 0, -1)).mean() + jnp.cos(z[V]).sum() + b.sum()


@found
def in_a_lower_precision(x, w, b):
    z = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32) + b
    logits, value = jnp.split(z, [V], -1)
    return -picked(logits).mean() + jnp.square(value).mean()


@found
def other_columns_twice(x, w, b):
    logits, one, two = jnp.split(x @ w, [V, V + 1], -1)
    return -picked(logits).mean() + (one * two).sum() + jnp.sin(two).mean() + b.sum()


@found
def rows_in_one_axis(x, w, b):
    z = (x.reshape(B * T, D) @ w + b).reshape(B, T, V + 2)
    return -picked(z[..., 2:]).mean() + jnp.tanh(z[..., :2]).sum()


@found
def in_a_layer_loop(x, w, b):
    def layer(x, _):
        z = x @ w + b
        return x * 0.9, jnp.square(z[..., V:]).sum() - picked(z[..., :V]).sum()

    return lax.scan(layer, x, length=3)[1].sum()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", FOUND)
def test_the_loss_is_found(name, dtype):
    compared = compare(FOUND[name], arguments(dtype))
    assert compared.complaints == []
    assert (compared.report.counts()["cross_entropy"], compared.report.near_misses) == (1, ())


def test_each_book_reads_its_own_columns_of_unstacked_logits():
    def books(x, w):
        z = jnp.unstack((x @ w).reshape(B, T, 3, 6), axis=2)
        return -sum((i + 1) * picked(one, LABELS % 6).mean() for i, one in enumerate(z))

    compared = compare(books, [array(B, T, D, seed=1), array(D, 18, seed=2)])
    assert compared.complaints == []
    assert (compared.report.counts()["cross_entropy"], compared.report.near_misses) == (3, ())


def test_rows_without_labels_and_infinite_logits():
    def loss(x, w, b):
        z = x @ w + b
        weights = (LABELS > 1).astype(jnp.float32)
        return -(picked(z[..., :V]) * weights).sum() / weights.sum() + jnp.square(z[..., V]).mean()

    x, w, b = arguments()
    compared = compare(loss, [x, w, b.at[3].set(-jnp.inf)])
    assert compared.complaints == []
    assert compared.report.counts()["cross_entropy"] == 1


OTHERS, other = registry()


@other
def something_reads_all_columns(x, w, b):
    z = x @ w + b
    return -picked(z[..., :V]).mean() + jnp.square(z).mean()


@other
def columns_of_two_losses_overlap(x, w, b):
    z = x @ w + b
    return -picked(z[..., :V]).mean() - picked(z[..., 2:]).mean()


@other
def columns_across_the_edge(x, w, b):
    z = x @ w + b
    return -picked(z[..., :V]).mean() + jnp.square(z[..., V - 1 : V + 1]).mean()


@other
def every_second_column(x, w, b):
    z = x @ w + b
    return -picked(z[..., ::2], LABELS % 4).mean() + jnp.square(z[..., 1::2]).mean()


@pytest.mark.parametrize("name", OTHERS)
def test_what_reads_columns_otherwise_is_a_near_miss(name):
    compared = compare(OTHERS[name], arguments())
    assert compared.complaints == []
    assert compared.report.counts()["cross_entropy"] == 0
    assert "cross_entropy" in {miss.op for miss in compared.report.near_misses}


def _products(function, *args):
    return str(jax.make_jaxpr(function)(*args)).count("dot_general")


def _parted(function, *args, **options):
    program = compat.make_jaxpr(function, *args)
    graph, _, _ = find_sites(Passes(program, checked=False), program, resolve(options), divided=False)
    return [products for body in graph.root.walk() for products in body.parted]


def test_a_product_stays_whole_where_no_site_stands_in_for_a_part():
    def probabilities(x, w, b):
        z = x @ w + b
        return softmax(z[..., :V]), z[..., V:]

    args = arguments()
    step = with_gradients(actor_and_critic, args)
    assert _parted(step, *args, objective="always")
    assert not _parted(step, *args, objective="always", ops=("attention",))
    assert not _parted(probabilities, *args, objective="always")
    assert not _parted(step, *args, objective="time")  # so few logits are kept
    assert _products(autopallas.optimize(step, objective="time"), *args) == _products(step, *args)


def test_columns_without_a_gradient_are_assumed_to_be_finite():
    def loss(x, w, b):
        z = x @ w + b
        return -picked(z[..., :V]).mean(), z[..., V]

    args = arguments()
    step = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    compared = compare(step, args, gradients=False)
    assert compared.complaints == []
    (site,) = [site for site in compared.report.sites if site.op == "cross_entropy"]
    assert any("columns that no gradient comes back to" in said for said in site.assumptions)
    x, w, b = args
    infinite = [x, w.at[0, V].set(jnp.inf), b]
    given = autopallas.optimize(step, objective="always", assume_finite=False)(*infinite)
    for one, other in zip(jax.tree.leaves(given), jax.tree.leaves(step(*infinite)), strict=True):
        assert jnp.array_equal(jnp.isnan(one), jnp.isnan(other))


def test_gradients_of_the_other_columns_alone():
    def value(x, w, b):
        z = x @ w + b
        return jnp.square(z[..., V]).mean(), lax.stop_gradient(-picked(z[..., :V]).mean())

    compared = compare(jax.value_and_grad(value, (0, 1, 2), has_aux=True), arguments(), gradients=False)
    assert compared.complaints == []


def test_an_attention_whose_scores_gradients_are_parted_is_found_beside_a_product_that_stays_whole():
    def step(a, b, w):
        scores = jnp.einsum("btd,bsd->bts", a, b)
        there, back = softmax(scores) @ b, softmax(scores, 1).mT @ a
        z = there @ w
        gates = softmax(z[..., :V])
        return (gates * jnp.sin(gates)).sum() + jnp.square(z[..., V]).sum() + jnp.sin(back).sum()

    args = [array(B, T, D, seed=1), array(B, T + 1, D, seed=2), array(D, V + 2, seed=3)]
    gradient = jax.value_and_grad(step, (0, 1, 2))
    compared = compare(gradient, args, gradients=False, ops=("attention",))
    assert compared.complaints == []
    assert compared.report.counts()["attention"] == 2


def test_one_device_of_an_explicit_mesh_takes_its_own_columns():
    def own(x, w, b):
        return jax.value_and_grad(actor_and_critic, (0, 1, 2))(x, w, b)

    args = arguments()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        step = jax.shard_map(own, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        optimized = autopallas.optimize(step, objective="always", strict=True)
        given = jax.jit(lambda *arrays: optimized(*arrays))(*args)
    assert optimized.report().counts()["cross_entropy"] == 1
    for one, true in zip(jax.tree.leaves(given), jax.tree.leaves(own(*args)), strict=True):
        assert jnp.allclose(jax.device_get(one), true, atol=1e-5)
