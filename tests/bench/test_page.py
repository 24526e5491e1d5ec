"""The HTML page of results: what it shows, and how a browser shows it."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.publish.steps import RESULTS
from sdfastgn.bench import page
from sdfastgn.bench.documents import UNAVAILABLE, WRONG
from sdfastgn.bench.kernel_categories import CATEGORIES, GAPS
from sdfastgn.bench.tables.results import Result, cases_of
from tests.bench.tables.cases import ENVIRONMENT, row, save
from tests.browser import open_at, tables_out_of_sight
from tests.command_line import invoke

LONG_NAME = "a_kernel_whose_reason_goes_on_and_on_" * 8
# As wide as a small phone, and as a desk.
WIDTHS = (360, 1280)


def profile(scale: float) -> dict[str, Any]:
    categories = dict.fromkeys((*CATEGORIES, GAPS), scale)
    times = dict.fromkeys(("total_ms", "timed_ms", "floor_ms", "call_gaps_ms"), 8 * scale)
    return {"source": "call", "categories": categories, **times, "kernels": 9, "top": [], "other": []}


def result_at(path: Path, **environment: Any) -> Result:
    rows = [
        row("eager", 25.0, graph_ms=12.0, profile=profile(3.0), psnr_fp32_db=52.0, ssim_fp32=0.99912),
        row("sdfastgn", 5.0, profile=profile(1.0), psnr_fp32_db=54.0, ssim_fp32=0.99934, psnr_db=51.0),
        row("compile", status=WRONG, reason=f"<script>alert(1)</script> {LONG_NAME}"),
    ]
    save(path.parent, path.name, "profile", rows, environment={**ENVIRONMENT, **environment})
    return Result(path.name, json.loads(path.read_text()))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Two results of two machines, the first with images, on one page."""
    first, second = result_at(tmp_path / "a.json"), result_at(tmp_path / "b.json", gpu="NVIDIA L4")
    truth = np.random.default_rng(0).uniform(0.2, 0.8, (64, 48, 3))
    images = {"fp32": truth, "eager": truth + 0.01, "sdfastgn": truth - 0.005}
    for title, rows in cases_of(first).items():
        first.figures[title] = page.figures(rows, images)
    page.write_page(tmp_path / "page.html", [first, second])
    return tmp_path / "page.html"


def test_the_page_holds_what_was_measured(written):
    text = written.read_text(encoding="utf-8")
    for words in (
        "25 ms, 1.00x",
        "eager (a.json) + graph",
        "5 ms, 5.00x",
        "b.json, other machine",
        "PSNR 52.0 dB, SSIM 0.99912",
        "PSNR 54.0 dB, SSIM 0.99934",
        "convolution: 3 ms",
        "optimized fp16 - fp32| x 64",  # the largest power of two that takes 0.01 to at most 1
        "packages torch</th><td>2.11.0</td>",
    ):
        assert words in text, words
    assert text.count("data:image/png;base64,") == 5
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_a_page_without_images_or_profiles(tmp_path):
    path = save(tmp_path, "a.json", "end_to_end", [row("eager", 25.0)])
    page.write_page(tmp_path / "p.html", [Result("a.json", json.loads(path.read_text()))])
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "<h2>Times</h2>" in text
    assert "<h2>Images</h2>" not in text
    assert "<h2>Where the time goes</h2>" not in text


def test_the_page_has_every_warning_of_the_terminal(tmp_path):
    """Nothing is gained on a CPU, why a time is missing, and which speed-ups are uncertain."""
    rows = [
        row("eager", 1426.0, graph_reason="no CUDA"),
        row("sdfastgn", 68.0, note="2 skipped"),
        row("stable_fast", status=UNAVAILABLE, reason="not installed"),
    ]
    rows[0].p10_ms, rows[0].p90_ms = 424.0, 2428.0
    path = save(tmp_path, "a.json", "end_to_end", rows, environment={**ENVIRONMENT, "device": "cpu"})
    result = invoke("report", str(path), "--html", str(tmp_path / "p.html"), COLUMNS="1000")
    assert result.exit_code == 0, result.output
    text = html.unescape((tmp_path / "p.html").read_text(encoding="utf-8"))
    for words in (
        "no GPU: sdfastgn runs stock's own code here",
        "sdfastgn: 2 skipped",
        "stable-fast: unavailable: not installed",
        "no graph time for eager: no CUDA",
        "sdfastgn: 20.97x? is uncertain: the 10th and 90th percentiles of the times allow",
    ):
        assert words in text, words
        assert words in result.stdout, words
    assert '<span class="value uncertain">68 ms, 20.97x?</span>' in text
    assert "x?: uncertain" in text
    page.write_page(tmp_path / "certain.html", [result_at(tmp_path / "b.json")])
    certain = (tmp_path / "certain.html").read_text(encoding="utf-8")
    assert not any(words in certain for words in ("no GPU:", "x?", "value uncertain"))


@pytest.mark.parametrize("without", ["eager", "fp32", "sdfastgn"])
def test_figures_of_what_there_is(without):
    images = {name: np.full((16, 16, 3), v) for name, v in (("eager", 0.5), ("fp32", 0.4), ("sdfastgn", 0.6))}
    del images[without]
    rows = [row(name, 1.0) for name in images if name != "fp32"]
    shown = [caption for caption, _, _ in page.figures(rows, images)]
    assert (
        shown[-1]
        == {
            "eager": "|optimized fp16 - fp32| x 4",
            "fp32": "|optimized fp16 - stock fp16| x 8",
            "sdfastgn": "|stock fp16 - fp32| x 8",
        }[without]
    )


def test_figures_of_fp8_are_beside_the_others():
    names = ("fp32", "eager", "sdfastgn", "sdfastgn_fp8", "sdfastgn_eager")
    images = {name: np.full((16, 16, 3), 0.1 * i) for i, name in enumerate(names)}
    shown = [caption for caption, _, _ in page.figures([row(name, 1.0) for name in names[1:]], images)]
    assert shown[:4] == ["stock fp16", "optimized fp16", "optimized FP8", "fp32 reference"]
    assert shown[-1] == "|optimized FP8 - fp32| x 2"
    assert len(shown) == 7


def test_large_images_are_shown_smaller(written):
    small, large = page._png(np.zeros((64, 64, 3))), page._png(np.zeros((4 * page.SHOWN, page.SHOWN, 3)))
    assert page._png(np.full((64, 64, 3), 2.0)) != small
    assert len(large) < 20 * len(small)


# ---- in a browser


def faults(browser: Any) -> dict[str, Any]:
    """What a reader would see broken, or the page fetch."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    wide, broken = browser.execute_script(
        "return [document.documentElement.scrollWidth - document.documentElement.clientWidth,"
        " [...document.images].filter(i => !i.complete || i.naturalWidth == 0).map(i => i.alt)]"
    )
    return {
        "pixels too wide": max(0, wide),
        "broken images": broken,
        "requests": [url for url in requests if not url.startswith(("file:", "data:", "chrome"))],
        "console": browser.get_log("browser"),
    }


NONE = {"pixels too wide": 0, "broken images": [], "requests": [], "console": []}


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_shows_the_whole_page(browser, written, width):
    open_at(browser, written, width)
    assert browser.execute_script("return document.images.length") == 5
    assert faults(browser) == NONE


@pytest.mark.slow
def test_a_wide_table_scrolls_beside_its_first_column(browser, written):
    open_at(browser, written, WIDTHS[0])
    tables, unseen = tables_out_of_sight(browser)
    assert tables > 2
    assert unseen == []
    # What a table is called does not scroll away with it.
    ends = "return [...document.querySelectorAll('.title')].map(e => e.getBoundingClientRect().right)"
    assert 0 < max(browser.execute_script(ends)) <= WIDTHS[0]


@pytest.mark.parametrize("name", ["warm_up_sdxl", "profile_sdxl", "kernels"])
def test_a_browser_shows_committed_results(browser, tmp_path, name):
    content = json.loads((RESULTS / f"{name}.json").read_text())
    page.write_page(tmp_path / "page.html", [Result(name, content)])
    open_at(browser, tmp_path / "page.html", WIDTHS[0])
    assert faults(browser) == NONE


def test_a_broken_page_is_noticed(browser, tmp_path):
    broken = tmp_path / "page.html"
    broken.write_text(
        "<!doctype html><link rel='icon' href='data:,'><div style='width: 999px'>wide</div>"
        "<img alt='gone' src='data:image/png,x'>"
        "<img src='http://127.0.0.1:9/x.png' alt='far'><script>console.error('no')</script>"
    )
    open_at(browser, broken, WIDTHS[0])
    found = faults(browser)
    assert found["pixels too wide"] > 600
    assert found["broken images"] == ["gone", "far"]
    assert found["requests"] == ["http://127.0.0.1:9/x.png"]
    assert found["console"]
