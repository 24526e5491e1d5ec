"""Spatial norms are one step, which reads the small tensors."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.plans.run import steps
from tests.plans.rewrite.rewriting import checked, steps_of


def nearest(z, size):
    return F.interpolate(z, size=size, mode="nearest")


def first_apart(z, size):
    """The first frame by itself, the others together."""
    first, rest = z[:, :, :1], z[:, :, 1:]
    return torch.cat([nearest(first, (1, *size[1:])), nearest(rest, (size[0] - 1, *size[1:]))], 2)


def spatial_norm(x, factor, offset):
    return F.silu(F.group_norm(x, 2) * factor + offset)


@pytest.fixture
def layers():
    """Two convolutions of single pixels, from 3 channels to 4: for the factor and for the offset."""

    def made(axes):
        (w, b), (v, c) = ((torch.randn(4, 3, *[1] * axes), torch.randn(4)) for _ in range(2))
        conv = F.conv2d if axes == 2 else F.conv3d
        return (lambda z: conv(z, w, b)), (lambda z: conv(z, v, c))

    return made


# ---- videos and images

VIDEOS = [
    (nearest, (4, 5, 6), (2, 5, 3)),
    (nearest, (1, 8, 6), (1, 2, 3)),
    (nearest, (3, 4, 6), (3, 2, 3)),
    (first_apart, (5, 4, 6), (3, 2, 3)),
    (first_apart, (3, 4, 6), (3, 2, 6)),
]


@pytest.mark.parametrize(("upsampled", "large", "small"), VIDEOS)
def test_videos(layers, upsampled, large, small):
    factor, offset = layers(3)

    def call(x, z):
        z = upsampled(z, large)
        return spatial_norm(x, factor(z), offset(z))

    plan = checked(call, torch.randn(2, 4, *large), torch.randn(2, 3, *small))
    n = plan.only(steps.modulated_norm)
    assert not {"upsample", "group_norm", "aten.mul", "aten.silu"} & set(plan.steps)
    assert (n.args[5], n.args[6].meta["shape"]) == ("silu", (2, 8, *small))


def test_images(layers):
    factor, offset = layers(2)

    def call(x, z):
        z = nearest(z, x.shape[2:])
        return spatial_norm(x, factor(z), offset(z))

    plan = checked(call, torch.randn(2, 4, 4, 6), torch.randn(2, 3, 2, 3))
    assert plan.only(steps.modulated_norm).args[5] == "silu"
    assert plan.only(steps.modulated_norm).args[6].meta["shape"] == (2, 8, 1, 2, 3)


def test_activations_of_norms_that_are_read_elsewhere_stay():
    def call(x, a, b):
        y = F.group_norm(x, 2) * nearest(a, x.shape[2:]) + nearest(b, x.shape[2:])
        return F.silu(F.silu(y)), y

    plan = checked(call, torch.randn(1, 4, 2, 4, 6), torch.randn(1, 4, 1, 2, 3), torch.randn(1, 4, 1, 2, 3))
    assert plan.steps[-2:] == ["aten.silu", "aten.silu"]


def test_small_tensors_without_convolutions():
    def call(x, a, b):
        return nearest(b, x.shape[2:]) + nearest(a, x.shape[2:]) * F.group_norm(x, 2)

    plan = checked(call, torch.randn(1, 4, 2, 4, 6), torch.randn(1, 4, 1, 2, 3), torch.randn(1, 4, 1, 2, 3))
    assert plan.steps == ["cat", "modulated_norm"]
    assert plan.only(steps.modulated_norm).args[5] == "identity"


def test_parts_of_different_videos(layers):
    """The first frame and the others have no tensor in common."""
    factor, offset = layers(3)

    def call(x, a, b):
        z = torch.cat([nearest(a, (1, 4, 6)), nearest(b, (4, 4, 6))], 2)
        return spatial_norm(x, factor(z), offset(z))

    plan = checked(call, torch.randn(2, 4, 5, 4, 6), torch.randn(2, 3, 1, 2, 3), torch.randn(2, 3, 2, 2, 3))
    assert plan.only(steps.modulated_norm).args[6].meta["shape"] == (2, 8, 3, 2, 3)


def test_a_chunk_of_a_longer_video(layers):
    factor, offset = layers(3)

    def call(x, z):
        z = first_apart(z[:, :, 1:4], (5, 4, 6))
        return spatial_norm(x, factor(z), offset(z))

    plan = checked(call, torch.randn(2, 4, 5, 4, 6), torch.randn(2, 3, 6, 2, 3))
    assert "modulated_norm" in plan.steps


def test_a_spatial_norm_goes_into_the_frames(layers):
    factor, offset = layers(3)
    w, v, b = torch.randn(4, 4, 3, 3, 3), torch.randn(4, 4, 1, 1, 1), torch.randn(4)

    def call(x, z):
        z = nearest(z, (4, 5, 6))
        h = spatial_norm(F.conv3d(x, v, b), factor(z), offset(z))
        return F.conv3d(F.pad(h, (1, 1, 1, 1, 2, 0), mode="replicate"), w), h[:, :, -2:].clone()

    plan = checked(call, torch.randn(2, 4, 4, 5, 6), torch.randn(2, 3, 2, 5, 3))
    assert plan.steps[-2:] == ["frames", "conv"]
    assert "modulated_norm" not in plan.steps


def test_a_spatial_norm_of_a_padded_image(layers):
    factor, offset = layers(2)
    w = torch.randn(4, 4, 3, 3)

    def call(x, z):
        z = nearest(z, x.shape[2:])
        return F.conv2d(F.pad(spatial_norm(x, factor(z), offset(z)), (1, 1, 1, 1), mode="replicate"), w)

    plan = checked(call, torch.randn(2, 4, 4, 6), torch.randn(2, 3, 2, 3))
    assert plan.steps[-2:] == ["frames", "conv"]
    assert "modulated_norm" not in plan.steps


# ---- near misses


@pytest.mark.parametrize(("upsampled", "large", "small"), [(nearest, (5, 4, 6), (5, 2, 3)), VIDEOS[3]])
def test_other_convolutions_of_the_upsampled(upsampled, large, small):
    wide, shifted, strided = (
        torch.randn(4, 3, 3, 3, 3),
        torch.randn(4, 3, 1, 1, 1),
        torch.randn(4, 3, 1, 1, 1),
    )
    for layer, size in (
        (lambda z: F.conv3d(z, wide, padding=1), large),
        (lambda z: F.conv3d(z, shifted, padding=(0, 1, 1))[:, :, :, 1:-1, 1:-1], large),
        (lambda z: F.conv3d(torch.cat([z, z], 3), strided, stride=(1, 2, 1)), large),
    ):

        def call(x, z, layer=layer, size=size):
            factor = layer(upsampled(z, size))
            return spatial_norm(x, factor, factor)

        assert "modulated_norm" not in steps_of(call, torch.randn(2, 4, *large), torch.randn(2, 3, *small))


def test_an_odd_number_of_frames_upsampled_evenly(layers):
    """The step would take the first frame once."""
    factor, offset = layers(3)

    def call(x, z):
        z = F.interpolate(torch.cat([z, z], 2), size=(4, 4, 6), mode="nearest")
        first = torch.cat([nearest(z[:, :, :2], (2, 4, 6)), z[:, :, 1:]], 2)
        return spatial_norm(x, factor(first), offset(first))

    assert "modulated_norm" not in steps_of(call, torch.randn(2, 4, 5, 4, 6), torch.randn(2, 3, 1, 2, 3))


def test_factor_and_offset_of_different_sizes():
    def call(x, a, b):
        return F.group_norm(x, 2) * nearest(a, x.shape[2:]) + nearest(b, x.shape[2:])

    plan = checked(call, torch.randn(1, 4, 2, 4, 6), torch.randn(1, 4, 1, 2, 3), torch.randn(1, 4, 2, 2, 3))
    assert "modulated_norm" not in plan.steps


def test_one_sample_for_all():
    def call(x, a, b):
        return F.group_norm(x, 2) * nearest(a, x.shape[2:]) + nearest(b, x.shape[2:])

    plan = checked(call, torch.randn(2, 4, 2, 4, 6), torch.randn(1, 4, 1, 2, 3), torch.randn(1, 4, 1, 2, 3))
    assert "modulated_norm" not in plan.steps


def test_norms_and_products_that_are_read_elsewhere(layers):
    factor, offset = layers(3)
    a, b = (lambda z: factor(nearest(z, (4, 5, 6)))), (lambda z: offset(nearest(z, (4, 5, 6))))
    for call in (
        lambda x, z: (y := F.group_norm(x, 2), y * a(z) + b(z)),
        lambda x, z: (y := F.group_norm(x, 2) * a(z), y + b(z)),
        lambda x, z: F.silu(F.group_norm(x, 2)) * a(z) + b(z),
        lambda x, z: F.group_norm(x, 2) * a(z) - b(z),
        lambda x, z: torch.add(F.group_norm(x, 2) * a(z), b(z), alpha=2),
        lambda x, z: F.group_norm(x, 2) * 2.0 * a(z) + b(z),
        lambda x, z: F.normalize(x, dim=1) * a(z) + b(z),
    ):
        plan = checked(call, torch.randn(2, 4, 4, 5, 6), torch.randn(2, 3, 2, 5, 3))
        assert "modulated_norm" not in plan.steps
