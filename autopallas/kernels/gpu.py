"""Shares what the GPU kernels of all operations need: which GPUs, tiles of shared memory, and the one ``kernel`` call.

Kernels are written for Hopper's H100 with Mosaic GPU (``plgpu.kernel``). Everything here except :func:`mosaic`,
:func:`tile` and :func:`call` is plain arithmetic that needs no GPU and no Pallas.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from autopallas import compat
from autopallas.compat import ArrayFunction, PyTree, Shaped
from autopallas.kernels.refs import Ref, Types
from autopallas.sites.device import Device, gpu_properties
from autopallas.sites.elementwise import ElementwiseProgram
from autopallas.sites.interpret import interpretation, refusal
from autopallas.sites.operation import Unsupported

__all__ = [
    "APPROXIMATED",
    "MATRIX_DTYPES",
    "PROGRAM_PRIMITIVES",
    "SHARED_MEMORY",
    "array_bytes",
    "call",
    "clusters",
    "is_hopper",
    "mosaic",
    "processors",
    "reason_against",
    "reason_against_programs",
    "rounded",
    "shared_bytes",
    "store",
    "swizzle",
    "tile",
    "too_few_threads",
    "unravelled",
]


SHARED_MEMORY = 227 * 2**10
"""Bytes of shared memory that one block of an H100 may have."""

MATRIX_DTYPES = ("bfloat16", "float16")
"""Dtypes that wgmma multiplies without loss: float32 operands would be cut to TF32, 10 bits of fraction."""

_CAPABILITY = "9.0"
_HOPPERS = frozenset({"H100", "H200", "GH200", "H800", "H20"})
_MISCOMPILES = range(12080, 12091)
"""Versions of the CUDA runtime with which JAX's own attention kernel for Hopper refuses causal masks."""

_REDUCTION_SCRATCH = 2048
"""Bytes of shared memory that Mosaic sets aside for reductions across warps."""
_BARRIER, _ALIGNMENT = 8, 1024
_INTERPRETER_THREADS = 8
_HAS_AFFINITY = hasattr(os, "sched_getaffinity")


def is_hopper(device: Device) -> bool:
    """Returns whether a device has compute capability 9.0 (sm_90), as H100, H200 and GH200 do.

    The device itself answers if this process has one of that kind; otherwise its name does.

    Example:
      >>> [is_hopper(Device("gpu", f"NVIDIA {name}")) for name in ("H100 80GB HBM3", "H200", "A100-SXM4-40GB")]
      [True, True, False]
    """
    if device.platform != "gpu":
        return False
    found = gpu_properties(device.kind)
    return found.capability == _CAPABILITY if found is not None else not _HOPPERS.isdisjoint(device.kind.split())


def clusters(device: Device) -> int:
    """Returns the number of clusters of two blocks that are there at once; where the kernel is interpreted, two."""
    return max(2, processors(device) // 2)


def processors(device: Device) -> int:
    """Returns the number of streaming multiprocessors, which is the number of blocks of a persistent kernel.

    Where the kernel is interpreted, the number is small. A program that is exported for GPUs is lowered without the
    name of one.
    """
    if device.platform != "gpu":
        return 2
    found = gpu_properties(device.kind)
    return found.processors if found is not None and found.processors else 114 if "PCIe" in device.kind else 132


# ---------------------------------------------------------------------- what is supported

PROGRAM_PRIMITIVES = frozenset(
    """
    abs add and atan2 bitcast_convert_type clamp clz convert_element_type cos div eq exp exp2 ge gt integer_pow
    le log logistic lt max min mul ne neg not one_minus_square or rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sqrt square sub tanh xor
    """.split()
)
"""Elementwise primitives that Mosaic GPU lowers in every version of JAX in which these kernels run."""

APPROXIMATED = frozenset("atan2 cos exp exp2 log logistic pow rsqrt sin sqrt tanh".split())
"""Primitives whose results ``call(approximate=True)`` may change, tanh by as much as 2**-11 of them."""

_PROGRAM_DTYPES = frozenset("bool int8 int16 int32 uint8 uint16 uint32 bfloat16 float16 float32".split())


def reason_against(
    device: Device,
    dtypes: Iterable[DTypeLike] = (),
    programs: Iterable[ElementwiseProgram] = (),
    held: Iterable[DTypeLike] = (),
) -> Unsupported | None:
    """Returns what stops a Hopper kernel, from rules alone; None where no obstacle is known.

    Args:
      device: where it is to run.
      dtypes: dtypes of what the tensor cores multiply.
      programs: what it evaluates on a tile.
      held: dtypes of its other operands and of its results.
    """
    if (answer := refusal("gpu", device)) is not None:
        return answer
    if (missing := compat.missing_mosaic_gpu()) is not None:
        return Unsupported(missing)
    if device.platform != "gpu" and (waits := too_few_threads()) is not None:
        return Unsupported(waits)
    if device.platform == "gpu" and not is_hopper(device):
        return Unsupported(f"it is written for Hopper (sm_90a: TMA and wgmma), and this GPU is {device.kind}")
    if device.platform == "gpu" and device.here and (version := compat.cuda_runtime()) in _MISCOMPILES:
        return Unsupported(
            f"ptxas of CUDA 12.8.0 to 12.9.0 miscompiles causal attention for Hopper, and the CUDA here is {version}"
        )
    names = dict.fromkeys(np.dtype(d).name for d in dtypes)
    if wrong := [name for name in names if name not in MATRIX_DTYPES]:
        return Unsupported(f"wgmma multiplies {' and '.join(MATRIX_DTYPES)} without loss, and not {', '.join(wrong)}")
    if len(names) > 1:
        return Unsupported(f"wgmma does not multiply {' with '.join(names)}")
    return reason_against_programs(programs, held)


def reason_against_programs(
    programs: Iterable[ElementwiseProgram], held: Iterable[DTypeLike] = ()
) -> Unsupported | None:
    """Returns what programs, or dtypes of other operands and results, need and Mosaic GPU lacks; None if nothing."""
    programs = tuple(programs)
    # Programs evaluate add_any, which adds cotangents, as an addition.
    if absent := sorted({p for program in programs for p in program.primitives} - PROGRAM_PRIMITIVES - {"add_any"}):
        return Unsupported(f"Mosaic GPU has no {', '.join(absent)}")
    others = {np.dtype(d).name for d in held}
    others |= {np.dtype(x.dtype).name for program in programs for x in (*program.inputs, *program.instructions)}
    if absent := sorted(others - _PROGRAM_DTYPES):
        return Unsupported(f"the GPU kernels do not compute with {', '.join(absent)}")
    return None


# ---------------------------------------------------------------------- tiles of shared memory


def rounded(number: int, multiple: int) -> int:
    """Returns the next multiple at or above a number."""
    return -(-number // multiple) * multiple


def array_bytes(*arrays: Shaped) -> int:
    """Returns the bytes of main memory that arrays, or arrays of these types, take."""
    return sum(int(math.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in arrays)


def swizzle(columns: int, dtype: DTypeLike) -> int:
    """Returns the bytes of the widest swizzle that divides the rows of a tile with so many columns.

    Raises:
      ValueError: the rows have no multiple of 32 bytes.

    Example:
      >>> swizzle(64, np.float16), swizzle(96, np.float16), swizzle(16, np.float16)
      (128, 64, 32)
    """
    size = columns * np.dtype(dtype).itemsize
    for width in (128, 64, 32):
        if size % width == 0:
            return width
    raise ValueError(f"rows of {columns} {np.dtype(dtype).name} are no multiple of 32 bytes")


def shared_bytes(tiles: Iterable[tuple[Sequence[int], DTypeLike]], barriers: int = 0) -> int:
    """Returns the shared memory of one block: its tiles, each at an aligned address, its barriers, and Mosaic's
    scratch.

    Args:
      tiles: shape, with the stages of a pipeline in front, and dtype.
      barriers: their number, counted with the stages.

    Example:
      >>> shared_bytes([((4, 128, 64), np.float16), ((4, 64, 256), np.float16)], barriers=8)
      198720
    """
    sizes = (math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in tiles)
    return sum(rounded(size, _ALIGNMENT) for size in sizes) + barriers * _BARRIER + _REDUCTION_SCRATCH


# ---------------------------------------------------------------------- Pallas


def too_few_threads() -> str | None:
    """Returns what keeps kernels from being interpreted here; None where nothing does.

    Each warpgroup that waits at a barrier holds a thread of XLA's pool. If the pool is as small as it is by default on
    small machines, the warpgroups that it waits for may never run.
    """
    wanted = os.environ.get("NPROC", "")
    here = len(os.sched_getaffinity(0)) if _HAS_AFFINITY else os.cpu_count() or 1
    threads = int(wanted) if wanted.isdecimal() else here
    if threads >= _INTERPRETER_THREADS:
        return None
    return (
        f"interpreted GPU kernels wait for each other in {_INTERPRETER_THREADS} threads or more, and XLA has {threads} "
        "(set NPROC=32 before JAX starts)"
    )


def mosaic() -> ModuleType:
    """Returns ``jax.experimental.pallas.mosaic_gpu``, imported when first asked for."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def store(ref: Ref, value: jax.Array) -> None:
    """Stores an array of registers, also where its threads fill sectors of 32 bytes of global memory by halves, or meet
    in banks of shared memory.

    From JAX 0.12 on such a store has to be asked for; before, there is no other.
    """
    if hasattr(mosaic(), "store"):
        mosaic().store(ref, value, optimized=False)
    else:
        ref[...] = value


def tile(shape: Sequence[int], dtype: DTypeLike, widest: int = 128) -> Ref:
    """Returns shared memory in the layout that TMA writes and wgmma reads: 8 rows by one swizzle, and so on.

    Args:
      shape: rows and columns last, and stages in front.
      dtype: of 16 bits, where wgmma reads it.
      widest: bytes that the swizzle may have. wgmma takes as many rows at once as there are numbers in one.
    """
    plgpu = mosaic()
    width = min(swizzle(shape[-1], dtype), widest)
    transforms = plgpu.TilingTransform((8, width // np.dtype(dtype).itemsize)), plgpu.SwizzleTransform(width)
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def unravelled(number: jax.Array, inner: int) -> tuple[jax.Array, jax.Array]:
    """Returns (number // inner, number % inner), in a kernel, of a number that is not negative.

    Grids have one axis: it may have 2**31 - 1 blocks, but a second or third one 65535, which nothing checks before
    the launch.
    """
    return lax.div(number, jnp.int32(inner)), lax.rem(number, jnp.int32(inner))


def call(
    body: Callable[..., None],
    *,
    name: str,
    grid: Mapping[str, int],
    out_type: Types,
    scratch: Sequence[Ref],
    warpgroups: int,
    cluster: Mapping[str, int] = MappingProxyType({}),
    flops: int = 0,
    bytes_accessed: int = 0,
    transcendentals: int = 0,
    approximate: bool = False,
    by_lanes: bool = False,
) -> ArrayFunction:
    """Returns a ``plgpu.kernel`` as every GPU kernel here needs it: named, scoped, and interpreted where asked for.

    Args:
      body: function of inputs, outputs and scratch. ``lax.axis_index`` of the grid's names and of "warpgroup" says
        where it is.
      name: of the kernel and of the scope around it.
      grid: the number of blocks along each named axis.
      out_type: shapes and dtypes of the results.
      scratch: shared memory and barriers, as :func:`tile` and Pallas make them.
      warpgroups: threads of 128 lanes in a block.
      cluster: the number of blocks along each named axis of a cluster; the grid then counts clusters.
      flops, bytes_accessed, transcendentals: what XLA's scheduler is told of its cost.
      approximate: whether :data:`APPROXIMATED` may be the hardware's approximations; of exp and log these are within
        about 2 units in the last place.
      by_lanes: whether the body itself says how arrays lie in registers. Otherwise Mosaic infers it, by a search whose
        time grows exponentially with the number of values that have no given layout.

    Returns:
      A function of the operands.

    Raises:
      RuntimeError: it is to be interpreted, and XLA has too few threads for that.
    """
    plgpu = mosaic()
    mode = interpretation()
    semantics = {"lowering_semantics": plgpu.LoweringSemantics.Lane} if by_lanes else {}
    kernel = compat.mosaic_gpu_kernel(
        body,
        cost=dict(flops=flops, bytes_accessed=bytes_accessed, transcendentals=transcendentals),
        out_type=out_type,
        scratch_types=list(scratch),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple(cluster.values()),
        cluster_names=tuple(cluster),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        interpret=plgpu.InterpretGPUParams() if mode is True else mode,
        compiler_params=plgpu.CompilerParams(approx_math=approximate, **semantics),
    )

    def run(*operands: jax.Array) -> PyTree:
        # Indices have 32 bits, even where the surrounding program has 64.
        with jax.named_scope(name), jax.enable_x64(False):
            found = kernel(*operands)
        # A result that a loop stacks, and that is used besides, would be computed twice: XLA makes a second call that
        # writes into the stack.
        return jax.tree.map(lax.optimization_barrier, found)

    return run
