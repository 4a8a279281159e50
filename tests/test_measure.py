"""What ``autopallas.tuning.measure`` promises, with clocks that do not depend on the machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopallas.tuning import Clocks, Spread, measure


class World:
    """A clock that goes forward only when a candidate says so, and the order in which candidates ran."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []
        self.clocks = Clocks(wall=lambda: self.now, cpu=lambda: 2 * self.now)

    def candidate(self, name: str, *durations: float, result: Any = 0.0, **stages: Any) -> Candidate:
        """A candidate whose runs take ``durations``, the last one for ever after."""
        return Candidate(self, name, durations, result, **stages)


@dataclasses.dataclass
class Analysis:
    temp_size_in_bytes: int = 100
    argument_size_in_bytes: int = 20
    output_size_in_bytes: int = 3


class Candidate:
    def __init__(
        self,
        world: World,
        name: str,
        durations: tuple[float, ...],
        result: Any,
        fails_at_run: int | None = None,
        fails: str | None = None,
        lower_seconds: float = 0.0,
        compile_seconds: float = 0.0,
    ) -> None:
        self.world, self.name, self.result = world, name, result
        self.durations = self._forever(durations)
        self.fails_at_run, self.fails = fails_at_run, fails
        self.lower_seconds, self.compile_seconds = lower_seconds, compile_seconds
        self.runs = 0

    @staticmethod
    def _forever(durations: tuple[float, ...]) -> Iterator[float]:
        yield from durations
        while True:
            yield durations[-1]

    def lower(self, *arguments: Any) -> Candidate:
        self.world.now += self.lower_seconds
        if self.fails == "lower":
            raise TypeError("cannot be lowered")
        return self

    def compile(self) -> Callable[..., Any]:
        self.world.now += self.compile_seconds
        if self.fails == "compile":
            raise ValueError("cannot be compiled")
        call = self._call

        class Compiled:
            def __call__(self, *arguments: Any) -> Any:
                return call()

            def memory_analysis(self) -> Analysis:
                return Analysis()

        return Compiled()

    def _call(self) -> Any:
        self.runs += 1
        self.world.ran.append(self.name)
        if self.runs == self.fails_at_run:
            raise FloatingPointError("no luck")
        self.world.now += next(self.durations)
        return self.result


def test_ratios_are_formed_within_rounds() -> None:
    world = World()
    # First run, two of warm-up, then five rounds during which the machine becomes four times as slow for both.
    slow = world.candidate("slow", 0, 0, 0, 2, 2, 8, 8, 8)
    fast = world.candidate("fast", 0, 0, 0, 1, 1, 4, 4, 4)
    m = measure({"slow": slow, "fast": fast}, baseline="slow", repetitions=5, seconds=1e9, clocks=world.clocks)
    assert m["slow"].wall == (2, 2, 8, 8, 8)
    assert m["fast"].cpu == (2, 2, 8, 8, 8)
    assert m.ratio("fast") == Spread(median=2.0, lower=2.0, upper=2.0, minimum=2.0, count=5)
    assert m.ratio("slow", baseline="fast", clock="cpu").median == 0.5
    assert m["fast"].spread() == Spread(median=4.0, lower=1.0, upper=4.0, minimum=1.0, count=5)


def test_every_round_runs_every_candidate_in_an_order_of_its_own() -> None:
    world = World()
    names = "abcd"
    measure({n: world.candidate(n, 0) for n in names}, repetitions=20, warm_up=1, clocks=world.clocks)
    timed = world.ran[2 * len(names) :]
    rounds = [tuple(timed[i : i + 4]) for i in range(0, len(timed), 4)]
    assert len(rounds) == 20
    assert all(sorted(r) == list(names) for r in rounds)
    assert len(set(rounds)) > 5


def test_compile_pass_comes_first_and_its_times_are_kept() -> None:
    world = World()
    a = world.candidate("a", 5.0, 1.0, lower_seconds=2.0, compile_seconds=3.0)
    m = measure({"a": a}, clocks=world.clocks)
    assert (m["a"].lower_seconds, m["a"].compile_seconds, m["a"].first_step_seconds) == (2.0, 3.0, 10.0)
    assert set(m["a"].wall) == {1.0}
    assert (m["a"].temporary_bytes, m["a"].argument_bytes, m["a"].output_bytes) == (100, 20, 3)


def test_time_is_bounded_but_some_rounds_are_always_run() -> None:
    world = World()
    m = measure({"a": world.candidate("a", 1.0)}, seconds=6.5, repetitions=100, clocks=world.clocks)
    assert len(m["a"].wall) == 7
    m = measure({"a": world.candidate("a", 50.0)}, seconds=6.5, minimum_repetitions=4, clocks=world.clocks)
    assert len(m["a"].wall) == 4


@pytest.mark.parametrize("stage", ["lower", "compile"])
def test_a_candidate_that_cannot_be_built_is_a_record_and_the_others_go_on(stage: str) -> None:
    world = World()
    broken = world.candidate("broken", 0.1, fails=stage)
    m = measure({"broken": broken, "sound": world.candidate("sound", 0.1)}, baseline="sound", clocks=world.clocks)
    failure = m.failures.pop("broken")
    assert failure.stage == stage
    assert f"cannot be {stage.removesuffix('e')}" in str(failure)
    assert m["broken"].spread() is None
    assert m.ratio("broken") is None
    assert m["sound"].spread().count == 15


@pytest.mark.parametrize("run, rounds", [(1, 0), (3, 0), (7, 3)])
def test_a_candidate_that_fails_while_running_keeps_the_rounds_before(run: int, rounds: int) -> None:
    world = World()
    broken = world.candidate("broken", 0.1, fails_at_run=run)
    m = measure({"broken": broken, "sound": world.candidate("sound", 0.2)}, baseline="sound", clocks=world.clocks)
    assert m["broken"].failure.stage == "run"
    assert "no luck" in m["broken"].failure.error
    assert len(m["broken"].wall) == rounds
    assert broken.runs == run
    assert len(m["sound"].wall) == 15
    assert rounds == 0 or m.ratio("broken").count == rounds


def test_nothing_is_run_that_needs_more_memory_than_allowed() -> None:
    world = World()
    m = measure({"a": world.candidate("a", 1)}, memory_limit=122, clocks=world.clocks)
    assert m["a"].failure.stage == "memory"
    assert m["a"].temporary_bytes == 100
    assert world.ran == []
    assert not measure({"a": world.candidate("a", 1)}, memory_limit=123, clocks=world.clocks).failures


def test_differences_are_relative_to_the_largest_reference_of_each_output() -> None:
    reference = {"x": np.array([1.0, -4.0]), "y": np.array([100.0, 0.0])}
    result = {"x": np.array([1.0, -4.4]), "y": np.array([100.0, 1.0])}
    world = World()
    m = measure({"a": world.candidate("a", 1, result=result)}, reference=reference, clocks=world.clocks)
    x, y = m["a"].differences
    assert (x.maximum, x.mean) == (pytest.approx(0.1), pytest.approx(0.05))
    assert (y.maximum, y.mean) == (pytest.approx(0.01), pytest.approx(0.005))
    assert m["a"].difference.maximum == pytest.approx(0.1)


@pytest.mark.parametrize(
    "result, reference, expected",
    [
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([0.0, 1.0], [math.nan, 1.0], math.inf),
        ([-math.inf, 1.0], [-math.inf, 1.0], 0.0),
        ([math.inf, 1.0], [-math.inf, 1.0], math.inf),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1e-30], [0.0, 0.0], math.inf),
    ],
)
def test_what_is_not_finite_must_agree(result: list[float], reference: list[float], expected: float) -> None:
    world = World()
    candidate = world.candidate("a", 1, result=np.array(result))
    m = measure({"a": candidate}, reference=np.array(reference), clocks=world.clocks)
    assert m["a"].difference.maximum == expected


def test_a_result_of_another_shape_is_a_failure_to_compare() -> None:
    world = World()
    m = measure({"a": world.candidate("a", 1, result=np.ones(2))}, reference=np.ones(3), clocks=world.clocks)
    assert m["a"].failure.stage == "compare"


def test_functions_jit_functions_and_compiled_ones_are_measured_alike() -> None:
    x = jnp.arange(8.0).reshape(2, 4)

    def double(x: jax.Array) -> jax.Array:
        return x + x

    candidates = {"plain": double, "jit": jax.jit(double), "compiled": jax.jit(double).lower(x).compile()}
    m = measure(candidates, (x,), baseline="plain", repetitions=3, reference=2 * x)
    assert not m.failures
    for name in candidates:
        assert len(m[name].wall) == len(m[name].cpu) == m.ratio(name).count == 3
        assert m[name].difference.maximum == 0.0
        assert m[name].argument_bytes == m[name].output_bytes == 32
    assert m["compiled"].compile_seconds is None
    assert m["jit"].compile_seconds > 0


def test_a_real_error_inside_a_candidate_is_data() -> None:
    m = measure({"bad": lambda x: x @ jnp.ones((3, 3)), "good": lambda x: x}, (jnp.ones((2, 2)),), repetitions=3)
    assert m["bad"].failure.stage == "lower"
    assert "TypeError" in m["bad"].failure.error
    assert len(m["good"].wall) == 3


def test_a_measurement_cannot_be_changed() -> None:
    world = World()
    m = measure({"a": world.candidate("a", 1)}, clocks=world.clocks)
    with pytest.raises(dataclasses.FrozenInstanceError):
        m["a"].wall = ()  # type: ignore[misc]


def test_mistaken_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="baseline 'b' is not among the candidates: a"):
        measure({"a": lambda: 0}, baseline="b")
    with pytest.raises(ValueError, match="repetition"):
        measure({"a": lambda: 0}, repetitions=0)
    with pytest.raises(ValueError, match="baseline"):
        measure({"a": lambda: 0}, repetitions=1).ratio("a")
