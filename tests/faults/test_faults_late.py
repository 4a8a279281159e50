"""What fails after the report was made, in lowering or in a transformation around, is entered into it: the original
runs, and the report says so to whoever reads it."""

from __future__ import annotations

import importlib
import os

import jax
import numpy as np
import pytest
from jax import export

import autopallas
from autopallas.report import at_exit
from autopallas.sites.calls import kernel_backward, kernel_forward
from autopallas.tuning import processor
from tests.faults.programs import OPERATIONS, attention, gradient, program, warned


def broken_after(monkeypatch, op, name, times):
    """Lets a kernel fail from the trace after ``times`` on: planning, which traces it first, finds nothing wrong.

    What was traced is forgotten, so that lowering does not find it and traces anew.
    """
    module = importlib.import_module(f"autopallas.kernels.{op}.xla")
    real, seen = getattr(module, name), []

    def fails(*arguments, **keywords):
        seen.append(name)
        kernel_forward.cache_clear()
        kernel_backward.cache_clear()
        if len(seen) > times:
            raise RuntimeError("broken later")
        return real(*arguments, **keywords)

    monkeypatch.setattr(module, name, fails)
    kernel_forward.cache_clear()
    kernel_backward.cache_clear()


USES = {
    "call": (False, lambda fn: fn),
    "under jit": (False, lambda fn: jax.jit(lambda *a: fn(*a))),
    "under vmap": (False, lambda fn: lambda *a: jax.tree.map(lambda x: x[0], jax.vmap(fn)(*(x[None] for x in a)))),
    "under scan": (False, lambda fn: lambda *a: jax.lax.scan(lambda c, _: (fn(*a), None), fn(*a), None, length=1)[0]),
    "under grad": (True, lambda fn: jax.value_and_grad(lambda *a: (fn(*a) ** 2).sum(), argnums=(0, 1))),
    "under jit of grad": (True, lambda fn: jax.jit(jax.value_and_grad(lambda *a: (fn(*a) ** 2).sum(), argnums=(0, 1)))),
}


def told(report, stage="lowering"):
    """The report says that the only site was kept, why, and what failed; it survives being written."""
    (site,) = report.sites
    assert (site.verdict, site.implementation, site.block_sizes, site.replacement) == ("kept", None, None, "")
    assert "broken later" in site.reason
    assert {(f.stage, f.op, f.location) for f in report.failures} == {(stage, site.op, site.location)}
    assert report.counts() == {}
    assert autopallas.Report.from_json(report.to_json()) == report
    return True


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("op", OPERATIONS)
def test_a_forward_that_cannot_be_lowered(op, use, monkeypatch):
    backward, around = USES[use]
    case = program(op, backward)
    broken_after(monkeypatch, op, "forward", 1)
    fn = autopallas.optimize(program(op).function, objective="always")
    with warned(1, "broken later"):
        case.same(around(fn)(*case.operands))
    assert told(fn.report())


@pytest.mark.parametrize("use", ["under grad", "under jit of grad"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_a_backward_that_cannot_be_lowered(op, use, monkeypatch):
    case = program(op, backward=True)
    broken_after(monkeypatch, op, "backward", 0)
    fn = autopallas.optimize(program(op).function, objective="always")
    with warned(1, "broken later"):
        case.same(USES[use][1](fn)(*case.operands))
    assert told(fn.report())


@pytest.mark.parametrize(
    ("name", "use", "stage"),
    [("batched", "under vmap", "batching"), ("with_residuals", "under grad", "differentiation")],
)
def test_a_transformation_that_fails(name, use, stage, monkeypatch):
    backward, around = USES[use]
    case = program(backward=backward)
    site = importlib.import_module("autopallas.kernels.attention.site").AttentionSite

    def fails(self, *arguments):
        raise RuntimeError("broken later")

    monkeypatch.setattr(site, name, fails, raising=False)
    fn = autopallas.optimize(attention, objective="always")
    with warned(1, "broken later"):
        case.same(around(fn)(*case.operands))
    assert told(fn.report(), stage)


def test_strict_raises_late_too(monkeypatch):
    case = program()
    broken_after(monkeypatch, "attention", "forward", 1)
    with pytest.raises(RuntimeError, match="broken later"):
        jax.jit(lambda *a: autopallas.optimize(attention, objective="always", strict=True)(*a))(*case.operands)


def test_other_sites_stay_in_the_report(monkeypatch):
    first, second = program("attention"), program("cross_entropy")

    def both(a, b):
        return first.function(*a), second.function(*b)

    broken_after(monkeypatch, "attention", "forward", 1)
    fn = autopallas.optimize(both, objective="always")
    with warned(1, "broken later"):
        results = jax.jit(lambda *a: fn(*a))(first.operands, second.operands)
    first.same(results[0])
    second.same(results[1])
    assert {site.op: site.verdict for site in fn.report().sites} == {"attention": "kept", "cross_entropy": "applied"}


def test_a_program_exported_for_another_platform(monkeypatch):
    """Nothing was measured there: as long as it was lowered for that platform alone, no kernel runs."""
    monkeypatch.setattr(processor, "vector_extensions", lambda: "avx2")  # with which a row for here was measured
    case = program()
    fn = autopallas.optimize(attention)
    longer = [np.zeros((256, 16), np.float32)] * 3  # rows hold for no site of so little work as the case's
    export.export(jax.jit(fn), platforms=["tpu"])(*longer)
    (site,) = fn.report().sites
    assert (site.verdict, site.implementation) == ("kept", None)
    assert site.reason.startswith("on tpu: nothing was measured")
    fn = autopallas.optimize(attention, objective="always")
    export.export(jax.jit(fn), platforms=["cpu", "tpu"])(*case.operands)
    assert fn.report().counts() == {"attention": 1}


def test_what_is_printed_at_exit_is_the_corrected_report(monkeypatch, capsys):
    log = at_exit._Log(destination="1", process=os.getpid())
    monkeypatch.setattr(at_exit, "_LOG", log)
    case = program()
    broken_after(monkeypatch, "attention", "forward", 1)
    fn = autopallas.optimize(attention, objective="always")
    with warned(1):
        jax.jit(lambda *a: fn(*a))(*case.operands)
    log.flush()
    printed = capsys.readouterr().err
    assert "broken later" in printed
    assert str(fn.report()) in printed


def test_what_could_not_be_run_is_not_printed_at_exit(monkeypatch):
    """A call that is done again has a new report in the place of the first one."""
    from tests.faults.programs import break_kernel, launch_fails

    log = at_exit._Log(destination="1", process=os.getpid())
    monkeypatch.setattr(at_exit, "_LOG", log)
    case = program()
    break_kernel(monkeypatch, "attention", "forward", launch_fails)
    fn = autopallas.optimize(attention, objective="always")
    with warned(1):
        case.same(fn(*case.operands))
    (entry,) = log.entries
    assert entry[1]() == fn.report()
    assert fn.report().counts() == {}


def test_gradients_are_those_of_the_whole_program_too(monkeypatch):
    """A train step whose forward fails late: the backward in the same program runs with the reference's residuals."""
    case = program("attention", backward=True)
    broken_after(monkeypatch, "attention", "forward", 1)
    fn = autopallas.optimize(gradient("attention"), objective="always")
    with warned(1, "broken later"):
        result = jax.jit(lambda *a: fn(*a))(*case.operands)
    case.same(result)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(result))
    assert told(fn.report())
