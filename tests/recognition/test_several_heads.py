"""Losses that read the logits of several heads together, such as divergences; and gradients of soft labels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.nn import log_softmax, logsumexp, softmax
from jax.scipy.special import xlogy
from support.catalogue import array, registry
from support.checks import arrays, check
from support.compare import compare, optimized_like_a_user

from recognition.losses import picked

N, D, E, V = 7, 4, 5, 11
SIZES = N, V
LABELS = jnp.arange(N) * 3 % V
VALID = jnp.arange(N) % 3 != 1


def arguments(dtype=jnp.float32):
    """x [N, D], w [D, V], y [N, E], u [E, V]."""
    shapes = (N, D), (D, V), (N, E), (E, V)
    return tuple(array(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))


def divergence(s, t):
    """KL(t || s) of log-probabilities, for each row."""
    return (jnp.exp(t) * (t - s)).sum(-1)


HEADS, heads = registry()


@heads
def of_log_probabilities(x, w, y, u):
    return divergence(log_softmax(x @ w), log_softmax(y @ u)).mean()


@heads
def the_other_way(x, w, y, u):
    s, t = log_softmax(x @ w), log_softmax(y @ u)
    return jnp.where(softmax(x @ w) == 0, 0, jnp.exp(s) * (s - t)).sum(-1).mean()


@heads
def of_given_probabilities(x, w, y, u):
    """As optax has it."""
    t = softmax(y @ u)
    return (t * (jnp.where(t == 0, 0, jnp.log(t)) - log_softmax(x @ w))).sum(-1).mean()


@heads
def soft_labels_at_a_temperature(x, w, y, u):
    return -4 * (softmax(y @ u / 2) * log_softmax(x @ w / 2)).sum(-1).mean()


@heads
def soft_labels_contracted(x, w, y, u):
    return -jnp.einsum("nv,nv->n", softmax(y @ u), log_softmax(x @ w)).mean() - jnp.vdot(
        softmax(y @ u), log_softmax(x @ w)
    )


@heads
def hard_and_soft_labels(x, w, y, u):
    s, t = x @ w, y @ u
    return -picked(log_softmax(s), LABELS).mean() + 0.5 * divergence(log_softmax(s / 2), log_softmax(t / 2)).mean()


@heads
def only_some_rows(x, w, y, u):
    s, t = log_softmax(x @ w), log_softmax(y @ u)
    return jnp.where(VALID[:, None], jnp.exp(t) * (t - s), 0).sum() / VALID.sum() + (divergence(t, s) * VALID).mean()


@heads
def jensen_shannon(x, w, y, u):
    a, b = softmax(x @ w), softmax(y @ u)
    m = 0.5 * (a + b)
    return 0.5 * ((a * (jnp.log(a) - jnp.log(m))).sum(-1) + (b * (jnp.log(b) - jnp.log(m))).sum(-1)).mean()


@heads
def jensen_shannon_of_logarithms(x, w, y, u):
    a, b = log_softmax(x @ w), log_softmax(y @ u)
    m = jnp.logaddexp(a + jnp.log(0.3), b + jnp.log(0.7))
    return (0.3 * divergence(m, a) + 0.7 * divergence(m, b)).mean()


@heads
def by_special_functions(x, w, y, u):
    a, b = softmax(x @ w), softmax(y @ u)
    return (xlogy(a, a) - xlogy(a, (a + b) / 2) + xlogy(b, b) - xlogy(b, a)).sum(-1).mean()


@heads
def distances_of_probabilities(x, w, y, u):
    a, b = softmax(x @ w), softmax(y @ u)
    return (jnp.abs(a - b) + (jnp.sqrt(a) - jnp.sqrt(b)) ** 2 + (a - b) ** 2).sum(-1).mean()


@heads
def twice_through_one_head(x, w, y, u):
    """As R-Drop has it."""
    s, t = log_softmax(x @ w), log_softmax(jnp.tanh(x) @ w)
    return ((jnp.exp(t) - jnp.exp(s)) * (t - s)).sum(-1).mean() + y.sum() * u.sum()


@heads
def one_tower_with_two_heads(x, w, y, u):
    s, t = log_softmax(x @ w + jnp.cos(w[0])), log_softmax(x @ jnp.sin(w) + u[0])
    return divergence(s, t).mean() + y.sum()


@heads
def logits_that_are_sums_of_products(x, w, y, u):
    """A head with a low-rank addition."""
    return -picked(log_softmax(x @ w + 0.5 * (y @ u)), LABELS).mean()


@heads
def mixture_of_softmaxes(x, w, y, u):
    return -jnp.log(picked(0.3 * softmax(x @ w) + 0.7 * softmax(y @ u), LABELS)).mean()


@heads
def product_of_experts(x, w, y, u):
    return -picked(log_softmax(log_softmax(x @ w) + log_softmax(y @ u)), LABELS).mean()


@heads
def three_heads(x, w, y, u):
    a, b, c = log_softmax(x @ w), log_softmax(y @ u), log_softmax(jnp.cos(x) @ w)
    return (jnp.exp(a) * (a - 0.5 * b - 0.5 * c)).sum(-1).mean()


@heads
def logits_of_which_no_exponential_is_taken(x, w, y, u):
    s, t = x @ w, y @ u
    return ((s - t) ** 2).mean() - picked(log_softmax(s), LABELS).mean() + (softmax(s) * t).sum(-1).mean()


@heads
def weighted_by_the_other_s_confidence(x, w, y, u):
    s, t = log_softmax(x @ w), y @ u
    return (divergence(s, log_softmax(t)) * lax.stop_gradient(softmax(t)).max(-1)).mean() + logsumexp(t, -1).mean()


@heads
def other_layouts(x, w, y, u):
    s = log_softmax(jnp.einsum("dv,nd->vn", w, x), 0)
    return divergence(s.T, log_softmax(jnp.einsum("vd,nd->nv", u.T, y))).mean()


@heads
def shifted_rows(x, w, y, u):
    return divergence(log_softmax((x @ w)[1:]), log_softmax((y @ u)[:-1])).mean()


@heads
def a_vocabulary_that_is_padded(x, w, y, u):
    return divergence(log_softmax(x @ w), log_softmax((y @ jnp.concatenate([u, u], 1))[:, :V])).mean()


@heads
def in_a_checkpoint(x, w, y, u):
    return jax.checkpoint(HEADS["hard_and_soft_labels"])(jnp.tanh(x), w, jnp.tanh(y), u)


@heads
def in_a_loop(x, w, y, u):
    def body(total, rows):
        return total + HEADS["of_log_probabilities"](rows[0], w, rows[1], u), None

    return lax.scan(body, 0.0, (jnp.stack([x, x * 2]), jnp.stack([y, -y])))[0]


@heads
def mapped_over_rows(x, w, y, u):
    return jax.vmap(lambda a, b: divergence(log_softmax(a @ w), log_softmax(b @ u)))(x, y).mean()


@heads
def mapped_over_weights(x, w, y, u):
    pairs = (jnp.stack([z, z[::-1]]) for z in (x, w, y, u))
    return jax.vmap(HEADS["of_given_probabilities"])(*pairs).mean()


@pytest.mark.parametrize("name", HEADS)
def test_the_logits_of_all_heads_are_one_site(name):
    args = arguments()
    compared = compare(HEADS[name], args)
    assert compared.counts("cross_entropy") == 1, compared.reasons()
    assert compared.complaints == []
    report = check(jax.value_and_grad(HEADS[name], (0, 1, 2, 3)), args, op="cross_entropy", sizes=SIZES)
    assert report.near_misses == ()


G = 3


def grouped(dtype=jnp.float32):
    """x [N, D], w [D, G V], y [N, E], u [E, G V]: several distributions for each row."""
    shapes = (N, D), (D, G * V), (N, E), (E, G * V)
    return tuple(array(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))


def in_groups(x, w):
    return (x @ w).reshape(-1, G, V)


def mixed_with_uniform(x, w):
    return 0.99 * softmax(in_groups(x, w)) + 0.01 / V


def balanced(x, w, y, u):
    """As world models of reinforcement learning have it: each side is drawn to the other one, which stands still."""
    p, q = mixed_with_uniform(x, w), mixed_with_uniform(y, u)
    still_p, still_q = lax.stop_gradient(p), lax.stop_gradient(q)
    of = (still_p * (jnp.log(still_p) - jnp.log(q))).sum((-1, -2)), (p * (jnp.log(p) - jnp.log(still_q))).sum((-1, -2))
    return 0.5 * jnp.maximum(1.0, of[0]).mean() + 0.1 * jnp.maximum(1.0, of[1]).mean()


def of_matrices(w):
    return w.reshape(-1, G, V)


GROUPS = {
    "columns": lambda x, w, y, u: divergence(log_softmax(in_groups(x, w)), log_softmax(in_groups(y, u))).mean(),
    "balanced": balanced,
    "an axis of the weights": lambda x, w, y, u: divergence(
        log_softmax(jnp.einsum("nd,dgv->ngv", x, of_matrices(w))),
        log_softmax(jnp.einsum("ne,egv->vgn", y, of_matrices(u)).T),
    ).sum(),
    "one head has rows of each group": lambda x, w, y, u: divergence(
        log_softmax(in_groups(x, w)),
        log_softmax(jnp.einsum("nge,egv->ngv", y[:, None] * jnp.arange(1.0, G + 1)[:, None], of_matrices(u))),
    ).sum(),
    "the first head has rows of each group": lambda x, w, y, u: divergence(
        log_softmax(jnp.einsum("ngd,dgv->ngv", x[:, None] * jnp.arange(1.0, G + 1)[:, None], of_matrices(w))),
        log_softmax(in_groups(y, u)),
    ).sum(),
    "mapped over heads": lambda x, w, y, u: jax.vmap(
        lambda w, u: divergence(log_softmax(x @ w), log_softmax(y @ u)), (1, 1)
    )(of_matrices(w), of_matrices(u)).mean(),
    "in a loop": lambda x, w, y, u: lax.scan(
        lambda total, rows: (total + balanced(rows[0], w, rows[1], u), None),
        0.0,
        (jnp.stack([x, x * 2]), jnp.stack([y, -y])),
    )[0],
}


@pytest.mark.parametrize("name", GROUPS)
def test_heads_that_give_several_distributions_for_each_row(name):
    compared = compare(GROUPS[name], grouped())
    assert compared.counts("cross_entropy") == 1, compared.reasons()
    assert compared.complaints == []
    report = check(jax.value_and_grad(GROUPS[name], (0, 1, 2, 3)), grouped(), op="cross_entropy", sizes=(N, V))
    assert report.near_misses == ()


GROUPS_REFUSED = {
    "groups in another order": lambda x, w, y, u: divergence(
        log_softmax(in_groups(x, w)), log_softmax(jnp.flip(in_groups(y, u), 1))
    ),
    "groups as the words of the other": lambda x, w, y, u: divergence(
        log_softmax(in_groups(x, w)[..., :G]), log_softmax(in_groups(y, u)[..., :G].mT)
    ),
    "one distribution for all groups of the other": lambda x, w, y, u: divergence(
        log_softmax(in_groups(x, w)), log_softmax(y @ u[:, :V])[:, None]
    ),
    "one normaliser for all groups": lambda x, w, y, u: divergence(
        in_groups(x, w) - logsumexp(in_groups(x, w), (1, 2), keepdims=True), log_softmax(in_groups(y, u))
    ),
}


@pytest.mark.parametrize("name", GROUPS_REFUSED)
def test_groups_that_are_other_groups(name):
    def total(*args):
        return jnp.sin(GROUPS_REFUSED[name](*args)).sum()

    assert compare(total, grouped()).complaints == []
    assert compare(jax.value_and_grad(total, (0, 1, 2, 3)), grouped(), gradients=False).complaints == []


@pytest.mark.parametrize("of", [(0, 1), (2, 3)], ids=["the one", "the other"])
@pytest.mark.parametrize("name", ["of_log_probabilities", "jensen_shannon", "hard_and_soft_labels"])
def test_of_one_head_alone_no_logits_are_left_either(name, of):
    def loss(*args):
        return HEADS[name](*(a if i in of else lax.stop_gradient(a) for i, a in enumerate(args)))

    for function, numbers in ((HEADS[name], of), (loss, (0, 1, 2, 3))):
        report = check(jax.value_and_grad(function, numbers), arguments(), op="cross_entropy", sizes=SIZES)
        assert report.near_misses == ()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_heads_in_16_bits(dtype):
    def loss(x, w, y, u):
        s, t = (log_softmax(z.astype(jnp.float32)) for z in (x @ w, y @ u))
        return divergence(s, t).mean()

    step = jax.value_and_grad(loss, (0, 1, 2, 3))
    check(step, arguments(dtype), op="cross_entropy", dtype=jnp.dtype(dtype).name)
    check(step, (*arguments()[:2], *arguments(dtype)[2:]), op="cross_entropy", dtype=jnp.dtype(dtype).name)


def test_infinite_logits_of_either_head():
    """Words that one head or both leave out."""

    def loss(x, w, y, u):
        s = log_softmax(jnp.where(jnp.arange(V) == 3, -jnp.inf, x @ w))
        t = log_softmax(jnp.where((jnp.arange(V) == 3) | (jnp.arange(N)[:, None] == 2), -jnp.inf, y @ u))
        return jnp.where(jnp.exp(t) == 0, 0, jnp.exp(t) * (t - s)).sum(-1)

    assert compare(loss, arguments()).complaints == []


def test_heads_of_which_only_picked_elements_are_compared_are_sites_of_their_own():
    """Each needs a number of the other's for its gradient, and gives its statistics before."""

    def loss(x, w, y, u):
        own, other = picked(log_softmax(x @ w), LABELS), picked(log_softmax(y @ u), LABELS)
        return -jax.nn.log_sigmoid(own - other).mean()

    step = jax.value_and_grad(loss, (0, 1, 2, 3))
    report = check(step, arguments(), ("forward+backward",) * 2, op="cross_entropy", sizes=SIZES)
    assert report.near_misses == ()


def test_the_logits_of_one_head_are_returned_too():
    def loss(x, w, y, u):
        s, t = x @ w, y @ u
        return divergence(log_softmax(s), log_softmax(t)).mean(), t

    step = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)
    compared = compare(step, arguments(), gradients=False)
    assert compared.counts("cross_entropy") == 0
    assert compared.complaints == []
    assert all("also returned: float32[7,11] of dot_general" in reason for reason in compared.reasons()[-2:])


REFUSED, refused = registry()


@refused
def another_part_of_the_vocabulary(x, w, y, u):
    z = y @ jnp.concatenate([u, u], 1)
    return divergence(log_softmax(x @ w), log_softmax(jnp.concatenate([z[:, 3:V], z[:, :3]], 1)))


@refused
def the_vocabulary_backwards(x, w, y, u):
    return divergence(log_softmax(x @ w), log_softmax(lax.rev(lax.sort(y @ u), (1,))))


@refused
def one_row_for_all(x, w, y, u):
    return divergence(log_softmax(x @ w), log_softmax(y[2] @ u))


@refused
def other_words_of_the_other_head(x, w, y, u):
    """Square logits, read once as rows and once as columns."""
    square = y @ u[:, :N]
    return divergence(log_softmax(x @ w[:, :N]), log_softmax(square.T)) + logsumexp(square, -1)


@refused
def another_weight_for_the_gradient(x, w, y, u):
    return divergence(log_softmax(x @ w), log_softmax(y @ u)).sum() + (softmax(x @ w) * softmax(y @ u)) @ jnp.sin(u).T


@refused
def the_greatest_of_one_head(x, w, y, u):
    s, t = log_softmax(x @ w), log_softmax(y @ u)
    best, places = lax.top_k(t, 3)
    return (jnp.exp(best) * (best - jnp.take_along_axis(s, places, -1))).sum(-1) + divergence(s, t)


@refused
def stacked_log_probabilities(x, w, y, u):
    both = jnp.stack([log_softmax(x @ w), log_softmax(y @ u)])
    return divergence(logsumexp(both, 0), both[0])


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_cannot_be_read_tile_by_tile_together(name):
    """Whatever is found of them is right, and what is not has its reason."""

    def total(*args):
        return sum(jnp.sin(value).sum() for value in jax.tree.leaves(REFUSED[name](*args)))

    assert compare(REFUSED[name], arguments()).complaints == []
    compared = compare(jax.value_and_grad(total, (0, 1, 2, 3)), arguments(), gradients=False)
    assert compared.complaints == []
    assert compared.reasons()


SOFT, soft = registry()


@soft
def as_they_are(x, w, q):
    return -(q * log_softmax(x @ w)).sum(-1).mean()


@soft
def relative_entropy(x, w, q):
    return (q * (jnp.log(q) - log_softmax(x @ w))).sum(-1).mean()


@soft
def given_as_logits(x, w, q):
    return -(softmax(q) * log_softmax(x @ w)).sum(-1).mean()


@soft
def given_as_logarithms(x, w, q):
    return divergence(log_softmax(x @ w), jnp.log(q)).mean()


@soft
def smoothed(x, w, q):
    return -((0.9 * q + 0.1 / V) * log_softmax(x @ w)).sum(-1).mean()


@soft
def sharpened(x, w, q):
    q = q**2
    return -(q / q.sum(-1, keepdims=True) * log_softmax(x @ w)).sum(-1).mean()


@soft
def a_bias_for_each_element(x, w, q):
    return -picked(log_softmax(x @ w + q), LABELS).mean()


def soft_arguments(dtype=jnp.float32):
    return (*arguments(dtype)[:2], softmax(array(N, V, seed=8)).astype(dtype))


@pytest.mark.parametrize("name", SOFT)
def test_the_gradient_of_soft_labels_is_written_by_the_pass_that_forms_the_logits_gradient(name):
    step = jax.value_and_grad(SOFT[name], (0, 1, 2))
    report = check(step, soft_arguments(), op="cross_entropy")
    assert report.near_misses == ()
    optimized = optimized_like_a_user(step)
    left = arrays(jax.make_jaxpr(lambda *args: optimized(*args))(*soft_arguments()))
    assert not [aval for primitive, aval in left if primitive == "dot_general" and aval.shape == (N, V)]


def projected(q):
    """Moves probabilities of returns onto two neighbouring atoms each, as distributional learning of values does."""
    rewards = jnp.linspace(-0.4, 0.7, N)[:, None]
    place = jnp.clip(rewards * 3 + 0.9 * jnp.arange(V), 0, V - 1.5)
    low = jnp.floor(place).astype(jnp.int32)
    rows = jnp.arange(N)[:, None]
    return jnp.zeros_like(q).at[rows, low].add(q * (low + 1 - place)).at[rows, low + 1].add(q * (place - low))


TARGETS = {
    "distributions projected onto atoms": projected,
    "counts of words": lambda q: jnp.zeros_like(q).at[jnp.arange(N)[:, None], WORDS].add(1 / WORDS.shape[1]),
    "numbers added to others": lambda q: q.at[jnp.arange(N), LABELS].add(0.25),
    "numbers that are replaced": lambda q: q.at[jnp.arange(N), LABELS].set(0.25),
    "one number for each row": lambda q: jnp.zeros_like(q).at[jnp.arange(N), LABELS].add(q[:, 0]),
}
WORDS = jnp.stack([LABELS, (LABELS + 5) % V, (3 * LABELS + 1) % V], -1)


@pytest.mark.parametrize("name", TARGETS)
def test_labels_that_a_program_puts_together_by_index(name):
    """What is scattered into them is no gradient of the logits."""

    def loss(x, w, q):
        return -(TARGETS[name](q) * log_softmax(x @ w)).sum(-1).mean()

    given = soft_arguments()
    check(loss, given, directions=("forward",), op="cross_entropy")
    report = check(jax.value_and_grad(loss, (0, 1)), given, op="cross_entropy")
    assert report.near_misses == ()
    assert compare(jax.value_and_grad(loss, (0, 1, 2)), given, gradients=False).complaints == []


def test_the_gradient_of_soft_labels_in_16_bits_and_of_some_rows():
    def loss(x, w, q):
        rows = (q * log_softmax((x @ w).astype(jnp.float32))).sum(-1)
        return -jnp.where(VALID, rows, 0).sum() / VALID.sum()

    check(jax.value_and_grad(loss, (0, 1, 2)), soft_arguments(jnp.bfloat16), op="cross_entropy", dtype="bfloat16")


@pytest.mark.parametrize("what", ["of the labels alone", "the logits", "log-probabilities of the forward"])
def test_an_array_of_the_logits_size_that_saves_none(what):
    def loss(x, w, q):
        z = x @ w
        return -(q * log_softmax(z)).sum(-1).mean(), z

    program = {
        "of the labels alone": lambda x, w, q: jax.grad(lambda q: loss(x, w, q)[0])(q),
        "the logits": jax.value_and_grad(loss, (0, 1), has_aux=True),
        "log-probabilities of the forward": lambda x, w, q: (loss(x, w, q)[0], log_softmax(x @ w)),
    }[what]
    compared = compare(program, soft_arguments(), gradients=False)
    assert compared.counts("cross_entropy") == 0
    assert compared.complaints == []
    assert any("also returned" in reason for reason in compared.reasons())
