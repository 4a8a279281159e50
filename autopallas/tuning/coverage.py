"""Tells whether a table's row holds for a site: it was measured at one batch size, for one spelling, on one processor.

A table's key names what block sizes depend on.  On CPUs the original's own speed depends on more.  XLA compiles some
originals to one kernel and others to several, depending on their batch axes and the order of their products, and
processors and versions of JAX differ in how they multiply 16-bit numbers.  A row says nothing about what was not varied
when it was measured.

An operation declares what its rows depend on by a function ``conditions(match)`` in its module of tuned block sizes;
without one its rows depend only on the processor.  On GPUs and TPUs rows are of the operation's cases, and hold for no
site that computes more than these.  On GPUs a row was measured where the whole device was busy; what is left of its
gain at a site that is smaller, or has more independent parts, an operation bounds by ``share_of_gain(match, row,
device)``, on TPUs too.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from string import ascii_lowercase
from typing import TypeVar

import jax.numpy as jnp
import numpy as np

from autopallas.compat import ClosedJaxpr
from autopallas.sites.device import Device
from autopallas.sites.operation import operation_named
from autopallas.sites.workload import Workload
from autopallas.tuning import processor
from autopallas.tuning.row import jax_line, running_jax
from autopallas.tuning.table import Row

S = TypeVar("S")

__all__ = ["Conditions", "conditions_of", "form_of", "gap", "gap_of_work", "products", "stated"]

REMEDY = 'AUTOPALLAS_AUTOTUNE=1 measures it where it runs, objective="always" replaces without evidence'
"""Advice to the user about a site that no row holds for."""
_UNKNOWN = "unknown"
"""The extensions in a row that was measured where the processor does not say which it has."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions that a site's original depends on, beyond the key of its row.

    Attributes:
      batch: how many independent parts it has, all leading axes together; 1 if the operation has no such axis.
      spelling: empty if its products are those of the operation's cases (``cases.py``); otherwise these products.
      holds_from: the gain from which a row holds for another batch size or spelling than its own: 0.0 for all of
        them, infinity for none.
      elsewhere_from: the gain from which a row holds for other vector extensions than its own.
      mixed_from: the gain from which a row holds for a site of whose floats some have 16 bits and the widest have more,
        on another processor that multiplies the latter alike.
      form: what the invariants of a row end in that was measured for originals which compile as this one does; empty
        if they compile as the operation's cases at batch size 1.  Such a row holds for all of these originals; another
        one is asked for where there is none.
      form_on_gpus: whether rows of GPUs have that form too.
      with_jax: whether ``elsewhere_from`` is asked of another minor version of JAX too.
      beyond: what it computes beyond the operation's cases, so that their rows say nothing of it on any device; empty
        if nothing.
      unlike: how its original differs from those of all rows, such as by the order of an array's axes; empty if it does
        not.
      unlike_from: the gain from which a row holds for such an original.
      slight: why it computes too little for rows of a CPU, of whose gain less is left there; empty if it does not.
    """

    batch: int = 1
    spelling: str = ""
    holds_from: float = 0.0
    elsewhere_from: float = 0.0
    mixed_from: float = math.inf
    form: str = ""
    form_on_gpus: bool = False
    with_jax: bool = False
    beyond: str = ""
    unlike: str = ""
    unlike_from: float = math.inf
    slight: str = ""


def conditions_of(match: Workload) -> Conditions:
    """Returns the conditions of a match, as its operation declares them."""
    tables = operation_named(match.op).part("tuned_block_sizes")
    found: Conditions = tables.conditions(match) if hasattr(tables, "conditions") else Conditions()
    return found


def form_of(match: Workload, device: Device) -> str:
    """Returns what the invariants of a match's own row end in: on devices other than CPUs nothing, as a rule."""
    asked = conditions_of(match)
    return asked.form if device.platform == "cpu" or (device.platform == "gpu" and asked.form_on_gpus) else ""


_LEAST_OF_SHARE = 2.0
"""Smallest gain that the bound has to leave: the original of a small site may fit into a GPU's caches."""


def _gap_of_size(row: Row[object], match: Workload, device: Device) -> str:
    tables = operation_named(match.op).part("tuned_block_sizes")
    share: float = tables.share_of_gain(match, row, device) if hasattr(tables, "share_of_gain") else 1.0
    if share >= 1.0 or row.assured_gain * share >= _LEAST_OF_SHARE:
        return ""
    left = f"of its {row.assured_gain:.3g}x, {row.assured_gain * share:.2g}x may be left"
    return f"no row for this size: the table's is of a {device.platform.upper()}'s usual work, and {left}"


def gap(row: Row[object], match: Workload, device: Device, own_form: bool = False) -> str:
    """Returns why a row of the table does not hold for a match, or an empty string.  The match needs ``op``, ``spec``,
    ``direction`` and ``original``.

    Args:
      row: the row.
      match: the site.
      device: where it will run.
      own_form: whether the row was measured for originals of the site's own form.
    """
    asked = conditions_of(match)
    if device.platform != "cpu":
        if asked.beyond:
            return f"no row for sites {asked.beyond}: the table's is of a site that computes less"
        return _gap_of_size(row, match, device)
    if row.assured_gain < asked.holds_from and not own_form:
        if (asked.batch > 1) != (row.batch > 1):
            measured = f"the table's was measured at B={row.batch}, and this site has B={asked.batch}"
            return f"no row for this batch size: {measured}"
        if asked.spelling != row.spelling:
            measured = f"the products {row.spelling}" if row.spelling else "the usual einsum"
            return (
                f"no row for this spelling, of which XLA may make a faster kernel: the table's was measured against "
                f"{measured}, and this site has the products {asked.spelling or 'of the usual einsum'}"
            )
    if own_form and _axes(row.spelling) > max(_USUAL_AXES, _axes(asked.spelling)):
        measured = f"the table's was measured against the products {row.spelling}"
        return (
            f"no row for this spelling, of which XLA may make a faster kernel: {measured}, and this site has "
            f"{asked.spelling or 'those of the usual einsum'}"
        )
    if asked.unlike and row.assured_gain < asked.unlike_from:
        return f"no row for {asked.unlike}: those of the table gain less than {asked.unlike_from:.3g}x without"
    here, running = processor.vector_extensions(), running_jax()
    other_line = row.jax_line != jax_line(running)
    alike_in_float32 = processor.alike_in_float32(row.measured_with, here or _UNKNOWN)
    mixed = alike_in_float32 and not _is_narrow(match.spec.widest_dtype) and row.assured_gain >= asked.mixed_from
    if _narrow(match) and not mixed and not processor.alike(row.measured_with, here):
        decided = "no row for these vector extensions, which decide the speed of 16-bit numbers"
    elif other_line and (
        _is_narrow(match.spec.widest_dtype) or (asked.with_jax and row.assured_gain < asked.elsewhere_from)
    ):
        return f"no row for this version of JAX: the table's was measured with {row.versions}, and this is {running}"
    elif not alike_in_float32 and row.assured_gain < asked.elsewhere_from:
        decided = "no row for these vector extensions, on which the gain depends"
    else:
        return ""
    return (
        f"{decided}: the table's was measured with {row.measured_with}, and this machine has {here or 'unknown ones'}"
    )


_USUAL_AXES = 4
"""Axes of the usual products.  XLA makes one kernel of attention that is spelled with as many, and of more it does not:
a row of those does not hold for the others, of its form or not.  At B=1 N=2 T=4096, spelled with matmul, the form with
heads on two axes had 0.89 of the original's speed (AVX-512, JAX 0.10.2) where such a row gains 2.1."""


def _axes(spelling: str) -> int:
    """Returns the most axes that an operand of products in einsum notation has.

    Example:
      >>> _axes("abcde,abfe->abcdf; ab,bc->ac"), _axes("")
      (5, 0)
    """
    return max(len(operand) for operand in re.split(r"[^a-z]+", spelling))


def gap_of_work(match: Workload, device: Device) -> str:
    """Returns why no row of a CPU's table holds for a match that computes too little, or an empty string."""
    slight = conditions_of(match).slight if device.platform == "cpu" else ""
    return slight and f"no row for so little work: {slight}"


def stated(row: Row[S], match: Workload, device: Device) -> Row[S]:
    """Adds to a row that was measured for a match on this machine the conditions under which it holds."""
    if device.platform != "cpu":
        return row
    asked = conditions_of(match)
    extensions = processor.vector_extensions() or _UNKNOWN
    return dataclasses.replace(row, batch=asked.batch, extensions=extensions, spelling=asked.spelling)


def products(original: ClosedJaxpr) -> str:
    """Returns the matrix products of a closed jaxpr in einsum notation, in their order.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> x = jnp.ones((2, 3))
      >>> products(jax.make_jaxpr(lambda x: (x @ x.T) @ x)(x))
      'ab,bc->ac; ab,bc->ac'
    """
    found = []
    for equation in getattr(original, "eqns", ()):
        if equation.primitive.name == "dot_general":
            (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
            shared = dict(zip((*right, *right_batch), (*left, *left_batch), strict=True))
            ranks = [len(v.aval.shape) for v in equation.invars]
            first = ascii_lowercase[: ranks[0]]
            further = iter(ascii_lowercase[ranks[0] :])
            second = "".join(first[shared[i]] if i in shared else next(further) for i in range(ranks[1]))
            result = "".join(
                (
                    *(first[i] for i in left_batch),
                    *(first[i] for i in range(ranks[0]) if i not in (*left, *left_batch)),
                    *(second[i] for i in range(ranks[1]) if i not in shared),
                )
            )
            found.append(f"{first},{second}->{result}")
    return "; ".join(found)


def _narrow(match: Workload) -> bool:
    """Returns whether any dtype of a spec, or of the operands if the spec names none, is of floats of 16 bits or fewer,
    so that products may be of such numbers."""
    values = (getattr(match.spec, field.name) for field in dataclasses.fields(match.spec))
    dtypes = [value for value in values if isinstance(value, np.dtype)] or [a.dtype for a in match.original.in_avals]
    return any(map(_is_narrow, dtypes))


def _is_narrow(dtype: np.dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize <= 2
