"""A program that was planned for one platform and is lowered for another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopallas.graph import Graph, flatten
from autopallas.options import resolve
from autopallas.patterns import find
from autopallas.plan.cross_platform import replan_for
from autopallas.plan.decision import Decision
from autopallas.sites.device import Device


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
