"""The step that writes the input of a GroupNorm computes its statistics."""

import functools
import operator

import pytest
import torch
import torch.nn.functional as F

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
            assert known.args[0] is n.args[0].args[0], "statistics of another tensor"
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


@pytest.mark.usefixtures("always")
def test_a_norm_of_each_frame_computes_its_own():
    w = torch.randn(4, 4, 3, 3, 3)

    def call(x):
        y = (x + F.relu(x)) / 2.0
        images = NORM(y.transpose(1, 2).flatten(0, 1)).unflatten(0, (2, -1)).transpose(1, 2)
        return F.conv3d(F.pad(images, (1, 1, 1, 1, 2, 0)), w)

    assert writers(checked(call, torch.randn(2, 4, 3, 5, 6))) == []


def test_small_norms_compute_their_own(conv, image):
    plan = checked(lambda x: NORM(torch.cat([x, x + conv(x)], 1)), image)
    assert plan.steps == ["conv", "add", "cat", "group_norm"]
    assert writers(plan) == []


def test_large_norms_do_not():
    plan = checked(lambda x: NORM(x + F.relu(x)), torch.randn(1, 4, 128, 128))
    assert writers(plan) == ["add"]
