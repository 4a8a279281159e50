"""Makes inputs to measure a mixture of experts on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from autopallas.compat import Shaped
from autopallas.kernels.example import harmless, normal
from autopallas.kernels.mixture_of_experts.site import ExpertsSite
from autopallas.numerics.casts import is_floating

__all__ = ["operands"]

Array: TypeAlias = np.ndarray


def operands(site: ExpertsSite, types: Sequence[Shaped], key: int = 0) -> list[Array]:
    """Returns an array per operand, of the given shapes and dtypes.

    Integers are numbers of experts. Floats have the size of weights, since larger ones would grow from product to
    product.
    """
    filled, random = harmless(np.random.default_rng(key), types), np.random.default_rng(key)
    experts = math.prod(site.sizes[label] for label in site.expert_labels)
    scale = 1 / math.sqrt(max(1, site.spec.contracting))
    for i, array in enumerate(filled):
        if is_floating(array.dtype):
            filled[i] = normal(random, array.shape, array.dtype, scale if array.ndim > 2 else 1.0)
        elif array.dtype.kind in "iu":
            filled[i] = random.integers(0, experts, array.shape).astype(array.dtype)
    return filled
