"""Causal linear attention: attention without a softmax, as sums over the steps before each."""

from autopallas.kernels.exports import public_functions

__getattr__ = public_functions(__name__)
