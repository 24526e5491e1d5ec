"""Views move behind norms and activations, and what depends on samples or frames stays right."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.plans.rewrite.norms import ACTIVATIONS
from sdfastgn.plans.run import steps
from tests.plans.rewrite.rewriting import checked, steps_of

video = torch.randn(2, 4, 3, 2, 5)
image = torch.randn(2, 4, 3, 5)
single = torch.randn(2, 1, 3, 5)


def as_images(x):
    return x.transpose(1, 2).flatten(0, 1)


def is_of_argument(plan, step):
    """True if the step reads the argument itself, and not a view of it."""
    return plan.only(step).args[0].op == "placeholder"


@pytest.mark.parametrize(
    ("call", "x"),
    [
        (lambda x: F.group_norm(x.flatten(2), 2), image),
        (lambda x: F.group_norm(x.flatten(2).transpose(1, 2).transpose(1, 2), 2), image),
        (lambda x: F.group_norm(x.transpose(2, 3), 2), image),
        (lambda x: F.group_norm(x.flatten(3), 2), video),
        (lambda x: F.group_norm(x[:, :, None], 2).squeeze(2), image),
        (lambda x: F.group_norm(as_images(x), 2), video),
        (lambda x: F.group_norm(as_images(x[:1]), 2), video[:1]),
    ],
)
def test_views_move_behind_a_group_norm(call, x):
    plan = checked(call, x)
    assert plan.steps == ["group_norm"]
    assert is_of_argument(plan, steps.group_norm)


def test_frames_as_images_are_normalized_by_themselves():
    def call(x):
        y = F.group_norm(as_images(x), 2)
        return y.unflatten(0, (2, 3)).transpose(1, 2)

    plan = checked(call, video)
    assert plan.only(steps.group_norm).args[8] is True
    assert len([n for n in plan.graph.nodes if n.op == "call_function"]) == 1
    assert not checked(lambda x: F.group_norm(x.flatten(2), 2), video).only(steps.group_norm).args[8]


@pytest.mark.parametrize(
    ("call", "x"),
    [
        (lambda x: F.group_norm(x.flatten(0, 1).unflatten(0, (4, 2)), 2), torch.randn(2, 4, 3, 5)),
        (lambda x: F.group_norm(x.transpose(0, 2).flatten(2), 2), torch.randn(3, 4, 2, 5)),
        (lambda x: F.group_norm(x.transpose(1, 2).flatten(2), 3), video),
        (lambda x: F.group_norm(x.transpose(0, 2).transpose(1, 2).transpose(1, 2), 2), video),
        (lambda x: F.group_norm(x.permute(0, 3, 1, 2, 4).flatten(0, 1), 2), video),
        (lambda x: F.group_norm(x.permute(2, 0, 1, 3, 4).flatten(0, 1), 2), video),
        (lambda x: F.group_norm(x.permute(0, 2, 1, 4, 3).flatten(0, 1), 2), video),
        (lambda x: F.group_norm(x.flatten(0, 1)[:, None], 1), image),
        (lambda x: F.group_norm(x.view(2, 2, 6, 5), 2), image),
        (lambda x: F.group_norm(x.view(2, 6, 2, 5), 2), image),
        (lambda x: F.group_norm(x.transpose(2, 3).reshape(2, 1, 15), 1), single),
        (lambda x: F.group_norm(x.view(3, 2, 5), 2), torch.randn(3, 10)),
    ],
)
def test_views_that_mix_samples_or_channels_stay(call, x):
    plan = checked(call, x)
    assert plan.steps == ["group_norm"]
    assert not is_of_argument(plan, steps.group_norm)


def test_views_that_others_read_stay():
    def call(x):
        y = x.flatten(2)
        return F.group_norm(y, 2), y * 2

    assert not is_of_argument(checked(call, image), steps.group_norm)


@pytest.mark.parametrize(
    ("call", "x"),
    [
        (lambda x: F.normalize(as_images(x), dim=1), video),
        (lambda x: F.normalize(x.movedim(1, -1), dim=-1), image),
        (lambda x: F.normalize(x.permute(3, 1, 0, 2), dim=1), image),
        (lambda x: F.normalize(x.permute(2, 0, 1, 3, 4).flatten(0, 1), dim=1), video),
        (lambda x: F.rms_norm(x.movedim(1, -1).flatten(1, 2), (4,), eps=1e-3), video),
    ],
)
def test_views_move_behind_a_norm_of_channels(call, x):
    plan = checked(call, x)
    assert plan.steps == ["channel_norm"]
    assert is_of_argument(plan, steps.channel_norm)


@pytest.mark.parametrize("act", [F.silu, F.relu, F.gelu, lambda x: F.gelu(x, approximate="tanh")])
def test_views_move_behind_activations(act):
    plan = checked(lambda x: act(F.group_norm(x, 2).flatten(2)), image)
    assert len(plan.steps) == 1
    plan = checked(lambda x: act((x * 2).movedim(1, -1).flatten(1, 2).mT).unflatten(2, (3, 5)), image)
    computed = [n.target for n in plan.graph.nodes if n.op == "call_function"]
    assert computed[0] is torch.ops.aten.mul.Tensor
    assert computed[1] in ACTIVATIONS


def test_permutations_of_permutations_are_one():
    plan = checked(lambda x: F.normalize(x.movedim(1, -1), dim=-1).movedim(-1, 1), image)
    assert [n.op for n in plan.graph.nodes].count("call_function") == 1


def test_steps_of_rank_two_stay():
    assert steps_of(lambda x: F.silu(x.view(6, 20)), image) == ["aten.silu"]
    assert steps_of(lambda x: F.silu(x.flatten()), image) == ["aten.silu"]


# ---- means of windows, and cats


def over_time(x, call):
    """``call`` of rows of frames: one row for each position and channel."""
    N, C, T, H, W = x.shape
    y = call(x.permute(0, 3, 4, 1, 2).reshape(N * H * W, C, T))
    return y.reshape(N, H, W, C, -1).permute(0, 3, 4, 1, 2)


def first_alone(y):
    return torch.cat([y[..., 0][..., None], F.avg_pool1d(y[..., 1:], 2)], -1)


def computed(call, *inputs):
    """The steps of ``call`` with what they read: "x" for the argument or parts of it. No view is left."""
    plan = checked(lambda *inputs: call(*inputs) * 2, *inputs)
    assert not plan.all(steps.reshape) + plan.all(steps.permute)
    return plan.steps[:-1]


@pytest.mark.parametrize("N", [1, 2])
def test_views_move_behind_means_of_frames(N):
    x = torch.randn(N, 4, 5, 2, 3)
    assert computed(lambda x: over_time(x, first_alone), x) == ["mean_windows", "cat"]
    assert computed(lambda x: over_time(x, lambda y: F.avg_pool1d(y, 2)), x) == ["mean_windows"]
    assert computed(lambda x: over_time(x, lambda y: F.avg_pool1d(y[..., 1:], 4)), x) == ["mean_windows"]
    last = lambda y: torch.cat([F.avg_pool1d(y[..., :3], 3), y[..., 3:]], -1)  # noqa: E731
    assert computed(lambda x: over_time(x, last), x) == ["mean_windows", "cat"]


@pytest.mark.parametrize(
    "call",
    [
        lambda y, z: torch.cat([z[..., :1], F.avg_pool1d(y, 2)], -1),
        lambda y, z: torch.cat([y.flip(0)[..., :1], F.avg_pool1d(y, 2)], -1),
        lambda y, z: torch.cat([y[..., :1].flatten(1).reshape(6, 4, 1), F.avg_pool1d(y, 2)], -1),
        lambda y, z: torch.cat([y[:, ::2, :4], F.avg_pool1d(y[:, :2], 1)[..., :4]], -1),
        lambda y, z: torch.cat([y[..., :2], F.avg_pool1d(y, 2)], 1),
        lambda y, z: torch.cat([y[..., :2], F.avg_pool1d(y, 2)], 0),
        lambda y, z: F.avg_pool1d(y.mT, 4).mT.expand(-1, 4, -1),
        lambda y, z: F.avg_pool1d(y.flatten(1), 5).reshape(6, 4, -1),
        lambda y, z: F.avg_pool1d(y.flatten(0, 1)[:, 1:], 2).reshape(6, 4, -1),
    ],
)
def test_means_and_cats_of_other_views(call):
    """Other axes, other videos and other views: the result is right, whatever moves."""
    z = torch.randn(6, 4, 5)
    checked(lambda x, z: over_time(x, lambda y: call(y, z)) * 2, torch.randn(1, 4, 5, 2, 3), z)


def test_cats_of_different_views_stay():
    def call(x):
        a, b = x.permute(0, 3, 4, 1, 2).reshape(6, 4, 5), x.permute(0, 4, 3, 1, 2).reshape(6, 4, 5)
        return torch.cat([a[..., :1], F.avg_pool1d(b, 2)], -1)

    assert checked(call, torch.randn(1, 4, 5, 2, 3)).only(steps.cat).meta["shape"] == (6, 4, 3)
    assert checked(call, torch.randn(1, 4, 5, 3, 2)).only(steps.cat).args[1] == 2
