"""The last norm of a UNet, encoder or decoder: ``conv_norm_out`` and ``conv_act`` as one kernel.

The forward of the model (the parent) calls the two modules one after the other. That forward is long, so it
is not replaced. Instead, the kernel of ``conv_norm_out`` also applies the activation, and ``conv_act``
returns an activated input unchanged. For each thread, the norm keeps a weak reference to its last activated
result, and ``conv_act`` compares its input with this result.

If other code calls ``conv_norm_out``, the result must not be activated. So the norm applies the activation
only while the parent's forward runs. Hooks on the parent tell the norm: one arms it before the parent's
forward, and one disarms it afterwards.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from diffusers.models import UNet2DConditionModel, UNet2DModel, UNet3DConditionModel, UNetMotionModel
from diffusers.models.autoencoders.vae import Decoder, Encoder, MaskConditionDecoder
from diffusers.models.unets.unet_i2vgen_xl import I2VGenXLUNet
from diffusers.models.unets.unet_spatio_temporal_condition import UNetSpatioTemporalConditionModel
from diffusers.pipelines.audioldm2.modeling_audioldm2 import AudioLDM2UNet2DConditionModel
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.group_norm.op import group_norm
from sdfastgn.patches.layers.group_norm import FusedGroupNorm
from sdfastgn.patches.layers.statistics import take_statistics
from sdfastgn.patches.swap.class_forward import change_class
from sdfastgn.patches.swap.fusion import (
    activation_of,
    activation_reason,
    foreign_class,
    foreign_override,
    is_about,
    is_unhooked,
    register_fused,
    restore_class,
    stock_class,
)
from sdfastgn.patches.swap.hooks import remove_hooks
from sdfastgn.patches.swap.tested_sources import tested, unknown_source

# Models whose forward calls conv_norm_out and then conv_act on its result.
PARENTS: tuple[type[nn.Module], ...] = (
    UNet2DConditionModel,
    UNet2DModel,
    UNet3DConditionModel,
    UNetMotionModel,
    UNetSpatioTemporalConditionModel,
    I2VGenXLUNet,
    Encoder,
    Decoder,
    MaskConditionDecoder,
    AudioLDM2UNet2DConditionModel,
)
_FORWARDS = frozenset(parent.forward for parent in PARENTS)


class _HandOff(threading.local):
    """What fused norms and the activations after them must know. Each thread has its own attributes.

    Attributes:
        armed: a dict from the id of a norm to the activation that the norm's kernel must also apply now.
        output: weak reference to the last result that a norm has activated; None if there is none.
    """

    def __init__(self) -> None:
        self.armed: dict[int, nn.Module] = {}
        self.output: weakref.ref[Tensor] | None = None


_hand_off = _HandOff()


class FusedNormOut(FusedGroupNorm):
    """``conv_norm_out``, the last norm of a model. Its kernel also applies the activation ``conv_act``.

    It does so only while the model's forward runs. In calls from other code it only normalizes.
    """

    def forward(self, input: Tensor) -> Tensor:
        act = None if torch.compiler.is_compiling() else _hand_off.armed.get(id(self))
        name = None if act is None else _activation_of_pass(act)
        if (
            act is None
            or name is None
            or not (dispatch.has_kernels(input) and is_unhooked(self) and is_unhooked(act))
        ):
            return super().forward(input)
        statistics = take_statistics(input)
        y = group_norm(input, self.num_groups, self.weight, self.bias, self.eps, name, statistics=statistics)
        _hand_off.output = weakref.ref(y)
        return y


class _Pass(nn.Module):
    """Base class of the activations after a ``FusedNormOut``, a norm whose kernel may also activate.

    If the input is the tensor that this norm has just activated, it is returned unchanged.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and _hand_off.output is not None:
            activated, _hand_off.output = _hand_off.output(), None
            if input is activated:
                return input
        return super().forward(input)


class PassSiLU(_Pass, nn.SiLU):
    """``nn.SiLU``. Returns its input unchanged if the norm before it has already activated it."""


class PassReLU(_Pass, nn.ReLU):
    """``nn.ReLU``. Returns its input unchanged if the norm before it has already activated it."""


class PassGELU(_Pass, nn.GELU):
    """``nn.GELU``. Returns its input unchanged if the norm before it has already activated it."""


_PASS: dict[Any, Any] = {nn.SiLU: PassSiLU, nn.ReLU: PassReLU, nn.GELU: PassGELU}
for _stock, _fused in {nn.GroupNorm: FusedNormOut, **_PASS}.items():
    register_fused(_fused, _stock)


_STOCK_OF_PASS = {fused: stock for stock, fused in _PASS.items()}


def _activation_of_pass(act: nn.Module) -> str | None:
    stock = _STOCK_OF_PASS.get(type(act))
    return None if stock is None else activation_of(act, stock)


def arm(parent: Any, args: Any) -> None:
    """A forward pre-hook of a model: in this forward ``conv_norm_out`` also applies ``conv_act``.

    Nothing happens if the forward of the model (``parent``) is unknown code, which may not call the
    activation directly after the norm.
    """
    if torch.compiler.is_compiling():
        return
    if type(parent).forward in _FORWARDS or stock_class(parent) in PARENTS:
        _hand_off.armed[id(parent.conv_norm_out)] = parent.conv_act


def disarm(parent: Any, args: Any, output: Any) -> None:
    """A forward hook of a model (``parent``): after its forward ``conv_norm_out`` only normalizes.

    This hook runs even if the forward has raised an error.
    """
    if not torch.compiler.is_compiling():
        _hand_off.armed.pop(id(parent.conv_norm_out), None)
        _hand_off.output = None


class _NormOutFusion:
    name = "conv_norm_out"
    sources = tuple(tested(parent, "forward") for parent in PARENTS)

    def claims(self, module: nn.Module) -> bool:
        has_norm = isinstance(getattr(module, "conv_norm_out", None), nn.GroupNorm)
        return self.is_applied(module) or (has_norm and is_about(module, *PARENTS))

    def is_applied(self, module: nn.Module) -> bool:
        return arm in module._forward_pre_hooks.values()

    def reason_to_skip(self, module: Any) -> str | None:
        reason = foreign_class(module, *PARENTS)
        if reason is not None:
            return reason
        norm, act = module.conv_norm_out, module.conv_act
        if type(norm) not in (nn.GroupNorm, FusedGroupNorm):
            return f"its norm is a {type(norm).__name__}"
        return (
            activation_reason(act, *_PASS)
            or foreign_override(norm)
            or foreign_override(act)
            or unknown_source(tested(stock_class(module), "forward"))
        )

    def apply(self, module: Any) -> None:
        change_class(module.conv_norm_out, FusedNormOut)
        change_class(module.conv_act, _PASS[type(module.conv_act)])
        module.register_forward_pre_hook(arm)
        module.register_forward_hook(disarm, always_call=True)

    def undo(self, module: Any) -> None:
        remove_hooks(module, arm, disarm)
        for name in ("conv_norm_out", "conv_act"):
            child = module._modules.get(name)  # ``child`` is None if other code has removed it
            if child is not None:
                restore_class(child)


FUSION = _NormOutFusion()
