"""Replaces models under ComfyUI's DynamicVRAM by models whose weights stay at one address.

DynamicVRAM is the default in ComfyUI 0.16 and later on NVIDIA GPUs. Models under it are *dynamic*: at each
call, a layer requests its weights from ComfyUI, and their addresses may differ from call to call. Fused
layers and CUDA graphs need weights that stay at one address. So a dynamic model that fits into the GPU's
memory is loaded a second time, without DynamicVRAM. ComfyUI itself does so for models with hooks. ComfyUI
cannot load a ControlNet again. So a ControlNet is copied, and until it is loaded, the copy shares its weights
in main memory.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import Any

from comfy import model_management
from comfy.cldm.cldm import ControlNet
from comfy.model_patcher import ModelPatcher
from torch import nn

# Attributes of a module that ComfyUI's ``ModelPatcherDynamic`` sets, and that belong to its weights on a GPU.
# For most of them the module's class has a default.
_OF_DYNAMIC = (
    "_pin_state", "_pins", "_v", "_v_block", "_v_signature", "bias_function", "bias_lowvram_function",
    "comfy_cast_weights", "current_weight_patches_uuid", "dynamic_patchers", "dynamic_pins", "dynamic_vbars",
    "model_loaded_weight_memory", "model_lowvram", "weight_function", "weight_lowvram_function",
)  # fmt: skip
# A dict from a model under DynamicVRAM to an unchanged ``ModelPatcher`` of a second model, which was loaded
# from the same file without DynamicVRAM. Clones of a ``ModelPatcher`` share its model, so they also share the
# second model.
_loaded: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def is_dynamic(patcher: Any) -> bool:
    """True if the model of ``patcher`` is dynamic: ComfyUI may move its weights between two calls."""
    # Older releases of ComfyUI have no DynamicVRAM, and their ``ModelPatcher`` has no method ``is_dynamic``.
    return bool(getattr(patcher, "is_dynamic", bool)())


def reason_to_stay(patcher: Any, beside: Iterable[Any] = ()) -> str | None:
    """Why the model of ``patcher`` must stay under DynamicVRAM; None if ``clone`` can load it without.

    ``beside``: the ``ModelPatcher`` objects whose models are loaded at the same time.
    """
    if patcher.cached_patcher_init is None and not isinstance(patcher.model, ControlNet):
        return "DynamicVRAM moves its weights, and its loader cannot load it the older way"
    sizes = sum(each.model_size() for each in (patcher, *beside))
    needed = sizes + model_management.minimum_inference_memory()
    total = model_management.get_total_memory(patcher.load_device)
    if needed > total:
        return (
            f"DynamicVRAM moves its weights, and it does not fit the GPU: it needs {_gib(needed)} of "
            f"{_gib(total)}"
        )
    return None


def clone(patcher: Any) -> Any:
    """Returns a clone of ``patcher`` whose model is not under DynamicVRAM.

    If the model of ``patcher`` is under DynamicVRAM, the first call loads a second model from the same file,
    or copies a ControlNet. Later calls for this model use the second model again. If ``reason_to_stay`` gives
    a reason, the clone's model stays under DynamicVRAM.
    """
    if not is_dynamic(patcher) or reason_to_stay(patcher) is not None:
        return patcher.clone()
    stock = _loaded.get(patcher.model)
    if stock is None and patcher.cached_patcher_init is None:
        second = ModelPatcher(_copy_of(patcher.model), patcher.load_device, patcher.offload_device)
    else:
        second = stock
    model = None if second is None else second.get_clone_model_override()
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


def _copy_of(model: nn.Module) -> nn.Module:
    """A copy of ``model``, a dynamic one, as ComfyUI makes it without DynamicVRAM."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                # A dynamic layer keeps the dtype of the file, and converts its weights at each call.
                dtype = getattr(module, f"{name}_comfy_model_dtype", None) or weight.dtype
                own = weight.detach().to(model_management.unet_offload_device(), dtype)
                memo[id(weight)] = nn.Parameter(own, requires_grad=False)
        for value in (vars(module).get(name) for name in _OF_DYNAMIC):
            if isinstance(value, (dict, list, set, tuple)) or callable(value):
                memo[id(value)] = None
    found = copy.deepcopy(model, memo)
    for module in found.modules():
        for name in _OF_DYNAMIC:
            vars(module).pop(name, None)
    return found


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
