"""Sums, means and biases read elements where they are, and write them where they go: once, channels-last."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.plans.run import steps
from tests.plans.rewrite.rewriting import checked, steps_of


def last(*shape):
    return torch.randn(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


class Copies(TorchDispatchMode):
    """Counts the copies of tensors."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("clone", "copy_", "contiguous", "cat", "_to_copy"):
            self.found[name] += 1
        return func(*args, **kwargs or {})


def copies_of(call, *inputs):
    """The steps of ``call``, and the copies that they make. The first result must be channels-last."""
    plan = checked(call, *inputs)
    with Copies() as copies:
        results = plan(*inputs)
    y = results if isinstance(results, torch.Tensor) else results[0]
    assert is_channels_last(y)
    return plan.steps, dict(copies.found)


def in_cells(x, *cell, order="C..."):
    """Channels become positions: C / k channels and cells of k positions. x (N, C, *size)."""
    N, C, *size = x.shape
    d, k = len(cell), torch.Size(cell).numel()
    if order == "...C":
        y = x.reshape(N, *cell, C // k, *size).movedim(1 + d, 1)
    else:
        y = x.reshape(N, C // k, *cell, *size)
    pairs = [axis for i in range(d) for axis in (2 + d + i, 2 + i)]
    larger = [s * c for s, c in zip(size, cell, strict=True)]
    return y.permute(0, 1, *pairs).reshape(N, C // k, *larger)


def to_channels(x, *cell):
    """Positions of cells become channels, as (C, *cell). x (N, C, *size)."""
    N, C, *size = x.shape
    d = len(cell)
    split = [n for s, c in zip(size, cell, strict=True) for n in (s // c, c)]
    y = x.reshape(N, C, *split).permute(0, 1, *range(3, 3 + 2 * d, 2), *range(2, 2 + 2 * d, 2))
    return y.reshape(N, C * torch.Size(cell).numel(), *split[::2])


image, video = last(2, 8, 3, 5), last(1, 16, 2, 3, 5)
larger_image, larger_video = last(2, 2, 6, 10), last(1, 2, 4, 6, 10)

# ---- sums


@pytest.mark.parametrize(
    ("call", "inputs"),
    [
        (lambda x, y: y + in_cells(x, 2, 2), (image, larger_image)),
        (lambda x, y: in_cells(x, 2, 2) + y, (image, larger_image)),
        (lambda x, y: in_cells(x, 2, 2, order="...C") + y, (image, larger_image)),
        (lambda x, y: in_cells(x, 2, 2, 2) + y, (video, larger_video)),
        (lambda x, y: in_cells(x, 1, 2, 2).repeat_interleave(2, 2) + y, (last(1, 8, 2, 3, 5), larger_video)),
        (lambda x, y: in_cells(x.repeat_interleave(4, 1), 2, 2, 2) + y, (last(1, 4, 2, 3, 5), larger_video)),
        (lambda x, y: F.pixel_shuffle(x, 2) + in_cells(x, 2, 2, order="...C"), (image, larger_image)),
        (lambda x, y: to_channels(x, 3, 1) + to_channels(y[..., :5], 6, 1).repeat(1, 2, 1, 1), None),
        (lambda x, y: to_channels(y, 2, 2) + x, (image, larger_image)),
        (lambda x, y: in_cells(x, 2, 2, 2).repeat(1, 3, 1, 1, 1) + y, (video, last(1, 6, 4, 6, 10))),
        (lambda x, y: in_cells(x, 2, 2).repeat(1, 2, 1, 2) + y, (image, last(2, 4, 6, 20))),
        (lambda x, y: in_cells(x, 2, 2, 2)[:, :, 2:] + y[:, :, :2], (video, larger_video)),
        (lambda x, y: in_cells(x[:, :, :1], 2, 2, 2)[:, :, 1:] + y[:, :, :1], (video, larger_video)),
        (lambda x, y: in_cells(x, 2, 2, 2)[:, :, 1:2] + y[:, :, :1], (video, larger_video)),
        (lambda x, y: in_cells(x, 2, 2, 2)[:, :, 1:] + y[:, :, 1:], (video, larger_video)),
        (
            lambda x, y: in_cells(x, 2, 2, 2)[:, :, 1:] + in_cells(x * 2, 2, 2, 2)[:, :, 1:],
            (video, larger_video),
        ),
    ],
)
def test_a_sum_reads_moved_elements(call, inputs):
    if inputs is None:
        inputs = last(2, 4, 6, 5), last(2, 1, 12, 10)
    found, copies = copies_of(call, *inputs)
    assert [s for s in found if s != "aten.mul"] == ["add_views"]
    assert not copies


def flat(x):
    return x.permute(0, 2, 3, 1).reshape(len(x), -1, x.shape[1])


@pytest.mark.parametrize(
    ("call", "inputs"),
    [
        (lambda x, y: torch.add(y, in_cells(x, 2, 2), alpha=2), (image, larger_image)),
        (lambda x, y: y - in_cells(x, 2, 2), (image, larger_image)),
        (lambda x, y: y[:, :1] + in_cells(x, 2, 2), (image, larger_image)),
        (lambda x, y: y[:, :, :1] + in_cells(x, 2, 2), (image, larger_image)),
        (lambda x, y: y.double() + in_cells(x, 2, 2), (image, larger_image)),
        (lambda x, y: (y + (z := in_cells(x, 2, 2)), z), (image, larger_image)),
        (lambda x, y: y + (z := in_cells(x, 2, 2)) * z, (image, larger_image)),
        (lambda x, y: in_cells(x, 2, 2) + 1, (image, larger_image)),
        (lambda x, y: flat(in_cells(x, 2, 2)) + flat(y), (image, larger_image)),
        (lambda x, y: x.reshape(2, 2, 4, 3, 5) + y, (image, last(2, 2, 4, 3, 5))),
        (lambda x, y: x.transpose(2, 3).reshape(2, 8, 3, 5) + y, (image, image)),
        (lambda x, y: in_cells(x, 2, 2, 2)[:, :, 1:] + y[:, :, :3], (video, larger_video)),
        (lambda x, y: in_cells(x, 2, 2, 2)[:, :, 1:] + in_cells(y, 2, 2, 2)[:, :, :-1], (video, video)),
        (lambda x, y: in_cells(x, 2, 2) + y, (image[:0], larger_image[:0])),
    ],
)
def test_other_sums_stay(call, inputs):
    assert "add_views" not in steps_of(call, *inputs)


W8, B8 = torch.randn(8, 8, 3, 3), torch.randn(8)


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        (lambda x, y: in_cells(x, 2, 2) + y, ["add_views"]),
        (lambda x, y: y + in_cells(x.repeat_interleave(2, 1), 2, 2)[:, :2], ["add_views"]),
        (
            lambda x, y: in_cells(F.conv2d(x, W8, B8, padding=1), 2, 2) + in_cells(x, 2, 2),
            ["conv", "add_bias_", "add_views"],
        ),
        (lambda x, y: in_cells(F.conv2d(x, W8, B8, padding=1), 2, 2) + y, ["conv", "add_views", "add"]),
        (lambda x, y: x.transpose(2, 3).reshape(2, 2, 6, 10) + y, ["add"]),
    ],
)
def test_sums_with_statistics(call, steps, monkeypatch):
    """A sum of what would be copied needs no copy. Else it computes the statistics for the norm after it."""
    monkeypatch.setattr("sdfastgn.plans.rewrite.statistics.statistics_pay", lambda *args: True)
    found = steps_of(lambda x, y: F.group_norm(call(x, y), 2), image, larger_image)
    assert found == [*steps, "group_norm"]


# ---- biases


@pytest.fixture
def parameters():
    return [torch.randn(8, 8, 3, 3), torch.randn(8), torch.randn(16, 16, 3, 3, 3), torch.randn(16)]


@pytest.mark.parametrize(
    ("call", "x"),
    [
        (lambda c: in_cells(c, 2, 2), image),
        (lambda c: in_cells(c, 2, 2, order="...C"), image),
        (lambda c: in_cells(c, 2, 2, 2)[:, :, 1:], video),
        (lambda c: c.flatten(1, 2).unsqueeze(-1), image),
        (lambda c: torch.stack(c.chunk(2, 1), 3).flatten(2, 3), video),
        (lambda c: torch.stack((c[:, :8], c[:, 8:]), 3).flatten(2, 3).transpose(1, 2).flatten(0, 1), video),
    ],
)
def test_a_copy_adds_the_bias(call, x, parameters):
    w, b = parameters[:2] if x.dim() == 4 else parameters[2:]
    conv = F.conv2d if x.dim() == 4 else F.conv3d
    plan = checked(lambda x: call(conv(x, w, b, padding=1)) * 2, x)
    assert plan.steps in (["conv", "add_views", "aten.mul"], ["frames", "conv", "add_views", "aten.mul"])
    assert is_channels_last(plan(x))


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        (lambda c: c.reshape(2, 2, 4, 3, 5), ["conv", "add_bias_"]),
        (lambda c: c.transpose(2, 3), ["conv", "add_bias_"]),
        (lambda c: c.flatten(1), ["conv", "add_bias_"]),
        (lambda c: c.reshape(2, 6, 4, 5), ["conv", "add_bias_"]),
        (lambda c: (in_cells(c, 2, 2), c), ["conv", "add_bias_"]),
        (lambda c: F.relu(in_cells(F.relu(c), 2, 2)), ["conv", "add_bias_", "aten.relu"]),
    ],
)
def test_other_biases_stay(call, steps, parameters):
    w, b = parameters[:2]
    found = steps_of(lambda x: call(F.conv2d(x, w, b, padding=1)), image)
    assert [s for s in found if s != "copy"] == steps


# ---- means


@pytest.mark.parametrize(
    ("call", "x"),
    [
        (lambda x: to_channels(x, 2, 2).unflatten(1, (8, 4)).mean(2), last(2, 8, 6, 4)),
        (lambda x: to_channels(x, 2, 2).unflatten(1, (16, 2)).mean(2), last(2, 8, 6, 4)),
        (lambda x: to_channels(x, 2, 2).unflatten(1, (4, 8)).mean(2), last(2, 8, 6, 4)),
        (lambda x: to_channels(x, 2, 2, 2).unflatten(1, (16, 4)).mean(2), last(1, 8, 4, 6, 10)),
        (lambda x: to_channels(x, 2, 2, 2).unflatten(1, (4, 16)).mean(-4), last(1, 8, 4, 6, 10)),
        (lambda x: x.unflatten(1, (4, 2)).mean(2), last(2, 8, 6, 5)),
        (lambda x: x.unflatten(1, (2, 4)).mean(1), last(2, 8, 6, 5)),
        (lambda x: x.unflatten(2, (3, 2)).mean(3), last(2, 8, 6, 5)),
        (lambda x: x.mean(2), last(2, 8, 4, 6, 5)),
        (lambda x: x.unflatten(3, (3, 2)).unflatten(2, (2, 2)).mean((3, 5)), last(1, 3, 4, 6, 5)),
    ],
)
def test_a_mean_reads_moved_elements(call, x):
    assert copies_of(call, x) == (["aten.mean"], {})


def test_a_mean_of_one_element_is_the_element():
    assert steps_of(lambda x: x.unflatten(1, (8, 1)).mean(2) * 2, image) == ["aten.mul"]
    assert steps_of(lambda x: x[:, :1].mean(1) * 2, image) == ["aten.mul"]
    assert steps_of(lambda x: x[:, :1].mean(1, dtype=torch.float64) * 2, image) == ["aten.mean", "aten.mul"]
    assert steps_of(lambda x: x[:, :1].mean() * 2, image) == ["aten.mean", "aten.mul"]


def test_a_mean_of_all_elements():
    checked(lambda x: x.reshape(1, -1, 1, 1, 1).mean(1), last(1, 4, 2, 4, 5))


def test_a_mean_in_another_dtype_has_it():
    found = checked(
        lambda x: to_channels(x, 2, 2).unflatten(1, (8, 4)).mean(2, dtype=torch.float64), last(2, 8, 6, 4)
    )
    assert found.only(torch.ops.aten.mean.dim).meta["dtype"] is torch.float64


@pytest.mark.parametrize(
    ("call", "x"),
    [
        (lambda x: x.mean(1), torch.randn(2, 3, 4, 5, 6)),  # rows of tokens: the last axis is innermost
        (lambda x: x.flatten(2).mean(1), image),
        (lambda x: x.mean(1, keepdim=True), image),
        (lambda x: x.transpose(1, 2).reshape(2, 8, 3, 5).unflatten(1, (4, 2)).mean(2), image),
        (lambda x: x.unflatten(1, (4, 2)).mean(2), image[:0]),
    ],
)
def test_other_means_stay(call, x):
    plan = checked(call, x)
    axes = plan.only(torch.ops.aten.mean.dim).args[1]
    assert [a % 5 for a in axes] in ([1], [2])


def test_step_writes_channels_last():
    a, b = torch.randn(2, 3, 4, 2, 5), torch.randn(2, 1, 4, 2, 5)
    y = steps.add_views(a, b.expand_as(a), (2, 3, 8, 5))
    assert is_channels_last(y)
    assert torch.equal(y, (a + b).reshape(2, 3, 8, 5))


# ---- frames


def test_pooled_frames_are_copied_once():
    """Means of pairs of frames behind the first frame, in rows of positions, then zeros around them."""

    def call(x):
        N, C, T, H, W = x.shape
        y = x.permute(0, 3, 4, 1, 2).reshape(-1, C, T)
        y = torch.cat([y[..., 0][..., None], F.avg_pool1d(y[..., 1:], 2)], -1)
        return F.pad(y.reshape(N, H, W, C, -1).permute(0, 3, 4, 1, 2), (0, 1, 0, 1))

    found, copies = copies_of(call, last(2, 4, 5, 2, 3))
    assert found == ["mean_windows", "padded_cat"]
    assert copies == {"copy_": 2}
