"""Block sizes: there are none."""

from autopallas.sites.spec import NoBlockSizes as BlockSizes

__all__ = ["BlockSizes"]
