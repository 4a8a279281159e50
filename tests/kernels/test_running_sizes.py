"""Reports tell the sizes with which kernels compute, whatever the block sizes are that they are asked for."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.kernels.mixture_of_experts.cases import mixture
from autopallas.kernels.recurrence.example import program as recurrence
from autopallas.patterns import find
from autopallas.sites.calls import kernel_forward
from autopallas.sites.device import Device
from autopallas.sites.interpret import settled
from autopallas.sites.operation import Supported, operation_folders, operation_named, operation_names
from autopallas.sites.spec import NoBlockSizes

CPU, V5E, H100 = Device("cpu", "cpu"), Device("tpu", "TPU v5 lite"), Device("gpu", "NVIDIA H100 80GB HBM3")
DEVICES = {"xla": CPU, "pallas_tpu": V5E, "pallas_gpu": H100}


def attend(q, k, v):
    return jax.nn.softmax(q @ k.T / 8, axis=-1) @ v


def loss(x, w, labels):
    logits = (x @ w).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def gated(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def linear(q, k, v):
    return jnp.tril(q @ k.T) @ v


# Lengths that no power of two divides, and further sizes that no block has.
PROGRAMS = {
    "attention": (attend, ((1500, 48), (1100, 48), (1100, 40)), ()),
    "cross_entropy": (loss, ((1500, 48), (48, 5000)), ((1500,),)),
    "grouped_matmul": (jax.lax.ragged_dot, ((1500, 48), (3, 48, 80)), ((3,),)),
    "mixture_of_experts": (mixture, ((750, 48), (12, 48, 80), (12, 80, 48), (750, 2)), ((750, 2),)),
    "gated_mlp": (gated, ((1500, 48), (48, 144), (48, 144), (144, 48)), ()),
    "linear_attention": (linear, ((1500, 48), (1500, 48), (1500, 40)), ()),
    "recurrence": (recurrence()[0], ((100, 3, 48), (100, 3, 48), (100, 3, 40), (3,)), ()),
}


def match_of(folder, dtype="float32"):
    program, floats, integers = PROGRAMS[folder]
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape in floats]
    types += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers]
    matches, misses = find(Graph(flatten(jax.make_jaxpr(program)(*types))), ("-respelling",), True)
    assert len(matches) == 1, misses
    return matches[0]


def kind_of(op):
    return operation_named(op).part("block_sizes").BlockSizes


def asked(match, name, device):
    """The block sizes that a search would try, as far as they are valid for the site."""
    kind = kind_of(match.op)
    own = match.site.operation.hook(name, "candidates")
    return [kind.get_default().fitted(match.spec), *(own(match.spec, device) if own else kind.candidates(match.spec))]


def lengths(jaxpr):
    """The length of each axis of each value in a program and in the kernels that it calls."""
    found = set()
    for equation in jaxpr.eqns:
        for variable in (*equation.invars, *equation.outvars):
            found.update(getattr(variable.aval, "shape", ()))
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found |= {n for v in inner.invars for n in getattr(v.aval, "shape", ())} | lengths(inner)
    return found


def traced(match, name, sizes, device):
    abstract = AbstractDevice(device_kind=device.kind, num_cores=1, platform=device.platform)
    mesh = AbstractMesh((), (), abstract_device=abstract)
    with device.targeted(), settled(), contextlib.nullcontext() if device == CPU else use_abstract_mesh(mesh):
        return jax.make_jaxpr(kernel_forward(match.site, name, sizes))(*match.original.in_avals).jaxpr


def folders():
    having = [name for name in operation_names() if kind_of(name) is not NoBlockSizes]
    return [folder for name in having for folder in operation_folders(name)]


def test_each_operation_with_block_sizes_has_a_program_here():
    assert set(folders()) == set(PROGRAMS)


OF_KERNELS = [
    (folder, name) for folder in PROGRAMS for name in ("xla", "pallas_tpu") if operation_named(folder).has(name)
]


@pytest.mark.parametrize(("folder", "name"), OF_KERNELS)
def test_a_kernel_has_tiles_of_the_sizes_that_run_and_of_no_others(folder, name):
    match, device = match_of(folder), DEVICES[name]
    assert isinstance(match.site.operation.supports(name, match.spec, device), Supported)
    axes = {n for aval in match.original.in_avals for n in aval.shape}
    for sizes in asked(match, name, device):
        if sizes.to_dict().get("forward", "chunked") != "chunked":  # such a recurrence has chunks in its backward alone
            continue
        running = match.site.operation.running_sizes(name, match.spec, sizes, device)
        wanted = {n: size for n, size in running.items() if isinstance(size, int)}
        other = {size for n, size in sizes.to_dict().items() if n in wanted} - {0, *wanted.values(), *axes}
        found = lengths(traced(match, name, sizes, device))
        assert wanted
        assert set(wanted.values()) <= found, (sizes, running)
        assert not other & found, (sizes, running)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("folder", PROGRAMS)
def test_who_asks_for_the_sizes_that_run_gets_them(folder, name):
    match, device = match_of(folder, "bfloat16" if name == "pallas_gpu" else "float32"), DEVICES[name]
    kind = kind_of(match.op)
    if not isinstance(match.site.operation.supports(name, match.spec, device), Supported):
        pytest.skip(f"{name} does not compute it")
    for sizes in asked(match, name, device):
        running = match.site.operation.running_sizes(name, match.spec, sizes, device)
        if running:
            again = kind(**sizes.to_dict() | dict(running))
            assert match.site.operation.running_sizes(name, match.spec, again, device) == running


def test_the_reference_has_no_block_sizes():
    match = match_of("attention")
    sizes = kind_of(match.op).get_default()
    assert match.site.operation.running_sizes("reference", match.spec, sizes, CPU) == {}
    report = autopallas.explain(
        autopallas.optimize(attend, implementation="reference", objective="always"), *match.original.in_avals
    )
    assert report.sites[0].block_sizes is None


def test_a_report_tells_the_sizes_that_run_and_for_which_they_do():
    types = [jax.ShapeDtypeStruct((1500, 64), jnp.float16)] * 3  # of which no table knows
    optimized = autopallas.optimize(attend, implementation="xla", objective="always")
    (site,) = autopallas.explain(optimized, *types).sites
    assert site.block_sizes == {"query_block": 256, "key_block": 256}
    assert site.running_sizes == {"query_block": 300, "key_block": 300}
    assert "xla[query_block=300, key_block=300]" in site.replacement
    assert site.spec["tiles"]["rows"] == 300
    text = " ".join(str(autopallas.explain(optimized, *types)).split())
    assert "block sizes query_block=300 key_block=300 (for query_block=256 key_block=256," in text


def test_a_report_tells_the_sizes_alone_where_they_are_those_that_were_chosen():
    types = [jax.ShapeDtypeStruct((1536, 64), jnp.float16)] * 3
    optimized = autopallas.optimize(attend, implementation="xla", objective="always")
    report = autopallas.explain(optimized, *types)
    assert report.sites[0].running_sizes == report.sites[0].block_sizes == {"query_block": 256, "key_block": 256}
    assert " for query_block" not in str(report)
