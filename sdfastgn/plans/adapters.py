"""Plans of models with adapters, such as LoRAs. A plan is a traced call that runs without the model's Python.

In the trace, a plain layer with a merged weight replaces each layer with adapters. The merged weight is the
layer's own weight plus what the adapters add to it. Merged weights (``patches/lora``) have memory of their
own, and a plan reads them as it reads parameters.

Before a plan runs, an ``AdapterSurvey`` compares the adapters and their scales with those of the last call.
If they have changed, it writes new merged weights into the same memory. While the GPU runs the plan, the
survey compares all tensors from which the merged weights are computed. If one has changed, the plan runs
again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from torch import nn

from sdfastgn.patches.graphs.arguments import Unsupported
from sdfastgn.patches.graphs.lora_scale import LoraScale
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.lora.adapter_survey import AdapterSurvey
from sdfastgn.patches.lora.adapters import has_adapters, reason_not_merged
from sdfastgn.patches.lora.merged_weights import changing
from sdfastgn.patches.lora.merging import is_frozen
from sdfastgn.plans.trace.traced import Traced, Untraceable

# A plan, which replaces the Python of a traced call, runs at most this many times for one call. It runs again
# if another thread has changed adapters while the plan read the merged weights.
_MOST_RUNS = 4
_OTHERS = "another thread changes its adapters"

R = TypeVar("R")


class Unmerged(Exception):  # noqa: N818  # callers catch it, and run the model's own code
    """The merged weights of a model's adapters cannot be brought up to date. The message says why."""


class Adapters:
    """The layers of ``module`` that have adapters, such as a LoRA, and their merged weights.

    An object is valid as long as nobody replaces functions that the module's code calls.

    ``has_replaced``: True if other code has replaced such functions before. Then no layer runs with a merged
    weight, because a merged layer would ignore the replacement.

    Attributes:
        survey: compares the adapters of all layers that run with merged weights, and writes the weights.
        reason: why calls of the module cannot be traced; None if they can.
        layers: a dict from each plain layer with a merged weight to the layer of the model that it replaces.
    """

    def __init__(self, module: nn.Module, has_replaced: bool = False) -> None:
        why = None
        if has_adapters(module):
            why = "code that they run was replaced" if has_replaced else reason_not_merged(module)
            if why is None:
                # The layers' own weights are made channels-last before merged weights are computed from
                # them, because merged weights get the same strides.
                channels_last.lay_out_weights(module)
        self.survey = AdapterSurvey(module, merges=why is None)
        if why is None and not self.survey.takes_scale:
            why = reason_not_merged(module) or "they are not merged yet"
        self.reason = None if why is None else f"it has layers with adapters, such as a LoRA: {why}"
        self.layers = self.survey.stand_ins

    def scale(self, module: nn.Module, kwargs: dict[str, Any]) -> LoraScale:
        """Finds the number in a call's arguments by which the scales of all adapters are multiplied.

        Raises Unsupported if the scale is no number.
        """
        scale = LoraScale(module, kwargs, self.survey)
        if self.layers and scale.is_left:
            raise Unsupported("the scale of its adapters is no number")
        return scale

    def refresh(self, factor: float) -> None:
        """Bring all merged weights up to date, with the scales of all adapters multiplied by ``factor``.

        Raises Unmerged if the adapters cannot be merged any more.
        """
        if not self.survey.refresh(factor):
            raise Unmerged(self.survey.reason)

    def check(self, traced: Traced) -> None:
        """Raise Untraceable if the traced call has read the weights of an adapter instead of merged ones."""
        own = {part for layer in self.survey.layers for part in layer.modules()} - {*self.layers.values()}
        if any(module in own for module, *_ in traced.parameters):
            raise Untraceable("a layer with an adapter runs its own code")

    def check_written(self, factor: float) -> None:
        """Raise Unsupported if merged weights are outdated, because another thread has changed adapters."""
        if not self.survey.is_written(factor):
            raise Unsupported(_OTHERS)

    def run(self, run: Callable[[], R | None], factor: float, *, is_capture: bool, is_once: bool) -> R | None:
        """Bring merged weights up to date, call ``run()``, and return its result.

        If adapters have changed while ``run`` computed, call it again. Only one thread at a time may call
        this method.

        Raises Unmerged if the adapters cannot be merged any more, and Unsupported if another thread changes
        adapters in each attempt.

        Args:
            run: runs a plan, and compares the model with what was traced. If it returns None, this method
                returns None at once.
            factor: a number by which the scales of all adapters are multiplied.
            is_capture: True in the capture of a CUDA graph, where no weights may be written.
            is_once: True if ``run`` may be called only once, for instance because it writes into arguments.
                Then other threads that want to change adapters wait until it returns.
        """
        survey = self.survey
        if not survey.layers:
            return run()
        if is_capture or is_frozen():
            self.check_written(factor)
            return run()
        with changing if is_once else nullcontext():
            is_quick = not is_once
            for _ in range(_MOST_RUNS):
                is_written = is_quick and survey.has_same_settings(factor)
                if not (is_written or survey.refresh(factor, compares_later=is_quick)):
                    raise Unmerged(survey.reason)
                survey.wait()
                result = run()
                if result is None or is_once or self._is_still_current(factor):
                    return result
                is_quick = False
        raise Unsupported(_OTHERS)

    def _is_still_current(self, factor: float) -> bool:
        survey = self.survey
        return survey.is_current(factor) and survey.has_same_tensors() and survey.has_same_contents()
