"""What the tests of respellings share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.patterns import find
from support.compare import compare

__all__ = ["LAYOUTS", "agrees", "convolution", "found", "layer_operands", "optimized", "random", "same_bits", "sites"]


def random(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def found(function, *arguments):
    """Returns the kind of each respelling of a program."""
    return [site.spec.kind for site in sites(function, *arguments)]


def optimized(function, **options):
    return autopallas.optimize(function, objective="always", strict=True, **options)


def sites(function, *arguments, ops=("respelling",)):
    return find(Graph(flatten(jax.make_jaxpr(function)(*arguments))), ops, True)[0]


def same_bits(given, wanted):
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        a, b = np.atleast_1d(np.asarray(a)), np.atleast_1d(np.asarray(b))
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b)) if a.dtype.kind == "f" else None
        np.testing.assert_array_equal(np.where(a == a, a, 0).view(np.uint8), np.where(b == b, b, 0).view(np.uint8))


LAYOUTS = {1: (("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW"), ("WNC", "IOW", "CWN"))}
LAYOUTS[2] = (("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("HWNC", "IHWO", "CHNW"))
LAYOUTS[3] = (("NDHWC", "DHWIO", "NDHWC"), ("NCDHW", "OIDHW", "NCDHW"))


def convolution(groups, numbers, stride=1, padding="SAME", dilation=1, base=1):
    def run(x, w):
        rank = x.ndim - 2
        return lax.conv_general_dilated(
            x, w, (stride,) * rank, padding, (base,) * rank, (dilation,) * rank, numbers, feature_group_count=groups
        )

    return run


def layer_operands(numbers, size, window, channels, results):
    """Two images, and weights, with their axes in the order of a convolution's letters; sizes along D, H, W."""
    space = [letter for letter in "DHW" if letter in numbers[0]]
    sizes = dict(zip(space, size, strict=True)) | {"N": 2, "C": channels}
    weights = dict(zip(space, window, strict=True)) | {"I": channels, "O": results}
    x, w = (tuple(known[letter] for letter in names) for known, names in zip((sizes, weights), numbers, strict=False))
    return random(*x), random(*w, seed=1)


def agrees(name, run, operands, count=1):
    """Asserts that so many sites of a kind are found, and that what they compute is what the program does."""
    assert found(run, *operands).count(name) == count
    compared = compare(run, operands, gradients=False, ops=name)
    assert compared.complaints == []
    assert compared.counts("respelling") == count
