"""The kernel of ``act_linear`` against fp64."""

import pytest
import torch

from sdfastgn.kernels.act_linear.config import tile_config
from sdfastgn.kernels.act_linear.op import act_linear
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.sizes import vector_width
from tests.kernels.ops import true_act_linear as eager
from tests.kernels.samples import BOUNDS, DTYPES, error, in_fp64, kernels, skip_cut_off

NUM_SMS = 2
pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.multiprocessors(NUM_SMS)]

# (N, C, K)
SHAPES = [
    pytest.param((1, 20, 64), id="one-row"),
    pytest.param((2, 16, 512), id="even"),
    pytest.param((3, 33, 333), id="odd"),
    pytest.param((16, 9, 40), id="sixteen-rows"),
    pytest.param((21, 5, 7), id="many-rows"),
    pytest.param((2, 17, 1280), id="several-steps"),
    pytest.param((2, 18, 2816), id="several-turns"),
    pytest.param((4, 1, 1), id="one-by-one"),
]
WAYS = [pytest.param((2, 16, 512), id="even"), pytest.param((3, 33, 333), id="masked")]


def make(shape, dtype=torch.float32, device="cpu", mean=3.0, seed=0):
    """x with a mean away from zero, a random weight of a linear layer's size, bias and extra bias."""
    N, C, K = shape
    g = torch.Generator().manual_seed(seed)
    x = torch.randn((N, K), generator=g) * 1.5 + mean
    weight = torch.randn((C, K), generator=g) / K**0.5
    biases = [torch.randn(C, generator=g) for _ in range(2)]
    return [t.to(dtype).to(device) for t in (x, weight, *biases)]


def run(x, weight, bias=None, activation="silu", extra_bias=None):
    with kernels(direct=True):
        return act_linear(x, weight, bias, activation, extra_bias=extra_bias)


truth = in_fp64(eager)


@pytest.mark.parametrize("activation", ["identity", "silu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, activation, device):
    x, weight, bias, extra = make(shape, device=device)
    y = run(x, weight, bias, activation, extra)
    assert y.shape == shape[:2]
    assert y.is_contiguous()
    assert error(y, truth(x, weight, bias, activation, extra)) < BOUNDS[torch.float32]


def test_the_shapes_take_every_way():
    sizes = [p.values[0] for p in SHAPES]
    configs = [tile_config(*size, 4, vector_width(4, size[2]), NUM_SMS) for size in sizes]
    assert {config.block_n for config in configs} == {1, 2, 4}
    assert {config.is_even(K) for config, (_, _, K) in zip(configs, sizes, strict=True)} == {True, False}
    assert {N % c.block_n == 0 for c, (N, _, _) in zip(configs, sizes, strict=True)} == {True, False}
    assert {C % c.block_c == 0 for c, (_, C, _) in zip(configs, sizes, strict=True)} == {True, False}
    assert max(c.block_c for c in configs) == 8
    assert max(c.steps for c in configs) > 1
    assert max(K / (c.steps * c.block_k) for c, (_, _, K) in zip(configs, sizes, strict=True)) > 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WAYS)
def test_every_dtype(shape, dtype, device):
    x, weight, bias, extra = make(shape, dtype, device)
    for biases in ((bias, extra), (bias.float(), None), (None, extra), (None, None)):
        y = run(x, weight, biases[0], "silu", biases[1])
        assert y.dtype is dtype
        assert error(y, truth(x, weight, biases[0], "silu", biases[1])) < BOUNDS[dtype]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, device):
    x, weight, bias, _ = make((3, 6, 37), mean=-0.5, device=device)
    assert error(run(x, weight, bias, activation), truth(x, weight, bias, activation)) < 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [0.0, 30.0], ids=["centred", "large"])
def test_no_less_exact_than_eager(dtype, mean, device):
    skip_cut_off(dtype, device)
    x, weight, bias, extra = make((3, 33, 333), dtype, device, mean)
    expected = truth(x, weight, bias, "silu", extra)
    slack = 0.5 * torch.finfo(dtype).eps if dtype is torch.float32 else 0.0
    assert error(run(x, weight, bias, "silu", extra), expected) <= (
        error(eager(x, weight, bias, "silu", extra), expected) + slack
    )


@pytest.mark.parametrize("shape", WAYS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_not_finite_values_stay_where_they_are(shape, device):
    """In their row of x, or of the weight; columns and rows that are not there must not make 0 * inf."""
    x, weight, bias, _ = make(shape, device=device)
    x[-1, -1], weight[-1, 0] = float("inf"), float("nan")
    weight[-2, 1] = float("inf")
    y, expected = run(x, weight, bias), eager(x, weight, bias, "silu")
    assert torch.equal(y.isnan(), expected.isnan())
    assert y.isfinite().sum() == (shape[0] - 1) * (shape[1] - 2)
    torch.testing.assert_close(y, expected, equal_nan=True, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", WAYS)
def test_nothing_else_is_read_or_written(shape, device):
    """The tensors lie between NaN, and so does the result."""

    def between(t):
        buffer = torch.full((t.numel() + 64,), float("nan"), device=device)
        buffer[32:-32] = t.flatten()
        return buffer[32:-32].view(t.shape)

    x, weight, bias, extra = make(shape, device=device)
    expected = run(x, weight, bias, "silu", extra)
    found = run(*map(between, (x, weight, bias)), "silu", between(extra))
    assert torch.equal(found, expected)
    assert expected.isfinite().all()


# --- GPU ----------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 320, 1280), (2, 1280, 1280), (3, 2560, 1280), (16, 640, 2816), (300, 77, 333)], ids=str
)
def test_real_shapes_on_the_gpu(shape, dtype):
    x, weight, bias, extra = make(shape, dtype, "cuda")
    assert error(run(x, weight, bias, "silu", extra), truth(x, weight, bias, "silu", extra)) < BOUNDS[dtype]


@pytest.mark.gpu
@pytest.mark.gigabytes
def test_a_weight_of_more_than_two_to_the_31_elements():
    x = torch.full((1, 2**16), 0.5, dtype=torch.float16, device="cuda")
    weight = torch.zeros((2**15 + 8, 2**16), dtype=torch.float16, device="cuda")
    weight[-1] = 2**-10
    y = act_linear(x, weight)
    assert y[0, -1] == 32
    assert not y[0, :-1].any()
