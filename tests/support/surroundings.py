"""Spellings that differ in what stands around or between: control flow, custom rules, names, barriers, copies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.nn import softmax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from support.catalogue import array, bhtd, bthd, spelling


def attend(q, k, v):
    return softmax(q @ k.mT * 0.4) @ v


def same_length(sizes, dtype):
    return bhtd(sizes._replace(keys=sizes.queries), dtype)


# --- In between ------------------------------------------------------------------------------------------------------


@spelling()
def named_for_a_checkpoint_policy(sizes, q, k, v):
    p = checkpoint_name(softmax(checkpoint_name(q @ k.mT, "scores")), "probabilities")
    return checkpoint_name(p @ v, "out")


@spelling()
def named_within_a_checkpoint(sizes, q, k, v):
    policy = jax.checkpoint_policies.save_only_these_names("out")
    body = lambda q, k, v: checkpoint_name(attend(q, k, v), "out") * 2  # noqa: E731
    return jax.checkpoint(body, policy=policy)(q, k, v)


@spelling()
def barrier_between(sizes, q, k, v):
    scores, v = lax.optimization_barrier((q @ k.mT, v))
    return lax.optimization_barrier(softmax(scores)) @ v


@spelling()
def sharding_constraints_between(sizes, q, k, v):
    whole = NamedSharding(Mesh(jax.devices()[:1], ("batch",)), PartitionSpec("batch"))
    scores = lax.with_sharding_constraint(q @ k.mT, whole)
    return lax.with_sharding_constraint(softmax(scores), whole) @ v


@spelling()
def copies_between(sizes, q, k, v):
    return jnp.array(softmax(jnp.copy(q @ k.mT)), copy=True) @ v


@spelling()
def cast_up_and_down_between(sizes, q, k, v):
    scores = (q @ k.mT).astype(jnp.float32)
    return (softmax(scores).astype(q.dtype).astype(jnp.float32) @ v.astype(jnp.float32)).astype(q.dtype)


@spelling()
def slices_that_keep_everything(sizes, q, k, v):
    p = softmax((q @ k.mT)[..., : sizes.keys])
    return (p[:, :, : sizes.queries] @ v)[:, : sizes.heads]


@spelling()
def some_of_the_queries_only(sizes, q, k, v):
    return softmax((q @ k.mT)[:, :, 1:]) @ v


# --- Calls -----------------------------------------------------------------------------------------------------------


@spelling(same_length, sites=2)
def in_a_jit_called_twice(sizes, q, k, v):
    inner = jax.jit(attend)
    return inner(inner(q, k, v), k, v)


@spelling()
def softmax_in_a_jit_of_its_own(sizes, q, k, v):
    return jax.jit(softmax)(q @ k.mT) @ v


@spelling()
def in_a_checkpoint(sizes, q, k, v):
    return jax.checkpoint(attend)(q, k, v) * 2


@spelling(gradients=False)
def in_a_custom_vjp(sizes, q, k, v):
    function = jax.custom_vjp(attend)
    function.defvjp(lambda q, k, v: (attend(q, k, v), v), lambda v, g: (None, None, v))
    return function(q, k, v)


@spelling(gradients=False)
def in_a_custom_jvp(sizes, q, k, v):
    function = jax.custom_jvp(attend)
    function.defjvp(lambda primals, tangents: (attend(*primals), tangents[0]))
    return function(q, k, v)


# --- Control flow ----------------------------------------------------------------------------------------------------


@spelling(
    lambda sizes, dtype: [
        array(sizes.batch, sizes.queries, sizes.size, dtype=dtype),
        array(3, 3, sizes.size, sizes.size, dtype=dtype, scale=0.5),
    ]
)
def in_a_scan_over_layers(sizes, x, weights):
    def layer(x, w):
        return x + attend(x @ w[0], x @ w[1], x @ w[2]), None

    return lax.scan(layer, x, weights)[0]


@spelling(inputs=lambda sizes, dtype: [array(3, sizes.queries, sizes.size, dtype=dtype)])
def of_each_sequence_to_each(sizes, xs):
    """A loop inside a loop, both over the same array: at two different slices of it."""

    def attend_to_all(x):
        return lax.scan(lambda total, other: (total + softmax(x @ other.T) @ other, None), jnp.zeros_like(x), xs)[0]

    return lax.map(attend_to_all, xs)


@spelling(
    lambda sizes, dtype: [
        array(sizes.batch, sizes.queries, sizes.size, dtype=dtype),
        array(3, 3, sizes.size, sizes.size, dtype=dtype, scale=0.5),
    ]
)
def in_a_checkpointed_scan_with_a_constant_mask(sizes, x, weights):
    mask = jnp.tril(jnp.ones((sizes.queries, sizes.queries), bool))

    @jax.checkpoint
    def layer(x, w):
        scores = (x @ w[0]) @ (x @ w[1]).mT
        return x + softmax(jnp.where(mask, scores, -jnp.inf)) @ (x @ w[2]), scores.shape[-1]

    return lax.scan(layer, x, weights)[0]


@spelling(same_length)
def in_a_loop_with_a_fixed_count(sizes, q, k, v):
    return lax.fori_loop(0, 2, lambda _, x: attend(x, k, v), q)


@spelling(same_length, gradients=False)
def in_a_while_loop(sizes, q, k, v):
    more = lambda carry: (carry[0] < 2) & (jnp.sum(carry[1]) < 1e6)  # noqa: E731
    return lax.while_loop(more, lambda carry: (carry[0] + 1, attend(carry[1], k, v)), (0, q))[1]


@spelling(extra=lambda sizes, dtype: [jnp.bool_(True)])
def in_a_branch(sizes, q, k, v, wanted):
    return lax.cond(wanted, attend, lambda q, k, v: q * jnp.sum(v), q, k, v)


@spelling(extra=lambda sizes, dtype: [jnp.int32(2)], sites=2)
def in_two_of_three_branches(sizes, q, k, v, which):
    causal = lambda q, k, v: attend(q[:, :, ::-1], k, v)  # noqa: E731
    return lax.switch(which, [attend, lambda q, k, v: q, causal], q, k, v)


@spelling()
def one_batch_element_after_the_other(sizes, q, k, v):
    return lax.map(lambda x: attend(*x), (q, k, v))


@spelling(bthd)
def blocks_of_queries_one_after_the_other(sizes, q, k, v):
    row = jnp.arange(sizes.queries) + sizes.ahead

    def one(block):
        position, query = block
        scores = jnp.einsum("bhd,bshd->bhs", query, k)
        scores = jnp.where(jnp.arange(sizes.keys) <= position, scores, -1e9)
        return jnp.einsum("bhs,bshd->bhd", softmax(scores), v)

    return lax.map(one, (row, jnp.moveaxis(q, 1, 0)))


@spelling(same_length, sites=2)
def two_in_a_row(sizes, q, k, v):
    return attend(attend(q, k, v), k, v)


@spelling(sites=2)
def two_that_share_their_keys(sizes, q, k, v):
    return attend(q, k, v) + attend(q * 2, k, v)


@spelling(
    lambda sizes, dtype: [
        array(sizes.batch, sizes.queries, sizes.heads * sizes.size, dtype=dtype),
        array(4, sizes.heads * sizes.size, sizes.heads * sizes.size, dtype=dtype, scale=0.3),
    ]
)
def with_its_projections(sizes, x, weights):
    split = lambda y: y.reshape(*y.shape[:2], sizes.heads, sizes.size)  # noqa: E731
    q, k, v = (split(x @ weights[i]) for i in range(3))
    out = jnp.einsum("bhts,bshd->bthd", softmax(jnp.einsum("bthd,bshd->bhts", q, k) / sizes.size**0.5), v)
    return out.reshape(x.shape) @ weights[3] + x
