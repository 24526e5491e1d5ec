"""A small model that gets plans. Tests copy this file, edit the copy, and import it."""

import torch
import torch.nn.functional as F
from torch import nn


def mixed(x, y):
    return x + y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.scale = 0.5

    def forward(self, x):
        y = self.conv(F.silu(self.norm(x)))
        return mixed(x, self.scale * y * torch.tensor([1.0, 2.0] * 4).view(8, 1, 1).to(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(), Block())
        self.extra = nn.Parameter(torch.zeros(3))
        self.options = {"finish": "doubled"}

    def forward(self, x, factor=1.0, kept=None):
        y = self.blocks(self.conv_in(x)) * factor
        y = getattr(self, self.options["finish"])(y)
        if kept is None:
            return y
        kept[:] = [y[..., :1]]
        return {"sample": y, "parts": (x, y[:, :2])}

    def doubled(self, y):
        return y * 2.0
