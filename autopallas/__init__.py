"""Makes existing JAX programs fast without changing them.

Put ``@autopallas.optimize`` on a function or on an existing ``jax.jit`` function: the places where it spells out a
reference computation, in whatever spelling, run as tuned fused kernels, and ``fn.report()`` says what was replaced and
why.
"""

from autopallas.errors import (
    AutopallasWarning,
    OptionError,
    RequirementError,
    UnsupportedError,
    VerificationError,
)
from autopallas.optimize import explain, optimize
from autopallas.options import options
from autopallas.report import Report
from autopallas.verification.verify import Verification, verify

__all__ = [
    "AutopallasWarning",
    "OptionError",
    "Report",
    "RequirementError",
    "UnsupportedError",
    "Verification",
    "VerificationError",
    "__version__",
    "explain",
    "optimize",
    "options",
    "verify",
]

__version__ = "0.1.0"
