"""Elementary functions as arithmetic on vectors: against float64, special values, large arguments, and in programs."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import special
from support.compare import compare
from support.respellings import found, random

import autopallas
from autopallas.kernels.respelling import elementary, xla
from autopallas.kernels.respelling.kinds import elementwise
from autopallas.patterns import find
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported

NAN, INF = float("nan"), float("inf")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 1.5, -2.5, 1e-40, -1e-40, 1.2e-38, 3.4e38, -3.4e38,
           1e10, 16777217.0, INF, -INF, NAN)  # fmt: skip
LEAST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
ROUNDED = 0.51
"""Units in the last place: half of one, and what the arithmetic adds."""
UNARY = {
    "sin": (lax.sin, np.sin), "cos": (lax.cos, np.cos), "tan": (lax.tan, np.tan), "asin": (lax.asin, np.arcsin),
    "acos": (lax.acos, np.arccos), "atan": (lax.atan, np.arctan), "cbrt": (lax.cbrt, np.cbrt),
}  # fmt: skip
GAMMA = {
    "lgamma": (lax.lgamma, special.gammaln),
    "digamma": (lax.digamma, special.psi),
    "trigamma": (lambda x: lax.polygamma(np.asarray(1, x.dtype)[()], x), lambda x: special.zeta(2, x)),
}
BINARY = {"atan2": (lax.atan2, np.arctan2), "rem": (lax.rem, np.fmod)}
EXPONENTS = (
    1.5,
    -1.5,
    0.75,
    0.25,
    -0.25,
    -0.5,
    -0.75,
    2.5,
    -2.5,
    4.0,
    -2.0,
    5.0,
    -3.0,
    7.75,
    2.2,
    -0.9,
    1 / 3,
    11.0,
    -13.0,
    80.3,
)


@pytest.fixture(autouse=True)
def arctangents_one_by_one(monkeypatch):
    """As with JAX 0.10; later lines compute them on vectors, and then they are left alone."""
    monkeypatch.setattr(elementwise, "arctangents_take_vectors", lambda: False)


def optimized(function, **options):
    return autopallas.optimize(function, objective="always", strict=True, ops="elementwise", **options)


def patterns(count, seed=0):
    """Returns floats whose bits are spread over all of float32, without NaNs."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    x = bits.view(np.float32)
    return np.where(np.isnan(x), np.float32(1), x)


def computed(function, *arguments, count=1):
    run = optimized(function)
    given = run(*(jnp.asarray(a) for a in arguments))
    assert run.report().counts() == {"respelling": count}
    return np.asarray(given)


def exact(reference, *arguments):
    with np.errstate(all="ignore"):
        return reference(*(np.asarray(a, np.float64) for a in arguments))


def agree(given, wanted, most=ROUNDED):
    """Asserts that numbers are within so many units of float64's, with the same signs, zeros, infinities and NaNs.

    What has to be denormal may be zero.
    """
    given, size = given.astype(np.float64), np.abs(wanted)
    np.testing.assert_array_equal(np.isnan(given), np.isnan(wanted))
    known = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(given[known]), np.signbit(wanted[known]))
    beyond = size >= LARGEST * (1 + 2.0**-25)
    np.testing.assert_array_equal(np.isinf(given[known]), beyond[known])
    small = known & (size < LEAST)
    assert np.all((np.abs(given[small]) <= size[small] * (1 + 2.0**-23) + 2.0**-149) | (given[small] == 0))
    usual = known & ~beyond & ~small
    unit = np.spacing(np.minimum(size[usual], LARGEST).astype(np.float32)).astype(np.float64)
    unit = np.where(size[usual] < np.minimum(size[usual], LARGEST).astype(np.float32), unit / 1, unit)
    error = np.abs(given[usual] - wanted[usual]) / unit
    assert error.size == 0 or error.max() <= most


# ---------------------------------------------------------------------- against float64


COMPLEX = {"exp": (lax.exp, np.exp), "log": (lax.log, np.log)}


def wide_complex(name, x):
    """Returns (real part, imaginary part) in float64, of the log of numbers near 1 by :func:`np.log1p`."""
    z = x.astype(np.complex128)
    with np.errstate(all="ignore"):
        found = COMPLEX[name][1](z)
        if name == "log":
            most, least = np.maximum(np.abs(z.real), np.abs(z.imag)), np.minimum(np.abs(z.real), np.abs(z.imag))
            near = np.abs(most - 1) < 0.5
            found.real[near] = 0.5 * np.log1p((most * most - 1 + least * least)[near])
    return found.real, found.imag


@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.parametrize("kind", ["usual", "spread", "unit"])
def test_functions_of_complex_numbers_are_rounded_once(name, kind):
    generator = np.random.default_rng(3)
    x = generator.standard_normal((2**16, 2)).astype(np.float32)
    if kind == "spread":
        bits = patterns(2**17, 3).reshape(-1, 2)
        x = np.where(np.isfinite(bits) & (np.abs(bits) >= LEAST), bits, np.float32(1))
        if name == "exp":
            x[:, 1] = np.where(np.abs(x[:, 1]) < elementary.LARGE, x[:, 1], x[:, 1] * np.float32(2.0**-110))
    if kind == "unit":
        angle = generator.uniform(-4, 4, 2**16)
        x = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    z = x[:, 0] + np.complex64(1j) * x[:, 1]
    z.real, z.imag = x[:, 0], x[:, 1]
    given = computed(COMPLEX[name][0], z)
    for part, wanted in zip((given.real, given.imag), wide_complex(name, z), strict=True):
        agree(part, wanted)


@pytest.mark.parametrize("name", COMPLEX)
def test_special_complex_numbers_are_those_of_the_original(name):
    z = np.array([complex(a, b) for a in SPECIAL for b in SPECIAL], np.complex64)
    function = COMPLEX[name][0]
    wanted = jax.jit(function)(np.tile(z, 4))
    np.testing.assert_array_equal(computed(function, np.tile(z, 4)), wanted)
    # Zeros and infinities for which the arithmetic holds, among numbers that are usual.
    kept = [
        x for x in z if not np.isnan(x) and abs(x.imag) < 1e4 and (name == "exp" or (np.isfinite(x) and abs(x) > 1e-30))
    ]
    z = np.resize(np.array(kept, np.complex64), 2048)
    given, wanted = computed(function, z), np.asarray(jax.jit(function)(z))
    for own, other in zip((given.real, given.imag), (wanted.real, wanted.imag), strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-6, atol=1e-37)
        np.testing.assert_array_equal(np.signbit(own), np.signbit(other))


def test_functions_of_wider_complex_numbers_and_of_reals_are_left_alone():
    assert found(lax.exp, jnp.ones(4096)) == []
    with jax.enable_x64(True):
        assert found(lax.exp, jnp.ones(4096, jnp.complex128)) == []


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_results_are_rounded_once_over_all_of_float32(name, seed):
    x = patterns(2**18 if seed == 0 else 2**22, seed)
    if name in ("sin", "cos", "tan"):
        x = np.where(np.abs(x) < elementary.LARGE, x, np.float32(2) + x * np.float32(2.0**-110))
    if name in ("asin", "acos"):
        x = np.where(np.abs(x) < 1.0001, x, np.float32(1) - x * np.float32(2.0**-129))
    function, reference = UNARY[name]
    agree(computed(function, x), exact(reference, x))


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_numbers_next_to_multiples_of_a_quarter_turn(name):
    """There all digits of the reduced argument are what is left of a difference."""
    multiples = np.concatenate([np.arange(-4000, 4000), np.arange(2**22, 2**22 + 2**20, 97)])
    x = (multiples * (np.pi / 2)).astype(np.float32)
    x = np.concatenate([np.nextafter(x, np.float32(-INF)), x, np.nextafter(x, np.float32(INF))])
    x = x[np.abs(x) < elementary.LARGE]
    function, reference = UNARY[name]
    agree(computed(function, x), exact(reference, x))


def test_arctangents_that_the_compiler_computes_on_vectors_are_left_alone(monkeypatch):
    assert found(lax.atan, random(4096)) == ["elementwise"]
    monkeypatch.setattr(elementwise, "arctangents_take_vectors", lambda: True)
    assert found(lax.atan, random(4096)) == []


def test_angles_of_points():
    x, y = patterns(2**17, 3), patterns(2**17, 4)
    agree(computed(lax.atan2, x, y), exact(np.arctan2, x, y))
    x, y = (np.asarray(random(2**17, seed=seed)) for seed in (5, 6))
    agree(computed(lax.atan2, x, y), exact(np.arctan2, x, y))


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_powers_to_an_exponent_that_is_known(exponent):
    x, exponent = patterns(2**16), np.float32(exponent)
    x[: len(SPECIAL)] = SPECIAL
    agree(computed(lambda x: lax.pow(x, exponent), x), exact(np.power, x, exponent))


@pytest.mark.parametrize("base", [2.0, 10_000.0, 0.3, 1.00001, 1e-30, 3e38])
def test_powers_of_a_base_that_is_known(base):
    y, base = patterns(2**16), np.float32(base)
    y[: len(SPECIAL)] = SPECIAL
    agree(computed(lambda y: lax.pow(base, y), y), exact(np.power, base, y))


@pytest.mark.parametrize("name", GAMMA)
def test_the_gamma_function_of_numbers_above_zero(name):
    function, reference = GAMMA[name]
    draw = np.random.default_rng(3)
    beside = [n + draw.normal(size=2**12) * 1e-4 for n in (0.5, 1, 1.5, 2, 2.5, 6.5)]  # roots, and where forms meet
    x = np.concatenate([np.abs(patterns(2**16)), draw.uniform(0, 12, 2**16), *beside]).astype(np.float32)
    x = np.where((x >= LEAST) & (np.abs(x - 1.4616321) > 1e-4), x, np.float32(INF))
    x = np.where(np.isinf(x) & (name == "trigamma"), np.float32(1), x)
    agree(computed(function, x), exact(reference, x))


def test_digamma_next_to_its_root():
    x = np.linspace(1.4615, 1.4617, 4096, dtype=np.float32)
    np.testing.assert_allclose(computed(lax.digamma, x), exact(special.psi, x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", GAMMA)
@pytest.mark.parametrize("value", [0.0, -0.0, -2.5, -3.0, 1e-40, -INF])
def test_of_other_numbers_the_original_of_the_gamma_function_is_computed(name, value):
    x = jnp.abs(random(1500)).at[1234].set(value)
    np.testing.assert_array_equal(computed(GAMMA[name][0], x), np.asarray(jax.jit(GAMMA[name][0])(x)))
    x = x.at[jnp.array([3, 1234])].set(jnp.array([NAN, INF]))
    np.testing.assert_array_equal(
        computed(GAMMA[name][0], x)[[3, 1234]], np.asarray(jax.jit(GAMMA[name][0])(x))[[3, 1234]]
    )


def test_other_derivatives_of_the_gamma_function_are_left_alone():
    x = jnp.abs(random(2048)) + 1
    assert found(lambda x: [lax.polygamma(np.float32(n), x) for n in (0, 2, 3)], x) == []
    assert found(lambda x: [lax.polygamma(x, x), lax.zeta(x + 1, x), lax.polygamma(jnp.round(x), 2.0 * x)], x) == []
    assert found(jax.grad(lambda x: lax.digamma(x).sum()), x) == ["elementwise"]  # whose value nothing reads


# ---------------------------------------------------------------------- special values


def test_all_pairs_of_special_values():
    y, x = (np.resize(np.float32(a), 1024) for a in zip(*itertools.product(SPECIAL, SPECIAL), strict=True))
    agree(computed(lax.atan2, y, x), exact(np.arctan2, y, x))


@pytest.mark.parametrize("name", UNARY)
def test_special_values(name):
    x = np.resize(np.float32(SPECIAL), 1024)
    if name in ("sin", "cos", "tan"):
        x = np.where((np.abs(x) < elementary.LARGE) | ~np.isfinite(x), x, np.float32(1))
    function, reference = UNARY[name]
    agree(computed(function, x), exact(reference, x))


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
@pytest.mark.parametrize("value", [2.0**23, -1e10, 3e38])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_a_number_is_large_the_original_is_computed(name, value, dtype):
    x = random(1500, dtype=dtype).at[1234].set(value)
    function = UNARY[name][0]
    wanted = np.asarray(jax.jit(function)(x))
    if name == "tan":  # which JAX 0.12 rounds otherwise in a loop
        np.testing.assert_allclose(computed(function, x).astype(float), wanted.astype(float), rtol=2.0**-22)
    else:
        np.testing.assert_array_equal(computed(function, x), wanted)


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_infinities_and_nans_are_no_large_numbers(name):
    x = np.array(random(1500))
    x[[5, 7, 9]] = INF, -INF, NAN
    given = computed(UNARY[name][0], x)
    agree(given, exact(UNARY[name][1], x))


# ---------------------------------------------------------------------- remainders


DIVISORS = (0.0, -0.0, 1.0, -1.0, 3.0, 0.7, 6.25, 1e-3, 1e-40, -1.2e-38, 2.0**-103, 2.0**-102, 3.4e38, INF, -INF, NAN)


def remain(*pairs, function=lax.rem):
    """Asserts that remainders are the original's, bit for bit but for the bits of a NaN."""
    run, original = optimized(function), jax.jit(function)
    for x, y in pairs:
        given, wanted = (np.asarray(f(x, y), np.float32) for f in (run, original))
        np.testing.assert_array_equal(given, wanted)
        known = ~np.isnan(wanted)
        np.testing.assert_array_equal(np.signbit(given[known]), np.signbit(wanted[known]))
    assert run.report().counts() == {"respelling": 1}


@pytest.mark.parametrize("seed", range(4))
def test_remainders_of_numbers_over_all_of_float32(seed):
    """Nearly all quotients are beyond 2^28, and those numbers are the original's to compute."""
    remain((patterns(2**14, 2 * seed), patterns(2**14, 2 * seed + 1)))


@pytest.mark.parametrize("seed", range(3))
def test_remainders_next_to_whole_quotients(seed):
    """There a quotient must not be rounded to the whole number above it."""
    draw = np.random.default_rng(seed)
    y = np.abs(draw.normal(size=2**16)).astype(np.float32) * np.float32(2.0) ** draw.integers(-90, 90, 2**16)
    x = (y.astype(np.float64) * draw.integers(1, 2 ** draw.integers(1, 28, 2**16))).astype(np.float32)
    y = np.where(np.isfinite(x), y, np.float32(1)).astype(np.float32)
    x = np.where(np.isfinite(x), x, np.float32(1)).astype(np.float32)
    for beside in (x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(LARGEST))):
        assert not np.any(elementary.rem_is_apart(jnp.asarray(beside), jnp.asarray(y * np.float32(1.001))))
        apart = np.asarray(elementary.rem_is_apart(jnp.asarray(beside), jnp.asarray(y)))
        beside = np.where(apart, np.float32(1), beside)
        remain((beside, y), (-beside, y))


def test_remainders_of_all_pairs_of_special_values():
    """Each pair is alone among others that are computed here, so that one does not hide what becomes of the rest."""
    pairs = itertools.product(SPECIAL, DIVISORS)
    x, y = np.asarray(random(1024)), np.asarray(random(1024, seed=1)) + 8
    remain(*((np.append(x, np.float32(a)), np.append(y, np.float32(b))) for a, b in pairs))


@pytest.mark.parametrize("divisor", [2 * np.pi, -0.7, 0.5, 1000.0, 2.0**-100, 1.5 * 2.0**98])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_remainders_by_a_divisor_that_is_known(divisor, dtype):
    with np.errstate(over="ignore"):
        divisor = np.asarray(divisor, dtype)[()]
        x = np.resize(np.asarray([*SPECIAL, *(100 * np.asarray(random(3000)))], dtype), 4096)

    def function(x, _):
        return lax.rem(x, divisor)

    if dtype == "float16" and not 2.0**-100 <= abs(float(divisor)) < INF:
        assert found(function, x, x) == []
    else:
        remain((x, x), (np.asarray(random(4096), dtype), x), function=function)
    for other in (lambda x: x % divisor, lambda x: jnp.fmod(x, divisor), lambda x: x // divisor):
        run, given = optimized(other), random(2048).astype(dtype)
        np.testing.assert_array_equal(np.asarray(run(given), float), np.asarray(jax.jit(other)(given), float))


@pytest.mark.parametrize("divisor", [0.0, 1e-40, 2.0**-101, 3e31, INF, NAN, 1.0, -1024.0])
def test_remainders_by_other_constants_are_left_alone(divisor):
    assert found(lambda x: lax.rem(x, np.float32(divisor)), random(2048)) == []


def test_remainders_are_found_where_identical_results_are_asked_for():
    run = autopallas.optimize(
        lambda x, y: [x % y, jnp.sin(x), jnp.divmod(x, 2.5)], objective="always", numerics="identical"
    )
    x, y = random(64, 64), random(64, 64, seed=1)
    for given, wanted in zip(jax.tree.leaves(run(x, y)), jax.tree.leaves(jax.jit(run.__wrapped__)(x, y)), strict=True):
        np.testing.assert_array_equal(given, wanted)
    assert run.report().counts() == {"respelling": 2}


# ---------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", [*UNARY, *GAMMA, *BINARY])
def test_narrow_floats_are_computed_in_float32(name, dtype):
    function, reference = (UNARY | GAMMA | BINARY)[name]
    x = jnp.abs(random(4096)) % 1 + (0.01 if name in GAMMA else 0)
    arguments = [a.astype(dtype) for a in ([x, random(4096, seed=1)] if name in BINARY else [x])]
    run = optimized(function)
    given = run(*arguments)
    assert given.dtype == dtype
    assert run.report().counts() == {"respelling": 1}
    wanted = exact(reference, *arguments)
    wanted = np.where(wanted > float(jnp.finfo(dtype).max), INF, wanted)
    limits = jnp.finfo(dtype)
    half, least = 0.501 * float(limits.eps), float(limits.smallest_subnormal)
    np.testing.assert_allclose(np.asarray(given, np.float64), wanted, rtol=half, atol=least / 2)


def test_other_dtypes_are_left_alone():
    x = np.linspace(0.1, 1, 2048)
    for dtype in ("int32", "complex64"):
        assert found(lambda x: x**1.5 if x.dtype.kind == "c" else lax.pow(x * 1.0, x), jnp.asarray(x, dtype)) == []
    assert found(lambda x: [jnp.sin(x), jnp.cos(x)], jnp.asarray(x, "complex64")) == []
    with jax.enable_x64(True):
        assert found(lambda x: [jnp.sin(x), x**1.5], jnp.asarray(x)) == []


def test_operands_that_are_repeated_along_axes_of_each_other_are_left_alone():
    """Two ``vmap`` give operands with one axis of size 1 each, and a result with none."""
    angles = jax.vmap(jax.vmap(lax.atan2, (0, None)), (None, 0))
    y, x = random(2, 4, 256, seed=1), random(3, 4, 256, seed=2)
    run = optimized(angles)
    np.testing.assert_allclose(run(y, x), jax.jit(angles)(y, x), rtol=1e-5)
    assert not run.report().sites


@pytest.mark.parametrize("often", [4, 8])
def test_numbers_that_are_repeated_often_are_left_alone(often):
    """The compiler computes each of them once, and repeats the result."""
    programs = [
        lambda x: jnp.sin(jnp.tile(x, (often, 1))),
        lambda x: jnp.cos(2 * jnp.broadcast_to(x[:, None], (32, often, 64)) + 1),
        lambda x: jnp.broadcast_to(x.reshape(-1, 1), (x.size, often)).astype(jnp.bfloat16) ** 1.7,
        lambda x: lax.map(lambda c: jnp.sin(jnp.tile(c * x, (1, often))), jnp.arange(3.0)),
    ]
    wanted = ["elementwise"] if often < 8 else []
    for program in programs:
        assert [kind for kind in found(program, random(32, 64)) if kind == "elementwise"] == wanted


def test_what_the_compiler_writes_otherwise_itself_is_left_alone():
    x = random(2048)
    assert found(lambda x: [lax.pow(x, np.float32(y)) for y in (0, 0.5, 1, 2, 3, -1)], x) == []
    assert found(lambda x: [x**2, x**-3, lax.pow(x, 2), lax.pow(x, x), lax.rsqrt(x), lax.sqrt(x), jnp.exp(x)], x) == []
    assert found(lambda x: [lax.pow(np.float32(b), x) for b in (0, 1, -2, INF, NAN)], x) == []
    assert found(lambda x: [lax.pow(x, np.float32(y)) for y in (INF, -INF, NAN)], x) == []


def test_few_numbers_and_none_are_left_alone():
    for shape in ((), (1023,), (0, 4096)):
        assert found(lambda x: [jnp.sin(x), x**1.5], jnp.ones(shape)) == []
    assert found(lambda x: [jnp.sin(x), x**1.5], jnp.ones((2, 512))) == ["elementwise"] * 2


def test_what_is_read_in_parts_is_left_alone():
    """The compiler computes those parts alone."""
    x, ids = random(64, 32), jnp.arange(0, 64, 9)
    assert (
        found(lambda x: [jnp.sin(x)[ids], (2 * x**1.5)[3], lax.dynamic_slice(jnp.cos(x).T, (0, 3), (32, 5))], x) == []
    )
    assert found(lambda x: [jnp.sin(x), jnp.sin(x)[ids]], x) == [
        "elementwise",
    ]
    assert found(lambda x: (lambda y: [y[ids], y @ x.T, y[0]])(jnp.sin(x)), x) == ["elementwise"]
    assert found(lambda x: (lambda y: [y[ids], y.sum()])(x**1.5), x) == ["elementwise"]


def test_what_a_reduction_takes_depends_on_the_compiler(monkeypatch):
    """That of JAX 0.12 computes sines on vectors there, and powers one by one."""
    functions = (
        lambda x: jnp.sin(x).sum(), lambda x: (3 * jnp.cos(x) + 1).T.max(0), lambda x: jax.nn.softmax(jnp.tan(x)),
        lambda x: jnp.sin(x) - jnp.sin(x).mean(),
    )  # fmt: skip
    others = (
        lambda x: (x**1.5).sum(), lambda x: jnp.sin(x) @ x.T, lambda x: (lambda y: (y, y.sum()))(jnp.sin(x)),
        lambda x: lax.scan(lambda c, row: (c, row.sum()), 0.0, jnp.sin(x))[1],
    )  # fmt: skip
    x = random(64, 32)
    for taken in (True, False):
        monkeypatch.setattr(elementwise, "reductions_take_sines", lambda taken=taken: taken)
        assert ["elementwise" in found(function, x) for function in functions] == [not taken] * 4
        assert ["elementwise" in found(function, x) for function in others] == [True] * 4


def test_looking_at_what_reads_a_result_is_bounded():
    def long(x):
        y = jnp.sin(x)
        for _ in range(200):
            y = y * x + 1
        return y

    assert "elementwise" not in found(long, random(2048))


def test_an_accuracy_that_is_asked_for_is_left_to_the_compiler():
    x = random(2048)
    assert found(lambda x: lax.sin(x, accuracy=lax.AccuracyMode.HIGHEST), x) == []
    assert found(lambda x: lax.sin(x), x) == ["elementwise"]


def test_it_is_written_for_cpus():
    (match,) = find_sites(jnp.sin, random(2048))
    assert xla.supports(match.spec, Device("cpu", "")) == Supported()
    for platform in ("gpu", "tpu"):
        assert "cpu" in xla.supports(match.spec, Device(platform, "")).reason


def find_sites(function, *arguments):
    from autopallas.graph import Graph, flatten

    return find(Graph(flatten(jax.make_jaxpr(function)(*arguments))), ("respelling",), True)[0]


# ---------------------------------------------------------------------- in programs


def layers(w, x):
    for i in range(3):
        x = jnp.sin(30 * (x @ w[i]))
    return x


W = tuple(random(24, 24, seed=i) / 24 for i in range(3))
X = random(64, 24, seed=9)


def everything(x):
    """Uses each function where it has a derivative."""
    y = jnp.abs(x) + 0.1
    small = jnp.tanh(x) * 0.9
    return (jnp.sin(x) + jnp.cos(x) + jnp.tan(small) + jnp.arcsin(small) + jnp.arccos(small) + jnp.arctan2(x, y)
            + jnp.cbrt(y) + y**1.5 + y**2.2 + 1.7**x + jnp.abs(x % 3 - 1.5) + jnp.fmod(x, y) * y
            + lax.lgamma(y))  # fmt: skip


def test_a_train_step_of_a_network_of_sines():
    step = jax.value_and_grad(lambda w, x: (layers(w, x) ** 2).mean())
    found = compare(step, (W, X), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") >= 4


def test_every_function_and_its_gradient():
    x = random(40, 30)
    found = compare(everything, (x,))
    assert found.complaints == []
    assert found.counts("respelling") >= 10
    gradient = compare(jax.value_and_grad(lambda x: everything(x).sum()), (x,), gradients=False)
    assert gradient.complaints == []
    assert gradient.counts("respelling") >= 7


def few(x):
    return jnp.sin(x) * (jnp.abs(x) + 0.1) ** 1.5 + jnp.arctan2(x, jnp.cos(x))


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f, x: jax.jvp(f, (x,), (jnp.cos(x),))[1],
        lambda f, x: jax.grad(lambda x: (f(x) ** 2).sum())(x),
        lambda f, x: jax.hessian(lambda s: f(s * x).sum())(1.0),
    ],
    ids=["jvp", "grad", "hessian"],
)
def test_derivatives_around_it(derivative):
    run, x = optimized(few), random(1024)
    np.testing.assert_allclose(derivative(run, x), derivative(few, x), rtol=2e-5, atol=2e-5)
    assert run.report().counts() == {"respelling": 4}


def test_vmap_around_it():
    x = random(3, 1024).at[1, 5].set(1e9)
    np.testing.assert_allclose(jax.vmap(optimized(few))(x), few(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [jnp.sin, lambda x: jnp.abs(x) ** 1.5], ids=["sin", "power"])
@pytest.mark.parametrize("mapped", [False, True], ids=["alone", "vmap"])
def test_the_ways_are_branches_of_which_one_runs_and_little_beside_them_is_compiled(function, mapped):
    run, x = optimized(function), random(256, 1024)
    text = jax.jit(jax.vmap(run) if mapped else run).lower(x).compile().as_text()
    assert text.count(" conditional(") == 1
    assert " while(" not in text
    assert "reduce-window" not in text  # a count of integers in three steps, each a kernel


def test_scans_branches_and_checkpoints():
    x = random(3, 1024)

    def steps(x):
        def step(carry, row):
            found = jax.checkpoint(lambda c: jnp.sin(c + row) * jnp.abs(c) ** 1.5)(carry)
            return lax.cond(found.sum() > 0, jnp.cos, jnp.tanh, found), found

        last, rows = lax.scan(step, x[0], x)
        return (last**2).sum() + rows.sum()

    found = compare(jax.value_and_grad(steps), (x,), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") >= 3


def test_under_x64():
    with jax.enable_x64(True):
        x = jnp.asarray(random(1024), jnp.float32)
        run = optimized(few)
        given = run(x)
        assert given.dtype == jnp.float32
        assert run.report().counts() == {"respelling": 4}
        np.testing.assert_allclose(given, few(x), rtol=1e-5, atol=1e-5)


def test_strict_promotion_of_dtypes_and_ranks():
    x = random(32, 64)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        run = optimized(lambda x: lax.sin(x) + lax.pow(lax.abs(x), np.float32(1.3)) + lax.atan2(x, x) + lax.cos(x))
        run(x)
    assert run.report().counts() == {"respelling": 4}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_a_mesh(kind):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = jax.device_put(random(32, 64), NamedSharding(mesh, P("d")))
        run = optimized(few)
        given, wanted = run(x), jax.jit(few)(x)
        assert jax.typeof(given) == jax.typeof(wanted)
        np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-5)
        mapped = optimized(jax.shard_map(few, in_specs=P("d"), out_specs=P("d")))
        np.testing.assert_allclose(mapped(x), wanted, rtol=1e-5, atol=1e-5)
        assert run.report().counts() == mapped.report().counts() == {"respelling": 4}


def test_nothing_is_done_without_evidence_or_where_rounding_must_stay():
    x = random(4096)
    exact = autopallas.optimize(jnp.sin, objective="always", numerics="reordered")
    np.testing.assert_array_equal(exact(x), jax.jit(jnp.sin)(x))
    assert exact.report().counts() == {}


def test_loops_that_read_their_own_step_are_found_as_before():
    """What is computed in such a loop belongs to it."""

    def loss(x):
        def step(i, h):
            return jnp.sin(h) + x[i] * 0.1

        return lax.fori_loop(0, 12, step, jnp.zeros(2048)).sum()

    assert "indexed_loop" in found(jax.grad(loss), random(12, 2048))
