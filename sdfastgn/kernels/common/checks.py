"""Checks of arguments, with the same error texts for all public functions and modules.

In all functions ``name`` is the name of the public function, with which each error begins, and ``label`` is
the name of the argument. As in PyTorch, a number may be a Python number, a NumPy number or a 0-d tensor.

A check raises TypeError for a wrong type or dtype, and ValueError for a wrong value, shape or device.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common.activations import ACTIVATIONS

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def as_index(name: str, label: str, value: Any) -> int:
    """Returns ``value`` as an int. Raises TypeError if it is not an integer, or if it is a bool."""
    # This is ``try`` instead of ``contextlib.suppress``, at which torch.compile before 2.10 breaks the graph.
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}: {label} must be an int, got {value!r}")


def as_size(name: str, label: str, value: Any) -> int:
    """Returns ``value`` as an int. Raises ValueError if it is negative."""
    size = as_index(name, label, value)
    if size < 0:
        raise ValueError(f"{name}: {label} must not be negative, got {value!r}")
    return size


def as_float(name: str, label: str, value: Any) -> float:
    """Returns ``value`` as a float.

    Raises TypeError for a bool, for text, and for a tensor that requires a gradient, because the gradient
    would be lost.
    """
    if isinstance(value, Tensor):
        is_number = value.dim() == 0 and not value.is_complex() and not value.requires_grad
    else:
        is_number = not isinstance(value, (bool, str, bytes, bytearray))
    try:
        if is_number:
            return float(value)
    except (OverflowError, TypeError):  # ``float`` raises OverflowError for an int that is too large
        pass
    raise TypeError(f"{name}: {label} must be a number, got {value!r}")


def as_eps(name: str, value: Any) -> float:
    """Returns a norm's eps as a float. Accepts a bool too, as PyTorch does."""
    return float(value) if isinstance(value, bool) else as_float(name, "eps", value)


def check_bool(name: str, label: str, value: Any) -> None:
    """Raise TypeError if ``value`` is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {label} must be a bool, got {value!r}")


def check_activation(name: str, activation: Any) -> None:
    """Raise ValueError if ``activation`` is not a key of ``ACTIVATIONS``, also if it is not a string."""
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"{name}: unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")


def check_input(name: str, label: str, t: Any) -> None:
    """Check that ``t`` is a strided tensor of fp16, bf16, fp32 or fp64: not sparse, not nested.

    Unlike in ``check_floating``, the error for an object that is no tensor does not say "floating".
    """
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: {label} must be a torch.Tensor, got {type(t).__name__}")
    check_floating(name, label, t)


def check_floating(name: str, label: str, t: Any) -> None:
    """Check that ``t`` is a strided tensor of fp16, bf16, fp32 or fp64: not sparse, not nested."""
    if isinstance(t, Tensor) and t.dtype in _DTYPES and t.layout is torch.strided and not t.is_nested:
        return
    if not isinstance(t, Tensor) or not t.is_floating_point():
        found = t.dtype if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"{name}: {label} must be a floating torch.Tensor, got {found}")
    found = f"layout {t.layout}" if t.dtype in _DTYPES else t.dtype
    found = "a nested tensor" if t.is_nested else found
    raise TypeError(f"{name}: {label} must be a dense fp16, bf16, fp32 or fp64 tensor, got {found}")


def check_device(name: str, label: str, t: Tensor, x: Tensor, first: str = "x") -> None:
    """Check that ``t`` is on the device of ``x``. ``first``: the name of ``x``, for the error."""
    if t.device != x.device:
        raise ValueError(f"{name}: {label} is on {t.device}, {first} on {x.device}")


def check_operand(name: str, label: str, t: Any, x: Tensor, *shapes: tuple[int, ...]) -> None:
    """Check that ``t`` is None, or a floating tensor of one of ``shapes`` on the device of ``x``."""
    if t is None:
        return
    check_floating(name, label, t)
    # Each shape is compared by ``!=``, because torch.compile with dynamic shapes cannot compare shapes by
    # ``in``.
    if all(tuple(t.shape) != shape for shape in shapes):
        *others, last = map(str, shapes)
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{name}: {label} must have shape {allowed}, got {tuple(t.shape)}")
    check_device(name, label, t, x)
