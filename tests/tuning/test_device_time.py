"""Device time: what a profile says of each run, and that measuring works where it says nothing."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from autopallas.autotune.device_time import busy_seconds, kernel_seconds, profiled
from autopallas.tuning import measure


def event(name, start, duration):
    return SimpleNamespace(name=name, start_ns=start, duration_ns=duration)


def plane(name, **lines):
    return SimpleNamespace(name=name, lines=[SimpleNamespace(name=n, events=events) for n, events in lines.items()])


HOST = plane(
    "/host:CPU", python=[event("other", 0, 9999), *(event(f"autopallas run {i}", 1000 * i, 900) for i in (0, 1))]
)


def test_overlapping_events_of_several_streams_count_once():
    gpu = plane(
        "/device:GPU:0",
        **{"Stream #1": [event("a", 100, 200), event("b", 1100, 50)], "Stream #2": [event("c", 200, 200)]},
    )
    assert busy_seconds([HOST, gpu], 2) == pytest.approx([300e-9, 50e-9])


def test_kernels_of_each_run_are_told_apart():
    gpu = plane(
        "/device:GPU:0",
        **{
            "Stream #1": [event("dq", 100, 200), event("dk", 300, 50), event("dq", 400, 100), event("dk", 1100, 50)],
            "XLA Modules": [event("jit_f", 100, 400)],
        },
    )
    first, second = kernel_seconds([HOST, gpu], 2)
    assert first == pytest.approx({"dq": 300e-9, "dk": 50e-9})
    assert second == pytest.approx({"dk": 50e-9})
    assert kernel_seconds([HOST, plane("/device:GPU:0")], 2) is None


def test_a_tpus_modules_are_counted_and_not_their_operations_again():
    tpu = plane(
        "/device:TPU:0",
        **{"XLA Modules": [event("jit_f", 10, 70), event("jit_g", 1010, 80)], "XLA Ops": [event("dot", 20, 50)]},
    )
    assert busy_seconds([tpu, HOST], 2) == pytest.approx([70e-9, 80e-9])


def test_a_run_without_events_makes_all_device_times_unknown():
    gpu = plane("/device:GPU:0", **{"Stream #1": [event("a", 100, 200)]})
    assert busy_seconds([HOST, gpu], 2) is None
    assert busy_seconds([HOST], 2) is None


def test_a_cpu_has_no_device_time_and_is_measured_all_the_same():
    ran = []
    assert profiled([lambda: ran.append(1), lambda: ran.append(2)]) is None
    assert ran == [1, 2]
    timing = measure({"f": lambda x: x + 1}, (jnp.ones(8),), repetitions=2, profile=True)["f"]
    assert (len(timing.wall), timing.device) == (2, ())


def test_device_time_is_kept_by_candidate(monkeypatch):
    module = __import__("sys").modules["autopallas.tuning.measure"]
    counted = iter(range(1, 100))

    def fake(runs):
        return [(run(), next(counted) * 1e-6)[1] for run in runs]

    monkeypatch.setattr(module, "profiled", fake)
    found = measure({"f": lambda x: x + 1, "g": lambda x: x * 2}, (jnp.ones(8),), repetitions=3, profile=True)
    assert sorted((*found["f"].device, *found["g"].device)) == pytest.approx([n * 1e-6 for n in range(1, 7)])
    assert found["f"].samples("device") == found["f"].device
    assert found.ratio("f", baseline="g", clock="device").count == 3
