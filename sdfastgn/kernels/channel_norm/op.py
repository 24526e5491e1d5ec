"""The norm of each position's channels, and an activation: the op ``sdfastgn::channel_norm``.

Formula, with x of shape (N, C, *spatial), and the norm and the product over C:

    z = x / max(||x||_2, eps) * scale * weight + bias,        y = act(z)

With scale = sqrt(C) it is RMSNorm over the channels, as the autoencoders of Wan and Qwen-Image have it.

On a GPU the kernels of ``channel_norm/kernels.py`` run; everywhere else, and where a position's channels
do not fit into registers, ``reference_channel_norm``. Layout and numerics contract: there. Gradients:
``channel_norm/backward.py``.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. The formula and eps are those of
torch.nn.functional.normalize.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from torch import Tensor

from sdfastgn.kernels.channel_norm.backward import reference_channel_norm_grads, scaled
from sdfastgn.kernels.channel_norm.config import fits, fits_with_sums
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.checks import as_eps, as_float, check_activation
from sdfastgn.kernels.common.declaration import Operand, Value, backward_of, channels_last
from sdfastgn.kernels.common.grad_op import GradOp
from sdfastgn.kernels.common.layout import empty_laid_out, laid_out
from sdfastgn.kernels.common.op import PlannedOp

_PerChannel = Annotated[Tensor | None, Operand("(C,)")]


class ChannelNormCall(NamedTuple):
    """The arguments of the op ``sdfastgn::channel_norm``."""

    x: Annotated[Tensor, Operand("(N, C, *spatial)", whole=channels_last)]
    weight: _PerChannel
    bias: _PerChannel
    scale: float
    eps: float
    activation: Annotated[str, Value(check_activation)]


def reference_channel_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-12,
    activation: str = "identity",
) -> Tensor:
    """The same function in plain PyTorch, in fp32 (fp64 for fp64 input): the fallback."""
    _, _, z = scaled(x, weight, bias, scale, eps)
    return laid_out(ACTIVATIONS[activation](z).to(x.dtype), channels_last=True)


# --- ops --------------------------------------------------------------------------------------------


class _ReferencePlan:
    """For more channels than registers hold."""

    def __init__(self, reference: Any) -> None:
        self.run = self.run_and_save = reference


def _reference(call: ChannelNormCall) -> Tensor:
    return reference_channel_norm(*call)


# Plans and kernels need Triton, so they are imported when the first one is made.


def _plan(call: ChannelNormCall) -> Any:
    if not fits(call.x.shape[1]):
        return _ReferencePlan(_reference)
    from sdfastgn.kernels.channel_norm.plans import ChannelNormPlan

    return ChannelNormPlan(call)


def _grad_plan(call: Any) -> Any:
    if not fits_with_sums(call.x.shape[1]):
        return _ReferencePlan(reference_channel_norm_grads)
    from sdfastgn.kernels.channel_norm.backward_plans import ChannelNormGradPlan

    return ChannelNormGradPlan(call)


_CHANNEL_NORM = PlannedOp(
    "channel_norm",
    ChannelNormCall,
    ("y",),
    plan=_plan,
    reference=_reference,
    fake=lambda call: empty_laid_out(call.x, call.x.shape, channels_last=True),
    backward=GradOp(
        "channel_norm_backward",
        backward_of(ChannelNormCall, (), dy=Operand(whole=channels_last)),
        plan=_grad_plan,
        reference=reference_channel_norm_grads,
    ),
)


# --- public function ------------------------------------------------------------------------------

_NAME = f"{__name__}.channel_norm"


def channel_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-12,
    activation: str = "identity",
) -> Tensor:
    """``act(x / max(||x||, eps) * scale * weight + bias)``, with the norm over the channels, in one pass.

    Args:
        x: (N, C, *spatial), at least rank 2.
        weight, bias: (C,) or None, independently of each other.
        scale: a number; sqrt(C) makes it RMSNorm.
        eps: the least norm that x is divided by.
        activation: any of ``ACTIVATIONS``.

    Shapes: the output has the shape of x.
    Dtypes: x fp16, bf16 or fp32 (fp64 runs in plain PyTorch); weight and bias any of these. The
        output has the dtype of x, also under autocast.
    Layout: the output is channels-last. x is read where it lies if it is channels-last without gaps,
        else from a copy.
    Grad: with respect to every tensor. Between forward and backward the operands are kept, nothing
        else. A second derivative, the transforms of torch.func and forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: a tensor is not dense, or none of these dtypes, or another argument has the wrong type.
        ValueError: a shape, a device or the activation's name does not fit.

    Source: torch.nn.functional.normalize; Zhang and Sennrich, 2019.
    """
    if type(scale) is not float:
        scale = as_float(_NAME, "scale", scale)
    if type(eps) is not float:
        eps = as_eps(_NAME, eps)
    return _CHANNEL_NORM(ChannelNormCall(x, weight, bias, scale, eps, activation), _NAME)
