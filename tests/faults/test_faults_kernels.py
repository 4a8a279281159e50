"""Kernels that fail while they are traced, lowered, compiled, launched and run, forward and backward."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest
from jax._src import compiler

import autopallas
from autopallas.sites.operation import Operation
from autopallas.tuning.probe_cache import ProbeResults
from tests.faults import programs
from tests.faults.programs import OPERATIONS, break_kernel, forget, program, raises, warned

ALL = os.environ.get("FAULTS") == "all"
"""Whether all operations meet all faults: `make faults`."""

FAULTS = {
    ("trace", "exception"): (raises(ValueError("no such thing")), "trace"),
    ("trace", "wrong shape"): (programs.longer, "trace"),
    ("trace", "out of memory"): (raises(MemoryError("while tracing")), "trace"),
    ("lower", "exception"): (programs.unlowered, "lowering"),
    ("lower", "wrong shape"): (programs.mistyped, "lowering"),
    ("lower", "out of memory"): (programs.exhausted_lowering, "lowering"),
    ("compile", "exception"): (programs.uncompilable, "compile"),
    ("launch", "exception"): (programs.launch_fails, "run"),
    ("launch", "out of memory"): (programs.too_much, "memory"),
    ("run", "exception"): (programs.run_fails, "run"),
    ("run", "out of memory"): (programs.run_exhausted, "memory"),
}
BACKWARD = [
    ("trace", "exception"),
    ("trace", "wrong shape"),
    ("lower", "exception"),
    ("compile", "exception"),
    ("run", "exception"),
    ("launch", "out of memory"),
]


def cases(faults):
    for number, fault in enumerate(faults):
        for op in OPERATIONS if ALL else (OPERATIONS[number % len(OPERATIONS)],):
            yield pytest.param(op, *fault, id=f"{op}, {', '.join(fault)}")


def recovers(monkeypatch, op, name, fault, stage, backward):
    """The result is right, once with a warning; the report says why; so it is in the next process; then all is well."""
    case = program(op, backward)
    with monkeypatch.context() as patched:
        break_kernel(patched, op, name, fault)
        fn = autopallas.optimize(case.function, objective="always")
        with warned(1, op, stage):
            for _ in range(3):
                case.same(fn(*case.operands))
        report = fn.report()
        assert report.counts() == {}
        assert {site.attempts[0][:2] for site in report.sites} >= {("xla", stage)}
        assert [failure.stage for failure in report.failures] == [stage]
        assert autopallas.Report.from_json(report.to_json()) == report

        forget()  # the next process knows from the disk, and does not try again
        again = autopallas.optimize(case.function, objective="always")
        with warned(0):
            case.same(again(*case.operands))
        assert [failure.stage for failure in again.report().failures] == [stage]
    forget()
    ProbeResults.current().clear()
    healed = autopallas.optimize(case.function, objective="always")
    case.same(healed(*case.operands))
    assert healed.report().counts() == {op: len(report.sites)}


@pytest.mark.parametrize(("op", "stage", "kind"), list(cases(FAULTS)))
def test_a_kernel_that_fails(op, stage, kind, monkeypatch):
    fault, told = FAULTS[stage, kind]
    recovers(monkeypatch, op, "forward", fault, told, backward=False)


def test_a_run_that_fails_after_its_launch(monkeypatch):
    recovers(monkeypatch, "attention", "forward", programs.too_much_unread, "memory", backward=False)


def test_a_compiler_that_runs_out_of_memory(monkeypatch):
    """A CPU's has no limit to exceed, so that it is told to say so of the kernel that it cannot compile."""
    real = compiler.compile_or_get_cached

    def exhausted(backend, computation, *arguments, **keywords):
        if "faults_no_such_target" in str(computation):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory while compiling")
        return real(backend, computation, *arguments, **keywords)

    monkeypatch.setattr(compiler, "compile_or_get_cached", exhausted)
    recovers(monkeypatch, "attention", "forward", programs.uncompilable, "compile", backward=False)


# Attention alone has a kernel that only backwards call: those of the others are sites of their own.
@pytest.mark.parametrize(("stage", "kind"), BACKWARD)
def test_a_backward_that_fails(stage, kind, monkeypatch):
    fault, told = FAULTS[stage, kind]
    recovers(monkeypatch, "attention", "backward", fault, told, backward=True)


@pytest.mark.parametrize("fault", [programs.not_numbers, programs.doubled])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_wrong_numbers_under_verify(name, fault, monkeypatch):
    case = program("attention", backward=name == "backward")
    break_kernel(monkeypatch, "attention", name, fault)
    fn = autopallas.optimize(case.function, objective="always", verify=True)
    with pytest.raises(autopallas.VerificationError) as caught:
        fn(*case.operands)
    assert not caught.value.verification.ok
    monkeypatch.undo()
    forget()
    healed = autopallas.optimize(case.function, objective="always", verify=True)
    case.same(healed(*case.operands))


def test_nan_is_a_failure_where_jax_looks_for_it(monkeypatch):
    case = program()
    break_kernel(monkeypatch, "attention", "forward", programs.not_numbers)
    fn = autopallas.optimize(case.function, objective="always")
    with jax.debug_nans(True), warned(1, "attention", "run"):
        case.same(fn(*case.operands))


# --- what recovery is, and what it is not ----------------------------------------------------------------------------


def test_the_next_implementation_takes_the_place(monkeypatch):
    case = program()
    monkeypatch.setattr(Operation, "requested", lambda *_: ("xla", "reference"))
    break_kernel(monkeypatch, "attention", "forward", programs.uncompilable)
    fn = autopallas.optimize(case.function, objective="always")
    with warned(1, "attention", "compile"):
        case.same(fn(*case.operands))
        case.same(fn(*case.operands))
    (site,) = fn.report().sites
    assert (site.verdict, site.implementation) == ("applied", "reference")


@pytest.mark.parametrize("options", [{"implementation": "xla"}, {"strict": True}])
def test_one_named_implementation_and_strict_raise(options, monkeypatch):
    case = program()
    break_kernel(monkeypatch, "attention", "forward", programs.uncompilable)
    fn = autopallas.optimize(case.function, objective="always", **options)
    with warned(0), pytest.raises(Exception, match="faults_no_such_target"):
        fn(*case.operands)


def test_one_named_implementation_is_tried_again_whatever_is_remembered(monkeypatch):
    case = program()
    with monkeypatch.context() as patched:
        break_kernel(patched, "attention", "forward", programs.uncompilable)
        with warned(1):
            autopallas.optimize(case.function, objective="always")(*case.operands)
    forget()
    fn = autopallas.optimize(case.function, implementation="xla")
    case.same(fn(*case.operands))
    assert fn.report().counts() == {"attention": 1}


def test_only_the_site_at_fault_is_given_up(monkeypatch):
    """Found by halving, among sites of which each is another."""
    heads = (8, 16, 24, 32, 40)

    def several(arrays):
        return [programs.attention(x, x + 1, x - 1) for x in arrays]

    arrays = [np.random.default_rng(n).standard_normal((16, n), np.float32) for n in heads]
    wanted = several(arrays)

    def fault(x):
        return programs.uncompilable(x) if x.shape[-1] == 24 else x

    break_kernel(monkeypatch, "attention", "forward", fault)
    fn = autopallas.optimize(several, objective="always")
    with warned(1, "compile"):
        jax.tree.map(lambda r, w: np.testing.assert_allclose(r, w, atol=1e-5), fn(arrays), wanted)
    assert [site.verdict for site in fn.report().sites] == ["applied", "applied", "kept", "applied", "applied"]


@pytest.mark.parametrize("fault", [programs.unlowered, programs.uncompilable])
def test_donated_arguments_are_intact_until_the_program_runs(fault, monkeypatch):
    case = program()
    break_kernel(monkeypatch, "attention", "forward", fault)
    fn = autopallas.optimize(jax.jit(case.function, donate_argnums=(0, 1, 2)), objective="always")
    with warned(1):
        case.same(fn(*map(jax.numpy.asarray, case.operands)))
        case.same(fn(*map(jax.numpy.asarray, case.operands)))


def test_a_run_that_took_donated_arguments_says_so(monkeypatch):
    case = program()
    break_kernel(monkeypatch, "attention", "forward", programs.run_fails)
    fn = autopallas.optimize(jax.jit(case.function, donate_argnums=0), objective="always")
    with pytest.raises(jax.errors.JaxRuntimeError, match="the run failed") as caught:
        fn(*map(jax.numpy.asarray, case.operands))
    assert any("donated" in note for note in caught.value.__notes__)


def test_effects_do_not_happen_twice(monkeypatch):
    seen = []

    def told(q, k, v):
        jax.debug.callback(seen.append, 1, ordered=True)
        return programs.attention(q, k, v)

    operands = program().operands
    break_kernel(monkeypatch, "attention", "forward", programs.run_fails)
    fn = autopallas.optimize(told, objective="always")
    with pytest.raises(jax.errors.JaxRuntimeError, match="the run failed"):
        fn(*operands)
    assert len(seen) <= 1


def test_effects_happen_once_where_the_program_did_not_run(monkeypatch):
    seen = []

    def told(q, k, v):
        jax.debug.callback(seen.append, 1, ordered=True)
        return programs.attention(q, k, v)

    case = program()
    break_kernel(monkeypatch, "attention", "forward", programs.uncompilable)
    fn = autopallas.optimize(told, objective="always")
    with warned(1):
        case.same(fn(*case.operands))
    jax.effects_barrier()
    assert len(seen) == 1


class TheirsError(Exception):
    pass


@pytest.mark.parametrize("when", ["trace", "trace of a jit function", "run"])
def test_the_programs_own_errors_stay_its_own(when):
    calls = []

    def fails(q, k, v):
        calls.append(1)
        if when != "run" and len(calls) > 1:
            raise TheirsError("mine")
        out = programs.attention(q, k, v)
        return programs.run_fails(out) if when == "run" else out

    operands = program().operands
    fn = autopallas.optimize(jax.jit(fails) if when == "trace of a jit function" else fails, objective="always")
    if when == "run":
        with warned(0), pytest.raises(jax.errors.JaxRuntimeError, match="the run failed"):
            fn(*operands)
        assert fn.report().counts() == {"attention": 1}
    else:
        fn(*operands)
        with warned(0), pytest.raises(TheirsError, match="mine"):
            fn(*(x[:20] for x in operands))
        # A plain function may fail only because it is traced, so that it is called once more, as it is written.
        assert len(calls) == (3 if when == "trace" else 2)


def test_a_failure_that_does_not_come_back_costs_one_call(monkeypatch):
    left = [1]

    def once(x):
        if left:
            left.pop()
            raise RuntimeError("this once")
        return x

    case = program()
    break_kernel(monkeypatch, "attention", "forward", programs._called_back(once))
    fn = autopallas.optimize(case.function, objective="always")
    with warned(1, "again"):
        case.same(fn(*case.operands))
        case.same(fn(*case.operands))
    assert fn.report().counts() == {"attention": 1}
    assert [failure.stage for failure in fn.report().failures] == ["run"]


def test_a_transformation_from_outside_has_the_original_to_fall_back_to(monkeypatch):
    """Under somebody else's grad: the derivative's kernel is traced only then."""
    case = program()
    gradient = jax.grad(lambda *a: case.function(*a).sum(), argnums=(0, 1, 2))
    wanted = gradient(*case.operands)
    break_kernel(monkeypatch, "attention", "backward", raises(ValueError("no backward today")))
    fn = autopallas.optimize(case.function, objective="always")
    with warned(1, "no backward today"):
        found = jax.grad(lambda *a: fn(*a).sum(), argnums=(0, 1, 2))(*case.operands)
    jax.tree.map(lambda r, w: np.testing.assert_allclose(r, w, atol=5e-5), found, wanted)


@pytest.mark.parametrize("options", [{"implementation": "xla"}, {"strict": True}])
def test_a_derivative_from_outside_raises_where_there_must_be_no_fallback(options, monkeypatch):
    case = program()
    break_kernel(monkeypatch, "attention", "backward", raises(ValueError("no backward today")))
    fn = autopallas.optimize(case.function, objective="always", **options)
    with warned(0), pytest.raises(ValueError, match="no backward today"):
        jax.grad(lambda *a: fn(*a).sum())(*case.operands)
