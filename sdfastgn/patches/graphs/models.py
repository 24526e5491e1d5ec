"""Lists the models whose calls become CUDA graphs, and the states in which their calls must run eagerly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sdfastgn.kernels.common import dispatch, private
from sdfastgn.patches.core import channels_last
from sdfastgn.patches.core.fusion import stock_class
from sdfastgn.patches.graphs.arguments import Number
from sdfastgn.patches.graphs.factors import is_tested

__all__ = ["is_graphable", "is_harmless", "numbers_of", "reason_in_training", "reason_now", "takes_gigabytes"]

# For models that convert a timestep that is a float to an fp64 tensor.
_TIMESTEP = {"timestep": Number(1, torch.float64)}
# UNets for video: full name of the class -> its arguments that may be numbers. The graphs of these UNets take
# gigabytes, so they are kept only if enough memory is left for other models (``takes_gigabytes``).
_VIDEO: dict[str, dict[str, Number]] = {
    "diffusers.models.unets.unet_3d_condition.UNet3DConditionModel": _TIMESTEP,
    "diffusers.models.unets.unet_i2vgen_xl.I2VGenXLUNet": _TIMESTEP,
    "diffusers.models.unets.unet_motion_model.UNetMotionModel": _TIMESTEP,
    "diffusers.models.unets.unet_spatio_temporal_condition.UNetSpatioTemporalConditionModel": _TIMESTEP,
}
# All classes whose calls become graphs: full name -> the arguments that may be numbers. The keys are names,
# so that diffusers need not be imported. Subclasses get no graphs.
_GRAPHABLE: dict[str, dict[str, Number]] = {
    **_VIDEO,
    "diffusers.models.unets.unet_1d.UNet1DModel": {"timestep": Number(1, torch.int64)},
    "diffusers.models.unets.unet_2d.UNet2DModel": {"timestep": Number(1, torch.int64)},
    "diffusers.models.unets.unet_2d_condition.UNet2DConditionModel": _TIMESTEP,
    "diffusers.models.unets.unet_kandinsky3.Kandinsky3UNet": {"timestep": Number(1, torch.float32)},
    "diffusers.models.unets.unet_stable_cascade.StableCascadeUNet": {},
    "diffusers.models.controlnets.controlnet.ControlNetModel": _TIMESTEP,
    "diffusers.models.controlnets.controlnet_union.ControlNetUnionModel": _TIMESTEP,
    "diffusers.models.controlnets.controlnet_xs.UNetControlNetXSModel": _TIMESTEP,
    "diffusers.models.transformers.pixart_transformer_2d.PixArtTransformer2DModel": {},
    "diffusers.models.transformers.sana_transformer.SanaTransformer2DModel": {},
    "diffusers.models.autoencoders.vae.Encoder": {},
    "diffusers.models.autoencoders.vae.Decoder": {},
    "diffusers.models.autoencoders.vae.EncoderTiny": {},
    "diffusers.models.autoencoders.vae.DecoderTiny": {},
    "diffusers.models.autoencoders.vae.MaskConditionDecoder": {},
    "diffusers.pipelines.audioldm2.modeling_audioldm2.AudioLDM2UNet2DConditionModel": _TIMESTEP,
    "diffusers.pipelines.deprecated.wuerstchen.modeling_wuerstchen_prior.WuerstchenPrior": {},
    "diffusers.pipelines.wuerstchen.modeling_wuerstchen_prior.WuerstchenPrior": {},
    "transformers.models.clip.modeling_clip.CLIPTextModel": {},
    "transformers.models.clip.modeling_clip.CLIPTextModelWithProjection": {},
}
# The models whose calls with gradients can become graphs.
_TRAINED = {
    "diffusers.models.unets.unet_2d_condition.UNet2DConditionModel",
    "diffusers.models.controlnets.controlnet.ControlNetModel",
}
# Arguments that are factors (``factors.py``).
_FACTORS: dict[str, dict[str, Number]] = {
    "diffusers.models.controlnets.controlnet.ControlNetModel": {
        "conditioning_scale": Number(4, is_factor=True)
    },
    "diffusers.models.controlnets.controlnet_union.ControlNetUnionModel": {
        "conditioning_scale": Number(6, is_factor=True)
    },
}
# The model whose forward multiplies the scales of all LoRA layers by an argument.
_TAKES_SCALE = "diffusers.models.unets.unet_2d_condition.UNet2DConditionModel"
_HARMLESS = (channels_last.enter, channels_last.leave)


def is_harmless(hook: Any) -> bool:
    """True for a forward hook whose effects are all part of the graph.

    sdfastgn's own hooks change layouts on the GPU. The hooks of transformers collect hidden states, which
    are outputs of the captured call.
    """
    # ``__globals__`` names the module in which the hook was written. ``__module__`` may name another one,
    # because functools.wraps copies it.
    written_in = getattr(hook, "__globals__", {}).get("__name__")
    return hook in _HARMLESS or written_in == "transformers.utils.output_capturing"


def is_graphable(module: nn.Module) -> bool:
    """True if ``module`` is of a class whose calls become graphs."""
    return numbers_of(module) is not None


def numbers_of(module: nn.Module) -> dict[str, Number] | None:
    """The arguments of ``module`` that may be numbers, by name; None if its calls never become graphs."""
    name = _class_name(module)
    numbers, factors = _GRAPHABLE.get(name), _FACTORS.get(name)
    return numbers if numbers is None or factors is None or not is_tested(module) else numbers | factors


def takes_gigabytes(module: nn.Module) -> bool:
    """True if graphs of ``module`` may take so much memory that too little is left for other models."""
    return _class_name(module) in _VIDEO


def _class_name(module: nn.Module) -> str:
    kind = stock_class(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def lora_scale_of(module: nn.Module) -> str | None:
    """The name of the argument in which ``module`` takes a scale of LoRAs; None if it takes none.

    The argument is a dict, and the scale is its item "scale".
    """
    is_unet = f"{stock_class(module).__module__}.{stock_class(module).__qualname__}" == _TAKES_SCALE
    return "cross_attention_kwargs" if is_unet else None


def reason_now(module: nn.Module) -> str | None:
    """Why this thread cannot run ``module`` as a graph now, for any arguments; None if it can."""
    if torch.is_grad_enabled():
        return "gradients are enabled"
    if module.training:
        return "it is in training mode"
    return _reason_with_or_without_gradients(module)


def reason_in_training(module: nn.Module) -> str | None:
    """Why this thread cannot run a call of ``module`` with gradients as graphs now; None if it can."""
    if _class_name(module) not in _TRAINED:
        return "gradients are enabled"
    if torch.is_anomaly_enabled():
        return "autograd detects anomalies"
    if private.has_saved_tensors_hooks():
        return "there are hooks on saved tensors"
    return _reason_with_or_without_gradients(module)


def _reason_with_or_without_gradients(module: nn.Module) -> str | None:
    if private.is_compiled(module):
        return "it is compiled by torch.compile"
    if private.is_tracing() or dispatch.is_transformed():
        return "the call is traced or transformed"
    if private.dispatch_modes() or private.in_function_mode():
        return "a dispatch or function mode is active"
    if private.has_any_global_hook():
        return "there are global module hooks"
    if private.caches_parametrizations():
        return "parametrizations are cached"
    return None
