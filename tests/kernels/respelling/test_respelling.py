"""Respellings: each kind against the original, in float64 or bit for bit, over shapes, layouts, dtypes and values."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from recognition import capacities
from support.compare import compare
from support.mixtures import P, X
from support.respellings import random
from support.tiers import examples

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.kernels.respelling.kinds import kind_named, kind_names
from autopallas.patterns import find
from autopallas.sites.encoding import encoded, saved_site
from autopallas.tuning.table import Table
from autopallas.workbench.cases import cases_of, match_of

KINDS = kind_names()


def holds_a_program(spec):
    """Whether parameters hold a part of the program, which has no form as data."""
    return not {"loop", "around", "pair"}.isdisjoint(dict(spec.parameters))


def optimized(function, **options):
    return autopallas.optimize(function, objective="always", strict=True, **options)


def sites(function, *arguments):
    return find(Graph(flatten(jax.make_jaxpr(function)(*arguments))), ("respelling",), True)[0]


def same_bits(given, wanted):
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        a, b = np.atleast_1d(np.asarray(a)), np.atleast_1d(np.asarray(b))
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b)) if a.dtype.kind == "f" else None
        np.testing.assert_array_equal(np.where(a == a, a, 0).view(np.uint8), np.where(b == b, b, 0).view(np.uint8))


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

        if "pair" in dict(match.spec.parameters):
            continue  # of two passes, which are no pair by themselves
        program = original
        if kind_named(name).least_steps > 1:  # it is found in loops alone
            program = lambda *given, each=original: lax.map(lambda one: each(*one), given)  # noqa: E731
            open_types = [jax.ShapeDtypeStruct((2, *t.shape), t.dtype) for t in open_types]
        (found,) = find(Graph(flatten(jax.make_jaxpr(program)(*open_types))), ("respelling", name), True)[0]
        if holds_a_program(match.spec):
            assert kind_named(name).feature(found.spec) == kind_named(name).feature(match.spec)
            continue
        assert found.spec.parameters == match.spec.parameters


def test_grouped_convolutions_with_channels_in_fours_have_evidence_of_their_own():
    """XLA computes these on vectors, and the others one by one."""

    def feature(channels):
        x, w = jnp.ones((1, 9, 32 * channels)), jnp.ones((3, channels, 32 * channels))
        (site,) = sites(lambda x, w: convolution(32, LAYOUTS[1][0])(x, w), x, w)
        return kind_named("convolution").feature(site.spec)

    assert feature(3) == feature(5) != feature(4) == feature(8)


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


def test_no_platform_but_cpus_has_rows():
    table = cases_of("respelling").table_grid
    assert table("tpu") == table("gpu") == ()


@pytest.mark.nightly
def test_samples_cover_every_bucket_of_every_row():
    from autopallas.kernels.respelling.tuned_block_sizes import TABLE

    assert isinstance(TABLE, Table)
    known = {TABLE.key(match_of(case).spec, "xla", "forward") for case in cases_of("respelling").table_grid()}
    assert {key for key, _ in TABLE.files.read("cpu")} <= known


# ---------------------------------------------------------------------- convolutions


LAYOUTS = {1: (("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW"), ("WNC", "IOW", "CWN"))}
LAYOUTS[2] = (("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("HWNC", "IHWO", "CHNW"))
LAYOUTS[3] = (("NDHWC", "DHWIO", "NDHWC"), ("NCDHW", "OIDHW", "NCDHW"))


def convolution(groups, numbers, stride=1, padding="SAME", dilation=1, base=1):
    def run(x, w):
        rank = x.ndim - 2
        return lax.conv_general_dilated(
            x, w, (stride,) * rank, padding, (base,) * rank, (dilation,) * rank, numbers, feature_group_count=groups
        )

    return run


def operands(rank, layout, channels, groups, multiplier=1, size=6, window=3, dtype=jnp.float32):
    sizes = dict(zip("DHW"[-rank:], (size + 1, size, size - 1)[:rank], strict=True)) | {"N": 2, "C": channels}
    weights = dict.fromkeys("DHW", window) | {"I": channels // groups, "O": channels * multiplier}
    data, kernel, _ = LAYOUTS[rank][layout]
    return (
        random(*(sizes[letter] for letter in data), dtype=dtype),
        random(*(weights[letter] for letter in kernel), seed=1, dtype=dtype),
    )


@pytest.mark.parametrize(
    ("rank", "layout"), [(rank, layout) for rank, layouts in LAYOUTS.items() for layout in range(len(layouts))]
)
@pytest.mark.parametrize(("channels", "groups", "multiplier"), [(6, 6, 1), (4, 4, 2), (6, 3, 1), (6, 2, 2)])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "base"),
    [
        (1, "SAME", 1, 1),
        (2, "VALID", 1, 1),
        (1, "SAME", 2, 1),
        (1, [(2, 0)], 1, 1),
        (1, [(-1, 3)], 1, 2),
        (3, "SAME", 1, 1),
    ],
)
def test_grouped_convolutions_and_their_gradients(
    rank, layout, channels, groups, multiplier, stride, padding, dilation, base
):
    padding = padding * rank if isinstance(padding, list) else padding
    x, w = operands(rank, layout, channels, groups, multiplier, window=2 if rank == 3 else 3)
    run = convolution(groups, LAYOUTS[rank][layout], stride, padding, dilation, base)
    loss = jax.value_and_grad(lambda x, w: (jnp.tanh(run(x, w)) ** 2).sum(), (0, 1))
    found = compare(loss, (x, w), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 3


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_convolutions_are_summed_in_float32(dtype):
    x, w = operands(2, 0, 6, 6, size=9, dtype=dtype)
    found = compare(convolution(6, LAYOUTS[2][0]), (x, w))
    assert found.complaints == []
    assert found.counts("respelling") > 0


def test_a_weight_gradient_is_summed_over_blocks_that_do_not_divide_the_window():
    """The window, of 1031 positions, is longer than one block."""
    run = convolution(40, LAYOUTS[1][0], padding=[(3, 0)])
    x, w = random(2, 1031, 40), random(4, 1, 40, seed=1)
    found = compare(jax.grad(lambda x, w: (run(x, w) ** 2).sum(), 1), (x, w), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 2


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
def test_what_is_not_finite_meets_the_zeros_of_the_padding(place, value):
    given = list(operands(2, 0, 4, 4))
    given[place] = given[place].at[(0,) * 4].set(value)
    run = convolution(4, LAYOUTS[2][0])
    a, b = jax.jit(run)(*given), jax.jit(optimized(run))(*given)
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    np.testing.assert_array_equal(np.isinf(a), np.isinf(b))


FOUR_AXES = lax.ConvDimensionNumbers((0, 5, 1, 2, 3, 4), (5, 4, 0, 1, 2, 3), (0, 5, 1, 2, 3, 4))
"""Numbers of a convolution over four axes of space, with the channels last."""


@pytest.mark.parametrize(
    ("dtype", "rank", "padding", "assumed"),
    [("float64", 2, "SAME", 1), ("float64", 2, "VALID", 0), ("float32", 4, "SAME", 1), ("float32", 3, "SAME", 0)],
)
def test_padding_that_the_original_skips_is_assumed_to_meet_what_is_finite(dtype, rank, padding, assumed):
    numbers = LAYOUTS[rank][0] if rank in LAYOUTS else FOUR_AXES
    run = convolution(2, numbers, padding=padding)
    with jax.enable_x64(True):
        x, w = np.ones((1, *(4,) * rank, 2), dtype), np.ones((*(2,) * rank, 1, 2), dtype)
        w[-1] = np.inf
        own = optimized(run)
        own(x, w)
        (site,) = own.report().sites
        assert len(site.assumptions) == assumed
        strict = optimized(run, assume_finite=False)
        np.testing.assert_array_equal(strict(x, w), jax.jit(run)(x, w))
        assert len(strict.report().sites) == 1 - assumed


def test_other_convolutions_are_left_alone():
    numbers = LAYOUTS[2][0]
    plain = convolution(1, numbers), random(1, 8, 8, 4), random(3, 3, 4, 4)
    wide = convolution(4, numbers), random(1, 20, 20, 4), random(9, 9, 1, 4)
    empty = convolution(4, numbers), random(0, 8, 8, 4), random(3, 3, 1, 4)
    for run, *arrays in (plain, wide, empty):
        assert sites(run, *arrays) == []


# ---------------------------------------------------------------------- cumulative operations


@pytest.mark.parametrize(
    "run",
    [
        lambda x: lax.cumprod(x, axis=0),
        lambda x: lax.cumsum(x, axis=0),
        lambda x: lax.reduce_window(x, np.asarray(-jnp.inf, x.dtype), lax.max, (2, 1), (2, 1), "VALID"),
    ],
    ids=["cumprod", "cumsum", "reduce_window_max"],
)
def test_numbers_that_overflow_on_the_way_and_windows_with_a_nan_are_assumed_away(run):
    own = optimized(run)
    own(random(64, 128))
    (site,) = own.report().sites
    assert any("overflows" in text or "NaN" in text for text in site.assumptions)
    strict = optimized(run, assume_finite=False)
    rows = np.ones((64, 128), np.float32)
    rows[:4, 0], rows[4, 1] = [1e30, 1e30, 1e-30, 1e-30], np.nan
    rows[3, 2], rows[34:36, 2] = 3e38, [3e38, -3e38]
    np.testing.assert_array_equal(strict(rows), jax.jit(run)(rows))
    assert not strict.report().sites


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((5, 7), 0), ((5, 7), 1), ((3, 4, 5), 1), ((9,), 0), ((2, 1), 0)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8])
def test_cumulative_operations(name, reverse, shape, axis, dtype):
    floating = jnp.issubdtype(dtype, jnp.floating)
    if name == "cumlogsumexp" and not floating:
        pytest.skip("JAX has no logarithm of integers")
    x = (
        random(*shape, dtype=dtype)
        if floating
        else jnp.asarray(np.arange(np.prod(shape)).reshape(shape) % 5 + 1, dtype)
    )

    def run(x):
        return getattr(lax, name)(x, axis=axis, reverse=reverse)

    if not floating or name in ("cummax", "cummin"):
        same_bits(jax.jit(optimized(run))(x), jax.jit(run)(x))
        assert len(sites(run, x)) == 1
    else:
        found = compare(run, (x,), gradients=name != "cumprod")
        assert found.complaints == []
        assert found.counts("respelling") > 0


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
def test_cumulative_operations_of_what_is_not_finite(name):
    values = [0.0, -0.0, 1.5, jnp.inf, -jnp.inf, jnp.nan, 2.0, -3e38, 3e38, 1e-40]
    x = jnp.asarray(list(itertools.permutations(values, 3)), jnp.float32).T

    def run(x):
        return getattr(lax, name)(x, axis=0)

    a, b = np.asarray(jax.jit(run)(x)), np.asarray(jax.jit(optimized(run))(x))
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e4])
def test_a_long_sum_is_no_less_exact_than_the_original(offset):
    """Added one by one without what rounding lost, 50,000 numbers of one sign are off by 1e-4."""
    x = random(50_000, 2) + offset
    found = compare(lambda x: jnp.cumsum(x, 0), (x,), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 1
    assert found.errors["value"][0][0] < 1e-6


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("numbers", ["random", "rising", "falling"])
def test_logarithms_of_long_sums_of_exponentials(numbers, offset):
    """Beside the logarithm of a long sum a term vanishes: carried as such, it is off by 1.5 at 1e4."""
    x = {"random": random(50_000), "rising": jnp.linspace(0, 99, 50_000), "falling": jnp.linspace(99, 0, 50_000)}
    found = compare(lambda x: lax.cumlogsumexp(x), (x[numbers] + offset,), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 1


def test_long_products_of_floats_are_left_alone():
    assert sites(lambda x: lax.cumprod(x, axis=0), random(2000, 3)) == []
    assert len(sites(lambda x: lax.cumprod(x, axis=0), jnp.ones((2000, 3), jnp.int32))) == 1


# ---------------------------------------------------------------------- windows


@pytest.mark.parametrize("step", [lax.add, lax.max, lax.min])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8])
@pytest.mark.parametrize(
    ("window", "strides", "padding", "base", "dilation"),
    [
        ((1, 2, 2, 1), (1, 2, 2, 1), "VALID", (1,) * 4, (1,) * 4),
        ((1, 3, 3, 1), (1, 1, 1, 1), "SAME", (1,) * 4, (1,) * 4),
        ((1, 3, 2, 1), (1, 2, 1, 1), [(0, 0), (2, 1), (0, 3), (0, 0)], (1,) * 4, (1, 1, 2, 1)),
        ((2, 1, 1, 3), (1, 1, 1, 2), "VALID", (1,) * 4, (1,) * 4),
        ((1, 2, 2, 1), (1, 1, 1, 1), [(0, 0), (1, 1), (1, 1), (0, 0)], (1, 2, 2, 1), (1,) * 4),
    ],
)
def test_windows(step, dtype, window, strides, padding, base, dilation):
    floating = jnp.issubdtype(dtype, jnp.floating)
    x = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 7, 6, 5)), dtype)
    x = (x / 7).astype(dtype) if floating else x
    start = 0 if step is lax.add else (jnp.finfo if floating else jnp.iinfo)(dtype)
    start = start if step is lax.add else (start.min if step is lax.max else start.max)
    start = (-np.inf if step is lax.max else np.inf) if floating and step is not lax.add else start

    def run(x):
        return lax.reduce_window(x, np.asarray(start, dtype), step, window, strides, padding, base, dilation)

    assert len(sites(run, x)) == 1
    if floating and step is lax.add:
        found = compare(run, (x,))
        assert found.complaints == []
        assert found.counts("respelling") > 0
    else:
        same_bits(jax.jit(optimized(run))(x), jax.jit(run)(x))


@pytest.mark.parametrize("step", [lax.add, lax.max, lax.min])
def test_windows_of_what_is_not_finite(step):
    x = random(1, 6, 6, 2).at[0, 2, 3, 0].set(jnp.nan).at[0, 0, 0, 1].set(jnp.inf).at[0, 4, 4, 1].set(-jnp.inf)
    start = {lax.add: 0.0, lax.max: -jnp.inf, lax.min: jnp.inf}[step]
    run = lambda x: lax.reduce_window(x, start, step, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")  # noqa: E731
    np.testing.assert_allclose(optimized(run)(x), run(x), rtol=1e-6, atol=1e-6)
    assert len(sites(run, x)) == 1


# ---------------------------------------------------------------------- positions of extrema


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")]), min_size=1, max_size=9
    ),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.booleans(),
)
def test_the_first_extremum_or_the_first_nan(values, dtype, largest):
    x = jnp.asarray(values, dtype)
    run = jnp.argmax if largest else jnp.argmin
    assert int(optimized(run)(x)) == int(run(x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("function", [jnp.argmax, jnp.argmin])
def test_the_first_nan_is_the_extremum_of_three_axes(function, dtype):
    """Of three axes and more, XLA's maxima of float32 numbers on CPUs leave NaNs out."""
    draw = np.random.default_rng(0)
    x = draw.choice([np.nan, np.inf, -np.inf, 0, 1, 2], (2, 40, 64), p=[0.02, 0.02, 0.02, 0.3, 0.34, 0.3])
    x = jnp.asarray(x, dtype)
    for axis in range(3):
        run = optimized(lambda x, axis=axis: function(x, axis), numerics="identical")
        same_bits(run(x), function(x, axis))
        assert run.report().counts() == {"respelling": 1}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.uint8, jnp.int8])
@pytest.mark.parametrize(("shape", "axis"), [((5, 7), 0), ((5, 7), 1), ((3, 1, 4), 1), ((8,), 0), ((0, 3), 1)])
@pytest.mark.parametrize("function", [jnp.argmax, jnp.argmin])
def test_positions_of_extrema(dtype, shape, axis, function):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 4, shape), dtype)
    same_bits(optimized(lambda x: function(x, axis))(x), function(x, axis))
    assert len(sites(lambda x: function(x, axis), x)) == (0 not in shape)


def test_rows_of_long_axes_hold_for_none_that_is_shorter():
    """40 rows of 100,000 took twice as long; rows were measured from 64 on."""
    names = [sites(lambda x: jnp.argmax(x, 0), jnp.ones((n, 100)))[0].site.form for n in (40, 64)]
    assert [kind_named("argmax").feature(form) for form in names] == [
        "floats, short other axis",
        "floats, long other axis",
    ]


def test_positions_beyond_what_a_float_counts():
    x = jnp.zeros(2**24 + 5, jnp.int8).at[2**24 + 3].set(1)
    assert int(optimized(jnp.argmax)(x)) == 2**24 + 3


# ---------------------------------------------------------------------- sorts


SPECIAL = [0.0, 1.5, -1.5, float("inf"), float("-inf"), float("nan"), -float("nan"), 1e-40, -1e-40, 3e38, -3e38, 1.5]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_values_are_sorted_with_nans_last(dtype):
    x = jnp.asarray(np.random.default_rng(0).choice(np.array(SPECIAL, np.float32), (20, 13)), dtype)
    for axis in (0, 1):
        wanted = jnp.asarray(np.sort(np.asarray(x, np.float32), axis), dtype)  # JAX takes subnormal bfloat16 for equal
        found = optimized(lambda x, axis=axis: jnp.sort(x, axis))(x)
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))
    assert len(sites(jnp.sort, x)) == 1


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_further_operands_follow_and_equal_ones_stay_in_order(stable, dtype):
    """-0.0 equals 0.0, and every NaN every other."""
    x = jnp.asarray(np.random.default_rng(1).choice(np.array([*SPECIAL, -0.0], np.float32), (6, 40)), dtype)
    places = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    run = lambda x, p: lax.sort((x, p, -p), is_stable=stable, num_keys=1)  # noqa: E731
    if stable:
        same_bits(optimized(run)(x, places), run(x, places))
        same_bits(optimized(jnp.argsort)(x), jnp.argsort(x))
    keys, found, negative = optimized(run)(x, places)
    taken = np.take_along_axis(np.asarray(x, np.float32), np.asarray(found), 1)
    np.testing.assert_array_equal(taken, np.asarray(keys, np.float32))
    np.testing.assert_array_equal(found, -negative)


def test_minus_zero_stands_beside_zero():
    x = jnp.asarray([0.0, -0.0, 1.0, -1.0, -0.0, 0.0])
    np.testing.assert_array_equal(optimized(jnp.sort)(x), jnp.sort(x))


def test_other_sorts_are_left_alone():
    x = random(4, 8)
    assert sites(lambda x: lax.sort((x, x), num_keys=2), x) == []
    assert sites(jnp.sort, jnp.arange(8)) == []
    assert sites(jnp.sort, x.astype(jnp.complex64)) == []


@pytest.mark.parametrize(
    "function", [jnp.median, lambda x: jnp.quantile(x, 0.3, axis=-1), lambda x: jnp.percentile(x, 90)]
)
def test_what_sorts_inside(function):
    x = random(5, 31)
    found = compare(function, (x,), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 1


# ---------------------------------------------------------------------- one-hot products


def test_one_hot_products_pick_and_add_up_rows():
    ids, table = jnp.asarray([[3, 0, 7, 2], [-1, 9, 8, 3]]), random(9, 5)

    def loss(table, ids):
        return (jnp.sin(jax.nn.one_hot(ids, 9) @ table) ** 2).sum()

    found = compare(jax.value_and_grad(loss), (table, ids), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 2


@pytest.mark.parametrize(
    "spelling", ["lik,kj->lij", "lik,kj->jli", "lik,jk->lij", "lik,kjm->limj", "lik,lij->kj", "lik,ilj->jk"]
)
def test_one_hot_products_in_any_spelling(spelling):
    ids = jnp.asarray([[3, 0, 2], [4, 3, 1]])
    sizes = {"l": 2, "i": 3, "k": 5, "j": 4, "m": 6}
    other = random(*(sizes[letter] for letter in spelling.split(",")[1].split("->")[0]))
    for flipped in (False, True):

        def run(ids, other, flipped=flipped):
            matrix = (ids[..., None] == jnp.arange(5)).astype(other.dtype)
            left, right = spelling.split("->")[0].split(",")
            words, given = (f"{right},{left}", (other, matrix)) if flipped else (f"{left},{right}", (matrix, other))
            return jnp.einsum(f"{words}->{spelling.split('->')[1]}", *given)

        found = compare(run, (ids, other), gradients=False, dtype="float32")
        assert found.complaints == []
        assert found.counts("respelling") == 1


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (1,), (2, 1, 3)])
def test_one_hot_products_with_axes_of_size_one(shape):
    ids, table = jnp.asarray(np.arange(np.prod(shape)).reshape(shape) % 5), random(5, 3)
    loss = jax.value_and_grad(lambda t, i: (jnp.sin(jax.nn.one_hot(i, 5) @ t) ** 2).sum())
    found = compare(loss, (table, ids), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 2


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int32])
def test_ids_of_any_integer_dtype(dtype):
    ids, table = jnp.asarray([3, 0, 100], dtype), random(101, 4)
    found = compare(lambda i, t: jax.nn.one_hot(i, 101) @ t, (ids, table), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 1


@pytest.mark.parametrize(("dtype", "classes"), [(jnp.uint8, 256), (jnp.int8, 128), (jnp.uint16, 65536)])
def test_as_many_classes_as_a_dtype_has_ids(dtype, classes):
    """The number of classes is no number of that dtype."""
    ids = jnp.asarray(np.random.default_rng(0).integers(0, classes, 50), dtype)
    run = lambda i, t, x: (jax.nn.one_hot(i, classes) @ t, jax.nn.one_hot(i, classes).T @ x)  # noqa: E731
    found = compare(run, (ids, random(classes, 3), random(50, 3)), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 2


@pytest.mark.parametrize("count", [512, 513, 20_000])
def test_a_long_sum_of_equal_rows_is_as_exact_as_a_product(count):
    """Added one by one, 20,000 times 0.1 are off by 1e-4."""
    ids = jnp.zeros(count, jnp.int32).at[3].set(7)
    found = compare(lambda i, x: jax.nn.one_hot(i, 2).T @ x, (ids, jnp.full((count, 3), 0.1)), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 1


def test_sums_by_index_of_any_number_of_rows_copy_no_rows():
    """Blocks of rows are read where they stand, also where the last one is shorter."""
    sums = optimized(lambda ids, x: jax.nn.one_hot(ids, 20).T @ x)
    ids, x = jax.ShapeDtypeStruct((5000,), jnp.int32), jax.ShapeDtypeStruct((5000, 64), jnp.float32)
    compiled = sums.lower(ids, x).compile()
    assert sums.report().counts() == {"respelling": 1}
    assert compiled.memory_analysis().temp_size_in_bytes < x.size * x.dtype.itemsize / 4


def test_what_is_no_one_hot_product_is_left_alone():
    ids, table = jnp.asarray([3, 0, 2]), random(4, 4)
    for run in (
        lambda i, t: (i[:, None] == i[None, :]).astype(t.dtype) @ t[:3],  # no positions
        lambda i, t: (i[:, None] == jnp.arange(1, 5)).astype(t.dtype) @ t,  # positions that begin at 1
        lambda i, t: (i[:, None] >= jnp.arange(4)).astype(t.dtype) @ t,
        lambda i, t: jax.nn.one_hot(i, 4).at[0].mul(2) @ t,
        lambda i, t: jnp.einsum("lik,ikj->lj", jax.nn.one_hot(i[:, None], 4), t[None]),
    ):
        assert sites(run, ids, table) == []


def test_products_with_infinities_stay_unless_they_are_assumed_away():
    ids, table = jnp.asarray([0, 1]), random(4, 3).at[3].set(jnp.inf)
    run = lambda i, t: jax.nn.one_hot(i, 4) @ t  # noqa: E731
    assert np.isnan(run(ids, table)).all()
    assert np.isnan(optimized(run, assume_finite=False)(ids, table)).all()
    found = optimized(run)
    assert np.isfinite(found(ids, table)).all()
    assert any("finite" in assumption for assumption in found.report().sites[0].assumptions)


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


def test_what_lies_in_a_site_that_is_kept_is_respelt(monkeypatch):
    """The places of tokens in a mixture with a capacity are a cumulative sum, which the mixture's kernel computes."""
    written = capacities.first(
        capacities.per_expert, lambda dispatch, g, mine: dispatch * (g * mine).sum(-1)[:, None, None]
    )
    applied = optimized(written)
    close(applied(P, X), written(P, X))
    assert applied.report().counts() == {"grouped_matmul": 1}

    monkeypatch.setenv("AUTOPALLAS_BACKEND_RESPELLING", "xla")
    kept = autopallas.optimize(written, strict=True)
    close(kept(P, X), written(P, X))
    verdicts = {(site.op, site.kind): site.verdict for site in kept.report().sites}
    assert verdicts == {("grouped_matmul", ""): "kept", ("respelling", "cumulative"): "applied"}


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
