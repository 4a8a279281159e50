"""Programs over a mesh, and how their arguments are divided; run as a module, on as many devices as there are.

Prints one line of JSON: for each case that is named, or for all, the largest error against one device, what is left of
the sites, and the collective operations of both programs after compilation.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopallas

B, T, N, D, V, L = 8, 16, 4, 8, 64, 2

_COLLECTIVE = re.compile(r"= (.*) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_ARRAY = re.compile(r"\b[a-z]+(\d+)(?:\w*)\[([\d,]*)\]")


def array(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def qkv(keys=N):
    return array(B, T, N, D), array(B, T, keys, D, seed=1), array(B, T, keys, D, seed=2)


def attend(q, k, v):
    groups = q.shape[2] // k.shape[2]
    if groups > 1:  # with explicit axes jnp.repeat wants to be told the sharding
        k, v = jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2)
    scores = jnp.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(jnp.where(causal, scores, -1e30)), v)


def slopes(q, k, v):
    """Scores with a slope for each head and document numbers for each batch."""
    scores = jnp.einsum("btnd,bsnd->bnts", q, k)
    t = jnp.arange(q.shape[1])
    bias = -jnp.abs(t[:, None] - t) * (2.0 ** -jnp.arange(1, N + 1))[:, None, None]
    document = (t[None] * (1 + jnp.arange(q.shape[0]))[:, None]) // T
    same = document[:, None, :, None] == document[:, None, None, :]
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(jnp.where(same, scores + bias, -jnp.inf)), v)


def tokens():
    return array(B, T, N * D), array(V, N * D, seed=1), np.random.default_rng(2).integers(0, V, (B, T))


def loss(x, w, y):
    """Cross-entropy with a ``w`` whose rows are words."""
    logits = jnp.einsum("btd,vd->btv", x, w)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1))


def attend_and_lose(q, k, v, x, w, y):
    # Not the sum, of whose size a rounding is: all gradients follow a function of the result.
    return jnp.mean(jnp.tanh(attend(q, k, v))) + loss(x, w, y)


def spelled_loss(x, w, y):
    logits = jnp.einsum("btd,vd->btv", x, w)
    return -jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(y, V), -1)


def grouped(*batch):
    sizes = np.array([3, 0, 6, 7], np.int32)
    lhs, rhs = array(*batch, 16, 8), array(*batch, 4, 8, 16, seed=1)
    return lhs, rhs, np.broadcast_to(sizes, (*batch, 4)).copy()


def product(lhs, rhs, sizes):
    return lax.ragged_dot(lhs, rhs, sizes)


def projected(lhs, rhs, sizes):
    return lax.ragged_dot(lhs, rhs, sizes) @ array(16, 4, seed=3)


def activated(lhs, rhs, sizes):
    return jax.nn.silu(lax.ragged_dot(lhs, rhs, sizes))


def experts():
    return {
        "router": array(D, 4),
        "up": array(4, D, 16, seed=1),
        "down": array(4, 16, D, seed=2),
    }, array(16, D, seed=3)


def mixture(weights, x):
    """Every expert computes every token, and counts for those that chose it."""
    probabilities, chosen = lax.top_k(jax.nn.softmax(x @ weights["router"]), 2)
    combine = jnp.sum(jax.nn.one_hot(chosen, 4) * probabilities[..., None], -2)
    hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, weights["up"]))
    return jnp.einsum("tef,efd,te->td", hidden, weights["down"], combine)


def mixture_in_a_loop(weights, x):
    probabilities, chosen = lax.top_k(jax.nn.softmax(x @ weights["router"]), 2)
    total = jnp.zeros_like(x)
    for e in range(4):
        combine = jnp.sum(jnp.where(chosen == e, probabilities, 0), -1)
        total += combine[:, None] * (jax.nn.silu(x @ weights["up"][e]) @ weights["down"][e])
    return total


def dispatched(weights, x):
    """Every expert has slots for all tokens."""
    probabilities, chosen = lax.top_k(jax.nn.softmax(x @ weights["router"]), 1)
    mine = jax.nn.one_hot(chosen[:, 0], 4)
    place = jnp.cumsum(mine, 0) * mine - 1
    slots = jax.nn.one_hot(place.astype(int), x.shape[0]) * mine[..., None]
    inside = jnp.einsum("tec,td->ecd", slots, x)
    outside = jnp.einsum(
        "ecf,efd->ecd", jax.nn.silu(jnp.einsum("ecd,edf->ecf", inside, weights["up"])), weights["down"]
    )
    return jnp.einsum("tec,ecd->td", slots * probabilities[..., None], outside)


def model():
    width = N * D
    scale = 1 / np.sqrt(width)
    weights = {name: scale * array(L, width, N, D, seed=i) for i, name in enumerate("qkv")}
    weights["o"] = scale * array(L, N, D, width, seed=3)
    weights["w"] = array(V, width, seed=4)
    return weights, np.random.default_rng(5).integers(0, V, (B, T + 1))


def constrained(x, sharding):
    return x if sharding is None else lax.with_sharding_constraint(x, sharding)


def apply(weights, ids, activations, each_layer=lambda f: f):
    @each_layer
    def layer(x, w):
        x = constrained(x, activations)
        q, k, v = (jnp.einsum("btc,cnd->btnd", x, w[name]) for name in "qkv")
        return x + jnp.einsum("btnd,ndc->btc", attend(q, k, v), w["o"]), None

    x = constrained(weights["w"][ids[:, :-1]], activations)
    stacked = {name: weights[name] for name in "qkvo"}
    x, _ = lax.scan(layer, x, stacked)
    return loss(x, weights["w"], ids[:, 1:])


ROWS = P("data")
FREE = P(P.UNCONSTRAINED, P.UNCONSTRAINED, P.UNCONSTRAINED)


def train_step(weights, ids, each_layer=lambda f: f, spec=ROWS):
    """With activations that are divided as ``spec`` says; None: on one device."""
    devices = jax.make_mesh(meshes(), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    activations = None if spec is None else NamedSharding(devices, spec)
    value, gradients = jax.value_and_grad(lambda w: apply(w, ids, activations, each_layer))(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def on_one_device(function):
    step = getattr(function, "func", function) is train_step
    return functools.partial(function, spec=None) if step else function


def model_specs(qkv, o, w):
    return {**dict.fromkeys("qkv", qkv), "o": o, "w": w}, P("data")


@functools.cache
def backward_of(function, *active):
    """The gradients of a sum of squares: a tanh of a loss would be flat, and all its gradients zero."""
    return jax.grad(lambda *args: jnp.sum(jnp.square(function(*args))), active)


SAME = {
    "data and heads": P("data", None, "model"),
    "data over both": P(("data", "model")),
    "one device's work everywhere": P(),
}
LOSS = {
    "tokens": (P("data"), P(), P("data")),
    "tokens and vocabulary": (P("data"), P("model"), P("data")),
    "gathered weights": (P("data"), P(None, "data"), P("data")),
    "gathered weights and vocabulary": (P("data"), P("model", "data"), P("data")),
    "gathered vocabulary": (P(("data", "model")), P("data"), P(("data", "model"))),
}
GROUPED = {
    "columns": (P(), P(None, None, "model"), P()),
    "contracted": (P(None, "model"), P(None, "model"), P()),
    "contracted and columns": (P(None, "data"), P(None, "data", "model"), P()),
    "experts": (P(), P("model"), P()),
}


def expert_specs(up, down):
    return {"router": P(), "up": up, "down": down}


EXPERTS = expert_specs(P("model"), P("model"))
MIXTURES = {
    "tokens": (expert_specs(P(), P()), P("data")),
    "tokens over both": (expert_specs(P(), P()), P(("data", "model"))),
    "experts and tokens": (EXPERTS, P("data")),
    "gathered weights": (expert_specs(P(None, "data"), P(None, None, "data")), P("data")),
    "gathered experts": (expert_specs(P("model", "data"), P("model", None, "data")), P("data")),
    "columns": (expert_specs(P(None, None, "model"), P(None, "model")), P("data")),
}
MODEL = {
    "tensor": model_specs(P(None, None, "model"), P(None, "model"), P("model")),
    "gathered": model_specs(P(None, "data"), P(None, None, None, "data"), P(None, "data")),
    "gathered tensor": model_specs(P(None, "data", "model"), P(None, "model", None, "data"), P("model", "data")),
}

CASES = {}
"""(function, arguments, how they are divided, how many sites are replaced; None: whichever do not cost more).

A backward holds its forward: of forwards alone there is one of each operation.  Each case is two programs to compile.
"""
for _name, _spec in SAME.items():
    CASES[f"attention backward: {_name}"] = backward_of(attend, 0, 1, 2), qkv, (_spec,) * 3, 1
CASES |= {
    "attention: data and heads": (attend, qkv, (SAME["data and heads"],) * 3, 1),
    "attention backward: rows": (backward_of(attend, 0, 1, 2), qkv, (P("data", "model"), P("data"), P("data")), 1),
    "attention backward: one key head": (
        backward_of(attend, 0, 1, 2),
        functools.partial(qkv, 1),
        (P("data", None, "model"), P("data"), P("data")),
        1,
    ),
    "attention backward: slopes and documents": (backward_of(slopes, 0, 1, 2), qkv, (P("data", None, "model"),) * 3, 1),
    "attention: keys apart": (attend, qkv, (P(), P(None, "model"), P(None, "model")), 0),
    "attention: contracted": (attend, qkv, (P("data", None, None, "model"),) * 3, 0),
    "loss: tokens and vocabulary": (loss, tokens, LOSS["tokens and vocabulary"], 1),
    "loss: contracted": (loss, tokens, (P("data", None, "model"), P(None, "model"), P("data")), 0),
    "product: contracted and columns": (product, grouped, GROUPED["contracted and columns"], 1),
    "product: experts": (product, grouped, GROUPED["experts"], 1),
    "product: rows and experts": (product, grouped, (P("data"), P("model"), P()), 0),
    "mixture: experts and tokens": (mixture, experts, MIXTURES["experts and tokens"], 1),
    "mixture: experts over the axis of tokens": (mixture, experts, (expert_specs(P("data"), P("data")), P("data")), 0),
    "mixture in a loop: tokens": (mixture_in_a_loop, experts, MIXTURES["tokens over both"], 1),
    "heads alone and a vocabulary alone backward": (
        backward_of(attend_and_lose, 0, 1, 2, 3, 4),
        lambda: (*qkv(), *tokens()),
        (*(P(None, None, "model"),) * 3, P(), P("model"), P()),
        2,
    ),
    "mixture in a loop: experts": (mixture_in_a_loop, experts, (EXPERTS, P()), 0),
    "dispatched: tokens": (dispatched, experts, MIXTURES["tokens"], 0),
}
for _name in ("tokens", "experts and tokens", "gathered experts", "columns"):
    CASES[f"mixture backward: {_name}"] = backward_of(mixture, 0, 1), experts, MIXTURES[_name], 1
for _name in ("tokens", "tokens and vocabulary", "gathered weights and vocabulary", "gathered vocabulary"):
    CASES[f"loss backward: {_name}"] = backward_of(loss, 0, 1), tokens, LOSS[_name], 1
for _name in ("tokens and vocabulary", "gathered weights"):
    CASES[f"spelled loss backward: {_name}"] = backward_of(spelled_loss, 0, 1), tokens, LOSS[_name], 1
for _name, _specs in GROUPED.items():
    CASES[f"product backward: {_name}"] = backward_of(projected, 0, 1), grouped, _specs, 1
# What an activation makes of parts of a sum does not sum up to what it makes of the sum.
for _name, _sites in {"columns": 1, "contracted": 0, "experts": 1}.items():
    CASES[f"activated product backward: {_name}"] = backward_of(activated, 0, 1), grouped, GROUPED[_name], _sites
CASES["product: batches"] = jax.vmap(product), functools.partial(grouped, B), (P("data"),) * 3, 1
CASES["train step: tensor"] = train_step, model, MODEL["tensor"], 2
CASES["free train step: gathered"] = functools.partial(train_step, spec=FREE), model, MODEL["gathered"], None
CASES["train step with checkpoints: gathered tensor"] = (
    functools.partial(train_step, each_layer=jax.checkpoint),
    model,
    MODEL["gathered tensor"],
    2,
)


def collectives(jitted, args):
    return sent(jitted.lower(*args).compile())


def sent(compiled):
    """How often what is sent, and how many bits are received with that."""
    found: Counter[str] = Counter()
    for types, kind in _COLLECTIVE.findall(compiled.as_text()):
        found[kind] += 1
        for width, shape in _ARRAY.findall(types):
            found["bits"] += int(width) * math.prod(map(int, filter(None, shape.split(","))))
    return found


@functools.cache
def expected(function, make):
    """What one device computes: once for all the ways of dividing it."""
    return jax.tree.leaves(jax.jit(on_one_device(function))(*make()))


def compared(original, optimized, args, wanted):
    """The largest error, and what both programs send; each is compiled once."""
    programs = [jitted.lower(*args).compile() for jitted in (original, optimized)]
    return {
        "error": error(programs[1](*args), wanted),
        "original": sent(programs[0]),
        "rewritten": sent(programs[1]),
    }


def error(given, wanted):
    """The largest over all results, each relative to its largest value."""
    pairs = zip(map(np.asarray, jax.tree.leaves(given)), map(np.asarray, jax.tree.leaves(wanted)), strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs)


def run(name, mesh):
    function, make, specs, _ = CASES[name]
    args = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), make(), specs)
    optimized = autopallas.optimize(jax.jit(function), objective="always", strict=True)
    found = compared(jax.jit(function), optimized, args, expected(function, make))
    return found | verdicts(optimized.report())


def verdicts(report):
    return {
        "applied": sum(report.counts().values()),
        "kept": [site.reason for site in report.sites if site.verdict == "kept"],
    }


def meshes():
    return {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (4, 2)}[jax.device_count()]


def answer(calls):
    """Prints what the calls give whose names are arguments of this process; of all where there are none."""
    print(json.dumps({name: calls[name]() for name in sys.argv[1:] or calls}))


if __name__ == "__main__":
    mesh = jax.make_mesh(meshes(), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    answer({name: functools.partial(run, name, mesh) for name in CASES})
