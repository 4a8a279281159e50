"""Makes existing JAX programs fast without changing them.

Put ``@autopallas.optimize`` on a function or on an existing ``jax.jit`` function.  Wherever it spells out a reference
computation, in whatever spelling, it then runs a tuned fused kernel, and ``fn.report()`` says what was replaced and
why.
"""

from typing import TYPE_CHECKING

from autopallas.custom.declare import pattern
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
from autopallas.version import __version__

if TYPE_CHECKING:
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
    "pattern",
    "verify",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name in ("Verification", "verify"):  # few programs verify, so only they pay for the import
        from autopallas.verification import verify as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
