"""Numerical effects of arithmetic: casts, roundings, and the float64 oracle with which results are compared."""
