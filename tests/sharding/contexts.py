"""Programs that change the types of a mesh's axes on the way, by ``auto_axes`` and ``explicit_axes``; run as a module,
on as many devices as there are.

Prints one line of JSON: per case the largest error relative to the original, how many sites were applied, and what the
report says of the others.
"""

from __future__ import annotations

import json
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopallas

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ROWS = P("data")
random = np.random.default_rng(0)
QKV = [random.standard_normal((8, 64, 4, 16), np.float32) for _ in range(3)]
HEAD = [
    random.standard_normal((8, 32, 16), np.float32),
    random.standard_normal((16, 128), np.float32),
    random.integers(0, 128, (8, 32)),
]
GROUPED = [
    random.standard_normal((64, 32), np.float32),
    random.standard_normal((4, 32, 16), np.float32),
    np.array([16, 16, 20, 12], np.int32),
]


def attend(q, k, v):
    """With a mask that each context computes for itself."""
    scores = jnp.einsum("btnd,bsnd->bnts", q, k) / 4
    length = scores.shape[-1]
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores, axis=-1), v)


def loss(x, table, labels):
    logits = x @ table
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def auto(function, out, **axes):
    return lambda *arrays: jax.sharding.auto_axes(function, out_sharding=out, **axes)(*arrays)


def explicit(function, *given):
    return lambda *arrays: jax.sharding.explicit_axes(function, in_sharding=given)(*arrays)


def three_layers(q, k, v):
    q = attend(q, k, v)
    q = auto(attend, ROWS)(q, k, v)
    return attend(q, k, v)


def explicit_within(q, k, v):
    return explicit(attend, ROWS, ROWS, ROWS)(attend(q, k, v), k, v)


def in_scan(q, k, v):
    return lax.scan(lambda q, _: (auto(attend, ROWS)(q, k, v), None), q, None, length=2)[0]


BOTH = (EXPLICIT, EXPLICIT)
CASES = {
    # name: (function, types of the axes, arrays, their specs, sites)
    "auto": (auto(attend, ROWS), BOTH, QKV, [ROWS] * 3, 1),
    "auto over heads": (auto(attend, P("data", None, "model")), BOTH, QKV, [P("data", None, "model")] * 3, 1),
    "auto of one axis": (auto(attend, ROWS, axes="data"), BOTH, QKV, [ROWS] * 3, 1),
    "auto of the explicit axis": (auto(attend, ROWS), (EXPLICIT, AUTO), QKV, [ROWS] * 3, 1),
    "auto between explicit": (three_layers, BOTH, QKV, [ROWS] * 3, 3),
    "explicit in auto": (auto(explicit_within, ROWS), BOTH, QKV, [ROWS] * 3, 2),
    "explicit": (explicit(attend, ROWS, ROWS, ROWS), (AUTO, AUTO), QKV, [ROWS] * 3, 1),
    "auto in a scan": (in_scan, BOTH, QKV, [ROWS] * 3, 1),
    "auto in a checkpoint": (jax.checkpoint(auto(attend, ROWS)), BOTH, QKV, [ROWS] * 3, 1),
    "loss": (auto(loss, P()), BOTH, HEAD, [ROWS, P(), ROWS], 1),
    "grouped": (auto(lax.ragged_dot, P()), BOTH, GROUPED, [P()] * 3, 1),
}
USES = ("forward", "gradient", "under jit", "under grad", "under vmap")


def run(use, function, kinds, arrays, specs):
    devices = len(jax.devices())
    sides = (devices // 2, 2) if devices > 1 else (1, 1)
    mesh = jax.make_mesh(sides, ("data", "model"), axis_types=kinds)
    floating = tuple(i for i, x in enumerate(arrays) if x.dtype == np.float32)

    def gradient(function):
        return jax.value_and_grad(lambda *a: jnp.sum(function(*a) ** 2), argnums=floating)

    with jax.set_mesh(mesh):
        args = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
        program = gradient(function) if use == "gradient" else function
        optimized = autopallas.optimize(program, objective="always", strict=True)
        around = {
            "under jit": lambda f: jax.jit(lambda *a: f(*a)),
            "under grad": lambda f: jax.jit(gradient(f)),
            "under vmap": lambda f: jax.jit(jax.vmap(lambda *a: f(*a))),
        }.get(use, lambda f: f)
        if use == "under vmap":
            args = [jnp.stack([x, x]) for x in args]
        wanted, found = jax.jit(around(program))(*args), around(optimized)(*args)

        def error(x, y):
            return float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y)))

        report = optimized.report()
        return {
            "error": max(jax.tree.leaves(jax.tree.map(error, found, wanted))),
            "applied": sum(report.counts().values()),
            "kept": [site.reason for site in report.sites if site.verdict == "kept"],
            "failures": [failure.error for failure in report.failures],
        }


if __name__ == "__main__":
    warnings.simplefilter("error", autopallas.AutopallasWarning)  # it would say that a site runs as it is written
    chosen = [name for name in CASES if not sys.argv[1:] or name in sys.argv[1:]]
    print(json.dumps({f"{name}, {use}": run(use, *CASES[name][:-1]) for name in chosen for use in USES}))
