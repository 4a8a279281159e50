"""Recognises products of sorted rows with a matrix for each group."""

from autopallas.patterns.grouped_matmul.recognise import find

__all__ = ["find"]
