"""Splices decisions back into an edited jaxpr; the site primitive."""

from autopallas.rewrite.splice import splice

__all__ = ["splice"]
