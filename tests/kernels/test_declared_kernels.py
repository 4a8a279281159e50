"""What every kernel of a declared operation has to compute, by the declaration: interpreted, and judged in float64."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from support.drained import drained_barriers
from support.multicast import interpreted_multicast

import autopallas
from autopallas.kernels import gpu, tpu
from autopallas.kernels.declared_function import public_function
from autopallas.sites import interpret
from autopallas.sites.declared import DeclaredOperation
from autopallas.sites.declared_call import checked_parameters, operand_names, parameters, site_of
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Score, Side, traced
from autopallas.sites.elementwise_gradients import pulled_back, without_rules
from autopallas.sites.operation import Supported, Unsupported, operation_named, operation_names

DECLARED = [name for name in operation_names() if isinstance(operation_named(name), DeclaredOperation)]
KERNELS = [(op, name) for op in DECLARED for name in ("pallas_tpu", "pallas_gpu") if operation_named(op).has(name)]
V5E = Device("tpu", "TPU v5 lite")
SIZES = {"below a block": (1, 5, 7, 9, 11), "odd": (1, 37, 50, 70, 33), "several blocks": (2, 70, 300, 200, 150),
         "whole blocks": (1, 512, 256, 256, 128)}  # fmt: skip
"""Of the letters of an operation, in order."""
FURTHER_SIZES = 16
"""Of letters behind those."""
DTYPES = {"pallas_tpu": ("float32", "bfloat16"), "pallas_gpu": ("bfloat16", "float16")}
OPERANDS = {"pallas_tpu": "all", "pallas_gpu": "sample"}
NOISE = 2.0
"""Times the error of the reference in the same dtypes, which rounds at least as often."""
ULPS = 8
"""In units of the result's last place, for sums in another order."""


@pytest.fixture
def small_memory(monkeypatch):
    """Kernels have to cut what would fit into a TPU as a whole, and two cores to share the work."""
    monkeypatch.setattr(tpu, "ANY_GENERATION", replace(tpu.ANY_GENERATION, unasked=700 * 2**10, cores=2))


small = pytest.mark.usefixtures("small_memory")


@contextmanager
def interpreted(name):
    if name == "pallas_tpu":
        with interpret.mode(True):
            yield [0]
        return
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not hasattr(plgpu, "InterpretGPUParams") or gpu.too_few_threads() is not None:
        pytest.skip("GPU kernels are interpreted by JAX 0.11 and later, in eight threads (NPROC=32)")
    with (
        interpret.mode(plgpu.InterpretGPUParams(detect_races=True)),
        interpreted_multicast() as transfers,
        drained_barriers(),
    ):
        yield transfers


def operands_of(op, which, sizes, dtype, scale=1.0, models=False):
    """Random operands: "sample" those that the sample has, "all" with its letters, "every", or "required"; ``models``:
    each with a batch."""
    operation, random = operation_named(op), np.random.default_rng(0)
    extents, found = dict.fromkeys(operation.sizes, FURTHER_SIZES) | dict(zip(operation.sizes, sizes, strict=False)), {}
    extents = operation.fitted_sizes(extents)
    for name, may_lack in operand_names(operation).items():
        letters = operation.operands[name].split()
        if which == "required" and may_lack:
            continue
        if which == "sample" and getattr(operation.sample, f"{name}_dtype") is None:
            continue
        if which == "all" and not set(letters) <= operation.letters(operation.sample).keys():
            continue
        main = not found
        shape = [extents[letter] for letter in letters if letter != operation.first_row or models or main]
        array = random.standard_normal(shape) * (scale if main else 1 / np.sqrt(shape[-2]) if len(shape) > 1 else 1)
        found[name] = jnp.asarray(array, dtype)
    return found


def both(op, implementation, given, **more):
    """Result and gradients of a weighted sum, by name."""
    function = public_function(operation_named(op))

    def loss(operands):
        results = function(**operands, implementation=implementation, **more)
        results = dict(enumerate(results)) if isinstance(results, tuple) else {"result": results}
        total = 0.0
        for number, result in enumerate(results.values()):
            weights = jnp.cos(jnp.arange(result.size, dtype=jnp.float32) + number).reshape(result.shape)
            total += jnp.sum(result.astype(weights.dtype) * weights)
        return total, results

    (_, results), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(given)
    return {**results, **gradients}


def wide(arrays):
    return {name: np.asarray(x, np.float64) for name, x in arrays.items()}


def check(op, implementation, given, **more):
    """The kernel's errors are those of the reference, up to a factor; both against float64."""
    with interpreted(implementation):
        answer = operation_named(op).supports(implementation, spec_of(op, given, **more), Device("cpu", "cpu"))
        if implementation == "pallas_gpu" and isinstance(answer, Unsupported):
            pytest.skip(answer.reason)
        assert isinstance(answer, Supported)
        found = wide(both(op, implementation, given, **more))
    own = wide(both(op, "reference", given, **more))
    with jax.enable_x64(True):
        unrounded = {**more, **{name: "float64" for name in further_of(op, None) if name in more}}
        exact = both(op, "reference", {n: jnp.asarray(x, jnp.float64) for n, x in given.items()}, **unrounded)
        exact = wide(exact)
    for name, wanted in exact.items():
        finite = np.isfinite(own[name])  # of float16 a product of 1000 and 1000 is not, in the original either
        assert finite.all() or (implementation == "pallas_gpu" and given["x"].dtype == np.float16), name
        if not finite.any():
            continue
        own[name], wanted, found[name] = own[name][finite], wanted[finite], found[name][finite]
        size = np.max(np.abs(wanted))
        dtype = given[name].dtype if name in given else next(iter(given.values())).dtype
        allowed = NOISE * np.max(np.abs(own[name] - wanted)) + ULPS * float(jnp.finfo(dtype).eps) * size
        worst = np.max(np.abs(found[name] - wanted))
        assert worst <= allowed, f"{name}: {worst} of {size}, {allowed} allowed"


def spec_of(op, given, **more):
    operation = operation_named(op)
    further = {name: np.dtype(dtype) for name in operation.further if (dtype := more.pop(f"{name}_dtype", None))}
    values = checked_parameters(operation, {**parameters(operation), **more})
    return site_of(operation, given, values, further_dtypes=further).spec


def other_flags(op, implementation, given):
    """The opposite of each flag, but of those that the kernels refuse, such as of a layout that they do not read."""
    own = {name: not value for name, value in parameters(operation_named(op)).items() if isinstance(value, bool)}
    with interpreted(implementation):
        supports, device = operation_named(op).supports, Device("cpu", "cpu")
        taken = {
            n: v
            for n, v in own.items()
            if supports(implementation, spec_of(op, given, **{n: v}), device) == Supported()
        }
    if not taken:
        pytest.skip("it has no flags")
    return taken


def further_of(op, dtype):
    """What asks for all further results of an operation."""
    return {f"{name}_dtype": dtype for name in operation_named(op).further}


FURTHER = [(op, name) for op, name in KERNELS if operation_named(op).further]


@small
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("which", ["sample", "all", "required", "all, other flags", "every", "every, other flags"])
@pytest.mark.parametrize("op, implementation", KERNELS)
def test_values_and_gradients_at_odd_sizes(op, implementation, which, sizes):
    which, _, flags = which.partition(", ")
    if which == "every" and not operation_named(op).variants:
        pytest.skip("all are all")
    for dtype in DTYPES[implementation]:
        given = operands_of(op, which, SIZES[sizes], dtype)
        check(op, implementation, given, **(other_flags(op, implementation, given) if flags else {}))


@small
@pytest.mark.parametrize("dtype, scale", [*itertools.product(["bfloat16", "float32", "float16"], [30.0, 1000.0])])
@pytest.mark.parametrize("op, implementation", KERNELS)
def test_values_and_gradients_at_every_scale(op, implementation, dtype, scale):
    if dtype not in DTYPES[implementation]:
        pytest.skip("not claimed")
    check(op, implementation, operands_of(op, OPERANDS[implementation], SIZES["odd"], dtype, scale))


@small
@pytest.mark.parametrize("op, implementation", KERNELS)
def test_models_with_operands_of_their_own(op, implementation):
    given = operands_of(op, OPERANDS[implementation], (3, 20, 24, 40, 17), DTYPES[implementation][0], models=True)
    check(op, implementation, given)


@small
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("which", ["all", "required", "all, other flags"])
@pytest.mark.parametrize("op, implementation", FURTHER)
def test_further_results_and_their_cotangents(op, implementation, which, sizes):
    which, _, flags = which.partition(", ")
    for dtype in DTYPES[implementation]:
        given = operands_of(op, which, SIZES[sizes], dtype)
        other = other_flags(op, implementation, given) if flags else {}
        check(op, implementation, given, **other, **further_of(op, dtype))


@small
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("op, implementation", FURTHER)
def test_further_results_at_every_scale(op, implementation, scale):
    for dtype in DTYPES[implementation]:
        check(op, implementation, operands_of(op, "all", SIZES["odd"], dtype, scale), **further_of(op, dtype))


@small
@pytest.mark.parametrize("op, implementation", FURTHER)
def test_further_results_of_models_with_operands_of_their_own(op, implementation):
    for dtype in DTYPES[implementation]:
        given = operands_of(op, "all", (3, 20, 24, 40, 17), dtype, models=True)
        check(op, implementation, given, **further_of(op, "float32"))


def test_the_gradient_of_a_norm_beside_the_largest_scale_is_finite_where_the_original_is():
    """The row's sum of cotangent, scale and x / root is beyond float32; divided by the columns it is not."""
    x = jnp.asarray([[[1.0] * 6 + [10.0]]], jnp.float32)
    given = {"x": x, "scale": jnp.ones((1, 7), jnp.float32).at[0, 6].set(jnp.finfo(jnp.float32).max)}
    with interpreted("pallas_tpu"):
        found = both("rms_norm", "pallas_tpu", given)["x"]
    wanted = both("rms_norm", "reference", given)["x"]
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_wide_rows_of_any_number_are_cut_into_whole_tiles(op):
    """1001 rows of 8192 columns do not fit into vector memory at once."""
    x = jax.ShapeDtypeStruct((1001, 8192), jnp.bfloat16)
    function = public_function(operation_named(op))
    with V5E.targeted():
        jax.eval_shape(lambda x, y: function(x, residual=y, sum_dtype=x.dtype, implementation="pallas_tpu"), x, x)


@small
@pytest.mark.parametrize("op", [op for op, name in KERNELS if name == "pallas_tpu"])
def test_the_simulated_tpu_finds_no_fault(op):
    """No block out of bounds, no result left and returned to, nothing read that was never written."""
    given = operands_of(op, "all", SIZES["several blocks"], "float32")
    wanted = both(op, "reference", given)
    with interpret.mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        found = both(op, "pallas_tpu", given)
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(x))))


@pytest.mark.parametrize("op", [op for op, name in KERNELS if name == "pallas_tpu"])
def test_a_tpu_kernel_says_what_it_cannot_compute(op):
    operation = operation_named(op)
    narrow = spec_of(op, operands_of(op, "sample", SIZES["odd"], "float16"))
    assert "float16" in operation.supports("pallas_tpu", narrow, V5E).reason
    spec = spec_of(op, operands_of(op, "sample", SIZES["odd"], "bfloat16"))
    assert isinstance(operation.supports("pallas_tpu", spec, V5E), Supported)
    assert isinstance(operation.supports("pallas_tpu", spec, Device("cpu", "cpu")), Unsupported)


@pytest.mark.parametrize("op", [op for op, name in KERNELS if name == "pallas_tpu"])
def test_what_is_exported_for_a_tpu_is_the_kernel(op):
    program, types = operation_named(op).program()
    optimized = autopallas.optimize(program, implementation="pallas_tpu")

    def step(*given):
        return jax.grad(lambda *a: jnp.sum(optimized(*a).astype(jnp.float32)), tuple(range(len(types))))(*given)

    for function, directions in ((optimized, ["forward"]), (step, ["backward"])):
        text = jax.export.export(jax.jit(function), platforms=["tpu"])(*types).mlir_module()
        for direction in directions:
            assert f'kernel_name = "autopallas_{op}_{direction}"' in text


def gelu_by_erf(x):
    return jax.nn.gelu(x, approximate=False)


NAMES = ("silu", "gelu", "relu", "relu6", "sigmoid", "tanh", "softplus", "hard_swish", "mish", "leaky_relu")
ACTIVATIONS = {name: getattr(jax.nn, name) for name in NAMES} | {"gelu by erf": gelu_by_erf}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_of_programs_are_those_of_the_functions(name, dtype):
    """Functions with derivatives of their own keep them: relu's is 0 at 0, where that of a maximum is a half."""
    function, dtype = ACTIVATIONS[name], np.dtype(dtype)
    program = traced(lambda gate, up: function(gate) * up, Score(dtype), Side(0, dtype))
    derivative = pulled_back(program, (Score(dtype),), Side(1, dtype))
    if dtype != np.float16:
        assert tpu.reason_against(V5E, [without_rules(program), derivative], []) is None
    x = jnp.linspace(-8, 8, 33, dtype=dtype)
    up, cotangent = x[::-1] * 2, jnp.cos(x)
    value = without_rules(program).evaluate(x, None, None, [up])
    found = derivative.evaluate(x, None, None, [up, cotangent])
    wanted, pull = jax.vjp(lambda x: function(x) * up, x)
    tolerance = 16 * float(jnp.finfo(dtype).eps) * 16  # of numbers up to 16, whose parts cancel
    for a, b in ((value, wanted), (found, pull(cotangent)[0])):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0, atol=tolerance)
    twice = jax.vjp(lambda x: program.evaluate(x, None, None, [up]), x)[1](cotangent)[0]
    np.testing.assert_allclose(np.float32(twice), np.float32(pull(cotangent)[0]), rtol=0, atol=tolerance)


@pytest.mark.parametrize("which", ["sample", "all"])
def test_long_derivatives_of_gated_mlps_in_strips_of_half_the_columns(which):
    """The GPU's registers do not hold more: of the last strip too, and with biases."""
    check("gated_mlp", "pallas_gpu", operands_of("gated_mlp", which, SIZES["odd"], "bfloat16"), activation="gelu")


@pytest.mark.parametrize("rows, hidden", [(256, 200), (200, 64)])
def test_two_blocks_load_the_weights_of_a_gated_mlp_together(rows, hidden):
    """In a forward pass whose rows have an even number of tiles."""
    given = operands_of("gated_mlp", "sample", (2, rows, 72, hidden, 40), "bfloat16", models=True)
    wanted = both("gated_mlp", "reference", given)
    with interpreted("pallas_gpu") as transfers:
        found = both("gated_mlp", "pallas_gpu", given)
    assert transfers[0] > 0
    for name, x in wanted.items():
        assert float(jnp.max(jnp.abs(found[name].astype(jnp.float32) - x))) <= 4e-2 * float(jnp.max(jnp.abs(x))), name


@small
@pytest.mark.parametrize("which", ["sample", "all"])
@pytest.mark.parametrize("implementation", DTYPES)
def test_gated_mlps_with_an_activation_by_erf(implementation, which):
    for dtype in DTYPES[implementation]:
        given = operands_of("gated_mlp", which, SIZES["odd"], dtype)
        check("gated_mlp", implementation, given, activation=gelu_by_erf)


GPU_BACKWARDS = {
    "gradients of biases": ("all", "bfloat16", jax.nn.silu, "float32"),
    "float16": ("sample", "float16", jax.nn.silu, "float16"),
    "float16, gradients of biases": ("all", "float16", jax.nn.silu, "float16"),
    "an activation by erf": ("sample", "bfloat16", gelu_by_erf, "float32"),
}
"""Operands, their dtype, the activation, and the dtype in which the program has the hidden units."""


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("name", GPU_BACKWARDS)
def test_the_gpu_computes_backwards_of_gated_mlps_in_its_kernel(name, scale, monkeypatch):
    which, dtype, activation, wide = GPU_BACKWARDS[name]
    given, inputs = operands_of("gated_mlp", which, SIZES["odd"], dtype, scale), [Score(np.dtype(wide))]
    sides = 3 if which == "all" else 1
    inputs += [Side(position, np.dtype(wide)) for position in range(sides)]

    def unit(gate, up, of_gate=0, of_up=0):
        return activation(gate + of_gate) * (up + of_up)

    def refused(*_):
        raise AssertionError("the backward is XLA's")

    monkeypatch.setattr("autopallas.kernels.gated_mlp.xla.backward", refused)
    check("gated_mlp", "pallas_gpu", given, activation=traced(unit, *inputs))


def test_the_gpu_leaves_cotangents_to_xla_that_float16_may_not_hold(monkeypatch):
    """Where the program has the hidden units in float32, their cotangents are beyond the range of float16."""
    called = []
    own = operation_named("gated_mlp").implementation("xla").backward
    monkeypatch.setattr("autopallas.kernels.gated_mlp.xla.backward", lambda *a: called.append(1) or own(*a))
    check("gated_mlp", "pallas_gpu", operands_of("gated_mlp", "sample", SIZES["odd"], "float16"))
    assert called
