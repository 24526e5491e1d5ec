"""Finds layers with an adapter, such as a LoRA, and says why some of them run peft's code.

A *wrapper* is any layer of peft that has a layer of the model as its child. LoRA layers (``wrappers.py``) run
with merged weights where that is possible. Any other wrapper is called as in unchanged diffusers: the wrapper
runs the layer and the adapter's small layers, and adds the results.

peft is not imported here: a wrapper is recognized by the names of its children. Other code may use these
names for modules without an adapter. So the report, and the error that ``strict=True`` raises, name a wrapper
only if its class is also based on a class of peft.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from sdfastgn.patches.lora.merging import has_new, is_allowed, waits, why_not
from sdfastgn.patches.swap.exclusive import call_entry
from sdfastgn.patches.swap.fusion import stock_class

# peft's names for the model's own layer inside a wrapper. All other children belong to the adapter.
# ``base_layer`` is in wrappers that add the result of an adapter to the layer's result, such as LoRA's.
# ``original_module`` is in wrappers that train a copy of the whole layer.
WRAPPED = ("base_layer", "original_module")

# The name of a base class of models that can have adapters. diffusers and transformers both have such a
# class.
_MIXIN = "PeftAdapterMixin"

_ALONE = "stock's code runs the layer by itself"


def takes_adapters(modules: Sequence[nn.Module]) -> bool:
    """True if a model has layers with adapters of peft, or if diffusers or transformers can give it some.

    ``modules``: the model and all modules in it.
    """
    return any(cls.__name__ == _MIXIN for cls in type(modules[0]).__mro__) or any(map(is_adapted, modules))


def adapted_layers(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yields each of ``modules`` that is peft's wrapper around a layer with an adapter."""
    return filter(_has_layer_inside, modules)


def unmerged_layers(
    root: nn.Module, prefix: str = "", merges: bool | None = None, with_waiting: bool = False
) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields (path, layer, reason) of each layer in ``root`` that runs peft's code because of its adapter.

    Args:
        root: a model.
        prefix: the path of ``root``.
        merges: True if LoRAs may run with merged weights. None: use what was chosen when ``root`` was
            optimized.
        with_waiting: True also yields layers that can run with merged weights, but have none yet.
    """
    for path, module in root.named_modules(prefix=prefix):
        # ``optimize(merge_adapters=False)`` forbids merging for the model and for the layers that it has at
        # this time. For a LoRA layer that was added later, merging is forbidden only through the model. So
        # ``is_allowed`` is called for both the model and the layer.
        is_merging = is_allowed(root) and is_allowed(module) if merges is None else merges
        reason = adapter_reason(module, is_merging)
        if reason is None and with_waiting and waits(module):
            # The layer has no merged weights, but can get some. Its adapter may be new. Or ``.to()`` has
            # freed the merged weights: then the layer has kept the class that sdfastgn gave it, and the next
            # call merges again.
            reason = f"its adapter (LoRA) is not merged yet: {_when_merged(root, module)}"
        if reason is not None:
            yield path, module, reason


def is_adapted(layer: nn.Module) -> bool:
    """True if ``layer`` is a layer of peft with an adapter, around a layer of the model."""
    return _has_layer_inside(layer) and _is_of_peft(layer)


def has_adapters(root: nn.Module) -> bool:
    """True if a layer of ``root`` has an adapter of peft."""
    return any(map(is_adapted, root.modules()))


def reason_not_merged(root: nn.Module) -> str | None:
    """Why a layer of ``root`` with an adapter must run peft's code; None if all run with merged weights."""
    for layer in filter(is_adapted, root.modules()):
        is_on = is_allowed(root) and is_allowed(layer)
        why = why_not(layer) if is_on else "merge_adapters is False"
        if why is not None:
            return why
    return None


def _when_merged(root: nn.Module, layer: nn.Module) -> str:
    """Says for the report which call of the optimized model ``root`` will merge the adapter of ``layer``."""
    if stock_class(layer) is not type(layer):
        return "its next call without gradients merges it"
    if call_entry(root) is not None and has_new(root):
        return "the next call of its model without gradients merges it"
    return "the next call of its model that can become a CUDA graph merges it, and so does sdfastgn.optimize"


def adapter_reason(layer: Any, merges: bool = True) -> str | None:
    """Why ``layer`` runs peft's code because of its adapter, in words for the report.

    None if ``layer`` has no adapter, or an adapter that can be merged. If the user can do something about the
    reason, the text says what. ``merges``: False if the model must not get merged weights.
    """
    if isinstance(getattr(layer, "lora_layer", None), nn.Module):  # an old diffusers adds LoRAs without peft
        return f"it has an adapter (LoRA): {_ALONE}"
    if not (isinstance(layer, nn.Module) and is_adapted(layer)):
        return None
    if hasattr(layer, "original_module"):
        return f"an adapter trains a copy of it: {_ALONE}"
    why = why_not(layer) if merges else "merge_adapters is False"
    if why is None:
        return None
    if getattr(layer, "merged", False):
        return (
            f"its adapter (LoRA) is fused, but still wrapped around it: {_ALONE} ({why}); "
            "unload_lora_weights() makes it a plain layer that keeps the fused weights"
        )
    if getattr(layer, "disable_adapters", False) or not getattr(layer, "active_adapters", True):
        return (
            f"its adapter (LoRA) is off, but still wrapped around it: {_ALONE} ({why}); "
            "unload_lora_weights() makes it a plain layer"
        )
    return (
        f"it has an adapter (LoRA): {_ALONE}, then the adapter's own small products and their sum ({why}); "
        "fuse_lora() and then unload_lora_weights() make it a plain layer"
    )


def _has_layer_inside(module: nn.Module) -> bool:
    return any(name in WRAPPED for name, _ in module.named_children())


def _is_of_peft(module: nn.Module) -> bool:
    """True if the class of ``module``, or one of its base classes, is defined in the package peft."""
    return any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__)
