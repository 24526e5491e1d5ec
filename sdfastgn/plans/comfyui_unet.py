"""Plans for a ``UNetModel`` or ``ControlNet`` of ComfyUI whose code was never tested with sdfastgn.

A plan is a traced call that runs without the model's Python. Fused blocks repeat code of ComfyUI, so they
need releases in which this code was read and tested. A plan is traced from the installed code, so it needs
no tested release.

A ``UNetModel`` gets the class ``PlannedUNetModel``. If no other node than sdfastgn's has put code into a
call, the call runs as a plan. If Python takes longer than the GPU, the plan is captured as a CUDA graph. If
another node has put code into a call, ComfyUI's own ``forward`` runs, and only blocks with tested code are
fused. A union ControlNet, which takes one of several kinds of images, runs as plans with tested code, too.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

from comfy.cldm.cldm import ControlNet
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import Tensor, nn

from sdfastgn.kernels.common.setting import setting
from sdfastgn.patches.comfyui import graphs, report
from sdfastgn.patches.comfyui.inference_mode import outside_inference_mode
from sdfastgn.patches.graphs.forward import Planner
from sdfastgn.patches.swap.fusion import ClassSwap, stock_class
from sdfastgn.patches.swap.tested_sources import unknown_source
from sdfastgn.plans.install import Maker, Planned, described
from sdfastgn.plans.trace.refusals import is_tracing, refuse

# The arguments of ``_forward`` on which ``PlannedUNetModel`` relies.
_ARGUMENTS = ["self", "x", "timesteps", "context", "y", "control", "transformer_options", "kwargs"]
# Entries of ``transformer_options`` in which other nodes than sdfastgn's put code; else they are empty dicts.
_EMPTY = ("patches", "patches_replace")
# The ``transformer_options`` of the call that runs now.
_options: ContextVar[dict[str, Any]] = ContextVar("sdfastgn_transformer_options")


class _Unread:
    """Replaces a value in ``transformer_options`` during a trace. Any use of the value ends the trace.

    A plan could not repeat such a use, because the values differ from call to call. ComfyUI's own code only
    passes them on to other nodes.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        refuse(f"the call reads transformer_options[{vars(self)['_name']!r}]")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = __str__ = _refuse
    __getattr__ = __getitem__ = __contains__ = __iter__ = __len__ = __call__ = _refuse
    __int__ = __float__ = __index__ = _refuse

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        refuse("the call computes with an entry of transformer_options")


class PlannedUNetModel(UNetModel):
    """A ``UNetModel`` that traces ComfyUI's own code, and runs later calls from the trace, as plans.

    If another node than sdfastgn's has put code into a call, the call runs ComfyUI's ``forward`` instead.

    Shapes: x (N, C, H, W), timesteps (N,), context (N, tokens, D). The result is (N, C_out, H, W).
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
        graphed = graphs.graphs_of(self)
        if graphed is None or graphs.has_other_nodes(options, graphed):
            return super()._forward(x, timesteps, context, y, control, options, **kwargs)
        with setting(_options, options), outside_inference_mode():
            output, left = graphed(x, timesteps, context=context, y=y, control=control, **kwargs)
        for name, count in left.items():
            del control[name][count:]
        return output

    def call_alone(self, *args: Any, control: Any = None, **kwargs: Any) -> tuple[Tensor, dict[str, int]]:
        """Compute a call into which no other node than sdfastgn's has put code. This method is traced.

        ComfyUI's code removes the tensors that it uses from the lists in ``control``. This method gives it
        copies of the lists, so ``control`` stays as it is.

        Returns the result, and for each list in ``control`` how many of its entries are left.
        """
        options = _options.get()
        if is_tracing():
            options = {name: {} if name in _EMPTY else _Unread(name) for name in graphs.HARMLESS}
        given = None if control is None else {name: list(entries) for name, entries in control.items()}
        with graphs.keeping_interrupts():
            output = super()._forward(*args, control=given, transformer_options=options, **kwargs)
        left = {} if given is None else {name: len(entries) for name, entries in given.items()}
        if is_tracing():
            for name, entries in (given or {}).items():
                if any(map(operator.is_not, entries, control[name])) or len(entries) > len(control[name]):
                    refuse("the call changes control other than by removing the last tensors")
        return output, left


def _reason_to_skip(unet: Any) -> str | None:
    found = list(inspect.signature(UNetModel._forward).parameters)
    return None if found == _ARGUMENTS else f"UNetModel._forward has other arguments: {', '.join(found)}"


PLANNED = ClassSwap("comfyui_planned_unet", UNetModel, PlannedUNetModel, check=_reason_to_skip)


def reasons_for_plans(root: nn.Module) -> list[str]:
    """Why calls of ``root``, a ``UNetModel`` or ``ControlNet``, run as plans. Empty if it gets no plans.

    The usual reasons are of the class ``Untested``: code of ComfyUI that differs from all releases that were
    tested.
    """
    kind = stock_class(root)
    if kind is ControlNet:
        # ``forward`` makes a tensor of the list of control types. A CUDA graph cannot repeat that, but in a
        # plan this tensor is a constant.
        is_union = getattr(root, "control_add_embedding", None) is not None
        return [*report.untested_in(root), *(["it is a union ControlNet"] if is_union else [])]
    if kind is not UNetModel or PLANNED.reason_to_skip(root) is not None:
        return []
    own = unknown_source(*graphs.UNET.sources)
    return list(dict.fromkeys([*report.untested_in(root), *([] if own is None else [own])]))


def inspect_plans(unet: nn.Module) -> Iterator[Planned]:
    """Yields what the report says about the plans of ``unet``.

    Code that other packages replace while a program runs has several states. There is one item for each state
    in which calls were traced.
    """
    graphed = graphs.graphs_of(unet)
    for planned in () if graphed is None else graphed.planned:
        yield described("", unet, planned)


def install(unet: nn.Module, mode: str | bool, trusted: frozenset[str]) -> None:
    """Let calls of ``unet``, a ``PlannedUNetModel`` or ``FusedControlNet``, run as plans.

    ``mode``: the argument ``cuda_graphs`` of ``sdfastgn.optimize``. ``trusted``: names of packages whose code
    a trace may run, because it keeps no state that changes results.
    """
    planner = Planner(Maker(trusted, False), is_always=True, is_required=True)
    graphs.install(unet, mode, planner)
