"""Divides the channels of each position by their norm, and applies an activation: ``sdfastgn::channel_norm``.

Formula, with x of shape (N, C, *spatial), and ||x|| the Euclidean norm of the channels of a position:

    z = x / max(||x||, eps) * scale * weight + bias,        y = act(z)

With scale = sqrt(C) this is RMSNorm over the channels, which the autoencoders of Wan and Qwen-Image use.

On a GPU the kernels of ``channel_norm/kernels.py`` run; that file explains layouts and numerics. Everywhere
else, and if the channels of a position do not fit into registers, ``reference_channel_norm`` runs. Gradients
are in ``channel_norm/backward.py``.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. The formula and eps come from
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
from sdfastgn.kernels.common.plan_cache import named

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
    """Computes ``channel_norm`` in plain PyTorch, in fp32 or fp64, for calls that no kernel can run."""
    _, _, z = scaled(x, weight, bias, scale, eps)
    return laid_out(ACTIVATIONS[activation](z).to(x.dtype), channels_last=True)


# --- ops --------------------------------------------------------------------------------------------


class _ReferencePlan:
    """Takes the place of ``ChannelNormPlan``, but launches no kernels: ``run`` computes in plain PyTorch.

    It is used if a position has more channels than fit into the registers of a program.
    """

    def __init__(self, reference: Any) -> None:
        self.run = self.run_and_save = reference


def _reference(call: ChannelNormCall) -> Tensor:
    return reference_channel_norm(*call)


_own_plan = named(f"{__package__}.plans:ChannelNormPlan")
_own_grad_plan = named(f"{__package__}.backward_plans:ChannelNormGradPlan")


def _plan(call: ChannelNormCall) -> Any:
    return _own_plan(call) if fits(call.x.shape[1]) else _ReferencePlan(_reference)


def _grad_plan(call: Any) -> Any:
    fitting = fits_with_sums(call.x.shape[1])
    return _own_grad_plan(call) if fitting else _ReferencePlan(reference_channel_norm_grads)


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
    """Computes ``act(x / max(||x||, eps) * scale * weight + bias)`` in one pass.

    ||x|| is the Euclidean norm of the channels of each position.

    Args:
        x: (N, C, *spatial), at least rank 2.
        weight, bias: (C,) or None, independently of each other.
        scale: a number. With sqrt(C) the result is RMSNorm.
        eps: smallest number by which x is divided. If ||x|| is smaller, x is divided by eps.
        activation: a key of ``sdfastgn.kernels.common.activations.ACTIVATIONS``.

    Shapes: the output has the shape of x.
    Dtypes: x is fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch. weight and bias may have any of the
        four dtypes. The output has the dtype of x, also under autocast.
    Layout: any. x is copied first if it is not channels-last without gaps. The output is channels-last.
    Grad: every tensor has gradients. Only the operands are kept for the backward. Second derivatives, the
        transforms of torch.func and forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: a tensor is not strided or has another dtype, or another argument has the wrong type.
        ValueError: a shape, a device or the activation's name does not fit.

    Source: torch.nn.functional.normalize; Zhang and Sennrich, 2019.
    """
    if type(scale) is not float:
        scale = as_float(_NAME, "scale", scale)
    if type(eps) is not float:
        eps = as_eps(_NAME, eps)
    return _CHANNEL_NORM(ChannelNormCall(x, weight, bias, scale, eps, activation), _NAME)
