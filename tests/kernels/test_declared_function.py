"""The public function of a declared operation: what it computes, what it refuses, and what it says of itself."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_declared import OPERATIONS, small

import autopallas
from autopallas.errors import AutopallasWarning, UnsupportedError
from autopallas.kernels.declared_function import function_named, public_function
from autopallas.kernels.rms_norm import rms_norm
from autopallas.sites.declared import DeclaredOperation
from autopallas.sites.declared_call import operand_names, parameters, site_of
from autopallas.sites.operation import operation_named
from autopallas.sites.spec import Spec


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, SCALE, SCALES = normal(0, 2, 5, 3, 8), normal(1, 8), normal(2, 5, 8)


def written_out(x, scale=None, shift=None, epsilon=1e-6):
    """RMSNorm of the last axis."""
    result = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    result = result if scale is None else result * scale
    return result if shift is None else result + shift


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_declared_operation_has_one_that_computes_its_reference(op):
    operation = small(op)
    package = __import__(operation.package, fromlist=[op])
    assert getattr(package, op) is function_named(op)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing
    program, types = operation.program()
    arrays = [normal(seed, *kind.shape).astype(kind.dtype) for seed, kind in enumerate(types)]
    names = [name for name in operation.operands if getattr(operation.sample, f"{name}_dtype") is not None]
    values = {name: getattr(operation.sample, name) for name in parameters(operation)}

    def loss(function):
        return lambda arrays: jnp.sum(jnp.sin(function(*arrays)))

    def called(*arrays):
        return getattr(package, op)(**dict(zip(names, arrays, strict=True)), **values)

    found, wanted = (jax.jit(jax.value_and_grad(loss(function)))(arrays) for function in (called, program))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_signature_and_the_docstring_follow_the_declaration(op):
    operation, function = operation_named(op), function_named(op)
    dtypes = [f"{name}_dtype" for name in ("result", *operation.further)]
    named = [*operand_names(operation), *parameters(operation), *dtypes, "implementation", "block_sizes"]
    assert list(inspect.signature(function).parameters) == named
    lines = inspect.getdoc(function).splitlines()
    assert max(map(len, lines)) <= 120
    for name in named:
        assert any(line.startswith(f"  {name}: ") for line in lines), name


def test_the_docstring_has_shapes_in_letters_and_what_is_written_under_parameters():
    text = rms_norm.__doc__
    assert "``rms_norm`` computes one normalisation" in text
    assert "Letters: B batch, M rows, N columns" in text
    assert "scale: [B..., N], floating-point; may be left out." in text
    assert "outside: whether epsilon is added to the root, and not to the mean; False by default." in text


@pytest.mark.parametrize(("scale", "shift"), [(SCALE, None), (SCALES, SCALE), (SCALES[None, :1], None), (None, SCALES)])
def test_axes_in_front_are_any_number_and_broadcast(scale, shift):
    """Scales are shared by the three rows of each of two times five places."""

    def spread(a):
        return a if a is None or a.ndim == 1 else a[..., None, :]

    def loss(function, *given):
        return jnp.sum(jnp.sin(function(*given)))

    given = tuple(a for a in (X, scale, shift) if a is not None)
    names = [name for name, a in zip(("x", "scale", "shift"), (X, scale, shift), strict=True) if a is not None]

    def ours(*arrays):
        return rms_norm(**dict(zip(names, arrays, strict=True)), epsilon=0.1)

    def theirs(*arrays):
        own = dict(zip(names, arrays, strict=True))
        return written_out(own["x"], spread(own.get("scale")), spread(own.get("shift")), 0.1)

    everything = tuple(range(len(given)))
    results = (jax.value_and_grad(lambda *a, f=f: loss(f, *a), everything)(*given) for f in (ours, theirs))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert ours(*given).shape == X.shape


@pytest.mark.parametrize(("called", "written"), [(SCALE, SCALE), (SCALES, SCALES[:, None]), (None, None)])
def test_a_call_is_filed_as_the_place_in_a_program_that_computes_the_same(called, written):
    arrays = {"x": X} if called is None else {"x": X, "scale": called}
    site = site_of(operation_named("rms_norm"), arrays, {"epsilon": 0.5})
    report = autopallas.explain(autopallas.optimize(lambda x: written_out(x, written, epsilon=0.5)), X)
    assert report.sites[0].spec == site.spec.to_dict()


@pytest.mark.parametrize("scale", [None, SCALE, SCALES])
def test_a_single_row_needs_no_axis_for_its_number(scale):
    def loss(function, *given):
        return jnp.sum(jnp.sin(function(*given)))

    given = (X[0, 0, 0],) if scale is None else (X[0, 0, 0], scale)
    assert rms_norm(*given).shape == written_out(*given).shape
    everything = tuple(range(len(given)))
    results = (jax.value_and_grad(functools.partial(loss, f), everything)(*given) for f in (rms_norm, written_out))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_single_row_is_filed_as_the_place_in_a_program_that_computes_it():
    row = X[0, 0, 0]
    site = site_of(operation_named("rms_norm"), {"x": row}, {"epsilon": 0.5})
    report = autopallas.explain(autopallas.optimize(lambda x: written_out(x, epsilon=0.5)), row)
    assert report.sites[0].spec == site.spec.to_dict()


def test_the_result_has_the_dtype_of_x_or_the_one_asked_for():
    x = X.astype(jnp.bfloat16)
    assert rms_norm(x, SCALE).dtype == jnp.bfloat16
    wide = rms_norm(x, SCALE, result_dtype=jnp.float32)
    np.testing.assert_allclose(wide, written_out(x.astype(jnp.float32), SCALE), rtol=1e-5, atol=1e-5)


def test_under_vmap_each_example_is_its_own():
    found = jax.vmap(rms_norm, in_axes=(1, 0))(X, SCALES)
    np.testing.assert_allclose(found, written_out(X.swapaxes(0, 1), SCALES[:, None, None]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": X.astype(int)}, TypeError, "x must be an array of floating-point numbers, not int32; convert it"),
        ({"x": None}, TypeError, "x must be an array of floating-point numbers, not NoneType"),
        ({"x": 3.0}, TypeError, "x must be an array of floating-point numbers, not float"),
        ({"x": X[0, 0, 0, 0]}, ValueError, "x has shape (); it must be [B..., M, N]: add or merge axes"),
        ({"scale": SCALE[0]}, ValueError, "scale has shape (); it must be [B..., N]: add or merge axes"),
        ({"x": X[:0]}, ValueError, "x has shape (0, 5, 3, 8); it must not be empty"),
        ({"scale": SCALE[:7]}, ValueError, "scale has 7 columns (N) and x 8; they must agree"),
        ({"scale": SCALES[:4]}, ValueError, "(2, 5) of x, (4,) of scale; make them 1 or equal"),
        ({"epsilon": jnp.ones(())}, TypeError, "pass a Python float, known before tracing"),
        ({"epsilon": float("nan")}, ValueError, "epsilon is nan; it must be a finite number"),
        ({"outside": 1}, TypeError, "outside is a int; pass True or False"),
        ({"eps": 1e-5}, TypeError, "unexpected keyword argument 'eps'"),
        ({"result_dtype": jnp.int32}, TypeError, "result_dtype is int32; it must be floating-point"),
        ({"block_sizes": 8}, TypeError, "block_sizes is a int; rms_norm has none: leave them out"),
        ({"implementation": "cudnn"}, UnsupportedError, "rms_norm has no implementation cudnn"),
    ],
)
def test_refusals_name_the_argument_and_the_remedy(change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        rms_norm(**({"x": X, "scale": SCALE} | change))


def test_a_list_of_implementations_falls_through_with_a_warning():
    with pytest.warns(AutopallasWarning, match="no implementation cudnn; using xla"):
        rms_norm(X, SCALE, implementation=["cudnn", "xla"])


@dataclass(frozen=True)
class PickedSpec(Spec):
    """One of N numbers of each row: ``times * x[index]``."""

    batch: int
    rows: int
    columns: int
    x_dtype: np.dtype
    index_dtype: np.dtype
    result_dtype: np.dtype
    times: int


def picked(spec, x, index):
    """The reference: the result is float32, whatever x is."""
    x, index = jnp.broadcast_arrays(x, index[..., None])
    return (spec.times * jnp.take_along_axis(x, index[..., :1], -1)[..., 0]).astype(spec.result_dtype)


def test_operands_may_be_integers_and_the_result_of_no_operands_dtype(monkeypatch):
    operation = DeclaredOperation(
        "picked_for_a_test",
        reference=picked,
        operands={"x": "B M N", "index": "B M"},
        result="B M",
        sizes={"B": "batch", "M": "rows", "N": "columns"},
        rows="B M",
        sample=PickedSpec(1, 4, 8, np.dtype(jnp.bfloat16), np.dtype(np.int32), np.dtype(np.float32), 1),
    )
    monkeypatch.setitem(sys.modules, f"{operation.package}.operation", SimpleNamespace(OPERATION=operation))
    function = public_function(operation)
    index = jnp.arange(15).reshape(5, 3) % 8
    found, gradient = jax.value_and_grad(lambda x: jnp.sum(function(x, index, times=3)))(X)
    wanted = jax.value_and_grad(lambda x: 3 * jnp.sum(x * jax.nn.one_hot(index, 8)))(X)
    np.testing.assert_allclose(found, wanted[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted[1], rtol=1e-5)
    assert function(X.astype(jnp.bfloat16), index, times=3).dtype == jnp.float32
    assert "result_dtype: the dtype of the result; float32 by default." in function.__doc__
    with pytest.raises(TypeError, match="index must be an array of integer numbers, not float32; convert it"):
        function(X, X[..., 0], times=3)
    with pytest.raises(TypeError, match="times is a float; pass a Python int"):
        function(X, index, times=3.0)
    with pytest.raises(TypeError, match=r"missing a required (keyword-only )?argument: 'times'"):
        function(X, index)
