"""Recognises products of sorted rows with a matrix for each group."""

from autopallas.patterns.grouped_matmul.finder import find

__all__ = ["find"]
