"""Verifies a rewritten program: compares original, rewritten program and float64 oracle, result by result."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from autopallas import compat, jaxprs
from autopallas.arguments import Static, given_back, join, split, traceable
from autopallas.compat import Array, ArrayFunction, ClosedJaxpr, PyTree
from autopallas.errors import VerificationError
from autopallas.numerics.compare import Comparison, compare, tolerance_of
from autopallas.numerics.oracle import Oracle, without_callbacks
from autopallas.numerics.promote import in_float64, is_float, quiet
from autopallas.options import callable_given, resolve
from autopallas.pipeline import OptimizedFunction, inside, rewrite
from autopallas.verification import text
from autopallas.verification.influence import Source, sources
from autopallas.verification.sites import SiteCheck, applied_sites, check_sites

__all__ = ["Verification", "verify"]

_SAMPLES = 4
"""How often to run the original on arguments one rounding away, when an output would be in breach otherwise."""
_NOT_AGAIN = frozenset({"io_callback", "ordered_io_callback"})
"""Effects on the outside world, which a check must not repeat."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Findings of :func:`verify`.  ``str()`` of it is a table of at most 80 columns."""

    outputs: tuple[Comparison, ...]
    """Comparison of every array that the function returns."""
    sites: tuple[SiteCheck, ...]
    """Check of every replaced site by itself; only after a breach."""
    ok: bool
    """Whether every output is as close to the oracle as allowed, and no NaN or infinity is new."""
    replaced: int = 0
    """Number of kernels that the rewritten program runs; without any there was nothing to verify."""
    notes: tuple[str, ...] = ()
    """Limits of the check, such as an equation that has no float64 form."""

    def __str__(self) -> str:
        return text.render(self)


def verify(fn: ArrayFunction, /, *args: PyTree, **kwargs: PyTree) -> Verification:
    """Checks that :func:`autopallas.optimize` does not change what a call computes.

    Runs the original, the rewritten program, and a float64 evaluation of the original, the oracle.  The oracle promotes
    floats, also behind explicit casts; integers, comparisons and random bits are as in the original.  An output is in
    breach if its error is above the tolerance (float32 1e-5, float16 4e-3, bfloat16 2e-2, for the narrowest dtype on
    its way from the replaced sites; more for gradients) and above twice the original's own error, or if it is NaN or
    infinite where the original is not.  Errors are max |x - oracle| / max |oracle|.  Before an output counts as a
    breach, the original's error on arguments one rounding away is also taken into account, since an ill-conditioned
    result may be exact by luck.

    Debug callbacks and prints do not run in a check.  A function with an ``io_callback``, or with mutable arrays that
    it does not make itself, is not checked, which the notes say.

    Args:
      fn: a function.  If it is optimized, its own options apply; if it calls optimized functions, theirs apply.
      *args, **kwargs: arguments of a call.  Donated arguments are not consumed.

    Returns:
      The errors of every output, with ``ok`` true.

    Raises:
      VerificationError: an output is in breach.  Its ``verification`` also holds the errors of each site by itself.
      OptionError: ``fn`` cannot be called.
      ValueError: this process lacks values of arguments: they are traced, a ``jax.ShapeDtypeStruct``, or spread over
        several processes.

    Example:
      >>> import jax, jax.numpy as jnp, autopallas
      >>> @autopallas.optimize(objective="always")
      ... def attend(q, k, v):
      ...     return jax.nn.softmax(q @ k.T / 8.0) @ v
      >>> x = jnp.ones((16, 64))
      >>> autopallas.verify(attend, x, x, x).ok
      True
    """
    verification = check(fn, args, kwargs)
    if not verification.ok:
        raise VerificationError(str(verification), verification)
    return verification


def check(fn: ArrayFunction, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Verification:
    """Like :func:`verify`, but returns the verification of a breach instead of raising."""
    callable_given("verify", fn)
    if isinstance(fn, types.MethodType) and isinstance(fn.__func__, OptimizedFunction):
        fn, args = fn.__func__, (fn.__self__, *args)
    if any(map(compat.is_tracer, jax.tree.leaves((args, kwargs)))):
        raise ValueError("verify needs the values of its arguments; call it outside of jit, grad and vmap")
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((args, kwargs))):
        raise ValueError("verify needs the values of its arguments, and a jax.ShapeDtypeStruct has none")
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves((args, kwargs))):
        raise ValueError(
            "verify compares values in one process, and arguments are spread over several: verify the function on "
            "arrays of one process"
        )
    arrays, static = split(args, kwargs)
    if getattr(fn, "_settings", None) is None:
        static = replace(static, given=(args, kwargs))
    original, rewritten, names = _programs(fn, arrays, static)
    replaced = len(applied_sites(rewritten))
    if any(equation.primitive.name in _NOT_AGAIN for equation in jaxprs.every_equation(original)):
        return Verification((), (), True, replaced, ("not run: the function has effects outside of JAX (io_callback)",))
    if compat.has_input_effects(original.jaxpr.effects):
        reason = "not run: the function reads or writes mutable arrays (jax.Ref) that it does not make itself"
        return Verification((), (), True, replaced, (reason,))
    with quiet():
        own, ours = (
            jax.block_until_ready(jax.jit(compat.jaxpr_as_fun(without_callbacks(program)))(*arrays))
            for program in (original, rewritten)
        )
    outputs, notes = judged(original, rewritten, names, arrays, own, ours)
    ok = all(c.ok for c in outputs)
    sites: Sequence[SiteCheck] = ()
    if not ok and replaced:
        try:
            sites, more = check_sites(rewritten, arrays)
            notes = tuple(dict.fromkeys((*notes, *more)))
        except Exception as error:
            notes = (*notes, f"the sites could not be looked at: {type(error).__name__}: {error}")
    return Verification(tuple(outputs), tuple(sites), ok, replaced, notes)


def judged(
    original: ClosedJaxpr,
    rewritten: ClosedJaxpr,
    names: Sequence[str],
    arrays: Sequence[Array],
    own: Sequence[jax.Array],
    ours: Sequence[jax.Array],
) -> tuple[list[Comparison], tuple[str, ...]]:
    """Returns the comparison of each output with the oracle, and notes on the oracle.

    Args:
      original, rewritten: the two programs, closed jaxprs.
      names: the names of the outputs.
      arrays: the arguments.
      own, ours: the outputs of the two programs.
    """
    oracle, notes = _oracle(original, arrays, own)
    reached = sources(rewritten)

    def compared(i: int, perturbed: Sequence[Sequence[jax.Array]] = ()) -> Comparison:
        allowed = tolerance_of(own[i].dtype, reached[i])
        return compare(names[i], own[i], ours[i], oracle[i], allowed, [sample[i] for sample in perturbed])

    outputs = [compared(i) for i in range(len(own))]
    # One sample of the original's error is a poor measure for an output that is a small difference of large numbers: a
    # mean near zero may be exact by luck, and the gradient of a bias that softmax ignores is zero except for rounding.
    doubtful = [i for i, c in enumerate(outputs) if not c.ok and not c.non_finite]
    if doubtful:
        with quiet():
            run = jax.jit(compat.jaxpr_as_fun(without_callbacks(original)))
            steps = {_precision(own[i].dtype, reached[i]) for i in doubtful}
            perturbed = {step: [run(*_perturbed(arrays, seed, step)) for seed in range(_SAMPLES)] for step in steps}
        for i in doubtful:
            outputs[i] = compared(i, perturbed[_precision(own[i].dtype, reached[i])])
    return outputs, notes


def _programs(
    fn: ArrayFunction, arrays: Sequence[ArrayLike], static: Static
) -> tuple[ClosedJaxpr, ClosedJaxpr, list[str]]:
    """Returns (original, rewritten, names of the results): closed jaxprs of the arrays, everything else held fixed."""
    inner: ArrayFunction = fn._inner if isinstance(fn, OptimizedFunction) else fn
    original, _, names = original_program(inner, arrays, static)
    if not isinstance(fn, OptimizedFunction):
        as_called = compat.make_jaxpr(_of_arrays(inner, static), *arrays)
        if applied_sites(as_called):
            return original, as_called, names
    return original, rewrite(original, resolve(fn._explicit if isinstance(fn, OptimizedFunction) else {}))[0], names


def original_program(
    inner: ArrayFunction, arrays: Sequence[ArrayLike], static: Static
) -> tuple[ClosedJaxpr, PyTree, list[str]]:
    """Returns a function as a closed jaxpr of its arrays, the types of its results, and their names."""
    with inside(True):
        original, shapes = compat.make_jaxpr_and_shapes(_of_arrays(inner, static), *arrays)
    return original, shapes, [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]]


def _of_arrays(inner: ArrayFunction, static: Static) -> ArrayFunction:
    """Returns a function of the arrays among its arguments, with everything else held fixed."""

    def program_of(*arrays: ArrayLike) -> PyTree:
        args, kwargs = join(static, arrays)
        result = inner(*args, **kwargs)
        return result if all(map(traceable, jax.tree.leaves(result))) else given_back(result, static)

    return program_of


def _oracle(
    original: ClosedJaxpr, arrays: Sequence[ArrayLike], own: Sequence[jax.Array]
) -> tuple[Sequence[Array], tuple[str, ...]]:
    oracle = Oracle(original)
    try:
        return oracle(*arrays), oracle.notes
    except Exception as error:
        # A comparison with the original is better than none.
        reason = f"no float64 evaluation, compared with the original instead: {type(error).__name__}: {error}"
        return [in_float64(x) if is_float(x.dtype) else x for x in own], (reason.split("\n")[0],)


def _precision(dtype: DTypeLike, source: Source) -> float:
    """Returns the spacing of numbers, relative to 1, in the precision in which a result of this dtype is computed."""
    if not jnp.issubdtype(dtype, np.inexact):
        return 0.0
    return float(jnp.finfo(dtype if source.dtype is None else source.dtype).eps)


def _perturbed(arrays: Sequence[Array], seed: int, most: float) -> list[Array]:
    """Moves every float in the arguments by one unit in its last place, up or down, if that is at most ``most`` of it.

    An argument narrower than the program's precision stays as it is: one of its units is far more than the program's
    own error.
    """
    random = np.random.default_rng(seed)

    def moved(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, np.floating):
            return x
        if float(jnp.finfo(x.dtype).eps) > most:
            return x
        wide = np.asarray(x).astype(np.float64)
        step = float(jnp.finfo(x.dtype).eps) * random.choice([-1.0, 1.0], wide.shape)
        result: jax.Array = jax.device_put((wide * (1 + step)).astype(x.dtype), getattr(x, "sharding", None))
        return result

    return [moved(x) for x in arrays]
