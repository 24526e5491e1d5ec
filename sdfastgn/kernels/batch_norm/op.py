"""BatchNorm with a fused residual add and activation: the op ``sdfastgn::batch_norm``.

Formula, with x of shape (N, C, *spatial). mean and var are given, or are computed over all dimensions but C:

    z = (x - mean[c]) / sqrt(var[c] + eps) * weight[c] + bias[c]          (var: the biased variance)
    y = activation(z + residual)

On a GPU the kernels of ``batch_norm/kernels.py`` run; that file explains layouts and numerics. Everywhere
else ``reference_batch_norm`` runs.

Source: Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing
Internal Covariate Shift", 2015. The interface follows torch.nn.functional.batch_norm.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.batch_norm.backward import BATCH_NORM_BACKWARD, BatchNormGradCall
from sdfastgn.kernels.batch_norm.plain import centered, empty_moments, like_x, per_channel
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.checks import as_eps, as_float, check_activation, check_bool, check_input
from sdfastgn.kernels.common.declaration import Operand, Value, checks_of, dense
from sdfastgn.kernels.common.layout import empty_dense_like, like_dense
from sdfastgn.kernels.common.op import PlannedOp
from sdfastgn.kernels.common.plan_cache import named

_PerChannel = Annotated[Tensor | None, Operand("(C,)")]
# Type of the arguments running_mean and running_var, which are updated in place. ``whole=None`` says that
# they are never copied to another layout, because an update of the copy would be lost.
_Running = Annotated[Tensor | None, Operand("(C,)", whole=None)]


class BatchNormCall(NamedTuple):
    """The arguments of the op ``sdfastgn::batch_norm``, in its schema's order.

    If mean and var are None, they are computed from the batch. The kernels then also update ``running_mean``
    and ``running_var`` in place, unless these are None. ``momentum``: weight of the batch in this update.
    """

    x: Annotated[Tensor, Operand("(N, C, *spatial)", whole=dense)]
    weight: _PerChannel
    bias: _PerChannel
    residual: Annotated[Tensor | None, Operand("(N, C, *spatial)", whole=like_x)]
    mean: Annotated[Tensor | None, Operand("(C,)", has_gradient=False, label="running_mean")]
    var: Annotated[Tensor | None, Operand("(C,)", has_gradient=False, label="running_var")]
    eps: float
    momentum: float
    activation: Annotated[str, Value(check_activation)]
    running_mean: _Running = None
    running_var: _Running = None


def reference_batch_norm(call: BatchNormCall) -> tuple[Tensor, Tensor, Tensor]:
    """Computes BatchNorm in plain PyTorch, and does not update the running averages.

    Returns y, and mean and variance of the batch, (C,). If ``call`` gives mean and variance, the two returned
    ones have size 0.
    """
    x, residual = call.x, call.residual
    if x.numel() == 0:
        d, mean, var = x.to(torch.promote_types(x.dtype, torch.float32)), *empty_moments(x, x.shape[1])
        mean, var = mean.zero_(), var.zero_()
    else:
        d, mean, var = centered(x, call.mean, call.var)
    z = d * torch.rsqrt(per_channel(var, x) + call.eps)
    z = z if call.weight is None else z * per_channel(call.weight, x)
    z = z if call.bias is None else z + per_channel(call.bias, x)
    z = z if residual is None else z + residual.to(z.dtype)
    y = like_dense(ACTIVATIONS[call.activation](z).to(x.dtype), x)
    if call.mean is not None:
        return y, *empty_moments(x, 0)
    return y, mean.reshape(-1), var.reshape(-1)


# --- op ---------------------------------------------------------------------------------------------


def _fake(call: BatchNormCall) -> tuple[Tensor, Tensor, Tensor]:
    x = call.x
    return empty_dense_like(x, x.dtype), *empty_moments(x, x.shape[1] if call.mean is None else 0)


def _save(ctx: Any, call: BatchNormCall, results: tuple[Tensor, Tensor, Tensor]) -> None:
    # If mean and var are given, copies are saved. Other code may update mean and var in place before the
    # backward, which needs the values that the forward had.
    moments = results[1:] if call.mean is None or call.var is None else (call.mean.clone(), call.var.clone())
    ctx.mark_non_differentiable(*results[1:])
    ctx.set_materialize_grads(False)
    ctx.settings = call.eps, call.activation, call.mean is None
    ctx.residual_dtype = None if call.residual is None else call.residual.dtype
    residual = None if call.activation == "identity" else call.residual
    ctx.save_for_backward(call.x, *moments, call.weight, call.bias, residual)


def _backward(ctx: Any, needs: Any, dy: Tensor | None, *_: None) -> dict[str, Tensor | None]:
    if dy is None:
        return {}
    passes_on = ctx.settings[1] == "identity"
    wanted = [needs.x, needs.weight, needs.bias, needs.residual and not passes_on]
    grads = BATCH_NORM_BACKWARD(BatchNormGradCall(dy, *ctx.saved_tensors, *ctx.settings, *wanted))
    return grads | {"residual": dy.to(ctx.residual_dtype)} if needs.residual and passes_on else grads


def _check(name: str, call: BatchNormCall) -> None:
    if call.mean is None and 0 < call.x.numel() == call.x.shape[1]:
        raise ValueError(
            f"{name}: training needs more than one value of each channel, x has shape {tuple(call.x.shape)}"
        )


# Checks a call in one of several processes that share the statistics of a batch. Unlike in ``_check``, the
# process may have only one value of each channel, because mean and variance are computed from the values of
# all processes.
check_share = checks_of(BatchNormCall, lambda name, call: None)


BATCH_NORM = PlannedOp(
    "batch_norm",
    BatchNormCall,
    # The results mean and var are of the batch: (C,) in fp32, or in fp64 for fp64 input. Their size is 0 if
    # the call gives mean and var.
    ("y", "mean", "var"),
    plan=named(f"{__package__}.plans:BatchNormPlan"),
    reference=reference_batch_norm,
    fake=_fake,
    save=_save,
    backward=_backward,
    check=_check,
)


def batch_norm_call(
    name: str,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    activation: str,
    residual: Tensor | None,
) -> BatchNormCall:
    """Makes a ``BatchNormCall`` for the arguments of ``batch_norm``, but checks no tensors or activation."""
    if type(eps) is not float or type(momentum) is not float or type(training) is not bool:
        check_input(name, "x", x)
        eps, momentum = as_eps(name, eps), as_float(name, "momentum", momentum)
        check_bool(name, "training", training)
    if (running_mean is None) is not (running_var is None):
        given, missing = ("running_var", "running_mean")[:: 1 if running_mean is None else -1]
        raise ValueError(f"{name}: {given} is given, and {missing} must be too, got None")
    if training:
        momentum = 0.0 if running_mean is None else momentum
        moments = None, None, eps, momentum, activation, running_mean, running_var
        return BatchNormCall(x, weight, bias, residual, *moments)
    if running_mean is None:
        check_input(name, "x", x)
        raise ValueError(f"{name}: running_mean and running_var must be given unless training, got None")
    return BatchNormCall(x, weight, bias, residual, running_mean, running_var, eps, 0.0, activation)


def normalize(name: str, call: BatchNormCall, *, fused: bool = True) -> Tensor:
    """Computes y for ``call``, and updates the running averages.

    The kernels update the running averages if ``fused`` is True, kernels run, the running averages are
    contiguous, and nothing traces or transforms the call. Otherwise PyTorch's own ops update them.
    """
    running = call.running_mean, call.running_var
    if call.running_mean is None:
        return BATCH_NORM(call, name)[0]
    fused = fused and dispatch.is_plain(call.x, call) and all(map(_is_contiguous, running))
    if fused:
        y, mean, var = BATCH_NORM(call, name)
    else:
        BATCH_NORM.check(name, call)
        # A call without the running averages is made from all operands, because torch.compile before
        # PyTorch 2.9 cannot trace ``_replace``.
        operands = call.x, call.weight, call.bias, call.residual, call.mean, call.var
        y, mean, var = BATCH_NORM(BatchNormCall(*operands, call.eps, 0.0, call.activation), name)
    # If a kernel could not be compiled, sdfastgn has turned the op off, and ``reference_batch_norm`` has
    # computed y in plain PyTorch. That function does not update the running averages, so they are updated
    # here.
    if not fused or dispatch.is_op_off("batch_norm", call.x):
        _update_running(call, mean, var)
    return y


def _is_contiguous(t: Any) -> bool:
    try:
        return bool(t.is_contiguous())
    except (AttributeError, RuntimeError):  # ``t`` is no tensor or not strided: ``normalize`` raises
        return False


def _update_running(call: BatchNormCall, mean: Tensor, var: Tensor) -> None:
    count = call.x.numel() // call.x.shape[1] if call.x.shape[1] else 0
    if count:
        update_average(call.running_mean, mean, call.momentum)
        update_average(call.running_var, var * (count / (count - 1)), call.momentum)


@torch.no_grad()
def update_average(running: Tensor | None, value: Tensor, momentum: float) -> None:
    """Updates ``running`` in place: to (1 - momentum) * running + momentum * value. None stays None."""
    if running is not None:
        running.copy_((1 - momentum) * running.to(value.dtype) + momentum * value.detach())


# --- public function --------------------------------------------------------------------------------


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "identity",
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """BatchNorm, a residual add and an activation, fused into Triton kernels on NVIDIA GPUs.

    Args:
        x: (N, C, *spatial), with zero or more spatial dimensions. N may be 0.
        running_mean, running_var: (C,), or None for both. In training they are updated in place, with the
            unbiased variance. If ``training`` is False, x is normalized with them, and they must be given.
        weight, bias: (C,) or None, independently of each other.
        training: True if x is normalized with mean and variance of this batch.
        momentum: weight of this batch in the running averages, from 0 to 1. The first call with each new
            value takes longer, because the kernels' launches are prepared again.
        eps: added to the variance. A number of Python or NumPy, or a tensor without dimensions.
        activation: a key of ``sdfastgn.kernels.common.activations.ACTIVATIONS``.
        residual: a tensor of the shape of x that is added before the activation, or None.

    Shapes: the output has the shape of x.
    Dtypes: x is fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch. All other tensors may have any of the
        four dtypes. The output has the dtype of x, also under autocast, as with
        torch.nn.functional.batch_norm.
    Layout: any. The output has the strides of x if x is channels-first or channels-last. Else it is
        channels-last if the channels of x have stride 1, and channels-first otherwise.
    Grad: x, weight, bias and residual have gradients. x, two values for each channel and, if there is an
        activation, the residual are kept for the backward. Second derivatives, the transforms of torch.func
        and forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: a tensor is not strided or has another dtype, or another argument has the wrong type.
        ValueError: a shape, a device or the activation's name does not fit; only one of running_mean and
            running_var is given; in training there is only one value of each channel, as in PyTorch.

    Source: torch.nn.functional.batch_norm for the interface; Ioffe and Szegedy, 2015, for the formula.
    """
    name = "sdfastgn.batch_norm"
    call = batch_norm_call(
        name, x, running_mean, running_var, weight, bias, training, momentum, eps, activation, residual
    )
    return normalize(name, call)
