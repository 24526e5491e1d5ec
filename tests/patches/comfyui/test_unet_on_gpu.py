"""A UNet on a GPU: CUDA graphs with a ControlNet and with fp8 weights.

ComfyUI itself runs as on a machine without a GPU. The tests move the UNet.
"""

import pytest
import torch

from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

from sdfastgn.patches.comfyui.graphs import begin_run, calls_of_run  # noqa: E402
from sdfastgn.patches.comfyui.inject import eject, inject  # noqa: E402
from tests.patches.comfyui import comfy_models  # noqa: E402
from tests.patches.comfyui.comfy_models import unet_of  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
KINDS = list(comfy_models.KINDS)


def noise(seed, *shape):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g).to(DEVICE, torch.float16)


def control(seed):
    return {
        "input": [],
        "middle": [noise(seed, 2, 320, 8, 8)],
        "output": [None, noise(seed + 1, 2, 320, 16, 16), noise(seed + 2, 2, 320, 8, 8)],
    }


def step(unet, kind, seed, **options):
    context = noise(seed + 3, 2, 77, comfy_models.KINDS[kind]["context_dim"])
    y = noise(seed + 4, 2, 2816) if kind == "sdxl" else None
    timesteps = torch.tensor([5.0 + seed] * 2, device=DEVICE)
    with torch.inference_mode():
        x = noise(seed, 2, 4, 16, 16)
        return unet(x, timesteps, context, y=y, transformer_options={}, **options)


def agree(found, expected):
    """Within fp16's rounding."""
    assert torch.isfinite(expected).all()
    assert (found - expected).abs().max() < 2e-2 * expected.abs().max()


@torch.inference_mode()
def on_gpu(model):
    """The UNet of ``model``, moved as ComfyUI moves it: its weights are inference tensors."""
    return unet_of(model).to(DEVICE)


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float8_e4m3fn], ids=["fp16", "fp8"])
def test_graphs_with_a_controlnet(weight_dtype):
    model = comfy_models.load_model("sd15", weight_dtype=weight_dtype)
    unet = on_gpu(model)
    makes = [lambda seed=seed: control(seed) for seed in range(4)] + [lambda: None] * 2
    stock = [step(unet, "sd15", seed, control=make()) for seed, make in enumerate(makes)]
    inject(unet, True)
    begin_run(unet)
    for _ in range(2):
        for seed, make in enumerate(makes):
            agree(step(unet, "sd15", seed, control=make()), stock[seed])
    assert calls_of_run(unet) == (12, {})
    eject(unet)
    again = [step(unet, "sd15", seed, control=make()) for seed, make in enumerate(makes)]
    assert all(torch.equal(a, b) for a, b in zip(again, stock, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_fp8_weights(kind):
    """The casts are part of the graph: it reads weights that were written in place."""
    model = comfy_models.load_model(kind, weight_dtype=torch.float8_e4m3fn)
    unet = on_gpu(model)
    norm = unet.out[0]

    def results():
        norm.weight.data.copy_(torch.full_like(norm.weight, 1.0, dtype=torch.float16))
        first = [step(unet, kind, seed) for seed in range(3)]
        norm.weight.data.copy_(torch.full_like(norm.weight, 0.5, dtype=torch.float16))
        return [*first, step(unet, kind, 3)]

    stock = results()
    inject(unet)
    begin_run(unet)
    for found, expected in zip(results(), stock, strict=True):
        agree(found, expected)
    assert calls_of_run(unet) == (3, {"first call of its kind": 1})
    eject(unet)
    assert all(torch.equal(a, b) for a, b in zip(results(), stock, strict=True))
