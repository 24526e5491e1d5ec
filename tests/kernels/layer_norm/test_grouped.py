"""LayerNorm of rows in groups, with a vector for each group before or after the norm."""

import pytest
import torch

from sdfastgn.kernels.layer_norm.grouped import Groups, grouped_layer_norm
from tests.kernels.ops import true_layer_norm
from tests.kernels.samples import BOUNDS, DTYPES, error, in_fp64, kernels, skip_cut_off

pytestmark = pytest.mark.usefixtures("poisoned_memory", "without_gradients")
run = kernels(direct=True)(grouped_layer_norm)
truth = in_fp64(true_layer_norm)
# (N, T, P, D): rows shared by warps, several rows for each warp, columns that no vector divides, and rows
# that do not fit into registers.
SHAPES = [(2, 3, 5, 320), (1, 3, 2, 1280), (2, 3, 70, 10), (3, 1, 3, 7), (1, 2, 2, 17000)]


def made(shape, dtype, device):
    g = torch.Generator().manual_seed(0)
    (N, T, P, D), draw = shape, lambda *s: (torch.randn(s, generator=g) * 1.5 + 1).to(dtype).to(device)
    return draw(N * T * P, D), draw(N * T * P, D), draw(T, D), draw(N * T, D), [draw(D) for _ in range(3)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_vector_of_each_frame(shape, dtype, device):
    skip_cut_off(dtype, device)
    x, residual, of_frames, of_images, (weight, bias, total_bias) = made(shape, dtype, device)
    _, T, P, _ = shape
    frame = torch.arange(len(x), device=device) // P
    # An embedding of frames before the norm.
    y, total = run(x, weight, bias, 1e-5, Groups(P, added=of_frames), total_bias=total_bias)
    summed = x + of_frames[frame % T]
    assert error(y, truth(summed, weight, bias)) < BOUNDS[dtype]
    wide = x.double() + of_frames[frame % T].double()
    assert error(total, wide + total_bias.double()) < BOUNDS[dtype]
    # A vector of each image, and a residual.
    y, total = run(x, weight, bias, 1e-5, Groups(P, added=of_images), residual=residual)
    wide = x.double() + residual.double() + of_images[frame].double()
    assert error(total, wide) < BOUNDS[dtype]
    assert error(y, truth(total, weight, bias)) < BOUNDS[dtype]
    # A positional embedding behind the norm.
    y, total = run(x, weight, bias, 1e-5, Groups(P, position=of_frames))
    assert torch.equal(total, x)
    assert error(y, truth(x, weight, bias) + of_frames[frame % T].double()) < 2 * BOUNDS[dtype]
    y, total = run(x, weight, None, 1e-5, Groups(P, position=of_frames), residual=residual)
    assert torch.equal(total, x + residual)
    assert error(y, truth(total, weight) + of_frames[frame % T].double()) < 2 * BOUNDS[dtype]


@pytest.mark.parametrize("shape", SHAPES[:1], ids=str)
def test_one_launch(shape, launches, device):
    x, residual, of_frames, _, (weight, bias, _) = made(shape, torch.float32, device)
    run(x, weight, bias, 1e-5, Groups(shape[2], of_frames, of_frames), residual=residual, total_bias=bias)
    assert [name for name, *_ in launches] == ["rows"]


def test_gradients_and_odd_layouts_run_in_pytorch(launches, device):
    x, residual, of_frames, _, (weight, bias, _) = made(SHAPES[0], torch.float32, device)
    expected = run(x, weight, bias, 1e-5, Groups(5, added=of_frames), residual=residual)
    launches.clear()
    odd = residual.t().contiguous().t()
    found = run(x, weight, bias, 1e-5, Groups(5, added=of_frames), residual=odd)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)
    with torch.enable_grad():
        y, _ = run(x, weight.requires_grad_(), bias, 1e-5, Groups(5, added=of_frames), residual=residual)
        (gradient,) = torch.autograd.grad(y.sum(), weight)
    assert gradient.shape == weight.shape
