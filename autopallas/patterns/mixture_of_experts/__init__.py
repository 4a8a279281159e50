"""Recognises mixtures of experts in any spelling, as products of only the rows that each expert has to compute."""

from autopallas.patterns.mixture_of_experts.finder import find

__all__ = ["find"]
