"""The report's page, in a headless Chromium: it renders, folds and filters, and nothing in it can run or load."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape

import pytest

from autopallas.report import Failure, NearMiss, Report, Site, html
from autopallas.report.records import Pass

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

TILES = {"rows": 256, "columns": 256, "states": ["1000", "2100", "2210", "2221"]}
APPLIED = Site(
    op="attention",
    location="model.py:41 (attend)",
    path="scan",
    direction="forward+backward",
    verdict="applied",
    reason="measured: 2.57x the original's speed",
    implementation="xla",
    block_sizes={"query_block": 256, "key_block": 256},
    block_sizes_from="table",
    measured={
        "kernel_us": 10500.0,
        "original_us": 27000.0,
        "kernel_bytes": 2**20,
        "original_bytes": 2**24,
        "evidence": "measured",
    },
    spec={"tiles": TILES, "mask_class": "causal"},
    spec_line="attention B=1 N=4 T=1024 S=1024 D=64 float32, causal mask",
    original="{ lambda ; a:f32[]. let b:f32[] = exp a in (b,) }",
    replacement="attention.xla[query_block=256] (f32[]) -> (f32[])",
)
KEPT = Site("cross_entropy", "model.py:60 (loss)", "", "forward", "kept", "nothing was measured")
MISS = NearMiss("attention", "model.py:90 (pool)", "dropout is active on the probabilities", "Set its rate to 0.")
REPORT = Report(
    sites=(APPLIED, KEPT, APPLIED),
    near_misses=(MISS, MISS),
    failures=(Failure("plan", "TypeError: unhashable", "attention", "model.py:41 (attend)"),),
    platform="cpu",
    device_kind="cpu",
    versions={"jax": "0.12.0"},
)


def browse(tmp_path, page, script=None, size="1280,1000"):
    """(what ``script`` returns, the messages of the console), from a browser that shows the page."""
    if script is not None:
        policy, page = re.subn(r"script-src 'sha256-[^']+'", "script-src 'unsafe-inline'", page)[::-1]
        assert policy == 1
        harness = f"<script>document.body.dataset.result = JSON.stringify((() => {{ {script} }})())</script>"
        page = page.replace("</body>", f"{harness}</body>")
    path = tmp_path / "page.html"
    path.write_text(page, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={size}"]
    command = [CHROMIUM, *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    console = [line for line in shown.stderr.splitlines() if ":CONSOLE" in line]
    if script is None:
        return shown.stdout, console
    result = re.search(r'data-result="([^"]*)"', shown.stdout)
    assert result, shown.stdout[-2000:]
    return json.loads(unescape(result[1])), console


VISIBLE = "const visible = () => [...document.querySelectorAll('details.item')].filter((i) => !i.hidden).length;"
CLICK = "const click = (name) => [...document.querySelectorAll('button')].find((b) => b.textContent === name).click();"


@needs_chromium
def test_its_own_script_runs_under_its_own_policy_and_the_console_stays_empty(tmp_path):
    dom, console = browse(tmp_path, html.page([("step", REPORT)]))
    assert console == []
    assert re.search(r'<div class="filters">', dom), "the script has made the filters visible"


@needs_chromium
def test_filters_show_what_they_name_and_items_fold_and_unfold_together(tmp_path):
    script = f"""{VISIBLE} {CLICK}
        const open = () => [...document.querySelectorAll("details.item")].filter((i) => i.open).length;
        const folded = [open()];
        click("Unfold all"); folded.push(open());
        document.querySelector(".fold").click(); folded.push(open());
        const counts = [visible()];
        for (const name of ["Replaced 2", "Replaced 2", "Near misses 2", "attention", "Near misses 2"])
          {{ click(name); counts.push(visible()); }}
        click("attention");
        const search = document.querySelector("input");
        const heading = document.querySelector("h3[data-kind=miss]");
        for (const words of ["LOSS nothing", "no such text", ""]) {{
          search.value = words;
          search.dispatchEvent(new Event("input"));
          counts.push(visible());
          counts.push(!heading.hidden, !document.querySelector(".nothing-matches").hidden);
        }}
        return [folded, counts];"""
    (folded, counts), console = browse(tmp_path, html.page([("step", REPORT)]), script)
    assert folded == [3, 4, 0]
    # 4 items: a replaced site (twice), a kept one, a near miss (twice), a failure of attention.
    assert counts[:6] == [4, 1, 4, 1, 1, 3]
    assert counts[6:] == [1, False, False, 0, False, True, 4, True, False]
    assert console == []


@needs_chromium
@pytest.mark.parametrize("size", ["1280,1000", "500,900"])
def test_nothing_runs_out_of_the_window_and_the_drawings_have_a_size(tmp_path, size):
    long = Site("attention", "x" * 300 + ".py:3 (f)", "", "forward", "kept", "why " * 80 + "y" * 300)
    script = """
        const box = (name) => document.querySelector(name).getBoundingClientRect();
        const over = document.documentElement.scrollWidth - document.documentElement.clientWidth;
        const bars = [...document.querySelectorAll(".measured rect.original, .measured rect.kernel")]
          .map((bar) => bar.getBoundingClientRect().width);
        return [over, box("svg.tiles").width, box("svg.tiles").height, ...bars];"""
    page = html.page([("step", Report(sites=(APPLIED, long), platform="cpu"))])
    (over, width, height, *bars), _ = browse(tmp_path, page, script, size)
    assert over <= 0
    assert width > 100
    assert height > 100
    assert bars[1] / bars[0] == pytest.approx(10.5 / 27, rel=0.02)
    assert bars[3] / bars[2] == pytest.approx(1 / 16, rel=0.02)


HOSTILE = "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">'\"&amp;<b>"


def hostile():
    site = Site(
        op=HOSTILE,
        location=f"{HOSTILE}.py:3 ({HOSTILE})",
        path=HOSTILE,
        direction="forward",
        verdict="applied",
        reason=HOSTILE,
        implementation=HOSTILE,
        block_sizes={HOSTILE: 3},
        measured={"evidence": HOSTILE, "kernel_us": 1.0, "original_us": 2.0},
        attempts=((HOSTILE, HOSTILE, HOSTILE),),
        assumptions=(HOSTILE,),
        spec={"tiles": {"states": [HOSTILE, HOSTILE]}, "mask_class": HOSTILE},
        spec_line=HOSTILE,
        original=HOSTILE,
        replacement=HOSTILE,
    )
    return Report(
        sites=(site, KEPT),
        near_misses=(NearMiss(HOSTILE, HOSTILE, HOSTILE, HOSTILE),),
        failures=(Failure(HOSTILE, HOSTILE, HOSTILE, HOSTILE),),
        platform=HOSTILE,
        device_kind=HOSTILE,
        versions={HOSTILE: HOSTILE},
    )


@needs_chromium
def test_hostile_names_are_text(tmp_path):
    page = html.page([(HOSTILE, hostile())])
    script = f"""{VISIBLE}
        const inserted = document.querySelectorAll("main img, main script, main b:not(.bar b)").length;
        const button = [...document.querySelectorAll("button")].find((b) => b.textContent.includes("onerror"));
        button.click();
        return [document.title, inserted, document.querySelectorAll("script").length, visible()];"""
    (title, inserted, scripts, visible), console = browse(tmp_path, page, script)
    assert (title, inserted, scripts) == ("autopallas report", 0, 2), "2: the page's script and the test's"
    assert visible == 3
    assert console == []


def test_hostile_names_are_escaped_in_the_text_of_the_page():
    page = html.page([(HOSTILE, hostile())])
    assert "<img" not in page
    assert page.count("<script>") == page.count("</script>") == 1
    assert re.search(r"(src|href)=\"?(https?:|//)", page) is None


def test_the_page_shows_the_passes_and_their_times():
    passes = (Pass("number values", "graph", 0.0125, 40, 0), Pass("find <sites>", "patterns", 0.25, 40, 2))
    found = html.page([("", replace(REPORT, trace=passes))])
    assert "Passes over the program, 262.5 ms" in found
    assert "<tr><td>number values</td><td>12.5</td><td>40</td><td>0</td></tr>" in found
    assert "find &lt;sites&gt;" in found
    assert "Passes over the program" not in html.page([("", replace(REPORT, trace=()))])


def test_the_page_shows_the_advice_of_a_near_miss():
    assert '<p class="hint">Set its rate to 0.</p>' in html.page([("", REPORT)])
    assert 'class="hint"' not in html.page([("", Report(near_misses=(replace(MISS, advice=""),)))])


def test_figures_of_a_table_are_told_from_the_readers_own():
    assert "measured, at one size of this bucket, not in your program" in html.page([("", REPORT)])


def test_the_source_line_is_shown_where_the_file_is_at_hand(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("one\ntwo\nthree <b>\nfour\n\n\n")
    site = Site("attention", f"{path}:3 (f)", "", "forward", "kept", "why")
    page = html.page([("", Report(sites=(site,)))])
    assert "<span class=here><i>3</i>three &lt;b&gt;</span><span><i>4</i>four</span></pre>" in page
    path.rename(tmp_path / "model.txt")
    for location in (f"{path}:3 (f)", f"{tmp_path / 'model.txt'}:3 (f)", "/dev/zero.py:1 (f)", f"{tmp_path}:1 (f)"):
        site = Site("attention", location, "", "forward", "kept", "why")
        assert 'class="source"' not in html.page([("", Report(sites=(site,)))])


@pytest.mark.parametrize("states", [None, "12", [], [3], ["12", "1"], [""]])
def test_a_picture_that_is_none_is_left_out(states):
    site = Site("attention", "m.py:3 (f)", "", "forward", "kept", "why", spec={"tiles": {"states": states}})
    assert "<main>" in html.page([("", Report(sites=(site,)))])


def test_notebooks_get_the_page_in_a_frame():
    shown = REPORT._repr_html_()
    assert shown.startswith("<iframe")
    assert 'sandbox="allow-scripts"' in shown
    inside = unescape(re.search(r'srcdoc="([^"]*)"', shown)[1])
    assert inside == html.page([("", REPORT)])
