"""Defines the optimized function, which is called, traced and lowered as the original function was."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar, cast

import jax
from jax.typing import ArrayLike

from autopallas import compat, key_order, own_frames, pipeline
from autopallas.arguments import Static, is_flag, join, split_traced
from autopallas.compat import ArrayFunction, ClosedJaxpr, Jitted, Params, PyTree
from autopallas.errors import one_line, warn
from autopallas.fallback.bisect import is_bisecting, no_site_is_allowed
from autopallas.fallback.rerun import is_users_error, mark_users_error, record_failures, rerun
from autopallas.faults import MEANT
from autopallas.flags import MayHaveFlags, MayHaveNames, as_jit_traces, has_flags, may_have_flags, may_have_names
from autopallas.gc_pause import paused, rare
from autopallas.options import Options, resolve
from autopallas.plain_calls import CONCRETE, Args, Kwargs, PlainCalls, call_jitted
from autopallas.report import Failure, Report, at_exit
from autopallas.report.live_report import LiveReport
from autopallas.sharding import call_shardings
from autopallas.sharding.processes import disagreement, inspection_only
from autopallas.verification import first_call

if TYPE_CHECKING:
    from autopallas.verification.canary import Canary

__all__ = ["Optimized"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Optimized(Generic[P, R]):
    """A function whose reference computations run as tuned kernels; ``optimize`` makes it from the function."""

    # slots, since every call reads these attributes
    __slots__ = ("__dict__", "__weakref__", "_canary", "_run", "_spread")

    def __init__(self, function: Callable[P, R], explicit: dict[str, object]):
        functools.update_wrapper(self, function, updated=())
        own = getattr(function, "__dict__", {})
        self.__dict__.update((name, value) for name, value in own.items() if not hasattr(Optimized, name))
        self._function = function
        self._explicit = explicit
        self._report = LiveReport(Report())
        self._lock = threading.Lock()
        nested = isinstance(function, Optimized)
        settings: Params | None = getattr(function, "_settings", None) if nested else compat.jit_settings(function)
        self._settings = settings
        self._inner: Callable[..., R] = function if settings is None else function.__wrapped__  # type: ignore[attr-defined]

        # What jit compiled is gone with the last reference to this object, and not when garbage is collected next.
        this = weakref.ref(self)

        @functools.wraps(self._inner, updated=())
        def traced(*args: PyTree, **kwargs: PyTree) -> PyTree:
            function = cast("Optimized[..., R]", this())
            if function._plain is not None:
                function._plain.refuse_flags(args, kwargs)
            with as_jit_traces(False):  # what is called in the function has flags of its own
                return function._traced(args, kwargs)

        def traced_fixed(static: Static, *arrays: ArrayLike) -> PyTree:
            function = cast("Optimized[..., R]", this())
            return function._traced(*join(static, arrays), static)

        self._jit = cast(Jitted, jax.jit(traced, **(settings or {})))
        self._fixed = cast(Jitted, jax.jit(traced_fixed, static_argnums=0))
        self._run: Callable[..., R] = self._jit
        self._plain: PlainCalls | None = PlainCalls(self) if settings is None else None
        self._was_traced = False
        self._replaced = False
        self._unread = False
        """Whether no result was read yet of a program that was traced with sites replaced."""
        self._spread = False
        self._dry = False
        self._canary: Canary | None = None
        self._disabled: dict[pipeline.Place, str] = {}

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._canary is not None and self._canary.due():
            from autopallas.verification.compared_calls import compared  # only programs with canaries pay for it

            return compared(self, self._canary, args, kwargs)
        run = self._run  # which another thread may change meanwhile
        if self._plain is not None and run is self._jit:
            looks_inside = self._looks_inside
            if has_flags(args, kwargs, looks_inside):
                run = functools.partial(self._plain.call, call_jitted)
            elif looks_inside and not self._plain.knows_names:  # a trace that is aborted would leave calls slow
                self._plain.knows_names = may_have_names(args, kwargs)
        failed: Exception | None = None
        try:  # the common call pays only for this frame
            if self._spread and not call_shardings.is_recording():
                with call_shardings.recording_shardings(args, kwargs):
                    if self._canary is not None:
                        self._canary.left += 1  # the call was counted
                    return self(*args, **kwargs)
            result = run(*args, **kwargs) if self._plain is None else key_order.called(self, run, args, kwargs)
            if self._unread:
                self._wait_for(result)
            return result
        except first_call.FirstCall:
            pass
        except call_shardings.ShardingsNeeded:
            self._spread = True
            return self(*args, **kwargs)
        except (MayHaveFlags, MayHaveNames) as refused:
            assert self._plain is not None
            self._plain.knows_names |= isinstance(refused, MayHaveNames)
            leaves = jax.tree.leaves((args, kwargs))
            if isinstance(refused, MayHaveFlags) or any(is_flag(type(leaf)) for leaf in leaves):
                self._run = functools.partial(self._plain.call, call_jitted)
            return self(*args, **kwargs)
        except Exception as error:
            plain = self._plain if run is self._jit else None
            failed = error if plain is not None and plain.may_be_ours(error, args, kwargs) else None
            if failed is None:
                recovered = self._recovered(error, args, kwargs)
                if recovered is None:
                    own_frames.leave_out(error)
                    raise
                return recovered[0]
        if failed is not None:  # outside of the handler, so that what is raised now does not name it
            try:
                assert self._plain is not None
                return cast(R, self._plain.call_again(failed, args, kwargs))
            except Exception as error:
                own_frames.leave_out(error)
                raise
            finally:
                failed = None  # whose traceback has this frame, and with it the arguments
        first_call.checked(self, args, kwargs, resolve(self._explicit).strict)
        with first_call.unchecked():
            return self(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Optimized[P, R] | types.MethodType:
        """Binds where the function would: one that is bound already, a static one, and most objects that are called do
        not."""
        fn: object = self._function
        binds = hasattr(type(fn), "__get__") and not isinstance(fn, (staticmethod, types.MethodType))
        return self if instance is None or not binds else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<autopallas.optimize of {self._function!r}>"

    def __reduce__(self) -> str | tuple[type[Optimized[P, R]], tuple[Callable[P, R], dict[str, object]]]:
        """Pickles by name where the module holds this object under its own name; otherwise as function and options."""
        name: str = getattr(self, "__qualname__", "")
        found: object = sys.modules.get(self.__module__)
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (Optimized, (self._function, self._explicit))

    def report(self) -> Report:
        """Returns what was done to the signature traced last, as far as it is known by now; empty before any trace."""
        held = None if self._plain is None else self._plain.inside
        return self._report() if held is None or not held._was_traced else held.report()

    # ------------------------------------------------------------------ the API of jit

    @own_frames.left_out
    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Lowers the rewritten program, as ``jax.jit(f).lower`` does."""
        with first_call.unchecked(), inspection_only():
            return cast(jax.stages.Lowered, self._inspected("lower", args, kwargs))

    @own_frames.left_out
    def trace(self, /, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        """Traces the rewritten program, as ``jax.jit(f).trace`` does."""
        with first_call.unchecked(), inspection_only():
            return cast(jax.stages.Traced, self._inspected("trace", args, kwargs))

    @own_frames.left_out
    def eval_shape(self, /, *args: P.args, **kwargs: P.kwargs) -> PyTree:
        """Returns shapes and dtypes of the result, as ``jax.jit(f).eval_shape`` does."""
        with first_call.unchecked(), inspection_only():
            return self._inspected("eval_shape", args, kwargs)

    def clear_cache(self) -> None:
        """Clears the cache, as for ``jax.jit``, so that the next call traces anew."""
        self._jit.clear_cache()
        self._fixed.clear_cache()
        if self._plain is not None:
            self._plain.clear_cache()

    # ------------------------------------------------------------------ tracing

    def _inspected(self, name: str, args: Args, kwargs: Kwargs) -> PyTree:
        """Calls a method of jit that runs nothing; where the function holds a jit function, and cannot be traced as a
        whole, its own method of that name."""
        try:
            return self._placed(getattr(self._jit, name), args, kwargs)
        except Exception as error:
            plain = self._plain
            if plain is None or not plain.inspects(name) or not plain.may_be_ours(error, args, kwargs):
                raise
        return plain.inspected(name, args, kwargs)

    def _placed(self, use: Callable[..., T], args: Args, kwargs: Kwargs) -> T:
        """Calls ``use``, for whose trace the order of the call's dictionaries is kept; if the trace asks for the
        arguments' shardings, retries with them recorded."""
        if self._plain is None:
            return self._with_shardings(use, *args, **kwargs)
        traces_flags = may_have_flags(args, kwargs) or may_have_names(args, kwargs)
        # as part of the key, or a call would use what is traced here
        with as_jit_traces(True) if traces_flags else contextlib.nullcontext():
            return key_order.called(self, functools.partial(self._with_shardings, use), args, kwargs)

    def _with_shardings(self, use: Callable[..., T], /, *args: PyTree, **kwargs: PyTree) -> T:
        if not self._spread:
            try:
                return use(*args, **kwargs)
            except call_shardings.ShardingsNeeded:
                self._spread = True
        with call_shardings.recording_shardings(args, kwargs):
            return use(*args, **kwargs)

    def _traced(self, args: Args, kwargs: Kwargs, fixed: Static | None = None) -> PyTree:
        """Traces the original and rewrites its jaxpr; jit traces this function."""
        options, self._was_traced = resolve(self._explicit), True
        if options.disabled or pipeline.inside.value or no_site_is_allowed():
            return self._as_written(args, kwargs, fixed)
        if compat.is_outermost() and _seeks_nans():
            return self._called(args, kwargs)
        if options.verify is True:
            first_call.demand()
        arrays, static = split_traced(args, kwargs)

        def program_of(*arrays: ArrayLike) -> PyTree:
            return self._as_written(*join(static, arrays), fixed)

        program_of.__signature__ = _ANY_ARRAYS  # type: ignore[attr-defined]
        program_of.__wrapped__ = self._inner  # type: ignore[attr-defined] # the function that JAX's errors name
        try:
            with pipeline.inside(True), rare():
                program, shapes = compat.make_jaxpr_and_shapes(program_of, *arrays)
        except CONCRETE:
            if self._plain is None and getattr(jax.config, "jax_disable_jit", False):  # the function may look at values
                return self._called(args, kwargs)
            raise
        if call_shardings.needs_shardings(program, self._settings):
            raise call_shardings.ShardingsNeeded
        shardings, rewritten = None, program
        try:
            shardings = call_shardings.known(program, args, kwargs, arrays, shapes, self._settings)
        except Exception as error:  # a program that may be sharded must not be taken for one that is not
            if options.strict:
                raise
            text = f"{type(error).__name__}: {error}"
            warn(f"autopallas left a program as it was: partition failed with {text}")
            live = LiveReport(Report(failures=(Failure("partition", text),)))
            pipeline.require(live(), options)
        else:
            rewritten, live = pipeline.rewritten(program, options, not self._dry, shardings, self._disabled)
        self._watch(options, live)
        self._publish(live)
        report = live.unprinted()
        if (report.sites or report.rematerialised or report.failures) and not self._dry:
            reason = disagreement(program, rewritten, arrays, shardings)
            if reason is not None:
                rewritten = _left(program, live, f"it is run by several processes together: {reason}")
                pipeline.require(live(), options)
        if not is_bisecting():
            pipeline.require_certified(rewritten, live.unprinted(), options)
        with paused():
            results = _emit(rewritten, program, live, arrays, options.strict)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    def _as_written(self, args: Args, kwargs: Kwargs, fixed: Static | None) -> PyTree:
        """Calls the function while it is traced, with what is held ``fixed`` among the arguments, if anything."""
        return self._called(args, kwargs) if self._plain is None else self._plain.as_written(args, kwargs, fixed)

    def _called(self, args: Args, kwargs: Kwargs) -> PyTree:
        try:
            return self._inner(*args, **kwargs)
        except Exception as error:
            mark_users_error(error)
            raise

    def _publish(self, report: LiveReport) -> None:
        if is_bisecting():
            return
        if report.counts() or report.unprinted().rematerialised:
            self._replaced = self._unread = True
        with self._lock:
            self._report = report
        at_exit.record(getattr(self._function, "__qualname__", repr(self._function)), report)

    # ------------------------------------------------------------------ compared calls

    def _watch(self, options: Options, report: LiveReport) -> None:
        """Makes the calls of a program count for the option ``verify``, if that is a fraction."""
        if isinstance(options.verify, bool) or self._dry or is_bisecting():
            return
        if self._canary is None:
            from autopallas.verification.canary import Canary

            self._canary = Canary(options.verify)
        report.canary = self._canary.record

    @property
    def _runs_as_it_is(self) -> bool:
        """Whether the function is not compiled, but runs as it is."""
        return self._plain is not None and self._plain.runs_as_it_is

    def _with_options(self, function: Callable[..., T]) -> Optimized[..., T]:
        """Returns another function, optimized with the same options."""
        return Optimized(function, self._explicit)

    @property
    def _looks_inside(self) -> bool:
        """Whether flags inside of arguments are looked for before a call: in the first ones, since another thread may
        just trace a program for integers, and in all where there is such a program."""
        return not self._was_traced or (self._plain is not None and self._plain.knows_names)

    def _repeated(self, args: Args, kwargs: Kwargs) -> _Repeated:
        return _Repeated(self, args, kwargs)

    # ------------------------------------------------------------------ failures

    def _wait_for(self, result: PyTree) -> None:
        """Waits for the first result of a program with sites replaced.  JAX runs asynchronously, so that what fails in
        a run would be raised where a result is read, and nothing could take its place."""
        if not any(map(compat.is_tracer, jax.tree.leaves(result))):
            self._unread = False
            jax.block_until_ready(result)

    def _recovered(self, error: Exception, args: Args, kwargs: Kwargs) -> tuple[R] | None:
        """Returns the result of a failed call if a replaced site was at fault; None if the error is to be raised."""
        if not self._replaced or self._runs_as_it_is or isinstance(error, MEANT) or is_users_error(error):
            return None
        options = resolve(self._explicit)
        leaves = jax.tree.leaves((args, kwargs))
        if options.strict or isinstance(options.implementation, str) or jax.process_count() > 1:
            return None  # one process that runs another program than the others would hang them all
        call = _Repeated(self, args, kwargs)
        if not compat.is_outermost() or any(map(compat.is_tracer, leaves)):
            return None
        if call.spent():
            error.add_note("autopallas cannot repeat this call as it is written: donated arguments are gone.")
            return None
        with first_call.unchecked():
            found = rerun(call, error)
            if found is None:
                return None
            result, blamed = found
            if any(b.suspect and isinstance(options.implementation_for(b.suspect.op), str) for b in blamed):
                return None
            record_failures(blamed)
            at_exit.withdraw(self._report)  # some of the sites in this report could not be run
            self.clear_cache()
            call.trace()  # traces for the next call, and puts what now holds in the report
        self._report.add(*(Failure(b.stage, b.error) for b in blamed if b.suspect is None))
        return (result,)


def _seeks_nans() -> bool:
    """Returns whether JAX looks for the line that made a NaN, for which it repeats a call without jit."""
    sought = any(getattr(jax.config, name, False) for name in ("jax_debug_nans", "jax_debug_infs"))
    return sought and not getattr(jax.config, "jax_disable_jit", False)


_ANY_ARRAYS = inspect.signature(lambda *arrays: None)


@dataclass(frozen=True, slots=True)
class _Repeated:
    """A call of an optimized function that can be repeated."""

    function: Optimized[..., PyTree]
    args: Args
    kwargs: Kwargs

    def _use(self, use: ArrayFunction) -> PyTree:
        function, plain = self.function, self.function._plain
        run = functools.partial(use, function._jit)
        if plain is None:
            return run(*self.args, **self.kwargs)
        if function._run is not function._jit or has_flags(self.args, self.kwargs, function._looks_inside):
            run = functools.partial(plain.call, use)
        return key_order.called(function, run, self.args, self.kwargs)

    def __call__(self) -> PyTree:
        return jax.block_until_ready(self._use(call_jitted))

    def trace(self) -> jax.stages.Traced:
        traced: jax.stages.Traced = self._use(lambda jitted, /, *args, **kwargs: jitted.trace(*args, **kwargs))
        return traced

    def spent(self) -> bool:
        leaves = jax.tree.leaves((self.args, self.kwargs))
        return any(isinstance(x, jax.Array) and not compat.is_tracer(x) and x.is_deleted() for x in leaves)


def _emit(
    rewritten: ClosedJaxpr, program: ClosedJaxpr, report: LiveReport, arrays: Sequence[ArrayLike], strict: bool
) -> Sequence[jax.Array]:
    """Emits the equations of the rewritten program, or of the original where the rewritten one cannot be traced."""
    if rewritten is not program and not strict:
        try:
            return compat.emit(rewritten, arrays)
        except Exception as error:
            reason = one_line(error)
            rewritten = _left(program, report, f"tracing failed: {reason}", Failure("trace", reason))
            warn(f"autopallas left a program as it was: tracing the rewritten one failed with {reason}")
    return compat.emit(rewritten, arrays)


def _left(program: ClosedJaxpr, report: LiveReport, reason: str, *failures: Failure) -> ClosedJaxpr:
    """Returns the original, and enters the reason in the report."""
    report.leave(reason)
    report.add(*failures)
    return program
