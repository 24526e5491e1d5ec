"""Checks of arguments, in one wording for all public functions and modules.

``name`` is the public name that an error begins with, ``label`` the argument's. Numbers are what
PyTorch's own functions take as such: Python's, NumPy's, and tensors without dimensions.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common.activations import ACTIVATIONS

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# ``try``, not ``contextlib.suppress``: torch.compile before 2.10 breaks the graph at the latter.
def as_index(name: str, label: str, value: Any) -> int:
    """``value`` as an int. A bool is none, as in PyTorch."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}: {label} must be an int, got {value!r}")


def as_size(name: str, label: str, value: Any) -> int:
    """``value`` as a number of elements. Zero is one, as in PyTorch."""
    size = as_index(name, label, value)
    if size < 0:
        raise ValueError(f"{name}: {label} must not be negative, got {value!r}")
    return size


def as_float(name: str, label: str, value: Any) -> float:
    """``value`` as a float. Not taken: bools, text, and tensors that want a gradient, which would be lost."""
    if isinstance(value, Tensor):
        is_number = value.dim() == 0 and not value.is_complex() and not value.requires_grad
    else:
        is_number = not isinstance(value, (bool, str, bytes, bytearray))
    try:
        if is_number:
            return float(value)
    except (OverflowError, TypeError):  # the former of a huge int
        pass
    raise TypeError(f"{name}: {label} must be a number, got {value!r}")


def as_eps(name: str, value: Any) -> float:
    """``value`` as a float. A bool is one, as in PyTorch."""
    return float(value) if isinstance(value, bool) else as_float(name, "eps", value)


def check_activation(name: str, activation: Any) -> None:
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"{name}: unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")


def check_input(name: str, label: str, t: Any) -> None:
    """``check_floating``, with fewer words for what is no tensor at all."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: {label} must be a torch.Tensor, got {type(t).__name__}")
    check_floating(name, label, t)


def check_floating(name: str, label: str, t: Any) -> None:
    """``t`` has a dtype that the ops take, and its elements lie in memory as shape and strides say."""
    if isinstance(t, Tensor) and t.dtype in _DTYPES and t.layout is torch.strided and not t.is_nested:
        return
    if not isinstance(t, Tensor) or not t.is_floating_point():
        found = t.dtype if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"{name}: {label} must be a floating torch.Tensor, got {found}")
    found = f"layout {t.layout}" if t.dtype in _DTYPES else t.dtype
    found = "a nested tensor" if t.is_nested else found
    raise TypeError(f"{name}: {label} must be a dense fp16, bf16, fp32 or fp64 tensor, got {found}")


def check_device(name: str, label: str, t: Tensor, x: Tensor, first: str = "x") -> None:
    if t.device != x.device:
        raise ValueError(f"{name}: {label} is on {t.device}, {first} on {x.device}")


def check_operand(name: str, label: str, t: Any, x: Tensor, *shapes: tuple[int, ...]) -> None:
    """``t`` is None, or a floating tensor of one of ``shapes`` on the device of ``x``."""
    if t is None:
        return
    check_floating(name, label, t)
    # Not ``in``: a compiler compares sizes that it does not know one by one.
    if all(tuple(t.shape) != shape for shape in shapes):
        *others, last = map(str, shapes)
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{name}: {label} must have shape {allowed}, got {tuple(t.shape)}")
    check_device(name, label, t, x)
