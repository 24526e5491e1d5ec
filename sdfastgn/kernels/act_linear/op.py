"""A linear layer behind an activation, for few rows: ``act_linear``.

Formula, with x (N, K), weight (C, K), and either bias (C,) or nothing:

    y[n, c] = sum_k act(x[n, k]) * weight[c, k] + bias[c] + extra_bias[c]

This is what a diffusion model does with its time embedding, some twenty times a step with N as
small as 1 or 2. On a GPU the kernel of ``act_linear/kernels.py`` runs; everywhere else, and with
gradients, ``reference_act_linear``. Layout and numerics contract: there.

Source: torch.nn.functional.linear for the interface.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sdfastgn.kernels.act_linear.config import tile_config
from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.checks import check_activation, check_device, check_floating, check_operand
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.plan_cache import Plans
from sdfastgn.kernels.common.sizes import vector_width


def reference_act_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "identity",
    extra_bias: Tensor | None = None,
) -> Tensor:
    """The same function in plain PyTorch, in fp32 (fp64 for fp64 input): the fallback."""
    wide = torch.promote_types(x.dtype, torch.float32)
    bias, extra_bias = (None if b is None else b.to(wide) for b in (bias, extra_bias))
    y = F.linear(ACTIVATIONS[activation](x.to(wide)), weight.to(wide), bias)
    y = y if extra_bias is None else y + extra_bias
    return y.to(x.dtype)


# --- launch -----------------------------------------------------------------------------------------


class _Call(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str
    extra_bias: Tensor | None


class _Plan:
    """The launch for one combination of shapes, strides, dtypes, activation and device."""

    __slots__ = ("launch", "shape")

    def __init__(self, call: _Call) -> None:
        from sdfastgn.kernels.act_linear import kernels  # needs Triton

        x = call.x
        N, K = x.shape
        C = call.weight.shape[0]
        self.shape = (N, C)
        config = tile_config(N, C, K, x.itemsize, vector_width(x.itemsize, K), gpu.num_sms(x.device))
        pdl = gpu.has_programmatic_launch(x.device)
        self.launch = Launch(
            kernels._act_linear_kernel, config.programs(N, C), config.num_warps, pdl=pdl,
            N=N, C=C, K=K, ACTIVATION=call.activation, EVEN=config.is_even(K),
            BLOCK_N=config.block_n, BLOCK_C=config.block_c, BLOCK_K=config.block_k,
            STEPS=config.steps, VECTOR=config.vector,
        )  # fmt: skip

    def run(self, call: _Call) -> Tensor:
        x, weight, bias, _, extra_bias = call
        y = torch.empty(self.shape, dtype=x.dtype, device=x.device)
        self.launch.run(x, weight, bias, extra_bias, y)
        return y


_plans = Plans(_Call, _Plan)


# --- public function ------------------------------------------------------------------------------


def act_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "identity",
    *,
    extra_bias: Tensor | None = None,
) -> Tensor:
    """``linear(act(x), weight, bias) + extra_bias`` in one kernel, which reads the weight once: for
    few rows, as of a time embedding.

    Args:
        x: (N, K). Any N is right; for more than some 16 rows a matrix product is faster.
        weight: (C, K), dtype and device of x.
        bias: (C,) or None, any of x's dtypes.
        activation: of x, before the product: any of ``ACTIVATIONS``.
        extra_bias: as bias: something else that is added to every row, such as the bias of a convolution.

    Shapes: the output is (N, C).
    Dtypes: x fp16, bf16 or fp32 (fp64 runs in plain PyTorch). The activation is not rounded, and
        products and sums are in fp32, without TF32. The output has the dtype of x. Under autocast
        PyTorch's own linear layer runs, in the dtype that autocast chooses.
    Layout: the output is contiguous; what is not contiguous is copied first.
    Grad: with respect to every tensor, any number of times, in plain PyTorch, as are the transforms
    of torch.func and forward-mode AD.
    Raises:
        TypeError: a tensor is not dense, or none of these dtypes, or the dtypes of x and weight differ.
        ValueError: a shape, a device or the activation's name does not fit.

    Source: torch.nn.functional.linear.
    """
    call = _Call(x, weight, bias, activation, extra_bias)
    autocast = isinstance(x, Tensor) and (x.is_cuda or x.is_cpu) and torch.is_autocast_enabled(x.device.type)
    if not autocast and dispatch.is_plain_inference(x, call):
        try:
            # Invalid arguments never have a plan, so only calls of a new kind are checked.
            plan = _plans.made.get(_plans.key(call, _plans.tensors(call)))
            if plan is None:
                _check(call)
                if x.numel() and weight.numel():
                    plan = _plans.of(call)
            if plan is not None:
                return plan.run(call)
        except dispatch.KernelError:
            return act_linear(x, weight, bias, activation, extra_bias=extra_bias)
        # A number for a tensor; a tensor without strides or memory.
        except (AttributeError, RuntimeError):
            _check(call)
            raise
    _check(call)
    if autocast:
        y = F.linear(ACTIVATIONS[activation](x), weight, bias)
        return y if extra_bias is None else y + extra_bias.to(y.dtype)
    return reference_act_linear(x, weight, bias, activation, extra_bias)


def _check(call: _Call) -> None:
    x, weight = call.x, call.weight
    name = f"{__name__}.act_linear"
    check_floating(name, "x", x)
    check_floating(name, "weight", weight)
    check_device(name, "weight", weight, x)
    if x.dtype != weight.dtype:
        raise TypeError(f"{name}: x and weight must have one dtype, got {x.dtype} and {weight.dtype}")
    if x.dim() != 2:
        raise ValueError(f"{name}: x must be (N, K), got shape {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"{name}: weight must be (C, {x.shape[1]}), got shape {tuple(weight.shape)}")
    for label in ("bias", "extra_bias"):
        check_operand(name, label, getattr(call, label), x, (weight.shape[0],))
    check_activation(name, call.activation)
