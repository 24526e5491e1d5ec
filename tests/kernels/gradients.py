"""Gradients of ``sdfastgn.group_norm`` beside those of the formula in fp64."""

import functools

import torch

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
