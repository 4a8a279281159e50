"""Programs divided among eight TPU cores that are not there: compiled ahead of time, with kernels, and send no more."""

import json
import os
import subprocess
import sys

import pytest

from autopallas.compile import tpu

PROGRAM = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import autopallas
from sharding import cases

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
mesh = Mesh(np.array(devices).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

def typed(spec, *shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

heads, rows = P("data", None, "model"), P("data")
programs = {
    "attention": (cases.attend, [typed(heads, 8, 512, 4, 128)] * 3),
    "attention backward": (cases.backward_of(cases.attend, 0, 1, 2), [typed(heads, 8, 512, 4, 128)] * 3),
    "loss": (
        cases.loss,
        [typed(rows, 8, 256, 256), typed(P("model"), 4096, 256), typed(rows, 8, 256, dtype=jnp.int32)],
    ),
}
found = {}
for name, (function, types) in programs.items():
    optimized = autopallas.optimize(jax.jit(function), objective="always")
    lowered = optimized.lower(*types)
    text = lowered.compile().as_text()
    found[name] = {
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "original": cases.collectives(jax.jit(function), types),
        "rewritten": cases.collectives(optimized, types),
    }
print(json.dumps(found))
"""

TOKENS = 8 * 256 // 4  # of one device
WIDER = {"loss": 2 * 16 * TOKENS}
"""Bits that are sent beyond those of the original.

Of a divided vocabulary both programs send three numbers per token: the greatest logit, the sum of exponentials and the
logit of the label.  The TPU's compiler rounds each device's part of the original's sums to bfloat16 and adds them.
Parts of the kernels' are added in float32, and the sum is rounded where the program says so.
"""


@pytest.mark.skipif(tpu.missing() is not None, reason=str(tpu.missing()))
def test_kernels_on_tpus_are_divided_like_the_original():
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, outcome in json.loads(done.stdout.splitlines()[-1]).items():
        assert outcome["kernels"], name
        for kind, count in outcome["rewritten"].items():
            more = WIDER.get(name, 0) if kind == "bits" else 0
            assert count <= outcome["original"].get(kind, 0) + more, (name, outcome)
