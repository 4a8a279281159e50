"""What is computed again for a backward: which arrays, that results stay, and when everything is kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import autopallas
from autopallas import pipeline
from autopallas.numerics.promote import usual_promotion
from autopallas.options import Options
from autopallas.report import Report
from autopallas.rewrite.rematerialisation import kept as kept_values
from autopallas.rewrite.rematerialisation import rematerialise as module

LAYERS, WIDTH, INNER = 4, 64, 256


def parameters(dtype=jnp.float32, seed=0):
    """Weights of layers: [width, inner], [inner, width], and a scale and a shift [width] each."""
    random = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape) / 8, dtype)  # noqa: E731
    return [(draw(WIDTH, INNER), draw(INNER, WIDTH), 1 + draw(WIDTH), draw(WIDTH)) for _ in range(LAYERS)], 8 * draw(
        4, 128, WIDTH
    )


def blocks(activation):
    """The loss of residual blocks, each of a layer norm, two products, and an activation between them."""

    def loss(weights, x):
        for w, u, scale, shift in weights:
            y = x - x.mean(-1, keepdims=True)
            y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5) * scale + shift
            x = x + activation(y @ w) @ u
        return jnp.mean(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))))

    return loss


def step_of(activation):
    return jax.value_and_grad(blocks(activation))


def optimized(function, **options):
    return autopallas.optimize(function, **{"objective": "memory", "strict": True} | options)


def temporary(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def arrays_of(function, *arguments, **options):
    report = autopallas.explain(optimized(function, **options), *arguments)
    return sum(one.arrays for one in report.rematerialised)


def near(given, wanted, within):
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=within * max(np.abs(b).max(), 1e-3))


def exactly(step, *arguments):
    with jax.enable_x64(True), usual_promotion():
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(np.float64)), arguments)
        return jax.tree.map(np.asarray, step(*wide))


def dropout(x):
    keep = np.random.default_rng(3).random(x.shape) < 0.9  # the same in float64, in which JAX draws others
    return jnp.where(keep, jax.nn.gelu(x) / 0.9, 0)


@pytest.mark.parametrize(
    "activation",
    [jax.nn.gelu, jax.nn.silu, jax.nn.softplus, jax.nn.elu, jax.nn.mish, jnp.tanh, dropout],
    ids=["gelu", "silu", "softplus", "elu", "mish", "tanh", "dropout"],
)
def test_a_train_step_gives_the_same_and_takes_less_memory(activation):
    arguments, step = parameters(), step_of(activation)
    run = optimized(step)
    given, wanted = run(*arguments), jax.jit(step)(*arguments)
    exact = exactly(step, *arguments)
    # Both are rounded as XLA fuses them: a product of 256 numbers in float32, in four layers, and back.
    near(given, exact, 1e-5)
    near(given, wanted, 1e-5)
    assert sum(one.arrays for one in run.report().rematerialised) >= LAYERS
    assert temporary(run, *arguments) < 0.8 * temporary(step, *arguments)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_train_step_of_16_bits_is_as_near_to_the_exact_one(dtype):
    arguments, step = parameters(dtype), step_of(jax.nn.gelu)
    run = optimized(step)
    given, wanted, exact = run(*arguments), jax.jit(step)(*arguments), exactly(step, *arguments)
    assert run.report().rematerialised
    for a, b, c in zip(*map(jax.tree.leaves, (given, wanted, exact)), strict=True):
        ours, theirs = (float(np.max(np.abs(np.asarray(x, np.float64) - c))) for x in (a, b))
        # What is fused otherwise is rounded to 16 bits at other places; the largest of 16,384 errors varies by less.
        assert ours <= 1.5 * theirs + 1e-6, f"off by {ours} where the original is by {theirs}"


def test_the_bits_are_the_same_where_nothing_is_fused_otherwise():
    def loss(w, u, x):
        return jnp.sum(jnp.maximum(jnp.exp(x @ w), 1.5) @ u)

    random = np.random.default_rng(1)
    w, u, x = (
        jnp.asarray(random.standard_normal(shape) / 16, jnp.float32) for shape in ((64, 256), (256, 8), (512, 64))
    )
    step = jax.grad(lambda w, u, x: loss(w, u, x) + loss(w + 1, u, x), (0, 1, 2))
    run = optimized(step)
    for a, b in zip(run(w, u, x), jax.jit(step)(w, u, x), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("token", [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 5e-8, -3e38])
@pytest.mark.parametrize("hide", [kept_values._selected, kept_values._behind_a_barrier], ids=["selected", "barrier"])
def test_what_is_kept_comes_through_whatever_the_number_of_the_backward_is(hide, dtype, token):
    with jax.enable_x64(dtype == "float64"):
        like = jax.make_jaxpr(jnp.exp)(jnp.ones(3)).eqns[0]
        token = jnp.full((2, 3), token, dtype)
        arrays = [jnp.asarray([1.0, np.nan, -0.0, np.inf]), jnp.asarray([True, False]), jnp.arange(3)]
        variables = jax.make_jaxpr(lambda *x: x)(token, token, *arrays).jaxpr.invars
        equations, results = kept_values._hidden(variables[:2], variables[2:], like, hide)
        closed = jax.make_jaxpr(lambda *x: x)(token, token, *arrays)
        program = kept_values.jaxprs.rebuild(closed, [], [], variables, results, equations)
        for given, wanted in zip(jaxpr_as_fun(program)(token, token, *arrays), arrays, strict=True):
            assert given.dtype == wanted.dtype
            np.testing.assert_array_equal(given, wanted)


def test_no_constant_is_needed_where_jax_folds_constants():
    arguments, step = parameters(), step_of(jax.nn.gelu)
    before = jax.config.eager_constant_folding
    jax.config.update("eager_constant_folding", True)
    try:
        run = optimized(step)
        near(run(*arguments), jax.jit(step)(*arguments), 1e-5)
    finally:
        jax.config.update("eager_constant_folding", before)
    assert run.report().rematerialised


def test_train_steps_in_a_loop_compute_again_too():
    weights, x = parameters()

    def epoch(weights, x):
        def step(weights, _):
            value, gradient = step_of(jax.nn.gelu)(weights, x)
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value

        return lax.scan(step, weights, None, length=3)

    run = optimized(epoch)
    near(run(weights, x), jax.jit(epoch)(weights, x), 1e-5)
    assert run.report().rematerialised
    assert temporary(run, weights, x) < 0.8 * temporary(epoch, weights, x)


def test_calls_are_looked_into_where_no_site_is_replaced():
    weights, x = parameters()

    def loss(matrices, x):
        for w, u in matrices:
            x = jax.nn.mish(jax.nn.elu(x @ w) @ u)
        return jnp.sum(x**2)

    step = jax.value_and_grad(loss)
    matrices = [(w, u) for w, u, *_ in weights]
    report = autopallas.explain(optimized(step, ops="rematerialisation"), matrices, x)
    assert report.counts().total() == 0
    assert sum(one.arrays for one in report.rematerialised) >= LAYERS


def test_what_the_program_returns_is_kept():
    weights, x = parameters()
    w, u, *_ = weights[0]

    def step(w, u, x):
        (value, kept), gradient = jax.value_and_grad(
            lambda w: (lambda h: (jnp.sum(jnp.sin(h @ u)), h))(jnp.tanh(x @ w)), has_aux=True
        )(w)
        return value, kept, gradient

    assert arrays_of(step, w, u, x) == 0
    near(optimized(step)(w, u, x), jax.jit(step)(w, u, x), 1e-5)


def test_a_forward_alone_stays_as_it_is():
    arguments = parameters()
    assert arrays_of(blocks(jax.nn.gelu), *arguments) == 0


def test_a_program_with_checkpoints_of_its_own_gives_the_same():
    weights, x = parameters()

    def loss(weights, x):
        @jax.checkpoint
        def block(x, w, u):
            return x + jax.nn.gelu(x @ w) @ u

        for w, u, *_ in weights:
            x = block(x, w, u)
        return jnp.mean(x**2)

    step = jax.value_and_grad(loss)
    run = optimized(step)
    near(run(weights, x), jax.jit(step)(weights, x), 1e-5)


def test_effects_keys_and_integers_stay():
    weights, x = parameters()

    def step(weights, x, key):
        def loss(weights):
            value = blocks(dropout)(weights, x)
            jax.debug.callback(seen.append, value)
            return value, (jax.random.split(key), jnp.arange(3))

        return jax.value_and_grad(loss, has_aux=True)(weights)

    seen = []
    run = optimized(step)
    key = jax.random.key(0)
    (value, (keys, counted)), gradient = run(weights, x, key)
    jax.effects_barrier()
    assert len(seen) == 1
    (same, (own, _)), wanted = jax.jit(step)(weights, x, key)
    near((value, gradient), (same, wanted), 1e-5)
    assert (jax.random.key_data(keys) == jax.random.key_data(own)).all()
    assert counted.tolist() == [0, 1, 2]


def test_vmap_and_derivatives_of_a_rewritten_step_are_those_of_the_original():
    weights, x = parameters()
    step = step_of(jax.nn.silu)
    run = optimized(step)
    xs = jnp.stack([x, 2 * x])
    near(jax.vmap(run, (None, 0))(weights, xs), jax.vmap(step, (None, 0))(weights, xs), 1e-5)
    direction = jnp.sin(x)
    for one in (run, step):
        assert one(weights, x)[0].shape == ()
    near(
        jax.jvp(lambda x: run(weights, x), (x,), (direction,)),
        jax.jvp(lambda x: step(weights, x), (x,), (direction,)),
        1e-4,  # second derivatives, of which each is a sum with much cancellation
    )


def test_infinite_and_nan_cotangents_change_nothing():
    weights, x = parameters()

    def loss(weights, x, scale):
        return scale * blocks(jnp.tanh)(weights, x)

    step = jax.grad(loss)
    run = optimized(step)
    for scale in (np.nan, np.inf, 0.0, 1e-45):
        given, wanted = (one(weights, x, jnp.float32(scale)) for one in (run, jax.jit(step)))
        for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


# ---------------------------------------------------------------------- when, and what is said


def test_it_is_done_for_memory_or_by_name_alone():
    arguments, step = parameters(), step_of(jax.nn.gelu)
    assert arrays_of(step, *arguments) > 0
    assert arrays_of(step, *arguments, objective="time") == 0
    assert arrays_of(step, *arguments, objective="always") == 0
    assert arrays_of(step, *arguments, objective="time", ops="rematerialisation") > 0
    assert arrays_of(step, *arguments, ops="-rematerialisation") == 0
    assert arrays_of(step, *arguments, ops="attention") == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"numerics": "identical"}, "have to be identical"),
        ({"deny": "elsewhere.py:3"}, "places are denied"),
        ({"fuel": 5}, "the number of sites is limited"),
    ],
)
def test_what_is_in_the_way_is_told(options, reason):
    arguments, step = parameters(), step_of(jax.nn.gelu)
    report = autopallas.explain(optimized(step, **options), *arguments)
    assert report.rematerialised == ()
    assert any(note.startswith("rematerialisation: ") and reason in note for note in report.notes)


def test_arrays_on_several_devices_are_kept_where_types_alone_tell():
    """So it is where another transformation is around."""
    report = rewritten_over_devices(AxisType.Auto)
    assert report.rematerialised == ()
    assert any("where arrays are spread over several devices" in note for note in report.notes)


def test_arrays_are_kept_whose_types_tell_how_they_are_spread():
    report = rewritten_over_devices(AxisType.Explicit)
    assert report.rematerialised == ()
    assert any("types tell how arrays are spread over several devices" in note for note in report.notes)


def rewritten_over_devices(kind):
    weights, x = parameters()
    with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("i",), axis_types=(kind,))):
        spec = PartitionSpec("i") if kind == AxisType.Explicit else PartitionSpec()
        rows = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(jax.sharding.get_abstract_mesh(), spec))
        program = jax.make_jaxpr(step_of(jax.nn.gelu))(weights, rows)
        return pipeline.rewrite(program, Options(objective="memory", strict=True))[1]


def test_the_report_tells_what_is_computed_again():
    arguments, step = parameters(), step_of(jax.nn.gelu)
    run = optimized(step)
    run(*arguments)
    report = run.report()
    count = sum(one.arrays for one in report.rematerialised)
    assert f"{count} arrays rematerialised" in str(report)
    assert "Rematerialised (computed again for a backward;" in str(report)
    assert "test_rematerialisation.py" in str(report)
    assert "computed again for a backward" in report.to_html()
    assert Report.from_json(report.to_json()) == report
    assert any(one.name == "rematerialise" for one in report.trace)


def test_an_error_leaves_the_program_as_it_was_rewritten(monkeypatch):
    def broken(program, extent, platform):
        raise KeyError("on purpose")

    monkeypatch.setattr(pipeline, "rematerialise", broken)
    arguments, step = parameters(), step_of(jax.nn.gelu)
    run = optimized(step, strict=False)
    with pytest.warns(UserWarning, match="on purpose"):
        near(run(*arguments), jax.jit(step)(*arguments), 1e-5)
    assert run.report().rematerialised == ()
    assert any("on purpose" in failure.error for failure in run.report().failures)


def test_a_program_without_gain_is_returned_itself():
    program = jax.make_jaxpr(jax.value_and_grad(lambda w, x: jnp.sum((x @ w) ** 2)))(jnp.ones((8, 8)), jnp.ones((8, 8)))
    found, told = module.rematerialise(program)
    assert found is program
    assert told == ()


def test_steps_are_in_proportion_to_the_program():
    """Twice as many layers take about twice as many steps: chains are bounded, and each walk is one."""

    def count(layers):
        steps = 0
        kept = kept_values.Kept._chain

        def counted(self, value, passed):
            nonlocal steps
            found = kept(self, value, passed)
            steps += len(found[1])
            return found

        kept_values.Kept._chain = counted
        try:
            weights, x = parameters()
            module.rematerialise(jax.make_jaxpr(step_of(jax.nn.gelu))(weights * layers, x))
        finally:
            kept_values.Kept._chain = kept
        return steps

    assert count(8) < 2.5 * count(4)
