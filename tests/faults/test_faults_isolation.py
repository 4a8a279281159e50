"""An exception in the work on one candidate costs that candidate: other sites are replaced as before."""

from __future__ import annotations

import functools
import importlib
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas
from tests.faults.programs import warned
from tests.faults.several import ODD, faulty, is_odd, operands, several, step

ERRORS = (ValueError("on fire"), RecursionError("too deep"), KeyError(7), MemoryError("too much"), AssertionError())
ALL = Counter(attention=2, cross_entropy=2, grouped_matmul=4)

CANDIDATE = {
    # what fails for one candidate: (operation, the programs in which it costs one site)
    "patterns.attention.recognise:_Proofs.at": ("attention", (several, step)),
    "patterns.attention.recognise:match_of": ("attention", (several, step)),
    "patterns.attention.recognise:AttentionDraft.search": ("attention", (step,)),
    "patterns.attention.recognise:AttentionDraft.match_with": ("attention", (step,)),
    "patterns.cross_entropy.recognise:Region.read": ("cross_entropy", (several, step)),
    "patterns.cross_entropy.recognise:_match": ("cross_entropy", (several, step)),
    "patterns.grouped_matmul.recognise:ragged_dot": ("grouped_matmul", (several, step)),
    "patterns.grouped_matmul.recognise:with_epilogue": ("grouped_matmul", (several,)),
    "patterns.mixture_of_experts.recognise:_found": ("grouped_matmul", (several, step)),
    "patterns.mixture_of_experts.recognise:Draft.match": ("grouped_matmul", (several, step)),
    "patterns.mixture_of_experts.recognise:Draft.search": ("grouped_matmul", (step,)),
    "patterns.mixture_of_experts.recognise:Draft.match_with": ("grouped_matmul", (step,)),
}

SET_UP = {
    # what a pattern prepares: (operation, sites that are left of it)
    "patterns.attention.recognise:_reach": ("attention", 0),
    "patterns.attention.recognise:_Proofs.__init__": ("attention", 0),
    "patterns.cross_entropy.recognise:_exponents": ("cross_entropy", 0),
    "patterns.mixture_of_experts.finder:candidates": ("grouped_matmul", 2),
    "patterns.mixture_of_experts.recognise:choice_axes": ("grouped_matmul", 2),
}


@functools.cache
def wanted(function):
    """Computed before any fault is let loose."""
    return jax.tree.map(np.asarray, jax.jit(function)(operands()))


def same(function, result):
    # 1e-4: float32 gradients of eight sites, of which each may differ by 5e-5 of its largest value.
    jax.tree.map(lambda r, w: np.testing.assert_allclose(r, w, rtol=1e-4, atol=1e-4), result, wanted(function))


def let_loose(monkeypatch, place, error, everywhere=False):
    """Makes "module:name" or "module:class.name" raise, for odd sites or everywhere."""
    module, _, name = place.partition(":")
    owner = importlib.import_module(f"autopallas.{module}")
    *classes, name = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, name, faulty(getattr(owner, name), error, everywhere))


def run(function, stage, op, left, error, **options):
    """Runs with a fault: one warning, one operation at fault, the other sites and the numbers as without."""
    wanted(function)
    fn = autopallas.optimize(function, objective="always", ops="-respelling", **options)
    with warned(1, op, type(error).__name__):
        same(function, fn(operands()))
        same(function, fn(operands()))
    report = fn.report()
    assert report.counts() == ALL - Counter({op: ALL[op] - left})
    assert {(failure.stage, failure.op) for failure in report.failures} == {(stage, op)}
    assert all(type(error).__name__ in failure.error for failure in report.failures)
    assert autopallas.Report.from_json(report.to_json()) == report
    return report


@pytest.mark.parametrize(
    ("place", "function"),
    [(place, function) for place, (_, functions) in CANDIDATE.items() for function in functions],
)
def test_an_exception_in_one_candidate_costs_that_candidate(place, function, monkeypatch):
    op, _ = CANDIDATE[place]
    error = ERRORS[list(CANDIDATE).index(place) % len(ERRORS)]
    wanted(function)
    let_loose(monkeypatch, place, error)
    report = run(function, "recognition", op, ALL[op] - 1, error)
    assert all(failure.location.endswith(")") for failure in report.failures), report.failures


@pytest.mark.parametrize(("place", "case"), SET_UP.items(), ids=list(SET_UP))
def test_an_exception_in_what_a_pattern_prepares_costs_that_pattern(place, case, monkeypatch):
    op, left = case
    wanted(several)
    let_loose(monkeypatch, place, ValueError("on fire"), everywhere=True)
    run(several, "recognition", op, left, ValueError("on fire"))


@pytest.mark.parametrize("error", ERRORS[:2], ids=lambda error: type(error).__name__)
def test_a_backward_whose_search_fails_leaves_other_backwards(error, monkeypatch):
    wanted(step)
    let_loose(monkeypatch, "patterns.backward:Lookup.backwards", error)
    fn = autopallas.optimize(step, objective="always", ops="-respelling")
    with warned(1, type(error).__name__):
        same(step, fn(operands()))
    report = fn.report()
    assert report.counts() == Counter(attention=1, cross_entropy=2, grouped_matmul=3)
    assert {(failure.stage, failure.op) for failure in report.failures} == {
        ("recognition", "attention"),
        ("recognition", "grouped_matmul"),
    }
    assert {site.direction for site in report.sites} == {"forward+backward"}
    assert [miss.op for miss in report.near_misses].count("attention") == 1, "the site is told as a near miss"


LATER = {
    "sharding.shard_sites:_mesh": "partition",
    "plan.choose_implementation:_decide": "plan",
    "report.describe:_describe": "report",
    "rewrite.sites:_Splicer.replace": "rewrite",
}


@pytest.mark.parametrize(("place", "stage"), LATER.items(), ids=list(LATER))
@pytest.mark.parametrize("function", [several, step])
def test_an_exception_in_later_work_on_a_site_costs_that_site(place, stage, function, monkeypatch):
    wanted(function)
    let_loose(monkeypatch, place, ValueError("on fire"))
    fn = autopallas.optimize(function, objective="always")
    with warned(4 if stage in ("plan", "rewrite") else 1, "on fire"):  # these warn of each kernel that is not used
        same(function, fn(operands()))
    report = fn.report()
    assert report.counts() == Counter(attention=1, cross_entropy=1, grouped_matmul=2)
    kept = [site for site in report.sites if site.verdict == "kept"]
    assert len(kept) == 4
    assert all("on fire" in site.reason for site in kept)
    assert {(failure.stage, failure.op) for failure in report.failures} == {(stage, op) for op in ALL}
    assert autopallas.Report.from_json(report.to_json()) == report


@pytest.mark.parametrize("place", [*CANDIDATE, *SET_UP, *LATER])
def test_strict_raises(place, monkeypatch):
    let_loose(monkeypatch, place, ZeroDivisionError("on fire"), everywhere=True)
    function = CANDIDATE.get(place, ("", (several,)))[1][0]
    with pytest.raises(ZeroDivisionError, match="on fire"):
        autopallas.explain(autopallas.optimize(function, objective="always", strict=True), operands())


def gate(x, y):
    return jnp.tanh(x) * y + jnp.sin(y)


def blend(x, y):
    return jnp.cos(x) * jnp.exp(-y)


@pytest.fixture
def gate_and_blend():
    """Two own patterns."""
    types = [jax.ShapeDtypeStruct((8, 16), jnp.float32)] * 2
    made = [autopallas.pattern(f, shapes=types, name=f.__name__)(lambda x, y, f=f: f(x, y)) for f in (gate, blend)]
    yield [one.name for one in made]
    for one in made:
        one.remove()


def gated(pairs):
    return [(gate(*pair), blend(*pair)) for pair in pairs]


PAIRS = [tuple(np.full((8, width), 0.5 + k, np.float32) for k in (0, 1)) for width in (16, ODD)]


@pytest.mark.parametrize("place", ["_Finder._match", "_Finder.__init__", "_Finder._exactly"])
def test_an_exception_in_an_own_pattern_costs_that_pattern_or_candidate(place, gate_and_blend, monkeypatch):
    wanted = jax.jit(gated)(PAIRS)
    prepares = place.endswith("__init__")
    owner = importlib.import_module("autopallas.patterns.spellings")._Finder
    name = place.split(".")[1]
    real = getattr(owner, name)

    def fails(self, *arguments, **keywords):
        pattern = arguments[1] if prepares else self.pattern
        if pattern.name == gate_and_blend[0] and (prepares or is_odd(*arguments)):
            raise ValueError("on fire")
        return real(self, *arguments, **keywords)

    monkeypatch.setattr(owner, name, fails)
    fn = autopallas.optimize(gated)
    with warned(1, "on fire"):
        jax.tree.map(np.testing.assert_array_equal, fn(PAIRS), wanted)
    first, second = gate_and_blend
    assert fn.report().counts() == Counter({first: 0 if prepares else 1, second: 2})
    assert [(f.stage, f.op) for f in fn.report().failures] == [("recognition", first)]


def sorted_mixture(rows, weights, router):
    """Rows sorted by expert, one ragged product, and back."""
    gates, chosen = jax.lax.top_k(jax.nn.softmax(rows @ router), 2)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.sum(jax.nn.one_hot(chosen.reshape(-1), weights.shape[0], dtype=jnp.int32), 0)
    found = jnp.tanh(jax.lax.ragged_dot(rows[order // 2], weights, sizes))
    return jnp.sum(gates[..., None] * found[jnp.argsort(order)].reshape(*chosen.shape, -1), 1)


def one_by_one(rows, weights, router):
    """One ragged product for each expert, in which all rows are its own."""
    gates, chosen = jax.lax.top_k(jax.nn.softmax(rows @ router), 2)
    total = 0.0
    for expert in range(weights.shape[0]):
        sizes = jnp.zeros(weights.shape[0], jnp.int32).at[expert].set(rows.shape[0])
        gate = jnp.sum(jnp.where(chosen == expert, gates, 0), -1)
        total = total + gate[:, None] * jax.lax.ragged_dot(rows, weights, sizes)
    return total


def mapped(function):
    return lambda batches, *given: jax.lax.map(lambda rows: function(rows, *given), batches)


def accumulated(function):
    """The sum of the gradients of microbatches."""

    def gradients(batches, *given):
        def add(sums, rows):
            own = jax.grad(lambda given: jnp.sum(function(rows, *given) ** 2))(given)
            return jax.tree.map(jnp.add, sums, own), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, given), batches)[0]

    return gradients


@pytest.mark.parametrize("around", [mapped, accumulated])
@pytest.mark.parametrize("function", [sorted_mixture, one_by_one])
def test_what_jax_cannot_map_is_not_mapped(function, around):
    """JAX has no rule for a ragged product of which only some operands are mapped, and the program asks for none."""
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape, np.float32) for shape in ((6, 32, 8), (4, 8, 16), (8, 4))]
    program = around(function)
    fn = autopallas.optimize(program, objective="always", strict=True)
    # 2e-5: gradients of six microbatches, added up in float32.
    compare = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5 * 100)
    jax.tree.map(compare, fn(*arrays), jax.jit(program)(*arrays))
    assert fn.report().counts()["grouped_matmul"] == (1 if function is sorted_mixture else 4)


def test_a_backward_that_jax_cannot_map_is_none():
    """The own pattern's value in between is stacked by the loop, so that a backward for each step is looked for."""
    random = np.random.default_rng(0)
    rows, weights = (random.standard_normal(shape, np.float32) for shape in ((6, 32, 8), (4, 8, 16)))
    sizes = np.array([8, 8, 10, 6], np.int32)

    def reference(x, w, sizes):
        return jnp.tanh(jax.lax.ragged_dot(x, w, sizes)) * 2

    made = autopallas.pattern(reference, shapes=[rows[0], weights, sizes], name="product")(reference)
    try:

        def program(rows, weights):
            def both(x):
                between = jax.lax.ragged_dot(x, weights, sizes)
                return between, jnp.tanh(between) * 2

            return jax.lax.map(both, rows)

        fn = autopallas.optimize(program, objective="always", strict=True)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),  # float32, sums in another order
            fn(rows, weights),
            jax.jit(program)(rows, weights),
        )
        assert fn.report().counts() == {"grouped_matmul": 1}
        assert [miss.op for miss in fn.report().near_misses] == ["product"]
    finally:
        made.remove()
