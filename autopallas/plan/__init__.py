"""Legality, choice of implementation, block sizes, go / no-go."""

from autopallas.plan.decide import Decision, plan

__all__ = ["Decision", "plan"]
