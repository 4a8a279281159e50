"""The kernels of norms whose rows are turned behind them, interpreted, against the reference in float64."""

from __future__ import annotations

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_declared_kernels import NOISE, ULPS, interpreted, small_memory  # noqa: F401 (a fixture)

from autopallas import compat
from autopallas.errors import UnsupportedError
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, operation_named

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
H100 = Device("gpu", "NVIDIA H100 80GB HBM3")
each_norm = pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
MISSING = compat.missing_mosaic_gpu()
needs_mosaic = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def site(op, sizes, dtype, angles, columns=None, tables=F32, own=1, each=(1, 1), adds=False, models=False, **more):
    """A spec and its operands.

    Args:
      op: the operation.
      sizes: models, positions, neighbouring rows of each, and how often all of them come.
      dtype: of the rows.
      angles, columns: how many there are; by default all columns are turned.
      tables: the dtype of cosines and sines.
      own: 2 where the columns of a pair have cosines of their own.
      each: how many models, and how many neighbouring rows, have cosines of their own.
      adds: whether a residual is added, and its sum given.
      models: whether each has a scale of its own.
      more: further fields of the spec.
    """
    (batch, positions, heads, times), columns, dtype = sizes, columns or 2 * angles, jnp.dtype(dtype)
    rows, random = positions * heads * times, np.random.default_rng(0)

    def array(*shape, of=F32):
        return jnp.asarray(random.standard_normal(shape), of)

    found = {"x": array(batch, rows, columns, of=dtype), "scale": array(batch if models else 1, columns)}
    found |= {name: array(each[0], positions, each[1], own, angles, of=tables) for name in ("cos", "sin")}
    if adds:
        found |= {"shift": array(1, columns), "residual": array(batch, rows, columns, of=dtype)}
    dtypes = {f"{name}_dtype": jnp.dtype(x.dtype) for name, x in found.items()}
    spec = replace(
        operation_named(op).sample, batch=batch, rows=rows, columns=columns, positions=positions, heads=heads,
        own_of_pair=own, angles=angles, result_dtype=dtype, sum_dtype=dtype if adds else None, **dtypes, **more,
    )  # fmt: skip
    return spec, found


def check(op, implementation, spec, operands):
    """Results and all gradients are as near to those in float64 as the reference's."""
    operation = operation_named(op)
    module, random = operation.implementation(implementation), np.random.default_rng(1)
    shape = spec.batch, spec.rows, spec.columns
    count = 1 if spec.sum_dtype is None else 2
    cotangents = tuple(jnp.asarray(random.standard_normal(shape), spec.result_dtype) for _ in range(count))

    def results(found):
        return found if isinstance(found, tuple) else (found,)

    def by_reference(spec, operands, cotangents):
        found, pull = jax.vjp(lambda operands: results(operation.reference(spec, **operands)), operands)
        return dict(enumerate(found)) | pull(tuple(cotangents))[0]

    with interpreted(implementation):
        assert operation.supports(implementation, spec, Device("cpu", "cpu")) == Supported()
        found = results(jax.jit(lambda operands: module.forward(spec, None, operands))(operands))
        known = operands if count == 1 else operands | {"sum": found[1]}
        given = cotangents if count > 1 else cotangents[0]
        wanted = frozenset(operands)
        gradients = jax.jit(lambda known, dy: module.backward(spec, None, known, dy, wanted))(known, given)
    found = dict(enumerate(found)) | gradients
    own = by_reference(spec, operands, cotangents)
    with jax.enable_x64(True):
        wide = {f.name: F64 for f in fields(spec) if isinstance(getattr(spec, f.name), np.dtype)}
        operands, cotangents = (
            {n: np.asarray(x, F64) for n, x in operands.items()},
            [np.asarray(x, F64) for x in cotangents],
        )
        exact = by_reference(replace(spec, **wide), operands, cotangents)
        exact = {name: np.asarray(x, F64) for name, x in exact.items()}
    for name, wanted in exact.items():
        a, b = (np.asarray(x[name], F64) for x in (found, own))
        assert a.shape == wanted.shape, name
        eps = float(jnp.finfo(own[name].dtype).eps)
        allowed = NOISE * np.max(np.abs(b - wanted)) + ULPS * eps * np.max(np.abs(wanted))
        assert np.max(np.abs(a - wanted)) <= allowed, name


TPU_CASES = {
    "heads last": dict(sizes=(2, 37, 4, 1), dtype="float32", angles=64),
    "heads first": dict(sizes=(2, 37, 1, 3), dtype="bfloat16", angles=64, models=True),
    "both": dict(sizes=(2, 19, 3, 2), dtype="float32", angles=20, adds=True),
    "a part": dict(sizes=(1, 50, 2, 1), dtype="bfloat16", angles=16, columns=80, start=3, adds=True),
    "neighbours": dict(sizes=(1, 33, 8, 1), dtype="float32", angles=64, neighbours=True, own=2),
    "a part of neighbours": dict(
        sizes=(1, 33, 1, 2), dtype="float32", angles=20, columns=128, start=16, neighbours=True
    ),
    "tables of models": dict(sizes=(3, 20, 4, 1), dtype="bfloat16", angles=32, each=(3, 1), own=2, tables=jnp.bfloat16),
    "tables of rows": dict(sizes=(2, 20, 4, 2), dtype="float32", angles=32, each=(1, 4), adds=True),
    "one position": dict(sizes=(2, 1, 5, 1), dtype="float32", angles=64),
    "one row of each": dict(sizes=(1, 300, 1, 1), dtype="bfloat16", angles=128, first_adds=True, second_subtracts=True),
}
GPU_CASES = {
    "heads last": dict(sizes=(2, 3, 8, 1), dtype="bfloat16", angles=64),
    "four heads": dict(sizes=(1, 5, 4, 1), dtype="float32", angles=32, first_adds=True),
    "heads first": dict(sizes=(2, 8, 1, 3), dtype="float16", angles=64, models=True),
    "both, with a residual": dict(sizes=(1, 3, 4, 2), dtype="bfloat16", angles=64, adds=True, own=2),
    "tables of models": dict(sizes=(3, 4, 4, 1), dtype="bfloat16", angles=32, each=(3, 1), tables=jnp.bfloat16),
    "tables of rows": dict(sizes=(1, 3, 4, 1), dtype="float32", angles=32, each=(1, 4), adds=True, own=2),
    "wide": dict(sizes=(1, 2, 4, 1), dtype="float32", angles=512, second_subtracts=True),
}


@each_norm
@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize("name", TPU_CASES)
def test_values_and_gradients_on_a_tpu(op, name):
    check(op, "pallas_tpu", *site(op, **TPU_CASES[name]))


@each_norm
@pytest.mark.parametrize("name", GPU_CASES)
def test_values_and_gradients_on_a_gpu(op, name):
    check(op, "pallas_gpu", *site(op, **GPU_CASES[name]))


@pytest.mark.parametrize("implementation, cases", [("pallas_tpu", TPU_CASES), ("pallas_gpu", GPU_CASES)])
def test_gain_factor_and_epsilon_outside(implementation, cases):
    more = {"gain": 0.5, "factor": 128.0, "outside": True, "epsilon": 1e-3}
    check("rms_norm", implementation, *site("rms_norm", **cases["heads last"], **more))
    check("rms_norm", implementation, *site("rms_norm", **cases["heads last"], **more | {"floor": True}))


def test_columns_that_are_not_turned_stay_infinite_or_not():
    """What is not turned is not multiplied by 0 either."""
    spec, operands = site("rms_norm", (1, 4, 2, 1), "float32", 16, columns=128, start=32)
    operands["scale"] = operands["scale"].at[0, 5].set(jnp.inf)
    module = operation_named("rms_norm").implementation("pallas_tpu")
    with interpreted("pallas_tpu"):
        found = module.forward(spec, None, operands)
    np.testing.assert_array_equal(np.isinf(found), np.broadcast_to(np.arange(128) == 5, found.shape))


@needs_mosaic
@pytest.mark.parametrize(
    "change, words",
    [
        ({}, None),
        ({"heads": 16, "positions": 128}, None),
        ({"neighbours": True}, "are neighbours"),
        ({"angles": 32}, "64 of 128 columns are turned"),
        ({"angles": 24, "columns": 48}, "half rows of 24 columns"),
        ({"heads": 2}, "2 rows of each of 2048 positions"),
        ({"positions": 1}, "1 rows of each of 1 positions"),
    ],
    ids=str,
)
def test_a_gpu_kernel_says_what_it_cannot_turn(change, words):
    operation = operation_named("rms_norm")
    answer = operation.supports("pallas_gpu", replace(operation.variants["turned"], **change), H100)
    assert answer == Supported() if words is None else words in answer.reason


def test_cosines_without_sines_and_those_that_do_not_fit_are_refused():
    from autopallas.kernels.rms_norm import rms_norm

    x, cos = jnp.ones((8, 16)), jnp.ones((4, 1, 1, 8))
    assert rms_norm(x, cos=cos, sin=cos).shape == x.shape
    with pytest.raises(UnsupportedError, match="one is lacking"):
        rms_norm(x, cos=cos)
    with pytest.raises(UnsupportedError, match="do not fit"):
        rms_norm(x, cos=cos[:3], sin=cos[:3])
    with pytest.raises(UnsupportedError, match="do not fit"):
        rms_norm(x, cos=cos, sin=cos, start=1)
