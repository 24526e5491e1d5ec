"""The script that times ComfyUI: its measurements on tiny models, and bad input."""

import runpy
from pathlib import Path

import pytest
import torch

from scripts.publish import comfyui_models
from sdfastgn.cli import comfyui_checkout
from tests.command_line import exit_code
from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

from tests.patches.comfyui import comfy_models  # noqa: E402

pytestmark = pytest.mark.fused_on_cpu

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "publish" / "comfyui.py"


@pytest.mark.parametrize("variant", ["stock", "sdfastgn"])
def test_what_it_measures(variant, monkeypatch, tmp_path, gpu_at_hand):
    model, vae = comfy_models.load_model("sd15"), comfy_models.load_vae()
    monkeypatch.setattr(comfyui_checkout, "import_comfyui", lambda folder, *arguments: "0")
    monkeypatch.setattr(comfyui_models, "load_model", lambda *_: model)
    monkeypatch.setattr(comfyui_models, "load_vae", lambda *_: vae)
    for name, value in {"synchronize": None, "get_device_name": "CPU", "max_memory_allocated": 2e9}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    script = runpy.run_path(str(SCRIPT))
    script["seconds_of"].__globals__.update(WARM_UP_RUNS=0, TIMED_RUNS=1)
    found = script["times_of"](variant, tmp_path, "sd15", 64, 1)
    assert found["it_per_s"] > 0 < found["decode_ms"]
    assert (found["comfyui"], found["gpu"], found["peak_gb"]) == ("0", "CPU", 2.0)
    if variant == "sdfastgn":
        every = {"sampler": True, "vae": True}
        assert found["stock_repeats_itself"] == found["exact_after_ejection"] == every
        assert 0 < found["latent_difference"] < 1e-4
        assert 0 < found["image_difference"] < 1e-4
        assert found["report"][0] == "UNetModel: faster"


@pytest.mark.parametrize("arguments", [("nowhere",), (".", "--model", "sd3")])
def test_bad_input(arguments, monkeypatch):
    assert exit_code(monkeypatch, "publish/comfyui.py", *arguments) == 2
