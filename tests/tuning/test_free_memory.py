"""How much memory a trial may take: the machine's, or what a container's limit leaves."""

from types import SimpleNamespace

import jax
import pytest

from autopallas.autotune import free_memory

GIBIBYTE = 2**30


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with 64 GiB to spare, of which files take none; returns how to write another file of it."""
    monkeypatch.setattr(free_memory, "_PROCESSES", tmp_path / "proc")
    monkeypatch.setattr(free_memory, "_GROUPS", tmp_path / "cgroup")

    def write(name, *lines):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in lines))

    write("proc/meminfo", "MemTotal: 134217728 kB", "MemFree: 1024 kB", f"MemAvailable: {64 * 2**20} kB")
    return write


def test_copies_of_files_count_as_free(machine):
    assert free_memory.free_bytes() == 64 * GIBIBYTE


def test_a_container_has_what_its_limit_leaves(machine):
    machine("proc/self/cgroup", "0::/")
    machine("cgroup/memory.max", 8 * GIBIBYTE)
    machine("cgroup/memory.current", 7 * GIBIBYTE)
    machine("cgroup/memory.stat", f"anon {4 * GIBIBYTE}", f"inactive_file {3 * GIBIBYTE}")
    assert free_memory.free_bytes() == 4 * GIBIBYTE


def test_the_first_version_of_control_groups_is_read_too(machine):
    machine("proc/self/cgroup", "5:devices:/", "4:cpu,memory:/docker/one", "0::/")
    machine("cgroup/memory/docker/one/memory.limit_in_bytes", 8 * GIBIBYTE)
    machine("cgroup/memory/docker/one/memory.usage_in_bytes", 7 * GIBIBYTE)
    machine("cgroup/memory/docker/one/memory.stat", "cache 5", f"total_inactive_file {GIBIBYTE}")
    assert free_memory.free_bytes() == 2 * GIBIBYTE


def test_the_narrowest_limit_of_the_groups_around_counts(machine):
    machine("proc/self/cgroup", "0::/batch/job")
    machine("cgroup/batch/memory.max", 2 * GIBIBYTE)
    machine("cgroup/batch/memory.current", GIBIBYTE)
    machine("cgroup/batch/job/memory.max", 8 * GIBIBYTE)
    machine("cgroup/batch/job/memory.current", GIBIBYTE)
    assert free_memory.free_bytes() == GIBIBYTE


def test_no_limit_is_none(machine):
    machine("proc/self/cgroup", "0::/")
    machine("cgroup/memory.max", "max")
    machine("cgroup/memory.current", GIBIBYTE)
    assert free_memory.free_bytes() == 64 * GIBIBYTE


def test_more_than_the_limit_leaves_nothing(machine):
    machine("proc/self/cgroup", "0::/")
    machine("cgroup/memory.max", GIBIBYTE)
    machine("cgroup/memory.current", 2 * GIBIBYTE)
    assert free_memory.free_bytes() == 0


def test_a_device_tells_its_own(monkeypatch, machine):
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 100, "bytes_in_use": 30})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert free_memory.free_bytes() == 70
