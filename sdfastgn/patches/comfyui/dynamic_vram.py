"""ComfyUI's DynamicVRAM, under which no layer keeps its weights at one address.

DynamicVRAM is the default of ComfyUI 0.16 and later on NVIDIA cards. Each layer asks for its weights at each
call, and they may lie elsewhere than at the last call. Fused layers and CUDA graphs need weights that stay.
A dynamic model that fits the card is therefore loaded a second time, as a model of the older kind whose
weights stay on the GPU. ComfyUI itself does that for models with hooks.
"""

from __future__ import annotations

import weakref
from typing import Any

from comfy import model_management

# Dynamic model -> the same model loaded the older way: ``model_override`` of ``ModelPatcher.clone``. Clones
# with other LoRAs share both models.
_loaded: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def is_dynamic(patcher: Any) -> bool:
    """True if ComfyUI may move the weights of ``patcher`` between two calls."""
    # Releases before DynamicVRAM have no such method.
    return bool(getattr(patcher, "is_dynamic", bool)())


def reason_to_stay(patcher: Any) -> str | None:
    """Why the weights of a dynamic ``patcher`` cannot stay on the GPU; None if they can."""
    if patcher.cached_patcher_init is None:
        return "DynamicVRAM moves its weights, and its loader cannot load it the older way"
    needed = patcher.model_size() + model_management.minimum_inference_memory()
    total = model_management.get_total_memory(patcher.load_device)
    if needed > total:
        return (
            f"DynamicVRAM moves its weights, and it does not fit the GPU: it needs {_gib(needed)} of "
            f"{_gib(total)}"
        )
    return None


def clone(patcher: Any) -> Any:
    """A clone of ``patcher``. Its weights stay on the GPU while it is loaded, unless ``reason_to_stay``.

    The first such clone of a dynamic model reads the model's file again.
    """
    if not is_dynamic(patcher) or reason_to_stay(patcher) is not None:
        return patcher.clone()
    found = patcher.clone(disable_dynamic=True, model_override=_loaded.get(patcher.model))
    _loaded.setdefault(patcher.model, found.get_clone_model_override())
    return found


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
