"""Which models get plans, and what the report says of those that were not called."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sdfastgn
from sdfastgn.plans.install import gets_plans
from tests.patches.cases import agree, noise
from tests.patches.samples import randomize

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return F.normalize(x, dim=1) * self.gamma[:, None, None]


class Convolutions(nn.Module):
    def __init__(self, first=nn.Conv2d):
        super().__init__()
        self.first = first(3, 8, 3) if first is nn.Conv2d else first(8, 3)
        self.rest = nn.Sequential(nn.Conv2d(8, 8, 3), Norm(), nn.Conv2d(8, 3, 3))

    def forward(self, x):
        return self.rest(F.silu(self.first(x)))


def test_lazy_weights_wait_for_their_first_call():
    model = Convolutions(nn.LazyConv2d)
    assert not gets_plans(model)
    assert sdfastgn.optimize(model, missing_ok=True) is model
    sdfastgn.report(model)
    stock = copy.deepcopy(model)
    stock(noise(1, 3, 9, 9))
    model.load_state_dict(stock.state_dict())
    sdfastgn.optimize(model)
    for seed in range(3):  # the first one still removes hooks
        agree(model(noise(1, 3, 8, 9, seed=seed)), stock(noise(1, 3, 8, 9, seed=seed)))
    assert len(vars(model)["forward"].plans) == 1


def test_weights_without_memory():
    with torch.device("meta"):
        model = Convolutions()
    sdfastgn.optimize(model)
    assert model(torch.empty(1, 3, 9, 9, device="meta")).shape == (1, 3, 3, 3)
    stock = randomize(Convolutions())
    model.load_state_dict(stock.state_dict(), assign=True)
    for seed in range(2):
        agree(model(noise(1, 3, 9, 9, seed=seed)), stock(noise(1, 3, 9, 9, seed=seed)))
    assert len(vars(model)["forward"].plans) == 1


def test_the_report_leaves_out_children_that_were_not_called():
    model = sdfastgn.optimize(randomize(Convolutions()))
    assert "plans of" not in str(sdfastgn.report(model))
    model(noise(1, 3, 9, 9))
    assert "plans of Convolutions: 1 alive" in str(sdfastgn.report(model))
    assert "plans of rest" not in str(sdfastgn.report(model))
    model.rest(noise(1, 8, 9, 9))
    assert "plans of rest: 1 alive" in str(sdfastgn.report(model))
