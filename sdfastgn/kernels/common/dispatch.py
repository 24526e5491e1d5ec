"""When a call runs in Triton, and when it needs PyTorch's dispatcher on the way."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from sdfastgn.kernels.common import gpu, private
from sdfastgn.kernels.common.private import (
    dispatch_modes,
    forward_ad,
    in_function_mode,
    in_transform,
    is_tracing,
)

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Why no kernel runs in this process, or None. ``turn_off`` sets it.
why_off: str | None = "triton is not installed" if gpu.triton is None else None
# True inside ``stock_code``: for the calls of one thread, while other threads launch kernels.
_in_stock_code: ContextVar[bool] = ContextVar("sdfastgn_in_stock_code", default=False)

P = ParamSpec("P")
T = TypeVar("T")

_TENSORS = (Tensor, torch.nn.Parameter)
# Arguments that no mode and no subclass has a say in.
_PLAIN_TYPES = frozenset((*_TENSORS, type(None), int, float, bool, str, torch.dtype))


class KernelError(Exception):
    """A kernel could not be compiled, and from now on none is launched.

    An op catches it and makes its call again, which then runs in plain PyTorch.
    """


def retried(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, which asks whether Triton runs: called again where a kernel cannot be compiled.

    Not for what torch.compile traces: it would trace the ``try`` too.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except KernelError:
            return function(*args, **kwargs)

    return call


def turn_off(reason: str) -> KernelError:
    """Let all calls of this process run in plain PyTorch from now on. Warns once. Returns what to raise."""
    global why_off
    if why_off is None:
        why_off = reason
        warnings.warn(
            f"sdfastgn: {reason}. From now on this process runs plain PyTorch: the same results, at "
            "stock's speed. Remedies: docs/troubleshooting.md",
            stacklevel=2,
        )
    return KernelError(f"sdfastgn: {reason}")


@contextlib.contextmanager
def stock_code() -> Iterator[None]:
    """Inside, calls of this thread launch no kernel, and optimized modules run their stock forwards.

    What torch.compile has compiled stays as it is.
    """
    token = _in_stock_code.set(True)
    try:
        yield
    finally:
        _in_stock_code.reset(token)


def is_on() -> bool:
    """True if calls of this thread may launch kernels now."""
    return _is_on(torch.compiler.is_compiling())


def _is_on(is_compiling: bool) -> bool:
    # torch.compile cannot trace a ContextVar, and must not bake its value into what it compiles.
    return why_off is None and (is_compiling or not _in_stock_code.get())


def is_supported(x: Tensor) -> bool:
    """True if kernels take tensors on the device and of the dtype of ``x``."""
    return x.is_cuda and x.dtype in KERNEL_DTYPES


def runs_in_triton(x: Tensor) -> bool:
    """True if an op of this package on ``x`` launches Triton kernels, false if it runs in plain PyTorch."""
    return is_supported(x) and is_on()


def has_kernels(x: Tensor) -> bool:
    """True if a kernel of this package takes tensors like ``x`` now; ONNX knows PyTorch's ops alone.

    Where it is false, public functions are PyTorch's own ops and optimized modules run their stock forward.
    """
    if not is_supported(x):
        return False
    is_compiling = torch.compiler.is_compiling()
    return _is_on(is_compiling) and not ((is_compiling or is_tracing()) and torch.onnx.is_in_onnx_export())


def autocast_dtype(x: Any) -> torch.dtype | None:
    """Eager's rule for norms: under CUDA autocast they compute in and return fp32. None: the dtype of x."""
    if torch.is_autocast_enabled("cuda") and isinstance(x, Tensor) and runs_in_triton(x):
        return torch.float32
    return None


def needs_op(x: Tensor) -> bool:
    """True if a call that is not plain is the registered op; else it is PyTorch's own ops and autograd."""
    return has_kernels(x) and (torch.compiler.is_compiling() or not is_transformed())


def is_plain_inference(x: Tensor, others: Iterable[Any]) -> bool:
    """True if nothing would come of the dispatcher but its cost: ``is_plain``, and no gradient is wanted."""
    return is_plain(x, others) and not wants_gradient(x, others)


def wants_gradient(x: Tensor, others: Iterable[Any]) -> bool:
    """True if autograd records an operation on these tensors."""
    return torch.is_grad_enabled() and (
        x.requires_grad or any(t is not None and isinstance(t, Tensor) and t.requires_grad for t in others)
    )


def is_plain(x: Tensor, others: Iterable[Any]) -> bool:
    """True if nothing would come of the dispatcher but autograd: Triton runs, and ``is_untraced``."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and is_supported(x)
        # ``is_on``, without the calls
        and why_off is None
        and not _in_stock_code.get()
        and _are_values(others)
    )


def is_untraced(x: Tensor, others: Iterable[Any]) -> bool:
    """True if these are just memory and numbers: no tracing, modes, tensor subclasses or transforms."""
    return not torch.compiler.is_compiling() and type(x) in _TENSORS and _are_values(others)


def _are_values(others: Iterable[Any]) -> bool:
    return (
        _PLAIN_TYPES.issuperset(map(type, others))
        and dispatch_modes() == 0
        and not in_function_mode()
        and not is_tracing()
        # ``is_transformed``, without the call
        and in_transform() is None
        and forward_ad._current_level < 0
    )


def is_batched(dy: Tensor) -> bool:
    """True if ``dy`` stands for many gradients, which autograd hands to a backward at once."""
    return not torch.compiler.is_compiling() and private.is_batched(dy)


def is_transformed() -> bool:
    """True in torch.func transforms and forward-mode AD, which cannot differentiate ops of a library."""
    return in_transform() is not None or forward_ad._current_level >= 0
