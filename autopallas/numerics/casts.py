"""Defines what a cast means to a proof; every walk over a program asks here.

A program's arithmetic is read as arithmetic of real numbers, which kernels compute at least as precisely.  A cast is
different: it states how precise the program wants a value to be.  What a proof may do with a cast depends on where it
stands:

* **A factor** (probabilities, a sum of exponentials, a reciprocal): rounding changes it by a relative error, as the
  rounding in a kernel does.  A cast between floating types of 16 bits and more is read through (:func:`rounds`).
* **A sum in an exponent**, such as ``x - m``: rounding changes the exponential by a factor that grows with the numbers.
  A cast that keeps every value commutes with taking ``m`` out (:func:`widens`).  A cast that rounds does not:
  ``bf16(x - m)`` is not ``bf16(x) - m``.  The rounded number is small there, and is kept unrounded, unless a number
  is added before the cast that carries ``x - m`` away from 0 (:func:`blurs`).
* **A number of a row** in an exponent, such as ``bf16(m)``: it cancels only against itself.  A cast that keeps every
  value is read through; one that rounds is not.
* **A maximum** commutes with every rounding, since rounding is monotone; the cast stays, outside of the maximum.
* **A position or a label**: a cast is read through if both types hold every number that is counted
  (:func:`counts_exactly`); types of 8 and 16 bits often do not.
* **To and from integers and booleans**: only casts of positions are read through.  Casts of 8-bit floating types are
  never read through, since their values are quantised on purpose.
"""

from __future__ import annotations

from functools import cache

import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype

__all__ = [
    "blurs",
    "counts_exactly",
    "exponential_underflows_below",
    "is_floating",
    "is_quantised",
    "keeps_range",
    "kind_of",
    "rounds",
    "widens",
]


@cache
def is_floating(dtype: Dtype) -> bool:
    """Returns whether a dtype is a real floating one; remembered, since JAX's own answer takes long.

    Example:
      >>> is_floating(jnp.dtype("bfloat16")), is_floating(np.dtype("complex64"))
      (True, False)
    """
    return bool(jnp.issubdtype(dtype, jnp.floating))


def is_quantised(dtype: Dtype) -> bool:
    """Returns whether a dtype is a floating one of less than 16 bits.

    Many of these have no infinities, and JAX promotes none of them to another type.

    Example:
      >>> is_quantised(jnp.dtype("float8_e4m3fn")), is_quantised(jnp.dtype("bfloat16"))
      (True, False)
    """
    return is_floating(dtype) and dtype.itemsize < 2


@cache
def rounds(source: Dtype, target: Dtype) -> bool:
    """Returns whether a cast between floating types keeps a value up to the rounding of the narrower of them.

    Both types must have 16 bits or more.  Beyond the range of float16 this does not hold; a proof says what it assumes.

    Example:
      >>> rounds(np.dtype("float32"), np.dtype("float16")), rounds(np.dtype("int32"), np.dtype("float32"))
      (True, False)
    """
    return all(jnp.issubdtype(dtype, jnp.floating) and not is_quantised(dtype) for dtype in (source, target))


@cache
def widens(source: Dtype, target: Dtype) -> bool:
    """Returns whether a cast between floating types of 16 bits or more keeps every value as it is.

    Example:
      >>> widens(np.dtype("float16"), np.dtype("float32")), widens(np.dtype("float16"), jnp.dtype("bfloat16"))
      (True, False)
    """
    if not rounds(source, target):
        return False
    before, after = jnp.finfo(source), jnp.finfo(target)
    return bool(before.nmant <= after.nmant and before.maxexp <= after.maxexp and before.minexp >= after.minexp)


def kind_of(dtype: object) -> str:
    """Returns the letter by which NumPy tells kinds of types, and "-" for types that NumPy lacks, such as random keys.

    Example:
      >>> import jax
      >>> kind_of(np.dtype("uint8")), kind_of(jax.random.key(0).dtype)
      ('u', '-')
    """
    return str(getattr(dtype, "kind", "-"))


@cache
def counts_exactly(dtype: Dtype, largest: int) -> bool:
    """Returns whether a type holds every whole number from 0 to ``largest``.

    Example:
      >>> [counts_exactly(np.dtype(name), 299) for name in ("uint8", "int16", "bfloat16", "float16")]
      [False, True, False, True]
    """
    if largest <= 0:
        return True
    if kind_of(dtype) == "b":
        return largest <= 1
    if kind_of(dtype) in "iu":
        return largest <= int(jnp.iinfo(dtype).max)
    if jnp.issubdtype(dtype, jnp.floating):
        information = jnp.finfo(dtype)
        return largest <= 2 ** (int(information.nmant) + 1) and largest <= float(information.max)
    return False


@cache
def keeps_range(source: Dtype, target: Dtype) -> bool:
    """Returns whether a cast between floating types makes no finite number infinite, apart from its rounding.

    Example:
      >>> keeps_range(np.dtype("float32"), jnp.dtype("bfloat16")), keeps_range(np.dtype("float32"), np.dtype("float16"))
      (True, False)
    """
    return bool(jnp.finfo(source).maxexp <= jnp.finfo(target).maxexp)


_BLURRED = 0.02
"""Error of an exponent that changes its exponential by more than the tolerances of 16-bit numbers allow."""


def blurs(dtype: Dtype, distance: float) -> bool:
    """Returns whether a cast to a floating type rounds an exponent at this distance from 0 beyond recognition.

    Example:
      >>> blurs(jnp.dtype("bfloat16"), 1000.0), blurs(jnp.dtype("bfloat16"), 1.0), blurs(np.dtype("float32"), 1000.0)
      (True, False, False)
    """
    return distance * float(jnp.finfo(dtype).eps) > _BLURRED


def exponential_underflows_below(dtype: Dtype) -> float:
    """Returns a number below which the exponential, computed in this type and viewed in a wider one, is exactly 0.

    The least positive numbers are 1.4e-45 in float32, which narrower types are computed in, and 4.9e-324 in float64.
    """
    return -800.0 if dtype == np.float64 else -200.0
