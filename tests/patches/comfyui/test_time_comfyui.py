"""The scripts that time ComfyUI: its measurements on tiny models, and bad input."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts.publish import comfyui, comfyui_models, comfyui_vaes, comfyui_weights
from tests.command_line import exit_code
from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

from comfy.ldm.wan.vae import WanVAE  # noqa: E402

from tests.patches.comfyui import comfy_models  # noqa: E402

pytestmark = pytest.mark.fused_on_cpu


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the files of a tiny model, and a VAE of SD 1.5's own size."""
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfyui_models, "MODELS", comfy_models.KINDS)
        comfyui_models.write_files(folder, "sd15", "cpu")
    return folder


def case_of(variant, files, size=32):
    folder = Path(os.environ["COMFYUI"])
    return comfyui.Case(folder, False, "sd15", variant, size, 2, 2, files)


@pytest.fixture
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(comfyui_models, "MODELS", comfy_models.KINDS)
    answers = {
        "synchronize": None,
        "get_allocator_backend": "native",
        "get_device_name": "CPU",
        "max_memory_allocated": 2e9,
        "reset_peak_memory_stats": None,
    }
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def test_what_it_measures(on_the_cpu, files, gpu_at_hand):
    found = {variant: comfyui.times_of(case_of(variant, files)) for variant in comfyui.VARIANTS}
    times = ("first_s", "it_per_s", "decode_ms", "control_it_per_s", "lora_it_per_s", "changed_strength_s")
    for each in found.values():
        assert all(each[name] > 0 for name in times)
        assert (each["gpu"], each["peak_gb"]) == ("CPU", 2.0)
    ours, every = found["sdfastgn"], {"sampler": True, "vae": True}
    assert ours["stock_repeats_itself"] == ours["exact_after_ejection"] == every
    names = ("latent_difference", "lora_difference", "control_difference", "image_difference")
    assert all(0 < ours[name] < 1e-3 for name in names)
    assert ours["report"][0] == "UNetModel: faster"
    assert "Without a graph: 2 (there are no graphs on cpu)" in ours["control_report"]


def test_weights_in_fp8(on_the_cpu, files, gpu_at_hand, monkeypatch, capsys):
    monkeypatch.setattr(comfyui_weights, "MODEL", "sd15")
    (files / "fp8").mkdir()
    comfyui_weights.write_fp8(files)
    saved = load_file(files / "fp8" / "sd15_checkpoint.safetensors")
    assert saved["model.diffusion_model.out.0.weight"].dtype == torch.float8_e4m3fn
    assert saved["first_stage_model.decoder.conv_in.weight"].dtype == torch.float16
    found = comfyui_weights.measured(files / "fp8", 32, 2, 2)
    assert found["report"][0] == "UNetModel: faster"
    assert found["gpu_mib"] > 0
    assert 0 < found["difference"] < 1e-3
    assert found["stock_repeats_itself"]
    assert found["is_exact_after_ejection"]
    assert all(found[f"{name}it_per_s"] > 0 for name in ("stock_", ""))
    stages = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert stages == ["first image", "stock", "stock, deterministic", "sdfastgn", "stock after ejection"]


def test_weights_in_main_memory():
    labels = {setting.label: setting.options for setting in comfyui_weights.settings(80.0)}
    assert labels["fp16, half in main memory"] == ("--reserve-vram", "76.5")
    assert len(comfyui_weights.settings(80.0, "main memory")) == 2


def test_decodes_of_videos(on_the_cpu, gpu_at_hand, tmp_path, monkeypatch):
    nodes = []
    monkeypatch.setattr(comfyui_vaes, "end_of_node", lambda: nodes.append("VAE Decode"))
    build = functools.partial(WanVAE, dim=8, z_dim=16, temperal_downsample=[False, True, True])
    found = comfyui_vaes.times_of(comfyui_vaes.Decode("small Wan", build, (1, 16, 2, 1, 1)), 2, tmp_path)
    assert found["report"][0] == "WanVAE: faster, once its calls repeat. They run as plans"
    assert len(nodes) == 2 * 4 + 1  # two decodes before the two that are timed, and one after ejection
    assert 0 < found["difference"] < 0.05
    assert found["is_exact_after_ejection"]
    assert all(found[f"{name}_{unit}"] > 0 for name in ("stock", "optimized") for unit in ("ms", "mib"))


def test_a_row_that_cannot_be_measured_says_why(tmp_path):
    case = case_of("stock", tmp_path)  # without the model's files
    with ThreadPoolExecutor(1) as pool:
        is_ready, has_none = pool.submit(lambda: None), pool.submit(lambda: "none here")
        cannot = pool.submit(lambda: 1 / 0)
        rows = [
            comfyui._measured(pool, case, is_ready, True),
            comfyui._measured(pool, case, has_none, False),
            comfyui._measured(pool, case, cannot, False),
        ]
    assert [(row["status"], row["reason"]) for row in rows] == [
        ("unavailable", "the time was over"),
        ("unavailable", "none here"),
        ("failed", "ZeroDivisionError: division by zero"),
    ]
    assert comfyui.line_of({**case.told(), **rows[0]}).endswith("sd15, stock: unavailable, the time was over")


BAD = [
    ("comfyui", "nowhere"), ("comfyui", ".", "--model", "sd3"), ("comfyui_vaes", "nowhere"),
    ("comfyui_weights", "nowhere"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input(arguments, monkeypatch):
    script, *rest = arguments
    assert exit_code(monkeypatch, f"publish/{script}.py", *rest) == 2
