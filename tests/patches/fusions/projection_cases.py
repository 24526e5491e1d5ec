"""UNets whose ResNet blocks may share their time embedding's projections, and what was launched for it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

import sdfastgn
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.patches.fusions.resnet_block import ResnetBlock2D
from tests.kernels import samples

WHERE = {"device": "cpu"}
# Without attention: Triton's interpreter is slow.
SIZES = {
    "block_out_channels": (8, 24), "norm_num_groups": 4, "layers_per_block": 1, "cross_attention_dim": 12,
    "down_block_types": ("DownBlock2D",) * 2, "mid_block_type": "UNetMidBlock2D",
}  # fmt: skip


@pytest.fixture(autouse=True, params=samples.DEVICES)
def as_on_a_gpu(request, monkeypatch):
    """Kernels without the dispatcher, on a CPU too."""
    monkeypatch.setitem(WHERE, "device", request.param)
    with samples.kernels(direct=True):
        yield


@pytest.fixture
def launches(monkeypatch):
    """Rows of the weight of each projection with two biases, the embedding's and conv1's, that is launched."""
    found: list[int] = []
    launch = Launch.__call__

    def note(self: Launch, stream: int, *tensors: Tensor | None) -> None:
        if self.kernel.__name__ == "_act_linear_kernel" and all(bias is not None for bias in tensors[2:4]):
            found.append(tensors[1].shape[0])
        launch(self, stream, *tensors)

    monkeypatch.setattr(Launch, "__call__", note)
    return found


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(WHERE["device"])


def unet(**options: Any) -> UNet2DConditionModel:
    torch.manual_seed(2)
    model = UNet2DConditionModel(sample_size=4, up_block_types=("UpBlock2D",) * 2, **SIZES, **options).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model.to(WHERE["device"])


def twins(build=unet):
    """(optimised, stock) with the same weights."""
    stock = build()
    return sdfastgn.optimize(copy.deepcopy(stock), cuda_graphs=False), stock


def call(model, seed: int = 0):
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        return model(random(2, 4, 4, 4, seed=seed).to(dtype), 3, random(2, 5, 12, seed=1).to(dtype)).sample


def blocks(model) -> list:
    return [m for m in model.modules() if isinstance(m, ResnetBlock2D)]


def widths(model) -> list[int]:
    return [m.time_emb_proj.out_features for m in blocks(model)]


def in_order_of_calls(model) -> list[int]:
    parts = (*model.down_blocks, model.mid_block, *model.up_blocks)
    return [resnet.time_emb_proj.out_features for part in parts for resnet in part.resnets]


def agree(a: Tensor, b: Tensor, tolerance: float = 5e-5) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
