"""Builds the networks of ``configurations.py`` with random weights, and makes their inputs.

No pretrained weights are needed to time a network. Weights are drawn from a normal distribution with variance
1 / fan_in, so that activations stay near one and every output is finite in fp16. The weights and biases of
norms are random too, so that the output is wrong if a kernel forgets to apply one of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from sdfastgn import model_inputs
from sdfastgn.models import configurations
from sdfastgn.models.configurations import TINY_AUTOENCODERS, UNETS, VAES, VideoNetwork
from sdfastgn.models.saved import latent_scale

if TYPE_CHECKING:  # only for types: diffusers takes seconds to import
    from diffusers import AutoencoderKL, AutoencoderTiny, UNet2DConditionModel

# The dtype of the weights for each value of the command-line option --dtype.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, full) for name, full in configurations.DTYPES.items()}
# Settings of a UNet whose value is either a list with an entry for each block, or one value for all blocks.
_PER_BLOCK = ("layers_per_block", "cross_attention_dim", "attention_head_dim", "transformer_layers_per_block")

# Settings of a UNet that add inputs to its forward. For each setting, the values for which ``unet_inputs``
# can make these inputs.
_KNOWN_EMBEDDINGS = {
    "addition_embed_type": (None, "text", "text_time"),
    "class_embed_type": (None, "timestep", "projection", "simple_projection"),
    "encoder_hid_dim_type": (None, "text_proj"),
}


def unet_reason(config: Mapping[str, Any]) -> str:
    """Why ``unet_inputs`` cannot make inputs for a UNet of this configuration; empty if it can."""
    kind = config.get("_class_name", "UNet2DConditionModel")
    if kind not in ("UNet2DConditionModel", "UNet2DModel"):
        return f"a {kind} takes inputs that the benchmark does not make"
    for key, known in _KNOWN_EMBEDDINGS.items():
        if config.get(key) not in known:
            return f"its {key} {config[key]!r} takes inputs that the benchmark does not make"
    return ""


def unet_difference(config: Mapping[str, Any], model: str) -> str:
    """Says in which setting ``config`` first differs from the UNet named ``model``; empty if in none.

    An example of a result is ``"layers_per_block (1, 1), not (2, 2)"``. The compared settings are
    all that ``UNETS`` has for any model, except for the image size. The number of input channels is not
    compared, because UNets for inpainting have more input channels.
    """
    for key in dict.fromkeys(key for known in UNETS.values() for key in known if key != "sample_size"):
        expected, found = _setting(UNETS[model], key), _setting(config, key)
        if found != expected:
            return f"{key} {found}, not {expected}"
    return ""


@functools.cache
def _unet_defaults() -> dict[str, Any]:
    from diffusers import UNet2DConditionModel

    return {
        name: each.default
        for name, each in inspect.signature(UNet2DConditionModel.__init__).parameters.items()
    }


def _setting(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key, _unet_defaults()[key])
    if isinstance(value, list | tuple):
        return tuple(value)
    blocks = config.get("block_out_channels", _unet_defaults()["block_out_channels"])
    return (value,) * len(blocks) if key in _PER_BLOCK else value


def build_unet(
    model: str, dtype: torch.dtype, device: torch.device | str, *, seed: int = 0
) -> UNet2DConditionModel:
    """Returns the UNet of the model named ``model``, in eval mode, with random weights from ``seed``."""
    from diffusers import UNet2DConditionModel

    return with_random_weights(lambda: UNet2DConditionModel(**UNETS[model]), dtype, device, seed)


def build_vae(
    model: str, dtype: torch.dtype, device: torch.device | str, *, seed: int = 0
) -> AutoencoderKL | AutoencoderTiny:
    """Returns the VAE of the model named ``model``, in eval mode, with random weights from ``seed``.

    ``force_upcast`` is off, so pipelines decode in ``dtype``, although SDXL's pipeline would use fp32.
    """
    from diffusers import AutoencoderKL, AutoencoderTiny

    if model in TINY_AUTOENCODERS:
        return with_random_weights(AutoencoderTiny, dtype, device, seed)
    config = {**VAES[model], "force_upcast": False}
    return with_random_weights(lambda: AutoencoderKL(**config), dtype, device, seed)


def build_video_network(
    network: VideoNetwork, dtype: torch.dtype, device: torch.device | str, *, seed: int = 0
) -> Any:
    """Returns the network that ``network`` describes, in eval mode, with random weights from ``seed``."""
    import diffusers

    cls = getattr(diffusers, network.cls)
    return with_random_weights(lambda: cls(**network.config), dtype, device, seed)


def unet_inputs(model: str, **options: Any) -> dict[str, Any]:
    """Returns random keyword arguments for one step of the UNet of the model named ``model``.

    ``options``: the arguments of ``sdfastgn.model_inputs.unet_inputs``.
    """
    return model_inputs.unet_inputs(UNETS[model], **options)


def vae_latents(model: str | Mapping[str, Any], *, size: int, batch: int, seed: int, **where: Any) -> Tensor:
    """Returns random latents that decode to ``batch`` square images with ``size`` pixels along a side.

    ``model``: a model's name, or the configuration of a VAE. ``where``: dtype and device of the latents, as
    keyword arguments.
    """
    config = VAES[model] if isinstance(model, str) else model
    pixels = size // latent_scale(config)
    channels = config.get("latent_channels", 4)
    return model_inputs.randn(batch, channels, pixels, pixels, seed=seed, **where)


def with_random_weights(
    build: Callable[[], nn.Module], dtype: torch.dtype, device: torch.device | str, seed: int
) -> Any:
    """Returns the module that ``build`` makes, in eval mode, with random weights drawn from ``seed``.

    Buffers, such as embeddings of positions, keep the values that ``build`` gives them. If ``device`` is the
    meta device, neither weights nor buffers have values.
    """

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    # The hook puts each new parameter on the meta device, where it needs no values: initializing 2.6 billion
    # values on the CPU would take minutes. (The type checker ignores the hook, because torch's stubs say that
    # such a hook returns None.)
    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        model = build()
    finally:
        hook.remove()
    # PyTorch's method is called, because ``ModelMixin.to`` of diffusers would warn of modules that must stay
    # in fp32, although there are none here.
    nn.Module.to(model, dtype)
    buffers = dict(model.named_buffers())
    model.to_empty(device=device).eval()
    for name, buffer in model.named_buffers():  # ``to_empty`` has given all buffers undefined values
        buffer.copy_(buffers[name])
    return model if torch.device(device).type == "meta" else randomize(model, seed)


def randomize(module: nn.Module, seed: int) -> Any:
    """Draw random values for all parameters of ``module`` in place, and return ``module``."""
    norms = {id(m.weight) for m in module.modules() if isinstance(m, (nn.GroupNorm, nn.LayerNorm))}
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for p in module.parameters():
            g = generators.setdefault(p.device, torch.Generator(p.device).manual_seed(seed))
            if p.dim() > 1:
                p.normal_(0.0, p[0].numel() ** -0.5, generator=g)
            else:
                p.normal_(float(id(p) in norms), 0.1, generator=g)
    return module
