"""Implements mixtures of experts as a part of the grouped matmul, which computes their products."""
