"""Attention of pixels over the frames of a video, and of samples of few tokens, against fp64."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.kernels.attention.over_frames import attend_in_samples, attend_over_frames
from tests.kernels.samples import DTYPES, kernels

pytestmark = pytest.mark.usefixtures("poisoned_memory", "without_gradients")
run = kernels(direct=True)(attend_over_frames)
# (N, heads, frames, pixels, D): tiles of several pixels and of one, with rows and columns that are padding.
SHAPES = [
    (2, 2, 3, 37, 8),
    (1, 3, 14, 9, 40),
    (2, 1, 16, 5, 16),
    (1, 2, 25, 3, 24),
    (1, 1, 40, 2, 80),
    (2, 2, 1, 70, 8),
    (1, 1, 3, 18, 264),  # several parts of the channels
]
BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6}


def made(shape, dtype, device, seed=0):
    """(q, k, v), each a part of one tensor, as after one product."""
    N, H, T, P, D = shape
    x = torch.randn(N, T * P, 3 * H, D, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype).transpose(1, 2).chunk(3, 1)


def truth(q, k, v, frames):
    q, k, v = (t.double().unflatten(2, (frames, -1)).transpose(2, 3) for t in (q, k, v))
    weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
    return (weights @ v).transpose(2, 3).flatten(2, 3).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(shape, dtype, launches, device):
    if dtype is torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bf16 as integers")
    q, k, v = made(shape, dtype, device)
    y = run(q, k, v, shape[2])
    assert y.is_contiguous()
    assert (y.double() - truth(q, k, v, shape[2])).abs().max() < BOUNDS[dtype]
    assert len(launches) == (dtype != torch.float32)


@pytest.mark.parametrize("scale", [1e-3, 200.0])
def test_flat_and_peaked_weights(scale, device):
    q, k, v = made((1, 2, 5, 7, 16), torch.float16, device)
    y = run(q * scale, k, v, 5)
    assert (y.double() - truth(q * scale, k, v, 5)).abs().max() < BOUNDS[torch.float16]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_what_is_not_finite_stays_in_its_tile(operand, value, device):
    """In q and k it stays in its pixel. In v it may reach the pixels beside it, as the docstring says."""
    operands = dict(zip("qkv", made((2, 1, 3, 100, 16), torch.float16, device), strict=True))
    operands[operand][0, :, 2] = value  # the third pixel of the first frame
    y, true = run(*operands.values(), 3).double(), truth(*operands.values(), 3)
    found = ~y.isfinite().all(-1).view(2, 3, 100)
    pixels = found.any(1).nonzero().tolist()
    assert [0, 2] in pixels
    assert all(sample == 0 and pixel < (16 if operand == "v" else 3) for sample, pixel in pixels)
    assert operand == "v" or pixels == [[0, 2]]
    others = ~found.flatten(1)
    torch.testing.assert_close(y[others], true[others], atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    "shape", [(1, 1, 65, 2, 16), (1, 1, 3, 2, 12), (1, 1, 3, 2, 520)], ids=["frames", "odd-channels", "wide"]
)
def test_what_does_not_fit_runs_in_pytorch(shape, launches, device):
    q, k, v = made(shape, torch.float16, device)
    y = run(q, k, v, shape[2])
    assert (y.double() - truth(q, k, v, shape[2])).abs().max() < BOUNDS[torch.float16]
    assert not launches


def test_gradients(launches, device):
    q, k, v = (t.detach().requires_grad_() for t in made((2, 2, 3, 4, 8), torch.float32, device))
    with torch.enable_grad():
        found = torch.autograd.grad(run(q, k, v, 3).square().sum(), (q, k, v))
        wanted = torch.autograd.grad(truth(q, k, v, 3).square().sum(), (q, k, v))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert not launches


# ---- samples of few tokens

run_samples = kernels(direct=True)(attend_in_samples)


def samples(B, H, L, D, tokens_first, dtype=torch.float16, device="cpu"):
    """(q, k, v) of B samples, in which a token of all samples comes first, or all tokens of a sample."""
    order = (L, B) if tokens_first else (B, L)
    x = torch.randn(*order, 3 * H, D, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return x.permute(*((1, 2, 0, 3) if tokens_first else (0, 2, 1, 3))).chunk(3, 1)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3, "is_causal": True}], ids=str)
@pytest.mark.parametrize("shape", [(70, 2, 3, 8), (64, 1, 16, 40), (65, 1, 5, 136)], ids=str)
@pytest.mark.parametrize("tokens_first", [False, True])
def test_samples_of_few_tokens(tokens_first, shape, options, launches, device):
    q, k, v = samples(*shape, tokens_first, device=device)
    y = run_samples(q, k, v, **options)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
    assert (y.double() - expected).abs().max() < BOUNDS[torch.float16]
    assert len(launches) == 1
    # The tokens are in the order of q, and the heads of a token lie side by side.
    order = (2, 0, 1, 3) if tokens_first else (0, 2, 1, 3)
    assert y.shape == shape
    assert y.permute(*order).is_contiguous()


@pytest.mark.parametrize(
    "qkv",
    [
        samples(70, 1, 33, 8, False),
        samples(63, 1, 3, 8, False),
        [samples(70, 1, 3, 8, True)[0], *samples(70, 1, 3, 8, False)[1:]],
        [t[:, :, 1:] for t in samples(70, 1, 4, 8, False)],
        [samples(70, 1, 3, 8, False)[0], *samples(70, 1, 4, 8, False)[1:]],
        samples(70, 1, 3, 8, False, torch.float32),
        [t[0] for t in samples(70, 70, 3, 8, False)],
    ],
    ids=["many tokens", "few samples", "two orders", "gaps", "other keys", "fp32", "one sample"],
)
def test_other_samples_are_left_to_other_kernels(qkv, launches):
    assert run_samples(*qkv) is None
    assert not launches
