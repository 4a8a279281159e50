"""Recurrences are found in any spelling and computed as exactly as by the program; other loops are left alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare, optimized_like_a_user, with_gradients

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.kernels.recurrence import directions
from autopallas.patterns.recurrence import find
from tests.recognition import loops_that_are_none, matrix_recurrences, several_updates  # noqa: F401 (they enter their programs)
from tests.recognition.recurrences import FOUND, REFUSED, T, gated, receptance, retention, state_space

ONLY = {"ops": ("recurrence",)}


@pytest.mark.parametrize("name", FOUND)
def test_a_spelling_is_found_and_right_with_gradients_taken_outside(name):
    case = FOUND[name]
    outcome = compare(case.function, case.arguments, **ONLY)
    assert outcome.complaints == []
    (site,) = outcome.report.sites
    assert (site.op, site.verdict, site.spec["decay"]) == ("recurrence", "applied", case.decay)
    assert len(set(site.assumptions)) == len(site.assumptions)


@pytest.mark.parametrize("name", FOUND)
def test_its_backward_is_found_in_a_program_that_holds_it(name):
    case = FOUND[name]
    step = with_gradients(case.function, case.arguments)
    outcome = compare(step, case.arguments, gradients=False, **ONLY)
    assert outcome.complaints == []
    found = [(site.op, site.direction, site.verdict) for site in outcome.report.sites]
    assert found == [("recurrence", "forward+backward", "applied")] * case.trained
    program = jax.make_jaxpr(optimized_like_a_user(step, **ONLY))(*case.arguments)
    assert "scan" not in {e.primitive.name for e in flatten(program).equations} or not case.trained


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("retention", 1),
        ("several_inputs_and_outputs", 3),
        ("two_products_with_a_shared_key", 2),
        ("gated_delta_product", 3),
    ],
)
def test_a_step_has_as_few_products_as_it_can(name, count):
    """Neither the decay before the first of several corrections nor a shared key makes one more."""
    case = FOUND[name]
    report = autopallas.explain(optimized_like_a_user(case.function, **ONLY), *case.arguments)
    assert [site.spec["substeps"] for site in report.sites] == [count]


def test_a_backward_is_found_where_jax_checks_each_jaxpr():
    case = next(case for case in FOUND.values() if case.trained)
    with jax.enable_checks(True):
        outcome = compare(with_gradients(case.function, case.arguments), case.arguments, gradients=False, **ONLY)
    assert outcome.complaints == []
    assert [site.direction for site in outcome.report.sites] == ["forward+backward"]


@pytest.mark.parametrize("shared", [False, True])
def test_a_norm_in_the_step_is_looked_for_where_jax_checks_each_jaxpr(shared):
    """What survives a norm is asked of a program without its equations, whose values are read all the same."""
    case = FOUND["gated"]
    function, arguments = case.function, case.arguments
    if shared:  # queries, by examples
        function = jax.vmap(function, (None, 0, 0, 0, 0))
        arguments = (arguments[0], *(x[None] for x in arguments[1:]))
    step = optimized_like_a_user(with_gradients(function, arguments))
    with jax.enable_checks(True):
        report = autopallas.explain(step, *arguments)
    assert not report.failures
    assert "recurrence" in [site.op for site in report.sites]


@pytest.mark.parametrize("name", REFUSED)
def test_another_loop_is_left_alone_with_a_reason(name):
    case = REFUSED[name]
    for function in (case.function, with_gradients(case.function, case.arguments)):
        report = autopallas.explain(optimized_like_a_user(function, **ONLY), *case.arguments)
        assert [site.op for site in report.sites] == []
        assert not report.failures
        reasons = [miss.reason for miss in report.near_misses]
        assert all(case.reason in reason for reason in reasons)
        assert len(reasons) == bool(case.reason) or function is not case.function


def layer(name):
    """A residual layer around one spelling, from and to [T, B, 12]."""
    function, given = FOUND[name].function, FOUND[name].arguments
    widths = [a.shape[2:] for a in given if a.shape[:2] == given[0].shape[:2]]
    sizes = [int(np.prod(w)) for w in widths]

    def run(x, weights, rest):
        projected = jnp.split(x @ weights[0], np.cumsum(sizes)[:-1], -1)
        arrays = [p.reshape(*x.shape[:2], *w) for p, w in zip(projected, widths, strict=True)]
        y = function(*arrays, *rest)
        return x + jnp.tanh(y.reshape(*x.shape[:2], -1) @ weights[1])

    random = np.random.default_rng(1)
    y = jax.eval_shape(function, *given)
    out = int(np.prod(y.shape[2:]))
    weights = [jnp.asarray(random.standard_normal(s) * 0.2, jnp.float32) for s in ((12, sum(sizes)), (out, 12))]
    return run, weights, given[len(widths) :]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("name", ["retention", "state_space", "gated", "receptance"])
def test_layers_in_a_scan_are_trained_in_chunks(name, checkpointed):
    run, weights, rest = layer(name)
    stacked = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), weights)

    def loss(x, stacked, *rest):
        body = lambda x, w: (run(x, w, rest), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(jax.checkpoint(body) if checkpointed else body, x, stacked)[0] ** 2)

    x = jnp.asarray(np.random.default_rng(2).standard_normal((T, 2, 12)), jnp.float32)
    step = jax.value_and_grad(loss, argnums=tuple(range(2 + len(rest))))
    outcome = compare(step, (x, stacked, *rest), gradients=False, **ONLY)
    assert outcome.complaints == []
    assert [(s.direction, s.verdict) for s in outcome.report.sites] == [("forward+backward", "applied")]


def test_equal_layers_share_their_site():
    run, weights, rest = layer("state_space")

    def loss(x, weights, *rest):
        for own in weights:
            x = run(x, own, rest)
        return jnp.mean(x**2)

    x = jnp.ones((T, 2, 12), jnp.float32)
    program = jax.make_jaxpr(jax.value_and_grad(loss, 1))(x, [weights] * 3, *rest)
    matches, misses = find(Graph(flatten(program)))
    assert not misses
    assert len(matches) == 3
    assert len({match.site for match in matches}) == 1


@pytest.mark.parametrize("last", [False, True], ids=["both", "last"])
def test_the_last_state_may_be_a_result(last):
    *given, gate, state = FOUND["state_kept"].arguments

    def run(q, k, v, gate, state):
        def step(state, own):
            q, k, v, gate = own
            state = jax.nn.sigmoid(gate)[..., None, None] * state + k[..., None] * v[..., None, :]
            return state, jnp.einsum("bhn,bhnp->bhp", q, state)

        found = jax.lax.scan(step, state, (q, k, v, gate))
        return found[0] if last else found

    arguments = (*given, gate, state)
    outcome = compare(run, arguments, **ONLY)
    assert outcome.complaints == []
    assert len(outcome.report.sites) == 1


def test_a_loop_over_an_empty_batch_is_left_alone():
    def loss(decay, k, v):
        def step(state, own):
            k, v = own
            state = decay * state + k[:, :, None] * v[:, None, :]
            return state, jnp.einsum("bkv,bk->bv", state, k)

        return jnp.sum(jax.lax.scan(step, jnp.zeros((0, 16, 8)), (k, v))[1])

    arguments = jnp.ones(()), jnp.ones((32, 0, 16)), jnp.ones((32, 0, 8))
    gradients = autopallas.optimize(jax.grad(loss, (0, 1, 2)), objective="always", strict=True)
    assert [g.shape for g in gradients(*arguments)] == [x.shape for x in arguments]


def with_state(stacks):
    """A loop that gives what it stacks and its last state."""

    def run(q, k, v, gate, state):
        def step(state, own):
            q, k, v, gate = own
            state = jax.nn.sigmoid(gate)[..., None, None] * state + k[..., None] * v[..., None, :]
            return state, stacks(jnp.einsum("bhn,bhnp->bhp", q, state))

        state, y = jax.lax.scan(step, state, (q, k, v, gate))
        return y, state

    return run


def stopped(function):
    """What a step of training on a part of a sequence does: the last state goes on, and its gradient does not."""

    def run(*arguments):
        y, state = function(*arguments)
        return y, jax.lax.stop_gradient(state)

    return run


def followed(function):
    """A sequence in two parts."""

    def run(*arguments):
        first, state = function(*arguments)
        second, state = function(*arguments[:-1], state)
        return first, second, state

    return run


@pytest.mark.parametrize("around", [lambda function: function, stopped, followed], ids=["both", "stopped", "followed"])
def test_a_last_state_has_a_cotangent_of_its_own(around):
    run, arguments = around(with_state(lambda y: y)), FOUND["state_kept"].arguments
    outcome = compare(with_gradients(run, arguments), arguments, gradients=False, **ONLY)
    assert outcome.complaints == []
    found = {(site.direction, site.verdict) for site in outcome.report.sites}
    assert found == {("forward+backward", "applied")}
    program = jax.make_jaxpr(optimized_like_a_user(with_gradients(run, arguments), **ONLY))(*arguments)
    assert "scan" not in {e.primitive.name for e in flatten(program).equations}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_give_their_last_states(checkpointed):
    q, k, v, gate, state = FOUND["state_kept"].arguments

    def run(x, scales, states):
        def layer(x, own):
            scale, state = own
            y, state = with_state(lambda y: y)(q * scale, k * scale, v * x, gate * scale, state)
            return x + jnp.tanh(y), state

        return jax.lax.scan(jax.checkpoint(layer) if checkpointed else layer, x, (scales, states))

    arguments = jnp.ones_like(v), jnp.array([1.0, 0.5]), jnp.stack([state, -state])
    outcome = compare(with_gradients(run, arguments), arguments, gradients=False, **ONLY)
    assert outcome.complaints == []
    assert [(site.direction, site.verdict) for site in outcome.report.sites] == [("forward+backward", "applied")]


def in_shard_map(function, checked):
    """Sequences on the devices of a mesh."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = jax.sharding.PartitionSpec("data")

    def run(*arguments):
        part = jax.shard_map(
            jax.vmap(function), mesh=mesh, in_specs=(spec,) * len(arguments), out_specs=spec, check_vma=checked
        )
        return part(*arguments)

    return run


def decayed_outer_products(gate, k, v, q, state):
    def step(state, own):
        gate, k, v, q = own
        state = jax.nn.sigmoid(gate) * state + jnp.outer(k, v)
        return state, q @ state

    return jax.lax.scan(step, state, (gate, k, v, q))[1]


def indexed_outer_products(gate, k, v, q, state):
    def step(i, carried):
        state, y = carried
        state = jax.nn.sigmoid(gate[i]) * state + jnp.outer(k[i], v[i])
        return state, y.at[i].set(q[i] @ state)

    return jax.lax.fori_loop(0, T, step, (state, 0 * v))[1]


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("function", [decayed_outer_products, indexed_outer_products])
def test_a_loop_in_a_shard_map_is_found_with_its_backward(function, checked):
    shapes = ((2, T), (2, T, 8), (2, T, 12), (2, T, 8), (2, 8, 12))
    arguments = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    run = with_gradients(in_shard_map(function, checked), arguments)
    optimized = optimized_like_a_user(run, **ONLY)
    given, expected = optimized(*arguments), with_gradients(jax.vmap(function), arguments)(*arguments)
    for one, other in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    assert [(site.direction, site.verdict) for site in optimized.report().sites] == [("forward+backward", "applied")]


@pytest.mark.parametrize("function", [decayed_outer_products, indexed_outer_products])
def test_a_loop_whose_gates_and_keys_all_devices_share_is_found_with_its_backward(function):
    """Columns of the values on the devices of a mesh."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    columns, whole = jax.sharding.PartitionSpec(None, "data"), jax.sharding.PartitionSpec()
    specs = (whole, whole, columns, whole, columns)
    part = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=columns, check_vma=False)
    shapes = ((T,), (T, 8), (T, 12), (T, 8), (8, 12))
    arguments = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    optimized = optimized_like_a_user(with_gradients(part, arguments), **ONLY)
    given, expected = optimized(*arguments), with_gradients(function, arguments)(*arguments)
    for one, other in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    assert [(site.direction, site.verdict) for site in optimized.report().sites] == [("forward+backward", "applied")]


def begun_with(first):
    """Sequences on the devices of a mesh; the first state is cast to vary over its axis."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    batch, whole = jax.sharding.PartitionSpec(None, "data"), jax.sharding.PartitionSpec()

    def run(gate, k, v, q, given):
        def step(state, own):
            gate, k, v, q = own
            state = jax.nn.sigmoid(gate)[:, None, None] * state + k[:, :, None] * v[:, None, :]
            return state, jnp.einsum("bn,bnp->bp", q, state)

        state = jax.lax.pcast(first(given), ("data",), to="varying")
        return jax.lax.scan(step, state, (gate, k, v, q))[1]

    return jax.shard_map(run, mesh=mesh, in_specs=(batch,) * 4 + (whole,), out_specs=batch, check_vma=True)


BEGUN = [FOUND["state_kept"].arguments[i][:, :, 0] for i in (3, 1, 2, 0)] + [FOUND["state_kept"].arguments[4][:, 0]]


def test_a_loop_in_a_shard_map_may_begin_with_zeros_that_are_cast_to_vary():
    run = with_gradients(begun_with(jnp.zeros_like), BEGUN)
    optimized = optimized_like_a_user(run, **ONLY)
    given, expected = optimized(*BEGUN), run(*BEGUN)
    for one, other in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    assert [(site.direction, site.verdict) for site in optimized.report().sites] == [("forward+backward", "applied")]


def test_a_first_value_that_is_given_and_cast_to_vary_keeps_the_loop_and_says_so():
    """Its cotangent is summed over the mesh's axis by the transpose of the cast."""
    report = autopallas.explain(optimized_like_a_user(begun_with(lambda given: given), **ONLY), *BEGUN)
    assert (report.sites, report.failures) == ((), ())
    assert ["cast to vary" in miss.reason for miss in report.near_misses] == [True]


def test_two_stacked_results_and_the_last_state_have_cotangents():
    run, arguments = with_state(lambda y: (y, jnp.tanh(y))), FOUND["state_kept"].arguments
    outcome = compare(with_gradients(run, arguments), arguments, gradients=False, **ONLY)
    assert outcome.complaints == []
    assert [(site.direction, site.verdict) for site in outcome.report.sites] == [("forward+backward", "applied")]


def test_a_result_whose_gradient_is_stopped_has_none():
    """Beside what is read, each step gives something that is computed from it and has no gradient."""
    run = with_state(lambda y: (y, jnp.tanh(jax.lax.stop_gradient(y))))
    arguments = FOUND["state_kept"].arguments
    outcome = compare(with_gradients(run, arguments), arguments, gradients=False, **ONLY)
    assert outcome.complaints == []
    assert len(outcome.report.sites) + len(outcome.reasons()) == 1  # some versions of JAX leave no trace of the stop


def test_an_activation_of_a_constant_in_the_step_is_differentiated_with_it():
    """A gated linear recurrent unit, whose decays are computed in the step from a parameter's softplus."""

    def run(x, weights, decays):
        def step(h, x):
            gate = jax.nn.sigmoid(x @ weights)
            decay = jnp.exp(-8 * gate * jax.nn.softplus(decays))
            h = decay * h + jnp.sqrt(1 - decay * decay + 1e-6) * x
            return h, h

        return jax.lax.scan(step, jnp.zeros(x.shape[1:]), x)[1]

    arguments = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((T, 2, 8), (8, 8), (8,)))]
    outcome = compare(with_gradients(run, arguments), arguments, gradients=False, **ONLY)
    assert outcome.complaints == []
    assert [(site.direction, site.verdict) for site in outcome.report.sites] == [("forward+backward", "applied")]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("inside", [False, True], ids=["before", "inside"])
def test_an_activation_before_the_loop_or_inside_is_followed_in_layers(inside, checkpointed):
    """Of gates that data and a parameter decide.  In layers some versions of JAX write out what softplus computes, and
    move what is the same in all steps out of the loop; a checkpoint computes it again by a call."""

    def run(x, weights, rates):
        gates, softened = jax.nn.log_sigmoid(x @ weights), jax.nn.softplus(rates)

        def step(h, own):
            x, gate = own
            h = jnp.exp(gate * (jax.nn.softplus(rates) if inside else softened)) * h + x
            return h, h

        return jax.lax.scan(step, jnp.zeros(x.shape[1:]), (x, gates))[1]

    def layers(x, weights, rates):
        layer = lambda x, own: (x + 0.1 * run(x, *own), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(layer) if checkpointed else layer, x, (weights, rates))[0]

    arguments = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((T, 8), (2, 8, 8), (2, 8)))]
    outcome = compare(with_gradients(layers, arguments), arguments, gradients=False, **ONLY)
    assert outcome.complaints == []
    assert [site.direction for site in outcome.report.sites] == ["forward+backward"]


def test_a_product_of_matrices_that_are_not_narrow_is_not_taken_for_outer_products():
    def run(k, v, q):
        def step(state, own):
            k, v, q = own
            state = 0.9 * state + k @ v
            return state, q @ state

        return jax.lax.scan(step, jnp.zeros((8, 12)), (k, v, q))[1]

    arguments = [jax.random.normal(jax.random.key(i), (T, *n)) for i, n in enumerate(((8, 8), (8, 12), (8,)))]
    for function in (run, with_gradients(run, arguments)):
        outcome = compare(function, arguments, gradients=function is run, **ONLY)
        assert outcome.complaints == []
        assert [site.spec["decay"] for site in outcome.report.sites] == ["elementwise"]


def test_a_state_that_something_else_needs_is_no_matrix():
    def run(q, k, v, decay):
        def step(state, own):
            q, k, v = own
            state = decay[:, None, None] * state + k[..., :, None] * v[..., None, :]
            return state, (jnp.einsum("bhn,bhnp->bhp", q, state), jnp.tanh(state))

        return jax.lax.scan(step, jnp.zeros((2, 3, 8, 9)), (q, k, v))[1]

    report = autopallas.explain(optimized_like_a_user(run, **ONLY), *FOUND["retention"].arguments)
    assert [(site.verdict, site.spec["decay"]) for site in report.sites] == [("kept", "elementwise")]
    assert "best form" in report.sites[0].reason


def test_infinities_are_assumed_away_only_where_that_is_allowed():
    (site,) = autopallas.explain(optimized_like_a_user(retention, **ONLY), *FOUND["retention"].arguments).sites
    assert any("finite" in assumption for assumption in site.assumptions)
    careful = optimized_like_a_user(retention, assume_finite=False, **ONLY)
    report = autopallas.explain(careful, *FOUND["retention"].arguments)
    assert [site.verdict for site in report.sites] == ["kept"]


@pytest.mark.parametrize("mapped", [(0, 0, 0, None), (0, None, 0, 0)])
def test_sites_can_be_mapped_and_differentiated(mapped):
    given = FOUND["retention"].arguments
    batched = tuple(jnp.stack([a, 0.5 * a]) if axis == 0 else a for a, axis in zip(given, mapped, strict=True))
    optimized = optimized_like_a_user(retention, **ONLY)

    def gradient(function):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), argnums=(0, 1, 2, 3))

    for form in (lambda f: f, gradient):
        ours, theirs = (jax.vmap(form(f), mapped)(*batched) for f in (optimized, retention))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    assert {s.verdict for s in optimized.report().sites} == {"applied"}


@pytest.mark.parametrize("function", [retention, state_space, gated, receptance])
def test_16_bit_programs_are_computed_in_float32_inside(function):
    given = tuple(a.astype(jnp.bfloat16) for a in FOUND[function.__name__].arguments)
    run = lambda *a: function(*a).astype(jnp.bfloat16)  # noqa: E731
    outcome = compare(run, given, gradients=False, **ONLY)
    assert outcome.complaints == []
    assert len(outcome.report.sites) == 1


@pytest.fixture
def in_chunks(monkeypatch):
    """Runs every state in chunks, whatever the tuned table says."""
    run = directions._run

    def chunks(of_chunks, site, form, chunk, operands):
        return run(of_chunks, site, "chunked" if site.states else "hoisted", 16, operands)

    monkeypatch.setattr(directions, "_run", chunks)


def matrix_loop(update, dtype=jnp.float32, last=False):
    """A loop over decays [T, H], keys and queries [T, H, N] and values [T, H, P] whose state ``update`` computes."""

    def run(a, k, v, q):
        def step(state, own):
            a, k, v, q = own
            state = update(state, a[:, None, None], k[:, :, None] * v[:, None, :])
            return state, jnp.einsum("hn,hnp->hp", q, state).real

        return jax.lax.scan(step, jnp.zeros((*k.shape[1:], v.shape[-1]), dtype), (a, k, v, q))[1]

    return run


def loop_arguments(steps=T, decay=None):
    random = np.random.default_rng(5)
    k, v, q = (jnp.asarray(random.standard_normal((steps, 2, n)), jnp.float32) for n in (8, 9, 8))
    a = random.uniform(0.5, 1, (steps, 2)) if decay is None else np.full((steps, 2), decay)
    return jnp.asarray(a, jnp.float32), k, v, q


@pytest.mark.parametrize(
    "update",
    [
        lambda state, a, added: state + a * (added - state),
        lambda state, a, added: state / (1 + a) + added,
        lambda state, a, added: (state * (1 - a)) * (1 - 0.7 * a) + added,
        lambda state, a, added: jnp.where(a > 2, 0.5 * state, state - a * state + added),
    ],
    ids=["towards", "divided", "twice", "selected"],
)
def test_a_decay_near_one_keeps_the_digits_of_its_terms(in_chunks, update):
    """2000 steps that change the state by 1e-3: ``1 - a`` alone, rounded, is wrong by 1e-5 of the result."""
    a, *given = loop_arguments(2000, 1e-3)
    arguments = (a, *map(jnp.abs, given))
    optimized = optimized_like_a_user(matrix_loop(update), **ONLY)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arguments]
        true = np.asarray(jax.jit(matrix_loop(update, jnp.float64))(*wide))
    found, loop = (np.asarray(jax.jit(f)(*arguments)) for f in (optimized, matrix_loop(update)))
    error, base = (np.max(np.abs(y - true)) / np.max(true) for y in (found, loop))
    assert [site.verdict for site in optimized.report().sites] == ["applied"]
    assert error < max(2 * base, 3e-6)


def reasons_of(function, *arguments):
    report = autopallas.explain(optimized_like_a_user(function, **ONLY), *arguments)
    assert not report.failures
    assert [site.verdict for site in report.sites if site.verdict != "kept"] == []
    return [miss.reason for miss in report.near_misses]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("carried", [False, True], ids=["cast there and back", "carried"])
def test_a_state_that_each_step_rounds_is_left_alone(dtype, carried):
    def update(state, a, added):
        state = (a * state.astype(jnp.float32) + added).astype(dtype)
        return state if carried else state.astype(jnp.float32)

    run = matrix_loop(update, dtype if carried else jnp.float32)
    assert ["rounded to a narrower type" in reason for reason in reasons_of(run, *loop_arguments())] == [True]


@pytest.mark.parametrize("batched", [False, True], ids=["by an identity matrix", "by numbers"])
def test_a_state_that_a_product_rounds_is_left_alone(batched):
    """By a ``preferred_element_type`` that is narrower than what it multiplies."""

    def update(state, a, added):
        by = a[:, 0, 0] if batched else 0.9 * jnp.eye(2)
        numbers = (((), ()), ((0,), (0,))) if batched else (((1,), (0,)), ((), ()))
        return lax.dot_general(by, state, numbers, preferred_element_type="bfloat16").astype(jnp.float32) + added

    run = matrix_loop(update)
    assert ["rounded to a narrower type" in reason for reason in reasons_of(run, *loop_arguments())] == [True]


def test_a_state_in_8_bits_is_left_alone():
    quantised = lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32)  # noqa: E731
    run = matrix_loop(lambda state, a, added: quantised(a * state + added))
    assert ["convert_element_type of" in reason for reason in reasons_of(run, *loop_arguments())] == [True]


def test_a_complex_state_is_no_matrix(in_chunks):
    def run(a, k, v, q):
        turned = matrix_loop(lambda state, a, added: a * state + added, jnp.complex64)
        return turned(a * jnp.exp(1j * a), k + 1j * q, v + 0j, q + 0j)

    given = loop_arguments()
    report = autopallas.explain(optimized_like_a_user(run, **ONLY), *given)
    assert [(site.verdict, site.spec["decay"]) for site in report.sites] == [("kept", "elementwise")]
    np.testing.assert_allclose(optimized_like_a_user(run, **ONLY)(*given), run(*given), rtol=1e-4, atol=1e-5)


def dropped_out(implementation):
    def run(a, k, v, q):
        def step(state, own):
            key, a, k, v, q = own
            k = jnp.where(jax.random.bernoulli(key, 0.5, k.shape), k, 0)
            state = a[:, None, None] * state + k[:, :, None] * v[:, None, :]
            return state, jnp.einsum("hn,hnp->hp", q, state)

        keys = jax.random.split(jax.random.key(1, impl=implementation), k.shape[0])
        return jax.lax.scan(step, jnp.zeros((*k.shape[1:], v.shape[-1])), (keys, a, k, v, q))[1]

    return run


def branched(a, k, v, q):
    def step(state, own):
        a, k, v, q = own
        decay = jax.lax.cond(a[0] > 0.7, jnp.sqrt, lambda x: 0.9 * x, a - 0.7)
        state = decay[:, None, None] * state + k[:, :, None] * v[:, None, :]
        return state, jnp.einsum("hn,hnp->hp", q, state)

    return jax.lax.scan(step, jnp.zeros((*k.shape[1:], v.shape[-1])), (a, k, v, q))[1]


def called_back(a, k, v, q):
    def step(state, own):
        a, k, v, q = own
        decay = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(a.shape, a.dtype), a)
        state = decay[:, None, None] * state + k[:, :, None] * v[:, None, :]
        return state, jnp.einsum("hn,hnp->hp", q, state)

    return jax.lax.scan(step, jnp.zeros((*k.shape[1:], v.shape[-1])), (a, k, v, q))[1]


@pytest.mark.parametrize("function", [dropped_out("rbg"), branched, called_back], ids=["random", "cond", "callback"])
def test_steps_that_compute_something_else_for_all_steps_at_once_are_left_alone(in_chunks, function):
    """Mapped generators draw other bits, mapped branches both run, and a callback may not be mapped."""
    given = loop_arguments()
    assert ["for all steps at once" in reason for reason in reasons_of(function, *given)] == [True]
    optimized = optimized_like_a_user(function, **ONLY)
    np.testing.assert_array_equal(jax.jit(optimized)(*given), jax.jit(function)(*given))


decayed = matrix_loop(lambda state, a, added: a * state + added)


def test_a_loss_whose_value_is_dropped_is_trained_in_chunks(in_chunks):
    """The loop's result is read by its own cotangent alone."""
    step = jax.grad(lambda *given: jnp.sum(jnp.sin(decayed(*given))), argnums=(0, 1, 2, 3))
    outcome = compare(step, loop_arguments(), gradients=False, **ONLY)
    assert outcome.complaints == []
    assert [(s.direction, s.verdict) for s in outcome.report.sites] == [("forward+backward", "applied")]


@pytest.mark.parametrize("count", [2, 3])
def test_loops_that_share_slices_are_trained_in_chunks(in_chunks, count):
    """What they compute of shared slices is the same value in the backward of each."""

    def loss(a, k, v, q):
        return sum(jnp.sum(jnp.sin(decayed(a * (1 - 0.1 * i), k, v, q))) for i in range(count))

    step = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
    outcome = compare(step, loop_arguments(), gradients=False, **ONLY)
    assert outcome.complaints == []
    found = [(s.direction, s.verdict) for s in outcome.report.sites]
    assert found == [("forward+backward", "applied")] * count


def test_a_carried_value_may_become_a_constant(in_chunks):
    """The step before is the same array in all steps but the first."""

    def loss(a, k, v, q, given):
        def step(carried, own):
            state, before = carried
            a, k, v, q = own
            state = a[:, None, None] * state + k[:, :, None] * v[:, None, :]
            return (state, given), jnp.einsum("hn,hnp->hp", q, state) * before

        first = jnp.zeros((*k.shape[1:], v.shape[-1])), jnp.ones_like(given)
        return jnp.sum(jnp.sin(jax.lax.scan(step, first, (a, k, v, q))[1]))

    given = jnp.asarray(np.random.default_rng(6).standard_normal((2, 9)), jnp.float32)
    step = jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))
    outcome = compare(step, (*loop_arguments(), given), gradients=False, **ONLY)
    assert outcome.complaints == []
    assert not outcome.report.failures


@pytest.mark.parametrize("differentiated", [False, True])
def test_looking_takes_steps_in_proportion_to_the_layers(differentiated):
    def steps(count):
        def loss(x, weights):
            for w in weights:
                q, k, v = jnp.split(x @ w, (8, 16), -1)
                a = jax.nn.sigmoid(x[..., 0])
                x = x + jnp.tanh(decayed(a, k, v, q))
            return jnp.mean(x**2)

        given = jnp.ones((T, 2, 9)), [jnp.full((9, 25), 0.1 * i) for i in range(count)]
        program = jax.make_jaxpr(jax.value_and_grad(loss, 1) if differentiated else loss)(*given)
        graph = Graph(flatten(program))
        matches, _ = find(graph)
        assert len(matches) == count
        return graph.steps.spent

    few, many = steps(4), steps(16)
    assert 0 < many <= 4 * few


def test_a_cotangent_that_the_backward_carries_as_it_is_does_not_stand_for_its_loop():
    """A reversed loop stacks the cotangent of q, which it is given: that value is not computed from itself."""

    def run(k, q, a):
        def step(s, now):
            k, q, a = now
            s = a * s + k
            return s, s + q

        scaled = k / (1 + jnp.linalg.norm(k, axis=-1, keepdims=True))
        return jnp.sin(jax.lax.scan(step, jnp.cos(scaled[0]), (scaled, q, a))[1]).sum(0)

    def step(k, q, a):
        out, pull = jax.vjp(run, k, q, a)
        return out, pull(jnp.cos(out))

    k, q, a = (jnp.asarray(np.random.default_rng(n).standard_normal((24, 8)), jnp.float32) for n in range(3))
    outcome = compare(step, (k, q, a), gradients=False)
    assert outcome.complaints == []
    assert not outcome.report.failures


def outer_products(gain, activation):
    """A state to which outer products are added, of values behind an activation and keys times a gain."""

    def run(gate, k, v, q):
        def step(state, now):
            gate, k, v, q = now
            state = jax.nn.sigmoid(gate) * state + jnp.outer(k * gain, activation(v))
            return state, q @ state

        return jax.lax.scan(step, jnp.zeros((k.shape[1], v.shape[1])), (gate, k, v, q))[1]

    return run


def magnified(x):
    return 1e4 * jnp.tanh(x)


def rectified(slope):
    """max(x, 0), whose derivative is said to be ``slope * cos(x)``, as of a spike with a surrogate."""

    @jax.custom_jvp
    def function(x):
        return jnp.maximum(x, 0)

    function.defjvp(lambda primals, tangents: (function(*primals), tangents[0] * slope * jnp.cos(primals[0])))
    return function


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (outer_products(1.23446e-4, magnified), outer_products(1.23454e-4, magnified)),
        (outer_products(1.0, rectified(1.0)), outer_products(1.0, rectified(3.0))),
    ],
    ids=["in a digit of a number", "in a derivative"],
)
def test_loops_that_hardly_differ_are_told_apart(first, second):
    """In one program, and in programs that follow each other in one process."""
    random = np.random.default_rng(3)
    gate, k, v, q = (jnp.asarray(random.standard_normal((T, *n)), jnp.float32) for n in ((), (8,), (12,), (8,)))
    for function in (first, second, lambda *arrays: (first(*arrays), second(*arrays))):
        outcome = compare(function, (gate, k / 3, v, q), **ONLY)
        assert outcome.complaints == []
        assert {site.verdict for site in outcome.report.sites} == {"applied"}


def test_the_advice_for_a_filter_of_the_second_order_is_followed_and_recognised():
    x, (p, r) = jnp.asarray(np.random.default_rng(0).standard_normal((64, 3)), jnp.float32), (0.9, -0.4)

    def filtered(x):
        def step(carried, x):
            y = (p + r) * carried[0] - p * r * carried[1] + x
            return (y, carried[0]), y

        return lax.scan(step, (jnp.zeros(3), jnp.zeros(3)), x)[1]

    def cascade(x):
        for number in (p, r):
            x = lax.scan(lambda h, x, a=number: (a * h + x, a * h + x), jnp.zeros(3), x)[1]
        return x

    np.testing.assert_allclose(cascade(x), filtered(x), rtol=1e-4, atol=1e-5)
    (miss,) = autopallas.explain(filtered, x).near_misses
    assert "filter of the second order" in miss.reason
    assert "g = p * g + x" in miss.advice
    assert [site.op for site in autopallas.explain(cascade, x).sites] == ["recurrence", "recurrence"]


def test_a_loop_that_adds_up_a_likelihood_is_no_near_miss():
    """A hidden Markov model: each state is divided by its sum, and the sum of logarithms is no recurrence."""

    def likelihood(transitions, first, given):
        def step(carried, given):
            total, state = carried
            state = state * jnp.exp(given)
            size = state.sum()
            size = jnp.where(size == 0, 1.0, size)
            state = state / size
            return (total + jnp.log(size), transitions.T @ state), state

        return lax.scan(step, (0.0, first), given)[0][0]

    keys = jax.random.split(jax.random.key(0))
    transitions = jax.nn.softmax(jax.random.normal(keys[0], (4, 4)))
    arguments = transitions, jnp.full(4, 0.25), jax.random.normal(keys[1], (T, 4))
    assert reasons_of(jax.grad(likelihood, (0, 1, 2)), *arguments) == []
