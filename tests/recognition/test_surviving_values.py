"""Which values a program still computes when some are computed elsewhere: the quick way gives what dead-code
elimination of the rewritten program gives."""

import gc
import random
import weakref

import jax
import jax.experimental.pallas
import jax.numpy as jnp
import pytest

import autopallas
from autopallas.graph import Graph, edit, flatten
from autopallas.graph.edit import surviving
from autopallas.graph.needs import Needs, Unknown

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


def of_carried_values(x, w):
    """One carried value feeds itself alone, one feeds another, and some results are read by nobody."""

    def step(carried, row):
        a, b, idle, _ = carried
        a = jnp.tanh(a * row)
        return (a, b + jnp.sin(a), jnp.cos(idle), row), (a * b, jnp.exp(idle), row)

    first = x[0], w[0], x[1], w[1]
    (a, b, _, last), (products, _, rows) = jax.lax.scan(step, first, jnp.exp(x) @ w)
    return (a * last).sum() + (products + jnp.sqrt(rows)).sum() + 0 * b.sum()


def of_loops_in_loops(x, w):
    def step(carried, row):
        inner = jax.lax.scan(lambda c, i: (jnp.sin(c) * i, (c, jnp.exp(c))), carried, w)
        branch = jax.lax.cond(row.sum() > 0, lambda a: (a @ w, jnp.tanh(a)), lambda a: (a, a * 2), carried)
        kept = jax.checkpoint(lambda a: (jnp.sin(a) @ w, jnp.cos(a)))(branch[0])
        return kept[0] + inner[0], (inner[1][0].sum(0), doubled(kept[1]), branch[1])

    last, (a, _, _) = jax.lax.scan(step, x[0], x @ w)
    return last.sum() + a.sum()


def of_conditions(x, w):
    def step(carried):
        count, a, b, idle = carried
        return count + 1, a @ w, jnp.sin(b) + a, jnp.cos(idle)

    _, a, b, _ = jax.lax.while_loop(lambda c: (c[0] < 3) & (c[1].sum() < 9), step, (0, x[0], w[0], jnp.exp(x[1])))
    return jnp.tanh(a).sum() + 0 * b.sum()


def of_shifted_rows(x, w):
    """A scan stacks what it reads, as it is."""
    rows = jax.lax.scan(lambda c, row: (jnp.tanh(c + row), (row, c)), x[0], jnp.sin(x) @ w)[1]
    return (rows[0] * rows[1]).sum() + pair(rows[0], w)[1].sum()


LOOPS = [of_carried_values, of_loops_in_loops, of_conditions, of_shifted_rows]


@pytest.mark.parametrize("function", [with_rules, with_several_results, layers, *LOOPS], ids=lambda f: f.__name__)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_what_survives_is_what_dead_code_elimination_leaves(function, backward, monkeypatch):
    if backward and function is of_conditions:
        pytest.skip("a while_loop has no gradient")
    program = jax.make_jaxpr(jax.grad(function, (0, 1)) if backward else function)(X, X)
    quick, slow = Graph(flatten(program)), Graph(flatten(program))
    assert quick.has_plain_bodies == (function not in LOOPS)
    if function in LOOPS:
        assert edit._needs_of(quick) is not None
    slow.has_plain_bodies = False
    monkeypatch.setitem(edit._NEEDS, slow, None)  # rebuilds the program instead
    computed = {number for node in quick.nodes for number in node.outputs}
    chance = random.Random(0)
    for count in (0, 1, 2, 5, 20):
        for _ in range(10):
            given = frozenset(chance.sample(range(len(quick.avals)), min(count, len(quick.avals))))
            whole = (surviving(slow, given) & computed) - given
            assert (surviving(quick, given) & computed) - given == whole, given
            reads = {number: chance.sample(range(number), min(number, 3)) for number in given}
            if function in LOOPS:
                assert surviving(quick, given, reads) == surviving(slow, given, reads), (given, reads)
            least = chance.randrange(len(quick.avals))
            late = set(range(least, len(quick.avals))) & computed
            assert (surviving(quick, given, least=least) & late) - given == whole & late, (given, least)


def test_what_a_loop_computes_is_known_without_rebuilding_it():
    program = jax.make_jaxpr(of_loops_in_loops)(X, X)
    assert edit._needs_of(Graph(flatten(program))) is not None


def test_what_is_known_of_a_loop_is_forgotten_with_its_program():
    graph = Graph(flatten(jax.make_jaxpr(of_loops_in_loops)(X, X)))
    assert surviving(graph)
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is None


def test_what_only_jax_knows_is_left_to_it():
    """What results of a kernel need, say."""

    def function(x):
        kernel = jax.experimental.pallas.pallas_call(lambda r, o: None, jax.ShapeDtypeStruct((8, 8), x.dtype))
        return jax.lax.scan(lambda c, row: (c + row, None), x[0], kernel(x))[0]

    graph = Graph(flatten(jax.make_jaxpr(function)(X)))
    with pytest.raises(Unknown):
        Needs(graph)
    assert surviving(graph)


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
