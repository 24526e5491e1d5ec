"""Decides whether a call of an op runs in Triton, and whether it must go through PyTorch's dispatcher."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from sdfastgn.kernels.common import gpu, private
from sdfastgn.kernels.common.observers import is_observed
from sdfastgn.kernels.common.private import (
    any_autocast,
    dispatch_modes,
    forward_ad,
    in_function_mode,
    in_transform,
    is_tracing,
)
from sdfastgn.kernels.common.setting import setting

# Dtypes for which this package has kernels.
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# The reason why kernels are turned off in this process; None if they are on. ``turn_off`` sets it.
why_off: str | None = "triton is not installed" if gpu.triton is None else None
# Maps (name of an op, index of a GPU) to the reason why the op runs in plain PyTorch on this GPU.
# ``turn_op_off`` adds entries.
ops_off: dict[tuple[str, int], str] = {}
# True inside the context ``stock_code``, in which no kernels are launched. It is a ContextVar, so that other
# threads still launch kernels.
_in_stock_code: ContextVar[bool] = ContextVar("sdfastgn_in_stock_code", default=False)

P = ParamSpec("P")
T = TypeVar("T")

_TENSORS = (Tensor, torch.nn.Parameter)
# Types of an op's arguments with which a call can skip PyTorch's dispatcher. A subclass of Tensor may need
# the dispatcher.
_PLAIN_TYPES = frozenset((*_TENSORS, type(None), int, float, bool, str, torch.dtype))


class KernelError(Exception):
    """Raised if the GPU is too old, or if Triton cannot compile or load a kernel.

    The op that launched the kernel catches this error. It turns its own kernels off (``turn_op_off``) and
    runs in plain PyTorch. Public functions never raise this error.
    """


def turn_off(reason: str) -> KernelError:
    """Make all later calls in this process run in plain PyTorch, and warn once.

    Returns a ``KernelError`` with the reason, which the caller raises.
    """
    global why_off
    if why_off is None:
        why_off = reason
        warnings.warn(
            f"sdfastgn: {reason}. From now on this process runs plain PyTorch: the same results, at "
            "stock's speed. Remedies: docs/troubleshooting.md",
            stacklevel=2,
        )
    return KernelError(reason)


def turn_op_off(op: str, x: Tensor, error: KernelError) -> None:
    """Make all later calls of ``op`` on the GPU of ``x`` run in plain PyTorch, because of ``error``.

    Warns once. Does nothing if all kernels of this process are off already.
    """
    key = op, x.get_device()
    if why_off is None and key not in ops_off:
        ops_off[key] = str(error)
        warnings.warn(
            f"sdfastgn: {error}. From now on {op} runs in plain PyTorch on {x.device}: the same results, at "
            "stock's speed. Other operations keep their kernels. Remedies: docs/troubleshooting.md",
            stacklevel=2,
        )


def is_op_off(op: str, x: Tensor) -> bool:
    """True if the kernels of ``op`` are turned off on the GPU of ``x``, or if all kernels are turned off."""
    return why_off is not None or (bool(ops_off) and (op, x.get_device()) in ops_off)


def ops_without_kernels() -> dict[str, str]:
    """Returns {op and GPU: reason why the op's kernels are turned off there}, for reports.

    A key is, for example, ``geglu on cuda:0``.
    """
    return {
        f"{op} on {'cpu' if index < 0 else f'cuda:{index}'}": reason
        for (op, index), reason in ops_off.items()
    }


def kernels_of(op: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator of a function that launches kernels of ``op``.

    The first argument of the function must be a tensor on the GPU. The function raises ``KernelError`` if a
    kernel cannot be compiled. Then the decorator turns off the kernels of ``op`` on this GPU. All later calls
    of the function raise ``KernelError`` at once. Callers catch the error and compute in plain PyTorch.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def launch(*args: P.args, **kwargs: P.kwargs) -> T:
            x: Any = args[0]
            if is_op_off(op, x):
                raise KernelError(f"the kernels of {op} are off")
            try:
                return function(*args, **kwargs)
            except KernelError as error:
                turn_op_off(op, x, error)
                raise

        return launch

    return decorate


def stock_code() -> AbstractContextManager[None]:
    """A context in which this thread launches no kernels, and optimized modules run their original forwards.

    Code that torch.compile has already compiled still launches kernels.
    """
    return setting(_in_stock_code, True)


def is_stock_code() -> bool:
    """True inside the context ``stock_code``, in which this thread launches no kernels.

    Always False in code that torch.compile compiles, because torch.compile cannot trace a ContextVar.
    """
    return not torch.compiler.is_compiling() and _in_stock_code.get()


def is_on() -> bool:
    """True if calls of this thread may launch kernels now."""
    # torch.compile cannot trace a ContextVar. So compiled code ignores the context ``stock_code``, in which
    # no kernels should be launched.
    return why_off is None and (torch.compiler.is_compiling() or not _in_stock_code.get())


def is_supported(x: Tensor) -> bool:
    """True if kernels support the device and the dtype of ``x``."""
    return x.is_cuda and x.dtype in KERNEL_DTYPES


def runs_in_triton(x: Tensor) -> bool:
    """True if an op whose first operand is ``x`` launches Triton kernels. Else it runs in plain PyTorch."""
    return is_supported(x) and is_on()


def has_kernels(x: Tensor) -> bool:
    """True if a call on ``x`` may use this package's ops: kernels run, and the call is not exported to ONNX.

    An export to ONNX cannot translate this package's ops. If the result is False, public functions call
    PyTorch's own ops, and optimized modules run their original forward.
    """
    if not is_supported(x) or why_off is not None:
        return False
    # ``is_compiling`` is also True in exports without torch.compile, but takes longer than
    # ``is_dynamo_compiling``. In such exports x is a subclass of Tensor. So ``is_compiling`` is called only
    # for subclasses.
    if torch.compiler.is_dynamo_compiling() or (type(x) is not Tensor and torch.compiler.is_compiling()):
        return not torch.onnx.is_in_onnx_export()
    return not _in_stock_code.get() and not (is_tracing() and torch.onnx.is_in_onnx_export())


def autocast_dtype(x: Any) -> torch.dtype | None:
    """Returns the dtype of a norm's result: fp32 under CUDA autocast if kernels run on x.

    Otherwise returns None, which means the dtype of x.
    """
    if any_autocast() and torch.is_autocast_enabled("cuda") and isinstance(x, Tensor) and runs_in_triton(x):
        return torch.float32
    return None


def is_autocast(x: Tensor) -> bool:
    """True if autocast is on for the type of device on which ``x`` is."""
    return any_autocast() and torch.is_autocast_enabled(x.device.type)


def needs_op(x: Tensor) -> bool:
    """Decides how a call runs if it does not launch kernels directly, for example under torch.compile.

    Returns True if the op that this package has registered with PyTorch runs the call, through the
    dispatcher. Returns False if PyTorch's own ops run it.
    """
    return has_kernels(x) and (torch.compiler.is_compiling() or not is_transformed())


def is_plain_inference(x: Tensor, others: Iterable[Any]) -> bool:
    """True if a call may launch a kernel directly.

    A call may do so if it can skip PyTorch's dispatcher (``is_plain``), and autograd need not record the
    call.
    """
    return is_plain(x, others) and not (torch.is_grad_enabled() and wants_gradient(x, others))


def wants_gradient(x: Tensor, others: Iterable[Any]) -> bool:
    """True if autograd would record an operation on ``x`` and the tensors in ``others``."""
    return torch.is_grad_enabled() and (
        x.requires_grad or any(t is not None and isinstance(t, Tensor) and t.requires_grad for t in others)
    )


def is_plain(x: Tensor, others: Iterable[Any]) -> bool:
    """True if a call can skip PyTorch's dispatcher: kernels run, and nothing traces or transforms the call.

    Autograd may still have to record the call (``wants_gradient``). If x is a Parameter, the result is always
    False.
    """
    return (
        # ``is_dynamo_compiling`` is faster than ``is_compiling``, but does not find exports without
        # torch.compile. In such exports x is a subclass of Tensor, which the next line excludes.
        not torch.compiler.is_dynamo_compiling()
        and type(x) is Tensor
        and is_supported(x)
        # The code of ``is_on`` and of ``is_untraced`` is repeated here, because function calls take time.
        and why_off is None
        and not _in_stock_code.get()
        and _PLAIN_TYPES.issuperset(map(type, others))
        and (dispatch_modes() == 0 or is_observed())
        and not in_function_mode()
        and not is_tracing()
        and in_transform() is None
        and forward_ad._current_level < 0
    )


def is_untraced(x: Tensor, others: Iterable[Any]) -> bool:
    """True if the arguments are ordinary tensors and numbers, and nothing traces or transforms the call.

    False under tracing, in torch.func transforms, in forward-mode AD and in PyTorch's modes
    (``TorchDispatchMode``, ``TorchFunctionMode``). Two modes make no difference: the mode that only chooses a
    default device, and the mode of code that records this thread's launches (``common/observers.py``). Also
    False for a subclass of Tensor, except Parameter.
    """
    return (
        not torch.compiler.is_dynamo_compiling()
        and type(x) in _TENSORS
        and _PLAIN_TYPES.issuperset(map(type, others))
        and (dispatch_modes() == 0 or is_observed())
        and not in_function_mode()
        and not is_tracing()
        # The next two lines repeat the code of ``not is_transformed()``, because a function call takes time.
        and in_transform() is None
        and forward_ad._current_level < 0
    )


def is_batched(dy: Tensor) -> bool:
    """True if ``dy`` is a batch of gradients, from ``torch.autograd.grad(..., is_grads_batched=True)``."""
    return not torch.compiler.is_compiling() and private.is_batched(dy)


def is_transformed() -> bool:
    """True inside torch.func transforms and forward-mode AD, which cannot differentiate registered ops."""
    return in_transform() is not None or forward_ad._current_level >= 0
