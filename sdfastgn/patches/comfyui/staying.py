"""Keeps models of ComfyUI fused between two decodes or runs of the sampler.

An *injection* is a pair of functions of a node, such as sdfastgn's. ComfyUI calls one when it has loaded the
model (it *injects*), and the other before it changes or unloads the model (it *ejects*). ComfyUI loads a VAE
at each decode and encode, and a UNet when the sampler begins. If the weights are already on the GPU and have
their patches, ComfyUI still ejects all injections, and then injects them again. ComfyUI does the same twice
when the sampler ends, to remove patches of hooks, which most models do not have. Each time, sdfastgn would
restore and replace the classes of all modules, and would copy the weights of convolutions into another layout
and back.

The ``ModelPatcher`` of an optimized model is a ``StayingPatcher``. Inside of the context ``staying``, it
ignores such an ejection and the injection after it, until ComfyUI is about to change something in the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from comfy import model_management
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP
from torch import nn

from sdfastgn.patches.code.states import replaced_in_calls

# The name under which a ``ModelPatcher`` has sdfastgn's wrapper around the function that loads the model.
_KEY = "sdfastgn stays"
# A dict from a model to the ``StayingPatcher`` that has injected it last. After an ejection the model has no
# entry. The attribute ``is_injected`` does not show which ``ModelPatcher`` has injected the model, because a
# clone gets a copy of the attribute.
_injected_by: weakref.WeakKeyDictionary[nn.Module, weakref.ref[StayingPatcher]] = weakref.WeakKeyDictionary()


class StayingPatcher(ModelPatcher):
    """A ``ModelPatcher`` that can ignore an ejection after which ComfyUI changes nothing.

    Attributes:
        stays: True while ejections are ignored, so that the model stays fused.
        is_ejected: True after an ignored ejection, until the injection that follows.
    """

    stays = False
    is_ejected = False

    def is_unchanged(self) -> bool:
        """True if the whole model is loaded and fused, and a new load by ComfyUI would change nothing."""
        model, unknown = self.model, object()
        by = _injected_by.get(model)
        return (
            by is not None
            and by() is self
            and getattr(model, "current_weight_patches_uuid", unknown) == self.patches_uuid
            and getattr(model, "model_lowvram", unknown) is False
            and getattr(model, "model_loaded_weight_memory", 0) > 0
            and not (self.object_patches or self.object_patches_backup)
            and getattr(self, "forced_hooks", None) is getattr(self, "current_hooks", None) is None
            # If other code has replaced code that the model calls, the model counts as changed, so that an
            # injection decides anew what is fused.
            and not replaced_in_calls(model)
        )

    def eject_model(self) -> None:
        if self.stays:
            self.is_ejected = True
        else:
            _injected_by.pop(self.model, None)
            super().eject_model()

    def inject_model(self) -> None:
        if not self.is_ejected or self.skip_injection:
            was_injected = self.is_injected
            super().inject_model()
            if self.is_injected and not was_injected:
                _injected_by[self.model] = weakref.ref(self)
            return
        self.is_ejected = False
        for callback in self.get_all_callbacks(CallbacksMP.ON_INJECT_MODEL):
            callback(self)

    def leave(self) -> None:
        """Ignore no ejections from now on. If an ejection was ignored just now, eject the model."""
        was_ejected, self.stays, self.is_ejected = self.is_ejected, False, False
        if was_ejected:
            self.eject_model()

    # ---- methods by which ComfyUI changes the model. Each first ejects the model if an ejection was ignored

    def load(self, *args: Any, **options: Any) -> Any:
        self.leave()
        return super().load(*args, **options)

    def partially_unload(self, *args: Any, **options: Any) -> Any:
        self.leave()
        return super().partially_unload(*args, **options)

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
        if unpatch_weights:
            self.leave()
        return super().unpatch_model(device_to, unpatch_weights)

    def patch_hooks(self, hooks: Any) -> Any:
        if hooks is not None:
            self.leave()
        return super().patch_hooks(hooks)

    def unpatch_hooks(self, *args: Any, **options: Any) -> Any:
        if self.hook_backup:
            self.leave()
        return super().unpatch_hooks(*args, **options)

    def clean_hooks(self) -> None:
        with staying(self):
            super().clean_hooks()


@contextmanager
def staying(patcher: Any) -> Iterator[None]:
    """A context in which the model of ``patcher`` stays fused although ComfyUI ejects and injects it.

    In this context ComfyUI may load or clean ``patcher``, but no other ``ModelPatcher`` of the same model.
    """
    if not isinstance(patcher, StayingPatcher) or patcher.stays or not patcher.is_unchanged():
        yield
        return
    patcher.stays = True
    try:
        yield
    finally:
        # ComfyUI takes a model off its list of loaded models before it loads the model again. If the load
        # fails, the model is not in the list, so it is ejected here.
        if not any(each.model is patcher for each in model_management.current_loaded_models):
            patcher.is_ejected = True
        patcher.leave()


def stay_fused(patcher: Any) -> None:
    """Let the model of ``patcher``, a new clone, stay fused between two runs of the sampler.

    The same then holds for clones of ``patcher``. Nothing is done for a ``ModelPatcher`` of another class, as
    models under DynamicVRAM and some other nodes have.
    """
    if type(patcher) is ModelPatcher:
        patcher.__class__ = StayingPatcher
    if isinstance(patcher, StayingPatcher):
        wrap_load(patcher, _KEY, _load)


def wrap_load(patcher: Any, key: str, wrapper: Callable[..., Any]) -> None:
    """Let ``wrapper`` run around ComfyUI's function that loads the sampler's models, for runs of ``patcher``.

    It replaces a wrapper with the same ``key``. Old releases of ComfyUI have no such wrappers, so with these
    releases this does nothing: models do not stay fused between runs, and ControlNets run as stock.
    """
    if hasattr(WrappersMP, "PREPARE_SAMPLING"):
        patcher.remove_wrappers_with_key(WrappersMP.PREPARE_SAMPLING, key)
        patcher.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, key, wrapper)


def _load(executor: Any, patcher: Any, *args: Any, **options: Any) -> Any:
    """Runs ComfyUI's function that loads the sampler's model. Meanwhile the model stays fused.

    ``executor`` calls ComfyUI's function.
    """
    with staying(patcher):
        return executor(patcher, *args, **options)
