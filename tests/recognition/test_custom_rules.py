"""Scores through functions with a derivative of their own: carried with that derivative, or left alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import softmax
from support.catalogue import ODD, array, bhtd
from support.compare import compare, compiled, optimized_like_a_user, with_gradients

from autopallas import jaxprs
from autopallas.graph.custom_rules import called_program, is_elementwise_call, rule_of, same_rule


def arguments():
    """Queries of which one is zero: all its scores lie where a rectifier has a kink."""
    q, k, v = bhtd(ODD, jnp.float32)
    return q.at[:, :, 2].set(0), k, v


def ruled(value, rule):
    """A function whose derivative is a user's choice."""
    function = jax.custom_jvp(value)
    function.defjvp(lambda primals, tangents: (value(*primals), rule(*primals, *tangents)))
    return function


doubled = ruled(jnp.tanh, lambda x, t: 2 * t * jnp.cos(x))
halved = ruled(jnp.tanh, lambda x, t: 0.5 * t * jnp.cos(x))
scaled = ruled(lambda x, y: x * jnp.exp(y), lambda x, y, t, u: t * jnp.exp(y) + 3 * u)
shifted = ruled(lambda x, n: x + n.astype(x.dtype), lambda x, n, t, _: t * (1 + n.astype(x.dtype)))

CARRIED = {
    "relu": jax.nn.relu,
    "squared_relu": lambda s: jax.nn.relu(s) ** 2 * 0.1,
    "relu6": jax.nn.relu6,
    "softplus": lambda s: -jax.nn.softplus(s),
    "log_sigmoid": jax.nn.log_sigmoid,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "xlogy": lambda s: jax.scipy.special.xlogy(0.3, 1 + s**2),
    "a_rule_that_is_no_derivative": doubled,
    "a_rule_of_two_operands": lambda s: scaled(s, s * 0.1),
    "a_rule_with_an_operand_of_integers": lambda s: shifted(s, jnp.arange(s.shape[-1])[None, None, None]),
}


@pytest.mark.parametrize("name", CARRIED)
def test_the_function_is_carried_with_its_derivative(name):
    compared = compare(lambda q, k, v: softmax(CARRIED[name](q @ k.mT)) @ v, arguments())
    assert compared.counts() == 1, compared.reasons()
    assert compared.complaints == []
    assert compared.reasons() == []


def test_functions_of_equal_values_keep_their_own_derivatives():
    def three(q, k, v):
        return softmax(doubled(q @ k.mT)) @ v, softmax(halved(2 * q @ k.mT)) @ v, softmax(doubled(3 * q @ k.mT)) @ v

    compared = compare(three, arguments())
    assert compared.complaints == []
    assert compared.counts() == 3, compared.reasons()


def test_second_derivatives_are_those_of_the_original():
    def attend(q, k, v):
        return softmax(jax.nn.softplus(q @ k.mT)) @ v

    def penalty(function):
        return jax.grad(lambda *a: jnp.sum(jax.grad(lambda *b: jnp.sum(jnp.sin(function(*b))))(*a) ** 2), argnums=1)

    optimized = optimized_like_a_user(attend)
    given = compiled(penalty(optimized))(*arguments())
    assert optimized.report().counts()["attention"] == 1
    np.testing.assert_allclose(given, compiled(penalty(attend))(*arguments()), rtol=2e-4, atol=2e-4)


summed = ruled(jnp.tanh, lambda x, t: t + 0 * jnp.sum(t, -1, keepdims=True))
table = np.linspace(0.5, 1.0, ODD.keys, dtype=np.float32)
tabled = ruled(jnp.tanh, lambda x, t: t * table)
refused_rule = jax.custom_vjp(jnp.tanh)
refused_rule.defvjp(lambda x: (jnp.tanh(x), None), lambda _, g: (2 * g,))
REFUSED = {"a_rule_with_a_sum": summed, "a_rule_with_an_array": tabled, "a_rule_for_cotangents": refused_rule}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_is_left_alone(name):
    def attend(q, k, v):
        return softmax(REFUSED[name](q @ k.mT)) @ v

    optimized = optimized_like_a_user(attend)
    given = compiled(with_gradients(optimized, arguments()))(*arguments())
    report = optimized.report()
    assert report.counts()["attention"] == 0
    assert "derivative of its own" in report.near_misses[0].reason
    expected = compiled(with_gradients(attend, arguments()))(*arguments())
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def _call(function):
    program = jaxprs.open_jaxpr(jax.make_jaxpr(function)(np.ones((2, 3), np.float32)))[0]
    (equation,) = (e for e in program.eqns if e.primitive.name == "custom_jvp_call")
    return equation


def test_rules_are_compared_by_what_they_compute():
    again = ruled(jnp.tanh, lambda x, t: 2 * t * jnp.cos(x))
    assert same_rule(_call(doubled), _call(doubled))
    assert same_rule(_call(doubled), _call(again))
    assert not same_rule(_call(doubled), _call(halved))
    assert called_program(_call(doubled)) == called_program(_call(halved))
    assert rule_of(_call(summed)) is None


def test_a_body_that_mixes_elements_is_not_elementwise():
    assert is_elementwise_call(_call(jax.nn.relu))
    assert not is_elementwise_call(_call(ruled(lambda x: x - jnp.sum(x), lambda x, t: t)))


def test_a_rule_that_vmap_maps_over_another_axis_is_elementwise_unless_it_mixes_axes():
    """Where experts are mapped behind tokens, a derivative's axes are permuted and permuted back."""

    def behind(function):
        return jax.vmap(jax.vmap(function, 0, 0), 1, 1)

    square = np.arange(9, dtype=np.float32).reshape(3, 3) - 4
    turned = ruled(jnp.tanh, lambda x, t: t * jnp.cos(x.T))
    found = {}
    for name, function in (("plain", jax.nn.relu), ("behind", behind(jax.nn.relu)), ("turned", turned)):
        program = jaxprs.open_jaxpr(jax.make_jaxpr(function)(square))[0]
        (equation,) = (e for e in program.eqns if e.primitive.name == "custom_jvp_call")
        found[name] = rule_of(equation)
    assert found["behind"] is not None
    assert found["behind"].value == found["plain"].value
    assert found["turned"] is None


@pytest.mark.parametrize("approximate", [True, False])
def test_a_derivative_that_has_some_of_the_cotangents_of_a_norms_rows_is_left_alone(approximate):
    """The rows are read twice, to be scaled and to be squared: the derivative has the cotangent of the first use, and
    something else for that of the second."""

    @jax.custom_vjp
    def norm(x, scale):
        return forward(x, scale)[0]

    def forward(x, scale):
        moment = jnp.sum(x * x, -1, keepdims=True) / x.shape[-1] + 1e-6
        root = jax.lax.rsqrt(moment)
        return x * root * scale, (x, scale, root, moment)

    def backward(kept, cotangent):
        x, scale, root, moment = kept
        rows = cotangent * scale
        of_root = jnp.sum(x * rows, -1, keepdims=True)
        of_moment = 0.1 * of_root if approximate else -0.5 * of_root * root / moment
        return rows * root + 2 * x * of_moment / x.shape[-1], jnp.sum(cotangent * x * root, 0)

    norm.defvjp(forward, backward)
    rows, scale = array(6, 8, seed=1), array(8, seed=2)

    def gradients(x, scale):
        return jax.grad(lambda x, scale: jnp.sum(jnp.sin(norm(x, scale))), (0, 1))(x, scale)

    assert compare(gradients, (rows, scale), gradients=False).complaints == []
