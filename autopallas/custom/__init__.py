"""Patterns of a user's own: a reference computation and what is to run in its place."""
