"""Every implementation of mixtures of experts computes what is chosen, each by the grouped matmul of its own name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.kernels.mixture_of_experts import sorted_rows
from autopallas.kernels.mixture_of_experts.cases import DENSE, mixture
from autopallas.kernels.mixture_of_experts.example import operands
from autopallas.kernels.mixture_of_experts.spec import ExpertsSpec
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported
from autopallas.workbench.cases import Case, match_of

TOLERANCES = {"float32": 1e-5, "bfloat16": 4e-2}
"""Of two products accumulated in float32, each rounded to the dtype."""
TPU = Device("tpu", "TPU v5 lite")


def match(dtype: str = "float32") -> Any:
    """24 tokens, each with two of four experts."""
    return match_of(Case("grouped_matmul", "forward", dtype, DENSE, (("M", 48), ("K", 16), ("N", 24), ("G", 4))))


def arguments(dtype: str = "float32") -> list[np.ndarray]:
    """Of :func:`mixture`, with some experts named twice, and some tokens without weight."""
    random = np.random.default_rng(0)
    shapes = (24, 16), (4, 16, 24), (4, 24, 16), (24, 2)
    given = [np.asarray(random.standard_normal(shape) / 4, jnp.dtype(dtype)) for shape in shapes]
    given[3][::7] = 0
    return [*given, random.integers(0, 4, (24, 2)).astype(np.int32)]


def truth(given: list[np.ndarray], cotangent: np.ndarray) -> list[np.ndarray]:
    """The result and the gradients of all floating arguments in float64."""
    with jax.enable_x64(True):
        *wide, experts = (jnp.asarray(x, np.float64 if x.dtype != np.int32 else x.dtype) for x in given)
        result, pull = jax.vjp(lambda *floating: mixture(*floating, experts), *wide)
        return [np.asarray(x) for x in (result, *pull(jnp.asarray(cotangent, np.float64)))]


def form_of(x: Any) -> tuple[str, tuple[int, ...]]:
    return str(x.dtype), tuple(n for n in x.shape if n != 1)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ["reference", "xla", "pallas_tpu"])
def test_result_and_gradients_are_those_of_the_program(name, dtype, monkeypatch):
    if name == "pallas_tpu":
        monkeypatch.setenv("AUTOPALLAS_INTERPRET", "1")
    found = match(dtype)
    kernel = found.site.operation.implementation(name)
    answer = kernel.supports(found.spec, Device.current())
    assert isinstance(answer, Supported), answer
    sizes = None if name == "reference" else BlockSizes(16)
    given = arguments(dtype)
    cotangent = np.asarray(np.random.default_rng(1).standard_normal((24, 16)), jnp.dtype(dtype))

    def program(*floating: jax.Array) -> jax.Array:
        """On the operands of the site, which are the arguments in another order and with further axes of size 1."""
        by_form = {form_of(x): x for x in (*floating, jnp.asarray(given[-1]))}
        values = [by_form[form_of(aval)].reshape(aval.shape) for aval in found.original.in_avals]
        return found.site.forward(kernel, sizes, values)[0][0]

    result, pull = jax.vjp(program, *map(jnp.asarray, given[:-1]))
    for own, wanted in zip((result, *pull(jnp.asarray(cotangent))), truth(given, cotangent), strict=True):
        assert np.abs(np.asarray(own, np.float64) - wanted).max() < TOLERANCES[dtype] * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["reference", "xla", "pallas_gpu", "pallas_tpu"])
def test_products_are_computed_by_the_implementation_that_was_chosen(name, monkeypatch):
    asked: list[str] = []

    def apply(product: str, spec: Any, block_sizes: Any, lhs: Any, rhs: Any, group_sizes: Any) -> jax.Array:
        asked.append(product)
        return jnp.zeros((1, *spec.result_shape()), spec.result_dtype)

    monkeypatch.setattr(sorted_rows, "apply", apply)
    found = match()
    kernel = found.site.operation.implementation(name)
    found.site.forward(kernel, BlockSizes(16), operands(found.site, found.original.in_avals))
    assert asked == [name, name]


def test_there_is_no_implementation_that_the_grouped_matmul_has_not():
    operation = match().site.operation
    assert operation.implementation("cudnn") is None
    assert not operation.has("cudnn")
    assert operation.has("pallas_gpu")


def test_an_implementation_is_asked_about_the_largest_product():
    spec = ExpertsSpec(64, 2, 8, 32, 48, np.dtype(np.float16), 2)
    operation = match().site.operation
    assert isinstance(operation.supports("xla", spec, TPU), Supported)
    refused = operation.supports("pallas_tpu", spec, TPU)
    assert isinstance(refused, Unsupported)
    assert "float16" in refused.reason


def test_the_largest_product_has_what_block_sizes_depend_on():
    spec = ExpertsSpec(64, 2, 8, 32, 48, np.dtype(jnp.bfloat16), 2)
    product = spec.largest_product
    for name in ("rows", "groups", "rows_per_group", "contracting", "columns", "first_dtype", "accumulation_dtype",
                 "widest_dtype", "assume_finite"):  # fmt: skip
        assert getattr(product, name) == getattr(spec, name), name


def test_example_operands_name_experts_that_there_are():
    found = match()
    arrays = operands(found.site, found.original.in_avals)
    assert [(x.shape, x.dtype) for x in arrays] == [(t.shape, t.dtype) for t in found.original.in_avals]
    (experts,) = (x for x in arrays if x.dtype == np.int32)
    assert set(experts.ravel()) == {0, 1, 2, 3}
