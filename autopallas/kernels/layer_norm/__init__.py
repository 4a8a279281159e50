"""LayerNorm: rows less their mean, divided by their standard deviation."""

from autopallas.kernels.exports import public_functions

__getattr__ = public_functions(__name__)
