"""Keeps models of ComfyUI fused between two decodes or runs of the sampler.

ComfyUI loads a VAE at each decode and encode, and a UNet when the sampler begins. If the weights are already
on the GPU and have their patches, ComfyUI still ejects all injections, and then injects them again. It does
the same twice when the sampler ends, to remove patches that most models do not have (those of hooks). For
sdfastgn each time restores and replaces the classes of all modules, and copies the weights of convolutions
into another layout and back.

The ``ModelPatcher`` of an optimized model is a ``StayingPatcher``. While ComfyUI does so (``staying``), it
ignores the ejection and the injection, until ComfyUI is about to change something in the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from comfy import model_management
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP
from torch import nn

from sdfastgn.patches.code.states import replaced_in_calls

# The name of the wrapper in a ``ModelPatcher``.
_KEY = "sdfastgn stays"
# Model -> the ``StayingPatcher`` that has injected it last. A model has no entry after an ejection by any of
# them. The attribute ``is_injected`` does not say this: a clone gets a copy of it.
_injected_by: weakref.WeakKeyDictionary[nn.Module, weakref.ref[StayingPatcher]] = weakref.WeakKeyDictionary()


class StayingPatcher(ModelPatcher):
    """A ``ModelPatcher`` that can ignore an ejection after which ComfyUI changes nothing.

    Attributes:
        stays: True while ejections are ignored.
        is_ejected: True after an ignored ejection, until the injection that follows it.
    """

    stays = False
    is_ejected = False

    def is_unchanged(self) -> bool:
        """True if the whole model is loaded and fused, and has the weights and objects that it shall have."""
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
            and not replaced_in_calls(model)  # an injection would choose other blocks, or plans
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
        """Make up for an ignored ejection, and ignore none from now on."""
        was_ejected, self.stays, self.is_ejected = self.is_ejected, False, False
        if was_ejected:
            self.eject_model()

    # ---- what changes the model

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
    """A context in which ComfyUI loads or cleans ``patcher``, and no other ``ModelPatcher`` of its model.

    In the context the model may stay fused.
    """
    if not isinstance(patcher, StayingPatcher) or patcher.stays or not patcher.is_unchanged():
        yield
        return
    patcher.stays = True
    try:
        yield
    finally:
        # ComfyUI takes a model off its list before it loads it again. An error in between leaves it there.
        if not any(each.model is patcher for each in model_management.current_loaded_models):
            patcher.is_ejected = True
        patcher.leave()


def stay_fused(patcher: Any) -> None:
    """Let ``patcher``, a new clone, and its own clones stay fused between two runs of the sampler.

    Does nothing for a ``ModelPatcher`` under DynamicVRAM, or of another node, which have other classes.
    """
    if type(patcher) is ModelPatcher:
        patcher.__class__ = StayingPatcher
    if isinstance(patcher, StayingPatcher) and hasattr(WrappersMP, "PREPARE_SAMPLING"):  # not in old releases
        patcher.remove_wrappers_with_key(WrappersMP.PREPARE_SAMPLING, _KEY)
        patcher.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, _KEY, _load)


def _load(executor: Any, patcher: Any, *args: Any, **options: Any) -> Any:
    """Runs ComfyUI's function that loads the sampler's model. ``executor``: calls this function."""
    with staying(patcher):
        return executor(patcher, *args, **options)
