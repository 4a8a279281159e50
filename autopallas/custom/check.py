"""Compares the replacement of a custom pattern with its reference before it is used, and says what was compared."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from autopallas import compat
from autopallas.compat import ClosedJaxpr, Shaped
from autopallas.compile.outside_trace import is_within, isolated, within
from autopallas.custom.operation import PatternOperation, PatternSpec, ReplacementError, pattern_of
from autopallas.errors import one_line
from autopallas.patterns.match import Match
from autopallas.sites.calls import kernel_backward, kernel_forward, replaced_at
from autopallas.sites.declared import DeclaredSite, Result
from autopallas.sites.device import Device
from autopallas.sites.sharded_site import ShardedSite
from autopallas.sites.spec import BlockSizes, Spec

__all__ = ["check_replacement"]


_MOST_BYTES = 2**28
"""Size above which a site's replacement is not compared as a whole, in bytes of its operands."""
_RUNS = 2
"""How often a replacement is run on the same operands, which has to give the same bits."""
_FEW_ROWS = 4
"""Largest number of rows of the parts on which their independence is checked."""

_EQUAL = "asked for by its pattern, and found equal to the reference within tolerance"
_UNCHECKED = "asked for by its pattern; it is compared with the reference before its first use"
_TYPES_ONLY = (
    "asked for by its pattern; its operands are too large for a comparison with the reference, so only the shape and "
    "dtype of its result were checked"
)


class _Verdicts:
    """Results of checking replacements in this process: None, or what is wrong."""

    def __init__(self) -> None:
        self._known: dict[Hashable, str | None] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, compute: Callable[[], str | None]) -> str | None:
        """Returns the result of a check, which is computed if it is not known.

        A replacement may call an optimized function with sites of patterns.  So no lock is held while one is checked,
        and a site in it whose check is the one around it is left as it is.
        """
        with self._lock:
            if key in self._known:
                return self._known[key]
        if is_within((_Verdicts, key)):
            return "the replacement calls it itself, while it is compared with the reference"
        with within((_Verdicts, key)):
            found = compute()
        with self._lock:
            return self._known.setdefault(key, found)


_VERDICTS = _Verdicts()


class _Sample(NamedTuple):
    """What a replacement is compared on: a site, the same by the reference, and what the comparison tells.

    The site is None where nothing of it is small enough to be compared.
    """

    site: DeclaredSite | None
    original: ClosedJaxpr
    in_words: str


def check_replacement(match: Match, block_sizes: BlockSizes, strict: bool, runs: bool) -> tuple[bool, str]:
    """Returns whether the replacement may be used for a site of a custom pattern, and the reason.

    Args:
      match: the site.
      block_sizes: those with which the replacement will run.
      strict: whether to raise an exception in the replacement.
      runs: whether anything may run; if not, as in ``explain``, the replacement is not checked.
    """
    if not runs:
        return True, _UNCHECKED
    site = match.site.standalone if isinstance(match.site, ShardedSite) else match.site
    assert isinstance(site, DeclaredSite)
    asked = {site.uses[p] for backward in match.backwards for p, _ in backward.gradients}
    active = tuple(i for i, value in enumerate(site.uses) if value in asked)
    setting = compat.numeric_setting()
    try:
        fault = _VERDICTS.get((site.form, setting), lambda: _fault_of_rows(site))
        if fault is None:
            sample = _sample(match, site)
            key = (site, active, block_sizes, sample.in_words, setting)
            fault = _VERDICTS.get(key, lambda: _fault(site, sample, block_sizes, active))
    except ReplacementError as error:
        return False, str(error)
    except Exception as error:
        if strict:
            raise
        return False, f"the replacement fails with {one_line(error)}"
    return (True, sample.in_words) if fault is None else (False, fault)


# ---------------------------------------------------------------------- what is compared


def _sample(match: Match, site: DeclaredSite) -> _Sample:
    """Returns the site and the program's equations; for a sharded site, one device's part and the reference; with
    fewer rows where the operands are too large."""
    if not isinstance(match.site, ShardedSite) and _bytes(match.original.in_avals) <= _MOST_BYTES:
        return _Sample(site, match.original, _EQUAL)
    words = f"{_EQUAL}, in one device's part" if isinstance(match.site, ShardedSite) else _EQUAL
    if _bytes(_types(site)) > _MOST_BYTES:
        words = f"{_EQUAL}, in some of its rows, since its operands are too large as a whole"
        site = _with_fewer_rows(site)
    if _bytes(_types(site)) > _MOST_BYTES:
        return _Sample(None, match.original, _TYPES_ONLY)
    return _Sample(site, compat.make_jaxpr(lambda *x: _by_reference(site, x), *_types(site)), words)


def _types(site: DeclaredSite) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of a site's operands, one for each use."""
    found = {
        own.position: jax.ShapeDtypeStruct(
            tuple(math.prod(site.sizes[label] for label in labels) for _, labels in own.view),
            getattr(site.form, f"{name}_dtype"),
        )
        for name, own in site.operands
    }
    return [found[value] for value in site.uses]


def _with_fewer_rows(site: DeclaredSite) -> DeclaredSite:
    """Returns the site with as many of its rows as may be compared, or with one."""
    letters, sizes = dict(site.letters), list(site.sizes)
    rows = [label for letter in site.operation.rows.split() for label in letters[letter]]
    while rows and _bytes(_types(site)) > _MOST_BYTES:
        largest = max(rows, key=lambda label: sizes[label])
        if sizes[largest] == 1:
            break
        sizes[largest] = (sizes[largest] + 1) // 2
        site = replace(site, sizes=tuple(sizes))
    return site


def _by_reference(site: DeclaredSite, operands: Sequence[jax.Array]) -> jax.Array:
    """Computes a site by the pattern's reference, in the program's layout."""
    assert isinstance(site.form, PatternSpec)
    arguments = [operands[site.uses.index(own.position)] for _, own in site.operands]
    found: jax.Array = site.form.operation.pattern.reference(*arguments, **site.form.scalars())
    return found


# ---------------------------------------------------------------------- what is wrong


def _fault(site: DeclaredSite, sample: _Sample, block_sizes: BlockSizes, active: tuple[int, ...]) -> str | None:
    """Returns what is wrong with the replacement for a site, or None.

    Raises:
      ReplacementError: it gives another type than the reference.
    """
    name = site.operation.usual(Device.current())
    jax.eval_shape(kernel_forward(site, name, block_sizes), *_types(site))
    if sample.site is None:
        return None
    from autopallas.court.hearing import Reference, cotangent, differing_runs, hear

    own, program = sample.site, sample.original
    original = _with_gradients(own, active, lambda operands: compat.jaxpr_as_fun(program)(*operands)[0])
    kernel = kernel_forward(own, name, block_sizes)

    def replaced(*operands: jax.Array) -> list[jax.Array]:
        results, _ = kernel(*operands)
        if not (active and own.has_backward):
            return list(results)
        pull = kernel_backward(own, name, block_sizes, active)
        return [*results, *_summed(own, active, pull(operands, results, (), (cotangent(results[0]),)))]

    def work() -> str | None:
        operands = [jnp.asarray(x) for x in own.operation.part("example").operands(own, _types(own))]
        count = len(jax.eval_shape(original, *operands))
        names = ["result", *(f"gradient {number}" for number in range(count - 1))]
        pattern = pattern_of(own)
        numerics = "tolerance" if pattern is None else pattern.numerics
        gradients = [position > 0 for position in range(count)]
        reference = Reference.of(original, operands, names, gradients, numerics)
        run = jax.jit(replaced)
        for finding in (*hear(reference, run, operands).findings, *differing_runs(run, names, [operands], _RUNS)):
            match finding.kind:
                case "maximum":
                    said = f"differs from the reference's by {finding.error:.2g} of the largest value"
                case "row":
                    said = f"differs from the reference's by {finding.error:.2g} in row {list(finding.row or ())}"
                case _:
                    said = f"differs from the reference's: it {finding.said}"
            return f"the replacement's {finding.what} {said}"
        return None

    return isolated(work)


def _summed(site: DeclaredSite, active: Sequence[int], gradients: Sequence[jax.Array]) -> list[jax.Array]:
    """Adds up the gradients of the uses of each value."""
    sums: dict[int, jax.Array] = {}
    for position, gradient in zip(active, gradients, strict=True):
        value = site.uses[position]
        sums[value] = sums[value] + gradient if value in sums else gradient
    return list(sums.values())


def _with_gradients(
    site: DeclaredSite, active: Sequence[int], function: Callable[[Sequence[jax.Array]], jax.Array]
) -> Callable[..., list[jax.Array]]:
    """Returns a function that gives what ``function`` does, and gradients of each value if the replacement has them."""
    from autopallas.court.hearing import cotangent

    def run(*operands: jax.Array) -> list[jax.Array]:
        if not (active and site.has_backward):
            return [function(operands)]

        def varied(*chosen: jax.Array) -> jax.Array:
            return function(replaced_at(operands, active, chosen))

        value, pull = jax.vjp(varied, *(operands[i] for i in active))
        return [value, *_summed(site, active, pull(cotangent(value)))]

    return run


def _fault_of_rows(site: DeclaredSite) -> str | None:
    """Returns why the letters that a pattern names as ``rows`` are not independent, or None; compares the reference of
    parts with parts of the reference, in float64."""
    from autopallas.numerics.oracle import Oracle

    own = site.operation
    assert isinstance(own, PatternOperation)
    small = {name: getattr(own.sample, name) for name in own.sizes.values()}
    rows = own.rows.split()
    small |= {own.sizes[letter]: min(_FEW_ROWS, small[own.sizes[letter]]) for letter in rows}
    for letter in rows:
        part = replace(site.form, **small)
        whole = replace(part, **{own.sizes[letter]: 2 * small[own.sizes[letter]]})
        types = [jax.ShapeDtypeStruct(own.shape(whole, n), getattr(whole, f"{n}_dtype")) for n in own.operands]
        if _bytes(types) > _MOST_BYTES:
            return f"rows={own.rows!r} cannot be checked, since the pattern's example is too large"

        def at_once(*arrays: jax.Array, whole: Spec = whole) -> Result:
            return own.reference(whole, **dict(zip(own.operands, arrays, strict=True)))

        def in_parts(*arrays: jax.Array, part: Spec = part, letter: str = letter) -> jax.Array:
            letters = [letters.split() for letters in own.operands.values()]
            pairs = [
                jnp.split(x, 2, axes.index(letter)) if letter in axes else (x, x)
                for x, axes in zip(arrays, letters, strict=True)
            ]
            halves = (dict(zip(own.operands, half, strict=True)) for half in zip(*pairs, strict=True))
            found = [cast("jax.Array", own.reference(part, **half)) for half in halves]  # patterns have one result
            return jnp.concatenate(found, own.result.split().index(letter))

        def work(types: Sequence[jax.ShapeDtypeStruct] = types) -> bool:
            arrays = [jnp.asarray(x) for x in own.pattern.example(types)]
            found, wanted = (np.asarray(Oracle(compat.make_jaxpr(f, *types))(*arrays)[0]) for f in (in_parts, at_once))
            largest = np.max(np.abs(np.where(np.isfinite(wanted), wanted, 0)), initial=0.0)
            return np.allclose(found, wanted, rtol=1e-6, atol=1e-6 * float(largest), equal_nan=True)

        try:
            alike = isolated(work)
        except Exception as error:
            reason = one_line(error)
            return f"rows={own.rows!r} cannot be checked, since the reference fails for parts of {letter}: {reason}"
        if not alike:
            return f"rows={own.rows!r} is wrong: the reference of a part along {letter} is not that part of the whole"
    return None


def _bytes(avals: Sequence[Shaped]) -> int:
    return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in avals)
