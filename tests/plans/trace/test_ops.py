"""Ops become nodes of a graph that computes the same for other inputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sdfastgn.plans.trace.traced import Untraceable
from sdfastgn.plans.trace.tracer import trace
from tests.plans.trace.runs import Net, check, run, targets

aten = torch.ops.aten


def attention(net, x):
    q = x.view(1, 1, 4, 4)
    return F.scaled_dot_product_attention(q, q, q * 2, is_causal=True, scale=0.3)


WHOLE = {
    aten.linear.default: lambda net, x: F.linear(x, net.weight, net.table),
    aten.layer_norm.default: lambda net, x: F.layer_norm(x, (4,), net.table),
    aten.group_norm.default: lambda net, x: F.group_norm(x[None], 2, net.table, net.table),
    aten.rms_norm.default: lambda net, x: F.rms_norm(x, (4,), net.table, 1e-5),
    aten.scaled_dot_product_attention.default: attention,
}


@pytest.mark.parametrize("op", WHOLE, ids=str)
def test_linear_norms_and_attention_stay_whole(op):
    assert targets(check(WHOLE[op])).count(op) == 1


@torch.no_grad()
def test_cudnns_convolution_is_a_convolution():
    x, w = torch.randn(1, 4, 3, 5, 6), torch.randn(6, 2, 2, 3, 3)

    def of_cudnn(x, w):
        return torch.ops.aten.cudnn_convolution(x, w, [0, 1, 1], [1, 2, 1], [1, 1, 1], 2, False, False, True)

    traced = trace(nn.Identity(), of_cudnn, x, w)
    expected = F.conv3d(x, w, stride=(1, 2, 1), padding=(0, 1, 1), groups=2)
    torch.testing.assert_close(run(traced, x, w), expected)


def literals(net, x):
    number = int(torch.tensor([1.0, 2.0, 3.0])[1]) + torch.arange(4)[2].item()
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0]) * number + torch.linspace(0, 1, 4) + x.new_tensor([2.0])


def masks(net, x):
    m = torch.tensor([True, False, True, True])
    return x[m], torch.masked_select(torch.arange(4), m), x.repeat_interleave(torch.tensor([1, 2, 1, 1]), 0)


def parts(net, x):
    a, b = (x @ net.weight).split(2, 1)
    c, d = x.chunk(2)
    return a * b + c.sum(), d, x.unbind(1)[1], tuple(torch.topk(x, 2)), x.split([1, 3])[1]


def shapes(net, x):
    y = torch.stack([x, x * 2]).unflatten(0, (2, 1)).movedim(0, -1).flatten(1)
    return y * x.stride(0), y if y.is_contiguous() else -y, y.view_as(y).permute(1, 0)


def rotated(net, x):
    pairs = torch.view_as_complex(x.reshape(4, 2, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones(2), torch.arange(2.0)))


def images(net, x):
    y = F.pad(F.interpolate(x[None, None], scale_factor=2.0), (1, 1, 2, 0), mode="reflect")
    normed = F.batch_norm(y, net.table[:1], net.table[:1].abs() + 1)
    return (
        F.conv2d(y, net.weight[None, None, :3, :3], padding="same"),
        F.avg_pool2d(y, 2),
        normed,
        F.instance_norm(y),
    )


def weight_normed(net, x):
    return x @ torch._weight_norm(net.weight.t(), net.table[None], 1), torch._weight_norm(x, x[:, :1], 0)


def profiled(net, x):
    with torch.profiler.record_function("part"):
        return x @ net.weight


def several(net, x):
    return {"a": x * 1, "b": [None, 3, "text", net.weight, x]}


@torch.jit.script
def scripted(x):
    return x * 2 + x.relu()


OTHER = [literals, masks, parts, shapes, rotated, images, weight_normed, profiled, several]
OTHER += [lambda net, x: scripted(x), lambda net, x: torch.vmap(lambda row: row * 2 + net.table)(x)]
OTHER += [lambda net, x: torch.einsum("ij,kj->ik", x, net.weight), lambda net, x: x.unfold(0, 2, 1) + 1]
OTHER += [lambda net, x: F.dropout(x, 0.5, training=False) * 2, lambda net, x: x + torch.Tensor([2.0])]


@pytest.mark.parametrize("call", OTHER)
def test_other_inputs_give_what_the_call_gives(call):
    check(call)


def test_python_may_catch_errors_that_the_call_raises_too():
    def call(net, x):
        try:
            return x.t().view(16)
        except RuntimeError:
            return x.t().reshape(16)

    check(call)


# ---- where tensors come from


def test_parameters_are_read_by_name_and_other_tensors_by_reference():
    scale = torch.tensor([2.0])
    net = Net(lambda net, x: (x @ net.weight + net.table) * scale)
    with torch.no_grad():
        traced = trace(net, net, torch.randn(4, 4))
        assert traced.parameters == [(net, "_parameters", "weight"), (net, "_buffers", "table")]
        assert traced.others == [scale]
        net.load_state_dict({name: t + 1 for name, t in net.state_dict().items()}, assign=True)
        scale.fill_(3)
        x = torch.randn(4, 4)
        torch.testing.assert_close(run(traced, x), net(x))


def test_only_what_is_read_is_an_input_and_in_the_order_of_the_contract():
    early = torch.ones(4)
    traced = check(lambda net, x, y: x + early + net.table * torch.ones(()) + y, (4,), (4,))
    names = [n.name for n in traced.graph.graph.nodes if n.op == "placeholder"]
    assert [name.rpartition("_")[0] for name in names] == ["parameter", "other", "input", "input"]


def test_tied_weights_and_data_are_one_input():
    net = Net(lambda net, x: x @ net.weight + x @ net.tied + x @ net.weight.data + x @ data)
    net.tied = net.weight
    data = net.weight.data
    traced = trace(net, net, torch.randn(4, 4))
    assert traced.parameters == [(net, "_parameters", "weight")]
    assert not traced.others
    x = torch.randn(4, 4)
    with torch.no_grad():
        torch.testing.assert_close(run(traced, x), net(x))


def test_parameters_on_the_meta_device_are_traced():
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()).half()
        traced = trace(net, net, torch.empty(2, 4, 64, 64, dtype=torch.float16))
    (out,) = next(n for n in traced.graph.graph.nodes if n.op == "output").args[0]
    assert out.meta == {"shape": (2, 8, 64, 64), "dtype": torch.float16, "device": torch.device("meta")}


def test_a_graph_keeps_no_tensors_of_the_trace():
    traced = check(lambda net, x: (x * 2)[1:].relu())
    for n in traced.graph.graph.nodes:
        assert set(n.meta) <= {"shape", "dtype", "device"}


# ---- settings around a call


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradient_modes(around):
    net = Net(lambda net, x: F.linear(x, net.weight[:2]).relu_())
    with around():
        traced = trace(net, net, torch.randn(4, 4))
    with torch.no_grad():
        x = torch.randn(4, 4)
        torch.testing.assert_close(run(traced, x), net(x))


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_casts_in_the_graph_and_keeps_no_traced_weights(inside):
    def call(net, x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, net.weight) + F.linear(x, net.weight)

    plain = Net(lambda net, x: F.linear(x, net.weight) + F.linear(x, net.weight))
    net, x = (Net(call) if inside else plain), torch.randn(4, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        traced = trace(net, net, torch.randn(4, 4))
        expected = net(x)
    assert expected.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(run(traced, x), expected)


def test_the_default_dtype_is_part_of_the_table_of_shapes(monkeypatch):
    def call(net, x):
        return torch.ones(4) + torch.arange(4) * 0.5

    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            check(call)
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_traced_tensor_has_the_strides_of_the_call():
    seen = []

    def call(net, x):
        y = F.conv2d(x, torch.ones(4, 4, 1, 1)).transpose(1, 2)[:, 1:]
        seen.append((y.shape, y.stride(), y.is_contiguous()))
        return y * 1

    net, x = nn.Identity(), torch.randn(2, 4, 4, 4).to(memory_format=torch.channels_last)
    trace(net, lambda x: call(net, x), x)
    call(net, x)
    assert seen[0] == seen[1]


def test_arguments_are_checked():
    with pytest.raises(Untraceable, match="an argument is a"):
        trace(nn.Identity(), lambda x: x, torch.eye(2).to_sparse())
    with pytest.raises(Untraceable, match="the call returns a object"):
        trace(nn.Identity(), lambda x: object(), torch.eye(2))
