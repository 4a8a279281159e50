"""Cross-entropies of which the gradient is asked for outside a loop, a branch or a shard_map: no logits leave it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from support.catalogue import array
from support.checks import check

B, N, D, V = 3, 7, 4, 13
LABELS = jnp.asarray([[(3 * i + 5 * b) % V for i in range(N)] for b in range(B)])


def loss(x, w, labels):
    """Mean cross-entropy of rows x [N, D], with a z-loss."""
    logits = x @ w
    normalizer = jax.nn.logsumexp(logits, -1)
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return jnp.mean(normalizer - picked) + 1e-2 * jnp.mean(normalizer**2)


def over_batches(one):
    """Each step's rows are computed, so that it is not the rows of one product that the loop goes over."""

    def total(x, w):
        def body(h, given):
            x, labels = given
            h = jnp.tanh(h + x)
            return h, one(h, w, labels)

        h, losses = lax.scan(body, x[0], (x, LABELS))
        return jnp.sum(losses**2) + jnp.sum(h)

    return total


def in_a_scan(x, w):
    return over_batches(loss)(x, w)


def in_a_scan_of_checkpoints(x, w):
    return over_batches(jax.checkpoint(loss))(x, w)


def in_a_scan_with_smoothed_labels(x, w):
    """The program sums the wanted probabilities themselves, and stacks them for that."""

    def smoothed(x, w, labels):
        wanted = jax.nn.one_hot(labels, V) * 0.9 + 0.1 / V
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(x @ w) * wanted, -1))

    return over_batches(smoothed)(x, w)


def in_a_scan_of_scans(x, w):
    return lax.scan(lambda total, scale: (total + in_a_scan(x * scale, w), None), 0.0, jnp.array([0.5, 2.0]))[0]


def in_a_branch(x, w):
    other = lambda x, w: jnp.sum(x) * jnp.sum(w)  # noqa: E731
    return lax.cond(jnp.sum(x) > -1e6, lambda x, w: loss(x, w, LABELS[0]), other, x[0], w)


def in_a_branch_in_a_scan(x, w):
    def one(x, w, labels):
        return lax.cond(jnp.sum(x) > 0, lambda x: loss(x, w, labels), lambda x: jnp.sum(jnp.sin(x)), x)

    return over_batches(one)(x, w)


def on_devices(check_vma):
    mesh = Mesh(jax.devices()[:1], ("data",))
    parts, whole = PartitionSpec("data"), PartitionSpec()

    def own(x, w, labels):
        return lax.pmean(loss(x.reshape(-1, D), w, labels.reshape(-1)), "data")

    spread = jax.shard_map(own, mesh=mesh, in_specs=(parts, whole, parts), out_specs=whole, check_vma=check_vma)
    return lambda x, w: spread(x, w, LABELS)


def on_one_device(x, w):
    return loss(x.reshape(-1, D), w, LABELS.reshape(-1))


CASES = [
    in_a_scan,
    in_a_scan_of_checkpoints,
    in_a_scan_of_scans,
    in_a_branch,
    in_a_branch_in_a_scan,
]


def checked(function, argnums=(0, 1), oracle=None, sizes=(N, V)):
    args = array(B, N, D), array(D, V, seed=1)
    gradient = jax.value_and_grad(function, argnums)
    oracle = oracle and jax.value_and_grad(oracle, argnums)
    report = check(gradient, args, sizes=sizes, op="cross_entropy", ops=("cross_entropy",), oracle=oracle)
    assert report.near_misses == ()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_no_logits_are_left(case):
    checked(case)


def test_smoothed_labels_in_a_scan():
    checked(in_a_scan_with_smoothed_labels, sizes=None)


@pytest.mark.parametrize("argnums", [0, 1])
@pytest.mark.parametrize("case", [in_a_scan, in_a_branch], ids=lambda case: case.__name__)
def test_of_one_gradient_only(case, argnums):
    checked(case, argnums)


@pytest.mark.parametrize("check_vma", [True, False])
def test_no_logits_are_left_on_any_device(check_vma):
    checked(on_devices(check_vma), oracle=on_one_device, sizes=(B * N, V))
