"""Legality, choice of implementation, block sizes, go / no-go."""

from autopallas.plan.alone import alone
from autopallas.plan.decide import Decision, plan
from autopallas.plan.elsewhere import elsewhere

__all__ = ["Decision", "alone", "elsewhere", "plan"]
