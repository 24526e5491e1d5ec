"""What is made of an op's declaration: its schema, its checks, its backward's arguments."""

from typing import Annotated, NamedTuple

import pytest
import torch
from torch import Tensor

from sdfastgn.kernels.common.checks import check_activation
from sdfastgn.kernels.common.declaration import (
    Operand,
    Value,
    backward_of,
    checks_of,
    dense,
    differentiable,
    even_rows,
    gaps_of,
    gradients_of,
    schema_of,
    without_gaps,
)

PerSample = Annotated[Tensor | None, Operand("(C,)", "(1, C)", "(N, C)")]


class ScaleCall(NamedTuple):
    x: Annotated[Tensor, Operand("(N, C, *spatial)", whole=dense)]
    weight: PerSample
    like: Annotated[Tensor | None, Operand("(N, C, *spatial)", same_dtype=True, has_gradient=False)]
    activation: Annotated[str, Value(check_activation)]
    eps: float
    out_dtype: torch.dtype | None
    running: Annotated[Tensor | None, Operand("(C,)", whole=None, label="average")] = None


class RowsCall(NamedTuple):
    x: Annotated[Tensor, Operand("(..., D)", whole=even_rows)]
    bias: Annotated[Tensor, Operand("(D,)")]
    residual: Annotated[Tensor, Operand("(..., D)")]


X = torch.zeros(2, 6, 3, 4)


def scale_call(**given):
    return ScaleCall(X, None, None, "silu", 1e-5, None)._replace(**given)


def no_more(name, call):
    pass


def test_the_schema_has_all_fields_without_a_default():
    assert schema_of("scale", ScaleCall, "Tensor") == (
        "scale(Tensor x, Tensor? weight, Tensor? like, str activation, float eps, ScalarType? out_dtype)"
        " -> Tensor"
    )


def test_the_backward_takes_what_it_needs_and_tells_what_is_wanted():
    grad_call = backward_of(ScaleCall, ("mean",), dy=Operand())
    assert differentiable(ScaleCall) == ("x", "weight")
    assert schema_of("scale_backward", grad_call, "Tensor[]") == (
        "scale_backward(Tensor dy, Tensor x, Tensor mean, Tensor? weight, str activation, float eps, "
        "bool dx, bool dweight) -> Tensor[]"
    )
    assert gradients_of(grad_call) == ("x", "weight")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"x": 3}, r"f: x must be a torch\.Tensor, got int"),
        ({"x": X[0, 0, 0]}, r"f: x must be \(N, C, \*spatial\), got shape \(4,\)"),
        ({"weight": X[0]}, r"f: weight must have shape \(6,\), \(1, 6\) or \(2, 6\), got \(6, 3, 4\)"),
        ({"weight": X.long()}, r"f: weight must be a floating torch\.Tensor, got torch\.int64"),
        ({"like": X.half()}, r"f: like must have the dtype torch\.float32, got torch\.float16"),
        ({"like": X[1:]}, r"f: like must have shape \(2, 6, 3, 4\), got \(1, 6, 3, 4\)"),
        ({"activation": "none"}, "f: unknown activation 'none'"),
        ({"running": X}, r"f: average must have shape \(6,\)"),
    ],
)
def test_what_does_not_fit_is_named(given, words):
    check = checks_of(ScaleCall, no_more)
    check("f", scale_call())
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        check("f", scale_call(**given))


@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 3, 6)])
def test_shapes_are_counted_from_the_end_behind_any_number_of_axes(shape):
    check = checks_of(RowsCall, no_more)
    x, bias = torch.zeros(shape), torch.zeros(6)
    check("f", RowsCall(x, bias, x))
    with pytest.raises(ValueError, match=r"^f: bias must have shape \(6,\)"):
        check("f", RowsCall(x, x[..., :3], x))
    with pytest.raises(ValueError, match=r"^f: residual must have shape"):
        check("f", RowsCall(x, bias, x[..., :3]))


def test_an_ops_own_check_finds_the_first_operand_checked():
    def own(name, call):
        raise ZeroDivisionError(name)

    check = checks_of(ScaleCall, own)
    with pytest.raises(TypeError, match="x must be"):
        check("f", scale_call(x=None))
    with pytest.raises(ZeroDivisionError, match="f"):
        check("f", scale_call(weight=3))


def test_only_operands_with_gaps_are_copied():
    gaps = torch.arange(12.0)[::2]
    call = scale_call(weight=gaps, running=gaps)
    found = without_gaps(call, gaps_of(call))
    assert found.weight.is_contiguous()
    assert torch.equal(found.weight, gaps)
    assert found.x is X
    assert found.running is gaps
    assert gaps_of(scale_call(x=X.to(memory_format=torch.channels_last))) == ()
    assert [place for place, _ in gaps_of(scale_call(x=X.mT))] == [0]
