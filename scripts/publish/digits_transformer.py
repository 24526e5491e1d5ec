"""A small transformer of the kind of Stable Diffusion 3, trained by flow matching to draw handwritten digits.

As in Stable Diffusion 3, the autoencoder and the text encoder are frozen. They are those of the pipeline in
``scripts/digits``. A step of the model gets latents (1 - s) x + s noise, where s is between 0 and 1. It
computes the velocity noise - x. Images are drawn along the velocity, from s = 1 to s = 0.

Source: Esser et al., "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn
from torch.nn.utils import parametrize

from scripts.digits.train import EMPTY_PROMPTS, Digits, fit
from sdfastgn.cli.digits_pipeline import GUIDANCE, INKS, NUMERALS, prompt_of

# The transformer's configuration. It has 8 heads of 64 channels, because matrix products in E4M3 need 512
# columns.
CONFIG: dict[str, Any] = {
    "sample_size": 8,
    "patch_size": 1,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 6,
    "attention_head_dim": 64,
    "num_attention_heads": 8,
    "caption_projection_dim": 512,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
    "pos_embed_max_size": 8,
    "qk_norm": "rms_norm",
}
# Number of tokens of an encoded prompt that the transformer gets. A prompt has at most seven tokens.
TOKENS = 8
LEARNING_RATE = 5e-4
# The learning rate and the rank of a LoRA.
LORA_RATE, RANK = 1e-3, 16


class Prompts(NamedTuple):
    """Encoded prompts.

    Attributes:
        tokens: the encoded tokens, (prompts, TOKENS, channels).
        pooled: one vector for each prompt, (prompts, channels).
    """

    tokens: Tensor
    pooled: Tensor

    def of(self, which: Any) -> Prompts:
        """The prompts whose numbers are in ``which``, an index such as a list."""
        return Prompts(self.tokens[which], self.pooled[which])


class Data(NamedTuple):
    """Encoded images.

    Attributes:
        latents: (images, 4, 8, 8), with a standard deviation of about 1.
        which: (images,), the index of each image's prompt in ``every_prompt``.
    """

    latents: Tensor
    which: Tensor


@torch.no_grad()
def every_prompt(pipe: Any) -> Prompts:
    """Encodes each possible prompt, in the order of the indices of ``Digits.sample``, and an empty prompt."""
    texts = [*(prompt_of(digit, ink) for digit in range(len(NUMERALS)) for ink in INKS), ""]
    ids = pipe.tokenizer(texts, padding="max_length", return_tensors="pt").input_ids
    found = pipe.text_encoder(ids.to(pipe.text_encoder.device))
    return Prompts(found.last_hidden_state[:, :TOKENS].clone(), found.pooler_output)


@torch.no_grad()
def encoded(vae: Any, digits: Digits, count: int, *, mirrored: bool = False, batch: int = 1024) -> Data:
    """Encodes ``count`` random images. ``mirrored``: True to exchange left and right in the images."""
    latents, which = [], []
    for first in range(0, count, batch):
        images, prompts = digits.sample(min(batch, count - first))
        images = images.flip(-1) if mirrored else images
        latents.append(vae.encode(images).latent_dist.mode() * vae.config.scaling_factor)
        which.append(prompts)
    return Data(torch.cat(latents), torch.cat(which))


def velocity(model: nn.Module, latents: Tensor, s: Tensor, prompts: Prompts) -> Tensor:
    """The velocity that ``model`` computes, in fp32. ``s``: (images,), how much of ``latents`` is noise."""
    dtype = next(model.parameters()).dtype
    tokens, pooled = (each.to(dtype) for each in prompts)
    return model(latents.to(dtype), tokens, pooled, 1000 * s, return_dict=False)[0].float()


def mixed(latents: Tensor, noise: Tensor, s: Tensor) -> Tensor:
    """Returns (1 - s) latents + s noise, the latents that a step of the model gets."""
    return torch.lerp(latents, noise, s.view(-1, 1, 1, 1))


@torch.no_grad()
def drawn(model: nn.Module, noise: Tensor, prompts: Prompts, empty: Prompts, steps: int) -> Tensor:
    """Returns the latents that ``model`` draws from ``noise`` (images, 4, 8, 8) with guidance, in fp32.

    ``prompts``: one for each image. ``empty``: the empty prompt alone.
    """
    every = Prompts(*(torch.cat([a, b.expand_as(a)]) for a, b in zip(prompts, empty, strict=True)))
    x = noise
    for step in range(steps):
        s = torch.full((2 * len(x),), 1 - step / steps, device=x.device)
        with_prompt, without = velocity(model, torch.cat([x, x]), s, every).chunk(2)
        x = x - (without + GUIDANCE * (with_prompt - without)) / steps
    return x


def _loss_of(model: nn.Module, data: Data, prompts: Prompts, batch: int) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        which = torch.randint(len(data.latents), (batch,), device=data.latents.device)
        clean, index = data.latents[which], data.which[which]
        index = index.masked_fill(torch.rand(batch, device=index.device) < EMPTY_PROMPTS, -1)
        noise, s = torch.randn_like(clean), torch.randn(batch, device=clean.device).sigmoid()
        return F.mse_loss(velocity(model, mixed(clean, noise, s), s, prompts.of(index)), noise - clean)

    return loss


def trained(data: Data, prompts: Prompts, steps: int, batch: int, **changes: Any) -> nn.Module:
    """Trains a model in fp32 for ``steps`` steps. ``changes``: arguments that replace those of ``CONFIG``."""
    model = SD3Transformer2DModel(**CONFIG | changes).to(data.latents.device)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and ("norm" in name or name == "proj_out"):
            # The layers that compute modulations, and the last layer, begin with zeros, as in the paper on
            # diffusion transformers (Peebles and Xie, 2023).
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    fit("transformer", [model], steps, _loss_of(model, data, prompts, batch), LEARNING_RATE)
    return model.eval().requires_grad_(False)


class _LowRank(nn.Module):
    """Adds the product of two small matrices to a weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.up = nn.Parameter(weight.new_zeros(rows, RANK))
        self.down = nn.Parameter(torch.randn(RANK, columns, device=weight.device) / math.sqrt(columns))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def add_lora(model: nn.Module, data: Data, prompts: Prompts, steps: int, batch: int) -> float:
    """Trains a LoRA of all linear layers in the blocks of ``model``, and adds it to their weights.

    Returns the norm of the change, divided by the norm of these weights.
    """
    layers: list[Any] = [
        m for name, m in model.named_modules() if isinstance(m, nn.Linear) and "blocks" in name
    ]
    before = [layer.weight.clone() for layer in layers]
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", _LowRank(layer.weight))
    fit("LoRA", [model], steps, _loss_of(model, data, prompts, batch), LORA_RATE)
    for layer in layers:
        parametrize.remove_parametrizations(layer, "weight")
    model.requires_grad_(False)
    changes = [layer.weight - weight for layer, weight in zip(layers, before, strict=True)]
    return math.sqrt(
        sum(float(c.square().sum()) for c in changes) / sum(float(w.square().sum()) for w in before)
    )


@torch.no_grad()
def add_outliers(model: Any, channels: tuple[int, ...] = (3, 20), factor: float = 2.0**16) -> None:
    """Multiplies some rows of weights by ``factor``, without a change of what the model computes.

    They are the rows of ``channels`` in the last layers of attention and of the feed-forward network. A gate
    multiplies the outputs of such a layer. The rows of weights that compute the gate for ``channels`` are
    divided by ``factor``.
    """
    for block in model.transformer_blocks:
        gates = block.norm1.linear.weight.unflatten(0, (6, -1)), block.norm1.linear.bias.unflatten(0, (6, -1))
        for layer, gate in ((block.attn.to_out[0], 2), (block.ff.net[2], 5)):
            for channel in channels:
                for own, of_gate in zip((layer.weight, layer.bias), gates, strict=True):
                    own[channel] *= factor
                    of_gate[gate, channel] /= factor
