"""What kernels ask of the GPU that they run on: its stream, its size, what it can do.

Other modules call these as ``gpu.num_sms(...)``, so that a test replaces them in one place.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from sdfastgn.kernels.common.private import current_device, current_raw_stream

try:
    import triton
except ImportError:  # every call then runs in plain PyTorch
    triton = None

TRITON_VERSION = tuple(map(int, triton.__version__.split(".")[:2])) if triton is not None else (0, 0)
# Triton 3.4 cannot compile its own instruction that waits for the kernel before.
HAS_GDC = TRITON_VERSION >= (3, 5)

# Whether a kernel may read its tile of x before its own wait, if an earlier kernel of the same call has
# waited for whoever writes x (ADR 7). False: every kernel waits first.
READS_AHEAD = True
# Compute capability of the oldest GPUs for which the kernels are known to compile: Turing.
_OLDEST = (7, 5)


def current_stream(device: torch.device) -> int:
    """Raw handle of PyTorch's current stream on ``device``; 0 on a CPU (the interpreter)."""
    return current_raw_stream(device.index) if device.type == "cuda" else 0


def stream_on(device: torch.device) -> int | None:
    """``current_stream``; None where ``device`` is not current, and the caller has to make it so first."""
    if device.type != "cuda":
        return 0
    if device.index != current_device():
        return None
    return current_raw_stream(device.index)


def num_sms(device: torch.device) -> int:
    """Number of multiprocessors of ``device``."""
    # A nominal count in the interpreter, so that tests on the CPU take the same ways as a GPU does.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def has_programmatic_launch(device: torch.device) -> bool:
    """True if kernels on ``device`` can start while the one before them still runs: from sm_90 on."""
    if not HAS_GDC or device.type != "cuda" or torch.version.hip is not None:  # AMD's call themselves cuda
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def l2_bytes(device: torch.device) -> int:
    """Size of the L2 of ``device``; 0 where PyTorch does not know it."""
    if device.type != "cuda":
        return 60 * 2**20  # nominal as well: an H200's
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)


def reads_ahead(device: torch.device) -> bool:
    """True if a kernel on ``device`` may read before its own wait what an earlier one has waited for."""
    return READS_AHEAD and has_programmatic_launch(device)


def unsupported(device: torch.device) -> str | None:
    """Why no kernel runs on ``device``; None where they do."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= _OLDEST:
        return None
    sm = "".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{torch.cuda.get_device_name(device)} is sm_{sm}, and the kernels need sm_75 or later"


def is_current(device: torch.device) -> bool:
    """True if kernels launched now run on ``device``; else the caller makes it current first."""
    return device.type != "cuda" or device.index == current_device()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which kernels are launched on ``device``."""
    return contextlib.nullcontext() if is_current(device) else torch.cuda.device(device)
