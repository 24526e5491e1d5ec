"""The documentation site on a small desk: nothing is cut."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.browser import open_at, tables_out_of_sight
from tests.command_line import process

WIDTH = 1280
# Pixels that code is wider than its block, by page: lines of up to 100 columns fit.
TOO_WIDE = (
    "return Math.max(...[...document.querySelectorAll('pre > code')].map(e => e.scrollWidth - e.clientWidth))"
)


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
