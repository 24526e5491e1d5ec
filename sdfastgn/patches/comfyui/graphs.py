"""Runs ComfyUI's ``UNetModel`` and ``ControlNet`` as CUDA graphs, if no other node runs code inside of them.

Other nodes put code into a UNet as entries of ``transformer_options``: patches, or functions that replace an
attention. A call with such an entry, or with an unknown entry, runs without a graph. ComfyUI's own entries
only inform other nodes about the call, so a graph does not need them. Wrappers that other nodes install run
around ``_forward``, outside of the graph.

The tensors of ControlNets and T2I-Adapters (``control``) are inputs of the graph like all other tensors.
ComfyUI's forward removes each tensor that it uses from the caller's lists. So a graph gets copies of the
lists, and ``_forward`` removes the tensors from the caller's lists afterwards.

Calls are counted for the report: ``begin_run`` marks the start of a sampler's run, and ``calls_of_run``
returns the counts since then.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from comfy import model_management
from comfy.cldm.cldm import ControlNet
from comfy.ldm.modules.attention import CrossAttention
from comfy.ldm.modules.diffusionmodules import openaimodel
from comfy.ldm.modules.diffusionmodules.openaimodel import TimestepEmbedSequential, UNetModel
from torch import Tensor, nn

from sdfastgn.patches.comfyui.inference_mode import outside_inference_mode
from sdfastgn.patches.comfyui.layers import restore
from sdfastgn.patches.graphs.forward import GraphedForward, Planner
from sdfastgn.patches.offload.moves import follow_moves, stop_following
from sdfastgn.patches.swap.fusion import ClassSwap
from sdfastgn.patches.swap.instance_entries import InstanceEntry
from sdfastgn.patches.swap.tested_sources import tested

# Names of the entries in ``transformer_options`` that ComfyUI's own sampling and a UNet's forward add. A call
# with any other entry runs without a CUDA graph. Other nodes may put code into the entries ``patches`` and
# ``patches_replace``, so ``_other_nodes`` also looks into these two.
HARMLESS = frozenset(
    (
        "activations_shape", "block", "block_index", "callbacks", "cond_or_uncond", "original_shape",
        "patches", "patches_replace", "prefetch_dynamic_vbars", "sample_sigmas", "sigmas",
        "transformer_index", "uuids", "wrappers",
    )
)  # fmt: skip

# A dict from a UNet to the object that keeps the UNet's CUDA graphs. The graphs stay after the UNet was
# restored, and the next run of the sampler can use them. If the UNet is moved before that, its graphs are
# dropped.
_graphs: weakref.WeakKeyDictionary[nn.Module, GraphedForward] = weakref.WeakKeyDictionary()
# The counts of each UNet's calls when the sampler's last run began: the number of calls that were replays of
# CUDA graphs, and for each reason the number of calls without a graph.
_before_run: weakref.WeakKeyDictionary[nn.Module, tuple[int, Counter[str]]] = weakref.WeakKeyDictionary()


def begin_run(unet: nn.Module) -> None:
    """Mark the start of a sampler's run. ``calls_of_run`` counts the calls since then."""
    graphed = _graphs.get(unet)
    if graphed is not None:
        _before_run[unet] = graphed.replays, graphed.eager.copy()


def calls_of_run(unet: nn.Module) -> tuple[int, Counter[str]]:
    """Returns (number of replayed calls, {reason: number of calls without a graph}) since ``begin_run``."""
    graphed = _graphs.get(unet)
    if graphed is None:
        return 0, Counter()
    replays, eager = _before_run.get(unet, (0, Counter()))
    return graphed.replays - replays, graphed.eager - eager


def install(unet: nn.Module, mode: str | bool, planner: Planner | None = None) -> None:
    """Let calls of ``unet`` become CUDA graphs; if ``mode`` is False, drop its graphs and make no new ones.

    The calls are those of its method ``call_alone``, which runs if no other node has put code into a call.

    Args:
        unet: a model of a class of sdfastgn with this method: a UNet or a ControlNet.
        mode: "auto" captures the second call with the same shapes and arguments, True the first, False none.
        planner: makes plans for the calls (traced lists of kernels), which run in place of the method's
            Python; None for no plans.
    """
    graphed = _graphs.get(unet)
    if graphed is None or graphed.planner != planner:
        drop(unet)
        graphed = _graphs[unet] = GraphedForward(unet, mode, method="call_alone", planner=planner)
    graphed.mode = mode
    if mode is False:
        graphed.clear()


def graphs_of(unet: nn.Module) -> GraphedForward | None:
    """The object that keeps the CUDA graphs of ``unet`` and counts its calls; None if it never had one."""
    return _graphs.get(unet)


def drop(unet: nn.Module) -> None:
    """Drop all CUDA graphs and plans (traced lists of kernels) of ``unet``.

    This frees their memory, and the weights to which they refer.
    """
    graphed = _graphs.get(unet)
    if graphed is not None:
        graphed.clear()
        for planned in graphed.planned:
            planned.clear()
    keep_at_moves(unet)


def drop_at_next_move(unet: nn.Module) -> None:
    """Let the next ``.to()`` of ``unet``, or of a module around it, drop the CUDA graphs of ``unet``.

    Its plans (traced lists of kernels that replace the model's Python) are dropped too.

    ComfyUI calls ``.to()`` when it unloads a model, and when it has removed a LoRA from the weights. The call
    may come from a clone of the ``ModelPatcher`` that is not optimized, and has no callbacks of sdfastgn.
    Repeated calls of this function change nothing.
    """
    graphed = _graphs.get(unet)
    has_any = graphed is not None and (graphed.mode is not False or graphed.planner is not None)
    if has_any and "_apply" not in vars(unet):
        follow_moves(_DropGraphs(unet))


def keep_at_moves(unet: nn.Module) -> None:
    """Let ``unet`` keep its CUDA graphs when it is moved.

    This ends what ``drop_at_next_move`` has begun.
    """
    stop_following(unet, _DropGraphs)


class _DropGraphs(InstanceEntry):
    """Replaces the method ``_apply`` of a UNet. ``.to()`` and similar methods call ``_apply``.

    A call drops the UNet's CUDA graphs, removes this replacement, and runs the original method.
    """

    __slots__ = ()

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        unet = self.module
        drop(unet)
        type(unet)._apply(unet, fn, recurse)
        return unet


class FusedUNetModel(UNetModel):
    """``UNetModel`` that runs as a CUDA graph where possible.

    Unless other nodes run code inside of the UNet, the UNet runs outside of inference mode, so that norms can
    use the mean and variance that were stored for their input (``inference_mode.py``).

    x (N, C, H, W), timesteps (N,), context (N, tokens, D) -> (N, C_out, H, W).
    """

    def _forward(
        self,
        x: Tensor,
        timesteps: Tensor | None = None,
        context: Any = None,
        y: Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        graphed = _graphs.get(self)
        if has_other_nodes(options, graphed):
            # Other nodes' code in the UNet may write into inference tensors. PyTorch allows this only in
            # inference mode, so inference mode stays on.
            return super()._forward(x, timesteps, context, y, control, options, **kwargs)
        with outside_inference_mode():
            if graphed is None:
                return super()._forward(x, timesteps, context, y, control, options, **kwargs)
            output = graphed(x, timesteps, context=context, y=y, control=control, **kwargs)
        if control is not None:
            _remove_used(self, control)
        return output

    def call_alone(self, *args: Any, control: Any = None, **kwargs: Any) -> Tensor:
        """Compute a call into which no other node has put code. ``control`` stays as it is."""
        if control is not None:
            control = {name: list(entries) for name, entries in control.items()}
        with keeping_interrupts():
            return super()._forward(*args, control=control, transformer_options={}, **kwargs)


class FusedControlNet(ControlNet):
    """``ControlNet`` that runs as a CUDA graph where possible. ComfyUI passes it no code of other nodes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        graphed = _graphs.get(self)
        with outside_inference_mode():
            return (graphed or self.call_alone)(*args, **kwargs)

    def call_alone(self, *args: Any, **kwargs: Any) -> Any:
        with keeping_interrupts():
            return super().forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Returns a copy of class ``ControlNet``. Other nodes may copy conditioning with its ControlNets.

        ComfyUI would not know that such a copy is fused, and would not restore it.
        """
        make, args, state, *_ = cast("tuple[Any, ...]", self.__reduce_ex__(2))
        found = memo[id(self)] = make(*args)
        found.__setstate__(copy.deepcopy(state, memo))
        restore(found)
        return found


@contextmanager
def keeping_interrupts() -> Iterator[None]:
    """A context for ComfyUI's code in a call that may run a second time, for instance if a capture fails.

    If the user has interrupted the run, ComfyUI raises an error, and clears its flag for interrupts. The flag
    is set again here, because the error may be ignored, and then the second run must raise it.
    """
    try:
        yield
    except model_management.InterruptProcessingException:
        model_management.interrupt_current_processing()
        raise


def _remove_used(unet: Any, control: dict[str, list[Any]]) -> None:
    """Remove from the lists in ``control`` what ComfyUI's forward removes: the last entry for each block.

    ``control`` has the tensors of ControlNets and T2I-Adapters.
    """
    for name, count in ("input", len(unet.input_blocks)), ("middle", 1), ("output", len(unet.output_blocks)):
        entries = control.get(name, [])
        del entries[max(0, len(entries) - count) :]


def has_other_nodes(options: dict[str, Any], graphed: GraphedForward | None) -> bool:
    """True if other nodes have put code into a call. Then the call is counted as one without a CUDA graph.

    ``options``: the ``transformer_options`` of the call. ``graphed``: counts the UNet's calls, unless it is
    None.
    """
    reason = _other_nodes(options)
    if reason is not None and graphed is not None:
        graphed.eager[reason] += 1
    return reason is not None


def _other_nodes(options: dict[str, Any]) -> str | None:
    """Returns a sentence with the names of other nodes' entries in a call; None if there are no such entries.

    ``options``: the ``transformer_options`` of a call.
    """
    names = {*options.get("patches", ()), *options.get("patches_replace", ()), *(options.keys() - HARMLESS)}
    return f"other nodes take part: {', '.join(sorted(map(str, names)))}" if names else None


UNET = ClassSwap(
    "comfyui_unet",
    UNetModel,
    FusedUNetModel,
    sources=(
        tested(UNetModel, "forward", "_forward"),
        tested(TimestepEmbedSequential, "forward"),
        tested(openaimodel, "forward_timestep_embed", "apply_control"),
        tested(CrossAttention, "forward"),
    ),
)

CONTROL_NET = ClassSwap("comfyui_control_net", ControlNet, FusedControlNet)


def is_capturable(module: nn.Module) -> bool:
    """True if ``module`` has a class of sdfastgn whose calls can become CUDA graphs."""
    return UNET.is_applied(module) or CONTROL_NET.is_applied(module)
