"""One spelling for each op: what is recognized, and what must stay as it is."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import sdfastgn
from sdfastgn.plans.rewrite.nodes import rank
from sdfastgn.plans.rewrite.spelling import canonicalize
from sdfastgn.plans.run import steps
from tests.plans.rewrite.rewriting import checked, name_of, steps_of

x3 = torch.randn(2, 6, 8)
x4 = torch.randn(2, 4, 6, 8)
x5 = torch.randn(1, 4, 3, 6, 8)
W = torch.randn(5, 8)
B = torch.randn(5)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.view(2, 48).unflatten(1, (6, 8)).unsqueeze(0).squeeze(0) * 2,
        lambda x: x.contiguous().clone().detach().reshape(4, 12, 2).flatten() * 2,
        lambda x: x.transpose(1, 2).movedim(0, 1).permute(0, 2, 1).mT.contiguous() * 2,
        lambda x: x[:, 1:-1][:, :2, 3].t() * 2,
        lambda x: x[-1, :, -3:].expand(4, 6, 3) * 2,
        lambda x: sum(t * 2 for t in x.split([1, 5], 1)[1].unbind(2)),
        lambda x: x.unsqueeze(1).repeat(1, 3, 1, 1) * 2,
        lambda x: x.repeat(2, 1, 3) * 2,
        lambda x: x[:, :1].repeat(2, 1, 5, 1) * 2,
        lambda x: x.repeat(1, 0, 2) * 2,
        lambda x: x.repeat(1, 1, 1) * 2,
        lambda x: x.chunk(3, 1)[2] * 2,
        lambda x: x[:, 1:4][:, -1] * 2,
        lambda x: x[:, 1:4][:, -2:] * 2,
    ],
)
def test_views_compute_nothing(call):
    assert set(steps_of(call, x3)) <= {"aten.mul", "aten.add"}


def test_reshapes_of_reshapes_are_one():
    assert views_of(lambda x: x.view(12, 8).view(3, 32).reshape(4, 24) * 2, x3) == ["reshape", "aten.mul"]


def in_squares(x, order):
    """Pixel shuffle by hand: 4 channels become 2 x 2 pixels. ``order``: that of C, k, k in the channels."""
    sizes = {"C": x.shape[1] // 4, "h": 2, "w": 2}
    y = x.unflatten(1, [sizes[axis] for axis in order])
    C, h, w = (1 + order.index(axis) for axis in "Chw")
    return y.permute(0, C, 4, h, 5, w).flatten(4, 5).flatten(2, 3)


def views_of(call, x):
    """All nodes of the rewritten ``call``, views included."""
    return [name_of(n) for n in checked(call, x).graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    ("call", "x"),
    [
        (lambda x: F.pixel_shuffle(x, 2), x4),
        (lambda x: F.pixel_shuffle(x, 2), x4[0]),
        (lambda x: F.pixel_shuffle(x, 3), torch.randn(2, 2, 9, 2, 5)),
        (lambda x: F.pixel_unshuffle(x, 2), x4),
        (lambda x: F.pixel_unshuffle(x, 3), torch.randint(0, 9, (2, 2, 6, 9))),
        (lambda x: F.pixel_unshuffle(x, 2), x4.contiguous(memory_format=torch.channels_last)),
    ],
)
def test_pixel_shuffles_are_views(call, x):
    assert steps_of(lambda x: call(x) * 2, x) == ["aten.mul"]


def test_pixel_shuffles_by_hand_are_the_same_value():
    assert views_of(lambda x: F.pixel_shuffle(x, 2) * in_squares(x, "Chw"), x4).count("permute") == 1
    assert views_of(lambda x: F.pixel_shuffle(F.pixel_unshuffle(x, 2), 2) * 2, x4) == ["aten.mul"]
    assert views_of(lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2) * 2, x4) == ["aten.mul"]
    assert views_of(lambda x: F.pixel_shuffle(x, 1) * 2, x4) == ["aten.mul"]


@pytest.mark.parametrize("order", ["Cwh", "hwC", "hCw"])
def test_squares_of_other_channels_are_other_values(order):
    x = torch.randn(2, 8, 3, 5)
    assert views_of(lambda x: F.pixel_shuffle(x, 2) * in_squares(x, order), x).count("permute") == 2


def test_shuffles_that_do_more_stay():
    twice = views_of(lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 4), 2) * 2, torch.randn(1, 16, 3, 5))
    assert twice.count("permute") == 2
    assert [s.replace("native_", "") for s in steps_of(lambda x: F.channel_shuffle(x, 2), x4)] == [
        "aten.channel_shuffle"
    ]


def test_a_slice_with_a_step_stays():
    assert steps_of(lambda x: x[:, ::2] * 2, x3) == ["aten.slice", "aten.mul"]


def test_a_copy_of_a_part_stays():
    assert steps_of(lambda x: (x[:, :2].clone() * 2, x.clone() * 2), x3) == ["copy", "aten.mul", "aten.mul"]


def test_equal_values_are_computed_once():
    def call(x):
        return (x.exp() + 1) * (x.exp() + 1.0), x.exp() + True

    assert steps_of(call, x3).count("aten.exp") == 1


def test_equal_numbers_of_other_types_are_other_nodes():
    x = torch.randint(0, 9, (4,))
    assert steps_of(lambda x: (x + 1, x + 1.0, x * 0.0, x * -0.0), x) == [
        "aten.add",
        "aten.add",
        "aten.mul",
        "aten.mul",
    ]


def test_empty_tensors_are_not_shared():
    def call(x):
        a, b = torch.empty_like(x), torch.empty_like(x)
        for out in (a, b):
            out[:, 1:], out[:, 0] = x[:, 1:], x[:, 1]
        return a, b * 2

    assert "aten.slice_scatter" not in steps_of(call, x3)


def test_casts():
    def call(x):
        return x.float().to(torch.float64).to(x.dtype) * 2

    assert steps_of(call, x3.bfloat16()) == ["aten.mul"]
    assert steps_of(lambda x: x.bfloat16().float() * 2, x3) == ["cast", "cast", "aten.mul"]
    assert steps_of(lambda x: x.int().float() * 2, x3) == ["cast", "cast", "aten.mul"]
    assert steps_of(lambda x: x.to(torch.complex64) * 2, x3) == ["aten._to_copy", "aten.mul"]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.linear(x, W, B),
        lambda x: F.linear(x.view(12, 8), W, B).view(2, 6, 5),
        lambda x: torch.addmm(B, x.view(12, 8), W.t()),
        lambda x: torch.addmm(B, x.view(12, 8), W.t(), beta=1, alpha=1),
        lambda x: x @ W.t(),
        lambda x: x @ W.t() + B,
        lambda x: B + x @ W.t(),
        lambda x: B + F.linear(x.view(12, 8), W).view(2, 6, 5),
        lambda x: torch.bmm(x, W.t().expand(2, 8, 5)),
        lambda x: torch.mm(x.flatten(0, 1), W.mT),
    ],
)
def test_linear_layers(call):
    assert steps_of(call, x3) == ["linear"]


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        (lambda x: x @ torch.ones(8, 5), ["aten.full", "aten.mm"]),
        (lambda x: torch.addmm(B, x.view(12, 8), W.t(), alpha=2), ["aten.addmm"]),
        (lambda x: torch.addmm(B, x.view(12, 8), W.t(), beta=0.5), ["aten.addmm"]),
        (lambda x: torch.addmm(x[0, 0, :1], x.view(12, 8), W.t()), ["aten.addmm"]),
        (lambda x: torch.bmm(x, x.transpose(1, 2)), ["aten.bmm"]),
        (lambda x: torch.bmm(x[..., :5], W.t().reshape(5, 8).expand(2, 5, 8)), ["aten.bmm"]),
        (lambda x: F.linear(x, W[:1]) + B, ["linear", "aten.add"]),
        (lambda x: F.linear(x.sum().view(1, 1), W[:, :1]), ["aten.sum", "linear"]),
        (lambda x: torch.bmm(x, torch.stack([W.t(), W.t() * 2])), ["aten.mul", "cat", "aten.bmm"]),
        (lambda x: torch.add(x @ W.t(), B, alpha=2), ["linear", "aten.add"]),
        (lambda x: F.linear(x, W, B) + B, ["linear", "aten.add"]),
        (lambda x: x @ W.t() + B[:1], ["linear", "aten.add"]),
        (lambda x: (x @ W.t()) + B.view(1, 5), ["linear", "aten.add"]),
        (lambda x: (x @ W.t()) + B.double(), ["linear", "cast", "aten.add"]),
        (lambda x: F.linear(x.view(12, 8), W).view(2, 5, 6) + x[0, 0, :6], ["linear", "aten.add"]),
        (lambda x: F.linear(x[0, 0], W), ["linear"]),
    ],
)
def test_products_that_are_other_layers(call, steps):
    assert steps_of(call, x3) == steps


def test_a_bias_stays_outside_of_a_product_that_is_read_elsewhere():
    def call(x):
        y = x @ W.t()
        return y + B, y * 2

    assert sorted(steps_of(call, x3)) == ["aten.add", "aten.mul", "linear"]


def test_a_bias_stays_outside_of_a_result():
    def call(x):
        y = x @ W.t()
        return y + B, y

    assert steps_of(call, x3) == ["linear", "aten.add"]


def test_attention():
    q = torch.randn(1, 2, 5, 8)
    mask = torch.randn(5, 5)
    assert steps_of(lambda q: F.scaled_dot_product_attention(q, q * 2, q * 3), q)[-1] == "attention"
    assert steps_of(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.1), q) == [
        "attention"
    ]
    assert steps_of(lambda q: F.scaled_dot_product_attention(q, q, q, mask), q) == ["attention"]
    grouped = lambda q: F.scaled_dot_product_attention(q, q[:, :1], q[:, 1:], enable_gqa=True)  # noqa: E731
    assert steps_of(grouped, q) == ["attention"]


@pytest.mark.parametrize(
    ("call", "x", "steps"),
    [
        (lambda x: F.avg_pool1d(x, 2), x3, ["mean_windows"]),
        (lambda x: F.avg_pool1d(x, 3, 3, ceil_mode=False), x3, ["mean_windows"]),
        (lambda x: F.avg_pool2d(x, (1, 4)), x4, ["mean_windows"]),
        (lambda x: F.avg_pool2d(x, (4, 1), (4, 1)), x4.double(), ["mean_windows"]),
        (lambda x: F.avg_pool2d(x, (2, 1), ceil_mode=True), x4[0], ["mean_windows"]),
        (lambda x: F.avg_pool1d(x.half(), 2), x3, ["cast", "mean_windows"]),
        (lambda x: F.avg_pool1d(x, 3, 3, ceil_mode=True), x3, ["aten.avg_pool2d"]),
        (lambda x: F.avg_pool1d(x, 2, 1), x3, ["aten.avg_pool2d"]),
        (lambda x: F.avg_pool1d(x, 2, 2, 1), x3, ["aten.avg_pool2d"]),
        (lambda x: F.avg_pool2d(x, 2), x4, ["aten.mean"]),
        (lambda x: F.avg_pool2d(x, (1, 2), divisor_override=3), x4, ["aten.avg_pool2d"]),
        (lambda x: F.avg_pool2d(x, 1), x4, ["copy"]),
    ],
)
def test_means_of_windows(call, x, steps):
    assert steps_of(call, x) == steps


@pytest.mark.parametrize(
    ("call", "q", "heads"),
    [
        (lambda q: F.scaled_dot_product_attention(q, q[:, 1:], q[:, 1:]), torch.randn(2, 5, 8), 4),
        (lambda q: F.scaled_dot_product_attention(q, q, q[..., :4], is_causal=True), torch.randn(2, 5, 8), 4),
        (lambda q: F.scaled_dot_product_attention(q, q, q, torch.eye(5)), torch.randn(2, 5, 8), 3),
        (lambda q: F.scaled_dot_product_attention(q, q[:1], q[:1], enable_gqa=True), torch.randn(2, 5, 8), 3),
        (lambda q: F.scaled_dot_product_attention(q, q[:1], q), torch.randn(2, 5, 8), 3),
        (lambda q: F.scaled_dot_product_attention(q, q, q), torch.randn(5, 8), 2),
    ],
)
def test_attention_without_heads_has_one(call, q, heads):
    assert rank(checked(call, q).only(steps.attention).args[0]) == heads


@pytest.mark.parametrize(
    ("call", "x", "args"),
    [
        (lambda x: F.pad(x, (1, 2)), x4, ((1, 2, 0, 0), "constant", 0.0)),
        (lambda x: F.pad(x, (1, 2, 3, 4), value=2), x4, ((1, 2, 3, 4), "constant", 2.0)),
        (lambda x: F.pad(F.pad(x, (1, 2)), (1, 1, 3, 0)), x4, ((2, 3, 3, 0), "constant", 0.0)),
        (lambda x: F.pad(x, (1, 2, 3, 0), "replicate"), x4, ((1, 2, 3, 0), "replicate", 0.0)),
        (lambda x: F.pad(x, (1, 2, 3, 0), "reflect"), x4, ((1, 2, 3, 0), "reflect", 0.0)),
        (lambda x: F.pad(x, (1, 1, 0, 0, 2, 0), "replicate"), x5, ((1, 1, 0, 0, 2, 0), "replicate", 0.0)),
        (lambda x: F.pad(x, (1, 1, 0, 0, 2, 0), "reflect"), x5, ((1, 1, 0, 0, 2, 0), "reflect", 0.0)),
    ],
)
def test_pads(call, x, args):
    plan = checked(call, x)
    assert (plan.steps, plan.only(steps.pad).args[1:]) == (["pad"], args)


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        (lambda x: F.pad(x, (0, 0, 0, 0)) * 2, ["aten.mul"]),
        (lambda x: F.pad(x, (-1, 2)), ["aten.constant_pad_nd"]),
        (lambda x: F.pad(x, (0, 0, 0, 0, 1, 0)), ["aten.constant_pad_nd"]),
        (lambda x: F.pad(x.flatten(1), (1, 0)), ["aten.constant_pad_nd"]),
        (lambda x: F.pad(x.flatten(2), (1, 0)), ["aten.constant_pad_nd"]),
        (lambda x: F.pad(x.int(), (1, 0)), ["cast", "aten.constant_pad_nd"]),
        (lambda x: F.pad(F.pad(x, (1, 0), value=1.0), (1, 0)), ["pad", "pad"]),
        (lambda x: F.pad(F.pad(x, (1, 0, 0, 0), "replicate"), (1, 0)), ["pad", "pad"]),
        (lambda x: F.pad(F.pad(x, (2, 0, 0, 0), "reflect"), (3, 0, 0, 0), "reflect"), ["pad", "pad"]),
    ],
)
def test_pads_that_differ(call, steps):
    assert steps_of(call, x4) == steps


@pytest.mark.parametrize(
    ("call", "x"),
    [
        (lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"), x4),
        (lambda x: F.interpolate(x, size=(12, 32), mode="nearest"), x4),
        (lambda x: F.interpolate(x, scale_factor=(2.0, 4.0), mode="nearest-exact"), x4),
        (lambda x: F.interpolate(x, scale_factor=(1.0, 2.0, 2.0), mode="nearest"), x5.double()),
        (lambda x: F.interpolate(x.float(), scale_factor=2.0).to(x.dtype), x4.bfloat16()),
    ],
)
def test_upsampling(call, x):
    assert steps_of(call, x) == ["upsample"]


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        (lambda x: F.interpolate(x, scale_factor=3.0), ["aten.upsample_nearest2d"]),
        (lambda x: F.interpolate(x, scale_factor=2.1), ["aten.upsample_nearest2d"]),
        (lambda x: F.interpolate(x, size=(11, 16)), ["aten.upsample_nearest2d"]),
        (lambda x: F.interpolate(x, size=(3, 4)), ["aten.upsample_nearest2d"]),
        (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), ["aten.upsample_bilinear2d"]),
        (lambda x: F.interpolate(x.bfloat16(), scale_factor=2.0).float(), ["cast", "upsample", "cast"]),
        (lambda x: F.interpolate(x.byte(), scale_factor=2.0), ["cast", "aten.upsample_nearest2d"]),
        (lambda x: F.interpolate(x.int().float(), scale_factor=2.0), ["cast", "cast", "upsample"]),
    ],
)
def test_other_upsampling_stays(call, steps):
    assert steps_of(call, x4) == steps


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        (lambda x: (x + 0) * 1, []),
        (lambda x: (x - 0.0) / 1.0, []),
        (lambda x: 1 * x, []),
        (lambda x: x + 1e-9, ["aten.add"]),
        (lambda x: 0 - x, ["aten.rsub"]),
        (lambda x: 1 / x.exp(), ["aten.exp", "aten.reciprocal"]),
        (lambda x: x * 0, ["aten.mul"]),
        (lambda x: x * torch.sigmoid(x), ["aten.silu"]),
        (lambda x: torch.sigmoid(x) * x, ["aten.silu"]),
        (lambda x: x * torch.sigmoid(x * 2), ["aten.mul", "aten.sigmoid", "aten.mul"]),
        (lambda x: x + x * torch.sigmoid(-x), ["aten.neg", "aten.sigmoid", "ada_norm"]),
        (lambda x: x**2, ["aten.mul"]),
        (lambda x: x**3, ["aten.pow"]),
        (lambda x: x.repeat(1, 2, 1), []),
        (
            lambda x: torch.zeros_like(x) + x.new_zeros(2, 6, 8) + torch.zeros(2, 6, 8),
            ["aten.full", "aten.add", "aten.add"],
        ),
        (
            lambda x: torch.ones_like(x) + x.new_full((8,), 1.5) + torch.full_like(x, 2),
            ["aten.full", "aten.full", "aten.add", "aten.full", "aten.add"],
        ),
        (lambda x: x.clone().fill_(2) + x.clone().zero_(), ["aten.full", "aten.full", "aten.add"]),
        (lambda x: torch.stack([x]), []),
    ],
)
def test_numbers(call, steps):
    assert steps_of(lambda x: torch.exp2(call(x)), x3) == [*steps, "aten.exp2"]


def test_numbers_that_change_the_dtype_or_the_shape():
    x = torch.randint(1, 9, (4,))
    assert steps_of(lambda x: (x / 1, x + 0.0, x * 1.0, x**2.0), x) == [
        "aten.div",
        "aten.add",
        "aten.mul",
        "aten.pow",
    ]
    assert steps_of(lambda x: x.bool() + 0, x) == ["cast", "aten.add"]


def test_complex_elements_are_neighbors_in_memory():
    def call(x):
        return torch.view_as_complex(x.unflatten(-1, (-1, 2)))

    strided = torch.randn(2, 8, 6).mT
    plan = checked(call, x3)
    assert plan.steps == [
        "aten.contiguous",
        "aten.view_as_complex",
        "copy",
    ]  # else the result is the argument
    assert torch.equal(plan(strided), call(strided.contiguous()))


def test_bits_are_neighbors_in_memory():
    strided = torch.randn(2, 8, 6).mT
    plan = checked(lambda x: x.view(torch.int16) + 1, x3)
    assert plan.steps == ["aten.contiguous", "aten.view", "aten.add"]
    assert torch.equal(plan(strided), strided.contiguous().view(torch.int16) + 1)


def test_a_tensor_fills_another_in_its_dtype():
    def call(x):
        return x.int().fill_(x[0, 0, 0] * 10)

    assert steps_of(call, x3) == ["aten.mul", "cast"]


@pytest.mark.parametrize("op", [torch.ops.aten._to_copy.default, torch.ops.aten.fill.Tensor])
def test_moves_to_other_devices_stay(op):
    graph = fx.Graph()
    x, value = graph.placeholder("x"), graph.placeholder("value")
    args, kwargs = ((x,), {"device": "meta"}) if op is torch.ops.aten._to_copy.default else ((x, value), {})
    moved = graph.call_function(op, args, kwargs)
    for n, device in ((x, "cpu" if kwargs else "meta"), (value, "cpu"), (moved, "meta")):
        n.meta = {"shape": (), "dtype": torch.float32, "device": torch.device(device)}
    graph.output([moved])
    assert op in {n.target for n in canonicalize(graph).nodes}


def test_attention_with_dropout_stays():
    graph = fx.Graph()
    q = graph.placeholder("q")
    attention = graph.call_function(torch.ops.aten.scaled_dot_product_attention.default, (q, q, q, None, 0.5))
    q.meta = {"shape": (1, 2, 3, 4), "dtype": torch.float32, "device": torch.device("cpu")}
    attention.meta = dict(q.meta)
    graph.output([attention])
    assert attention in canonicalize(graph).nodes


def test_norms_are_whole():
    w, b = torch.randn(8), torch.randn(8)
    assert steps_of(lambda x: F.layer_norm(x, (8,), w, b, 1e-3), x3) == ["layer_norm"]
    assert steps_of(lambda x: F.layer_norm(x, (6, 8)), x3) == ["aten.layer_norm"]  # no kernel takes two axes
    assert steps_of(lambda x: F.group_norm(x, 2, w[:4], b[:4], 1e-3), x4) == ["group_norm"]
    assert steps_of(lambda x: F.group_norm(x.flatten(1), 2, eps=1e-3), x4) == ["aten.group_norm"]
    assert steps_of(lambda x: F.rms_norm(x, (8,), w), x3) == ["aten.rms_norm"]


def test_the_first_result_of_native_group_norm():
    w, b = torch.randn(4), torch.randn(4)

    def found(x):
        return torch.native_group_norm(x, w, b, 2, 4, 48, 2, 1e-3)

    assert steps_of(lambda x: F.silu(found(x)[0]), x4) == ["group_norm"]
    assert steps_of(lambda x: found(x)[1] * 2, x4) == ["aten.native_group_norm", "aten.mul"]
    assert steps_of(lambda x: found(x)[:2], x4) == ["aten.native_group_norm", "group_norm"]
    module = sdfastgn.GroupNorm(2, 4, activation="silu")
    assert steps_of(module, x4) == ["group_norm"]


# ---- means of cells


@pytest.mark.parametrize(
    ("call", "x"),
    [
        (lambda x: F.avg_pool2d(x, 2), x4),
        (lambda x: F.avg_pool2d(x, (3, 2), stride=(3, 2)), x4),
        (lambda x: F.avg_pool2d(x, (4, 3)), x4),
        (lambda x: F.avg_pool3d(x, (1, 2, 4)), x5),
        (lambda x: F.avg_pool3d(x, 2, stride=2), x5.double()),
        (lambda x: F.avg_pool3d(F.pad(x, (0, 1, 0, 1)), (1, 2, 2)), x5),
        (lambda x: F.avg_pool2d(F.pad(x, (0, 1, 0, 1), mode="replicate"), 2), x4),
    ],
)
def test_means_of_cells_are_means_of_views(call, x):
    assert steps_of(call, x) == ["aten.mean"]


@pytest.mark.parametrize("pads", [(1, 1), (0, 2), (0, 1, 1, 0), (-2, 1)])
def test_a_pad_that_a_cell_reads_stays(pads):
    found = steps_of(lambda x: F.avg_pool2d(F.pad(x, pads), 2), x4)
    assert found[0] in ("pad", "aten.constant_pad_nd")
    assert found[1:] == ["aten.mean"]


@pytest.mark.parametrize(
    ("call", "x"),
    [
        (lambda x: F.avg_pool2d(x, 2, stride=1), x4),
        (lambda x: F.avg_pool2d(x, 2, stride=(2, 3)), x4),
        (lambda x: F.avg_pool2d(x, 2, padding=1), x4),
        (lambda x: F.avg_pool2d(x, 2, padding=1, count_include_pad=False), x4),
        (lambda x: F.avg_pool2d(x, (4, 3), ceil_mode=True), x4),
        (lambda x: F.avg_pool2d(x, 2, divisor_override=3), x4),
        (lambda x: F.avg_pool2d(x, 2), x3),
        (lambda x: F.avg_pool2d(x, 2), torch.randint(0, 9, (1, 2, 4, 4))),
        (lambda x: F.max_pool2d(x, 2), x4),
    ],
)
def test_other_pools_stay(call, x):
    assert "aten.mean" not in steps_of(call, x)


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: torch.tril(x.new_ones(6, 6)).bool(),
        lambda x: torch.ones(6, 6, dtype=torch.bool).tril()[None],
        lambda x: torch.full((1, 6, 6), True).tril().expand(2, 6, 6),
    ],
)
def test_a_mask_that_is_a_triangle_is_causal_attention(mask):
    plan = checked(lambda x: F.scaled_dot_product_attention(x, x, x, mask(x)), x3)
    assert plan.steps == ["attention"]
    (step,) = [n for n in plan.graph.nodes if n.target is steps.attention]
    assert step.args[3:5] == (None, True)


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: torch.tril(x.new_ones(6, 6)),  # it is added
        lambda x: torch.tril(x.new_ones(6, 6), 1).bool(),
        lambda x: torch.triu(x.new_ones(6, 6)).bool().flip(0, 1).mT,
        lambda x: torch.tril(x.new_ones(2, 6)).bool().any(0).expand(6, 6),
        lambda x: (torch.tril(x.new_ones(6, 6)) * x[0, :, :6]).abs().bool(),
    ],
)
def test_masks_that_are_no_triangle_of_ones_stay(mask):
    plan = checked(lambda x: F.scaled_dot_product_attention(x, x, x, mask(x)), x3)
    (step,) = [n for n in plan.graph.nodes if n.target is steps.attention]
    assert step.args[3] is not None


def of_frames(x, positions, hidden=-math.inf, dtype=None, keys=None):
    """A mask that shows a frame of ``positions`` tokens itself and earlier frames, filled as a model does."""
    S = x.shape[2]
    mask = torch.full((S, keys or S), hidden, dtype=dtype or x.dtype)
    for i in range(S):
        mask[i, : (i // positions + 1) * positions] = 0 if hidden else 1
    return mask


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: of_frames(x, 24),
        lambda x: of_frames(x, 24)[None].expand(2, 1, -1, -1),
        lambda x: of_frames(x, 24, False, torch.bool),
    ],
)
def test_each_frame_attends_to_the_frames_that_it_sees(mask):
    q, k, v = (torch.randn(2, 1, 72, D) for D in (5, 5, 3))
    plan = checked(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask(q), scale=0.3), q, k, v)
    assert plan.steps == ["attention"] * 3 + ["cat"]
    found = [(n.args[0].meta["shape"][2], n.args[1].meta["shape"][2]) for n in plan.calls[:3]]
    assert found == [(24, 24), (24, 48), (24, 72)]
    assert all(n.args[3] is None for n in plan.calls[:3])


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: of_frames(x, 4),  # attention would run 18 times
        lambda x: of_frames(x, 24, -5.0),
        lambda x: of_frames(x, 24, False),  # 1 is added to what is seen, and nothing to the rest
        lambda x: of_frames(x, 24).flip(1),
        lambda x: of_frames(x, 24) * 0.5 + x[0, 0, :, :1],
        lambda x: torch.cat([of_frames(x, 24)[24:], of_frames(x, 24)[:24]]) * 2,
        lambda x: of_frames(x, 24).bool(),  # it shows what of_frames hides
        lambda x: of_frames(x, 24).bool().to(x.dtype),
        lambda x: of_frames(x, 24, keys=1),  # one number for all keys
    ],
)
def test_other_masks_of_frames_stay(mask):
    x = torch.randn(1, 1, 72, 5)
    plan = checked(lambda x: F.scaled_dot_product_attention(x, x, x, mask(x)), x)
    (step,) = [n for n in plan.graph.nodes if n.target is steps.attention]
    assert step.args[3] is not None


@pytest.mark.parametrize("size", [(1, 72, 5), (72, 5)])
def test_keys_of_all_samples_have_a_mask_of_frames(size):
    """They have fewer axes than the queries."""

    def call(q, k):
        return F.scaled_dot_product_attention(q, k, k, of_frames(q, 24))

    assert steps_of(call, torch.randn(2, 1, 72, 5), torch.randn(size)).count("attention") == 1


def test_a_mask_of_frames_beside_a_triangle_stays():
    def call(x):
        return F.scaled_dot_product_attention(x, x, x, of_frames(x, 24), is_causal=True)

    assert steps_of(call, torch.randn(1, 1, 72, 5)).count("attention") == 1


def test_a_mask_of_frames_needs_the_memory_of_a_row_for_each_frame(monkeypatch):
    monkeypatch.setattr("sdfastgn.plans.trace.fills._MOST_MEMORY", 3 * 72 * 4)
    x = torch.randn(1, 1, 72, 5)
    plan = checked(lambda x: F.scaled_dot_product_attention(x, x, x, of_frames(x, 24)), x)
    assert plan.steps == ["attention"] * 3 + ["cat"]


def test_a_mask_with_a_hole_stays():
    def call(x):
        mask = of_frames(x, 24)
        mask[30, 20] = -math.inf
        return F.scaled_dot_product_attention(x, x, x, mask)

    assert steps_of(call, torch.randn(1, 1, 72, 5)).count("attention") == 1


def test_a_triangle_of_other_sizes_stays():
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[:, :4]
    checked(lambda x: F.scaled_dot_product_attention(x, x[:, :4], x[:, :4], mask), x3)
