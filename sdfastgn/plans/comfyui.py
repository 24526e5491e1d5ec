"""Plans for those models of ComfyUI in which fused blocks cannot replace ComfyUI's blocks.

A plan is a traced call that runs without the model's Python. A model needs plans if sdfastgn has no fused
form of its blocks, or if this release of ComfyUI has other code in the blocks than the releases that were
tested.

In ComfyUI, an injection is a pair of functions. ComfyUI calls the first when it has loaded a model, and the
second before it moves or patches the weights. A VAE gets two injections of sdfastgn. The first one
(``patches/comfyui``) fuses the blocks that it can, and the second one, in this file, turns plans on and off.
UNets may have fused blocks and plans at the same time (``comfyui_unet.py``).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from comfy.patcher_extension import PatcherInjection
from torch import nn

from sdfastgn.patches.code.checked import entrances
from sdfastgn.patches.comfyui import control_nets, dynamic_vram, model_patcher, report
from sdfastgn.patches.comfyui.fused_vae import FusedVAE
from sdfastgn.patches.comfyui.inject import eject, inject, reason_to_stay, root_of
from sdfastgn.patches.comfyui.layers import LAYERS
from sdfastgn.patches.comfyui.unet import has_no_patches
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.patcher import Finding
from sdfastgn.plans import comfyui_unet
from sdfastgn.plans import install as planning
from sdfastgn.plans.forward import PlannedForward
from sdfastgn.plans.inside import plan_inside

# The name under which ComfyUI's ``ModelPatcher`` keeps the two functions that turn plans on and off.
_KEY = "sdfastgn plans"
# Packages with which ComfyUI's layers load their weights. They keep state between calls, but that changes no
# result, so a trace may run their code.
TRUSTED = frozenset(("comfy_aimdo", "comfy_kitchen", "psutil"))
# A dict from a model to the ``PlannedForward`` objects that were removed from its modules. They are used
# again, because ComfyUI turns plans on and off whenever it loads the model, such as for each decode of a VAE.
_taken_out: weakref.WeakKeyDictionary[nn.Module, list[PlannedForward]] = weakref.WeakKeyDictionary()


def optimize_model(
    model: Any, cuda_graphs: str | bool = "auto", after_run: Callable[[str], None] | None = None
) -> Any:
    """Does what ``model_patcher.optimize_model`` does, and lets a UNet with untested code run as plans.

    A plan is a traced call that runs without the model's Python. Untested code is code of another release of
    ComfyUI than those with which fused blocks were compared.
    """
    options: Any = {"fuse": _fuse, "restore": _restore, "describe": text_of}
    return model_patcher.optimize_model(model, cuda_graphs, after_run, **options)


def _fuse(root: nn.Module, cuda_graphs: str | bool) -> None:
    if reason_to_stay(root) is not None or not comfyui_unet.reasons_for_plans(root):
        inject(root, cuda_graphs)
        return
    if comfyui_unet.PLANNED.claims(root):
        comfyui_unet.PLANNED.apply(root)
    inject(root, cuda_graphs, partial(comfyui_unet.install, trusted=TRUSTED))
    for planned in _taken_out.pop(root, ()):
        planned.put("forward")


def _restore(root: nn.Module) -> None:
    # If the calls of ``root`` cannot be traced, modules in it have plans of their own.
    inside = planning.take_off(root)
    eject(root)
    _keep(root, inside)


def optimize_vae(vae: Any, after_load: Callable[[str], None] | None = None, *, plans: bool = True) -> Any:
    """Copies ComfyUI's VAE ``vae``. While the copy is loaded, it has fused blocks or runs as plans.

    A plan is a traced call that runs without the model's Python. ``vae`` itself runs ComfyUI's own code as
    before.

    Args:
        vae: ComfyUI's VAE.
        after_load: called with the text of the report before each decode and encode, when ComfyUI has loaded
            the model.
        plans: False lets a VAE whose blocks cannot be fused run ComfyUI's own code.

    Raises what ``model_patcher.check_vae`` raises.
    """
    optimized = model_patcher.optimize_vae(vae)
    if plans:
        optimized.patcher.set_injections(_KEY, [PatcherInjection(_put_in, _take_out)])
        if isinstance(optimized, FusedVAE):
            optimized.after_use = _plan_layers
    if after_load is not None:
        model_patcher.call_after_load(optimized, _KEY, after_load, text_of)
    return optimized


def text_of(patcher: Any, has_run: bool = True) -> str:
    """Returns the report on the model of a ``ModelPatcher`` as a text of a few lines.

    The first line says whether sdfastgn makes the model faster. With ``has_run`` False the numbers of calls
    are left out. Of a UNet the text also has the reports on the ControlNets in the sampler's last run.
    """
    lines = [_text_of(patcher, has_run)]
    if has_run:
        nets, reasons = control_nets.of_last_run(root_of(patcher))
        lines += [_text_of(net, has_run) for net in nets]
        lines += [f"ControlNet: not faster. {reason}" for reason in reasons]
    return "\n".join(lines)


def _text_of(patcher: Any, has_run: bool) -> str:
    root = root_of(patcher)
    reasons = _reasons_for_plans(patcher)
    if not reasons and not _gets_plans(patcher):
        return report.text_of(patcher, has_run)
    name = type(root).__name__
    reason = report.why_stock(patcher, root)
    if reason is not None:
        return f"{name}: not faster. {reason}"
    lines = [f"{name}: faster, once its calls repeat. They run as plans"]
    lines += [f"Reason for plans: {why}" for why in reasons or report.untested_in(root)]
    for each in comfyui_unet.inspect_plans(root) if reasons else planning.inspect(root):
        if has_run and (each.plans or each.calls):
            share = each.kernel_bytes / max(each.bytes, 1)
            lines.append(
                f"{each.path or each.kind}: {each.calls} calls as plans, {share:.0%} in fused kernels"
            )
        lines += [f"As stock: {count} calls of {each.path or each.kind}. Reason: {why}"
                  for why, count in each.own.items() if count]  # fmt: skip
    return "\n".join([*lines, *(report.calls_of(root) if reasons and has_run else [])])


def _reasons_for_plans(patcher: Any) -> list[str]:
    """Why the calls of a UNet or ControlNet run as plans. Empty if they do not.

    It is also empty if other nodes of ComfyUI have put code into the calls, which then run without plans.
    """
    options = patcher.model_options.get("transformer_options", {})
    return comfyui_unet.reasons_for_plans(root_of(patcher)) if has_no_patches(options) else []


def _gets_plans(patcher: Any) -> bool:
    root = root_of(patcher)
    if planning.has_plans_now(root):
        return True
    modules = list(root.modules())
    is_untried = not planning.is_convolutional(modules)  # plans of transformers were not tested in ComfyUI
    if _KEY not in patcher.injections or is_untried or not planning.gets_plans(root):
        return False
    if report.untested_in(root):
        return True
    blocks = [
        Finding("", module, fusion, "skipped" if reason else "fusable", reason or "")
        for module, fusion, reason in report.findings_in(root)
        if fusion not in LAYERS
    ]
    return not planning.fused_blocks_pay(modules, blocks)


def _put_in(patcher: Any) -> None:
    root = root_of(patcher)
    if _gets_plans(patcher) and not dynamic_vram.is_dynamic(patcher) and reason_to_stay(root) is None:
        former = _taken_out.pop(root, ())
        planning.install(root, True, TRUSTED, former=former)
        if any(planned.plans for planned in former):
            # The former plans were traced with channels-last weights. So weights become channels-last again.
            channels_last.lay_out_weights(root)


def _plan_layers(root: nn.Module) -> None:
    """If neither the encoder nor the decoder of ``root`` was called, gives plans to the layers in them.

    ComfyUI's decode of CogVideoX, for example, calls the decoder's layers, but never the decoder itself.
    """
    _, *halves = entrances(root)
    planned = [(half, each) for half in halves if (each := PlannedForward.of(half)) is not None]
    if not any(each.plans or each.calls or each.own for _, each in planned):
        for half, _ in planned:
            plan_inside(half, lambda module, has_entry: PlannedForward(module, TRUSTED, has_entry))


def _take_out(patcher: Any, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    if is_finalizing():  # when Python exits, modules that the code below needs may be gone
        return
    root = root_of(patcher)
    _keep(root, planning.take_off(root))


def _keep(root: nn.Module, former: list[PlannedForward]) -> None:
    """Keep ``former``, whose plans were taken off ``root``, for the next time."""
    for planned in former:
        planned.moved()  # drops references to weights: ComfyUI may move them next, to free memory
    if former:
        _taken_out[root] = former
