"""Splices decisions back into an edited jaxpr; the site primitive."""

from autopallas.rewrite.sites import splice

__all__ = ["splice"]
