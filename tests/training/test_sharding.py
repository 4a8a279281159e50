"""Derivatives inside and outside of shard_map, on one device and, in a process of its own, on two."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from support import tiers
from support.catalogue import array
from support.checks import TOLERANCE, absolute_errors, quadratic, replaced
from support.compare import compiled, optimized_like_a_user
from support.oracle import evaluate

import autopallas
from training.catalogue import D, S, T, attend, deep, layer, loss_of, qkv

ARGNUMS = (0, 1, 2)


PARTS, WHOLE = PartitionSpec("data"), PartitionSpec()


def split(function, check_vma, mesh, out=PARTS):
    return jax.shard_map(function, mesh=mesh, in_specs=(PARTS,) * 3, out_specs=out, check_vma=check_vma)


def gradient_inside(mesh, check_vma):
    """Each device differentiates its own part of the batch."""
    return split(jax.grad(loss_of(attend), argnums=ARGNUMS), check_vma, mesh), jax.grad(loss_of(attend), ARGNUMS), qkv()


def gradient_outside(mesh, check_vma):
    function = loss_of(split(attend, check_vma, mesh))
    return jax.grad(function, argnums=ARGNUMS), jax.grad(loss_of(attend), ARGNUMS), qkv()


def gradient_outside_a_sum_over_devices(mesh, check_vma):
    def total(q, k, v):
        return lax.psum(loss_of(attend)(q, k, v), "data")

    function = split(total, check_vma, mesh, WHOLE)
    return jax.value_and_grad(function, argnums=ARGNUMS), jax.value_and_grad(loss_of(attend), ARGNUMS), qkv()


def data_parallel_step(mesh, check_vma):
    """Parameters are on every device, gradients are summed over all: a train step as it is often written."""

    def own(w, x):
        w = jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), w) if check_vma else w
        value, gradient = jax.value_and_grad(loss_of(scanned))(w, x)
        return lax.psum((value, gradient), "data")

    function = jax.shard_map(own, mesh=mesh, in_specs=(WHOLE, PARTS), out_specs=WHOLE, check_vma=check_vma)
    return function, jax.value_and_grad(loss_of(scanned)), deep()


def scanned(w, x):
    return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


def over_batches(function, mesh, check_vma):
    """Parameters on every device, each with its own part of the batch."""
    return jax.shard_map(function, mesh=mesh, in_specs=(WHOLE, PARTS), out_specs=PARTS, check_vma=check_vma)


def both(function):
    return jax.value_and_grad(loss_of(function), argnums=(0, 1))


def gradient_outside_of_a_scan(mesh, check_vma):
    return both(over_batches(scanned, mesh, check_vma)), both(scanned), deep()


def gradient_outside_of_a_scan_of_checkpoints(mesh, check_vma):
    def model(w, x):
        return lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, w)[0]

    return both(over_batches(model, mesh, check_vma)), both(model), deep()


def gradient_outside_of_a_scan_around_it(mesh, check_vma):
    one = over_batches(lambda w, x: layer(x, w), mesh, check_vma)
    return both(lambda w, x: lax.scan(lambda x, w: (one(w, x), None), x, w)[0]), both(scanned), deep()


def gradient_outside_of_a_branch_in_it(mesh, check_vma):
    def model(w, x):
        return lax.cond(jnp.sum(x) > -1e6, lambda w, x: layer(x, w[0]), lambda w, x: x + jnp.sum(w), w, x)

    return both(over_batches(model, mesh, check_vma)), both(model), deep()


def gradient_outside_of_one_query(mesh, check_vma):
    """The logsumexp is one number on each device."""
    q, k, v = array(D), array(2, S, D, seed=1), array(2, S, D, seed=2)

    def one(q, k, v):
        return (jax.nn.softmax(q @ k[0].T) @ v[0])[None]

    specs = (WHOLE, PARTS, PARTS)
    function = loss_of(jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=PARTS, check_vma=check_vma))
    if mesh.size == 1:
        plain = loss_of(one)
    else:
        plain = loss_of(lambda q, k, v: jnp.concatenate([one(q, k[i:], v[i:]) for i in range(2)]))
    return jax.grad(function, ARGNUMS), jax.grad(plain, ARGNUMS), (q, k, v)


def gradient_outside_of_a_mesh_of_two_axes(mesh, check_vma):
    """Heads along one axis of the mesh, and nothing along the other."""
    mesh = Mesh(mesh.devices.reshape(1, -1), ("data", "model"))
    spec = PartitionSpec("data", "model")
    q, k, v = (jnp.concatenate([x, x[:, :1] * 0.5], 1) for x in qkv())  # four heads
    function = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=check_vma)
    return jax.grad(loss_of(function), ARGNUMS), jax.grad(loss_of(attend), ARGNUMS), (q, k, v)


def gradient_outside_with_keys_on_every_device(mesh, check_vma):
    function = jax.shard_map(attend, mesh=mesh, in_specs=(PARTS, WHOLE, WHOLE), out_specs=PARTS, check_vma=check_vma)
    q, k, v = qkv()
    return jax.grad(loss_of(function), ARGNUMS), jax.grad(loss_of(attend), ARGNUMS), (q, k[0], v[0])


CASES = [
    gradient_inside,
    gradient_outside,
    gradient_outside_a_sum_over_devices,
    data_parallel_step,
    gradient_outside_of_a_scan,
    gradient_outside_of_a_scan_of_checkpoints,
    gradient_outside_of_a_scan_around_it,
    gradient_outside_of_a_branch_in_it,
    gradient_outside_of_one_query,
    gradient_outside_of_a_mesh_of_two_axes,
    gradient_outside_with_keys_on_every_device,
]


def run(case, check_vma, devices):
    """What is wrong with a case on some devices; nothing, if empty."""
    mesh = Mesh(jax.devices()[:devices], ("data",))
    function, plain, args = case(mesh, check_vma)
    optimized = optimized_like_a_user(function)
    traced = compiled(lambda *args: optimized(*args)).trace(*args)
    given = traced.lower().compile()(*args)
    true = evaluate(jax.make_jaxpr(plain)(*args), *args)
    error, mean, largest = absolute_errors(given, true)
    complaints = []
    if not error <= TOLERANCE["float32"] * largest:
        complaints.append(f"max absolute error {error:.2e}, mean {mean:.2e} of values up to {largest:.2e}")
    report = optimized.report()
    if replaced(report) != ["forward+backward"]:
        complaints.append(f"replaced {replaced(report)}: {[miss.reason for miss in report.near_misses]}")
    sizes = (T, T) if len(args) == 2 else (T, S)
    return complaints + quadratic(traced.jaxpr, sizes)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_gradients_around_shard_map(case, check_vma):
    assert run(case, check_vma, devices=1) == []


def unreduced_from_a_shard_map(q, k, v):
    """What each device attends to is summed behind the shard_map."""
    inside = jax.shard_map(
        lambda *parts: lax.pcast(attend(*parts), "data", to="unreduced"),
        out_specs=PartitionSpec(unreduced={"data"}),
    )
    return jax.sharding.reshard(inside(q, k, v), PartitionSpec())


def unreduced_from_a_product(q, k, v):
    """Keys are divided, so that the product with the values leaves a sum to each device."""
    probabilities = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) / 8, axis=-1)
    whole = jnp.einsum("bts,bsd->btd", probabilities, v, out_sharding=PartitionSpec(unreduced={"data"}))
    return jax.sharding.reshard(whole, PartitionSpec())


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(("function", "axis"), [(unreduced_from_a_shard_map, 0), (unreduced_from_a_product, 1)])
def test_what_is_yet_to_be_summed_over_devices_is_no_failure(function, axis, gradient):
    mesh = Mesh(jax.devices()[:1], ("data",), axis_types=(AxisType.Explicit,))
    args = [array(2, 8, D, seed=seed) for seed in range(3)]
    wanted = jax.grad(lambda *args: jnp.sum(function(*args) ** 2), argnums=(0, 1, 2)) if gradient else function
    with jax.set_mesh(mesh):
        parts = PartitionSpec(*[None] * axis, "data")
        spread = [jax.device_put(x, PartitionSpec() if axis and x is args[0] else parts) for x in args]
        report = autopallas.explain(jax.jit(wanted), *spread)
    assert [site.op for site in report.sites] == ["attention"]
    assert not report.failures


def test_gradients_around_shard_map_on_two_devices():
    """Each with and without ``check_vma``; in turns, where few cases are to run."""
    environment = dict(os.environ)
    environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "training.test_sharding", tiers.tier],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def sharded_batch():
    """The mesh is automatic: jit partitions a train step whose batch is spread over two devices."""
    mesh = Mesh(jax.devices()[:2], ("data",))
    w, x = deep()
    args = w, jax.device_put(x, NamedSharding(mesh, PARTS))
    step = jax.jit(both(scanned))
    given, expected = optimized_like_a_user(step)(*args), step(*args)
    complaints = []
    error, _, largest = absolute_errors(given, expected)
    if not error <= 2e-5 * largest:
        complaints.append(f"max absolute error {error:.2e} of values up to {largest:.2e}")
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        if not a.sharding.is_equivalent_to(b.sharding, jnp.ndim(a)):
            complaints.append(f"a result is sharded {a.sharding}, not {b.sharding}")
    return complaints


if __name__ == "__main__":
    wrong = [
        f"{case.__name__}, check_vma={check_vma}: {complaint}"
        for position, case in enumerate(CASES)
        for check_vma in ((True, False) if sys.argv[1] == "nightly" else (position % 2 == 0,))
        for complaint in run(case, check_vma, devices=2)
    ]
    wrong += [f"sharded batch: {complaint}" for complaint in sharded_batch()]
    print("\n".join(wrong))
    sys.exit(bool(wrong))
