"""``sdfastgn.layer_norm`` on the largest shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sdfastgn


def operands(*shape, dtype=torch.float32, device="cpu", requires_grad=False):
    """x, residual, weight, bias, add_bias."""
    full = [torch.randn(shape) * 1.5 + 2 for _ in range(2)]
    columns = [torch.randn(shape[-1]) for _ in range(3)]
    return [t.to(device, dtype).requires_grad_(requires_grad) for t in (*full, *columns)]


def eager(x, residual, weight, bias, add_bias, eps=1e-5):
    total = x + residual + add_bias
    return F.layer_norm(total, total.shape[-1:], weight, bias, eps), total


def ours(x, residual, weight, bias, add_bias, eps=1e-5):
    return sdfastgn.add_layer_norm(x, residual, weight, bias, eps, add_bias=add_bias)


# --- GPU ----------------------------------------------------------------------

GPU_SHAPES = [pytest.param((512, 320), id="rows"), pytest.param((3, 40000), id="chunks")]


@pytest.mark.gpu
def test_ten_million_columns_and_ten_million_rows():
    for shape in [(10, 10**7), (10**7, 10)]:
        x, _, weight, bias, _ = operands(*shape, dtype=torch.float16, device="cuda", requires_grad=True)
        y = sdfastgn.layer_norm(x, weight, bias)
        expected = F.layer_norm(
            x.detach().float(), shape[-1:], weight.detach().float(), bias.detach().float()
        )
        torch.testing.assert_close(y.detach(), expected.half(), atol=4e-3, rtol=2e-3)
        # A power of 2, so that each sum is exact, and small enough for fp16.
        dx, dbias = torch.autograd.grad(y, (x, bias), torch.full_like(y, 2**-10))
        assert dx.isfinite().all()
        torch.testing.assert_close(dbias, torch.full_like(dbias, shape[0] / 2**10))
