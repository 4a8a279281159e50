"""Near misses say what to write instead: every reason is raised with its advice, which reaches the report."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.nn import one_hot, softmax
from support.compare import optimized_like_a_user

import autopallas
from autopallas import patterns
from autopallas.patterns import advice as constants
from autopallas.patterns.match import Mismatch, NearMiss
from autopallas.report import Report
from autopallas.report.terminal import summary

NAMES = [info.name for info in pkgutil.walk_packages(patterns.__path__, f"{patterns.__name__}.")]
MODULES = [importlib.import_module(name) for name in NAMES]
TREES = [(module, ast.parse(Path(module.__file__).read_text())) for module in MODULES]
WITHOUT_ADVICE = {"str(out)": "the search ran out of steps, whatever the program's spelling is"}
"""Reasons for which there is nothing to say, as they stand in the source, and why there is nothing."""


def refusals():
    """The exceptions of patterns that are given a reason where they are raised."""
    todo, found = [Mismatch], set()
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if kind is Mismatch or "__init__" not in vars(kind):
            found.add(kind.__name__)
    return found


def calls(names):
    """(module, call) of each call of a function or a class that has one of the names."""
    for module, tree in TREES:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                yield module, node


def advice_of(call):
    return next((keyword.value for keyword in call.keywords if keyword.arg == "advice"), None)


def test_every_reason_is_raised_with_advice():
    raised = list(calls(refusals()))
    assert len(raised) > 150
    without = {ast.unparse(call.args[0]) for _, call in raised if advice_of(call) is None}
    assert without == WITHOUT_ADVICE.keys()


def test_advice_is_a_sentence_where_it_stands_in_the_source():
    told = [(module, value) for module, call in calls(refusals()) if (value := advice_of(call)) is not None]
    texts = {value.value for _, value in told if isinstance(value, ast.Constant)}
    texts |= {getattr(module, value.id, None) for module, value in told if isinstance(value, ast.Name)} - {None}
    assert len(texts) > 50
    assert [text for text in texts if not text.endswith(".") or not 30 < len(text) < 400] == []


def test_no_near_miss_is_made_without_its_advice():
    fields = list(NearMiss.__dataclass_fields__)
    made = [call for _, call in calls({"NearMiss"})]
    assert made
    assert [ast.unparse(call) for call in made if len(call.args) < len(fields) and advice_of(call) is None] == []


def test_every_shared_advice_is_given_somewhere():
    names = {name for name in vars(constants) if name.isupper()}
    nodes = (node for _, tree in TREES for node in ast.walk(tree))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assert names - read == set()


def test_a_shared_advice_has_a_name_of_its_own():
    tree = ast.parse(Path(constants.__file__).read_text())
    names = [target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    assert len(names) == len(set(names))


# --- The advice in a report ------------------------------------------------------------------------------------------

T, D, E = 6, 4, 3


def array(*shape):
    return jnp.sin(jnp.arange(float(jnp.prod(jnp.array(shape)))) + len(shape)).reshape(shape)


def probabilities_returned(q, k, v):
    p = softmax(q @ k.T)
    return p @ v, p


def masked_by_the_scores(q, k, v):
    s = q @ k.T
    return jnp.where(s > 0, softmax(s), 0) @ v


def values_of_the_query(q, k, v):
    return jnp.einsum("ts,tsd->td", softmax(q @ k.T), q[:, None] * v[None])


def epsilon(q, k, v):
    e = jnp.exp(q @ k.T - jnp.max(q @ k.T, axis=-1, keepdims=True))
    return e / (e.sum(-1, keepdims=True) + 1e-3 * jnp.abs(e).max(-1, keepdims=True)) @ v


def sorted_scores(q, k, v):
    return softmax(jnp.sort(q @ k.T, axis=-1)) @ v


def attend_with_a_rule(q, k, v):
    @jax.custom_jvp
    def rule(s):
        return softmax(s)

    rule.defjvp(lambda primals, tangents: (rule(*primals), 2.0 * tangents[0]))
    return rule(q @ k.T) @ v


def logits_returned(q, k, v):
    logits = q @ k.T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.arange(T)[:, None], -1).mean(), logits


def loss_in_a_loop(q, k, v):
    logits = q @ k.T

    def step(total, i):
        return total - jax.nn.log_softmax(logits)[jnp.arange(T), jnp.arange(T)].mean() * i, None

    return jax.lax.scan(step, 0.0, jnp.arange(3.0))[0]


def experts_of_every_weight(x, w, gate):
    return jnp.einsum("te,tef->tf", softmax(x @ gate), jnp.einsum("td,edf->tef", x, w))


def experts_through_a_sort(x, w, gate):
    chosen = one_hot(jnp.argmax(x @ gate, -1), E)
    return jnp.einsum("te,tef->tf", chosen, jnp.sort(jnp.einsum("td,edf->tef", x, w), axis=-1))


ATTENTION = (array(T, D), array(T, D) + 1, array(T, D) - 1)
MIXTURE = (array(T, D), array(E, D, D), array(D, E))
CASES = [
    (probabilities_returned, ATTENTION, "from a separate function"),
    (masked_by_the_scores, ATTENTION, "Mask the scores, before the softmax, with -inf"),
    (values_of_the_query, ATTENTION, "belongs after the second product"),
    (epsilon, ATTENTION, "jax.nn.softmax"),
    (sorted_scores, ATTENTION, "element by element"),
    (attend_with_a_rule, ATTENTION, "custom_jvp or custom_vjp"),
    (logits_returned, ATTENTION, "from a separate function"),
    (loss_in_a_loop, ATTENTION, "without the loop"),
    (experts_of_every_weight, MIXTURE, "choose with top_k"),
    (experts_through_a_sort, MIXTURE, "Between the products of an expert"),
]


@pytest.mark.parametrize(("function", "arguments", "words"), CASES, ids=[function.__name__ for function, *_ in CASES])
def test_advice_is_about_its_reason_and_reaches_every_view_of_the_report(function, arguments, words):
    report = autopallas.explain(optimized_like_a_user(function), *arguments)
    (miss,) = report.near_misses
    assert words in miss.advice, miss
    assert Report.from_json(report.to_json()) == report
    assert words in report.to_html().replace("&#x27;", "'")
    assert words in " ".join(summary([("", report)]).split())


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", ["scan", "fori_loop"])
def test_attention_that_goes_through_blocks_of_keys_in_a_loop_says_so(kind, trained):
    def attend(q, k, v):
        def step(carry, block):
            largest, total, result = carry
            scores = q @ block[0].mT
            higher = jnp.maximum(largest, scores.max(-1))
            weights, rest = jnp.exp(scores - higher[:, None]), jnp.exp(largest - higher)
            result = result * rest[:, None] + weights @ block[1]
            return (higher, total * rest + weights.sum(-1), result), None

        first = jnp.full(len(q), -jnp.inf), jnp.zeros(len(q)), jnp.zeros((len(q), v.shape[-1]))
        if kind == "scan":
            _, total, result = jax.lax.scan(step, first, (k, v))[0]
        else:
            _, total, result = jax.lax.fori_loop(0, len(k), lambda i, carry: step(carry, (k[i], v[i]))[0], first)
        return result / total[:, None]

    def program(*operands):
        if trained:
            return jax.grad(lambda *own: jnp.sin(attend(*own)).sum(), (0, 1, 2))(*operands)
        return attend(*operands)

    report = autopallas.explain(optimized_like_a_user(program), jnp.ones((6, 4)), *[jnp.ones((3, 5, 4))] * 2)
    reasons = [miss.reason for miss in report.near_misses if miss.op == "attention"]
    assert reasons == ["the program goes through the keys block by block already, with a running maximum"]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("each", [jax.lax.map, lambda f, blocks: jax.vmap(f)(blocks)], ids=["map", "vmap"])
@pytest.mark.parametrize("stopped", [False, True])
def test_blocks_of_keys_that_are_joined_after_a_map_are_told(trained, each, stopped):
    def attend(q, k, v):
        @jax.checkpoint
        def summary(block):
            scores = q @ block[0].mT
            largest = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - (jax.lax.stop_gradient(largest) if stopped else largest))
            return weights @ block[1], weights.sum(-1, keepdims=True), largest

        results, totals, largest = each(summary, (k, v))
        factors = jnp.exp(largest - largest.max(0, keepdims=True))
        return (results * factors).sum(0) / (totals * factors).sum(0)

    def program(*operands):
        if trained:
            return jax.grad(lambda *own: jnp.sin(attend(*own)).sum(), (0, 1, 2))(*operands)
        return attend(*operands)

    report = autopallas.explain(optimized_like_a_user(program), jnp.ones((6, 4)), *[jnp.ones((3, 5, 4))] * 2)
    reasons = [miss.reason for miss in report.near_misses]
    assert reasons == [
        "the program goes through the keys block by block already, and joins the blocks' maxima and sums afterwards"
    ]


def test_predicted_weights_of_gathered_values_are_no_loss():
    """The gradient of the gathered values, which the weights multiply, is added up by numbers that are no labels."""

    def sampled(w, queries, image, places):  # as of deformable attention: a few points for each query
        weights = softmax((queries @ w).reshape(2, 6, 2, 3))
        return jnp.sin(jnp.einsum("bqhpd,bqhp->bqhd", image[places], weights)).sum()

    arguments = jnp.ones((8, 6)), jnp.ones((2, 6, 8)), jnp.ones((9, 4)), jnp.zeros((2, 6, 2, 3), int)
    report = autopallas.explain(optimized_like_a_user(jax.grad(sampled, (0, 1, 2))), *arguments)
    assert [miss.op for miss in report.near_misses] == ["attention"]


@pytest.mark.parametrize("apart", [False, True])
def test_scores_and_values_of_one_product_are_found_once_each_has_its_own(apart):
    """Softmaxes of features, as in efficient attention, are attention with the columns of a matrix as queries."""

    def context(x, w):
        k, v = (x @ w[:, :D], x @ w[:, D:]) if apart else jnp.split(x @ w, 2, -1)
        return jnp.einsum("btd,bte->bde", softmax(k, -2), v)

    report = autopallas.explain(optimized_like_a_user(context), array(2, T, D), array(D, 2 * D))
    if apart:
        assert [site.op for site in report.sites if site.op == "attention"] == ["attention"]
        return
    (miss,) = report.near_misses
    assert miss.op == "attention"
    assert "parts of one product" in miss.reason
    assert "by a product of its own" in miss.advice
