"""What the commands do. What they refuse is in ``test_wrong_input.py``."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sdfastgn
from scripts.publish.steps import RESULTS
from sdfastgn import cli
from sdfastgn.bench.documents import OK
from sdfastgn.bench.kernels.suite import KernelRow
from sdfastgn.bench.kernels.suites import SUITES
from sdfastgn.bench.variants import PARTS, VARIANTS, Variant
from sdfastgn.cli import bench_options
from sdfastgn.kernels.common import dispatch
from sdfastgn.models import configurations
from sdfastgn.models.pipelines import build_pipeline
from sdfastgn.patches.fusions.geglu import FusedGEGLU
from sdfastgn.versions import installed_versions
from tests import small_video
from tests.command_line import ROOT, invoke

# As the entry point sets it. transformers would keep the first runner's standard error.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

FORWARD = FusedGEGLU.forward
ON_CPU = ("--device", "cpu", "--repeats", "1")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"]


# ---- command -> exit code, and words of its standard output

PROVIDERS = {name for suite in SUITES.values() for name in suite.providers}
SEEDED = "kernels --shapes 1x32x1x1 --providers copy --device cpu --repeats 1 --seed"
RIGHT: dict[str, tuple[int, list[str]]] = {
    "--version": (0, [f"sdfastgn {sdfastgn.__version__}"]),
    "bench --part vae --device cpu --variants stable_fast": (1, ["unavailable"]),
    "info --device cpu": (
        0,
        [
            "GPU:",
            *(f"{name}: {version}" for name, version in installed_versions().items() if version),
            "cuDNN: ",
            "kernels of sdfastgn on cpu: no, ",
            "the device is cpu",
            "calls run in plain PyTorch",
        ],
    ),
    "info --device cpu --all": (
        0,
        [
            "torch:",
            "variant eager: yes",
            "variant sdfastgn: without kernels",
            "kernel eager: yes",
            "kernel sdfastgn: without kernels",
            "variant stable_fast: package sfast (stable-fast) is not installed",
            *(f"variant {name}:" for name in VARIANTS),
            *(f"kernel {name}:" for name in PROVIDERS),
        ],
    ),
    "inspect tiny_xl": (
        0,
        [
            "resnet_block",
            "optimize would fuse",
            "graphs: none yet",
            "would be CUDA graphs on an NVIDIA GPU: UNet2DConditionModel",
            "" if torch.cuda.is_available() else "would run in: plain PyTorch, stock's own code",
        ],
    ),
    **{f"{SEEDED} {seed}": (0, ["copy"]) for seed in (0, -(2**63), 2**63 - 1)},
    f"report {RESULTS}/warm_up_sdxl.json {RESULTS}/sdxl.json": (
        0,
        ["first images, sdxl 1024²", "VAE decode, SDXL 1024²"],
    ),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("command", RIGHT, ids=lambda command: command.replace(f"{RESULTS}/", ""))
def test_a_command_ends_and_says(command: str) -> None:
    code, words = RIGHT[command]
    result = invoke(*command.split(), COLUMNS="60" if command.startswith("info") else "160")
    assert result.exit_code == code, result.output
    shown = " ".join(result.stdout.split())
    assert [each for each in words if each not in shown] == []


@pytest.mark.parametrize(("number", "shown"), [(91002, "9.10.2"), (8902, "8.9.2"), (None, "not installed")])
def test_info_is_ten_lines(number: int | None, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    monkeypatch.setattr("sdfastgn.versions.RUN", {"torch": ("1.0",)})
    lines = invoke("info", "--device", "cpu").stdout.splitlines()
    assert len(lines) == 10
    assert lines[2].endswith("was never run with this sdfastgn (1.0 were))")
    assert lines[3] == f"cuDNN: {shown}"


def test_an_output_without_all_characters_has_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["sdfastgn", "report", str(RESULTS / "warm_up_sdxl.json")])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    assert rb"first images, sdxl 1024\xb2" in written.getvalue()


def test_a_name_that_is_a_folder_too_is_said_to_be_read_as_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    says = "'tiny' is read as a name; for the path give"
    with pytest.warns(UserWarning, match=f"^MODEL: {says} ./tiny$"):
        assert invoke("inspect", "tiny").exit_code == 0
    with pytest.warns(UserWarning, match=f"^--model: {says} --weights ./tiny$"):
        bench_options.preset_configs(None, model="tiny")
    (tmp_path / "random").mkdir()
    with pytest.warns(
        UserWarning, match="^--weights: 'random' is read as a name; for the path give ./random$"
    ):
        bench_options.preset_configs(None, weights="random")
    assert "MODEL: cannot load './tiny'" in invoke("inspect", "./tiny").stderr


# ---- bench


@pytest.mark.slow
def test_bench_prints_checks_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    chosen = ("--part", "unet", "--part", "vae", "--variants", "eager,sdfastgn,stable_fast")
    result = invoke("bench", *chosen, *ON_CPU, "--fp32-reference", "--json", str(path), COLUMNS="60")
    assert result.exit_code == 0, result.output
    cells = [(row["part"], row["variant"], row["status"]) for row in rows_of(path)]
    status = {"eager": OK, "sdfastgn": OK, "stable_fast": "unavailable"}
    assert cells == [(part, name, status[name]) for part in ("unet", "vae") for name in status]
    # Nothing is cut. A table's cell may go on in the next line, under itself.
    assert result.stdout.startswith("no GPU: sdfastgn runs stock's own code here")
    assert max(map(len, result.stdout.splitlines())) <= 60
    shown = " ".join(re.sub("[│┃]", " ", result.stdout).split())
    for words in ("median", "speed-up", "correctness gate", "package sfast (stable-fast) is not installed"):
        assert words in shown


def test_a_new_variant_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = Variant("thrown_away", "thrown away", lambda device: None, lambda *arguments: None)
    monkeypatch.setitem(VARIANTS, new.name, new)
    path = tmp_path / "out.json"
    result = invoke("bench", "--part", "vae", *ON_CPU, "--variants", "thrown_away", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "│ thrown away │" in result.stdout
    assert [(row["variant"], row["status"]) for row in rows_of(path)] == [("thrown_away", OK)]
    assert "variant thrown_away: yes" in invoke("info", "--device", "cpu", "--all").stdout
    assert "thrown_away" in invoke("bench", "-h").stdout


def test_all_variants_but_those_to_be_named() -> None:
    chosen = [variant.name for variant in bench_options.variant_list("--variants", "all")]
    assert chosen == [name for name in VARIANTS if name not in ("sdfastgn_no_plans", "compile_blocks")]
    named = bench_options.variant_list("--variants", "sdfastgn_no_plans,eager")
    assert [variant.name for variant in named] == ["eager", "sdfastgn_no_plans"]


VIDEO = [(model, part) for model, parts in configurations.VIDEO_NETWORKS.items() for part in parts]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("model", "part"), VIDEO, ids=["-".join(each) for each in VIDEO])
def test_a_video_network_is_timed(
    model: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_video.shrink(monkeypatch, height=32, width=48)
    path = tmp_path / "out.json"
    chosen = ("--model", model, "--part", part, "--variants", "eager,channels_last,sdfastgn")
    result = invoke("bench", *chosen, *ON_CPU, "--fp32-reference", "--json", str(path))
    assert result.exit_code == 0, result.output
    content = json.loads(path.read_text())
    network = configurations.VIDEO_NETWORKS[model][part]
    for row in content["rows"]:
        assert row["status"] == OK
        assert row["error_fp32"] is not None
        found = [row[name] for name in ("model", "part", "frames", "size", "width", "batch", "dtype")]
        assert found == [model, part, network.frames, 32, 48, network.batch, "fp32"]
    # The whole size is in the title, here and in a report.
    size = "32 x 48" if network.frames == 1 else f"{network.frames} x 32 x 48"
    assert f"{model} {part}, {size}, batch {network.batch}" in result.stdout
    assert f"{size}, batch {network.batch}, fp32" in invoke("report", str(path)).stdout


def test_the_documents_have_every_video_network() -> None:
    text = (ROOT / "docs" / "benchmarking.md").read_text()
    for model, part in VIDEO:
        each = configurations.VIDEO_NETWORKS[model][part]
        size = f"{each.frames} x {each.height} x {each.width}"
        line = rf"^\| `{model}`.* \| `{part}` \| {size} \| {each.dtype} \|$"
        assert re.search(line, text, re.MULTILINE), line


def test_the_size_of_a_video_is_its_own_or_square(monkeypatch: pytest.MonkeyPatch) -> None:
    def shape(**options: Any) -> tuple[Any, ...]:
        (config,) = bench_options.preset_configs(None, **options, device="cpu")
        return config.part, config.frames, config.size, config.width, config.batch, config.dtype

    assert shape(model="wan") == ("vae", 17, 480, 832, 1, "fp32")
    assert shape(model="svd") == ("unet", 14, 576, 1024, 2, "fp32")
    assert shape(model="svd", parts=["vae"], size=512) == ("vae", 4, 512, 512, 1, "fp32")
    assert shape(model="animatediff", batch="1", dtype="bf16") == ("unet", 16, 512, 512, 1, "bf16")
    assert shape(model="sd15") == ("unet", None, 512, None, 2, "fp32")
    monkeypatch.setattr(bench_options, "device_name", lambda option, value: "cuda")
    assert [shape(model=model)[-1] for model in ("wan", "svd", "sd15")] == ["bf16", "fp16", "fp16"]


def test_a_wrong_variant_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdfastgn.bench.gate.ERROR_BOUNDS", {"fp32": -1.0})
    result = invoke("bench", "--part", "vae", *ON_CPU, "--variants", "eager,channels_last")
    assert result.exit_code == 1
    assert "wrong output" in result.stdout
    assert "median ms" not in result.stdout
    assert "speed-up" not in result.stdout


@pytest.mark.slow
def test_batches_and_steps_are_lists(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    lists = ("--part", "vae", "--part", "pipeline", "--batch", "1,2", "--steps", "2,1", "--size", "32")
    result = invoke("bench", *lists, *ON_CPU, "--variants", "eager", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["kind"] == "sweep"
    found = [(row["part"], row["batch"], row["steps"]) for row in rows_of(path)]
    pipelines = [("pipeline", batch, steps) for batch in (1, 2) for steps in (2, 1)]
    assert found == [("vae", 1, None), ("vae", 2, None), *pipelines]
    shown = invoke("report", str(path))
    assert shown.exit_code == 0, shown.output
    assert all(re.search(rf"\b{steps}\b", shown.stdout) for steps in ("1 step", "2 steps"))


@pytest.mark.slow
def test_weights_of_any_pipeline_with_a_unet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the known models: three levels, wider text, a VAE of four pixels a latent."""
    changes = {
        "UNETS": {
            "block_out_channels": (8, 16, 24),
            "norm_num_groups": 4,
            "sample_size": 16,
            "cross_attention_dim": 48,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        },
        "VAES": {
            "block_out_channels": (8, 8, 16),
            "down_block_types": ("DownEncoderBlock2D",) * 3,
            "up_block_types": ("UpDecoderBlock2D",) * 3,
        },
    }
    with monkeypatch.context() as patch:
        for table, values in changes.items():
            known = getattr(configurations, table)
            patch.setitem(known, "tiny", {**known["tiny"], **values})
        text = {**configurations.TEXT_ENCODERS["tiny"][0], "hidden_size": 48}
        patch.setitem(configurations.TEXT_ENCODERS, "tiny", (text,))
        build_pipeline("tiny", dtype=torch.float32, device="cpu").save_pretrained(tmp_path / "other")
    path, parts = tmp_path / "out.json", [word for part in PARTS for word in ("--part", part)]
    chosen = ("--weights", str(tmp_path / "other"), *parts, "--steps", "1", "--variants", "eager")
    result = invoke("bench", *chosen, *ON_CPU, "--json", str(path))
    assert result.exit_code == 0, result.output
    found = {(row["part"], row["model"], row["size"], row["status"]) for row in rows_of(path)}
    assert found == {(part, "other", 64, OK) for part in PARTS}


# ---- verify


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "code", "says"),
    [
        (None, 0, "not verified: no kernel runs"),
        (False, 0, "right"),
        (True, 1, "put back: verification: its error"),
    ],
    ids=["without kernels", "right", "wrong"],
)
def test_a_saved_pipeline_is_verified(
    wrong: bool | None, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_pipeline("tiny", dtype=torch.float32, device="cpu").save_pretrained(tmp_path)
    if wrong is not None:
        monkeypatch.setattr(dispatch, "has_kernels", lambda x: dispatch.is_on())
    if wrong:
        monkeypatch.setattr(
            FusedGEGLU,
            "forward",
            lambda self, x: self.proj(x).chunk(2, -1)[0] if dispatch.has_kernels(x) else FORWARD(self, x),
        )
    result = invoke("verify", str(tmp_path), "--device", "cpu")
    assert (result.exit_code, says in result.output) == (code, True), result.output
    assert "group_norm" in result.output


# ---- kernels


def test_kernels_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    chosen = ("--shapes", "1x64x4x4,2x32x3x3", "--providers", "eager_nchw,sdfastgn,stable_fast")
    result = invoke("kernels", *chosen, *ON_CPU, "--json", str(path))
    assert result.exit_code == 0, result.output
    content = json.loads(path.read_text())
    assert list(content) == ["schema", "kind", "environment", "config", "rows", "summary"]
    assert (content["kind"], content["config"]["suite"]) == ("kernels", "inference")
    assert content["environment"]["switches"]
    assert {row["provider"] for row in content["rows"]} == {"copy", "eager_nchw", "sdfastgn", "stable_fast"}
    assert "1x64x4x4" in result.stdout
    assert "stable_fast: unavailable" in result.stdout
    # One measured case is one line, and what old runs have is what new ones have.
    lines = [line for line in path.read_text().splitlines() if '"provider"' in line]
    assert [json.loads(line.rstrip(",")) for line in lines] == content["rows"]
    for name in ("kernels", "kernels_layer_norm"):
        old = json.loads((RESULTS / f"{name}.json").read_text())
        assert set(old["rows"][0]) <= set(content["rows"][0])
        assert set(old["config"]) <= set(content["config"])


def test_a_suite_with_several_dtypes_writes_a_file_for_each(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    command = ("kernels", "--suite", "instance_norm", "--shapes", "1x3x5x2x4", *ON_CPU, "--json", str(path))
    assert invoke(*command, "--dtype", "bf16,fp32").exit_code == 0
    assert {each.name for each in tmp_path.iterdir()} == {"a_bf16.json", "a_fp32.json"}
    result = invoke(*command)
    content = json.loads(path.read_text())
    assert (content["kind"], content["config"]["dtype"]) == ("kernels_instance_norm", "fp16")
    assert "forward + backward" in result.stdout
    assert "not run (name them in --providers): inductor_ndhwc" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [(), ("--suite", "training"), ("--device", "cpu", "--shapes", "2x1280x64x64")],
    ids=["inference", "training", "large"],
)
def test_kernels_say_once_why_nothing_is_timed(arguments: tuple[str, ...], tmp_path: Path) -> None:
    if torch.cuda.is_available() and "cpu" not in arguments:
        pytest.skip("there is a GPU, which can be timed")
    path = tmp_path / "out.json"
    result = invoke("kernels", *arguments, "--json", str(path))
    assert result.exit_code == 1
    (line,) = (line for line in result.stdout.splitlines() if not line.startswith("wrote"))
    why = "too many for the CPU" if "cpu" in arguments else "kernel times need an NVIDIA GPU"
    assert line.startswith("nothing was timed: ")
    assert why in line
    assert {(row["status"], row["hot_us"]) for row in rows_of(path)} == {("unavailable", None)}


def test_kernels_that_are_cut_off_leave_the_shapes_that_were_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def line(row: KernelRow) -> str:
        if row.shape == (2, 32, 5, 3):
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr("sdfastgn.bench.tables.kernels.cell_line", line)
    path = tmp_path / "out.json"
    shapes = ("--shapes", "2x32x3x5,2x32x5x3", "--providers", "eager_nchw")
    assert invoke("kernels", *shapes, *ON_CPU, "--json", str(path)).exit_code != 0
    rows = rows_of(path)
    assert {tuple(row["shape"]) for row in rows} == {(2, 32, 3, 5)}
    assert all(row["hot_ratio"] for row in rows)


def test_a_wrong_gradient_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdfastgn.bench.kernels.run.GRADIENT_BOUNDS", {"fp16": -1.0})
    chosen = ("--suite", "training", "--shapes", "2x32x3x5", "--providers", "eager_nchw")
    result = invoke("kernels", *chosen, *ON_CPU)
    assert result.exit_code == 1
    assert "wrong output: relative error of dx" in result.stdout
