"""Patterns of a user's own: a reference computation and what is to run in its place."""

from autopallas.own.pattern import Pattern, declared, pattern

__all__ = ["Pattern", "declared", "pattern"]
