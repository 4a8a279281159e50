"""Checks a rewritten program against the original, with a float64 evaluation of the original as the reference."""
