"""Reads the scale of all LoRAs from a call's arguments, such as ``cross_attention_kwargs={"scale": 0.5}``.

The argument is called ``cross_attention_kwargs`` in UNets, and ``attention_kwargs`` or
``joint_attention_kwargs`` in transformers.

diffusers multiplies the scales in all LoRA layers by this number when a forward begins, and divides them by
this number when the forward ends. If all LoRA layers run with merged weights (``merging.py``), the
number is removed from the arguments and becomes part of the merged weights. So calls with different scales
share one graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from sdfastgn.patches.graphs.models import lora_scale_of
from sdfastgn.patches.lora.adapter_survey import AdapterSurvey
from sdfastgn.patches.lora.sources import is_class_of_scales

_ITEM = "scale"


class LoraScale:
    """The number in the arguments of one call by which the scales of all LoRAs are multiplied.

    Attributes:
        kwargs: the call's keyword arguments. The number is removed if it becomes part of the merged weights.
        factor: the number; 1.0 if the arguments have none.
        in_forward: ``factor`` if it was removed from ``kwargs``, else 1.0. While the forward runs, the scales
            of all layers with merged weights must be multiplied by this number.
        is_left: True if ``kwargs`` has a scale that was not removed.
    """

    __slots__ = ("factor", "in_forward", "is_left", "kwargs")

    def __init__(self, module: nn.Module, kwargs: dict[str, Any], survey: AdapterSurvey) -> None:
        self.kwargs, self.factor, self.in_forward = kwargs, 1.0, 1.0
        name = lora_scale_of(module) or ""
        options = kwargs.get(name)
        self.is_left = isinstance(options, Mapping) and _ITEM in options
        if type(options) is not dict or not is_class_of_scales(type(options.get(_ITEM))):
            return
        self.factor = float(options[_ITEM])
        if survey.takes_scale:
            self.in_forward, self.is_left = self.factor, False
            others = {key: value for key, value in options.items() if key != _ITEM}
            self.kwargs = {key: value for key, value in kwargs.items() if key != name}
            if others:
                self.kwargs[name] = others

    def end(self, module: nn.Module) -> None:
        """After a call with the scale 0, set the scales of all active LoRAs to their initial values.

        diffusers sets them at the end of such a forward. If the scale was removed from the arguments,
        diffusers does not know of the scale, so this method sets them.
        """
        if self.factor == 0 and self.in_forward == 0:
            from diffusers.utils.peft_utils import unscale_lora_layers

            unscale_lora_layers(module, 0.0)
