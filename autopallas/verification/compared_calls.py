"""Makes the calls that are compared with the original, and disables the sites that make one wrong."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar, cast

import jax

from autopallas import compat, pipeline
from autopallas.compat import Jitted, PyTree
from autopallas.errors import one_line, warn
from autopallas.fallback.bisect import ALL_SITES, NO_SITES, SEEN, allowing
from autopallas.fallback.rerun import Recoverable
from autopallas.options import Options, resolve
from autopallas.report import at_exit
from autopallas.sharding import call_shardings
from autopallas.tuning.cache import WARNED
from autopallas.tuning.probe_cache import ProbeResult, ProbeResults
from autopallas.verification import first_call
from autopallas.verification.canary import Canary, distances, leaves_named
from autopallas.verification.sites import applied_sites

if TYPE_CHECKING:
    from autopallas.optimized import Optimized

__all__ = ["compared"]

T = TypeVar("T")
Args = tuple[PyTree, ...]
Kwargs = dict[str, PyTree]


def compared(function: Optimized[..., T], canary: Canary, args: Args, kwargs: Kwargs) -> T:
    """Makes a call of an optimized function, and compares its result with that of the original.

    Args:
      function: the function.
      canary: what counts its calls.
      args, kwargs: the arguments of the call.

    Returns:
      The result of the optimized function, whatever the comparison says.
    """
    options = resolve(function._explicit)
    canary.wait(options.verify)
    canary.left += 1  # for the call itself, which is made below
    if isinstance(options.verify, bool):  # the option does not hold here
        return function(*args, **kwargs)
    obstacle = _obstacle(function, args, kwargs)
    if obstacle:
        canary.note(f"a call was not compared: {obstacle}")
        return function(*args, **kwargs)
    donates = any(name.startswith("donate") for name in function._settings or ())
    if donates:
        canary.note("the function donates arguments, so they are copied for a call that is compared")
    kept_args, kept_kwargs = jax.tree.map(_copy, (args, kwargs)) if donates else (args, kwargs)
    result = function(*args, **kwargs)
    recorded = call_shardings.recording_shardings(kept_args, kept_kwargs) if function._spread else nullcontext()
    try:
        with recorded:
            _compare(function, canary, kept_args, kept_kwargs, result, options)
    except Exception as error:
        if options.strict:
            raise
        reason = one_line(error)
        canary.note(f"a call could not be compared: {reason}")
        WARNED.once(f"canary {reason}", f"autopallas could not compare a call of {function!r}: {reason}")
    return result


def _copy(leaf: PyTree) -> PyTree:
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


def _obstacle(function: Optimized[..., PyTree], args: Args, kwargs: Kwargs) -> str:
    """Returns why a call is not compared, or an empty string."""
    if not compat.is_outermost() or any(map(compat.is_tracer, jax.tree.leaves((args, kwargs)))):
        return "it is part of another program that is traced"
    if jax.process_count() > 1:
        return "several processes run the program, and one alone cannot run another"
    return "the function runs as it is" if function._runs_as_it_is else ""


def _compare(
    function: Optimized[..., PyTree], canary: Canary, args: Args, kwargs: Kwargs, result: PyTree, options: Options
) -> None:
    """Compares the result of a call with the original's; disables the sites that are to blame if it is wrong."""
    call = function._repeated(args, kwargs)
    with first_call.unchecked():
        program = call.trace().jaxpr
        if program.effects:
            canary.note("calls are not compared: the program has effects, which would happen twice")
            return
        if not applied_sites(program):
            canary.note("calls are not compared where nothing is replaced")
            return
        with allowing(NO_SITES):
            original = jax.block_until_ready(_run_original(function, args, kwargs))
    (names, ours), (_, own) = leaves_named(result), leaves_named(original)
    if not canary.suspicious(program, function._report, names, distances(own, ours)):
        return
    from autopallas.verification.blame import judge

    judgement = judge(function, args, kwargs, own, ours, options)
    if judgement.blamed:
        _disable(function, canary, call, judgement.blamed)
    else:
        canary.allow(program, judgement.outputs)


def _run_original(function: Optimized[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Runs a call as it is written, without consuming its arguments."""
    if function._settings is None:
        return function._repeated(args, kwargs)()
    return _undonated(function)(*args, **kwargs)


def _undonated(function: Optimized[..., PyTree]) -> Jitted:
    """Returns the original of a jit function, which donates nothing; it is kept with the function."""
    held: dict[str, object] = function.__dict__
    if "_undonated" not in held:
        settings = {k: v for k, v in (function._settings or {}).items() if not k.startswith("donate")}
        held["_undonated"] = jax.jit(function._inner, **settings)
    return cast(Jitted, held["_undonated"])


def _disable(
    function: Optimized[..., PyTree], canary: Canary, call: Recoverable, blamed: Mapping[pipeline.Place, str]
) -> None:
    """Keeps the originals of sites from now on, and remembers on disk which implementations were wrong."""
    SEEN.suspects.clear()
    with first_call.unchecked(), allowing(ALL_SITES):
        call.trace()
    for suspect in SEEN.suspects.values():
        reason = blamed.get((suspect.op, suspect.location))
        if reason is not None:
            ProbeResults.current().put(ProbeResult.of(suspect.key, "verify", reason))
    for (op, location), reason in blamed.items():
        function._disabled[op, location] = reason
        canary.breach(f"{op} at {location}: {reason}; it is disabled")
        warn(f"autopallas disables the {op} at {location}: {reason}")
    at_exit.withdraw(function._report)
    function.clear_cache()
    with first_call.unchecked():
        call.trace()  # traces for the next call, and puts what now holds in the report
