"""Faults that the product once had, to be put back one at a time: the random programs have to find each.

A fault is put back by giving a function of the product its old behaviour.  Where that function is gone or has another
name, putting the fault back fails: then the entry here has to follow.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .program import FIRST_RECURRENCE, RandomProgram

__all__ = ["FAULTS", "Fault", "put_back"]


@dataclass(frozen=True)
class Fault:
    """A fault that can be put back.

    Attributes:
      what: what is wrong with it.
      put_back: puts it back, given a function that replaces an attribute.
      concerns: whether a program has what it takes for the fault to show.  Others need not be run to know that it does
        not show in them.
      in_kernels: whether kernels compute otherwise; else programs are recognised otherwise.
      first: the first program of a kind in which it may show.
    """

    what: str
    put_back: Callable[[Replace], None]
    concerns: Callable[[RandomProgram], bool]
    in_kernels: bool = False
    first: int = 0


Replace = Callable[[str, str, Callable[[Any], Any]], None]
"""``replace(module, name, change)``: sets the attribute, whose name may have dots, to ``change(old)``, in every module
that has it by that name."""


@contextlib.contextmanager
def put_back(name: str) -> Iterator[None]:
    """Has a fault in this process, as long as the context lasts."""
    undone: list[tuple[Any, str, Any]] = []

    def replace(module: str, path: str, change: Callable[[Any], Any]) -> None:
        holder = importlib.import_module(f"autopallas.{module}")
        *outer, last = path.split(".")
        for part in outer:
            holder = getattr(holder, part)
        old = vars(holder)[last]
        new = change(old)
        holders = [holder]
        if not outer:
            ours = [m for n, m in list(sys.modules.items()) if n.split(".")[0] == "autopallas" and m is not holder]
            holders += [m for m in ours if vars(m).get(last) is old]
        for one in holders:
            undone.append((one, last, old))
            setattr(one, last, new)

    # What is bound at import has to be bound before it is replaced.
    for module in (
        "optimize",
        "patterns.attention.recognise",
        "patterns.cross_entropy.recognise",
        "patterns.grouped_matmul.recognise",
        "patterns.recurrence.recognise",
    ):
        importlib.import_module(f"autopallas.{module}")
    for operation in ("attention", "cross_entropy", "grouped_matmul"):
        importlib.import_module(f"autopallas.kernels.{operation}.xla")
    try:
        FAULTS[name].put_back(replace)
        yield
    finally:
        for holder, last, old in reversed(undone):
            setattr(holder, last, old)


def _cast_before_rows(replace: Replace) -> None:
    """``exp((s - m).astype(bf16))`` is read as ``exp(s.astype(bf16) - m)``."""

    def change(old: Any) -> Any:
        def take_rows_out(self: Any, ref: Any, *further: Any) -> Any:
            found = old(self, ref, *further)
            if found.rows and self.scope.name(ref) == "convert_element_type":
                return found._replace(x=self.convert(found.x, self.scope.graph.dtype(ref.value)))
            return found

        return take_rows_out

    replace("patterns.softmax", "Softmax._take_rows_out", change)


def _shift_of_masked_keys(replace: Replace) -> None:
    """Keys of weight 0 raise the maximum that is subtracted."""

    def change(old: Any) -> Any:
        return lambda spec, weights, x, here: old(spec, [w for w in weights if w.kind == "where"], x, here)

    replace("kernels.attention.tile_values", "heights", change)


def _positions_of_any_dtype(replace: Replace) -> None:
    """Positions count in any dtype, whether it holds them or not."""
    replace("numerics.casts", "counts_exactly", lambda old: lambda dtype, largest: True)


def _rounded_to_the_operand(replace: Replace) -> None:
    """Probabilities are rounded to the dtype of the values, though the original promotes these."""
    replace(
        "kernels.attention.tile_values", "narrow", lambda old: lambda p, read, v, bounded: old(p, v.dtype, v, bounded)
    )


def _rounded_rows_cancel(replace: Replace) -> None:
    """``m`` and ``bfloat16(m)`` are one term."""

    def change(old: Any) -> Any:
        def summands(self: Any, ref: Any, *further: Any) -> Any:
            operands = self.space.operands(ref)
            if operands and self.scope.name(ref) == "convert_element_type" and self._rounds(ref, operands[0]):
                return self.linear(operands[0], *further)
            return old(self, ref, *further)

        return summands

    replace("patterns.row_terms", "RowTerms._summands", change)


def _rounded_maximum(replace: Replace) -> None:
    """A rounded maximum counts as the maximum, so that a floor under the sum seems to have no effect."""

    def change(old: Any) -> Any:
        return lambda self, row, argument, about=True: old(self, row, argument, True)

    replace("patterns.row_terms", "RowTerms._is_maximum", change)


def _integers_through_floats(replace: Replace) -> None:
    """Constants are floats, which 64-bit integers do not fit into."""

    def change(old: Any) -> Any:
        def scalar(value: Any) -> float | None:
            found = old(value)
            return None if found is None else float(found)

        return scalar

    replace("patterns.expressions", "_scalar", change)


def _fill_of_the_inner_dtype(replace: Replace) -> None:
    """A fill is taken for -inf by the dtype in which it was made, though the exponential is of a wider one."""

    def change(old: Any) -> Any:
        casts = importlib.import_module("autopallas.numerics.casts")

        def take_rows_out(self: Any, ref: Any, nothing: float, *further: Any) -> Any:
            if nothing != -float("inf"):
                nothing = casts.exponential_underflows_below(self.scope.graph.dtype(ref.value))
            return old(self, ref, nothing, *further)

        return take_rows_out

    replace("patterns.softmax", "Softmax._take_rows_out", change)


def _zero_over_zero(replace: Replace) -> None:
    """0 / x is 0, whatever x is."""

    def change(old: Any) -> Any:
        def folded(name: str, given: Any, *further: Any) -> Any:
            return 0.0 if name == "div" and given[0] == 0 else old(name, given, *further)

        return folded

    replace("patterns.mixture_of_experts.choice", "_folded", change)
    replace("patterns.mixture_of_experts.choice", "Choices._left_out", lambda old: lambda self, *of: True)


def _nothing_assumed(replace: Replace) -> None:
    """Where no maximum is subtracted, scores are taken to be small, and no site says so."""
    replace("patterns.attention.site", "ProvedAttention.assumptions", lambda old: property(lambda self: ()))


def _gates_without_the_carry(replace: Replace) -> None:
    """A gate of the carried value is taken for one of zeros."""

    def change(old: Any) -> Any:
        sums = importlib.import_module("autopallas.patterns.recurrence.sums")

        def equation(self: Any, one: Any) -> None:
            old(self, one)
            if one.primitive.name == "logistic" and hasattr(self.values[one.outvars[0]], "reason"):
                axes = (None,) * one.outvars[0].aval.ndim
                self.values[one.outvars[0]] = sums.Sum(axes, (sums.Part(0.5),))

        return equation

    replace("patterns.recurrence.interpret", "Interpretation._equation", change)


def _swapped_product(replace: Replace) -> None:
    """A vector times the state is taken for the state times the vector, where the state is square."""

    def change(old: Any) -> Any:
        def contracted(equation: Any, read: Any, labels: Any) -> Any:
            numbers = equation.params["dimension_numbers"]
            (left, right), batches = numbers
            for place, of in ((0, left), (1, right)):
                shape = equation.invars[place].aval.shape
                if not read[place].is_free and len(shape) == 2 and shape[0] == shape[1] and len(of) == 1:
                    turned = [left, right]
                    turned[place] = (1 - of[0],)
                    params = {**equation.params, "dimension_numbers": (tuple(turned), batches)}
                    return old(equation.replace(params=params), read, labels)
            return old(equation, read, labels)

        return contracted

    replace("patterns.recurrence.interpret", "_contracted", change)
    interpret = importlib.import_module("autopallas.patterns.recurrence.interpret")
    replace(
        "patterns.recurrence.interpret", "RULES", lambda old: {**old, "dot_general": vars(interpret)["_contracted"]}
    )


def _has(*features: str) -> Callable[[RandomProgram], bool]:
    """All of some features; one of several where they are separated by a bar."""
    return lambda program: all(any(one in program.features for one in f.split(" | ")) for f in features)


def _chose(*endings: str) -> Callable[[RandomProgram], bool]:
    """A choice with a name that ends like that, other than the plain one."""
    return lambda program: any(name.endswith(endings) for name in program.choices)


FAULTS = {
    "A1": Fault(
        "a cast after a subtracted row is moved before it", _cast_before_rows, _chose("difference cast", ".cast"),
    ),
    "A2": Fault(
        "keys whose weight is 0 raise the maximum that is subtracted", _shift_of_masked_keys,
        _has("weights: float mask | weights: random mask"), in_kernels=True,
    ),
    "A3": Fault(
        "experts are counted in a dtype that does not hold them", _positions_of_any_dtype,
        _has("many experts", "positions"),
    ),
    "A4": Fault(
        "probabilities are rounded to the values' dtype", _rounded_to_the_operand, _chose(".v", ".k", ".q", ".dtype"),
        in_kernels=True,
    ),
    "A5": Fault(
        "a row and the same row rounded cancel", _rounded_rows_cancel,
        _chose("outer max cast", "lse cast", "other max", "row cast", "max cast"),
    ),
    "A6": Fault(
        "a floor under the denominator is dropped though it acts", _rounded_maximum,
        lambda p: _chose("max cast", "coarse maximum")(p) and _has("guard: floor | coarse maximum")(p),
    ),
    "A7": Fault("integers of 64 bits pass through float", _integers_through_floats, _has("x64", "limits")),
    "A8": Fault(
        "a fill is taken for -inf before a cast to a wider dtype", _fill_of_the_inner_dtype,
        _has("filled before a wider cast"),
    ),
    "A9": Fault(
        "0 / 0 in the gates of a token without expert is 0", _zero_over_zero,
        _has("tokens without experts", "gates: divided | gates: reciprocal"),
    ),
    "R1": Fault(
        "a gate that reads the carried value is hoisted out of the loop", _gates_without_the_carry,
        _has("update: read by a gate"), first=FIRST_RECURRENCE,
    ),
    "R2": Fault(
        "a loop reads the columns of its state and not the rows", _swapped_product, _has("state: matrix", "square"),
        first=FIRST_RECURRENCE,
    ),
    "A10": Fault("NaN of large scores becomes finite, and nothing says so", _nothing_assumed, _has("no maximum")),
}  # fmt: skip
