"""Which tolerance a result has: that of what the original rounds on the way to it, for the program and for a site."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopallas
from autopallas.kernels.attention import xla
from autopallas.numerics.compare import tolerance
from autopallas.numerics.rounding import sources_of
from autopallas.sites import calls

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
WIDE, NARROW = jnp.ones((4, 4), F32), jnp.ones((4, 4), BF16)


def looped(x, y):
    return lax.while_loop(lambda c: c[0].sum() < 9, lambda c: (c[0] + 1, c[1] @ x, (c[2] @ y).astype(F32)), (x, x, x))


def scanned(x, y):
    def step(carry, row):
        return carry.astype(BF16).astype(F32) + row.sum(), row.sum()

    return lax.scan(step, x[0, 0], y.astype(F32))


@pytest.mark.parametrize(
    "function, wanted",
    [
        (lambda x, y: x @ y.astype(F32), [F32]),
        (lambda x, y: y.T[1:].reshape(2, 6), [None]),
        (lambda x, y: jnp.where(x > 0, y, -y).astype(F32), [None]),
        (lambda x, y: (y + y).astype(F32) * x, [BF16]),
        (lambda x, y: x.astype(BF16).astype(F32) @ x, [BF16]),
        (lambda x, y: lax.reduce_precision(x, 8, 7) @ x, [BF16]),
        (lambda x, y: (x @ x, y @ y), [F32, BF16]),
        (lambda x, y: jnp.einsum("ij,jk->ik", y, y, preferred_element_type=F32), [F32]),
        (lambda x, y: jax.jit(lambda a, b: a @ b.astype(F32))(x, y), [F32]),
        (lambda x, y: lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: (y @ y).astype(F32)), [BF16]),
        (lambda x, y: jax.checkpoint(lambda a, b: jnp.sin(a) * b.astype(F32))(x, y), [F32]),
        (scanned, [BF16, F32]),
        (looped, [F32, F32, F32]),
        (lambda x, y: lax.fori_loop(0, 3, lambda _, c: (c[1] @ c[1], x.astype(F16).astype(F32)), (x, x)), [F16, F16]),
    ],
)  # fmt: skip
def test_what_a_result_is_rounded_to(function, wanted):
    found = [source.dtype for source in sources_of(jax.make_jaxpr(function)(WIDE, NARROW))]
    assert found == [None if d is None else np.dtype(d) for d in wanted]


def attend(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("td,sd->ts", q, k) / 4, axis=-1)
    return jnp.einsum("ts,sd->td", weights, v)


def rounding(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("td,sd->ts", q, k) / 4, axis=-1).astype(v.dtype)
    return jnp.einsum("ts,sd->td", weights, v, preferred_element_type=jnp.float32)


def stepped(q, k, v):
    return lax.scan(lambda carry, x: (carry, attend(x, k, v)), None, q[None])[1][0]


@pytest.fixture
def planted(monkeypatch):
    """An error of a thousandth in the kernels' results."""
    forget = [calls.kernel_forward.cache_clear, calls.kernel_backward.cache_clear]
    true = xla.forward

    def wrong(*args, **kwargs):
        out, *rest = true(*args, **kwargs)
        return (out * 1.001, *rest)

    monkeypatch.setattr(xla, "forward", wrong)
    for clear in forget:
        clear()
    yield
    monkeypatch.undo()
    for clear in forget:
        clear()


@pytest.mark.parametrize("function, dtype", [(attend, F32), (stepped, F32), (rounding, BF16)])
def test_the_program_and_its_site_have_one_tolerance(planted, function, dtype):
    random = np.random.default_rng(3)
    q, k, v = (
        jnp.asarray(random.standard_normal((n, 16)), d) for n, d in ((24, F32), (32, BF16), (32, BF16))
    )  # fmt: skip
    always = functools.partial(autopallas.optimize, objective="always")
    if dtype == BF16:  # of which a thousandth is less than a rounding
        assert autopallas.verify(always(function), q, k, v).ok
        return
    with pytest.raises(autopallas.VerificationError) as caught:
        autopallas.verify(always(function), q, k, v)
    verification = caught.value.verification
    (output,), (site,) = verification.outputs, verification.sites
    assert not site.ok
    assert output.allowed == site.outputs[0].allowed == tolerance(dtype, gradient=False)
