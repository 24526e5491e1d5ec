"""ComfyUI on a GPU as its ``main.py`` starts it: with DynamicVRAM, if the release has it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdfastgn.cli import comfyui_checkout
from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

from tests.patches.comfyui import comfy_models  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["native", "cudaMallocAsync"])
def facts(request, tmp_path_factory):
    done = subprocess.run(
        [sys.executable, "-m", "tests.patches.comfyui.on_gpu", str(tmp_path_factory.mktemp("files"))],
        cwd=Path(__file__).resolve().parents[3],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"backend:{request.param}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["allocator"] == request.param
    return found


@pytest.mark.parametrize("kind", comfy_models.KINDS)
def test_as_stock_up_to_rounding(facts, kind):
    found = facts[kind]
    assert 0 < found["latents"] < 5e-3
    assert 0 < found["pixels"] < 0.06
    assert 0 < found["lora"] < 5e-3 < found["lora_changes"]
    assert 0 < found["control"] < 5e-3


@pytest.mark.parametrize("kind", comfy_models.KINDS)
def test_everything_is_fused_and_replayed(facts, kind):
    unet, vae = facts[kind]["text"].split("\nAutoencoderKL: ")
    assert unet.startswith("UNetModel: faster\n")
    assert "Last run: 3 of 4 calls as CUDA graphs" in unet
    assert vae.startswith("faster")
    _, _, net = facts[kind]["control_text"].partition("\nControlNet: ")
    assert net.startswith("faster\n")
    assert "Last run: 3 of 4 calls as CUDA graphs" in net


@pytest.mark.parametrize("kind", comfy_models.KINDS)
def test_ejection_gives_the_same_bits(facts, kind):
    if not facts[kind]["stock_repeats"]:
        pytest.skip("on this GPU stock's own bits differ from run to run")
    assert facts[kind]["exact"] == [True, True]


@pytest.mark.parametrize("kind", comfy_models.KINDS)
def test_dynamic_vram(facts, kind):
    if not comfyui_checkout.has_dynamic_vram(Path(os.environ["COMFYUI"])):
        pytest.skip("this ComfyUI has no DynamicVRAM")
    assert facts["dynamic_vram"]
    assert facts[kind]["dynamic"] == [True, True, False]
    text, is_exact = facts[kind]["no_room"]
    assert text.startswith("UNetModel: not faster. DynamicVRAM moves its weights, and it does not fit")
    assert is_exact or not facts[kind]["stock_repeats"]
