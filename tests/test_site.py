"""The documentation site, opened from its folder: nothing is cut, and search and links work."""

from __future__ import annotations

import json
import re
import runpy
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

import sdfastgn
from tests.browser import open_at, tables_out_of_sight
from tests.command_line import ROOT
from tests.processes import process

WIDTH = 1280
PHONE = 400
# Pixels that code is wider than its block, by page: lines of up to 100 columns fit.
TOO_WIDE = (
    "return Math.max(...[...document.querySelectorAll('pre > code')].map(e => e.scrollWidth - e.clientWidth))"
)

WIDER_THAN_THE_SCREEN = "const e = document.documentElement; return e.scrollWidth - e.clientWidth"
# Names in tables that are broken into several lines.
BROKEN_NAMES = """
return [...document.querySelectorAll('td code')]
  .filter((code) => /^\\w+$/.test(code.textContent) && code.getClientRects().length > 1)
  .map((code) => code.textContent);
"""
# Types ``arguments[0]`` into the search.
TYPE = """
const input = document.querySelector(".md-search__input");
input.focus();
input.value = arguments[0];
input.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
"""
# The pages that the search has found, with the best first.
FOUND = """
return [...document.querySelectorAll(".md-search-result__item")]
  .map((item) => item.querySelector("a").href.replace(/.*[/]([^/]+[/][^/]+)[.]html.*/, "$1"));
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder))
    done = process(*command, NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_code_and_tables_can_be_read_to_their_end(browser: Any, site: Path) -> None:
    open_at(browser, site / "getting-started.html", WIDTH)
    assert browser.execute_script(TOO_WIDE) <= 0
    open_at(browser, site / "benchmarks.html", WIDTH)
    tables, unseen = tables_out_of_sight(browser)
    assert tables > 0
    assert unseen == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", ["index", "getting-started", "comfyui", "benchmarks", "coverage", "results", "api"]
)
def test_a_page_can_be_read_on_a_phone(browser: Any, site: Path, page: str) -> None:
    open_at(browser, site / f"{page}.html", PHONE)
    assert browser.execute_script(WIDER_THAN_THE_SCREEN) <= 0
    assert browser.execute_script(BROKEN_NAMES) == []
    assert tables_out_of_sight(browser)[1] == []
    pictures = browser.execute_script("return [...document.querySelectorAll('p > img')].map(i => i.width)")
    assert all(width >= 700 for width in pictures)  # their letters are 10 of about 1200 pixels


@pytest.mark.slow
@pytest.mark.parametrize("start", ["index.html", "adr/0001-layout.html"])
def test_the_search_works_without_a_server(browser: Any, site: Path, start: str) -> None:
    """Evidence comes after the pages for use that are about the same."""
    browser.get_log("performance")  # takes out what other tests have requested
    open_at(browser, site / start, WIDTH)
    found = searched(browser, "cuda graphs")
    assert not {"adr", "measurements"} & {name.split("/")[0] for name in found}
    assert "benchmarks" not in [name.split("/")[1] for name in found[:3]]
    assert searched(browser, "functionalize") == ["adr/0028-plans"]  # what only evidence has is found
    requests = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [
        one["params"]["request"]["url"] for one in requests if one["method"] == "Network.requestWillBeSent"
    ]
    assert sent
    assert [url for url in sent if not url.startswith(("file:", "data:", "about:"))] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("lora", "lora"),
        ("offloading", "memory"),
        ("black images", "troubleshooting"),
        ("comfyui", "comfyui"),
        ("groupnorm", "other-models"),
        ("kernel cache", "first-images"),
    ],
)
def test_the_page_for_use_is_found_first(browser: Any, site: Path, words: str, page: str) -> None:
    open_at(browser, site / "index.html", WIDTH)
    assert searched(browser, words)[0].split("/")[1] == page


def searched(browser: Any, words: str) -> list[str]:
    """The pages that the search finds, each with its folder."""
    before = browser.execute_script(FOUND)  # those of an earlier search
    browser.execute_script(TYPE, words)
    for _ in range(100):
        if (found := browser.execute_script(FOUND)) and found != before:
            return found
        time.sleep(0.1)
    raise AssertionError(f"the search finds nothing for {words!r}")


@pytest.mark.slow
def test_links_of_the_api_page_lead_somewhere(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    assert "docs/" not in re.sub(r"<[^>]*>", "", text)
    links = re.findall(r'<a href="(?:([\w-]+\.html)">|#(sdfastgn\.\w+)"><code>)', text)
    assert {page for page, _ in links if page} >= {"coverage.html", "lora.html", "fp8.html"}
    assert all((site / page).exists() for page, _ in links if page)
    anchors = {anchor for _, anchor in links if anchor}
    assert anchors >= {f"sdfastgn.{name}" for name in sdfastgn.__all__ if not name.startswith("_")}
    assert anchors <= set(re.findall(r' id="([\w.]+)"', text))


def test_the_repository_is_linked_once_it_has_an_address(tmp_path: Path) -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    for host, linked in (("repository.invalid", None), ("example.org", "https://example.org/us")):
        text = f'[project.urls]\nRepository = "https://{host}/us"\n'
        (tmp_path / "pyproject.toml").write_text(text)
        config = types.SimpleNamespace(
            config_file_path=str(tmp_path / "mkdocs.yml"), site_name="sdfastgn", repo_url=None
        )
        hooks["on_config"](config)
        assert config.repo_url == linked
