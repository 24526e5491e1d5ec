"""Convolutions of strips and norms of some channels, which models compute one after another."""

import pytest
import torch
import torch.nn.functional as F

from tests.plans.rewrite.rewriting import steps_of

video = torch.randn(1, 4, 5, 13, 6)
image = torch.randn(2, 4, 17, 6)
weight, flat, single = torch.randn(8, 4, 3, 3, 3), torch.randn(8, 4, 3, 3), torch.randn(8, 4, 1, 1)
bias = torch.randn(8)
scale, offset = torch.randn(8), torch.randn(8)


def strips(x, sizes, weight, dim=2, *, halo=2, ends=(1, 1), between=0, **options):
    """A convolution of strips of x along ``dim``. Each begins with the last ``halo`` rows of the one before.

    ``ends``: rows of zeros before and after x. ``between``: rows of zeros at the other ends of strips.
    """
    parts, results = x.split(sizes, dim), []
    for i, part in enumerate(parts):
        rows = [parts[i - 1].transpose(0, dim)[-halo:].transpose(0, dim)] if i and halo else []
        pads = [1, 1] * (x.dim() - 2)
        at = 2 * (x.dim() - 1 - dim)
        pads[at : at + 2] = between if i else ends[0], ends[1] if i == len(parts) - 1 else between
        padded = F.pad(torch.cat([*rows, part], dim), pads)
        results.append((F.conv3d if x.dim() == 5 else F.conv2d)(padded, weight, bias, **options))
    return torch.cat(results, dim)


def after(past, x, sizes=(5, 8)):
    """Strips of a video whose first frames, ``past``, were cut alike, and joined with it strip by strip."""
    parts = [torch.cat(pair, 2) for pair in zip(past.split(sizes, 3), x.split(sizes, 3), strict=True)]
    top = F.conv3d(F.pad(parts[0], [1, 1, 1, 0]), weight, bias)
    rest = torch.cat([parts[0][:, :, :, -2:], parts[1]], 3)
    return torch.cat([top, F.conv3d(F.pad(rest, [1, 1, 0, 1]), weight, bias)], 3)


def after_copies(x):
    """The frames before the first one are copies of it."""
    return after(x[:, :, :1].repeat(1, 1, 2, 1, 1), x)


def columns(x, above, below):
    left = F.conv2d(F.pad(x[..., :4], [1, 0, above, below]), flat, bias)
    return torch.cat([left, F.conv2d(F.pad(x[..., 2:], [0, 1, above, below]), flat, bias)], 3)


def convolved(x, *slices, weights=(flat, flat), dim=2):
    parts = [F.conv2d(x[:, :, rows], w) for rows, w in zip(slices, weights, strict=True)]
    return torch.cat(parts, dim)


def apart(parts, rows=((0, 0), (0, 0)), sides=((1, 1), (1, 1)), value=0.0):
    """Convolutions of ``parts``, with these rows and columns of ``value`` around each, below each other."""
    sides = sides or ((0, 0), (0, 0))
    around = [(*side, *row) for side, row in zip(sides, rows, strict=True)]
    padded = [F.pad(part, pads, value=value) for part, pads in zip(parts, around, strict=True)]
    return torch.cat([F.conv2d(each, flat) for each in padded], 2)


def skipping(x):
    return torch.cat([x[:, :, 3:6], x[:, :, 8:]], 2)


def read_elsewhere(x):
    top = F.conv2d(x[:, :, :9], flat)
    return torch.cat([top, F.conv2d(x[:, :, 7:], flat)], 2), top * 2


def transposed(x):
    parts = [F.conv_transpose2d(t, flat.transpose(0, 1), padding=(0, 1)) for t in (x[:, :, :9], x[:, :, 7:])]
    return torch.cat(parts, 2)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: strips(x, (5, 5, 7), flat), id="three"),
        pytest.param(lambda x: strips(x, (5, 12), flat, ends=(0, 0)), id="no zeros"),
        pytest.param(lambda x: strips(x, (5, 12), flat, ends=(3, 2)), id="more zeros"),
        pytest.param(lambda x: strips(x, (6, 11), flat, halo=1, stride=2), id="every other row"),
        pytest.param(lambda x: strips(x, (5, 12), flat, ends=(0, 0), halo=1, stride=2), id="odd"),
        pytest.param(lambda x: strips(x, (9, 8), flat, halo=4, ends=(2, 2), dilation=(2, 1)), id="dilated"),
        pytest.param(lambda x: strips(x, (9, 8), single, halo=0, ends=(0, 0)), id="pixels"),
        pytest.param(lambda x: strips(x, (2, 4), flat, 3), id="columns"),
        pytest.param(
            lambda x: torch.cat([columns(x[:, :, :9], 1, 0), columns(x[:, :, 7:], 0, 1)], 2), id="both"
        ),
        pytest.param(lambda x: convolved(x, slice(2, 9), slice(7, 15)), id="not all rows"),
    ],
)
def test_strips_of_images(call):
    steps = steps_of(call, image)
    assert sum("conv" in step for step in steps) == 1
    assert not {"cat", "padded_cat"} & {*steps}


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: strips(x, (9, 8), flat, halo=0), id="no rows of the strip before"),
        pytest.param(lambda x: strips(x, (9, 8), flat, halo=1), id="too few"),
        pytest.param(lambda x: strips(x, (9, 8), flat, halo=3), id="too many"),
        pytest.param(lambda x: strips(x, (9, 8), flat, halo=0, between=1), id="zeros between"),
        pytest.param(
            lambda x: apart([x[:, :, :9], x[:, :, 8:]], [(1, 1), (0, 1)]), id="zeros after the first"
        ),
        pytest.param(
            lambda x: apart([x[:, :, :10], x[:, :, 9:]], [(1, 0), (1, 1)]), id="zeros before the last"
        ),
        pytest.param(lambda x: apart([x[:, :, :9], x[:, :, 7:]], sides=[(1, 1), (2, 0)]), id="other sides"),
        pytest.param(
            lambda x: apart([x[:, :, :9], x[:, :, 7:]], [(1, 0), (0, 1)], value=1.0), id="ones around"
        ),
        pytest.param(lambda x: apart([x[:, :, :5], skipping(x)]), id="rows are left out"),
        pytest.param(lambda x: strips(x, (9, 8), flat, halo=0, padding=(1, 0)), id="padding"),
        pytest.param(lambda x: strips(x, (8, 9), flat, halo=2, stride=2), id="another row than the next"),
        pytest.param(lambda x: convolved(x, slice(7, 17), slice(0, 9)), id="another order"),
        pytest.param(
            lambda x: convolved(x, slice(0, 9), slice(7, 17), weights=(flat, flat * 2)), id="weights"
        ),
        pytest.param(lambda x: convolved(x, slice(0, 9), slice(8, 17), dim=1), id="channels"),
        pytest.param(read_elsewhere, id="read elsewhere"),
        pytest.param(transposed, id="transposed"),
    ],
)
def test_parts_that_stay_apart(call):
    steps = steps_of(call, image)
    assert sum("conv" in step for step in steps) > 1
    assert "cat" in steps


def test_axes_that_were_moved_and_not_moved_back():
    def call(x):
        rows = x.permute(2, 1, 0, 3)[3:5].permute(1, 2, 0, 3)  # samples and channels are exchanged
        return apart([x[:, :, :5], torch.cat([rows, x[:, :, 5:]], 2)])

    assert sum("conv" in step for step in steps_of(call, torch.randn(4, 4, 9, 4))) == 2


def test_columns_below_each_other():
    def call(x):
        moved = x.permute(3, 1, 2, 0)
        return apart([moved[:4].permute(3, 1, 2, 0), moved[2:].permute(3, 1, 2, 0)], sides=None)

    assert sum("conv" in step for step in steps_of(call, torch.randn(2, 4, 4, 6))) == 2


def test_a_border_that_is_repeated():
    def call(x):
        return strips(F.pad(x, [0, 0, 1, 1], mode="replicate"), (9, 10), flat, ends=(0, 0))

    steps_of(call, image)


def test_rows_of_tensors_with_other_heights():
    def call(x, past):
        parts = [torch.cat([t[:, :2, rows] for t in (x, past)], 1) for rows in (slice(9), slice(7, 17))]
        return apart(parts)

    assert sum("conv" in step for step in steps_of(call, image, torch.randn(2, 4, 20, 6))) == 2


def test_strips_of_two_images():
    call = lambda x, y: torch.cat([F.conv2d(x[:, :, :9], flat), F.conv2d(y[:, :, 7:], flat)], 2)  # noqa: E731
    assert sum("conv" in step for step in steps_of(call, image, image.clone())) == 2


@pytest.mark.parametrize("call", [lambda x: strips(x, (5, 8), weight, 3), after_copies])
def test_strips_of_videos(call):
    steps = steps_of(call, video)
    assert sum("conv" in step for step in steps) == 1
    assert "cat" not in steps


def test_frames_of_an_earlier_call_are_joined_once():
    past = torch.randn(1, 4, 2, 13, 6)
    assert steps_of(after, past, video) == ["frames", "conv", "add_bias_"]


def test_frames_that_were_cut_at_other_rows_stay_apart():
    def call(past, x):
        top = torch.cat([past[:, :, :, :5], x[:, :, :, 1:6]], 2)
        rest = torch.cat([past[:, :, :, 3:], x[:, :, :, 3:]], 2)
        return torch.cat([F.conv3d(top, weight), F.conv3d(rest, weight)], 3)

    assert sum("conv" in step for step in steps_of(call, torch.randn(1, 4, 2, 13, 6), video)) == 2


def norms(x, groups=(2, 2), sizes=(4, 4), eps=(1e-5, 1e-5), swapped=False, dim=1):
    scales = scale.split(sizes)[:: -1 if swapped else 1]
    each = zip(x.split(sizes, 1), groups, scales, offset.split(sizes), eps, strict=True)
    return torch.cat([F.group_norm(*one) for one in each], dim)


def test_norms_of_some_channels():
    x = torch.randn(2, 8, 5, 6)
    assert steps_of(norms, x) == ["group_norm"]
    assert steps_of(lambda x: norms(x, (1, 3), (2, 6)), x) == ["group_norm"]
    assert steps_of(lambda x: norms(x[:, 1:9]), torch.randn(2, 10, 5, 6)) == ["group_norm"]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: norms(x, (1, 2)), id="groups of other sizes"),
        pytest.param(lambda x: norms(x, eps=(1e-5, 1e-2)), id="another eps"),
        pytest.param(lambda x: norms(x, swapped=True), id="another order"),
        pytest.param(lambda x: norms(x, dim=2), id="rows"),
    ],
)
def test_norms_that_stay_apart(call):
    assert steps_of(call, torch.randn(2, 8, 5, 6)).count("group_norm") == 2
