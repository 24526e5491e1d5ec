"""``sdfastgn.group_norm`` as a PyTorch citizen: fallback, errors, gradients, fake tensors, compile, autocast, graphs, streams."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import sdfastgn
from sdfastgn.kernels.group_norm.op import reference_group_norm


def channels_last(*shape, dtype=torch.float32, device="cpu", seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype) * 1.5 + 2
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


# --- the fallback on a CPU ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 12, 5, 6), (2, 12, 7), (2, 12), (2, 12, 2, 3, 4)], ids=str)
def test_fallback_is_eager_pytorch(shape, dtype):
    x = channels_last(*shape, dtype=dtype) if len(shape) > 2 else torch.randn(shape).to(dtype)
    w, b = torch.randn(12, dtype=dtype), torch.randn(12, dtype=dtype)
    y = sdfastgn.group_norm(x, 3, w, b, activation="silu")
    expected = F.silu(F.group_norm(x.double().contiguous(), 3, w.double(), b.double()))
    assert y.dtype is dtype
    assert y.stride() == x.stride()
    torch.testing.assert_close(
        y.double(), expected, atol=4 * torch.finfo(dtype).eps, rtol=2 * torch.finfo(dtype).eps
    )


def test_fallback_keeps_the_variance_when_the_mean_is_large():
    """PyTorch 2.13's own CPU kernel on channels-last input is off by hundreds here."""
    x = channels_last(1, 32, 64, 64) + 1000
    y = sdfastgn.group_norm(x, 4)
    assert (y - F.group_norm(x.double().contiguous(), 4)).abs().max() < 1e-3


# --- errors ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        pytest.param(([1.0], 1), TypeError, "x must be a torch.Tensor, got list", id="list"),
        pytest.param((torch.ones(2, 4, dtype=torch.int64), 2), TypeError, "got torch.int64", id="integers"),
        pytest.param(
            (torch.ones(2, 4, dtype=torch.complex64), 2), TypeError, "got torch.complex64", id="complex"
        ),
        pytest.param((torch.ones(4), 2), ValueError, "got shape (4,)", id="rank1"),
        pytest.param(
            (torch.ones(2, 4, 3), 3),
            ValueError,
            "num_groups=3 must be a positive divisor of C=4",
            id="indivisible",
        ),
        pytest.param((torch.ones(2, 4, 3), -2), ValueError, "num_groups=-2", id="negative-groups"),
        pytest.param((torch.ones(2, 4, 3), 0), ZeroDivisionError, "got 0", id="no-groups"),
        pytest.param((torch.ones(2, 4, 3), 2.0), TypeError, "got 2.0", id="float-groups"),
        pytest.param(
            (torch.ones(2, 4, 3), 2, torch.ones(3)),
            ValueError,
            "weight must have shape (4,), got (3,)",
            id="weight",
        ),
        pytest.param(
            (torch.ones(2, 4, 3), 2, None, [0.0]), TypeError, "bias must be a floating", id="bias-list"
        ),
        pytest.param(
            (torch.ones(2, 4, 3), 2, torch.ones(4, device="meta")),
            ValueError,
            "weight is on meta",
            id="device",
        ),
        pytest.param(
            (torch.ones(2, 4, 3), 2, None, None, "1e-5"),
            TypeError,
            "eps must be a number, got '1e-5'",
            id="eps",
        ),
        pytest.param(
            (torch.ones(2, 4, 3), 2, None, None, 1e-5, ["silu"]), ValueError, "['silu']", id="activation-list"
        ),
        pytest.param(
            (torch.ones(2, 4, 3), 2, None, None, 1e-5, "mish"),
            ValueError,
            "unknown activation 'mish'",
            id="activation",
        ),
    ],
)
def test_errors_name_the_call_and_the_value(arguments, kind, message):
    with pytest.raises(kind) as caught:
        sdfastgn.group_norm(*arguments)
    assert str(caught.value).startswith("sdfastgn.group_norm: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["shift", "ada_scale", "ada_shift"])
def test_operand_errors(name):
    with pytest.raises(
        ValueError, match=rf"{name} must have shape \(4,\), \(1, 4\) or \(2, 4\), got \(3, 4\)"
    ):
        sdfastgn.group_norm(torch.ones(2, 4, 3), 2, **{name: torch.ones(3, 4)})


@pytest.mark.gpu
def test_errors_come_on_the_gpu_too_and_after_a_good_call():
    x = channels_last(2, 4, 3, 3, device="cuda")
    sdfastgn.group_norm(x, 2, torch.ones(4, device="cuda"))
    with pytest.raises(ValueError, match=r"weight must have shape \(4,\), got \(5,\)"):
        sdfastgn.group_norm(x, 2, torch.ones(5, device="cuda"))
    with pytest.raises(ValueError, match="weight is on cpu, x on cuda:0"):
        sdfastgn.group_norm(x, 2, torch.ones(4))


# --- gradients ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["identity", "silu", "gelu", "gelu_tanh"])
def test_first_and_second_derivative(activation):
    x = channels_last(2, 6, 3, 4).double().requires_grad_()
    params = [
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in [(6,), (6,), (2, 6), (1, 6), (6,)]
    ]

    def f(x, weight, bias, shift, scale, offset):
        return sdfastgn.group_norm(
            x, 3, weight, bias, 1e-3, activation, shift=shift, ada_scale=scale, ada_shift=offset
        )  # fmt: skip

    assert torch.autograd.gradcheck(f, (x, *params))
    assert torch.autograd.gradgradcheck(f, (x, *params))


@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("activation", ["identity", "relu", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_no_less_exact_than_eager(dtype, activation, device):
    x, w, b = channels_last(2, 30, 9, 7, dtype=dtype, device=device), *torch.randn(2, 30).to(device, dtype)
    dy = channels_last(2, 30, 9, 7, dtype=dtype, device=device, seed=1)
    if activation == "relu":  # at its kink a rounding decides between two right answers
        z = reference_group_norm(x.double(), 3, w.double(), b.double())
        dy = torch.where(z.abs() < 0.02, 0, dy)

    def grads(f, to, layout=torch.preserve_format):
        leaves = [t.to(to, memory_format=layout).detach().requires_grad_() for t in (x, w, b)]
        return [g.double() for g in torch.autograd.grad(f(*leaves), leaves, dy.to(to))]

    expected = grads(lambda x, w, b: reference_group_norm(x, 3, w, b, activation=activation), torch.float64)
    act = getattr(F, activation.removesuffix("_tanh"), lambda z: z)
    kwargs = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
    eager = grads(lambda x, w, b: act(F.group_norm(x, 3, w, b), **kwargs), dtype, torch.contiguous_format)
    ours = grads(lambda x, w, b: sdfastgn.group_norm(x, 3, w, b, activation=activation), dtype)
    for got, stock, want in zip(ours, eager, expected, strict=True):
        assert (got - want).norm() <= (stock - want).norm() * 1.05 + 2 * torch.finfo(
            dtype
        ).eps * want.norm() * 0.2


@pytest.mark.parametrize("needs", ["x", "weight", "bias", "weight+bias"])
def test_frozen_inputs_get_no_gradient(needs):
    """PyTorch's own CPU backward on channels-last input crashes when only weight or bias needs one."""
    leaves = {"x": channels_last(2, 6, 4, 4), "weight": torch.randn(6), "bias": torch.randn(6)}
    for name in needs.split("+"):
        leaves[name].requires_grad_()
    sdfastgn.group_norm(leaves["x"], 3, leaves["weight"], leaves["bias"], activation="silu").sum().backward()
    assert {name for name, t in leaves.items() if t.grad is not None} == set(needs.split("+"))


def test_bias_without_weight_has_a_backward():
    bias = torch.randn(6, requires_grad=True)
    x = channels_last(2, 6, 4, 4).requires_grad_()
    sdfastgn.group_norm(x, 3, None, bias).square().sum().backward()
    assert bias.grad is not None
    assert x.grad.stride() == x.stride()


# --- tracing -----------------------------------------------------------------------------------------------------------------

SAMPLES = [
    pytest.param((2, 6, 4, 5), "channels_last", id="channels-last"),
    pytest.param((2, 6, 4, 5), "channels_first", id="channels-first"),
    pytest.param((2, 6, 7), "channels_last", id="tokens"),
]


def _sample(shape, layout):
    return channels_last(*shape) if layout == "channels_last" else torch.randn(shape)


@pytest.mark.parametrize(("shape", "layout"), SAMPLES)
def test_opcheck(shape, layout):
    x = _sample(shape, layout).requires_grad_()
    w, shift = torch.randn(6, requires_grad=True), torch.randn(2, 6, requires_grad=True)
    arguments = (x, 3, w, None, 1e-5, "silu", shift, None, None, None, False, None)
    torch.library.opcheck(torch.ops.sdfastgn.group_norm, arguments)


@pytest.mark.parametrize(("shape", "layout"), SAMPLES)
def test_fake_tensors_have_the_real_strides(shape, layout):
    x = _sample(shape, layout)
    with FakeTensorMode() as mode:
        fake = sdfastgn.group_norm(mode.from_tensor(x), 3, activation="silu")
    assert fake.stride() == sdfastgn.group_norm(x, 3, activation="silu").stride() == x.stride()


def test_compiles_without_a_graph_break():
    norm = sdfastgn.GroupNorm(3, 6, activation="silu")
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    x = channels_last(2, 6, 4, 5).requires_grad_()
    torch.testing.assert_close(compiled(x), norm(x))
    torch.testing.assert_close(*(torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, norm)))


# --- GPU -----------------------------------------------------------------------------------------------------------------------

GPU_CASES = [pytest.param((2, 320, 16, 16), id="small"), pytest.param((2, 320, 64, 64), id="split")]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_CASES)
def test_autocast_follows_eager(shape):
    x, w, b = (
        channels_last(*shape, dtype=torch.float16, device="cuda"),
        *torch.randn(2, shape[1], device="cuda"),
    )
    with torch.autocast("cuda", torch.float16):
        y, eager = sdfastgn.group_norm(x, 32, w, b, activation="silu"), F.silu(F.group_norm(x, 32, w, b))
    assert y.dtype is eager.dtype is torch.float32
    torch.testing.assert_close(y, eager, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_CASES)
def test_cuda_graph_replays_on_new_data(shape):
    x = channels_last(*shape, dtype=torch.float16, device="cuda")
    sdfastgn.group_norm(x, 32, activation="silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sdfastgn.group_norm(x, 32, activation="silu")
    x.copy_(channels_last(*shape, dtype=torch.float16, device="cuda", seed=5) * 3)
    graph.replay()
    assert torch.equal(y, sdfastgn.group_norm(x, 32, activation="silu"))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_CASES)
def test_the_current_stream_is_used(shape):
    x = channels_last(*shape, dtype=torch.float16, device="cuda")
    expected = sdfastgn.group_norm(x, 32, activation="silu")
    stream = torch.cuda.Stream()
    slow = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(x)
        for _ in range(20):
            slow = slow @ slow
            slow /= slow.norm()
        late.copy_(x)
        y = sdfastgn.group_norm(late, 32, activation="silu")
    stream.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_CASES)
def test_unaligned_data(shape):
    """A kernel compiled for 16-byte aligned pointers must not get others, in either order of calls."""
    aligned = channels_last(*shape, dtype=torch.float16, device="cuda")
    buffer = torch.empty(aligned.numel() + 1, dtype=torch.float16, device="cuda")
    unaligned = buffer[1:].as_strided(aligned.shape, aligned.stride(), 1).copy_(aligned)
    assert unaligned.data_ptr() % 16
    expected = sdfastgn.group_norm(aligned, 32, activation="silu")
    for x in (unaligned, aligned, unaligned):
        torch.testing.assert_close(sdfastgn.group_norm(x, 32, activation="silu"), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_CASES)
def test_eps_may_be_an_int_in_either_order_of_calls(shape):
    """A kernel compiled for an int must not get a float, nor the other way round."""
    x = channels_last(*shape, dtype=torch.float32, device="cuda", seed=9)
    for eps in (1, 0.25, 1):
        expected = reference_group_norm(x, 32, eps=float(eps))
        torch.testing.assert_close(sdfastgn.group_norm(x, 32, eps=eps), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_CASES)
def test_inference_and_training_agree(shape):
    """To the bit, though one also stores mean and rstd."""
    x = channels_last(*shape, device="cuda")
    direct = sdfastgn.group_norm(x, 32, activation="silu")
    recorded = sdfastgn.group_norm(x.clone().requires_grad_(), 32, activation="silu")
    assert recorded.grad_fn is not None
    assert torch.equal(direct, recorded)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("shape", GPU_CASES)
def test_launches_under_the_device_of_the_tensor(shape):
    first = channels_last(*shape, dtype=torch.float16, device="cuda:0")
    with torch.cuda.device(0):
        y = sdfastgn.group_norm(first.to("cuda:1"), 32, activation="silu")
    assert y.device == torch.device("cuda:1")
    assert torch.equal(y.cpu(), sdfastgn.group_norm(first, 32, activation="silu").cpu())
