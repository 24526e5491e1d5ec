"""``sdfastgn.GroupNorm``: a drop-in for ``torch.nn.GroupNorm``."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn

import sdfastgn


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"bias": False}, {"eps": 1e-3}], ids=str)
def test_state_dict_goes_both_ways(options):
    ours = sdfastgn.GroupNorm(4, 12, activation="silu", **options)
    stock = nn.GroupNorm(4, 12, **{k: v for k, v in options.items() if k != "bias"})
    if "bias" in options:  # an argument of nn.GroupNorm's constructor only in newer releases
        stock.register_parameter("bias", None)
    for p in stock.parameters():
        nn.init.normal_(p)
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())
    x = torch.randn(2, 12, 5, 5)
    torch.testing.assert_close(ours(x), nn.functional.silu(stock(x)))


def test_same_arguments_in_the_same_order():
    norm = sdfastgn.GroupNorm(4, 12, 1e-3, True, "cpu", torch.float64)
    assert (norm.num_groups, norm.num_channels, norm.eps, norm.weight.dtype) == (4, 12, 1e-3, torch.float64)
    assert "activation='identity'" in repr(norm)


def test_copies_keep_the_activation():
    norm = sdfastgn.GroupNorm(4, 12, activation="relu")
    x = torch.randn(2, 12, 3)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert torch.equal(twin(x), norm(x))
        assert (twin(x) >= 0).all()


@pytest.mark.parametrize(
    ("arguments", "activation", "kind", "message"),
    [
        pytest.param((5, 12), "silu", ValueError, "num_groups=5", id="indivisible"),
        pytest.param((-4, 12), "silu", ValueError, "num_groups=-4", id="negative"),
        pytest.param((0, 12), "silu", ZeroDivisionError, "got 0", id="zero"),
        pytest.param((4, -12), "silu", ValueError, "num_channels must not be negative, got -12", id="size"),
        pytest.param((4, 12), "swish", ValueError, "'swish'", id="activation"),
        pytest.param((4, 12), ["silu"], ValueError, "['silu']", id="activation-list"),
        pytest.param(("4", 12), "silu", TypeError, "num_groups must be an int, got '4'", id="groups-text"),
        pytest.param(
            (4, "12"), "silu", TypeError, "num_channels must be an int, got '12'", id="channels-text"
        ),
        pytest.param((4.0, 12), "silu", TypeError, "num_groups must be an int, got 4.0", id="groups-float"),
        pytest.param((True, 12), "silu", TypeError, "num_groups must be an int, got True", id="groups-bool"),
        pytest.param((4, 12, "1e-5"), "silu", TypeError, "eps must be a number, got '1e-5'", id="eps-text"),
    ],
)
def test_errors(arguments, activation, kind, message):
    with pytest.raises(kind, match=r"^sdfastgn\.GroupNorm") as caught:
        sdfastgn.GroupNorm(*arguments, activation=activation)
    assert message in str(caught.value)


# --- InstanceNorm -------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "size"),
    [(nn.InstanceNorm1d, (9,)), (nn.InstanceNorm2d, (5, 6)), (nn.InstanceNorm3d, (3, 4, 5))],
    ids=["1d", "2d", "3d"],
)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_instance_norm_is_a_drop_in(kind, size, affine):
    ours, theirs = sdfastgn.InstanceNorm(6, 1e-3, 0.1, affine, activation="silu"), kind(6, 1e-3, 0.1, affine)
    for p in theirs.parameters():
        nn.init.normal_(p)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 6, *size)
    torch.testing.assert_close(ours(x), nn.functional.silu(theirs(x)))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    assert torch.equal(twin(x), ours(x))
    assert "activation='silu'" in repr(ours)


INSTANCE_NORM_ERRORS = {
    "track_running_stats=True": lambda: sdfastgn.InstanceNorm(4, track_running_stats=True),
    "num_features must not be negative, got -4": lambda: sdfastgn.InstanceNorm(-4),
    "unknown activation 'swish'": lambda: sdfastgn.InstanceNorm(4, activation="swish"),
    "input must be (N, 4, *spatial), got shape (2, 5, 3)": lambda: sdfastgn.InstanceNorm(4)(
        torch.ones(2, 5, 3)
    ),
}


@pytest.mark.parametrize(("message", "call"), INSTANCE_NORM_ERRORS.items(), ids=INSTANCE_NORM_ERRORS)
def test_instance_norm_errors(message, call):
    with pytest.raises(ValueError, match=rf"^sdfastgn\.InstanceNorm: {re.escape(message)}"):
        call()


NO_TENSOR = {
    "group_norm: x must be a torch.Tensor, got NoneType": lambda: sdfastgn.GroupNorm(4, 32)(None),
    "InstanceNorm: input must be a torch.Tensor, got NoneType": lambda: sdfastgn.InstanceNorm(32)(None),
    "InstanceNorm: input must be a torch.Tensor, got list": lambda: sdfastgn.InstanceNorm(32)([[1.0]]),
    "BatchNorm: input must be a torch.Tensor, got NoneType": lambda: sdfastgn.BatchNorm(4)(None),
    "LayerNorm: input must be a torch.Tensor, got NoneType": lambda: sdfastgn.LayerNorm(4)(None),
    "LayerNorm: input must be a torch.Tensor, got int": lambda: sdfastgn.LayerNorm(4)(1, torch.ones(4)),
    "LayerNorm: add_bias must be a torch.Tensor, got int": lambda: sdfastgn.LayerNorm(4)(
        torch.ones(4), None, 1
    ),
}


@pytest.mark.parametrize(("message", "call"), NO_TENSOR.items(), ids=NO_TENSOR)
def test_no_tensor_is_named(message, call):
    with pytest.raises(TypeError, match=rf"^sdfastgn\.{message}"):
        call()


@pytest.mark.parametrize(
    ("ours", "stock", "size"),
    [
        (sdfastgn.GroupNorm, nn.GroupNorm, (np.int64(2), np.int64(8))),
        (sdfastgn.GroupNorm, nn.GroupNorm, (torch.tensor(2), np.int32(8))),
        (sdfastgn.InstanceNorm, nn.InstanceNorm2d, (np.int64(8),)),
        (sdfastgn.BatchNorm, nn.BatchNorm2d, (np.int64(8),)),
        (sdfastgn.LayerNorm, nn.LayerNorm, (np.int64(8),)),
        (sdfastgn.LayerNorm, nn.LayerNorm, ((np.int64(8),),)),
        (sdfastgn.LayerNorm, nn.LayerNorm, (np.array([8]),)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("eps", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), 1, True], ids=repr)
def test_numbers_of_any_kind_that_pytorch_takes(ours, stock, size, eps):
    x = torch.randn(2, 8, 4, 8)
    norms = ours(*size, eps=eps), stock(*size, eps=eps)
    torch.testing.assert_close(*(norm(x) for norm in norms))
    for norm in norms:
        norm.eps = np.float32(2.5)  # later, by hand
    torch.testing.assert_close(*(norm(x) for norm in norms))


@pytest.mark.parametrize(
    "options", [{}, {"elementwise_affine": False}, {"bias": False}, {"eps": 1e-3}], ids=str
)
def test_layer_norm_is_a_drop_in(options):
    ours, stock = sdfastgn.LayerNorm(12, **options), nn.LayerNorm(12, **options)
    for p in stock.parameters():
        nn.init.normal_(p)
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())
    x, residual = torch.randn(2, 2, 5, 12)
    assert repr(ours) == repr(stock)
    torch.testing.assert_close(ours(x), stock(x))
    y, total = ours(x, residual, torch.ones(12))
    torch.testing.assert_close(total, x + residual + 1)
    torch.testing.assert_close(y, stock(total))
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(twin(x), ours(x))


def test_layer_norm_arguments_in_the_same_order():
    norm = sdfastgn.LayerNorm([12], 1e-3, True, False, "cpu", torch.float64)
    assert (norm.normalized_shape, norm.eps, norm.weight.dtype, norm.bias) == (
        (12,),
        1e-3,
        torch.float64,
        None,
    )


LAYER_NORM_ERRORS = {
    "normalized_shape must be one dimension, got (3, 4)": lambda: sdfastgn.LayerNorm((3, 4)),
    "normalized_shape must be one dimension, got ()": lambda: sdfastgn.LayerNorm(()),
    "input must be (..., 4), got shape (2, 3)": lambda: sdfastgn.LayerNorm(4, elementwise_affine=False)(
        torch.ones(2, 3)
    ),
    "add_bias needs a residual": lambda: sdfastgn.LayerNorm(4)(torch.ones(2, 4), None, torch.ones(4)),
}


@pytest.mark.parametrize(("message", "call"), LAYER_NORM_ERRORS.items(), ids=LAYER_NORM_ERRORS)
def test_layer_norm_errors(message, call):
    with pytest.raises(ValueError, match=rf"^sdfastgn\.LayerNorm: {re.escape(message)}"):
        call()
