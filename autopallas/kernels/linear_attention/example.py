"""Inputs to measure linear attention on: where its sums are divided by those of the scores, no score is negative."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopallas.compat import Shaped
from autopallas.kernels.example import harmless, is_float, normal
from autopallas.kernels.linear_attention.operation import LinearAttentionSpec
from autopallas.sites.declared import DeclaredSite

__all__ = ["operands"]


def operands(site: DeclaredSite, types: Sequence[Shaped], key: int = 0) -> list[np.ndarray]:
    """Returns an array for each operand of a site, the same one for uses of one value."""
    spec, random = site.spec, np.random.default_rng(key)
    assert isinstance(spec, LinearAttentionSpec)
    found = harmless(random, types)
    of_scores = {own.position for name, own in site.operands if name != "value"}
    for value in dict.fromkeys(site.uses):
        first = site.uses.index(value)
        if is_float(found[first].dtype):
            found[first] = normal(random, found[first].shape, found[first].dtype)
            if spec.normalised and value in of_scores:
                found[first] = np.abs(found[first])
    return [found[site.uses.index(value)] for value in site.uses]
