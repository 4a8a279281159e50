"""Rows of GPUs: how sites are filed, what a row holds for there, and which implementation is taken."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopallas.autotune import tuner as tuners
from autopallas.autotune.tuner import Tuner
from autopallas.compile.gpu import H100
from autopallas.kernels.attention import tuned_block_sizes as attention
from autopallas.kernels.attention import xla
from autopallas.kernels.grouped_matmul import tuned_block_sizes as grouped_matmul
from autopallas.kernels.recurrence import tuned_block_sizes as recurrence
from autopallas.kernels.recurrence.spec import RecurrenceSpec
from autopallas.options import resolve
from autopallas.sites.declared import declared_named, declared_names
from autopallas.sites.device import Device
from autopallas.sites.operation import operation_named
from autopallas.tuning import coverage
from autopallas.tuning.declared_table import DeclaredTable
from autopallas.tuning.entry import Entry
from autopallas.tuning.evidence import Evidence, ranked
from autopallas.tuning.lookup import of_table
from autopallas.tuning.table import Row
from autopallas.workbench.cases import Case, match_of, only_match

BF16 = jnp.dtype(jnp.bfloat16)
WITH_TABLES = [name for name in declared_names() if operation_named(name).has("tuned_block_sizes")]


def attention_match(b=4, t=4096, n=16, d=128, direction="forward"):
    return match_of(Case("attention", direction, "bfloat16", "causal", (("B", b), ("T", t), ("N", n), ("D", d))))


def measured(sizes, kernel_us, original_us=1000.0, **more):
    return Row(sizes, kernel_us, original_us, 1, 2, "measured", "2026-11-27", "jax 0.11.2", **more)


@pytest.mark.parametrize(
    "implementation, classes",
    [
        ("pallas_gpu", (", D32", ", D64", ", D128", ", D128", ", D256")),
        ("cudnn", (", D32", ", D64", ", D128", ", D128", ", D256")),
        ("pallas_tpu", (", D64", ", D64", "", "", "")),
        ("xla", ("", "", "", "", "")),
    ],
)
def test_head_sizes_have_rows_of_their_own_on_gpus_and_in_two_classes_on_tpus(implementation, classes):
    spec = attention_match().spec
    keys = [
        attention.table_key(replace(spec, head_size=d, value_head_size=d), implementation, "forward")[-1]
        for d in (16, 64, 80, 128, 256)
    ]
    assert keys == [f"causal{name}" for name in classes]


@pytest.mark.parametrize("forward", [True, False])
def test_the_fastest_implementation_that_was_measured_is_taken(monkeypatch, forward):
    """Where the kernel is faster it, where cuDNN is cuDNN; of a direction without rows nothing is said."""
    match = attention_match(1, 16384)
    times = {"pallas_gpu": 70.0, "cudnn": 80.0} if forward else {"pallas_gpu": 80.0, "cudnn": 70.0}
    sizes = attention.TABLE.files.read("NVIDIA H100")[0][1].block_sizes
    rows = {attention.table_key(match.spec, name, "forward"): measured(sizes, us) for name, us in times.items()}
    monkeypatch.setattr(attention.TABLE, "rows", {"NVIDIA H100": rows})
    order = ranked({name: of_table(match, name, H100) for name in ("pallas_gpu", "cudnn", "xla")}, "time")
    assert order[0][0] == ("pallas_gpu" if forward else "cudnn")
    other = attention_match(1, 16384, d=64)
    assert not any(of_table(other, name, H100).exact for name in ("pallas_gpu", "cudnn", "xla"))


def test_a_gpu_that_is_not_filled_has_less_of_a_gain():
    row = measured(None, 100.0, 1250.0)
    assert not coverage.gap(row, attention_match(4, 4096, 16), H100)
    assert not coverage.gap(row, attention_match(1, 4096, 1), H100), "a quarter of 12.5x is left"
    told = coverage.gap(replace(row, original_us=500.0), attention_match(1, 4096, 1), H100)
    assert "of its 5x, 1.2x may be left" in told
    assert not coverage.gap(replace(row, original_us=500.0), attention_match(1, 4096, 2), Device("tpu", "TPU v5"))


def test_rows_of_recurrences_hold_for_as_many_states_as_their_gain_allows():
    spec = RecurrenceSpec(4096, 4, 16, 128, 64, "scalar", 0, 1, 1, 0, BF16, BF16)
    row = measured(None, 100.0, 3600.0, batch=64)

    def gap(**change):
        return coverage.gap(row, SimpleNamespace(op="recurrence", spec=replace(spec, **change)), H100)

    assert not gap()
    assert not gap(groups=1)
    assert not gap(groups=4 * 18)
    assert "may be left" in gap(groups=4 * 19)
    assert recurrence.share_of_gain(SimpleNamespace(spec=spec), row, H100) == 1.0


@pytest.mark.parametrize("device", [H100, Device("tpu", "TPU v5e")])
def test_on_accelerators_rows_hold_for_no_site_that_computes_more_than_the_cases(device):
    row = measured(None, 100.0, 3600.0, batch=64)
    single = RecurrenceSpec(4096, 4, 16, 128, 64, "scalar", 0, 1, 1, 0, BF16, BF16)
    for change in ({}, {"states": 2}, {"readouts": 2}, {"loops": 1}):
        told = coverage.gap(row, SimpleNamespace(op="recurrence", spec=replace(single, **change)), device)
        assert ("no row for sites of" in told) == bool(change), (change, told)
    sizes = (("N", 4096), ("D", 512), ("V", 32768))
    loss = match_of(Case("cross_entropy", "forward", "bfloat16", "plain", sizes))
    for passes in (1, 2):
        match = SimpleNamespace(op=loss.op, spec=loss.spec, direction="forward", passes=loss.passes * passes)
        told = coverage.gap(row, match, device)
        assert ("of 2 passes over the logits" in told) == (passes == 2), told


def test_on_a_tpu_more_states_than_the_cases_have_less_of_a_gain():
    spec = RecurrenceSpec(512, 1, 8, 64, 64, "scalar", 0, 1, 1, 0, BF16, BF16)
    row = measured(None, 100.0, 194.0)

    def gap(states):
        match = SimpleNamespace(op="recurrence", spec=replace(spec, heads=states))
        return coverage.gap(row, match, Device("tpu", "TPU v5e"))

    assert not gap(1)
    assert not gap(8)
    assert "no row for this size: the table's is of a TPU's usual work" in gap(16)


def test_a_small_grouped_matmul_is_not_what_was_measured():
    def share(rows, inner):
        sizes = (("M", rows), ("K", inner), ("N", inner), ("G", 8))
        match = match_of(Case("grouped_matmul", "forward", "bfloat16", "uneven", sizes))
        return grouped_matmul.share_of_gain(match, measured(None, 1.0), H100)

    assert share(8192, 4096) == 1.0
    assert share(1024, 256) < 0.1


# ---------------------------------------------------------------------- declared operations


@pytest.mark.parametrize("op", WITH_TABLES)
def test_a_declared_operation_is_filed_by_its_sizes_dtypes_and_parts(op):
    operation = declared_named(op)
    table = operation.part("tuned_block_sizes").TABLE
    assert isinstance(table, DeclaredTable)
    sample = operation.sample

    def key(**change):
        return table.key(replace(sample, **change), "pallas_gpu", "forward")

    *_, rows = operation.rows.split()
    count, columns = operation.sizes[rows], operation.sizes[operation.result.split()[-1]]
    assert key(**{count: 65536}) == key(**{count: 300_000}) != key(**{count: 4096})
    assert key(**{columns: 1024}) == key(**{columns: 1100}) != key(**{columns: 4096})
    for name in (f"{next(iter(operation.operands))}_dtype", "result_dtype"):
        other = BF16 if getattr(sample, name) == np.float32 else np.dtype(np.float32)
        assert key(**{name: other}) != key()
    lacking = next(n for n in operation.operands if getattr(sample, f"{n}_dtype") is None)
    assert key(**{f"{lacking}_dtype": BF16}) != key()
    assert key(**{f"{lacking}_dtype": BF16})[2] == key()[2]


def test_what_a_norm_adds_and_in_which_dtype_it_scales_is_no_matter():
    sample = declared_named("rms_norm").sample
    table = operation_named("rms_norm").part("tuned_block_sizes").TABLE

    def key(**change):
        return table.key(replace(sample, **change), "pallas_gpu", "forward")

    assert key() == key(epsilon=1e-3) == key(scale_dtype=BF16)
    assert key(outside=True) != key()


def test_products_in_another_dtype_are_another_original():
    """XLA writes hidden units in float32 where the program rounds them later, which takes it longer."""
    table = operation_named("gated_mlp").part("tuned_block_sizes").TABLE

    def key(dtype):
        def program(x, gate, up, down):
            products = (jnp.dot(x, w, preferred_element_type=dtype) for w in (gate, up))
            return (jax.nn.silu(next(products)) * next(products)).astype(x.dtype) @ down

        sizes = ((64, 32), (32, 48), (32, 48), (48, 32))
        types = [jax.ShapeDtypeStruct(shape, BF16) for shape in sizes]
        return table.key(only_match(program, types, "gated_mlp").spec, "pallas_gpu", "forward")

    assert "activation of logistic in bfloat16" in key(BF16)[-1]
    assert "activation of logistic in float32" in key(jnp.float32)[-1]


def test_what_was_measured_decides_about_a_norm_in_a_train_step():
    """The H100's own rows: a gain with gradients."""
    operation = operation_named("layer_norm")
    spec = replace(operation.sample, rows=65536)
    match = SimpleNamespace(op="layer_norm", spec=spec, direction="forward+backward", original=None)
    found = of_table(match, "pallas_gpu", H100)
    assert found.exact
    assert Evidence.of(found.row, "time").licenses
    assert not of_table(replace_spec(match, columns=8192), "pallas_gpu", H100).exact


def replace_spec(match, **change):
    return SimpleNamespace(**(vars(match) | {"spec": replace(match.spec, **change)}))


# ---------------------------------------------------------------------- searches


@pytest.mark.parametrize("autotune, known, searches", [(None, True, 0), (True, True, 2), (None, False, 2)])
@pytest.mark.usefixtures("user_cache")
@pytest.mark.filterwarnings("ignore:autopallas could not search")
def test_where_one_implementation_has_a_row_no_other_is_searched_for_unasked(monkeypatch, autotune, known, searches):
    match, searched = attention_match(), []
    sizes = attention.TABLE.files.read("NVIDIA H100")[0][1].block_sizes
    rows = {attention.table_key(match.spec, "cudnn", "forward"): measured(sizes, 70.0)} if known else {}
    monkeypatch.setattr(attention.TABLE, "rows", {"NVIDIA H100": rows})
    monkeypatch.setattr(tuners, "isolated", lambda function: searched.append(function) or 1 / 0)
    tuner = Tuner(H100, resolve({"autotune": autotune}))
    found = tuner.choices(match, ("pallas_gpu", "cudnn", "xla"))
    assert len(searched) == searches
    assert found["cudnn"].exact is known


@pytest.mark.parametrize(
    "autotune, objective, kernel_us, wanted",
    [
        (None, "time", 500.0, ["pallas_gpu", "cudnn"]),
        (None, "time", 990.0, ["pallas_gpu", "cudnn"]),
        (None, "time", None, ["pallas_gpu", "cudnn", "xla"]),
        (None, "memory", 1400.0, ["pallas_gpu", "cudnn", "xla"]),
        (True, "time", 500.0, ["pallas_gpu", "cudnn", "xla"]),
    ],
)
@pytest.mark.usefixtures("user_cache")
def test_plain_jax_is_searched_for_unasked_where_no_kernel_works(monkeypatch, autotune, objective, kernel_us, wanted):
    """Under objective "memory" where none gains: a kernel that takes more than 1.3 times as long does not count."""
    match, searched = attention_match(), []
    sizes = attention.TABLE.files.read("NVIDIA H100")[0][1].block_sizes

    def found(match, implementation, key, *rest, **settings):
        searched.append(implementation)
        if kernel_us is None:
            return Entry(key.description, "failed", reason="none works", seconds=1.0)
        row = measured(sizes.to_dict(), kernel_us)
        return Entry(key.description, "tuned", row=row, seconds=1.0, block_sizes=sizes.to_dict())

    monkeypatch.setattr(attention.TABLE, "rows", {"NVIDIA H100": {}})
    monkeypatch.setattr(tuners, "search", found)
    monkeypatch.setattr(xla, "GAINS_ON", {})
    options = resolve({"autotune": autotune, "objective": objective})
    chosen = Tuner(H100, options).choices(match, ("pallas_gpu", "cudnn", "xla"))
    assert searched == wanted
    assert chosen["pallas_gpu"].source == "autotune"
    assert set(chosen) == {"pallas_gpu", "cudnn", "xla"}


@pytest.mark.parametrize("operation", ["attention", "cross_entropy"])
def test_tiles_in_plain_jax_are_for_memory_on_gpus(operation):
    own, spec = operation_named(operation), attention_match().spec
    found = {(p, o): own.may_gain("xla", o, spec, p) for p in ("cpu", "gpu") for o in ("time", "memory")}
    assert [place for place, may in found.items() if not may] == [("gpu", "time")]


@pytest.mark.parametrize("autotune, kernel_us, searches", [(None, 1300.0, 0), (None, 990.0, 1), (True, 1300.0, 1)])
@pytest.mark.usefixtures("user_cache")
@pytest.mark.filterwarnings("ignore:autopallas could not search")
def test_what_was_slower_in_the_nearest_bucket_is_not_searched_for_unasked(monkeypatch, autotune, kernel_us, searches):
    match, searched = attention_match(), []
    sizes = attention.TABLE.files.read("NVIDIA H100")[0][1].block_sizes
    key = attention.table_key(match.spec, "pallas_gpu", "forward")
    near = (*key[:3], "T16384" if key[3] != "T16384" else "T8192", key[4])
    monkeypatch.setattr(attention.TABLE, "rows", {"NVIDIA H100": {near: measured(sizes, kernel_us)}})
    monkeypatch.setattr(tuners, "isolated", lambda function: searched.append(function) or 1 / 0)
    Tuner(H100, resolve({"autotune": autotune})).choices(match, ("pallas_gpu",))
    assert len(searched) == searches
