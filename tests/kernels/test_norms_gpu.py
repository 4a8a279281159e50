"""The GPU kernels of norms, interpreted with race detection: judged in float64, value and gradient."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_declared_kernels import both, check, interpreted, operands_of

from autopallas import compat
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, operation_named

NORMS = ("rms_norm", "layer_norm")
H100 = Device("gpu", "NVIDIA H100 80GB HBM3")
MISSING = compat.missing_mosaic_gpu()
needs_mosaic = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
each_norm = pytest.mark.parametrize("op", NORMS)

CASES = [
    # operands, (models, rows, columns), dtype
    ("all", (1, 37, 256), "bfloat16"),
    ("all", (2, 10, 384), "float16"),
    ("all", (1, 44, 96), "float16"),
    ("required", (1, 24, 128), "float32"),
    ("sample", (1, 3, 2048), "bfloat16"),
    ("all", (1, 9, 1024), "float32"),
    ("all", (2, 4, 768), "bfloat16"),
]
"""Rows that all threads share, and rows of a warp each; loads of 2, 4, 8 and 16 bytes a thread."""


@each_norm
@pytest.mark.parametrize("which, sizes, dtype", CASES)
def test_values_and_gradients(op, which, sizes, dtype):
    check(op, "pallas_gpu", operands_of(op, which, sizes, dtype))


@each_norm
@pytest.mark.parametrize("rows", [6, 8])
def test_epsilon_outside_of_the_root(op, rows):
    check(op, "pallas_gpu", operands_of(op, "all", (1, rows, 256), "float32"), outside=True, epsilon=1e-3)


@pytest.mark.parametrize("implementation", ["pallas_gpu", "pallas_tpu"])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("gain, factor", [(1.0, 256.0), (16.0, 256.0), (-0.5, 1.0)])
def test_rows_divided_by_their_norm_and_multiplied(implementation, outside, gain, factor):
    given = operands_of("rms_norm", "all", (1, 8, 256), "float32")
    check("rms_norm", implementation, given, gain=gain, factor=factor, outside=outside, epsilon=1e-3)


@each_norm
@pytest.mark.parametrize("implementation", ["pallas_gpu", "pallas_tpu"])
@pytest.mark.parametrize("outside", [False, True])
def test_a_floor_in_the_place_of_epsilon(op, implementation, outside):
    """Rows above, at and below the floor: at it, the gradient has half of what passes through the moment."""
    given = operands_of(op, "required", (1, 8, 256), "float32")
    at = jnp.tile(jnp.asarray([0.5, -0.5], jnp.float32), 128)  # its moment is 1/4, its root 1/2
    given["x"] = given["x"].at[0, 1].mul(1e-3).at[0, 2].set(at).at[0, 5].mul(1e-12)
    check(op, implementation, given, outside=outside, floor=True, epsilon=0.5 if outside else 0.25)


@each_norm
@pytest.mark.parametrize("implementation", ["pallas_gpu", "pallas_tpu"])
@pytest.mark.parametrize("outside", [False, True])
def test_a_row_with_a_nan_is_not_raised_to_the_floor(op, implementation, outside):
    given = operands_of(op, "required", (1, 8, 256), "float32")
    given["x"] = given["x"].at[0, 3, 7].set(jnp.nan)
    with interpreted(implementation):
        found = both(op, implementation, given, outside=outside, floor=True, epsilon=0.5)
    for name in ("result", "x"):
        np.testing.assert_array_equal(np.isnan(found[name][0]).all(-1), np.arange(8) == 3)
        np.testing.assert_array_equal(np.isnan(found[name][0]).any(-1), np.arange(8) == 3)


@each_norm
@pytest.mark.parametrize("rows", [7, 8])
def test_models_with_scales_of_their_own(op, rows):
    check(op, "pallas_gpu", operands_of(op, "all", (3, rows, 128), "bfloat16", models=True))


@each_norm
@pytest.mark.parametrize("dtype, scale", [("bfloat16", 1000.0), ("float16", 30.0), ("float32", 1e6)])
def test_values_and_gradients_at_every_scale(op, dtype, scale):
    check(op, "pallas_gpu", operands_of(op, "sample", (1, 6, 256), dtype, scale))


@each_norm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_offsets_and_rows_of_zeros(op, dtype):
    """The variance is taken of the centred row; of a row of zeros, epsilon alone divides."""
    given = operands_of(op, "all", (1, 6, 256), "float32")
    del given["residual"]
    x = given["x"] + jnp.asarray([0.0, 1.0, -30.0, 1000.0, -4096.0, 0.0])[:, None]
    given["x"] = x.at[5].set(0.0)
    check(op, "pallas_gpu", {name: array.astype(dtype) for name, array in given.items()}, epsilon=1e-5)


@pytest.mark.parametrize("op, offset", [("layer_norm", 16384.0)])
def test_an_offset_costs_no_more_than_its_own_rounding(op, offset):
    """float32 holds x beside 16,384 to 2**-10; a variance from the mean of squares would be off by 16 and more."""
    x = np.random.default_rng(1).standard_normal((4, 512)) + offset
    spec, forward, _ = kernels(op, 4, 512, "float32", shift=False, scale=False)
    with interpreted("pallas_gpu"):
        found = forward({"x": jnp.asarray(x, jnp.float32)[None]})[0]
    held = np.asarray(jnp.asarray(x, jnp.float32), np.float64)
    centred = held - held.mean(1, keepdims=True)
    wanted = centred / np.sqrt((centred**2).mean(1, keepdims=True) + spec.epsilon)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2 * offset * 2.0**-23)


def kernels(op, rows, columns, dtype, scale=True, shift=True, **more):
    """The spec, and forward and backward of the kernel as jitted functions of the operands by name."""
    operation, f32 = operation_named(op), np.dtype(np.float32)
    dtype = jnp.dtype(dtype)
    spec = replace(
        operation.sample, rows=rows, columns=columns, x_dtype=dtype, result_dtype=dtype,
        scale_dtype=f32 if scale else None, shift_dtype=f32 if shift else None, **more,
    )  # fmt: skip
    module = operation.implementation("pallas_gpu")
    forward = jax.jit(lambda operands: module.forward(spec, None, operands))
    backward = jax.jit(lambda operands, dy, wanted: module.backward(spec, None, operands, dy, frozenset(wanted)),
                       static_argnums=2)  # fmt: skip
    return spec, forward, backward


def own_operands(rows, columns):
    random = np.random.default_rng(2)
    arrays = (random.standard_normal(shape) for shape in ((1, rows, columns), (1, columns), (1, columns)))
    return dict(zip(("x", "scale", "shift"), (jnp.asarray(a, jnp.float32) for a in arrays), strict=True))


@each_norm
def test_nan_and_infinities_stay_in_their_rows(op):
    operands = own_operands(8, 128)
    operands["x"] = operands["x"].at[0, 1, 5].set(jnp.nan).at[0, 2, 7].set(jnp.inf).at[0, 6, 0].set(-jnp.inf)
    spec, forward, backward = kernels(op, 8, 128, "float32")
    cotangent = jnp.cos(jnp.arange(8 * 128, dtype=jnp.float32)).reshape(1, 8, 128)
    with interpreted("pallas_gpu"):
        found, gradient = forward(operands), backward(operands, cotangent, ("x",))["x"]
    function = operation_named(op).reference
    wanted, pull = jax.vjp(lambda x: function(spec, **operands | {"x": x}), operands["x"])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    clean = np.asarray([0, 3, 4, 5, 7])
    np.testing.assert_allclose(gradient[0, clean], pull(cotangent)[0][0, clean], rtol=1e-4, atol=1e-5)
    assert not np.isfinite(gradient[0, 1]).any()


@each_norm
@pytest.mark.parametrize("wanted", [("scale",), ("x", "shift")])
def test_only_the_gradients_that_are_wanted(op, wanted):
    operands = own_operands(5, 256)
    spec, _, backward = kernels(op, 5, 256, "float32")
    cotangent = jnp.cos(jnp.arange(5 * 256, dtype=jnp.float32)).reshape(1, 5, 256)
    with interpreted("pallas_gpu"):
        found = backward(operands, cotangent, wanted)
    assert set(found) == set(wanted)
    function = operation_named(op).reference
    for name in wanted:
        pull = jax.vjp(lambda x, name=name: function(spec, **operands | {name: x}), operands[name])[1]
        np.testing.assert_allclose(found[name], pull(cotangent)[0], rtol=1e-4, atol=1e-5)


@each_norm
def test_a_scale_of_one_column_and_a_wider_result(op):
    """What a site may hand over: [1, 1] for all columns, and bfloat16 rows whose result stays in float32."""
    operands = own_operands(6, 256) | {"scale": jnp.full((1, 1), 1.5, jnp.float32)}
    operands["x"] = operands["x"].astype(jnp.bfloat16)
    spec = replace(kernels(op, 6, 256, "bfloat16")[0], result_dtype=np.dtype(np.float32))
    module, function = operation_named(op).implementation("pallas_gpu"), operation_named(op).reference
    cotangent = jnp.cos(jnp.arange(6 * 256, dtype=jnp.float32)).reshape(1, 6, 256)
    with interpreted("pallas_gpu"):
        found = jax.jit(lambda operands: module.forward(spec, None, operands))(operands)
        gradients = jax.jit(lambda o, dy: module.backward(spec, None, o, dy, frozenset(o)))(operands, cotangent)
    wanted, pull = jax.vjp(lambda operands: function(spec, **operands), operands)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    for name, gradient in pull(cotangent)[0].items():
        assert gradients[name].shape == gradient.shape
        tolerance = 2e-2 if name == "x" else 1e-4  # of bfloat16's last place, and of a sum in another order
        np.testing.assert_allclose(np.float32(gradients[name]), np.float32(gradient), rtol=tolerance, atol=tolerance)


@needs_mosaic
@each_norm
@pytest.mark.parametrize("columns, dtype", [(1024, "bfloat16"), (8192, "float32"), (1920, "float16"), (96, "float16")])
def test_kernels_are_lowered_for_a_gpu(op, columns, dtype):
    """With loads and stores of any width, which the interpreter does not look at."""
    spec, forward, backward = kernels(op, 16, columns, dtype)
    types = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in own_operands(16, columns).items()}
    types["x"] = jax.ShapeDtypeStruct((1, 16, columns), spec.x_dtype)
    with H100.targeted():
        programs = forward.trace(types), backward.trace(types, types["x"], ("x", "scale", "shift"))
        texts = [program.lower(lowering_platforms=("cuda",)).as_text() for program in programs]
    assert all("mosaic_gpu" in text for text in texts)


@needs_mosaic
@each_norm
@pytest.mark.parametrize(
    "change, words",
    [
        ({"columns": 100}, "rows of 100 columns cannot be shared evenly by 32 threads"),
        ({"columns": 1056}, "rows of 1056 columns cannot be shared evenly by 128 threads"),
        ({"columns": 96, "rows": 1001}, "1001 rows of 96 columns cannot be shared evenly by 128 threads"),
        ({"columns": 96}, None),
        ({"columns": 16384}, "do not hold rows of 16384 columns"),
        ({"x_dtype": np.dtype(np.float64)}, "not float64"),
        ({}, None),
        ({"columns": 8192, "x_dtype": np.dtype(np.float32)}, None),
    ],
    ids=str,
)
def test_it_says_what_it_cannot_compute(op, change, words):
    operation = operation_named(op)
    answer = operation.supports("pallas_gpu", replace(operation.sample, **change), H100)
    if words is None:
        assert isinstance(answer, Supported)
    else:
        assert words in answer.reason
    elsewhere = operation.supports("pallas_gpu", operation.sample, Device("gpu", "NVIDIA A100-SXM4-40GB"))
    assert "Hopper" in elsewhere.reason


@each_norm
def test_without_a_measured_row_no_norm_is_replaced_on_a_gpu(op):
    """A row says nothing of other sizes, and no first step waits for a quick search."""
    operation = operation_named(op)
    assert not operation.may_gain("pallas_gpu", "time", operation.sample)
    tables = operation.part("tuned_block_sizes")
    (bucket,) = {key[3] for key in tables.TABLE["NVIDIA H100"] if key[3].endswith("N1024") and ">=32768" in key[3]}
    measured = replace(operation.sample, rows=65536)
    assert tables.table_key(measured, "pallas_gpu", "forward")[3] == bucket
    assert tables.find(measured, H100, "pallas_gpu", "forward+backward").source == "table"
    assert tables.find(replace(measured, columns=8192), H100, "pallas_gpu", "forward+backward") is None
