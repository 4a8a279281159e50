"""Describes the devices for which programs are compiled."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import jax

from autopallas.trace_context import TraceContext

__all__ = ["Device", "GpuProperties", "gpu_properties"]

_ANY_TPU = "TPU v4"
"""Oldest supported generation; what Mosaic lowers for it runs on the later ones."""

_target: TraceContext[Device | None] = TraceContext(None)
"""Device that code is being lowered for, where it is not this process's own."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where a program will run: ``platform`` is "cpu", "gpu" or "tpu"; ``kind`` is the device's own name."""

    platform: str
    kind: str

    @staticmethod
    def current() -> Device:
        """Returns the device that code is compiled for: that of an enclosing ``with device.targeted()``, else that of
        JAX's mesh, else the default one."""
        if _target.value is not None:
            return _target.value
        device = jax.sharding.get_abstract_mesh().abstract_device
        return Device.of(device or jax.devices()[0])

    @staticmethod
    def of(device: jax.Device | jax.sharding.AbstractDevice) -> Device:
        """Returns the description of one of JAX's devices."""
        return Device({"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform), device.device_kind)

    @property
    def here(self) -> bool:
        """Whether this process can run something on such a device."""
        return self.platform == Device.of(jax.devices()[0]).platform

    def targeted(self) -> AbstractContextManager[None]:
        """Returns a context in which code is traced and lowered for this device, whatever this process runs on."""
        return _target(self)

    def checked(self) -> AbstractContextManager[None]:
        """Returns the context in which planning traces what this device will run, so that lowering finds it again.

        The kind of a CPU is left out: lowering does not always know it, and no kernel depends on it.
        """
        return Device("cpu", "").targeted() if self.platform == "cpu" else self.targeted()

    @contextmanager
    def lowered(self) -> Iterator[None]:
        """Does the same for code that is traced and lowered at once, and also tells JAX's own rules the device."""
        with ExitStack() as contexts:
            contexts.enter_context(self.checked())
            if self.platform == "tpu" and jax.default_backend() != "tpu":
                device = jax.sharding.AbstractDevice(self.kind or _ANY_TPU, 1, "tpu")
                mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
                contexts.enter_context(jax.sharding.use_abstract_mesh(mesh))
            yield


class GpuProperties(NamedTuple):
    """Compute capability, such as "9.0", and number of streaming multiprocessors of a GPU."""

    capability: str
    processors: int


@functools.cache
def gpu_properties(kind: str) -> GpuProperties | None:
    """Returns the properties of this process's GPU of a kind, or None if it has none."""
    for device in jax.local_devices():
        if device.platform in ("gpu", "cuda") and device.device_kind == kind:
            return GpuProperties(str(getattr(device, "compute_capability", "")), int(getattr(device, "core_count", 0)))
    return None
