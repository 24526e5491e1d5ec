"""Linear layers of a time embedding: when one kernel computes activation, product and biases."""

import copy

import pytest
import torch
from torch import nn

from sdfastgn.patches.layers.linear import fused_linear, linear_of
from tests.kernels import samples
from tests.patches import cases, changes
from tests.patches.cases import WHERE, agree, image, noise, resnet
from tests.patches.cases import random_twins as twins
from tests.patches.cases import resnet_inputs as inputs

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]


@pytest.fixture
def ran(launches):
    """(rows of x, rows of the weight, activation, number of biases) of each product so far."""
    return lambda: [
        (
            pointers["x_ptr"].shape[0],
            pointers["weight_ptr"].shape[0],
            launch.constants["ACTIVATION"],
            sum(pointers[name] is not None for name in ("bias_ptr", "extra_bias_ptr")),
        )
        for name, launch, pointers in launches
        if name == "act_linear"
    ]


# --- ResNet blocks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "product"),
    [
        pytest.param({}, (2, 6, "silu", 2), id="shift"),
        pytest.param({"time_embedding_norm": "scale_shift"}, (2, 12, "silu", 1), id="scale-shift"),
        pytest.param({"skip_time_act": True}, (2, 6, "identity", 2), id="skip-time-act"),
        pytest.param({"non_linearity": "gelu", "up": True}, (2, 6, "gelu", 2), id="gelu-up"),
    ],
)
def test_a_resnet_projects_in_one_kernel(options, product, ran, linear_calls):
    fused, stock = twins(resnet(**options))
    y = fused(*inputs())
    assert not linear_calls
    assert ran() == [product]
    agree(y, stock(*inputs()), 5e-5)


def test_a_resnet_is_no_less_exact_than_stock(ran):
    """Not tested in bfloat16, because the interpreter truncates instead of rounding."""
    fused, stock = twins(resnet(time_embedding_norm="scale_shift"), torch.float16)
    x, embedding = inputs(dtype=torch.float16)
    args = x, 4 * embedding  # so large that the projection's error is most of the block's
    expected = copy.deepcopy(stock).double()(*(t.double() for t in args))
    assert samples.error(fused(*args), expected) <= 1.05 * samples.error(stock(*args), expected)
    assert len(ran()) == 1


@pytest.mark.parametrize(
    ("name", "change", "biases"),
    [
        pytest.param("time_emb_proj", changes.hooked, [], id="projection-hook"),
        pytest.param("time_emb_proj", changes.pre_hooked, [], id="projection-pre-hook"),
        pytest.param("time_emb_proj", changes.overridden, [], id="projection-override"),
        pytest.param("nonlinearity", changes.hooked, [], id="activation"),
        pytest.param("conv1", changes.hooked, [1], id="convolution"),
        pytest.param("norm2", changes.overridden, [1], id="norm"),
    ],
)
def test_what_is_watched_is_called(name, biases, change, ran):
    """``biases``: the number of biases of each product that still runs in one kernel."""
    fused, stock = twins(resnet())
    for module in (fused, stock):
        change(module, name)
    agree(fused(*inputs()), stock(*inputs()), 5e-5)
    assert [product[-1] for product in ran()] == biases


@pytest.mark.parametrize("target", ["time_emb_proj", "conv1"])
def test_lora(target, ran, launches):
    """The next call merges it, and the products run as without it."""
    fused, stock = twins(resnet())
    before = fused(*inputs())
    launches.clear()
    for module in (fused, stock):
        changes.lora(module, target)
        module.to(WHERE["device"])
    y = fused(*inputs())
    agree(y, stock(*inputs()), 5e-5)
    assert not torch.allclose(y, before, atol=1e-3)
    assert [product[-1] for product in ran()] == [2]


def test_biases_are_those_of_the_call(ran):
    fused, stock = twins(resnet())
    fused(*inputs())
    for module in (fused, stock):
        module.conv1.bias.add_(1)
        module.time_emb_proj.bias = nn.Parameter(module.time_emb_proj.bias * 2)
        module.time_emb_proj.weight.data = module.time_emb_proj.weight.data.neg()
    agree(fused(*inputs()), stock(*inputs()), 5e-5)
    assert len(ran()) == 2


@pytest.mark.parametrize(("N", "products"), [(1, 1), (16, 1), (17, 0)])
def test_many_rows_are_a_matrix_product(N, products, ran):
    linear, act, x = nn.Linear(8, 6).to(WHERE["device"]), nn.SiLU(), noise(N, 8)
    agree(linear_of(linear, act, x), linear(act(x)))
    assert len(ran()) == products


def test_one_embedding_for_all_images(ran):
    """Upstream broadcasts the embedding. Only its own activation, product and bias are fused."""
    fused, stock = twins(resnet())
    x = inputs()[0]
    agree(fused(x, noise(1, 8)), stock(x, noise(1, 8)), 5e-5)
    assert ran() == [(1, 6, "silu", 1)]


@pytest.mark.parametrize("norm", ["default", "scale_shift"])
def test_an_embedding_without_a_projection_broadcasts_as_stocks(norm):
    """Such a matrix is added along rows and columns of the image, although it has a number per channel."""
    fused, stock = twins(resnet(temb_channels=None, time_embedding_norm=norm))
    width = 12 if norm == "scale_shift" else 6
    args = image(2, 4, 2, 6), noise(2, width)
    agree(fused(*args), stock(*args))


def test_another_dtype_of_the_embedding_is_stocks_error(ran):
    for module in twins(resnet()):
        with pytest.raises(RuntimeError, match="dtype"):
            module(inputs()[0], noise(2, 8, dtype=torch.float16))
    assert not ran()


def test_autocast_and_gradients_run_the_modules(ran, linear_calls):
    fused, stock = twins(resnet())
    args = inputs()
    with torch.autocast(WHERE["device"], torch.bfloat16):
        torch.testing.assert_close(fused(*args).float(), stock(*args).float(), atol=0.06, rtol=0.02)
    args[0].requires_grad_()  # stock PyTorch crashes without
    cases.same_gradients((fused, stock), *args)
    assert not ran()
    assert sum(a is b for a in linear_calls for b in fused.modules()) == 2


# --- what is fused --------------------------------------------------------------------------------


def test_a_bias_of_another_size_or_dtype_is_not_added():
    linear, x = nn.Linear(16, 5).to(WHERE["device"]), noise(2, 16)
    assert fused_linear(linear, None, x, noise(5)) is not None
    for extra in (noise(4), noise(1), noise(5, dtype=torch.float16)):
        assert fused_linear(linear, None, x, extra) is None


def test_another_activation_rank_or_size_is_not_fused():
    linear, x = nn.Linear(16, 5).to(WHERE["device"]), noise(2, 16)
    assert fused_linear(linear, nn.SiLU(), x) is not None
    assert fused_linear(linear, nn.Tanh(), x) is None
    for other in (noise(2, 16, 16), noise(2, 15)):
        assert fused_linear(linear, None, other) is None


def test_a_weight_that_is_not_contiguous_is_not_copied_at_each_call():
    linear, x = nn.Linear(16, 16).to(WHERE["device"]), noise(2, 16)
    linear.weight.data = linear.weight.data.T
    assert fused_linear(linear, None, x) is None
    assert torch.equal(linear_of(linear, None, x), linear(x))


@pytest.mark.gpu
def test_a_resnet_is_captured():
    fused, _ = twins(resnet(), torch.float16)
    x, temb = inputs(dtype=torch.float16)
    fused(x, temb)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fused(x, temb)
    temb.mul_(-2)
    graph.replay()
    assert torch.equal(y, fused(x, temb))
