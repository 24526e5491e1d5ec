"""Subclasses of ``nn.GroupNorm`` whose ``forward`` is known: GroupNorm32, and timm's GroupNormAct."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sdfastgn
from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.layers import known_norms
from sdfastgn.patches.swap.tested_sources import definition_of, hash_of
from tests.pages import BLOCKS
from tests.patches import cases
from tests.patches.cases import WHERE, agree, gradients, image, same_gradients
from tests.patches.group_norm_32 import GroupNorm32

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]


def twins(stock):
    return cases.random_twins(stock, strict=True)


def status(module):
    return [(e.fusion, e.status, e.reason) for e in sdfastgn.report(module).entries]


# ---- GroupNorm32


def test_a_cast_and_its_activation_are_one_kernel(launches):
    """With fp16 images and fp32 weights, the kernel rounds once."""
    fused, stock = twins(nn.Sequential(GroupNorm32(4, 8), nn.SiLU()))
    x = image(2, 8, 6, 5, dtype=torch.float16)
    y, expected = fused(x), stock(x)
    assert y.dtype == torch.float16
    agree(y, expected, 2e-3)
    names = [name for name, _, _ in launches]
    assert names == ["small"]
    fused[0](x=x)  # alone
    assert len(launches) == 2


@pytest.mark.gpu
def test_a_cast_under_autocast_on_the_gpu():
    fused, stock = twins(nn.Sequential(GroupNorm32(4, 8), nn.SiLU()))
    x = image(2, 8, 6, 5, dtype=torch.float16)
    with torch.autocast("cuda"):
        y, expected = fused(x), stock(x)
    assert y.dtype == expected.dtype == torch.float16
    agree(y, expected, 2e-3)


def test_it_stays_an_instance_of_its_class():
    norm = GroupNorm32(4, 8)
    other = GroupNorm32(4, 8)
    sdfastgn.optimize(norm)
    assert isinstance(norm, GroupNorm32)
    assert type(norm) is not GroupNorm32
    assert type(other) is GroupNorm32
    assert status(norm) == [("group_norm_subclass", "fused", "")]
    assert type(sdfastgn.optimize(other)) is type(norm)
    assert type(sdfastgn.restore(norm)) is GroupNorm32


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_a_cast_without_kernels_is_stocks(dtype):
    fused, stock = twins(GroupNorm32(4, 8))
    x = torch.randn(2, 8, 6, 5, device=WHERE["device"]).to(dtype)
    with dispatch.stock_code():
        y = fused(x)
    assert torch.equal(y, stock(x))
    assert y.dtype == dtype


class NoCastBack(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.float())


class Twice(GroupNorm32):
    def forward(self, x):
        return super().forward(x) * 2


class Derived(GroupNorm32):
    """A class with the code of a known class, but not derived from ``nn.GroupNorm`` directly."""

    forward = GroupNorm32.forward


def wrapped(forward):
    return functools.wraps(forward)(lambda self, x: forward(self, x) * 2)


class Wrapped(nn.GroupNorm):
    forward = wrapped(GroupNorm32.forward)


@pytest.mark.parametrize(
    ("cls", "fusion", "base"),
    [
        (NoCastBack, "group_norm", "GroupNorm"),
        (Wrapped, "group_norm", "GroupNorm"),
        (Twice, "group_norm_subclass", "GroupNorm32"),
        (Derived, "group_norm_subclass", "GroupNorm32"),
    ],
)
def test_other_subclasses_are_reported(cls, fusion, base):
    module = sdfastgn.optimize(cls(4, 8))
    assert type(module) is cls
    reason = f"its class {cls.__module__}.{cls.__qualname__} is a subclass of {base}"
    assert status(module) == [(fusion, "skipped", reason)]


def test_a_class_that_is_patched_later_is_restored(monkeypatch):
    norm = sdfastgn.optimize(GroupNorm32(4, 8))
    monkeypatch.setattr(GroupNorm32, "forward", NoCastBack.forward)
    sdfastgn.optimize(norm)
    assert type(sdfastgn.restore(norm)) is GroupNorm32
    assert [s for _, s, _ in status(norm)] == ["skipped"]


# ---- GroupNormAct


class NormAct(nn.GroupNorm):
    """Replaces timm's class if timm is not installed. It computes the same with other code."""

    def __init__(self, num_channels, num_groups=32, drop_layer=nn.Identity):
        super().__init__(num_groups, num_channels)
        self.drop, self.act, self._fast_norm = drop_layer(), nn.ReLU(inplace=True), False

    def forward(self, x):
        return self.act(self.drop(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)))


def timms():
    try:  # a torchvision of another build of torch is a RuntimeError
        from timm.layers.norm_act import GroupNormAct
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"timm cannot be imported: {error}")
    return GroupNormAct


@pytest.fixture(params=["stand-in", "timm"])
def norm_act(request, monkeypatch):
    if request.param == "timm":
        return timms()
    monkeypatch.setitem(known_norms._KINDS, hash_of(definition_of(NormAct.forward)), known_norms.NORM_ACT)
    return NormAct


def test_norm_and_activation_are_one_kernel(norm_act, launches):
    fused, stock = twins(norm_act(8, 4))
    x = image(2, 8, 6, 5)
    agree(fused(x), stock(x))
    assert [name for name, _, _ in launches] == ["small"]
    assert fused(x).min() == 0
    assert isinstance(fused, norm_act)
    assert type(sdfastgn.restore(fused)) is norm_act


@pytest.mark.parametrize("kind", ["cast", "activation"])
def test_gradients(norm_act, kind):
    stock = norm_act(8, 4) if kind == "activation" else nn.Sequential(GroupNorm32(4, 8), nn.SiLU())
    same_gradients(twins(stock), image(2, 8, 6, 5).requires_grad_())


@pytest.mark.parametrize("change", ["drop", "hook", "activation"])
def test_what_is_between_norm_and_activation_stays(norm_act, change, launches):
    stock = norm_act(8, 4, drop_layer=functools.partial(nn.Dropout, 1.0) if change == "drop" else nn.Identity)
    if change == "activation":
        stock.act = nn.Tanh()
    fused, stock = twins(stock)
    if change == "drop":
        fused.train(), stock.train()
    seen = []
    if change == "hook":
        for module in (fused, stock):
            module.drop.register_forward_hook(lambda module, args, y: seen.append(y.clone()))
    x = image(2, 8, 6, 5)
    agree(fused(x), stock(x))
    assert [name for name, _, _ in launches] == ["small"]
    if change == "drop":
        assert not fused(x).any()
    if change == "hook":
        agree(*seen)
        assert seen[0].min() < 0


def test_fast_norm_is_left_to_timm(norm_act, launches):
    stock = norm_act(8, 4)
    fused = sdfastgn.optimize(copy.deepcopy(stock))
    for module in (stock, fused):
        module._fast_norm = True
        module.to(WHERE["device"])
    x = image(2, 8, 6, 5)
    assert torch.equal(fused(x), stock(x))
    assert not launches
    reason = "timm's fast norm is on, which computes in autocast's dtype"
    assert status(sdfastgn.optimize(stock)) == [("group_norm_subclass", "skipped", reason)]


def test_norm_and_activation_without_kernels_are_stocks(norm_act):
    fused, stock = twins(norm_act(8, 4))
    x = torch.randn(2, 8, 6, 5, device=WHERE["device"])
    with dispatch.stock_code():
        assert torch.equal(fused(x), stock(x))
        agree(fused(x.to(memory_format=torch.channels_last)), stock(x))


def test_a_fork_with_another_functional_is_not_known(norm_act, monkeypatch):
    monkeypatch.setitem(norm_act.forward.__globals__, "F", None)
    assert [s for _, s, _ in status(norm_act(8, 4))] == ["skipped"]


def test_a_network_of_timm():
    norm = functools.partial(timms(), num_groups=8)
    from timm.models.resnetv2 import ResNetV2

    stock = ResNetV2(layers=[1, 1, 1], channels=(32, 64, 64), num_classes=5, stem_chs=16, norm_layer=norm)
    fused, stock = twins(stock)
    parts = sdfastgn.report(fused)
    assert {e.fusion for e in parts.fused} == {"group_norm_subclass"}
    assert len(parts.fused) == sum(isinstance(m, nn.GroupNorm) for m in stock.modules()) > 8
    x = image(1, 3, 32, 32).requires_grad_()
    agree(fused(x), stock(x), 1e-4)
    for a, b in zip(gradients(fused, x), gradients(stock, x), strict=True):
        agree(a, b, 1e-3)
    sdfastgn.restore(fused)
    assert torch.equal(fused(x), stock(x))
    assert [type(m) for m in fused.modules()] == [type(m) for m in stock.modules()]


def test_the_example_of_the_page():
    timms()
    [block] = [b for b in BLOCKS if b.page == "docs/other-models.md" and "timm" in b.code]
    with torch.device(WHERE["device"]):
        exec(block.code, {"torch": torch, "sdfastgn": sdfastgn})
