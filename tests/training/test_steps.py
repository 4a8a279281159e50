"""Wherever a derivative is asked for inside the optimized function, both halves of the attention are replaced."""

from __future__ import annotations

import math

import jax
import pytest
from support.checks import arrays, check, replaced, right
from support.compare import compiled, optimized_like_a_user

from training import biases, branches, derivatives, loops
from training.catalogue import STEPS, T

assert biases
assert branches
assert derivatives
assert loops

NOT_YET: dict[str, str] = {
    # Forward mode keeps the probabilities.
    "linearize": "also used by mul",
    "jvp": "",
    # Keys without an example's axis have a gradient for each example.
    "per_example_gradients_of_shared_keys": "also used by mul",
}
"""Steps in which not every site is replaced yet, with the reason that the report gives.  Their results are right."""


WHOLE = {
    "value_and_grad",
    "linearize_and_transpose",
    "per_example_gradients",
    "grad_in_a_branch",
    "grad_in_a_loop",
    "a_jacobian_of_two_losses",
    "bias_per_example_and_head",
    "bfloat16_throughout",
    "scan_in_reverse",
    "scan_unrolled_in_part",
    "checkpoint_within_a_checkpoint",
    "scan_of_checkpoints_that_save_dots",
    "checkpoint_of_loops_of_loops",
    "loops_of_loops_with_branches_that_do_the_same_with_other_weights",
    "microbatches_around_a_scan",
}
"""Steps that are compiled as a whole: of each kind of loop, branch and checkpoint one.  So is test_train_steps.py."""


@pytest.mark.parametrize("name", [name for name in STEPS if name not in NOT_YET])
def test_both_directions_are_replaced_and_exact(name):
    step = STEPS[name]
    directions = ["forward+backward"] * step.sites
    report = check(step.function, step.arguments(), directions, step.sizes, whole=name in WHOLE)
    assert report.near_misses == ()


@pytest.mark.parametrize("name", NOT_YET)
def test_what_is_not_found_yet_is_left_alone_with_its_reason(name):
    step = STEPS[name]
    optimized = optimized_like_a_user(step.function)
    args = step.arguments()
    right(compiled(lambda *args: optimized(*args))(*args), step.function, args, "float32")
    report = optimized.report()
    assert not report.failures
    assert len(replaced(report)) < step.sites
    assert any(NOT_YET[name] in miss.reason for miss in report.near_misses), [m.reason for m in report.near_misses]


def test_a_bias_for_all_layers_is_not_stacked_for_the_backward_loop():
    step = STEPS["scan_with_one_table_of_distances_for_all_layers"]
    optimized = optimized_like_a_user(step.function)
    program = jax.make_jaxpr(lambda *args: optimized(*args))(*step.arguments())
    assert replaced(optimized.report()) == ["forward+backward"]
    shapes = [getattr(aval, "shape", ()) for _, aval in arrays(program)]
    assert not [shape for shape in shapes if shape[-2:] == (T, T) and math.prod(shape) > T * T]
