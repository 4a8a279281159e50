"""Finds gated MLPs: two projections of one value, of which one is activated and the other multiplied with it."""

from autopallas.patterns.gated_mlp.recognise import find

__all__ = ["find"]
