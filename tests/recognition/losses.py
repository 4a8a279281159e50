"""Spellings of logits and cross-entropy: plain functions of weight, activations and labels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import log_softmax, logsumexp, one_hot, softmax
from support.catalogue import array, registry

__all__ = ["LOSSES", "SIZES", "D", "N", "V", "arguments"]

N, D, V = 6, 5, 13
SIZES = (N, V)
LOSSES, loss = registry()


def arguments(dtype: Any = jnp.float32, scale: float = 1.0) -> tuple[Any, Any, Any]:
    """w [D, V], x [N, D], labels [N]."""
    labels = jnp.asarray([3, 0, 12, 3, 7, 1], jnp.int32)
    return array(D, V, dtype=dtype, seed=1), array(N, D, dtype=dtype, seed=2, scale=scale), labels


def picked(values: Any, y: Any) -> Any:
    return jnp.take_along_axis(values, y[..., None], -1)[..., 0]


# --- Picking the label -----------------------------------------------------------------------------------------------


@loss
def take_along_axis(w, x, y):
    return -picked(log_softmax(x @ w), y).mean()


@loss
def fancy_index(w, x, y):
    return -log_softmax(x @ w)[jnp.arange(N), y].mean()


@loss
def rows_counted_by_numpy(w, x, y):
    return -log_softmax(x @ w)[np.arange(N), y].mean()


@loss
def take_along_axis_that_clips(w, x, y):
    z = x @ w
    return (logsumexp(z, -1) - jnp.take_along_axis(z, y[:, None] + 3, 1, mode="clip")[:, 0]).mean()


@loss
def labels_out_of_range_are_nan(w, x, y):
    return -jnp.nan_to_num(picked(log_softmax(x @ w), y + 5)).mean()


@loss
def indices_out_of_range_are_clipped(w, x, y):
    return -log_softmax(x @ w)[jnp.arange(N), y + 5].mean()


@loss
def negative_labels_count_from_the_end(w, x, y):
    return -picked(log_softmax(x @ w), y - V).mean()


@loss
def one_hot_product(w, x, y):
    return -(one_hot(y, V) * log_softmax(x @ w)).sum(-1).mean()


@loss
def one_hot_einsum(w, x, y):
    return -jnp.mean(jnp.sum(one_hot(y, V) * log_softmax(jnp.einsum("nd,dv->nv", x, w)), axis=-1))


@loss
def summed_over_everything_at_once(w, x, y):
    return -jnp.sum(one_hot(y, V) * log_softmax(x @ w)) / N


@loss
def iota_compared(w, x, y):
    z = x @ w
    return (logsumexp(z, -1) - jnp.sum(jnp.where(jnp.arange(V) == y[:, None], z, 0.0), -1)).mean()


@loss
def vmapped_index(w, x, y):
    return jax.vmap(lambda x, y: -log_softmax(x @ w)[y])(x, y).mean()


# --- The normaliser --------------------------------------------------------------------------------------------------


@loss
def by_hand(w, x, y):
    z = x @ w
    m = lax.stop_gradient(z.max(-1, keepdims=True))
    return (jnp.log(jnp.exp(z - m).sum(-1)) + m[:, 0] - (z * one_hot(y, V)).sum(-1)).mean()


@loss
def maximum_with_its_gradient(w, x, y):
    z = x @ w
    shifted = z - z.max(-1, keepdims=True)
    return (jnp.log(jnp.exp(shifted).sum(-1)) - (shifted * one_hot(y, V)).sum(-1)).mean()


@loss
def greatest_against_the_label(w, x, y):
    z = (x @ w) * 0.7 + w[0]
    return (z.max(-1) - picked(z, y) + 0.1 * logsumexp(z, -1)).mean()


@loss
def without_a_maximum(w, x, y):
    z = x @ w
    return (jnp.log(jnp.exp(z).sum(-1)) - picked(z, y)).mean()


@loss
def log_of_softmax(w, x, y):
    return -jnp.log(softmax(x @ w))[jnp.arange(N), y].mean()


@loss
def base_two(w, x, y):
    z = (x @ w) * np.float32(np.log2(np.e))
    m = lax.stop_gradient(z.max(-1, keepdims=True))
    return (jnp.log(jnp.exp2(z - m).sum(-1)) + (m[:, 0] - picked(z, y)) * np.float32(np.log(2))).mean()


# --- The logits ------------------------------------------------------------------------------------------------------


@loss
def tied_and_transposed(w, x, y):
    return -picked(log_softmax(x @ w.T.T), y).mean()


@loss
def einsum_the_other_way_round(w, x, y):
    return -log_softmax(jnp.einsum("dv,nd->vn", w, x), axis=0)[y, jnp.arange(N)].mean()


@loss
def tokens_in_sequences(w, x, y):
    return -picked(log_softmax(x.reshape(2, 3, D) @ w), y.reshape(2, 3)).mean()


@loss
def sequences_flattened(w, x, y):
    return -picked(log_softmax((x.reshape(2, 3, D) @ w).reshape(-1, V)), y).mean()


@loss
def rows_unflattened(w, x, y):
    return -picked(log_softmax((x @ w).reshape(2, 3, V)), y.reshape(2, 3)).mean()


@loss
def hidden_in_heads(w, x, y):
    h = jnp.concatenate([x, x[:, :3]], 1).reshape(N, 2, 4)
    return -picked(log_softmax(jnp.einsum("nhd,hdv->nv", h, jnp.concatenate([w, w[:3]]).reshape(2, 4, V))), y).mean()


@loss
def bias_and_scale(w, x, y):
    return -picked(log_softmax((x @ w + jnp.sin(w[0])) * 0.5), y).mean()


@loss
def soft_cap(w, x, y):
    return -picked(log_softmax(3 * jnp.tanh((x @ w) / 3)), y).mean()


@loss
def temperature_per_row(w, x, y):
    return -picked(log_softmax((x @ w) / (1 + jnp.abs(x[:, :1]))), y).mean()


@loss
def learned_temperature(w, x, y):
    return -picked(log_softmax((x @ w) * jnp.exp(w[0, 0])), y).mean()


@loss
def vocabulary_masked(w, x, y):
    z = jnp.where(jnp.arange(V) < 11, x @ w, -jnp.inf)
    return -picked(log_softmax(z), y % 11).mean()


@loss
def vocabulary_masked_by_where(w, x, y):
    z = x @ w
    return (logsumexp(z, -1, where=jnp.arange(V) < 11) - picked(z, y % 11)).mean()


@loss
def first_part_of_a_padded_weight(w, x, y):
    return -picked(log_softmax(x @ w[:, :11]), y % 11).mean()


# --- What is made of the rows ----------------------------------------------------------------------------------------


@loss
def ignored_labels_and_weights(w, x, y):
    weight = (y != 3) * jnp.abs(x[:, 0])
    return (-picked(log_softmax(x @ w), jnp.where(y != 3, y, 0)) * weight).sum() / weight.sum()


@loss
def z_loss_and_accuracy(w, x, y):
    z = x @ w
    normaliser = logsumexp(z, -1)
    return (normaliser - picked(z, y) + 1e-2 * normaliser**2).mean(), (z.argmax(-1) == y).mean()


@loss
def accuracy_by_the_greatest_logit(w, x, y):
    z = x @ w
    lowest = (logsumexp(z, -1) - picked(z, y)).mean()
    return lowest, (lax.stop_gradient(picked(z, y)) == lax.stop_gradient(z.max(-1))).mean()


@loss
def label_smoothing(w, x, y):
    return -((one_hot(y, V) * 0.9 + 0.1 / V) * log_softmax(x @ w)).sum(-1).mean()


@loss
def label_smoothing_by_the_mean(w, x, y):
    lp = log_softmax(x @ w)
    return -(0.9 * picked(lp, y) + 0.1 * lp.mean(-1)).mean()


@loss
def soft_labels(w, x, y):
    targets = softmax(array(N, V, seed=7))
    return -(targets * log_softmax(x @ w)).sum(-1).mean()


@loss
def two_losses_of_the_same_logits(w, x, y):
    z = x @ w
    return (-picked(log_softmax(z), y) + 0.3 * (logsumexp(2 * z, -1) - picked(2 * z, (y + 1) % V))).mean()


@loss
def focal(w, x, y):
    lp = picked(log_softmax(x @ w), y)
    return -((1 - jnp.exp(lp)) ** 2 * lp).mean()


@loss
def relu_of_the_logits(w, x, y):
    return -picked(log_softmax(jax.nn.relu(x @ w)), y).mean()


@loss
def logits_through_a_rule_that_is_no_derivative(w, x, y):
    doubled = jax.custom_jvp(jnp.tanh)
    doubled.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), 2 * tangents[0] * jnp.cos(primals[0])))
    return -picked(log_softmax(3 * doubled(x @ w)), y).mean()


@loss
def checkpointed(w, x, y):
    return jax.checkpoint(take_along_axis)(w, x, y)


@loss
def checkpointed_with_the_layer_before(w, x, y):
    return jax.checkpoint(lambda w, x, y: one_hot_product(w, jnp.tanh(x), y))(w, x, y)


@loss
def microbatches(w, x, y):
    def body(total, batch):
        x, y = batch
        return total + picked(log_softmax(jnp.tanh(x) @ w), y).sum(), None

    return lax.scan(body, 0.0, (x.reshape(2, 3, D), y.reshape(2, 3)))[0] / N


@jax.custom_vjp
def with_z_loss(logits, targets, weight):
    return with_z_loss_forward(logits, targets, weight)[0]


def with_z_loss_forward(logits, targets, weight):
    maximum = jnp.max(logits, -1, keepdims=True)
    exponentials = jnp.exp(logits - maximum)
    total = exponentials.sum(-1, keepdims=True)
    normaliser = jnp.squeeze(jnp.log(total) + maximum, -1)
    z_loss = weight * normaliser**2
    loss = -jnp.sum(targets * (logits - maximum - jnp.log(total)), -1) + z_loss
    return (loss, z_loss), (targets, weight, exponentials, total, normaliser)


def with_z_loss_backward(kept, cotangents):
    targets, weight, exponentials, total, normaliser = kept
    gradient = (1 + 2 * weight * normaliser)[..., None] * exponentials / total - targets
    return cotangents[0][..., None] * gradient, jnp.zeros_like(targets), jnp.zeros_like(weight)


with_z_loss.defvjp(with_z_loss_forward, with_z_loss_backward)


@loss
def custom_rule_that_drops_a_cotangent(w, x, y):
    losses, z_losses = with_z_loss(x @ w, one_hot(y, V), jnp.float32(1e-2))
    return losses.mean(), z_losses.sum()
