"""Sites as data: what a report holds is enough to tune for, and nothing in it is believed."""

from __future__ import annotations

import copy
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import CPU, attend, gradient, match_of, qkv
from support.tiers import examples
from test_tables import PLAIN

import autopallas
from autopallas.autotune.trial import Trial
from autopallas.report import Report
from autopallas.sites.encoding import EncodingError, encoded, saved_site
from autopallas.tuning.key import key_of
from autopallas.workbench.cases import Case
from autopallas.workbench.cases import match_of as match_of_case

PADDED = Case("attention", "forward+backward", "bfloat16", "padded", (("B", 2), ("T", 64), ("N", 2), ("D", 16)))
BACKWARDS = [PADDED] + [Case(op, "forward+backward", c.dtype, c.mask, c.sizes) for op, c in PLAIN.items()]


@pytest.mark.parametrize("case", [*PLAIN.values(), *BACKWARDS], ids=str)
def test_a_site_comes_back_from_json_as_it_was(case):
    match = match_of_case(case)
    saved = saved_site(match.op, match.direction, json.loads(json.dumps(encoded(match))))
    assert [part.site for part in saved.passes] == [part.site for part in match.passes]
    assert encoded(saved) == encoded(match)
    assert key_of(saved, "xla", CPU) == key_of(match, "xla", CPU), "its result is found by the program"
    wanted = jax.eval_shape(Trial.of(match).original(), *Trial.of(match).arguments)
    assert jax.eval_shape(Trial.of(saved).original(), *Trial.of(saved).arguments) == wanted


def test_a_loss_with_two_heads_and_soft_labels_comes_back_too():
    def loss(x, w, y, u, q):
        own, other = jax.nn.log_softmax(x @ w), jax.nn.log_softmax(y @ u)
        return (jax.numpy.exp(other) * (other - own) - q * own).sum(-1).mean()

    types = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((6, 3), (3, 8), (6, 5), (5, 8), (6, 8))]
    match = match_of(jax.value_and_grad(loss, (0, 1, 2, 3, 4)), *types)
    saved = saved_site(match.op, match.direction, json.loads(json.dumps(encoded(match))))
    assert [part.site for part in saved.passes] == [part.site for part in match.passes]
    assert "D=3+5" in str(match.spec)
    trial, again = Trial.of(match), Trial.of(saved)
    found = again.kernel("xla", match.site.operation.implementation("xla").BlockSizes(4, 4))(*trial.arguments)
    for a, b, c in zip(found, again.original()(*trial.arguments), trial.original()(*trial.arguments), strict=True):
        np.testing.assert_allclose(a, c, atol=2e-5)
        np.testing.assert_allclose(b, c, atol=2e-5)


def test_what_stands_for_the_original_computes_the_same():
    match = match_of(gradient, *qkv(64, "float32"))
    saved = saved_site(match.op, match.direction, encoded(match))
    trial = Trial.of(match)
    for found, wanted in zip(
        Trial.of(saved).original()(*trial.arguments), trial.original()(*trial.arguments), strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=2e-5)  # float32, sums in another order


def test_a_report_holds_its_sites_through_json():
    report = autopallas.explain(attend, *qkv(64))
    again = Report.from_json(report.to_json())
    assert again == report
    (site,) = again.sites
    assert saved_site(site.op, site.direction, site.encoded).site == match_of(attend, *qkv(64)).site


def test_constants_that_json_lacks_are_kept():
    data = encoded(match_of(attend, *qkv(64)))
    assert {"float": "-inf"} in [i.get("value") for i in data["passes"][0]["site"]["score"]["inputs"]]


GOOD = encoded(match_of_case(PADDED))


def changed(path, value):
    data = copy.deepcopy(GOOD)
    place = data["passes"][0]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "no site"),
        ([], "no site"),
        ({"format": 0, "passes": []}, "no site"),
        ({"format": 1, "passes": []}, "no site in format 3"),
        ({"format": 3, "passes": []}, "no passes"),
        ({"format": 3, "passes": [3]}, "other fields"),
        (changed(("site",), 3), "no site of attention"),
        (changed(("site", "is"), "Popen"), "nothing in a site is called 'Popen'"),
        (changed(("site", "is"), "Operation"), "nothing in a site|other fields|no attention"),
        (changed(("site", "more"), 1), "other fields"),
        (changed(("site", "score_dtype"), {"dtype": "__class__"}), "no dtype"),
        (changed(("site", "score", "instructions", 0, "primitive"), {"primitive": "eval"}), "describes nothing"),
        (changed(("site", "score", "result"), 999), "no attention"),
        (changed(("site", "score"), {"enum": ["os", "system"]}), "describes nothing"),
        (changed(("site", "sizes"), [1]), "no attention"),
        (changed(("operands", 0), [[2**30, 2**30], "float32"]), "no shape"),
        (changed(("operands", 0), [[-1], "float32"]), "no shape"),
        (changed(("results", 0), [[3], "float32"]), "not what the site gives"),
        (changed(("gradients",), [77]), "gradients of operands"),
    ],
)
def test_what_describes_no_site_is_refused(data, reason):
    with pytest.raises(EncodingError, match=reason):
        saved_site("attention", "forward", data)


def test_another_operation_or_direction_is_refused():
    for op, direction in (("no_such", "forward"), ("cross_entropy", "forward"), ("attention", "sideways")):
        with pytest.raises(EncodingError):
            saved_site(op, direction, GOOD)


def leaves(data, path=()):
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, value in items:
        yield (*path, name)
        yield from leaves(value, (*path, name))


PLACES = sorted(leaves(GOOD["passes"][0]), key=str)
JUNK = st.one_of(st.none(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8), st.just([]), st.just({}))


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(PLACES), JUNK)
def test_damaged_data_are_refused_or_harmless(path, value):
    try:
        found = saved_site("attention", "forward", changed(path, value))
    except EncodingError:
        return
    hash(found.site)
