"""The step that writes the input of a GroupNorm computes its statistics."""

import functools
import operator

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.kernels.statistics.plain import reference_channel_statistics
from sdfastgn.plans.rewrite.nodes import has
from sdfastgn.plans.run import steps
from tests.kernels.samples import kernels
from tests.plans.rewrite.rewriting import checked

NORM = functools.partial(F.group_norm, num_groups=2)


@pytest.fixture
def always(monkeypatch):
    """Statistics are computed for tensors of any size."""
    monkeypatch.setattr("sdfastgn.plans.rewrite.statistics.statistics_pay", lambda C, HW: True)


def writers(plan):
    """The steps whose statistics a norm reads."""
    found = []
    for n in plan.calls:
        known = None
        if has(n, steps.group_norm):
            known = n.args[7]
        elif has(n, steps.frames) and isinstance(n.args[8], steps.Group):
            known = n.args[8].statistics
        if known is not None:
            assert has(known, operator.getitem)
            assert known.args[1] == 1
            x = n.args[0]
            while has(x, steps.reshape, steps.permute):
                x = x.args[0]
            assert known.args[0] is x.args[0], "statistics of another tensor"
            assert True in known.args[0].args[2:], "the step does not compute them"
            found.append(known.args[0].target.__name__)
    return found


@pytest.mark.usefixtures("always")
def test_writers(conv, image, monkeypatch):
    monkeypatch.setattr("sdfastgn.plans.rewrite.convolutions.phases_pay", lambda *sizes: True)

    def twice(x):
        return F.interpolate(x, scale_factor=2.0, mode="nearest")

    for call, writer in (
        (lambda x: NORM(x + conv(x)), "add"),
        (lambda x: NORM((x + conv(x)) / 2.0), "add"),
        (lambda x: NORM(x + F.relu(x)), "add"),
        (lambda x: NORM(F.relu(x + conv(x))), "add"),
        (lambda x: NORM(F.silu(conv(x))), "add_bias_"),
        (lambda x: NORM(torch.cat([x, F.relu(x)], 1)), "cat_two"),
        (lambda x: (y := conv(x), NORM(y)), "add_bias_"),
        (lambda x: NORM(conv(twice(x))), "upsample_conv"),
    ):
        with kernels(direct=True):  # the kernels compute the statistics, and the norm reads them
            plan = checked(call, image.contiguous(memory_format=torch.channels_last))
        assert writers(plan) == [writer]


@pytest.mark.usefixtures("always")
def test_norms_of_one_tensor_read_the_same_statistics(conv, image):
    plan = checked(lambda x: (y := x + conv(x), NORM(y), F.group_norm(y, 4)), image)
    assert writers(plan) == ["add", "add"]
    assert sum(has(n, operator.getitem) and n.args[1] == 1 for n in plan.graph.nodes) == 1


@pytest.mark.usefixtures("always")
def test_statistics_are_those_without_the_shift(conv, image):
    def call(x, e):
        return NORM((x + conv(x)) / 2.0 + e[:, :, None, None])

    with kernels(direct=True):
        assert writers(checked(call, image, torch.randn(2, 4))) == ["add"]


@pytest.mark.usefixtures("always")
def test_a_norm_inside_of_frames():
    w, v, b = torch.randn(4, 4, 3, 3, 3), torch.randn(4, 4, 1, 1, 1), torch.randn(4)

    def call(x):
        y = x + F.conv3d(x, v, b)
        return y, F.conv3d(F.pad(F.silu(NORM(y)), (1, 1, 1, 1, 2, 0), mode="replicate"), w)

    with kernels(direct=True):
        plan = checked(call, torch.randn(2, 4, 3, 5, 6))
    assert plan.steps == ["conv", "add", "frames", "conv"]
    assert writers(plan) == ["add"]


@pytest.mark.usefixtures("always")
def test_a_norm_of_an_image_as_a_video(conv, image):
    """The view between the sum and the norm has the same channels and positions."""
    w = torch.randn(4, 4, 3, 3)

    def call(x):
        y = x + conv(x)
        return y, F.conv2d(F.pad(NORM(y), (1, 1, 1, 1), mode="replicate"), w)

    with kernels(direct=True):
        plan = checked(call, image)
    assert plan.steps == ["conv", "add", "frames", "conv"]
    (norm,) = (n.args[8] for n in plan.calls if has(n, steps.frames))
    assert norm.statistics.args[0].target is steps.add


@pytest.mark.usefixtures("always")
def test_a_norm_of_other_views_computes_its_own(conv, image):
    for view in (lambda y: y.reshape(2, 2, 2, 5, 6), lambda y: y.reshape(1, 8, 5, 6)):
        plan = checked(lambda x, view=view: F.group_norm(view(x + conv(x)), 1), image)
        assert writers(plan) == []


@pytest.mark.usefixtures("always")
def test_other_norms_compute_their_own(conv, image):
    for call in (
        lambda x: NORM(F.relu(x)),
        lambda x: NORM(conv(x)),
        lambda x: NORM(torch.cat([x, F.relu(x)], 2)),
        lambda x: NORM(torch.cat([x, F.relu(x), conv(x)], 1)[:, :8]),
        lambda x: (y := F.relu(x + conv(x)), NORM(y + 1)),
        lambda x: F.normalize(x + conv(x), dim=1),
    ):
        plan = checked(call, image)
        assert writers(plan) == []
        assert not any(has(n, steps.cat_two) for n in plan.calls)


# ---- videos and their frames

W5, B5 = torch.randn(4, 4, 3, 3, 3), torch.randn(4)


def images_of(x):
    return x.transpose(1, 2).flatten(0, 1)


def video_of(x, N=2):
    return x.unflatten(0, (N, -1)).transpose(1, 2)


def conv_of_frames(x):
    return F.conv3d(F.pad(x, (0, 0, 0, 0, 2, 0), mode="replicate"), W5, padding=(0, 1, 1))


def conv_3d(x):
    return F.conv3d(x, W5, B5, padding=1)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda x: NORM(images_of(x + conv_3d(x))), (2, 4, 3, 5, 6)),
        (lambda x: NORM(images_of(F.relu(conv_3d(x)))), (2, 4, 3, 5, 6)),
        (lambda x: conv_of_frames(video_of(NORM(images_of((x + F.relu(x)) / 2.0)))), (2, 4, 3, 5, 6)),
        (lambda x: video_of(NORM(images_of(x + F.relu(x)))) * 2, (2, 4, 3, 5, 6)),
        (lambda x: F.conv3d(NORM(torch.cat([(y := x + conv_3d(x))[:, :, :1], y], 2)), W5), (2, 4, 3, 5, 6)),
        (lambda x: NORM(video_of(x + F.relu(x))), (4, 4, 5, 6)),
        (lambda x: conv_of_frames(NORM(video_of(x + F.relu(x)))), (4, 4, 5, 6)),
        (lambda x: conv_of_frames(video_of(NORM(x + F.relu(x)))), (4, 4, 5, 6)),
        (lambda x: NORM(images_of(x + conv_3d(x))), (2, 4, 1, 5, 6)),
    ],
)
def test_norms_of_frames_and_of_videos(call, shape):
    """A sum of images computes the statistics of each frame, from which follow those of the video."""
    with kernels(direct=True):
        plan = checked(call, torch.randn(shape))
    assert len(writers(plan)) == 1


@pytest.mark.usefixtures("always")
def test_norms_of_the_video_and_of_its_frames_read_the_same_statistics():
    def call(x):
        y = x + conv_3d(x)
        return y, NORM(y), NORM(images_of(y))

    with kernels(direct=True):
        assert writers(checked(call, torch.randn(2, 4, 3, 5, 6))) == ["add", "add"]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.permute(2, 0, 1, 3, 4).flatten(0, 1),
        lambda y: y.transpose(1, 3).flatten(0, 1),
        lambda y: y.transpose(1, 2).reshape(3, 8, 5, 6),
    ],
)
def test_other_images_of_a_video(view):
    """They have other channels, positions or samples."""

    def call(x):
        return F.group_norm(view(x + conv_3d(x)), 1)

    with kernels(direct=True):
        assert writers(checked(call, torch.randn(2, 4, 3, 5, 6))) == []


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("shape", [(12, 4, 5, 3), (3, 8, 5, 6), (6, 4, 6, 5)])
def test_other_videos_of_images(shape):
    def call(x):
        return NORM((x + F.relu(x)).reshape(2, 3, 4, 5, 6).transpose(1, 2))

    with kernels(direct=True):
        assert writers(checked(call, torch.randn(shape))) == []


@pytest.mark.usefixtures("always")
def test_a_norm_of_each_frame_reads_no_statistics_of_the_video():
    def call(x):
        return conv_of_frames(video_of(NORM(images_of(torch.cat([x, F.relu(x)], 1)))))

    with kernels(direct=True):
        assert writers(checked(call, torch.randn(2, 2, 3, 5, 6))) == []


def test_the_size_of_what_is_normalized_decides(monkeypatch):
    asked = set()
    monkeypatch.setattr(
        "sdfastgn.plans.rewrite.statistics.statistics_pay", lambda *size: asked.add(size) or False
    )
    for call in (lambda y: NORM(y), lambda y: conv_of_frames(video_of(NORM(images_of(y))))):
        checked(lambda x, call=call: call(x + F.relu(x)), torch.randn(2, 4, 3, 5, 6))
    assert asked == {(4, 90), (4, 30)}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_chunks_of_frames_that_are_no_chunks_of_a_video(chunks, monkeypatch):
    """Then the norm computes the statistics itself."""
    real = steps.statistics_op.add_kernel

    def add_kernel(*args, **options):
        y, found = real(*args, **options)
        return y, None if found is None else reference_channel_statistics(y, chunks)

    monkeypatch.setattr(steps.statistics_op, "add_kernel", add_kernel)
    with kernels(direct=True):
        checked(lambda x: NORM(video_of(x + F.relu(x) * GROWING)), torch.randn(4, 4, 5, 6))


GROWING = torch.arange(1.0, 5.0)[:, None, None, None]


def test_small_norms_compute_their_own(conv, image):
    plan = checked(lambda x: NORM(torch.cat([x, x + conv(x)], 1)), image)
    assert plan.steps == ["conv", "add", "cat", "group_norm"]
    assert writers(plan) == []


def test_large_norms_do_not():
    plan = checked(lambda x: NORM(x + F.relu(x)), torch.randn(1, 4, 128, 128))
    assert writers(plan) == ["add"]
