"""Programs in the styles of several libraries and authors that were not found, each with what it was found without."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.nn import log_softmax, logsumexp
from jax.sharding import AxisType, PartitionSpec
from support.catalogue import array
from support.compare import compare, optimized_like_a_user

B, T, D, V, K = 2, 6, 8, 13, 3
LABELS = jnp.arange(B * T).reshape(B, T) * 5 % V
CODES = jnp.arange(B * T * K).reshape(B, T, K) * 7 % V


def picked(logits, labels):
    return jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]


def step(loss, args, argnums=(0, 1)):
    """A train step's value and gradient, and its comparison."""
    return compare(jax.value_and_grad(loss, argnums), args, gradients=False)


# --- Losses ----------------------------------------------------------------------------------------------------------


def heads_side_by_side(x, w):
    return -picked(log_softmax(jnp.einsum("btd,kdv->btkv", jnp.tanh(x), w)), CODES).mean()


def heads_mapped(x, w):
    h = jnp.tanh(x)

    def one(w, codes):
        z = h @ w
        return (logsumexp(z, -1) - picked(z, codes)).mean()

    return jax.vmap(one, (0, -1))(w, CODES).mean()


def heads_of_one_matrix(x, w):
    z = (jnp.tanh(x) @ w.transpose(1, 0, 2).reshape(D, K * V)).reshape(B, T, K, V)
    return (logsumexp(z, -1) - picked(z, CODES)).mean()


def heads_in_a_loop(x, w):
    h = jnp.tanh(x)

    def one(total, given):
        w, codes = given
        return total - picked(log_softmax(h @ w), codes).mean(), None

    return lax.scan(one, jnp.zeros((), x.dtype), (w, jnp.moveaxis(CODES, -1, 0)))[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss", [heads_side_by_side, heads_mapped, heads_of_one_matrix, heads_in_a_loop])
def test_several_heads_in_a_train_step(loss, dtype):
    args = array(B, T, D, seed=1).astype(dtype), array(K, D, V, seed=2).astype(dtype)
    compared = step(loss, args)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1
    assert not compared.report.near_misses


SUMS = {
    "a product": lambda e: e @ jnp.ones(V, e.dtype),
    "a contraction": lambda e: jnp.einsum("btv,v->bt", e, jnp.ones(V, e.dtype)),
    "of each row": jax.vmap(jax.vmap(lambda e: jnp.vdot(jnp.ones_like(e), e))),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_exponentials_that_are_products_with_ones(name, dtype):
    def loss(x, w):
        z = jnp.tanh(x) @ w
        z = z - lax.stop_gradient(z.max(-1, keepdims=True))
        return (jnp.log(SUMS[name](jnp.exp(z))) - picked(z, LABELS)).mean()

    args = array(B, T, D, seed=1).astype(dtype), array(D, V, seed=2).astype(dtype)
    compared = step(loss, args)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1
    assert not compared.report.near_misses


@pytest.mark.parametrize("weights", [jnp.full(V, 2.0), jnp.arange(1.0, V + 1), jnp.ones(V).at[3].set(0.0)])
def test_other_products_of_exponentials_are_no_sums_of_a_softmax(weights):
    def loss(x, w):
        z = jnp.tanh(x) @ w
        return (jnp.log(jnp.exp(z) @ weights) - picked(z, LABELS)).mean()

    compared = step(loss, (array(B, T, D, seed=1), array(D, V, seed=2)))
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 0


def pieces(x, w, labels):
    size = w.shape[1] // 3

    def piece(carried, given):
        number, w = given
        greatest, total, found = carried
        z = x @ w
        further = jnp.maximum(greatest, z.max(-1))
        total = total * jnp.exp(greatest - further) + jnp.exp(z - further[..., None]).sum(-1)
        own = labels - number * size
        found += jnp.where((own >= 0) & (own < size), picked(z, jnp.clip(own, 0, size - 1)), 0)
        return (further, total, found), None

    start = jnp.full(labels.shape, -jnp.inf), jnp.zeros(labels.shape), jnp.zeros(labels.shape)
    parts = jnp.arange(3), w.reshape(D, 3, size).transpose(1, 0, 2)
    (greatest, total, found), _ = lax.scan(piece, start, parts)
    return (greatest + jnp.log(total) - found).mean()


def test_pieces_of_a_vocabulary_are_left_alone_also_in_a_loop_over_labels():
    labels = jnp.stack([LABELS % 12, (LABELS + 1) % 12])

    def loss(x, w):
        return lax.scan(lambda total, own: (total + pieces(x, w, own), None), 0.0, labels)[0]

    compared = step(loss, (array(B, T, D, seed=1), array(D, 12, seed=2)))
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 0


def difference(x, w, labels):
    z = x @ w
    return (logsumexp(z, -1) - picked(z, labels)).mean()


@pytest.mark.parametrize("shape", [(1, 6), (6, 1), (1, 1), (1, 1, 4), (1, 3, 1)])
def test_losses_with_axes_of_one_element(shape):
    labels = jnp.arange(jnp.prod(jnp.array(shape))).reshape(shape) % V
    compared = step(partial(difference, labels=labels), (array(*shape, D, seed=1), array(D, V, seed=2)))
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


def test_a_vocabulary_in_parts_whose_maxima_are_exchanged():
    mesh = jax.make_mesh((1,), ("model",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))

    def of_a_part(x, w, labels):
        z = x @ w
        size = z.shape[-1]
        greatest = lax.pmax(lax.stop_gradient(z.max(-1)), "model")
        total = lax.psum(jnp.exp(z - greatest[..., None]).sum(-1), "model")
        own = labels - lax.axis_index("model") * size
        found = jnp.where((own >= 0) & (own < size), picked(z, jnp.clip(own, 0, size - 1)), 0.0)
        return (greatest + jnp.log(total) - lax.psum(found, "model")).mean()

    whole = PartitionSpec()
    divided = PartitionSpec(None, "model")
    loss = jax.shard_map(of_a_part, mesh=mesh, in_specs=(whole, divided, whole), out_specs=whole)
    x, w = array(B, T, D, seed=1), array(D, 12, seed=2)
    labels = LABELS % 12
    function = jax.value_and_grad(lambda x, w: loss(x, w, labels), (0, 1))
    optimized = optimized_like_a_user(function)
    given, expected = jax.jit(optimized)(x, w), jax.jit(function)(x, w)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(a, b, rtol=2e-5, atol=2e-6)
    assert optimized.report().counts()["cross_entropy"] == 1


# --- Gated MLPs ------------------------------------------------------------------------------------------------------


def layers(activation):
    def run(x, gate, up, down):
        def layer(x, own):
            gate, up, down = own
            return x + (activation(x @ gate) * (x @ up)) @ down, None

        return lax.scan(layer, x, (gate, up, down))[0].sum()

    return run


ACTIVATIONS = {
    "softplus": jax.nn.softplus,
    "mish": jax.nn.mish,
    "log_sigmoid": jax.nn.log_sigmoid,
    "logaddexp": lambda x: jnp.logaddexp(x, 0.0) - 0.5,
    "relu6": jax.nn.relu6,
    "hard_swish": jax.nn.hard_swish,
    "minimum of a relu": lambda x: jnp.minimum(jax.nn.relu(x), 6.0),
    "maximum and minimum": lambda x: jnp.minimum(jnp.maximum(x, 0.0), 6.0),
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_with_a_rule_in_a_loop_that_is_differentiated(name, checkpointed):
    run = layers(ACTIVATIONS[name])
    run = jax.checkpoint(run) if checkpointed else run
    args = array(T, D, seed=1), array(2, D, 12, seed=2), array(2, D, 12, seed=3), array(2, 12, D, seed=4) * 0.3
    compared = step(run, args, (0, 1, 2, 3))
    assert compared.complaints == []
    assert compared.counts("gated_mlp") == 1
    assert not compared.report.near_misses


@pytest.mark.parametrize("name", ["softplus", "relu6", "minimum of a relu", "maximum and minimum"])
def test_activations_of_zeros_keep_their_derivatives(name):
    run = layers(ACTIVATIONS[name])  # at zero, the derivatives are 1/2, 0, 0 and 1/2
    args = jnp.zeros((T, D)).at[1:].set(array(T - 1, D, seed=1)), *(array(2, D, 12, seed=n) for n in (2, 3))
    args = (*args, array(2, 12, D, seed=4) * 0.3)
    compared = step(run, args, (0, 1, 2, 3))
    assert compared.complaints == []
    assert compared.counts("gated_mlp") == 1


def test_almost_a_softplus_is_read_as_what_it_is():
    def almost(x):
        further = jnp.maximum(x, 0.0)
        return jnp.where(x != x, x, further + jnp.log1p(jnp.exp(-jnp.abs(x) * 0.5)))

    args = array(T, D, seed=1), array(2, D, 12, seed=2), array(2, D, 12, seed=3), array(2, 12, D, seed=4) * 0.3
    assert step(layers(almost), args, (0, 1, 2, 3)).complaints == []


@pytest.mark.parametrize("shape", [(1, 1, 12), (T, 12), (1, 12)])
def test_a_bias_whose_layout_changes_in_checkpointed_steps(shape):
    def loss(x, gate, bias, up, down):
        def example(total, x):
            added = jnp.broadcast_to(bias, shape) if shape[0] == T else bias.reshape(shape)
            return total + jnp.sin((jax.nn.silu(x @ gate + added) * (x @ up)) @ down).sum(), None

        return lax.scan(jax.checkpoint(example), jnp.float32(0), x)[0]

    shapes = ((3, B, T, D), (D, 12), (12,), (D, 12), (12, D))
    compared = step(loss, [array(*shape, seed=n) for n, shape in enumerate(shapes)], (0, 1, 2, 3, 4))
    assert compared.complaints == []
    assert compared.counts("gated_mlp") == 1
    assert not compared.report.near_misses


def test_tokens_in_a_row_that_a_router_reads_too():
    def block(x, router, gate, up, down):
        rows = x.reshape(B * T, D)
        scores = jax.nn.sigmoid(rows @ router)
        return (scores * ((jax.nn.silu(rows @ gate) * (rows @ up)) @ down)).reshape(x.shape)

    shapes = ((B, T, D), (D, 1), (D, 12), (D, 12), (12, D))
    compared = compare(block, [array(*shape, seed=n) for n, shape in enumerate(shapes)])
    assert compared.complaints == []
    assert compared.counts("gated_mlp") == 1


def test_mapped_pieces_that_a_checkpoint_computes_again():
    x = array(2, T, D, seed=1)

    def loss(gate, up, down):
        pieces = lax.map(lambda x: (jax.nn.silu(jnp.tanh(x) @ gate) * (jnp.tanh(x) @ up)) @ down, x)
        return jnp.sin(pieces).sum()

    args = array(D, 12, seed=2), array(D, 12, seed=3), array(12, D, seed=4)
    compared = step(jax.checkpoint(loss), args, (0, 1, 2))
    assert compared.complaints == []
    assert compared.counts("gated_mlp") == 1


# --- Norms -----------------------------------------------------------------------------------------------------------


def test_the_reciprocal_of_a_root():
    def norm(x, scale):
        square = jnp.mean(jnp.square(x), -1, keepdims=True)
        return x * jnp.reciprocal(jnp.sqrt(square + 1e-6)) * (1 + scale)

    compared = compare(norm, (array(B, T, D, seed=1), array(D, seed=2)))
    assert compared.complaints == []
    assert compared.counts("rms_norm") == 1


def test_a_variance_to_the_power_of_minus_a_half():
    def norm(x, scale):
        square = jnp.mean(x * x, -1, keepdims=True)
        return x * (jnp.sqrt(square + 1e-6)) ** -1.0 * scale

    compared = compare(norm, (array(B, T, D, seed=1), array(D, seed=2)))
    assert compared.complaints == []
    assert compared.counts("rms_norm") == 1


def test_rows_that_are_cast_before_numbers_as_narrow_are_taken():
    def norm(x, scale):
        x = x.astype(jnp.bfloat16)
        centred = x - x.mean(-1, keepdims=True)
        return centred * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * scale

    compared = compare(norm, (array(B, T, D, seed=1), array(D, seed=2).astype(jnp.bfloat16)))
    assert compared.complaints == []
    assert compared.counts("layer_norm") == 1


# --- Mixtures --------------------------------------------------------------------------------------------------------

E, F = 4, 12


def weights():
    x = array(B, T, D, seed=1)
    return x, array(D, E, seed=2), array(E, D, F, seed=3) * 0.3, array(E, F, D, seed=4) * 0.3


def every_expert(x, up, down):
    return jnp.einsum("btef,efd->bted", jax.nn.relu(jnp.einsum("btd,edf->btef", x, up)), down)


def logits_masked_with_infinity(x, router, up, down):
    logits = x @ router
    _, chosen = lax.top_k(logits, 2)
    shown = jax.nn.one_hot(chosen, E).sum(-2) > 0
    gates = jax.nn.softmax(jnp.where(shown, logits, -jnp.inf), -1)
    return jnp.einsum("bted,bte->btd", every_expert(x, up, down), gates)


def logits_put_into_minus_infinity(x, router, up, down):
    logits = x @ router
    best, chosen = lax.top_k(logits, 1)
    rows = jnp.arange(B)[:, None, None], jnp.arange(T)[None, :, None]
    gates = jax.nn.sigmoid(jnp.full_like(logits, -jnp.inf).at[(*rows, chosen)].set(best))
    return jnp.einsum("bted,bte->btd", every_expert(x, up, down), gates)


def gates_put_along_an_axis(x, router, up, down):
    best, chosen = lax.top_k(x @ router, 2)
    gates = jnp.put_along_axis(jnp.zeros((B, T, E)), chosen, jax.nn.softmax(best), axis=-1, inplace=False)
    return (gates[..., None] * every_expert(x, up, down)).sum(2)


@pytest.mark.parametrize(
    "mixture", [logits_masked_with_infinity, logits_put_into_minus_infinity, gates_put_along_an_axis]
)
def test_gates_of_the_experts_that_are_chosen(mixture):
    compared = compare(mixture, weights())
    assert compared.complaints == []
    assert compared.counts("grouped_matmul") == 1
    assert not compared.report.near_misses


def test_a_token_whose_experts_are_all_masked_stays_not_a_number():
    def mixture(x, router, up, down):
        logits = x @ router
        _, chosen = lax.top_k(logits, 2)
        shown = (jax.nn.one_hot(chosen, E).sum(-2) > 0) & (x[..., :1] > 0)
        gates = jax.nn.softmax(jnp.where(shown, logits, -jnp.inf), -1)
        return jnp.einsum("bted,bte->btd", every_expert(x, up, down), gates)

    given, expected = (jax.jit(f)(*weights()) for f in (optimized_like_a_user(mixture), mixture))
    assert jnp.array_equal(jnp.isnan(given), jnp.isnan(expected))


def test_the_biases_of_chosen_experts_are_no_attention():
    def mixture(x, router, up, down):
        best, chosen = lax.top_k(x @ router, 2)
        hidden = jax.nn.relu(jnp.einsum("btd,btkdf->btkf", x, up[chosen]))
        given = jnp.einsum("btkf,btkfd->btkd", hidden, down[chosen]) + down[:, 0][chosen]
        return jnp.einsum("btkd,btk->btd", given, jax.nn.softmax(best, -1))

    compared = compare(mixture, weights())
    assert compared.complaints == []
    assert not [miss for miss in compared.report.near_misses if miss.op == "attention"]
