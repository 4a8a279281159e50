"""Lowers functions for devices that are not there."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from autopallas import compat
from autopallas.compat import ArrayFunction, PyTree
from autopallas.sites.device import Device
from autopallas.sites.interpret import settled

__all__ = ["lowered"]


def lowered(function: ArrayFunction, arguments: Sequence[PyTree], device: Device, cores: int | None = None) -> bytes:
    """Lowers a function for a device, and serializes it.

    Args:
      function: the function to trace with ``arguments``; its questions to Pallas about the device are answered.
      arguments: arrays, or anything with shape and dtype, in pytrees.
      device: the device.
      cores: how many cores it has, where Pallas asks for them.
    """
    leaves, tree = jax.tree.flatten(tuple(arguments))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

    def flat(*values: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, values)))

    abstract = AbstractDevice(device_kind=device.kind, num_cores=cores, platform=device.platform)
    with device.targeted(), settled(), use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        return compat.exported(flat, types, device.platform)
