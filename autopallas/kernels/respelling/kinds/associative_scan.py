"""Recurrences ``h[t] = a[t] h[t-1] + b[t]`` and products ``p[t] = a[t] p[t-1]`` that are written with
``lax.associative_scan`` or by doubling by hand, and their gradients, which those of ``cumprod`` are too.

On a device with many processors the scan's tree of log T levels is worth its work; a CPU computes each level slice by
slice, and writes T steps some times over.  A loop over the steps reads and writes each step once.  Where the program
expands what it scans, and reduces what comes of it, as state-space models do, the loop does that too, in each step.

What is scanned may lack axes of the result, such as decays that a batch shares: these are repeated in each step, and
the gradient of them is a sum over the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat
from autopallas.compat import Dtype
from autopallas.graph import Body, Graph, Node
from autopallas.kernels.example import decaying
from autopallas.kernels.respelling.associative_scan_spec import Backward, Forward
from autopallas.kernels.respelling.doubling import scans_of
from autopallas.kernels.respelling.exact_sums import Sums, stepped_exactly
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.lanes import Layout, laid_alike
from autopallas.kernels.respelling.loop_surroundings import Around, around
from autopallas.kernels.respelling.spec import ArrayType, Parameters, RespellingSpec
from autopallas.kernels.respelling.step_evaluation import run_step
from autopallas.kernels.respelling.step_results import Written, empty, whole_of, with_step

__all__ = ["KIND"]


def _match(graph: Graph, node: Node) -> Found | None:
    scan = scans_of(graph).get(node.outputs[0])
    if scan is None:
        return None
    if isinstance(scan, Forward):
        own = _parameters(scan, (), scan.given is None, False)
        if laid := _laid_out(graph, scan, scan.inputs, scan.layouts, (), ()):
            return Found(tuple(sorted((*own, laid))), scan.inputs, (scan.result,))
        return _with_around(graph, scan, own, scan.inputs, (), (scan.result,))
    forward = scan.scan
    wanted = tuple(name for name, n in (("given", scan.of_given), ("decay", scan.of_decay)) if n is not None)
    own = _parameters(forward, wanted, forward.given is None, scan.products is not None)
    read = scan.scanned if scan.reads_result else ()
    needed = (*forward.inputs, *scan.cotangents)
    added = [(n, layout) for n, layout in scan.added if n is not None]
    if added:
        own = tuple(sorted((*own, ("added", tuple(None if n is None else layout for n, layout in scan.added)))))
        read += tuple(n for n, _ in added)
    layouts = (*forward.layouts, *scan.layouts[0])
    home = graph.definitions[forward.result].body
    if laid := _laid_out(graph, forward, needed, layouts, scan.results, scan.layouts[1], added):
        return Found(tuple(sorted((*own, laid))), (*needed, *read), scan.results, home)
    return replace(_with_around(graph, forward, own, needed, read, scan.results, home), home=home)


def _laid_out(
    graph: Graph,
    scan: Forward,
    needed: Sequence[int],
    layouts: Sequence[Layout],
    results: Sequence[int],
    of_results: Sequence[Layout],
    added: Sequence[tuple[int, Layout]] = (),
) -> tuple[str, tuple[tuple[int, ...], tuple[Layout, ...], tuple[Layout, ...]]] | None:
    """Returns the parameter that says which axes of a scan's result each operand has, and each of the results of its
    gradient; None where these are all of its axes, in the same order."""
    shape = graph.shape(scan.result)
    given = [*zip((*needed, *results), (*layouts, *of_results), strict=True), *added]
    if all(laid_alike(graph.shape(n), own, shape) for n, own in given):
        return None
    return "layouts", (shape, tuple(layouts), tuple(of_results))


def _parameters(scan: Forward, wanted: tuple[str, ...], products: bool, both: bool) -> Parameters:
    flags = {"both": both, "products": products, "shifted": scan.shifted}
    own: Parameters = (("axis", scan.axis), ("gradients", wanted))
    return tuple(sorted(own + tuple((name, True) for name, given in flags.items() if given)))


def _results(scan: Forward | Backward) -> tuple[int, ...]:
    return (scan.result,) if isinstance(scan, Forward) else scan.results


def _with_around(
    graph: Graph,
    scan: Forward,
    own: Parameters,
    needed: Sequence[int],
    read: Sequence[int],
    results: tuple[int, ...],
    home: Body | None = None,
) -> Found:
    """Returns a scan, or its gradients, with what the loop can compute beside it."""
    operands = (*needed, *read)
    if dict(own).keys() & {"added", "both", "products"}:
        return Found(own, operands, results)
    known = {n for scan in scans_of(graph).values() for n in _results(scan)}
    found = around(graph, operands, results, scan.axis, read, known, home)
    if found is None:
        return Found(own, operands, results)
    return Found((("around", found[0]), *own), found[1], found[2])


def _accumulated(dtype: Dtype) -> Dtype:
    """Returns the dtype in which a recurrence is computed: 32 bits where the program has 16."""
    return jnp.promote_types(dtype, jnp.float32)


def _states(decay: jax.Array, given: jax.Array) -> jax.Array:
    """Computes the recurrence along the first axis."""
    wide = _accumulated(given.dtype)

    def step(state: Sums, own: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Sums, jax.Array]:
        later, a, b = own
        state = stepped_exactly(state, jnp.where(later, a.astype(wide), 0), b.astype(wide))
        return state, state[0].astype(given.dtype)

    later = jnp.arange(given.shape[0]) > 0  # the first decay is not read, and may be anything
    zeros = jnp.zeros(np.broadcast_shapes(decay.shape[1:], given.shape[1:]), wide)
    return lax.scan(step, (zeros, zeros), (later, decay, given))[1]


def _products(decay: jax.Array) -> jax.Array:
    """Computes the products of the numbers so far along the first axis."""
    wide = _accumulated(decay.dtype)

    def step(product: Sums, a: jax.Array) -> tuple[Sums, jax.Array]:
        product = stepped_exactly(product, a.astype(wide), jnp.zeros_like(product[0]))
        return product, product[0].astype(decay.dtype)

    ones = jnp.ones(decay.shape[1:], wide)
    return lax.scan(step, (ones, jnp.zeros_like(ones)), decay)[1]


def _gradients(decay: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Computes the gradient of ``given`` along the first axis."""
    wide = _accumulated(cotangent.dtype)

    def step(gradient: Sums, own: tuple[jax.Array, jax.Array]) -> tuple[Sums, jax.Array]:
        following, d = own
        gradient = stepped_exactly(gradient, following.astype(wide), d.astype(wide))
        return gradient, gradient[0].astype(cotangent.dtype)

    zeros = jnp.zeros(np.broadcast_shapes(decay.shape[1:], cotangent.shape[1:]), wide)
    following = jnp.concatenate([decay[1:], jnp.zeros_like(decay[:1])])  # carried along, it takes twice as long
    return lax.scan(step, (zeros, zeros), (following, cotangent), reverse=True)[1]


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    axis, wanted = cast(int, spec["axis"]), cast(tuple[str, ...], spec["gradients"])
    beside = _around(spec)
    if beside is not None:
        return _looped(beside, axis, wanted, spec.results, operands)
    operands, added = _apart(spec, operands)
    shape, _, of_results = _layouts(spec, operands)
    moved = [jnp.moveaxis(x, axis, 0) for x in _laid(spec, operands)]
    scans = _scans_in(spec)
    inputs, rest = moved[: len(scans[0])], moved[len(scans[0]) :]
    if not wanted:
        return [jnp.moveaxis(_states(*inputs) if len(inputs) == 2 else _products(*inputs), 0, axis)]
    decay, given = inputs[0], inputs[-1]
    gradients = [_gradients(decay, cotangent) for cotangent in rest[: len(scans)]]
    found = {"given": gradients[0]}
    if "decay" in wanted:
        results = rest[len(scans) :] or [_states(decay, given) if len(own) == 2 else _products(decay) for own in scans]
        terms = [
            jnp.concatenate([gradient[:1] if len(own) == 1 else jnp.zeros_like(states[:1]), gradient[1:] * states[:-1]])
            for gradient, states, own in zip(gradients, results, scans, strict=True)
        ]
        found["decay"] = sum(terms[1:], terms[0])
    whole = [jnp.broadcast_to(jnp.moveaxis(found[name], 0, axis), shape) for name in wanted]
    return added([_summed(x, own, kind) for x, own, (kind, _) in zip(whole, of_results, spec.results, strict=True)])


def _apart(
    spec: RespellingSpec, operands: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], Callable[[list[jax.Array]], list[jax.Array]]]:
    """Returns the operands of gradients alone, and what adds the others to these."""
    wanted = cast(tuple[str, ...], spec["gradients"])
    given = cast("tuple[Layout | None, ...]", dict(spec.parameters).get("added", (None,) * len(wanted)))
    count = len(operands) - sum(layout is not None for layout in given)
    shape, _, of_results = _layouts(spec, operands[:count])

    def add(results: list[jax.Array]) -> list[jax.Array]:
        left = iter(operands[count:])
        return [
            x if layout is None else x + _summed(_with_axes(next(left), layout, len(shape)), own, x.shape)
            for x, layout, own in zip(results, given, of_results, strict=True)
        ]

    return operands[:count], add


_Layouts: TypeAlias = tuple[tuple[int, ...], Sequence[Layout], Sequence[Layout]]


def _layouts(spec: RespellingSpec, operands: Sequence[jax.Array]) -> _Layouts:
    """Returns the shape of the scan's result, and which of its axes the inputs and cotangents have, and the results of
    its gradient."""
    found = dict(spec.parameters).get("layouts")
    if found is not None:
        return cast(_Layouts, found)
    shape = operands[0].shape
    same = tuple(range(len(shape)))
    return shape, (same,) * len(operands), (same,) * len(cast(tuple[str, ...], spec["gradients"]))


def _laid(spec: RespellingSpec, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns operands with the axes of the scan's result in order, of size 1 where they lack one."""
    if "layouts" not in dict(spec.parameters):
        return list(operands)
    shape, layouts, _ = _layouts(spec, operands)
    layouts = [*layouts, *[tuple(range(len(shape)))] * (len(operands) - len(layouts))]  # what was scanned, as it is
    return [_with_axes(x, layout, len(shape)) for x, layout in zip(operands, layouts, strict=True)]


def _with_axes(x: jax.Array, layout: Layout, rank: int) -> jax.Array:
    """Returns an array with its axes where a layout has them, and others of size 1."""
    order = sorted((d for d, axis in enumerate(layout) if axis >= 0), key=lambda d: layout[d])
    sizes = [1] * rank
    for d in order:
        sizes[layout[d]] = x.shape[d]
    return lax.transpose(x, (*order, *(d for d, axis in enumerate(layout) if axis < 0))).reshape(sizes)


def _summed(x: jax.Array, layout: Layout, shape: Sequence[int]) -> jax.Array:
    """Returns the sum of an array over the axes that a layout lacks, in this layout."""
    kept = [axis for axis in layout if axis >= 0]
    lacking = tuple(d for d, size in enumerate(x.shape) if size != 1 and d not in kept)
    total = jnp.sum(x, lacking, dtype=_accumulated(x.dtype)).astype(x.dtype) if lacking else x
    left = [d for d in range(x.ndim) if d not in lacking]
    ones = [i for i, d in enumerate(left) if d not in kept]
    return lax.transpose(total, (*(left.index(axis) for axis in kept), *ones)).reshape(shape)


def _scans_in(spec: RespellingSpec) -> list[tuple[str, ...]]:
    """Returns the inputs of the scan that is computed, or of each of which the gradients are."""
    states, products = ("decay", "given"), ("decay",)
    own = dict(spec.parameters)
    return [states, products] if own.get("both") else [products] if own.get("products") else [states]


def _around(spec: RespellingSpec) -> Around | None:
    return cast("Around | None", dict(spec.parameters).get("around"))


def _looped(
    beside: Around, axis: int, wanted: Sequence[str], types: Sequence[ArrayType], operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """Computes a scan, or its gradients, with what lies around it, in a loop that writes slices of its results."""
    whole = beside.before.out_avals
    shape, dtype = list(whole[0].shape), whole[-1].dtype
    count, wide = shape[axis], _accumulated(dtype)
    shape[axis] = 1
    numbers = jnp.arange(count, dtype=jnp.int32)

    def slices(t: jax.Array) -> list[jax.Array]:
        given = zip(operands, beside.axes, strict=True)
        return [x if at is None else lax.dynamic_slice_in_dim(x, t, 1, at) for x, at in given]

    def after(found: Sequence[jax.Array], own: Sequence[jax.Array], written: Written, t: jax.Array) -> Written:
        results = run_step(beside.after, beside.steps_after, [*found, *own])
        return [with_step(x, one, t, at) for x, one, at in zip(written, results, beside.results, strict=True)]

    def forward(state: Sums, own: Sequence[jax.Array], t: jax.Array) -> Sums:
        decay, given, *_ = run_step(beside.before, beside.steps_before, own)
        kept = jnp.where(t > 0, decay.astype(wide), 0)  # the first decay is not read, and may be anything
        return stepped_exactly(state, kept, given.astype(wide))

    def step(carried: tuple[Sums, Written], t: jax.Array) -> tuple[tuple[Sums, Written], None]:
        state, written = carried
        own = slices(t)
        state = forward(state, own, t)
        return (state, after([state[0].astype(dtype)], own, written, t)), None

    def states() -> jax.Array:
        def step(carried: tuple[Sums, jax.Array], t: jax.Array) -> tuple[tuple[Sums, jax.Array], None]:
            state = forward(carried[0], slices(t), t)
            return (state, lax.dynamic_update_slice_in_dim(carried[1], state[0].astype(dtype), t, axis)), None

        found: jax.Array = lax.scan(step, ((zeros, zeros), jnp.zeros(whole[0].shape, dtype)), numbers)[0][1]
        return found

    zeros = jnp.zeros(shape, wide)
    first = [empty(own, kind, at) for (own, kind), at in zip(types, beside.results, strict=True)]
    if not wanted:
        (_, written), _ = lax.scan(step, ((zeros, zeros), first), numbers)
        return [whole_of(x).astype(kind) for x, (_, kind) in zip(written, types, strict=True)]
    known = operands[0] if len(whole) == 4 else states() if "decay" in wanted else None

    def back(carried: tuple[Sums, jax.Array, Written], t: jax.Array) -> tuple[tuple[Sums, jax.Array, Written], None]:
        gradient, following, written = carried
        own = slices(t)
        decay, _, cotangent, *_ = run_step(beside.before, beside.steps_before, own)
        gradient = stepped_exactly(gradient, following, cotangent.astype(wide))
        narrow = gradient[0].astype(dtype)
        found = [narrow] if "given" in wanted else []
        if known is not None and "decay" in wanted:
            before = lax.dynamic_slice_in_dim(known, jnp.maximum(t - 1, 0), 1, axis)
            found.append(jnp.where(t > 0, narrow * before, 0))
        return (gradient, decay.astype(wide), after(found, own, written, t)), None

    last, _ = lax.scan(back, ((zeros, zeros), zeros, first), numbers, reverse=True)
    return [whole_of(x).astype(kind) for x, (_, kind) in zip(last[2], types, strict=True)]


def _combined(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Composes two steps, the left one first."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def _scan(axis: int, decay: jax.Array, given: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the products of the decays, and the states."""
    found: tuple[jax.Array, jax.Array] = lax.associative_scan(_combined, (decay, given), axis=axis)
    return found


def _shifted(axis: int, decay: jax.Array, given: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the same by shifts of all steps by 1, 2, 4, ... (Hillis and Steele, 1986)."""
    count = decay.shape[axis]
    by = 1
    while by < count:
        kept, filled = (lax.slice_in_dim(decay, 0, stop, axis=axis) for stop in (count - by, by))
        before = lax.slice_in_dim(given, 0, count - by, axis=axis)
        earlier = (
            jnp.concatenate([jnp.ones_like(filled), kept], axis),
            jnp.concatenate([jnp.zeros_like(filled), before], axis),
        )
        decay, given = _combined(earlier, (decay, given))
        by *= 2
    return decay, given


def _original(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    beside = _around(spec)
    if beside is None:
        return _plain(spec, *operands)
    found = _plain(spec, *compat.jaxpr_as_fun(beside.before)(*operands))
    return compat.jaxpr_as_fun(beside.after)(*found, *operands)


def _plain(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    wanted, scans = cast(tuple[str, ...], spec["gradients"]), _scans_in(spec)
    operands, added = _apart(spec, operands)
    shape, layouts, of_results = _layouts(spec, operands)
    axes = [frozenset(layout) - {-1} for layout in layouts[: len(scans[0])]]
    kept = dict(zip(wanted, of_results, strict=False))
    every = (
        [d for d, size in enumerate(shape) if size != 1] if "layouts" in dict(spec.parameters) else range(len(shape))
    )
    # What examples share, and have gradients of their own of, is mapped outside of the gradient.
    outside = {
        d for name, own in zip(scans[0], axes, strict=True) for d in kept.get(name, ()) if d >= 0 and d not in own
    }
    inner = frozenset(every) - outside
    common = inner.intersection(*axes)
    own = _shifted if dict(spec.parameters).get("shifted") else _scan
    at = sorted(common).index(cast(int, spec["axis"]))

    def scan(decay: jax.Array, *given: jax.Array) -> list[jax.Array]:
        products, states = own(at, decay, *(given or (jnp.zeros_like(decay),)))
        return [states if len(names) == 2 else products for names in scans]

    run = _mapped(scan, [one - outside for one in axes], [inner] * len(scans), sorted(inner - common))
    inputs = [_in_order(x, layout) for x, layout in zip(operands, layouts[: len(axes)], strict=False)]
    if not wanted:
        return [x.reshape(shape) for x in run(*inputs)]
    cotangents = [
        jnp.broadcast_to(_with_axes(x, layout, len(shape)), shape).reshape([shape[d] for d in every])
        for x, layout in zip(operands[len(axes) :], layouts[len(axes) :], strict=False)
    ][: len(scans)]

    def pulled(*given: jax.Array) -> list[jax.Array]:
        return list(jax.vjp(run, *given[: len(axes)])[1](list(given[len(axes) :])))

    have = [one | outside for one in axes]
    pull = _mapped(pulled, [*axes, *[frozenset(every)] * len(cotangents)], have, sorted(outside))
    found = dict(zip(scans[0], zip(pull(*inputs, *cotangents), have, strict=True), strict=True))
    results = [_with_axes(x, tuple(sorted(of)), len(shape)) for x, of in (found[name] for name in wanted)]
    types = [kind for kind, _ in spec.results] if "layouts" in dict(spec.parameters) else [shape] * len(wanted)
    return added([_summed(x, kept[name], kind) for x, name, kind in zip(results, wanted, types, strict=True)])


def _in_order(x: jax.Array, layout: Layout) -> jax.Array:
    """Returns an array with its axes in the order of the scan's result, without those of size 1."""
    if -1 in layout:
        x = lax.squeeze(x, [d for d, axis in enumerate(layout) if axis < 0])
    return lax.transpose(x, sorted(range(x.ndim), key=[axis for axis in layout if axis >= 0].__getitem__))


def _mapped(
    function: Callable[..., list[jax.Array]],
    given: Sequence[frozenset[int]],
    results: Sequence[frozenset[int]],
    over: Sequence[int],
) -> Callable[..., list[jax.Array]]:
    """Maps a function over axes that its results have and some of its operands lack.

    Args:
      function: a function of arrays that have none of these axes.
      given, results: the axes that each operand and result has then, in order.
      over: the axes.
    """
    inside = [set(own) - set(over) for own in (*given, *results)]
    for d in over:
        for own, then in zip(inside, (*given, *results), strict=True):
            own |= {d} & then
        places = [sorted(own).index(d) if d in own else None for own in inside]
        function = jax.vmap(function, tuple(places[: len(given)]), places[len(given) :])
    return function


def _assumptions(spec: RespellingSpec) -> tuple[str, ...]:
    """Returns that nothing overflows: an infinite product of decays times a state of 0 is NaN in the original, and an
    infinite state times a decay of 0 in the loop.  Shifts multiply the first decay by the zeros that they fill with."""
    own = dict(spec.parameters)
    first = ", and the first decay is finite" if own.get("shifted") else ""
    states = (f"no state and no product of decays overflows{first}",)
    if own.get("products") or own.get("both"):
        products = "no product of the first numbers overflows, or vanishes, and comes back with later ones"
        return (products,) if own.get("products") else (*states, products)
    return states


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns what is computed, and whether there are few steps or many."""
    axis, beside = cast(int, spec["axis"]), _around(spec)
    shape, dtype = spec.operands[0] if beside is None else (beside.before.out_avals[0].shape, spec.widest_dtype)
    laid = cast("_Layouts | None", dict(spec.parameters).get("layouts"))
    if laid is not None:
        shape = laid[0]
    steps = "few" if shape[axis] < 64 else "many" if math.prod(shape) >= 16 * shape[axis] else "many narrow"
    where = "first" if axis == 0 else "last" if axis == len(shape) - 1 else "middle"
    where += " axis" if beside is None else " axis, expanded"
    if laid is not None:
        where += ", shared" if any(len(set(own) - {-1}) < sum(n != 1 for n in shape) for own in laid[1]) else ", turned"
    own = dict(spec.parameters)
    of = "gradients" if spec["gradients"] else "products" if own.get("products") else "states"
    of += " of products" if spec["gradients"] and own.get("products") else " of both" if own.get("both") else ""
    of += " by shifts" if own.get("shifted") else ""
    kind = "complex numbers" if jnp.issubdtype(dtype, jnp.complexfloating) else "floats"
    return f"{of} of {kind}, {steps} steps, {where}"


def _fill(spec: RespellingSpec, random: np.random.Generator, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return list(arrays) if _around(spec) is None else decaying(arrays)


def _samples() -> Iterator[tuple[str, Sample]]:
    shapes: Sequence[tuple[tuple[int, ...], int]] = (
        ((32, 16), 0), ((1024, 16), 0), ((2, 512, 16), 1), ((16, 1024), 1),
        ((32, 4096), 0), ((256, 512), 0), ((4096, 32), 0), ((4, 1024, 32), 1), ((128, 1024), 1),
        ((32, 65536), 0), ((1024, 128, 16), 0), ((4096, 512), 0), ((2, 1024, 1024), 1), ((2048, 1024), 1),
    )  # fmt: skip
    for shape, axis in shapes:
        for dtype in (jnp.float32, jnp.complex64):
            if dtype == jnp.complex64 and (len(shape) > 2 or axis):
                continue
            name = f"{'x'.join(map(str, shape))}-{axis}-{jnp.dtype(dtype).name}"
            one = jax.ShapeDtypeStruct(shape, dtype)

            def forward(a: jax.Array, b: jax.Array, axis: int = axis) -> jax.Array:
                return _scan(axis, jnp.tanh(a), jnp.tanh(b))[1]

            def gradients(a: jax.Array, b: jax.Array, d: jax.Array, axis: int = axis) -> tuple[jax.Array, jax.Array]:
                a, b, d = jnp.tanh(a), jnp.tanh(b), jnp.tanh(d)
                found: tuple[jax.Array, jax.Array] = jax.vjp(lambda a, b: _scan(axis, a, b)[1], a, b)[1](d)
                return found

            yield f"states-{name}", Sample(forward, (one, one))
            yield f"gradients-{name}", Sample(gradients, (one, one, one))
    for shape, axis in (((4096, 64), 1), ((256, 512), 0), ((65536, 128), 1)):
        one = jax.ShapeDtypeStruct(shape, jnp.float32)

        def products(a: jax.Array, axis: int = axis) -> jax.Array:
            found: jax.Array = lax.associative_scan(jnp.multiply, jnp.tanh(a), axis=axis)
            return found

        def of_products(a: jax.Array, d: jax.Array, axis: int = axis) -> jax.Array:
            found: tuple[jax.Array] = jax.vjp(lambda a: lax.cumprod(a, axis), jnp.tanh(a))[1](jnp.tanh(d))
            return found[0]

        def of_both(a: jax.Array, b: jax.Array, d: jax.Array, e: jax.Array, axis: int = axis) -> tuple[jax.Array, ...]:
            a, b, d, e = (jnp.tanh(x) for x in (a, b, d, e))
            found: tuple[jax.Array, ...] = jax.vjp(lambda a, b: _scan(axis, a, b), a, b)[1]((d, e))
            return found

        name = "x".join(map(str, shape))
        yield f"products-{name}-{axis}", Sample(products, (one,))
        yield f"gradients-of-products-{name}-{axis}", Sample(of_products, (one, one))
        if axis == 0:
            yield f"gradients-of-both-{name}-{axis}", Sample(of_both, (one, one, one, one))
    for shape in ((1024, 16), (256, 512), (4096, 32), (2048, 1024)):
        one = jax.ShapeDtypeStruct(shape, jnp.float32)

        def doubled(a: jax.Array, b: jax.Array) -> jax.Array:
            return _shifted(0, jnp.tanh(a), jnp.tanh(b))[1]

        def of_doubled(a: jax.Array, b: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
            a, b, d = jnp.tanh(a), jnp.tanh(b), jnp.tanh(d)
            found: tuple[jax.Array, jax.Array] = jax.vjp(lambda a, b: _shifted(0, a, b)[1], a, b)[1](d)
            return found

        name = "x".join(map(str, shape))
        yield f"states-{name}-shifted", Sample(doubled, (one, one))
        yield f"gradients-{name}-shifted", Sample(of_doubled, (one, one, one))
    for batch, steps, width in ((8, 256, 64), (16, 1024, 64), (16, 2048, 128)):  # of floats, whole train steps lost
        decays, one = (jax.ShapeDtypeStruct(own, jnp.complex64) for own in ((steps, width), (batch, steps, width)))
        yield f"states-{batch}x{steps}x{width}-shared", Sample(_shared, (decays, one))

        def of_shared(a: jax.Array, b: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
            found: tuple[jax.Array, jax.Array] = jax.vjp(_shared, a, b)[1](jnp.tanh(d))
            return found

        yield f"gradients-{batch}x{steps}x{width}-shared", Sample(of_shared, (decays, one, one))
    for batch, steps, width, state in ((1, 256, 64, 16), (2, 1024, 256, 16)):
        several = [(batch, steps, width), (batch, steps, width), (width, state), *[(batch, steps, state)] * 2]
        types = tuple(jax.ShapeDtypeStruct(own, jnp.float32) for own in several)
        name = f"{batch}x{steps}x{width}x{state}-expanded"
        yield f"states-{name}", Sample(lambda *x: _expanded(*x)[0], types)
        if batch * steps * width <= 2**19:
            yield f"states-read-{name}", Sample(_expanded, types)

        def pulled(*given: jax.Array) -> tuple[jax.Array, ...]:
            *own, cotangent = given
            found: tuple[jax.Array, ...] = jax.vjp(lambda *x: _expanded(*x)[0], *own)[1](cotangent)
            return found[:-1]

        yield f"gradients-{name}", Sample(pulled, (*types, types[0]))


def _shared(decay: jax.Array, given: jax.Array) -> jax.Array:
    """Computes the states of a batch with the same decays."""
    found: jax.Array = jax.vmap(lambda a, b: _scan(0, a, b)[1], (None, 0))(jnp.tanh(decay), jnp.tanh(given))
    return found


def _expanded(
    width: jax.Array, x: jax.Array, rate: jax.Array, write: jax.Array, read: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes a state-space model whose states have an axis more than what it is given (arXiv:2312.00752)."""
    decay = jnp.exp(-jax.nn.softplus(width)[..., None] * jnp.exp(rate))
    states = _scan(1, decay, x[..., None] * write[..., None, :])[1]
    return jnp.einsum("btdn,btn->btd", states, read), states


KIND = Kind(
    name="associative_scan",
    primitives=("add", "add_any", "mul"),
    numerics="reordered",
    assumptions=_assumptions,
    instead="a loop over the steps",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    is_in=lambda graph: bool(scans_of(graph)),
    fill=_fill,
)
