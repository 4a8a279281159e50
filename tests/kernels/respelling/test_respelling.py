"""What every kind of respelling declares, and respellings in programs."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from recognition import capacities
from support.compare import compare
from support.mixtures import P, X
from support.respellings import LAYOUTS, convolution, optimized, random, sites

import autopallas
from autopallas.faults import collecting
from autopallas.graph import Graph, flatten
from autopallas.kernels.respelling.example import operands
from autopallas.kernels.respelling.kinds import kind_named, kind_names, kinds_by_primitive
from autopallas.kernels.respelling.step_sequences import StepsApart
from autopallas.kernels.respelling.tuned_block_sizes import TABLE
from autopallas.patterns import find, respelling
from autopallas.sites.encoding import encoded, saved_site
from autopallas.tuning import processor
from autopallas.tuning.evidence import LEAST_GAIN
from autopallas.tuning.row import MEMORY_SLOWDOWN, key_of_least_time
from autopallas.tuning.table import Table
from autopallas.workbench.cases import cases_of, match_of

KINDS = kind_names()
_A_LOSS = 0.9
"""Of the original's speed: processes differ from each other by a tenth where both compute the same."""


def holds_a_program(spec):
    """Whether parameters hold a part of the program, which has no form as data."""
    return not {"loop", "around", "pair", "steps"}.isdisjoint(dict(spec.parameters))


# ---------------------------------------------------------------------- what every kind declares


@pytest.mark.parametrize("name", KINDS)
def test_each_sample_is_one_site_of_its_kind_and_is_made_anew_from_data(name):
    cases = [case for case in cases_of("respelling").table_grid() if case.mask.startswith(f"{name}:")]
    assert cases
    for case in cases:
        match = match_of(case)
        assert match.spec.kind == name
        data = encoded(match)
        if holds_a_program(match.spec):
            assert data is None
            continue
        assert data is not None
        assert saved_site("respelling", "forward", data).site == match.site


def mapped(function, *given):
    return lax.map(lambda one: function(*one), given)


def found_alone(name, function, types):
    """What is found of a kind where no other one is looked for."""
    return find(Graph(flatten(jax.make_jaxpr(function)(*types))), (name,), True)[0]


@pytest.mark.parametrize("name", KINDS)
def test_the_reference_of_a_kind_is_its_original(name):
    """So a saved site is measured against what the program had; integers that the program knows stay known."""
    for case in cases_of("respelling").table_grid():
        if not case.mask.startswith(f"{name}:"):
            continue
        match = match_of(case)
        loop = dict(match.spec.parameters).get("loop")
        known = {} if loop is None else dict(loop.known)
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in match.original.in_avals]
        open_types = [t for i, t in enumerate(types) if i not in known]

        def original(*given, spec=match.spec, known=known):
            rest = iter(given)
            operands = [jnp.asarray(known[i]) if i in known else next(rest) for i in range(len(spec.operands))]
            return kind_named(name).original(spec, *operands)

        if match.then or "pair" in dict(match.spec.parameters) or kind_named(name).is_slow_among_others:
            continue  # of two passes, which are no pair by themselves, or found beside others alone
        program = original
        if kind_named(name).least_steps > 1:  # it is found in loops alone
            program = partial(mapped, original)
            open_types = [jax.ShapeDtypeStruct((2, *t.shape), t.dtype) for t in open_types]
        every = found_alone(name, program, open_types)
        if not every and isinstance(dict(match.spec.parameters).get("steps"), StepsApart):  # results are stored anyhow
            read = lambda *given: jnp.concatenate([result.ravel() for result in original(*given)])  # noqa: E731
            every = found_alone(name, read, open_types)
        (found,) = every
        if holds_a_program(match.spec):
            assert kind_named(name).feature(found.spec) == kind_named(name).feature(match.spec)
            continue
        assert found.spec.parameters == match.spec.parameters


def test_windows_along_one_axis_stay_in_loops():
    x = random(3, 64, 512)
    lines = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 7), (1, 1), "VALID")  # noqa: E731
    images = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 7), (1, 1), "VALID")  # noqa: E731
    kinds = lambda run, x: [site.spec.kind for site in sites(run, x)]  # noqa: E731
    assert kinds(lines, x[0]) == kinds(images, x[0]) == kinds(lambda x: lax.map(images, x), x) == ["pooling"]
    assert kinds(lambda x: lax.map(lines, x), x) == []


@pytest.mark.parametrize("length", [2, 3, 8])
def test_short_sums_along_an_axis_and_few_classes_have_evidence_of_their_own(length):
    """Loops over so few steps, and sums by index into so few rows, take up to four times as long as the original."""
    picks = lambda ids, x: jax.nn.one_hot(ids, length - 1).T @ x  # noqa: E731
    for run, *arrays in (
        (lambda x: lax.cumsum(x, axis=1), jnp.ones((8, length, 4096))),
        (lambda x: lax.cumsum(x, axis=1), jnp.ones((8, length, 4096), jnp.int32)),
        (picks, jnp.zeros(65536, jnp.int32), jnp.ones((65536, 1))),
    ):
        report = autopallas.explain(run, *arrays)
        assert len(report.sites) == 1
        assert report.counts() == {}


def test_of_other_platforms_tpus_alone_have_rows_of_loops_whose_stacks_are_large():
    table = cases_of("respelling").table_grid
    assert table("gpu") == ()
    assert {case.mask.partition(":")[0] for case in table("tpu")} == {"scan_checkpoint"}


@pytest.mark.parametrize("columns", [2**11, 2**13, 2**17, 2**20, 2**21, 2**25, 2**28])
def test_no_row_of_small_arrays_holds_for_ones_that_no_cache_holds(columns):
    """Sums over few rows gain among arrays that fit into a cache, and lose among those that do not."""
    (match,) = sites(lambda x: x.sum(0), jax.ShapeDtypeStruct((4, columns), jnp.float32))
    bucket = TABLE.key(match.spec, "xla", "forward")[3]
    assert bucket == next(
        name
        for name, most in (("other", 2**13), ("E32768", 2**17), ("E524288", 2**21), ("E8388608", 2**40))
        if 4 * columns <= most
    )


@pytest.mark.parametrize("name", KINDS)
def test_no_gain_that_holds_elsewhere_was_measured_there_as_a_loss(name):
    """Where a row holds for processors and versions of JAX without one, those with one must not contradict it."""
    least, kinds = max(kind_named(name).elsewhere_from, LEAST_GAIN), defaultdict(list)
    a_loss = 1 / MEMORY_SLOWDOWN if name == "scan_checkpoint" else _A_LOSS  # which is looked for to save memory
    for key, row in TABLE.files.read("cpu"):
        if key[4].partition(",")[0] == name and key == key_of_least_time(key):
            kinds[key].append(row)
    for key, rows in kinds.items():
        narrow = key[2] in ("bfloat16", "float16")  # these hold for one version, and where they are multiplied alike
        for row, other in itertools.permutations(rows, 2):
            alike = row.jax_line == other.jax_line and processor.alike(row.measured_with, other.measured_with)
            if row.assured_gain >= least and (alike or not narrow):
                assert other.speedup > a_loss, (key, row, other)


@pytest.mark.nightly
def test_samples_cover_every_bucket_of_every_row():
    assert isinstance(TABLE, Table)
    known = {TABLE.key(match_of(case).spec, "xla", "forward") for case in cases_of("respelling").table_grid()}
    assert {key for key, _ in TABLE.files.read("cpu")} <= known


# ---------------------------------------------------------------------- in programs


def program(x, w, ids):
    y = convolution(x.shape[-1], LAYOUTS[1][0], padding=[(3, 0)])(x, w)
    total = jnp.cumsum(y, 1)
    return (
        jnp.argmax(total, -1),
        jnp.sort(total, 1),
        jax.nn.one_hot(ids, x.shape[-1]) @ w[0, 0],
        jnp.argsort(total[0, 0]),
    )


ARGUMENTS = (random(2, 12, 6), random(4, 1, 6, seed=1), jnp.asarray([1, 5]))


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_the_gradient_may_be_taken_outside():
    def loss(x, w):
        y = convolution(x.shape[-1], LAYOUTS[1][0], padding=[(3, 0)])(x, w)
        return (jnp.sort(jnp.cumsum(y, 1), 1) ** 3).sum() + lax.cummax(y, axis=1).sum()

    x, w = ARGUMENTS[:2]
    close(jax.jit(jax.grad(optimized(loss), (0, 1)))(x, w), jax.grad(loss, (0, 1))(x, w))
    close(jax.jvp(optimized(loss), (x, w), (x, w)), jax.jvp(loss, (x, w), (x, w)))


def tangents(function, x):
    return jax.jvp(function, (x,), (jnp.cos(x),))


@pytest.mark.parametrize(
    "derivative",
    [
        tangents,
        lambda f, x: tangents(jax.vmap(f), x),
        lambda f, x: jax.linearize(f, x)[1](x),
        lambda f, x: jax.grad(lambda x: f(f(x)[1] + x)[1][0, 0].sum())(x),
        lambda f, x: jax.hessian(lambda x: f(f(x)[1] + x)[1][0].sum())(x[:, :2]),
    ],
    ids=["jvp", "jvp_of_vmap", "linearize", "grad", "hessian"],
)
def test_results_that_are_integers_have_no_tangents(derivative):
    def function(x):
        return jnp.argmax(x, -1), jnp.cumsum(jnp.sort(x, -1) ** 2, -1), jnp.argsort(x, -1)

    x, run = ARGUMENTS[0], optimized(function)
    given, wanted = derivative(run, x), derivative(function, x)
    assert run.report().counts()["respelling"] == 4
    assert [y.dtype for y in jax.tree.leaves(given)] == [y.dtype for y in jax.tree.leaves(wanted)]
    close(*([y for y in jax.tree.leaves(tree) if y.dtype != jax.dtypes.float0] for tree in (given, wanted)))


def test_vmap_inside_and_outside():
    x, w, ids = ARGUMENTS
    many = jnp.stack([x, 2 * x, -x])
    wanted = jax.vmap(program, (0, None, None))(many, w, ids)
    close(jax.jit(jax.vmap(optimized(program), (0, None, None)))(many, w, ids), wanted)
    inside = optimized(jax.vmap(program, (0, None, None)))
    close(inside(many, w, ids), wanted)
    assert inside.report().counts()["respelling"] == 6


def test_scan_remat_and_branches():
    def step(carry, w):
        found = jax.checkpoint(lambda c: jnp.cumsum(convolution(6, LAYOUTS[1][0], padding=[(3, 0)])(c, w), 1))(carry)
        return jnp.tanh(found), lax.cond(found.sum() > 0, lambda: jnp.argmax(found, 1), lambda: jnp.argmin(found, 1))

    def loss(x, ws):
        last, picked = lax.scan(step, x, ws)
        return (last**2).sum(), picked

    x, w = ARGUMENTS[:2]
    gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)
    found = compare(gradient, (x, jnp.stack([w, -w, 2 * w])), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") >= 6


def test_x64():
    with jax.enable_x64(True):
        x, w = (jnp.asarray(a, jnp.float64) for a in ARGUMENTS[:2])
        ids = jnp.asarray([1, 5])
        for a, b in zip(
            jax.tree.leaves(optimized(program)(x, w, ids)), jax.tree.leaves(program(x, w, ids)), strict=True
        ):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def test_samples_are_traced_under_x64():
    """There Python's numbers are of 64 bits, and stand beside positions of 32.  The smallest of each form."""
    forms = {}
    for case in cases_of("respelling").table_grid():
        forms.setdefault((case.mask.partition(":")[0], case.mask.rpartition("-")[2], len(case.sizes)), case)
    for case in forms.values():
        spec = match_of(case).spec
        types = [jax.ShapeDtypeStruct(*operand) for operand in spec.operands]
        known = {} if "loop" not in dict(spec.parameters) else dict(dict(spec.parameters)["loop"].known)

        def respelt(*given, spec=spec, known=known):
            operands = [jnp.asarray(known[i]) if i in known else x for i, x in enumerate(given)]
            return kind_named(spec.kind).respelt(spec, *operands)

        with jax.enable_x64(True):
            found = jax.eval_shape(respelt, *types)
        assert [(t.shape, t.dtype) for t in found] == list(spec.results), case


def test_a_site_of_another_operation_wins():
    """The gather of the labels' logits by one-hot products belongs to the loss."""
    x, w, labels = random(8, 16), random(16, 32, seed=1), jnp.arange(8)

    def loss(x, w):
        logits = x @ w
        return (jax.nn.logsumexp(logits, -1) - jnp.einsum("nv,nv->n", logits, jax.nn.one_hot(labels, 32))).mean()

    found = optimized(loss)
    close(found(x, w), loss(x, w))
    assert found.report().counts() == {"cross_entropy": 1}


def test_an_exception_in_one_kind_costs_its_candidate_alone(monkeypatch):
    def failing(graph, node):
        raise ZeroDivisionError("planted")

    kinds = {name: (replace(own[0], match=failing), *own) for name, own in kinds_by_primitive().items()}
    monkeypatch.setattr(respelling, "kinds_by_primitive", lambda: kinds)
    with collecting() as failures:
        found, _ = respelling.find(Graph(flatten(jax.make_jaxpr(jnp.cos)(jnp.ones(1024)))))
    assert [match.spec.kind for match in found] == ["elementwise"]
    assert [(f.op, f.stage, f.error) for f in failures] == [("respelling", "recognition", "ZeroDivisionError: planted")]


def test_what_lies_in_a_site_that_is_kept_is_respelt(monkeypatch):
    """The places of tokens in a mixture with a capacity are a cumulative sum, which the mixture's kernel computes; the
    choice of each token's expert is what it reads."""
    written = capacities.first(
        capacities.per_expert, lambda dispatch, g, mine: dispatch * (g * mine).sum(-1)[:, None, None]
    )
    applied = optimized(written)
    close(applied(P, X), written(P, X))
    verdicts = {(site.op, site.kind): site.verdict for site in applied.report().sites}
    assert verdicts == {("grouped_matmul", ""): "applied", ("respelling", "argmax"): "applied"}

    monkeypatch.setenv("AUTOPALLAS_BACKEND_RESPELLING", "xla")
    kept = autopallas.optimize(written, strict=True)
    close(kept(P, X), written(P, X))
    verdicts = {(site.op, site.kind): site.verdict for site in kept.report().sites}
    respelt = {("respelling", kind): "applied" for kind in ("argmax", "cumulative")}
    assert verdicts == {("grouped_matmul", ""): "kept", **respelt}


def test_what_a_site_reads_is_respelt_beside_it():
    def attend(x, w):
        y = convolution(x.shape[-1], LAYOUTS[1][0], padding=[(3, 0)])(x, w)
        return jax.nn.softmax(jnp.einsum("btd,bsd->bts", y, y)) @ y

    x, w = ARGUMENTS[:2]
    found = optimized(attend)
    close(found(x, w), attend(x, w))
    assert found.report().counts() == {"attention": 1, "respelling": 1}


def test_kinds_are_selected_and_left_out_by_name():
    def kinds(**options):
        return {site.kind for site in autopallas.explain(optimized(program, **options), *ARGUMENTS).sites}

    everything = {"convolution", "cumulative", "argmax", "sort", "one_hot"}
    assert kinds() == kinds(ops="respelling") == everything
    assert kinds(ops="sort") == {"sort"}
    assert kinds(ops=["-sort", "-argmax"]) == everything - {"sort", "argmax"}
    assert kinds(ops=["respelling", "-sort"]) == everything - {"sort"}
    assert kinds(ops="-respelling") == kinds(ops="attention") == set()
    with pytest.raises(autopallas.OptionError, match="sort"):
        kinds(ops="sorts")


def test_the_report_tells_each_kind_once():
    found = optimized(lambda x: [jnp.sort(x + i) for i in range(4)])
    found(random(4, 8))
    text = str(found.report())
    assert text.count("respelling: ") == 1
    assert "respelling: sort, 4 sites" in text
    assert found.report().counts() == {"respelling": 4}
    assert "sort" in found.report().to_html()


def test_an_implementation_that_is_asked_for_in_general_does_not_concern_respellings(monkeypatch):
    """Nor operations that have none of that name: a program holds more than what has a kernel."""

    def run(x):
        return jnp.argmax(x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6), -1)

    def counts(**options):
        return autopallas.explain(autopallas.optimize(run, **options), random(4, 8)).counts()

    assert counts(implementation="cudnn") == {}
    assert counts(implementation="xla") == {"rms_norm": 1}
    monkeypatch.setenv("AUTOPALLAS_BACKEND_RESPELLING", "xla")
    assert counts(implementation="cudnn") == {"respelling": 1}
    monkeypatch.setenv("AUTOPALLAS_BACKEND_RESPELLING", "pallas_tpu")
    with pytest.raises(autopallas.UnsupportedError, match="respelling"):
        counts()


# ---------------------------------------------------------------------- all kinds


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_quantised_floats_are_left_alone(dtype):
    """Many have no infinity to begin a maximum with, and none is promoted to another type."""

    def function(x):
        windows = lax.reduce_window(x, np.asarray(jnp.finfo(dtype).min, dtype), lax.max, (3, 1), (1, 1), "SAME")
        rows = jax.nn.one_hot(jnp.arange(5), 8, dtype=dtype) @ x
        return windows, lax.cummax(x, axis=1), lax.cumsum(x, axis=0), jnp.sort(x, 1), jnp.argmax(x, 0), rows

    x = random(8, 16).astype(dtype)
    respelt = optimized(function)
    for found, expected in zip(respelt(x), jax.jit(function)(x), strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
    assert not respelt.report().counts()


def test_complex_operands_of_a_search_are_drawn_and_are_no_zeros():
    (site,) = sites(jnp.exp, jnp.ones((64, 256), jnp.complex64))
    (given,) = operands(site.site, [jax.ShapeDtypeStruct((64, 256), jnp.complex64)])
    assert given.dtype == np.complex64
    for part in (given.real, given.imag):
        assert 0.6 < np.std(part) < 0.8
