"""The optimized function under every transformation of JAX: same results as the original, with the kernels in use."""

from __future__ import annotations

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, jet
from support.catalogue import array

import autopallas
from autopallas import AutopallasWarning
from autopallas.rewrite import primitive

B, H, T, S, D = 2, 2, 5, 7, 3
MASK = np.tri(T, S, S - T, dtype=bool)


def attend(q, k, v):
    return jax.nn.softmax(jnp.where(MASK, q @ k.mT * 0.5, -1e9)) @ v


def optimized(function=attend, **options):
    return autopallas.optimize(function, **{"objective": "always", "strict": True} | options)


@pytest.fixture(scope="module")
def qkv():
    return array(B, H, T, D, seed=1), array(B, H, S, D, seed=2), array(B, H, S, D, seed=3)


def loss(function):
    return lambda *args: jnp.sum(jnp.sin(function(*args) * 1.3))


def same(given, expected, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance), given, expected)


def primitives(jaxpr, found=None):
    """Names of all primitives in a jaxpr and its bodies."""
    found = set() if found is None else found
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found.add(equation.primitive.name)
        if equation.primitive not in (primitive.site_p, primitive.tangent_p, primitive.backward_p):
            for value in equation.params.values():
                for inner in value if isinstance(value, (tuple, list)) else [value]:
                    if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                        primitives(inner, found)
    return found


def cotangent(q):
    return jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)


# Each transformation: a function of (the function, q, k, v).
TRANSFORMATIONS = {
    "jit": lambda f, q, k, v: jax.jit(f)(q, k, v),
    "grad": lambda f, q, k, v: jax.grad(loss(f), argnums=(0, 1, 2))(q, k, v),
    "grad_of_the_keys_only": lambda f, q, k, v: jax.grad(loss(f), argnums=1)(q, k, v),
    "value_and_grad": lambda f, q, k, v: jax.value_and_grad(loss(f), argnums=(0, 2))(q, k, v),
    "jvp": lambda f, q, k, v: jax.jvp(f, (q, k, v), (cotangent(q), cotangent(k), cotangent(v))),
    "jvp_of_the_values_only": lambda f, q, k, v: jax.jvp(lambda v: f(q, k, v), (v,), (cotangent(v),)),
    "vjp": lambda f, q, k, v: jax.vjp(f, q, k, v)[1](cotangent(q)),
    "linearize": lambda f, q, k, v: jax.linearize(f, q, k, v)[1](cotangent(q), cotangent(k), cotangent(v)),
    "linear_transpose": lambda f, q, k, v: jax.linear_transpose(lambda v: f(q, k, v), v)(cotangent(q)),
    "jacfwd": lambda f, q, k, v: jax.jacfwd(f)(q[:1, :1], k[:1, :1], v[:1, :1]),
    "jacrev": lambda f, q, k, v: jax.jacrev(f, argnums=1)(q[:1, :1], k[:1, :1], v[:1, :1]),
    "hessian": lambda f, q, k, v: jax.hessian(loss(f), argnums=(0, 1))(q[:1, :1], k[:1, :1], v[:1, :1]),
    "grad_of_grad": lambda f, q, k, v: jax.grad(
        lambda q: jnp.sum(jax.grad(lambda q, k: loss(f)(q, k, v), argnums=1)(q, k) ** 2)
    )(q),
    "forward_over_reverse": lambda f, q, k, v: jax.jvp(jax.grad(lambda q: loss(f)(q, k, v)), (q,), (cotangent(q),)),
    "reverse_over_forward": lambda f, q, k, v: jax.grad(
        lambda q: jnp.sum(jax.jvp(lambda k: f(q, k, v), (k,), (cotangent(k),))[1] ** 2)
    )(q),
    "vmap_of_grad": lambda f, q, k, v: jax.vmap(jax.grad(loss(f), argnums=(0, 1, 2)))(q, k, v),
    "vmap_of_grad_with_shared_keys": lambda f, q, k, v: jax.vmap(
        jax.grad(loss(f), argnums=(0, 1, 2)), in_axes=(0, None, None)
    )(q, k[0], v[0]),
    "grad_of_vmap": lambda f, q, k, v: jax.grad(lambda *a: jnp.sum(jax.vmap(loss(f))(*a)), argnums=(0, 1, 2))(q, k, v),
    "grad_of_vmap_with_shared_keys": lambda f, q, k, v: jax.grad(
        lambda *a: jnp.sum(jax.vmap(loss(f), (0, None, None))(*a)), argnums=(0, 1, 2)
    )(q, k[0], v[0]),
    "jvp_of_vmap": lambda f, q, k, v: jax.jvp(jax.vmap(f), (q, k, v), (cotangent(q), cotangent(k), cotangent(v))),
    "scan": lambda f, q, k, v: lax.scan(lambda c, x: (c + 1, f(*x)), 0, (q, k, v)),
    "map": lambda f, q, k, v: lax.map(lambda x: f(*x), (q, k, v)),
    "grad_of_scan": lambda f, q, k, v: jax.grad(
        lambda *a: lax.scan(lambda c, x: (c + loss(f)(x, *a[1:]), None), 0.0, a[0])[0], argnums=(0, 1, 2)
    )(q, k[0], v[0]),
    "grad_in_scan": lambda f, q, k, v: lax.scan(lambda c, x: (c, jax.grad(loss(f), argnums=(0, 1))(*x)), 0, (q, k, v))[
        1
    ],
    "grad_of_checkpoint": lambda f, q, k, v: jax.grad(jax.checkpoint(loss(f)), argnums=(0, 1, 2))(q, k, v),
    "grad_of_checkpoint_with_a_policy": lambda f, q, k, v: jax.grad(
        jax.checkpoint(loss(f), policy=jax.checkpoint_policies.dots_saveable), argnums=(0, 1, 2)
    )(q, k, v),
    "grad_of_a_checkpointed_scan": lambda f, q, k, v: jax.grad(
        lambda *a: lax.scan(jax.checkpoint(lambda c, x: (c + loss(f)(x, *a[1:]), None)), 0.0, a[0])[0], argnums=(0, 1)
    )(q, k[0], v[0]),
    "grad_of_cond": lambda f, q, k, v: jax.grad(
        lambda q, k: lax.cond(q.sum() < 1e6, loss(f), lambda q, k, v: jnp.sum(q), q, k, v), argnums=(0, 1)
    )(q, k),
    "while": lambda f, q, k, v: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1], k, v)), (0, q)),
    "eval_shape": lambda f, q, k, v: jnp.zeros(jax.eval_shape(f, q, k, v).shape),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformed_function_gives_what_the_original_gives(name, qkv):
    function = optimized(require={"attention": 1})
    transform = TRANSFORMATIONS[name]
    same(jax.jit(lambda *a: transform(function, *a))(*qkv), jax.jit(lambda *a: transform(attend, *a))(*qkv), 3e-5)


@pytest.mark.parametrize(
    "axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, 0, None), (None, None, 1), (1, 0, 1)]
)
def test_vmap_over_any_of_the_operands(axes, qkv):
    function = optimized(require={"attention": 1})
    arguments = [x if axis is not None else x[0] for x, axis in zip(qkv, axes, strict=True)]
    same(jax.vmap(function, axes)(*arguments), jax.vmap(attend, axes)(*arguments))


@pytest.mark.parametrize("name", ["grad", "vjp", "grad_of_scan", "grad_of_checkpoint", "grad_of_cond", "vmap_of_grad"])
def test_reverse_mode_runs_the_backward_kernel(name, qkv):
    function = optimized()
    names = primitives(jax.make_jaxpr(lambda *a: TRANSFORMATIONS[name](function, *a))(*qkv))
    assert "autopallas_site" in names
    assert "autopallas_site_backward" in names


def test_vmap_does_not_loop_over_examples(qkv):
    jaxpr = jax.make_jaxpr(jax.vmap(optimized()))(*qkv)
    assert "autopallas_site" in primitives(jaxpr)
    assert not {"scan", "while"} & primitives(jaxpr)


def test_shared_operands_of_a_vmap_are_not_copied(qkv):
    q, k, v = qkv
    jaxpr = str(jax.make_jaxpr(jax.vmap(optimized(), (0, None, None)))(q, k[0], v[0]))
    assert f"f32[{B},{H},{S},{D}]" not in jaxpr


def test_nothing_is_differentiated_where_no_derivative_is_asked_for(qkv):
    names = primitives(jax.make_jaxpr(lambda *a: optimized()(*a))(*qkv))
    assert "autopallas_site" in names
    assert not {"autopallas_site_tangent", "autopallas_site_backward"} & names


def test_without_jit_the_results_are_the_same(qkv):
    expected = jax.value_and_grad(loss(attend))(*qkv)
    with jax.disable_jit():
        function = optimized(require={"attention": 1})
        given = jax.value_and_grad(loss(function))(*qkv)
    same(given, expected)


@pytest.mark.parametrize("platforms", [["cpu"], ["tpu"], ["cpu", "tpu", "cuda"]])
def test_exported_for_platforms(platforms, qkv):
    from jax import export

    exported = export.export(jax.jit(optimized(require={"attention": 1})), platforms=platforms)(*qkv)
    assert list(exported.platforms) == platforms
    if "cpu" in platforms:
        same(exported.call(*qkv), attend(*qkv))


def test_exported_with_its_derivative_and_read_back(qkv):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    from jax import export

    exported = export.export(jax.jit(optimized()))(*qkv)
    again = export.deserialize(exported.serialize(vjp_order=1))
    same(again.call(*qkv), attend(*qkv))
    same(jax.grad(loss(again.call), argnums=(0, 1))(*qkv), jax.grad(loss(attend), argnums=(0, 1))(*qkv))


def test_eight_threads_trace_at_once(qkv):
    function = optimized(require={"attention": 1})
    barrier, results, errors = threading.Barrier(8), {}, []

    def work(i):
        try:
            barrier.wait()
            arguments = [x[..., : 1 + i % 3] if n < 2 else x for n, x in enumerate(qkv)]
            results[i] = function(*arguments), attend(*arguments)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(results) == 8
    for given, expected in results.values():
        same(given, expected)


def test_the_outermost_of_nested_optimized_functions_owns_the_rewrite(qkv):
    inner = optimized()
    outer = optimized(lambda q, k, v: inner(q, k, v) + attend(q, k * 2, v))
    same(outer(*qkv), attend(*qkv) + attend(qkv[0], qkv[1] * 2, qkv[2]))
    assert outer.report().counts()["attention"] == 2
    assert inner.report().sites == ()
    inner(*qkv)
    assert inner.report().counts()["attention"] == 1


def test_an_existing_jit_around_an_optimized_function_is_traced_again_inside_another(qkv):
    inner = optimized()
    jitted = jax.jit(inner)
    jitted(*qkv)
    outer = optimized(lambda *a: jitted(*a))
    outer(*qkv)
    assert outer.report().counts()["attention"] == 1


@pytest.mark.parametrize("around", [lambda f: f, lambda f: jax.grad(lambda *qkv: loss(f)(*qkv))], ids=["value", "grad"])
def test_taylor_mode_computes_with_the_original(around, qkv):
    def terms(f):
        return jet.jet(around(f), qkv, [(x, 2 * x, -x) for x in qkv])

    run = optimized(attend)
    given, wanted = jax.jit(lambda: terms(run))(), terms(attend)
    assert run.report().counts()["attention"] == 1
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    "around", [lambda f: f, lambda f: jax.grad(lambda *qkv: loss(f)(*qkv)), jax.vmap], ids=["value", "grad", "map"]
)
@pytest.mark.parametrize("errors", [checkify.float_checks, checkify.user_checks], ids=["floats", "own"])
@pytest.mark.parametrize("bad", [False, True])
def test_checkify_looks_for_the_errors_of_the_original(around, errors, bad, qkv):
    """A site is one equation, in which nothing was checked: NaNs went unnoticed."""
    q, *rest = qkv
    given = q.at[0, 0, 0, 0].set(jnp.nan) if bad else q
    run = optimized(attend)
    wanted, expected = checkify.checkify(around(attend), errors=errors)(given, *rest)
    found, results = checkify.checkify(around(run), errors=errors)(given, *rest)
    checked = errors == checkify.float_checks
    assert (found.get() is None) == (wanted.get() is None) == (not (checked and bad))
    same(results, expected)
    (site,) = run.report().sites
    assert site.verdict == ("kept" if checked else "applied")
    assert ("checkify" in site.reason) == checked


def test_debug_nans_does_not_see_nans_that_the_original_lacks(qkv):
    with jax.debug_nans(True):
        same(jax.grad(loss(optimized()))(*qkv), jax.grad(loss(attend))(*qkv))


def test_leaks_no_tracer(qkv):
    with jax.checking_leaks():
        same(jax.jit(jax.grad(loss(optimized())))(*qkv), jax.grad(loss(attend))(*qkv))


def test_in_64_bits(qkv):
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in qkv]
        function = optimized(require={"attention": 1})
        given = jax.value_and_grad(loss(function))(*wide)
        assert given[0].dtype == np.float64
        same(given, jax.value_and_grad(loss(attend))(*wide), 1e-12)


WIDE_PARTS = {
    "attention": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "layer_norm": lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-9),
    "gated_mlp": lambda x: jax.nn.silu(x @ x.T) * (x @ (x.T + 1)),
    "respelling": lambda x: jnp.cumsum(x, 0),
}


@pytest.mark.parametrize("name", WIDE_PARTS)
@pytest.mark.parametrize("derivative", [False, True])
def test_a_part_that_enables_64_bits_itself_computes_with_64_bits(name, derivative):
    """A kernel would be traced where they are not enabled, and compute with 32."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 8)) + 1000, jnp.float32)

    def function(x):
        with jax.enable_x64(True):
            result = WIDE_PARTS[name](lax.convert_element_type(x, jnp.float64) - 999)
            return lax.convert_element_type(result, jnp.float32)

    program = jax.grad(lambda x: jnp.sum(jnp.sin(function(x)))) if derivative else function
    run = autopallas.optimize(lambda x: program(x), objective="always", strict=True)
    given, expected = run(x), jax.jit(program)(x)
    np.testing.assert_array_equal(given, expected)
    kept = [site for site in run.report().sites if site.op == name]
    assert all(site.verdict == "kept" and "64-bit types" in site.reason for site in kept)
    assert kept or derivative


def test_under_strict_promotion(qkv):
    with jax.numpy_dtype_promotion("strict"):
        same(jax.jit(jax.grad(loss(optimized(require={"attention": 1}))))(*qkv), jax.grad(loss(attend))(*qkv))


# --- Failures inside -------------------------------------------------------------------------------------------------

STAGES = {
    "graph": "autopallas.pipeline.Graph",
    "patterns": "autopallas.pipeline.find",
    "plan": "autopallas.pipeline.plan",
    "rewrite": "autopallas.fallback.splice.splice",
}


def _break(monkeypatch, stage):
    import sys

    def broken(*args, **kwargs):
        raise ZeroDivisionError(f"broken {stage}")

    module, name = STAGES[stage].rsplit(".", 1)
    monkeypatch.setattr(sys.modules[module], name, broken)


@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_inside_leaves_the_program_as_it_was_with_one_warning(stage, qkv, monkeypatch):
    _break(monkeypatch, stage)
    function = optimized(strict=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = function(*qkv)
        function(*qkv)
    assert len([w for w in caught if issubclass(w.category, AutopallasWarning)]) == 1
    np.testing.assert_array_equal(given, jax.jit(attend)(*qkv))
    (failure,) = function.report().failures
    assert failure.stage == stage
    assert "ZeroDivisionError: broken" in failure.error
    assert function.report().counts()["attention"] == 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_inside_is_raised_under_strict(stage, qkv, monkeypatch):
    _break(monkeypatch, stage)
    with pytest.raises(ZeroDivisionError, match="broken"):
        optimized()(*qkv)
