"""Concatenations and pads that compute less than they join."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.plans.run import steps
from tests.plans.rewrite.rewriting import checked, steps_of

video = torch.randn(1, 4, 5, 2, 4)
wide = video.double()  # upsampling of fp64 stays a step of its own
batch = torch.randn(4, 4, 2, 4)


def nearest(x, *times):
    return F.interpolate(x, scale_factor=tuple(map(float, times)), mode="nearest")


def once_and_twice(x, first=1):
    """Upsamples the first frame in space and the others in time too, as causal autoencoders do."""
    image = nearest(x[:, :, 0], 2, 2).unsqueeze(2)
    return torch.cat([image, nearest(x[:, :, first:], 2, 2, 2)], 2)


def two_frames_once(x):
    images = nearest(x[:, :, :2].reshape(1, 8, 2, 4), 2, 2).reshape(1, 4, 2, 4, 8)
    return torch.cat([images, nearest(x[:, :, 2:], 2, 2, 2)], 2)


def reshaped_once(x):
    """The first frame has the elements of a frame of another size when it is upsampled."""
    image = nearest(x[:, :, 0].reshape(1, 4, 4, 2), 2, 2).reshape(1, 4, 1, 4, 8)
    return torch.cat([image, nearest(x[:, :, 1:], 2, 2, 2)], 2)


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        (lambda x: torch.cat([x, x * 2], 1), ["aten.mul", "cat"]),
        (lambda x: torch.cat([x[:, :, :0], x * 2], 2), ["aten.mul"]),
        (lambda x: torch.cat([x.new_empty(0), x * 2], 2), ["aten.mul"]),
        (lambda x: torch.cat([x, x.double()], 1), ["cast", "aten.cat"]),
        (lambda x: torch.stack([x, x * 2], 1), ["aten.mul", "cat"]),
        (lambda x: torch.stack([x, x * 2], -1), ["aten.mul", "cat"]),
        (lambda x: torch.cat([x[:, :, :2], x[:, :, 2:]], 2) * 2, ["aten.mul"]),
        (lambda x: torch.cat([x[:, :, i : i + 1].clone() for i in range(5)], 2) * 2, ["aten.mul"]),
        (lambda x: torch.cat([x[:, :, 2:], x[:, :, :2]], 2), ["cat"]),
        (lambda x: torch.cat([x[:, :, :2], x[:, :, 3:]], 2), ["cat"]),
        (lambda x: torch.cat([x[:, :, :2], x[:, :, 2:4]], 2), ["cat"]),
        (lambda x: torch.cat([x[:, :2], x[:, 2:]], 2) * 2, ["aten.mul"]),
        (lambda x: torch.cat([x[:, :, :2], (x * 2)[:, :, 2:]], 2), ["aten.mul", "cat"]),
        (lambda x: torch.cat([x[:, :, :1], x], 2), ["pad"]),
        (lambda x: torch.cat([x[:, :, :1]] * 2 + [x] + [x[:, :, -1:]], 2), ["pad"]),
        (lambda x: torch.cat([x[:, :, :1].repeat(1, 1, 2, 1, 1), x], 2), ["pad"]),
        (lambda x: torch.cat([x[:, :, :1].clone(), x], 2), ["pad"]),
        (lambda x: torch.cat([x[:, :, 1:2], x], 2), ["cat"]),
        (lambda x: torch.cat([(x * 2)[:, :, :1], x], 2), ["aten.mul", "cat"]),
        (lambda x: torch.cat([x[:, :, :1], x[:, :, :1] * 2, x], 2), ["aten.mul", "cat"]),
        (lambda x: torch.cat([x[:, :, :2], x], 2), ["cat"]),
        (lambda x: torch.cat([x, x[:, :, :1]], 2), ["cat"]),
        (lambda x: torch.cat([x[:, :1], x], 1), ["cat"]),
        (lambda x: torch.cat([x[:, :, :1], x], -3), ["pad"]),
        (lambda x: torch.cat([x[:, :, :, :1].expand_as(x), x], 2), ["cat"]),
        (
            lambda x: torch.cat([x.new_empty(0, dtype=torch.float64), x * 2], 2),
            ["aten.new_empty", "aten.mul", "aten.cat"],
        ),
        (lambda x: torch.cat([x[0][:, :1], x[0]], 1), ["cat"]),
        (lambda x: torch.cat([x[0, :, None, :1], x[0, :, None]], 2), ["pad"]),
        (lambda x: torch.cat([x[:, :, 0, :1], x[:, :, 0]], 2), ["cat"]),
        (once_and_twice, ["upsample"]),
        (lambda x: once_and_twice(x * 2), ["aten.mul", "upsample"]),
        (lambda x: once_and_twice(x, 2), None),
        (reshaped_once, None),
        (two_frames_once, ["copy", "upsample", "upsample", "cat"]),
        (lambda x: torch.cat([once_and_twice(x)[:, :, :1], nearest(x[:, :, 1:], 2, 2, 2)], 2), None),
        (lambda x: torch.cat([once_and_twice(x), nearest(x[:, :, :1], 1, 2, 2)], 2), None),
        (lambda x: torch.cat([nearest(x[:, :, 0, :1], 2, 2), nearest(x[:, :, 0, 1:], 2, 2)], 2), None),
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
    expected = steps or ["upsample", "upsample", "cat"]
    assert steps_of(call, wide if "upsample" in expected else video) == expected


def test_upsampling_of_the_first_frame_once_says_so():
    assert checked(once_and_twice, wide).only(steps.upsample).args[1:] == ((2, 2, 2), True)


def test_three_parts_are_no_upsampling():
    def call(x):
        first, others = nearest(x[:, :, :1], 1, 2, 2), nearest(x[:, :, 1:], 2, 2, 2)
        return torch.cat([first, others, first * 2], 2)

    assert steps_of(call, wide) == ["upsample", "upsample", "aten.mul", "cat"]


def test_frames_side_by_side_in_other_axes():
    two = torch.randn(1, 4, 2, 2, 4)
    halves = lambda x: (nearest(x[:, :, :1], 1, 2, 2), nearest(x[:, :, 1:], 1, 2, 2))  # noqa: E731
    assert steps_of(lambda x: torch.cat(halves(x), 1), two)[-1] == "cat"
    assert steps_of(lambda x: torch.cat([x, x], 1), two[:, :, :1]) == ["cat"]


def test_frames_that_are_upsampled_once_already():
    def call(x):
        return torch.cat([nearest(x[:, :, :1], 1, 2, 2), once_and_twice(x[:, :, 1:].clone())], 2)

    assert steps_of(call, video)[-1] == "cat"


def test_a_video_of_one_frame_is_its_first_and_last_frame():
    image = torch.randn(1, 4, 1, 2, 4)
    assert steps_of(lambda x: torch.cat([x[:, :, :1]] * 2 + [x], 2), image) == ["pad"]
    assert steps_of(lambda x: torch.cat([x[:, :, :1].expand(1, 4, 2, 2, 4), x, x], 2), image) == ["pad"]


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


# ---- zeros and borders

BORDER = (1, 1, 2, 2, 0, 0)


def bordered(x, front=0, back=0, mode="replicate"):
    return F.pad(x, (*BORDER[:4], front, back), mode=mode)


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        (lambda x: torch.cat([torch.zeros_like(x[:, :, :2]), x], 2), ["pad"]),
        (lambda x: torch.cat([x.new_zeros(1, 4, 1, 2, 4), x, torch.zeros(1, 4, 2, 2, 4)], 2), ["pad"]),
        (lambda x: torch.cat([torch.zeros_like(x[:, :, :1]), x, x * 2], 2), ["aten.mul", "padded_cat"]),
        (lambda x: torch.cat([torch.zeros_like(x), x], 1), ["aten.full", "cat"]),
        (lambda x: torch.cat([torch.ones_like(x), x], 2), ["aten.full", "cat"]),
        (lambda x: torch.cat([x, torch.zeros_like(x), x], 2), ["aten.full", "cat"]),
        (lambda x: torch.cat([torch.zeros_like(x), torch.zeros_like(x)], 2), ["aten.full", "cat"]),
        (lambda x: torch.cat([torch.zeros_like(x[0]), x[0]], 1), ["aten.full", "cat"]),
        (lambda x: torch.cat([torch.zeros_like(x.long()), x.long()], 2), ["cast", "aten.full", "cat"]),
    ],
)
def test_zeros_before_and_after_frames(call, steps):
    assert steps_of(call, video) == steps


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        (lambda x, y: torch.cat([bordered(x), bordered(y)], 2), ["cat", "pad"]),
        (lambda x, y: torch.cat([bordered(x, 2), bordered(y, 0, 1)], 2), ["cat", "pad"]),
        (lambda x, y: torch.cat([F.pad(x, BORDER), F.pad(y, BORDER)], 2), ["padded_cat"]),
        (lambda x, y: torch.cat([F.pad(x[0], (1, 1, 2, 0)), F.pad(y[0], (1, 1, 0, 2))], 1), None),
        (lambda x, y: torch.cat([bordered(x, 0, 1), bordered(y)], 2), None),
        (lambda x, y: torch.cat([bordered(x), bordered(y, 1)], 2), None),
        (lambda x, y: torch.cat([bordered(x, mode="reflect"), bordered(y, mode="reflect")], 2), None),
        (lambda x, y: torch.cat([bordered(x), F.pad(y, BORDER)], 2), None),
        (lambda x, y: torch.cat([F.pad(x, BORDER), F.pad(y, BORDER, value=1.0)], 2), None),
        (lambda x, y: torch.cat([bordered(x), F.pad(y, (2, 0, 2, 2, 0, 0), mode="replicate")], 2), None),
        (lambda x, y: torch.cat([F.pad(x, BORDER), F.pad(y, BORDER)], 1), None),
    ],
)
def test_a_border_around_parts(call, steps):
    sizes = torch.randn(1, 4, 3, 3, 5), torch.randn(1, 4, 3, 3, 5)
    assert steps_of(call, *sizes) == (steps or ["pad", "pad", "cat"])


def test_a_border_that_is_read_without_the_others_stays():
    def call(x, y):
        a = bordered(x)
        return torch.cat([a, bordered(y)], 2), a * 2

    assert steps_of(call, video, video * 2) == ["pad", "pad", "cat", "aten.mul"]


@pytest.mark.parametrize(
    "part",
    [
        lambda x: bordered(x)[:, :, -2:],
        lambda x: bordered(x, 2)[:, :, -2:],
        lambda x: bordered(x[:, :, :1], 2)[:, :, -2:],
        lambda x: bordered(x, 2, 1)[:, :, 1:-1],
        lambda x: bordered(x, 2, 1)[:, :, 1:3],
        lambda x: bordered(x, 2, 1)[:, :, 5:],
        lambda x: bordered(x)[..., 1:4, :],
        lambda x: bordered(x)[..., 3:],
        lambda x: F.pad(x, (1, 1, 2, 2, 2, 0), value=3.0)[:, :, 1:3],
        lambda x: F.pad(x, (1, 1, 1, 1, 0, 0), mode="reflect")[:, :, 1:3],
    ],
)
def test_a_copy_of_a_part_with_its_border(part):
    assert steps_of(lambda x: part(x).clone(), video) == ["pad"]


@pytest.mark.parametrize(
    "part",
    [
        lambda x: bordered(x, 2)[:, :, :2],  # no frame of x
        lambda x: bordered(x, 0, 2)[:, :, -1:],
        lambda x: F.pad(x, (1, 1, 1, 1, 2, 0), mode="reflect")[:, :, 1:4],
        lambda x: bordered(x)[:, :2],
        lambda x: F.pad(x, (0, 0, 0, 0, 2, 0), mode="replicate")[:, :, -2:],  # no border
    ],
)
def test_other_copies_of_parts_stay(part):
    assert steps_of(lambda x: part(x).clone(), video) == ["pad", "copy"]


# ---- parts along another axis

picture, frames, larger = torch.randn(2, 8, 3, 5), torch.randn(1, 16, 2, 3, 5), torch.randn(1, 2, 4, 6, 10)


@pytest.mark.parametrize(
    ("call", "x"),
    [
        (lambda x: torch.stack(x.unbind(1), 2), picture),
        (lambda x: torch.stack([x[:, 0], x[:, 1]], 3), larger),
        (lambda x: torch.stack(x.chunk(2, 1), 3).flatten(2, 3), frames),
        (lambda x: torch.stack(x.chunk(4, 1), 1), frames),
        (lambda x: torch.stack(x.chunk(4, 1), -1), frames),
        (lambda x: torch.cat(x.chunk(4, 1), 2), frames),
        (lambda x: torch.cat(x.chunk(4, 1)), picture),
        (lambda x: torch.cat(x.split(1), 1), picture),
        (lambda x: torch.stack([x[:, :8].flatten(2, 3), x[:, 8:].flatten(2, 3)], 1), frames),
        (lambda x: torch.stack([x[:, :, i].flatten(2) for i in range(2)], 3), frames),
        (lambda x: torch.stack([x[:, :8].flatten(2), x[:, 8:].flatten(2)], 2), frames),
    ],
)
def test_parts_along_another_axis_are_views(call, x):
    assert steps_of(lambda x: call(x) * 2, x) == ["aten.mul"]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.stack(x.chunk(2, 1)[::-1], 3),
        lambda x: torch.cat([x[:, :4].flatten(1), x[:, 4:].flatten(1)], 1),
        lambda x: torch.stack(x.chunk(4, 1)[:2], 3),
        lambda x: torch.stack([x[:, :4], x[:, 4:8], x[:, 12:]], 3),
        lambda x: torch.stack([x[:, :8], (x * 1.5)[:, 8:]], 3),
        lambda x: torch.cat([x[:, :4], x[:, 4:]], 1) * torch.cat([x[:, 4:], x[:, :4]], 1),
        lambda x: torch.stack([x[:, :8], x[:, 8:].reshape(1, 8, 3, 2, 5).transpose(2, 3)], 3),
        lambda x: torch.stack([x[:, :8].reshape(1, 8, 5, 6), x[:, 8:].reshape(1, 8, 5, 6)], 3),
        lambda x: torch.stack([x[:, :8].flatten(2).transpose(1, 2), x[:, 8:].flatten(2).transpose(1, 2)], 1),
    ],
)
def test_other_parts_are_joined(call):
    assert "cat" in steps_of(lambda x: call(x) * 2, frames)
