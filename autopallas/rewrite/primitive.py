"""Defines the site primitives, which take the place of reference computations in a rewritten program.

Three primitives serve every operation.  ``site`` gives the original's results, and on demand the residuals that the
backward kernel needs.  Its JVP rule binds itself and ``tangent``, which is linear in the tangents; the transpose of
``tangent`` binds ``backward``.  So reverse mode runs the kernels.  Everything else that JAX can do with the original
(forward mode, second order) runs the original, which all three primitives carry along.

Their parameters are ``site``, the operation's description of the site (see :mod:`autopallas.sites.calls`);
``decision``, the planner's decision about it; and ``original``, the replaced equations as a closed jaxpr from operands
to results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias, TypedDict, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from autopallas import array_types, compat
from autopallas.compat import (
    ClosedJaxpr,
    LoweringContext,
    Primitive,
    Shaped,
    ShapedArray,
    ad,
    batching,
    mlir,
)
from autopallas.errors import one_line
from autopallas.numerics.promote import usual_promotion
from autopallas.plan.cross_platform import replan_for
from autopallas.plan.decision import NOTHING_TO_COMPUTE, Decision, size_unknown
from autopallas.report.live_report import Entry
from autopallas.rewrite.manual_axes import evaluate
from autopallas.sites.calls import SiteDescription, kernel_backward, kernel_forward, with_residuals
from autopallas.sites.device import Device
from autopallas.sites.interpret import settled
from autopallas.sites.operation import NOT_EXPORTED, Supported
from autopallas.sites.sharded_site import ShardedSite
from autopallas.tuning.cache import WARNED

Arrays: TypeAlias = tuple[jax.Array, ...]
Tangent: TypeAlias = jax.Array | ad.Zero
Lowering: TypeAlias = Callable[..., compat.IrValues]
"""Maps a context and the operands in a module to the results."""


class _Place(TypedDict):
    """Parameters that all three primitives have, except ``decision``, which some functions take separately."""

    site: SiteDescription
    original: ClosedJaxpr


class _Further(_Place, total=False):
    """Parameters that only some of the primitives have, added to the common ones."""

    residuals: bool
    active: tuple[int, ...]


class _Decided(_Place):
    decision: Decision


class _Params(_Further):
    decision: Decision


class _SiteParams(_Decided):
    residuals: bool


class _LinearParams(_Decided):
    active: tuple[int, ...]


def entry_of(decision: Decision) -> Entry:
    """Returns the report entry of a site; for a site that was never reported, an entry that nothing shows."""
    return decision.entry or Entry()


def enter(name: str, decision: Decision, platform: str, stage: str, error: Exception) -> None:
    """Reports and warns that a site runs as it is written, because of an exception."""
    reason = f"{name} of {decision.implementation} failed with {one_line(error)}"
    if entry_of(decision).keeps(platform, f"{stage} failed: {reason}", (stage, one_line(error))):
        WARNED.once(reason, f"autopallas runs a transformed site as it is written: {reason}")


def _vary(
    original: ClosedJaxpr, chosen: Sequence[int], operands: Sequence[ArrayLike]
) -> Callable[..., list[jax.Array]]:
    """Returns the original as a function of the operands at the positions ``chosen``, with the others fixed."""

    def function(*varied: jax.Array) -> list[jax.Array]:
        filled = list(operands)
        for position, x in zip(chosen, varied, strict=True):
            filled[position] = x
        return evaluate(original, filled)

    return function


# ---------------------------------------------------------------------- what each primitive computes


def _site(
    runs: bool, *operands: jax.Array, site: SiteDescription, decision: Decision, original: ClosedJaxpr, residuals: bool
) -> list[jax.Array]:
    if runs:
        results, extra = kernel_forward(site, decision.implementation or "", decision.block_sizes)(*operands)
    else:
        results = compat.jaxpr_as_fun(original)(*operands)
        # The backward of a kept site differentiates the original, which needs no residuals.
        extra = tuple(jnp.zeros(t.shape, t.dtype) for t in site.residual_types())
    return _typed(results, extra, site, original, residuals)


def _site_for_backward(
    *operands: jax.Array, site: SiteDescription, original: ClosedJaxpr, **_: object
) -> list[jax.Array]:
    """Returns the original's results where the forward kernel failed, and residuals for the backward kernel, which may
    still work: those of the reference implementation, on whole arrays."""
    results = compat.jaxpr_as_fun(original)(*operands)
    whole: SiteDescription = site.site if isinstance(site, ShardedSite) else site
    with usual_promotion():
        extra = whole.forward(site.operation.implementation("reference"), None, operands)[1]
    return _typed(results, extra, site, original, True)


def _typed(
    results: Sequence[jax.Array],
    extra: Sequence[jax.Array],
    site: SiteDescription,
    original: ClosedJaxpr,
    residuals: bool,
) -> list[jax.Array]:
    types: list[Shaped] = [*original.out_avals, *site.residual_types()]
    outputs = [*results, *extra] if residuals else list(results)
    return [array_types.divided_like(x, like) for x, like in zip(outputs, types, strict=False)]


def _tangent(
    runs: bool,
    *arguments: jax.Array,
    site: SiteDescription,
    original: ClosedJaxpr,
    active: tuple[int, ...],
    **_: object,
) -> list[jax.Array]:
    operands, _results, _residuals, tangents = _split(array_types.varied_alike(arguments, arguments), site, original)
    function = _vary(original, active, operands)
    moved: list[jax.Array] = jax.jvp(function, tuple(operands[i] for i in active), tuple(tangents))[1]
    return [moved[i] for i in _moving(original)]


def _backward(
    runs: bool,
    *arguments: jax.Array,
    site: SiteDescription,
    decision: Decision,
    original: ClosedJaxpr,
    active: tuple[int, ...],
) -> list[jax.Array]:
    operands, results, residuals, cotangents = _split(arguments, site, original)
    if runs and site.has_backward:
        kernel = kernel_backward(site, decision.implementation or "", decision.block_sizes, active)
        gradients = kernel(operands, results, residuals, cotangents)
        return [array_types.divided_like(x, original.in_avals[i]) for x, i in zip(gradients, active, strict=True)]
    operands, _, _, cotangents = _split(array_types.varied_alike(arguments, arguments), site, original)
    _, pull = jax.vjp(_vary(original, active, operands), *(operands[i] for i in active))
    return list(pull(list(cotangents)))


def _split(
    arguments: Sequence[jax.Array], site: SiteDescription, original: ClosedJaxpr
) -> tuple[Arrays, Arrays, Arrays, Arrays]:
    """Splits arguments into (operands, results, residuals, tangents or cotangents)."""
    operands = len(original.in_avals)
    results = operands + len(original.out_avals)
    residuals = results + len(site.residual_types())
    arguments = tuple(arguments)
    return arguments[:operands], arguments[operands:results], arguments[results:residuals], arguments[residuals:]


# ---------------------------------------------------------------------- registration


class _Computation:
    """One of the three computations of a site, as it runs without jit and as it is lowered.

    Args:
      name: the primitive's name.
      compute: ``compute(kernel, *operands, **params)`` computes it, by the kernel or by the original.
    """

    def __init__(self, name: str, compute: Callable[..., list[jax.Array]]):
        self.name, self.compute = name, compute

    def decided(self, decision: Decision, device: Device, params: _Further) -> Decision:
        """Returns the decision for a device, which may not be the one that the program was planned for."""
        if decision.verdict == "kept" or not device.platform or self.compute is _tangent:
            return decision
        same_kind = decision.options is None or not device.kind or decision.kind == device.kind
        if same_kind and decision.platform == device.platform and not decision.mapped:
            return decision
        found = replan_for(decision, device, params["site"], params["original"], params.get("active"))
        if found.verdict == "kept":
            errors = [(stage, error) for _, stage, error in found.attempts if stage not in ("supports", "tune")]
            entry_of(decision).keeps(device.platform, found.reason, *errors)
        return replace(found, entry=decision.entry)

    def attempt(
        self, kernel: bool, *operands: jax.Array, platform: str, decision: Decision, **params: Unpack[_Further]
    ) -> list[jax.Array]:
        """Runs the kernel, or the original where the kernel cannot be traced.

        Planning has traced the kernel for the program, but not for what transformations around the program make of
        it.
        """
        if kernel:
            try:
                results = self.compute(True, *operands, decision=decision, **params)
            except Exception as error:
                if decision.raise_on_failure:
                    raise
                enter(self.name, decision, platform, "lowering", error)
                if params.get("residuals"):
                    return _site_for_backward(*operands, **params)
            else:
                entry_of(decision).runs(platform)
                return results
        return self.compute(False, *operands, decision=decision, **params)

    def run(self, *operands: jax.Array, decision: Decision, **params: Unpack[_Further]) -> list[jax.Array]:
        """Runs it without jit."""
        device = Device.current()
        decision = self.decided(decision, device, params)
        applied = decision.verdict == "applied"
        return self.attempt(applied, *operands, platform=device.platform, decision=decision, **params)

    def lowering_for(self, ours: str) -> Lowering:
        """Returns the rule that lowers it for a platform, by our name of it."""

        def lowered(*operands: jax.Array, runs: bool, **params: Unpack[_Params]) -> list[jax.Array]:
            return self.attempt(runs, *operands, platform=ours, **params)

        rule: Lowering = mlir.lower_fun(lowered, multiple_results=True)
        with_marks: Lowering = mlir.lower_fun(self.marked, multiple_results=True)

        def lowering(
            context: LoweringContext, *operands: object, decision: Decision, **params: Unpack[_Further]
        ) -> compat.IrValues:
            found = compat.lowering_device(context)
            device = Device.of(found) if found is not None and Device.of(found).platform == ours else Device(ours, "")
            # Kernels and extracted equations mix operands and constants, and ignore the mesh.
            typed = isinstance(params["site"], ShardedSite) or decision.mark is not None
            plain = array_types.invariant_type if typed else array_types.whole_type
            given = cast("Sequence[ShapedArray]", context.avals_in)
            context = context.replace(avals_in=[plain(a) for a in given])
            if decision.mark is not None:
                return with_marks(context, *operands, number=decision.mark, decision=decision, **params)
            decision = self.decided(decision, device, params)
            if compat.exporting(context):
                decision = _exported(decision, params["site"])
            runs = decision.verdict == "applied" and decision.platform == ours
            if runs and compat.is_partitioned(context) and not isinstance(params["site"], ShardedSite):
                runs = False  # the compiler would gather everything on each device
                entry_of(decision).keeps(ours, _UNPLACED.partition(": ")[2])
                WARNED.once(_UNPLACED + params["site"].operation.name, _UNPLACED)
            with device.lowered(), settled():
                return rule(context, *operands, decision=decision, runs=runs, **params)

        return lowering

    def marked(self, *operands: jax.Array, number: int, **params: Unpack[_Params]) -> list[jax.Array]:
        """Runs the original, with marks by which its operands and results are found in the lowered program."""
        if self.compute is not _site:
            return self.compute(False, *operands, **params)
        prelude = getattr(params["site"], "prelude", None)
        if prelude is None:
            given = [mark_p.bind(x, name=f"{number} operand {i}") for i, x in enumerate(operands)]
            results = self.compute(False, *given, **params)
        elif prelude.witness is None:
            for i, x in enumerate(prelude(operands)):
                mark_p.bind(x, name=f"{number} operand {i}")
            results = self.compute(False, *operands, **params)
        else:
            count, own = len(params["original"].out_avals), len(prelude.reads)
            found = compat.jaxpr_as_fun(prelude.witness)(*operands)
            for i, x in enumerate(found[count:]):
                mark_p.bind(x, name=f"{number} operand {i}" if i < own else f"{number} between {i - own}")
            results = found[:count]  # such sites have no residuals
        return [mark_p.bind(x, name=f"{number} result {i}") for i, x in enumerate(results)]


def _primitive(
    name: str, compute: Callable[..., list[jax.Array]], types: Callable[..., list[ShapedArray]]
) -> Primitive:
    primitive, computation = Primitive(name), _Computation(name, compute)
    primitive.multiple_results = True
    primitive.def_impl(computation.run)
    primitive.def_abstract_eval(types)
    for platform, ours in {None: "", "cpu": "cpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}.items():
        mlir.register_lowering(primitive, computation.lowering_for(ours), platform=platform)
    return primitive


mark_p = Primitive("autopallas_mark")
mark_p.def_abstract_eval(lambda x, name: x)
mlir.register_lowering(mark_p, compat.mark_lowering)


def _exported(decision: Decision, site: SiteDescription) -> Decision:
    """Returns a decision for an exported program, which has to run where no library of another package is."""
    name = decision.implementation or ""
    if name in NOT_EXPORTED:
        return replace(decision, implementation=NOT_EXPORTED[name])
    return replace(decision, implementation="xla") if site.operation.provided(name) is not None else decision


_UNPLACED = (
    "autopallas runs a site as it is written: the program is divided among several devices, and how was not known "
    "when it was traced"
)


def _results(operands: Sequence[ShapedArray], original: ClosedJaxpr) -> list[ShapedArray]:
    return [array_types.array_type(a.shape, a.dtype, operands, a) for a in original.out_avals]


def _site_types(
    *operands: ShapedArray, site: SiteDescription, original: ClosedJaxpr, residuals: bool, **_: object
) -> list[ShapedArray]:
    extra = [array_types.array_type(t.shape, t.dtype, operands, t) for t in site.residual_types()] if residuals else []
    return _results(operands, original) + extra


def _tangent_types(*arguments: ShapedArray, original: ClosedJaxpr, **_: object) -> list[ShapedArray]:
    results = _results(arguments, original)
    return [results[i] for i in _moving(original)]


def _backward_types(
    *arguments: ShapedArray, original: ClosedJaxpr, active: tuple[int, ...], **_: object
) -> list[ShapedArray]:
    return [array_types.array_type(arguments[i].shape, arguments[i].dtype, arguments, arguments[i]) for i in active]


site_p = _primitive("autopallas_site", _site, _site_types)
tangent_p = _primitive("autopallas_site_tangent", _tangent, _tangent_types)
backward_p = _primitive("autopallas_site_backward", _backward, _backward_types)


# ---------------------------------------------------------------------- derivatives


def _zero(x: jax.Array) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _moving(original: ClosedJaxpr) -> list[int]:
    """Returns the positions of the results that have tangents: of integers, booleans and keys there are none."""
    return [i for i, a in enumerate(original.out_avals) if a.to_tangent_aval().dtype != jax.dtypes.float0]


def _site_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], **params: Unpack[_SiteParams]
) -> tuple[list[jax.Array], list[Tangent]]:
    try:
        return _site_and_tangent(primals, tangents, **params)
    except Exception as error:
        decision, original = params["decision"], params["original"]
        if decision.raise_on_failure or decision.verdict == "kept" or params["residuals"]:
            raise
        enter(site_p.name, decision, decision.platform, "differentiation", error)
    active = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    function = _vary(original, active, primals)
    results, moved = jax.jvp(function, tuple(primals[i] for i in active), tuple(tangents[i] for i in active))
    moving = _moving(original)
    return list(results), [moved[i] if i in moving else _zero(x) for i, x in enumerate(results)]


def _site_and_tangent(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, residuals: bool, **params: Unpack[_Decided]
) -> tuple[list[jax.Array], list[Tangent]]:
    params = params | {"site": with_residuals(params["site"])}
    outputs = site_p.bind(*primals, residuals=True, **params)
    count = len(params["original"].out_avals)
    active = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
    moved: list[Tangent] = [_zero(x) for x in outputs[:count]]
    moving = _moving(params["original"])
    if active and moving:
        # What a site computes varies over the manual axes of all operands; JAX transposes the casts to sums over axes.
        given = array_types.varied_alike([tangents[i] for i in active], primals)
        found = tangent_p.bind(*primals, *outputs, *given, active=active, **params)
        for position, tangent in zip(moving, found, strict=True):
            moved[position] = tangent
    if not residuals:
        return outputs[:count], moved
    # The residuals depend on the operands, but every primitive that reads them differentiates through the operands.
    return outputs, [*moved, *(_zero(x) for x in outputs[count:])]


def _site_transpose(
    cotangents: Sequence[Tangent], *operands: jax.Array, original: ClosedJaxpr, **_: object
) -> list[jax.Array | None]:
    """Transposes the original, for ``jax.linear_transpose`` of a program that is linear in the operands."""
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    types = [array_types.shape_of(operands[i].aval) for i in linear]
    given = [ad.instantiate_zeros(ct) for ct in cotangents[: len(original.out_avals)]]
    pulled = iter(jax.linear_transpose(_vary(original, linear, operands), *types)(given))
    return [next(pulled) if i in linear else None for i in range(len(operands))]


def _tangent_transpose(
    cotangents: Sequence[Tangent], *arguments: jax.Array, **params: Unpack[_LinearParams]
) -> list[jax.Array | None]:
    active = params["active"]
    known = arguments[: len(arguments) - len(active)]
    moving = dict(zip(_moving(params["original"]), cotangents, strict=True))
    types = [a.to_tangent_aval() for a in params["original"].out_avals]
    given = [ad.instantiate_zeros(moving.get(i, ad.Zero(aval))) for i, aval in enumerate(types)]
    return [None] * len(known) + list(backward_p.bind(*known, *given, **params))


def _tangent_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], **params: Unpack[_LinearParams]
) -> tuple[list[jax.Array], list[Tangent]]:
    return _differentiate(tangent_p, _tangent, primals, tangents, params)


def _backward_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], **params: Unpack[_LinearParams]
) -> tuple[list[jax.Array], list[Tangent]]:
    return _differentiate(backward_p, _backward, primals, tangents, params)


def _differentiate(
    primitive: Primitive,
    compute: Callable[..., list[jax.Array]],
    primals: Sequence[jax.Array],
    tangents: Sequence[Tangent],
    params: _LinearParams,
) -> tuple[list[jax.Array], list[Tangent]]:
    """Differentiates ``tangent`` or ``backward`` through the original, as functions of operands and (co)tangents.

    Tangents of results and residuals are ignored: these depend on the operands, and the original accounts for that.
    """
    site, original = params["site"], params["original"]
    operands = len(original.in_avals)
    given = operands + len(original.out_avals) + len(site.residual_types())
    varied = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero and not operands <= i < given]

    def function(*chosen: jax.Array) -> list[jax.Array]:
        filled = list(primals)
        for position, x in zip(varied, chosen, strict=True):
            filled[position] = x
        return compute(False, *filled, **params)

    outputs = primitive.bind(*primals, **params)
    if not varied:
        return outputs, [_zero(x) for x in outputs]
    _, moved = jax.jvp(function, tuple(primals[i] for i in varied), tuple(tangents[i] for i in varied))
    return outputs, list(moved)


ad.primitive_jvps[site_p] = _site_jvp
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_jvps[backward_p] = _backward_jvp
ad.primitive_transposes[site_p] = _site_transpose
ad.primitive_transposes[tangent_p] = _tangent_transpose


# ---------------------------------------------------------------------- batching


def _front(x: jax.Array, axis: int | None, size: int, wanted: bool) -> jax.Array:
    """Moves the mapped axis of ``x`` to the front; adds one by broadcasting where it is wanted and missing."""
    if axis is not None:
        return jnp.moveaxis(x, axis, 0)
    return jnp.broadcast_to(x, (size, *x.shape)) if wanted else x


def _batched_params(params: _Params, axes: Sequence[int | None], size: int, types: Sequence[ShapedArray]) -> _Params:
    original, site, decision = params["original"], params["site"].batched(axes, size), params["decision"]
    divided = next((named for t in types if (named := _first_axes(t))), ())
    if divided:
        further = site.divided_further(divided) if isinstance(site, ShardedSite) else None
        if further is None and decision.verdict == "applied":
            WARNED.once(_MAPPED + site.operation.name, _MAPPED)
            entry_of(decision).keeps(decision.platform, _MAPPED.partition(": ")[2])
            decision = replace(decision, verdict="kept", reason=_MAPPED)
        site = further or site
    if decision.verdict == "applied" and size == 0:
        entry_of(decision).keeps(decision.platform, NOTHING_TO_COMPUTE)
        decision = replace(decision, verdict="kept", reason=NOTHING_TO_COMPUTE)
    if decision.verdict == "applied" and not _still_holds(decision, site):
        decision = replace(decision, mapped=True)
    function = jax.vmap(compat.jaxpr_as_fun(original), in_axes=tuple(axes), axis_size=size)
    shapes = [array_types.shape_of(t) for t in types[: len(original.in_avals)]]
    return params | {"site": site, "decision": decision, "original": compat.make_jaxpr(function, *shapes)}


def _still_holds(decision: Decision, site: SiteDescription) -> bool:
    """Returns whether what was decided about a site holds for the site that ``vmap`` made of it."""
    options = decision.options
    by_evidence = decision.evidence is not None and decision.block_sizes_from != "explicit"
    asked = options is None or options.objective == "always" or not by_evidence
    if not (asked or getattr(site, "maps_alike", False)):
        return False  # evidence is for the site's own sizes
    device = Device(decision.platform, decision.kind)
    return isinstance(site.operation.supports(decision.implementation or "", site.spec, device), Supported)


def _first_axes(kind: Shaped) -> tuple[str, ...]:
    """Returns the explicit mesh axes over which the first axis of an array is sharded."""
    sharding = array_types.explicit_sharding(kind)
    axes = sharding.spec[0] if sharding is not None and kind.shape else None
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


_MAPPED = "autopallas runs a site as it is written: vmap maps it over an axis that is divided among devices"


def _batch(
    primitive: Primitive, arguments: Sequence[jax.Array], axes: Sequence[int | None], params: _Params
) -> tuple[Sequence[jax.Array], list[int]]:
    """Batches each of the three primitives.

    An operand whose cotangent is asked for gets the mapped axis, so that each example has its own; other operands that
    lack the axis stay without it.  Tangents of which many meet one operand, as in a Jacobian, move the original's own
    equations, which share what they compute of it.  Copies for each example are more work, and XLA's CPU compiler of
    JAX 0.10 adds up products wrong that it makes of such copies.
    """
    sizes = {np.shape(x)[axis] for x, axis in zip(arguments, axes, strict=True) if axis is not None}
    (size,) = sizes
    count = len(params["original"].in_avals)
    active = params.get("active", ())
    if primitive is tangent_p and any(axes[i] is None for i in active):
        moved = jax.vmap(functools.partial(_tangent, False, **params), in_axes=tuple(axes), axis_size=size)(*arguments)
        return moved, [0] * len(moved)
    wanted = [i in active or i >= count for i in range(len(arguments))]
    moved = [_front(x, axis, size, w) for x, axis, w in zip(arguments, axes, wanted, strict=True)]
    in_front = [0 if axis is not None or w else None for axis, w in zip(axes, wanted, strict=True)]
    types = [jax.typeof(x) for x in moved]
    decision = params["decision"]
    if isinstance(size, int):
        try:
            outputs = primitive.bind(*moved, **_batched_params(params, in_front[:count], size, types))
            return outputs, [0] * len(outputs)
        except Exception as error:
            if decision.raise_on_failure or decision.verdict == "kept":
                raise
            enter(primitive.name, decision, decision.platform, "batching", error)
    elif decision.verdict == "applied":
        entry_of(decision).keeps(decision.platform, size_unknown(size))
    compute = functools.partial(_COMPUTED[primitive], False, **params)
    outputs = jax.vmap(compute, in_axes=tuple(axes), axis_size=size)(*arguments)
    return outputs, [0] * len(outputs)


_COMPUTED: dict[Primitive, Callable[..., list[jax.Array]]] = {site_p: _site, tangent_p: _tangent, backward_p: _backward}


@functools.cache
def allow_taylor_mode() -> None:
    """Lets ``jax.experimental.jet`` run the originals of sites; called before the first one, since JAX imports it
    lazily too."""
    for primitive, compute in _COMPUTED.items():
        compat.register_taylor_rule(primitive, functools.partial(compute, False))


@functools.cache
def allow_checks() -> None:
    """Lets ``checkify`` look for the errors of the originals of sites, such as NaNs and indices out of range."""
    for primitive, compute in _COMPUTED.items():
        compat.register_checks(primitive, functools.partial(_checked, compute))


def _checked(
    compute: Callable[..., list[jax.Array]], *operands: jax.Array, decision: Decision, **params: Unpack[_Further]
) -> list[jax.Array]:
    """Computes with the original, and reports it."""
    entry_of(decision).keeps(decision.platform, "checkify checks each of its equations")
    return compute(False, *operands, decision=decision, **params)


for _p in _COMPUTED:
    batching.primitive_batchers[_p] = lambda arguments, axes, _p=_p, **params: _batch(_p, arguments, axes, params)
