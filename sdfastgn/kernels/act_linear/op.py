"""A linear layer behind an activation, for few rows: the op ``sdfastgn::act_linear``.

Formula, with x (N, K), weight (C, K), and either bias (C,) or nothing:

    y[n, c] = sum_k act(x[n, k]) * weight[c, k] + bias[c] + extra_bias[c]

This is what a diffusion model does with its time embedding, some twenty times a step with N as small as 1 or 2. On a GPU the kernel of
``act_linear/kernels.py`` runs; everywhere else ``reference_act_linear``. Layout and numerics contract: there.

Source: torch.nn.functional.linear for the interface; the gradient is the chain rule.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sdfastgn.kernels.act_linear.kernels import find_plan, launch_act_linear, make_plan, plan_key
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.activations import ACTIVATION_GRADS, ACTIVATIONS
from sdfastgn.kernels.common.checks import check_device, check_floating, check_operand

__all__ = ["act_linear", "reference_act_linear"]


def reference_act_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "identity",
    extra_bias: Tensor | None = None,
) -> Tensor:
    """The same function in plain PyTorch, in fp32 (fp64 for fp64 input): fallback without a GPU and truth of the tests (in fp64)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    bias, extra_bias = (None if b is None else b.to(wide) for b in (bias, extra_bias))
    y = F.linear(ACTIVATIONS[activation](x.to(wide)), weight.to(wide), bias)
    y = y if extra_bias is None else y + extra_bias
    return y.to(x.dtype)


# --- op -----------------------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("sdfastgn", "FRAGMENT")
_LIBRARY.define(
    "act_linear(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? extra_bias) -> Tensor"
)


def _impl(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, extra_bias: Tensor | None
) -> Tensor:
    if dispatch.runs_in_triton(x):
        key = plan_key(x, weight, bias, extra_bias, activation)
        plan = find_plan(key) or make_plan(key, x, weight, (bias, extra_bias), activation)
        if plan.programs:
            return launch_act_linear(plan, x, weight, bias, extra_bias)
    return reference_act_linear(x, weight, bias, activation, extra_bias)


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, extra_bias: Tensor | None
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, activation, extra_bias = inputs
    ctx.activation = activation
    ctx.bias_dtypes = tuple(None if b is None else b.dtype for b in (bias, extra_bias))
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """In plain PyTorch, so that it can be differentiated again."""
    x, weight = ctx.saved_tensors
    wide = torch.promote_types(x.dtype, torch.float32)
    needs_x, needs_weight, *_ = ctx.needs_input_grad
    dx = dweight = None
    dy, z = dy.to(wide), x.to(wide)
    if needs_x:
        dx = ACTIVATION_GRADS[ctx.activation](dy @ weight.to(wide), z).to(x.dtype)
    if needs_weight:
        dweight = (dy.mT @ ACTIVATIONS[ctx.activation](z)).to(weight.dtype)
    needs_bias = (ctx.needs_input_grad[2], ctx.needs_input_grad[4])
    dbias, dextra = (
        dy.sum(0).to(dtype) if needs else None
        for needs, dtype in zip(needs_bias, ctx.bias_dtypes, strict=True)
    )
    return dx, dweight, dbias, None, dextra


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("act_linear", _impl, _key)
torch.library.register_fake("sdfastgn::act_linear", _fake, lib=_LIBRARY)
torch.library.register_autograd("sdfastgn::act_linear", _backward, setup_context=_setup, lib=_LIBRARY)


# --- public function ------------------------------------------------------------------------------------------------------------


def act_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "identity",
    *,
    extra_bias: Tensor | None = None,
) -> Tensor:
    """``linear(act(x), weight, bias) + extra_bias`` in one kernel, which reads the weight once: for few rows, as of a time embedding.

    Args:
        x: (N, K). Any N is right; for more than some 16 rows a matrix product is faster.
        weight: (C, K), dtype and device of x.
        bias: (C,) or None, any of x's dtypes.
        activation: of x, before the product: "identity", "relu", "silu", "gelu" or "gelu_tanh".
        extra_bias: as bias: something else that is added to every row, such as the bias of a convolution.

    Shapes: the output is (N, C).
    Dtypes: x fp16, bf16 or fp32 (fp64 runs in plain PyTorch). The activation is not rounded, and products and sums are in fp32, without
        TF32. The output has the dtype of x. Under autocast PyTorch's own linear layer runs, in the dtype that autocast chooses.
    Layout: the output is contiguous; what is not contiguous is copied first.
    Grad: with respect to every tensor, any number of times, in plain PyTorch, as are the transforms of torch.func and forward-mode AD.
    Raises:
        TypeError: a tensor is not dense, or none of these dtypes, or the dtypes of x and weight differ.
        ValueError: a shape, a device or the activation's name does not fit.

    Source: torch.nn.functional.linear.
    """
    autocast = isinstance(x, Tensor) and (x.is_cuda or x.is_cpu) and torch.is_autocast_enabled(x.device.type)
    # A key that can be looked up first; whatever is wrong misses there and is then checked.
    if (
        not autocast
        and type(activation) is str
        and isinstance(weight, Tensor)
        and dispatch.is_plain_inference(x, (weight, bias, extra_bias))
    ):
        try:
            key = plan_key(x, weight, bias, extra_bias, activation)
            plan = find_plan(key)
            if plan is None:
                _check(x, weight, bias, activation, extra_bias)
                plan = make_plan(key, x, weight, (bias, extra_bias), activation)
            if plan.programs:
                return launch_act_linear(plan, x, weight, bias, extra_bias)
        except RuntimeError:  # a tensor that has no strides or no memory
            _check(x, weight, bias, activation, extra_bias)
            raise
    _check(x, weight, bias, activation, extra_bias)
    if autocast:
        y = F.linear(ACTIVATIONS[activation](x), weight, bias)
        return y if extra_bias is None else y + extra_bias.to(y.dtype)
    if not dispatch.needs_op(x):
        return reference_act_linear(x, weight, bias, activation, extra_bias)
    return torch.ops.sdfastgn.act_linear(x, weight, bias, activation, extra_bias)


def _check(x: Any, weight: Any, bias: Any, activation: Any, extra_bias: Any) -> None:
    name = "sdfastgn.act_linear"
    check_floating(name, "x", x)
    check_floating(name, "weight", weight)
    check_device(name, "weight", weight, x)
    if x.dtype != weight.dtype:
        raise TypeError(f"{name}: x and weight must have one dtype, got {x.dtype} and {weight.dtype}")
    if x.dim() != 2:
        raise ValueError(f"{name}: x must be (N, K), got shape {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"{name}: weight must be (C, {x.shape[1]}), got shape {tuple(weight.shape)}")
    for label, b in (("bias", bias), ("extra_bias", extra_bias)):
        check_operand(name, label, b, x, (weight.shape[0],))
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"{name}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
