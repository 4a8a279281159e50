"""Sites are selected by their place in the source code: file, line, function, named scope."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autopallas
from autopallas.errors import OptionError, RequirementError
from autopallas.options import options, resolve
from autopallas.place_selectors import Frame, Places, selector_of
from autopallas.report.terminal import summary


def attend(q, k, v):
    scores = q @ k.T / 8.0
    weights = jax.nn.softmax(scores)
    return weights @ v


compiled = jax.jit(attend)


def model(x):
    with jax.named_scope("encoder"):
        y = compiled(x, x, x)  # FIRST

    def layer(carried, _):
        with jax.named_scope("layer_0"):
            return attend(carried, carried, carried), None

    with jax.named_scope("decoder"):
        z, _ = jax.lax.scan(layer, y, None, length=2)  # SECOND
    return z + compiled(y, x, x)  # THIRD


X = jax.ShapeDtypeStruct((64, 16), jnp.float32)


def line(mark):
    with open(__file__, encoding="utf-8") as file:
        return 1 + next(i for i, text in enumerate(file) if text.rstrip().endswith(f"# {mark}"))


def verdicts(function=model, *arguments, **given):
    """Which of the sites are replaced, in order, and the reasons of the others."""
    optimized = autopallas.optimize(function, objective="always", strict=True, **given)
    sites = autopallas.explain(optimized, *(arguments or (X,))).sites
    return [site.verdict == "applied" for site in sites], {s.reason for s in sites if s.verdict == "kept"}


def test_without_selectors_all_sites_are_replaced():
    assert verdicts() == ([True] * 3, set())


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        ("test_places.py", [True, True, True]),
        ("tests/test_places.py", [True, True, True]),
        (__file__, [True, True, True]),
        ("*/test_*.py", [True, True, True]),
        ("other.py", [False, False, False]),
        ("st_places.py", [False, False, False]),
        ("FIRST", [True, False, False]),
        ("SECOND", [False, True, False]),
        ("THIRD", [False, False, True]),
        ("FIRST-SECOND", [True, True, False]),
        ("test_places.py:layer", [False, True, False]),
        ("test_places.py:model.<locals>.layer", [False, True, False]),
        ("function:lay*", [False, True, False]),
        ("function:attend", [True, True, True]),
        ("other.py:attend", [False, False, False]),
        ("scope:encoder", [True, False, False]),
        ("scope:decoder/layer_?", [False, True, False]),
        ("scope:layer_0", [False, True, False]),
        ("scope:code", [False, False, False]),
        ("scope:*code*", [True, True, False]),
    ],
)
def test_a_selector_selects_by_the_calls_that_led_to_a_site_and_by_its_scopes(selector, selected):
    if selector.isupper():
        selector = "test_places.py:" + "-".join(str(line(mark)) for mark in selector.split("-"))
    assert verdicts(deny=selector)[0] == [not own for own in selected]
    assert verdicts(only=[selector])[0] == selected


def test_any_line_of_a_site_selects_it_also_in_a_train_step():
    step = jax.grad(lambda x: jnp.sum(attend(x, x, x) ** 2))
    for number in range(attend.__code__.co_firstlineno + 1, attend.__code__.co_firstlineno + 4):
        assert verdicts(step, X, deny=f"test_places.py:{number}")[0] == [False]
    assert verdicts(step, X, deny=f"test_places.py:{attend.__code__.co_firstlineno + 20}")[0] == [True]


def test_the_report_says_what_denied_a_site_and_deny_wins_over_only():
    third = f"test_places.py:{line('THIRD')}"
    assert verdicts(only="test_places.py", deny=third) == ([True, True, False], {f"denied by {third}"})
    found, reasons = verdicts(only=third)
    assert (found, reasons) == ([False, False, True], {f"denied by its place, since only {third} is allowed"})


def test_the_report_names_places_that_are_no_sites():
    optimized = autopallas.optimize(model, deny=["scope:encoder", "other.py", "FIRST.py:3"], only="function:att*")
    report = autopallas.explain(optimized, X)
    assert report.notes == ("deny 'other.py' selects no site", "deny 'FIRST.py:3' selects no site")
    for text in (str(report), report.to_html(), summary([("model", report)])):
        assert "Without effect" in text
        assert "other.py" in text
    assert autopallas.explain(autopallas.optimize(model, only="function:attend"), X).notes == ()


def test_what_is_denied_adds_up_and_what_is_allowed_does_not(monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_DENY", "scope:encoder, other.py")
    monkeypatch.setenv("AUTOPALLAS_ONLY", "environment.py")
    assert resolve({}).only == ("environment.py",)
    with options(deny="block.py", only="block.py"), options(deny="inner.py"):
        resolved = resolve({"deny": ["function:f"], "only": "test_places.py"})
    assert resolved.deny == ("scope:encoder", "other.py", "block.py", "inner.py", "function:f")
    assert resolved.only == ("test_places.py",)
    assert verdicts(only=None)[0] == [False, True, True]


def test_a_site_that_is_asked_for_by_name_is_denied_all_the_same_and_is_missed_by_require():
    assert verdicts(implementation="xla", deny="scope:encoder")[0] == [False, True, True]
    with pytest.raises(RequirementError, match="denied by scope:encoder"):
        verdicts(require={"attention": 3}, deny="scope:encoder")


def test_nothing_is_moved_at_a_place_that_is_denied_while_other_sites_are_replaced():
    """Rows of logits are otherwise selected before the product."""

    def loss(x, w):
        logits = (attend(x, x, x) @ w)[:-1]
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(63), 0])  # LOSS

    w = jax.ShapeDtypeStruct((16, 100), jnp.float32)
    optimized = autopallas.optimize(loss, objective="always", strict=True, deny=f"test_places.py:{line('LOSS')}")
    products = [e.outvars[0].aval.shape for e in optimized.trace(X, w).jaxpr.eqns if e.primitive.name == "dot_general"]
    assert products == [(64, 100)]
    assert optimized.report().counts() == {"attention": 1}


@pytest.mark.parametrize("selectors", [{"deny": "scope:second"}, {"only": "scope:first"}, {"deny": "scope:first"}])
def test_a_value_that_is_computed_at_two_places_is_denied_at_both(selectors):
    def function(x):
        with jax.named_scope("first"):
            y = attend(x, x, x)
        with jax.named_scope("second"):
            return y, attend(x, x, x)

    assert verdicts(function)[0] == [True]
    assert verdicts(function, **selectors)[0] == [False]


def test_what_a_checkpoint_computes_again_is_at_its_own_place():
    def gradient(x):
        def loss(x):
            with jax.named_scope("layer"):
                return jnp.sum(jnp.tanh(jax.checkpoint(lambda x: jnp.tanh(attend(x, x, x)))(x)))

        return jax.grad(loss)(x)

    for selectors in ({"only": "scope:layer"}, {"only": "function:attend"}, {"only": "test_places.py"}):
        assert verdicts(gradient, **selectors)[0] == [True]


def test_results_are_those_of_the_program_as_it_is_where_all_is_denied():
    x = jax.random.normal(jax.random.key(0), X.shape)
    optimized = autopallas.optimize(model, objective="always", deny="function:attend")
    assert (optimized(x) == jax.jit(model)(x)).all()


@pytest.mark.parametrize("text", ["attend", "", "model.py:", "model.py:9-3", "model.py:0", "scope:", "function:", 3])
def test_a_text_that_selects_no_place_is_refused_with_the_forms(monkeypatch, text):
    for name in ("only", "deny"):
        with pytest.raises(OptionError, match=r"selects no place.*FILE:FIRST-LAST"):
            resolve({name: [text]})
    if text and isinstance(text, str):
        monkeypatch.setenv("AUTOPALLAS_DENY", text)
        with pytest.raises(OptionError, match="AUTOPALLAS_DENY"):
            resolve({})


def test_no_place_at_all_is_not_taken_for_everywhere():
    for nowhere in ([], ()):
        with pytest.raises(OptionError, match=r"option only is .*at least one place"):
            resolve({"only": nowhere})
    assert resolve({"deny": []}).deny == ()


@pytest.mark.parametrize("value", [3, {"model.py": 3}, b"model.py"])
def test_something_else_than_places_is_refused(value):
    with pytest.raises(OptionError, match=r"option deny is .*FILE"):
        resolve({"deny": value})


@pytest.mark.parametrize("path", ["C:\\work\\model.py", "/work/model.py", "model.py"])
def test_paths_of_every_system_end_alike(path):
    places = Places(frozenset({Frame(path, 94, "Block.__call__")}), frozenset())
    assert selector_of("model.py:94").selects(places)
    assert selector_of("model.py:__call__").selects(places)
    assert selector_of("model.py:Block.*").selects(places)
    assert not selector_of("model.py:call").selects(places)
