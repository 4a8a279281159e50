"""Brings the kernels of tokamax (https://github.com/openxla/tokamax) as implementations, where it is installed.

They are called by tokamax's public functions, take part in the race on GPUs and TPUs as any other implementation, and
are used on evidence alone: a search that finds them faster, or because they are named.  ``pip install
'.[tokamax]'`` installs it, on Python 3.12 or later.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata

from autopallas.sites.providers import ProvidedImplementation, Provider

__all__ = ["NAME", "provider"]

NAME = "tokamax"
"""Name of the implementations."""


def provider() -> Provider:
    """Returns the provider: without implementations where tokamax is not installed."""
    if importlib.util.find_spec("tokamax") is None:
        return Provider()
    version = metadata.version("tokamax")
    return Provider(
        tuple(
            ProvidedImplementation(operation, NAME, f"autopallas.tokamax.{operation}", ("gpu", "tpu"), version)
            for operation in ("attention", "grouped_matmul")
        )
    )
