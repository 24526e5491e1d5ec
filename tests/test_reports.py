"""Reports as a person meets them: in one line, printed, in a notebook."""

from __future__ import annotations

import pickle
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch

import sdfastgn
from sdfastgn.kernels.common import gpu
from sdfastgn.models.architectures import build_unet
from sdfastgn.patches.graphs.install import Graphs
from sdfastgn.reports import Entry, Report

LONG = (
    "other code replaced this instance's forward, " + "which is told in a sentence longer than a line of 80"
)
PATHS = [f"down_blocks.{i}.resnets.{j}" for i in range(4) for j in range(8)]
REPORT = Report(
    entries=(
        Entry("unet", "conv", "resnet_block", "ResnetBlock2D", "fused"),
        *(Entry("unet", path, "sequential", "Odd<Block>", "skipped", LONG) for path in PATHS),
    ),
    backend="Triton 3.6 on <b>H200</b>",
    channels_last_weights=3,
    layout_copies_removed=1,
    graphs=(
        Graphs("unet", "UNet2DConditionModel", "auto", 2, 2, 48, 0, {"a <reason>": 1}, "LoRA scale <of> x"),
    ),
    graph_memory_bytes=2**20,
    without_kernels={"geglu on cuda:0": "too much shared <memory>"},
)
ALONE = replace(REPORT, entries=REPORT.entries[1:], graphs=(), graph_memory_bytes=0, without_kernels={})


class Cells(HTMLParser):
    """Tags and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_repr_is_one_short_line() -> None:
    summary = "1 part fused, 32 skipped, graphs: 2 alive, 48 calls replayed"
    assert repr(REPORT) == f"<sdfastgn report: {summary}; print it for more>"
    assert repr(ALONE) == "<sdfastgn report: nothing to fuse, 32 skipped, graphs: none; print it for more>"


def test_print_begins_with_the_summary_and_fits_80_columns() -> None:
    text = str(REPORT)
    lines = text.splitlines()
    assert lines[0] == "1 part fused, 32 skipped, graphs: 2 alive, 48 calls replayed"
    assert max(map(len, lines)) <= 80
    words = " ".join(text.split())
    assert "fused: 1 in unet" in words
    assert f"skipped: {LONG} (sequential) {', '.join(PATHS[:3])} and 29 more" in words
    assert "runs in: Triton 3.6 on <b>H200</b>" in words
    assert "CUDA graphs of unet: 2 alive, 48 calls replayed 1 call without: a <reason>" in words
    assert "a <reason> last recapture: LoRA scale <of> x" in words
    assert "memory of CUDA graphs: 1 MiB" in words


def test_details_name_every_path_and_count_each_fusion() -> None:
    lines = REPORT.details().splitlines()
    assert max(map(len, lines)) <= 80
    assert all(path in REPORT.details() for path in PATHS)
    assert [line.split() for line in lines[-4:]] == [
        ["component", "fusion", "fused", "skipped"],  # nothing is fusable
        ["-" * width for width in (9, 12, 5, 7)],
        ["unet", "resnet_block", "1", "0"],
        ["unet", "sequential", "0", "32"],
    ]


def test_html_is_tables_with_everything_escaped() -> None:
    cells = Cells(REPORT._repr_html_())
    assert cells.tags == {"p", "b", "table", "tr", "th", "td"}
    text = " ".join(cells.text)
    assert f"skipped: {LONG} (sequential)" in text
    assert "Triton 3.6 on <b>H200</b>" in text
    assert "a <reason>" in text
    assert "last recapture: LoRA scale <of> x" in text
    assert all(path in text for path in PATHS)


def test_a_report_is_still_data() -> None:
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT != ALONE
    assert REPORT.to_dict()["entries"][0]["path"] == "conv"


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("has_gpu", [False, True], ids=["no GPU", "GPU"])
def test_what_is_not_fused_yet_says_what_would_be(
    device: str, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    unet = build_unet("tiny", torch.float32, device)
    text = str(sdfastgn.report(unet))
    assert text.startswith(f"optimize would fuse {len(sdfastgn.report(unet).fusable)} parts, 0 skipped")
    assert "\nruns in" not in text
    # Weights on meta may go to the GPU.
    stock = "would run in: plain PyTorch, stock's own code at stock's speed"
    assert (stock in text, "would run in" in text) == ((device, has_gpu) != ("meta", True),) * 2
    assert "graphs: none yet\n" in text
    assert "would be CUDA graphs on an NVIDIA GPU: UNet2DConditionModel" in text


def test_what_is_fused_says_where_it_runs() -> None:
    report = sdfastgn.report(sdfastgn.optimize(build_unet("tiny", torch.float32, "cpu")))
    parts = len(report.fused)
    assert str(report).startswith(f"{parts} parts fused where kernels run, none here, 0 skipped")
    assert f"\nfused where kernels run: {parts} in UNet2DConditionModel\n" in str(report)
    assert "layout copies removed per call: 0" in str(report)
    assert f"\nruns in: {report.backend[:20]}" in str(report)
    assert "optimize would" not in str(report)
    assert "graphs: none\n" in str(report)
    assert "would be" not in str(report)


def test_what_runs_is_said_of_each_component(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is offloaded to the CPU, and its calls run on the GPU; another stays on the CPU."""
    unet, other = (sdfastgn.optimize(build_unet("tiny", torch.float32, "cpu")) for _ in range(2))
    pipe = SimpleNamespace(components={"unet": unet, "other": other})
    assert not sdfastgn.report(pipe).runs_kernels
    monkeypatch.setattr(gpu, "unsupported", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    unet._hf_hook = SimpleNamespace(execution_device="cuda:0")
    report = sdfastgn.report(pipe)
    assert report.backend.endswith("on H200")
    assert report.layout_copies_removed == sdfastgn.report(unet).layout_copies_removed > 0
    assert str(report).startswith(f"{len(report.fused)} parts fused, 0 skipped")
