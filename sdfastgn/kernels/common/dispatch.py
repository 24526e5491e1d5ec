"""When a call runs in Triton, and when it needs PyTorch's dispatcher on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from sdfastgn.kernels.common.tiles import triton

__all__ = [
    "KERNEL_DTYPES",
    "has_kernels",
    "is_plain",
    "is_plain_inference",
    "is_transformed",
    "is_untraced",
    "needs_op",
    "runs_in_triton",
    "wants_gradient",
]

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def runs_in_triton(x: Tensor) -> bool:
    """True if an op of this package on ``x`` launches Triton kernels, false if it runs in plain PyTorch."""
    return triton is not None and x.is_cuda and x.dtype in KERNEL_DTYPES


def has_kernels(x: Tensor) -> bool:
    """True if a kernel of this package is for tensors like ``x``, and may be called now: ONNX knows PyTorch's ops alone.

    Where it is false, public functions are PyTorch's own ops and optimized modules run their stock forward.
    """
    return runs_in_triton(x) and not (
        (torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None)
        and torch.onnx.is_in_onnx_export()
    )


def needs_op(x: Tensor) -> bool:
    """True if a call that is not plain has to be the registered op; else it is PyTorch's own ops, under PyTorch's own autograd."""
    return has_kernels(x) and (torch.compiler.is_compiling() or not is_transformed())


def is_plain_inference(x: Tensor, others: tuple[Tensor | None, ...]) -> bool:
    """True if nothing would come of the dispatcher but its cost: ``is_plain``, and no gradient is wanted."""
    return is_plain(x, others) and not wants_gradient(x, others)


def wants_gradient(x: Tensor, others: tuple[Tensor | None, ...]) -> bool:
    """True if autograd records an operation on these tensors."""
    return torch.is_grad_enabled() and (
        x.requires_grad or any(t is not None and t.requires_grad for t in others)
    )


def is_plain(x: Tensor, others: tuple[Tensor | None, ...]) -> bool:
    """True if nothing would come of the dispatcher but autograd: Triton runs, and ``is_untraced``."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and runs_in_triton(x)
        and is_untraced(x, others)
    )


def is_untraced(x: Tensor, others: tuple[Tensor | None, ...]) -> bool:
    """True if these tensors are memory and nothing else: no tracing, no modes, no tensor subclasses, no transforms."""
    if torch.compiler.is_compiling() or type(x) not in _PLAIN_TYPES:
        return False
    for t in others:
        if t is not None and type(t) not in _PLAIN_TYPES:
            return False
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_torch_function_mode_enabled()
        and torch._C._get_tracing_state() is None
        and not is_transformed()
    )


def is_transformed() -> bool:
    """True within torch.func transforms and forward-mode AD, which differentiate PyTorch's ops but not those of a library."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )
