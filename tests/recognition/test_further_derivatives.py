"""Near misses in derivatives that no site stands in for say so, and ask for no change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.compare import optimized_like_a_user

import autopallas

W = jax.random.normal(jax.random.key(1), (8, 8)) / 3
X = jax.random.normal(jax.random.key(2), (6, 8))
CLASSES = jnp.arange(6) % 5


def attend(w, x):
    return jax.nn.softmax((x @ w) @ x.T) @ x


def norm(w, x):
    y = x @ w
    return y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * w[0]


def classify(w, x):
    logs = jax.nn.log_softmax(jnp.sin(x @ w) @ w[:, :5])
    return -jnp.take_along_axis(logs, CLASSES[:, None], 1)


def loss(function):
    return lambda w: jnp.sum(jnp.sin(function(w, X)))


def forward_mode(function):
    return lambda w: jax.jvp(loss(function), (w,), (w,))


def hessian_product(function):
    return lambda w: jax.jvp(jax.grad(loss(function)), (w,), (w,))


def inner_step(function):
    return jax.value_and_grad(lambda w: loss(function)(w - 0.1 * jax.grad(loss(function))(w)))


@pytest.mark.parametrize(
    "function, derivative, op, which",
    [
        (attend, forward_mode, "attention", "in a derivative in forward mode"),
        (attend, hessian_product, "attention", "in a second derivative"),
        (attend, inner_step, "attention", "in a second derivative"),
        (norm, hessian_product, "rms_norm", "in a second derivative"),
        (norm, inner_step, "rms_norm", "in a second derivative"),
        (classify, inner_step, "cross_entropy", "in a second derivative"),
    ],
)
def test_a_near_miss_says_which_derivative_reads_its_values(function, derivative, op, which):
    report = autopallas.explain(optimized_like_a_user(derivative(function)), W)
    (miss,) = (miss for miss in report.near_misses if miss.op == op)
    assert which in miss.reason
    assert miss.advice.startswith("Nothing has to be changed")


@pytest.mark.parametrize("function, op", [(attend, "attention"), (norm, "rms_norm")])
def test_what_the_function_itself_reads_is_no_derivative(function, op):
    def with_more(w, x):
        scores = (x @ w) @ x.T if op == "attention" else x @ w
        values = jax.nn.softmax(scores) if op == "attention" else jnp.mean(scores * scores, -1, keepdims=True)
        return function(w, x) + jnp.cos(values).sum()

    report = autopallas.explain(optimized_like_a_user(jax.value_and_grad(loss(with_more))), W)
    (miss,) = (miss for miss in report.near_misses if miss.op == op)
    assert "also used by" in miss.reason
    assert not any(which in miss.reason for which in ("forward mode", "second derivative"))
