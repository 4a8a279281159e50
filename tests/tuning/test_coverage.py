"""What a table's row licenses on a CPU: sites of its own batch size and spelling, on processors like its own."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from entries import tuned
from places import CPU, match_of

import autopallas
from autopallas.autotune import tuner
from autopallas.autotune.trial import Trial
from autopallas.graph import Graph, flatten
from autopallas.kernels.attention import tuned_block_sizes
from autopallas.kernels.attention.cases import square
from autopallas.kernels.cross_entropy import tuned_block_sizes as cross_entropy_tables
from autopallas.kernels.grouped_matmul import tuned_block_sizes as grouped_matmul_tables
from autopallas.patterns import find
from autopallas.sites.device import Device
from autopallas.tuning import coverage, processor
from autopallas.tuning.coverage import form_of, gap, products, stated
from autopallas.tuning.entry import EntryError, parse
from autopallas.tuning.evidence import Evidence
from autopallas.tuning.key import key_of
from autopallas.tuning.lookup import of_table
from autopallas.tuning.table import Row, of_form
from autopallas.workbench.cases import DIRECTIONS, Case, cases_of
from autopallas.workbench.cases import match_of as match_of_case
from autopallas.workbench.remeasure import joined

MASKS = ("full", "padded", "causal", "window")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """``machine(extensions)`` makes this processor have them; before that, those of the tables' rows."""

    def set_to(extensions):
        monkeypatch.setattr(processor, "vector_extensions", lambda: extensions)

    set_to("avx2")
    return set_to


@pytest.fixture(autouse=True)
def rows_of_one_sequence(monkeypatch):
    """The tables' rows of tiles, without those that were measured for several sequences."""
    kept = {
        device: {key: row for key, row in rows.items() if key[0] != "xla_heads" and "batched" not in key[4]}
        for device, rows in tuned_block_sizes.TABLE.rows.items()
    }
    monkeypatch.setattr(tuned_block_sizes.TABLE, "rows", kept)


@pytest.fixture
def rows_of_this_jax(monkeypatch, rows_of_one_sequence):
    """The tables' rows, as if the JAX that runs had measured all of them: those of 16-bit numbers hold for no other."""
    for tables in (tuned_block_sizes, cross_entropy_tables, grouped_matmul_tables):
        kept = {
            device: {key: replace(row, versions=coverage.running_jax()) for key, row in rows.items()}
            for device, rows in tables.TABLE.rows.items()
        }
        monkeypatch.setattr(tables.TABLE, "rows", kept)


def einsum(query, key, value, mask="full", lengths=None):
    """[B, T, N, D], as the cases are spelled."""
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / 8
    return jnp.einsum("bnts,bsnd->btnd", weights_of(scores, mask, lengths), value)


def matmul(query, key, value, mask="full", lengths=None):
    """[B, N, T, D]."""
    return weights_of(query @ key.swapaxes(-1, -2) / 8, mask, lengths) @ value


def weights_of(scores, mask, lengths):
    places = jnp.arange(scores.shape[-2])[:, None] - jnp.arange(scores.shape[-1])[None, :]
    shown = {"full": None, "causal": places >= 0, "window": (places >= 0) & (places < scores.shape[-1] // 2)}
    if mask == "padded":
        shown = {"padded": jnp.arange(scores.shape[-1]) < lengths[:, None, None, None]}
    if shown[mask] is not None:
        # As the cases have them: with -inf the mask is known to leave out whole tiles in any dtype.
        fill = jnp.finfo(scores.dtype).min if mask == "padded" else -jnp.inf
        scores = jnp.where(shown[mask], scores, fill)
    return jax.nn.softmax(scores, axis=-1)


def site_of(spelling, batch, length=1024, heads=4, mask="full", dtype="float32", gradient=False, **options):
    """The one site of an attention, by the tables that are checked in."""
    shape = (batch, heads, length, 64) if spelling is matmul else (batch, length, heads, 64)
    types = [jax.ShapeDtypeStruct(shape, dtype)] * 3 + [jax.ShapeDtypeStruct((batch,), "int32")]

    def attention(query, key, value, lengths):
        return spelling(query, key, value, mask, lengths)

    def step(query, key, value, lengths):
        return jax.grad(lambda *qkv: jnp.sum(attention(*qkv, lengths) ** 2), argnums=(0, 1, 2))(query, key, value)

    optimized = autopallas.optimize(step if gradient else attention, **options)
    optimized.trace(*types)
    (site,) = optimized.report().sites
    return site


@pytest.mark.parametrize("spelling", [einsum, matmul])
@pytest.mark.parametrize("mask", ["full", "padded"])
@pytest.mark.parametrize("batch", [2, 3, 16])
def test_several_sequences_are_kept_where_the_row_is_of_one(spelling, mask, batch):
    site = site_of(spelling, batch, mask=mask)
    assert (site.verdict, site.direction) == ("kept", "forward")
    assert "no row for this batch size" in site.reason
    assert f"B={batch}" in site.reason
    assert "AUTOPALLAS_AUTOTUNE=1" in site.reason
    assert 'objective="always"' in site.reason
    assert site_of(spelling, batch, mask=mask, objective="memory").verdict == "kept", "its memory is not the row's"
    applied = site_of(spelling, batch, mask=mask, objective="always")
    assert (applied.verdict, applied.block_sizes_from) == ("applied", "table"), "the block sizes are still the row's"


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(("order", "holds_from"), [((0, 3, 1, 2), 1.5), ((0, 1, 2, 3), 0.0)])
def test_an_input_with_another_axis_after_the_keys_asks_for_a_large_gain(order, holds_from, gradient):
    """Tiles read it more often than the original does, with a stride: 0.77 of the speed where the row gained 1.17."""

    def attention(query, key, value, bias):
        scores = jnp.einsum("btnd,bsnd->bnts", query, key) / 8 + bias.transpose(order)
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores, axis=-1), value)

    def step(*arguments):
        return jax.grad(lambda *given: jnp.sum(attention(*given) ** 2), argnums=(0, 1, 2, 3))(*arguments)

    shape = [(2, 4, 256, 256)[order.index(axis)] for axis in range(4)]
    types = [jnp.zeros((2, 256, 4, 64))] * 3 + [jnp.zeros(shape)]
    (match,), _ = find(Graph(flatten(jax.make_jaxpr(step if gradient else attention)(*types))), ["attention"], True)
    gains = [gain for gain in (1.2, 1.4, 1.6) if gap(_row_of_gain(gain), match, CPU, own_form=True) == ""]
    assert gains == [gain for gain in (1.2, 1.4, 1.6) if gain >= holds_from]
    refused = gap(_row_of_gain(1.2), match, CPU, own_form=True)
    assert ("another axis after the keys" in refused) == bool(holds_from)


@pytest.mark.parametrize(
    ("shape", "filed"), [((1, 1, 1, 200), "dynamic"), ((1, 4, 1, 1), "full"), ((1, 1, 200, 200), "full, T x S input")]
)
@pytest.mark.parametrize("dtype", [bool, jnp.float32])
def test_an_input_along_the_keys_is_filed_with_padding_whatever_it_fills_in(shape, filed, dtype):
    """Padding with -1e9 took 1.16 of the memory, as one with -inf does, where the row without a mask has 0.75."""

    def attention(query, key, value, given):
        scores = jnp.einsum("btnd,bsnd->bnts", query, key) / 8
        scores = jnp.where(given, scores, -1e9) if dtype is bool else scores + given
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores, axis=-1), value)

    types = [jnp.zeros((1, 200, 4, 64))] * 3 + [jnp.zeros(shape, dtype)]
    (match,), _ = find(Graph(flatten(jax.make_jaxpr(attention)(*types))), ["attention"], True)
    assert tuned_block_sizes.table_key(match.spec, "xla", "forward")[-1] == filed


def _row_of_gain(gain):
    return Row(None, 1.0, gain, 1, 2, "measured", "2026-11-25", f"jax {jax.__version__}", batch=2)


@pytest.mark.parametrize("leading", [(2, 1), (1, 2), (2, 2)])
def test_all_leading_axes_count(leading):
    """As of nested maps over examples."""
    types = [jax.ShapeDtypeStruct((*leading, 1024, 4, 64), "float32")] * 3
    optimized = autopallas.optimize(jax.vmap(einsum))
    optimized.trace(*types)
    (site,) = optimized.report().sites
    assert site.verdict == "kept"
    assert "no row for this batch size" in site.reason


@pytest.mark.parametrize("mask", ["full", "padded", "causal"])
@pytest.mark.parametrize(("length", "heads", "missing"), [(24, 4, "8,192 scores"), (40, 16, "48 keys")])
def test_rows_say_nothing_of_little_work(mask, length, heads, missing):
    """Of sites that take microseconds in a backward, kernels are slower than the original."""
    site = site_of(einsum, 1, length=length, heads=heads, mask=mask, gradient=True)
    assert site.verdict == "kept"
    assert "no row for so little work" in site.reason
    assert missing in site.reason
    assert 'objective="always"' in site.reason
    applied = site_of(einsum, 1, length=length, heads=heads, mask=mask, gradient=True, objective="always")
    assert (applied.verdict, applied.block_sizes_from) == ("applied", "table")


def test_rows_hold_from_8192_scores_on():
    sites = [site_of(einsum, 1, length=length, heads=heads) for length, heads in ((24, 14), (24, 16))]
    assert [site.verdict for site in sites] == ["kept", "applied"]
    with_backward = site_of(einsum, 1, length=64, heads=2, mask="causal", gradient=True)
    assert with_backward.verdict == "applied", "64 keys and 8,192 scores"


def loss_of(classes, gradient=False, one_hot=False, dtype="bfloat16", **options):
    """The one site of a loss of 2,048 examples, by the tables that are checked in."""

    def loss(x, w, labels):
        logits = (x @ w).astype(jnp.float32)
        if one_hot:
            return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, classes) * jax.nn.log_softmax(logits), axis=-1))
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))

    function = jax.grad(loss, argnums=(0, 1)) if gradient else loss
    optimized = autopallas.optimize(function, ops="cross_entropy", **options)
    types = [((2048, 256), dtype), ((256, classes), dtype), ((2048,), "int32")]
    optimized.trace(*(jax.ShapeDtypeStruct(*given) for given in types))
    (site,) = optimized.report().sites
    return site


@pytest.mark.usefixtures("rows_of_this_jax")
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("classes", [2, 10, 100, 255])
def test_rows_of_words_say_nothing_of_few_classes(machine, classes, gradient):
    """Of 10 classes in bfloat16 a train step had 0.57 of the original's speed, where the row of 1,024 gains 1.9."""
    machine("avx512_bf16")
    site = loss_of(classes, gradient)
    assert site.verdict == "kept"
    assert "no row for so little work" in site.reason
    assert "256 words" in site.reason
    assert loss_of(classes, gradient, objective="always").verdict == "applied"
    assert loss_of(256, gradient).verdict == "applied"


@pytest.mark.parametrize("mask", ["full", "padded"])
def test_one_sequence_is_licensed_as_it_was_measured(mask):
    assert site_of(einsum, 1, mask=mask).verdict == "applied"


@pytest.mark.parametrize("mask", ["full", "padded"])
def test_another_spelling_than_the_measured_one_is_kept(mask):
    """XLA makes one kernel of this one, at B = 1 too."""
    site = site_of(matmul, 1, mask=mask)
    assert site.verdict == "kept"
    assert "no row for this spelling" in site.reason


def test_a_single_head_has_one_spelling():
    """Without any batch axis XLA computes each step by itself, however it is written."""
    assert site_of(matmul, 1, heads=1).verdict == "applied"
    assert site_of(einsum, 1, heads=1).verdict == "applied"


@pytest.mark.parametrize("spelling", [einsum, matmul])
@pytest.mark.parametrize(("mask", "length"), [("causal", 512), ("causal", 1024), ("window", 512), ("window", 1024)])
def test_skipped_tiles_outweigh_the_batch_where_they_gain_much(spelling, mask, length):
    site = site_of(spelling, 2, length, mask=mask)
    gain = site.measured["original_us"] / site.measured["kernel_us"]
    assert site.verdict == ("applied" if gain >= 1.6 else "kept"), gain
    assert site_of(einsum, 1, length, mask=mask).verdict == "applied"


@pytest.mark.parametrize("mask", MASKS)
def test_a_train_step_of_several_sequences_is_licensed_by_rows_of_more_than_small_gains(mask):
    assert site_of(einsum, 2, 1024, mask=mask, gradient=True).verdict == "applied"
    kept = site_of(einsum, 2, 256, mask=mask, gradient=True)
    assert kept.verdict == "kept"
    assert "no row for this batch size" in kept.reason


# --- processors ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("rows_of_this_jax")
@pytest.mark.parametrize("here", ["avx512_bf16", "amx", "neon", "neon_bf16", None])
@pytest.mark.parametrize(("mask", "gradient"), [("causal", False), ("causal", True), ("full", False)])
def test_16_bit_numbers_need_a_row_of_such_a_processor(machine, here, mask, gradient):
    asked = {"mask": mask, "gradient": gradient, "dtype": "bfloat16", "length": 2048 if mask == "full" else 1024}
    assert site_of(einsum, 1, **asked).verdict == "applied"
    machine(here)
    site = site_of(einsum, 1, **asked)
    assert site.verdict == "kept"
    assert "no row for these vector extensions" in site.reason
    assert "avx2" in site.reason
    assert (here or "unknown") in site.reason
    assert "AUTOPALLAS_AUTOTUNE=1" in site.reason
    assert site_of(einsum, 1, objective="always", **asked).verdict == "applied"


@pytest.mark.parametrize("here", ["avx512", "avx512_bf16", "amx", None])
def test_float32_rows_hold_for_any_processor(machine, here):
    machine(here)
    assert site_of(einsum, 1, mask="causal").verdict == "applied"
    assert site_of(einsum, 1, mask="causal", gradient=True).verdict == "applied"


@pytest.mark.usefixtures("rows_of_this_jax")
def test_products_widened_on_both_are_alike(machine):
    machine("avx512")
    assert site_of(einsum, 1, mask="causal", dtype="bfloat16").verdict == "applied"


@pytest.mark.usefixtures("rows_of_this_jax")
def test_16_bit_values_beside_float32_count_too(machine):
    """They are filed under float32, and their products are of 16-bit numbers."""
    spec = match_of_case(square("forward", "float32", "causal", 1024)).spec
    match = SimpleNamespace(
        op="attention",
        direction="forward",
        original=match_of_case(square("forward", "float32", "causal", 1024)).original,
        spec=replace(spec, value_dtype=np.dtype(jnp.bfloat16)),
    )
    assert of_table(match, "xla", CPU).exact
    machine("amx")
    assert not of_table(match, "xla", CPU).exact


@pytest.mark.parametrize(
    ("narrow", "gain", "here", "holds"),
    [
        ("value", 1.35, "avx512_fp16", True),
        ("value", 1.3, "avx512_fp16", False),
        ("key", 3.0, "avx512_fp16", False),
        ("value", 3.0, "avx512", False),
        ("value", 3.0, "avx2", False),
    ],
)
def test_float32_rows_of_large_gains_hold_for_scores_of_float32_and_16_bit_values(machine, narrow, gain, here, holds):
    """On processors that differ in how they multiply 16-bit numbers alone: the scores are most of the work."""
    case = match_of_case(square("forward+backward", "float32", "causal", 1024))
    spec = replace(case.spec, **{f"{narrow}_dtype": np.dtype(jnp.bfloat16)})
    match = SimpleNamespace(op="attention", direction="forward+backward", original=case.original, spec=spec)
    row = replace(_row_of_gain(gain), extensions="avx512_bf16", batch=1)
    machine(here)
    assert (gap(row, match, CPU) == "") == holds
    machine("avx512_bf16")
    assert gap(row, match, CPU) == ""


@pytest.mark.usefixtures("rows_of_this_jax")
@pytest.mark.parametrize(
    ("tables", "case"),
    [
        (
            cross_entropy_tables,
            Case("cross_entropy", "forward", "bfloat16", "plain", (("N", 2048), ("D", 64), ("V", 32000))),
        ),
        (
            grouped_matmul_tables,
            Case("grouped_matmul", "forward", "bfloat16", "uneven", (("M", 512), ("K", 256), ("N", 256), ("G", 8))),
        ),
    ],
)
def test_every_operation_asks_for_the_processor(machine, tables, case):
    match = match_of_case(case)
    assert of_table(match, "xla", CPU).exact
    machine("neon_bf16")
    choice = of_table(match, "xla", CPU)
    assert not choice.exact
    assert "vector extensions" in choice.gap
    assert choice.block_sizes == tables.infer_block_sizes(match.spec, CPU, "xla", "forward")


@pytest.mark.parametrize(
    ("direction", "batch", "gain", "holds"),
    [
        ("forward", 1, 1.3, False),
        ("forward", 1, 1.4, True),
        ("forward", 2, 1.6, False),
        ("forward", 2, 1.7, True),
        ("forward+backward", 1, 1.2, False),
        ("forward+backward", 2, 1.3, True),
    ],
)
def test_a_row_of_attention_holds_for_other_extensions_if_its_gain_is_large(machine, direction, batch, gain, holds):
    match = match_of_case(square(direction, "float32", "causal", 1024, batch=batch))
    row = Row(None, 1.0, gain, 1, 2, "measured", "2026-11-25", "jax", batch=batch)
    assert gap(row, match, CPU, own_form=True) == ""
    for other in ("avx512", "avx512_bf16", "neon", None):
        machine(other)
        found = gap(row, match, CPU, own_form=True)
        assert (found == "") == holds
        assert holds or "no row for these vector extensions" in found
        assert gap(stated(row, match, CPU), match, CPU, own_form=True) == ""


def test_respellings_of_products_of_16_bits_ask_for_the_processor(machine):
    """Their specs name no dtype: rows of a processor that multiplies bfloat16 were taken for one that does not."""
    x, w = jnp.ones((256, 512), jnp.bfloat16), jnp.ones((256, 256), jnp.bfloat16)

    def product(x, w):
        return jax.lax.dot_general(x, w, (((0,), (0,)), ((), ())))

    machine("avx512_bf16")
    (match,), _ = find(Graph(flatten(jax.make_jaxpr(product)(x, w))), ["product"], True)
    row = Row(None, 1.0, 2.5, 1, 2, "measured", "2026-11-25", coverage.running_jax(), extensions="avx512_bf16")
    assert gap(row, match, CPU) == ""
    machine("avx2")
    assert "16-bit numbers" in gap(row, match, CPU)


@pytest.mark.parametrize(("dtype", "holds"), [("bfloat16", False), ("float32", True)])
def test_rows_of_16_bit_numbers_hold_for_their_own_line_of_jax(monkeypatch, dtype, holds):
    """Attention of two sequences in bfloat16 gains 3.0 with JAX 0.12 and 1.04 with JAX 0.10."""
    match = match_of_case(square("forward+backward", dtype, "causal", 1024))
    row = Row(None, 1.0, 3.0, 1, 2, "measured", "2026-11-30", "jax 0.12.0")
    monkeypatch.setattr(coverage, "running_jax", lambda: "jax 0.12.4")
    assert gap(row, match, CPU, own_form=True) == ""
    monkeypatch.setattr(coverage, "running_jax", lambda: "jax 0.10.2")
    found = gap(row, match, CPU, own_form=True)
    assert ("no row for this version of JAX" in found) == (not holds)
    assert bool(found) == (not holds)


def test_rows_of_argmax_hold_for_their_own_extensions_and_line_of_jax(machine):
    (match,), _ = find(
        Graph(flatten(jax.make_jaxpr(lambda x: jnp.argmax(x, 1))(jnp.ones((128, 4096))))), ["argmax"], True
    )
    row = Row(None, 1.0, 6.0, 1, 2, "measured", "2026-11-25", f"jax {jax.__version__}")
    assert gap(row, match, CPU) == ""
    assert "this version of JAX" in gap(replace(row, versions="jax 0.9.1"), match, CPU)
    machine("avx512_bf16")
    assert "vector extensions" in gap(row, match, CPU)


def test_other_devices_are_asked_nothing(machine):
    machine(None)
    match = match_of_case(square("forward", "bfloat16", "full", 1024, batch=4))
    row = Row(None, 1.0, 2.0, 1, 2, "measured", "2026-11-21", "jax")
    assert gap(row, match, Device("gpu", "NVIDIA H100 80GB HBM3")) == ""
    assert gap(row, match, CPU) != ""
    assert stated(row, match, Device("tpu", "TPU v5e")) == row


@pytest.mark.parametrize(
    ("text", "extensions"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 avx avx2 fma\n", "avx2"),
        ("flags\t\t: avx2 avx512f avx512bw\n", "avx512"),
        ("flags\t\t: avx2 avx512f avx512_bf16\n", "avx512_bf16"),
        ("flags\t\t: avx2 avx512f avx512_bf16 avx512_fp16\n", "avx512_fp16"),
        ("flags\t\t: avx2 avx512f avx512_bf16 avx512_fp16 amx_tile amx_bf16\n", "amx"),
        ("flags\t\t: avx2 avx512f\nprocessor\t: 1\nflags\t\t: avx2\n", "avx2"),
        ("Features\t: fp asimd crc32\n", "neon"),
        ("Features\t: fp asimd bf16\n", "neon_bf16"),
        ("flags\t\t: fpu sse2\n", None),
        ("", None),
    ],
)
def test_extensions_are_read_from_the_kernels_account(text, extensions):
    assert processor.parsed(text) == extensions


def test_the_report_names_the_extensions(machine):
    machine("avx512_bf16")
    optimized = autopallas.optimize(einsum)
    optimized.trace(*[jax.ShapeDtypeStruct((1, 64, 2, 16), "float32")] * 3)
    assert optimized.report().versions["vector extensions"] == "avx512_bf16"
    assert "vector extensions avx512_bf16" in " ".join(str(optimized.report()).split())
    machine(None)
    optimized.trace(*[jax.ShapeDtypeStruct((1, 32, 2, 16), "float32")] * 3)
    assert optimized.report().versions["vector extensions"] == "unknown"


# --- rows that say more ----------------------------------------------------------------------------------------------


def planted(monkeypatch, match, **fields):
    """The table has one row for a match, with what it holds for."""
    sizes, running = tuned_block_sizes.BlockSizes(256, 256), coverage.running_jax()
    row = Row(sizes, 100.0, 150.0, 10, 20, "measured", "2026-11-21", running, **fields)
    key = tuned_block_sizes.table_key(match.spec, "xla", match.direction)
    monkeypatch.setattr(tuned_block_sizes.TABLE, "rows", {"cpu": {key: row}})


def test_a_row_of_several_sequences_licenses_several_and_not_one(monkeypatch):
    several, one = (match_of_case(square("forward", "float32", "full", 1024, batch=b)) for b in (4, 1))
    planted(monkeypatch, several, extensions="avx2", batch=2)
    assert of_table(several, "xla", CPU).exact
    assert "B=2" in of_table(one, "xla", CPU).gap


@pytest.mark.parametrize("spelling", [einsum, matmul])
def test_a_row_of_its_own_form_comes_first(monkeypatch, spelling):
    """Matmul compiles at B=1 as einsum does at B=2, and one row holds for both; not for einsum at B=1."""
    shape = (1, 4, 1024, 64) if spelling is matmul else (2, 1024, 4, 64)
    match = match_of(lambda q, k, v: spelling(q, k, v), *[jax.ShapeDtypeStruct(shape, "float32")] * 3)
    assert form_of(match, CPU) == "batched"
    assert form_of(match, Device("gpu", "some kind")) == ""
    table = tuned_block_sizes
    base, sizes = table.table_key(match.spec, "xla", "forward"), table.BlockSizes
    rows = {
        base: Row(sizes(256, 256), 100.0, 200.0, 10, 20, "measured", "2026-11-21", "jax"),
        of_form(base, "batched"): Row(sizes(128, 128), 100.0, 150.0, 10, 20, "measured", "2026-11-21", "jax", batch=2),
    }
    monkeypatch.setattr(table.TABLE, "rows", {"cpu": rows})
    found = of_table(match, "xla", CPU)
    assert found.exact
    assert (found.block_sizes, found.row.speedup) == (sizes(128, 128), 1.5)
    one = of_table(match_of_case(square("forward", "float32", "full", 1024)), "xla", CPU)
    assert (one.exact, one.row.speedup) == (True, 2.0)


def test_several_processes_license_by_their_lower_quartile():
    rows = [Row(None, 100.0, gain, 10, 20, "measured", "", "") for gain in (160.0, 100.0, 130.0)]
    row = joined(rows)
    assert (row.speedup, row.lower_gain, row.processes) == (1.3, 1.15, 3)
    assert Evidence.of(row, "time").licenses
    assert not Evidence.of(replace(row, lower_gain=1.05), "time").licenses
    assert joined(rows[:1]) == rows[0]


@pytest.mark.usefixtures("rows_of_this_jax")
def test_a_row_of_such_a_processor_licenses_16_bit_numbers(monkeypatch, machine):
    match = match_of_case(square("forward", "bfloat16", "full", 1024))
    planted(monkeypatch, match, extensions="avx512_bf16")
    assert "avx512_bf16" in of_table(match, "xla", CPU).gap
    machine("amx")
    assert of_table(match, "xla", CPU).exact


def test_a_row_of_another_spelling_licenses_that_spelling(monkeypatch):
    types = [jax.ShapeDtypeStruct((1, 4, 1024, 64), "float32")] * 3
    match = match_of(lambda q, k, v: matmul(q, k, v), *types)
    planted(monkeypatch, match, extensions="avx2", spelling=products(match.original))
    assert of_table(match, "xla", CPU).exact
    usual = match_of_case(square("forward", "float32", "full", 1024))
    assert "spelling" in of_table(usual, "xla", CPU).gap


def test_a_row_of_products_with_more_axes_holds_for_no_fewer():
    """XLA makes one kernel of attention that is spelled with matmul, and none of products with two axes of a batch."""
    match = match_of(lambda q, k, v: matmul(q, k, v), *[jax.ShapeDtypeStruct((1, 4, 4096, 64), "float32")] * 3)
    row = replace(_row_of_gain(2.1), spelling="abcde,abfe->abcdf; abcde,abef->abcdf")
    assert "no row for this spelling" in gap(row, match, CPU, own_form=True)
    assert gap(replace(row, spelling=""), match, CPU, own_form=True) == ""


def test_what_is_measured_here_says_what_it_holds_for(machine):
    machine(None)
    row = Row(None, 1.0, 2.0, 1, 2, "measured", "2026-11-21", "jax")
    match = match_of_case(square("forward", "float32", "full", 1024, batch=3))
    assert stated(row, match, CPU) == replace(row, batch=3, extensions="unknown")


def test_what_a_row_holds_for_is_kept_on_disk():
    entry = tuned()
    assert entry.row is not None
    entry = replace(entry, row=replace(entry.row, extensions="amx", batch=4, spelling="ab,bc->ac"))
    assert parse(entry.to_json()) == entry
    without = json.loads(entry.to_json())
    del without["row"]["batch"]
    with pytest.raises(EntryError, match="batch"):
        parse(json.dumps(without))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_the_cases_of_the_table_are_spelled_as_its_rows_say(direction, mask):
    match = match_of_case(square(direction, "float32", mask, 1024))
    assert tuned_block_sizes.conditions(match).spelling == ""


@pytest.mark.parametrize("op", ["attention", "cross_entropy", "grouped_matmul"])
def test_rows_of_cpus_name_their_processor(op):
    tables = {
        "attention": tuned_block_sizes,
        "cross_entropy": cross_entropy_tables,
        "grouped_matmul": grouped_matmul_tables,
    }
    assert {row.extensions for row in tables[op].TABLE["cpu"].values()} <= set(processor._PRODUCTS)
    assert cases_of(op) is not None


# --- searches and margins --------------------------------------------------------------------------------------------


def test_a_search_takes_the_place_of_a_row_that_does_not_hold(monkeypatch):
    begun = []

    def search(match, implementation, key, first, seconds, known, quick, yardstick):
        begun.append((implementation, match.spec.batch))
        raise RuntimeError("no")

    monkeypatch.setattr(tuner, "search", search)
    with pytest.warns(autopallas.AutopallasWarning, match="could not search"):
        site = site_of(einsum, 2, autotune=True)
    assert begun == [("xla", 2)]
    assert site.verdict == "kept"
    assert "no row for this batch size" in site.reason
    assert "a search found nothing" in site.reason
    begun.clear()
    assert site_of(einsum, 1, autotune=True).implementation == "xla"
    assert begun == [("xla_heads", 1)]  # of which no table knows


def test_the_key_of_a_search_holds_the_batch_and_the_processor(machine):
    one, two = (match_of_case(square("forward", "float32", "full", 1024, batch=b)) for b in (1, 2))
    assert key_of(one, "xla", CPU).digest != key_of(two, "xla", CPU).digest
    before = key_of(one, "xla", CPU)
    machine("amx")
    assert key_of(one, "xla", CPU).digest != before.digest
    assert "amx" in key_of(one, "xla", CPU).description["runtime"]


@pytest.mark.parametrize(
    ("kind", "time", "memory", "licensed"),
    [
        ("measured", 1.09, 2.0, False),
        ("measured", 1.1, 2.0, True),
        ("measured", 1.1, 1.0, True),
        ("measured", 1.29, 0.9, False),
        ("measured", 1.3, 0.9, True),
        ("simulated", 1.29, 2.0, False),
        ("simulated", 1.31, 2.0, True),
    ],
)
def test_a_gain_counts_from_a_margin_and_a_greater_one_where_memory_grows(kind, time, memory, licensed):
    evidence = Evidence(kind, time, memory, "time")
    assert evidence.licenses is licensed
    assert ("within what measurements differ by" in evidence.reason) is (not licensed and kind == "measured")


def test_what_holds_for_nothing_is_never_sure():
    match = match_of_case(square("forward", "float32", "full", 1024, batch=2))
    assert math.isinf(tuned_block_sizes.conditions(match).holds_from)


# ---------------------------------------------------------------------- losses over rows and columns


def contrastive(x, y):
    logits = x @ y.T
    rows, columns = (jax.nn.log_softmax(logits, axis) for axis in (1, 0))
    return -jnp.mean(jnp.diag(rows) + jnp.diag(columns))


def contrastive_match(gradients, dtype=jnp.bfloat16):
    program = jax.value_and_grad(contrastive, (0, 1)) if gradients else contrastive
    arrays = [jax.ShapeDtypeStruct((4096, 64), dtype)] * 2
    (match,), _ = find(Graph(flatten(jax.make_jaxpr(program)(*arrays))), ("cross_entropy",), True)
    assert len(match.passes) > 1
    return match


@pytest.mark.usefixtures("rows_of_this_jax")
@pytest.mark.parametrize("gradients", [False, True])
def test_rows_of_one_pass_over_the_logits_do_not_hold_for_two(gradients):
    match = contrastive_match(gradients)
    choice = of_table(match, "xla", CPU)
    assert not choice.exact
    plain = SimpleNamespace(**{name: getattr(match, name) for name in ("op", "spec", "direction", "original")})
    plain.passes = (plain,)
    known = cross_entropy_tables.find(match.spec, CPU, "xla", match.direction)
    assert known is None or gap(known.row, plain, CPU) == ""


def test_the_original_of_two_passes_multiplies_once():
    match = contrastive_match(False, jnp.float32)
    trial = Trial.abstract(match)
    equations = jax.make_jaxpr(trial.original())(*trial.arguments).eqns
    read = [e.invars[0] for e in equations if e.primitive.name == "dot_general"]
    transposed = [e.invars[0] for e in equations if e.primitive.name == "transpose"]
    assert len(read) == len(transposed) == len(match.passes) == 2
    assert read[0] is read[1]
    assert transposed[0] is transposed[1]
