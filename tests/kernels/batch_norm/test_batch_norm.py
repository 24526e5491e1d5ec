"""The kernels of ``sdfastgn.batch_norm`` against fp64."""

import pytest
import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.batch_norm import config
from sdfastgn.kernels.batch_norm.op import BATCH_NORM, BatchNormCall
from sdfastgn.kernels.batch_norm.plans import BatchNormPlan, Moments
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.plan_cache import PlanCache
from tests.kernels.ops import true_batch_norm
from tests.kernels.samples import (
    BOUNDS,
    DTYPES,
    LAYOUTS,
    error,
    first_alone,
    interpreted,
    kernels,
    make,
    to_layout,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory", "few_registers")

SMALL = [
    pytest.param((2, 37, 3, 9), id="2d"),
    pytest.param((2, 5, 3, 4, 5), id="3d"),
    pytest.param((3, 5, 21), id="1d"),
    pytest.param((7, 19), id="no-positions"),
    pytest.param((7, 19, 1, 1), id="one-position"),
    pytest.param((2, 1, 7, 9), id="one-channel"),
]
SPLIT = [
    pytest.param((3, 34, 19, 23), id="split"),
    # Eight positions side by side, and four.
    pytest.param((5, 3, 32, 24), id="few-channels"),
    pytest.param((2, 10, 24, 39), id="ten-channels"),
    pytest.param((5001, 2), id="no-positions-split"),
    pytest.param((1, 1, 131, 129), id="one-channel-split"),
    pytest.param((3, 17, 5, 11, 9), id="3d-split"),
    pytest.param((27, 11, 6, 7), id="small-images"),
]
GPU_SHAPES = [
    pytest.param((32, 64, 112, 112), id="32x64x112x112"),
    pytest.param((32, 2048, 7, 7), id="32x2048x7x7"),
    pytest.param((8, 2, 320, 320), id="8x2x320x320"),
    pytest.param((128, 1024, 4, 4), id="128x1024x4x4"),
    pytest.param((32, 256, 14, 14), id="32x256x14x14"),
    pytest.param((128, 64, 14, 14), id="128x64x14x14"),
    pytest.param((4, 99, 133, 35), id="odd"),
]
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture
def few_registers(request, monkeypatch):
    """Tensors of SPLIT's sizes take the way of large ones; on real shapes nothing is changed."""
    if request.function is not test_real_shapes_on_the_gpu:
        for name in ("_SMALL_MAX_ELEMENTS", "_SMALL_MAX_ALONE", "_SMALL_BACKWARD_MAX_ELEMENTS"):
            monkeypatch.setattr(config, name, 1024)
        monkeypatch.setattr(config, "_SMALL_PER_WARP", 512)


def of_operands(function):
    """``function`` of what has a gradient, in training if nothing else is said."""

    def call(x, weight=None, bias=None, residual=None, *, training=True, activation="identity", running=None):
        averages = running or (None, None)
        return function(x, *averages, weight, bias, training, 0.1, 1e-4, activation, residual=residual)

    return call


stock, ours = of_operands(true_batch_norm), of_operands(kernels()(sdfastgn.batch_norm))


def operands(shape, dtype, device, layout):
    x, weight, bias = make(shape, dtype, device, layout)
    return x, weight, bias, make(shape, dtype, device, layout, mean=0.0, seed=9)[0]


def check(shape, dtype, device, layout, activation, *, training=True, with_residual=True):
    leaves = [t.requires_grad_() for t in operands(shape, dtype, device, layout)[: 3 + with_residual]]
    # Of mean 0, else the weight's gradient is a small difference of large sums.
    dy = make(shape, dtype, device, layout, mean=0.0, seed=5)[0]
    channels = torch.arange(shape[1], device=device).double()
    moments = None if training else (channels % 7 / 4 + 1, channels % 5 / 8 + 0.5)
    running = moments and tuple(t.float() for t in moments)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    exact = stock(*doubles, training=training, activation=activation, running=moments)
    if activation == "relu":  # at its kink a rounding decides between two right answers
        z = stock(*doubles, training=training, running=moments)
        dy = torch.where(z.abs() < 0.02, 0, dy)
    y = ours(*leaves, training=training, activation=activation, running=running)
    with kernels():
        got = (y, *torch.autograd.grad(y, leaves, dy))
    want = (exact, *torch.autograd.grad(exact, doubles, dy.double()))
    assert got[0].stride() == got[1].stride() == leaves[0].stride()
    for mine, right in zip(got, want, strict=True):
        assert mine.dtype is dtype
        assert off(mine, right.detach(), leaves[0]) < 2 * BOUNDS[dtype]


def off(mine, right, x):
    """The error; of a sum over channels of x, over what such a sum of random terms is at least."""
    if mine.dim() > 1:
        return error(mine, right)
    random = (x.numel() // x.shape[1]) ** 0.5
    return float((mine.double() - right).abs().max() / right.abs().max().clamp(min=random))


def check_far_mean(x):
    """Far above the spread."""
    x = x + 3e3
    mine, eager, exact = ours(x), stock(x), stock(x.double())
    one_rounding = exact.abs().max() * torch.finfo(torch.float32).eps
    assert (mine - exact).abs().max() <= 2 * (eager - exact).abs().max() + one_rounding


def test_the_shapes_take_both_ways():
    for params, is_small in ((SMALL, True), (SPLIT, False)):
        for param in params:
            for layout in LAYOUTS:
                x = to_layout(torch.empty(param.values[0]), layout)
                plan = BatchNormPlan(BatchNormCall(x, *[None] * 5, 1e-5, 0.0, "identity"))
                assert (plan.small is not None) is is_small, param.id


@pytest.mark.drawn(5)
@each_layout
@pytest.mark.parametrize("shape", SMALL + SPLIT)
def test_forward_and_backward_in_training(shape, layout, device):
    check(shape, torch.float32, device, layout, "silu")


@each_layout
@pytest.mark.parametrize("shape", [SMALL[0], SPLIT[0], SPLIT[1]])
@pytest.mark.parametrize("activation", first_alone(["relu", "identity", "gelu"]))
def test_forward_and_backward_in_eval(shape, activation, layout, device):
    check(shape, torch.float32, device, layout, activation, training=False)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(2, 24, 3, 9), (2, 24, 13, 17)], ids=["small", "split"])
def test_every_activation_and_dtype(shape, activation, dtype, device):
    check(shape, dtype, device, "channels_last", activation)
    check(shape, dtype, device, "channels_last", activation, with_residual=False)


def test_the_backward_in_eval_takes_the_averages_of_the_forward(device):
    x, weight, bias = make((3, 5, 6, 7), device=device)
    running = torch.zeros(5, device=device), torch.ones(5, device=device)
    x.requires_grad_()
    (want,) = torch.autograd.grad(ours(x, weight, bias, training=False, running=running).square().sum(), x)
    loss = ours(x, weight, bias, training=False, running=running).square().sum()
    for average in running:
        average.add_(1)
    (got,) = torch.autograd.grad(loss, x)
    assert torch.equal(got, want)


@each_layout
@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (2, 6, 23, 25)], ids=["small", "split"])
def test_in_eval_an_infinite_input_does_not_reach_the_gradient(shape, layout, device):
    x, weight, bias, dy = operands(shape, torch.float32, device, layout)
    x[0, 3, 2, 2] = float("inf")
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    ones = torch.ones(6, device=device)
    y = ours(*leaves, training=False, running=(ones, ones))
    with kernels():
        dx, _, dbias = torch.autograd.grad(y, leaves, dy)
    torch.testing.assert_close(dx, dy * weight.view(-1, 1, 1) / (1 + 1e-4) ** 0.5)
    torch.testing.assert_close(dbias, dy.sum((0, 2, 3)), atol=1e-4, rtol=1e-5)


@pytest.mark.drawn(1)
@each_layout
@pytest.mark.multiprocessors(1)
@pytest.mark.parametrize("shape", [(2, 64, 48, 32), (3, 20, 37, 29)], ids=["whole", "odd"])
def test_chunks_of_several_tiles(shape, layout, device):
    check(shape, torch.float32, device, layout, "silu")


@pytest.mark.drawn(1)
@each_layout
@pytest.mark.parametrize("shape", [(3, 18, 19, 23), (3, 3, 24, 24)], ids=["many", "few-channels"])
def test_merges_of_several_tiles(shape, layout, device, monkeypatch):
    """In the forward and in the backward; also of equal values, and with a mean far above the spread."""
    monkeypatch.setattr(config, "_MERGE_TILE", 4)
    x = make(shape, device=device, layout=layout)[0]
    assert Moments(x)._merge.constants["LOOP"]
    check(shape, torch.float32, device, layout, "silu")
    assert not ours(torch.full_like(x, 0.1)).any()
    check_far_mean(x)


@pytest.mark.gpu
@each_layout
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_real_shapes_on_the_gpu(shape, dtype, layout):
    check(shape, dtype, "cuda", layout, "relu")


WANTED = [(True, *rest) for rest in ((False,) * 3, (True, False, False), (False, False, True))] + [
    (False, *rest) for rest in ((True, False, False), (False, False, True), (False, True, True))
]


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("wanted", WANTED, ids=str)
@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (2, 6, 23, 25)], ids=["small", "split"])
def test_some_gradients_alone(shape, wanted, training, device):
    """Each leaves out other kernels."""
    tensors = operands(shape, torch.float32, device, "channels_last")
    dy = make(shape, device=device, mean=0.0, seed=5)[0]
    ones = torch.ones(shape[1], device=device)

    def grads(call, dtype):
        leaves = [t.detach().to(dtype).requires_grad_(on) for t, on in zip(tensors, wanted, strict=True)]
        running = None if training else (ones.to(dtype),) * 2
        y = call(*leaves, training=training, activation="silu", running=running)
        with kernels():
            return torch.autograd.grad(y, [t for t in leaves if t.requires_grad], dy.to(dtype))

    for mine, right in zip(grads(ours, torch.float32), grads(stock, torch.float64), strict=True):
        assert error(mine, right) < 2 * BOUNDS[torch.float32]


@each_layout
@pytest.mark.parametrize("size", [1.0, 1e5], ids=["dy-of-1", "dy-beyond-fp16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (2, 6, 23, 25)], ids=["small", "split"])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, under the interpreter
def test_a_residual_in_fewer_bits_does_not_round_the_gradient_of_x(shape, dtype, size, layout, device):
    """Its own gradient is rounded, and infinite where its dtype ends."""
    x, weight, bias, residual = operands(shape, torch.float32, device, layout)
    leaves = [t.requires_grad_() for t in (x, weight, bias, residual.to(dtype))]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    dy = make(shape, device=device, layout=layout, mean=0.0, seed=5)[0] * size
    y = ours(*leaves, activation="silu")
    with kernels():
        mine = torch.autograd.grad(y, leaves, dy)
    right = torch.autograd.grad(stock(*doubles, activation="silu"), doubles, dy.double())
    for a, b in zip(mine[:3], right[:3], strict=True):
        assert error(a, b) < 2 * BOUNDS[torch.float32]
    assert mine[3].dtype is dtype
    # Exact in fp64, then rounded; the interpreter cuts bf16 off.
    torch.testing.assert_close(mine[3], right[3].to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-3 * size)


@pytest.mark.gpu
@pytest.mark.gigabytes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_than_2_to_the_31_elements(layout):
    shape = (5, 64, 2600, 2600)
    x = torch.empty(shape, dtype=torch.float16, device="cuda", memory_format=torch.channels_last)
    x = to_layout(x.normal_(2.0, 1.5), layout).requires_grad_()
    assert x.numel() > 2**31
    y = sdfastgn.batch_norm(x, training=True)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    for c in (0, 63):
        part = x.detach()[:, c].float()
        var, mean = torch.var_mean(part, correction=0)
        expected = (part[-1, -3:].double() - mean) * torch.rsqrt(var + 1e-5)
        assert error(y.detach()[-1, c, -3:], expected) < BOUNDS[torch.float16]
    assert dx.abs().max() < 1e-3  # an equal gradient is none


# --- running averages ---------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "dispatcher"])
@pytest.mark.parametrize("dtype", first_alone([torch.float32, torch.float16]))
@pytest.mark.parametrize("shape", [SMALL[0], SPLIT[0], SPLIT[1]])
def test_running_averages_follow_the_batches(shape, dtype, direct, device):
    mine = [
        torch.linspace(0, 1, shape[1]).to(device, dtype),
        torch.linspace(1, 2, shape[1]).to(device, dtype),
    ]
    right = [t.double() for t in mine]
    for seed in range(2):
        x = make(shape, device=device, seed=seed)[0]
        with kernels(direct=direct), torch.no_grad():
            y = sdfastgn.batch_norm(x, *mine, training=True, momentum=0.25)
        expected = F.batch_norm(x.double().contiguous(), *right, training=True, momentum=0.25)
        assert error(y, expected) < 2 * BOUNDS[torch.float32]
    for t, exact in zip(mine, right, strict=True):
        assert error(t, exact) < 4 * BOUNDS[dtype]


def test_running_averages_that_lie_apart_are_updated_in_place(device):
    both = torch.zeros(6, 2, device=device)
    x = make((4, 6, 5, 5), device=device)[0]
    with kernels(direct=True):
        sdfastgn.batch_norm(x, both[:, 0], both[:, 1], training=True, momentum=1.0)
    torch.testing.assert_close(both[:, 0], x.mean((0, 2, 3)))
    torch.testing.assert_close(both[:, 1], x.var((0, 2, 3)))


def test_running_averages_stay_where_there_are_no_samples():
    mean, var = torch.ones(3), torch.ones(3)
    for path in (kernels(direct=True), kernels()):
        with path:
            y = sdfastgn.batch_norm(torch.ones(0, 3, 4, 4), mean, var, training=True)
        assert y.shape == (0, 3, 4, 4)
    assert torch.equal(torch.stack((mean, var)), torch.ones(2, 3))


@interpreted
@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        ("channels_kernel", (4, 3, 5, 5)),
        ("merge_kernel", (3, 34, 19, 23)),
        ("batch_apply_kernel", (3, 34, 19, 23)),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_running_averages_are_updated_once_whichever_kernel_cannot_be_compiled(
    kernel, shape, trains, monkeypatch
):
    through_triton = Launch._through_triton

    def fails(self, tensors):
        if self.kernel.__name__ == kernel:
            raise dispatch.turn_off("no compiler")
        return through_triton(self, tensors)

    mean, var = torch.zeros(shape[1]), torch.zeros(shape[1])
    x = make(shape)[0].requires_grad_(trains)
    monkeypatch.setattr(dispatch, "why_off", None)
    monkeypatch.setattr(Launch, "_through_triton", fails)
    monkeypatch.setattr(BATCH_NORM.plans, "made", PlanCache())
    with kernels(direct=True), pytest.warns(UserWarning, match="no compiler"):
        y = sdfastgn.batch_norm(x, mean, var, training=True, momentum=0.5)
    torch.testing.assert_close(mean, x.mean((0, 2, 3)) / 2)
    torch.testing.assert_close(var, x.var((0, 2, 3)) / 2)
    torch.testing.assert_close(y, F.batch_norm(x, None, None, training=True))


# --- numerics -----------------------------------------------------------------


@each_layout
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", first_alone([-2.3e4, 1e4, 0.1]))
@pytest.mark.parametrize("shape", [SMALL[0], SPLIT[0], SPLIT[1]])
def test_equal_values_give_exactly_the_bias(shape, value, dtype, layout, device):
    x, weight, bias, _ = operands(shape, dtype, device, layout)
    x = torch.full_like(x, value)
    y = ours(x, weight, bias)
    assert torch.equal(y, bias.view(-1, *[1] * (x.dim() - 2)).expand(shape))


@each_layout
@pytest.mark.parametrize("shape", [SMALL[0], SPLIT[0], SPLIT[1]])
def test_a_mean_far_above_the_spread_is_no_less_exact_than_eager(shape, layout, device):
    check_far_mean(make(shape, device=device, layout=layout)[0])


@pytest.mark.parametrize("shape", [SMALL[0], SPLIT[0]])
def test_each_channel_has_its_own_scale(shape, device):
    """Neighboring channels of very different sizes, one of them NaN, lie in one program's tile."""
    x = make(shape, device=device)[0]
    x = x * (10.0 ** torch.linspace(-2, 4, shape[1], device=device)).reshape(1, -1, 1, 1)
    x = to_layout(x, "channels_last")
    x[0, 3, 2, 2] = float("nan")
    y, expected = ours(x), stock(x.double())
    assert y[:, 3].isnan().all()
    rest = [c for c in range(shape[1]) if c != 3]
    assert error(y[:, rest], expected[:, rest]) < 1e-5


@pytest.mark.parametrize("shape", [SMALL[0], SPLIT[0]])
def test_the_same_bits_at_each_run(shape, device):
    x, weight, bias, residual = (
        t.requires_grad_() for t in operands(shape, torch.float32, device, "channels_last")
    )

    def results():
        y = ours(x, weight, bias, residual, activation="silu")
        with kernels():
            return [y, *torch.autograd.grad(y, (x, weight, bias, residual), torch.ones_like(y))]

    assert all(map(torch.equal, results(), results()))
