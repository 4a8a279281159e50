"""Recognition is linear in a program's equations, and bounded: it ends on any program, and loses no ordinary site."""

from __future__ import annotations

import functools
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from support import mixtures

from autopallas.graph import Graph, flatten
from autopallas.graph.steps import OutOfSteps, Steps
from autopallas.options import resolve
from autopallas.patterns import find
from autopallas.patterns.attention import attempt
from autopallas.patterns.cross_entropy import recognise as logits
from autopallas.patterns.recurrence import transpose
from autopallas.patterns.recurrence.interpret import Interpretation
from autopallas.patterns.softmax import Softmax
from autopallas.pipeline import rewrite
from recognition.stacks import (
    LAYERS,
    attention,
    convolution,
    hidden,
    looked_up,
    loop,
    masked_mixture,
    merged_heads,
    norm,
    one_hot_mixture,
    one_hot_positions,
    one_hot_tokens,
    ragged,
    recurrence,
    rematerialised,
    scanned_experts,
    scattered_mixture,
    slots,
    stack,
)

OPTIONS = resolve({"objective": "always", "autotune": False})


def recognised(function, args):
    """The graph of a program after recognition, how often each operation was found, and the near misses."""
    graph = Graph(flatten(jax.make_jaxpr(function)(*args)))
    matches, misses = find(graph, None, True)
    return graph, Counter(match.op for match in matches), misses


def checkpointed_mixture(p, x):
    return jax.checkpoint(one_hot_mixture)(p, x)


def checkpointed_norm(p, x):
    return jax.checkpoint(norm)(p, x)


ALWAYS = {
    "attention": (attention, merged_heads, rematerialised),
    "grouped_matmul": (one_hot_mixture, masked_mixture, scattered_mixture, slots, loop, scanned_experts, ragged),
}
"""Each layer of these is a site."""


def assert_linear(layers, embedding, loss, depths=(8, 32, 96)):
    """Three times the layers take three times the steps at most, and what both ends take once more."""
    spent = {}
    for depth in depths:
        graph, found, misses = recognised(*stack(layers, depth, embedding, loss))
        spent[depth] = graph.steps.spent
        assert not [miss.reason for miss in misses if "not decided" in miss.reason]
        assert spent[depth] < 100 * len(graph.nodes) + 2000, "far from what a pattern may spend"
        for op, kinds in ALWAYS.items():
            assert found[op] >= sum(layers[i % len(layers)] in kinds for i in range(depth))
    few, some, many = (spent[depth] for depth in depths)
    # A tenth more, since the first layers of a form are proved and others compared with them.
    assert many <= some * depths[2] / depths[1] * 1.1 + 500
    assert some <= few * depths[1] / depths[0] * 1.1 + 500


@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
def test_the_steps_grow_with_the_layers_of_a_kind(layer):
    assert_linear([layer], one_hot_positions, loss=False)


@pytest.mark.parametrize(
    "layers",
    [
        [attention, one_hot_mixture],
        [merged_heads, masked_mixture],
        [slots, attention],
        [merged_heads, slots, norm, loop],
        [ragged, attention, scattered_mixture, merged_heads],
        [recurrence, attention, convolution, scanned_experts],
        [hidden, norm, attention, recurrence, slots, one_hot_mixture, merged_heads, loop],
    ],
    ids=lambda layers: " ".join(f.__name__ for f in layers),
)
def test_the_steps_grow_with_the_layers_in_any_order(layers):
    assert_linear(layers, one_hot_positions, loss=False)


@pytest.mark.parametrize("embedding", [looked_up, one_hot_tokens], ids=lambda f: f.__name__)
def test_the_steps_do_not_depend_on_the_embedding(embedding):
    assert_linear([merged_heads, slots, attention], embedding, loss=False)


@pytest.mark.parametrize(
    "layers",
    [
        [attention, hidden],
        [merged_heads, norm],
        [rematerialised, one_hot_mixture],
        [attention, slots],
        [masked_mixture, recurrence],
        [ragged, convolution],
        [loop, attention],
    ],
    ids=lambda layers: " ".join(f.__name__ for f in layers),
)
def test_the_steps_of_a_train_step_grow_with_the_layers(layers):
    assert_linear(layers, one_hot_tokens, loss=True, depths=(4, 12, 36))


@pytest.mark.parametrize("operation", ["layer_norm", "rms_norm"])
def test_the_steps_of_a_train_step_grow_with_the_layers_that_share_their_parameters(operation):
    def apply(x, scale):
        centred = x - x.mean(-1, keepdims=True) if operation == "layer_norm" else x
        return x + jnp.tanh(centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale)

    spent = {}
    for depth in (48, 144):

        def loss(scale, x, depth=depth):
            for _ in range(depth):
                x = apply(x, scale)
            return (x**2).sum()

        graph, found, _ = recognised(jax.grad(loss, (0, 1)), (jnp.ones(8), jnp.ones((6, 8))))
        assert found[operation] >= depth - 1
        spent[depth] = graph.steps.spent
    assert spent[144] < spent[48] * 3 * 1.1 + 500


def test_a_stack_has_all_its_sites_however_deep_it_is():
    _, found, misses = recognised(*stack([merged_heads, slots, attention, one_hot_mixture], 48, one_hot_positions))
    assert found["attention"] == found["grouped_matmul"] == 24
    assert misses == []


# ---------------------------------------------------------------------- deep chains


def chain(step, count):
    return lambda x: functools.reduce(lambda y, i: step(y, i), range(count), x)


DEEP = {
    "3000 sums": chain(lambda x, i: x + jnp.float32(i), 3000),
    "3000 terms": chain(lambda x, i: x + jnp.sin(x) if i % 2 else x * 0.5, 1500),
    "200 times itself": chain(lambda x, i: x + x, 200),
    "200 squares": chain(lambda x, i: jnp.tanh(x * x), 200),
}


def nested(x, count):
    function = jnp.sin
    for _ in range(count):
        function = jax.jit(lambda x, inner=function: inner(x) * 0.9)
    return function(x)


PLACES = {
    "weights of experts": lambda deep: (
        lambda p, x: jnp.einsum("tef,efd,te->td", mixtures.hidden(p, x), p["down"], deep(mixtures.combine(p, x)))
    ),
    "what experts give": lambda deep: (
        lambda p, x: jnp.einsum(
            "ted,te->td",
            deep(jnp.einsum("tef,efd->ted", mixtures.hidden(p, x), p["down"])),
            mixtures.combine(p, x),
        )
    ),
    "one expert after the other": lambda deep: (
        lambda p, x: sum(mixtures.combine(p, x)[:, e : e + 1] * deep(x @ p["gate"][e]) @ p["down"][e] for e in range(2))
    ),
    "tokens": lambda deep: lambda p, x: mixtures.one_einsum(p, deep(x)),
    "the result": lambda deep: lambda p, x: deep(mixtures.one_einsum(p, x)),
}


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("deep", DEEP)
def test_deep_chains_around_a_mixture_end(deep, place, gradient):
    function = PLACES[place](DEEP[deep])
    if gradient:
        function = jax.value_and_grad(lambda p, x, inner=function: jnp.sum(jnp.sin(inner(p, x))))
    graph, found, _ = recognised(function, (mixtures.P, mixtures.X))
    assert graph.steps.spent < 100 * len(graph.nodes)
    assert found["grouped_matmul"] == 1 or place not in ("tokens", "the result")


SCORES = {
    "scores": lambda deep: (
        lambda p, x: jax.nn.softmax(deep(x @ p["router"] @ p["router"].T @ x.T)) @ (x @ p["gate"][0])
    ),
    "values": lambda deep: lambda p, x: jax.nn.softmax(x @ p["router"] @ (x @ p["router"]).T) @ deep(x),
    "logits": lambda deep: (
        lambda p, x: (
            -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(deep(x @ p["router"])), jnp.zeros((12, 1), int), 1))
        )
    ),
}


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("place", SCORES)
@pytest.mark.parametrize("deep", DEEP)
def test_deep_chains_around_a_softmax_end(deep, place, gradient):
    function = SCORES[place](DEEP[deep])
    if gradient:
        function = jax.value_and_grad(lambda p, x, inner=function: jnp.sum(jnp.sin(inner(p, x))))
    graph, _, _ = recognised(function, (mixtures.P, mixtures.X))
    assert graph.steps.spent < 100 * len(graph.nodes)


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_probabilities_that_are_normalised_again_and_again_are_found_with_few_terms(monkeypatch, gradient):
    """Each sum has the rows of what it adds up, so that uncombined rows would be twice as many after each division."""
    terms, combine = 0, Softmax.combine

    def counted(self, given):
        nonlocal terms
        given = list(given)
        terms += len(given)
        assert terms < 20_000
        return combine(self, given)

    def attend(x):
        p = jax.nn.softmax(x @ x.T)
        for _ in range(16):
            p = p / jnp.sum(p, axis=-1, keepdims=True)
        return p @ x

    monkeypatch.setattr(Softmax, "combine", counted)
    function = jax.grad(lambda x: jnp.sum(jnp.sin(attend(x)))) if gradient else attend
    assert recognised(function, (mixtures.X,))[1]["attention"] == 1


def test_sums_that_are_multiplied_by_themselves_again_and_again_are_not_written_as_products():
    """The power of the sum is doubled by each step: 2**32 products would never end."""

    def attend(x):
        e = jnp.exp(x @ x.T)
        total = jnp.sum(e, axis=-1, keepdims=True)
        for _ in range(32):
            total = total * total
        return e / total @ x

    _, found, misses = recognised(attend, (mixtures.X,))
    assert not found["attention"]
    assert any("power" in miss.reason for miss in misses)


def calls_of(monkeypatch, name):
    """Counts the calls of a method of the softmax's reader from now on."""
    calls, method = Counter(), getattr(Softmax, name)

    def counted(self, *arguments):
        calls[name] += 1
        return method(self, *arguments)

    monkeypatch.setattr(Softmax, name, counted)
    return calls


def test_probabilities_with_any_number_of_masks_are_left_alone_with_few_terms(monkeypatch):
    """Masked probabilities that are divided by their sum have one more mask, and one more sum, each time."""
    calls = calls_of(monkeypatch, "term_key")

    def attend(x, mask):
        p = jax.nn.softmax(x @ x.T)
        for _ in range(24):
            p = p * mask
            p = p / jnp.sum(p, axis=-1, keepdims=True)
        return p @ x

    assert not recognised(attend, (mixtures.X, jnp.ones((12, 12))))[1]["attention"]
    assert 0 < calls["term_key"] < 4_000


def test_softmaxes_of_softmaxes_take_looks_in_proportion_to_their_number(monkeypatch):
    """Each product in a long chain would look for scores among all that is before it."""
    looks = calls_of(monkeypatch, "carries_axis")

    def loss(x, count):
        v = x @ x.T
        for _ in range(count):
            v = jax.nn.softmax(jax.nn.softmax(v, axis=-1), axis=0)
        return jnp.sum(jnp.sin(v @ x))

    counts = []
    for count in (20, 40, 60):
        looks.clear()
        recognised(jax.grad(functools.partial(loss, count=count)), (mixtures.X,))
        counts.append(looks["carries_axis"])
    few, some, many = counts
    assert many - some < 1.3 * (some - few), counts


def gated(steps):
    """The gradient of a recurrence with exponential gates, whose steps are written one after the other."""

    def loss(weights, x):
        h, total, largest = x, x, x
        for _ in range(steps):
            kept, new = h @ weights, h @ (2 * weights)
            above = jnp.maximum(kept + largest, new)
            kept, new, largest = jnp.exp(kept + largest - above), jnp.exp(new - above), above
            h, total = kept * h + new * jnp.tanh(h @ weights.T), kept * total + new
        return jnp.sum(h / total)

    return jax.grad(loss, (0, 1)), (jnp.ones((4, 4)), jnp.ones((6, 4)))


def test_gates_of_steps_that_are_written_one_after_the_other_take_few_looks(monkeypatch):
    """Behind each exponential of a product lie those of all steps before it."""
    graph, found, _ = recognised(*gated(32))
    assert not found["attention"]
    monkeypatch.setattr(attempt, "_MOST_PRODUCTS", len(graph.nodes))
    anew, _, _ = recognised(*gated(32))
    assert 2 * graph.steps.spent < anew.steps.spent


def test_logits_are_followed_as_far_as_a_loss_reaches(monkeypatch):
    """Each gate of such a recurrence flows into all steps that follow it."""
    followed, own = [], logits._flows
    monkeypatch.setattr(logits, "_MOST_INSIDE", 64)
    monkeypatch.setattr(logits, "_flows", lambda node: followed.append(node) or own(node))
    counts = []
    for steps in (12, 24, 36):
        followed.clear()
        recognised(*gated(steps))
        counts.append(len(followed))
    few, some, many = counts
    assert many - some < 1.2 * (some - few), counts


def test_each_function_of_the_pipeline_is_called_in_proportion_to_the_layers_of_a_train_step():
    """What is called for each pair of layers is seen long before it takes most of the time."""
    counts = {}
    for depth in (4, 4, 12, 20):  # the first time also fills what JAX keeps
        function, args = stack([attention, norm, hidden], depth, one_hot_tokens, loss=True)
        program = jax.make_jaxpr(function)(*args)
        rewrite(program, OPTIONS, probes=False)
        calls = counts[depth] = Counter()
        sys.setprofile(lambda frame, event, _, calls=calls: calls.update([frame.f_code] if event == "call" else ()))
        try:
            rewrite(program, OPTIONS, probes=False)
        finally:
            sys.setprofile(None)
    few, some, many = counts.values()
    for code, count in many.items():
        growth = some[code] - few[code], count - some[code]
        assert growth[1] <= 1.5 * growth[0] + 100, (code.co_filename, code.co_qualname, few[code], some[code], count)


def test_the_bodies_of_a_program_are_not_walked_for_each_of_its_checkpoints():
    class Walked(dict):
        walks = 0

        def __iter__(self):
            Walked.walks += 1
            return super().__iter__()

        def items(self):
            Walked.walks += 1
            return super().items()

    for layer in (rematerialised, checkpointed_mixture, checkpointed_norm):
        walks = []
        for depth in (4, 12):
            function, args = stack([layer], depth, loss=True)
            graph = Graph(flatten(jax.make_jaxpr(function)(*args)))
            graph.positions = Walked(graph.positions)
            Walked.walks = 0
            matches, _ = find(graph, None, True)
            assert len(matches) > depth
            walks.append(Walked.walks)
        assert walks[0] == walks[1], layer.__name__


def test_functions_within_functions_end():
    def model(p, x):
        return nested(mixtures.one_einsum(p, nested(x, 60)), 60)

    assert recognised(model, (mixtures.P, mixtures.X))[1]["grouped_matmul"] == 1


def test_a_loop_that_carries_much_is_paired_with_few_looks_at_what_it_carries(monkeypatch):
    """Which of 40 carried values the reversed loop carries is not found by trying all choices of them."""
    looks = 0

    def alike(first, second):
        nonlocal looks
        looks += 1
        assert looks < 40**3
        return first.aval.shape == second.aval.shape and first.aval.dtype == second.aval.dtype

    monkeypatch.setattr(transpose, "_alike", alike)

    def loss(trained, others):
        def step(carried, given):
            carried = [jax.nn.sigmoid(x) * state + x for state, x in zip(carried, given, strict=True)]
            return carried, carried

        every = [x for pair in zip(others, trained, strict=True) for x in pair]
        found = jax.lax.scan(step, [jnp.zeros(x.shape[1:]) for x in every], every)[1]
        return sum(jnp.sum(x**2) for x in found[1::2]), found

    others, trained = ([jnp.ones((16, 2 * n + i)) for n in range(1, 21)] for i in (0, 1))
    recognised(jax.grad(loss, has_aux=True), (trained, others))
    assert looks


@pytest.mark.parametrize("waves", [False, True], ids=["heat", "waves"])
def test_steps_of_a_stencil_that_are_written_out_are_looked_at_once_each(waves):
    """They shift arrays by 1, 2, 3 and 4, as doubling by hand does, and add the shifted arrays."""

    def shifted(x, by):
        return jnp.pad(x[by:], (0, by)) if by > 0 else jnp.pad(x[:by], (-by, 0))

    def simulated(count):
        def run(x, before):
            for _ in range(count):
                around = sum(shifted(x, by) + shifted(x, -by) for by in range(1, 5)) - x
                x, before = (x + x - before + around, x) if waves else (x + around, before)
            return x

        graph, found, _ = recognised(run, (jnp.ones(64), jnp.ones(64)))
        assert found["respelling"] <= 1  # the run of steps
        return graph.steps.spent

    few, some, many = map(simulated, (10, 20, 40))
    assert many - some <= 3 * (some - few) + 100


# ---------------------------------------------------------------------- a limit


def endless(steps):
    with steps.one_try():
        while True:
            steps.spend()


def test_a_try_has_a_limited_number_of_steps_and_the_next_one_has_its_own():
    steps = Steps(equations=10)
    for _ in range(3):
        with pytest.raises(OutOfSteps, match="not decided within"):
            endless(steps)
    assert steps.spent < 100_000
    steps.spend(10**6)  # outside of a try there is no limit
    with steps.one_try():
        steps.spend(1000)  # what ordinary sites need is left to each


def test_a_pattern_without_steps_leaves_each_further_try_a_few():
    steps = Steps(equations=10)
    steps.begin()
    spent = []
    for _ in range(100):
        before = steps.spent
        with pytest.raises(OutOfSteps):
            endless(steps)
        spent.append(steps.spent - before)
    assert spent[-1] < spent[0] / 5
    assert spent[-1] > 1000


def test_one_candidate_without_steps_is_a_near_miss_and_the_others_are_found(monkeypatch):
    """The steps of a try are made too few for a chain of many operations inside an expert, and do for other sites."""
    monkeypatch.setattr("autopallas.graph.steps._EACH", 500)
    monkeypatch.setattr("autopallas.graph.steps._EACH_PER_EQUATION", 0)
    monkeypatch.setattr("autopallas.graph.steps._LEAST", 500)
    long = PLACES["one expert after the other"](DEEP["200 squares"])

    def model(p, x):
        return mixtures.one_einsum(p, x), long(p, x)

    _, found, misses = recognised(model, (mixtures.P, mixtures.X))
    assert found["grouped_matmul"] == 1
    assert any("not decided within 500 steps" in miss.reason for miss in misses)


@pytest.mark.parametrize(("count", "reason"), [(100, "more than 128 operations"), (300, "not looked at")])
def test_scores_that_are_far_from_their_product_are_a_near_miss(count, reason):
    def run(q, k, v):
        scores = q @ k.T
        for _ in range(count):
            scores = jnp.sin(scores) + 0.1
        return jax.nn.softmax(scores) @ v

    arrays = [jax.ShapeDtypeStruct((8, 4), jnp.float32)] * 3
    matches, misses = find(Graph(flatten(jax.make_jaxpr(run)(*arrays))), ("attention",), True)
    assert matches == []
    assert [reason in miss.reason for miss in misses] == [True]


def test_carried_values_that_wait_for_each_other_are_looked_at_once(monkeypatch):
    """In a chain, each of them is known only when the one before it is."""
    count = Counter()
    equation = Interpretation._equation
    monkeypatch.setattr(Interpretation, "_equation", lambda self, own: (count.update([length]), equation(self, own))[1])

    def step(carried, x):
        return [0.9 * own + (carried[i - 1] if i else x) for i, own in enumerate(carried)], carried[-1]

    for length in (12, 48):
        first = [jnp.zeros(8)] * length
        _, found, _ = recognised(lambda x, first=first: jax.lax.scan(step, first, x)[1], [jnp.ones((16, 8))])
        assert found["recurrence"] == 1
    assert count[48] < 4.2 * count[12]
