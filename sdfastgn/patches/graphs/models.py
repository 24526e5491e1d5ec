"""Lists the models whose calls become CUDA graphs, and the states in which their calls must run eagerly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch, private
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.graphs.arguments import Call, Number
from sdfastgn.patches.graphs.factors import is_tested
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.swap.fusion import stock_class

# The argument ``timestep`` of models whose forward converts a float timestep to an fp64 tensor.
_TIMESTEP = {"timestep": Number(1, torch.float64)}
# UNets for video: full name of the class -> its arguments that may be numbers. The graphs of these UNets and
# of ``_DECODERS`` take gigabytes, so they are kept only if enough memory is left for other models
# (``takes_gigabytes``).
_VIDEO: dict[str, dict[str, Number]] = {
    "diffusers.models.unets.unet_3d_condition.UNet3DConditionModel": _TIMESTEP,
    "diffusers.models.unets.unet_i2vgen_xl.I2VGenXLUNet": _TIMESTEP,
    "diffusers.models.unets.unet_motion_model.UNetMotionModel": _TIMESTEP,
    "diffusers.models.unets.unet_spatio_temporal_condition.UNetSpatioTemporalConditionModel": _TIMESTEP,
}


class Decoder(NamedTuple):
    """Describes a class that decodes the latents of videos or of large images.

    Attributes:
        most_pixels: a call runs eagerly if it decodes more pixels. They are counted as batch x frames of
            latents x height of the image x its width.
        method: the name of the method whose calls become graphs.
        scratch: attributes of the module that each call of the method sets before it reads them. Between two
            calls they hold no tensors.
        scale: height of the image divided by the height of its latents. None: the module's attribute
            ``spatial_compression_ratio`` is this number.
    """

    most_pixels: int
    method: str = "forward"
    scratch: frozenset[str] = frozenset()
    scale: int | None = None


# The decoders of Wan and Qwen-Image compute one frame of latents at a time. They keep the last frames of each
# convolution's input in a list. The autoencoder's ``_decode`` makes this list and clears it. So it is not the
# decoder's calls but the calls of ``_decode`` that become CUDA graphs. These attributes of the autoencoder
# hold such a list for the decoder and one for the encoder, their lengths, and an index into each.
_CACHES = frozenset(
    ("_conv_num", "_conv_idx", "_feat_map", "_enc_conv_num", "_enc_conv_idx", "_enc_feat_map")
)
# Full name of a decoder's class -> its ``Decoder``, with the largest call that becomes a graph. Python takes
# equally long for frames of any size, while the GPU takes longer for larger frames. For a call of
# ``most_pixels``, Python and the GPU each take about 10 ms on an H100 (estimated from docs/benchmarks.md,
# "Video"). A graph of a larger call would save little time and hold gigabytes.
_DECODERS = {
    "diffusers.models.autoencoders.autoencoder_kl_qwenimage.AutoencoderKLQwenImage": Decoder(
        768 * 768, "_decode", _CACHES
    ),
    "diffusers.models.autoencoders.autoencoder_kl_qwenimage21.AutoencoderKLQwenImage21": Decoder(
        512 * 512, "_decode", _CACHES
    ),
    "diffusers.models.autoencoders.autoencoder_kl_wan.AutoencoderKLWan": Decoder(
        768 * 768, "_decode", _CACHES
    ),
    # HunyuanImage: an image with more than 512 x 1024 pixels is decoded eagerly. With tiling, the decoder is
    # called for each tile, and these calls become graphs.
    "diffusers.models.autoencoders.autoencoder_kl_hunyuanimage.HunyuanImageDecoder2D": Decoder(
        512 * 1024, scale=32
    ),
    # LTX-Video: more than 25 frames (4 frames of latents) with 512 x 704 pixels are decoded eagerly. With
    # tiling, the decoder is called for each tile of a larger video, and these calls become graphs.
    "diffusers.models.autoencoders.autoencoder_kl_ltx.LTXVideoDecoder3d": Decoder(4 * 512 * 704, scale=32),
    # Cosmos: more than 17 frames (3 frames of latents) with 480 x 832 pixels are decoded eagerly.
    "diffusers.models.autoencoders.autoencoder_kl_cosmos.CosmosDecoder3d": Decoder(3 * 480 * 832, scale=8),
    # The decoders of HunyuanVideo and of HunyuanImage's refiner run eagerly, except in calls for one tile of
    # 256 x 256 pixels with one frame of latents. A call with more frames, or with 512 x 512 pixels, keeps the
    # GPU busy anyway: a graph saved at most 3 % of the time on an H100.
    "diffusers.models.autoencoders.autoencoder_kl_hunyuan_video.HunyuanVideoDecoder3D": Decoder(
        256 * 256, scale=8
    ),
    "diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15.HunyuanVideo15Decoder3D": Decoder(
        256 * 256, scale=16
    ),
    "diffusers.models.autoencoders.autoencoder_kl_hunyuanimage_refiner.HunyuanImageRefinerDecoder3D": Decoder(
        256 * 256, scale=16
    ),
}
# All classes whose calls become graphs: full name -> the arguments that may be numbers. The keys are names,
# so that diffusers need not be imported. Subclasses get no graphs.
_GRAPHABLE: dict[str, dict[str, Number]] = {
    **_VIDEO,
    **{name: {} for name in _DECODERS},
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
# Full name of a class -> its arguments that are factors: numbers that are inputs of graphs
# (``factors.py``).
_FACTORS: dict[str, dict[str, Number]] = {
    "diffusers.models.controlnets.controlnet.ControlNetModel": {
        "conditioning_scale": Number(4, is_factor=True)
    },
    "diffusers.models.controlnets.controlnet_union.ControlNetUnionModel": {
        "conditioning_scale": Number(6, is_factor=True)
    },
    "diffusers.models.controlnets.controlnet_xs.UNetControlNetXSModel": {
        "conditioning_scale": Number(4, is_factor=True)
    },
}
# Full name of a class -> its attributes that pipelines switch during an image. There is a graph for each
# combination of their values in a model.
_SWITCHES = {"diffusers.models.attention.GatedSelfAttentionDense": ("enabled",)}
# Name of a submodule of GLIGEN's models. Only a model that has it can have attributes that pipelines switch.
_WITH_SWITCHES = "position_net"
# The Python module of diffusers with a decorator for ``forward`` that applies the scale of all LoRAs
# (``lora_scale.py``). The decorator's variable _SCALES_BY has the name of the argument with this scale.
_SCALES = "diffusers.utils.peft_utils"
_SCALES_BY = "kwargs_name"
# Full name of a class -> the name of the argument with the scale of all LoRAs. This is for older releases of
# diffusers, where no decorator adds the argument to the ``forward``.
_TAKES_SCALE = {
    "diffusers.models.unets.unet_2d_condition.UNet2DConditionModel": "cross_attention_kwargs",
    "diffusers.models.transformers.sana_transformer.SanaTransformer2DModel": "attention_kwargs",
}
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
    """Returns {name: ``Number``} for each argument of ``module`` that may be a number.

    None if calls of ``module`` never become graphs.
    """
    name = _class_name(module)
    numbers, factors = _GRAPHABLE.get(name), _FACTORS.get(name)
    return numbers if numbers is None or factors is None or not is_tested(module) else numbers | factors


def switches_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the attributes of ``module`` that pipelines switch during an image."""
    return _SWITCHES.get(_class_name(module), ())


def switched(root: nn.Module) -> tuple[Any, ...]:
    """The present values of the attributes of all modules in ``root`` that ``switches_of`` names.

    GLIGEN's pipelines turn off the attention to objects after the first steps of each image.
    """
    if _WITH_SWITCHES not in root._modules:
        return ()
    return tuple(getattr(part, name, None) for part in root.modules() for name in switches_of(part))


def takes_gigabytes(module: nn.Module) -> bool:
    """True if a graph of ``module`` may take gigabytes.

    Such a graph is kept only if enough memory is left for other models.
    """
    return _class_name(module) in (_VIDEO | _DECODERS)


def method_of(module: nn.Module) -> str:
    """The name of the method of ``module`` whose calls become graphs."""
    decoder = _DECODERS.get(_class_name(module))
    return "forward" if decoder is None else decoder.method


def scratch_of(module: nn.Module) -> frozenset[str]:
    """Names of the attributes of ``module`` that each call sets before it reads them."""
    decoder = _DECODERS.get(_class_name(module))
    return frozenset() if decoder is None else decoder.scratch


def reason_for(module: Any, call: Call) -> str | None:
    """Why ``call`` must run eagerly: it is too large, or ``module`` decodes in tiles. Else None."""
    decoder = _DECODERS.get(_class_name(module))
    if decoder is None:
        return None
    if _has_tiles(module):
        return "tiling is enabled"
    z, scale = call.tensors[0], decoder.scale or module.spatial_compression_ratio
    if isinstance(z, Tensor) and z.dim() > 1 and z.numel() * scale**2 > decoder.most_pixels * z.shape[1]:
        return "the call is so large that the GPU takes longer than Python"
    return None


def repeats_decoder(module: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a call that may become a graph calls a decoder several times: for frames, or for tiles.

    ``args``, ``kwargs``: the arguments of such a call of ``module``.
    """
    if method_of(module) == "forward":
        return False
    z = next(iter((*args, *kwargs.values())), None)
    return _has_tiles(module) or not isinstance(z, Tensor) or z.dim() != 5 or z.shape[2] != 1


def _has_tiles(module: nn.Module) -> bool:
    return method_of(module) != "forward" and getattr(module, "use_tiling", False)


def _class_name(module: nn.Module) -> str:
    kind = stock_class(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def lora_scale_of(module: nn.Module) -> str | None:
    """The name of the argument whose item "scale" multiplies the scales of all LoRAs, or None."""
    forward = getattr(stock_class(module), "forward", None)
    if getattr(forward, "__globals__", {}).get("__name__") != _SCALES:
        return _TAKES_SCALE.get(_class_name(module))
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))  # type: ignore[union-attr]
    return cells[_SCALES_BY].cell_contents if _SCALES_BY in cells else None


def reason_now(module: nn.Module) -> str | None:
    """Why this thread can now run no call of ``module`` as a graph; None if it can run some."""
    return reason_without_graphs(module) or fp8.reason_now(module)


def reason_without_graphs(module: nn.Module) -> str | None:
    """Why this thread can now run no call of ``module`` as a CUDA graph or plan; None if it can run some.

    A plan is the module's own code, traced once and rewritten to sdfastgn's kernels.
    """
    if torch.is_grad_enabled():
        return "gradients are enabled"
    return _reason_with_or_without_gradients(module)


def reason_in_training(module: nn.Module) -> str | None:
    """Why this thread cannot now run any call of ``module`` with gradients as graphs; None if it can."""
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
