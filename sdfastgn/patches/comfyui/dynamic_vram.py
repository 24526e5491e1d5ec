"""Replaces models under ComfyUI's DynamicVRAM by models whose weights stay at one address.

DynamicVRAM is the default in ComfyUI 0.16 and later on NVIDIA GPUs. Models under it are *dynamic*: at each
call, a layer requests its weights from ComfyUI, and their addresses may differ from call to call. Fused
layers and CUDA graphs need weights that stay at one address. So a dynamic model that fits into the GPU's
memory is loaded a second time, without DynamicVRAM. ComfyUI itself does so for models with hooks.
"""

from __future__ import annotations

import weakref
from typing import Any

from comfy import model_management

# A dict from a model under DynamicVRAM to an unchanged ``ModelPatcher`` of a second model, which was loaded
# from the same file without DynamicVRAM. Clones of a ``ModelPatcher`` share its model, so they also share the
# second model.
_loaded: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def is_dynamic(patcher: Any) -> bool:
    """True if the model of ``patcher`` is dynamic: ComfyUI may move its weights between two calls."""
    # Older releases of ComfyUI have no DynamicVRAM, and their ``ModelPatcher`` has no method ``is_dynamic``.
    return bool(getattr(patcher, "is_dynamic", bool)())


def reason_to_stay(patcher: Any) -> str | None:
    """Why the model of ``patcher`` must stay under DynamicVRAM; None if ``clone`` can load it without."""
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
    """Returns a clone of ``patcher`` whose model is not under DynamicVRAM.

    If the model of ``patcher`` is under DynamicVRAM, the first call loads a second model from the same file.
    Later calls for this model use the second model again. If ``reason_to_stay`` gives a reason, the clone's
    model stays under DynamicVRAM.
    """
    if not is_dynamic(patcher) or reason_to_stay(patcher) is not None:
        return patcher.clone()
    stock = _loaded.get(patcher.model)
    model = None if stock is None else stock.get_clone_model_override()
    found = patcher.clone(disable_dynamic=True, model_override=model)
    if stock is None:
        # ``stock``, the patcher kept in ``_loaded``, must have neither LoRAs nor code of other nodes, which
        # may refer to ``patcher``. So it is made from a new ``ModelPatcher``: a clone of ``found`` would have
        # both.
        empty = type(found)(found.model, found.load_device, found.offload_device)
        stock = empty.clone(model_override=found.get_clone_model_override())
        _loaded[patcher.model] = stock
    # When ``found``, the returned clone, is deleted, ComfyUI unloads the model of the clone's parent. The
    # parent that ``patcher.clone`` has set is ``patcher``, whose model is another one, under DynamicVRAM.
    # ``stock`` has the same model as ``found``, so it becomes the parent.
    found.parent = stock
    return found


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
