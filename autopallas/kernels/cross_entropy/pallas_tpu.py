"""Cross-entropy for Mosaic TPU: tiles of logits that never leave VMEM.

One kernel gives the statistics, in one pass over the vocabulary for each block of rows, as in online softmax (Milakov
and Gimelshein 2018, https://arxiv.org/abs/1805.02867).  Products recompute the logits: one kernel sums over the
vocabulary (the gradient of x), one over the rows (that of the weight), so that each accumulates what it writes in VMEM.

Letters: N rows (tokens), D hidden size, V vocabulary; a tile is [r, c].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autopallas.compat import Shaped
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.gradients import Pull
from autopallas.kernels.cross_entropy.operands import Gradients, Operands, Residuals, Results
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec
from autopallas.kernels.cross_entropy.statistics import required
from autopallas.kernels.cross_entropy.tile_products import Target
from autopallas.kernels.cross_entropy.tiles import Tile, TileOperands
from autopallas.kernels.cross_entropy.tpu_kernels import Make, Reader, contract, statistics, summed_apart, values_of
from autopallas.kernels.cross_entropy.tpu_memory import SUBLANES, Packed, Shape, Task, fitting
from autopallas.kernels.refs import IndexMap
from autopallas.kernels.tpu import LANES, call, cost_of, generation, reason_against
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.interpret import interpretation
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import Sizes

__all__ = ["NUMERICS", "backward", "candidates", "forward", "running_sizes", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""

INTERPRETED_UNITS = (8, 8)
"""Interpreted kernels have no registers to fill, and with small tiles show what large ones do."""

Array: TypeAlias = jax.Array


def supports(spec: CrossEntropySpec, device: Device) -> Supported | Unsupported:
    """bfloat16 and float32 on TPUs, programs that Mosaic has, and hidden sizes of which a tile fits into VMEM."""
    if len(spec.heads) > 1:
        return Unsupported("it computes the logits of one head, and the loss reads those of several")
    if any(product.kind == "values" for product in spec.products):
        return Unsupported("the program asks for an array of the logits' size, such as the gradient of soft labels")
    programs = [s.program for s in spec.statistics] + [p.program for p in spec.products]
    dtypes = [spec.row_dtype, spec.weight_dtype, spec.logit_dtype, *(s.dtype for s in spec.sides)]
    answer = reason_against(device, programs, [*dtypes, *(p.dtype for p in spec.products)])
    if answer is not None:
        return answer
    computed = spec.row_dtype, spec.weight_dtype, spec.logit_dtype, spec.accumulation_dtype
    foreign = [d for d in computed if d.name not in ("bfloat16", "float32")]
    if foreign:
        return Unsupported(f"TPUs compute in bfloat16 and float32, not {foreign[0]}")
    budget = generation(device).budget
    for task in _tasks(spec):
        if fitting(spec, BlockSizes.get_default(), task, budget) is None:
            return Unsupported(f"no tile of hidden size {spec.hidden} fits into {budget} bytes of VMEM")
    return Supported()


def _tasks(spec: CrossEntropySpec) -> tuple[Task, ...]:
    """What kernels a spec needs, its derivative included."""
    if not spec.products:
        return "statistics", "rows", "columns"
    kinds = {p.kind for p in spec.products}
    return (
        *(("statistics",) if spec.statistics else ()),
        *(("rows",) if "rows" in kinds else ()),
        *(("columns",) if kinds & {"columns", "column_sum"} else ()),
    )  # fmt: skip


def candidates(spec: CrossEntropySpec, device: Device) -> tuple[BlockSizes, ...]:
    """Returns what a search should try, best guess first; each gives one of the kernels another tile."""
    budget = generation(device).budget
    different: dict[tuple[Shape | None, ...], BlockSizes] = {}
    for pair in ((2048, 2048), (1024, 1024), (1024, 512), (512, 1024), (512, 512), (2048, 256), (256, 2048)):
        sizes = BlockSizes(*pair).fitted(spec)
        different.setdefault(tuple(fitting(spec, sizes, task, budget) for task in _tasks(spec)), sizes)
    return tuple(different.values())


def running_sizes(spec: CrossEntropySpec, block_sizes: BlockSizes, device: Device) -> Sizes:
    """Returns the sizes of the tiles of the forward's first kernel; the others have as much of them as fits into the
    VMEM."""
    lying = replace(spec, vocabulary_major=True) if _lies_transposed(spec) else spec
    rows, columns = _shape(lying, block_sizes, _tasks(spec)[0], device)
    return {"rows_block": rows, "vocabulary_block": columns}


def forward(spec: CrossEntropySpec, block_sizes: BlockSizes, operands: Operands) -> Results:
    """One kernel gives the statistics, and one or two the products."""
    if _lies_transposed(spec):
        major, turned = replace(spec, vocabulary_major=True), operands._replace(w=operands.w.T)
        found, made = forward(major, block_sizes, turned)
        lying = (a.T if p.kind == "columns" else a for a, p in zip(made, spec.products, strict=True))
        return Results(found, tuple(lying))
    arrays = TileOperands.of(spec, operands)
    found = _statistics(spec, block_sizes, operands, arrays.labels) if spec.statistics else ()
    if not spec.products:
        return Results(found)
    finished = arrays.finished(spec, (0, spec.rows), found)
    targets = [Target.of_product(p) for p in spec.products]
    programs = [p.program for p in spec.products]
    products = _contracted(
        spec, block_sizes, operands, finished, targets, lambda chosen: values_of([programs[n] for n in chosen])
    )
    shaped = (a[0] if p.kind == "column_sum" else a for a, p in zip(products, spec.products, strict=True))
    return Results(found, tuple(shaped))


def backward(
    spec: CrossEntropySpec,
    block_sizes: BlockSizes,
    operands: Operands,
    residuals: Residuals,
    cotangents: Sequence[Array | None],
    wanted: Sequence[bool],
) -> Gradients:
    """The kernels of the products give the gradients."""
    if _lies_transposed(spec):
        major, turned = replace(spec, vocabulary_major=True), operands._replace(w=operands.w.T)
        found = backward(major, block_sizes, turned, residuals, cotangents, wanted)
        return found if found.w is None else found._replace(w=found.w.T)
    targets = Target.of_gradients(spec, wanted)
    if not targets:
        return Gradients.at({}, len(spec.sides))
    labels = TileOperands.of(spec, operands).labels

    def compute(other: CrossEntropySpec) -> tuple[Array, ...]:
        return _statistics(other, block_sizes, operands, labels)

    pull = Pull.of(spec, labels, residuals.statistics, cotangents, compute)
    positions = list(targets)

    def make(chosen: Sequence[int]) -> Make:
        floating = [positions[n] - 2 for n in chosen if positions[n] >= 2]

        def values(tile: Tile, extra: Sequence[Array]) -> list[Array]:
            rows = (0, tile.query.shape[0])
            dscore, dsides = pull.over(extra).tile(tile, rows, floating)
            left = iter(dsides)
            return [next(left) if positions[n] >= 2 else dscore for n in chosen]

        return values

    gradients = _contracted(spec, block_sizes, operands, pull.arrays(), [*targets.values()], make)
    return Gradients.at(dict(zip(positions, gradients, strict=True)), len(spec.sides))


def _lies_transposed(spec: CrossEntropySpec) -> bool:
    """Whether XLA keeps a weight [D, V] in memory as [V, D], which takes less padding, and would copy it for a kernel
    that reads it as [D, V]."""
    return not spec.vocabulary_major and spec.vocabulary % LANES != 0 and spec.hidden % LANES == 0


# ---------------------------------------------------------------------- the calls


def _shape(spec: CrossEntropySpec, sizes: BlockSizes, task: Task, device: Device) -> Shape:
    """The tile of a task's kernel."""
    budget = generation(device).budget
    units = INTERPRETED_UNITS if interpretation() else (LANES, SUBLANES)
    shape = fitting(spec, sizes, task, budget, *units)
    if shape is None:
        raise ValueError(f"no tile of hidden size {spec.hidden} fits into {budget} bytes of VMEM")
    return shape


def _reader(spec: CrossEntropySpec, sizes: BlockSizes, task: Task, sides: Sequence[Array]) -> Reader:
    return Reader(spec, _shape(spec, sizes, task, Device.current()), Packed.of(sides, spec.rows))


def _in_specs(reader: Reader, rows_outside: bool) -> list[pl.BlockSpec]:
    """Of x, w and the packed arrays, on a grid of (rows, vocabulary), or the other way round."""
    spec, (rows, columns) = reader.spec, reader.shape

    def at(*axes: int | None) -> IndexMap:
        order = (0, 1) if rows_outside else (1, 0)
        return lambda *step: tuple(0 if axis is None else step[order[axis]] for axis in axes)

    x = pl.BlockSpec((rows, spec.hidden), at(0, None))
    w = pl.BlockSpec((columns, spec.hidden), at(1, None))
    if not spec.vocabulary_major:
        w = pl.BlockSpec((spec.hidden, columns), at(None, 1))
    packed = {
        "column": pl.BlockSpec((1, columns), at(None, 1)),
        "full": pl.BlockSpec((rows, columns), at(0, 1)),
    }
    others = [
        packed.get(kind) or pl.BlockSpec((rows, array.shape[1]), at(0, None))
        for kind, array in zip(reader.sides.kinds, reader.sides.arrays, strict=True)
    ]
    return [x, w, *others]


def _blocks(reader: Reader) -> tuple[int, int]:
    """How many blocks of rows, and of the vocabulary, there are."""
    return -(-reader.spec.rows // reader.shape.rows), -(-reader.spec.vocabulary // reader.shape.columns)


def _cost(reader: Reader, operands: Operands, results: Sequence[Shaped], passes: int, dots: int) -> pl.CostEstimate:
    """Of ``dots`` matmuls per tile, and an exponential per logit; what the inner loop holds is read in each pass."""
    x, w, _ = operands
    rows, columns = _blocks(reader)

    def body(x: Array, w: Array) -> Array:
        contract = 1 if reader.spec.vocabulary_major else 0
        logits = jax.lax.dot_general(x, w, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)
        return jnp.exp(logits)

    block = jax.ShapeDtypeStruct((reader.shape.rows, reader.spec.hidden), x.dtype)
    part = (reader.shape.columns, reader.spec.hidden)
    weight = jax.ShapeDtypeStruct(part if reader.spec.vocabulary_major else part[::-1], x.dtype)
    inner = w if passes == rows else x
    one = cost_of(body, block, weight, times=rows * columns, arrays=[x, w, *[inner] * (passes - 1), *results])
    return replace(one, flops=one.flops * dots)


def _statistics(
    spec: CrossEntropySpec, sizes: BlockSizes, operands: Operands, labels: dict[int, Array]
) -> tuple[Array, ...]:
    """The spec's statistics, [N] each."""
    needed = required(spec.statistics)
    reader = _reader(spec, sizes, "statistics", (*operands.side_arrays, *labels.values()))
    rows, columns = _blocks(reader)
    results = [jax.ShapeDtypeStruct((spec.rows, 1), jnp.int32 if s.kind == "argmax" else jnp.float32) for s in needed]
    found = call(
        partial(statistics, reader, needed, tuple(labels)),
        name="autopallas_cross_entropy_statistics",
        grid=(rows, columns),
        semantics=("parallel", "arbitrary"),
        in_specs=_in_specs(reader, True),
        out_specs=[pl.BlockSpec((reader.shape.rows, 1), lambda i, j: (i, 0)) for _ in needed],
        out_shape=results,
        cost=_cost(reader, operands, results, rows, 1),
        alike=2,
    )(operands.x, operands.w, *reader.sides.arrays)
    known = dict(zip(needed, found, strict=True))
    return tuple(known[s][:, 0] for s in spec.statistics)


def _contracted(
    spec: CrossEntropySpec,
    sizes: BlockSizes,
    operands: Operands,
    extra: Sequence[Array],
    targets: Sequence[Target],
    make: Callable[[Sequence[int]], Make],
) -> list[Array]:
    """The targets, each by the kernel that sums along its axis; ``make(numbers)`` gives the values of some of them."""
    tasks: dict[Task, list[int]] = {"rows": [], "columns": []}
    for n, target in enumerate(targets):
        over_rows = target.kind == "columns" or (target.kind == "side" and target.varies == (False, True))
        tasks["columns" if over_rows else "rows"].append(n)
    if all(targets[n].kind == "side" and all(targets[n].varies) for n in tasks["rows"]) and tasks["columns"]:
        # What is summed over nothing needs no pass of its own.
        tasks = {"rows": [], "columns": sorted(tasks["rows"] + tasks["columns"])}
    found: dict[int, Array] = {}
    for task, numbers in tasks.items():
        if numbers:
            chosen = [targets[n] for n in numbers]
            results = _contraction(spec, sizes, operands, extra, task, chosen, make(numbers))
            found |= dict(zip(numbers, results, strict=True))
    return [found[n] for n in range(len(targets))]


def _contraction(
    spec: CrossEntropySpec,
    sizes: BlockSizes,
    operands: Operands,
    extra: Sequence[Array],
    task: Task,
    targets: Sequence[Target],
    make: Make,
) -> list[Array]:
    reader = _reader(spec, sizes, task, (*operands.side_arrays, *extra))
    shape, blocks = reader.shape, _blocks(reader)
    outside = 0 if task == "rows" else 1
    specs, results, scratch = [], [], []
    for target in targets:
        dtype, whole = target.dtype, target.shape(spec, spec.rows, spec.vocabulary)
        block: tuple[int, ...] = target.shape(spec, *shape)
        places: tuple[int | None, int | None] = (0, None) if task == "rows" else (1, None)
        if target.kind == "columns" and not spec.vocabulary_major:
            places = (None, 1)
        elif target.kind == "side":
            by_row, by_column = target.varies if any(target.varies) else (True, False)  # one number per row first
            whole = spec.rows if by_row else 1, spec.vocabulary if by_column else 1
            block = shape.rows if by_row else 1, shape.columns if by_column else 1
            places = 0 if by_row else None, 1 if by_column else None
            dtype = dtype if by_row and by_column else np.dtype(np.float32)
        specs.append(pl.BlockSpec(block, _index(places, outside)))
        results.append(jax.ShapeDtypeStruct(whole, dtype))
        if summed_apart(target):
            scratch.append(pltpu.VMEM(block, jnp.float32))
    dots = 1 + sum(target.kind != "side" for target in targets)
    found = call(
        partial(contract, reader, task, targets, make),
        name=f"autopallas_cross_entropy_{task}",
        grid=blocks if task == "rows" else blocks[::-1],
        semantics=("parallel", "arbitrary"),
        in_specs=_in_specs(reader, task == "rows"),
        out_specs=specs,
        out_shape=results,
        scratch_shapes=scratch,
        cost=_cost(reader, operands, results, blocks[outside], dots),
        alike=2,
    )(operands.x, operands.w, *reader.sides.arrays)
    return [
        (a.sum(0, keepdims=True) if t.kind == "side" and t.varies == (False, False) else a).astype(t.dtype)
        for a, t in zip(found, targets, strict=True)
    ]


def _index(places: tuple[int | None, int | None], outside: int) -> IndexMap:
    """An index map: block of rows (0), of the vocabulary (1), or the only one (None) in each dimension."""
    return lambda *step: tuple(0 if p is None else step[0 if p == outside else 1] for p in places)
