"""Declares the operation: small rewrites of what a platform computes slowly."""

from __future__ import annotations

from autopallas.kernels.respelling.kinds import kind_names
from autopallas.sites.operation import Operation

__all__ = ["OPERATION"]


class _Respelling(Operation):
    __slots__ = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        return kind_names()


OPERATION = _Respelling("respelling", order=dict.fromkeys(("cpu", "gpu", "tpu"), ("xla",)), priority=-1)
"""Patterns of other operations look first, and win where their sites are applied."""
