"""GroupNorm with a fused activation, channels-last or channels-first: ``sdfastgn::group_norm``.

Formula, with x of shape (N, C, *spatial), HW = product of the spatial sizes, G groups of CG = C / G channels:

    u = x + shift[n, c]
    z = (u - mean(u)) / sqrt(var(u) + eps) * weight[c] + bias[c]          (for each (n, g); var: biased)
    y = activation(z * (1 + ada_scale[n, c]) + ada_shift[n, c])

On a GPU the kernels of ``group_norm/kernels.py`` run; that file explains layouts and numerics. Everywhere
else ``reference_group_norm`` runs. Gradients: ``group_norm/backward.py``.

Source: Wu and He, "Group Normalization", 2018. The interface follows torch.nn.functional.group_norm.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.checks import (
    as_eps,
    as_index,
    check_activation,
    check_device,
    check_floating,
    check_input,
)
from sdfastgn.kernels.common.declaration import Operand, Value, backward_of, dense
from sdfastgn.kernels.common.grad_op import GradOp
from sdfastgn.kernels.common.layout import empty_dense_like, is_dense, like_dense
from sdfastgn.kernels.common.op import PlannedOp
from sdfastgn.kernels.common.plan_cache import named
from sdfastgn.kernels.group_norm.backward import reference_group_norm_grads
from sdfastgn.kernels.group_norm.plain import plain_group_norm

# --- declaration --------------------------------------------------------------------------------------


def _rows(operand: Tensor, call: Any) -> Tensor:
    """Returns ``operand``, (C,) or (N, C), or a contiguous copy if its channels do not have stride 1."""
    return operand if operand.stride(-1) == 1 else operand.contiguous()


def _dense_gradient(dy: Tensor, call: Any) -> Tensor:
    """Returns ``dy`` if it is channels-last or channels-first, else a copy in the layout of x.

    If the forward returned tokens (N, HW, C), dy has that shape, and the result is dy or a contiguous copy.
    """
    if call.tokens:
        return dy.contiguous()
    return dy if is_dense(dy) else empty_dense_like(call.x, dy.dtype).copy_(dy)


# Type of the arguments weight and bias: a tensor of shape (C,), or None.
_PerChannel = Annotated[Tensor | None, Operand("(C,)", whole=_rows)]
# Type of the arguments shift, ada_scale and ada_shift: a tensor with a row for each sample, or one row for
# all samples, or None.
_PerSample = Annotated[Tensor | None, Operand("(C,)", "(1, C)", "(N, C)", whole=_rows)]


class GroupNormCall(NamedTuple):
    """The arguments of the op ``sdfastgn::group_norm``, in its schema's order."""

    x: Annotated[Tensor, Operand("(N, C, *spatial)", whole=dense)]
    num_groups: int
    weight: _PerChannel
    bias: _PerChannel
    eps: float
    activation: Annotated[str, Value(check_activation)]
    shift: _PerSample
    ada_scale: _PerSample
    ada_shift: _PerSample
    # Mean and sum of squared deviations of each channel of x, before ``shift`` is added to x, in each of P
    # chunks of positions. The shape is (2, N, P, C), the dtype is fp32.
    statistics: Annotated[Tensor | None, Operand(has_gradient=False)]
    tokens: bool
    out_dtype: torch.dtype | None


# Default values of the arguments of ``GroupNormCall`` after ``activation``, in their order.
NO_MORE = (None, None, None, None, False, None)


# --- reference ----------------------------------------------------------------------------------------


def reference_group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "identity",
    *,
    shift: Tensor | None = None,
    ada_scale: Tensor | None = None,
    ada_shift: Tensor | None = None,
    tokens: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes ``group_norm`` in plain PyTorch, in fp32, or in fp64 for fp64 input.

    This function runs where no kernel can run. Tests compare the kernels' results with the results of this
    function in fp64. Arguments are the same as in ``group_norm``, except that ``out_dtype`` is the dtype of
    the result, by default the dtype of x, and that there is no argument ``statistics``.
    """
    operands = shift, ada_scale, ada_shift
    call = GroupNormCall(x, num_groups, weight, bias, eps, activation, *operands, None, tokens, out_dtype)
    return _reference(call)[0]


def _reference(call: GroupNormCall) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the output of GroupNorm, and mean and 1 / deviation of each group, in plain PyTorch."""
    x = call.x
    dtype = torch.promote_types(x.dtype, torch.float32)

    def per_channel(operand: Tensor) -> Tensor:
        """Reshapes ``operand``, (N, C) or (C,), to (N or 1, C, 1, ...), which broadcasts to x."""
        return operand.to(dtype).reshape(-1, x.shape[1], *[1] * (x.dim() - 2))

    u = x.to(dtype)
    u = u if call.shift is None else u + per_channel(call.shift)
    weight, bias = (None if t is None else t.to(dtype) for t in (call.weight, call.bias))
    z, mean, rstd = plain_group_norm(u, call.num_groups, weight, bias, call.eps)
    z = z if call.ada_scale is None else z * (1 + per_channel(call.ada_scale))
    z = z if call.ada_shift is None else z + per_channel(call.ada_shift)
    y = ACTIVATIONS[call.activation](z).to(call.out_dtype or x.dtype)
    if not call.tokens:
        return like_dense(y, x), mean, rstd
    return y.movedim(1, -1).reshape(x.shape[0], math.prod(x.shape[2:]), x.shape[1]).contiguous(), mean, rstd


# --- op ---------------------------------------------------------------------------------------------


def empty_saved(call: GroupNormCall) -> Tensor:
    """Returns uninitialized memory for mean or rstd: (N, G) in fp32, or in fp64 for fp64 input."""
    dtype = torch.promote_types(call.x.dtype, torch.float32)
    return call.x.new_empty((call.x.shape[0], call.num_groups), dtype=dtype)


def _fake(call: GroupNormCall) -> tuple[Tensor, Tensor, Tensor]:
    x, dtype = call.x, call.out_dtype or call.x.dtype
    y = empty_dense_like(x, dtype)
    if call.tokens:
        y = x.new_empty((x.shape[0], math.prod(x.shape[2:]), x.shape[1]), dtype=dtype)
    return y, empty_saved(call), empty_saved(call)


def _check(name: str, call: GroupNormCall) -> None:
    """Raise an error if the number of groups or the statistics do not fit x."""
    x, num_groups = call.x, call.num_groups
    if num_groups == 0:
        raise ZeroDivisionError(f"{name}: num_groups must be positive, got 0")
    C = x.shape[1]
    if num_groups < 0 or C % num_groups:
        raise ValueError(
            f"{name}: num_groups={num_groups} must be a positive divisor of C={C}, "
            f"x has shape {tuple(x.shape)}"
        )
    if call.statistics is not None:
        _check_statistics(name, x, call.statistics)


def _check_statistics(name: str, x: Tensor, statistics: Any) -> None:
    """Check that ``statistics`` is fp32 (2, N, P, C), P >= 1, on the device of ``x``."""
    if not isinstance(statistics, Tensor) or statistics.dtype != torch.float32:
        found = statistics.dtype if isinstance(statistics, Tensor) else type(statistics).__name__
        raise TypeError(f"{name}: statistics must be an fp32 torch.Tensor, got {found}")
    check_floating(name, "statistics", statistics)
    shape = tuple(statistics.shape)
    if len(shape) != 4 or shape[0] != 2 or shape[2] < 1 or (shape[1], shape[3]) != tuple(x.shape[:2]):
        raise ValueError(
            f"{name}: statistics must have shape (2, {x.shape[0]}, P, {x.shape[1]}), got {shape}"
        )
    check_device(name, "statistics", statistics, x)


# The tensors that the forward saves for the backward: mean and 1 / deviation of each group.
_SAVED = ("mean", "rstd")
GROUP_NORM_BACKWARD = GradOp(
    "group_norm_backward",
    backward_of(GroupNormCall, _SAVED, dy=Operand(whole=_dense_gradient)),
    plan=named(f"{__package__}.backward_plans:GroupNormGradPlan"),
    reference=reference_group_norm_grads,
)
GROUP_NORM = PlannedOp(
    "group_norm",
    GroupNormCall,
    ("y",),
    _SAVED,
    plan=named(f"{__package__}.plans:GroupNormPlan"),
    reference=_reference,
    fake=_fake,
    check=_check,
    backward=GROUP_NORM_BACKWARD,
)


# --- public function --------------------------------------------------------------------------------


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "identity",
    *,
    shift: Tensor | None = None,
    ada_scale: Tensor | None = None,
    ada_shift: Tensor | None = None,
    statistics: Tensor | None = None,
    tokens: bool = False,
) -> Tensor:
    """GroupNorm followed by an activation, fused into Triton kernels on NVIDIA GPUs.

    Args:
        x: (N, C, *spatial), with zero or more spatial dimensions. N may be 0.
        num_groups: G, a divisor of C. An int, or any object with ``__index__``, but not a bool.
        weight, bias: (C,) or None, independently of each other.
        eps: added to the variance. A number of Python or NumPy, or a tensor without dimensions.
        activation: a key of ``sdfastgn.kernels.common.activations.ACTIVATIONS``.
        shift: (N, C), (1, C) or (C,), added to x before the norm. For example a convolution's bias or a
            time embedding.
        ada_scale, ada_shift: (N, C), (1, C) or (C,). Adaptive GroupNorm: the norm's result z becomes
            ``z * (1 + ada_scale) + ada_shift`` before the activation.
        statistics: (2, N, P, C) fp32, P >= 1: mean and sum of squared deviations of each channel of x,
            without ``shift``, in each of P chunks of positions. With them the kernels read x only once.
            They come from ``sdfastgn.channel_statistics``, or together with x from ``add_with_statistics``,
            ``cat_with_statistics`` or ``upsample_conv2d``. This function does not check whether they are
            the statistics of x. Calls that run in plain PyTorch ignore them.
        tokens: return contiguous tokens (N, HW, C), as attention takes them. HW is the product of the
            spatial sizes.

    Shapes: the output has the shape of x, or (N, HW, C) if ``tokens``.
    Dtypes: x is fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch. All other tensors except
        ``statistics`` may have any of the four dtypes. The output has the dtype of x, but fp32 under CUDA
        autocast, as with torch.nn.functional.group_norm.
    Layout: any. The output has the strides of x if x is channels-first or channels-last. Else it is
        channels-last if the channels of x have stride 1, and channels-first otherwise.
    Grad: every tensor except ``statistics`` has gradients. The gradient of x is the whole gradient, as if the
        statistics were computed from x. The operands and two fp32 values for each group are kept for the
        backward.
        Second derivatives, the transforms of torch.func (vmap, jacrev) and forward-mode AD run in plain
        PyTorch.
    Raises:
        TypeError: a tensor is not strided or has another dtype, or another argument has the wrong type.
        ValueError: a shape, the number of groups, a device or the activation's name does not fit.
        ZeroDivisionError: num_groups is 0, as in PyTorch.

    Source: torch.nn.functional.group_norm for the interface; Wu and He, 2018, for the formula.
    """
    name = "sdfastgn.group_norm"
    if type(num_groups) is not int or type(eps) is not float:
        check_input(name, "x", x)
        num_groups, eps = as_index(name, "num_groups", num_groups), as_eps(name, eps)
    dtype = dispatch.autocast_dtype(x)
    call = GroupNormCall(
        x, num_groups, weight, bias, eps, activation, shift, ada_scale, ada_shift, statistics, tokens, dtype
    )
    return GROUP_NORM(call)
