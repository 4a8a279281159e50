"""Gated MLP: the product of two projections, one of them activated, and the projection that follows."""

from autopallas.kernels.exports import public_functions

__getattr__ = public_functions(__name__)
