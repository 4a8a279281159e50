"""What every declared operation has by its declaration, and that nothing else of the package names one."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import compare, with_gradients

import autopallas
from autopallas.autotune.tuner import Tuner
from autopallas.graph import Graph, flatten
from autopallas.options import resolve
from autopallas.patterns import find
from autopallas.plan.choose_implementation import plan
from autopallas.sites.block_sizes import block_sizes_class
from autopallas.sites.declared import DeclaredOperation
from autopallas.sites.device import Device
from autopallas.sites.encoding import encoded, saved_site
from autopallas.sites.operation import Supported, operation_named, operation_names
from autopallas.tuning.lock import written
from autopallas.workbench.cases import DIRECTIONS, PLAIN, cases_of
from autopallas.workbench.cases import match_of as match_of_case

OPERATIONS = [name for name in operation_names() if isinstance(operation_named(name), DeclaredOperation)]
PACKAGE = Path(autopallas.__file__).parent


def small(op, sizes=()):
    """The operation with a small sample in float32; ``sizes`` are those wanted, by the names of the spec."""
    operation = operation_named(op)
    sizes = {name: 7 + 2 * n for n, name in enumerate(operation.sizes.values())} | dict(sizes)
    dtypes = {
        f.name: np.dtype(np.float32)
        for f in dataclasses.fields(operation.sample)
        if isinstance(getattr(operation.sample, f.name), np.dtype)
    }
    return dataclasses.replace(operation, sample=dataclasses.replace(operation.sample, **sizes, **dtypes))


def program_and_arguments(op, sizes=()):
    program, types = small(op, sizes).program()
    random = np.random.default_rng(0)
    return program, tuple(jnp.asarray(random.standard_normal(t.shape), t.dtype) for t in types)


def match_of(op):
    program, arguments = program_and_arguments(op)
    (match,), _ = find(Graph(flatten(jax.make_jaxpr(program)(*arguments))), (op,), True)
    return match


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_reference_is_recognised_and_right_in_value_and_gradient(op):
    program, arguments = program_and_arguments(op)
    outcome = compare(program, arguments)
    assert outcome.complaints == []
    assert outcome.counts(op) == 1
    report = autopallas.explain(autopallas.optimize(with_gradients(program, arguments)), *arguments)
    assert [(site.op, site.direction) for site in report.sites] == [(op, "forward+backward")]


@pytest.mark.parametrize("op", OPERATIONS)
def test_optimized_functions_can_be_mapped_and_differentiated_twice(op):
    program, arguments = program_and_arguments(op)
    optimized = autopallas.optimize(program, objective="always", strict=True)
    batched = tuple(jnp.stack([a, 2 * a, -a]) for a in arguments)
    everything = tuple(range(len(arguments)))

    def gradients(function):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), argnums=everything)

    for axes in ((0,) * len(arguments), (0, *(None for _ in arguments[1:]))):
        given = tuple(b if axis == 0 else a for a, b, axis in zip(arguments, batched, axes, strict=True))
        for form in (lambda function: function, gradients):
            ours, theirs = (jax.jit(jax.vmap(form(function), axes))(*given) for function in (optimized, program))
            for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    twice = [jax.grad(lambda x, f=f: jnp.sum(gradients(f)(x, *arguments[1:])[0] ** 2)) for f in (optimized, program)]
    ours, theirs = (jax.jit(function)(arguments[0]) for function in twice)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_declaration_whose_operands_cannot_all_have_the_axis_of_a_vmap_is_refused():
    declared = operation_named("rms_norm")
    operands = dict(declared.operands) | {"scale": "N"}
    with pytest.raises(ValueError, match="scale lacks the letter B"):
        dataclasses.replace(declared, operands=operands)


@pytest.mark.parametrize("op", OPERATIONS)
def test_sites_are_written_as_data_and_read_again(op):
    match = match_of(op)
    saved = saved_site(op, "forward", encoded(match))
    assert saved.site == match.site
    assert saved.spec == match.spec


@pytest.mark.parametrize("op", OPERATIONS)
def test_without_evidence_the_original_stays_and_a_search_measures(op):
    program, arguments = program_and_arguments(op)
    report = autopallas.explain(autopallas.optimize(program), *arguments)
    assert [(site.op, site.verdict) for site in report.sites] == [(op, "kept")]
    own = not operation_named(op).only_restates("xla")
    assert ("nothing was measured" if own else "no kernel of it for this platform (cpu)") in report.sites[0].reason
    quick = autopallas.optimize(program)
    quick(*arguments)
    assert quick.report().tuning["searches"] == 0, "the reference is no candidate that a first step waits for"
    optimized = autopallas.optimize(program, autotune=True, tune_seconds=20.0)
    optimized(*arguments)
    (site,) = optimized.report().sites
    assert site.measured is not None or "search" in site.reason
    again = autopallas.explain(autopallas.optimize(program, implementation=site.implementation), *arguments)
    assert site.measured is None or again.sites[0].measured == site.measured, "it is kept on disk"


VARIANTS = [(op, variant) for op in OPERATIONS for variant in (PLAIN, *operation_named(op).variants)]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op, variant", VARIANTS)
def test_its_cases_are_recognised_and_computed_by_its_own_function(op, variant, direction):
    offered = cases_of(op)
    first = next(case for case in offered.table_grid() if case.mask == variant)
    sizes = {letter: min(size, 5 + number) for number, (letter, size) in enumerate(first.sizes)}
    sizes = tuple(operation_named(op).fitted_sizes(sizes).items())
    case = dataclasses.replace(first, direction=direction, dtype="float32", sizes=sizes)
    types = offered.types(case)
    operands = types[:-1] if direction == "forward+backward" else types
    assert offered.case_of(operands, case.mask, direction) == case
    spec = match_of_case(case).spec
    assert [getattr(spec, operation_named(op).sizes[letter]) for letter, _ in sizes] == [size for _, size in sizes]
    random = np.random.default_rng(0)
    arguments = [jnp.asarray(random.standard_normal(t.shape), t.dtype) for t in types]
    original, direct = offered.ORIGINALS[case.mask], offered.direct(case)
    for a, b in zip(
        *(jax.tree.leaves(jax.jit(offered.in_direction(case, f))(*arguments)) for f in (original, direct)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_lockfile_decides_it(op, tmp_path):
    """Its block sizes are none, or few."""
    program, arguments = program_and_arguments(op)
    match, device, options = match_of(op), Device.current(), resolve({"objective": "always"})
    decisions = plan([match], device, options, Tuner(device, options))
    lock = tmp_path / "sites.lock"
    lock.write_text(written([match], decisions, "model:program", "", device, "/").to_json())
    report = autopallas.explain(autopallas.optimize(program, lock=lock), *arguments)
    assert [(site.op, site.verdict, site.block_sizes_from) for site in report.sites] == [(op, "applied", "explicit")]


def test_block_sizes_of_the_declaration_are_the_operations_and_its_best_guess_the_default():
    kind = block_sizes_class("some", {"block": 1, "fast": True}, lambda spec: [{"block": spec.rows}, {"fast": False}])
    operation = dataclasses.replace(small(OPERATIONS[0], {"rows": 12}), block_sizes=kind)
    assert operation.part("block_sizes").BlockSizes is kind
    assert operation.default("tuned_block_sizes").infer_block_sizes(operation.sample) == kind(block=12)
    assert kind.candidates(operation.sample) == (kind(block=12), kind(fast=False))
    assert kind(block=3).fitted(operation.sample) == kind(block=12)
    assert kind(fast=False).fitted(operation.sample).to_dict() == {"block": 1, "fast": False}
    wrong = block_sizes_class("some", {"block": 1}, lambda spec: [{"block": True}])
    with pytest.raises(ValueError, match="block=True; give a Python int"):
        wrong.candidates(operation.sample)


@pytest.mark.parametrize("op", OPERATIONS)
def test_options_and_implementations_know_it(op):
    program, arguments = program_and_arguments(op)
    others = [name for name in operation_names() if name != op]
    assert not autopallas.explain(autopallas.optimize(program, ops=others, objective="always"), *arguments).sites
    report = autopallas.explain(autopallas.optimize(program, implementation="reference"), *arguments)
    assert [site.implementation for site in report.sites] == ["reference"]
    match = match_of(op)
    answers = dict(match.site.operation.candidates(match.spec, Device.current(), None))
    assert any(isinstance(answer, Supported) for answer in answers.values())


ON_FOUR_DEVICES = """
import jax, numpy as np
import autopallas
from autopallas.sites.operation import operation_named
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_declared import program_and_arguments

for op in OPERATIONS:
    operation = operation_named(op)
    divided = operation.rows.split()[-1]
    program, arguments = program_and_arguments(op, {operation.sizes[divided]: 8})
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    sample = operation.sample
    given = [letters for n, letters in operation.operands.items() if getattr(sample, f"{n}_dtype") is not None]
    specs = [PartitionSpec(*("data" if own == divided else None for own in letters.split())) for letters in given]
    x, *others = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arguments, specs, strict=True))
    everything = tuple(range(1 + len(others)))
    gradient = lambda f: jax.jit(jax.grad(lambda *a: jax.numpy.sum(jax.numpy.sin(f(*a))), everything))
    optimized = autopallas.optimize(program, objective="always", strict=True)
    for ours, theirs in ((optimized, jax.jit(program)), (gradient(optimized), gradient(program))):
        for a, b in zip(jax.tree.leaves(ours(x, *others)), jax.tree.leaves(theirs(x, *others)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    step = autopallas.optimize(lambda *a: gradient(program)(*a), objective="always", strict=True)
    for a, b in zip(step(x, *others), gradient(program)(x, *others), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    print(op, [(site.op, site.verdict, site.reason) for site in step.report().sites])
"""


def test_devices_share_the_rows():
    """Four of the host, in a process of their own: the number of devices is fixed when JAX starts."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": paths}
    script = f"OPERATIONS = {OPERATIONS}\n{ON_FOUR_DEVICES}"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("'applied'") == len(OPERATIONS)


def names_in(op: str) -> Iterator[str]:
    """The files of the package that name an operation and are not its own."""
    words = {op, op.replace("_", "").lower()}
    for path in PACKAGE.rglob("*.py"):
        own = f"/kernels/{op}/" in str(path) or path.name == f"{op}.py" or f"/patterns/{op}/" in str(path)
        if not own and any(word in path.read_text().lower() for word in words):
            yield str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("op", OPERATIONS)
def test_no_other_file_of_the_package_names_it(op):
    assert list(names_in(op)) == []


@pytest.mark.parametrize("op", OPERATIONS)
def test_an_operation_is_three_files_and_few_lines_without_kernels(op):
    files = [*(PACKAGE / "kernels" / op).glob("*.py"), *(PACKAGE / "patterns").glob(f"{op}*")]
    kernels = "pallas_", "tpu_", "gpu_", "xla", "tuned_block_sizes"  # a table has rows of kernels alone
    own = [path for path in files if path.is_file() and not path.name.startswith(kernels)]
    assert len(own) <= 3
    assert sum(len(path.read_text().splitlines()) for path in own) <= 225
