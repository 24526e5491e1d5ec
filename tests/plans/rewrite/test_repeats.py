"""Elements that views repeat before a convolution are upsampled."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.plans.run import steps
from tests.plans.rewrite.rewriting import checked


def convolved(x):
    C, rank = x.shape[1], x.dim() - 2
    w = torch.ones(3, C, *[3] * rank) / C + torch.arange(3).view(-1, 1, *[1] * rank)
    return (F.conv2d if rank == 2 else F.conv3d)(x, w, padding=1)


def repeated(x, *axes, times=2):
    for axis in axes:
        x = x.repeat_interleave(times, axis)
    return x


def later(x, times=2):
    """All frames several times, except the first one."""
    return x.repeat_interleave(times, 2)[:, :, times - 1 :]


IMAGE, VIDEO = (2, 3, 4, 5), (1, 3, 4, 5, 3)
FOUND = {
    "rows": (IMAGE, lambda x: repeated(x, 2), (2, 1), False),
    "columns": (IMAGE, lambda x: repeated(x, 3, times=4), (1, 4), False),
    "rows, then columns": (IMAGE, lambda x: repeated(x, 2, 3), (2, 2), False),
    "twice two columns": (IMAGE, lambda x: repeated(x, 3, 3), (1, 4), False),
    "of a video": (VIDEO, lambda x: repeated(x, 3, 4), (1, 2, 2), False),
    "later frames": (VIDEO, later, (2, 1, 1), True),
    "later frames four times": (VIDEO, lambda x: later(x, 4), (4, 1, 1), True),
    "later frames, larger": (VIDEO, lambda x: later(repeated(x, 3, 4)), (2, 2, 2), True),
}


@pytest.mark.parametrize("name", FOUND)
def test_repeated_elements(name):
    size, call, times, first_once = FOUND[name]
    plan = checked(lambda x: convolved(call(x)), torch.randn(size))
    if len(size) == 4:
        assert plan.only(steps.upsample).args[1:] == (times, first_once)
    else:
        assert plan.only(steps.frames).args[9] == times


def test_frames_before_a_convolution():
    """The first frame is repeated as a pad, and others read the frames too."""

    def call(x):
        y = later(x)
        w = torch.ones(3, 3, 3, 1, 1)
        return y + F.conv3d(torch.cat([y[:, :, :1].repeat(1, 1, 2, 1, 1), y], 2), w)

    both = checked(call, torch.randn(VIDEO)).only(steps.frames)
    assert (both.args[2:6], both.args[9]) == ((2, 0, (0, 0), "replicate"), (2, 1, 1))
    upsampled, padded = checked(call, torch.randn(2, *VIDEO[1:])).all(steps.frames)  # several videos
    assert (upsampled.args[2:4], upsampled.args[9]) == ((0, 0), (2, 1, 1))
    assert (padded.args[2:6], padded.args[9]) == ((2, 0, (0, 0), "replicate"), (1, 1, 1))


def test_others_read_views():
    assert not checked(lambda x: repeated(x, 2, 3) * 2, torch.randn(IMAGE)).all(steps.upsample)
    assert not checked(lambda x: later(x) * 2, torch.randn(VIDEO)).all(steps.upsample)


@pytest.mark.parametrize(
    ("size", "call"),
    [
        (IMAGE, lambda x: x.repeat(1, 1, 2, 1)),
        (IMAGE, lambda x: repeated(x, 2, times=3)),
        (IMAGE, lambda x: x[:, :, :, None, :, None].expand(2, 3, 4, 2, 5, 2).reshape(2, 3, 8, 10)),
        (IMAGE, lambda x: repeated(x, 1)),
        (IMAGE, lambda x: repeated(x, 0)),
        (IMAGE, lambda x: x[:, :, :, None].expand(2, 3, 4, 2, 5).reshape(2, 3, 5, 8)),
        (VIDEO, lambda x: repeated(x, 2)),
        (VIDEO, lambda x: repeated(x, 2)[:, :, :-1]),
        (VIDEO, lambda x: repeated(x, 2)[:, :, 2:]),
        (VIDEO, lambda x: repeated(x, 3)[:, :, 1:]),
        (VIDEO, lambda x: repeated(x, 3)[:, :, :, 1:]),
        (VIDEO, lambda x: repeated(x, 2)[:, :, 1:-1]),
        (VIDEO, lambda x: x.double().repeat_interleave(2, 3)),
        (IMAGE, lambda x: repeated(x[:0], 2)),
    ],
)
def test_near_misses(size, call):
    def whole(x):
        y = call(x)
        return convolved(y if y.dtype == x.dtype else y.float())

    assert {"upsample", "frames"}.isdisjoint(checked(whole, torch.randn(size)).steps)
