"""Writes the tables and pictures of the published pages from the committed JSON files, and from docstrings.

``python -m scripts.publish.pages`` renews all tables of ``PAGES`` and the pictures of ``plots.PICTURES``. On
a page, a table is between the lines ``<!-- table:NAME -->`` and ``<!-- /table:NAME -->``.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.publish import plots
from scripts.publish.steps import ROOT, SUMMARY, origin
from scripts.publish.tables.adapters import adapters_markdown
from scripts.publish.tables.comfyui import (
    comfyui_markdown,
    comfyui_vaes_markdown,
    comfyui_weights_markdown,
)
from scripts.publish.tables.compiled_videos import compiled_videos_markdown
from scripts.publish.tables.end_to_end import (
    batches_markdown,
    claims_markdown,
    compared_markdown,
    headline_markdown,
    latency_markdown,
    results_markdown,
    several_gpus_markdown,
    stable_fast_markdown,
    transformer_claims_markdown,
    transformers_compared_markdown,
    transformers_markdown,
)
from scripts.publish.tables.fp8 import (
    fp8_mlperf_markdown,
    fp8_quality_markdown,
    fp8_times_markdown,
)
from scripts.publish.tables.fusions import fusions_markdown
from scripts.publish.tables.kernels import inference_markdown, suite_markdown
from scripts.publish.tables.memory import memory_markdown
from scripts.publish.tables.offloading import offloading_markdown
from scripts.publish.tables.plans import plans_markdown
from scripts.publish.tables.profile import profile_markdown
from scripts.publish.tables.real_sizes import real_sizes_markdown, video_markdown
from scripts.publish.tables.serving import serving_load_markdown, serving_replicas_markdown
from scripts.publish.tables.tiled_decode import tiled_decode_markdown
from scripts.publish.tables.warm_up import warm_up_markdown
from sdfastgn.bench.documents import read_json
from sdfastgn.bench.kernels.suite import INFERENCE
from sdfastgn.bench.kernels.suites import SUITES
from sdfastgn.bench.tables.plots import plot_reason

# The pages whose tables this script renews. The card of the kernels on Hugging Face's Hub has tables too:
# scripts/build_hub_kernels.py makes them.
PAGES = (
    "README.md", "docs/index.md", "docs/benchmarks.md", "docs/coverage.md", "docs/stable-fast.md",
    "docs/comfyui-in-detail.md", "docs/fp8-in-detail.md", "docs/fusions.md", "docs/measurements/plans.md",
)  # fmt: skip
TABLES: dict[str, Callable[[Path], str]] = {
    "claims": claims_markdown,
    "headline": headline_markdown,
    "results": results_markdown,
    "compared": compared_markdown,
    "stable_fast": stable_fast_markdown,
    "warm_up": warm_up_markdown,
    "profile": profile_markdown,
    "batches": batches_markdown,
    "latency": latency_markdown,
    "comfyui": comfyui_markdown,
    "comfyui_weights": comfyui_weights_markdown,
    "comfyui_vaes": comfyui_vaes_markdown,
    "real_sizes": real_sizes_markdown,
    "video": video_markdown,
    "compiled_videos": compiled_videos_markdown,
    "plans": plans_markdown,
    "transformer_claims": transformer_claims_markdown,
    "transformers": transformers_markdown,
    "transformers_compared": transformers_compared_markdown,
    "adapters": adapters_markdown,
    "tiled_decode": tiled_decode_markdown,
    "memory": memory_markdown,
    "offloading": offloading_markdown,
    "fp8_times": fp8_times_markdown,
    "fp8_mlperf": fp8_mlperf_markdown,
    "fp8_quality": fp8_quality_markdown,
    "serving_load": serving_load_markdown,
    "serving_replicas": serving_replicas_markdown,
    "several_gpus": several_gpus_markdown,
    "fusions": fusions_markdown,
    "kernels": inference_markdown,
    **{name: functools.partial(suite_markdown, suite) for name, suite in SUITES.items() if name != INFERENCE},
}

_SLOT = re.compile(r"(<!-- table:(?P<name>[\w-]+) -->)(?P<body>.*?)(<!-- /table:(?P=name) -->)", re.DOTALL)


def slots(text: str) -> list[str]:
    """Returns the names of the tables whose opening mark is in ``text``, in their order."""
    return re.findall(r"<!-- table:([\w-]+) -->", text)


def check_one_commit(results: Path) -> None:
    """Raises ValueError if a result of a renewal is missing, or has another commit or GPU than the renewal.

    A renewal is a folder with ``renewal.json`` (see ``scripts.publish.renew``), which names the renewal's
    commit and GPU. The error names the wrong files. Results in other folders are not checked.
    """
    for summary in results.rglob(SUMMARY):
        content, folder = read_json(summary), summary.parent
        made = [folder / row["writes"] for row in content["rows"] if row["writes"].endswith(".json")]
        if missing := [str(path) for path in made if not path.exists()]:
            raise ValueError(f"{summary} names files that are not there: {', '.join(missing)}")
        commit, gpu = origin(content)
        found = {path: origin(read_json(path)) for path in sorted(folder.rglob("*.json"))}
        others = [f"{path} ({str(c)[:7]}, {g})" for path, (c, g) in found.items() if (c, g) != (commit, gpu)]
        if others:
            what = f"{summary} is of commit {str(commit)[:7]} on {gpu}"
            raise ValueError(f"{what}, and these results are not: {'; '.join(others)}")


def filled(text: str, results: Path) -> str:
    """Returns ``text`` with all its tables made again from the JSON files in ``results``.

    Raises ValueError if a mark names an unknown table, if the closing mark of a table is missing, or if
    results of a renewal do not belong together (see ``check_one_commit``).
    """
    check_one_commit(results)
    opened = slots(text)
    unknown = sorted(set(opened) - set(TABLES))
    if unknown:
        raise ValueError(f"no table is called {', '.join(unknown)}; there are {', '.join(TABLES)}")
    closed = [match["name"] for match in _SLOT.finditer(text)]
    if closed != opened:
        raise ValueError(f"the slots opened are {opened}, those closed {closed}")
    return _SLOT.sub(lambda match: f"{match[1]}\n{TABLES[match['name']](results)}\n{match[4]}", text)


def _renewed(page: Path, results: Path) -> str:
    """Returns the text of ``page`` with new tables. If it raises ValueError, the error names the page."""
    try:
        return filled(page.read_text(encoding="utf-8"), results)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{page}: {reason}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns the exit code: 2 if the folder of results does not exist, a page cannot be filled or a picture
    cannot be drawn, else 0.
    """
    parser = argparse.ArgumentParser("python -m scripts.publish.pages", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="renew the tables in FILE alone")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks", help="folder of the JSON files")
    options = parser.parse_args(arguments)
    # A folder that does not exist is probably a mistyped path, so it is an error. An empty folder is allowed:
    # it may have no results yet.
    if not options.results.is_dir():
        print(f"pages: --results: there is no folder {str(options.results)!r} here", file=sys.stderr)
        return 2
    written = [options.write] if options.write else [ROOT / page for page in PAGES]
    try:
        texts = {path: _renewed(path, options.results) for path in written}
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        if options.write is None:
            if (reason := plot_reason()) is not None:
                raise ValueError(f"the tables are written, the pictures are not: {reason}")
            for name, draw in plots.PICTURES.items():
                draw(options.results, ROOT / "docs" / "images" / name)
    except (OSError, ValueError) as error:
        print(f"pages: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
