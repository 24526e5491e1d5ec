"""Blocks of ``UNet1DModel``: each norm and the activation after it in one pass."""

import copy

import pytest
import torch
from diffusers import UNet1DModel
from diffusers.models.resnet import Conv1dBlock, ResidualTemporalBlock1D
from diffusers.models.unets.unet_1d_blocks import ResConvBlock
from torch import nn

import sdfastgn
from tests.patches import cases

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]


def network():
    """Of diffusion over plans, with Mish."""
    return UNet1DModel(
        in_channels=6,
        out_channels=6,
        block_out_channels=(8, 16),
        down_block_types=("DownResnetBlock1D",) * 2,
        up_block_types=("UpResnetBlock1D",),
        mid_block_type="MidResTemporalBlock1D",
        out_block_type="OutConv1DBlock",
        act_fn="mish",
        time_embedding_type="positional",
        use_timestep_embedding=True,
        flip_sin_to_cos=False,
        freq_shift=1,
    )


def test_a_network_has_one_pass_for_each_norm(launches, monkeypatch):
    models = fused, stock = cases.random_twins(network(), cuda_graphs=False)
    assert not sdfastgn.report(fused).skipped
    x = cases.noise(2, 6, 14)
    expected = stock(x, 20).sample
    activated, forward = [], nn.Mish.forward
    monkeypatch.setattr(nn.Mish, "forward", lambda self, y: activated.append(y.dim()) or forward(self, y))
    cases.agree(fused(x, 20).sample, expected)
    assert set(activated) == {2}  # embeddings of the time
    norms = [m for m in stock.modules() if isinstance(m, nn.GroupNorm)]
    assert cases.passes(launches)["small"] + cases.passes(launches)["apply"] == len(norms)
    sdfastgn.restore(fused)
    assert torch.equal(*(model(x, 20).sample for model in models))


def test_gradients_are_stocks():
    models = cases.random_twins(ResidualTemporalBlock1D(6, 24, embed_dim=8))
    cases.same_gradients(models, cases.noise(2, 6, 13).requires_grad_(), cases.noise(2, 8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("build", [lambda: Conv1dBlock(6, 24, 5), lambda: ResConvBlock(6, 12, 10)])
def test_no_less_exact_than_stock(build, dtype):
    """The mean of what the norms read is far from zero."""
    fused, stock = models = cases.random_twins(build(), dtype)
    x = cases.noise(2, 6, 13, dtype=dtype)
    for model in models:
        first = next(m for m in model.modules() if isinstance(m, nn.Conv1d) and m.bias is not None)
        first.bias += 30
    exact = copy.deepcopy(stock).double()(x.double())
    errors = [float((model(x).double() - exact).norm() / exact.norm()) for model in (fused, stock)]
    assert errors[0] <= 1.1 * errors[1] + 1e-7


@pytest.mark.parametrize("layer", ["conv1d", "group_norm", "mish"])
def test_a_hook_sees_what_it_saw(layer):
    models = cases.random_twins(Conv1dBlock(6, 24, 5))
    seen = [], []
    for model, found in zip(models, seen, strict=True):
        module = model.get_submodule(layer)
        module.register_forward_hook(lambda m, args, y, found=found: found.append(y.clone()))
    x = cases.noise(2, 6, 13)
    cases.agree(*(model(x) for model in models))
    cases.agree(*(torch.stack(found) for found in seen))
