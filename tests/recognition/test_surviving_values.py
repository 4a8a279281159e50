"""Which values a program still computes when some are computed elsewhere: the quick way gives what dead-code
elimination of the rewritten program gives."""

import random

import jax
import jax.numpy as jnp
import pytest

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.graph.edit import surviving

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


@jax.custom_vjp
def pair(x, w):
    return jnp.tanh(x @ w), jnp.sin(x)


pair.defvjp(lambda x, w: (pair(x, w), (x, w)), lambda r, g: (g[0] @ r[1].T, r[0].T @ g[0]))


@jax.custom_jvp
def doubled(x):
    return jnp.tanh(x) * 2


doubled.defjvp(lambda p, t: (doubled(p[0]), t[0] * 3))


def with_rules(x, w):
    a, b = pair(x, w)
    c = doubled(a) + jax.nn.relu(b)
    d = jax.checkpoint(lambda y: doubled(jnp.sin(y @ w)))(c)
    return (d * c).sum()


def with_several_results(x, w):
    values, positions = jax.lax.top_k(jax.nn.softmax(x @ w), 3)
    jax.debug.callback(lambda x: None, jnp.exp(values))
    return values.sum() + w[positions].sum()


def layers(x, w):
    layer = jax.checkpoint(lambda x: x + jax.nn.softmax(x @ w) @ jnp.cos(x))
    for _ in range(3):
        x = layer(x)
    return (x - x.mean(-1, keepdims=True)).var()


@pytest.mark.parametrize("function", [with_rules, with_several_results, layers], ids=lambda f: f.__name__)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_what_survives_is_what_dead_code_elimination_leaves(function, backward):
    program = jax.make_jaxpr(jax.grad(function, (0, 1)) if backward else function)(X, X)
    quick, slow = Graph(flatten(program)), Graph(flatten(program))
    assert quick.has_plain_bodies
    slow.has_plain_bodies = False  # rebuilds the program instead
    computed = {number for node in quick.nodes for number in node.outputs}
    chance = random.Random(0)
    for count in (0, 1, 2, 5, 20):
        for _ in range(10):
            given = frozenset(chance.sample(range(len(quick.avals)), min(count, len(quick.avals))))
            whole = (surviving(slow, given) & computed) - given
            assert surviving(quick, given) & computed == whole, given
            least = chance.randrange(len(quick.avals))
            late = set(range(least, len(quick.avals))) & computed
            assert surviving(quick, given, least=least) & late == whole & late, (given, least)


def test_loops_and_branches_are_not_plain_bodies():
    def function(x, w):
        return jax.lax.scan(lambda c, row: (c + row, None), x[0], x @ w)[0]

    assert not Graph(flatten(jax.make_jaxpr(function)(X, X))).has_plain_bodies


def test_a_loop_that_ends_on_a_condition_computes_nothing_for_nobody():
    """Dead-code elimination of JAX leaves equations in its body that nothing reads, such as those inside of a site."""

    def layer(x, w):
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return (jax.nn.silu(x @ w) * (x @ jnp.sin(w))) @ jnp.cos(w)

    def function(x, w):
        return jax.lax.while_loop(lambda c: c[0].sum() < 1, lambda c: (layer(*c), c[1]), (x, w))[0]

    report = autopallas.explain(function, jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert {"rms_norm", "gated_mlp"} <= {site.op for site in report.sites}
    assert not report.near_misses
