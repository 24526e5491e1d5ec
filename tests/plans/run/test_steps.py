"""Each step against plain PyTorch in fp64: without kernels, and with kernels in the interpreter."""

import pytest
import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.plans.run import steps
from tests.kernels.samples import each_path
from tests.plans.run.step_cases import CASES, PATHS, PLACES, WRITERS


def close(found, expected, dtype):
    found, expected = ((t,) if isinstance(t, torch.Tensor) else t for t in (found, expected))
    bound = 1e-11 if dtype is torch.float64 else 2e-5
    for y, truth in zip(found, expected, strict=True):
        assert y.shape == truth.shape
        torch.testing.assert_close(y.double(), truth, atol=bound, rtol=bound)


@pytest.mark.drawn(300)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_steps(name, place, path, poisoned_memory):
    shapes, step, plain = CASES[name]
    dtype, way = PATHS[path]
    operands = [PLACES[place](torch.randn(shape, dtype=dtype)) for shape in shapes]
    before = [t.double() if dtype is not torch.float64 else t.clone() for t in operands]
    with torch.no_grad(), way():
        found = step(*operands)
        close(found, plain(*before), dtype)
    written = 1 if name.startswith(WRITERS) else 0
    for t, was in zip(operands[written:], before[written:], strict=True):
        assert torch.equal(t.double(), was)


@pytest.mark.parametrize("shape", [(1, 4, 6, 7), (3, 4, 6, 7), (1, 4, 2, 6, 7)])
def test_a_pad_stays_channels_last(shape):
    x = torch.randn(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    if len(x) == 1:  # the stride of a single sample has any value, as for the only frame of a video
        x = x.as_strided(x.shape, (shape[1], *x.stride()[1:]))
    y = steps.pad(x, (0, 1, 2, 1), "constant", 0.5)
    assert is_channels_last(y)
    assert torch.equal(y, F.pad(x, (0, 1, 2, 1), value=0.5))


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["channels-first", "channels-last", "strided"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_residual", [False, True])
def test_cudnn_computes_bias_residual_and_relu(dtype, place, has_residual, poisoned_memory):
    x, w, b, r = (
        torch.randn(shape, dtype=dtype, device="cuda")
        for shape in ((2, 16, 7, 9), (8, 16, 3, 3), (8,), (2, 8, 7, 9))
    )
    w /= 12
    x, residual = PLACES[place](x), PLACES[place](r) if has_residual else None
    y = steps.conv_relu(x, w, b, residual, [1, 1], [1, 1], [1, 1], 1)
    expected = F.conv2d(x.double(), w.double(), b.double(), padding=1)
    expected = F.relu(expected if residual is None else expected + residual.double())
    assert is_channels_last(y)
    torch.testing.assert_close(y.double(), expected, atol=0.03, rtol=0.02)


@each_path
def test_norms_of_videos_take_statistics_of_their_frames(path):
    x, w, b = torch.randn(2, 6, 3, 4, 5) + torch.arange(3.0).view(3, 1, 1), torch.randn(6), torch.randn(6)
    with path():
        known = sdfastgn.channel_statistics(x.movedim(2, 1).flatten(0, 1))
        for norm in (steps.Group(3, w, b, 1e-5, "silu", pads_first=first) for first in (False, True)):
            found, wanted = (
                steps.frames(x, front=1, back=1, mode="replicate", norm=norm._replace(statistics=each))[0]
                for each in (known, None)
            )
            torch.testing.assert_close(found, wanted)
        found, wanted = (steps.group_norm(x, 3, w, b, 1e-5, "silu", None, s, False) for s in (known, None))
    torch.testing.assert_close(found, wanted)
