"""What the kernel tests share: devices, dtypes, inputs, the kernels on any device, and the fp64 truth."""

from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import sdfastgn
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.dispatch import KERNEL_DTYPES
from sdfastgn.kernels.common.sizes import ceil_div
from sdfastgn.kernels.group_norm.op import reference_group_norm
from sdfastgn.kernels.statistics.op import reference_channel_statistics
from tests.devices import interpreted as interpreted

DTYPES = [
    pytest.param(d, id=str(d).removeprefix("torch.")) for d in (torch.float16, torch.bfloat16, torch.float32)
]
HALVES = DTYPES[:2]
LAYOUTS = ["channels_last", "channels_first"]
# For launch configurations, which need no GPU: a small one and an H200; 16 bits and fp32.
each_gpu = pytest.mark.parametrize("num_sms", [14, 132], ids=lambda n: f"{n}sms")
each_size = pytest.mark.parametrize("itemsize", [2, 4], ids=lambda n: f"{n}bytes")


def first_alone(values):
    """All values on a GPU; in the interpreter the first one, because the others walk the same code."""
    first, *others = values
    return [
        first,
        *(pytest.param(*as_param(v).values, id=as_param(v).id, marks=pytest.mark.gpu) for v in others),
    ]


def as_param(value):
    return value if hasattr(value, "values") and hasattr(value, "marks") else pytest.param(value)


def skip_cut_off(dtype, device):
    """For what is said of the last bit."""
    if device == "cpu" and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bf16 where a GPU rounds")


# A result rounded once: half a unit in the last place of the largest values, with room for fp32 sums.
BOUNDS = {torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 2e-6}


def to_layout(x, layout):
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if layout == "channels_last" else x.contiguous()


def make(
    shape, dtype=torch.float32, device="cpu", layout="channels_last", mean=3.0, seed=0, param_dtype=None
):
    """(x, weight, bias) with a mean away from zero and a random affine."""
    g = torch.Generator().manual_seed(seed)
    x = to_layout((torch.randn(shape, generator=g) * 1.5 + mean).to(dtype), layout).to(device)
    weight, bias = (torch.randn(shape[1], generator=g).to(param_dtype or dtype).to(device) for _ in range(2))
    return x, weight, bias


# --- where an operand may lie -------------------------------------------------


def every_second(t):
    return torch.stack((t, t + 100), -1).flatten(-2)[..., ::2]


def expanded(t):
    return t[..., :1].expand(t.shape)


def expanded_from_the_first(t):
    return t[:1].expand(t.shape)


def offset(t):
    return torch.cat((torch.full((3,), 100.0, dtype=t.dtype, device=t.device), t.flatten()))[3:].view(t.shape)


def narrowed(t):
    """Rows that are further apart than they are long."""
    return torch.cat((t, t + 100), -1)[..., : t.shape[-1]]


def transposed(t):
    # A vector becomes a column of a matrix.
    return (
        t.transpose(0, -1).contiguous().transpose(0, -1)
        if t.dim() > 1
        else torch.stack((t + 100, t), -1)[:, 1]
    )


def channels_last(t):
    return t.movedim(1, -1).contiguous().movedim(-1, 1) if t.dim() > 2 else t


PLACES = [every_second, expanded, expanded_from_the_first, offset, narrowed, transposed, channels_last]


# --- the kernels, whatever the device: the public functions take CPU tensors to PyTorch


@contextmanager
def kernels(*, direct=False):
    """The public functions launch Triton kernels on CPU tensors too, which Triton's interpreter then runs.

    ``direct``: as on a GPU, without PyTorch's dispatcher where it is of no use.
    """
    with ExitStack() as patches:
        is_supported = mock.patch.object(dispatch, "is_supported", lambda x: x.dtype in KERNEL_DTYPES)
        patches.enter_context(is_supported)
        if not direct:
            patches.enter_context(mock.patch.object(dispatch, "is_plain", return_value=False))
        yield


each_path = pytest.mark.parametrize(
    "path", [nullcontext, partial(kernels, direct=True)], ids=["pytorch", "kernels"]
)
run = kernels()(sdfastgn.group_norm)
run_statistics = kernels()(sdfastgn.channel_statistics)
run_add = kernels()(sdfastgn.add_with_statistics)
run_cat = kernels()(sdfastgn.cat_with_statistics)


# --- the truth ----------------------------------------------------------------


def in_fp64(function):
    """``function`` with its tensors in fp64."""

    def exact(*args, **options):
        args, options = tree_map_only(Tensor, Tensor.double, (args, options))
        return function(*args, **options)

    return exact


truth = in_fp64(reference_group_norm)


def error(y, expected):
    return ((y.double() - expected).norm() / expected.norm()).item()


def checked(x, num_groups, *affine, statistics=None, **options):
    """GroupNorm by the kernels, right to the last rounding."""
    y = run(x, num_groups, *affine, statistics=statistics, **options)
    expected = truth(x, num_groups, *affine, **options)
    assert (y.dtype, y.shape) == (x.dtype, expected.shape)
    assert error(y, expected) < BOUNDS[x.dtype]
    return y


def assert_statistics(statistics, y):
    """They are those of ``y``, chunk by chunk and, merged by Chan's formula, as a whole."""
    N, C, HW = y.shape[0], y.shape[1], y.shape[2:].numel()
    chunks = statistics.shape[2]
    assert statistics.shape == (2, N, chunks, C)
    assert statistics.dtype is torch.float32
    assert statistics.is_contiguous()
    assert not statistics.requires_grad
    rows = ceil_div(HW, chunks)
    count = (HW - rows * torch.arange(chunks, device=y.device)).clamp(0, rows).double()[:, None]
    assert (count > 0).all()
    mean, m2 = statistics.double()
    expected_mean, expected_m2 = reference_channel_statistics(y.double(), chunks)
    # A mean is rounded at its own size; squares are of deviations, whose last bits are those of y.
    slack = 4 * torch.finfo(torch.float32).eps * (expected_mean.abs() + (expected_m2 / count).sqrt())
    assert ((mean - expected_mean).abs() <= slack).all()
    assert ((m2 - expected_m2).abs() <= 1e-5 * expected_m2 + count * slack**2).all()
    # Chan's formula over the chunks.
    merged = (mean * count).sum(1) / HW
    merged_m2 = (m2 + (mean - merged[:, None]).square() * count).sum(1)
    u = y.double().reshape(N, C, HW)
    assert ((merged - u.mean(2)).abs() <= slack.amax(1)).all()
    whole = (u - u.mean(2, keepdim=True)).square().sum(2)
    slack = slack.amax(1) * HW**0.5  # of the root of the sum
    assert ((merged_m2 - whole).abs() <= 1e-5 * whole + 2 * slack * whole.sqrt() + slack**2).all()
