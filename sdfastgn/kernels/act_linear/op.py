"""An activation followed by a linear layer, for inputs with few rows: ``act_linear``.

Formula, with x (N, K), weight (C, K), and biases (C,) or None:

    y[n, c] = sum_k act(x[n, k]) * weight[c, k] + bias[c] + extra_bias[c]

The ResNet blocks of a diffusion model compute this from the time embedding, about twenty times in each step,
with N of 1 or 2.

On a GPU the kernel of ``act_linear/kernels.py`` runs; that file explains layouts and numerics. Under autocast
PyTorch's linear layer runs. Everywhere else, and with gradients, ``reference_act_linear`` runs in plain
PyTorch.

Source: torch.nn.functional.linear for the interface.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.act_linear import shared
from sdfastgn.kernels.act_linear.config import tile_config
from sdfastgn.kernels.common import dispatch, gpu, private
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
    """Computes ``act_linear`` in plain PyTorch, in fp32 or fp64, for calls that the kernel cannot run."""
    wide = torch.promote_types(x.dtype, torch.float32)
    bias, extra_bias = (None if b is None else b.to(wide) for b in (bias, extra_bias))
    y = private.linear(ACTIVATIONS[activation](x.to(wide)), weight.to(wide), bias)
    y = y if extra_bias is None else y + extra_bias
    return y.to(x.dtype)


# --- launch -----------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """The arguments of ``act_linear`` on which its launch depends."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str
    extra_bias: Tensor | None


class _Plan:
    """The launch of ``act_linear`` for calls with equal shapes, strides, dtypes, device and activation.

    It has one program for each tile of y.
    """

    __slots__ = ("config", "launch", "shape", "strides")

    def __init__(self, call: _Call) -> None:
        from sdfastgn.kernels.act_linear import kernels  # imported late: kernels.py needs Triton

        x = call.x
        N, K = x.shape
        C = call.weight.shape[0]
        self.shape, self.strides = (N, C), (C, 1)
        config = tile_config(N, C, K, x.itemsize, vector_width(x.itemsize, K), gpu.num_sms(x.device))
        self.config = config
        pdl = gpu.has_programmatic_launch(x.device)
        self.launch = Launch(
            kernels._act_linear_kernel, config.programs(N, C), config.num_warps, pdl=pdl,
            N=N, C=C, K=K, ACTIVATION=call.activation, EVEN=config.is_even(K),
            BLOCK_N=config.block_n, BLOCK_C=config.block_c, BLOCK_K=config.block_k,
            STEPS=config.steps, VECTOR=config.vector,
        )  # fmt: skip

    def run(self, call: _Call) -> Tensor:
        """Launch the kernel, and return y (N, C)."""
        sharing = shared.current.get()
        y = None if sharing is None else sharing.result(call, self.config)
        if y is not None:
            return y
        x, weight, bias, _, extra_bias = call
        # ``new_empty_strided`` takes half the CPU time of ``torch.empty``.
        y = x.new_empty_strided(self.shape, self.strides)
        self.launch.run(x, weight, bias, extra_bias, y)
        return y


_plans = Plans("act_linear", _Call, _Plan)


# --- public function ------------------------------------------------------------------------------


def act_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "identity",
    *,
    extra_bias: Tensor | None = None,
    is_plain: bool = False,
) -> Tensor:
    """Computes ``linear(act(x), weight, bias) + extra_bias`` in one kernel, which is fast if x has few rows.

    Args:
        x: (N, K). With more than about 16 rows a matrix product is faster.
        weight: (C, K), the dtype and device of x.
        bias: (C,) or None.
        activation: applied to x before the product. A key of
            ``sdfastgn.kernels.common.activations.ACTIVATIONS``.
        extra_bias: (C,) or None. It is added to every row too. For example, if the output is added to the
            result of a convolution next, this can be the bias of the convolution.
        is_plain: True if the caller has checked that the call may launch a kernel directly
            (``dispatch.is_plain_inference``), and that autocast is off. Then neither is checked again.

    Shapes: the output is (N, C).
    Dtypes: x is fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch. Each bias may have any of the four
        dtypes. Activation, products and sums are fp32, without TF32. The output has the dtype of x. Under
        autocast PyTorch's own linear layer runs, in the dtype that autocast chooses.
    Layout: any. Tensors that are not contiguous are copied first. The output is contiguous.
    Grad: every tensor has gradients, of any order. Calls with gradients, in transforms of torch.func or in
        forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: a tensor is not strided or has another dtype, or x and weight have different dtypes.
        ValueError: a shape, a device or the activation's name does not fit.

    Source: torch.nn.functional.linear.
    """
    call = _Call(x, weight, bias, activation, extra_bias)
    autocast = not is_plain and isinstance(x, Tensor) and (x.is_cuda or x.is_cpu) and dispatch.is_autocast(x)
    if is_plain or (not autocast and dispatch.is_plain_inference(x, call)):
        try:
            # A plan says how to launch the kernel. It is made and cached only for valid arguments. So if a
            # plan is found, the arguments are valid, and need no check.
            plan = _plans.made.get(_plans.key(call, _plans.tensors(call)))
            if plan is None:
                _check(call)
                if x.numel() and weight.numel():
                    plan = _plans.of(call)
            if plan is not None:
                return plan.run(call)
        except dispatch.KernelError as error:
            _plans.turn_off(call, error)
            return reference_act_linear(x, weight, bias, activation, extra_bias)
        # ``_plans.key`` raises an error that does not help the user if an argument is invalid, for example a
        # number instead of a tensor. ``_check`` raises a better error, which names the argument.
        except (AttributeError, RuntimeError):
            _check(call)
            raise
    _check(call)
    if autocast:
        y = private.linear(ACTIVATIONS[activation](x), weight, bias)
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
