"""Finds causal linear attention."""

from autopallas.patterns.linear_attention.recognise import find

__all__ = ["find"]
