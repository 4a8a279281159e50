"""Softmax attention: products of queries and keys, a proof that what follows is a softmax, products with values."""

from autopallas.patterns.attention.recognise import find

__all__ = ["find"]
