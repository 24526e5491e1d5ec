"""What kernels ask of the GPU that they run on: its stream, its size, what it can do.

Other modules call these as ``gpu.num_sms(...)``, so that a test replaces them in one place.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

__all__ = ["current_stream", "has_programmatic_launch", "is_current", "num_sms", "on_device", "stream_on"]


def current_stream(device: torch.device) -> int:
    """Raw handle of PyTorch's current stream on ``device``; 0 on a CPU (the interpreter)."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def stream_on(device: torch.device) -> int | None:
    """``current_stream``; None where ``device`` is not current, and the caller has to make it so first."""
    if device.type != "cuda":
        return 0
    if device.index != torch._C._cuda_getDevice():
        return None
    return torch._C._cuda_getCurrentRawStream(device.index)


def num_sms(device: torch.device) -> int:
    """Number of multiprocessors of ``device``."""
    # A nominal count in the interpreter, so that tests on the CPU take the same ways as a GPU does.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def has_programmatic_launch(device: torch.device) -> bool:
    """True if kernels on ``device`` can start while the one before them still runs: from sm_90 on."""
    if device.type != "cuda" or torch.version.hip is not None:  # AMD's call themselves cuda
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def is_current(device: torch.device) -> bool:
    """True if kernels launched now run on ``device``; else the caller makes it current first."""
    return device.type != "cuda" or device.index == torch._C._cuda_getDevice()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which kernels are launched on ``device``."""
    return contextlib.nullcontext() if is_current(device) else torch.cuda.device(device)
