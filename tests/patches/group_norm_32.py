"""The norm of pixel-space U-Nets and of latent diffusion."""

from torch import nn


class GroupNorm32(nn.GroupNorm):
    """GroupNorm in fp32, cast back."""

    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)
