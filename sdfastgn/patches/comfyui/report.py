"""Makes the report on a model in ComfyUI: is it faster, what is not fused and why, and its CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.comfyui import dynamic_vram, graphs
from sdfastgn.patches.comfyui.inject import CLAIMING, KEY, has_blocks, is_loaded, reason_to_stay, root_of
from sdfastgn.patches.comfyui.layers import LAYERS
from sdfastgn.patches.comfyui.tiled_decode import AUTOENCODERS
from sdfastgn.patches.comfyui.unet import has_no_patches
from sdfastgn.patches.swap.fusion import Fusion
from sdfastgn.patches.swap.tested_sources import Untested, how_to_compare, unknown_source

# A dict from the name of a fusion to the report's word for the modules that this fusion changes. Each fusion
# in ``inject.CLAIMING`` has an entry.
_WORDS = {
    "resblock": "ResNet blocks",
    "spatial_transformer": "transformers",
    "comfyui_transformer_block": "transformer blocks",
    "comfyui_geglu": "GEGLU",
    "comfyui_upsample": "upsampling",
    "comfyui_resnet_block": "ResNet blocks",
    "comfyui_attn_block": "attention",
    "comfyui_vae_upsample": "upsampling",
    "comfyui_unet": "UNet",
    "comfyui_control_net": "ControlNet",
    "comfyui_encoder": "encoder",
    "comfyui_decoder": "decoder",
    "comfyui_tiled_decode": "tiled decode",
    "plain_conv2d": "convolutions",
    "plain_linear": "linear layers",
    "plain_groupnorm": "group norms",
    "plain_layernorm": "layer norms",
}


def text_of(patcher: Any, has_run: bool = True) -> str:
    """Returns the report on the model of a ``ModelPatcher``: a few lines of text. This changes nothing.

    The first line says whether the model is faster. While the model is not loaded, the report says what is
    fused whenever the whole model fits into the GPU's memory. The numbers of calls are from the sampler's
    last run.

    ``has_run``: False leaves out the numbers of calls, because the sampler's last run was not part of this
    workflow.
    """
    root = root_of(patcher)
    name = type(root).__name__
    reason = _why_not_faster(patcher, root)
    if reason is not None:
        return f"{name}: not faster. {reason}"
    fused, stock = parts_of(root)
    if not has_no_patches(patcher.model_options.get("transformer_options", {})):
        count = fused.pop(_PATCHED, 0)
        if count:
            stock["other nodes' patches run inside of them"] = Counter({_PATCHED: count})
    faster = "partly faster" if stock else "faster"
    if not fused:
        verdict = "not faster. All of it runs as stock"
    elif not any(fusion.is_applied(module) for module in root.modules() for fusion in CLAIMING):
        # ComfyUI's history keeps the report after the run, too. So the report's first line must be true
        # before and after a run.
        verdict = f"{faster} whenever all of it is loaded"
    else:
        verdict = faster
    lines = [f"{name}: {verdict}"]
    if fused:
        lines.append(f"Fused: {_counted(fused)}")
    lines += [f"As stock: {_counted(parts)}. Reason: {why}" for why, parts in stock.items()]
    lines += _cost(stock)
    lines += [f"In plain PyTorch: {op}. Reason: {why}" for op, why in dispatch.ops_without_kernels().items()]
    return "\n".join([*lines, *(calls_of(root) if has_run else [])])


def _cost(stock: dict[str, Counter[str]]) -> list[str]:
    """Lines of the report about modules that are not fused because their code was never tested.

    The lines say what this costs, and how to see what changed in the code.
    """
    untested = {reason: parts for reason, parts in stock.items() if isinstance(reason, Untested)}
    if not untested:
        return []
    parts = sum(untested.values(), Counter[str]())
    has_no_graphs = parts.pop(_WORDS[graphs.UNET.name], 0)
    costs = [f"its {' and '.join(parts)} are not fused"] if parts else []
    costs += ["no call becomes a CUDA graph"] if has_no_graphs else []
    return [
        f"This costs speed: {', and '.join(costs)}",
        f"To see what changed: {how_to_compare(reason.file for reason in untested)}",
    ]


# The report's word for transformer blocks. They run ComfyUI's code while other nodes have patches inside of
# them.
_PATCHED = _WORDS["comfyui_transformer_block"]


def _why_not_faster(patcher: Any, root: nn.Module) -> str | None:
    if not has_blocks(root):
        return "sdfastgn knows none of its blocks"
    return why_stock(patcher, root)


def why_stock(patcher: Any, root: nn.Module) -> str | None:
    """Why the whole model must run ComfyUI's code; None if modules of the model may be fused.

    For instance, there is no GPU or too little memory, or no node of sdfastgn has optimized the model.
    """
    if KEY not in patcher.injections:
        return "It does not come from a node of sdfastgn that optimizes"
    if not _has_gpu():
        return "There is no CUDA GPU"
    if (reason := reason_to_stay(root)) is not None:
        return reason[0].upper() + reason[1:]
    if dispatch.why_off is not None:
        return f"No kernel runs: {dispatch.why_off}"
    if dynamic_vram.is_dynamic(patcher):
        return dynamic_vram.reason_to_stay(patcher) or "DynamicVRAM moves its weights"
    return None


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def parts_of(root: nn.Module) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """Counts the modules of ``root`` that are fused whenever the model is loaded, and those that are not.

    Returns two dicts. The first has the number of fused modules of each kind. The second has, for each
    reason, the numbers of modules of each kind that run ComfyUI's code for this reason. Kinds are named by
    the report's words, such as "transformer blocks".
    """
    fused: Counter[str] = Counter()
    stock: dict[str, Counter[str]] = {}
    for _, fusion, reason in findings_in(root):
        if reason is not None:
            stock.setdefault(reason, Counter())[_WORDS[fusion.name]] += 1
        elif fusion not in LAYERS:
            fused[_WORDS[fusion.name]] += 1
    return fused, stock


def findings_in(
    root: nn.Module, fusions: Sequence[Fusion] = CLAIMING
) -> Iterator[tuple[nn.Module, Fusion, str | None]]:
    """Yields (module, fusion, reason) for each module in ``root`` and each of ``fusions`` for this module.

    ``reason`` says why the module runs ComfyUI's code; it is None if the module is or can be fused. Outer
    modules come first.
    """
    for module in root.modules():
        for fusion in fusions:
            if fusion.claims(module):
                yield module, fusion, None if fusion.is_applied(module) else fusion.reason_to_skip(module)


def untested_in(root: nn.Module) -> list[Untested]:
    """Returns each reason why modules of ``root`` are not fused because ComfyUI's code was never tested.

    Reasons about the tiled decode's code are left out, because only a tiled decode runs this code.
    """
    unknown = [each for each in CLAIMING if each not in AUTOENCODERS and unknown_source(*each.sources)]
    found = (reason for _, _, reason in findings_in(root, unknown))
    return list(dict.fromkeys(reason for reason in found if isinstance(reason, Untested)))


def _counted(parts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in parts.items())


def calls_of(root: nn.Module) -> list[str]:
    """Lines of the report about the calls of the last run, and about the memory of all CUDA graphs.

    There are no lines before the first run, and for models that never become CUDA graphs, such as a VAE. If
    weights do not stay at one address, the only line says that there can be no graphs.
    """
    graphed = graphs.graphs_of(root)
    replayed, eager = graphs.calls_of_run(root)
    total = replayed + eager.total()
    if graphed is None or not total:
        return []
    if not is_loaded(root):
        return ["No CUDA graphs: graphs cannot repeat how some layers prepare their weights at each call"]
    memory = sum(graphed.pool_bytes().values()) / 2**20
    held = f", which hold {memory:.0f} MiB" if memory or not replayed else ""
    lines = [f"Last run: {replayed} of {total} calls as CUDA graphs{held}"]
    lines += [f"Without a graph: {count} ({reason})" for reason, count in eager.items()]
    if graphed.last_change:
        lines.append(f"Captured anew because: {graphed.last_change}")
    return lines
