"""What ``survey`` finds in a pipeline, and how often it looks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import sdfastgn
from sdfastgn.survey import Options, survey
from tests.patches import samples

pytestmark = pytest.mark.fused_on_cpu


class Modulated(nn.Module):
    """A transformer without blocks that could be fused."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.proj = nn.Linear(16, 64)

    def forward(self, x):
        return self.proj(self.norm(x))


class Pipe:
    def __init__(self, **models):
        self.components = models
        self.watermark = None


@pytest.fixture
def pipe():
    return Pipe(unet=samples.unet(), transformer=Modulated(), text=nn.Linear(4, 4))


@pytest.fixture
def walks(monkeypatch):
    """Identity of a model -> number of walks over it."""
    found, walk = Counter(), nn.Module.named_modules

    def counted(module, memo=None, *args, **options):
        found[id(module)] += memo is None  # walks inside of a walk have a memo
        return walk(module, memo, *args, **options)

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    return found


@pytest.mark.parametrize("options", [None, Options(), Options(fold_batch_norm=True, exact_tiling=False)])
def test_each_model_is_walked_once(pipe, walks, options):
    found = survey("optimize", pipe, options)
    assert list(found.roots) == ["unet", "transformer"]
    assert [walks[id(model)] for model in pipe.components.values()] == [1, 1, 1]


def test_optimize_hands_down_what_was_found(pipe, walks):
    sdfastgn.optimize(pipe)
    assert max(walks[id(pipe.components[name])] for name in ("unet", "transformer")) <= 14


def test_what_is_found_before_and_after():
    unet = samples.unet()
    stock = survey("optimize", unet).models[""]
    assert (stock.has_fusions, stock.is_graphable, stock.gets_plans, stock.is_stock) == (
        True,
        True,
        False,
        True,
    )
    assert {finding.status for finding in stock.findings} == {"fusable"}
    assert stock.devices == {torch.device("cpu")}
    sdfastgn.optimize(unet)
    fused = survey("optimize", unet).models[""]
    assert not fused.is_stock
    assert "fused" in {finding.status for finding in fused.findings}
    assert fused.modes == {unet: "auto"}
    sdfastgn.restore(unet)
    assert survey("optimize", unet).models[""].is_stock


def test_a_transformer_gets_plans_unless_the_options_forbid_it(pipe):
    kind = survey("optimize", pipe).models["transformer"].kind
    assert (kind.gains, kind.is_transformer, kind.has_plans) == (True, True, False)
    assert list(survey("optimize", pipe, Options(plans=False)).roots) == ["unet"]
    sdfastgn.optimize(pipe)
    assert survey("optimize", pipe).models["transformer"].trusted == frozenset()


def test_a_component_inside_of_another_one_is_left_out():
    unet = samples.unet()
    found = survey("report", Pipe(unet=unet, again=unet, block=unet.mid_block))
    assert list(found.models) == ["unet"]


def test_a_layer_without_a_weight_counts_nothing():
    model = Modulated()
    model.spare = nn.Linear(4, 4)
    model.spare.weight = None
    assert survey("report", model).models[""].gets_plans
    assert sdfastgn.report(sdfastgn.restore(sdfastgn.optimize(model))).plans
