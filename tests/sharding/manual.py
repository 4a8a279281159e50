"""Programs with a shard_map over some axes of the mesh, and with the maps of vmap and pmap over devices; run as a
module, on four devices.

Prints one line of JSON: per case what :mod:`sharding.cases` finds.
"""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopallas
from sharding import cases, typed
from sharding.cases import attend, backward_of, qkv, spelled_loss, tokens

AUTO = (AxisType.Auto,) * 2
EXPLICIT = (AxisType.Explicit,) * 2
BATCHES = (P("data"),) * 3


def mesh(kinds=AUTO):
    return jax.make_mesh(cases.meshes(), ("data", "model"), axis_types=kinds)


def part(function, check=True, axis="data", specs=BATCHES, out=BATCHES[0], kinds=AUTO, axes=None):
    """Each device along one axis of the mesh has its part of the batch; over those not in ``axes`` the compiler
    divides."""

    def mapped(*args):
        settings = {"in_specs": specs, "out_specs": out, "axis_names": axes or {axis}, "check_vma": check}
        return jax.shard_map(function, mesh=mesh(kinds), **settings)(*args)

    return mapped


def objective(weights, x, labels):
    def layer(x, w):
        q, k, v = (jnp.einsum("btc,cnd->btnd", x, w[name]) for name in "qkv")
        return x + jnp.einsum("btnd,ndc->btc", attend(q, k, v), w["o"]), None

    last, _ = lax.scan(layer, x, {name: weights[name] for name in "qkvo"})
    return jnp.mean(spelled_loss(last, weights["w"], labels))


def step():
    """A train step in the way of data parallelism: gradients of each part of the batch, averaged over all."""

    def own(weights, x, labels):
        weights = jax.tree.map(lambda w: lax.pcast(w, "data", to="varying"), weights)
        return lax.pmean(jax.value_and_grad(objective)(weights, x, labels), "data")

    return part(own, specs=(P(), P("data"), P("data")), out=P())


def constrained(q, k, v):
    """One example, whose heads are divided as a constraint says."""
    q, k, v = (cases.constrained(x, NamedSharding(mesh(), P(None, "model"))) for x in (q, k, v))
    return attend(q[None], k[None], v[None])[0]


HEADS = (P("data", None, "model"),) * 3
LABELLED = {"specs": (P("data"), P(), P("data"))}
gradients = (0, 1, 2)

CASES = {
    "attention backward over part of the axes": (
        backward_of(part(attend), *gradients),
        backward_of(attend, *gradients),
        qkv,
        HEADS,
        1,
    ),
    "attention over the inner axis": (
        part(attend, False, "model", (P(None, None, "model"),) * 3, P(None, None, "model")),
        attend,
        qkv,
        HEADS,
        1,
    ),
    "loss backward with the vocabulary divided inside": (
        backward_of(part(spelled_loss, False, **LABELLED), 0, 1),
        backward_of(spelled_loss, 0, 1),
        tokens,
        (P("data"), P("model"), P("data")),
        1,
    ),
    "keys divided inside": (part(attend), attend, qkv, (P("data"), P("data", "model"), P("data", "model")), 0),
    "train step": (step(), jax.value_and_grad(objective), typed.model, typed.STEP, 2),
    "explicit axes": (
        backward_of(part(attend, kinds=EXPLICIT), *gradients),
        backward_of(attend, *gradients),
        qkv,
        HEADS,
        1,
    ),
    "vmap that names an axis": (
        backward_of(jax.vmap(constrained, spmd_axis_name="data"), *gradients),
        backward_of(attend, *gradients),
        qkv,
        HEADS,
        1,
    ),
}
"""(function, the same on one device, arguments, how they are divided, how many sites are replaced)."""


def pmapped():
    """Each device has its batches by pmap, of which the optimized function is inside or around."""
    args = [x.reshape(jax.device_count(), -1, *x.shape[1:]) for x in qkv()]
    inside = autopallas.optimize(attend, objective="always", strict=True)
    around = autopallas.optimize(jax.pmap(attend), objective="always", strict=True)
    uses = {
        "inside": (jax.pmap(inside), attend, inside),
        "around": (around, attend, around),
        "inside a derivative": (jax.pmap(backward_of(inside, *gradients)), backward_of(attend, *gradients), inside),
    }
    return {
        name: {"error": cases.error(function(*args), jax.vmap(plain)(*args))} | cases.verdicts(optimized.report())
        for name, (function, plain, optimized) in uses.items()
    }


def attention_to_all_keys(q, k, v):
    scores = jnp.einsum("td,sd->ts", q, k)
    return jax.nn.softmax(jnp.where(jnp.arange(k.shape[0]) < 5, scores, -jnp.inf)) @ v


def loss_at_rows(x, w):
    """The rows are gathered, and moved back to x."""
    log_probabilities = jax.nn.log_softmax(x @ w)
    return log_probabilities[jnp.arange(len(x)), jnp.where(x[:, 0] > 0, 3, 1)][:, None]


def layer_norm(x, scale, shift):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * scale + shift


def summed(x, w):
    """The result, the same on all devices along "model", is summed over them too, as a varying one."""
    own = jax.nn.softmax(x @ w @ x[:2].T) @ x[:2]
    return lax.psum(own, "model") / jax.lax.axis_size("model") + own


def twice(x, w):
    return 2 * (jax.nn.softmax(x @ w @ x[:2].T) @ x[:2])


SHARED = {
    "attention": (attention_to_all_keys, attention_to_all_keys, ((12, 8), (7, 8), (7, 8))),
    "loss": (loss_at_rows, loss_at_rows, ((12, 8), (8, 5))),
    "layer norm": (layer_norm, layer_norm, ((12, 8), (8,), (8,))),
    "summed": (summed, lambda x, w: jnp.concatenate([twice(half, w) for half in jnp.split(x, 2)]), ((12, 8), (8, 8))),
}
"""(function, the same on one device, shapes): each device has rows of the first operand, and the others whole."""


def gradients_of(function):
    def total(*args):
        return jnp.sum(function(*args) ** 2)

    return lambda *args: jax.grad(total, argnums=tuple(range(len(args))))(*args)


def second_of(function):
    return lambda *args: jax.jvp(gradients_of(function), args, args)


def with_shared_operands():
    """Derivatives of the shared operands are sums over devices, whoever takes them and wherever."""
    found, random = {}, np.random.default_rng(0)
    for name, (function, plain, shapes) in SHARED.items():
        args = [random.standard_normal(shape).astype("float32") for shape in shapes]
        specs = (P("data"), *(P() for _ in shapes[1:]))
        optimized = autopallas.optimize(function, objective="always", strict=True)
        axes = {"axes": {"data", "model"}, "specs": specs, "out": P("data")}
        mapped = part(function, **axes)
        around = autopallas.optimize(jax.jit(mapped), objective="always", strict=True)
        for order, derivative in (("gradients", gradients_of), ("second derivatives", second_of)):
            whole = autopallas.optimize(jax.jit(derivative(mapped)), objective="always", strict=True)
            uses = {
                "inside": jax.jit(derivative(part(optimized, **axes))),
                "around": jax.jit(derivative(around)),
                "outermost": whole,
            }
            wanted = jax.jit(derivative(plain))(*args)
            for use, run in uses.items():
                found[f"{name}, {order}, {use}"] = cases.error(run(*args), wanted)
    return found


def constraints_alone():
    """No argument is on a mesh."""
    optimized = autopallas.optimize(jax.jit(jax.vmap(constrained)), objective="always", strict=True)
    return {"error": cases.error(optimized(*qkv()), attend(*qkv()))} | cases.verdicts(optimized.report())


def demanded_beside_static_arguments():
    """``in_shardings`` speak of the arguments that are not static."""
    q, k, v = qkv()
    by_batch = NamedSharding(mesh(), P("data"))

    def function(q, causal, kv, scale):
        return (attend if causal else none)(q * scale, *kv)

    def none(q, k, v):
        return q

    jitted = jax.jit(function, static_argnames=("causal", "scale"), in_shardings=(by_batch, [by_batch, None]))
    optimized = autopallas.optimize(jitted, objective="always", strict=True)
    return {"error": cases.error(optimized(q, True, [k, v], 2.0), attend(q * 2, k, v))} | cases.verdicts(
        optimized.report()
    )


def run(name):
    function, plain, make, specs, _ = CASES[name]
    devices = mesh(EXPLICIT if name.startswith("explicit") else AUTO)
    args = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(devices, spec)), make(), specs)
    optimized = autopallas.optimize(jax.jit(function), objective="always", strict=True)
    found = cases.compared(jax.jit(function), optimized, args, cases.expected(plain, make))
    return found | cases.verdicts(optimized.report())


if __name__ == "__main__":
    warnings.simplefilter("error", autopallas.AutopallasWarning)  # it would say that a site runs as it is written
    others = {"pmap": pmapped, "constraints alone": constraints_alone}
    others["with shared operands"] = with_shared_operands
    others["demanded beside static arguments"] = demanded_beside_static_arguments
    cases.answer({name: functools.partial(run, name) for name in CASES} | others)
