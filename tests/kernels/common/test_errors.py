"""Shapes, dtypes and values that do not fit: the error begins with the public name and quotes them."""

import functools
import inspect
from unittest import mock

import pytest
import torch

import sdfastgn
from sdfastgn.kernels.common import dispatch
from tests.kernels.ops import FUNCTIONS, as_tuple
from tests.kernels.samples import each_path, interpreted, kernels

pytestmark = interpreted  # tensors lie on the CPU; the GPU's path runs in the interpreter


def ones(*shape):
    return torch.ones(shape)


# Operands of the calls that are changed below: x is (2, 6, 3, 4), (3, 5, 8) or (3, 8).
ERRORS = [
    ("group_norm", {"x": ones(4)}, ValueError, "x must be (N, C, *spatial), got shape (4,)"),
    ("group_norm", {"num_groups": 4}, ValueError, "num_groups=4 must be a positive divisor of C=6"),
    ("group_norm", {"num_groups": -2}, ValueError, "num_groups=-2"),
    ("group_norm", {"num_groups": 0}, ZeroDivisionError, "got 0"),
    ("group_norm", {"weight": ones(3)}, ValueError, "weight must have shape (6,), got (3,)"),
    *(
        ("group_norm", {name: ones(3, 6)}, ValueError,
         f"{name} must have shape (6,), (1, 6) or (2, 6), got (3, 6)")
        for name in ("shift", "ada_scale", "ada_shift")
    ),
    ("group_norm", {"activation": ["silu"]}, ValueError, "['silu']"),
    ("group_norm", {"activation": "elu"}, ValueError, "unknown activation 'elu'"),
    ("group_norm", {"statistics": ones(2, 2, 6)}, ValueError,
     "statistics must have shape (2, 2, P, 6), got (2, 2, 6)"),
    ("group_norm", {"statistics": ones(2, 2, 1, 5)}, ValueError, "got (2, 2, 1, 5)"),
    ("group_norm", {"statistics": ones(2, 2, 1, 6).half()}, TypeError,
     "an fp32 torch.Tensor, got torch.float16"),
    ("instance_norm", {"x": ones(2, 3)}, ValueError, "got shape (2, 3)"),
    ("instance_norm", {"x": ones(2, 6, 1, 1)}, ValueError, "got shape (2, 6, 1, 1)"),
    ("instance_norm", {"weight": ones(4)}, ValueError, "weight must have shape (6,), got (4,)"),
    ("instance_norm", {"activation": "elu"}, ValueError, "'elu'"),
    ("batch_norm", {"x": ones(4)}, ValueError, "x must be (N, C, *spatial), got shape (4,)"),
    ("batch_norm", {"weight": ones(4)}, ValueError, "weight must have shape (6,), got (4,)"),
    ("batch_norm", {"residual": ones(2, 6, 3, 1)}, ValueError,
     "residual must have shape (2, 6, 3, 4), got (2, 6, 3, 1)"),
    ("batch_norm", {"running_mean": ones(6)}, ValueError, "running_mean is given, and running_var must"),
    ("batch_norm", {"running_mean": ones(6), "running_var": ones(4)}, ValueError,
     "running_var must have shape (6,), got (4,)"),
    ("batch_norm", {"running_mean": 1.0, "running_var": ones(6)}, TypeError,
     "running_mean must be a floating torch.Tensor, got float"),
    ("batch_norm", {"training": False}, ValueError, "running_mean and running_var must be given unless"),
    ("batch_norm", {"training": False, "running_mean": ones(5), "running_var": ones(6)}, ValueError,
     "running_mean must have shape (6,), got (5,)"),
    ("batch_norm", {"training": 1}, TypeError, "training must be a bool, got 1"),
    ("batch_norm", {"x": ones(1, 6, 1, 1), "residual": None}, ValueError,
     "more than one value of each channel, x has shape (1, 6, 1, 1)"),
    ("batch_norm", {"activation": "elu"}, ValueError, "unknown activation 'elu'"),
    ("channel_norm", {"x": ones(4)}, ValueError, "x must be (N, C, *spatial), got shape (4,)"),
    ("channel_norm", {"weight": ones(6, 1, 1)}, ValueError, "weight must have shape (6,), got (6, 1, 1)"),
    ("channel_norm", {"bias": ones(3)}, ValueError, "bias must have shape (6,), got (3,)"),
    ("channel_norm", {"activation": "elu"}, ValueError, "unknown activation 'elu'"),
    ("channel_norm", {"scale": "1"}, TypeError, "scale must be a number, got '1'"),
    ("channel_norm", {"eps": None}, TypeError, "eps must be a number, got None"),
    *(
        (op, *rest) for op in ("layer_norm", "add_layer_norm") for rest in (
            ({"x": torch.tensor(1.0)}, ValueError, "x must be (..., D), got shape ()"),
            ({"weight": ones(3)}, ValueError, "weight must have shape (8,), got (3,)"),
            ({"weight": ones(1, 8)}, ValueError, "(8,), got (1, 8)"),
        )
    ),
    ("add_layer_norm", {"residual": ones(3, 5, 8).half()}, TypeError,
     "the dtype torch.float32, got torch.float16"),
    ("add_layer_norm", {"residual": ones(1, 8)}, ValueError,
     "residual must have shape (3, 5, 8), got (1, 8)"),
    ("add_layer_norm", {"add_bias": ones(2, 8)}, ValueError, "add_bias must have shape (8,)"),
    ("add_layer_norm", {"total_bias": ones(3)}, ValueError, "total_bias must have shape (8,), got (3,)"),
    ("geglu", {"x": torch.tensor(1.0)}, ValueError, "x must be (..., 2D), got shape ()"),
    ("geglu", {"x": ones(2, 5)}, ValueError, "x must be (..., 2D), got shape (2, 5)"),
    ("geglu", {"bias": ones(4)}, ValueError, "bias must have shape (8,), got (4,)"),
    ("geglu", {"bias": ones(1, 8)}, ValueError, "(8,), got (1, 8)"),
    ("act_linear", {"weight": ones(10, 8).half()}, TypeError,
     "one dtype, got torch.float32 and torch.float16"),
    ("act_linear", {"x": ones(8)}, ValueError, "x must be (N, K), got shape (8,)"),
    ("act_linear", {"weight": ones(8, 10)}, ValueError, "weight must be (C, 8), got shape (8, 10)"),
    ("act_linear", {"bias": ones(8)}, ValueError, "bias must have shape (10,), got (8,)"),
    ("act_linear", {"extra_bias": ones(8)}, ValueError, "extra_bias must have shape (10,), got (8,)"),
    ("act_linear", {"activation": "elu"}, ValueError, "unknown activation 'elu'"),
    ("act_linear", {"activation": None}, ValueError, "unknown activation None"),
    ("channel_statistics", {"x": ones(4, 3)}, ValueError, "got shape (4, 3)"),
    ("add_with_statistics", {"x": ones(4, 3), "residual": ones(4, 3)}, ValueError,
     "x must be (N, C, *spatial), got shape (4, 3)"),
    ("add_with_statistics", {"residual": ones(1, 6, 3, 4)}, ValueError,
     "must have shape (2, 6, 3, 4), got (1, 6, 3, 4)"),
    ("add_with_statistics", {"residual": ones(2, 6, 3, 4).half()}, TypeError,
     "dtype torch.float32, got torch.float16"),
    ("add_with_statistics", {"bias": ones(3)}, ValueError, "bias must be (6,) on cpu, got (3,) on cpu"),
    *(
        ("add_with_statistics", {"scale": scale}, TypeError, f"scale must be a number, got {scale!r}")
        for scale in ("1", True, None)
    ),
    ("cat_with_statistics", {"a": ones(4, 3)}, ValueError, "a must be (N, C, *spatial), got shape (4, 3)"),
    ("cat_with_statistics", {"b": ones(2, 5, 3, 2)}, ValueError, "got (2, 5, 3, 2)"),
    ("cat_with_statistics", {"b": ones(2, 5, 3, 4, 1)}, ValueError, "got (2, 5, 3, 4, 1)"),
    ("cat_with_statistics", {"b": ones(2, 5, 3, 4).double()}, TypeError,
     "dtype torch.float32, got torch.float64"),
    ("upsample_nearest_2x", {"x": ones(2, 3, 4)}, ValueError, "x must be (N, C, H, W), got shape (2, 3, 4)"),
    ("upsample_nearest_2x", {"x": ones(1, 2, 3, 4, 5)}, ValueError, "got shape (1, 2, 3, 4, 5)"),
    ("upsample_conv2d", {"x": ones(6, 3, 4)}, ValueError, "x must be (N, C_in, H, W), got shape (6, 3, 4)"),
    ("upsample_conv2d", {"weight": ones(4, 5, 3, 3)}, ValueError,
     "weight must be (C_out, 6, 3, 3), got shape (4, 5, 3, 3)"),
    ("upsample_conv2d", {"weight": ones(4, 6, 3, 1)}, ValueError, "got shape (4, 6, 3, 1)"),
    ("upsample_conv2d", {"bias": ones(3)}, ValueError, "bias must be (4,), got shape (3,)"),
    ("upsample_conv2d", {"weight": ones(4, 6, 3, 3).half()}, TypeError,
     "weight must have the dtype of x, torch.float32, got torch.float16"),
    ("upsample_conv2d", {"bias": ones(4).double()}, TypeError, "bias must have the dtype of x"),
    ("wide_attention", {"v": ones(2, 2, 5, 8).half()}, TypeError,
     "v must have the dtype of q, torch.float32, got torch.float16"),
    ("wide_attention", {"q": ones(2, 5, 8)}, ValueError,
     "q must be (N, heads, L, D), D at least 1, got shape (2, 5, 8)"),
    ("wide_attention", {"k": ones(2, 2, 8, 5)}, ValueError,
     "k must be (2, 2, keys, 8), keys at least 1, got shape (2, 2, 8, 5)"),
    ("wide_attention", {"k": ones(2, 2, 0, 8)}, ValueError, "got shape (2, 2, 0, 8)"),
    ("wide_attention", {"v": ones(2, 2, 1, 8)}, ValueError,
     "v must have the shape of k, (2, 2, 5, 8), got (2, 2, 1, 8)"),
    *(
        ("wide_attention", {"scale": scale}, ValueError, "scale must be positive and finite, got")
        for scale in (0.0, -1.0, float("inf"), float("nan"))
    ),
]  # fmt: skip


@functools.cache
def make_a_plan(name):
    """So that it is in the cache, where a wrong argument must not find it."""
    with kernels(direct=True):
        FUNCTIONS[name].call(**FUNCTIONS[name].operands(torch.float32))


@each_path
@pytest.mark.parametrize(("name", "changes", "kind", "message"), ERRORS)
def test_errors_name_the_call_and_the_value(name, changes, kind, message, path):
    op = FUNCTIONS[name]
    make_a_plan(name)
    with path(), pytest.raises(kind) as caught:
        op.function(**{**op.operands(torch.float32), **op.options, **changes})
    assert str(caught.value).startswith(f"{op.name}: ")
    assert message in str(caught.value)


def numbers():
    """(name of a function, name of an argument, its value in the function's calls) for each number."""
    for name, op in FUNCTIONS.items():
        given = {**signature_defaults(op.function), **op.options}
        yield from (
            (name, label, value) for label, value in given.items() if type(value) in (int, float, bool)
        )


def signature_defaults(function):
    return {p.name: p.default for p in inspect.signature(function).parameters.values()}


def outcome(op, **changes):
    """The results, or the error's type and text."""
    try:
        return as_tuple(op.function(**{**op.operands(torch.float32), **op.options, **changes}))
    except Exception as error:
        return type(error), str(error)


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("name", "label", "value"), numbers())
def test_a_plan_accepts_no_number_of_another_type(name, label, value):
    """1 == 1.0 == True: a call with one of them is checked, whether or not there is a plan for another."""
    op = FUNCTIONS[name]
    with kernels(direct=True):
        for number in (value, 1):
            for same in (int(number), float(number), bool(number)):
                found = outcome(op, **{label: same})
                with mock.patch.object(dispatch, "is_plain", return_value=False):
                    without_plans = outcome(op, **{label: same})
                if isinstance(found[0], torch.Tensor):
                    torch.testing.assert_close(found, without_plans)
                else:
                    assert found == without_plans


@each_path
@pytest.mark.parametrize(
    ("name", "label"), [(name, label) for name, op in FUNCTIONS.items() for label in list(op.shapes)[1:]]
)
def test_another_device_is_named(name, label, path):
    op = FUNCTIONS[name]
    operands = op.operands(torch.float32)
    with path(), pytest.raises(ValueError, match=rf"^{op.name}: {label} .* on meta"):
        op.call(**{**operands, label: operands[label].to("meta")})


def test_the_statistics_device_is_named():
    with pytest.raises(ValueError, match=r"^sdfastgn\.group_norm: statistics is on meta"):
        sdfastgn.group_norm(ones(2, 6, 3, 4), 3, statistics=ones(2, 2, 1, 6).to("meta"))
