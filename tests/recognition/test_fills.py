"""Causal masks with finite fills are causal masks: found in any spelling, and right for any numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.catalogue import array
from support.compare import compare, compiled, optimized_like_a_user

import autopallas

T = 509
"""More than one tile along each axis, the last ones not whole."""


def seen(s):
    return jnp.tril(jnp.ones(s.shape[-2:], bool))


def softmax_over(masked):
    def attend(q, k, v):
        return jax.nn.softmax(masked(q @ k.mT / np.sqrt(q.shape[-1]).astype(q.dtype)), axis=-1) @ v

    return attend


MASKS = {
    "-1e9": lambda s: jnp.where(seen(s), s, -1e9),
    "-1e10 as an array": lambda s: jax.lax.select(jnp.broadcast_to(seen(s), s.shape), s, jnp.full_like(s, -1e10)),
    "-1e4 where the mask is 0": lambda s: jnp.where(seen(s).astype(s.dtype) == 0, -1e4, s),
    "-1e30": lambda s: jnp.where(seen(s), s, -1e30),
    "-inf, then divided": lambda s: jnp.where(seen(s), s, -jnp.inf) / 2.5,
    "-inf added": lambda s: s + jnp.where(seen(s), 0, -jnp.inf),
    "an upper triangle of -inf": lambda s: s + jnp.triu(jnp.full(s.shape[-2:], -jnp.inf, s.dtype), 1),
    "an upper triangle times -1e9": lambda s: s + jnp.triu(jnp.ones(s.shape[-2:], s.dtype), 1) * -1e9,
    "finfo.min added": lambda s: s + jnp.where(seen(s), 0, jnp.finfo(s.dtype).min).astype(s.dtype),
    "(1 - mask) * -1e10": lambda s: s + (1.0 - seen(s).astype(s.dtype)) * -1e10,
    "(mask - 1) * 1e4": lambda s: s + (seen(s).astype(s.dtype) - 1) * 1e4,
    "s * mask - 1e9 * (1 - mask)": lambda s: s * seen(s) - 1e9 * (1 - seen(s).astype(s.dtype)),
    "log(mask)": lambda s: s + jnp.log(seen(s).astype(s.dtype)),
    "by positions": lambda s: s - 1e9 * (jnp.arange(T)[None, :] > jnp.arange(T)[:, None]).astype(s.dtype),
    "minimum": lambda s: jnp.minimum(s, jnp.where(seen(s), jnp.inf, -1e9)),
    "with a soft cap": lambda s: 20 * jnp.tanh(s / 20) + jnp.where(seen(s), 0.0, -1e9),
    "with slopes": lambda s: jnp.where(
        seen(s), s - 0.25 * jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)).astype(s.dtype), -1e9
    ),
}
OTHERS = {
    "a small fill": lambda s: jnp.where(seen(s), s, -9.0),
    "a fill that is data": lambda s: jnp.where(seen(s), s, s[0, 0] - 1e9),
    "multiplied by a small number": lambda s: s + jnp.where(seen(s), 0.0, -1e9) * 1e-8,
    "capped after the mask": lambda s: 20 * jnp.tanh(jnp.where(seen(s), s, -1e9) / 20),
    "clipped after the mask": lambda s: jnp.maximum(jnp.where(seen(s), s, -1e9), -30.0),
    "a great fill": lambda s: jnp.where(seen(s), s, 1e9),
    "where scores decide": lambda s: jnp.where(s > 0, s, -1e9),
}


def qkv(*leading, length=T, dtype=jnp.float32):
    return tuple(array(*leading, length, 8, seed=n).astype(dtype) for n in range(3))


def checks(function, *arguments):
    """What is checked at run time at each site that is replaced."""
    report = autopallas.explain(optimized_like_a_user(function), *arguments)
    assert report.failures == ()
    applied = [site for site in report.sites if (site.op, site.verdict) == ("attention", "applied")]
    return [(site.spec["mask_class"], site.checks) for site in applied]


def hides(function, *arguments, sites=1):
    found = checks(function, *arguments)
    assert len(found) == sites
    return all(mask == "causal" and len(said) == 1 and "checked at run time" in said[0] for mask, said in found)


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_found(name):
    assert hides(softmax_over(MASKS[name]), *qkv(2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["-1e4 where the mask is 0", "finfo.min added", "(mask - 1) * 1e4"])
def test_masks_of_narrow_scores_are_found(name, dtype):
    assert hides(softmax_over(MASKS[name]), *qkv(2, dtype=dtype))


@pytest.mark.parametrize("name", OTHERS)
def test_others_hide_nothing(name):
    found = checks(softmax_over(OTHERS[name]), *qkv(2))
    assert all(said == () for _, said in found)


def test_the_report_names_mask_and_fill():
    attend = softmax_over(MASKS["-1e9"])
    report = autopallas.explain(optimized_like_a_user(attend), *qkv(2))
    (site,) = report.sites
    assert "causal mask with fill -1e9" in site.spec_line
    assert site.checks == (
        "causal mask, fill -1e9: its tiles are skipped where each row's maximum proves them zero (checked at run time)",
    )
    assert "maximum proves them zero" in " ".join(str(report).split())
    assert site.assumptions == ()
    assert "skipped where that is shown to change nothing" in report.to_html()


def layers(mask, remat=False):
    def step(x, w):
        q, k, v = (x @ a for a in w)
        return x + softmax_over(mask)(q, k, v), None

    def loss(ws, x):
        return jnp.sin(jax.lax.scan(jax.checkpoint(step) if remat else step, x, ws)[0]).sum()

    return loss


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", ["-1e9", "finfo.min added"])
def test_train_steps_over_layers(name, remat):
    ws, x = tuple(array(2, 8, 8, seed=n) * 0.3 for n in range(3)), array(T, 8, seed=5)
    assert hides(jax.grad(layers(MASKS[name], remat)), ws, x)


def test_under_vmap():
    arguments = qkv(2, 3)
    assert hides(jax.vmap(jax.vmap(softmax_over(MASKS["-1e9"]))), *arguments)
    assert hides(jax.vmap(softmax_over(MASKS["-1e9"]), 1, 1), *arguments)


@pytest.mark.parametrize("name", ["-1e9", "finfo.min added", "s * mask - 1e9 * (1 - mask)", "-inf, then divided"])
def test_values_and_gradients(name):
    compared = compare(softmax_over(MASKS[name]), qkv(1))
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()


@pytest.mark.parametrize("size", [1e3, 1e5])
@pytest.mark.parametrize("name", ["-1e4 where the mask is 0", "(mask - 1) * 1e4"])
def test_values_and_gradients_where_scores_are_as_low_as_the_fill(name, size):
    """Of the rows in the middle every score of a live key is about the fill, or far below it."""
    q, k, v = qkv(1)
    k = k.at[..., 0].set(1.0)
    q = q.at[:, 140:150].set(0.0).at[:, 140:150, 0].set(-size * np.sqrt(8) * 10)
    compared = compare(softmax_over(MASKS[name]), (q, k, v))
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()


def test_rows_that_padding_hides_entirely():
    """Causal and padded on the left: rows of padding have no key, and the mean of all values."""
    shown = jnp.arange(T) >= jnp.array([[0], [40], [T]])

    def attend(q, k, v):
        return softmax_over(lambda s: jnp.where(seen(s) & shown[:, None], s, -1e9))(q, k, v)

    ((_, said),) = checks(attend, *qkv(3))
    assert "part of the mask" in said[0]
    compared = compare(attend, qkv(3))
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_not_finite_goes_where_it_went(where, number):
    """Also where a hidden key is, of which the original multiplies a weight of 0."""
    given = dict(zip("qkv", qkv(1), strict=True))
    given[where] = given[where].at[0, -3, 2].set(number)
    for name in ("-1e9", "(1 - mask) * -1e10"):
        attend = softmax_over(MASKS[name])

        def both(q, k, v, attend=attend):
            out, pull = jax.vjp(attend, q, k, v)
            return out, pull(jnp.cos(out).at[:, T // 2 :].set(0.0))

        found, wanted = (compiled(f)(*given.values()) for f in (optimized_like_a_user(both), both))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))


@pytest.mark.parametrize("scores", ["multiplied", "scaled", "selected"])
@pytest.mark.parametrize("rows", [(T, 1), (T, T)], ids=str)
def test_gradients_of_a_bias_that_is_not_a_number_are_none(scores, rows):
    """Where the sum with the bias is multiplied, too: by the mask, or by a number."""
    q, k, v = (x[0] for x in qkv(1))
    bias = jnp.zeros(rows).at[30].set(jnp.nan)
    spelling = {
        "multiplied": lambda s, b: (s + b) * seen(s) - (1.0 - seen(s)) * 1e9,
        "scaled": lambda s, b: (s + b) * 2.0,
        "selected": lambda s, b: jnp.where(seen(s), s + b, -1e9),
    }[scores]

    def gradients(q, k, v, b):
        loss = lambda q, k, v, b: jnp.sin(jax.nn.softmax(spelling(q @ k.mT, b), axis=-1) @ v).sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, b)

    ours = autopallas.optimize(gradients, objective="always", strict=True, assume_finite=False)
    for found, wanted in zip(ours(q, k, v, bias), compiled(gradients)(q, k, v, bias), strict=True):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    assert ours.report().counts()["attention"] == 1
