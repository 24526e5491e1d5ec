"""Reports as a person meets them: in one line, printed, in a notebook."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from transformers import T5Config, T5EncoderModel

import sdfastgn
from sdfastgn import backend
from sdfastgn.kernels.common import archive, gpu
from sdfastgn.models import architectures, configurations
from sdfastgn.models.architectures import build_unet
from sdfastgn.patches.graphs.install import Graphs
from sdfastgn.plans.install import Planned
from sdfastgn.reports import Entry, Left, Report
from tests import small_video

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


def words_of(report: Report) -> str:
    return " ".join(str(report).split())


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


# ---- models at stock's speed


def test_models_at_stocks_speed_are_named() -> None:
    left = (Left("a", "A", "one"), Left("b", "B", "another <reason>"), Left("c", "C", "one"))
    report = replace(REPORT, left=left)
    assert "32 skipped, 3 models at stock's speed, graphs: 2 alive" in repr(report)
    assert "\nat stock's speed: a (A), c (C)\n  one\nat stock's speed: b (B)\n  another <reason>\n" in str(
        report
    )
    assert "another <reason>" in Cells(report._repr_html_()).text
    assert json.loads(json.dumps(report.to_dict()))["left"][1]["path"] == "b"
    assert "1 model at stock's speed" in repr(replace(REPORT, left=left[:1]))
    assert "stock's speed" not in str(REPORT)


@pytest.mark.parametrize("is_optimized", [False, True])
def test_a_pipeline_names_its_models_at_stocks_speed(is_optimized: bool) -> None:
    encoder = T5EncoderModel(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4))
    unet = build_unet("tiny", torch.float32, "cpu")
    pipe = SimpleNamespace(components={"unet": unet, "encoder": encoder, "plain": plain})
    if is_optimized:
        sdfastgn.optimize(pipe)
    report = sdfastgn.report(pipe)
    assert {(e.path, e.kind) for e in report.left} == {
        ("encoder", "T5EncoderModel"),
        ("plain", "Sequential"),
    }
    why = "there are no kernels, CUDA graphs or plans for models of this kind"
    words = words_of(report)
    speed = "at stock's speed:"
    assert f"{speed} encoder (T5EncoderModel) {why}; only their LoRA adapters can be" in words
    assert f"{speed} plain (Sequential) {why}" in words
    assert words.count(f"{why};") == 1
    sdfastgn.optimize(pipe, merge_adapters=False)
    assert "can be merged" not in words_of(sdfastgn.report(pipe))
    assert sdfastgn.report(plain).left[0].kind == "Sequential"


# ---- plans

STEPS = {"conv": 9, "aten.add.Tensor": 5, "group_norm": 4, "cast": 3, "cat": 2, "linear": 2, "copy": 1}
DECODER = Planned("vae.decoder", "Decoder", True, 2, 30, 3, STEPS, 250, 1000, {"a <reason>": 1}, "a <weight>")
ENCODER = Planned("vae.encoder", "Encoder", True)
PLANNED = replace(ALONE, entries=(), plans=(Planned("vae", "Vae", True), ENCODER, DECODER))


def test_plans_say_what_ran_and_what_did_not() -> None:
    assert "skipped, graphs: none, plans: 2 alive, 30 calls run by them; print it for more>" in repr(PLANNED)
    assert (
        "plans of vae.decoder: 2 alive, 30 calls run by them 1 call without: a <reason> 26 steps: 9 conv, "
        "5 aten.add.Tensor, 4 group_norm, 3 cast, 2 cat, 2 linear and 1 more "
        "kernels of sdfastgn move 25% of the bytes last new trace: a <weight>"
    ) in words_of(PLANNED)
    assert "encoder" not in str(PLANNED)  # which was not called
    assert "\nruns in: Triton 3.6" in str(PLANNED)
    assert "would" not in PLANNED.details()
    assert max(map(len, PLANNED.details().splitlines())) <= 80
    cells = Cells(PLANNED._repr_html_())
    assert cells.tags == {"p", "b", "table", "tr", "th", "td"}
    text = " ".join(cells.text)
    assert "plans of vae.decoder: 2 alive" in text
    assert "1 call without: a <reason>; 26 steps" in text
    assert "last new trace: a <weight>" in text
    found = json.loads(json.dumps(PLANNED.to_dict()))["plans"]
    assert [(p["path"], p["is_on"], p["calls"]) for p in found] == [
        ("vae", True, 0),
        ("vae.encoder", True, 0),
        ("vae.decoder", True, 30),
    ]
    assert (found[2]["steps"], found[2]["own"]) == (STEPS, {"a <reason>": 1})


def test_blocks_whose_plans_are_alike_are_one_paragraph() -> None:
    blocks = [replace(DECODER, path=f"blocks.{i}", calls=30 + (i == 5)) for i in range(6)]
    words = words_of(replace(PLANNED, plans=tuple(blocks)))
    assert "plans of blocks.0, blocks.1, blocks.2 and 2 more: 2 alive, 30 calls run by them 1 call" in words
    assert "plans of blocks.5: 2 alive, 31 calls" in words
    assert words.count("26 steps") == 2


def test_plans_before_the_first_call_and_calls_without_plans() -> None:
    children = ENCODER, replace(DECODER, plans=0, calls=0, own={}, last_change="")
    waits = replace(PLANNED, plans=(Planned("vae", "Vae", True), *children, Planned("vae_2", "Vae", True)))
    assert "graphs: none, plans: none yet;" in repr(waits)
    assert str(waits).endswith("\nruns as plans where kernels run: vae, vae_2")
    alone = replace(PLANNED, plans=(Planned("", "Vae", True), Planned("decoder", "Decoder", True)))
    assert str(alone).endswith("\nruns as plans where kernels run: Vae")
    refused = replace(PLANNED, plans=(*waits.plans, Planned("x", "X", True, own={"a reason": 2})))
    assert "graphs: none, plans: none;" in repr(refused)
    assert str(refused).endswith("\nplans of x: 0 alive, 0 calls run by them\n  2 calls without: a reason")


def test_models_whose_plans_are_off() -> None:
    off = Planned("vae", "Vae", False)
    stock = replace(PLANNED, plans=(off,))
    assert "graphs: none, plans: none yet;" in repr(stock)
    assert "\nwould run in: " in str(stock)
    assert str(stock).endswith("\nwould run as plans where kernels run: vae")
    ours = replace(REPORT, plans=(off,))
    assert "plans: none;" in repr(ours)
    assert "would run as plans with optimize(..., plans=True): vae" in words_of(ours)
    left = replace(PLANNED, plans=(replace(off, own={"it is compiled by torch.compile": 0}),))
    assert str(left).endswith("\nno plans of vae\n  it is compiled by torch.compile")


@pytest.mark.drawn(1)
@pytest.mark.fused_on_cpu
@pytest.mark.usefixtures("without_gradients")
@pytest.mark.parametrize(
    ("name", "path", "before"),
    [
        ("dc_ae", "vae.decoder", ("none", "vae")),
        ("qwen_image_21", "vae", ("none yet", "vae.encoder, vae.decoder")),
    ],
)
def test_a_pipeline_whose_vae_has_plans(
    name: str, path: str, before: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_video.shrink(monkeypatch)
    network = configurations.VIDEO_NETWORKS[name]["vae"]
    vae = architectures.build_video_network(network, torch.float32, "cpu")
    pipe = SimpleNamespace(components={"vae": vae, "scheduler": object()}, vae=vae)
    latents = torch.randn(1, 32, 1, 1) if name == "dc_ae" else torch.randn(1, 64, 1, 2, 2)
    graphs, models = before
    for words, found in (("would run", (graphs, "vae")), ("runs", ("none", models))):
        report = sdfastgn.report(pipe)
        assert str(report).startswith(f"nothing to fuse, 0 skipped, graphs: {found[0]}, plans: none yet\n")
        assert str(report).endswith(f"\n{words} as plans where kernels run: {found[1]}")
        sdfastgn.optimize(pipe)
    vae.decode(latents)
    report = sdfastgn.report(pipe)
    assert str(report).startswith("nothing to fuse, 0 skipped, graphs: none, plans: 1 alive, 1 call run by")
    assert f"plans of {path}: 1 alive, 1 call run by them" in report.details()
    (planned,) = [p for p in report.plans if p.calls]
    assert f"{sum(planned.steps.values())} steps: " in report._repr_html_()
    assert path in [each["path"] for each in json.loads(json.dumps(report.to_dict()))["plans"]]
    assert "would" not in str(report)
    sdfastgn.restore(pipe)


def test_a_report_says_which_compiled_kernels_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_states", {torch.device("cpu"): "compiled kernels from here: 7"})
    monkeypatch.setattr(backend, "triton", SimpleNamespace(__version__="3.9.0"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    models = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, device="meta")]
    found = backend.backend_text(models[:1], [None])
    assert found == "Triton 3.9.0 on a GPU; compiled kernels from here: 7"
    assert backend.backend_text(models, [None, None]) == ""
