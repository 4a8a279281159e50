"""The report: its records, its JSON, and its views."""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import autopallas
from autopallas import jaxprs
from autopallas.places import users_place
from autopallas.report import Failure, NearMiss, Report, Site, at_exit
from autopallas.report.terminal import summary
from autopallas.report.text import site_rows

ROOT = Path(__file__).parent.parent

APPLIED = Site(
    op="attention",
    location="model.py:41 (attend)",
    path="scan > checkpoint",
    direction="forward+backward",
    verdict="applied",
    reason="measured 2.6 times as fast as the original in the bucket of 1024 to 2048 queries on this device",
    implementation="xla",
    block_sizes={"query_block": 256, "key_block": 128},
    block_sizes_from="table",
    measured={"kernel_us": 10.5, "original_us": 27.0, "versions": {"jax": "0.12"}},
    attempts=(("cudnn", "compile", "RuntimeError: no such library"),),
    assumptions=("values are finite",),
    spec={"query_length": 1024, "sides": [{"varies": [True, False]}]},
    spec_line="attention B=1 N=4 T=1024 S=1024 D=64 float32, causal mask",
    original="{ lambda ; a:f32[]. let b:f32[] = exp a in (b,) }",
    replacement="{ lambda ; a:f32[]. let b:f32[] = attention a in (b,) }",
)
KEPT = Site("cross_entropy", "model.py:60 (loss)", "", "forward", "kept", "no measured row for this device")
MISS = NearMiss("attention", "model.py:90 (pool)", "the probabilities are also returned", "Return them elsewhere.")
REPORT = Report(
    sites=(APPLIED, KEPT, APPLIED),
    near_misses=(MISS, MISS, NearMiss("attention", "model.py:99 (other)", MISS.reason)),
    failures=(Failure("plan", "TypeError: unhashable", "attention", "model.py:41 (attend)"),),
    tuning={"searches": 1, "cache_hits": 2},
    platform="cpu",
    device_kind="cpu",
    versions={"jax": "0.12.0", "autopallas": "0.1.0"},
    notes=("deny 'other.py' selects no site",),
)


def test_counts_are_of_applied_sites_only():
    assert REPORT.counts() == {"attention": 2}
    assert REPORT.counts()["cross_entropy"] == 0
    assert Report().counts() == {}


def test_the_records_are_frozen_and_can_be_pickled():
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.sites[0].verdict = "kept"
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT


@pytest.mark.parametrize("report", [Report(), REPORT], ids=["empty", "full"])
def test_json_gives_the_same_report_back(report):
    assert Report.from_json(report.to_json()) == report
    assert Report.from_json(report.to_json()).to_json() == report.to_json()


def test_json_holds_every_field_and_the_schema_version():
    data = json.loads(REPORT.to_json())
    assert set(data) == {field.name for field in dataclasses.fields(Report)}
    assert set(data["sites"][0]) == {field.name for field in dataclasses.fields(Site)}
    assert data["schema_version"] == 8


def test_a_report_of_an_earlier_version_has_near_misses_without_advice():
    data = REPORT.to_dict() | {"schema_version": 2}
    for miss in data["near_misses"]:
        del miss["advice"]
    report = Report.from_dict(data)
    assert [miss.advice for miss in report.near_misses] == ["", "", ""]
    assert [miss.reason for miss in report.near_misses] == [miss.reason for miss in REPORT.near_misses]


def test_numbers_that_json_lacks_become_text():
    site = dataclasses.replace(KEPT, spec={"fill": float("-inf"), "scale": 0.5})
    assert json.loads(Report(sites=(site,)).to_json())["sites"][0]["spec"] == {"fill": "-inf", "scale": 0.5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(sites={}), "report.sites is {}, not a list"),
        (lambda d: d["sites"][0].update(verdict="maybe"), r"report.sites\[0\].verdict is 'maybe'"),
        (lambda d: d["sites"][0].update(op=3), r"report.sites\[0\].op is 3, not a string"),
        (lambda d: d["sites"][0].pop("reason"), r"report.sites\[0\] lacks reason"),
        (lambda d: d["sites"][0].update(attempts=[["xla"]]), r"attempts\[0\] is .* not a list of 3"),
        (lambda d: d["sites"][0].update(block_sizes={"query_block": 1.5}), r"query_block'\] is 1.5"),
        (lambda d: d.update(surprise=1), "unknown 'surprise'"),
        (lambda d: d.update(schema_version=99), "schema version 99"),
        (lambda d: d["near_misses"].append(None), r"near_misses\[3\] is None, not an object"),
    ],
)
def test_what_is_no_report_is_refused_with_the_field(change, message):
    data = json.loads(REPORT.to_json())
    change(data)
    with pytest.raises(ValueError, match=message):
        Report.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_text_that_is_no_report_is_a_value_error(text):
    with pytest.raises(ValueError, match="report"):
        Report.from_json(text)


def test_block_sizes_of_every_kind_survive_json():
    site = dataclasses.replace(
        REPORT.sites[0], block_sizes={"block": 8, "transposed": True, "order": "rows first", "last": False}
    )
    report = Report(sites=(site,))
    assert Report.from_json(report.to_json()) == report


def test_a_site_with_a_time_of_nothing_has_a_page():
    """Where a saved report was edited, or a clock was too coarse."""
    measured = {"kernel_us": 0, "original_us": 2.0, "kernel_bytes": 0, "original_bytes": 8}
    page = Report(sites=(dataclasses.replace(REPORT.sites[0], verdict="applied", measured=measured),)).to_html()
    assert "<small>as fast" not in page


def test_the_text_says_for_each_site_what_where_and_why():
    shown = str(REPORT)
    flat = " ".join(shown.split())
    assert flat.startswith("autopallas: 2 sites replaced, 1 kept, 3 near misses, 1 failure")
    for part in (
        "[1, 3] attention at model.py:41 (attend), 2 sites",
        "replaced, forward and backward",
        APPLIED.reason,
        "scan > checkpoint",
        "query_block=256 key_block=128 (from the tuned table)",
        APPLIED.spec_line,
        "cudnn, failed at compile: RuntimeError: no such library",
        "[2] cross_entropy at model.py:60 (loss)",
        "kept: recognised, but the original code runs",
        "TypeError: unhashable",
    ):
        assert part in flat, part


def test_the_layers_of_an_unrolled_model_are_told_once_and_others_apart():
    other = dataclasses.replace(APPLIED, reason="another one")
    shown = str(Report(sites=(APPLIED, APPLIED, APPLIED, other, APPLIED)))
    assert "[1-3, 5] attention at model.py:41 (attend), 4 sites" in shown
    assert "[4] attention at model.py:41 (attend)\n" in shown


def test_near_misses_with_the_same_reason_are_told_once():
    shown = str(REPORT)
    assert shown.count(MISS.reason) == 1
    assert "at model.py:90 (pool), 2 times" in shown
    assert "at model.py:99 (other)" in shown


def test_the_text_says_what_to_write_in_the_place_of_a_near_miss():
    lines = [line.strip() for line in str(REPORT).splitlines()]
    assert lines.count(MISS.advice) == 1
    assert lines[lines.index(MISS.advice) - 1] == "at model.py:90 (pool), 2 times"


def test_text_and_table_say_which_site_a_failure_concerns():
    for shown in (str(REPORT), summary([("", REPORT)])):
        assert "plan, attention at model.py:41 (attend): TypeError: unhashable" in " ".join(shown.split())


def test_the_text_fits_80_columns_whatever_it_holds():
    long = dataclasses.replace(
        APPLIED, location="/very" * 40 + "/model.py:1 (f)", reason="word " * 100, path="scan > " * 30
    )
    report = dataclasses.replace(
        REPORT,
        sites=(long,),
        near_misses=(NearMiss("attention", "x" * 200, "y" * 200, "z" * 200),),
        versions={str(i): "1.0" for i in range(30)},
    )
    assert max(map(len, str(report).splitlines())) <= 80


def test_the_text_carries_no_control_characters_to_the_terminal():
    report = Report(failures=(Failure("plan", "\x1b[31mred\x07"),))
    assert "\x1b" not in str(report)
    assert "\x07" not in str(report)


def test_an_empty_report_says_what_that_means():
    assert "traced yet" in str(Report())
    assert "runs as it was written" in " ".join(str(Report(platform="cpu")).split())


def test_html_escapes_every_text_and_loads_nothing():
    hostile = "<script>alert('&')</script>"
    site = dataclasses.replace(
        APPLIED,
        op=hostile,
        location=hostile,
        path=hostile,
        reason=hostile,
        implementation=hostile,
        block_sizes={hostile: 1},
        attempts=((hostile, hostile, hostile),),
        assumptions=(hostile,),
        spec_line=hostile,
        original=hostile,
        replacement=hostile,
    )
    page = Report(
        sites=(site,),
        near_misses=(NearMiss(hostile, hostile, hostile, hostile),),
        failures=(Failure(hostile, hostile, hostile, hostile),),
        platform=hostile,
        versions={hostile: hostile},
    ).to_html()
    assert page.count("<script") == 1, "the page's own, which a policy names by its hash"
    assert "&lt;script&gt;" in page
    assert "://" not in page


PROGRAM = """
import json, os, sys
from autopallas.report import Report, Site, at_exit

def work(destination):
    os.environ["AUTOPALLAS_REPORT"] = destination
    for name in ("first", "second"):
        site = Site("attention", name + ".py:1 (f)", "", "forward", "applied", "faster")
        at_exit.record(name, Report((site,), platform="cpu"))
    os.chdir("/")

for number, destination in enumerate(sys.argv[1:]):  # one process for each, of which none has to import again
    child = os.fork()
    if not child:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        work(destination)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """(standard output, standard error, folder) of a process that ended, for each AUTOPALLAS_REPORT."""
    folder = tmp_path_factory.mktemp("ended")
    destinations = ["1", "0", *(f"reports/report{s}" for s in (".json", ".html", ".txt")), "absent/report.json"]
    (folder / "reports").mkdir()
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *destinations]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=folder, check=True)

    def read(number, name):
        return (folder / f"{number}.{name}").read_text()

    return {d: (read(n, "out"), read(n, "err"), folder) for n, d in enumerate(destinations)}


def test_autopallas_report_prints_every_report_to_standard_error(ended):
    out, err, _ = ended["1"]
    assert out == ""
    assert "== first ==" in err
    assert "second.py:1 (f)" in err
    assert ended["0"][:2] == ("", "")


@pytest.mark.parametrize("suffix", [".json", ".html", ".txt"])
def test_autopallas_report_writes_every_report_to_the_path(ended, suffix):
    out, err, folder = ended[f"reports/report{suffix}"]
    assert (out, err) == ("", "")
    assert len(list((folder / "reports").iterdir())) == 3, "nothing unfinished is left beside them"
    content = (folder / "reports" / f"report{suffix}").read_text()
    if suffix == ".json":
        assert [Report.from_dict(item).counts() for item in json.loads(content)] == [{"attention": 1}] * 2
    else:
        assert "first.py:1 (f)" in content
        assert "second.py:1 (f)" in content


def test_a_path_that_cannot_be_written_costs_one_line(ended):
    _, err, _ = ended["absent/report.json"]
    assert len(err.strip().splitlines()) == 1
    assert "cannot be written" in err


def test_where_the_report_was_written_is_told_on_a_terminal_alone(tmp_path, monkeypatch, capsys):
    log = at_exit._Log()
    monkeypatch.chdir(tmp_path)
    log.begin("report.txt")
    atexit.unregister(log.flush)
    log.flush()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log.flush()
    assert capsys.readouterr().err == "autopallas: wrote report.txt\n"


def test_the_text_tells_what_it_took_to_find_block_sizes():
    assert "search" not in str(Report(platform="cpu", device_kind="cpu"))
    told = str(Report(platform="cpu", device_kind="cpu", tuning={"searches": 1, "cache_hits": 2}))
    assert "1 search for block sizes, 2 answers from the cache on disk" in told


def test_a_site_in_an_installed_package_is_placed_at_the_users_line(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages" / "layers_of_others"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "import jax\n\n\ndef attend(q, k, v):\n    return jax.nn.softmax(q @ k.T, -1) @ v\n"
    )
    monkeypatch.syspath_prepend(folder.parent)
    attend = importlib.import_module("layers_of_others").attend

    def model(q, k, v):
        return attend(q, k, v)

    q = jnp.ones((4, 8))
    (site,) = autopallas.explain(model, q, q, q).sites
    place, within = site.location.split(", in ")
    assert place.startswith(f"{__file__}:")
    assert place.endswith(".model)")
    assert within == "layers_of_others/__init__.py:5 (attend)"
    assert users_place(site.location) == place


def test_a_site_of_nothing_but_installed_packages_has_their_line(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages" / "programs_of_others"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("def f(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(folder.parent)
    f = importlib.import_module("programs_of_others").f
    with ThreadPoolExecutor(1) as pool:  # no line of this file leads there
        (equation,) = pool.submit(jax.make_jaxpr(f), 1.0).result().eqns
    assert jaxprs.location(equation) == f"{folder / '__init__.py'}:2 (f)"


def test_a_site_without_a_kernel_for_the_platform_names_no_candidate():
    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    (site,) = autopallas.explain(norm, jax.ShapeDtypeStruct((300, 256), jnp.float32)).sites
    assert (site.op, site.verdict, site.implementation) == ("rms_norm", "kept", None)
    assert "there is no kernel of it for this platform (cpu)" in site.reason
    assert "candidate" not in dict(site_rows(site))
