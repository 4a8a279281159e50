"""A slice of the random programs in each run of the tests; and that programs, judge and faults are what they should be.

``make fuzz`` judges thousands; ``make fuzz-mutations`` shows that they would find the faults that the product once had.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopallas.kernels.respelling.kinds import kind_names

from .altered import altered
from .judge import Verdict, judge, kinds_found
from .mutations import FAULTS, put_back
from .program import RandomProgram, random_program
from .record import clean_ranges
from .respellings import (
    FIRST_BROADCAST,
    FIRST_COMPLEX,
    FIRST_EXPONENTIALS,
    FIRST_GATED,
    FIRST_INTEGERS,
    FIRST_NETWORK,
    FIRST_OF_EVERY_KIND,
    FIRST_SPREAD,
    FIRST_UNROLLED,
    FIRST_WRITTEN,
)
from .shrink import shrunk
from .tolerance import roundings
from .writing import Argument

PROGRAMS = range(60)
BATCH = 5


@pytest.mark.parametrize("start", PROGRAMS[::BATCH])
def test_random_programs_compute_what_they_did(start):
    wrong, replaced = [], 0
    for seed in range(start, start + BATCH):
        verdict = judge(random_program(seed))
        wrong += [f"program {seed}: {complaint}" for complaint in verdict.complaints]
        replaced += any(verdict.applied.values())
    jax.clear_caches()
    assert wrong == []
    assert replaced >= BATCH // 4


def test_random_gated_mlps_compute_what_they_did():
    """Some have more rows than a block has."""
    programs = [random_program(seed) for seed in range(120_017, 120_117, 20)]
    assert {"family: gated"} <= frozenset.intersection(*(program.features for program in programs))
    assert any("rows beyond a block" in program.features for program in programs)
    assert [judge(program).complaints for program in programs] == [[]] * len(programs)


def test_random_linear_attentions_compute_what_they_did():
    found = [judge(random_program(seed)) for seed in range(140_008, 140_108, 20)]
    assert [v.complaints for v in found] == [[]] * len(found)
    assert any(v.applied.get("linear_attention") for v in found)


def test_random_convolutions_compute_what_they_did():
    found = [judge(random_program(seed)) for seed in range(180_009, 180_209, 20)]
    assert [v.complaints for v in found] == [[]] * len(found)
    assert sum(bool(v.applied.get("respelling")) for v in found) > 1


def test_derivatives_that_are_not_quite_those_of_the_program_stay_what_they_are():
    programs = [random_program(seed) for seed in range(160_000, 160_010)]
    found = [judge(program) for program in programs if program.gradients]
    assert [v.complaints for v in found] == [[]] * len(found)
    assert sum(any(v.applied.values()) for v in found) > 2


def test_an_altered_derivative_differs_and_the_values_do_not():
    def step(x):
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x) * x))(x)

    x = jnp.arange(1.0, 6.0)
    value, gradient = step(x)
    changed = [altered(step, seed)(x) for seed in range(6)]
    assert all(own == value for own, _ in changed)
    assert any(not np.allclose(own, gradient) for _, own in changed)
    assert altered(jnp.sin, 0)(x).tolist() == jnp.sin(x).tolist()


def test_a_seed_always_gives_the_same_program():
    for seed in range(20):
        first, second = random_program(seed), random_program(seed)
        assert (first.text, first.arguments) == (second.text, second.arguments)
        with jax.enable_x64(first.x64):
            assert all(np.array_equal(a, b) for a, b in zip(first.arrays(), second.arrays(), strict=True))


def test_a_choice_taken_plainly_leaves_the_others():
    for seed in range(30):
        whole = random_program(seed)
        for name in [n for n in whole.choices if n not in ("family", "x64", "busy")][:3]:
            smaller = random_program(seed, frozenset([name]))
            assert name not in smaller.choices
            kept = {n: c for n, c in smaller.choices.items() if n in whole.choices}
            assert kept.items() <= whole.choices.items()


def test_programs_have_what_they_are_said_to_have():
    features = {feature for seed in range(400) for feature in random_program(seed).features}
    wanted = [
        "cast", "positions", "limits", "empty rows", "tokens without experts", "many experts", "labels out of range",
        "embedding: one-hot", "two roundings of a row", "no maximum", "x64", "magnitude 1000", "layers: scan",
        "layers: unrolled", "mixture: ragged", "around: vmap", "around: scan", "around: accumulated",
        "within: checkpoint", "direction: vjp", "direction: grad", "fill: -jnp.inf", "fill: -1.0", "fill: finfo.min",
        "mask: random", "weights: float mask", "guard: floor", "guard: epsilon", "gates: divided",
    ]  # fmt: skip
    assert [name for name in wanted if name not in features] == []


def test_loops_over_time_carry_what_they_are_said_to():
    programs = [random_program(seed) for seed in range(80_000, 80_400) if seed % 10 in (5, 6)]
    features = {feature for program in programs for feature in program.features}
    updates = ("sum", "other order", "delta", "read by a gate", "squashed", "largest", "squared", "shifted")
    wanted = [f"update: {name}" for name in updates] + ["recurrence: fori", "recurrence: scan", "decay: above one"]
    wanted += ["recurrence: numbers", "reads: before", "writes: add", "writes: twice"]
    assert [name for name in wanted if name not in features] == []


def test_loops_over_time_are_checkpointed_and_optimized_for_memory():
    programs = [random_program(seed) for seed in range(100_000, 100_200)]
    features = {feature for program in programs for feature in program.features}
    wanted = ("usual", "checkpoint", "checkpoint and slices", "memory")
    assert [name for name in wanted if f"options: {name}" not in features] == []
    assert "scan_checkpoint" in next(p for p in programs if "options: checkpoint" in p.features).script()


def test_a_loop_that_runs_its_steps_again_is_judged():
    rows = [Argument(name, "normal", (24, 8), "'float32', 0.3, 0.0") for name in "kvq"]
    program = _written(_LOOP.format(gate="jax.nn.sigmoid(s.mean())", read="q @ s"), *rows)
    verdict = judge(replace(program, options={"ops": ("scan_checkpoint",)}))
    assert verdict.applied == {"respelling": 1}
    assert verdict.complaints == []


_DRAWN = {
    "argmax": "first: argmax",
    "associative_scan": "step: associative scan",
    "batched_product": "step: small matrices",
    "broadcast_product": "step: broadcast products",
    "complex_product": "step: complex products",
    "convolution": "step: convolution",
    "convolution_of_volumes": "step: volumes",
    "cumulative": "step: cumulative",
    "elementwise": "step: elementwise",
    "gates_of_slices": "step: gated loop",
    "indexed_loop": "step: indexed loop",
    "integer_product": "step: integer products",
    "looped_bfloat16": "step: looped bfloat16",
    "looped_convolution": "step: looped convolution",
    "one_hot": "step: one-hot",
    "pooling": "step: window",
    "pooling_gradient": "step: window",
    "product": "family: respelling",
    "python_loop": "step: written loop",
    "reduction": "step: reduction",
    "repeated_steps": "step: repeated steps",
    "scan_checkpoint": "step: long loop",
    "scan_surroundings": "step: expanded scan",
    "short_sum": "step: short sum",
    "sort": "first: sort",
    "squared_distances": "step: squared distances",
    "summed_exponentials": "step: summed exponentials",
    "summed_exponentials_gradient": "step: summed exponentials",
    "summed_products": "step: network",
    "threefry": "step: dropout",
    "transposed_convolution": "step: spread elements",
    "triangular_solve": "step: triangular solve",
    "unrolled_scan": "step: unrolled loop",
    "weight_gradient": "step: volumes",
}
"""What the programs have in which each kind of respelling is found."""


def test_every_kind_of_respelling_is_drawn():
    assert set(_DRAWN) == set(kind_names())


@pytest.mark.parametrize("kind", sorted(_DRAWN))
def test_a_respelling_is_found_in_programs_that_are_drawn_for_it(kind):
    later = {
        "broadcast_product": FIRST_BROADCAST,
        "complex_product": FIRST_COMPLEX,
        "integer_product": FIRST_INTEGERS,
        "summed_products": FIRST_NETWORK,
        "repeated_steps": FIRST_UNROLLED,
        "python_loop": FIRST_WRITTEN,
        "gates_of_slices": FIRST_GATED,
        "unrolled_scan": FIRST_UNROLLED,
        "transposed_convolution": FIRST_SPREAD,
    } | dict.fromkeys(("summed_exponentials", "summed_exponentials_gradient"), FIRST_EXPONENTIALS)
    first = later.get(kind, FIRST_OF_EVERY_KIND)
    programs = (random_program(seed) for seed in range(first + 2, first + 5_000, 10))
    drawn = (program for program in programs if _DRAWN[kind] in program.features)
    tries = 120 if kind == "product" else 40
    found = (kind in kinds_found(program) for program in itertools.islice(drawn, tries))
    assert sum(itertools.islice(filter(None, found), 2)) == 2


def test_mixtures_are_dispatched_in_each_way():
    features = {feature for seed in range(32_000, 32_400, 5) for feature in random_program(seed).features}
    ways = ("slots", "gathered", "picked", "intervals", "loop", "scan", "experts choose")
    assert [way for way in ways if f"mixture: {way}" not in features] == []


def _written(text: str, *arguments: Argument) -> RandomProgram:
    return RandomProgram(0, text, arguments, False, {}, frozenset(), 0)


_ATTENTION = """def program(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v"""


def _three(scale: float = 1.0, value: str = "float32") -> list[Argument]:
    return [
        Argument("q", "normal", (5, 4), f"'float32', {scale}, 0.0"),
        Argument("k", "normal", (7, 4), "'float32', 1.0, 0.0"),
        Argument("v", "normal", (7, 4), f"'{value}', 1.0, 0.0"),
    ]


def test_a_right_program_is_judged_right():
    verdict = judge(_written(_ATTENTION, *_three()))
    assert verdict.applied == {"attention": 1}
    assert verdict.complaints == []


@pytest.mark.parametrize("fault", ["A4"])
def test_a_fault_in_a_kernel_is_seen(fault):
    jax.clear_caches()
    with put_back(fault):
        verdict = judge(_written(_ATTENTION, *_three(value="bfloat16")))
    jax.clear_caches()
    assert verdict.kind == "values"
    assert "rounding in float32" in verdict.complaints[0]


def test_a_rounded_row_is_not_the_row():
    program = _written(
        """def program(q, k, v):
    s = q @ k.T
    lse = jax.nn.logsumexp(s, -1, keepdims=True).astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.exp(s - lse) @ v""",
        *_three(scale=100.0),
    )
    with put_back("A5"):
        assert judge(program).kind == "values"
    assert judge(program).complaints == []


_LOOP = """def program(k, v, q):
    def run(k, v, q):
        def step(s, now):
            k, v, q = now
            s = {gate} * s + jnp.outer(k, v)
            return s, {read}
        return lax.scan(step, jnp.zeros((8, 8)), (k, v, q))[1]
    out, pull = jax.vjp(run, k, v, q)
    return out, pull(jnp.cos(out))"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fault, gate, read", [("R1", "jax.nn.sigmoid(s.mean())", "q @ s"), ("R2", "0.9", "q @ s"), ("R2", "0.9", "s @ q")]
)
def test_a_fault_in_what_a_loop_is_read_as_is_seen(fault, gate, read):
    rows = [Argument(name, "normal", (24, 8), "'float32', 0.3, 0.0") for name in "kvq"]
    program = _written(_LOOP.format(gate=gate, read=read), *rows)
    with put_back(fault):
        assert judge(program).kind == "values"
    verdict = judge(program)
    assert verdict.complaints == []
    assert verdict.applied == ({} if fault == "R1" else {"recurrence": 1})


def test_every_fault_can_be_put_back_and_is_gone_afterwards():
    for name in FAULTS:
        with put_back(name):
            pass
    assert judge(_written(_ATTENTION, *_three(value="bfloat16"))).complaints == []


def test_a_dtype_in_which_nothing_rounds_allows_nothing():
    def program(x, y):
        return x.astype(jnp.float32) * 2, (x * 2).astype(jnp.float32), jnp.exp(y).astype(jnp.float16), x[::-1]

    program = jax.make_jaxpr(program)(jnp.ones(3, jnp.bfloat16), jnp.ones(3))
    assert roundings(program) == [jnp.float32, jnp.bfloat16, jnp.float16, None]


def test_a_failing_program_is_made_smaller():
    seed = next(s for s in range(100) if "weights: guard" in random_program(s).features)

    def fails(seed: int, plain: list[str]) -> Verdict:
        guarded = "weights: guard" in random_program(seed, frozenset(plain)).features
        return Verdict(seed, kind="values" if guarded else "")

    program = shrunk(fails(seed, []), fails)
    assert "weights: guard" in program.features
    assert len(program.choices) <= 4
    assert "isnan" in program.text


def test_recorded_ranges_say_where_they_come_from():
    for entry in clean_ranges():
        assert set(entry) == {"first", "programs", "replaced", "commit", "date", "jax"}
        assert entry["programs"] > 0
