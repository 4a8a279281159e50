"""Own patterns: found where the program computes exactly the reference, compared before use, never trusted."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import autopallas
from autopallas.custom.registry import declared


@pytest.fixture(autouse=True)
def none_is_left():
    yield
    for one in declared():
        one.remove()


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def fails_without_a_word(x):
    raise AssertionError


def rms_norm(x, weight, *, eps):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def linear_relu(x, w, b):
    return jax.nn.relu(x @ w + b)


def declare_softmax(**options):
    calls = []

    @autopallas.pattern(softmax, shapes=[normal(4, 8)], **options)
    def own_softmax(x):
        calls.append(x.shape)
        e = jnp.exp(x - jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True)))
        return e / jnp.sum(e, axis=-1, keepdims=True)

    return own_softmax, calls


def declare_rms_norm(**options):
    """The user's own Pallas kernel, which JAX cannot differentiate."""

    def kernel(x, weight, out, *, eps):
        out[...] = x[...] * jax.lax.rsqrt(jnp.mean(x[...] * x[...], axis=-1, keepdims=True) + eps) * weight[...]

    @autopallas.pattern(rms_norm, shapes=[normal(4, 8), normal(8)], scalars=["eps"], **options)
    def own_rms_norm(x, weight, *, eps):
        rows = x.reshape(-1, x.shape[-1])
        shape = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
        return pl.pallas_call(functools.partial(kernel, eps=eps), out_shape=shape, interpret=True)(
            rows, weight
        ).reshape(x.shape)

    return own_rms_norm


def same(found, wanted, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * float(jnp.max(jnp.abs(y))))


def applied(fn, *args):
    """Optimizes, runs, compares with the original, and returns the report."""
    optimized = autopallas.optimize(fn, strict=True)
    same(optimized(*args), fn(*args))
    return optimized.report()


# --- the three worked examples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 7), (2, 1, 3, 16)])
def test_a_softmax_kernel_is_used_at_any_rank_and_size(shape):
    _, calls = declare_softmax()
    report = applied(lambda x: softmax(2 * x) + 1, normal(*shape))
    assert report.counts() == {"own_softmax": 1}
    assert shape in calls
    assert report.sites[0].implementation == "own_softmax"
    assert "compared" in report.sites[0].assumptions[0]


@pytest.mark.parametrize("differentiable", [True, False])
def test_matmul_and_activation_in_a_train_step_are_replaced_forward_and_backward(differentiable):
    @autopallas.pattern(linear_relu, shapes=[normal(4, 8), normal(8, 6), normal(6)], differentiable=differentiable)
    def own_linear(x, w, b):
        return jnp.maximum(jnp.dot(x, w) + b, 0)

    def loss(w, b, x):
        return jnp.sum(linear_relu(jnp.sin(x), w, b) ** 2)

    report = applied(jax.value_and_grad(loss, argnums=(0, 1, 2)), normal(8, 6), normal(6), normal(10, 8))
    assert [(s.op, s.direction, s.verdict) for s in report.sites] == [("own_linear", "forward+backward", "applied")]


def test_a_pallas_kernel_without_a_derivative_is_trained_through_the_reference():
    declare_rms_norm()

    def loss(layers, x):
        for w, scale in layers:  # the residual stream has further uses, which add to the cotangent
            x = x + jnp.tanh(rms_norm(x, scale, eps=1e-5) @ w)
        return jnp.mean(x**2)

    layers = [(normal(8, 8, seed=i), normal(8, seed=i + 5)) for i in range(2)]
    report = applied(jax.value_and_grad(loss, argnums=(0, 1)), layers, normal(2, 3, 8))
    assert report.counts() == {"own_rms_norm": 2}
    assert report.near_misses == ()


# --- what is found --------------------------------------------------------------------------------------------------


def test_scalars_are_read_from_the_program():
    declare_rms_norm()
    report = applied(lambda x, w: rms_norm(x, w, eps=0.25) + rms_norm(x, w, eps=3.0), normal(4, 8), normal(8))
    assert sorted(site.spec["scalars"]["eps"] for site in report.sites) == [0.25, 3.0]


def test_complex_programs_are_looked_through_for_real_scalars():
    @autopallas.pattern(
        lambda z, *, c: jnp.tanh(z * c) * (2 + 1j), shapes=[normal(4, 8).astype(jnp.complex64)], scalars={"c": 0.3}
    )
    def own_tanh(z, *, c):
        return jnp.tanh(z * c) * (2 + 1j)

    z = normal(4, 8) + 1j * normal(4, 8, seed=1)
    assert applied(lambda z: jnp.tanh(z * 0.75) * (2 + 1j), z).counts() == {"own_tanh": 1}
    assert applied(lambda z: jnp.tanh(z * (0.75 + 2j)) * (2 + 1j), z).counts() == {}


def test_operands_of_a_sum_or_product_may_be_exchanged():
    declare_rms_norm()

    def other(x, w):
        return w * (jax.lax.rsqrt(0.5 + jnp.mean(jnp.square(x) * 1, axis=-1, keepdims=True)) * x)

    def exchanged(x, w):
        return w * (jax.lax.rsqrt(0.5 + jnp.mean(x * x, axis=-1, keepdims=True)) * x)

    assert applied(exchanged, normal(4, 8), normal(8)).counts() == {"own_rms_norm": 1}
    assert applied(other, normal(4, 8), normal(8)).counts() == {}, "other equations"


def test_one_value_may_be_several_operands():
    @autopallas.pattern(lambda x, y: jnp.tanh(x) * y, shapes=[normal(8), normal(8)])
    def gate(x, y):
        return y * jnp.tanh(x)

    assert applied(lambda x: jnp.tanh(x + 1) * (x + 1), normal(4, 8)).counts() == {"gate": 1}


@pytest.mark.parametrize(
    "program",
    [
        lambda x: jax.nn.softmax(x, axis=0),
        lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x), axis=0, keepdims=True),
        lambda x: jax.nn.log_softmax(x),
        lambda x: jax.nn.softmax(x.astype(jnp.bfloat16).astype(jnp.int32).astype(jnp.float32), axis=0),
    ],
)
def test_what_computes_something_else_is_not_found(program):
    declare_softmax()
    assert applied(program, normal(8, 8)).counts() == {}


def test_it_is_found_in_loops_under_vmap_and_in_checkpoints():
    declare_rms_norm()

    def loss(stacked, x):
        def layer(x, parameters):
            w, scale = parameters
            return x + jnp.tanh(rms_norm(x, scale, eps=1e-5) @ w), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, stacked)[0] ** 2)

    stacked = (normal(3, 8, 8), normal(3, 8))
    report = applied(jax.value_and_grad(loss), stacked, normal(4, 8))
    found = [(s.path, s.direction) for s in report.sites if s.op == "own_rms_norm"]
    assert found == [("scan", "forward+backward")]


def test_the_rewritten_function_can_be_transformed_further():
    declare_softmax(differentiable=True)
    fn = autopallas.optimize(lambda x: softmax(3 * x), strict=True)
    x = normal(2, 4, 8)

    def plain(x):
        return softmax(3 * x)

    same(jax.vmap(fn)(x), plain(x))
    same(jax.grad(lambda x: jnp.sum(fn(x) ** 2))(x), jax.grad(lambda x: jnp.sum(plain(x) ** 2))(x))
    same(jax.vmap(jax.grad(lambda x: jnp.sum(fn(x) ** 2)))(x), jax.grad(lambda x: jnp.sum(plain(x) ** 2))(x))
    same(jax.jvp(fn, (x,), (x,)), jax.jvp(plain, (x,), (x,)))


def test_a_value_in_the_middle_that_is_needed_elsewhere_makes_a_near_miss():
    declare_rms_norm()

    def leaky(x, w):
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 0.5)
        return x * scale * w, jnp.log(scale)

    report = applied(leaky, normal(4, 8), normal(8))
    assert report.counts() == {}
    assert "also used by log at" in report.near_misses[0].reason
    assert "in a separate function" in report.near_misses[0].advice


def test_a_built_in_site_that_is_replaced_has_the_own_one_inside_it():
    declare_softmax()

    def attend(q, k, v):
        return softmax(q @ k.T) @ v

    x = normal(16, 8)
    report = autopallas.explain(autopallas.optimize(attend, objective="always"), x, x + 1, x - 1)
    assert report.counts() == {"attention": 1}
    report = autopallas.explain(attend, x, x + 1, x - 1)
    assert report.counts() == {"own_softmax": 1}, "attention is kept for want of evidence"


# --- what is not trusted --------------------------------------------------------------------------------------------


def test_a_wrong_replacement_is_not_used_and_the_report_says_so():
    @autopallas.pattern(softmax, shapes=[normal(4, 8)])
    def wrong_softmax(x):
        return jax.nn.softmax(x, axis=-1) * 1.001

    report = applied(lambda x: softmax(2 * x), normal(4, 8))
    assert report.counts() == {}
    assert "differs from the reference's by 0.001 of the largest value" in report.sites[0].reason


def test_a_wrong_derivative_is_not_used():
    @jax.custom_jvp
    def silent(x):
        return jax.nn.softmax(x, axis=-1)

    silent.defjvp(lambda primals, tangents: (silent(*primals), 0 * tangents[0]))
    autopallas.pattern(softmax, shapes=[normal(4, 8)], differentiable=True, name="silent")(silent)
    report = applied(jax.grad(lambda x: jnp.sum(softmax(2 * x) ** 2)), normal(4, 8))
    assert report.counts() == {}
    assert "gradient 0 differs" in report.sites[0].reason


@pytest.mark.parametrize(
    ("replacement", "reason"),
    [
        (lambda x: x[0], "gives float32[8] where the reference gives float32[4, 8]"),
        (lambda x: softmax(x).astype(jnp.bfloat16), "gives bfloat16[4, 8]"),
        (lambda x: jnp.reshape(x, (3, 5)), "fails with TypeError"),
        (fails_without_a_word, "fails with AssertionError"),
        (lambda x: softmax(x) * jnp.nan, "differs from the reference's"),
    ],
)
def test_a_replacement_that_cannot_be_used_leaves_the_program_as_it_was(replacement, reason):
    autopallas.pattern(softmax, shapes=[normal(4, 8)], name="odd")(replacement)
    fn = autopallas.optimize(lambda x: softmax(2 * x))
    same(fn(normal(4, 8)), softmax(2 * normal(4, 8)))
    assert fn.report().counts() == {}
    assert reason in fn.report().sites[0].reason


@pytest.mark.parametrize("called", ["another", "itself"])
def test_a_replacement_may_call_an_optimized_function_with_sites_of_patterns(called):
    """Each site is compared before its first use, the one while the other is; a comparison does not wait for itself."""
    inner = autopallas.optimize(softmax)
    if called == "another":
        declare_softmax()

    def reference(x):
        return softmax(x) if called == "itself" else jnp.tanh(softmax(x) + 1)

    @autopallas.pattern(reference, shapes=[normal(4, 8)])
    def calls_it(x):
        return inner(x) if called == "itself" else jnp.tanh(inner(x) + 1)

    x, optimized = normal(6, 8), autopallas.optimize(reference, strict=True)
    thread = threading.Thread(target=optimized, args=(x,), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "a comparison waits for itself"
    same(optimized(x), reference(x))
    assert optimized.report().counts()["calls_it"] == 1


@pytest.mark.parametrize("first", ["its own", "another"])
def test_a_replacement_that_calls_its_own_reference_optimized_ends(first):
    """Its own sites in it are left as they are, in calls of any shape and after a call that replaced them."""
    inner = autopallas.optimize(softmax)

    @autopallas.pattern(softmax, shapes=[normal(4, 8)])
    def twice(x):
        return inner(jnp.concatenate([x, x]))[: x.shape[0]]

    x, another = normal(6, 8), autopallas.optimize(lambda x: softmax(jnp.sin(x)))
    for function in (inner, another) if first == "its own" else (another, inner):
        same(function(x), softmax(x if function is inner else jnp.sin(x)))
    assert another.report().counts()["twice"] == 1


def test_another_platforms_pattern_is_kept():
    declare_softmax(platforms=["tpu"])
    assert "the pattern is for tpu" in applied(lambda x: softmax(2 * x), normal(4, 8)).sites[0].reason


def test_explain_runs_no_replacement():
    _, calls = declare_softmax()
    report = autopallas.explain(lambda x: softmax(2 * x), normal(4, 8))
    assert report.counts() == {"own_softmax": 1}
    assert "before its first use" in report.sites[0].reason
    assert len(calls) <= 1, "traced for its types at most"


def test_options_switch_own_patterns_off():
    declare_softmax()
    x = normal(4, 8)
    assert autopallas.explain(autopallas.optimize(lambda x: softmax(2 * x), ops="attention"), x).counts() == {}
    assert autopallas.explain(autopallas.optimize(lambda x: softmax(2 * x), fuel=0), x).counts() == {}


def test_own_sites_can_be_required():
    declare_softmax()
    fn = autopallas.optimize(lambda x: softmax(2 * x), require={"own_softmax": 1})
    fn(normal(4, 8))
    fn = autopallas.optimize(lambda x: x + 1, require={"own_softmax": 1})
    with pytest.raises(autopallas.RequirementError, match="own_softmax: 0 of 1"):
        fn(normal(4, 8))


def test_a_removed_pattern_is_not_looked_for():
    own, _ = declare_softmax()
    same(own(normal(4, 8)), softmax(normal(4, 8)))
    own.remove()
    assert autopallas.explain(lambda x: softmax(2 * x), normal(4, 8)).sites == ()


# --- what cannot be declared ----------------------------------------------------------------------------------------

ARRAY = np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("reference", "options", "message"),
    [
        (3, {}, "is a function, not 3"),
        (softmax, {"shapes": []}, "has at least one operand"),
        (softmax, {"shapes": [normal(4), normal(4)]}, "cannot be traced: TypeError"),
        (lambda x: (x + 1, x + 2), {}, "returns 2 arrays, not one"),
        (fails_without_a_word, {}, "cannot be traced: AssertionError$"),
        (lambda x: x, {}, "computes nothing"),
        (lambda x: jnp.ones(3), {}, "does not use its operand 0"),
        (lambda x: x + jnp.asarray(ARRAY), {}, "holds an array of its own"),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x * 2, x), {}, "holds a scan|holds a while"),
        (lambda x, *, a: x + 1, {"scalars": ["a"]}, "does not use its scalar a as it is given"),
        (lambda x, *, a: x + a * a, {"scalars": ["a"]}, "does not use its scalar a as it is given"),
        (softmax, {"scalars": "eps"}, "give a list of names"),
        (softmax, {"scalars": 3}, "scalars is 3; give a list of names"),
        (softmax, {"shapes": 8}, "shapes is 8; give a list"),
        (softmax, {"platforms": None}, "platforms is None; give a list"),
        (softmax, {"name": 3}, "name is 3; give a word"),
        (softmax, {"inputs": [1]}, r"inputs is \[1\]; give a function"),
        (softmax, {"rows": ["M"]}, r"rows is \['M'\]; give letters"),
        (softmax, {"operands": {"x": "M"}, "result": "M", "sizes": ["M"]}, r"sizes is \['M'\]; give names"),
        (softmax, {"replacement": 3}, "replacement of a pattern is a function, not 3"),
        (softmax, {"name": "attention"}, "is no name for a pattern"),
        (softmax, {"name": "a b"}, "is no name for a pattern"),
        (softmax, {"platforms": "tpu"}, "give a list out of cpu, gpu, tpu"),
        (lambda x, *, a: x + a, {"scalars": ["a"], "replacement": lambda x: x}, "takes no keyword argument a"),
    ],
)
def test_what_cannot_be_looked_for_is_refused_when_it_is_declared(reference, options, message):
    options = {"shapes": [normal(8)], "name": "odd"} | options
    replacement = options.pop("replacement", lambda x, **scalars: x)
    with pytest.raises(autopallas.OptionError, match=message):
        autopallas.pattern(reference, **options)(replacement)
    assert declared() == ()


class TestNumerics:
    """What a pattern claims of its numerics, and the option that allows it."""

    @staticmethod
    def declared(kernel, **options):
        return autopallas.pattern(lambda x: jnp.sum(jnp.tanh(x), axis=-1), shapes=[normal(4, 8)], **options)(kernel)

    @staticmethod
    def site(allowed):
        optimized = autopallas.optimize(lambda x: 1 + jnp.sum(jnp.tanh(x), axis=-1), numerics=allowed)
        optimized(normal(3, 1000))
        (site,) = optimized.report().sites
        return site

    def test_by_default_it_is_allowed_under_tolerance_alone(self):
        self.declared(lambda x: jnp.sum(jnp.tanh(x), axis=-1), name="summed")
        assert self.site("tolerance").numerics == "tolerance"
        kept = self.site("reordered")
        assert kept.verdict == "kept"
        assert "'reordered' does not allow" in kept.reason

    def test_what_claims_to_be_reordered_is_allowed_there(self):
        self.declared(lambda x: jnp.sum(jnp.tanh(x)[..., ::-1], axis=-1), name="summed", numerics="reordered")
        assert self.site("reordered").verdict == "applied"
        assert self.site("identical").verdict == "kept"

    def test_what_claims_to_be_identical_is_compared_bit_by_bit(self):
        self.declared(lambda x: jnp.sum(jnp.tanh(x)[..., ::-1], axis=-1), name="summed", numerics="identical")
        wrong = self.site("identical")
        assert wrong.verdict == "kept"
        assert "other bits than the reference's" in wrong.reason
        self.declared(lambda x: jnp.sum(jnp.tanh(x), axis=-1), name="summed", numerics="identical")
        assert self.site("identical").numerics == "identical"

    def test_another_word_is_refused(self):
        with pytest.raises(autopallas.OptionError, match="numerics is 'exact'; give one of identical"):
            self.declared(jnp.sum, name="summed", numerics="exact")
