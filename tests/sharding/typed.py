"""Programs over meshes with explicit axes, where types say how arrays are divided; run as a module, on as many devices
as there are.

Prints one line of JSON: per case what :mod:`sharding.cases` finds, and what is wrong with the types.
"""

from __future__ import annotations

import contextlib
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopallas
from sharding import cases
from sharding.cases import (
    B,
    D,
    L,
    N,
    T,
    V,
    array,
    attend,
    backward_of,
    experts,
    grouped,
    loss,
    mixture,
    qkv,
    slopes,
    spelled_loss,
    tokens,
)

EXPLICIT = (AxisType.Explicit,) * 2
MIXED = (AxisType.Explicit, AxisType.Auto)


def mesh(kinds=EXPLICIT):
    return jax.make_mesh(cases.meshes(), ("data", "model"), axis_types=kinds)


def divided(x, *spec):
    """With a sharding on a mesh; as it is on one device."""
    kind = jax.typeof(x).sharding
    return x if kind.mesh.empty else jax.sharding.reshard(x, NamedSharding(kind.mesh, P(*spec)))


def product(*spec):
    """With the sharding of the result, which JAX wants to be told."""

    def function(lhs, rhs, sizes):
        kind = jax.typeof(lhs).sharding
        out = {} if kind.mesh.empty else {"out_sharding": NamedSharding(kind.mesh, P(*spec))}
        return lax.ragged_dot(lhs, rhs, sizes, **out)

    return function


def experts_apart(weights, x):
    """The sum over experts has to be told its sharding."""
    probabilities, chosen = lax.top_k(jax.nn.softmax(x @ weights["router"]), 2)
    combine = divided(jnp.sum(jax.nn.one_hot(chosen, 4) * probabilities[..., None], -2), "data", "model")
    hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, weights["up"])) * combine[..., None]
    kind = jax.typeof(x).sharding
    out = {} if kind.mesh.empty else {"out_sharding": NamedSharding(kind.mesh, P("data"))}
    return jnp.einsum("tef,efd->td", hidden, weights["down"], **out)


def gathered_mixture(weights, x):
    return mixture({name: divided(w) for name, w in weights.items()}, x)


def model():
    width = N * D
    weights = {name: array(L, width, N, D, seed=i) / np.sqrt(width) for i, name in enumerate("qkv")}
    weights["o"] = array(L, N, D, width, seed=3) / np.sqrt(width)
    weights["w"] = array(V, width, seed=4) / np.sqrt(width)
    return weights, array(B, T, width, seed=5), np.random.default_rng(6).integers(0, V, (B, T))


def train_step(weights, x, labels, each_layer=lambda f: f):
    """Heads, and what is computed from them, over "model"; weights gathered, where they are divided, over "data"."""

    @each_layer
    def layer(x, w):
        q, k, v = (jnp.einsum("btc,cnd->btnd", x, divided(w[name], None, "model")) for name in "qkv")
        heads = divided(attend(q, k, v), "data")
        return x + jnp.einsum("btnd,ndc->btc", heads, divided(w["o"])), None

    def mean(weights):
        stacked = {name: weights[name] for name in "qkvo"}
        last, _ = lax.scan(layer, x, stacked)
        return jnp.mean(spelled_loss(last, weights["w"], labels))

    value, gradients = jax.value_and_grad(mean)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


HEADS = P("data", None, "model")
WEIGHTS = {**dict.fromkeys("qkv", P(None, "data", "model")), "o": P(None, "model", None, "data"), "w": P("model")}
STEP = WEIGHTS, P("data"), P("data")

CASES = {
    "attention: one device's work everywhere": (attend, qkv, (P(),) * 3, 1),
    "attention backward: slopes": (backward_of(slopes, 0, 1, 2), qkv, (HEADS,) * 3, 1),
    "attention backward: rows": (backward_of(attend, 0, 1, 2), qkv, (P("data", "model"), P("data"), P("data")), 1),
    "attention: queries and documents": (slopes, qkv, (P("data", "model"), P("data"), P("data")), 1),
    "loss backward: tokens": (backward_of(loss, 0, 1), tokens, (P("data"), P(), P("data")), 1),
    "loss backward: gathered weights": (backward_of(loss, 0, 1), tokens, (P("data"), P(None, "data"), P("data")), 1),
    "train step": (train_step, model, STEP, 2),
    "train step with checkpoints": (functools.partial(train_step, each_layer=jax.checkpoint), model, STEP, 2),
    "mixture backward: tokens": (backward_of(mixture, 0, 1), experts, cases.MIXTURES["tokens"], 1),
    "mixture backward: experts and tokens": (
        backward_of(experts_apart, 0, 1),
        experts,
        cases.MIXTURES["experts and tokens"],
        1,
    ),
    "mixture backward: gathered weights": (
        backward_of(gathered_mixture, 0, 1),
        experts,
        cases.MIXTURES["gathered weights"],
        1,
    ),
    "product: columns": (product(None, "model"), grouped, (P(), P(None, None, "model"), P()), 1),
    "product: groups": (product(), grouped, (P(), P("data"), P()), 0),
}
for _name in ("data and heads", "data over both"):
    CASES[f"attention backward: {_name}"] = backward_of(attend, 0, 1, 2), qkv, (cases.SAME[_name],) * 3, 1
for _name in ("tokens and vocabulary", "gathered weights and vocabulary"):
    CASES[f"loss backward: {_name}"] = backward_of(spelled_loss, 0, 1), tokens, cases.LOSS[_name], 1

EDGES = {
    "gradient and vmap outside": (
        lambda f: backward_of(jax.vmap(f), 0, 1, 2),
        lambda q, k, v: attend(q[None], k[None], v[None])[0],
        qkv,
        (HEADS,) * 3,
    ),
    "second derivative outside": (
        lambda f: backward_of(lambda *args: backward_of(f, 0)(*args)[0], 0),
        attend,
        qkv,
        (HEADS,) * 3,
    ),
    "scan and gradient outside": (
        lambda f: backward_of(lambda q, k, v: lax.scan(lambda x, _: (f(x, k, v), None), q, None, 2)[0], 0, 1, 2),
        attend,
        qkv,
        (HEADS,) * 3,
    ),
}
"""Transformations around the optimized function: (transformation, function, arguments, how they are divided)."""

OTHERS = {
    "mesh in force": (lambda f: f, attend, qkv, (HEADS,) * 3),
    "several kinds of axes": (lambda f: f, slopes, qkv, (P("data"),) * 3, MIXED),
}

KINDS = {
    "attention": (backward_of(attend, 0, 1, 2), qkv, (HEADS,) * 3, MIXED),
    "attention, model explicit": (backward_of(attend, 0, 1, 2), qkv, (HEADS,) * 3, MIXED[::-1]),
    "loss": (backward_of(spelled_loss, 0, 1), tokens, (P("data"), P("model"), P("data")), MIXED),
    "mixture": (backward_of(mixture, 0, 1), experts, cases.MIXTURES["experts and tokens"], MIXED),
}
"""Over meshes with one explicit and one automatic axis: (function, arguments, how they are divided, kinds)."""


def types(function, args):
    return [str(aval) for aval in jax.make_jaxpr(function)(*args).out_avals]


def run(name, around, function, make, specs, kinds=EXPLICIT):
    plain, devices = make(), mesh(kinds)
    wanted = jax.tree.leaves(jax.jit(around(function))(*plain))
    args = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(devices, spec)), plain, specs)
    optimized = autopallas.optimize(jax.jit(function), objective="always", strict=True)
    with jax.set_mesh(devices) if name == "mesh in force" else contextlib.nullcontext():
        found = cases.compared(jax.jit(around(function)), jax.jit(around(optimized)), args, wanted)
        found["types"] = [types(around(f), args) for f in (function, optimized)]
    return found | cases.verdicts(optimized.report())


def mixed(function, make, specs, kinds):
    """Optimized outermost, which is where it is known how the compiler divides."""
    plain, devices = make(), mesh(kinds)
    args = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(devices, spec)), plain, specs)
    optimized = autopallas.optimize(jax.jit(function), objective="always", strict=True)
    found = cases.compared(jax.jit(function), optimized, args, cases.expected(function, make))
    found |= cases.verdicts(optimized.report())
    return found | {"types": [types(f, args) for f in (function, optimized)]}


if __name__ == "__main__":
    warnings.simplefilter("error", autopallas.AutopallasWarning)  # it would say that a site runs as it is written
    chosen = {name: (lambda f: f, *case[:3]) for name, case in CASES.items()} | EDGES | OTHERS
    calls = {name: functools.partial(run, name, *case) for name, case in chosen.items()}
    calls |= {f"several kinds of axes: {name}": functools.partial(mixed, *case) for name, case in KINDS.items()}
    cases.answer(calls)
