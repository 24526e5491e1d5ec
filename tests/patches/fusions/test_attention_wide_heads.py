"""The fused ``Attention`` with one wide head computes attention in chunks, if stock's result is the same."""

import copy

import pytest
import torch
from diffusers.models.attention_processor import Attention

import sdfastgn
from sdfastgn.kernels.attention import wide_heads as wide_attention
from sdfastgn.kernels.attention import wide_heads_kernels as wide_attention_kernels
from sdfastgn.kernels.common import dispatch

pytestmark = pytest.mark.fused_on_cpu

DIM = 264


def twins(device, dtype=torch.float16):
    """(fused, stock)"""
    options = {"heads": 1, "dim_head": DIM, "bias": True, "residual_connection": True, "norm_num_groups": 4}
    stock = Attention(DIM, **options).to(device, dtype).eval()
    return sdfastgn.optimize(copy.deepcopy(stock)), stock


def image(device, dtype=torch.float16):
    return torch.randn(2, DIM, 3, 4).to(device, dtype)


@pytest.fixture
def launches(monkeypatch):
    """A list with one entry for each attention in chunks. Here small images have it, too."""
    found = []
    monkeypatch.setattr(dispatch, "is_supported", lambda x: True)
    monkeypatch.setattr(wide_attention, "pays", lambda L, keys, D: D > 256)
    stock = wide_attention_kernels.launch_wide_attention
    monkeypatch.setattr(
        wide_attention_kernels, "launch_wide_attention", lambda *a: found.append(1) or stock(*a)
    )
    return found


def test_one_wide_head_attends_in_chunks(launches, device):
    fused, stock = twins(device)
    x = image(device)
    with torch.no_grad():
        y, expected = fused(x), stock(x)
    assert launches == [1]
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected, atol=4e-3, rtol=4e-3)
    sdfastgn.restore(fused)
    with torch.no_grad():
        assert torch.equal(fused(x), expected)
    assert launches == [1]


def test_gradients_and_fp32_are_stocks(launches, device):
    fused, stock = twins(device)
    x = image(device)
    torch.testing.assert_close(fused(x), stock(x), atol=4e-3, rtol=4e-3)
    fused, stock = twins(device, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(fused(x.float()), stock(x.float()), atol=2e-3, rtol=2e-3)
    assert not launches


@pytest.mark.gpu
def test_a_captured_graph_replays_on_new_data():
    stock = Attention(512, heads=1, dim_head=512).to("cuda", torch.float16).eval()
    fused = sdfastgn.optimize(copy.deepcopy(stock))
    x = torch.randn(1, 4096, 512, device="cuda").half()
    with torch.no_grad():
        fused(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fused(x)
        x.mul_(2)
        graph.replay()
        torch.testing.assert_close(y, stock(x), atol=4e-3, rtol=4e-3)
