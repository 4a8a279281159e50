"""RMSNorm for Mosaic TPU: one kernel forward and one backward, each of which reads its rows once."""

from __future__ import annotations

from autopallas.kernels.row_moments import GAINS, NUMERICS, TILES
from autopallas.kernels.row_moments_tpu import TpuMomentsKernels

__all__ = ["GAINS", "NUMERICS", "TILES", "backward", "forward", "supports"]

_KERNELS = TpuMomentsKernels("rms_norm", centred=False)
supports, forward, backward = _KERNELS.supports, _KERNELS.forward, _KERNELS.backward
