"""The public function: what it computes, what it refuses, how it chooses, and its block sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopallas.errors import AutopallasWarning, UnsupportedError
from autopallas.kernels.grouped_matmul import grouped_matmul
from autopallas.kernels.grouped_matmul import tuned_block_sizes as tuned
from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.kernels.grouped_matmul.operation import OPERATION
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec
from autopallas.sites.device import Device


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


LHS, RHS, SIZES = normal(0, 23, 6), normal(1, 4, 6, 9), jnp.array([5, 0, 11, 4])


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
def test_values_and_gradients_are_those_of_ragged_dot(implementation):
    def loss(function, **rest):
        return lambda x, w: jnp.sum(jnp.sin(function(x, w, SIZES, **rest)))

    ours = loss(grouped_matmul, implementation=implementation, block_sizes=BlockSizes(8))
    found = jax.jit(jax.value_and_grad(ours, (0, 1)))(LHS, RHS)
    wanted = jax.jit(jax.value_and_grad(loss(lax.ragged_dot), (0, 1)))(LHS, RHS)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_under_vmap_each_example_is_its_own():
    lhs, sizes = jnp.stack([LHS, 2 * LHS]), jnp.stack([SIZES, SIZES[::-1]])
    found = jax.vmap(grouped_matmul, in_axes=(0, None, 0))(lhs, RHS, sizes)
    for one, x, n in zip(found, lhs, sizes, strict=True):
        np.testing.assert_allclose(one, lax.ragged_dot(x, RHS, n), rtol=1e-5, atol=1e-5)


def test_the_result_has_the_dtype_asked_for():
    lhs, rhs = LHS.astype(jnp.bfloat16), RHS.astype(jnp.bfloat16)
    assert grouped_matmul(lhs, rhs, SIZES).dtype == jnp.bfloat16
    assert grouped_matmul(lhs, RHS, SIZES).dtype == jnp.float32
    wide = grouped_matmul(lhs, rhs, SIZES, preferred_element_type=jnp.float32)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, lax.ragged_dot(lhs, rhs, SIZES, preferred_element_type=jnp.float32), rtol=1e-4)


def test_the_precision_reaches_the_dots():
    text = str(jax.make_jaxpr(lambda x, w: grouped_matmul(x, w, SIZES, precision="highest"))(LHS, RHS))
    assert "Precision.HIGHEST" in text
    assert "Precision" not in str(jax.make_jaxpr(lambda x, w: grouped_matmul(x, w, SIZES))(LHS, RHS))


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (TypeError, "lhs must be a floating-point array", {"lhs": LHS.astype(jnp.int32)}),
        (TypeError, "group_sizes must be an array of integers", {"group_sizes": SIZES.astype(jnp.float32)}),
        (TypeError, "preferred_element_type is int32", {"preferred_element_type": jnp.int32}),
        (TypeError, "block_sizes is a int", {"block_sizes": 8}),
        (ValueError, r"rhs has shape \(6, 9\)", {"rhs": RHS[0]}),
        (ValueError, "rhs has inner size 6 and lhs 5", {"lhs": LHS[:, :5]}),
        (ValueError, "rhs has 4 groups", {"group_sizes": SIZES[:3]}),
        (ValueError, "must not be empty", {"lhs": LHS[:0]}),
        (ValueError, "cannot count 200 rows", {"lhs": normal(2, 200, 6), "group_sizes": SIZES.astype(jnp.int8)}),
        (UnsupportedError, "no implementation cudnn", {"implementation": "cudnn"}),
    ],
)
def test_a_wrong_argument_is_named(error, words, arguments):
    arguments = {"lhs": LHS, "rhs": RHS, "group_sizes": SIZES} | arguments
    with pytest.raises(error, match=words):
        grouped_matmul(**arguments)


@pytest.mark.parametrize("rows", [0, -8, 2.0, True])
def test_block_sizes_are_positive_integers(rows):
    with pytest.raises(ValueError, match="row_block must be a positive integer"):
        BlockSizes(rows)


def test_a_list_of_implementations_falls_through_with_a_warning():
    with pytest.warns(AutopallasWarning, match="no implementation cudnn; using xla"):
        grouped_matmul(LHS, RHS, SIZES, implementation=["cudnn", "xla"])
    assert OPERATION.requested(None, Device("cpu", "cpu")) == ("xla",)


def spec(rows: int, groups: int, inner: int = 512, columns: int = 1024, use: str = "forward") -> GroupedMatmulSpec:
    f32 = np.dtype(np.float32)
    return GroupedMatmulSpec(use, 1, rows, groups, inner, columns, f32, f32, f32)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (7, 3), (4096, 8), (4096, 64), (100, 64), (33, 1)])
def test_block_sizes_fit_rows_and_groups(rows, groups):
    for sizes in (
        *BlockSizes.candidates(spec(rows, groups)),
        tuned.infer_block_sizes(spec(rows, groups), Device("cpu", "cpu")),
    ):
        assert 1 <= sizes.row_block <= rows
        assert sizes.row_block <= max(16, 2 * (rows // groups))
        assert sizes.row_block % 8 == 0 or sizes.row_block == rows


def test_small_groups_get_small_tiles():
    default = BlockSizes.get_default()
    assert default.fitted(spec(4096, 64)).row_block < default.fitted(spec(4096, 8)).row_block


def test_every_row_of_the_table_stands_for_a_gain_or_says_that_there_is_none():
    for (implementation, direction, dtype, bucket, size), row in tuned.TABLE["cpu"].items():
        assert implementation == "xla"
        assert direction in ("forward", "forward+backward")
        assert dtype in ("float32", "bfloat16")
        assert bucket in {b.name for b in tuned.BUCKETS}
        assert size in ("small", "large", "dense large")
        assert row.kernel_us > 0
        assert row.original_us > 0
        assert row.evidence == "measured"


def test_a_spec_finds_the_row_of_its_size():
    def bucket(*sizes: int) -> str:
        return tuned.table_key(spec(*sizes), "xla", "forward")[3]

    assert (bucket(4096, 8), bucket(4096, 64), bucket(64, 4)) == ("G8 M/G256", "G64 M/G64", "G4 M/G16")
    assert (bucket(8, 8), bucket(2**20, 64)) == ("G8 M/G4", "G64 M/G64")
    assert bucket(512, 1) == "other"
    assert tuned.table_key(spec(512, 8, use="drhs"), "xla", "forward")[1] == "forward+backward"
    assert tuned.table_key(spec(512, 8, 16, 16), "xla", "forward")[4] == "small"
