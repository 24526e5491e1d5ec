"""Runs tiny models through ComfyUI on a GPU and prints as JSON what the tests check. Its argument: a folder.

ComfyUI decides about a GPU and DynamicVRAM when it is imported. So this needs a process of its own.
"""

import json
import os
import sys
from pathlib import Path

import torch

from scripts.publish import comfyui_models
from scripts.publish.comfyui_images import Images
from sdfastgn.bench.images import relative_error
from sdfastgn.cli import comfyui_checkout


def facts_of(kind, files, is_dynamic):
    from comfy import model_management

    from sdfastgn.patches.comfyui import dynamic_vram
    from sdfastgn.patches.comfyui.model_patcher import optimize_model
    from sdfastgn.patches.comfyui.report import text_of

    stock, ours = (Images(kind, 128, 4, files, is_optimized) for is_optimized in (False, True))
    latents, pixels = stock.first()
    found = ours.first()
    facts = {
        "dynamic": [dynamic_vram.is_dynamic(each) for each in (stock.loaded, ours.loaded, ours.model)],
        "latents": relative_error(found[0], latents),
        "pixels": float((ours.decode(latents) - pixels).abs().max()),
        "text": ours.text(),
        "stock_repeats": torch.equal(stock.sample(stock.model), latents),
    }
    for each in (stock, ours):
        each.with_lora(0.8)
    with_lora = stock.sample(stock.patched)
    facts["lora"] = relative_error(ours.sample(ours.patched), with_lora)
    facts["lora_changes"] = relative_error(with_lora, latents)
    for each in (stock, ours):
        each.with_control()
    with_control = stock.sample(stock.model, stock.controlled)
    facts["control"] = relative_error(ours.sample(ours.model, ours.controlled), with_control)
    facts["control_text"] = ours.text()
    ours.eject()
    facts["exact"] = [
        torch.equal(ours.sample(ours.model), latents), torch.equal(ours.decode(latents), pixels)
    ]  # fmt: skip
    if is_dynamic:
        room = model_management.get_total_memory
        model_management.get_total_memory = lambda *_: 2**29
        no_room = optimize_model(stock.loaded)
        facts["no_room"] = [text_of(no_room), torch.equal(stock.sample(no_room), latents)]
        model_management.get_total_memory = room
    return facts


if __name__ == "__main__":
    comfyui_checkout.import_comfyui(
        os.environ["COMFYUI"],
        "--deterministic",  # else stock's own bits may differ from run to run
        modules=["comfy.controlnet", "comfy.sample", "comfy.sd", "nodes"],
    )
    from tests.patches.comfyui import comfy_models

    comfyui_models.MODELS = comfy_models.KINDS
    folder = Path(sys.argv[1])
    # With DynamicVRAM a new layer has no weights until it is loaded.
    for kind in comfy_models.KINDS:
        comfyui_models.write_files(folder, kind, "cuda")
    has_it = comfyui_checkout.has_dynamic_vram(Path(os.environ["COMFYUI"]))
    is_dynamic = has_it and comfyui_checkout.start_dynamic_vram()
    facts = {kind: facts_of(kind, folder, is_dynamic) for kind in comfy_models.KINDS}
    facts["dynamic_vram"], facts["allocator"] = is_dynamic, torch.cuda.get_allocator_backend()
    print(json.dumps(facts))
