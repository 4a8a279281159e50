"""Holds the operations that autopallas replaces by kernels, one package each."""
