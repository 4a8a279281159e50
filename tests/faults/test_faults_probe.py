"""Probes: kernels are compiled and run alone, in a process that can be ended, before a program gets them."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import autopallas
from autopallas.autotune import probe
from autopallas.cli import main
from autopallas.compile import subprocess
from autopallas.options import Options
from autopallas.sites.device import Device
from autopallas.sites.interpret import mode
from autopallas.tuning.probe_cache import DAY, ProbeResults
from tests.faults import programs
from tests.faults.programs import OPERATIONS, break_kernel, forget, program, warned


@pytest.fixture(autouse=True)
def probed(monkeypatch):
    """As on an accelerator: plain JAX on a CPU is not probed."""
    monkeypatch.setattr(probe.Prober, "wanted", lambda self, name: True)


@pytest.fixture
def inside(monkeypatch):
    """In this process, as where no other can be started."""

    def cannot(x64):
        raise subprocess.ChildError("not here")

    monkeypatch.setattr(probe, "Child", cannot)


@pytest.fixture
def started(monkeypatch):
    """The children that are started."""
    made = []

    class Watched(subprocess.Child):
        def __init__(self, x64):
            super().__init__(x64)
            made.append(self._process)

    monkeypatch.setattr(probe, "Child", Watched)
    return made


def kept(stage, op="attention"):
    """One warning, the right result, and the same from the disk in the next process."""
    case = program(op)
    fn = autopallas.optimize(case.function, objective="always")
    with warned(1, op, stage):
        fn.trace(*case.operands)  # before anything is compiled for the program
        case.same(fn(*case.operands))
    assert [failure.stage for failure in fn.report().failures] == [stage]
    assert fn.report().counts() == {}
    forget()
    begin = time.monotonic()
    again = autopallas.optimize(case.function, objective="always")
    with warned(0):
        case.same(again(*case.operands))
    assert [failure.stage for failure in again.report().failures] == [stage]
    return time.monotonic() - begin


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_good_kernel_is_probed_once(op, inside, monkeypatch):
    case = program(op)
    probes = []
    real = probe.tried
    monkeypatch.setattr(probe, "tried", lambda *a: probes.append(a) or real(*a))
    for _ in range(2):
        fn = autopallas.optimize(case.function, objective="always", strict=True)
        case.same(fn(*case.operands))
        assert fn.report().counts()[op] == 1
        forget()
    assert len(probes) == 1
    assert {verdict.outcome for verdict in ProbeResults.current().entries()} == {"works"}


@pytest.mark.parametrize(
    ("fault", "stage"),
    [
        (programs.longer, "lowering"),
        (programs.unlowered, "lowering"),
        (programs.uncompilable, "compile"),
        (programs.too_much, "lowering"),  # a callback cannot be exported
    ],
)
def test_a_kernel_that_the_probe_cannot_use(fault, stage, inside, monkeypatch):
    break_kernel(monkeypatch, "attention", "forward", fault)
    kept(stage)


def test_a_kernel_that_needs_too_much_memory(inside, monkeypatch):
    monkeypatch.setattr(programs, "_called_back", lambda work: work)
    monkeypatch.setattr(probe, "free_bytes", lambda: None)
    break_kernel(monkeypatch, "attention", "forward", programs.too_much)
    kept("memory")
    (verdict,) = ProbeResults.current().entries()
    assert verdict.until < time.time() + 2 * DAY, "there may be more memory tomorrow"


def test_a_probe_that_hangs_is_ended(started, monkeypatch):
    monkeypatch.setattr(probe, "SECONDS", 4.0)
    break_kernel(monkeypatch, "attention", "forward", programs.endless)
    kept("hang")
    (process,) = started
    assert process.returncode == -signal.SIGKILL


def test_a_probe_that_is_killed(started, monkeypatch):
    break_kernel(monkeypatch, "attention", "forward", programs.endless)
    real = subprocess.Child.tried

    def killed(self, program, run, seconds):
        threading.Timer(1.0, os.kill, (self._process.pid, signal.SIGKILL)).start()
        return real(self, program, run, seconds)

    monkeypatch.setattr(subprocess.Child, "tried", killed)
    kept("compile")


def test_a_process_that_finds_no_memory_of_the_device_blames_no_kernel(started, monkeypatch):
    """This process may hold nearly all of it, and has room for what the other could not even compile."""
    words = "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16.49MiB"
    monkeypatch.setattr(subprocess.Child, "tried", lambda self, *_: ("compile", words))
    case = program("attention")
    fn = autopallas.optimize(case.function, objective="always", strict=True)
    case.same(fn(*case.operands))
    assert fn.report().counts() == {"attention": 1}
    assert started
    assert {verdict.outcome for verdict in ProbeResults.current().entries()} == {"works"}


def test_what_does_not_fit_is_not_run(inside, monkeypatch):
    runs = []
    monkeypatch.setattr(probe, "tried", lambda program, run: runs.append(run))
    monkeypatch.setattr(probe, "free_bytes", lambda: 1000)
    case = program()
    autopallas.optimize(case.function, objective="always").trace(*case.operands)
    assert runs == [False]


def test_explain_probes_nothing(monkeypatch):
    monkeypatch.setattr(probe.Prober, "_probed", lambda *_: pytest.fail("a probe"))
    case = program()
    assert autopallas.explain(autopallas.optimize(case.function, objective="always"), *case.operands).counts()


def test_verdicts_expire_and_can_be_cleared(inside, monkeypatch, capsys):
    case = program()
    with monkeypatch.context() as patched:
        break_kernel(patched, "attention", "forward", programs.uncompilable)
        kept("compile")

    def applied():
        forget()
        fn = autopallas.optimize(case.function, objective="always")
        with warned(0):
            case.same(fn(*case.operands))
        return fn.report().counts()["attention"]

    assert applied() == 0
    now = time.time()
    with monkeypatch.context() as later:
        later.setattr("autopallas.tuning.probe_cache.time.time", lambda: now + 8 * DAY)
        assert applied() == 1
    assert main(["cache", "clear"]) == 0
    assert applied() == 1
    assert "removed 1 result" in capsys.readouterr().out


def test_plain_jax_on_a_cpu_is_not_probed(monkeypatch):
    monkeypatch.undo()
    prober = probe.Prober(Device("cpu", "cpu"), Options())
    assert not prober.wanted("xla")
    with mode(True):
        assert not prober.wanted("pallas_tpu"), "interpreted, it is plain JAX too"
    assert prober.wanted("pallas_tpu")
    assert probe.Prober(Device("gpu", "gpu"), Options()).wanted("xla")
