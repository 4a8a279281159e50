"""Legality, choice of implementation, block sizes, go / no-go."""

from autopallas.plan.decide import Decision, decide

__all__ = ["Decision", "decide"]
