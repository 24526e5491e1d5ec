"""Two images or videos, each times one number for each frame: their sum is one step."""

import functools

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.plans.rewrite.nodes import has
from sdfastgn.plans.run import steps
from tests.kernels.samples import kernels
from tests.plans.engine import plan_of
from tests.plans.rewrite.rewriting import checked, steps_of

NORM = functools.partial(F.group_norm, num_groups=2)
VIDEO = (2, 4, 3, 5, 6)


def mixed(x, y, alpha):
    return alpha * x + (1.0 - alpha) * y


def of_images(images, frames=3):
    """Images as videos of ``frames`` images each."""
    return images.unflatten(0, (-1, frames)).transpose(1, 2)


def of_video(video):
    """The frames of a video as images."""
    return video.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("size", [(), (1,), (2, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1)])
def test_a_mix_of_images(image, size):
    plan = checked(lambda x, a: mixed(F.relu(x), x, a), image, torch.rand(size))
    assert plan.steps == ["aten.relu", "aten.rsub", "blend"]
    assert plan.only(steps.blend).args[2] is None


@pytest.mark.parametrize("size", [(1,), (2, 1, 1, 1, 1), (2, 1, 3, 1, 1), (1, 1, 3, 1, 1), (3, 1, 1)])
def test_a_mix_of_videos(size):
    plan = checked(lambda x, a: mixed(F.relu(x), x, a), torch.randn(VIDEO), torch.rand(size))
    assert plan.steps == ["aten.relu", "aten.rsub", "blend"]
    assert plan.only(steps.blend).args[0].meta["shape"] == (6, 4, 5, 6)


def test_any_factors(image):
    assert steps_of(lambda x, a, b: F.relu(x) * a + x * b, image, torch.rand(1), torch.rand(1))[1:] == [
        "blend"
    ]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_bias_of_either_side(conv, image, swapped):
    def call(x, a):
        return mixed(x, conv(x), a) if swapped else mixed(conv(x), x, a)

    plan = checked(call, image, torch.rand(1))
    assert plan.steps == ["conv", "aten.rsub", "blend"]
    h, _, bias, *_ = plan.only(steps.blend).args
    assert has(h, steps.conv)
    assert bias.op == "placeholder"


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y, a: mixed(x, x + y, a),
        lambda x, y, a: mixed(x, y + x, a),
        lambda x, y, a: mixed(x + y, x, a),
    ],
)
def test_a_residual_block_is_mixed_with_its_input(conv, image, call):
    plan = checked(lambda x, a: call(x, conv(x), a), image, torch.rand(2, 1, 1, 1))
    assert sorted(plan.steps) == ["aten.add", "aten.rsub", "blend", "conv"]
    assert plan.only(torch.ops.aten.add.Tensor).meta["shape"] == (2,)
    assert plan.only(steps.blend).args[2].op == "placeholder"


def test_what_others_read_is_computed(conv, image):
    """The sum, a product or the biased convolution, is also a result."""
    whole = checked(lambda x, a: (y := x + conv(x), mixed(x, y, a)), image, torch.rand(1))
    assert whole.steps == ["conv", "add", "aten.rsub", "blend"]
    assert steps_of(lambda x, a: (y := x * a, y + F.relu(x) * a), image, torch.rand(1)).count("blend") == 0
    biased = checked(lambda x, a: (y := conv(x), mixed(x, y, a)), image, torch.rand(1))
    assert biased.steps == ["conv", "add_bias_", "aten.rsub", "blend"]


def test_other_products_stay(image):
    x = torch.randn(2, 4, 5, 6)
    for call, *inputs in (
        (mixed, x, x, torch.rand(4, 1, 1)),
        (mixed, x, x, torch.rand(5, 1)),
        (mixed, x, x, torch.rand(6)),
        (mixed, x, x, torch.rand(2, 4, 5, 6)),
        (mixed, torch.randn(VIDEO), torch.randn(VIDEO), torch.rand(5, 1)),
        (mixed, x[:1], x, torch.rand(1)),
        (mixed, x, x, torch.rand(1).double()),
        (mixed, x.double(), x.double(), torch.rand(1).double()),
        (mixed, x.flatten(2), x.flatten(2), torch.rand(1)),
        (mixed, x[:0], x[:0], torch.rand(1)),
        (lambda x, a: x * a + x * (1 - a), x, torch.rand(1)),
        (lambda x, y, a: x * a + y, x, x, torch.rand(1)),
        (lambda x, y, a: x * a - y * a, x, x, torch.rand(1)),
        (lambda x, y, a: torch.add(x * a, y * a, alpha=2), x, x, torch.rand(1)),
        (lambda x, y, a: x * a + y * 2.0, x, x, torch.rand(1)),
    ):
        assert "blend" not in steps_of(call, *inputs), call


def test_a_sum_of_two_dtypes_is_computed_before_the_mix(image):
    plan = checked(lambda x, y, a: mixed(x, x + y, a), image, image.bfloat16(), torch.rand(1))
    assert plan.steps == ["aten.add", "aten.rsub", "blend"]


def test_a_number_on_another_device_stays(image):
    image, alpha = image.to("meta"), torch.tensor(0.5)
    plan = plan_of(torch.nn.Identity(), lambda x, a: mixed(F.relu(x), x, a), image, alpha)
    assert "blend" not in [step.target for step in plan.steps]


def test_the_statistics_of_blocks_of_images_and_videos(conv, monkeypatch):
    """A sum and a mix of images have statistics for norms of images and of videos."""
    monkeypatch.setattr("sdfastgn.plans.rewrite.statistics.statistics_pay", lambda C, HW: True)
    weight, bias = torch.randn(4, 4, 3, 1, 1), torch.randn(4)

    def call(x, a):
        x = x + conv(x)
        video = of_images(x)
        h = F.conv3d(NORM(video), weight, bias, padding=(1, 0, 0))
        return NORM(of_video(mixed(video, video + h, a)))

    with kernels(direct=True):
        plan = checked(call, torch.randn(6, 4, 5, 6), torch.rand(1))
    assert "add" in plan.steps
    assert "blend" in plan.steps
    of_a_video, of_frames = plan.all(steps.group_norm)
    assert of_a_video.args[7].args == (plan.only(steps.add), 1)
    assert of_frames.args[7].args == (plan.only(steps.blend), 1)
    assert of_frames.args[8] is True


def test_statistics_are_joined_only_for_frames(conv, monkeypatch):
    monkeypatch.setattr("sdfastgn.plans.rewrite.statistics.statistics_pay", lambda C, HW: True)
    x = torch.randn(4, 4, 4, 6)
    for view in (
        lambda y: y.unflatten(0, (2, 2)).transpose(0, 1).flatten(0, 1),
        lambda y: y.unflatten(0, (2, 2)).transpose(2, 3),
        lambda y: y.unflatten(0, (2, 2)).transpose(1, 2)[:, :, :1],
        lambda y: y.reshape(2, 2, 4, 2, 12).transpose(1, 2).flatten(3),
    ):
        plan = checked(lambda x, view=view: NORM(view(x + conv(x))), x)
        assert plan.only(steps.group_norm).args[7] is None
