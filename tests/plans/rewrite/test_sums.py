"""Biases, residuals and embeddings go into one sum, or into the norm that reads them."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.plans.rewrite.nodes import has
from sdfastgn.plans.run import steps
from tests.plans.rewrite.rewriting import Rewritten, checked, draw_exact, steps_of

# ---- residuals


@pytest.mark.parametrize("add", [lambda x, y: x + y, lambda x, y: y + x])
def test_a_residual_is_added_with_the_bias(conv, image, add):
    plan = checked(lambda x: add(x, conv(x)), image)
    assert plan.steps == ["conv", "add"]
    h, residual, bias, divisor, emits = plan.only(steps.add).args
    assert has(h, steps.conv) or has(residual, steps.conv)
    assert bias.op == "placeholder"
    assert (divisor, emits) == (1.0, False)


def test_a_divisor_goes_into_the_sum(conv, image):
    with_bias = checked(lambda x: (x + conv(x)) / 2.5, image)
    without = checked(lambda x: (x + F.relu(x)) / 2, image)
    assert with_bias.steps == ["conv", "add"]
    assert without.steps == ["aten.relu", "add"]
    assert [g.only(steps.add).args[3] for g in (with_bias, without)] == [2.5, 2.0]


def test_two_biases_are_added_first(conv, image):
    w, b = torch.randn(4, 4, 1, 1), torch.randn(4)
    plan = checked(lambda x: F.conv2d(x, w, b) + conv(x), image)
    assert sorted(plan.steps) == ["add", "aten.add", "conv", "conv"]


def test_sums_without_bias_and_divisor_stay(image):
    assert steps_of(lambda x: x + F.relu(x), image) == ["aten.relu", "aten.add"]


@pytest.fixture
def exact_conv():
    """Like ``conv``. With inputs of ``draw_exact`` no CPU rounds its result, and no sum with it is 0."""
    w, b = draw_exact((4, 4, 3, 3)), draw_exact((4,), bits=10)
    return lambda x: F.conv2d(x, w, b, padding=1)


def test_other_sums_stay(exact_conv, image):
    for call in (
        lambda x: torch.add(x, exact_conv(x), alpha=2),
        lambda x: x[:, :, :1] + exact_conv(x),
        lambda x: x[:1] + exact_conv(x),
        lambda x: exact_conv(x) + 2.5,
        lambda x: x.double() + exact_conv(x),
        lambda x: (y := exact_conv(x)) + y,
        lambda x: x - exact_conv(x),
    ):
        found = steps_of(call, image, draw=draw_exact)
        assert "add" not in found
        assert "add_bias_" in found


def test_other_divisors_stay(exact_conv, image):
    for call in (
        lambda x: torch.div(x + exact_conv(x), 0.5, rounding_mode="floor"),
        lambda x: (x + exact_conv(x)) / x[:, :1],
        lambda x: 2.0 / (x + exact_conv(x)),
        lambda x: (x.to(torch.int32) + 1) / 2.0,
    ):
        assert all(n.args[3] == 1.0 for n in checked(call, image, draw=draw_exact).all(steps.add))
    shared = checked(lambda x: (y := x + exact_conv(x), y / 2.0), image)
    assert shared.only(steps.add).args[3] == 1.0


def test_a_division_by_zero_stays(conv):
    x = torch.randn(1, 4, 3, 3)
    plan = Rewritten(lambda x: (x + conv(x)) / 0.0, x)
    assert plan.only(steps.add).args[3] == 1.0
    assert torch.equal(plan(x), (x + conv(x)) / 0.0)


def test_a_bias_that_is_read_twice_stays(conv, image):
    plan = checked(lambda x: (y := conv(x), x + y), image)
    assert plan.steps == ["conv", "add_bias_", "aten.add"]
    divided = checked(lambda x: (y := conv(x), (x + y) / 2.0), image)
    assert divided.steps == ["conv", "add_bias_", "add"]
    assert divided.only(steps.add).args[2] is None


def test_empty_images(conv):
    assert "add" not in steps_of(lambda x: x[:0] + conv(x[:0]), torch.randn(1, 4, 3, 3))


def test_sums_in_fp64_stay(image):
    w, b = torch.randn(4, 4, 3, 3).double(), torch.randn(4).double()
    assert "add" not in steps_of(lambda x: (x + F.conv2d(x, w, b, padding=1)) / 2.0, image.double())


# ---- biases behind views


def test_a_bias_moves_behind_views():
    """Frames that are convolved as images, and added to a video."""
    w, b = torch.randn(4, 4, 3, 3), torch.randn(4)

    def call(x):
        y = F.conv2d(x.transpose(1, 2).flatten(0, 1), w, b, padding=1)
        return x + y.unflatten(0, (2, -1)).transpose(1, 2)

    plan = checked(call, torch.randn(2, 4, 3, 5, 6))
    assert plan.steps == ["conv", "add"]


def test_a_bias_moves_to_the_norm_of_a_video():
    w, b = torch.randn(4, 4, 3, 3), torch.randn(4)

    def call(x):
        y = F.conv2d(x.transpose(1, 2).flatten(0, 1), w, b, padding=1)
        return F.group_norm(y.unflatten(0, (2, -1)).transpose(1, 2), 2)

    plan = checked(call, torch.randn(2, 4, 3, 5, 6))
    assert plan.steps == ["conv", "group_norm"]
    assert plan.only(steps.group_norm).args[6].op == "placeholder"


def test_a_bias_stays_before_other_views(conv):
    """The channels are another axis, parts of an axis, or not clear."""
    for view in (
        lambda y: y.transpose(1, 2),
        lambda y: y.reshape(2, 2, 2, 5, 4),
        lambda y: y.reshape(2, 5, 4, 4),
        lambda y: y.flatten(2),
        lambda y: y.transpose(1, 3),
    ):
        plan = checked(lambda x, view=view: F.relu(view(conv(x))), torch.randn(2, 4, 5, 4))
        added = plan.only(steps.add_bias_)
        assert has(added.args[0], steps.conv)


def test_a_bias_of_one_channel():
    w, b = draw_exact((1, 4, 3, 3)), draw_exact((1,), bits=10)
    call = lambda x: F.relu(F.conv2d(x, w, b, padding=1).transpose(1, 2))  # noqa: E731
    plan = checked(call, torch.randn(2, 4, 1, 4), draw=draw_exact)
    assert "add_bias_" in plan.steps


def test_a_view_that_is_read_twice_has_its_bias_once(conv):
    def call(x):
        y = conv(x)
        return y.flatten(2), x + y.unflatten(0, (2, 1)).squeeze(1)

    assert steps_of(call, torch.randn(2, 4, 5, 6)).count("add_bias_") == 1


# ---- activations

ACTIVATIONS = {
    "silu": F.silu,
    "relu": F.relu,
    "mish": F.mish,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_sum_computes_the_activation_after_it(name, conv, image):
    activation = ACTIVATIONS[name]
    for call, of in (
        (lambda x: activation(conv(x)), ["conv", "add_bias_"]),
        (lambda x: activation(x + conv(x)), ["conv", "add"]),
        (lambda x: activation((x + conv(x)) / 2.5), ["conv", "add"]),
        (lambda x: activation(x + torch.tanh(x)), ["aten.tanh", "add"]),
        (lambda x: activation(conv(x).flatten(2)), ["conv", "add_bias_"]),
    ):
        plan = checked(call, image)
        assert plan.steps == of
        assert plan.calls[-1].args[-1] == name


def test_videos_too():
    w, b = torch.randn(4, 4, 3, 3, 3), torch.randn(4)
    plan = checked(lambda x: F.silu(F.conv3d(x, w, b, padding=1)), torch.randn(2, 4, 3, 5, 6))
    assert plan.steps == ["conv", "add_bias_"]


def test_only_the_first_activation_goes_into_a_sum(conv, image):
    plan = checked(lambda x: F.silu(F.relu(conv(x))), image)
    assert plan.steps == ["conv", "add_bias_", "aten.silu"]
    assert plan.only(steps.add_bias_).args[3] == "relu"


def test_other_activations_stay(conv, image):
    for call in (
        lambda x: (y := conv(x), F.silu(y)),  # others read the sum
        lambda x: (y := x + conv(x), F.silu(y)),
        lambda x: (y := conv(x), F.silu(y) * y),
        lambda x: F.silu(conv(x) * 0.5),  # something is between
        lambda x: F.silu(conv(x)[:, :2]),
        lambda x: F.silu(conv(x).to(torch.bfloat16)).to(x.dtype),
        lambda x: torch.sigmoid(conv(x)),
        lambda x: F.leaky_relu(conv(x)),
        lambda x: F.silu(x[:1] + x),  # a sum that is no residual
        lambda x: F.silu(x + x),
        lambda x: F.silu(torch.add(x, torch.tanh(x), alpha=2)),
    ):
        plan = checked(call, image, tolerance=1e-2 if "bfloat16" in call.__code__.co_names else None)
        assert all(n.args[-1] is False for n in plan.calls if has(n, steps.add, steps.add_bias_))


def test_activations_of_convolutions_without_bias_stay(image):
    w = torch.randn(4, 4, 3, 3)
    assert steps_of(lambda x: F.silu(F.conv2d(x, w)), image) == ["conv", "aten.silu"]


def test_activations_in_other_dtypes_stay():
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    assert steps_of(lambda x: F.silu(x + torch.tanh(x)), x) == ["aten.tanh", "aten.add", "aten.silu"]


# ---- shifts


def test_a_bias_before_a_norm_is_its_shift(conv, image):
    group = checked(lambda x: F.group_norm(conv(x), 2), image)
    channel = checked(lambda x: F.normalize(conv(x), dim=1), image)
    assert (group.steps, channel.steps) == (["conv", "group_norm"], ["conv", "channel_norm"])
    assert group.only(steps.group_norm).args[6].op == "placeholder"
    assert channel.only(steps.channel_norm).args[7].op == "placeholder"


def test_a_bias_before_frames_is_their_shift():
    w, b, v = torch.randn(4, 4, 1, 1, 1), torch.randn(4), torch.randn(4, 4, 3, 3, 3)
    for norm in (lambda x: x, lambda x: F.group_norm(x, 2), lambda x: F.normalize(x, dim=1)):
        plan = checked(
            lambda x, norm=norm: F.conv3d(
                F.pad(norm(F.conv3d(x, w, b)), (1, 1, 1, 1, 2, 0), mode="replicate"), v
            ),
            torch.randn(2, 4, 3, 5, 6),
        )
        assert plan.steps == ["conv", "frames", "conv"]
        assert plan.only(steps.frames).args[7].op == "placeholder"


@pytest.mark.parametrize("samples", [1, 2])
def test_an_embedding_and_a_bias_are_one_shift(conv, image, samples):
    plan = checked(
        lambda x, e: F.silu(F.group_norm(conv(x) + e[:, :, None, None], 2)), image, torch.randn(samples, 4)
    )
    assert plan.steps == ["conv", "aten.add", "group_norm"]
    assert plan.only(steps.group_norm).args[6].meta["shape"] == (samples, 4)


def test_an_embedding_alone_is_a_shift(image):
    plan = checked(lambda x, e: F.group_norm(e[:, :, None, None] + F.relu(x), 2), image, torch.randn(2, 4))
    assert plan.steps == ["aten.relu", "group_norm"]


def test_other_sums_before_norms_stay(conv, image):
    for call, e in (
        (lambda x, e: F.group_norm(conv(x) + e[:, :, :, None], 2), torch.randn(2, 4, 5)),
        (lambda x, e: F.group_norm(conv(x) + e[:, None, None], 2), torch.randn(2, 6)),
        (lambda x, e: F.group_norm(torch.add(conv(x), e[:, :, None, None], alpha=2), 2), torch.randn(2, 4)),
        (lambda x, e: F.group_norm(conv(x) - e[:, :, None, None], 2), torch.randn(2, 4)),
        (lambda x, e: F.group_norm(conv(x) * e[:, :, None, None], 2), torch.randn(2, 4)),
        (lambda x, e: F.normalize(conv(x) + e[:, :, None, None], dim=1), torch.randn(2, 4)),
    ):
        found = steps_of(call, image, e)
        assert "add_bias_" in found


def test_what_is_read_twice_is_no_shift(conv, image):
    """The sum is written over the convolution's result, which a norm with a shift would read."""
    for call in (
        lambda x, e: (y := conv(x), F.group_norm(y, 2)),
        lambda x, e: (y := conv(x), F.group_norm(y, 2), F.group_norm(y, 4)),
        lambda x, e: (y := conv(x), F.normalize(y, dim=1)),
        lambda x, e: (y := conv(x) + e[:, :, None, None], F.group_norm(y, 2)),
    ):
        found = checked(call, image, torch.randn(2, 4))
        assert "add_bias_" in found.steps
        norms = [n for n in found.calls if has(n, steps.group_norm)]
        assert all(n.args[6] is None for n in norms)


def test_an_embedding_of_a_shared_convolution(conv, image):
    """The bias stays with the convolution, and the embedding alone is the shift."""
    plan = checked(
        lambda x, e: (y := conv(x), F.group_norm(y + e[:, :, None, None], 2)), image, torch.randn(2, 4)
    )
    assert plan.steps == ["conv", "add_bias_", "group_norm"]


# ---- embeddings of frames


W5, B5 = torch.randn(4, 4, 3, 1, 1), torch.randn(4)


@pytest.mark.parametrize("bias", [None, B5])
@pytest.mark.parametrize("flip", [False, True])
def test_an_embedding_of_each_frame_is_added_with_the_bias(bias, flip):
    def call(x, t):
        h, t = F.conv3d(x, W5, bias, padding=(1, 0, 0)), t.transpose(1, 2)[..., None, None]
        return F.silu(F.group_norm(t + h if flip else h + t, 2))

    plan = checked(call, torch.randn(2, 4, 3, 5, 6), torch.randn(2, 3, 4))
    assert [name for name in plan.steps if name != "aten.add"] == ["conv", "add_bias_", "group_norm"]
    assert plan.steps.count("aten.add") == (bias is not None)


@pytest.mark.parametrize(
    "call",
    [
        lambda h, t: (h, h + t[:, :, :, None, None]),
        lambda h, t: h + t[:1, :, :, None, None],
        lambda h, t: h + t[:, :1, :, None, None],
        lambda h, t: h.relu() + t[:, :, :, None, None],
        lambda h, t: h + t[:, :, :, None, None].double().float().expand(2, 4, 3, 5, 6),
        lambda h, t: h[:, :, :, 0, 0] + t,
    ],
    ids=["read twice", "of one video", "of one channel", "no convolution", "large", "no video"],
)
def test_other_embeddings_of_frames_stay(call):
    plan = checked(
        lambda x, t: call(F.conv3d(x, W5, padding=(1, 0, 0)), t),
        torch.randn(2, 4, 3, 5, 6),
        torch.randn(2, 4, 3),
    )
    assert "aten.add" in plan.steps
    assert "add_bias_" not in plan.steps
