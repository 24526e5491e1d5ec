"""Norms of channels in all spellings, what goes into a norm, and near misses."""

import pytest
import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.common import dispatch
from sdfastgn.plans.run import steps
from tests.plans.rewrite.rewriting import checked, steps_of

x4 = torch.randn(2, 6, 3, 5)
x5 = torch.randn(1, 6, 2, 3, 5)
W, B = torch.rand(6) + 0.5, torch.randn(6)
POSITIONS = torch.randn(6, 3, 5)
INTEGERS = torch.arange(6).view(6, 1, 1)
HALF = torch.bfloat16
W_HALF = W.to(HALF)
WEIGHT = torch.randn(6, 6, 1, 1)


def column(t, rank=4):
    return t.view(6, *[1] * (rank - 2))


def rms(x, dim=1, eps=1e-3):
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps)


def cast_rms(x, dim=1):
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(dim, keepdim=True) + 1e-3)).to(x.dtype)


@pytest.mark.parametrize(
    ("call", "x"),
    [
        (lambda x: F.normalize(x, dim=1), x4),
        (lambda x: F.normalize(x, dim=1, eps=0.5) * 6**0.5, x4),
        (lambda x: F.normalize(x, dim=1) * 6**0.5 * column(W) + column(B), x4),
        (lambda x: F.normalize(x, dim=1) * column(W, 5) * 6**0.5 + 0.0, x5),
        (lambda x: F.normalize(x, dim=-4) / 0.4, x5),
        (lambda x: F.normalize(x.movedim(1, -1), dim=-1) * W + B, x4),
        (lambda x: rms(x), x4),
        (lambda x: column(W) * rms(x) + column(B), x4),
        (lambda x: x / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-3), x5),
        (lambda x: rms(x.movedim(1, -1), -1) * W, x5),
        (lambda x: cast_rms(x), x4.to(HALF)),
        (lambda x: cast_rms(x) * column(W_HALF), x4.to(HALF)),
        (lambda x: (cast_rms(x.float()) * column(W)).to(HALF), x4.to(HALF)),
        (lambda x: F.rms_norm(x.movedim(1, -1), (6,), W, 1e-3), x4),
        (lambda x: F.rms_norm(x.movedim(1, -1), (6,)), x5),
        (lambda x: F.rms_norm(x.movedim(1, -1).float(), (6,), W, 1e-3).to(HALF), x4.to(HALF)),
        (lambda x: F.rms_norm(x.movedim(1, -1), (6,), W, 1e-3) * 2 + B, x4),
        (lambda x: F.rms_norm(x.view(2, 5, 3, 6).transpose(1, 2), (6,), W, 1e-3), x4),
    ],
)
def test_norms_of_channels(call, x):
    assert steps_of(call, x) == ["channel_norm"]


def test_permutations_of_other_axes_stay_behind_the_norm():
    plan = checked(lambda x: F.rms_norm(x.transpose(1, 2), (6,), W, 1e-3), torch.randn(2, 5, 3, 6))
    norm = plan.only(steps.channel_norm)
    assert norm.args[0].args[1] == (0, 3, 1, 2)  # the channels of each head, as they lie in memory


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.normalize(x, dim=2),
        lambda x: F.normalize(x, p=1, dim=1),
        lambda x: F.normalize(x, dim=(1, 2)),
        lambda x: x / x.exp().norm(dim=1, keepdim=True).clamp_min(1e-6).expand_as(x),
        lambda x: F.normalize(x.view(12, 3, 5), dim=1),
        lambda x: F.normalize(x.double(), dim=1),
        lambda x: rms(x, 2),
        lambda x: rms(x, (1, 2)),
        lambda x: x * torch.rsqrt(x.mean(1, keepdim=True).exp() + 1e-3),
        lambda x: x * torch.rsqrt((x * x.exp()).abs().mean(1, keepdim=True) + 1e-3),
        lambda x: x.exp() * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-3),
        lambda x: torch.sqrt((x * x).mean(1, keepdim=True) + 1e-3) / x,
        lambda x: x * torch.sqrt((x * x).mean(1, keepdim=True) + 1e-3),
        lambda x: x / torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-3),
        lambda x: x * torch.rsqrt(torch.add((x * x).mean(1, keepdim=True), 0.5, alpha=2)),
        lambda x: x[:, :, :, :1] * torch.rsqrt((x[:, :, :, :1] ** 2).mean(1)[:, None, :, 0] + 1).unsqueeze(3),
        lambda x: F.rms_norm(x, (3, 5)),
        lambda x: F.rms_norm(x.to(HALF), (5,)),
        lambda x: F.rms_norm(x.view(12, 3, 5), (5,)),
        lambda x: x * torch.rsqrt((x.to(HALF).float() ** 2).mean(1, keepdim=True) + 1e-3),
    ],
)
def test_other_norms_stay(call):
    assert "channel_norm" not in steps_of(call, x4)


@pytest.mark.parametrize(
    ("call", "rest"),
    [
        (lambda x: (F.normalize(x, dim=1) + column(B)) * 2, ["aten.mul"]),
        (lambda x: (F.normalize(x, dim=1) + column(B)) * column(W), ["aten.mul"]),
        (lambda x: (F.normalize(x, dim=1) + column(B)) + column(W), ["aten.add"]),
        (lambda x: F.normalize(x, dim=1) * column(B) * column(W), ["aten.mul"]),
        (lambda x: torch.add(F.normalize(x, dim=1), column(B), alpha=2), ["aten.add"]),
        (lambda x: F.normalize(x, dim=1) - column(B), ["aten.sub"]),
        (lambda x: F.normalize(x, dim=1) + 1, ["aten.add"]),
        (lambda x: F.normalize(x, dim=1) * x[:, :1], ["aten.mul"]),
        (lambda x: F.normalize(x, dim=1) * POSITIONS, ["aten.mul"]),
        (lambda x: F.normalize(x, dim=1) * INTEGERS, ["aten.mul"]),
        (lambda x: F.normalize(x[:, :1], dim=1) * column(W), ["aten.mul"]),
        (lambda x: F.normalize(x[:, :1], dim=1) + column(B), ["aten.add"]),
        (lambda x: F.normalize(x, dim=1) * column(x.sum((0, 2, 3))), ["aten.sum", "aten.mul"]),
        (lambda x: F.normalize(x, dim=1) * B[:5], ["aten.mul"]),
        (lambda x: F.normalize(x, dim=1) * B[:3, None], ["aten.mul"]),
        (lambda x: (F.normalize(x, dim=1) * 9).int() * 2.0, ["cast", "aten.mul"]),
        (lambda x: column(B) / F.normalize(x, dim=1), ["aten.div"]),
        (lambda x: F.rms_norm(x.movedim(1, -1), (6,), W, 1e-3) * W, ["aten.mul"]),
    ],
)
def test_what_stays_behind_a_norm(call, rest):
    assert steps_of(call, x4) == ["channel_norm", *rest]


def test_a_factor_for_each_row_is_no_weight():
    square = torch.randn(2, 6, 6, 6)
    assert steps_of(lambda x: F.normalize(x, dim=1) * W.view(6, 1), square) == ["channel_norm", "aten.mul"]
    assert steps_of(lambda x: F.normalize(x, dim=1) * W, square) == ["channel_norm", "aten.mul"]


def test_integers_between_two_factors_round():
    steps = steps_of(lambda x: (F.normalize(x, dim=1) * 9).int().float() * 2, x4)
    assert steps == ["channel_norm", "cast", "cast", "aten.mul"]


def test_a_cast_that_rounds_before_a_norm_stays():
    """From bf16 to fp16 large numbers become infinite, so the norm is zero."""
    big = torch.full((1, 6, 2, 2), 1e6, dtype=HALF)
    plan = checked(lambda x: F.normalize(x.half().float(), dim=1).to(x.dtype), big)
    assert "cast" in plan.steps
    assert not plan(big).nan_to_num().any()


@pytest.mark.parametrize(
    "spelling", [F.silu, F.relu, F.gelu, F.mish, lambda x: F.gelu(x, approximate="tanh")]
)
@pytest.mark.parametrize("norm", [lambda x: F.group_norm(x, 2), lambda x: F.normalize(x, dim=1)])
def test_activations_go_into_norms(spelling, norm):
    assert len(steps_of(lambda x: spelling(norm(x)), x4)) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.silu(F.silu(F.group_norm(x, 2))),
        lambda x: F.silu(F.group_norm(x, 2) * 2),
        lambda x: F.silu(F.layer_norm(x, (5,))),
        lambda x: F.silu(F.group_norm(x, 2).to(HALF)).float(),
        lambda x: F.leaky_relu(F.group_norm(x, 2)),
    ],
)
def test_what_does_not_go_into_norms(call):
    assert len(steps_of(call, x4)) > 1


def test_an_activation_of_a_norm_that_is_read_elsewhere_stays():
    def call(x):
        y = F.group_norm(x, 2)
        return F.silu(y), y * 2

    assert sorted(steps_of(call, x4)) == ["aten.mul", "aten.silu", "group_norm"]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.group_norm(x.float(), 2, W, B).to(x.dtype),
        lambda x: F.group_norm(x.float(), 2, W.to(HALF).float(), B.to(HALF).float()).to(x.dtype),
        lambda x: F.silu(F.group_norm(x.float(), 2)).to(x.dtype),
        lambda x: F.silu(F.group_norm(x.float(), 2).to(x.dtype)),
        lambda x: F.layer_norm(x.float(), (5,), W[:5], B[:5]).to(x.dtype),
    ],
)
def test_norms_in_fp32_of_16_bits(call):
    assert len([s for s in steps_of(call, x4.to(HALF)) if s != "cast"]) == 1
    plan = checked(call, x4.to(HALF))
    norm = plan.calls[-1]
    assert (norm.args[0].op, norm.meta["dtype"]) == ("placeholder", HALF)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.group_norm(x.float(), 2),
        lambda x: F.group_norm(x.float(), 2).half(),
        lambda x: F.group_norm(x.double(), 2).to(x.dtype),
        lambda x: F.group_norm(x.half(), 2).to(x.dtype),
    ],
)
def test_norms_between_other_casts_stay(call):
    assert "cast" in steps_of(call, x4.to(HALF))


def test_a_norm_in_fp32_that_is_read_elsewhere_stays():
    def call(x):
        y = F.group_norm(x.float(), 2)
        return y.to(x.dtype), y * 2

    assert sorted(steps_of(call, x4.to(HALF))) == ["aten.mul", "cast", "cast", "group_norm"]


# ---- scales and shifts of each sample


def of_embedding(e):
    """Scale and shift of images, as diffusers' residual blocks cut them out of an embedding."""
    return e[:, :, None, None].chunk(2, 1)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("affine", [(), (W, B)])
@pytest.mark.parametrize(
    "spelling",
    [
        lambda y, s, t: y * (1 + s) + t,
        lambda y, s, t: t + y * (s + 1.0),
        lambda y, s, t: (1 + s) * y + t,
        lambda y, s, t: y * (1 + s.flatten(1))[:, :, None, None] + t,
        lambda y, s, t: F.silu(y * (1 + s) + t),
        lambda y, s, t: F.gelu(y * (1 + s)),
        lambda y, s, t: F.silu(y + t),
    ],
)
def test_scales_and_shifts_go_into_group_norms(spelling, affine, samples):
    def call(x, e):
        return spelling(F.group_norm(x, 3, *affine), *of_embedding(e))

    assert steps_of(call, x4, torch.randn(samples, 12)) == ["group_norm"]


def test_of_videos():
    def call(x, e):
        scale, shift = e[:, :, None, None, None].chunk(2, 1)
        return F.silu(F.group_norm(x, 2) * (1 + scale) + shift)

    assert steps_of(call, torch.randn(2, 6, 4, 3, 5), torch.randn(2, 12)) == ["group_norm"]


def test_of_frames_as_images():
    """The norm goes before the view. Each frame keeps its own scale."""

    def call(x, e):
        scale, shift = of_embedding(e)
        y = F.group_norm(x.transpose(1, 2).flatten(0, 1), 2) * (1 + scale) + shift
        return F.silu(y).unflatten(0, (2, 4)).transpose(1, 2)

    for samples in (8, 1):
        plan = checked(call, torch.randn(2, 6, 4, 3, 5), torch.randn(samples, 12))
        assert plan.steps == ["group_norm"]
        assert plan.only(steps.group_norm).args[8] is True


def test_a_scale_of_videos_is_no_scale_of_frames():
    def call(x, e):
        scale, shift = e[:, :, None, None, None].chunk(2, 1)
        y = F.group_norm(x.transpose(1, 2).flatten(0, 1), 2).unflatten(0, (2, 4)).transpose(1, 2)
        return y * (1 + scale) + shift

    found = steps_of(call, torch.randn(2, 6, 4, 3, 5), torch.randn(2, 12))
    assert sorted(found) == ["aten.add", "aten.add", "aten.mul", "group_norm"]


def test_the_norm_also_adds_what_is_before_it():
    def call(x, e, f):
        scale, shift = of_embedding(e)
        return F.silu(F.group_norm(F.conv2d(x, WEIGHT, B) + f[..., None, None], 2) * (1 + scale) + shift)

    plan = checked(call, x4, torch.randn(2, 12), torch.randn(2, 6))
    assert plan.steps == ["conv", "aten.add", "group_norm"]  # the sum is of the embedding and the bias


def test_a_convolution_of_frames_reads_the_norm():
    """The step that pads frames computes norms, but without scales and shifts."""
    weight = torch.randn(6, 6, 3, 3, 3)

    def call(x, e):
        scale, shift = e[:, :, None, None, None].chunk(2, 1)
        y = F.silu(F.group_norm(x, 2) * (1 + scale) + shift)
        return F.conv3d(F.pad(y, (1, 1, 1, 1, 2, 0), mode="replicate"), weight)

    assert steps_of(call, torch.randn(2, 6, 4, 3, 5), torch.randn(2, 12)) == ["group_norm", "frames", "conv"]


@pytest.mark.parametrize("dtype", [torch.float16, HALF])
def test_they_are_rounded_once(dtype):
    """The step is as exact as eager, or more so."""

    def call(x, e):
        scale, shift = of_embedding(e)
        return F.silu(F.group_norm(x, 2) * (1 + scale) + shift)

    x, e = torch.randn(2, 6, 33, 17).to(dtype), torch.randn(2, 12).to(dtype)
    plan = checked(call, x, e)
    assert plan.steps == ["group_norm"]
    exact = call(x.double(), e.double())
    ours, eager = ((y.double() - exact).norm() for y in (plan(x, e), call(x, e)))
    assert ours <= eager


def test_a_norm_in_fp32_of_16_bits_with_scale_and_shift():
    def call(x, e):
        scale, shift = of_embedding(e)
        return F.silu(F.group_norm(x.float(), 2).to(x.dtype) * (1 + scale) + shift)

    assert steps_of(call, x4.to(HALF), torch.randn(2, 12, dtype=HALF)) == ["group_norm"]


@pytest.mark.parametrize(
    ("call", "left"),
    [
        (lambda y, s, t: y * s + t, ["mul", "add"]),
        (lambda y, s, t: y * (2 + s) + t, ["add", "mul", "add"]),
        (lambda y, s, t: y * (1 - s), ["rsub", "mul"]),
        (lambda y, s, t: y * torch.add(s, 1, alpha=2), ["add", "mul"]),
        (lambda y, s, t: torch.add(y, t, alpha=2), ["add"]),
        (lambda y, s, t: (y + t) * (1 + s), ["add", "mul"]),
        (lambda y, s, t: y * (1 + s) * (1 + t), ["add", "mul"]),
        (lambda y, s, t: y * (1 + s) + t + s, ["add"]),
        (lambda y, s, t: F.silu(y) * (1 + s) + t, ["add", "mul", "add"]),
        (lambda y, s, t: (y * (1 + s) + t, y), ["add", "mul", "add"]),  # others read the norm
        (lambda y, s, t: y * (1 + y.mean((2, 3), keepdim=True)), ["mean", "add", "mul"]),
        (lambda y, s, t: (z := y * (1 + s), z + t), ["add"]),
        (lambda y, s, t: y * (1 + s[:, :3].repeat(1, 2, 1, 1)[:, :, :, :1].expand(2, 6, 1, 5)), None),
        (lambda y, s, t: y * (1 + s.double()), None),
        (lambda y, s, t: y.double() * (1 + s), None),
        (lambda y, s, t: y[:1] * (1 + s), None),
    ],
)
def test_other_products_and_sums_stay(call, left):
    def whole(x, e):
        return call(F.group_norm(x, 2), *of_embedding(e))

    found = [s.removeprefix("aten.") for s in steps_of(whole, x4, torch.randn(2, 12))]
    assert left is None or sorted(found) == sorted(["group_norm", *left])
    assert len(found) > 1


@pytest.mark.parametrize("shape", [(6, 1), (1, 1, 6, 1), (2, 1, 1, 1), (2, 6, 6, 1), (6,), (1,)])
def test_numbers_along_other_axes_stay(shape):
    square = torch.randn(2, 6, 6, 6)
    found = steps_of(lambda x, t: F.group_norm(x, 2) * (1 + t) + t, square, torch.randn(shape))
    assert {"group_norm", "aten.mul", "aten.add"} == set(found)


# ---- this package's own modules


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norms_of_this_package_are_one_step(affine, dtype):
    norm = sdfastgn.LayerNorm(6, elementwise_affine=affine).to(dtype)
    x = torch.randn(2, 5, 6, dtype=dtype)
    with dispatch.stock_code():  # as in the traces of ``PlannedForward``
        assert steps_of(norm, x) == ["layer_norm"]


def test_sums_of_such_layer_norms_too():
    norm = sdfastgn.LayerNorm(6)
    with dispatch.stock_code():
        found = steps_of(lambda x, y: norm(x, y), torch.randn(2, 5, 6), torch.randn(2, 5, 6))
    assert found == ["add_layer_norm"]
