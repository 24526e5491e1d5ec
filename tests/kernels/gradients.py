"""Gradients of ``sdfastgn.group_norm`` beside those of the formula in fp64."""

import functools

import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.group_norm.op import reference_group_norm
from tests.kernels.ops import as_tuple
from tests.kernels.samples import BOUNDS, error, kernels, make, to_layout


def leaves_of(x, *others, dtype=None):
    return [t.to(dtype or t.dtype).detach().requires_grad_() for t in (x, *others)]


def grads_of(call, leaves, dys, dtype=None, *, direct=False):
    """By the kernels, but in fp64 in PyTorch. ``dys``: of each result, None where there is none."""
    leaves = leaves_of(*leaves, dtype=dtype)
    with kernels(direct=direct):  # the backward too
        pairs = zip(as_tuple(call(*leaves)), as_tuple(dys), strict=True)
        results, dys = zip(*((y, dy.to(y.dtype)) for y, dy in pairs if dy is not None), strict=True)
        return torch.autograd.grad(results, leaves, dys, allow_unused=True)


def compare(call, leaves, dy, bound=1e-5, *, direct=False):
    """Gradients of ``call(group_norm, *leaves)`` by the kernels and by the formula; returns the kernels'."""
    got = grads_of(functools.partial(call, sdfastgn.group_norm), leaves, dy, direct=direct)
    want = grads_of(functools.partial(call, reference_group_norm), leaves, dy, torch.float64)
    for g, w, leaf in zip(got, want, leaves, strict=True):
        assert (g.shape, g.dtype) == (leaf.shape, leaf.dtype)
        assert error(g, w) < bound
    return got


def away_from_the_kink(dy, x, groups, weight, bias):
    """At relu's kink a rounding decides between two right answers."""
    z = reference_group_norm(x.double(), groups, weight.double(), bias.double())
    return torch.where(z.abs() < 0.02, 0, dy)


def check(shape, groups, dtype, device, layout, activation, dy_layout, *, direct=False, dy_mean=0.5):
    x, weight, bias = make(shape, dtype, device, layout)
    dy = make(shape, dtype, device, dy_layout, mean=dy_mean, seed=7)[0]
    if activation == "relu":
        dy = to_layout(away_from_the_kink(dy, x, groups, weight, bias), dy_layout)
    leaves = leaves_of(x, weight, bias)
    got = compare(
        lambda f, x, w, b: f(x, groups, w, b, 1e-5, activation), leaves, dy, 2 * BOUNDS[dtype], direct=direct
    )
    assert got[0].stride() == x.stride()


OPERANDS = ("x", "weight", "bias", "shift", "ada_scale", "ada_shift")


def check_operands(
    shape, groups, wanted, device, *, layout="channels_last", rows=None, activation="silu", direct=True
):
    """Gradients of the operands ``wanted`` of a call that has all; ``rows``: the shape of the last three."""
    x, weight, bias = make(shape, device=device, layout=layout)
    dy = make(shape, device=device, layout=layout, seed=4)[0]
    seeds = (torch.Generator().manual_seed(i) for i in range(3))
    others = [torch.randn(rows or shape[:2], generator=g).to(device) for g in seeds]
    operands = dict(zip(OPERANDS, (x, weight, bias, *others), strict=True))

    def call(f, *leaves):
        given = {name: t.to(leaves[0].dtype) for name, t in operands.items()}
        given |= dict(zip(wanted, leaves, strict=True))
        return f(num_groups=groups, activation=activation, **given)

    compare(call, leaves_of(*(operands[name] for name in wanted)), dy, direct=direct)


def check_against_eager(x, groups, weight, bias, bound):
    """Gradients of GroupNorm and SiLU are no less exact than eager's, and the same bits at each run."""
    dy = make(x.shape, x.dtype, x.device, seed=4)[0]
    leaves = leaves_of(x, weight, bias)

    def call(f):
        return lambda x, w, b: f(x, groups, w, b, 1e-5, "silu")

    got, again = (grads_of(call(sdfastgn.group_norm), leaves, dy) for _ in range(2))
    assert all(map(torch.equal, got, again))
    want = grads_of(call(reference_group_norm), leaves, dy, torch.float64)
    eager = torch.autograd.grad(F.silu(F.group_norm(leaves[0].contiguous(), groups, *leaves[1:])), leaves, dy)
    for g, e, w in zip(got, eager, want, strict=True):
        assert error(g, w) <= error(e, w) * 1.05 + bound
