"""Attention, losses, norms and gated MLPs in spellings that were read wrong, or not found, or not spoken of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.nn import log_softmax, logsumexp, silu, softmax
from support.catalogue import array
from support.compare import compare

import autopallas

B, T, D, F, V = 2, 6, 8, 12, 13
POLICIES = jax.checkpoint_policies


def step(loss, args):
    """The gradients of a loss by all arguments, and its comparison."""
    return compare(jax.value_and_grad(loss, tuple(range(len(args)))), args, gradients=False)


def reasons(compared, op):
    return [miss.reason for miss in compared.report.near_misses if miss.op == op]


# --- Attention -------------------------------------------------------------------------------------------------------


def heads():
    return [array(B, T, D, seed=1), array(B, T, D, seed=2), array(B, T, D, seed=3)]


def probabilities(q, k):
    return softmax(q @ k.mT)


BIAS = jnp.where(jnp.arange(T * T).reshape(T, T) % 3 == 0, -jnp.inf, 0.0).at[:, 1].set(jnp.inf)


@pytest.mark.parametrize("infinite", [-jnp.inf, jnp.inf])
@pytest.mark.parametrize("otherwise", [0.125, 0.0])
def test_an_infinity_of_something_else_chooses_other_probabilities(infinite, otherwise):
    def attend(q, k, v, bias):
        return jnp.where(bias == infinite, otherwise, probabilities(q, k)) @ v

    assert compare(attend, [*heads(), BIAS]).complaints == []


@pytest.mark.parametrize("numbers", [{}, {"posinf": 0.0, "neginf": 0.0}])
def test_probabilities_that_are_not_numbers_become_zero(numbers):
    def attend(q, k, v):
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool), -1), q @ k.mT, -jnp.inf)
        return jnp.nan_to_num(softmax(scores), **numbers) @ v

    compared = compare(attend, heads())
    assert compared.complaints == []
    assert compared.counts("attention") == 1


def stopped(q, k, v):
    return lax.stop_gradient(probabilities(q, k)) @ k


def other_probabilities(q, k, v):
    bias = jnp.where(jnp.arange(T) % 2 == 0, -jnp.inf, 0.0) + 0.0 * lax.stop_gradient(v.sum())
    return jnp.where(bias == -jnp.inf, 0.125, probabilities(q, k)) @ v


def other_denominators(q, k, v):
    e = jnp.exp(q @ k.mT)
    return (e / e.sum(-1, keepdims=True)[::-1]) @ v


def keys_of_features(q, k, v):
    """Random features: exponentials of a product, but of no row of scores."""
    seen, of_keys = (jnp.exp(x @ v[0] - (x * x).sum(-1, keepdims=True) / 2) for x in (q, k))
    return (seen @ (of_keys.mT @ k)) / (seen @ of_keys.sum(1)[..., None])


@pytest.mark.parametrize("looks_alike", [stopped, other_probabilities, other_denominators, keys_of_features])
@pytest.mark.parametrize("differentiated", [False, True])
def test_what_is_nearly_an_attention_is_no_loss(looks_alike, differentiated):
    args = heads()
    if looks_alike is keys_of_features:
        args[2] = array(1, D, D, seed=3, scale=0.3)
    total = lambda *args: looks_alike(*args).sum()  # noqa: E731
    compared = step(total, args) if differentiated else compare(looks_alike, args, gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 0


# --- Losses ----------------------------------------------------------------------------------------------------------

EACH_ROW, PICKED = jnp.arange(T), jnp.arange(T) * 5 % V


def with_the_gradient_by_hand(added):
    """A loss and the gradient of its logits, which adds to the probability of each row's label."""

    def loss(x, w):
        probabilities = softmax(x @ w)
        d = added(probabilities) / T
        return -jnp.log(probabilities[EACH_ROW, PICKED]).mean(), d @ w.T, x.T @ d

    return loss


def picked_of(p):
    return jnp.take_along_axis(p, PICKED[:, None], 1)[:, 0]


def with_a_rule_by_hand(x, w):
    """A loss that keeps its probabilities for a derivative of its own."""

    @jax.custom_vjp
    def losses(z):
        return forward(z)[0]

    def forward(z):
        e = jnp.exp(z - z.max(-1, keepdims=True))
        total = e.sum(-1, keepdims=True)
        return (jnp.log(total) - (z - z.max(-1, keepdims=True))[EACH_ROW, PICKED][:, None])[:, 0], e / total

    def backward(probabilities, g):
        return ((probabilities * g[:, None]).at[EACH_ROW, PICKED].subtract(g),)

    losses.defvjp(forward, backward)
    return jax.value_and_grad(lambda x, w: losses(x @ w).mean(), (0, 1))(x, w)


def without_a_gather(x, w):
    z = x @ w
    picked = (z * jax.nn.one_hot(PICKED, V)).sum(-1)
    d = softmax(z).at[EACH_ROW, PICKED].add(-1.0)
    return (logsumexp(z, -1) - picked).sum(), d @ w.T, x.T @ d


GRADIENTS_BY_HAND = [
    with_the_gradient_by_hand(lambda p: p.at[EACH_ROW, PICKED].add(-1.0)),
    with_the_gradient_by_hand(lambda p: p.at[EACH_ROW, PICKED].subtract(1.0)),
    with_the_gradient_by_hand(lambda p: jax.vmap(lambda row, label: row.at[label].add(-1.0))(p, PICKED)),
    with_the_gradient_by_hand(lambda p: p.at[EACH_ROW, PICKED].set(p[EACH_ROW, PICKED] - 1)),
    with_the_gradient_by_hand(lambda p: p.at[EACH_ROW, PICKED].set(picked_of(p) - 1, unique_indices=True)),
    with_the_gradient_by_hand(lambda p: jax.vmap(lambda row, label: row.at[label].set(row[label] - 1))(p, PICKED)),
    with_the_gradient_by_hand(lambda p: jnp.put_along_axis(p, PICKED[:, None], -0.25, 1, inplace=False)),
    with_a_rule_by_hand,
    without_a_gather,
]


@pytest.mark.parametrize("loss", GRADIENTS_BY_HAND)
@pytest.mark.parametrize("mapped", [False, True])
def test_gradients_by_hand_change_the_label_of_each_row(loss, mapped):
    args = [array(T, D, seed=1), array(D, V, seed=2, scale=0.5)]
    if mapped:
        args[0] = array(B, T, D, seed=1)
    compared = compare(jax.vmap(loss, (0, None)) if mapped else loss, args, gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


ELSEWHERE = [
    lambda p: p.at[EACH_ROW * 0, PICKED].set(p[EACH_ROW, PICKED] - 1),
    lambda p: p.at[EACH_ROW[::-1], PICKED].set(p[EACH_ROW, PICKED] - 1),
    lambda p: p.at[EACH_ROW, PICKED + V - 3].set(p[EACH_ROW, PICKED] - 1),
    lambda p: p.at[EACH_ROW, PICKED].set(p[EACH_ROW, PICKED] - 1).at[EACH_ROW, PICKED[::-1]].set(p[:, 0]),
    lambda p: p.at[EACH_ROW // 2, PICKED // 3].set(-0.5),
    lambda p: p.at[:, PICKED[:2]].set(p[:, :2] - 1),
    lambda p: p.at[EACH_ROW * 0, PICKED].add(-1.0),
    lambda p: p.at[EACH_ROW[::-1], PICKED].add(-1.0),
    lambda p: p.at[EACH_ROW, PICKED + 4].add(-1.0),
    lambda p: p.at[EACH_ROW, PICKED].add(-1.0).at[EACH_ROW, PICKED[::-1]].add(p[:, 0]),
]


@pytest.mark.parametrize("added", ELSEWHERE)
def test_gradients_by_hand_may_change_other_elements(added):
    args = [array(T, D, seed=1), array(D, V, seed=2, scale=0.5)]
    assert compare(with_the_gradient_by_hand(added), args, gradients=False).complaints == []


def test_elements_that_are_written_twice_beside_a_site_are_written_once():
    """The rows of a write that are not known to differ keep it, also where another site is replaced."""

    def function(x, w, rows):
        p = softmax(x @ w)
        z = x @ w[:, ::-1]
        return p.at[rows, PICKED // V + 2].set(-0.5) @ w.T, (logsumexp(z, -1) - z[EACH_ROW, PICKED]).mean()

    args = [array(T, D, seed=1), array(D, V, seed=2, scale=0.5)]
    compared = compare(function, [*args, jnp.zeros(T, jnp.int32)], gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


ITEMS = jnp.arange(T) * 5 % V


def among_the_items_of_the_batch(users, items):
    """Two-tower retrieval: each user's item among those of the whole batch, looked up in a table."""
    z = users @ items[ITEMS].T
    return (logsumexp(z, -1) - jnp.diagonal(z)).mean()


def sampled_labels(x, embedding):
    own = (x * embedding[ITEMS]).sum(-1)
    drawn = jnp.array([1, 4, 9, 12])
    z = jnp.where(drawn == ITEMS[:, None], -1e9, x @ embedding[drawn].T)
    return (jnp.logaddexp(logsumexp(z, -1), own) - own).mean()


@pytest.mark.parametrize("loss", [among_the_items_of_the_batch, sampled_labels])
@pytest.mark.parametrize("mapped", [False, True])
def test_losses_over_rows_of_an_embedding(loss, mapped):
    if mapped:
        total = lambda x, w: jax.vmap(loss, (0, None))(x, w).sum()  # noqa: E731
        compared = step(total, [array(B, T, D, seed=1), array(V, D, seed=2)])
    else:
        compared = step(loss, [array(T, D, seed=1), array(V, D, seed=2)])
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


LABELS = jnp.arange(T) * 7 % V


def each_view(x, w):
    return jax.vmap(lambda x: (logsumexp(x @ w, -1) - picked(x @ w)).mean())(x).sum()


def each_member(x, w):
    """An ensemble: several heads of the same rows."""
    return jax.vmap(lambda w: (logsumexp(x[0] @ w, -1) - picked(x[0] @ w)).mean())(jnp.stack([w, w[::-1]])).sum()


def picked(z):
    return jnp.take_along_axis(z, LABELS[:, None], -1)[:, 0]


@pytest.mark.parametrize("loss", [each_view, each_member])
def test_labels_that_all_examples_share(loss):
    args = [array(B, T, D, seed=1), array(D, V, seed=2)]
    for compared in (compare(loss, args), step(loss, args)):
        assert compared.complaints == []
        assert compared.counts("cross_entropy") == 1


def test_one_piece_of_a_vocabulary_that_a_number_picks_is_left_alone():
    def loss(x, pieces):
        def piece(total, number):
            return jnp.logaddexp(total, logsumexp(x @ pieces[number], -1)), None

        total = lax.scan(piece, jnp.full(T, -jnp.inf), jnp.arange(3))[0]
        return (total - (x @ pieces[0])[:, 1]).mean()

    compared = step(loss, [array(T, D, seed=1), array(3, D, V, seed=2)])
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 0


# --- Norms -----------------------------------------------------------------------------------------------------------


def centred(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def layer_norm(x, scale):
    return centred(x) * scale


def scaled_root(x, scale):
    return (x - x.mean(-1, keepdims=True)) * (lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale)


def rms_norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def parallel(norm):
    """Blocks whose two branches have a norm of their own, as GPT-NeoX's."""

    def block(x, first, second, a, b):
        return x + jnp.tanh(norm(x, first) @ a) + jnp.sin(norm(x, second) @ b)

    return block


def branches():
    return [array(2, B, T, D, seed=1)[0], *(1 + array(2, D, seed=2) * 0.2), *(array(2, D, D, seed=3) * 0.3)]


@pytest.mark.parametrize("norm", [layer_norm, scaled_root, rms_norm])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_two_norms_of_the_same_rows(norm, checkpointed):
    block = jax.checkpoint(parallel(norm)) if checkpointed else parallel(norm)
    op = "rms_norm" if norm is rms_norm else "layer_norm"
    for compared in (compare(block, branches()), step(lambda *args: jnp.sin(block(*args)).sum(), branches())):
        assert compared.complaints == []
        assert compared.counts(op) == 2


def test_two_norms_of_the_same_rows_in_a_loop():
    def loss(x, *stacked):
        block = parallel(layer_norm)
        return jnp.sin(lax.scan(lambda h, own: (block(h, *own), None), x, stacked)[0]).sum()

    x, *own = branches()
    compared = step(loss, [x, *(jnp.stack([a, a[::-1], a * 0.5]) for a in own)])
    assert compared.complaints == []
    assert compared.counts("layer_norm") == 2


def test_one_norm_with_two_scales_is_one():
    def block(x, first, second, a, b):
        rows = centred(x)
        return jnp.tanh(rows * first @ a) + jnp.sin(rows * second @ b)

    for compared in (compare(block, branches()), step(lambda *args: jnp.sin(block(*args)).sum(), branches())):
        assert compared.complaints == []
        assert compared.counts("layer_norm") == 1


def two_numbers(x):
    return (x - x.mean(-1, keepdims=True)) / (jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) + 1e-3)


def floor_and_number(x):
    return x * lax.rsqrt(jnp.maximum(jnp.mean(x * x, -1, keepdims=True), 1e-2) + 1e-2)


def stopped_variance(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(lax.stop_gradient(x.var(-1, keepdims=True)) + 1e-5)


@pytest.mark.parametrize(
    "norm, op, reason",
    [
        (two_numbers, "layer_norm", "both to the mean of the squares and to its root"),
        (floor_and_number, "rms_norm", "a floor under the mean of the squares"),
        (stopped_variance, "layer_norm", "the gradient is stopped"),
    ],
)
def test_what_is_nearly_a_norm_is_a_near_miss(norm, op, reason):
    compared = compare(norm, [array(B, T, D, seed=1)])
    assert compared.complaints == []
    assert compared.counts(op) == 0
    (said,) = reasons(compared, op)
    assert reason in said


def test_a_norm_with_a_backward_that_somebody_wrote_says_so_in_a_train_step():
    @jax.custom_vjp
    def norm(x):
        return forward(x)[0]

    def forward(x):
        inverse = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return x * inverse, (x * inverse, inverse)

    def backward(kept, cotangent):
        y, inverse = kept
        return (inverse * (cotangent - y * jnp.mean(cotangent * y, -1, keepdims=True)),)

    norm.defvjp(forward, backward)
    x = array(B, T, D, seed=1)
    compared = compare(norm, [x], gradients=False)
    assert compared.complaints == []
    assert compared.counts("rms_norm") == 1
    report = autopallas.explain(jax.grad(lambda x: jnp.sum(jnp.sin(norm(x)))), x)
    (miss,) = [miss for miss in report.near_misses if miss.op == "rms_norm"]
    assert "a backward that is not as JAX's differentiation writes it" in miss.reason
    assert "leave it out" in miss.advice


# --- Gated MLPs ------------------------------------------------------------------------------------------------------


def gated(x, gate, up, down):
    return (silu(x @ gate) * (x @ up)) @ down


@pytest.mark.parametrize("policy", ["dots_saveable", "dots_with_no_batch_dims_saveable", "everything_saveable"])
def test_layers_whose_checkpoints_keep_their_products(policy):
    """The checkpoint is handed both products and each layer's matrices, but not the matrices of all layers."""
    layer = jax.checkpoint(lambda x, own: x + gated(x, *own), policy=getattr(POLICIES, policy))

    def loss(x, *stacked):
        for number in range(2):
            x = layer(x, tuple(own[number] for own in stacked))
        return jnp.sin(x).sum()

    args = [array(B, T, D), *(array(2, n, m, seed=n) * 0.4 for n, m in ((D, F), (D, F), (F, D)))]
    compared = step(loss, args)
    assert compared.complaints == []
    assert compared.counts("gated_mlp") == 2
    assert not compared.report.near_misses


def test_a_product_that_gives_more_than_the_projections_is_a_near_miss():
    def block(x, w, down, other):
        z = x @ w
        return (silu(z[..., :F]) * z[..., F : 2 * F]) @ down + log_softmax(z[..., 2 * F :]) @ other

    args = [array(B, T, D), array(D, 2 * F + D, seed=2), array(F, D, seed=3), array(D, D, seed=4)]
    compared = compare(block, args)
    assert compared.complaints == []
    assert reasons(compared, "gated_mlp") == ["the product that gives the projections gives something else too"]
