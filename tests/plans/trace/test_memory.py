"""Where values lie: a trace knows it, or refuses calls whose result depends on it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sdfastgn.plans.trace.traced import Untraceable
from sdfastgn.plans.trace.tracer import trace
from tests.plans.trace.runs import Net, check, run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Shapes of 4-d and 5-d tensors, many with axes of one element, for which several strides are the same.
SHAPES = [(2, 4, 6, 8), (1, 4, 6, 8), (2, 1, 6, 8), (1, 1, 6, 8), (2, 4, 1, 1), (1, 4, 1, 8), (1, 4, 6, 1),
          (2, 4, 3, 6, 8), (1, 4, 3, 6, 8), (1, 4, 1, 6, 8), (1, 1, 3, 6, 8), (1, 4, 1, 1, 1)]  # fmt: skip


def weight(x, *, groups=1, last=False):
    w = torch.ones(4 if groups == 1 else x.shape[1], 1 if groups > 1 else x.shape[1], *[3] * (x.dim() - 2))
    return in_channels_last(w.to(x.device, x.dtype)) if last else w.to(x.device, x.dtype)


def in_channels_last(x):
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return x.contiguous(memory_format=last)


def convolution(x, **kwargs):
    w = weight(x, **kwargs)
    return (F.conv2d if x.dim() == 4 else F.conv3d)(x, w, padding=1, groups=kwargs.get("groups", 1))


def one_by_one(x):
    w = in_channels_last(torch.ones(3, x.shape[1], *[1] * (x.dim() - 2), device=x.device))
    return (F.conv2d if x.dim() == 4 else F.conv3d)(x, w, torch.ones(3, device=x.device), stride=2)


CERTAIN = {
    "convolution": convolution,
    "convolution, weight channels-last": lambda x: convolution(x, last=True),
    "convolution of one pixel": one_by_one,
    "convolution in bfloat16": lambda x: convolution(x.bfloat16(), last=True),
    "depthwise convolution": lambda x: convolution(x, groups=x.shape[1]),
    "group norm": lambda x: F.group_norm(x, 1),
    "group norms": lambda x: F.group_norm(F.group_norm(x, 1), 1),
    "norm, then convolution": lambda x: convolution(F.silu(F.group_norm(x, 1))),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "RMS norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "normalize": lambda x: F.normalize(x, dim=1),
    "zeros around": lambda x: F.pad(x, (1, 1, 1, 0)),
    "linear": lambda x: F.linear(x, torch.ones(5, x.shape[-1], device=x.device)),
    "product": lambda x: x @ x.transpose(-1, -2),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "mean of channels": lambda x: x.mean(1),
    "largest": lambda x: x.amax(1),
    "softmax": lambda x: x.softmax(1),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x], 1),
    "repeat": lambda x: x.repeat(1, 2, *[1] * (x.dim() - 2)),
    "pointwise": lambda x: x * x.sum((2, 3), keepdim=True) + 1,
    "where": lambda x: torch.where(x[:, :1] > 0, x, 0.0),
    "flip": lambda x: x.flip(2),
    "zeros": torch.zeros_like,
    "clone": torch.clone,
    "cast": lambda x: x.to(torch.bfloat16).float(),
}


def is_dense(x):
    return x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last_3d)


LAYOUTS = {
    "contiguous": torch.clone,
    "channels-last": in_channels_last,
    "transposed": lambda x: x.transpose(-1, -2),
    "gaps": lambda x: x[:, :, ::2],
    "moved": lambda x: x.movedim(1, -1),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CERTAIN)
def test_strides_are_those_of_the_device(name, device):
    """Strides of axes of one element decide nothing."""

    def call(x):
        y = CERTAIN[name](x)
        seen.append([stride for n, stride in zip(y.shape, y.stride(), strict=True) if n > 1])
        return y

    for shape in SHAPES:
        for layout, lay_out in LAYOUTS.items():
            seen = []
            x = lay_out(torch.randn(shape, device=device))
            if name == "depthwise convolution" and x.is_cuda and x.dim() == 5 and not is_dense(x):
                continue  # PyTorch 2.11's own kernel reads beyond the memory of some of these
            with torch.no_grad():
                call(x)
            trace(nn.Identity(), call, x)
            assert seen[0] == seen[1], (shape, layout)


# ---- results of attention may be laid out in several ways


def attention(x):
    return F.scaled_dot_product_attention(*[x.reshape(2, 3, 2, 4).transpose(1, 2)] * 3)


COPIES = {
    "contiguous": lambda y: y.contiguous(),
    "contiguous, transposed": lambda y: y.transpose(1, 2).contiguous(),
    "channels-last": lambda y: y.to(memory_format=torch.channels_last),
    "channels-last copy": lambda y: y.contiguous(memory_format=torch.channels_last),
    "reshape": lambda y: y.transpose(1, 2).reshape(2, 3, 8),
    "reshape as": lambda y: y.transpose(1, 2).reshape_as(torch.empty(2, 24)),
    "flatten": lambda y: y.flatten(1),
    "ravel": lambda y: y.ravel(),
    "part": lambda y: y[:, :1].contiguous(),
    "twice": lambda y: y.transpose(1, 2).reshape(2, 3, 8).reshape(-1),
}
X = (2, 24)


def written_first(net, x, copy):
    y = attention(x)
    z = copy(y)
    y.mul_(2)
    return z


def written_after(net, x, copy):
    y = attention(x)
    z = copy(y)
    z[:1].add_(1)
    return y


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("call", [written_first, written_after])
def test_what_strides_decide_is_refused(call, name):
    with pytest.raises(Untraceable, match="strides decide"):
        trace(Net(call), Net(call), torch.randn(X), COPIES[name])


def test_values_of_such_results_count_as_well():
    def call(net, x):
        y = attention(x) * 2
        z = y.flatten(1)
        y.mul_(2)
        return z

    with pytest.raises(Untraceable, match="strides decide"):
        trace(Net(call), Net(call), torch.randn(X))


def one_side(net, x):
    """Only the tensor that is written is read later."""
    y = attention(x)
    z = y.transpose(1, 2).reshape(2, 3, 8)
    z += 1
    z[:, :1].mul_(2)
    a = attention(x)
    a.contiguous()
    a.relu_()
    return z, a, z.reshape(-1)


def written_before(net, x):
    y = attention(x)
    y.mul_(2)
    z = y.flatten(1)
    return y, z


def views(net, x):
    """No strides make a copy of these."""
    y = attention(x)
    parts, same, kept = y.reshape(2, 2, 3, 2, 2), y.reshape(2, 1, 2, 3, 4), y.to(y.dtype)
    y.mul_(2)
    return parts, same, kept, y


def copies(net, x):
    y = attention(x)
    z, wide = y.contiguous().clone(), y.to(torch.float64, memory_format=torch.channels_last)
    product = y.flatten(1) @ torch.ones(24, 4)
    flat = product.reshape(-1)
    flat.add_(1)
    y.mul_(2)
    return z, wide, product, y


def contiguous(net, x):
    """A contiguous copy is contiguous everywhere."""
    y = attention(x).contiguous()
    z = y.reshape(4, 12)
    z.mul_(2)
    return y


@pytest.mark.parametrize("call", [one_side, written_before, views, copies, contiguous])
def test_the_rest_is_traced(call):
    check(call, X)


def test_norms_keep_channels_last():
    """With one image too, where PyTorch's kernel for a CPU is another one than that of fake tensors."""

    def call(x):
        y = F.group_norm(F.group_norm(x, 1), 1)
        z = y.movedim(1, -1).contiguous()
        z[:1] = 0.5
        return y

    x = in_channels_last(torch.randn(1, 8, 6, 5))
    found = run(trace(nn.Identity(), call, x), x)
    torch.testing.assert_close(found, call(x))
    assert (found == 0.5).all()
