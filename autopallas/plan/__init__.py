"""Legality, choice of implementation, block sizes, go / no-go."""
