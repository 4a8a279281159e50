"""The court's questions, verdicts, and what it does not hold against a kernel."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopallas.court.case import Case, Numbers, in_words, size_variants
from autopallas.court.hearing import Reference, hear, with_gradients
from autopallas.court.trial import QUESTIONS, judge
from autopallas.numerics.rows import row_errors


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def softmax(x):
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True, initial=-jnp.inf))
    return e / jnp.sum(e, axis=-1, keepdims=True)


def test_a_right_kernel_is_right_in_every_question():
    verdict = judge(softmax, jax.nn.softmax, [f32(6, 10)], dtypes=[jnp.dtype(jnp.bfloat16)])
    assert verdict.ok, str(verdict)
    asked = {name for name, tally in verdict.tallies.items() if tally.heard}
    assert asked >= {*QUESTIONS} - {"devices"}
    assert "agrees with" in str(verdict)
    assert verdict.to_dict()["ok"] is True


def test_axes_of_equal_size_stay_equal_and_there_are_empty_odd_and_large_cases():
    types = (f32(4, 8), f32(8, 6))
    found = [tuple(t.shape for t in variant) for _, variant in size_variants(types)]
    assert all(x[1] == y[0] for x, y in found)
    assert {min(n for shape in shapes for n in shape) for shapes in found} >= {0, 1}
    assert max(n for shapes in found for shape in shapes for n in shape) >= 4 * 8
    assert any(all(n % 2 for shape in shapes for n in shape) for shapes in found)


def test_relations_that_only_the_reference_knows_leave_cases_out_instead_of_failing():
    def grouped(q, k):  # six heads share three
        return q.reshape(k.shape[0], -1, q.shape[1]) * k[:, None]

    verdict = judge(grouped, grouped, [f32(6, 4), f32(3, 4)], questions=["sizes"], dtypes=())
    assert verdict.ok
    assert verdict.tallies["sizes"].dropped > 0


def test_a_kernel_may_refuse_other_sizes_but_not_the_given_ones():
    def whole_tiles(x):
        if x.shape[-1] % 8 or not x.size:
            raise ValueError("needs whole tiles")
        return softmax(x)

    verdict = judge(whole_tiles, jax.nn.softmax, [f32(4, 8)], questions=["sizes"], dtypes=())
    assert verdict.ok
    assert verdict.tallies["sizes"].refused > 0
    assert "needs whole tiles" in verdict.refused[0]
    assert not judge(whole_tiles, jax.nn.softmax, [f32(4, 9)], questions=["sizes"], dtypes=()).ok


def test_another_type_is_a_fault_and_a_missing_gradient_a_note():
    verdict = judge(lambda x: softmax(x).astype(jnp.bfloat16), softmax, [f32(4, 4)], questions=["sizes"])
    assert "is bfloat16[4,4] where the reference's is float32[4,4]" in verdict.failures[0].findings[0]
    host = lambda x: jax.pure_callback(lambda v: np.tanh(v), f32(*x.shape), x)  # noqa: E731
    verdict = judge(host, jnp.tanh, [f32(4, 8)], questions=["runs"])
    assert verdict.ok
    assert "the kernel has none" in verdict.notes[0]


def test_a_wrong_gradient_is_found_where_the_value_is_right():
    @jax.custom_vjp
    def square(x):
        return x * x

    square.defvjp(lambda x: (x * x, x), lambda x, g: (2.02 * g * x,))
    verdict = judge(square, lambda x: x * x, [f32(4, 6)], questions=["sizes"])
    assert {f.split(" is off")[0] for failure in verdict.failures for f in failure.findings} == {
        "gradient of argument 0"
    }


def test_where_the_reference_has_no_digit_nothing_is_decided():
    def lost(x):  # the argument is rounded to a multiple of 64
        return jnp.sin(x * 1e9)

    verdict = judge(lambda x: jnp.cos(x * 1e9), lost, [f32(4, 6)], questions=["sizes"], gradients=False, dtypes=())
    assert any("were not judged" in note for note in verdict.notes)


def attention(wrong):
    """An attention whose gradient takes the sum of p * dp from the result, as kernels do."""

    @jax.custom_vjp
    def attend(q, k, v):
        return jax.nn.softmax(q @ k.T) @ v

    def backward(saved, dout):
        q, k, v = saved
        p = jax.nn.softmax(q @ k.T)
        ds = p * (dout @ v.T - jnp.sum(dout * (p @ v), -1, keepdims=True))
        dq = ds @ k
        return dq.at[1].multiply(1.35) if wrong else dq, ds.T @ q, p.T @ dout

    attend.defvjp(lambda *given: (attend(*given), given), backward)
    return with_gradients(attend, (0, 1, 2))


def test_a_rounding_in_place_of_a_difference_that_is_exactly_zero_is_no_fault():
    """Where a softmax is saturated, its gradient is zero in one order of the sums, and a rounding in another."""
    random = np.random.default_rng(0)
    saturated = [np.asarray(30 * random.standard_normal(shape), np.float32) for shape in ((6, 8), (10, 8), (10, 8))]
    gives = with_gradients(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, (0, 1, 2))
    names = ["result", "gradient of q", "gradient of k", "gradient of v"]
    reference = Reference.of(gives, saturated, names, [False, True, True, True])
    assert hear(reference, attention(wrong=False), saturated).findings == ()
    plain = [x / 30 for x in saturated]
    assert hear(reference, attention(wrong=False), plain).findings == ()
    assert {finding.what for finding in hear(reference, attention(wrong=True), plain).findings} == {"gradient of q"}


def test_what_claims_to_be_identical_is_compared_bit_by_bit():
    def other_order(x):
        return jnp.sum(x[::-1])

    x = jax.ShapeDtypeStruct((1000,), jnp.float32)
    asked = dict(questions=["sizes", "special values"], dtypes=())
    assert judge(other_order, jnp.sum, [x], **asked).ok
    verdict = judge(other_order, jnp.sum, [x], numerics="identical", **asked)
    assert not verdict.ok
    assert "other bits than the reference's" in verdict.smallest.findings[0]
    assert judge(jnp.sum, jnp.sum, [x], numerics="identical", **asked).ok  # a NaN is a NaN


def test_time_that_is_over_is_told():
    verdict = judge(softmax, softmax, [f32(4, 6)], questions=["sizes", "magnitudes"], seconds=1e-9)
    assert not verdict.ok
    (note,) = verdict.notes
    assert re.fullmatch(
        r"cases that were not heard, since 1e-09 seconds were over: \d+ of sizes, \d+ of magnitudes", note
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_row_is_judged_by_its_own_norm_and_by_the_originals_error_in_it(dtype):
    exact = np.array([[1e4, 1e4], [1.0, -1.0], [0.0, 0.0]])
    plain = exact.astype(dtype)
    wrong = plain.copy()
    wrong[1] *= dtype(1.35)
    found = row_errors(wrong, plain, exact, 1e-3)
    assert (found.ok, found.row) == (False, (1,))
    assert found.error == pytest.approx(0.35, rel=1e-2)
    assert row_errors(wrong, wrong, exact, 1e-3).ok, "the original is as wrong itself"
    noise = plain + np.array([[0], [0], [1e-4]], dtype)  # a rounding of the largest row, where the original is zero
    assert row_errors(noise.astype(dtype), plain, exact, 1e-3).ok
    zero = exact + np.array([[0], [0], [1e-17]])  # what float64 leaves of a zero
    assert row_errors(noise.astype(dtype), plain, zero, 1e-3).ok


def test_rows_without_a_digit_in_the_original_are_judged_by_its_largest_error_in_them():
    exact = np.full((3, 2), 1e-20)
    plain = np.float32([[1e-9, 0], [5e-20, 1e-20], [1e-11, 0]])  # a lucky row between others
    assert row_errors(np.float32([[0, 1e-9], [0, 1e-9], [1e-9, 0]]), plain, exact, 1e-5).ok
    assert not row_errors(np.float32([[0, 1e-9], [0, 1e-9], [5e-8, 0]]), plain, exact, 1e-5).ok


def test_numbers_of_a_case():
    case = Case((f32(2, 3),), Numbers(special=np.nan, place=1.0))
    (array,) = case.arguments(None)
    assert np.isnan(array[1, 2])
    assert np.isfinite(array).sum() == 5
    (zeros,) = Case((f32(2, 3),), Numbers(scale=-0.0)).arguments(None)
    assert np.signbit(zeros).any()
    assert in_words(case.types) == "f32[2,3]"


def test_where_the_reference_overflows_the_kernel_for_such_values_is_heard():
    """In another order a product overflows elsewhere, which finite arguments do not show."""

    def in_order(x):
        return jax.lax.scan(lambda product, row: (product * row,) * 2, jnp.ones(x.shape[1:], x.dtype), x)[1]

    def tree(x):
        return jax.lax.cumprod(x, axis=0)

    asked = dict(questions=["magnitudes"], gradients=False)
    verdict = judge(in_order, tree, [f32(64, 127)], **asked)
    assert any("NaN or infinite" in finding for failure in verdict.failures for finding in failure.findings)
    assert judge(in_order, tree, [f32(64, 127)], special=tree, **asked).ok
