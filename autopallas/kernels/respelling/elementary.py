"""Elementary functions of float32 numbers, and of pairs of these, as arithmetic on vectors in float64, rounded once.

A compiler that has no vector form of a function calls one for scalars, once for each element.  Here a function is a few
sums, products and selections.  float64 leaves some 29 bits to spare, so that the constants of a reduction need no more
than two parts, and what rounding adds is below 0.03 units in the last place of the result.

Products of a whole number and the first part of pi are exact, so that it does not matter whether the compiler rounds a
product and a sum once or twice.  Polynomials interpolate in Chebyshev's points, with relative errors below 2^-32.

CPUs that run XLA's programs take denormal operands for zero.  Where that would change a result, they are converted as
integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = [
    "LARGE",
    "acos",
    "asin",
    "atan",
    "atan2",
    "by_roots",
    "cbrt",
    "complex_exp",
    "complex_exp_is_apart",
    "complex_log",
    "complex_log_is_apart",
    "constant_power",
    "cos",
    "digamma",
    "gamma_is_apart",
    "lgamma",
    "power_of_constant",
    "rem",
    "rem_is_apart",
    "sin",
    "tan",
    "trigamma",
]

LARGE = 2.0**23
"""Magnitude from which ``sin``, ``cos`` and ``tan`` of finite numbers are not computed here."""
_TINY = 1e-4
"""Magnitude below which sine, tangent and their inverses equal their argument, to half a rounding."""

_PI = (3.141592651605606, 1.984187159361081e-09)
"""Pi in two parts; the first has 30 bits, and times a number of 23 bits is exact."""
_SIN = (1.0, -0.16666666663881236, 0.008333332768753579, -0.0001984108656147879, 2.7536463562574144e-06,
        -2.4080190432957776e-08)  # fmt: skip
"""sin(r) / r by r^2, for |r| up to pi / 2."""
_SHORT_SIN = (1.0, -0.16666666663844049, 0.008333331870341349, -0.00019840084376422702, 2.7249620080076326e-06)
"""The same up to pi / 4."""
_SHORT_COS = (1.0, -0.5, 0.041666666664311826, -0.0013888887668370663, 2.480059840835021e-05, -2.73007040380946e-07)
"""cos(r) by r^2, for |r| up to pi / 4."""
_ASIN = (1.0, 0.16666666665495086, 0.07500000598829049, 0.044642358484883155, 0.030397634130581868,
         0.022132443623412715, 0.01930626086945095, 0.005443185102512907, 0.029305239705593143)  # fmt: skip
"""asin(s) / s by s^2, for s up to 1 / 2."""
_ATAN = (1.0, -0.3333333332694414, 0.19999998154086074, -0.1428562489147981, 0.11109392308277778, -0.09073553118682658,
         0.0758665283246189, -0.0624631519105917, 0.047294798569670234, -0.029913111887721392, 0.014072923304447277,
         -0.004221657974942074, 0.0005930437528739356)  # fmt: skip
"""atan(t) / t by t^2, for t up to 1."""
_LOG2 = (
    2.8853900817779268,
    0.9617966939363068,
    0.5770779988540107,
    0.4122033165462088,
    0.3201522883097393,
    0.2793819114452022,
)
"""log2((1 + s) / (1 - s)) / s by s^2, for s up to 0.1716."""
_LOG = (1.9999999999999492, 0.66666666679556, 0.3999999489038565, 0.2857216649819684, 0.22174232071834804,
        0.19608388009701744)  # fmt: skip
"""log((1 + s) / (1 - s)) / s by s^2, for s up to 0.1716, within 2^-45."""
_LGAMMA = (
    0.42278433509979524,
    0.3224670334234971,
    -0.06735230143541444,
    0.02058080860530149,
    -0.007385533261350092,
    0.002890502080797806,
    -0.0011930547042558364,
    0.0005098091701383399,
    -0.0002208698299718629,
    9.839692820665425e-05,
    -5.27872106349623e-05,
    2.415466427590593e-05,
)
"""lgamma(2 + t) / t by t, for |t| up to 1 / 2."""
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680)
"""z (lgamma(z) - (z - 1/2) log(z) + z - log(2 pi) / 2) by z^-2, for z from 6.5 on."""
_PSI = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132)
"""z^2 (log(z) - 1 / (2 z) - digamma(z)) by z^-2, for z from 6 on."""
_TRIGAMMA = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66)
"""z^3 (trigamma(z) - 1 / z - 1 / (2 z^2)) by z^-2, for z from 6 on."""
_EXP2 = (1.0, 0.6931471805599453, 0.24022650922288757, 0.055504108839096185, 0.009618056678524639,
         0.0013333502386162538, 0.00015461444698568755, 1.5297323760760486e-05)  # fmt: skip
"""2^f by f, for |f| up to 1 / 2."""

_SIGN, _MAGNITUDE = np.int32(-(2**31)), np.int32(2**31 - 1)
_NORMAL = np.int32(0x00800000)
"""Bits of the least number that is not denormal."""
_INFINITE = np.int32(0x7F800000)
_EXACT = np.int32((127 - 102) << 23)
"""Bits of 2^-102: what is left of a division by that, or by more, is no denormal number."""
_ROOT_HALF = np.int32(0x3F3504F3)
"""Bits of the square root of 1 / 2."""
_BITS, _BIAS = np.int32(23), 1023.0
_ROOT_HALF_64 = np.float64(math.sqrt(0.5)).view(np.int64)
_WHOLE = np.float64(2.0**52).view(np.int64)
"""Bits that make a float64 of a whole number below 2^52: 2^52 more than the number."""


def _in_float64(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function of float32 arrays that is traced with 64 bits allowed, whatever the program's own setting."""

    def run(*given: jax.Array) -> jax.Array:
        with jax.enable_x64(True):
            return function(*given)

    run.__doc__ = function.__doc__
    return run


# ---------------------------------------------------------------------- trigonometric functions


@_in_float64
def sin(x: jax.Array) -> jax.Array:
    """Returns the sine of numbers below ``LARGE``; of an infinity, NaN."""
    z = _double(x)
    turns = _rounded(z * np.float64(1 / math.pi))
    return _where(_absolute(x) < np.float32(_TINY), x, _signed_sine(z, turns, turns))


@_in_float64
def cos(x: jax.Array) -> jax.Array:
    """Returns the cosine of numbers below ``LARGE``; of an infinity, NaN."""
    z = _double(x)
    turns = _rounded(z * np.float64(1 / math.pi) - np.float64(0.5))
    return _signed_sine(z, turns + np.float64(0.5), turns + np.float64(1))


def _signed_sine(z: jax.Array, multiple: jax.Array, turns: jax.Array) -> jax.Array:
    """Returns sin(z - multiple pi), negated where ``turns`` is odd."""
    r = (z - multiple * np.float64(_PI[0])) - multiple * np.float64(_PI[1])
    found = r * _polynomial(r * r, _SIN)
    return _single(_where(_is_odd(turns), -found, found))


@_in_float64
def tan(x: jax.Array) -> jax.Array:
    """Returns the tangent of numbers below ``LARGE``; of an infinity, NaN."""
    z = _double(x)
    turns = _rounded(z * np.float64(2 / math.pi))
    r = (z - turns * np.float64(_PI[0] / 2)) - turns * np.float64(_PI[1] / 2)
    w = r * r
    sine, cosine = r * _polynomial(w, _SHORT_SIN), _polynomial(w, _SHORT_COS)
    odd = _is_odd(turns)
    found = _where(odd, -cosine, sine) / _where(odd, sine, cosine)
    return _where(_absolute(x) < np.float32(_TINY), x, _single(found))


@_in_float64
def asin(x: jax.Array) -> jax.Array:
    """Returns the arcsine; NaN where there is none."""
    z = _double(_absolute(x))
    small, far = _arcsine(z)
    found = _where(far, np.float64(math.pi / 2) - (small + small), small)
    return _where(_absolute(x) < np.float32(_TINY), x, _with_sign(_single(found), x))


@_in_float64
def acos(x: jax.Array) -> jax.Array:
    """Returns the arccosine; NaN where there is none."""
    z = _double(_absolute(x))
    small, far = _arcsine(z)
    negative = x < np.float32(0)
    beside = _where(negative, np.float64(math.pi) - (small + small), small + small)
    middle = np.float64(math.pi / 2) + _where(negative, small, -small)
    return _single(_where(far, beside, middle))


def _arcsine(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns asin(z), and False; for z above 1 / 2 the arcsine of sqrt((1 - z) / 2), and True."""
    far = z > np.float64(0.5)
    w = _where(far, np.float64(0.5) - np.float64(0.5) * z, z * z)
    s = _where(far, lax.sqrt(w), z)
    return s * _polynomial(w, _ASIN), far


@_in_float64
def atan(x: jax.Array) -> jax.Array:
    """Returns the arctangent."""
    z = _double(_absolute(x))
    steep = z > np.float64(1)
    t = _where(steep, np.float64(1) / z, z)
    angle = t * _polynomial(t * t, _ATAN)
    found = _with_sign(_single(_where(steep, np.float64(math.pi / 2) - angle, angle)), x)
    return _where(_absolute(x) < np.float32(_TINY), x, found)


@_in_float64
def atan2(y: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the angle of points, in all four quadrants and on the axes."""
    high, wide = _double(_absolute(y), denormal=True), _double(_absolute(x), denormal=True)
    steep = high > wide
    least, most = _where(steep, wide, high), _where(steep, high, wide)
    quotient = least / _where(most == np.float64(0), np.float64(1), most)
    t = _where(least == np.float64(math.inf), np.float64(1), quotient)
    angle = t * _polynomial(t * t, _ATAN)
    angle = _where(steep, np.float64(math.pi / 2) - angle, angle)
    angle = _where(_is_negative(x), np.float64(math.pi) - angle, angle)
    return _with_sign(_where((x != x) | (y != y), np.float32(math.nan), _single(angle)), y)


# ---------------------------------------------------------------------- complex numbers


@_in_float64
def complex_exp(x: jax.Array) -> jax.Array:
    """Returns the exponential of complex numbers where :func:`complex_exp_is_apart` is False: e^a (cos b + i sin b)."""
    z = _double(lax.imag(x))
    turns = _rounded(z * np.float64(2 / math.pi))
    r = (z - turns * np.float64(_PI[0] / 2)) - turns * np.float64(_PI[1] / 2)
    w = r * r
    sine, cosine = r * _polynomial(w, _SHORT_SIN), _polynomial(w, _SHORT_COS)
    half = lax.floor(turns * np.float64(0.5))
    odd = half + half != turns
    size = _power_of_two(_double(lax.real(x)) * np.float64(1 / math.log(2)))
    size = _where(_is_odd(half), -size, size)
    return lax.complex(_single(size * _where(odd, -sine, cosine)), _single(size * _where(odd, cosine, sine)))


def complex_exp_is_apart(x: jax.Array) -> jax.Array:
    """Returns where :func:`complex_exp` does not hold: angles from ``LARGE`` on, and NaNs."""
    real, angle = lax.real(x), lax.imag(x)
    return ~(jnp.abs(angle) < np.float32(LARGE)) | (real != real)


@_in_float64
def complex_log(x: jax.Array) -> jax.Array:
    """Returns the logarithm of complex numbers where :func:`complex_log_is_apart` is False: log |x|, and the angle.

    Of |x|^2 near 1 the logarithm is that of 1 + w.  The greater square has 48 bits, so that its difference from 1 is
    exact, and w is rounded once.
    """
    a, b = _double(_absolute(lax.real(x))), _double(_absolute(lax.imag(x)))
    steep = b > a
    most, least = _where(steep, b, a), _where(steep, a, b)
    greater, less = most * most, least * least
    w = (greater - np.float64(1)) + less
    near = (w < np.float64(0.25)) & (w > np.float64(-0.25))
    s = _where(near, w, np.float64(0)) / (np.float64(2) + _where(near, w, np.float64(0)))
    size = _where(near, s * _polynomial(s * s, _LOG), _natural_logarithm(greater + less))
    return lax.complex(_single(np.float64(0.5) * size), atan2(lax.imag(x), lax.real(x)))


def complex_log_is_apart(x: jax.Array) -> jax.Array:
    """Returns where :func:`complex_log` does not hold: zero, numbers of which both parts are denormal, infinities and
    NaNs."""
    real, imaginary = _size(lax.real(x)), _size(lax.imag(x))
    most = jnp.maximum(real, imaginary)
    return (most < _NORMAL) | (most >= _INFINITE)


# ---------------------------------------------------------------------- the gamma function


@_in_float64
def lgamma(x: jax.Array) -> jax.Array:
    """Returns the logarithm of the gamma function of numbers above zero.

    Below 5/2 it is a polynomial around the root at 2, which keeps the digits of what is small there and around 1; from
    5/2 on it is Stirling's series.  Both are taken some whole numbers farther on: lgamma(x) = lgamma(x + 1) - log(x).
    """
    z, one = _double(x), np.float64(1)
    near, few = z < np.float64(2.5), z < np.float64(6.5)
    by_two, by_one = z < np.float64(0.5), z < np.float64(1.5)
    t = z - _where(by_two, np.float64(0), _where(by_one, one, np.float64(2)))
    first = z * (z + one)
    passed = _where(by_two, first, _where(by_one, z, one))
    passed = _where(near, passed, _where(few, first * (z + np.float64(2)) * (z + np.float64(3)), one))
    w = _where(few, z + np.float64(4), z)
    inverse = one / w
    series = inverse * _polynomial(inverse * inverse, _STIRLING) + np.float64(0.5 * math.log(2 * math.pi))
    series = (w - np.float64(0.5)) * _natural_logarithm(w) - w + series
    found = _where(near, t * _polynomial(t, _LGAMMA), series) - _natural_logarithm(passed)
    return _where(x < np.float32(math.inf), _single(found), x)


@_in_float64
def digamma(x: jax.Array) -> jax.Array:
    """Returns the derivative of :func:`lgamma` at numbers above zero.

    Below 6.5 its series is taken six whole numbers farther on: digamma(x) = digamma(x + 1) - 1 / x.
    """
    z, one = _double(x), np.float64(1)
    few = z < np.float64(6.5)
    top, bottom = z + (z + one), z * (z + one)
    for step in range(2, 6):
        farther = z + np.float64(step)
        top, bottom = top * farther + bottom, bottom * farther
    w = _where(few, z + np.float64(6), z)
    inverse = one / w
    square = inverse * inverse
    found = _natural_logarithm(w) - np.float64(0.5) * inverse - square * _polynomial(square, _PSI)
    found = found - _where(few, top / bottom, np.float64(0))
    return _where(x < np.float32(math.inf), _single(found), x)


@_in_float64
def trigamma(x: jax.Array) -> jax.Array:
    """Returns the derivative of :func:`digamma` at numbers above zero.

    Below 6.5 its series is taken six whole numbers farther on: trigamma(x) = trigamma(x + 1) + 1 / x^2.
    """
    z, one = _double(x), np.float64(1)
    few = z < np.float64(6.5)
    top, bottom = z * z + (z + one) * (z + one), z * z * ((z + one) * (z + one))
    for step in range(2, 6):
        farther = z + np.float64(step)
        top, bottom = top * (farther * farther) + bottom, bottom * (farther * farther)
    w = _where(few, z + np.float64(6), z)
    inverse = one / w
    square = inverse * inverse
    found = inverse + np.float64(0.5) * square + inverse * square * _polynomial(square, _TRIGAMMA)
    return _single(found + _where(few, top / bottom, np.float64(0)))


def gamma_is_apart(x: jax.Array) -> jax.Array:
    """Returns where :func:`lgamma` and its derivatives do not hold: numbers that are denormal, or not above zero."""
    return _bits(x) < _NORMAL


def _natural_logarithm(z: jax.Array) -> jax.Array:
    """Returns the logarithm of numbers in float64 that are normal, above zero and below infinity."""
    bits, places = lax.bitcast_convert_type(z, jnp.int64), np.int64(52)
    offset = np.int64(1024 << 52)
    counted = lax.shift_right_logical(bits - _ROOT_HALF_64 + offset, places)
    mantissa = lax.bitcast_convert_type(bits + offset - lax.shift_left(counted, places), jnp.float64)
    exponent = lax.bitcast_convert_type(counted | _WHOLE, jnp.float64) - np.float64(2.0**52 + 1024)
    s = (mantissa - np.float64(1)) * (np.float64(1) / (mantissa + np.float64(1)))
    return exponent * np.float64(math.log(2)) + s * _polynomial(s * s, _LOG)


# ---------------------------------------------------------------------- remainders


@_in_float64
def rem(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns what is left of whole divisions, with the sign of x, exactly, where :func:`rem_is_apart` is False.

    A quotient below 2^28 is rounded to no whole number above it, since it is at least 2^-24 below that; its product
    with 24 bits and the difference have at most 53 bits.
    """
    a, b = _double(_absolute(x)), _double(_absolute(y))
    left = a - lax.floor(a / b) * b
    left = _where((b == np.float64(math.inf)) & (a < np.float64(math.inf)), a, left)
    return _with_sign(_single(left), x)


def rem_is_apart(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns where :func:`rem` may not be exact: quotients from 2^28, denormals, divisors below 2^-102."""
    a, b = _size(x), _size(y)
    divides = b > np.int32(0)
    far = divides & (_absolute(x) >= _absolute(y) * np.float32(2.0**28)) & (a < _INFINITE)
    return far | ((a > np.int32(0)) & (a < _NORMAL)) | (divides & (b < _EXACT))


# ---------------------------------------------------------------------- powers


@_in_float64
def cbrt(x: jax.Array) -> jax.Array:
    """Returns the cube root, which has the sign of its operand."""
    found = _single(_power_of_two(_logarithm(x) * np.float64(1 / 3)))
    return _where(_size(x) < _INFINITE, _with_sign(found, x), x)


def power_of_constant(base: float, y: jax.Array) -> jax.Array:
    """Returns a finite number above zero, which is not 1, to the power of y."""
    with jax.enable_x64(True):
        found = _single(_power_of_two(_double(y) * np.float64(math.log2(base))))
        return _where(y == y, found, y)


def constant_power(x: jax.Array, exponent: float) -> jax.Array:
    """Returns x to a finite power that is not zero; to one of few quarters by roots and products."""
    with jax.enable_x64(True):
        if by_roots(exponent):
            found = _single(_root_power(_double(_absolute(x), denormal=True), round(4 * exponent)))
        else:
            found = _single(_power_of_two(_logarithm(x) * np.float64(exponent)))
        return _where(x == x, _signed(found, x, exponent), x)


def by_roots(exponent: float) -> bool:
    """Returns whether roots and products compute a power sooner than logarithms."""
    return abs(exponent) <= 8 and (4 * exponent).is_integer()


def _root_power(z: jax.Array, quarters: int) -> jax.Array:
    """Returns numbers from zero on to the power of some quarters, not none."""
    factors: list[jax.Array] = []
    whole, rest = divmod(abs(quarters), 4)
    inverted = quarters < 0 and whole == 0 and rest < 3  # a quotient by a root would become slow reciprocals of roots
    power = np.float64(1) / z if inverted else z
    root = lax.sqrt(power) if rest else power
    factors += [root] if rest >= 2 else []
    factors += [lax.sqrt(root)] if rest % 2 else []
    while whole:
        factors += [power] if whole % 2 else []
        whole, power = whole // 2, power * power
    found = math.prod(factors[1:], start=factors[0])
    return np.float64(1) / found if quarters < 0 and not inverted else found


def _signed(found: jax.Array, x: jax.Array, exponent: float) -> jax.Array:
    """Returns the power of numbers, from that of their magnitudes: for finite negative ones NaN, if it is not whole."""
    if exponent % 2 == 1:
        return lax.bitcast_convert_type(_bits(found) ^ (_bits(x) & _SIGN), jnp.float32)
    if exponent == math.floor(exponent):
        return found
    negative = _is_negative(x) & (_size(x) > np.int32(0)) & (_size(x) < _INFINITE)
    return _where(negative, np.float32(math.nan), found)


def _logarithm(x: jax.Array) -> jax.Array:
    """Returns the binary logarithm of magnitudes: of a NaN, infinity."""
    size = _size(x)
    denormal = size < _NORMAL
    bits = _where(denormal, _bits(size.astype(jnp.float32)), size)
    above = bits - _ROOT_HALF
    exponent = lax.shift_right_arithmetic(above, _BITS)
    mantissa = _double(lax.bitcast_convert_type(bits - lax.shift_left(exponent, _BITS), jnp.float32))
    # A quotient that is read once stays in one loop with all the rest.
    s = (mantissa - np.float64(1)) * (np.float64(1) / (mantissa + np.float64(1)))
    scale = _where(denormal, np.float64(-149), np.float64(0))
    found = (exponent.astype(jnp.float64) + scale) + s * _polynomial(s * s, _LOG2)
    infinite = _where(size == np.int32(0), np.float64(-math.inf), np.float64(math.inf))
    return _where((size == np.int32(0)) | (size >= _INFINITE), infinite, found)


def _power_of_two(t: jax.Array) -> jax.Array:
    """Returns 2^t in float64, for what is to be rounded to float32: of a NaN, anything."""
    t = _where(t < np.float64(400), t, np.float64(400))
    t = _where(t > np.float64(-400), t, np.float64(-400))
    whole = _rounded(t)
    counted = lax.bitcast_convert_type(whole + np.float64(2.0**52 + _BIAS), jnp.int64)
    scale = lax.bitcast_convert_type(lax.shift_left(counted, np.int64(52)), jnp.float64)
    return scale * _polynomial(t - whole, _EXP2)


# ---------------------------------------------------------------------- parts


def _polynomial(w: jax.Array, coefficients: Sequence[float]) -> jax.Array:
    *rest, last = coefficients
    found: jax.Array = w * np.float64(last) + np.float64(rest.pop())
    for coefficient in reversed(rest):
        found = found * w + np.float64(coefficient)
    return found


def _double(x: jax.Array, denormal: bool = False) -> jax.Array:
    """Returns numbers in float64; ``denormal`` ones too, if they are positive."""
    if not denormal:
        return x.astype(jnp.float64)
    counted = _bits(x).astype(jnp.float64) * np.float64(2.0**-149)
    return _where(_bits(x) < _NORMAL, counted, x.astype(jnp.float64))


def _single(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _rounded(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _is_odd(turns: jax.Array) -> jax.Array:
    """Returns whether whole numbers are odd."""
    half = turns * np.float64(0.5)
    return lax.floor(half) != half


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _absolute(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(_size(x), jnp.float32)


def _is_negative(x: jax.Array) -> jax.Array:
    """Returns whether the sign is set, that of zeros too."""
    return _bits(x) < np.int32(0)


def _size(x: jax.Array) -> jax.Array:
    """Returns the bits without the sign, which are in the order of magnitudes."""
    return _bits(x) & _MAGNITUDE


def _with_sign(found: jax.Array, x: jax.Array) -> jax.Array:
    """Returns numbers without a sign with that of ``x``."""
    return lax.bitcast_convert_type(_bits(found) | (_bits(x) & _SIGN), jnp.float32)


def _where(
    chosen: jax.Array, one: jax.Array | np.float32 | np.float64 | np.int32, other: jax.Array | np.float64 | np.int32
) -> jax.Array:
    """Returns a selection of arrays of one dtype, or of numbers."""
    shape = np.broadcast_shapes(chosen.shape, np.shape(one), np.shape(other))
    parts = (lax.broadcast_in_dim(x, shape, tuple(range(len(shape) - np.ndim(x), len(shape)))) for x in (one, other))
    return lax.select(lax.broadcast_in_dim(chosen, shape, range(len(shape) - chosen.ndim, len(shape))), *parts)
