"""Concatenations and pads that compute less than they join."""

import pytest
import torch
import torch.nn.functional as F

from tests.plans.rewrite.rewritten import checked, steps_of

video = torch.randn(1, 4, 5, 2, 4)
batch = torch.randn(4, 4, 2, 4)


def nearest(x, *times):
    return F.interpolate(x, scale_factor=tuple(map(float, times)), mode="nearest")


def once_and_twice(x, first=1):
    """Upsamples the first frame in space and the others in time too, as causal autoencoders do."""
    image = nearest(x[:, :, 0], 2, 2).unsqueeze(2)
    return torch.cat([image, nearest(x[:, :, first:], 2, 2, 2)], 2)


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        (lambda x: torch.cat([x, x * 2], 1), ["mul", "cat"]),
        (lambda x: torch.cat([x[:, :, :0], x * 2], 2), ["mul"]),
        (lambda x: torch.cat([x.new_empty(0), x * 2], 2), ["mul"]),
        (lambda x: torch.cat([x, x.double()], 1), ["cast", "cat"]),
        (lambda x: torch.stack([x, x * 2], 1), ["mul", "cat"]),
        (lambda x: torch.stack([x, x * 2], -1), ["mul", "cat"]),
        (lambda x: torch.cat([x[:, :, :2], x[:, :, 2:]], 2) * 2, ["mul"]),
        (lambda x: torch.cat([x[:, :, i : i + 1].clone() for i in range(5)], 2) * 2, ["mul"]),
        (lambda x: torch.cat([x[:, :, 2:], x[:, :, :2]], 2), ["cat"]),
        (lambda x: torch.cat([x[:, :, :2], x[:, :, 3:]], 2), ["cat"]),
        (lambda x: torch.cat([x[:, :, :2], x[:, :, 2:4]], 2), ["cat"]),
        (lambda x: torch.cat([x[:, :2], x[:, 2:]], 2), ["cat"]),
        (lambda x: torch.cat([x[:, :, :2], (x * 2)[:, :, 2:]], 2), ["mul", "cat"]),
        (lambda x: torch.cat([x[:, :, :1], x], 2), ["pad"]),
        (lambda x: torch.cat([x[:, :, :1]] * 2 + [x] + [x[:, :, -1:]], 2), ["pad"]),
        (lambda x: torch.cat([x[:, :, :1].repeat(1, 1, 2, 1, 1), x], 2), ["pad"]),
        (lambda x: torch.cat([x[:, :, :1].clone(), x], 2), ["pad"]),
        (lambda x: torch.cat([x[:, :, 1:2], x], 2), ["cat"]),
        (lambda x: torch.cat([x[:, :, :2], x], 2), ["cat"]),
        (lambda x: torch.cat([x, x[:, :, :1]], 2), ["cat"]),
        (lambda x: torch.cat([x[:, :1], x], 1), ["cat"]),
        (once_and_twice, ["upsample"]),
        (lambda x: once_and_twice(x * 2), ["mul", "upsample"]),
        (lambda x: once_and_twice(x, 2), ["upsample", "upsample", "cat"]),
        (
            lambda x: torch.cat([nearest(x[:, :, :1], 1, 2, 2), nearest(x[:, :, 1:], 2, 2, 2)], 2),
            ["upsample"],
        ),
        (lambda x: torch.cat([nearest(x[:, :, :1], 2, 2, 2), nearest(x[:, :, 1:], 2, 2, 2)], 2), None),
        (lambda x: torch.cat([nearest(x[:, :, :2], 1, 2, 2), nearest(x[:, :, 2:], 2, 2, 2)], 2), None),
        (lambda x: torch.cat([nearest(x[:, :, 1:2], 1, 2, 2), nearest(x[:, :, 1:], 2, 2, 2)], 2), None),
        (lambda x: torch.cat([nearest(x[:, :, 1:], 1, 2, 2), nearest(x[:, :, :1], 1, 2, 2)], 2), None),
        (lambda x: torch.cat([nearest(x[:, :2], 1, 2, 2), nearest(x[:, 2:], 1, 2, 2)], 1), None),
    ],
)
def test_videos(call, steps):
    assert steps_of(call, video) == (steps or ["upsample", "upsample", "cat"])


def test_upsampling_of_the_first_frame_once_says_so():
    assert checked(once_and_twice, video).node("upsample").args[1:] == ((2, 2, 2), True)


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        (lambda x: torch.cat([F.group_norm(t, 2) for t in x.split(1)]), ["group_norm"]),
        (lambda x: torch.cat([F.group_norm(t, 2) for t in x.split(3)]), ["group_norm"]),
        (lambda x: torch.cat([F.group_norm(t, 2) for t in x.chunk(2)][::-1]), ["group_norm"] * 2 + ["cat"]),
        (lambda x: torch.cat([F.group_norm(t, 2) for t in x.chunk(2)], 1), ["group_norm"] * 2 + ["cat"]),
        (lambda x: torch.cat([F.group_norm(t, 2) for t in x.chunk(2, 1)]), ["group_norm"] * 2 + ["cat"]),
        (lambda x: torch.cat([F.group_norm(t, i + 1) for i, t in enumerate(x.chunk(2))]), None),
        (lambda x: torch.cat([F.group_norm(t, 2) for t in x[:2].chunk(2)]), None),
    ],
)
def test_norms_of_samples(call, steps):
    assert steps_of(call, batch) == (steps or ["group_norm", "group_norm", "cat"])
