"""Runs a program as it is, rewritten, and in float64, and says what is wrong."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat
from autopallas.numerics.oracle import Oracle
from autopallas.numerics.promote import Value, decided, is_float, quiet
from autopallas.options import resolve
from autopallas.patterns import checkpointed_scans
from autopallas.patterns.cross_entropy.row_statistics import DIVIDED, ONE_HOT
from autopallas.patterns.softmax_terms import HIDDEN, UNSHIFTED
from autopallas.pipeline import rewrite
from autopallas.rewrite.primitive import site_p
from autopallas.verification.influence import replaced
from autopallas.verification.sites import _edited, _watched, applied_sites

from .mutations import put_back
from .program import RandomProgram
from .tolerance import ALLOWED, roundings

__all__ = ["Verdict", "judge", "judge_faults", "kinds_found"]

_CALLS = 128
"""So many calls of sites are looked at: all those of six layers, checkpointed twice, forward and backward."""
_NORMS = ("rms_norm", "layer_norm")
_SAMPLES = 12
"""How often the original runs on arguments a rounding away before an error counts: by luck it may be exact once."""


@dataclass
class Verdict:
    """What became of one program."""

    seed: int
    applied: dict[str, int] = field(default_factory=dict)
    """Replaced sites by operation."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Replaced sites of respellings by kind."""
    complaints: list[str] = field(default_factory=list)
    """What is wrong; nothing, if empty."""
    kind: str = ""
    """"values", "NaN", "exception", or empty."""
    badness: float = 0.0
    """The worst error over the one that is allowed."""
    features: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Near misses."""
    seconds: dict[str, float] = field(default_factory=dict)
    fault: str = ""
    """The fault that was put back, if any."""


class _Twins(Oracle):
    """The original in its own precision and in float64, compiled as one.

    Other than in :class:`Oracle`, a cast to a narrower dtype rounds in float64 too.  So a program whose casts act
    (``exp(s - bfloat16(logsumexp))`` of large scores) has to be that program, not the one without casts.
    """

    def __init__(self, program: Any, honoured: bool = True):
        super().__init__(program)
        self._honoured = honoured

    def _evaluate(self, *arguments: Any) -> list[Any]:
        values = self._run(self._program, [decided(jnp.asarray(x)) for x in arguments])
        return [v.own for v in values] + [v.high for v in values]

    def _equation(self, equation: Any, values: list[Value]) -> list[Value]:
        if equation.primitive.name == "convert_element_type" and self._honoured:
            source, target = values[0].own.dtype, equation.params["new_dtype"]
            if is_float(source) and is_float(target) and jnp.finfo(target).bits < jnp.finfo(source).bits:
                own = lax.convert_element_type(values[0].own, target)
                rounded = lax.convert_element_type(values[0].high, target)
                return [Value(own, lax.convert_element_type(rounded, np.float64))]
        return super()._equation(equation, values)


def judge(program: RandomProgram) -> Verdict:
    """Optimizes a program, by default under objective "always", strictly, and compares it with float64."""
    verdict = Verdict(program.seed, features=sorted(program.features))
    with _quietly(program), _small_loops():
        _judge(program, verdict)
    return verdict


def kinds_found(program: RandomProgram) -> dict[str, int]:
    """The kinds of respelling that are replaced in a program, which is not run, with their number."""
    with _quietly(program), _small_loops():
        original = jax.make_jaxpr(program.function())(*program.arrays())
        _, report = rewrite(original, resolve(program.every_option()), probes=False)
    return _kinds(report)


def _small_loops() -> Any:
    """Lets loops be checkpointed that stack as little as those of random programs."""
    return patch.object(checkpointed_scans, "_LEAST_BYTES", 0)


def _kinds(report: Any) -> dict[str, int]:
    return dict(Counter(site.kind for site in report.sites if site.verdict == "applied" and site.kind))


def judge_faults(program: RandomProgram, faults: Sequence[str]) -> list[Verdict]:
    """The verdicts on a program with faults put back that recognise it otherwise; of others it is what it was."""
    found = []
    with _quietly(program):
        try:
            original = jax.make_jaxpr(program.function())(*program.arrays())
        except NotImplementedError:
            return []
        usual = _text(original, program.every_option())
    for fault in faults:
        with put_back(fault):
            with _quietly(program):
                same = _text(original, program.every_option()) == usual
            if not same:
                found.append(replace(judge(program), fault=fault))
    return found


def _wider_statistics(report: Any) -> bool:
    """Whether a normalisation of 16-bit numbers was replaced: the site computes the statistics in float32.  A variance
    of large numbers that the original rounds to 0 makes it overflow, and not the site."""
    norms = [s.spec for s in report.sites if s.verdict == "applied" and s.op in _NORMS]
    return any(spec["x_dtype"] in ("bfloat16", "float16") for spec in norms)


def _text(original: Any, options: Mapping[str, Any]) -> str:
    """What becomes of a program, as text."""
    try:
        rewritten, report = rewrite(original, resolve(dict(options)), probes=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{rewritten}\n{[(s.spec, s.replacement, s.assumptions) for s in report.sites]}"


@contextlib.contextmanager
def _quietly(program: RandomProgram) -> Iterator[None]:
    before = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jax.config.update("jax_enable_x64", program.x64)  # for callbacks too, which run in threads of their own
        try:
            yield
        finally:
            jax.config.update("jax_enable_x64", before)


def _results(program: compat.ClosedJaxpr, leaves: Sequence[jax.Array]) -> list[np.ndarray]:
    with quiet():
        return [np.asarray(x) for x in jax.jit(compat.jaxpr_as_fun(program)).lower(*leaves).compile()(*leaves)]


def _runs(program: compat.ClosedJaxpr, leaves: Sequence[jax.Array]) -> bool:
    """Returns whether a program can be compiled and run as it is."""
    try:
        _results(program, leaves)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _judge(program: RandomProgram, verdict: Verdict) -> None:
    clock = _Clock(verdict.seconds)
    arrays = program.arrays()
    try:
        original = jax.make_jaxpr(program.function())(*arrays)
    except NotImplementedError as error:
        verdict.features.append(f"not a program: {error}")  # vmap of a ragged_dot, but for one dimension
        return
    clock.lap("trace")
    leaves = jax.tree.leaves(arrays)
    try:
        rewritten, report = rewrite(original, resolve(program.every_option()), probes=False)
        clock.lap("rewrite")
        verdict.applied = dict(report.counts())
        verdict.kinds = _kinds(report)
        verdict.reasons = [f"{miss.op}: {miss.reason}" for miss in report.near_misses]
        if report.failures:
            verdict.kind, verdict.complaints = "exception", [str(f) for f in report.failures]
            return
        if rewritten is original or not any(verdict.applied.values()):
            return
        given = _results(rewritten, leaves)
    except Exception as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and not _runs(original, leaves):
            verdict.features.append(f"not a program: {error}")  # the compiler has no such product of 16-bit numbers
            return
        verdict.kind, verdict.complaints = "exception", [f"{type(error).__name__}: {str(error)[:400]}"]
        return
    clock.lap("run")
    twins = _Twins(original)
    try:
        both = twins(*leaves)
    except jax.errors.JaxRuntimeError as error:
        verdict.features.append(f"not a program: {error}")
        return
    own, true = both[: len(given)], both[len(given) :]
    clock.lap("oracle")
    gradient = any(s.direction != "forward" for s in report.sites if s.verdict == "applied")
    kinds = roundings(original)
    floor = _noise(leaves) if program.gradients else 0.0
    checks = [_Check(*four, floor) for four in zip(given, own, true, kinds, strict=True)]
    assumed = {a for s in report.sites for a in s.assumptions}
    if any(check.hidden.any() for check in checks) and not _meets_non_finite(rewritten, leaves):
        unrounded = _Twins(original, honoured=False)(*leaves)[len(given) :]
        values = checks[: len(checks) - program.gradients]
        excused = bool(assumed) or _wider_statistics(report) or not any(check.hidden.any() for check in values)
        for check, exact in zip(checks, unrounded, strict=True):
            vanishing = not assumed.isdisjoint((UNSHIFTED, HIDDEN, DIVIDED, ONE_HOT))
            check.look_behind(exact, excused, vanishing)
    if any(check.places() for check in checks):
        apart = _one_by_one(original, leaves)
        if any(check.lives_on_luck(x) for check, x in zip(checks, apart, strict=True)):
            return
        values = checks[: len(checks) - program.gradients]
        lost = any(not check.integral and np.isnan(check.own).any() for check in values)
        for check in checks[len(values) :]:
            # In a gradient an infinity says no more than NaN, and of values that are NaN it says nothing.
            check.own = np.full_like(check.own, np.nan) if lost else np.where(np.isinf(check.own), np.nan, check.own)
    for n, check in enumerate(checks):
        if complaint := check.places():
            verdict.kind, verdict.badness = "NaN", float("inf")
            verdict.complaints.append(f"result {n}: {complaint}")
    if verdict.kind:
        return
    doubtful = [n for n, check in enumerate(checks) if check.ratio(gradient) > 1]
    if doubtful:
        for seed in range(_SAMPLES):
            moved = twins(*_moved(leaves, seed))
            for n in doubtful:
                checks[n].sample(moved[n], moved[len(given) + n])
        clock.lap("samples")
        doubtful = [n for n in doubtful if checks[n].ratio(gradient) > 1]
    if doubtful:  # compiled otherwise the original may round otherwise, to other numbers of a narrow dtype
        for n, x in enumerate(_one_by_one(original, leaves)):
            checks[n].sample(x, true[n])
    wrong = [n for n in doubtful if checks[n].ratio(gradient) > 1]
    if wrong and program.gradients:
        floor = max([_noise(operands) for _, operands, _ in _calls(rewritten, leaves)], default=floor)
        for n in wrong:
            checks[n].forgive(floor)
        wrong = [n for n in wrong if checks[n].ratio(gradient) > 1]
    if wrong and _passes_unrounded(original, leaves, given, kinds, floor, gradient, wrong):
        # What differs are roundings that the program asks for.  A layer after the other makes more of them, so that
        # only each site by itself says whether it leaves out more than it may.
        wrong = wrong if _sites_differ(rewritten, leaves) else []
        clock.lap("sites")
    for n in wrong:
        verdict.kind, verdict.badness = "values", max(verdict.badness, checks[n].ratio(gradient))
        verdict.complaints.append(f"result {n}: {checks[n].words(gradient)}")


def _one_by_one(program: Any, leaves: Sequence[Any]) -> list[Any]:
    """What a program gives where each equation is compiled by itself."""
    twins = _Twins(program)
    with quiet(), jax.enable_x64(True), jax.disable_jit():
        both = twins._evaluate(*leaves)
    return [np.asarray(x) for x in both[: len(both) // 2]]


def _passes_unrounded(
    original: Any, leaves: Sequence[Any], given: Sequence[Any], kinds: Sequence[Any], noise: float, gradient: bool,
    wrong: Sequence[int],
) -> bool:  # fmt: skip
    """Whether results are as good as the original's if casts round nothing."""
    twins = _Twins(original, honoured=False)
    both = twins(*leaves)
    checks = {n: _Check(given[n], both[n], both[len(given) + n], kinds[n], noise) for n in wrong}
    for seed in range(_SAMPLES):
        moved = twins(*_moved(leaves, seed))
        for n, check in checks.items():
            check.sample(moved[n], moved[len(given) + n])
    return all(check.ratio(gradient) <= 1 for check in checks.values())


def _sites_differ(rewritten: Any, leaves: Sequence[Any]) -> bool:
    """Whether a replaced site, on the operands that it meets, is further from its equations than they allow."""
    for site, operands, results in _calls(rewritten, leaves):
        closed = compat.make_jaxpr(replaced(site), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands))
        # Of a normalisation the statistics may be better than the program's: a mean of 30 in bfloat16 is off by 0.06.
        honoured = getattr(site.params["site"], "op", "") not in _NORMS
        twins, gradient = _Twins(closed, honoured=honoured), site.primitive is not site_p
        noise = _noise(operands) if gradient else 0.0
        both = twins(*operands)
        count = len(both) // 2
        checks = [
            _Check(np.asarray(x), own, true, kind, noise)
            for x, own, true, kind in zip(results[:count], both[:count], both[count:], roundings(closed), strict=True)
        ]
        for seed in range(_SAMPLES if any(check.ratio(gradient) > 1 for check in checks) else 0):
            moved = twins(*_moved(operands, seed))
            for n, check in enumerate(checks):
                check.sample(moved[n], moved[count + n])
        if any(check.ratio(gradient) > 1 for check in checks):
            return True
    return False


def _calls(rewritten: Any, arrays: Sequence[Any]) -> list[tuple[Any, list[Any], list[Any]]]:
    """The replaced sites as they are called in a run: (equation, operands, results)."""
    sites = {id(site) for site in applied_sites(rewritten)}
    met: list[tuple[Any, list[Any], list[Any]]] = []

    def watched(equation: Any) -> Any:
        if id(equation) not in sites:
            return equation

        def record(*values: Any) -> Any:
            taken, count = [np.array(x) for x in values], len(equation.invars)
            if len(met) < _CALLS:
                met.append((equation, taken[:count], taken[count:]))
            return taken[count:]

        return _watched(equation, record)

    with quiet():
        jax.block_until_ready(jax.jit(compat.jaxpr_as_fun(_edited(rewritten, watched)))(*arrays))
    return met


def _meets_non_finite(rewritten: Any, arrays: Sequence[Any]) -> bool:
    """Whether a replaced site is handed a NaN, or a mixture of experts an infinity.

    Multiplied by an exact zero it may vanish there: that is what ``assume_finite`` says.
    """
    for site, operands, _ in _calls(rewritten, arrays):
        mixture = site.params["site"].operation.name == "grouped_matmul"
        for x in (x for x in operands if is_float(x.dtype)):
            wide = np.asarray(x, np.float64)
            if np.isnan(wide).any() or (mixture and np.isinf(wide).any()):
                return True
    return False


class _Clock:
    def __init__(self, seconds: dict[str, float]):
        self._seconds, self._last = seconds, time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self._seconds[name], self._last = now - self._last, now


class _Check:
    """One result: rewritten, original, float64, and the coarsest dtype in which the original rounds."""

    def __init__(self, given: Any, own: Any, true: Any, rounding: Any, noise: float):
        self.integral = not is_float(own.dtype)
        self.dtype = own.dtype
        self.given, self.own, self.true = (x if self.integral else x.astype(np.float64) for x in (given, own, true))
        self.rounding = "float32" if rounding is None else np.dtype(rounding).name
        self.hidden = np.zeros(self.own.shape, bool)
        """Where a finite number stands for a NaN or an infinity."""
        self.lost = self.unsaid = 0
        if self.integral:
            return
        # Beyond the end of its dtype a number has an error as any other: one that is near the end may get there.
        beyond = np.isinf(self.given) & np.isfinite(self.own)
        self.given = np.where(beyond, np.copysign(float(jnp.finfo(own.dtype).max), self.given), self.given)
        finite = np.isfinite(self.true) & np.isfinite(self.own) & np.isfinite(self.given)
        self.finite = finite
        self.hidden = ~np.isfinite(self.own) & np.isfinite(self.given)
        kind = jnp.finfo(own.dtype)
        self.size = max(float(np.abs(self.true[finite]).max(initial=0.0)), float(kind.tiny) / float(kind.eps))
        self.forgive(noise)
        self.reference = float(np.abs(self.own - self.true)[finite].max(initial=0.0)) / self.size

    def forgive(self, noise: float) -> None:
        """Takes off the error what says nothing."""
        error = float(np.abs(self.given - self.true)[self.finite].max(initial=0.0))
        self.error = max(error - noise * float(jnp.finfo(self.rounding).eps), 0.0) / self.size

    def look_behind(self, true: Any, excused: bool, vanishing: bool) -> None:
        """Counts what is hidden: NaN and infinity that stand in float64, without roundings, too, and those that do not.

        The latter come of a dtype's range.  They may be hidden where a site says what it assumes (``excused``), and in
        a gradient of finite values, where an infinite factor was multiplied by an exact zero.  The former may be where
        a site assumes that no row of exponentials, or no probability, is ``vanishing``, or that no infinity meets the
        zeros of one-hot labels: 0 / 0, or infinity times 0, is a number after all.
        """
        if not self.integral:
            self.lost = 0 if vanishing else int((self.hidden & ~np.isfinite(true)).sum())
            self.unsaid = 0 if excused else int(self.hidden.sum()) - self.lost

    def places(self) -> str | None:
        """What is wrong with NaN and infinity, compared by place with the original."""
        if self.integral:
            return None
        new = int((np.isnan(self.given) & ~np.isnan(self.own)).sum())
        new += int((np.isinf(self.given) & ~np.isnan(self.own) & (self.given != self.own)).sum())
        if new:
            return f"{new} of {self.own.size} NaN or infinite that are not in the original"
        if self.lost:
            return f"{self.lost} of {self.own.size} finite where the original and float64 are NaN or infinite"
        if self.unsaid:
            return f"{self.unsaid} of {self.own.size} finite where the original is NaN or infinite, and nothing says so"
        return None

    def lives_on_luck(self, apart: Any) -> bool:
        """Whether the original is finite only since a compiler fuses a product beyond the dtype with what comes next:
        its equations ``apart``, one by one, are not."""
        return not self.integral and bool((~np.isfinite(apart.astype(np.float64)) & np.isfinite(self.own)).any())

    def sample(self, own: Any, true: Any) -> None:
        """A further sample of the original's own error."""
        own, true = own.astype(np.float64), true.astype(np.float64)
        finite = np.isfinite(own) & np.isfinite(true)
        self.reference = max(self.reference, float(np.abs(own - true)[finite].max(initial=0.0)) / self.size)

    def allowed(self, gradient: bool) -> float:
        return max(ALLOWED[self.rounding][gradient], 2 * self.reference)

    def ratio(self, gradient: bool) -> float:
        """The error over the one that is allowed."""
        if self.integral:
            return float("inf") if not np.array_equal(self.given, self.own) else 0.0
        return self.error / self.allowed(gradient)

    def words(self, gradient: bool) -> str:
        if self.integral:
            return f"{int((self.given != self.own).sum())} of {self.own.size} whole numbers differ"
        return (
            f"error {self.error:.2e} of {self.size:.2e} in {self.dtype}; the original's own {self.reference:.2e}, "
            f"rounding in {self.rounding} allows {ALLOWED[self.rounding][gradient]:.0e}"
        )


def _noise(arrays: Sequence[Any]) -> float:
    """How large the terms of a gradient may be that cancel: times the unit of a dtype, an error that says nothing.

    The gradient of a softmax that is 1 at one key is exactly 0 or not by the order of a sum alone.
    """
    largest = sorted(float(np.abs(np.asarray(x, np.float64)).max(initial=0.0)) for x in arrays if is_float(x.dtype))
    return 16 * float(np.prod([max(x, 1.0) for x in largest[-3:]]))


def _moved(arrays: Sequence[Any], seed: int) -> list[Any]:
    """The arguments, every float moved by one unit in its last place, up or down."""
    draw = np.random.default_rng(seed)

    def moved(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, np.floating):
            return x
        step = float(jnp.finfo(x.dtype).eps) * draw.choice([-1.0, 1.0], x.shape)
        return jnp.asarray(np.asarray(x).astype(np.float64) * (1 + step), x.dtype)

    return [moved(x) for x in arrays]
