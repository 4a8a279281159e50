"""RMSNorm: rows divided by the root of their mean square."""

from autopallas.kernels.exports import public_functions

__getattr__ = public_functions(__name__)
