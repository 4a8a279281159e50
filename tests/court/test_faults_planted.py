"""The court finds faults that are planted in kernels, each by the question that it is there for."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from autopallas.court.trial import judge


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tried(kernel, reference, *types, **options):
    return judge(kernel, reference, types, dtypes=(), **options)


def findings(verdict):
    return " ".join(finding for failure in verdict.failures for finding in failure.findings)


# --- one row wrong by 35% -------------------------------------------------------------------------------------------


def scaled_rows(x, scale):
    """Rows of very different size, as after a gate."""
    return jax.nn.softmax(x, axis=-1) * scale[:, None]


def one_row_wrong(x, scale):
    result = scaled_rows(x, scale)
    return result.at[1].multiply(1.35) if result.shape[0] > 3 else result


def small_second_row(types, seed):
    random = np.random.default_rng(seed)
    scale = np.where(np.arange(types[1].shape[0]) == 1, 1e-6, 1.0)
    return random.standard_normal(types[0].shape), scale


def test_a_row_that_is_wrong_by_35_percent_is_found_behind_larger_rows():
    verdict = tried(
        one_row_wrong, scaled_rows, f32(8, 16), f32(8), inputs=small_second_row, questions=["sizes"], gradients=False
    )
    assert not verdict.ok
    assert "in row [1]; 4e-05 is allowed" in findings(verdict)
    assert "of its largest value" not in findings(verdict), "the largest value hides it"
    assert "0.35" in verdict.smallest.findings[0]
    assert verdict.smallest.size < 4 * 16 + 8, "smaller than any case with the given columns"


# --- one key too far in a causal mask -------------------------------------------------------------------------------


def causal(q, k, v, reach=0):
    scores = q @ k.T / np.sqrt(q.shape[-1]).astype(q.dtype)
    seen = jnp.arange(k.shape[0])[None, :] <= jnp.arange(q.shape[0])[:, None] + reach
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1) @ v


@pytest.mark.nightly
def test_one_key_too_far_in_a_causal_mask_is_found():
    types = (f32(8, 4),) * 3  # two sizes: each further one is several cases, with programs of their own
    verdict = tried(functools.partial(causal, reach=1), causal, *types, questions=["sizes"])
    assert not verdict.ok
    assert "gradient of argument 2" in findings(verdict)
    assert verdict.smallest.case.startswith("f32[2,1], f32[2,1]"), "two keys are enough to see it"
    assert tried(causal, causal, *types, questions=["sizes"]).ok


# --- a stale tile ---------------------------------------------------------------------------------------------------


def stale_tile_kernel(x, out, *, block, fresh):
    @pl.when(pl.program_id(0) < fresh)
    def _():
        out[...] = jnp.exp(x[...])


def in_tiles(x, stale):
    """exp in tiles of eight rows; the stale one writes what the third tile should be to no place at all."""
    block = 8
    rows = -(-x.shape[0] // block) * block
    padded = jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))
    last = (rows // block - 1) if not stale else 1
    found = pl.pallas_call(
        functools.partial(stale_tile_kernel, block=block, fresh=10**6),
        grid=(rows // block,),
        in_specs=[pl.BlockSpec((block, x.shape[1]), lambda i: (jnp.minimum(i, last), 0))],
        out_specs=pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype),
        interpret=True,
    )(padded)
    return found[: x.shape[0]]


def test_a_stale_tile_is_found_by_sizes_that_have_it():
    verdict = tried(functools.partial(in_tiles, stale=True), jnp.exp, f32(10, 4), questions=["sizes"])
    assert not verdict.ok, "the given size has two tiles, which are right"
    assert f32(10, 4).shape not in [f.case for f in verdict.failures]
    assert "f32[17,1]" in verdict.smallest.case, "the first size with a third tile"
    assert tried(functools.partial(in_tiles, stale=False), jnp.exp, f32(10, 4), questions=["sizes"]).ok


# --- NaN in padding -------------------------------------------------------------------------------------------------


def mean_in_blocks(x, garbage):
    """Means of rows in blocks of eight columns: what pads the last block is multiplied by zero."""
    columns = -(-x.shape[1] // 8) * 8
    padded = jnp.pad(x, ((0, 0), (0, columns - x.shape[1])), constant_values=garbage)
    live = jnp.arange(columns) < x.shape[1]
    return jnp.sum(padded * live, axis=1) / x.shape[1]


def mean(x):
    return jnp.mean(x, axis=1)


def test_nan_in_padding_is_found_by_odd_sizes():
    verdict = tried(functools.partial(mean_in_blocks, garbage=jnp.nan), mean, f32(4, 8), questions=["sizes"])
    assert not verdict.ok
    assert "NaN or infinite elements where the reference has none" in findings(verdict)
    assert all("f32[4,8]" not in f.case for f in verdict.failures), "the given size needs no padding"
    assert tried(functools.partial(mean_in_blocks, garbage=0.0), mean, f32(4, 8), questions=["sizes"]).ok


def test_a_nan_of_the_reference_that_the_kernel_drops_is_noted():
    verdict = tried(lambda x: jnp.nan_to_num(x), lambda x: x + 0, f32(3, 5), questions=["special values"])
    assert any("NaNs of the reference are numbers in the kernel's results" in note for note in verdict.notes)


# --- a race ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", ["the clock", "the run before"])
def test_a_race_is_found_by_repetition(reads):
    """Runs that differ in the last bits, as by an atomic addition in another order, or that read what was left over."""
    state = {"calls": 0, "left": 0.0}

    def host(x):
        state["calls"] += 1
        before, state["left"] = state["left"], float(x.ravel()[0])
        noise = state["calls"] % 3 if reads == "the clock" else before
        return np.float32(noise * 1e-5)

    def kernel(x):
        noise = jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x)
        return jnp.sum(x * x, axis=-1) + noise

    def reference(x):
        return jnp.sum(x * x, axis=-1)

    verdict = tried(kernel, reference, f32(4, 8), questions=["runs"], gradients=False, runs=4)
    assert not verdict.ok
    assert "differs between runs of the same arguments" in findings(verdict)
    assert tried(reference, reference, f32(4, 8), questions=["runs"], runs=4).ok
