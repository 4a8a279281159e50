"""Classes of numerics: every replacement states one, keeps it, and is used only where it is allowed."""

from __future__ import annotations

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import autopallas
from autopallas import jaxprs
from autopallas.errors import UnsupportedError
from autopallas.graph import Graph, flatten
from autopallas.kernels.respelling.kinds import kind_named
from autopallas.numerics.classes import CLASSES, allows
from autopallas.patterns import find
from autopallas.sites import random_keys
from autopallas.sites.calls import kernel_forward
from autopallas.sites.device import Device
from autopallas.sites.operation import HOME, IMPLEMENTATIONS, Supported, folder_names, operation_named, operation_names
from autopallas.sites.spec import kind_of
from autopallas.workbench.cases import cases_of

CPU = Device("cpu", "cpu")
HERE = tuple(name for name in IMPLEMENTATIONS if HOME.get(name, "cpu") == "cpu")
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 1.0)
NARROWER = ("bfloat16", "float16")


def smaller(size):
    """A size that is quick to run; odd, so that blocks do not divide it, and different for different sizes."""
    return size if size <= 8 else 9 + 2 * (size.bit_length() % 4)


def found_in(function, types, ops=None):
    """The site of a computation at these sizes, or None where it has none."""
    try:
        traced = jax.make_jaxpr(function)(*types)
    except (TypeError, ValueError):  # there is no such computation of smaller arrays
        return None
    matches, _ = find(Graph(flatten(traced)), ops, True)
    return matches[0] if len(matches) == 1 else None


@functools.cache
def replacements(narrower=False):
    """(implementation, function, types, site) for sites of every form that a table knows, smaller where such a site is
    found, and for each implementation that runs on this platform; with 16 bits instead of 32 if ``narrower``."""
    found = {}
    for op in operation_names():
        cases = cases_of(op)
        for case in cases.table_grid():
            function = cases.in_direction(case, cases.ORIGINALS[case.mask])
            kind = case.mask.partition(":")[0]
            ops = (kind,) if kind in operation_named(op).kinds else None
            variants = NARROWER if op == "respelling" and case.dtype == "float32" else ()
            for dtype in variants if narrower else (None,):
                types = tuple(
                    jax.ShapeDtypeStruct(
                        tuple(map(smaller, t.shape)), dtype if dtype and t.dtype.name == case.dtype else t.dtype
                    )
                    for t in cases.types(case)
                )
                if (op, case.mask, types) in found or (op != "respelling" and (op, case.mask) in found):
                    continue
                match = found_in(function, types, ops)
                if match is None and (op, case.mask) not in found:
                    types = cases.types(case)  # no site of this form is so small
                    match = found_in(function, types, ops)
                if match is not None and match.op == op:
                    found[op, case.mask] = found[op, case.mask, types] = function, types, match
    return [
        (name, *own)
        for key, own in found.items()
        if len(key) == 3
        for name in HERE
        if isinstance(own[2].site.operation.supports(name, own[2].spec, CPU), Supported)
    ]


def of_class(stated, narrower=False):
    """The replacements of a class that are quick to run."""
    return [
        r
        for r in replacements(narrower)
        if r[3].site.operation.numerics(r[0], r[3].spec) == stated and max(t.size for t in r[2]) <= 10_000
    ]


def random_array(type_, seed, whole=False):
    random = np.random.default_rng(seed)
    if jnp.issubdtype(type_.dtype, jax.dtypes.prng_key):
        return random_keys.keys(type_.dtype, type_.shape, seed)
    if not jnp.issubdtype(type_.dtype, jnp.floating):
        return jnp.asarray(random.integers(0, 4, type_.shape), type_.dtype)
    if whole:  # few enough for sums and products of them to be exact
        return jnp.asarray(random.integers(0, 2, type_.shape), type_.dtype)
    values = random.standard_normal(type_.shape)
    special = random.choice(SPECIAL, type_.shape)
    return jnp.asarray(np.where(random.random(type_.shape) < 0.3, special, values), type_.dtype)


def random_arrays(types, whole=False):
    return [random_array(t, zlib.crc32(f"{i}{t}".encode()), whole) for i, t in enumerate(types)]


def same_bits(given, wanted, equal=False):
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        a, b = random_keys.data(a), random_keys.data(b)
        a, b = np.atleast_1d(np.asarray(a)), np.atleast_1d(np.asarray(b))
        if a.dtype == jax.dtypes.float0:
            continue
        nan = [np.zeros(x.shape, bool) if x.dtype.kind in "iub" else np.isnan(x.astype(np.float32)) for x in (a, b)]
        np.testing.assert_array_equal(*nan)
        a, b = (np.where(n, np.zeros((), x.dtype), x) for n, x in zip(nan, (a, b), strict=True))
        np.testing.assert_array_equal(*((a, b) if equal else (a.view(np.uint8), b.view(np.uint8))))


def gradient(function, arguments):
    """A program that pulls a cotangent back through a function to its floating arguments."""
    floating = [i for i, x in enumerate(arguments) if jnp.issubdtype(x.dtype, jnp.floating)]

    def pulled(*arguments):
        def of(*chosen):
            filled = list(arguments)
            for i, x in zip(floating, chosen, strict=True):
                filled[i] = x
            results = [x for x in jax.tree.leaves(function(*filled)) if jnp.issubdtype(x.dtype, jnp.floating)]
            return [(x * jnp.arange(1, x.size + 1, dtype=x.dtype).reshape(x.shape)).sum() for x in results]

        results, pull = jax.vjp(of, *(arguments[i] for i in floating))
        return pull([jnp.ones((), x.dtype) for x in results])

    return pulled


# ---------------------------------------------------------------------- every replacement


def test_every_implementation_states_its_class():
    for folder in folder_names():
        operation = operation_named(folder)
        for name in IMPLEMENTATIONS:
            module = operation.implementation(name) if operation.has(name) else None
            if module is not None:
                own = getattr(module, "numerics", None)
                assert callable(own) or getattr(module, "NUMERICS", None) in CLASSES, f"{folder} {name}"


def test_every_operation_and_every_kind_is_among_the_replacements_that_are_tested():
    assert {r[3].op for r in replacements()} == set(operation_names())
    assert {kind_of(r[3].spec) for r in replacements() if kind_of(r[3].spec)} == set(
        operation_named("respelling").kinds
    )


def in_programs(found):
    """The replacements of one class, of each form and dtype one, as programs of several that are compiled together:
    (implementation, program, types, matches).  Steps that are told by what repeats stand alone."""
    forms = {}
    for name, function, types, match in found:
        kind = kind_of(match.spec)
        form = kind_named(kind).feature(match.spec) if kind else ""
        forms.setdefault((name, match.op, kind, form, str(types[0].dtype)), (function, types, match))
    for name in {key[0] for key in forms}:
        own = [value for key, value in forms.items() if key[0] == name and not key[3].startswith("apart")]
        alone = [[value] for key, value in forms.items() if key[0] == name and key[3].startswith("apart")]
        for few in [*(own[i : i + 24] for i in range(0, len(own), 24)), *alone]:

            def program(*arrays, few=few):
                left = iter(arrays)
                return [function(*(next(left) for _ in types)) for function, types, _ in few]

            yield name, program, [t for _, types, _ in few for t in types], [match for _, _, match in few]


def optimized(function, numerics):
    # The one is looked for by name alone, and the other, beside it, too.
    ops = [*operation_names(), "scan_checkpoint", "unrolled_scan"]
    return autopallas.optimize(function, objective="always", numerics=numerics, strict=True, ops=ops)


@pytest.mark.parametrize("narrower", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_what_is_identical_is_so_bit_for_bit_in_value_and_gradient(narrower):
    """Over every replacement there is: those that say "identical" are; by themselves and in a program."""
    programs = list(in_programs(r for r in of_class("identical", narrower) if r[0] != "reference"))
    assert sum(len(matches) for _, _, _, matches in programs) >= 10
    for name, program, types, matches in programs:
        own = [random_arrays(match.original.in_avals) for match in matches]
        kernels = jax.jit(
            lambda own, name=name, matches=matches: [
                kernel_forward(match.site, name, None)(*x)[0] for match, x in zip(matches, own, strict=True)
            ]
        )
        originals = jax.jit(
            lambda own, matches=matches: [
                jaxpr_as_fun(match.original)(*x) for match, x in zip(matches, own, strict=True)
            ]
        )
        same_bits(kernels(own), originals(own))
        arguments = random_arrays(types)
        replaced = optimized(program, "identical")
        same_bits(replaced(*arguments), jax.jit(program)(*arguments))
        assert sum(replaced.report().counts().values()) == len(matches), replaced.report()
        wanted = jax.jit(gradient(program, arguments))(*arguments)
        same_bits(jax.jit(gradient(replaced, arguments))(*arguments), wanted)
        same_bits(optimized(gradient(program, arguments), "identical")(*arguments), wanted)


INEXACT = {"exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "div", "sin", "cos", "rsqrt", "sqrt", "erf"}


@pytest.mark.parametrize("narrower", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_what_is_reordered_is_equal_where_sums_and_products_are_exact(narrower):
    exact = [r for r in of_class("reordered", narrower) if r[0] != "reference" and not INEXACT & primitives(r[1], r[2])]
    assert len({kind_of(r[3].spec) or r[3].op for r in exact}) >= (4 if narrower else 6)
    for _, program, types, matches in in_programs(exact):
        arguments = random_arrays(types, whole=True)
        replaced = optimized(program, "reordered")
        same_bits(replaced(*arguments), jax.jit(program)(*arguments), equal=True)
        assert sum(replaced.report().counts().values()) >= len(matches), replaced.report()


def primitives(function, types):
    found, todo = set(), [jax.make_jaxpr(function)(*types).jaxpr]
    while todo:
        for equation in jaxprs.open_jaxpr(todo.pop())[0].eqns:
            found.add(equation.primitive.name)
            todo += [body for _, _, body in jaxprs.bodies(equation)]
    return found


# ---------------------------------------------------------------------- what is allowed


def attend(x):
    return jax.nn.softmax(x @ x.T) @ x


def mixed(x):
    return jnp.argmax(x, axis=-1), jnp.cumsum(x, axis=0), attend(x)


X = jnp.asarray(np.random.default_rng(0).standard_normal((64, 48)), jnp.float32)


@pytest.mark.parametrize(
    ("numerics", "kinds"),
    [("identical", {"argmax"}), ("reordered", {"argmax", "cumulative"}), ("tolerance", {"argmax", "cumulative", ""})],
)
def test_a_class_allows_those_before_it_and_the_report_says_what_it_does_not(monkeypatch, numerics, kinds):
    monkeypatch.setenv("AUTOPALLAS_NUMERICS", numerics)
    report = autopallas.explain(autopallas.optimize(mixed, objective="always"), X)
    assert {site.kind for site in report.sites if site.verdict == "applied"} == kinds
    for site in report.sites:
        if site.verdict == "kept":
            assert f"numerics {numerics!r} does not allow" in site.reason
            assert site.numerics is None
        else:
            assert allows(numerics, site.numerics)
    assert ("numerics '" in str(report)) == (numerics != "tolerance")


def test_an_implementation_that_is_named_and_not_allowed_raises_and_a_list_ends_in_the_original():
    with pytest.raises(UnsupportedError, match="numerics 'identical' does not allow"):
        autopallas.optimize(attend, implementation="xla", numerics="identical")(X)
    listed = autopallas.optimize(attend, implementation=["xla", "reference"], numerics="identical")
    np.testing.assert_array_equal(listed(X), jax.jit(attend)(X))


def test_an_own_pattern_is_within_the_tolerance():
    def reference(x):
        return x / (jnp.sum(jnp.abs(x), axis=-1, keepdims=True) + 1e-3)

    @autopallas.pattern(reference, shapes=[X])
    def own(x):
        return x * (1 / (jnp.sum(jnp.abs(x), axis=-1, keepdims=True) + 1e-3))

    try:
        for numerics, verdict in (("reordered", "kept"), ("tolerance", "applied")):
            report = autopallas.explain(autopallas.optimize(reference, numerics=numerics), X)
            assert [site.verdict for site in report.sites] == [verdict], report
    finally:
        own.remove()


def test_identical_moves_nothing_else_in_the_program():
    """Rows of logits are otherwise selected before the product, which rounds differently for other sizes."""

    def loss(x, w, labels):
        logits = (x @ w)[:-1]
        return jnp.argmax(x, -1), -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(63), labels])

    w, labels = jnp.ones((48, 100)), jnp.zeros(63, jnp.int32)

    def shapes(numerics):
        traced = optimized(loss, numerics).trace(X, w, labels)
        return [e.outvars[0].aval.shape for e in traced.jaxpr.eqns if e.primitive.name == "dot_general"]

    assert shapes("identical") == [(64, 100)]
    assert shapes("tolerance") == []
