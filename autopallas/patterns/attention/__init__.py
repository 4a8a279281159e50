"""Recognises softmax attention: products of queries and keys, a proof that a softmax follows, products with values."""

from autopallas.patterns.attention.recognise import find

__all__ = ["find"]
