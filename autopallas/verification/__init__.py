"""Checks of a rewritten program: against the original, judged by a float64 evaluation of the original."""
