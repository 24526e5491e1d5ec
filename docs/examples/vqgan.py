"""A VQGAN built with sdfastgn's modules, with the arguments and parameter names of published checkpoints.

``Encoder`` and ``Decoder`` can also be used for a latent-diffusion autoencoder (``double_z=True``). Tensors
stay channels-last from the input image to the output image. A norm is fused with the SiLU after it.

model = VQModel(ddconfig, n_embed=1024, embed_dim=256).to("cuda", memory_format=torch.channels_last)
model.load_state_dict(torch.load("last.ckpt")["state_dict"], strict=False)  # the file also has the loss

Source: Esser, Rombach and Ommer, "Taming Transformers for High-Resolution Image Synthesis", 2021.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sdfastgn
from sdfastgn.kernels.upsample.nearest import upsample_nearest_2x


def norm(channels: int, activation: str = "identity") -> nn.Module:
    return sdfastgn.GroupNorm(32, channels, eps=1e-6, activation=activation)


class ResnetBlock(nn.Module):
    """Two convolutions with a shortcut. x (N, in_channels, H, W) -> (N, out_channels, H, W)."""

    def __init__(self, in_channels: int, out_channels: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = norm(in_channels, "silu")
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = norm(out_channels, "silu")
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        if in_channels != out_channels:
            self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.norm1(x))
        h = self.conv2(self.dropout(self.norm2(h)))
        return (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x) + h


class AttnBlock(nn.Module):
    """Self-attention with one head over all positions. x (N, channels, H, W) -> the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (conv(h).flatten(2).transpose(1, 2) for conv in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).view_as(x)
        return x + self.proj_out(h)


class Downsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(upsample_nearest_2x(x))


class Level(nn.Module):
    """The residual blocks of one resolution. If ``attends``, attention follows each block."""

    def __init__(self, channels: Sequence[int], attends: bool, dropout: float) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResnetBlock(a, b, dropout) for a, b in itertools.pairwise(channels))
        self.attn = nn.ModuleList(AttnBlock(c) for c in channels[1:] if attends)

    def forward(self, h: Tensor) -> Tensor:
        for i, block in enumerate(self.block):
            h = block(h)
            h = self.attn[i](h) if self.attn else h
        return h


class Mid(nn.Module):
    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(channels, channels, dropout)
        self.attn_1 = AttnBlock(channels)
        self.block_2 = ResnetBlock(channels, channels, dropout)

    def forward(self, h: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(h)))


class Encoder(nn.Module):
    """Images (N, in_channels, H, W) -> latents (N, z_channels, h, w).

    With ``double_z`` there are 2 * z_channels channels. Each level but the last halves height and width.
    """

    def __init__(
        self,
        *,
        ch: int,
        ch_mult: Sequence[int],
        num_res_blocks: int,
        attn_resolutions: Sequence[int],
        in_channels: int,
        resolution: int,
        z_channels: int,
        dropout: float = 0.0,
        double_z: bool = True,
        **_: Any,
    ) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(in_channels, ch, 3, padding=1)
        self.down = nn.ModuleList()
        before = ch
        for i, factor in enumerate(ch_mult):
            channels = [before, *[before := ch * factor] * num_res_blocks]
            level = Level(channels, resolution >> i in attn_resolutions, dropout)
            if i < len(ch_mult) - 1:
                level.downsample = Downsample(before)
            self.down.append(level)
        self.mid = Mid(before, dropout)
        self.norm_out = norm(before, "silu")
        self.conv_out = nn.Conv2d(before, z_channels * (1 + double_z), 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv_in(x)
        for level in self.down:
            h = level(h)
            h = level.downsample(h) if hasattr(level, "downsample") else h
        return self.conv_out(self.norm_out(self.mid(h)))


class Decoder(nn.Module):
    """Latents (N, z_channels, h, w) -> images (N, out_ch, H, W).

    Each level but the last doubles height and width.
    """

    def __init__(
        self,
        *,
        ch: int,
        out_ch: int,
        ch_mult: Sequence[int],
        num_res_blocks: int,
        attn_resolutions: Sequence[int],
        resolution: int,
        z_channels: int,
        dropout: float = 0.0,
        **_: Any,
    ) -> None:
        super().__init__()
        before = ch * ch_mult[-1]
        self.conv_in = nn.Conv2d(z_channels, before, 3, padding=1)
        self.mid = Mid(before, dropout)
        levels = []
        for i in reversed(range(len(ch_mult))):
            channels = [before, *[before := ch * ch_mult[i]] * (num_res_blocks + 1)]
            level = Level(channels, resolution >> i in attn_resolutions, dropout)
            if i > 0:
                level.upsample = Upsample(before)
            levels.append(level)
        self.up = nn.ModuleList(reversed(levels))
        self.norm_out = norm(before, "silu")
        self.conv_out = nn.Conv2d(before, out_ch, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        h = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            h = level(h)
            h = level.upsample(h) if hasattr(level, "upsample") else h
        return self.conv_out(self.norm_out(h))


class VectorQuantizer(nn.Module):
    """z (N, C, H, W) -> (nearest codes with z's shape, loss, indices of the codes (N, H, W)).

    The loss is the one of van den Oord et al. 2017.
    """

    def __init__(self, n_e: int, e_dim: int, beta: float = 0.25) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_e, e_dim)
        self.beta = beta

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = z.movedim(1, -1)
        indices = torch.cdist(tokens.flatten(0, -2), self.embedding.weight).argmin(1).view(tokens.shape[:-1])
        codes = self.embedding(indices).movedim(-1, 1)
        loss = F.mse_loss(codes, z.detach()) + self.beta * F.mse_loss(z, codes.detach())
        return z + (codes - z).detach(), loss, indices


class VQModel(nn.Module):
    """Images (N, in_channels, H, W) -> (reconstructed images, the quantizer's loss)."""

    def __init__(self, ddconfig: Mapping[str, Any], n_embed: int, embed_dim: int) -> None:
        super().__init__()
        self.encoder = Encoder(**{**ddconfig, "double_z": False})
        self.decoder = Decoder(**ddconfig)
        self.quantize = VectorQuantizer(n_embed, embed_dim)
        self.quant_conv = nn.Conv2d(ddconfig["z_channels"], embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(embed_dim, ddconfig["z_channels"], 1)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.quantize(self.quant_conv(self.encoder(x)))

    def decode(self, quant: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(quant))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        quant, loss, _ = self.encode(x)
        return self.decode(quant), loss
