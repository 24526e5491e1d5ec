"""Which layers an adapter (a LoRA or the like) is wrapped around, and what that does to them.

peft puts a layer of its own in a layer's place and keeps the layer as a child of it. Fusions call plain
layers alone, so they call peft's layer as stock's code does: the layer first, then the adapter's own
small products, then their sum. peft is not imported: only its names are looked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["WRAPPED", "adapted_layers", "adapter_reason"]

# peft's names for the layer of the model within an adapter: beside one that an adapter adds to, and
# beside copies of one that is trained as a whole. The other children are what the adapter has added.
WRAPPED = ("base_layer", "original_module")

_ALONE = "stock's code runs the layer by itself"


def adapted_layers(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, layer) of each layer below ``root``, itself included, that an adapter is wrapped around."""
    return ((path, module) for path, module in root.named_modules() if _is_wrapper(module))


def adapter_reason(layer: Any) -> str | None:
    """Why ``layer`` runs stock's code if an adapter is wrapped around it, and what ends that; else None."""
    if isinstance(getattr(layer, "lora_layer", None), nn.Module):  # diffusers' own, before it used peft
        return f"it has an adapter (LoRA): {_ALONE}"
    if not (isinstance(layer, nn.Module) and _is_wrapper(layer)):
        return None
    if hasattr(layer, "original_module"):
        return f"an adapter trains a copy of it: {_ALONE}"
    if getattr(layer, "merged", False):
        return (
            f"its adapter (LoRA) is merged, but still wrapped around it: {_ALONE}; unload_lora_weights() "
            "makes it a plain layer that keeps the merged weights"
        )
    if getattr(layer, "disable_adapters", False) or not getattr(layer, "active_adapters", True):
        return (
            f"its adapter (LoRA) is off, but still wrapped around it: {_ALONE}; unload_lora_weights() makes "
            "it a plain layer"
        )
    return (
        f"it has an adapter (LoRA): {_ALONE}, then the adapter's own small products and their sum; "
        "fuse_lora() and then unload_lora_weights() make it a plain layer"
    )


def _is_wrapper(module: nn.Module) -> bool:
    return any(name in WRAPPED for name, _ in module.named_children())
