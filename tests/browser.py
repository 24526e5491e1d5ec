"""Pages in chromium: how they look at a width, and which tables cannot be read to their end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

CHROMIUM_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
# For each table that is wider than its place: whether its last column comes into sight by scrolling,
# and whether the first one is in sight then.
SCROLLED = """
const found = [];
for (const table of document.querySelectorAll("table")) {
  const scrolls = (box) =>
    /auto|scroll/.test(getComputedStyle(box).overflowX) && box.scrollWidth > box.clientWidth + 1;
  let box = table;
  while (box && !scrolls(box)) box = box.parentElement;
  if (!box) {
    const right = table.getBoundingClientRect().right;
    if (right > document.documentElement.clientWidth) found.push([false, false]);
    continue;
  }
  box.scrollLeft = 1e6;
  const cells = [...table.rows[0].cells].map((cell) => cell.getBoundingClientRect());
  const first = cells[0], last = cells[cells.length - 1], place = box.getBoundingClientRect();
  found.push([last.right <= place.right + 1, first.left >= place.left - 1]);
}
return found;
"""


def started(profile: Path) -> Any:
    """Chromium with an empty ``profile``, a folder. Skips the test where it or its driver is missing."""
    webdriver = pytest.importorskip("selenium.webdriver")
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.skip("the page is opened in chromium, with chromedriver; one of them is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for option in (*CHROMIUM_OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=programs[1])
    driver = webdriver.Chrome(options=options, service=service)
    driver.get("about:blank")  # the browser's own first tab fetches things
    driver.get_log("performance")
    return driver


def open_at(browser: Any, path: Path, width: int) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(path.as_uri())
    assert browser.execute_script("return innerWidth") == width


def tables_out_of_sight(browser: Any) -> tuple[int, list[list[bool]]]:
    """How many tables are wider than their place, and of which of them an end cannot be seen."""
    found = browser.execute_script(SCROLLED)
    return len(found), [each for each in found if each != [True, True]]
