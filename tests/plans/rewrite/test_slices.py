"""Calls in slices: which samples are independent, and what slices of them compute."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from sdfastgn.plans.rewrite.passes import rewrite
from sdfastgn.plans.rewrite.slices import sliced
from sdfastgn.plans.run.slices import Slices
from sdfastgn.plans.run.traffic import peak
from sdfastgn.plans.trace.tracer import trace
from tests.plans import programs
from tests.plans.engine import everything_pays, in_channels_last, plan_in_slices
from tests.plans.models import CALLS, Size, of_diffusers
from tests.plans.programs import same_random_numbers
from tests.plans.rewrite.rewriting import others_like

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]

x3 = torch.randn(4, 6, 8)
x4 = torch.randn(4, 8, 6, 5)
x5 = torch.randn(4, 8, 3, 6, 5)
W = torch.randn(8, 8)


def slices_of(call, *inputs):
    """The slices of ``call``, which must compute what eager computes."""
    plan = plan_in_slices(torch.nn.Module(), call, *inputs)
    for _ in range(2):
        inputs = others_like(inputs)
        expected = same_random_numbers(call, pytree.tree_map(torch.clone, inputs))
        found = same_random_numbers(lambda *inputs: plan(inputs), inputs)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    return plan.slices


@pytest.mark.parametrize(
    ("call", "x"),
    [
        (lambda x: F.silu(F.group_norm(x, 2)) + x, x4),
        (lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), W[:, :, None, None]), x4),
        (lambda x: F.conv3d(F.interpolate(x, scale_factor=2.0), W[:, :, None, None, None]), x5),
        (lambda x: F.interpolate(x, size=(9, 7), mode="nearest-exact"), x4),
        (lambda x: F.layer_norm(F.linear(x, W), (8,)), x3),
        (lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1), x3),
        (lambda x: F.scaled_dot_product_attention(x, x, x, torch.zeros(6, 6)), x3),
        (lambda x: torch.bmm(x, x.mT), x3),
        (lambda x: torch.cat([x, x.flip(1), x[:, ::2]], 1), x3),
        (lambda x: x.mean((1, 2), keepdim=True) + x.sum(-1, keepdim=True), x3),
        (lambda x: F.normalize(x, dim=1) * 3, x4),
        (lambda x: x.transpose(0, 1).mean(0) * 2, x3),
        (lambda x: (x[:, :1].transpose(0, 1) + 1, x[:, :1] + 1), x3),
        (lambda x: ((y := x[:, :1] + 1), y.view(1, 4, 8), y.transpose(0, 1)), x3),
        (lambda x: (x.mean(1) + x.sum(1))[:, None].expand(-1, 6, -1) * x, x3),
        (lambda x: x.movedim(2, 1).flatten(0, 1).relu().unflatten(0, (4, 3)).movedim(1, 2), x5),
        (lambda x: x.transpose(0, 1).reshape(6, 4, 2, 4).softmax(-1).flatten(1, 2) * 2, x3),
        (lambda x: torch.cat([torch.zeros(4, 2, 8), x, x.new_ones(4, 1, 8)], 1), x3),
        (lambda x: torch.cat([x, torch.arange(8.0).expand(4, 1, 8)], 1), x3),
        (lambda x: torch.empty(4, 6, 8).copy_(x) * 2, x3),
        (lambda x: [x * 2, {"a": x.mean(2), "b": torch.ones(3)}], x3),
    ],
)
def test_independent_samples(call, x):
    assert slices_of(call, x).number == 4


def rolled(x):
    return torch.cat([x[1:], x[:1]])


@pytest.mark.parametrize(
    ("call", "x"),
    [
        (lambda x: x - x.mean(0, keepdim=True), x3),
        (lambda x: x.mean(), x3),
        (lambda x: x * 2 + x.sum((0, 1)), x3),
        (lambda x: F.normalize(x, dim=0), x3),
        (rolled, x4),
        (lambda x: x.flip(0) * 2, x4),
        (lambda x: x[:2] * 2, x4),
        (lambda x: x[::2] * 2, x4),
        (lambda x: x.softmax(0), x3),
        (lambda x: x.cumsum(0), x3),
        (lambda x: x.transpose(0, 1).flatten(0, 1) * 2, x3),
        (lambda x: x.flatten() * 2 @ torch.ones(192), x3),
        (lambda x: x.transpose(0, 1) * x[:1].mean(), x3),
        (lambda x: x.transpose(0, 1)[:4, :, :4] * x[:, :4, :4], x3),
        (lambda x: torch.einsum("ijk,ljk->il", x, x), x3),
        (lambda x: F.linear(x.movedim(0, -1), torch.ones(4, 4)), x3),
        (lambda x: F.layer_norm(x.movedim(0, -1), (4,)), x3),
        (lambda x: F.group_norm(x.transpose(0, 1), 2), torch.randn(4, 6, 8, 2)),
        (lambda x: F.conv2d(x.transpose(0, 1), torch.ones(3, 4, 1, 1)), x4),
        (lambda x: F.conv2d(x, x[:, :, :1, :1]), x4),
        (lambda x: F.conv3d(x.view(2, 2, 8, 6, 5).transpose(1, 2), torch.ones(8, 8, 2, 1, 1)), x4),
        (lambda x: F.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3), x3),
        (lambda x: F.pad(x.movedim(0, 2), (1, 1, 1, 1)) * 2, x4),
        (lambda x: F.interpolate(x.movedim(0, 2), scale_factor=2.0), x4),
        (lambda x: x + torch.arange(4.0)[:, None, None], x3),
        (lambda x: x * 2 + torch.rand(4, 1, 1) * 0, x3),
        (lambda x: x.add_(1), x3),
        (lambda x: x.sort(1).values, x3),  # no rule says what sorts
        (lambda x: torch.frexp(x), x3),
        (lambda x: F.batch_norm(x, None, None, training=True), x4),
    ],
)
def test_samples_that_may_meet_stay_together(call, x):
    assert slices_of(call, x) is None


def test_no_op_that_reduces_counts_as_pointwise():
    for name in ("amax", "amin", "max", "mean", "min", "norm", "prod", "sum", "var"):
        packet = getattr(torch.ops.aten, name)
        reducing = [o for o in packet.overloads() if o in ("default", "dim", "dim_IntList")]
        assert not any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in reducing)


def test_each_tensor_has_its_axis():
    def call(x, t, shared):
        y = torch.cos(t)[:, None, None] * shared * x
        return y.transpose(0, 1), y.flatten(0, 1), shared + 1

    found = slices_of(call, x3, torch.randn(4), torch.randn(1, 6, 8))
    assert found == Slices(4, (0, 0, None), (1, 0, None))


def test_results_keep_their_layout_and_own_their_memory():
    x = x4.contiguous(memory_format=torch.channels_last)
    plan = plan_in_slices(torch.nn.Module(), lambda x: (F.group_norm(x, 2), x[:, :, 1:], x.mean(1)), x)
    y, part, mean = plan((x,))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert part.stride(1) == 1
    assert mean.is_contiguous()
    assert len({t.untyped_storage().data_ptr() for t in (x, y, part, mean)}) == 4


def test_tensors_at_any_address():
    """Kernels are compiled for an alignment. A slice of 15 numbers begins at another one."""
    slices_of(lambda x: F.silu(x) * 2, torch.randn(4, 3, 5))


# ---- how many slices


def count_of(*shape, call=None, parameters=(8, 8), results=1):
    """The number of slices of a call whose values take twice the bytes of its tensor at once."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(*parameters, device="meta"))

    def double(x):
        y = F.linear(x, model.weight)
        return [y.relu()[..., : 8 // 8], *[y.relu() * i for i in range(2, results)]]

    found = sliced(trace(model, double, torch.empty(*shape, device="meta"))).slices
    return 1 if found is None else found.number


GB = 1 << 30  # of a tensor with 2^25 rows of 8 numbers in fp32


@pytest.mark.parametrize(
    ("rows", "batch", "count"),
    [
        pytest.param(1 << 25, 1, 1, id="one-sample"),
        pytest.param(1 << 22, 4, 1, id="little-memory"),
        pytest.param(1 << 25, 2, 2, id="two-do-not-fit"),
        pytest.param(1 << 25, 5, 5, id="none-fits"),
        pytest.param(1 << 23, 6, 2, id="three-fit"),
        pytest.param(1 << 23, 7, 7, id="no-divisor"),
    ],
)
def test_a_slice_has_as_many_samples_as_fit(rows, batch, count):
    assert count_of(batch, rows, 8) == count


def test_parameters_must_be_small():
    """Each slice reads all of them again."""
    assert count_of(2, 1 << 25, 8, parameters=(8, 8)) == 2
    assert count_of(2, 1 << 14, 1 << 14, parameters=(1 << 14, 1 << 14)) == 1


def test_results_must_be_small():
    """Slices save nothing of what the call returns."""
    assert count_of(2, 1 << 25, 8, results=3) == 1


# ---- whole models


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "shape"),
    [
        ("AutoencoderKL", (1, 4, 128, 128)),
        ("AutoencoderDC", (1, 32, 32, 32)),
        ("AutoencoderKLHunyuanVideo", (1, 16, 3, 60, 104)),
    ],
)
def test_memory_of_a_decoder_does_not_grow_with_the_batch(cls, shape):
    from tests.plans.real_sizes import NETWORKS

    network = next(n for name, n in NETWORKS.items() if n.cls == cls and "decode" in name)
    with torch.device("meta"):
        decoder = of_diffusers(cls, **network.settings).to(torch.bfloat16).eval().decoder
    memory = []
    for batch in (1, 2, 4):
        z = torch.empty(batch, *shape[1:], dtype=torch.bfloat16, device="meta")
        traced = sliced(trace(decoder, decoder, z))
        graph = rewrite(traced.graph.graph)
        assert (traced.slices and traced.slices.number) == (batch if batch > 1 else None)
        memory.append(peak(graph))
    assert memory[1] == memory[2] == memory[0] > 5e8


def with_batch(call, batch):
    """``call`` with ``batch`` times as many samples."""
    inputs = {
        name: Size((batch * value.shape[0], *value.shape[1:])) if isinstance(value, Size) else value
        for name, value in call.inputs.items()
    }
    return call._replace(inputs=inputs)


INDEPENDENT = [
    call
    for call in CALLS
    if "Autoencoder" in call.cls or call.cls == "VQModel"
    if call.method in ("encode", "decode") and not call.why_not
    if not call.cls.endswith(("Allegro", "HunyuanVideo15"))  # which take one video at a time
    if call.name != "VQModel.decode"  # which looks up codes: no rule says that this keeps samples apart
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "call",
    [pytest.param(call, id=call.name, marks=[pytest.mark.slow] * call.is_slow) for call in INDEPENDENT],
)
def test_slices_compute_what_the_model_computes(call, monkeypatch):
    everything_pays(monkeypatch)
    call = with_batch(call, 2)
    model = in_channels_last(call.model())
    call.run(model, **call.drawn(0))
    plan = plan_in_slices(model, lambda **inputs: call.run(model, **inputs), **call.drawn(0))
    mixes_frames = call.cls == "AutoencoderKLTemporalDecoder" and call.method == "decode"
    assert (plan.slices is None) == mixes_frames
    for seed in (1, 2):
        found, expected = plan((), call.drawn(seed)), call.run(model, **call.drawn(seed))
        assert max(map(programs.relative, found, expected)) <= 1e-5
