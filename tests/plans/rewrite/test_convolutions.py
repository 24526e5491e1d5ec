"""Convolutions take padding, upsampling and the role of matrix products; their biases are apart."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from sdfastgn.plans.rewrite.biases import bias_of, biases
from sdfastgn.plans.rewrite.nodes import has
from sdfastgn.plans.run import steps
from tests.plans.rewrite.rewriting import checked, steps_of

aten = torch.ops.aten
HALF = 2e-2


def paddings(plan):
    return [list(n.args[4]) for n in plan.all(steps.conv)]


# ---- padding


@pytest.mark.parametrize(("pads", "own"), [((1, 1, 2, 2), [2, 1]), ((1, 1), [0, 1]), ((0, 0, 1, 1), [1, 0])])
def test_symmetric_zeros_are_the_convolutions_own(pads, own):
    w = torch.randn(5, 4, 3, 3)
    plan = checked(lambda x: F.conv2d(F.pad(x, pads), w), torch.randn(2, 4, 6, 7))
    assert (plan.steps, paddings(plan)) == (["conv"], [own])


def test_zeros_are_added_to_the_padding_of_the_convolution():
    w = torch.randn(5, 4, 3, 3)
    plan = checked(lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), w, padding=(0, 2)), torch.randn(2, 4, 6, 7))
    assert (plan.steps, paddings(plan)) == (["conv"], [[1, 3]])


def test_a_video_is_padded_by_its_convolution():
    w = torch.randn(5, 4, 3, 3, 3)
    plan = checked(lambda x: F.conv3d(F.pad(x, (1, 1, 0, 0, 2, 2)), w), torch.randn(1, 4, 3, 6, 5))
    assert (plan.steps, paddings(plan)) == (["conv"], [[2, 0, 1]])


def test_other_pads_stay():
    w = torch.randn(5, 4, 3, 3)
    for pad in (
        lambda x: F.pad(x, (0, 1, 0, 1)),
        lambda x: F.pad(x, (1, 1, 1, 1), value=1.0),
        lambda x: F.pad(x, (0, 1, 0, 1), mode="replicate"),
    ):
        plan = checked(lambda x, pad=pad: F.conv2d(pad(x), w), torch.randn(2, 4, 6, 7))
        assert (plan.steps, paddings(plan)) == (["pad", "conv"], [[0, 0]])


def test_an_axis_with_unequal_zeros_stays_a_pad():
    w = torch.randn(5, 4, 3, 3)
    plan = checked(lambda x: F.conv2d(F.pad(x, (1, 1, 0, 1)), w, stride=2), torch.randn(2, 4, 6, 7))
    assert (plan.steps, paddings(plan)) == (["pad", "conv"], [[0, 1]])
    assert plan.calls[0].meta["shape"] == (2, 4, 7, 7)


def test_convolutions_that_share_a_pad():
    w, v = torch.randn(5, 4, 3, 3), torch.randn(5, 4, 3, 3)

    def both(pads, x):
        x = F.pad(x, pads)
        return F.conv2d(x, w), F.conv2d(x, v)

    for pads, expected in (((1, 1, 1, 1), ["conv", "conv"]), ((1, 1, 0, 1), ["pad", "conv", "conv"])):
        plan = checked(functools.partial(both, pads), torch.randn(2, 4, 6, 7))
        assert plan.steps == expected


# ---- products


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_single_pixels_in_16_bits_are_a_product(dtype):
    w, v, b = (
        torch.randn(6, 4, 1, 1, dtype=dtype),
        torch.randn(5, 6, 1, 1, 1, dtype=dtype),
        torch.randn(6, dtype=dtype),
    )
    image = checked(lambda x: F.conv2d(x, w, b), torch.randn(2, 4, 3, 5, dtype=dtype), tolerance=HALF)
    video = checked(lambda x: F.conv3d(x, v), torch.randn(2, 6, 2, 3, 5, dtype=dtype), tolerance=HALF)
    assert image.steps == video.steps == ["pointwise_conv"]


def test_other_convolutions_are_no_products():
    w, dtype = torch.randn(6, 4, 1, 1), torch.bfloat16
    x, half = torch.randn(2, 4, 4, 6), w.to(dtype)
    for call, image in (
        (lambda x: F.conv2d(x, w), x),
        (lambda x: F.conv2d(x, half, stride=2), x.to(dtype)),
        (lambda x: F.conv2d(x, half, padding=1), x.to(dtype)),
        (lambda x: F.conv2d(x, half[:, :2], groups=2), x.to(dtype)),
        (lambda x: F.conv2d(x, half.expand(6, 4, 2, 1)), x.to(dtype)),
    ):
        assert steps_of(call, image, tolerance=HALF) == ["conv"]


# ---- upsampling


@pytest.fixture
def phases(monkeypatch):
    monkeypatch.setattr("sdfastgn.plans.rewrite.convolutions.phases_pay", lambda *sizes: True)


def twice(x, times=2.0):
    return F.interpolate(x, scale_factor=times, mode="nearest")


@pytest.mark.usefixtures("phases")
def test_an_upsampled_image_is_convolved_in_phases():
    w, b = torch.randn(5, 4, 3, 3), torch.randn(5)
    plan = checked(lambda x: F.conv2d(twice(x), w, b, padding=1), torch.randn(2, 4, 3, 5))
    padded = checked(lambda x: F.conv2d(F.pad(twice(x), (1, 1, 1, 1)), w), torch.randn(2, 4, 3, 5))
    assert plan.steps == padded.steps == ["upsample_conv"]


@pytest.mark.usefixtures("phases")
def test_other_upsampled_images_are_not():
    w, wide, grouped = torch.randn(4, 4, 3, 3), torch.randn(4, 4, 5, 5), torch.randn(4, 2, 3, 3)
    for call in (
        lambda x: F.conv2d(twice(x), w),
        lambda x: F.conv2d(twice(x), wide, padding=1),
        lambda x: F.conv2d(twice(x), w, padding=1, stride=2),
        lambda x: F.conv2d(twice(x), w, padding=1, dilation=2),
        lambda x: F.conv2d(twice(x), grouped, padding=1, groups=2),
        lambda x: F.conv2d(twice(x, 4.0), w, padding=1),
        lambda x: F.conv2d(twice(x, (2.0, 1.0)), w, padding=1),
    ):
        assert steps_of(call, torch.randn(2, 4, 3, 5)) == ["upsample", "conv"]
    assert (
        steps_of(lambda x: (large := twice(x), F.conv2d(large, w, padding=1)), torch.randn(2, 4, 3, 5))[-1]
        == "conv"
    )


def test_phases_are_asked_for_the_size(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "sdfastgn.plans.rewrite.convolutions.phases_pay", lambda *sizes: bool(asked.append(sizes))
    )
    w = torch.randn(7, 4, 3, 3)
    plan = checked(lambda x: F.conv2d(twice(x), w, padding=1), torch.randn(2, 4, 3, 5))
    assert (plan.steps, asked) == (["upsample", "conv"], [(2, 4, 7, 3, 5, 4)])


# ---- biases


def test_a_bias_is_a_step_of_its_own():
    w, b = torch.randn(5, 4, 3, 3), torch.randn(5)
    plan = checked(lambda x: torch.tanh(F.conv2d(x, w, b)), torch.randn(2, 4, 6, 7))
    assert plan.steps == ["conv", "add_bias_", "aten.tanh"]


def test_a_result_that_is_read_twice_has_its_bias_once():
    w, b = torch.randn(4, 4, 3, 3), torch.randn(4)

    def call(x):
        h = F.conv2d(x, w, b, padding=1)
        return h, h + F.relu(h), F.group_norm(h, 2)

    assert steps_of(call, torch.randn(2, 4, 6, 7)).count("add_bias_") == 1


def test_groups_and_strides_have_their_bias_apart():
    w, b = torch.randn(4, 2, 3, 3), torch.randn(4)
    plan = checked(lambda x: F.conv2d(x, w, b, stride=2, dilation=(1, 2), groups=2), torch.randn(2, 4, 7, 7))
    assert plan.steps == ["conv", "add_bias_"]


def test_other_convolutions_keep_their_bias():
    b = torch.randn(5)
    w, transposed, line = torch.randn(5, 4, 3, 3), torch.randn(4, 5, 2, 2), torch.randn(5, 4, 3)
    double = checked(lambda x: F.conv2d(x, w.double(), b.double()), torch.randn(2, 4, 6, 7).double())
    assert "add_bias_" not in double.steps
    assert steps_of(lambda x: F.conv_transpose2d(x, transposed, b, stride=2), torch.randn(2, 4, 3, 3)) == [
        "conv"
    ]
    assert steps_of(lambda x: F.conv1d(x, line, b), torch.randn(2, 4, 6)) == ["aten.convolution"]


def test_no_bias_is_written_over_what_another_step_reads():
    graph = fx.Graph()
    x, w, b, c = (graph.placeholder(name) for name in "xwbc")
    image, column = {"shape": (2, 4, 5, 5)}, {"shape": (4,)}
    same = {"dtype": torch.float32, "device": torch.device("cpu")}
    where = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    h = graph.call_function(steps.conv, (x, w, None, *where))
    first, second = (graph.call_function(bias_of, (h, bias)) for bias in (b, c))
    other = graph.call_function(steps.conv, (x, w, None, *where))
    tokens = graph.call_function(steps.reshape, (other, (2, 4, 25)))
    back = graph.call_function(steps.reshape, (tokens, (2, 4, 5, 5)))
    third = graph.call_function(bias_of, (back, b))
    plain = graph.call_function(bias_of, (x, b))
    graph.output([first, second, third, tokens, plain])
    for n in graph.nodes:
        n.meta = dict(column if n in (b, c) else image, **same)
    w.meta["shape"], tokens.meta["shape"] = (4, 4, 3, 3), (2, 4, 25)
    graph = biases(graph)
    assert [has(n, aten.add.Tensor) for n in graph.nodes].count(True) == 4
    assert not any(has(n, steps.add_bias_) for n in graph.nodes)
    x, w, b, c = torch.randn(2, 4, 5, 5), torch.randn(4, 4, 3, 3), torch.randn(4), torch.randn(4)
    y = F.conv2d(x, w, padding=1)
    wanted = y + b.view(4, 1, 1), y + c.view(4, 1, 1), y + b.view(4, 1, 1), y.flatten(2), x + b.view(4, 1, 1)
    for got, exact in zip(fx.GraphModule({}, graph)(x.clone(), w, b, c), wanted, strict=True):
        torch.testing.assert_close(got, exact)


# ---- pads of cats


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (1, 4, 3, 5, 6)])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.pad(torch.cat([x[:, :, :1], x * 2], 2), (0, 1, 0, 1)),
        lambda x: F.pad(torch.cat([x, x * 2], 1), (2, 1, 0, 3), value=0.5),
        lambda x: F.pad(torch.cat([x, x * 2], -1), (1, 1, 0, 2)),
        lambda x: F.pad(torch.cat([x, x * 2]), (0, 1)),
    ],
)
def test_a_pad_of_a_cat_is_one_copy(call, shape):
    assert steps_of(call, torch.randn(shape)) == ["aten.mul", "padded_cat"]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: (y := torch.cat([x, x * 2], 2), F.pad(y, (0, 1, 0, 1))),
        lambda x: F.pad(torch.cat([x, x * 2], 1), (0, 1, 0, -1)),
        lambda x: F.pad(torch.cat([x, x * 2], 1), (1, 1, 1, 1), mode="reflect"),
    ],
)
def test_other_pads_of_cats_stay(call):
    assert "cat" in steps_of(call, torch.randn(2, 4, 5, 6))


# ---- frames that are repeated


def in_frames(conv, x):
    y = conv(x.transpose(1, 2).flatten(0, 1))
    return y.unflatten(0, (len(x), -1)).transpose(1, 2)


def first_frame_once(x):
    first = F.interpolate(x[:, :, 0], scale_factor=2.0).unsqueeze(2)
    return torch.cat([first, F.interpolate(x[:, :, 1:], scale_factor=2.0)], 2)


@pytest.mark.parametrize(
    ("larger", "found"),
    [
        (lambda x: F.interpolate(x, scale_factor=2.0), ["upsample", "conv", "frames"]),
        (lambda x: F.interpolate(x, scale_factor=(4.0, 1.0, 1.0)), ["conv", "frames"]),
        (first_frame_once, ["upsample", "conv", "frames"]),
    ],
)
@pytest.mark.parametrize("N", [1, 2])
def test_frames_are_repeated_after_their_convolution(conv, larger, found, N):
    plan = checked(lambda x: in_frames(conv, larger(x)), torch.randn(N, 4, 3, 2, 5))
    assert plan.steps == found
    assert plan.only(steps.conv).meta["shape"][0] == 3 * N
    assert plan.only(steps.frames).args[9][1:] == (1, 1)


@pytest.mark.usefixtures("phases")
def test_frames_are_repeated_after_phases(conv):
    plan = checked(lambda x: in_frames(conv, first_frame_once(x)), torch.randn(2, 4, 3, 2, 5))
    assert plan.steps == ["upsample_conv", "frames"]


@pytest.mark.parametrize(
    "call",
    [
        lambda conv, x: in_frames(conv, F.interpolate(x, scale_factor=(1.0, 2.0, 2.0))),
        lambda conv, x: (in_frames(conv, y := F.interpolate(x, scale_factor=2.0)), y),
        lambda conv, x: conv(
            F.interpolate(x, scale_factor=2.0).transpose(0, 2).transpose(1, 2).flatten(0, 1)
        ),
        lambda conv, x: conv(
            F.interpolate(x, scale_factor=2.0).transpose(1, 3).flatten(0, 1).transpose(1, 2)
        ),
        lambda conv, x: conv(F.interpolate(x, scale_factor=2.0).transpose(1, 2).reshape(32, 4, 4, 10)),
        lambda conv, x: F.conv3d(F.interpolate(x, scale_factor=2.0), torch.ones(3, 4, 3, 3, 3)),
    ],
)
def test_other_frames_are_repeated_before(conv, call):
    plan = checked(functools.partial(call, conv), torch.randn(2, 4, 4, 4, 5))
    assert plan.only(steps.frames).args[0].op == "placeholder"


# ---- ReLU


def half(*shape):
    return torch.randn(shape, dtype=torch.float16)


@pytest.fixture
def residual_conv():
    """A convolution in fp16 with a bias, of images with 8 channels."""
    w, b = half(8, 8, 3, 3) / 8, half(8)
    return lambda x, **options: F.conv2d(x, w, b, **{"padding": 1, **options})


@pytest.mark.parametrize(
    "call",
    [
        lambda conv, x: F.relu(conv(x)),
        lambda conv, x: F.relu(conv(x, stride=2, padding=0)),
        lambda conv, x: F.relu(conv(x) + x),
        lambda conv, x: F.relu(x + conv(x)),
    ],
)
def test_a_convolution_has_its_relu(residual_conv, call):
    found = steps_of(functools.partial(call, residual_conv), half(2, 8, 5, 6), tolerance=HALF)
    assert found == ["conv_relu"]


def test_a_residual_block_is_one_step_a_convolution(residual_conv):
    def call(x):
        return F.relu(residual_conv(F.relu(residual_conv(x))) + x)

    assert steps_of(call, half(2, 8, 5, 6), tolerance=HALF) == ["conv_relu", "conv_relu"]


@pytest.mark.parametrize(
    "call",
    [
        lambda conv, x: F.silu(conv(x)),
        lambda conv, x: F.relu((conv(x) + x) / 2),
        lambda conv, x: F.relu(conv(x, stride=2) + x[:, :, ::2, ::2]),
        lambda conv, x: F.relu(conv(x, dilation=2, padding=2) + x),
        lambda conv, x: (F.relu(y := conv(x)), y),
        lambda conv, x: F.relu(conv(x) + x + 1),
        lambda conv, x: F.relu(conv(x.float().half()[:, :, 0, None].expand(2, 8, 5, 6)).flatten(1)),
    ],
)
def test_other_activations_stay(residual_conv, call):
    found = steps_of(functools.partial(call, residual_conv), half(2, 8, 5, 6), tolerance=HALF)
    assert "conv_relu" not in found


@pytest.mark.parametrize(
    ("x", "w", "b"),
    [
        (torch.randn(2, 8, 5, 6), torch.randn(8, 8, 3, 3), torch.randn(8)),
        (half(2, 4, 5, 6), half(8, 4, 3, 3), half(8)),
        (half(2, 8, 5, 6), half(4, 8, 3, 3), half(4)),
        (half(1, 8, 2, 5, 6), half(8, 8, 1, 3, 3), half(8)),
        (half(2, 8, 5, 6), half(8, 8, 3, 3), None),
    ],
)
def test_other_convolutions_have_no_relu(x, w, b):
    conv = F.conv2d if x.dim() == 4 else F.conv3d
    assert "conv_relu" not in steps_of(lambda x: F.relu(conv(x, w, b)), x, tolerance=HALF)


def test_statistics_stay_with_the_sum_after_a_convolution(residual_conv, monkeypatch):
    monkeypatch.setattr("sdfastgn.plans.rewrite.statistics.statistics_pay", lambda *args: True)

    def call(x):
        return F.group_norm(F.relu(residual_conv(x) + x), 2)

    assert steps_of(call, half(2, 8, 5, 6), tolerance=HALF) == ["conv", "add", "group_norm"]
