"""``sdfastgn.BatchNorm``: a drop-in for ``torch.nn.BatchNorm1d``, ``2d`` and ``3d``."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn

import sdfastgn
from sdfastgn.kernels.common import dispatch

KINDS = {"1d": (nn.BatchNorm1d, (9,)), "2d": (nn.BatchNorm2d, (5, 6)), "3d": (nn.BatchNorm3d, (3, 4, 5))}
OPTIONS: list[dict[str, object]] = [
    {},
    {"eps": 1e-3, "momentum": 0.3},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
]
each_kind = pytest.mark.parametrize(("kind", "size"), KINDS.values(), ids=KINDS)
each_options = pytest.mark.parametrize("options", OPTIONS, ids=str)


def random(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        nn.init.normal_(p)
    return module


def steps(norm: nn.Module, activation: nn.Module, size: tuple[int, ...]) -> list[Tensor]:
    """Results and gradients of three batches in training, what the state then is, and eval."""
    found = []
    for seed in range(3):
        x = torch.randn(4, 6, *size, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        y = activation(norm(x))
        found += [y, *torch.autograd.grad(y.square().sum(), [x, *norm.parameters()])]
    norm.eval()
    return [*found, *norm.state_dict().values(), activation(norm(x))]


@each_kind
@each_options
def test_it_is_a_drop_in(kind, size, options):
    stock = random(kind(6, **options))
    ours = sdfastgn.BatchNorm(6, **options, activation="silu")
    ours.load_state_dict(stock.state_dict())
    kind(6, **options).load_state_dict(ours.state_dict())
    for mine, right in zip(steps(ours, nn.Identity(), size), steps(stock, nn.SiLU(), size), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-4, rtol=1e-4)


def test_old_state_dicts_without_a_count_of_batches_load():
    state = nn.BatchNorm2d(6).state_dict()
    del state["num_batches_tracked"], state._metadata
    assert sdfastgn.BatchNorm(6).load_state_dict(state)


def test_same_arguments_in_the_same_order():
    norm = sdfastgn.BatchNorm(6, 1e-3, 0.2, True, True, "cpu", torch.float64, bias=False, activation="relu")
    assert (norm.num_features, norm.eps, norm.momentum) == (6, 1e-3, 0.2)
    assert (norm.weight.dtype, norm.bias) == (torch.float64, None)
    assert "activation='relu'" in repr(norm)
    assert (norm(torch.randn(3, 6, 4, dtype=torch.float64)) >= 0).all()


def test_the_residual_comes_before_the_activation():
    norm, x, residual = sdfastgn.BatchNorm(6, activation="relu"), torch.randn(2, 6, 5), torch.randn(2, 6, 5)
    expected = torch.relu(nn.BatchNorm1d(6)(x) + residual)
    torch.testing.assert_close(norm(x, residual), expected)


def test_copies_keep_the_activation_and_the_averages():
    norm = sdfastgn.BatchNorm(6, activation="relu")
    norm(torch.randn(8, 6))
    x = torch.randn(2, 6, 3)
    for twin in (copy.deepcopy(norm).eval(), pickle.loads(pickle.dumps(norm)).eval()):
        assert torch.equal(twin(x), norm.eval()(x))


@each_options
@pytest.mark.parametrize(("kind", "size"), [*KINDS.values(), (nn.SyncBatchNorm, (5, 6))])
def test_made_from_a_module_it_shares_parameters_and_buffers(kind, size, options):
    stock = kind(6, **options).eval()
    norm = sdfastgn.BatchNorm.from_module(stock, "silu")
    theirs, ours = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (stock, norm))
    assert theirs.keys() == ours.keys()
    assert all(ours[name] is t for name, t in theirs.items())
    assert (norm.eps, norm.momentum, norm.training) == (stock.eps, stock.momentum, False)
    assert norm.process_group == ("world" if kind is nn.SyncBatchNorm else None)
    x = torch.randn(3, 6, *size)
    torch.testing.assert_close(norm(x), nn.functional.silu(stock(x)))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_it_compiles_without_a_graph_break(training, monkeypatch):
    """The op changes nothing, so that the averages are updated behind it."""
    monkeypatch.setattr(dispatch, "has_kernels", lambda x: True)
    torch.compiler.reset()
    ours, stock = sdfastgn.BatchNorm(6).train(training), nn.BatchNorm2d(6).train(training)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        x = torch.randn(4, 6, 5, 5, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(compiled(x), stock(x))
    for mine, right in zip(ours.state_dict().values(), stock.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, right)


class Other(nn.BatchNorm2d):
    pass


def _hooked() -> nn.Module:
    norm = nn.BatchNorm2d(6)
    norm.register_forward_hook(lambda module, args, output: output * 2)
    return norm


def _pruned() -> nn.Module:
    return nn.utils.prune.random_unstructured(nn.BatchNorm2d(6), "weight", 0.5)


def test_errors():
    for call, kind, message in (
        (lambda: sdfastgn.BatchNorm(6, activation="swish"), ValueError, "unknown activation 'swish'"),
        (lambda: sdfastgn.BatchNorm("6"), TypeError, "num_features must be an int, got '6'"),
        (lambda: sdfastgn.BatchNorm(6, momentum="0.1"), TypeError, "momentum must be a number, got '0.1'"),
        (lambda: sdfastgn.BatchNorm(-1), ValueError, "num_features must not be negative, got -1"),
        (lambda: sdfastgn.BatchNorm(6, process_group="all"), ValueError, "got 'all'"),
        (lambda: sdfastgn.BatchNorm(6, process_group=3), ValueError, "process_group must be a group or"),
        (lambda: sdfastgn.BatchNorm.from_module(Other(6)), TypeError, "got Other"),
        (lambda: sdfastgn.BatchNorm.from_module(_hooked()), TypeError, "got BatchNorm2d with _forward_hooks"),
        (
            lambda: sdfastgn.BatchNorm.from_module(_pruned()),
            TypeError,
            "got BatchNorm2d with _forward_pre_hooks, weight_orig",
        ),
        (
            lambda: sdfastgn.BatchNorm(6)(torch.ones(2, 5, 3)),
            ValueError,
            "input must be (N, 6, *spatial), got shape (2, 5, 3)",
        ),
    ):
        with pytest.raises(kind, match=r"^sdfastgn\.BatchNorm: ") as caught:
            call()
        assert message in str(caught.value)


def test_a_wrong_call_changes_nothing():
    norm = sdfastgn.BatchNorm(6)
    with pytest.raises(ValueError, match="more than one value"):
        norm(torch.ones(1, 6))
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(norm.running_mean, torch.zeros(6))
