"""Recurrences in chunks against the loop in float64: any decay, any number of steps, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopallas import compat
from autopallas.kernels.recurrence.block_sizes import BlockSizes
from autopallas.kernels.recurrence.chunks import Recurrence, by_scans, chunked
from autopallas.kernels.recurrence.products import constant_pairs_of, halved_products, pairs, pairs_of, segment_products
from autopallas.kernels.recurrence.spec import RecurrenceSpec
from autopallas.kernels.recurrence.tuned_block_sizes import conditions
from autopallas.kernels.recurrence.xla import supports
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported

VALUE, GRADIENT = 1e-5, 5e-5
"""Tolerances of float32, beside twice the loop's own error."""


def loop(given: Recurrence, before: bool) -> tuple[jax.Array, jax.Array]:
    """The loop, step by step."""

    def step(state, own):
        a, k, v, q, probe, write = own
        k, q = (jnp.broadcast_to(x, (x.shape[0], v.shape[1], x.shape[2])) for x in (k, q))
        after = (a[..., None, None] if a.ndim == 2 else a[..., None]) * state + k[..., None] * v[..., None, :]
        if probe is not None:
            read = jnp.einsum("ghn,ghnp->ghp", probe, state)
            after += (k if write is None else write)[..., None] * read[..., None, :]
        return after, jnp.einsum("ghn,ghnp->ghp", q, state if before else after)

    slices = (given.decay, given.key, given.value, given.query, given.probe, given.write)
    last, y = jax.lax.scan(step, given.initial, slices)
    return y, last


def arrays(decay, shared=False, columns=5, seed=0) -> Recurrence:
    random = np.random.default_rng(seed)
    steps, groups, heads = decay.shape[:3]
    rows = decay.shape[3] if decay.ndim == 4 else 4

    def normal(*shape):
        return jnp.asarray(random.standard_normal(shape), jnp.float32)

    j = 1 if shared else heads
    key, query = normal(steps, groups, j, rows), normal(steps, groups, j, rows)
    value, initial = normal(steps, groups, heads, columns), normal(groups, heads, rows, columns)
    return Recurrence(jnp.asarray(decay, jnp.float32), key, value, query, initial)


def with_gradients(function, given, weights):
    def loss(given):
        found = function(given)
        return sum(jnp.sum(x * w.astype(x.dtype)) for x, w in zip(found, weights, strict=True)), found

    gradients, found = jax.jit(jax.grad(loss, has_aux=True))(given)
    return [*found], [x for x in gradients if x is not None]


def errors(given, true):
    return [
        float(np.max(np.abs(np.asarray(a, np.float64) - b)) / max(np.max(np.abs(b)), 1e-30))
        for a, b in zip(given, true, strict=True)
    ]


def check(given: Recurrence, chunk: int, before: bool, of_chunks=by_scans) -> None:
    steps, groups, heads, columns = given.value.shape
    random = np.random.default_rng(1)
    shapes = ((steps, groups, heads, columns), given.initial.shape)
    weights = [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]
    ours = with_gradients(lambda x: chunked(x, chunk, before, of_chunks), given, weights)
    theirs = with_gradients(lambda x: loop(x, before), given, weights)
    with jax.enable_x64(True):
        wide = Recurrence(*(None if x is None else jnp.asarray(np.asarray(x, np.float64)) for x in given))
        true = with_gradients(
            lambda x: loop(x, before), wide, [jnp.asarray(np.asarray(w, np.float64)) for w in weights]
        )
        true = [[np.asarray(x) for x in part] for part in true]
    for own, original, exact, limit in zip(ours, theirs, true, (VALUE, GRADIENT), strict=True):
        for error, base in zip(errors(own, exact), errors(original, exact), strict=True):
            assert error <= max(limit, 2 * base)


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("steps, chunk", [(37, 8), (32, 32), (5, 16), (1, 4), (70, 64)])
@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "channel"])
def test_chunks_compute_what_the_loop_does(channels, steps, chunk, shared, before):
    shape = (steps, 2, 3, 4) if channels else (steps, 2, 3)
    check(arrays(np.random.default_rng(2).uniform(0.5, 1, shape), shared), chunk, before)


DECAYS = {
    "near one": lambda r, s: 1 - 1e-4 * r.uniform(size=s),
    "one": lambda r, s: np.ones(s),
    "above one": lambda r, s: np.full(s, 1.0001),
    "small": lambda r, s: 10 ** r.uniform(-8, -3, s),
    "tiny": lambda r, s: np.full(s, 1e-30),
    "some zero": lambda r, s: np.where(r.uniform(size=s) < 0.05, 0.0, r.uniform(0.9, 1, s)),
    "zero": lambda r, s: np.zeros(s),
    "negative": lambda r, s: -r.uniform(0.9, 1, s),
    "both signs": lambda r, s: r.uniform(-1, 1, s),
    "one, but a few": lambda r, s: np.where(r.uniform(size=s) < 0.01, 1e-20, 1.0),
    "growing": lambda r, s: r.uniform(1, 1.05, s),
}


@pytest.mark.parametrize("known", [False, True], ids=["rounded", "excess"])
def test_sizes_of_blocks_one_after_the_other_give_the_same_products(known):
    random = np.random.default_rng(4)
    decay, *weights = (jnp.asarray(random.uniform(0.5, 1, (2, 16, 3)), jnp.float32) for _ in range(3))
    excess = decay - 1 + 1e-3 if known else None

    def run(decay, unrolled):
        found = halved_products(decay, excess, unrolled)
        return jnp.sum(jnp.sin(found.levels) * weights[0]) + jnp.sum(found.total * found.from_start[:, 3]), found

    one, other = (jax.jit(jax.grad(run, has_aux=True), static_argnums=1)(decay, own) for own in (False, True))
    for found, expected in zip(jax.tree.leaves(other), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "channel"])
def test_any_decay_is_as_exact_as_in_the_loop(channels, kind):
    """1000 steps: products of decays neither lose digits nor stop being finite."""
    shape = (1000, 1, 2, 4) if channels else (1000, 1, 2)
    check(arrays(DECAYS[kind](np.random.default_rng(3), shape)), 64 if not channels else 32, False)


def corrected(given: Recurrence, rate: float, apart: bool = False, seed: int = 4) -> Recurrence:
    """Adds a delta rule: each key's old value is removed, times ``rate``; or along rows of its own."""
    random = np.random.default_rng(seed)
    key = given.key / jnp.linalg.norm(given.key, axis=-1, keepdims=True)
    decay = given.decay if given.decay.ndim == 4 else given.decay[..., None]
    write = None
    if apart:
        write = jnp.asarray(random.standard_normal(key.shape) / 4, jnp.float32)
    return given._replace(key=key, probe=-rate * decay * key, write=write)


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("apart", [False, True], ids=["key", "apart"])
@pytest.mark.parametrize("steps, chunk", [(37, 8), (70, 32), (5, 16), (1, 4)])
@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "channel"])
def test_delta_rules_in_chunks_compute_what_the_loop_does(channels, steps, chunk, apart, before):
    shape = (steps, 2, 3, 4) if channels else (steps, 2, 3)
    given = arrays(np.random.default_rng(2).uniform(0.5, 1, shape))
    check(corrected(given, 0.7, apart), chunk, before)


@pytest.mark.parametrize("kind", [name for name in DECAYS if name not in ("above one", "growing")])
@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "channel"])
def test_delta_rules_are_as_exact_as_in_the_loop_with_any_decay(channels, kind):
    shape = (300, 1, 2, 4) if channels else (300, 1, 2)
    check(corrected(arrays(DECAYS[kind](np.random.default_rng(3), shape)), 0.9), 32, False)


@pytest.mark.parametrize("rate", [1.0, 1.9])
@pytest.mark.parametrize("chunk", [16, 64])
def test_equal_keys_are_as_exact_as_in_the_loop(rate, chunk):
    """The powers of the scores grow like binomials, and cancel: the sum of them has no digit left."""
    given = arrays(np.ones((200, 1, 2)))
    given = given._replace(key=jnp.broadcast_to(given.key[:1], given.key.shape))
    check(corrected(given, rate), chunk, False)


@pytest.mark.parametrize("norm", [1.5, 3.0])
def test_corrections_that_grow_are_as_exact_as_in_the_loop(norm):
    """Keys that are too long: the loop itself grows, and so do its gradients."""
    given = corrected(arrays(np.full((40, 1, 2), 0.9)), 1.0)
    check(given._replace(key=norm * given.key, probe=norm * given.probe), 32, False)


@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "channel"])
def test_a_decay_may_be_known_more_exactly_than_it_rounds(channels):
    """2000 steps with ``1 - a`` for a small ``a``: the rounded decay alone is wrong by 3e-5 at the end."""
    shape = (2000, 1, 1, 4) if channels else (2000, 1, 1)
    small = np.full(shape, np.float32(1.23e-4))
    given = arrays(1 - small)
    given = given._replace(**{n: jnp.abs(getattr(given, n)) for n in ("key", "value", "query", "initial")})
    with jax.enable_x64(True):
        wide = Recurrence(*(jnp.asarray(np.asarray(x, np.float64)) for x in given[:5]))
        true = [np.asarray(x) for x in loop(wide._replace(decay=jnp.asarray(1 - small.astype(np.float64))), False)]
    excess = jnp.asarray(-small, jnp.float32)
    for chunk in (16, 64):
        assert max(errors(chunked(given._replace(excess=excess), chunk, False, by_scans), true)) < 4e-6
        assert max(errors(chunked(given, chunk, False, by_scans), true)) > 8e-6


def test_segment_products_are_products_of_segments():
    decay = np.random.default_rng(0).standard_normal((6, 2))
    found = np.asarray(segment_products(jnp.asarray(decay, jnp.float32)))
    for t in range(6):
        for s in range(7):
            product = np.prod(decay[s : t + 1], 0) if s <= t + 1 else np.zeros(2)
            np.testing.assert_allclose(found[t, s], product, rtol=1e-5)


def test_halves_make_up_the_segments():
    decay = np.random.default_rng(0).standard_normal((8, 3))
    found = halved_products(jnp.asarray(decay, jnp.float32))
    np.testing.assert_allclose(found.total, np.prod(decay, 0), rtol=1e-5)
    np.testing.assert_allclose(found.to_end[2], np.prod(decay[3:], 0), rtol=1e-5)
    np.testing.assert_allclose(found.from_start[2], np.prod(decay[:2], 0), rtol=1e-5)
    for t in range(8):
        for s in range(t):
            (level,) = np.nonzero(pairs(8)[:, t, s])[0]
            segment = found.levels[level, s] * found.levels[level, t]
            np.testing.assert_allclose(segment, np.prod(decay[s + 1 : t], 0), rtol=1e-5)
    assert not np.any(np.triu(np.any(pairs(8), 0)))


def test_pairs_are_constants_outside_of_kernels():
    """XLA compiles what computes them on CPUs for longer than all else of a chunk."""
    assert not jax.make_jaxpr(lambda: pairs(16))().eqns
    for level in range(4):
        assert not jax.make_jaxpr(lambda level=level: constant_pairs_of(16, level))().eqns
        np.testing.assert_array_equal(constant_pairs_of(16, level), pairs_of(16, level))
        np.testing.assert_array_equal(constant_pairs_of(16, level), pairs(16)[level])


def test_gradients_of_halves_are_those_of_the_products():
    decay = jnp.asarray(np.random.default_rng(1).standard_normal((2, 8, 3)), jnp.float32)

    def exact(decay):
        rows = [[jnp.prod(decay[:, s + 1 : t], 1) for s in range(t)] for t in range(8)]
        ends = jnp.prod(decay[:, :2], 1) + 2 * jnp.prod(decay[:, 3:], 1) + 3 * jnp.prod(decay, 1)
        return sum(jnp.sum(jnp.sin(jnp.stack(row))) for row in rows[1:]) + jnp.sum(ends)

    def found(decay):
        own = halved_products(decay)
        segments = own.levels[:, :, :, None] * own.levels[:, :, None]
        kept = pairs(8)[:, None, :, :, None]
        ends = own.from_start[:, 2] + 2 * own.to_end[:, 2] + 3 * own.total
        return jnp.sum(jnp.where(kept, jnp.sin(segments), 0)) + jnp.sum(ends)

    np.testing.assert_allclose(jax.grad(found)(decay), jax.grad(exact)(decay), rtol=1e-4, atol=1e-5)


def test_a_padded_step_changes_nothing():
    given = arrays(np.full((9, 1, 1), 0.9))
    y, last = chunked(given, 8, False, by_scans)
    first, state = chunked(Recurrence(*(x[:8] for x in given[:4]), given.initial), 8, False, by_scans)
    np.testing.assert_array_equal(y[:8], first)
    np.testing.assert_allclose(last, 0.9 * state + given.key[8][..., None] * given.value[8][..., None, :], rtol=1e-5)


def spec(**changes) -> RecurrenceSpec:
    float32 = np.dtype(np.float32)
    fields = {"steps": 100, "groups": 1, "heads": 2, "rows": 16, "columns": 16, "decay": "scalar", "products": 0}
    return RecurrenceSpec(
        **(fields | {"states": 1, "readouts": 1, "loops": 0, "state_dtype": float32, "result_dtype": float32} | changes)
    )


def test_forms_fit_the_state():
    assert BlockSizes("scan", "chunked", 100).fitted(spec()).chunk == 128
    assert BlockSizes("scan", "chunked", 64).fitted(spec(steps=20)).chunk == 32
    assert BlockSizes.get_default().fitted(spec(decay="elementwise", products=1)).forward == "hoisted"
    for changes in (
        {},
        {"decay": "channel"},
        {"delta": True},
        {"decay": "elementwise", "products": 2},
        {"products": 1},
    ):
        own = spec(**changes)
        candidates = BlockSizes.candidates(own)
        assert candidates == tuple(dict.fromkeys(c.fitted(own) for c in candidates))
        assert all(c.temporary_bytes(own, "forward+backward") > 0 for c in candidates)


@pytest.mark.parametrize("sizes", [("loop", "chunked", 64), ("scan", "other", 64), ("scan", "chunked", 0)])
def test_block_sizes_are_checked(sizes):
    with pytest.raises(ValueError, match="must be"):
        BlockSizes(*sizes)


def test_a_vector_without_products_stays_a_loop():
    device = Device("cpu", "")
    assert isinstance(supports(spec(decay="elementwise"), device), Unsupported)
    assert isinstance(supports(spec(decay="elementwise", products=1), device), Supported)
    assert isinstance(supports(spec(), device), Supported)


def test_no_row_holds_for_a_loop_with_more_than_one_readout():
    """Each readout has matrix products of its own: the table's rows were measured with one."""
    single = conditions(SimpleNamespace(spec=spec()))
    assert (single.batch, single.spelling) == (2, "")
    assert single.holds_from > 1
    for changes in ({"readouts": 2}, {"states": 2}, {"loops": 1}, {"products": 1}):
        more = conditions(SimpleNamespace(spec=spec(**changes)))
        assert more.spelling
        assert more.holds_from == float("inf")


@pytest.mark.parametrize("kind", ["scalar", "channel", "delta"])
def test_loops_over_chunks_slice_and_stack_arrays_of_few_axes(kind):
    """XLA compiles a kernel for each shape that is sliced, and takes longer for more axes."""
    steps, rows = 32, (32, 2, 2, 8)
    q, k, v = (jnp.ones(rows) for _ in range(3))
    decay = jnp.ones(rows if kind == "channel" else rows[:3])
    given = Recurrence(decay, k, v, q, jnp.zeros((2, 2, 8, 8)), probe=k if kind == "delta" else None)
    program = jax.make_jaxpr(jax.grad(lambda given: jnp.sum(chunked(given, 8, False, by_scans)[0])))(given)
    loops = [e for e in program.eqns if e.primitive.name == "scan" and e.params["length"] == steps // 8]
    sliced = [v.aval for e in loops for v in e.invars[sum(compat.scan_parts(e)) :]]
    stacked = [v.aval for e in loops for v in e.outvars[compat.scan_parts(e)[1] :]]
    assert len(loops) >= 2
    assert {len(aval.shape) for aval in (*sliced, *stacked)} == {2}
