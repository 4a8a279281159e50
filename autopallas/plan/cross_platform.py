"""Plans a site again when its program is lowered for another device than it was planned for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import jax

from autopallas import compat
from autopallas.compat import ArrayFunction, ClosedJaxpr, Dtype, PyTree, Shaped
from autopallas.errors import UnsupportedError
from autopallas.plan.choose_implementation import evaluate_candidates
from autopallas.plan.decision import Decision
from autopallas.sites.calls import SiteDescription, kernel_backward, kernel_forward
from autopallas.sites.device import Device
from autopallas.sites.interpret import interpretation, settled
from autopallas.sites.sharded_site import ShardedSite
from autopallas.sites.spec import SiteSpec
from autopallas.tuning.coverage import products
from autopallas.tuning.lookup import Choice, of_table

__all__ = ["replan_for"]

Types = tuple[tuple[tuple[int, ...], Dtype], ...]
"""(shape, dtype) of each operand."""


class _Original:
    """A site's original, compared by its products, since table rows depend on nothing else of it."""

    def __init__(self, jaxpr: ClosedJaxpr):
        self.jaxpr, self.products = jaxpr, products(jaxpr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Original) and self.products == other.products

    def __hash__(self) -> int:
        return hash(self.products)


@dataclass(frozen=True, slots=True, eq=False)
class _Subject:
    """The part of a match that a table look-up needs."""

    op: str
    spec: SiteSpec
    direction: Literal["forward", "forward+backward"]
    original: ClosedJaxpr

    @property
    def passes(self) -> tuple[_Subject, ...]:
        return (self,)


def replan_for(
    decision: Decision,
    device: Device,
    site: SiteDescription,
    original: ClosedJaxpr,
    active: Sequence[int] | None = None,
) -> Decision:
    """Returns the decision for another device than that of ``decision``, from tables and support rules alone.

    A kernel that cannot be lowered for the device is skipped here, while the next one can still be chosen.

    Args:
      decision: the decision for the device that the program was planned for.
      device: the device that it is lowered for; its kind is "" where only the platform is known.
      site, original: the parameters of the site's primitive.
      active: for a backward, the positions of the operands whose gradients it returns; None for a forward.

    Raises:
      UnsupportedError: a single implementation was asked for by name, and it does not work on this device.
    """
    given: Sequence[Shaped] = original.in_avals
    found: Sequence[Shaped] = original.out_avals
    if isinstance(site, ShardedSite):  # one part is lowered, since the devices are not known here
        active = None if active is None else site.moved(active, site.given_types(given))
        given, found, site = site.local(given), site.local(found, results=True), site.standalone
    operands = tuple((a.shape, a.dtype) for a in given)
    setting = compat.numeric_setting(), interpretation()
    forward = _decided(decision, device, site, operands, _Original(original), setting)
    if active is None or forward.verdict == "kept" or not site.has_backward:
        return forward
    results = tuple((a.shape, a.dtype) for a in found)
    problem = _backward_problem(forward, device, site, operands, results, tuple(active), setting)
    return forward if problem is None else replace(forward, verdict="kept", reason=problem)


@lru_cache(maxsize=1024)
def _decided(
    decision: Decision,
    device: Device,
    site: SiteDescription,
    operands: Types,
    original: _Original,
    setting: Hashable,
) -> Decision:
    """Decides about a forward; ``setting`` is what kernels are traced under, and belongs to the key alone."""
    options, operation = decision.options, site.operation
    if options is None:
        return Decision("kept", f"nothing was decided for {device.platform}", device.platform)
    wanted = options.implementation_for(operation.name)
    subject = _Subject(operation.name, site.spec, decision.direction, original.jaxpr)
    attempts: list[tuple[str, str, str]] = []

    def choices(names: Sequence[str]) -> dict[str, Choice]:
        return {name: of_table(subject, name, device, options.objective) for name in names}

    for found in evaluate_candidates(operation, site.spec, device, options, choices, attempts):
        if found.verdict == "kept":
            return found

        def forward(*arguments: jax.Array, found: Decision = found) -> PyTree:
            return kernel_forward(site, found.implementation or "", found.block_sizes)(*arguments)

        problem = _lowering_problem(forward, device, _shapes(operands))
        if problem is None:
            return found
        attempts.append((found.implementation or "", "lower", problem))
    why = "; ".join(f"{name}: {reason}" for name, _, reason in attempts)
    if isinstance(wanted, str):
        raise UnsupportedError(f"{operation.name} was to run on {wanted} only: {why}. The site: {site.spec}")
    reason = f"no implementation can compute it ({why})"
    return Decision("kept", reason, device.platform, attempts=tuple(attempts))


@lru_cache(maxsize=1024)
def _backward_problem(
    decision: Decision,
    device: Device,
    site: SiteDescription,
    operands: Types,
    results: Types,
    active: tuple[int, ...],
    setting: Hashable,
) -> str | None:
    """Returns why the backward cannot be lowered, or None; ``setting`` as in :func:`_decided`."""

    def backward(*arguments: Sequence[jax.Array]) -> PyTree:
        return kernel_backward(site, decision.implementation or "", decision.block_sizes, active)(*arguments)

    given = _shapes(operands), _shapes(results), list(site.residual_types()), _shapes(results)
    return _lowering_problem(backward, device, given)


def _shapes(types: Types) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]


def _lowering_problem(function: ArrayFunction, device: Device, types: Sequence[PyTree]) -> str | None:
    """Returns why a kernel cannot be lowered for a device, or None.

    Lowers it in a program of its own, since a half-finished lowering cannot be undone.
    """
    platform = {"gpu": "cuda"}.get(device.platform, device.platform)
    try:
        with device.lowered(), settled():
            jax.jit(function).trace(*types).lower(lowering_platforms=(platform,))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
