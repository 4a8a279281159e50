"""Mixtures of experts: a part of the grouped matmul, by which they compute their products."""
