"""Loops over experts are found in the forms in which people run them; loops that only look like them are exact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.compare import compare
from support.mixtures import E, P, T, X, at, biased, combine, expert, route
from support.mixtures_written import KINDS, collected, sorted_rows

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.patterns import find

OP = "grouped_matmul"
LOOPS = [*KINDS["loops"], KINDS["intervals"][2], KINDS["intervals"][3]]
STACKED = jax.tree.map(lambda a: jnp.stack([a, 1.1 * a, 0.9 * a]), P)
MANY = jnp.stack([X, 2 * X, X[::-1]])


def loss(f):
    def scalar(p, x):
        y = f(p, x)
        return jnp.sum(jnp.sin(y + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)))

    return scalar


def norm(x):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def train(f):
    return jax.value_and_grad(loss(f), (0, 1)), (P, X)


def stacked(f):
    return jax.vmap(jax.value_and_grad(loss(f), (0, 1))), (STACKED, MANY)


def layers(f, wrap=lambda f: f):
    layer = wrap(lambda x, q: (x + f(q, norm(x)), None))
    return jax.value_and_grad(loss(lambda ps, x: lax.scan(layer, x, ps)[0]), (0, 1)), (STACKED, X)


def layers_again(f):
    return layers(f, jax.checkpoint)


def mapped(f):
    return jax.value_and_grad(lambda p, xs: jnp.mean(lax.map(lambda x: loss(f)(p, x), xs)), (0, 1)), (P, MANY)


def accumulated(f):
    def step(p, xs):
        def one(total, x):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss(f))(p, x)), None

        return lax.scan(one, jax.tree.map(jnp.zeros_like, (jnp.float32(0), p)), xs)[0]

    return step, (P, MANY)


FORMS = [train, stacked, layers, layers_again, mapped, accumulated]


def sites(function, args):
    """(directions of the mixtures, reasons of near misses) in a program."""
    matches, misses = find(Graph(flatten(jax.make_jaxpr(function)(*args))), None, True)
    return [m.direction for m in matches if m.op == OP], [m.reason for m in misses if m.op == OP]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("function", LOOPS, ids=lambda f: f.__name__)
def test_each_is_found_with_its_backward_in_every_form(function, form):
    directions, reasons = sites(*form(function))
    if form is mapped and function.__name__ in ("fori_loop_that_compares", "map_by_number"):
        # The repeated bias is taken out of the loop over examples: the site would have to give the gradient of that.
        assert reasons
        return
    wanted = {"forward+backward"}
    if form is layers_again and function.__name__ in ("fori_loop", "scan_by_number"):
        wanted.add("forward")  # a checkpoint's loop has no result of its own that is not the forward's
    assert len(directions) == 1, reasons
    assert set(directions) <= wanted


@pytest.mark.parametrize(
    "case",
    [(0, layers), (1, train), (1, stacked), (3, mapped), (3, stacked), (4, accumulated), (5, layers_again),
     (6, stacked), (7, train), (7, mapped)],
    ids=lambda case: f"{LOOPS[case[0]].__name__}-{case[1].__name__}",
)  # fmt: skip
def test_gradients_are_exact(case):
    number, form = case
    compared = compare(*form(LOOPS[number]), gradients=False)
    assert compared.complaints == []
    assert compared.counts(OP) == 1, compared.reasons()


# ---------------------------------------------------------------------- variations


def where_in_a_loop(p, x):
    best = jnp.argmax(x @ p["router"], -1)[:, None]
    return lax.fori_loop(0, E, lambda e, out: jnp.where(best == e, expert(at(p, e), x), out), jnp.zeros_like(x))


def where_in_a_scan(p, x):
    best = jnp.argmax(x @ p["router"], -1)[:, None]

    def step(out, q):
        e, q = q
        return jnp.where(e == best, biased(q, x), out), None

    return lax.scan(step, jnp.zeros_like(x), (jnp.arange(E), at(p, slice(None))))[0]


def segments(start=0, next_start=lambda start, count: start + count, inside=None, y=None):
    """Rows by intervals in a scan that carries where they begin."""

    def function(p, x):
        rows, back, counts, weights = sorted_rows(p, x)
        position = jnp.arange(rows.shape[0])

        def step(carry, q):
            start, out = carry
            q, count = q
            if inside is None:
                mine = ((position >= start) & (position < start + count))[:, None]
            else:
                mine = inside(position, start, count)
            value = expert(q, rows)
            value = value if y is None else y(value, mine)
            return (next_start(start, count), jnp.where(mine, value, out)), None

        given = (jnp.int32(start), jnp.zeros_like(rows)), (at(p, slice(None)), counts)
        return collected(lax.scan(step, *given)[0][1], back, weights)

    return function


def flipped(position, start, count):
    return ((start + count > position) & (start <= position))[:, None]


@pytest.mark.parametrize(
    "function", [where_in_a_loop, where_in_a_scan, segments(), segments(inside=flipped)],
    ids=["loop", "scan", "segments", "flipped"],
)  # fmt: skip
def test_selections_of_which_one_holds_are_sums(function):
    compared = compare(function, (P, X))
    assert compared.complaints == []
    assert compared.counts(OP) == 1, compared.reasons()


# ---------------------------------------------------------------------- look-alikes


def where_overlapping(p, x):
    """A token has two experts, of which the last one counts."""
    chosen = route(p, x)[1]

    def step(e, out):
        return jnp.where(jnp.any(chosen == e, -1, keepdims=True), expert(at(p, e), x), out)

    return lax.fori_loop(0, E, step, jnp.zeros_like(x))


def where_zero_is_written(p, x):
    """Each expert writes everywhere, mostly zeros: the last one counts."""
    best = jnp.argmax(x @ p["router"], -1)[:, None]

    def step(e, out):
        return jnp.where(x > -9, jnp.where(best == e, expert(at(p, e), x), 0), out)

    return lax.fori_loop(0, E, step, jnp.zeros_like(x))


def where_the_number_moves(p, x):
    best = jnp.argmax(x @ p["router"], -1)[:, None]

    def step(carry, q):
        best, out = carry
        e, q = q
        return (best + (e % 2), jnp.where(best == e, expert(q, x), out)), None

    return lax.scan(step, (best, jnp.zeros_like(x)), (jnp.arange(E), at(p, slice(None))))[0][1]


def where_numbers_repeat(p, x):
    best = jnp.argmax(x @ p["router"], -1)[:, None]

    def step(out, q):
        e, q = q
        return jnp.where(best == e, expert(q, x), out), None

    return lax.scan(step, jnp.zeros_like(x), (jnp.asarray([0, 1, 1, 0]), at(p, slice(None))))[0]


def where_it_is_read_too(p, x):
    best = jnp.argmax(x @ p["router"], -1)[:, None]

    def step(out, q):
        e, q = q
        return jnp.where(best == e, expert(q, x + 0.1 * out), out), None

    return lax.scan(step, jnp.zeros_like(x), (jnp.arange(E), at(p, slice(None))))[0]


def across(position, start, count):
    """Rows that are not before the start, columns that are before the end."""
    return (position[:, None] >= start) & (jnp.arange(8)[None] < start + count)


def crossed(p, x):
    """The same positions along two axes: what two experts have, overlaps."""
    rows, _, counts, _ = sorted_rows(p, x)
    rows = rows[:8]
    position = jnp.arange(8)

    def step(carry, q):
        start, out = carry
        q, count = q
        mine = (position[:, None] >= start) & (position[None] < start + count)
        return (start + count, jnp.where(mine, expert(q, rows), out)), None

    return lax.scan(step, (jnp.int32(0), jnp.zeros_like(rows)), (at(p, slice(None)), counts))[0][1]


def sums_may_fall(p, x):
    rows, back, counts, weights = sorted_rows(p, x)
    position = jnp.arange(rows.shape[0])

    def step(carry, q):
        start, out = carry
        q, count = q
        mine = (position >= start) & (position < start + count)
        return (start + count, jnp.where(mine[:, None], expert(q, rows), out)), None

    begin = jnp.int32(0), jnp.zeros_like(rows)
    return collected(lax.scan(step, begin, (at(p, slice(None)), counts - 4))[0][1], back, weights)


def begun_elsewhere(p, x):
    """What is selected in the end is in the place of something."""
    best = jnp.argmax(x @ p["router"], -1)[:, None]
    return lax.fori_loop(0, E, lambda e, out: jnp.where(best == e + 1, expert(at(p, e), x), out), x)


ALIKE = [
    where_overlapping, where_zero_is_written, where_the_number_moves, where_numbers_repeat, where_it_is_read_too,
    crossed, sums_may_fall, begun_elsewhere, segments(2), segments(next_start=lambda start, count: start + count - 1),
    segments(next_start=lambda start, count: start + 2 * count), segments(inside=across),
    segments(inside=lambda position, start, count: (position >= start)[:, None]),
    segments(inside=lambda position, start, count: (position < start + count)[:, None]),
    segments(inside=lambda position, start, count: ((position > start) & (position <= start + count))[:, None]),
    segments(inside=lambda position, start, count: ((position >= start) & (position <= start + count))[:, None]),
    segments(inside=lambda position, start, count: ((position >= start) | (position < start + count))[:, None]),
    segments(inside=lambda position, start, count: (position * 0 == 0)[:, None],
             y=lambda y, mine: jnp.where(mine, y, 0)),
]  # fmt: skip


@pytest.mark.parametrize("function", ALIKE, ids=range(len(ALIKE)))
def test_selections_that_may_hold_twice_are_exact(function):
    compared = compare(function, (P, X))
    assert compared.complaints == []
    assert compared.counts(OP) == 0
    if function in (where_overlapping, where_numbers_repeat):
        assert any("selected for two" in reason for reason in compared.reasons())


def loop_of_loops(p, x):
    """Two loops of the same length: each matrix is read at the step of the one or the other."""
    c = combine(p, x)

    def outer(out, e):
        def inner(total, f):
            h = jax.nn.silu(x @ p["gate"][f]) * (x @ p["up"][e])
            return total + c[:, f][:, None] * (h @ p["down"][f]), None

        return out + lax.scan(inner, jnp.zeros_like(x), jnp.arange(E))[0] * (e + 1.0), None

    return lax.scan(outer, jnp.zeros_like(x), jnp.arange(E))[0]


def matrices_that_change(p, x):
    """The array that is read at the number of the step is another one in each step."""
    c = combine(p, x)

    def step(carry, e):
        gate, out = carry
        q = at(p, e) | {"gate": gate[e]}
        return (gate[::-1] * 0.9, out + c[:, e][:, None] * expert(q, x)), None

    return lax.scan(step, (p["gate"], jnp.zeros_like(x)), jnp.arange(E))[0][1]


def stacks_of_what_changes(p, x):
    """What is stacked are slices of arrays of which each step has another one."""

    def slices(w):
        return lax.scan(lambda w, e: (w * 0.9, w[e]), w, jnp.arange(E))[1]

    q = {name: slices(p[name]) if name != "router" else p[name] for name in p}
    return KINDS["loops"][0](q, x)


def stacks_of_slices(p, x):
    q = {name: lax.map(lambda e, w=p[name]: w[e], jnp.arange(E)) if name != "router" else p[name] for name in p}
    return KINDS["loops"][3](q, x)


def from_behind(p, x):
    c = combine(p, x)
    step = lambda out, e: (out + c[:, e][:, None] * expert(at(p, e), x), None)  # noqa: E731
    return lax.scan(step, jnp.zeros_like(x), jnp.arange(E), reverse=True)[0]


def counted_from_behind(p, x):
    c = combine(p, x)

    def step(carry, q):
        e, out = carry
        return (e + 1, out + c[:, e][:, None] * expert(q, x)), None

    return lax.scan(step, (jnp.int32(0), jnp.zeros_like(x)), at(p, slice(None)), reverse=True)[0][1]


def a_longer_array(p, x):
    q = {name: jnp.concatenate([w, w[:1]]) if name != "router" else w for name, w in p.items()}
    c = combine(p, x)
    return lax.fori_loop(0, E, lambda e, out: out + c[:, e][:, None] * expert(at(q, e), x), jnp.zeros_like(x))


def the_next_one(p, x):
    c = combine(p, x)
    return lax.fori_loop(0, E, lambda e, out: out + c[:, e][:, None] * expert(at(p, (e + 1) % E), x), jnp.zeros_like(x))


def written_one_further(p, x):
    c = combine(p, x)

    def step(e, total):
        return total + jnp.zeros((E, T, 8)).at[(e + 1) % E].set(c[:, e][:, None] * expert(at(p, e), x))

    return jnp.einsum("etd,e->td", lax.fori_loop(0, E, step, jnp.zeros((E, T, 8))), jnp.arange(1.0, E + 1))


def written_onto_ones(p, x):
    c = combine(p, x)

    def step(e, total):
        return total + jnp.zeros((E, T, 8)).at[e].set(c[:, e][:, None] * expert(at(p, e), x))

    return jnp.einsum("etd,e->td", lax.fori_loop(0, E, step, jnp.ones((E, T, 8))), jnp.arange(1.0, E + 1))


def written_twice(p, x):
    c = combine(p, x)

    def step(e, totals):
        own = jnp.zeros((E, T, 8)).at[e].set(c[:, e][:, None] * expert(at(p, e), x))
        return totals[0] + own, totals[1] + 2 * own

    a, b = lax.fori_loop(0, E, step, (jnp.zeros((E, T, 8)), jnp.zeros((E, T, 8))))
    return jnp.einsum("etd,e->td", a + b[::-1], jnp.arange(1.0, E + 1))


ODD = [
    loop_of_loops, matrices_that_change, stacks_of_what_changes, stacks_of_slices, from_behind, counted_from_behind,
    a_longer_array, the_next_one, written_one_further, written_onto_ones, written_twice,
]  # fmt: skip


@pytest.mark.parametrize("function", ODD, ids=lambda f: f.__name__)
def test_loops_that_read_and_write_in_other_ways_are_exact(function):
    """Whether they are found or not, what they give and their derivatives are the same."""
    for form in (train, mapped):
        compared = compare(*form(function), gradients=False)
        assert compared.complaints == []


# ---------------------------------------------------------------------- near misses


def kept_where_as_great_as_the_last_choice(p, x):
    probabilities = jax.nn.softmax(x @ p["router"])
    weights = jnp.where(probabilities >= lax.top_k(probabilities, 2)[0][:, -1:], probabilities, 0)
    weights = weights / weights.sum(-1, keepdims=True)

    def step(total, given):
        weight, own = given
        return total + weight[:, None] * expert(own, x), None

    experts = {name: p[name] for name in ("gate", "up", "down")}
    return lax.scan(step, jnp.zeros_like(x), (weights.T, experts))[0]


def branches_that_are_left_out(p, x):
    weights, total = combine(p, x), jnp.zeros_like(x)
    for e in range(E):
        own = weights[:, e]
        used = lambda own=own, e=e: own[:, None] * expert(at(p, e), x)  # noqa: E731
        total = total + lax.cond((own > 0).any(), used, lambda: jnp.zeros_like(x))
    return total


def one_token(p, x):
    y = jnp.einsum("tef,efd->ted", jax.nn.silu(jnp.einsum("td,edf->tef", x[:1], p["up"])), p["down"])
    return jnp.einsum("te,ted->td", combine(p, x[:1]), y)


def added_choice_by_choice(p, x):
    (weights, chosen), total = route(p, x), jnp.zeros_like(x)
    for e in range(E):
        for j in range(2):
            own = weights[:, j : j + 1] * expert(at(p, e), x)
            total = total + jnp.where(chosen[:, j : j + 1] == e, own, 0)
    return total


def kept_where_an_expert_is_not_chosen(p, x):
    (weights, chosen), total = route(p, x), jnp.zeros_like(x)
    for e in range(E):
        own = jnp.where(chosen == e, weights, 0).sum(-1, keepdims=True)
        total = jnp.where((chosen == e).any(-1, keepdims=True), total + own * expert(at(p, e), x), total)
    return total


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "train step"])
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (added_choice_by_choice, "added where it was chosen, in a way that is not read as one sum"),
        (kept_where_an_expert_is_not_chosen, "added where it was chosen, in a way that is not read as one sum"),
        (kept_where_as_great_as_the_last_choice, "a comparison of weights decides which count"),
        (branches_that_are_left_out, "each expert is a branch that is left out"),
        (one_token, "there is one token alone"),
    ],
)
def test_what_is_no_site_says_why(function, said, gradient):
    program = jax.value_and_grad(loss(function), (0, 1)) if gradient else function
    _, misses = find(Graph(flatten(jax.make_jaxpr(program)(P, X))), None, True)
    assert [said in miss.reason for miss in misses if miss.op == OP] == [True], misses


def one_token_by_its_own_experts(p, x):
    weights, chosen = route(p, x[0])
    return sum(weights[j] * (jax.nn.silu(x[0] @ p["up"][chosen[j]]) @ p["down"][chosen[j]]) for j in range(2))


def branches_of_a_comparison(p, x):
    total = x
    for e in range(E):
        total = total + lax.cond(x[0, 0] > e, lambda e=e: expert(at(p, e), x), lambda: jnp.zeros_like(x))
    return total


def one_product_under_conditions(p, x):
    y = x @ p["router"][:, :1]
    return sum(jnp.where(jnp.arange(x.shape[0])[:, None] % 3 == r, y * r, 0) for r in range(3))


@pytest.mark.parametrize(
    "function", [one_token_by_its_own_experts, branches_of_a_comparison, one_product_under_conditions]
)
def test_what_leaves_nothing_out_is_no_near_miss(function):
    _, misses = find(Graph(flatten(jax.make_jaxpr(function)(P, X))), None, True)
    assert [miss for miss in misses if miss.op == OP] == []


def test_experts_that_are_written_out_on_a_mesh_with_explicit_axes():
    """The routing that stands before the site is evaluated for the types of its results."""

    def mixture(x, router, up, down):
        chosen = (x @ router).argmax(-1)
        each = (jnp.where((chosen == e)[:, None], jnp.tanh(x @ up[e]) @ down[e], 0) for e in range(4))
        return sum(each)

    mesh = jax.sharding.AbstractMesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    whole = jax.NamedSharding(mesh, jax.P())
    sizes = (20, 16), (16, 4), (4, 16, 24), (4, 24, 16)
    args = [jax.ShapeDtypeStruct(size, jnp.float32, sharding=whole) for size in sizes]
    report = autopallas.explain(autopallas.optimize(mixture, objective="always", strict=True), *args)
    assert report.failures == ()
    assert report.counts()["grouped_matmul"] == 1
