"""What every op owes a GPU: graphs, streams, devices, alignment, autocast, and the same bits at each run."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.ops import FUNCTIONS, OPS, as_tuple, random_operands

pytestmark = pytest.mark.gpu

CASES = [
    pytest.param(op, shapes, id=f"{name}-{i}")
    for name, op in FUNCTIONS.items()
    for i, shapes in enumerate(op.on_gpu)
]
each_case = pytest.mark.parametrize(("op", "shapes"), CASES)
NORMS = [case for case in CASES if case.id.startswith(("group_", "instance_", "batch_", "layer_"))]
each_norm = pytest.mark.parametrize(("op", "shapes"), NORMS)


def make(shapes, dtype=torch.float16, seed=0):
    """Operands on the GPU, images channels-last."""
    return {
        name: (t + seed).to("cuda").contiguous(
            memory_format=torch.channels_last
            if t.dim() == 4 and name in ("x", "a", "b", "residual")
            else torch.contiguous_format
        )
        for name, t in random_operands(shapes, dtype).items()
    }  # fmt: skip


def call(op, operands):
    """All results, with statistics."""
    return as_tuple(op.function(**operands, **(op.gpu_options or op.options)))


@each_case
def test_a_graph_replays_on_new_data(op, shapes):
    operands = make(shapes)
    with torch.no_grad():
        call(op, operands)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call(op, operands)
        for t in operands.values():
            t.mul_(-0.5)
        graph.replay()
        for y, expected in zip(results, call(op, operands), strict=True):
            torch.testing.assert_close(y, expected, atol=1e-2, rtol=1e-2)


@each_case
def test_the_same_bits_at_each_run_recorded_or_not(op, shapes):
    operands = make(shapes)
    with torch.no_grad():
        first, second = call(op, operands), call(op, operands)
    assert all(map(torch.equal, first, second))
    if not op.differentiable or op is OPS["upsample_conv2d"]:
        return
    leaves = {name: t.requires_grad_() for name, t in operands.items()}
    runs = []
    for _ in range(2):
        results = [y for y in call(op, leaves) if y.requires_grad]
        assert all(map(torch.equal, results, first))
        runs.append(
            torch.autograd.grad(results, list(leaves.values()), [torch.ones_like(y) for y in results])
        )
    assert all(map(torch.equal, *runs))


@each_case
def test_unaligned_operands(op, shapes):
    """A kernel compiled for 16-byte aligned pointers must not get others, in either order of calls."""
    aligned = make(shapes)

    def moved(t):
        buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device="cuda")
        return buffer[1:].as_strided(t.shape, t.stride(), 1).copy_(t)

    unaligned = {name: moved(t) for name, t in aligned.items()}
    assert all(t.data_ptr() % 16 for t in unaligned.values())
    with torch.no_grad():
        expected = call(op, aligned)
        for operands in (unaligned, aligned, unaligned):
            for y, e in zip(call(op, operands), expected, strict=True):
                torch.testing.assert_close(y, e, atol=1e-2, rtol=1e-2)


@each_case
def test_the_current_stream_is_used(op, shapes):
    operands = make(shapes)
    with torch.no_grad():
        expected = call(op, operands)
        stream, slow = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            late = {name: torch.zeros_like(t) for name, t in operands.items()}
            for _ in range(20):
                slow = slow @ slow
                slow /= slow.norm()
            for name, t in late.items():
                t.copy_(operands[name])
            results = call(op, late)
        stream.synchronize()
    assert all(map(torch.equal, results, expected))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_case
def test_launches_under_the_device_of_the_tensor(op, shapes):
    operands = make(shapes)
    with torch.no_grad(), torch.cuda.device(0):
        results = call(op, {name: t.to("cuda:1") for name, t in operands.items()})
        assert all(y.device == torch.device("cuda:1") for y in results)
        for y, expected in zip(results, call(op, operands), strict=True):
            torch.testing.assert_close(y.cpu(), expected.cpu())


@each_norm
def test_eps_may_be_an_int_in_either_order_of_calls(op, shapes):
    """A kernel compiled for an int must not get a float, nor the other way round."""
    operands = make(shapes, torch.float32)
    for eps in (1, 0.25, 1):
        options = {**(op.gpu_options or op.options), "eps": eps}
        expected = op.truth(**operands, **options)
        torch.testing.assert_close(op.function(**operands, **options), expected, atol=1e-5, rtol=1e-5)


@each_norm
def test_norms_under_autocast_return_the_dtype_of_pytorchs(op, shapes):
    """fp32 of GroupNorm and LayerNorm; InstanceNorm's is that of x."""
    operands = make(shapes)
    with torch.autocast("cuda", torch.float16):
        y, expected = call(op, operands)[0], op.truth(**operands, **(op.gpu_options or op.options))
    assert y.dtype is expected.dtype
    tolerance = 1e-4 if y.dtype is torch.float32 else 2e-3
    torch.testing.assert_close(y, expected, atol=tolerance, rtol=tolerance)


def test_autocast_of_the_sum_before_a_norm():
    operands = make(OPS["add_layer_norm"].on_gpu[0])
    with torch.autocast("cuda", torch.float16):
        y, total = call(OPS["add_layer_norm"], operands)
    assert (y.dtype, total.dtype) == (torch.float32, torch.float16)
    expected = F.layer_norm(
        total.float(), total.shape[-1:], operands["weight"].float(), operands["bias"].float()
    )
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
