"""Inputs to measure linear attention on: decays of 0.7 to 1, and no negative score where sums of scores divide."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopallas.compat import Shaped
from autopallas.kernels.example import harmless, normal
from autopallas.kernels.linear_attention.operation import LinearAttentionSpec
from autopallas.numerics.casts import is_floating
from autopallas.sites.declared import DeclaredSite
from autopallas.sites.index_notation import fill

__all__ = ["operands"]


def operands(site: DeclaredSite, types: Sequence[Shaped], key: int = 0) -> list[np.ndarray]:
    """Returns an array for each operand of a site, the same one for uses of one value."""
    spec, random = site.spec, np.random.default_rng(key)
    assert isinstance(spec, LinearAttentionSpec)
    found = harmless(random, types)
    values = [found[site.uses.index(value)] for value in range(max(site.uses) + 1)]
    of_scores = {own.position for name, own in site.operands if name in ("query", "key")}
    for value, array in enumerate(values):
        if is_floating(array.dtype):
            given = normal(random, array.shape, array.dtype)
            values[value] = np.abs(given) if spec.normalised and value in of_scores else given
    groups = [dict(site.letters)[letter] for letter in ("B", "T")]
    for name, own in site.operands:
        if name in ("decay", "log_decays"):
            logs = random.uniform(-0.35, -0.001, (spec.batch, spec.steps if name == "log_decays" else 1))
            logs = (np.cumsum(logs, 1) if spec.decay_form == "sums" else logs) / spec.rate
            array = np.exp(logs) if spec.decay_form in ("powers", "captured") else logs
            fill(own, array.astype(values[own.position].dtype), values, site.sizes, groups)
    return [values[value] for value in site.uses]
