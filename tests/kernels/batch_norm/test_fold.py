"""``fold_batch_norm`` against fp64: the kernel, in the interpreter or on a GPU, and the reference."""

import pytest
import torch

from sdfastgn.kernels.batch_norm import fold
from sdfastgn.kernels.batch_norm.fold import Folded, fold_batch_norm, reference_fold
from tests.devices import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)


def parts_of(shape, dtype, device, *, has_bias=True, is_affine=True):
    norm_dtype = torch.float32 if has_bias else dtype

    def vector():
        return torch.randn(shape[0], dtype=norm_dtype, device=device)

    weight = torch.randn(shape, device=device).to(dtype)
    bias = vector().to(dtype) if has_bias else None
    scale, offset = (vector(), vector()) if is_affine else (None, None)
    return Folded(weight, bias, scale, offset, vector(), vector().square() + 1e-4)


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("is_affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8, 3, 3, 3), (5, 250, 3, 3), (4, 16, 1, 1)], ids=str)
def test_values(shape, dtype, is_affine, has_bias, device):
    parts = parts_of(shape, dtype, device, has_bias=has_bias, is_affine=is_affine)
    if shape[1] == 16:
        parts = parts._replace(weight=parts.weight.to(memory_format=torch.channels_last))
    in_fp64 = Folded(*(None if t is None else t.double() for t in parts))
    for found in (
        fold._launched(parts.weight, parts, 1e-3),
        reference_fold(parts, 1e-3),
        fold_batch_norm(parts, 1e-3),
    ):
        for y, expected in zip(found, reference_fold(in_fp64, 1e-3), strict=True):
            assert y.dtype is dtype
            # The interpreter does not round to bf16, but cuts off.
            eps = torch.finfo(dtype).eps * (1.01 if (dtype, device) == (torch.bfloat16, "cpu") else 0.51)
            torch.testing.assert_close(y.double(), expected, rtol=eps + 1e-7, atol=1e-6)
        assert found[0].stride() == parts.weight.stride()
