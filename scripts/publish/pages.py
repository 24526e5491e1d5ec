"""Results as tables in Markdown files, from committed JSON.

``python -m scripts.publish.pages --write README.md`` renews what lies between ``<!--
table:NAME -->`` and ``<!-- /table:NAME -->``.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.publish.tables.end_to_end import (
    batches_markdown,
    headline_markdown,
    latency_markdown,
    peer_markdown,
    presets_markdown,
    processes_markdown,
    results_markdown,
)
from scripts.publish.tables.kernels import extras_markdown, host_markdown, suite_markdown
from scripts.publish.tables.pipelines import comfyui_markdown, pipelines_markdown
from scripts.publish.tables.profile import profile_markdown
from scripts.publish.tables.real_sizes import real_sizes_markdown
from sdfastgn.bench.kernels.suite import INFERENCE
from sdfastgn.bench.kernels.suites import SUITES

TABLES: dict[str, Callable[[Path], str]] = {
    "headline": headline_markdown,
    "results": results_markdown,
    "stable_fast": functools.partial(peer_markdown, peer="stable_fast"),
    "warm_up": functools.partial(pipelines_markdown, kind="warm_up"),
    "presets": presets_markdown,
    "processes": processes_markdown,
    "profile": profile_markdown,
    "batches": batches_markdown,
    "latency": latency_markdown,
    "comfyui": comfyui_markdown,
    "real_sizes": real_sizes_markdown,
    "host_calls": functools.partial(pipelines_markdown, kind="host"),
    "kernels": functools.partial(suite_markdown, SUITES[INFERENCE]),
    "producers": functools.partial(extras_markdown, SUITES[INFERENCE]),
    "host": functools.partial(host_markdown, SUITES[INFERENCE]),
    **{name: functools.partial(suite_markdown, suite) for name, suite in SUITES.items() if name != INFERENCE},
}

_SLOT = re.compile(r"(<!-- table:(?P<name>[\w-]+) -->)(?P<body>.*?)(<!-- /table:(?P=name) -->)", re.DOTALL)


def filled(text: str, results: Path) -> str:
    """``text`` with every table slot filled from the JSON files under ``results``.

    Raises ValueError where a slot has a name that no table has, or is not closed.
    """
    opened = re.findall(r"<!-- table:([\w-]+) -->", text)
    unknown = sorted(set(opened) - set(TABLES))
    if unknown:
        raise ValueError(f"no table is called {', '.join(unknown)}; there are {', '.join(TABLES)}")
    closed = [match["name"] for match in _SLOT.finditer(text)]
    if closed != opened:
        raise ValueError(f"the slots opened are {opened}, those closed {closed}")
    return _SLOT.sub(lambda match: f"{match[1]}\n{TABLES[match['name']](results)}\n{match[4]}", text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 where a file cannot be filled."""
    parser = argparse.ArgumentParser("python -m scripts.publish.pages", description=__doc__)
    parser.add_argument("--write", type=Path, required=True, metavar="FILE", help="renew the tables in FILE")
    parser.add_argument("--results", type=Path, default=Path("benchmarks"), help="folder of the JSON files")
    options = parser.parse_args(arguments)
    path = options.write
    # An empty folder has no results yet; one that is not there is somewhere else.
    if not options.results.is_dir():
        print(f"tables: --results: there is no folder {str(options.results)!r} here", file=sys.stderr)
        return 2
    try:
        path.write_text(filled(path.read_text(encoding="utf-8"), options.results), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"tables: {path}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
