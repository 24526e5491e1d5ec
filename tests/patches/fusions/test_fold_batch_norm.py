"""``optimize(..., fold_batch_norm=True)``: what is folded, when, and the exact undo."""

import copy
import pickle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sdfastgn
from sdfastgn.patches.graphs import install as graphs
from tests.patches.writers import WRITERS

pytestmark = pytest.mark.fused_on_cpu


class Block(nn.Module):
    """A convolution and a norm that are not in a Sequential."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.bn(self.conv(x))


def model():
    found = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(
            nn.Conv2d(8, 8, 3, groups=2), nn.BatchNorm2d(8, affine=False),
            nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.SiLU(),
        ),
        Block(),
    )  # fmt: skip
    for m in found.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
            for p in m.parameters():
                nn.init.normal_(p)
    return found.eval()


X = torch.randn(2, 3, 9, 11, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def compare(ours, stock):
    """Assert that both give the same, and return how many norms ran separately."""
    norms, forward = [], nn.BatchNorm2d.forward
    with mock.patch.object(nn.BatchNorm2d, "forward", lambda self, x: norms.append(self) or forward(self, x)):
        y = ours(X)
    torch.testing.assert_close(y, stock(X), atol=2e-5, rtol=2e-5)
    return len(norms)


def folded(**options):
    stock = model()
    return sdfastgn.optimize(copy.deepcopy(stock), fold_batch_norm=True, **options), stock


def test_norms_behind_convolutions_of_a_sequential_are_folded():
    assert compare(*folded()) == 1  # the block's own
    report = sdfastgn.report(folded()[0])
    assert [e.path for e in report.fused if e.fusion == "batch_norm"] == ["0", "1"]
    (skipped,) = report.skipped
    assert (skipped.path, skipped.fusion) == ("2", "batch_norm")
    assert skipped.reason == "BatchNorm2d is folded in an nn.Sequential alone, and this is a Block"


def entries(module, status):
    return [(e.path, e.fusion) for e in getattr(sdfastgn.report(module), status)]


def test_the_report_names_what_is_folded_once_and_each_norm_that_is_not():
    ours = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8)),
        nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.SiLU()),
    ).eval()
    with pytest.raises(ValueError, match=r"it has no running averages, or .*: 0\.3 \(batch_norm\)"):
        sdfastgn.optimize(ours, fold_batch_norm=True, strict=True)
    sdfastgn.optimize(ours, fold_batch_norm=True)
    folds = [("0", "batch_norm"), ("1", "sequential"), ("1", "batch_norm")]
    assert entries(ours, "fused") == [*folds, ("1.2", "group_norm")]
    assert entries(ours, "skipped") == [("0.3", "batch_norm")]


def test_the_report_names_a_norm_whose_forward_other_code_replaced():
    ours = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
    ).eval()
    ours[0][3].forward = lambda x: x
    sdfastgn.optimize(ours, fold_batch_norm=True)
    [skipped] = sdfastgn.report(ours).skipped
    assert (skipped.path, skipped.reason) == ("0.3", "other code replaced this instance's forward")


def test_an_optimize_that_fails_in_its_second_model_asks_for_no_folding(monkeypatch):
    first, second = (nn.Sequential(nn.GroupNorm(1, 3), nn.SiLU(), nn.BatchNorm2d(3)).eval() for _ in "12")
    pipe = SimpleNamespace(components={"first": first, "second": second})
    sdfastgn.optimize(pipe)
    before = sdfastgn.report(pipe)
    install = graphs.install

    def fail(module, mode):
        if module is second:
            raise RuntimeError("no graphs")
        install(module, mode)

    monkeypatch.setattr(graphs, "install", fail)
    with pytest.raises(RuntimeError, match="no graphs"):
        sdfastgn.optimize(pipe, fold_batch_norm=True)
    assert sdfastgn.report(pipe) == before


PARTS = {
    "norm": (lambda: nn.BatchNorm2d(3), "no BatchNorm2d with running averages is directly behind a Conv2d"),
    "block": (Block, "BatchNorm2d is folded in an nn.Sequential alone, and this is a Block"),
    "no norm": (nn.SiLU, "it has no part of this kind"),
}


@pytest.mark.parametrize("part", PARTS)
def test_the_report_says_that_nothing_is_folded(part):
    build, reason = PARTS[part]
    ours = nn.Sequential(nn.GroupNorm(1, 3), nn.SiLU(), build()).eval()
    before = sdfastgn.report(ours)
    sdfastgn.optimize(ours, fold_batch_norm=True)
    [skipped] = sdfastgn.report(ours).skipped
    assert (skipped.fusion, skipped.reason) == ("batch_norm", reason)
    sdfastgn.restore(ours)
    assert sdfastgn.report(ours) == before


def test_nothing_is_folded_unless_asked():
    stock = model()
    ours = sdfastgn.optimize(copy.deepcopy(stock))
    assert compare(ours, stock) == 3
    assert not [e for e in sdfastgn.report(ours).entries if e.fusion == "batch_norm"]


def test_parameters_stay_and_restore_is_exact():
    ours = model()
    stock = copy.deepcopy(ours)
    state, classes = {k: (t, t.clone()) for k, t in ours.state_dict(keep_vars=True).items()}, kinds(ours)
    attributes = [set(vars(m)) for m in ours.modules()]
    sdfastgn.optimize(ours, fold_batch_norm=True)
    compare(ours, stock)
    for key, t in ours.state_dict(keep_vars=True).items():
        assert t is state[key][0]
        assert torch.equal(t, state[key][1])
    assert sdfastgn.restore(ours) is ours
    assert kinds(ours) == classes
    assert [set(vars(m)) for m in ours.modules()] == attributes
    assert torch.equal(ours(X), stock(X))


def test_restore_finds_a_model_in_which_nothing_could_be_folded():
    ours = model()[2]  # a block of its own
    before = [set(vars(m)) for m in ours.modules()], [t.stride() for t in ours.state_dict().values()]
    sdfastgn.optimize(ours, fold_batch_norm=True)
    sdfastgn.restore(ours)
    after = [set(vars(m)) for m in ours.modules()], [t.stride() for t in ours.state_dict().values()]
    assert after == before


def test_an_image_without_a_batch_is_stocks_error():
    ours, stock = folded()
    for module in (ours, stock):
        with pytest.raises(ValueError, match="expected 4D input"), torch.no_grad():
            module(X[0])


def kinds(module):
    return [type(m) for m in module.modules()]


def test_copies_fold_for_themselves():
    ours, stock = folded()
    compare(ours, stock)
    assert kinds(copy.deepcopy(ours)) == kinds(ours)
    assert kinds(pickle.loads(pickle.dumps(ours[0]))) == kinds(ours[0])
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        twin[0][1].weight.mul_(2)
    assert compare(ours, stock) == 1


def _calibrate(model):
    """Change the running averages with other data, but no parameter."""
    model.train()
    model(X * 2 + 1)
    model.eval()


def _wrap_around(model):
    """Change the padding as code for seamless tiling does."""
    conv = model[0][0]
    conv.padding_mode, conv._reversed_padding_repeated_twice = "circular", [1, 1, 1, 1]


def _fuse_adapter(model):
    """Fuse a LoRA into a convolution and unwrap it, as ``fuse_lora`` and ``unload_lora_weights`` do."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    config = peft.LoraConfig(target_modules=["0.0"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    model[0][0].merge()
    setattr(model[0], "0", model[0][0].base_layer)


CHANGES = {
    "calibrated": _calibrate,
    "padding mode": _wrap_around,
    "in place": lambda m: m[0][1].weight.mul_(2),
    "averages": lambda m: m[0][1].running_mean.add_(1),
    "eps": lambda m: setattr(m[0][1], "eps", 0.5),
    "replaced": lambda m: setattr(m[0][0], "weight", nn.Parameter(m[0][0].weight * 2)),
    "moved": lambda m: setattr(m[0][0].weight, "data", m[0][0].weight.data * 2),
    "adapter fused": _fuse_adapter,
    "loaded": lambda m: m[0].load_state_dict({k: t * 2 for k, t in m[0].state_dict().items()}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_seen(change):
    ours, stock = folded()
    compare(ours, stock)
    before = ours(X)
    with torch.no_grad():
        change(ours)
        change(stock)
        assert compare(ours, stock) == 1
        assert not torch.equal(before, ours(X))


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_a_write_by_any_code_is_seen(writer):
    ours, stock = folded()
    compare(ours, stock)
    before = ours(X)
    for each in (ours, stock):
        writer([each[0][0].weight, each[0][1].weight, each[0][1].bias])
    with torch.no_grad():
        assert compare(ours, stock) == 1
        assert (before - ours(X)).norm() > 0.004 * before.norm()


@pytest.mark.gpu
@torch.no_grad()
def test_a_graph_folds_the_present_numbers():
    ours, stock = (each.cuda() for each in folded())
    x, stream = X.cuda(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ours(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = ours(x)
    for each in (ours, stock):
        each[0][0].weight.data.mul_(-2)
        each[0][1].running_mean.data.add_(1)
    graph.replay()
    torch.testing.assert_close(y, stock(x), atol=1e-4, rtol=1e-4)


def test_in_training_and_under_hooks_and_gradients_stock_runs():
    ours, stock = folded()
    ours.train(), stock.train()
    assert compare(ours, stock) == 3
    ours.eval(), stock.eval()
    handle = ours[0][1].register_forward_hook(lambda module, args, output: output + 1)
    stock[0][1].register_forward_hook(lambda module, args, output: output + 1)
    assert compare(ours, stock) == 2
    handle.remove()
    loss = ours(X).sum()
    loss.backward()
    assert ours[0][1].weight.grad is not None


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((nn.Conv2d(3, 8, 1), nn.ReLU(), nn.BatchNorm2d(8)), id="something between"),
        pytest.param(
            (nn.Conv2d(3, 8, 1, padding=1, padding_mode="reflect"), nn.BatchNorm2d(8)), id="padding"
        ),
        pytest.param((nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, track_running_stats=False)), id="no averages"),
        pytest.param((nn.ConvTranspose2d(3, 8, 1), nn.BatchNorm2d(8)), id="transposed"),
    ],
)
def test_what_is_not_known_to_be_safe_is_skipped_with_a_reason(parts):
    ours = nn.Sequential(*parts).eval()
    message = "no BatchNorm2d with running averages is directly behind a Conv2d"
    with pytest.raises(ValueError, match=message):
        sdfastgn.optimize(ours, fold_batch_norm=True, strict=True)
    stock = copy.deepcopy(ours)
    assert compare(sdfastgn.optimize(ours, fold_batch_norm=True), stock) == 1
    assert kinds(ours) == kinds(stock)


def test_a_subclass_of_sequential_is_left_alone():
    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + F.relu(x).sum()

    ours = Twice(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)).eval()
    stock = copy.deepcopy(ours)
    assert compare(sdfastgn.optimize(ours, fold_batch_norm=True), stock) == 1


def test_a_half_precision_convolution_is_folded_in_fp64():
    conv, norm = nn.Conv2d(3, 8, 3).half(), nn.BatchNorm2d(8)
    norm.running_var.fill_(1e-6)
    ours = sdfastgn.optimize(nn.Sequential(conv, norm).eval(), fold_batch_norm=True)
    with torch.no_grad():
        y = ours(X.half())
        exact = norm.double()(conv.double()(X.half().double()))
    assert y.dtype is torch.float16
    assert (y - exact).norm() < 2e-3 * exact.norm()
