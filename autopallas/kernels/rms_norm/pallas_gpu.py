"""RMSNorm for Mosaic GPU: one kernel forward and one backward, each of which reads its rows once."""

from __future__ import annotations

from autopallas.kernels.row_moments import GAINS, NUMERICS, TILES
from autopallas.kernels.row_moments_gpu import GpuMomentsKernels

__all__ = ["GAINS", "NUMERICS", "TILES", "backward", "forward", "supports"]

_KERNELS = GpuMomentsKernels("rms_norm", centred=False)
supports, forward, backward = _KERNELS.supports, _KERNELS.forward, _KERNELS.backward
