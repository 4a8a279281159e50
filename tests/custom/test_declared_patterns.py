"""Own patterns that declare what a declared operation does: axes by letters, rows, block sizes."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas
from autopallas.cli import main
from autopallas.custom import check
from autopallas.custom.registry import declared
from autopallas.sites.calls import kernel_backward, kernel_forward
from autopallas.sites.encoding import EncodingError, saved_site
from autopallas.tuning.cache import WARNED


@pytest.fixture(autouse=True)
def an_empty_cache_and_no_patterns(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_CACHE_DIR", str(tmp_path / "cache"))
    for cached in (kernel_forward, kernel_backward, WARNED):
        (cached.forget if cached is WARNED else cached.cache_clear)()
    yield
    for one in declared():
        one.remove()


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def rms_norm(x, scale, *, eps):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def program(x, scale):
    return rms_norm(jnp.sin(x), scale, eps=1e-3) + 1


LETTERS = {"operands": {"x": "M N", "scale": "N"}, "result": "M N", "rows": "M"}
TUNED = LETTERS | {
    "block_sizes": {"row_block": 1},
    "candidates": lambda spec: [{"row_block": b} for b in (8, 4, 2) if spec.M % b == 0],
}


def in_blocks(x, scale, *, eps, row_block):
    """RMSNorm as a kernel computes it: whole blocks of rows alone, so that it fails where they do not divide them."""
    blocks = x.reshape(-1, row_block, x.shape[1])
    return (blocks * jax.lax.rsqrt(jnp.mean(blocks**2, axis=-1, keepdims=True) + eps) * scale).reshape(x.shape)


def declare(replacement=in_blocks, reference=rms_norm, **options):
    """Declares RMSNorm; returns the pattern, and the (shape, block sizes) of each call of the replacement."""
    calls = []

    def recorded(x, scale, *, eps, **sizes):
        calls.append((x.shape, *sizes.values()))
        return replacement(x, scale, eps=eps, **sizes)

    given = {"shapes": [normal(8, 16), normal(16)], "scalars": ["eps"], "name": "own_norm", "differentiable": True}
    return autopallas.pattern(reference, **given | TUNED | options)(recorded), calls


def same(found, wanted, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * float(jnp.max(jnp.abs(y))))


def applied(fn, *args, **options):
    """Optimizes, runs, compares with the original, and returns the only site's record."""
    optimized = autopallas.optimize(fn, strict=True, objective="always", **options)
    same(optimized(*args), fn(*args))
    (site,) = optimized.report().sites
    return site


def gradients(fn, count=2):
    return jax.grad(lambda *args: jnp.sum(jnp.sin(fn(*args))), argnums=tuple(range(count)))


X, SCALE = normal(2, 6, 16), normal(16, seed=1)

# --- block sizes ----------------------------------------------------------------------------------------------------


def test_the_replacement_gets_an_axis_for_each_letter_and_block_sizes_that_are_valid():
    _, calls = declare()
    site = applied(program, X, SCALE)
    assert site.verdict == "applied"
    assert set(calls) == {((12, 16), 4)}, "twelve rows are no multiple of 8, the best guess"
    assert (site.block_sizes, site.block_sizes_from) == ({"row_block": 4}, "default")
    assert {name: site.spec[name] for name in ("M", "N", "operands")} == {
        "M": 12,
        "N": 16,
        "operands": ["float32[M,N]", "float32[N]"],
    }


def test_block_sizes_are_searched_for_on_a_miss_and_found_in_the_cache_after_it():
    _, calls = declare()
    optimized = autopallas.optimize(program, strict=True, objective="always", autotune=True, tune_seconds=20.0)
    same(optimized(X, SCALE), program(X, SCALE))
    report = optimized.report()
    assert report.tuning == {"searches": 1, "cache_hits": 0}
    assert {sizes for _, sizes in calls} == {4, 2}, "every valid candidate was tried, and no other"
    assert report.sites[0].block_sizes_from == "autotune"
    assert report.sites[0].measured["evidence"] == "measured"
    again = applied(program, X, SCALE)
    assert (again.block_sizes_from, again.block_sizes) == ("cache", report.sites[0].block_sizes)
    assert again.measured == report.sites[0].measured


def test_a_search_does_not_wait_for_that_of_an_optimized_function_which_a_replacement_calls():
    options = {"strict": True, "objective": "always", "autotune": True, "tune_seconds": 10.0}

    def tripled(x):
        return jnp.tanh(3 * x) * 3

    sizes = {"block_sizes": {"block": 2}, "candidates": lambda spec: [{"block": 2}, {"block": 4}]}
    declaration = {"shapes": [normal(8, 16)], "operands": {"x": "M N"}, "result": "M N", "rows": "M", **sizes}
    autopallas.pattern(tripled, **declaration, name="own_tripled")(lambda x, *, block: jnp.tanh(x + x + x) * 3)
    inner = autopallas.optimize(tripled, **options)

    def calls_it(x, scale, *, eps, row_block):
        return in_blocks(x, scale, eps=eps, row_block=row_block) + 0 * jnp.sum(inner(x[:, :row_block]))

    declare(calls_it)
    optimized = autopallas.optimize(program, **options)
    thread = threading.Thread(target=optimized, args=(normal(16, 16), SCALE), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "a search waits for itself"
    assert optimized.report().sites[0].block_sizes_from == "autotune"


def test_a_changed_replacement_is_searched_for_anew():
    def scaled_by(factor):
        def scaled(x, scale, *, eps, row_block):
            return in_blocks(factor * x, scale, eps=eps * factor**2, row_block=row_block)

        return scaled

    for factor, searches in ((1, 1), (1, 0), (2, 1)):
        declare(scaled_by(factor))
        optimized = autopallas.optimize(program, strict=True, objective="always", autotune=True, tune_seconds=20.0)
        same(optimized(X, SCALE), program(X, SCALE))
        assert optimized.report().tuning["searches"] == searches


def test_candidates_that_are_wrong_are_not_chosen():
    def wrong_in_fours(x, scale, *, eps, row_block):
        return in_blocks(x, scale, eps=eps, row_block=row_block) * (1.01 if row_block == 4 else 1)

    declare(wrong_in_fours)
    kept = autopallas.optimize(program, objective="always")
    same(kept(X, SCALE), program(X, SCALE))
    assert "differs from the reference's by 0.01 of the largest" in kept.report().sites[0].reason
    site = applied(program, X, SCALE, autotune=True, tune_seconds=20.0)
    assert (site.verdict, site.block_sizes) == ("applied", {"row_block": 2})


def test_what_was_measured_to_be_slower_is_not_used():
    def slow(x, scale, *, eps, row_block):
        def again(_, found):
            return found + 0 * jnp.sum(jnp.sin(jnp.outer(found[0], jnp.arange(1000.0))))

        return jax.lax.fori_loop(0, 300, again, in_blocks(x, scale, eps=eps, row_block=row_block))

    declare(slow, differentiable=False)
    optimized = autopallas.optimize(program, strict=True, autotune=True, tune_seconds=20.0)
    same(optimized(X, SCALE), program(X, SCALE))
    (site,) = optimized.report().sites
    assert site.verdict == "kept"
    assert site.reason.startswith("measured: 0.0")
    assert applied(program, X, SCALE).verdict == "applied", "which was asked for"


def test_a_replacement_that_fails_when_it_runs_is_found_and_remembered():
    broken = []

    def fragile(x, scale, *, eps, row_block):
        def read(array):
            if broken:
                raise RuntimeError("it broke")
            return np.asarray(array)

        result = in_blocks(x, scale, eps=eps, row_block=row_block)
        return jax.pure_callback(read, jax.ShapeDtypeStruct(x.shape, x.dtype), result)

    declare(fragile, differentiable=False)
    optimized = autopallas.optimize(program)
    optimized(X, SCALE)
    assert optimized.report().counts() == {"own_norm": 1}
    broken.append(True)
    with pytest.warns(autopallas.AutopallasWarning, match="run failed"):
        same(optimized(X, SCALE), program(X, SCALE))
    again = autopallas.optimize(lambda x, scale: program(x, scale) + 1)
    same(again(X, SCALE), program(X, SCALE) + 1)
    assert again.report().sites[0].verdict == "kept"


def test_no_block_sizes_are_no_replacement():
    declare(candidates=lambda spec: [] if spec.M == 12 else [{"row_block": 1}])
    assert "no block sizes for these sizes" in applied(program, X, SCALE).reason
    assert applied(program, X[:1], SCALE).verdict == "applied"


def test_a_call_of_the_pattern_has_valid_block_sizes_too():
    own, calls = declare()
    same(own(X[0], SCALE, eps=0.5), rms_norm(X[0], SCALE, eps=0.5))
    same(own(X[0], SCALE, eps=0.5, row_block=3), rms_norm(X[0], SCALE, eps=0.5))
    assert calls == [((6, 16), 2), ((6, 16), 3)]


def test_a_call_of_the_pattern_for_which_no_block_sizes_are_valid_says_so():
    own, calls = declare(candidates=lambda spec: [] if spec.M == 6 else [{"row_block": 1}])
    with pytest.raises(autopallas.UnsupportedError, match=r"own_norm has no block sizes for .*; give them by name"):
        own(X[0], SCALE, eps=0.5)
    assert not calls
    same(own(X[0], SCALE, eps=0.5, row_block=3), rms_norm(X[0], SCALE, eps=0.5))


def test_a_pattern_is_another_version_where_its_replacement_is_given_other_values():
    def versions(*replacements):
        return {autopallas.pattern(rms_norm, **given)(one).version for one in replacements}

    def either(first, *_, eps, fast):
        return first if fast else -first

    def defaulted(fast):
        def replaced(x, scale, *, eps, fast=fast):
            return x if fast else -x

        return replaced

    given = {"shapes": [normal(8, 16), normal(16)], "scalars": ["eps"], "name": "own_norm"}
    assert len(versions(*[functools.partial(either, fast=fast) for fast in (True, False)])) == 2
    assert len(versions(*[functools.partial(either, 1, fast=fast) for fast in (True, False, True)])) == 2
    assert len(versions(*[functools.partial(either, first, fast=True) for first in (1, 2)])) == 2
    assert len(versions(*map(defaulted, (True, False)))) == 2


# --- axes -----------------------------------------------------------------------------------------------------------


def test_names_for_letters_are_those_of_the_spec():
    seen = []
    options = {"sizes": {"M": "rows"}, "candidates": lambda spec: seen.append(spec.rows) or [{"row_block": 1}]}
    declare(**options)
    assert applied(program, X, SCALE).spec["rows"] == 12
    assert 12 in seen


def test_operands_that_do_not_have_the_axes_make_a_near_miss():
    def reference(x):
        return x / jnp.sum(jnp.abs(x), axis=-1, keepdims=True)

    letters = {"operands": {"x": "M N"}, "result": "M N"}
    autopallas.pattern(reference, shapes=[normal(8, 16)], **letters, name="l1")(lambda x: 1 * reference(x))
    assert applied(reference, X[0]).verdict == "applied"
    optimized = autopallas.optimize(reference, strict=True)
    optimized(X)
    (miss,) = optimized.report().near_misses
    assert "it computes the reference, but x has shape (2, 6, 16); it must be [M, N]" in miss.reason
    assert "declare another pattern" in miss.advice


def test_axes_that_the_reference_does_not_treat_alike_are_found_by_the_comparison():
    def reference(x, scale, *, eps):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps) * scale

    def fn(x, scale):
        return reference(jnp.sin(x), scale, eps=1e-3) + 1

    declare(reference=reference)
    assert applied(fn, X[0], SCALE).verdict == "applied"
    assert "differs from the reference's" in applied(fn, X, SCALE).reason


def test_rows_that_depend_on_each_other_are_not_believed():
    def reference(x, scale, *, eps):
        return x * jax.lax.rsqrt(jnp.mean(x * x) + eps) * scale

    def whole(x, scale, *, eps, row_block):
        return reference(x, scale, eps=eps)

    declare(whole, reference)
    site = applied(lambda x, scale: reference(jnp.sin(x), scale, eps=1e-3) + 1, X[0], SCALE)
    assert "rows='M' is wrong: the reference of a part along M is not that part of the whole" in site.reason


def test_a_name_that_is_declared_again_is_another_pattern():
    declare(lambda x, scale, *, eps, row_block: 2 * in_blocks(x, scale, eps=eps, row_block=row_block))
    assert applied(program, X, SCALE).verdict == "kept"
    declare()
    assert applied(program, X, SCALE).verdict == "applied"


# --- transformations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("differentiable", [True, False])
def test_train_steps_are_replaced(differentiable):
    declare(differentiable=differentiable)
    site = applied(gradients(program), X, SCALE)
    assert (site.direction, site.verdict) == ("forward+backward", "applied")


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, None)])
def test_under_vmap_the_replacement_is_mapped(axes):
    """So what runs is what was compared: it gets the rows of one example."""
    _, calls = declare()
    optimized = autopallas.optimize(program, strict=True, objective="always")
    given = [normal(4, 4, 16), normal(*(4, 16)[axes[1] is None :], seed=1)]
    for form in (lambda fn: fn, gradients):
        calls.clear()
        same(jax.vmap(form(optimized), axes)(*given), jax.jit(jax.vmap(form(program), axes))(*given))
        assert {shape for shape, _ in calls} == {(4, 16) if axes[0] is not None else (16, 16)}


def test_examples_in_examples_and_their_derivative():
    declare()
    optimized = autopallas.optimize(program, strict=True, objective="always")
    given = normal(3, 2, 4, 16), normal(2, 16, seed=1)

    def each(fn):
        inner = jax.vmap(fn)
        return gradients(lambda x, scale: jax.vmap(inner, (0, None))(x, scale))

    same(each(optimized)(*given), jax.jit(each(program))(*given))


# --- what was compared ----------------------------------------------------------------------------------------------


def test_large_operands_are_compared_in_some_of_their_rows(monkeypatch):
    monkeypatch.setattr(check, "_MOST_BYTES", 600)
    declare()
    assert "in some of its rows, since its operands are too large" in applied(program, X, SCALE).reason
    declare(lambda x, scale, *, eps, row_block: 1.01 * in_blocks(x, scale, eps=eps, row_block=row_block))
    assert "differs from the reference's by 0.01" in applied(program, X, SCALE).reason


def test_the_report_says_where_only_types_were_checked(monkeypatch):
    monkeypatch.setattr(check, "_MOST_BYTES", 600)

    @autopallas.pattern(rms_norm, shapes=[normal(8, 16), normal(16)], scalars=["eps"])
    def own_norm(x, scale, *, eps):
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale

    reason = applied(program, X, SCALE).reason
    assert "only the shape and dtype of its result were checked" in reason
    assert "found equal" not in reason
    assert "found equal" in applied(program, X[0, :2], SCALE).reason


# --- as data: reports, tuning, lockfiles ----------------------------------------------------------------------------


def test_a_site_is_written_as_data_and_read_again_where_the_pattern_is_declared():
    own, _ = declare()
    site = applied(gradients(program), X, SCALE)
    saved = saved_site(site.op, site.direction, site.encoded)
    assert str(saved.spec) == site.spec_line
    assert saved.site.operation is own.operation
    own.remove()
    with pytest.raises(EncodingError, match="no operation is called 'own_norm'"):
        saved_site(site.op, site.direction, site.encoded)


def test_a_pattern_without_letters_has_no_form_as_data():
    autopallas.pattern(rms_norm, shapes=[normal(8, 16), normal(16)], scalars=["eps"], name="own_norm")(rms_norm)
    assert applied(program, X, SCALE).encoded is None


MODULE = """
import jax, jax.numpy as jnp
import autopallas

def rms_norm(x, scale, *, eps):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale

@autopallas.pattern(
    rms_norm, shapes=[jnp.ones((8, 16)), jnp.ones(16)], scalars=["eps"], differentiable=True, name="NAME",
    operands={"x": "M N", "scale": "N"}, result="M N", rows="M", block_sizes={"row_block": 8},
    candidates=lambda spec: [{"row_block": b} for b in (4, 2) if spec.M % b == 0],
)
def own_norm(x, scale, *, eps, row_block):
    blocks = x.reshape(-1, row_block, x.shape[1])
    return (blocks * jax.lax.rsqrt(jnp.mean(blocks**2, axis=-1, keepdims=True) + eps) * scale).reshape(x.shape)

def model(x, scale):
    return rms_norm(jnp.sin(x), scale, eps=1e-3) + 1
"""


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """The name of a new module with a pattern and a model."""
    name = f"patterns_of_{request.node.name.split('[')[0]}"
    (tmp_path / f"{name}.py").write_text(MODULE.replace("NAME", "own_norm"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return name


SHAPES = "f32[2,6,16],f32[16]"


def told(capsys):
    return json.loads(capsys.readouterr().out)


def test_the_tune_command_takes_a_pattern_at_its_examples_size_or_another(module, capsys):
    assert main(["tune", f"{module}:own_norm", "--budget", "20", "--json"]) == 0
    found = told(capsys)
    assert [(one["op"], one["direction"]) for one in found] == [
        ("own_norm", d) for d in ("forward", "forward+backward")
    ]
    assert all(one["implementation"] == "own_norm" and one["block_sizes"]["row_block"] in (4, 2) for one in found)
    assert main(["tune", f"{module}:own_norm", "--shapes", SHAPES, "--direction", "forward", "--json"]) == 0
    (other,) = told(capsys)
    assert "float32[12,16]" in other["spec"]


def test_a_program_that_was_tuned_does_not_search(module, capsys):
    assert main(["tune", f"{module}:model", "--shapes", SHAPES, "--budget", "20", "--json"]) == 0
    (found,) = told(capsys)
    model = sys.modules[module].model
    site = applied(model, X, SCALE)
    assert (site.block_sizes_from, site.block_sizes) == ("cache", found["block_sizes"])


def test_a_saved_report_is_tuned_for(module, tmp_path, capsys):
    __import__(module)
    report = autopallas.explain(sys.modules[module].model, X, SCALE)
    (tmp_path / "report.json").write_text(json.dumps(report.to_dict()))
    assert main(["tune", "--from", str(tmp_path / "report.json"), "--budget", "20", "--json"]) == 0
    assert told(capsys)[0]["block_sizes"]["row_block"] in (4, 2)


def test_a_lockfile_decides_its_block_sizes(module, tmp_path, capsys):
    lock = str(tmp_path / "sites.lock")
    assert main(["lock", f"{module}:model", "--shapes", SHAPES, "-o", lock]) == 0
    written = json.loads((tmp_path / "sites.lock").read_text())
    assert [(site["op"], site["block_sizes"]) for site in written["sites"]] == [("own_norm", {"row_block": 4})]
    written["sites"][0]["block_sizes"] = {"row_block": 2}
    (tmp_path / "sites.lock").write_text(json.dumps(written))
    assert main(["check", lock]) == 1, "the locked program is another one"
    written["digests"].clear()
    (tmp_path / "sites.lock").write_text(json.dumps(written))
    assert main(["check", lock]) == 0
    model = sys.modules[module].model
    locked = autopallas.optimize(model, lock=lock, strict=True)
    same(locked(X, SCALE), model(X, SCALE))
    (site,) = locked.report().sites
    assert (site.verdict, site.block_sizes, site.block_sizes_from) == ("applied", {"row_block": 2}, "explicit")
    locked(X[:1], SCALE)
    assert "the lockfile has no such site" in locked.report().sites[0].reason


# --- on several devices ---------------------------------------------------------------------------------------------

ON_TWO_DEVICES = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import autopallas
from test_declared_patterns import SCALE, X, declare, gradients, normal, program, rms_norm, same

mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType[sys.argv[1]],))
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))

def run(name, fn, *args):
    optimized = autopallas.optimize(fn, strict=True, objective="always")
    found = optimized(*args)
    same(found, fn(*(np.asarray(a) for a in args)))
    (site,) = optimized.report().sites
    rows = [str(x.sharding.spec) for x in jax.tree.leaves(found)][0]
    print(name, site.verdict, site.spec.get("M"), rows, site.reason)

_, calls = declare()
run("forward", program, put(X, None, "data"), put(SCALE))
run("backward", gradients(program), put(X, None, "data"), put(SCALE))
run("columns", program, put(X, None, None, "data"), put(SCALE, "data"))
assert {shape for shape, _ in calls} == {(6, 16)}, calls
autopallas.pattern(rms_norm, shapes=[normal(8, 16), normal(16)], scalars=["eps"], name="own_norm")(rms_norm)
run("undeclared", program, put(X, None, "data"), put(SCALE))
run("whole", program, put(X), put(SCALE))
"""


@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_devices_share_the_rows(axes):
    """Two of the host, in a process of their own: the number of devices is fixed when JAX starts."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    paths = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": paths}
    command = [sys.executable, "-c", ON_TWO_DEVICES, axes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    for line, name in zip(lines[:2], ("forward", "backward"), strict=True):
        assert line.startswith(f"{name} applied 6 ")
        assert "data" in line.partition("asked for")[0], "the result is divided as the operand is"
        assert "in one device's part" in line
    assert lines[2].startswith("columns kept")
    assert lines[3].startswith("undeclared kept")
    assert "own_norm has no rule for it" in lines[3]
    assert lines[4].startswith("whole applied"), "where nothing is divided, no rule is needed"


# --- what cannot be declared ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"result": None}, "letters of axes are given for all arrays"),
        ({"operands": None}, "letters of axes are given for all arrays"),
        ({"operands": {"x": "M N"}}, "operands has 1 names, and shapes has 2 examples"),
        ({"operands": {"x": "M", "scale": "N"}}, r"x has the letters 'M', and its example the shape \(8, 16\)"),
        ({"operands": {"x": "M N", "scale": "M"}}, "the letter M stands for 8 and 16"),
        ({"result": "M K"}, "no operand has an axis K"),
        ({"result": "N M"}, r"result has the letters 'N M', which are \(16, 8\), and the reference \(8, 16\)"),
        ({"rows": "K"}, "rows has K, which the result lacks"),
        ({"rows": "M M"}, "'M M' has a letter twice"),
        ({"sizes": {"M": "eps"}}, "need different names"),
        ({"sizes": {"M": "the rows"}}, "'the rows' is no name"),
        ({"block_sizes": None}, "block_sizes is None; give names with defaults"),
        ({"block_sizes": {}}, "give names with defaults"),
        ({"block_sizes": {"eps": 1}}, "other keyword arguments than the scalars"),
        ({"block_sizes": {"row_block": 1.5}}, "row_block=1.5; give a whole number"),
        ({"block_sizes": {"others": 1}, "replacement": lambda x, scale, *, eps: x}, "no keyword argument others"),
        ({"candidates": 3}, "give a function of a spec"),
        ({"candidates": lambda spec: [{"row_block": "8"}]}, "fail for its example: ValueError.*give a Python int"),
        ({"candidates": lambda spec: [{"rows": 8}]}, "fail for its example: ValueError.*names out of row_block"),
        ({"candidates": lambda spec: spec.nothing}, "fail for its example: AttributeError"),
        ({"operands": None, "result": None, "rows": ""}, "declare these: operands=..., result=..."),
        ({"name": "mixture_of_experts"}, "is no name for a pattern"),
    ],
)
def test_declarations_that_contradict_themselves_are_refused(change, message):
    options = {"shapes": [normal(8, 16), normal(16)], "scalars": ["eps"], "name": "own_norm"} | TUNED | change
    replacement = options.pop("replacement", in_blocks)
    with pytest.raises(autopallas.OptionError, match=message):
        autopallas.pattern(rms_norm, **options)(replacement)
    assert declared() == ()


def test_block_sizes_of_another_size_are_made_valid():
    own, _ = declare()
    kind, spec = own.operation.block_sizes, own.operation.sample
    twelve = dataclasses.replace(spec, M=12)
    assert kind(row_block=8).fitted(spec) == kind(row_block=8)
    assert kind(row_block=8).fitted(twelve) == kind(row_block=4)
