"""Finds causal linear attention."""

from autopallas.patterns.linear_attention.finder import find

__all__ = ["find"]
