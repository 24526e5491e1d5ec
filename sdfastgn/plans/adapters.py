"""Layers with adapters in plans: each is traced as the plain layer with merged weights that replaces it.

Merged weights (``patches/lora``) have memory of their own, which a plan reads like that of parameters. Before
a plan runs, an ``AdapterSurvey`` writes new weights into this memory if adapters or scales have changed.
While the GPU works, it compares everything else from which they are computed, as for CUDA graphs.
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

# A plan runs this many times at most if other threads write the merged weights while it reads them.
_MOST_RUNS = 4
_OTHERS = "another thread changes its adapters"

R = TypeVar("R")


class Unmerged(Exception):  # noqa: N818  # no error for callers: they run upstream's code
    """A layer cannot run merged any more, or its merged weights are in other memory. The message says why."""


class Adapters:
    """The layers with adapters in ``module``, in one state of its code.

    ``has_replaced``: True if other code has replaced parts of what the module runs. Then no layer is merged.

    Attributes:
        survey: compares the layers that run merged.
        reason: why calls of the module can have no plans; None if they can.
        layers: each plain layer with merged weights -> the layer of the model that it replaces.
    """

    def __init__(self, module: nn.Module, has_replaced: bool = False) -> None:
        why = None
        if has_adapters(module):
            why = "code that they run was replaced" if has_replaced else reason_not_merged(module)
            if why is None:
                # Merged weights get the strides of the weights from which they are computed.
                channels_last.lay_out_weights(module)
        self.survey = AdapterSurvey(module, merges=why is None)
        if why is None and not self.survey.takes_scale:
            why = reason_not_merged(module) or "they are not merged yet"
        self.reason = None if why is None else f"it has layers with adapters, such as a LoRA: {why}"
        self.layers = self.survey.stand_ins

    def scale(self, module: nn.Module, kwargs: dict[str, Any]) -> LoraScale:
        """The scale for all adapters among the arguments of a call. Raises Unsupported if it is no number."""
        scale = LoraScale(module, kwargs, self.survey)
        if self.layers and scale.is_left:
            raise Unsupported("the scale of its adapters is no number")
        return scale

    def refresh(self, factor: float) -> None:
        """Bring all merged weights up to date, with all scales multiplied by ``factor``. Raises Unmerged."""
        if not self.survey.refresh(factor):
            raise Unmerged(self.survey.reason)

    def check(self, traced: Traced) -> None:
        """Raise Untraceable if the trace has read the weights of an adapter."""
        own = {part for layer in self.survey.layers for part in layer.modules()} - {*self.layers.values()}
        if any(module in own for module, *_ in traced.parameters):
            raise Untraceable("a layer with an adapter runs its own code")

    def check_written(self, factor: float) -> None:
        """Raise Unsupported if merged weights are outdated, because another thread has changed adapters."""
        if not self.survey.is_written(factor):
            raise Unsupported(_OTHERS)

    def run(self, run: Callable[[], R | None], factor: float, *, is_capture: bool, is_once: bool) -> R | None:
        """``run()``, which reads merged weights that are up to date. Raises Unmerged and Unsupported.

        Only one thread at a time may call it.

        Args:
            run: runs a plan and compares the model. It may run again, unless its result is None.
            factor: all scales are multiplied by it.
            is_capture: True in the capture of a CUDA graph, where no weights may be written.
            is_once: True if ``run`` may run only once. Then other threads that change adapters wait.
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
