"""Calls plain functions, which may take and return what ``jax.jit`` does not, or look at the values of numbers.

Such a call is compiled in the first way that works, with nothing, more, or all but arrays held fixed; otherwise the
function runs as it is written.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import jax
import numpy as np

from autopallas import compat, key_order
from autopallas.arguments import (
    Static,
    Untraceable,
    Watched,
    given_back,
    has_traced_parts,
    in_objects,
    is_flag,
    is_number,
    is_quantity,
    split,
    told_apart,
    traceable,
    with_arguments,
)
from autopallas.closed_over import ClosedOver, reads_iterator
from autopallas.compat import ArrayFunction, PyTree
from autopallas.errors import one_line, warn
from autopallas.fallback.rerun import is_users_error, mark_users_error
from autopallas.faults import MEANT
from autopallas.flags import MayHaveFlags, MayHaveNames, as_jit_traces, may_have_flags, may_have_names
from autopallas.held_jit import HeldJit, held_jit
from autopallas.options import resolve
from autopallas.report import Failure, Report
from autopallas.report.live_report import LiveReport

if TYPE_CHECKING:
    from autopallas.optimized import Optimized

__all__ = ["CONCRETE", "Args", "Kwargs", "PlainCalls", "call_jitted"]

T = TypeVar("T")
Args: TypeAlias = tuple[PyTree, ...]
Kwargs: TypeAlias = dict[str, PyTree]

CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""Errors that jit raises where a function looks at the value of an argument."""

_OF_ARGUMENTS = (TypeError, OverflowError)
"""Errors that jit raises itself for arguments that it does not take, such as integers of more than 32 bits."""

_MOST_HELD = 32
"""For how many values of arguments that are held fixed a function is compiled."""

_FIRST_HELD = 4
"""For how many numbers inside of objects it is compiled that are others in each call; for further ones, where as many
calls came back to numbers that it was compiled for."""


class _Changing(Untraceable):
    """Raised for a function that changes its object: in each call, or in the first one, which computes and keeps what
    later ones find."""


class PlainCalls:
    """The calls of one plain function.

    Attributes:
      runs_as_it_is: whether jit cannot trace the function, which runs as it is from then on.
      knows_names: whether it was looked up if integers inside of other arguments have names, which a trace does not
        tell.
      inside: what the function holds of jit, optimized, where the whole cannot be traced.
    """

    def __init__(self, owner: Optimized[..., PyTree]):
        self._weak_owner = weakref.ref(owner)
        self.runs_as_it_is = False
        self.knows_names = False
        self.inside: Optimized[..., PyTree] | None = None
        self._holder = held_jit(owner._function)
        self._ways: dict[Hashable, tuple[int, Exception | None]] = {}
        """Kinds of calls that jit cannot trace: the way in which they are made, and jit's error until one works."""
        self._held: set[Static] = set()
        self._came_back = 0
        """How many calls had what was held fixed before."""
        self._told: set[str] = set()
        """Why calls run as they are that would be compiled for further values: what was said of that."""
        self._gives_back = False
        """Whether results have leaves of the arguments that no trace can follow."""
        self._traced_by: set[int] = set()
        """Threads in which it is being traced, and may call itself."""
        self._settles = False
        """Whether the last trace found that the function changes its object, which its next call may find done."""

    def _owner(self) -> Optimized[..., PyTree]:
        """Returns the optimized function, which is called, and therefore there."""
        owner = self._weak_owner()
        assert owner is not None
        return owner

    def clear_cache(self) -> None:
        """Forgets what calls were compiled for."""
        self._held.clear()
        self._told.clear()
        self._came_back = 0
        if self.inside is not None:
            self.inside.clear_cache()

    def refuse_flags(self, args: Args, kwargs: Kwargs) -> None:
        """Aborts a trace by jit that is given what may be flags, or for the first time what may have names.

        Raises:
          MayHaveFlags, MayHaveNames: it is.
        """
        if may_have_flags(args, kwargs):
            raise MayHaveFlags
        if not self.knows_names and may_have_names(args, kwargs):
            raise MayHaveNames

    def as_written(self, args: Args, kwargs: Kwargs, fixed: Static | None) -> PyTree:
        """Calls the function while it is traced, with what is held ``fixed`` among the arguments, if anything.

        Raises:
          Untraceable: it does what would be lost.
        """
        with key_order.as_given(self._owner(), args, kwargs):
            own = threading.get_ident()
            added = {own} - self._traced_by
            self._traced_by |= added
            try:
                return self._as_written(args, kwargs, fixed)
            finally:
                self._traced_by -= added

    def _as_written(self, args: Args, kwargs: Kwargs, fixed: Static | None) -> PyTree:
        if reads_iterator(self._owner()._inner):
            raise Untraceable("it reads an iterator, which gives it something else in each call")
        watched, around = Watched(args, kwargs), ClosedOver(self._owner()._inner)
        try:
            result = self._owner()._called(args, kwargs)
            if inspect.iscoroutine(result):
                result.close()
            try:
                leaves, structure = jax.tree.flatten(result)
            except Exception as error:
                raise Untraceable(f"it returns what jit cannot take apart: {one_line(error)}") from error
            if has_traced_parts(structure):
                raise Untraceable("it returns an object with a traced array among the parts that it holds fixed")
            if not all(map(traceable, leaves)):
                if fixed is None:
                    raise Untraceable("it returns something that is neither an array nor a number")
                result = given_back(result, fixed)
                self._gives_back = True
            if watched.changed():
                raise Untraceable(
                    "it changes its arguments, which would be lost; let it return what is new, or optimize what "
                    "jax.jit makes of it, or the jit of the library whose objects it changes"
                )
            if around.changed():
                raise _Changing(
                    "it changes the object that it belongs to, or keeps what it computes in what it closes over, which "
                    "would be lost; let it return what is new, or optimize what jax.jit makes of it"
                )
        except Exception:
            watched.restore()
            around.restore()
            raise
        self._settles = False
        return result

    def may_be_ours(self, error: Exception, args: Args, kwargs: Kwargs) -> bool:
        """Returns whether a plain function failed only because jit compiled it, and may work when called as it is.

        A function that is traced may raise anything: ``x[:n]`` an IndexError where n is traced, a check of its own
        arguments a ValueError, what JAX's arrays have and traced ones have not an AttributeError.
        """
        if isinstance(error, (*MEANT, FloatingPointError)) or is_users_error(error, self._owner()):
            return False
        if isinstance(error, (*CONCRETE, Untraceable)):
            return True
        try:
            leaves = jax.tree.leaves((args, kwargs))
        except Exception:  # as of a dictionary whose keys have no order
            return True
        foreign = any(map(_is_foreign, leaves))
        fixed = foreign or any(map(is_number, leaves))
        if is_users_error(error):
            return fixed or compat.is_outermost()
        return (fixed and isinstance(error, _OF_ARGUMENTS)) or (foreign and isinstance(error, ValueError))

    def call_again(self, error: Exception, args: Args, kwargs: Kwargs) -> PyTree:
        """Calls a plain function that jit failed to trace, as :meth:`call` does from now on."""
        try:
            kind = _kind(split(args, kwargs)[1])
        except Exception:  # jit cannot take them apart
            kind = None
        if kind is not None:
            self._ways.setdefault(kind, (1, error))
        self._owner()._run = functools.partial(self.call, call_jitted)
        try:
            return self._owner()(*args, **kwargs)
        except Exception:
            if not any(tried is None for _, tried in list(self._ways.values())):  # nothing was learned of it
                self._owner()._run = self._owner()._jit
            raise
        finally:
            if self._ways.get(kind, (0, None))[1] is not None:
                self._ways.pop(kind, None)

    def call(self, use: ArrayFunction, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls a plain function, which may take and return what jit does not, or look at the values of numbers.

        Compiles it in the first way of :meth:`_attempts` that works; otherwise runs it as it is.
        """
        if self.runs_as_it_is:
            return self._uncompiled(use, args, kwargs)
        self.knows_names = True  # each call is looked through
        try:
            arrays, fixed = split(args, kwargs)
        except Exception as error:
            untraceable = Untraceable(f"it is given what jit cannot take apart: {one_line(error)}")
            return self._run_as_it_is(use, untraceable, args, kwargs)
        kind = _kind(fixed)
        first, failed = self._ways.get(kind, (0, None))  # each trace that fails takes as long as another
        try:
            for way, static, traced in self._attempts(args, kwargs, arrays, fixed):
                if way < first:
                    continue
                try:
                    if static is None:  # as part of the key: another thread may just call it with a flag in that place
                        with as_jit_traces(True) if may_have_flags(args, kwargs) else contextlib.nullcontext():
                            result = use(self._owner()._jit, *args, **kwargs)
                    elif self._holds(static := told_apart(static)):
                        result = use(self._owner()._fixed, static, *traced)
                        if self._gives_back:
                            result = with_arguments(result, static)
                    else:
                        failed = None  # too many are held: this one is called as it is, and the function stays compiled
                        break
                except Exception as error:
                    unhashable = static is not None and isinstance(error, TypeError)
                    if not unhashable and not self.may_be_ours(error, args, kwargs):
                        raise
                    failed = error
                    continue
                if kind is not None:
                    self._ways[kind] = way, None
                return result
            if failed is not None:
                return self._run_as_it_is(use, failed, args, kwargs)
            return self._uncompiled(use, args, kwargs)
        finally:
            failed = None  # whose traceback has this frame, and with it the arguments

    def _attempts(
        self, args: Args, kwargs: Kwargs, arrays: Sequence[PyTree], fixed: Static
    ) -> Iterator[tuple[int, Static | None, Sequence[PyTree]]]:
        """Yields the ways to compile a call, with what each holds fixed (None: nothing) and the arrays that it traces.

        Ways are numbered: by jit, where no argument is a flag, nor an object has a number with a fraction; with what
        jit does not take held fixed, and these; with everything that is not an array held fixed.
        """
        if not _has_quantities(fixed) and not any(map(is_flag, fixed.kinds)):
            yield 0, None, ()
        traced, fewer = split(args, kwargs, numbers=True)
        if fewer.kinds != fixed.kinds and any(kind is not None for kind in fewer.kinds):
            yield 1, fewer, traced
        if any(kind is not None for kind in fixed.kinds):
            yield 2, fixed, arrays

    def _uncompiled(self, use: ArrayFunction, args: Args, kwargs: Kwargs) -> PyTree:
        """Calls the function as it is, or what it holds of jit optimized; nothing where it is not to be called."""
        if use is not call_jitted:
            return None
        if self._holder is None or self.inside is None:
            return self._owner()._function(*args, **kwargs)
        return self._holder.call(self.inside, *args, **kwargs)

    def _run_as_it_is(self, use: ArrayFunction, error: Exception, args: Args, kwargs: Kwargs) -> PyTree:
        """Calls a plain function that cannot be traced, and runs it as it is from now on.

        Raises:
          Exception: the function's own error; what was learned of it is nothing then.
        """
        runs = use is call_jitted
        if runs and isinstance(error, _Changing) and self._may_settle():
            self._settles, self._owner()._run = True, self._owner()._jit
            return self._owner()._function(*args, **kwargs)
        perhaps_own = not isinstance(error, (*CONCRETE, Untraceable))
        if perhaps_own and threading.get_ident() in self._traced_by:
            raise error  # the call around it is made again, and this one too
        called, result = False, None
        if self._holder is not None and (runs or self._owner()._dry):
            inside, result = self._by_what_it_holds(self._holder, args, kwargs)
            if inside._was_traced:
                return result
            called = True  # and did not call what it holds
        elif perhaps_own and runs:
            called, result = True, self._by_itself(args, kwargs)
        elif perhaps_own and not (
            isinstance(error, _OF_ARGUMENTS) and any(not traceable(leaf) for leaf in jax.tree.leaves((args, kwargs)))
        ):
            raise error
        self.runs_as_it_is = True
        self._say_why(error)
        return self._owner()._function(*args, **kwargs) if runs and not called else result

    def _may_settle(self) -> bool:
        """Returns whether the next call of a function that changes its object may find that done."""
        return self._holder is None and not self._settles and not resolve(self._owner()._explicit).strict

    def _by_itself(self, args: Args, kwargs: Kwargs) -> PyTree:
        """Calls the function as it is; its errors are the user's."""
        try:
            return self._owner()._function(*args, **kwargs)
        except Exception as error:
            mark_users_error(error, self._owner())
            raise

    def _by_what_it_holds(
        self, holder: HeldJit[..., PyTree], args: Args, kwargs: Kwargs
    ) -> tuple[Optimized[..., PyTree], PyTree]:
        """Calls the function with what it holds of jit optimized, or traces that alone where nothing is to run.

        Returns:
          What it holds, optimized, and the result.
        """
        self.runs_as_it_is, inside, result = True, self._inside_of(holder), None
        try:
            if self._owner()._dry:
                holder.traced(inside.eval_shape, *args, **kwargs)
            else:
                result = holder.call(inside, *args, **kwargs)
        except Exception as error:
            self.runs_as_it_is, self.inside = False, None
            mark_users_error(error, self._owner())
            raise
        return inside, result

    def _say_why(self, error: Exception) -> None:
        """Reports and warns that the function runs as it is written.

        Raises:
          Exception: ``error``, under ``strict``.
        """
        reason = str(error) if isinstance(error, Untraceable) else one_line(error)
        reason = f"as it is written, since jax.jit cannot trace it: {reason}"
        self._owner()._publish(LiveReport(Report(failures=(Failure("trace", f"the function runs {reason}"),))))
        if resolve(self._owner()._explicit).strict:
            raise error
        if not self._owner()._dry:
            warn(f"autopallas runs {self._owner()._function!r} {reason}")

    def inspects(self, name: str) -> bool:
        """Returns whether the function holds a jit function, and has a method of this name, such as ``lower``."""
        return self._holder is not None and callable(getattr(self._owner()._function, name, None))

    def inspected(self, name: str, args: Args, kwargs: Kwargs) -> PyTree:
        """Calls such a method, with what the function holds of jit optimized."""
        assert self._holder is not None
        method = getattr(self._owner()._function, name)
        return self._holder.while_held(self._inside_of(self._holder), method, *args, **kwargs)

    def _inside_of(self, holder: HeldJit[..., PyTree]) -> Optimized[..., PyTree]:
        with self._owner()._lock:  # threads that call it at the same time share one
            inside = self.inside or self._owner()._with_options(holder.jitted)
            inside._dry = self._owner()._dry
            self.inside = inside
        return inside

    def _holds(self, static: Static) -> bool:
        """Returns whether a call is to be compiled with its ``static`` part held fixed.

        A number that is another one in each call, such as the step of a training, would have the program compiled in
        each of them.
        """
        if static in self._held:
            self._came_back += 1
            return True
        if not compat.is_outermost():
            return True
        many = len(self._held)
        if many >= _MOST_HELD:
            self._tell(f"{_MOST_HELD} different values of arguments that are not arrays and that it looks at")
        elif many >= _FIRST_HELD and self._came_back < many and _has_quantities(static):
            self._tell("several numbers inside of its arguments, which are others in each call")
        else:
            self._held.add(static)
            return True
        return False

    def _tell(self, values: str) -> None:
        if values not in self._told:
            self._told.add(values)
            reason = (
                f"it was compiled for {values}; give it numbers that change as arrays, and compare them by jnp.where "
                "or jax.lax.cond"
            )
            self._owner()._report.add(Failure("trace", f"further calls run as they are: {reason}"))
            warn(f"autopallas runs further calls of {self._owner()!r} as they are: {reason}")


def _is_foreign(leaf: object) -> bool:
    """Returns whether an argument is neither a number nor an array of JAX or NumPy itself, such as one with a mask, for
    which jit may raise a ValueError too."""
    known = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.generic, bool, int, float, complex))
    return not traceable(leaf) or not (known or type(leaf) is np.ndarray)


def _has_quantities(fixed: Static) -> bool:
    """Returns whether a call is given objects with numbers that have a fraction.

    They are held fixed, since a library may tell its parameters from them by ``isinstance``.
    """
    if not any(map(is_quantity, fixed.kinds)):
        return False
    inside = zip(fixed.kinds, in_objects(fixed.structure), strict=True)
    return any(is_inside and is_quantity(kind) for kind, is_inside in inside)


def _kind(static: Static) -> Hashable:
    """Returns what calls have in common that jit can trace, or cannot; None where their structure has no hash."""
    kind = static.structure, static.kinds
    try:
        hash(kind)
    except TypeError:
        return None
    return kind


def call_jitted(jitted: Callable[..., T], /, *args: PyTree, **kwargs: PyTree) -> T:
    """Calls a jit function: the use of it that a call is."""
    return jitted(*args, **kwargs)
