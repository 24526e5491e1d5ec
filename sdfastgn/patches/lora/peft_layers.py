"""Subclasses of peft's LoRA layers for ``nn.Linear`` and ``nn.Conv2d`` that run with merged weights.

With gradients nothing is merged: ``MergedLinear`` runs the code of ``trained_adapters.py`` if possible, and
``MergedConv2d`` runs peft's code.

This file imports peft. So it is only imported after other code has imported peft's layers (diffusers does so
if peft is installed), or when one of these classes is unpickled.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import layer as lora
from torch import nn

from sdfastgn.kernels.common.setting import setting
from sdfastgn.patches.lora import merged_weights, merging, wrappers
from sdfastgn.patches.lora.trained_adapters import trained
from sdfastgn.patches.swap.fusion import register_fused

# Attributes of peft's LoRA layer through which other code reaches the weights. Such code may write into them.
# So merged weights count as outdated after one of these attributes was read.
_DOORS = frozenset(("base_layer", "lora_A", "lora_B"))


class _MergedLayer(nn.Module):
    """The methods of LoRA layers that run with merged weights (``merging.py``).

    The methods also notice when other code may change the weights of the layer or its adapters.
    """

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        layer = None if args or kwargs else merging.merged_layer(self)
        return super().forward(x, *args, **kwargs) if layer is None else layer(x)

    def __getattr__(self, name: str) -> Any:
        if name in _DOORS:
            merged_weights.may_change(self)
        return super().__getattr__(name)

    def set_adapter(self, adapter_names: Any, *args: Any, **kwargs: Any) -> None:
        """Runs peft's method ``set_adapter``, but skips it if it would change nothing.

        peft's method reads the adapters' layers, but writes no weight, so merged weights stay valid.
        diffusers calls it for each layer even when only scales change, and it takes most of the time of
        ``set_adapters``.
        """
        if not (args or kwargs) and self._is_set(adapter_names):
            vars(self)["_active_adapter"] = adapter_names
            return
        with setting(merged_weights.only_reads, True):
            super().set_adapter(adapter_names, *args, **kwargs)  # type: ignore[misc]

    def _is_set(self, names: Any) -> bool:
        """True if peft's ``set_adapter(names)`` would surely change nothing.

        This is so if ``names`` is the list of active adapters, and exactly their parameters require
        gradients. False in cases that are not checked, such as adapters of embeddings.
        """
        own: Any = vars(self)
        if type(names) is not list or names != own["_active_adapter"]:
            return False
        # peft's ``frozen_peft_weight_names`` names parameters that never require gradients. If there are
        # some, the comparison of ``requires_grad`` below would be wrong.
        if getattr(self, "frozen_peft_weight_names", None):
            return False
        for kind in self.adapter_layer_names:
            part = own["_modules"].get(kind)
            # Adapters of embeddings have parameters in ``part`` itself. They are not checked.
            if part is None or part._parameters:
                return False
            for name, layer in part._modules.items():
                is_active = name in names
                for parameter in layer._parameters.values():
                    if parameter is not None and parameter.requires_grad != is_active:
                        return False
        return True

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Frees the merged weights when ``.to()`` or a similar method moves the layer.

        The next call of the layer computes its merged weights again.
        """
        merged_weights.move(self)
        return super()._apply(*args, **kwargs)


class MergedLinear(_MergedLayer, lora.Linear):
    """``peft.tuners.lora.layer.Linear`` with merged weights. In training: with fewer passes over results."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        y = None if args or kwargs else trained(self, x)
        return super().forward(x, *args, **kwargs) if y is None else y


class MergedConv2d(_MergedLayer, lora.Conv2d):
    """``peft.tuners.lora.layer.Conv2d`` that runs with merged weights."""


_SUBCLASSES: dict[type[nn.Module], type[nn.Module]] = {lora.Linear: MergedLinear, lora.Conv2d: MergedConv2d}
for _stock, _merged in _SUBCLASSES.items():
    register_fused(_merged, _stock)
wrappers.know(_SUBCLASSES)
