"""Products of one tensor with several parameters."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.plans.rewrite import packs
from tests.plans.rewrite.rewriting import checked, steps_of

x = torch.randn(2, 5, 8)
A, B, C = torch.randn(6, 8), torch.randn(4, 8), torch.randn(4, 8)
a, b, c = torch.randn(6), torch.randn(4), torch.randn(4)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: (F.linear(x, A), F.linear(x, B), F.linear(x, C)),
        lambda x: (F.linear(x, A, a), F.linear(x, B, b)),
        lambda x: F.linear(x, B, b) * F.linear(x, C, b),
    ],
)
def test_products_of_one_tensor(call):
    assert [s for s in steps_of(call, x) if s != "aten.mul"] == ["linears"]


def test_groups_with_and_without_bias():
    def call(x):
        return F.linear(x, A, a), F.linear(x, B), F.linear(x, B, b), F.linear(x, C)

    plan = checked(call, x)
    assert plan.steps == ["linears", "linears"]
    assert sorted(len(n.args[2]) for n in plan.graph.nodes if "linears" in str(n.target)) == [0, 2]


def test_products_of_such_a_product():
    """Keys and values of a product that itself runs beside another one, two times."""
    of_a, more_of_a = torch.randn(4, 6), torch.randn(6, 6)

    def call(x):
        y, z = F.linear(x, A), F.linear(x, B)
        v, w = F.linear(y, of_a), F.linear(y, more_of_a)
        return z, v, F.linear(w, of_a, b), F.linear(w, more_of_a, a)

    assert steps_of(call, x) == ["linears"] * 3


@pytest.mark.parametrize(
    "call",
    [
        lambda x: (F.linear(x, A), F.linear(x * 2, B)),
        lambda x: (F.linear(x, A), F.linear(x, B, b)),
        lambda x: (F.linear(x, B), F.linear(x, B, b), F.linear(x, B, b * 2)),
        lambda x: (F.linear(x, A), F.linear(x, B * 2)),
        lambda x: (F.linear(x, B, b), F.linear(x, B, c)),
        lambda x: (F.linear(x, A, a * 2), F.linear(x, B, b)),
        lambda x: (F.linear(x.sum(0), A), F.linear(x.sum(0), B)),
        lambda x: (F.linear(x, B, b), F.linear(x, B, a[:4])),
    ],
)
def test_other_products_stay(call):
    assert "linears" not in steps_of(call, x)


def test_large_products_stay(monkeypatch):
    def call(x):
        return F.linear(x, A), F.linear(x, B)

    monkeypatch.setattr(packs, "MAX_ELEMENTS", 60)
    assert steps_of(call, x) == ["linears"]
    monkeypatch.setattr(packs, "MAX_ELEMENTS", 59)
    assert steps_of(call, x) == ["linear", "linear"]
