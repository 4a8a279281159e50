"""A program that was planned for one platform and is lowered for another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopallas.graph import Graph, flatten
from autopallas.options import resolve
from autopallas.patterns import find
from autopallas.plan import cross_platform
from autopallas.plan.cross_platform import replan_for
from autopallas.plan.decision import Decision
from autopallas.sites.device import Device
from autopallas.sites.interpret import mode


def attend(q, k, v):
    return jax.nn.softmax(q @ k.mT / 8.0) @ v


@pytest.mark.parametrize("objective", ["time", "memory", "always"])
def test_what_was_planned_for_a_tpu_is_planned_anew_for_a_cpu_by_the_rows_of_its_table(objective):
    x = jax.ShapeDtypeStruct((1, 2, 1024, 64), jnp.float32)
    (match,), _ = find(Graph(flatten(jax.make_jaxpr(attend)(x, x, x))), None, False)
    planned = Decision("applied", "", "tpu", "pallas_tpu", kind="TPU v5e", options=resolve({"objective": objective}))
    found = replan_for(planned, Device("cpu", "cpu"), match.site, match.original)
    assert found.platform == "cpu"
    assert found.verdict == "kept" or found.implementation == "xla"
    assert objective != "always" or found.verdict == "applied"


def test_a_kernel_that_is_chosen_while_kernels_are_interpreted_is_not_chosen_where_they_are_not():
    x = jax.ShapeDtypeStruct((1, 2, 128, 64), jnp.float32)
    (match,), _ = find(Graph(flatten(jax.make_jaxpr(attend)(x, x, x))), None, False)
    options = resolve({"implementation": ["pallas_tpu", "xla"]})
    planned = Decision("applied", "", "gpu", "pallas_gpu", kind="H100", options=options)

    def chosen() -> str | None:
        return replan_for(planned, Device("cpu", "cpu"), match.site, match.original).implementation

    with mode(True):
        assert chosen() == "pallas_tpu"
    assert chosen() == "xla"
    with mode(True):
        assert chosen() == "pallas_tpu"


def test_what_is_planned_anew_where_64_bit_types_are_enabled_is_traced_there(monkeypatch):
    x = jax.ShapeDtypeStruct((1, 2, 128, 64), jnp.float32)
    (match,), _ = find(Graph(flatten(jax.make_jaxpr(attend)(x, x, x))), None, False)
    planned = Decision("applied", "", "tpu", "pallas_tpu", kind="TPU v5e", options=resolve({"objective": "always"}))
    problems = {False: None, True: "TypeError: no 64-bit indices"}
    monkeypatch.setattr(cross_platform, "_lowering_problem", lambda *_: problems[bool(jax.config.jax_enable_x64)])
    verdicts = []
    for enabled in (False, True):
        with jax.enable_x64(enabled):
            verdicts.append(replan_for(planned, Device("cpu", "other"), match.site, match.original).verdict)
    assert verdicts == ["applied", "kept"]
