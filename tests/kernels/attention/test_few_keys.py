"""Attention to few keys against fp64, beside the error of what it replaces."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdfastgn.kernels.attention import few_keys as short_attention
from sdfastgn.kernels.attention.few_keys import (
    MAX_KEYS,
    AttentionConfig,
    attention_config,
    fits,
)
from sdfastgn.kernels.common import dispatch, gpu
from tests.kernels.ops import true_attention
from tests.kernels.samples import error, in_fp64

DTYPES = [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")]


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    monkeypatch.setattr(dispatch, "is_supported", lambda x: True)
    short_attention._launches.clear()
    yield
    short_attention._launches.clear()


def heads(N, H, L, D, dtype=torch.float16, device="cpu", *, parts=1, seed=0):
    """``parts`` tensors (N, H, L, D), which lie side by side in the output of one linear layer."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn((N, L, parts * H * D), generator=g).to(device, dtype)
    return rows.view(N, L, parts * H, D).transpose(1, 2).chunk(parts, 1)


def attend_to_few(q, k, v, scale=None):
    """The result as (N, H, L, D), the shape of q."""
    y = short_attention.attend_to_few(q, k, v, scale)
    return None if y is None else y.unflatten(2, q.shape[1::2]).transpose(1, 2)


truth = in_fp64(true_attention)


def stock(q, k, v, scale=None):
    """What a flash kernel computes, with its roundings."""
    scores = q.float() @ k.float().transpose(2, 3) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    return (p.to(v.dtype).float() @ v.float() / p.sum(-1, keepdim=True)).to(q.dtype)


CASES = [
    pytest.param((2, 2, 130, 77, 64), id="prompt"),
    pytest.param((1, 3, 65, 77, 40), id="head-dim-40"),
    pytest.param((2, 1, 33, 77, 80), id="head-dim-80"),
    pytest.param((1, 1, 70, 77, 160), id="head-dim-160"),
    pytest.param((1, 2, 5, 1, 8), id="one-key"),
    pytest.param((1, 1, 17, 15, 64), id="fewer-than-a-tile"),
    pytest.param((1, 1, 64, 64, 32), id="one-whole-tile"),
    pytest.param((1, 2, 9, 100, 64), id="two-halves-are-one"),
    pytest.param((1, 1, 9, 128, 256), id="largest"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", CASES)
def test_against_fp64(sizes, dtype, device, poisoned_memory):
    if dtype is torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bf16 as integers")
    N, H, L, S, D = sizes
    (q,), (k, v) = heads(N, H, L, D, dtype, device), heads(N, H, S, D, dtype, device, parts=2, seed=1)
    y = attend_to_few(q, k, v)
    assert short_attention.attend_to_few(q, k, v).is_contiguous()
    assert y.dtype is dtype
    assert torch.equal(attend_to_few(q, k, v), y)
    assert error(y, truth(q, k, v)) < 1.05 * error(stock(q, k, v), truth(q, k, v)) + 1e-6


@pytest.mark.parametrize("scale", [0.5, 8.0], ids=["given-scale", "large-logits"])
def test_scale(scale, device):
    (q,), (k, v) = heads(1, 2, 33, 64, device=device), heads(1, 2, 77, 64, device=device, parts=2, seed=1)
    found = error(attend_to_few(q, k, v, scale), truth(q, k, v, scale))
    assert found < 1.05 * error(stock(q, k, v, scale), truth(q, k, v, scale))


def test_equal_logits_average(device):
    q = torch.zeros(1, 1, 4, 64, device=device, dtype=torch.float16)
    k, v = heads(1, 1, 77, 64, device=device, parts=2)
    y = attend_to_few(q, k, v)
    torch.testing.assert_close(y, v.double().mean(2, keepdim=True).half().expand_as(y), atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("index", [3, 70], ids=["first-tile", "second-tile"])
def test_what_is_not_finite_spreads_as_in_pytorch(where, value, index, device):
    (q,), (k, v) = heads(1, 2, 80, 32, device=device), heads(1, 2, 77, 32, device=device, parts=2, seed=1)
    {"q": q, "k": k, "v": v}[where][0, 1, index, 5] = value
    with sdpa_kernel(
        SDPBackend.MATH
    ):  # the formula itself; the others have ways of their own with infinities
        expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
    y = attend_to_few(q, k, v)
    assert torch.equal(y.isfinite(), expected.isfinite())
    assert y[0, 0].isfinite().all()


@pytest.mark.parametrize(
    ("S", "D", "expected"),
    [
        pytest.param(77, 64, AttentionConfig(64, 64, 64, 16, 4), id="prompt"),
        pytest.param(77, 160, AttentionConfig(64, 256, 64, 16, 8), id="wide-head"),
        pytest.param(64, 40, AttentionConfig(64, 64, 64, 0, 4), id="whole"),
        pytest.param(65, 64, AttentionConfig(64, 64, 64, 16, 4), id="one-more"),
        pytest.param(97, 64, AttentionConfig(64, 64, 128, 0, 4), id="halves"),
        pytest.param(1, 8, AttentionConfig(64, 16, 16, 0, 4), id="least"),
        pytest.param(20, 64, AttentionConfig(64, 64, 32, 0, 4), id="two-least"),
    ],
)
def test_config(S, D, expected):
    assert attention_config(D, S) == expected


def test_tiles_hold_all_keys():
    for S in range(1, MAX_KEYS + 1):
        config = attention_config(64, S)
        assert config.head + config.tail >= S
        assert config.tail == 0 or config.head < S
        assert config.head + config.tail < 2 * max(S, 16)


Q, (K, V) = heads(1, 2, 20, 64)[0], heads(1, 2, 77, 64, parts=2)
LONG = heads(1, 2, 129, 64)[0]


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param((Q.float(), K.float(), V.float()), id="fp32"),
        pytest.param((Q, K.bfloat16(), V), id="mixed"),
        pytest.param((Q, LONG, LONG), id="too-many-keys"),
        pytest.param((Q, K[:, :, :0], V[:, :, :0]), id="no-key"),
        pytest.param((Q[:, :, :0], K, V), id="no-query"),
        pytest.param((Q[..., :60], K[..., :60], V[..., :60]), id="head-dim-60"),
        pytest.param((Q, K[:, :1], V[:, :1]), id="broadcast"),
        pytest.param((Q, K, V.transpose(2, 3).contiguous().transpose(2, 3)), id="strided-rows"),
        pytest.param((Q[0], K[0], V[0]), id="rank-3"),
    ],
)
def test_left_to_pytorch(tensors):
    assert not fits(*tensors)
    assert attend_to_few(*tensors) is None


def test_without_triton(monkeypatch):
    monkeypatch.setattr(dispatch, "is_supported", lambda x: False)
    assert attend_to_few(Q, K, V) is None


@pytest.mark.parametrize(
    ("capability", "D", "expected"),
    [
        pytest.param((7, 5), 64, False, id="sm_75"),
        pytest.param((8, 0), 128, True, id="sm_80"),
        pytest.param((8, 6), 136, False, id="sm_86-wide-head"),
        pytest.param((9, 0), 256, True, id="sm_90-wide-head"),
        pytest.param((12, 0), 128, True, id="sm_120"),
        pytest.param((12, 0), 160, False, id="sm_120-wide-head"),
    ],
)
def test_gpus(capability, D, expected):
    assert short_attention.runs_on(capability, D) is expected


def test_what_is_left_to_pytorch_on_amd(monkeypatch):
    """Its GPUs are called cuda too, and gfx942 has the capability 9.4."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert gpu.has_programmatic_launch(torch.device("cuda"))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not gpu.has_programmatic_launch(torch.device("cuda"))
    assert not short_attention.runs_on((9, 4), 64)


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), False), ((9, 0), True)])
def test_on_the_device_meta_it_is_as_on_the_gpu_that_meta_stands_for(capability, expected):
    q = torch.empty(1, 1, 64, 160, dtype=torch.float16, device="meta")
    token = gpu.META_CAPABILITY.set(capability)
    try:
        assert short_attention.fits_heads(q, q, q, 256, 256) is expected
    finally:
        gpu.META_CAPABILITY.reset(token)
