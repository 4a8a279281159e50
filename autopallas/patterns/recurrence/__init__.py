"""Finds loops that are affine in what they carry: linear recurrences, and filters, returns and averages."""

from autopallas.patterns.recurrence.recognise import find

__all__ = ["find"]
