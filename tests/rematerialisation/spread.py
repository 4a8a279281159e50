"""A train step of layers in a scan on a mesh of four devices, as it is written and with less in its stacks, as JSON."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autopallas
from tests.rematerialisation.test_devices import example, layers
from tests.sharding.cases import error, sent


def main() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = (PartitionSpec(None, "data", "model"), PartitionSpec(None, "model", "data")), PartitionSpec("data")
    keys = iter(jax.random.split(jax.random.key(0), 3))
    arguments = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape) / 8, example(jnp.float32))
    arguments = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), arguments, specs)
    step = jax.value_and_grad(layers)
    found = {}
    for name, options in {"original": {"ops": "-rematerialisation"}, "rematerialised": {}}.items():
        optimized = autopallas.optimize(jax.jit(step), objective="memory", strict=True, **options)
        compiled = optimized.lower(*arguments).compile()
        found[name] = {
            "bytes": compiled.memory_analysis().temp_size_in_bytes,
            "sent": sent(compiled),
            "arrays": sum(one.arrays for one in optimized.report().rematerialised),
            "error": error(optimized(*arguments), step(*arguments)),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
