"""Programs that are divided among several devices: how each site is divided, as the original would be."""

from autopallas.partition.place import placed
from autopallas.partition.shardings import Shardings
from autopallas.partition.together import hurried, objection

__all__ = ["Shardings", "hurried", "objection", "placed"]
