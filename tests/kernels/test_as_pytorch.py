"""Every public op as a citizen of PyTorch: operands anywhere, autograd, transforms, fake tensors, compile."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import sdfastgn
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.geglu.op import geglu
from tests.kernels.ops import OPS, as_tuple, each_derivative, each_function, each_op, each_op_where
from tests.kernels.samples import (
    BOUNDS,
    PLACES,
    channels_last,
    every_second,
    expanded,
    interpreted,
    kernels,
    transposed,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@contextlib.contextmanager
def registered():
    """The public functions call the registered ops, which on the CPU run in plain PyTorch."""

    def always(x):  # a function, because torch.compile traces it
        return True

    with mock.patch.object(dispatch, "has_kernels", always):
        yield


plain = pytest.param(contextlib.nullcontext, id="plain")
op_way = pytest.param(registered, id="op")
interpreter = pytest.param(kernels, id="interpreter", marks=interpreted)
direct = pytest.param(lambda: kernels(direct=True), id="interpreter-without-dispatcher", marks=interpreted)
each_way = pytest.mark.parametrize("way", [plain, op_way, interpreter, direct])
# The dispatcher hands operands on as they are.
each_code = pytest.mark.parametrize("way", [plain, op_way, direct])
each_slow_way = pytest.mark.parametrize("way", [interpreter, direct])
each_way_in_pytorch = pytest.mark.parametrize("way", [plain, op_way])


# --- operands anywhere, of any dtype ------------------------------------------


each_place = pytest.mark.parametrize("place", PLACES)


def outputs_and_gradients(op, call, operands):
    """Detached results, then the gradients of all operands that want one."""
    leaves = [t for t in operands.values() if t.requires_grad]
    with contextlib.nullcontext() if leaves else torch.no_grad():
        outputs = call(**operands)
    if not leaves:
        return list(outputs)
    recorded = [y for y in outputs if y.requires_grad]
    # Values that each dtype can hold.
    along = [(torch.arange(y.numel()) % 37 / 32 - 0.5).view(y.shape).to(y.dtype) for y in recorded]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(recorded, leaves, along)]


def compare(op, operands, bound, *, wanted=None):
    """Against fp64; with gradients of all operands, or of ``wanted`` alone."""

    def ready(t, name):
        return t.detach().requires_grad_(op.differentiable and wanted in (None, name))

    want = outputs_and_gradients(
        op, op.true, {name: ready(t.double().contiguous().clone(), name) for name, t in operands.items()}
    )
    got = outputs_and_gradients(op, op.call, {name: ready(t, name) for name, t in operands.items()})
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        # A layer's gradient may be nothing but rounding: where the input is the same all over.
        assert (a.double() - b).norm() <= bound * max(b.norm().item(), 1.0), i


@pytest.mark.drawn(80)
@each_code
@each_place
@each_op
def test_operands_may_lie_anywhere(op, place, way):
    operands = op.operands(torch.float32)
    with way():
        compare(op, {name: place(t) for name, t in operands.items()}, 3e-5)
        # One at a time too: a copy for the sake of one operand may hide what another one needs.
        for name in operands if way is contextlib.nullcontext else list(operands)[:1]:
            compare(op, {**operands, name: place(operands[name])}, 3e-5)


@each_place
@each_op
def test_operands_in_fp64_are_exact(op, place):
    bound = 1e-6 if op is OPS["channel_statistics"] else 1e-11
    compare(op, {name: place(t) for name, t in op.operands(torch.float64).items()}, bound)


# Of the operands in turn, and the bound on the error.
MIXED = {
    "float64": ([torch.float64], 1e-12),
    "half-with-float32": ([torch.float16, torch.float32], 2e-3),
    "float32-with-bfloat16": ([torch.float32, torch.bfloat16, torch.float64], 2e-2),
}


@each_code
@pytest.mark.parametrize(("dtypes", "bound"), MIXED.values(), ids=MIXED)
@each_op_where(lambda op: op.mixed)
def test_operands_may_have_other_dtypes(op, dtypes, bound, way):
    operands = op.operands(*dtypes)
    with way():
        for place in (lambda t: t, every_second):
            compare(op, {name: place(t) for name, t in operands.items()}, bound)


# --- autograd -----------------------------------------------------------------


@each_way
@each_derivative
def test_one_operand_alone_may_want_a_gradient(op, way):
    operands = op.operands(torch.float32)
    with way():
        for name in operands:
            compare(op, operands, 3e-5, wanted=name)


@each_way_in_pytorch
@each_derivative
def test_first_and_second_derivative(op, way):
    operands = {name: t.requires_grad_() for name, t in op.operands(torch.float64).items()}

    def call(*tensors):
        return op.call(**dict(zip(operands, tensors, strict=True)))

    with way():
        assert torch.autograd.gradcheck(call, tuple(operands.values()), fast_mode=True)
        assert torch.autograd.gradgradcheck(call, tuple(operands.values()), fast_mode=True)


@each_slow_way
@each_derivative
def test_second_derivative_after_the_kernels(op, way):
    """The incoming gradient depends on x too, as in a gradient penalty."""
    operands = op.operands(torch.float32)

    def penalty(call, dtype):
        leaves = {name: t.to(dtype).detach().requires_grad_() for name, t in operands.items()}
        energy = sum(y.pow(3).sum() for y in call(**leaves))
        first = torch.autograd.grad(energy, list(leaves.values()), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), list(leaves.values()))

    with way():
        got = penalty(op.call, torch.float32)
    for g, w in zip(got, penalty(op.true, torch.float64), strict=True):
        assert (g - w).norm() <= 1e-4 * w.norm() + 1e-3


@each_slow_way
@each_derivative
def test_little_is_kept_for_the_backward(op, way):
    """Operands, results, and at most two values a row or group."""
    if op is OPS["upsample_conv2d"]:
        pytest.skip("PyTorch's own ops run under autograd")
    operands = {name: t.requires_grad_() for name, t in op.operands(torch.float32).items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), way():
        results = op.call(**operands)
    known = {t.data_ptr() for t in (*operands.values(), *results)}
    small = next(iter(operands.values())).numel() // 4
    # The sum of add_layer_norm is a result but for its own bias.
    large = [t for t in kept if t.data_ptr() not in known and t.numel() > small]
    assert len(large) <= ("total_bias" in operands)


@each_way
@each_op
def test_no_samples(op, way):
    operands = {
        name: t.requires_grad_(op.differentiable) for name, t in op.operands(torch.float32, batch=0).items()
    }
    with way():
        results = op.call(**operands)
        assert results[0].numel() == 0
        if op.differentiable:
            gradients = torch.autograd.grad(sum(y.sum() for y in results), list(operands.values()))
            assert all(g.shape == t.shape for g, t in zip(gradients, operands.values(), strict=True))
            assert not any(g.any() for g in gradients)


@each_slow_way
@each_op_where(lambda op: op is not OPS["act_linear"])
def test_recorded_and_plain_calls_give_the_same_bits_and_leave_operands_alone(op, way):
    """By the dispatcher or not, twice, and under autograd. There ``act_linear`` is PyTorch's own."""
    operands = {name: channels_last(t) for name, t in op.operands(torch.float32).items()}
    before = {name: t.clone() for name, t in operands.items()}
    with kernels(direct=True), torch.no_grad():
        expected = op.call(**operands)
    with way():
        for wants_gradient in (False, False, op.differentiable):
            leaves = {name: t.detach().requires_grad_(wants_gradient) for name, t in operands.items()}
            results = op.call(**leaves)
            # A bias of the total is added in PyTorch under autograd.
            assert all(torch.equal(y, e) for y, e in zip(results, expected, strict=True))
    assert all(torch.equal(t, before[name]) for name, t in operands.items())


@pytest.mark.parametrize("place", [expanded, transposed, every_second])
@each_derivative
@interpreted
def test_gradients_may_arrive_in_any_layout(op, place):
    operands = op.operands(torch.float32)

    def gradients(call, dtype):
        leaves = {name: t.to(dtype).requires_grad_() for name, t in operands.items()}
        results = call(**leaves)
        g = torch.Generator().manual_seed(1)
        dys = [place(torch.randn(y.shape, generator=g)).to(dtype) for y in results]
        return torch.autograd.grad(results, list(leaves.values()), dys)

    with kernels(direct=True):
        got = gradients(op.call, torch.float32)
    for a, b in zip(got, gradients(op.true, torch.float64), strict=True):
        assert (a - b).norm() <= 3e-5 * b.norm() + 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@each_function
def test_plain_pytorch_rounds_its_results_once(op, dtype):
    operands = op.operands(dtype)
    for y, exact in zip(
        op.call(**operands), op.true(**{n: t.double() for n, t in operands.items()}), strict=True
    ):
        assert y.dtype in (dtype, torch.float32)  # statistics
        assert (y - exact).norm() <= 2 * BOUNDS[dtype] * exact.norm()


@pytest.mark.parametrize("name", ["group_norm", "instance_norm", "batch_norm", "layer_norm"])
def test_plain_pytorch_keeps_the_variance_when_the_mean_is_large(name):
    """PyTorch's own CPU kernel for channels-last images is off by hundreds here."""
    op = OPS[name]
    operands = op.operands(torch.float32)
    operands["x"] = channels_last(operands["x"] + 1000)
    exact = op.true(**{n: t.double() for n, t in operands.items()})[0]
    assert (op.call(**operands)[0] - exact).abs().max() < 2e-3


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_first_and_second_derivative_of_every_activation(activation):
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    with registered():
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert check(lambda x: sdfastgn.group_norm(x, 3, activation=activation), x, fast_mode=True)


def normalized(x):
    d = x - x.mean(-1, keepdim=True)
    return d / torch.sqrt(d.square().mean(-1, keepdim=True) + 0.1)


def gated(x):
    value, gate = x.chunk(2, -1)
    return value * 0.5 * gate * (1 + torch.erf(gate / 2**0.5))


@each_way_in_pytorch
@pytest.mark.parametrize(
    ("f", "written_out"),
    [
        pytest.param(lambda x: sdfastgn.layer_norm(x, eps=0.1), normalized, id="layer_norm"),
        pytest.param(
            lambda x: sdfastgn.add_layer_norm(x, torch.zeros_like(x), eps=0.1)[0],
            normalized,
            id="add_layer_norm",
        ),
        pytest.param(geglu, gated, id="geglu"),
    ],
)
def test_derivatives_of_derivatives(f, written_out, way):
    """The fourth one. PyTorch 2.13's own of layer_norm is wrong by 6 %."""
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)

    def thrice(f):
        g = f(x).pow(3).sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
        return g

    with way():
        torch.testing.assert_close(thrice(f), thrice(written_out))


# --- tracing ------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """The calls of this package's registered ops, by name."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sdfastgn":
            self.calls[func.name()] = (func, args, kwargs or {})
        return func(*args, **kwargs or {})


def recorded_calls(op):
    """The registered ops that a call of ``op`` and its backward go through."""
    operands = {name: channels_last(t) for name, t in op.operands(torch.float64).items()}
    with registered(), Recorder() as recorder:
        outputs_and_gradients(
            op, op.call, {n: t.detach().requires_grad_(op.differentiable) for n, t in operands.items()}
        )
    return recorder.calls


@pytest.mark.slow
@each_function
def test_registered_ops_pass_opcheck(op):
    # In fp64, because sums in another order differ by less than opcheck allows.
    for func, args, kwargs in recorded_calls(op).values():
        args = tuple(
            t.detach().requires_grad_(op.differentiable) if isinstance(t, Tensor) else t for t in args
        )
        torch.library.opcheck(func, args, kwargs)


def test_every_registered_op_is_among_the_recorded():
    names = {name for op in OPS.values() for name in recorded_calls(op)}
    registered_names = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("sdfastgn::")}
    assert names == registered_names


def strides(t):
    """Those that have a meaning: of dimensions of more than one element."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


@pytest.mark.drawn(15)
@each_way_in_pytorch
@each_place
@each_op
def test_fake_tensors_have_the_real_strides(op, place, way):
    operands = {name: place(t) for name, t in op.operands(torch.float32).items()}
    with way():
        with FakeTensorMode() as mode:
            fakes = op.function(**{n: mode.from_tensor(t) for n, t in operands.items()}, **op.options)
        reals = op.function(**operands, **op.options)
    for fake, real in zip(as_tuple(fakes), as_tuple(reals), strict=True):
        assert (fake.shape, strides(fake), fake.dtype) == (real.shape, strides(real), real.dtype)


@pytest.mark.slow
@each_function
def test_compiles_without_a_graph_break_and_with_any_size(op):
    torch.compiler.reset()
    compiled = torch.compile(op.function, fullgraph=True, backend="aot_eager", dynamic=True)
    with registered():
        for batch in (2, 5):
            leaves = {
                name: t.requires_grad_(op.differentiable)
                for name, t in op.operands(torch.float32, batch=batch).items()
            }
            got, want = (
                outputs_and_gradients(
                    op, lambda f=f, **o: as_tuple(f(**o, **op.options))[: op.compared], leaves
                )
                for f in (compiled, op.function)
            )
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@each_way_in_pytorch
@each_op_where(lambda op: op.differentiable and op.compared is None)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_functional_transforms(op, way):
    """vmap and forward-mode AD over the first operand."""
    (name, x), *others = op.operands(torch.float32).items()

    def of_x(f):
        return lambda x: f(**{name: x}, **dict(others))

    with way():
        got, want = (torch.func.jvp(of_x(f), (x,), (x * 2,)) for f in (op.call, op.true))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        got, want = (torch.vmap(of_x(f))(torch.stack((x, x * 2))) for f in (op.call, op.true))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
