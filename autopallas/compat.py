"""Wraps every JAX name that is not public, or that differs between the supported versions (0.10 to 0.12)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jax._src import config, core, source_info_util
from jax._src.interpreters import batching as _batching
from jax._src.source_info_util import Frame, NameStack, SourceInfo, Traceback
from jax.extend.core import DebugInfo, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

Dtype: TypeAlias = np.dtype[np.generic]
"""A dtype."""
Array: TypeAlias = jax.Array | np.ndarray
"""An array, on a device or on the host."""
PyTree: TypeAlias = Any
"""A tree of arrays, as a user's functions take and return them; no type can describe it."""
Params: TypeAlias = dict[str, Any]
"""Parameters of an equation by name; their types depend on the primitive, and JAX does not declare them."""
ArrayFunction: TypeAlias = Callable[..., PyTree]
"""A function of arrays whose results are arrays or trees of them, as JAX's transformations take and return."""


class Shaped(Protocol):
    """Anything with a shape and a dtype: an array, or the type of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Dtype: ...


LoweringContext: TypeAlias = mlir.LoweringRuleContext
"""Context in which an equation is lowered."""

if TYPE_CHECKING:  # declares what this package uses of classes whose attributes JAX does not annotate
    from jax._src.core import JaxprEqnContext
    from jax._src.pallas.mosaic.core import TensorCoreMesh
    from jaxlib.mlir import ir

    class ManualAxisType:
        varying: frozenset[str]

        def __init__(self, varying: frozenset[str] = ...) -> None: ...

    class ShapedArray:  # for a type of no array (a token, a mutable array) only its hash may be used
        shape: tuple[int, ...]
        dtype: Dtype
        ndim: int
        size: int
        weak_type: bool
        sharding: NamedSharding
        manual_axis_type: ManualAxisType

        def __init__(self, shape: Sequence[int], dtype: DTypeLike, **further: object) -> None: ...

        def update(self, **changes: object) -> ShapedArray: ...

        def to_tangent_aval(self) -> PyTree: ...

        def str_short(self) -> str: ...

    class Var:
        aval: ShapedArray

        def __init__(self, aval: ShapedArray) -> None: ...

    class Literal:
        val: float  # a number of any kind
        aval: ShapedArray

        def __init__(self, val: object, aval: ShapedArray) -> None: ...

    class JaxprEqn:
        primitive: Primitive
        params: Params
        invars: list[Var | Literal]
        outvars: list[Var]
        effects: Set[object]
        source_info: SourceInfo
        ctx: JaxprEqnContext

        def replace(self, **changes: object) -> JaxprEqn: ...

    class Jaxpr:
        constvars: list[Var]
        invars: list[Var]
        outvars: list[Var | Literal]
        eqns: list[JaxprEqn]
        effects: Set[object]
        is_high: bool

        def __init__(
            self,
            constvars: Sequence[Var],
            invars: Sequence[Var],
            outvars: Sequence[Var | Literal],
            eqns: Sequence[JaxprEqn],
            effects: Set[object] = ...,
            debug_info: DebugInfo | None = ...,
        ) -> None: ...

    class ClosedJaxpr:
        jaxpr: Jaxpr
        consts: list[jax.Array]
        in_avals: list[ShapedArray]
        out_avals: list[ShapedArray]

        eqns: list[JaxprEqn]

        def __init__(self, jaxpr: Jaxpr, consts: Sequence[object]) -> None: ...

    def dce_jaxpr(
        jaxpr: Jaxpr, used_outputs: Sequence[bool], instantiate: bool | Sequence[bool] = False
    ) -> tuple[Jaxpr, list[bool]]: ...

    def jaxpr_as_fun(closed: JaxprLike) -> Callable[..., list[jax.Array]]: ...

    def new_jaxpr_eqn(
        invars: Sequence[Var | Literal],
        outvars: Sequence[Var],
        primitive: Primitive,
        params: Params,
        effects: Set[object],
        source_info: SourceInfo | None = ...,
        ctx: JaxprEqnContext | None = ...,
    ) -> JaxprEqn: ...

else:
    from jax.core import ShapedArray
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun, new_jaxpr_eqn
    from jax.interpreters.partial_eval import dce_jaxpr

pvary_p: Primitive = core.pvary_p
"""Makes a value vary over further manual mesh axes."""
IrValues: TypeAlias = "Sequence[ir.Value[ir.Type]]"
"""Values of a module that is being lowered."""
JaxprLike: TypeAlias = Jaxpr | ClosedJaxpr
"""A jaxpr, open or closed."""
JaxprAtom: TypeAlias = Var | Literal
"""Operand of an equation: a variable or a literal."""
MeshLike: TypeAlias = Mesh | AbstractMesh
"""A mesh of devices, or an abstract mesh, of which only the axes are known."""

__all__ = [
    "Array",
    "ArrayFunction",
    "ClosedJaxpr",
    "Dtype",
    "IrValues",
    "Jaxpr",
    "JaxprAtom",
    "JaxprEqn",
    "JaxprLike",
    "Jitted",
    "Literal",
    "LoweringContext",
    "MeshLike",
    "NameStack",
    "Params",
    "Primitive",
    "PyTree",
    "Shaped",
    "ShapedArray",
    "Traceback",
    "Var",
    "ad",
    "arctangents_take_vectors",
    "at_width",
    "batching",
    "cuda_runtime",
    "dce_jaxpr",
    "distributed_store",
    "draws_by_position",
    "effects_of",
    "effects_on",
    "emit",
    "exported",
    "exporting",
    "extended_scan",
    "has_input_effects",
    "has_side_effects",
    "is_high",
    "is_outermost",
    "is_partitioned",
    "is_plain_jit",
    "is_tracer",
    "is_transposed",
    "is_wide",
    "jaxpr_as_fun",
    "jit_key",
    "jit_settings",
    "lowering_device",
    "make_jaxpr",
    "make_jaxpr_and_shapes",
    "mark_lowering",
    "missing_mosaic_gpu",
    "mlir",
    "module_text",
    "mosaic_gpu_kernel",
    "mosaic_gpu_turns_tiles",
    "multiplication_params",
    "new_jaxpr",
    "new_jaxpr_eqn",
    "numeric_setting",
    "propagated",
    "pvary_p",
    "reductions_take_sines",
    "register_checks",
    "register_taylor_rule",
    "scan_parts",
    "scope_names",
    "spread",
    "tensor_cores",
    "user_frames",
    "versions",
]


def draws_by_position(equation: JaxprEqn) -> bool:
    """Returns whether random bits are those of ``jax_threefry_partitionable`` where an equation was traced, which JAX
    keeps with the equation."""
    current = getattr(jax.config, "jax_threefry_partitionable", True)
    return bool(getattr(equation.ctx, "threefry_partitionable", current))


def is_plain_jit(equation: JaxprEqn) -> bool:
    """Returns whether an inner jit only groups equations: it has no sharding, layout, donation or compiler option."""
    params = equation.params
    return (
        equation.primitive.name in ("jit", "pjit")
        and all(type(s).__name__ == "UnspecifiedValue" for s in (*params["in_shardings"], *params["out_shardings"]))
        and all(layout is None for layout in (*params["in_layouts"], *params["out_layouts"]))
        and not any(params["donated_invars"])
        and not params["compiler_options_kvs"]
        and not has_input_effects(equation.effects)
    )


def has_input_effects(effects: Set[object]) -> bool:
    """Returns whether an effect names an input by position (reads and writes of mutable arrays)."""
    return any(hasattr(effect, "input_index") or hasattr(effect, "input") for effect in effects)


def effects_on(equation: JaxprEqn, operands: Sequence[JaxprAtom]) -> Set[object]:
    """Returns an equation's effects with ``operands`` in the place of its own: those on mutable arrays name these."""
    effects = equation.effects
    if not has_input_effects(effects):
        return effects
    pairs = zip(equation.invars, operands, strict=True)
    names: dict[object, JaxprAtom] = {own: other for own, other in pairs if not isinstance(own, Literal)}
    return {e.replace(names[e.input]) if isinstance(e, _InputEffect) and e.input in names else e for e in effects}


@runtime_checkable
class _InputEffect(Protocol):
    """An effect on a mutable array."""

    input: object

    def replace(self, input: object) -> object: ...


def effects_of(
    constvars: Sequence[Var], invars: Sequence[Var], outvars: Sequence[JaxprAtom], equations: Sequence[JaxprEqn]
) -> Set[object]:
    """Returns the effects of a jaxpr that reads or writes mutable arrays among its inputs, which its equations tell."""
    from jax._src.interpreters import partial_eval

    told: Callable[..., Set[object]] = partial_eval.make_jaxpr_effects
    return told(constvars, invars, outvars, equations)


def has_side_effects(equation: JaxprEqn) -> bool:
    """Returns whether an equation does more than compute its results.  Naming a mesh axis does not count."""
    effects = equation.effects
    return bool(effects) and any(type(effect).__name__ != "NamedAxisEffect" for effect in effects)


def has_batching_rule(primitive: Primitive) -> bool:
    """Returns whether ``jax.vmap`` knows a primitive."""
    return primitive in _batching.fancy_primitive_batchers


def user_frames(traceback: Traceback) -> Iterator[Frame]:
    """Yields the frames of a traceback that are not JAX's, innermost first."""
    return source_info_util.user_frames(traceback)


def scope_names(equation: JaxprEqn) -> tuple[str, ...]:
    """Returns the named scopes around an equation, outermost first, without transformations."""
    stack = equation.source_info.name_stack.stack
    return tuple(part.name for part in stack if isinstance(part, source_info_util.Scope))


def is_transposed(equation: JaxprEqn) -> bool:
    """Returns whether reverse-mode differentiation made an equation, as a part of the backward."""
    stack = equation.source_info.name_stack.stack
    return bool(stack) and any(isinstance(s, source_info_util.Transform) and s.name == "transpose" for s in stack)


def times_differentiated(equation: JaxprEqn) -> int:
    """Returns how many derivatives an equation belongs to: 2 in the gradient of a gradient, forward and backward."""
    return sum(
        isinstance(s, source_info_util.Transform) and s.name == "jvp" for s in equation.source_info.name_stack.stack
    )


def scan_parts(equation: JaxprEqn) -> tuple[int, int]:
    """Returns how many of a scan's operands are loop constants, and how many are carried; the rest are slices."""
    if "num_consts" in equation.params:
        return int(equation.params["num_consts"]), int(equation.params["num_carry"])
    constants, carried, _ = equation.params["ft_in"].update(equation.invars).unpack()
    return len(list(constants)), len(list(carried))


def extended_scan(params: Params, given: int, read: int, stacked: int) -> Params:
    """Returns a scan's parameters after its body got ``given`` more loop constants in front, and ``read`` more slices
    and ``stacked`` more results, each at the end."""
    if "num_consts" in params:
        return params | {"num_consts": params["num_consts"] + given}
    from jax._src import flattree  # type: ignore[attr-defined]

    constants, carried, slices = params["ft_in"].unpack()
    carried_out, results = params["ft_out"].unpack()
    return params | {
        "ft_in": flattree.pack(((flattree.nones(given), constants), carried, (slices, flattree.nones(read)))),
        "ft_out": flattree.pack((carried_out, (results, flattree.nones(stacked)))),
    }


def spread(params: Params, aval: ShapedArray) -> tuple[PartitionSpec, ShapedArray]:
    """Returns (the partition spec, the outer type) with which a value leaves one shard_map in order to enter another:
    the devices' parts lie side by side along the first axis."""
    unsharded: Any = core.unshard_aval
    mesh, checked = params["mesh"], params["check_vma"]
    varying = aval.manual_axis_type.varying if checked else params["newly_manual_axes"]
    axes = tuple(a for a in mesh.axis_names if a in params["newly_manual_axes"] and a in varying)
    spec = jax.sharding.PartitionSpec(*([axes] if axes else []))
    return spec, unsharded(mesh, checked, spec, aval)


def emit(program: ClosedJaxpr, arguments: Sequence[ArrayLike]) -> Sequence[jax.Array]:
    """Emits a closed jaxpr's equations into the program that is being traced, and returns their results.

    The equations are copied where possible, and otherwise traced anew.
    """
    from jax._src.interpreters import partial_eval

    trace: Any = core.trace_ctx.trace
    tracer: Any = partial_eval.DynamicJaxprTracer
    jaxpr, consts = program.jaxpr, program.consts
    copies = isinstance(trace, partial_eval.DynamicJaxprTrace) and hasattr(trace, "emit_eqn")
    if not copies or any(has_input_effects(e.effects) for e in jaxpr.eqns) or any(map(is_tracer, consts)):
        return jaxpr_as_fun(program)(*arguments)
    here = source_info_util.current()
    given = [trace.to_jaxpr_tracer(x, here) for x in (*consts, *arguments)]
    known: dict[Var, jax.Array] = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))

    def read(atom: JaxprAtom, source: SourceInfo) -> jax.Array:
        if isinstance(atom, Literal):
            value: jax.Array = tracer(trace, atom.aval, atom, source)
            return value
        return known[atom]

    trace.frame.is_high |= jaxpr.is_high
    for equation in jaxpr.eqns:
        source = equation.source_info
        if here.name_stack.stack:
            source = source.replace(name_stack=here.name_stack + source.name_stack)
        operands = [read(atom, source) for atom in equation.invars]
        avals = [v.aval for v in equation.outvars]
        params, effects = equation.params, equation.effects
        outputs = trace.emit_eqn(operands, avals, equation.primitive, params, effects, source, equation.ctx)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom, here) for atom in jaxpr.outvars]


def new_jaxpr(
    constvars: Sequence[Var],
    invars: Sequence[Var],
    outvars: Sequence[JaxprAtom],
    equations: Sequence[JaxprEqn],
    effects: Set[object],
    info: DebugInfo,
) -> Jaxpr:
    """Returns an open jaxpr, marked if JAX has to lower some of its equations to others before it compiles them."""
    found: Any = Jaxpr
    jaxpr: Jaxpr = found(
        list(constvars), list(invars), list(outvars), list(equations), effects, debug_info=info,
        is_high=any(map(is_high, equations)),
    )  # fmt: skip
    return jaxpr


def is_high(equation: JaxprEqn) -> bool:
    """Returns whether JAX lowers an equation, or one in its bodies, to others before it compiles it ("hijax")."""
    if not equation.params:
        return False
    primitive: Any = equation.primitive
    if _asks_bodies(primitive):
        return any(value.is_high for value in equation.params.values() if isinstance(value, _JAXPRS))
    return bool(primitive.is_high(*(a.aval for a in equation.invars), **equation.params))


@functools.lru_cache(maxsize=1024)
def _asks_bodies(primitive: Primitive) -> bool:
    rule: object = getattr(primitive, "is_high", None)
    return getattr(rule, "__func__", None) is _ASKS_BODIES


_ASKS_BODIES = getattr(Primitive, "is_high", None)
"""JAX's rule for primitives without one of their own: whether a jaxpr among the parameters is high."""
_JAXPRS: Any = (Jaxpr, ClosedJaxpr)


@functools.cache
def multiplication_params() -> Params:
    """Returns the parameters of a plain ``lax.mul``: some versions have an explicit result dtype."""
    return dict(jax.make_jaxpr(jax.lax.mul)(np.float32(1), np.float32(1)).eqns[0].params)


def make_jaxpr(function: ArrayFunction, *args: PyTree, **kwargs: PyTree) -> ClosedJaxpr:
    """Returns the closed jaxpr of a function; of one with arguments of 64 bits, as where these are enabled, for a
    program that enables them itself holds such parts.

    Constants are not folded, also where the user has JAX do that: folded ones would be no part of the equations."""
    with at_width(any(map(is_wide, jax.tree.leaves((args, kwargs))))), config.eager_constant_folding(False):
        made: Any = jax.make_jaxpr(function)(*args, **kwargs)
    closed: ClosedJaxpr = made
    return closed


_WIDE = frozenset(map(np.dtype, ("float64", "int64", "uint64", "complex128")))


def is_wide(x: object) -> bool:
    """Returns whether something has a dtype that exists only where 64-bit types are enabled."""
    return getattr(x, "dtype", None) in _WIDE


def at_width(wide: bool) -> AbstractContextManager[None]:
    """Enables 64-bit types for a block that traces what is ``wide``."""
    if not wide or numeric_setting()[0]:
        return contextlib.nullcontext()
    enabled: AbstractContextManager[None] = jax.enable_x64(True)
    return enabled


def make_jaxpr_and_shapes(function: ArrayFunction, *args: PyTree) -> tuple[ClosedJaxpr, PyTree]:
    """Returns the closed jaxpr of a function, and the tree of its results' types."""
    made: Any = jax.make_jaxpr(function, return_shape=True)(*args)
    both: tuple[ClosedJaxpr, PyTree] = made
    return both


_JIT_FUNCTION = type(jax.jit(lambda: None))
"""What ``jax.jit`` returns.  Methods and wrappers of it hand its attributes on, and are called otherwise."""


def jit_settings(function: object) -> Params | None:
    """Returns the keyword arguments with which a ``jax.jit`` function was made, or None for any other function."""
    info = getattr(function, "_jit_info", None)
    if info is None or not isinstance(function, _JIT_FUNCTION):
        return None
    unflatten = jax.tree_util.tree_unflatten
    settings: Params = dict(
        keep_unused=info.keep_unused,
        inline=info.inline is True,
        compiler_options=dict(info.compiler_options_kvs) or None,
    )
    for use in ("static", "donate"):
        numbers, names = getattr(info, f"{use}_argnums"), getattr(info, f"{use}_argnames")
        if numbers or names:  # both, or jit would infer those that are not given
            settings |= {f"{use}_argnums": numbers, f"{use}_argnames": names}
    if info.user_specified_in_shardings:
        settings["in_shardings"] = unflatten(info.in_shardings_treedef, info.in_shardings_leaves)
    if any(type(s).__name__ != "UnspecifiedValue" for s in info.out_shardings_leaves):
        settings["out_shardings"] = unflatten(info.out_shardings_treedef, info.out_shardings_leaves)
    for name in ("device", "backend"):
        if getattr(info, name, None) is not None:
            settings[name] = getattr(info, name)
    return {k: v for k, v in settings.items() if v not in (None, False)}


def jit_key(function: object) -> tuple[object, ...] | None:
    """Returns a key of the settings with which a ``jax.jit`` function was made, or None where they have none."""
    info = getattr(function, "_jit_info", None)
    if not isinstance(info, tuple):
        return None
    key = tuple(info)  # which is compared by its fields, as the information itself is not
    try:
        hash(key)
    except TypeError:
        return None
    return key


class Jitted(Protocol):
    """Interface of a function that ``jax.jit`` returns."""

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree: ...

    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered: ...

    def trace(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Traced: ...

    def eval_shape(self, *args: PyTree, **kwargs: PyTree) -> PyTree: ...

    def clear_cache(self) -> None: ...


def numeric_setting() -> tuple[bool, str | None]:
    """Returns this thread's (whether 64-bit types are enabled, default precision of dots)."""
    config: Any = jax.config
    return bool(config.jax_enable_x64), config.jax_default_matmul_precision


def distributed_store() -> tuple[Any, int] | None:
    """Returns (the key-value store of ``jax.distributed``, this process's number), or None if it is not initialized."""
    from jax._src import distributed

    state: Any = distributed.global_state
    return None if state.client is None else (state.client, int(state.process_id))


def reductions_take_sines() -> bool:
    """Returns whether XLA's CPU compiler computes sines, cosines and tangents on vectors where a reduction reads them.

    That of JAX 0.12 does, and that of JAX 0.10 does not; 0.11 was not tried, and is taken for the former.
    """
    return _is_newer_than_0_10()


def arctangents_take_vectors() -> bool:
    """Returns whether XLA's CPU compiler computes arctangents on vectors: as with sines, that of JAX 0.12 does."""
    return _is_newer_than_0_10()


def _is_newer_than_0_10() -> bool:
    return tuple(int(part) for part in jax.__version__.split(".")[:2]) > (0, 10)


def versions() -> dict[str, str]:
    """Returns the versions that a measurement or a report depends on."""
    import platform

    import jaxlib

    return {"python": platform.python_version(), "jax": jax.__version__, "jaxlib": jaxlib.version.__version__}


def scoped(source: SourceInfo, name: str) -> SourceInfo:
    """Returns where an equation comes from, with a further name around it, as by ``jax.named_scope``."""
    found: SourceInfo = source.replace(name_stack=source.name_stack.extend(name))
    return found


def lowering_device(context: LoweringContext) -> jax.Device | None:
    """Returns the first device that a module is being lowered for, or None where only its platform is known."""
    devices = getattr(context.module_context.axis_context, "device_assignment", None)
    return devices[0] if devices else None


def tensor_cores(axis: str, count: int) -> TensorCoreMesh:
    """Returns the mesh of the TensorCores of one TPU device."""
    from jax.experimental.pallas import tpu as pltpu

    own = getattr(pltpu, "TensorCoreMesh", None)  # since JAX 0.11
    make: Any = own or pltpu.create_tensorcore_mesh
    mesh: TensorCoreMesh = make(axis_name=axis, num_cores=count) if own else make(axis, num_cores=count)
    return mesh


def is_partitioned(context: LoweringContext) -> bool:
    """Returns whether the compiler shards what is lowered in this context over several devices."""
    axes: Any = context.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return any(n > 1 for name, n in axes.mesh.shape.items() if name not in axes.manual_axes)
    return int(getattr(axes, "num_devices", None) or 1) > 1


_MARK = "autopallas_mark"


def mark_lowering(context: LoweringContext, operand: ir.Value[ir.RankedTensorType], *, name: str) -> IrValues:
    """Lowers an identity that Shardy propagates through unchanged, and that :func:`propagated` finds by its name."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    shape = operand.type.shape
    factors = [f"z_{i}" if i >= 17 else "ijklmnopqrstuvwxyz"[i] for i in range(len(shape))]
    sizes = ", ".join(f"{f}={n}" for f, n in zip(factors, shape, strict=True))
    dimensions = f"[{', '.join(factors)}]"
    rule = f"#sdy.op_sharding_rule<({dimensions})->({dimensions}){f' {{{sizes}}}' if sizes else ''}>"
    call = stablehlo.CustomCallOp(
        [operand.type],
        [operand],
        _MARK,
        has_side_effect=ir.BoolAttr.get(True),  # otherwise it goes as dead code where only a derivative is wanted
        backend_config=ir.StringAttr.get(name),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 2),
    )
    call.attributes["sdy.sharding_rule"] = ir.Attribute.parse(rule)
    return call.results


def propagated(lowered: jax.stages.Lowered) -> list[tuple[str, tuple[tuple[str, ...], ...] | None]]:
    """Returns how Shardy shards the marked values of a lowered program: (name, mesh axes per dimension).

    The axes are None where only a part of a mesh axis would describe the sharding.
    """
    from jaxlib.mlir import passmanager
    from jaxlib.mlir.dialects import sdy

    module: Any = lowered.compiler_ir("stablehlo")
    found: list[tuple[str, tuple[tuple[str, ...], ...] | None]] = []

    def dimensions(operation: ir.Operation) -> tuple[tuple[str, ...], ...] | None:
        rank = len(operation.results[0].type.shape)
        if "sdy.sharding" not in operation.attributes:
            return ((),) * rank
        per_value = sdy.TensorShardingPerValueAttr(operation.attributes["sdy.sharding"])
        sharding = sdy.TensorShardingAttr(per_value.shardings[0])
        named = []
        for dimension in sharding.dimension_shardings:
            axes = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dimension).axes]
            if any(axis.sub_axis_info is not None for axis in axes):
                return None
            named.append(tuple(str(axis.name) for axis in axes))
        return tuple(named)

    def visit(operation: Any) -> None:
        for region in operation.regions:
            for block in region:
                for inner in block:
                    attributes = inner.operation.attributes
                    if "call_target_name" in attributes and attributes["call_target_name"].value == _MARK:
                        found.append((attributes["backend_config"].value, dimensions(inner.operation)))
                    visit(inner.operation)

    with module.context:
        passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(module.operation)
        visit(module.operation)
    return found


def exporting(context: LoweringContext) -> bool:
    """Returns whether ``jax.export`` is lowering the module."""
    return bool(context.module_context.lowering_parameters.for_export)


def exported(function: ArrayFunction, types: Sequence[Shaped], platform: str) -> bytes:
    """Lowers a function for a platform, present or not, to bytes that another process of this version can use."""
    from jax import export

    names = {"gpu": "rocm" if "rocm" in getattr(jax.devices()[0].client, "platform_version", "") else "cuda"}
    name = names.get(platform, platform)
    traced = jax.jit(function).trace(*types)
    # Kernels are custom calls, for which no stability is promised; within one version none is needed.
    calls = set(re.findall(r'custom_call @"?([^"(]+)"?\(', traced.lower(lowering_platforms=(name,)).as_text()))
    unchecked = [export.DisabledSafetyCheck.custom_call(call) for call in sorted(calls)]
    with config.export_ignore_forward_compatibility(True):
        made = export.export(jax.jit(function), platforms=[name], disabled_checks=unchecked)
        return bytes(made(*types).serialize())


def module_text(bytecode: bytes) -> str:
    """Returns the text of a serialized MLIR module, such as a kernel's, without locations.

    Raises:
      Exception: it is none, or of a dialect that this version does not have.
    """
    from jaxlib.mlir import ir

    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    with contextlib.suppress(ImportError, AttributeError):  # attributes of TPU kernels need their dialect
        importlib.import_module("jax._src.lib").tpu.register_dialect(context)
    with context:
        return str(ir.Module.parse(bytecode).operation.get_asm(enable_debug_info=False))


def missing_mosaic_gpu() -> str | None:
    """Returns why kernels for Mosaic GPU cannot be written with this version of JAX, or None."""
    if tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11):
        return f"its Mosaic GPU kernels need JAX 0.11 or later, and this is {jax.__version__}"
    return None


def mosaic_gpu_turns_tiles() -> bool:
    """Returns whether Mosaic GPU can turn tiles of 16 bits as it reads them from shared memory, from JAX 0.11.1 on."""
    return tuple(jax.__version_info__[:3]) >= (0, 11, 1)


def cuda_runtime() -> int | None:
    """Returns the version of the CUDA runtime, such as 12080 for 12.8.0; None if there is none."""
    try:
        from jax._src.lib import cuda_versions

        return None if cuda_versions is None else int(cuda_versions.cuda_runtime_get_version())
    except Exception:  # without a driver, or in a version of JAX that does not tell
        return None


def mosaic_gpu_kernel(body: Callable[..., None], *, cost: dict[str, int], **settings: object) -> ArrayFunction:
    """Calls ``plgpu.kernel`` with the keyword arguments that this version takes; the cost from 0.12."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu

    make: Any = mosaic_gpu.kernel
    if "cost_estimate" in inspect.signature(make).parameters:
        settings["cost_estimate"] = pl.CostEstimate(**cost)
    kernel: ArrayFunction = make(body, **settings)
    return kernel


def register_taylor_rule(primitive: Primitive, compute: Callable[..., Sequence[jax.Array]]) -> None:
    """Has ``jax.experimental.jet`` take an equation of a primitive for what ``compute`` computes with its operands and
    parameters."""
    from jax.experimental import jet

    def rule(primals_in: PyTree, series_in: PyTree, **params: PyTree) -> PyTree:
        function = functools.partial(compute, **params)
        return jet.jet(lambda *x: list(function(*x)), tuple(primals_in), tuple(series_in), factorial_scaled=False)

    jet.jet_rules[primitive] = rule


def register_checks(primitive: Primitive, compute: Callable[..., Sequence[jax.Array]]) -> None:
    """Has ``checkify`` take an equation of a primitive for what ``compute`` computes with its operands and parameters,
    where it checks for more than the program's own errors."""
    from jax._src import checkify

    def rule(*given: PyTree, **params: PyTree) -> PyTree:
        at = 1 + next(i for i, x in enumerate(given) if isinstance(x, frozenset))
        *_, error, enabled = given[:at]
        if enabled <= checkify.user_checks:
            return error, primitive.bind(*given[at:], **params)
        closed = jax.make_jaxpr(jax.jit(lambda *x: list(compute(*x, **params))))(*given[at:])
        (equation,) = closed.jaxpr.eqns
        known = dict(zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*closed.consts, *given[at:]), strict=True))
        operands = [known[v] if isinstance(v, Var) else v.val for v in equation.invars]
        return checkify.error_checks[equation.primitive](*given[:at], *operands, **equation.params)

    checkify.error_checks[primitive] = rule


def is_outermost() -> bool:
    """Returns whether nothing is being traced around this call."""
    from jax._src.core import trace_state_clean

    return bool(trace_state_clean())


def is_tracer(x: object) -> bool:
    return isinstance(x, jax.core.Tracer)
