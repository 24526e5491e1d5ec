"""What runs fused in a model of ComfyUI, what does not and why, in a few lines of text."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.comfyui import graphs
from sdfastgn.patches.comfyui.inject import CLAIMING, has_blocks, is_loaded

__all__ = ["text_of"]


def text_of(root: nn.Module) -> str:
    """The state of ``root`` now. Changes nothing.

    For a model that is not loaded yet, it says what will run fused if the whole model fits the GPU.
    """
    title = f"{type(root).__name__}: "
    if not has_blocks(root):
        return title + "nothing that sdfastgn knows, stock's code"
    fused: Counter[str] = Counter()
    stock: Counter[tuple[str, str]] = Counter()
    applied = 0
    for module in root.modules():
        for fusion in CLAIMING:
            if fusion.claims(module):
                is_applied = fusion.is_applied(module)
                reason = None if is_applied else fusion.reason_to_skip(module)
                applied += is_applied
                if reason is None:
                    fused[fusion.name] += 1
                else:
                    stock[type(module).__name__, reason] += 1
    state = "fused" if applied else "to be fused once it is loaded"
    parts = ", ".join(f"{count} {name}" for name, count in fused.items()) or "nothing"
    lines = [f"{title}{state}: {parts}"]
    lines += [f"  as stock: {count} {name}: {reason}" for (name, reason), count in stock.items()]
    lines += [f"  {note}" for note in (_backend(), *_graphs(root)) if note]
    return "\n".join(lines)


def _backend() -> str:
    if dispatch.why_off is not None:
        return f"no kernel runs: {dispatch.why_off}"
    return "" if torch.cuda.is_available() else "no kernel runs: there is no CUDA GPU"


def _graphs(root: nn.Module) -> list[str]:
    found = [graphed for module in root.modules() if (graphed := graphs.graphs_of(module)) is not None]
    lines = []
    for graphed in found:
        lines.append(f"CUDA graphs: {graphed.alive} alive, {graphed.replays} calls replayed")
        lines += [f"eager, {reason}: {count} calls" for reason, count in graphed.eager.items()]
        if graphed.last_change:
            lines.append(f"last recapture: {graphed.last_change}")
    if found and not is_loaded(root):
        lines.append("no CUDA graphs while layers cast their weights")
    return lines
