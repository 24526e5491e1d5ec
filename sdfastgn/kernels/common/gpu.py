"""Properties of a GPU that decide how kernels are launched: current stream, multiprocessors, features.

Other modules call these as ``gpu.num_sms(...)``, so that a test can replace a function in this module.
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

# (major, minor); (0, 0) without Triton.
TRITON_VERSION = tuple(map(int, triton.__version__.split(".")[:2])) if triton is not None else (0, 0)
# Whether Triton has programmatic dependent launch. Triton 3.4 cannot compile its own ``gdc_wait``.
HAS_GDC = TRITON_VERSION >= (3, 5)

# Whether a kernel may read x before its own ``gdc_wait``, if an earlier kernel of the same call has waited
# until x was complete (ADR 7). Only tests set it to False: every kernel then waits first.
READS_AHEAD = True
# Lowest compute capability for which the kernels are known to compile: Turing.
_OLDEST = (7, 5)


def current_stream(device: torch.device) -> int:
    """Raw handle of PyTorch's current stream on ``device``; 0 on a CPU (the interpreter)."""
    return current_raw_stream(device.index) if device.type == "cuda" else 0


def stream_on(device: torch.device) -> int | None:
    """``current_stream(device)``, or None if ``device`` is not the current device.

    A launch runs on the current device, so in that case the caller must make ``device`` current first.
    """
    if device.type != "cuda":
        return 0
    if device.index != current_device():
        return None
    return current_raw_stream(device.index)


def num_sms(device: torch.device) -> int:
    """Number of multiprocessors of ``device``; for a CPU 132, an H200's number.

    With it, tests in the interpreter get the launch configurations of a GPU.
    """
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def has_programmatic_launch(device: torch.device) -> bool:
    """True if a kernel can start while the kernel before it still runs: on NVIDIA GPUs from sm_90 on."""
    if not HAS_GDC or device.type != "cuda" or torch.version.hip is not None:  # AMD's type is "cuda" too
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def l2_bytes(device: torch.device) -> int:
    """Bytes of the L2 cache of ``device``: 0 if PyTorch does not know it, for a CPU an H200's."""
    if device.type != "cuda":
        return 60 * 2**20
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)


def reads_ahead(device: torch.device) -> bool:
    """True if a kernel may read its input before its own ``gdc_wait`` (``READS_AHEAD``)."""
    return READS_AHEAD and has_programmatic_launch(device)


def unsupported(device: torch.device) -> str | None:
    """The reason why kernels cannot run on ``device``, or None if they can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= _OLDEST:
        return None
    sm = "".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{torch.cuda.get_device_name(device)} is sm_{sm}, and the kernels need sm_75 or later"


def is_current(device: torch.device) -> bool:
    """True if a launch runs on ``device``: it is the current device, or no GPU."""
    return device.type != "cuda" or device.index == current_device()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which kernels are launched on ``device``."""
    return contextlib.nullcontext() if is_current(device) else torch.cuda.device(device)
