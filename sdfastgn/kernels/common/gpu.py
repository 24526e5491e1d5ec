"""Properties of a GPU that decide how kernels are launched: current stream, multiprocessors, features.

Other modules call these functions as ``gpu.num_sms(...)``, so that a test can replace a function here.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common.private import current_device, current_raw_stream

try:
    import triton
except ImportError:  # Triton is optional: without it every call runs in plain PyTorch
    triton = None

# Triton's (major, minor) version; (0, 0) without Triton.
TRITON_VERSION = tuple(map(int, triton.__version__.split(".")[:2])) if triton is not None else (0, 0)
# True if this Triton supports programmatic dependent launch. Triton 3.4 cannot compile ``gdc_wait``, with
# which a kernel waits for the previous kernel.
HAS_GDC = TRITON_VERSION >= (3, 5)

# Whether kernels may read their input x ahead, that is, before they call ``gdc_wait``, which waits for the
# previous kernel. An op's first kernel never does so. It waits for the kernel that writes x, so later kernels
# of the op may read x ahead (docs/adr/0007-programmatic-dependent-launch.md). If False, every kernel waits
# before it reads. Only tests set it to False.
READS_AHEAD = True
# The compute capability that this package assumes for the meta device. The command ``sdfastgn plan`` sets it.
# So the command can show which kernels would run on a GPU that this machine lacks.
META_CAPABILITY: ContextVar[tuple[int, int]] = ContextVar("sdfastgn_meta_capability", default=(0, 0))
# Lowest compute capability for which the kernels are known to compile: Turing.
_OLDEST = (7, 5)


def current_stream(x: Tensor) -> int:
    """Returns the raw handle of PyTorch's current stream on the device of ``x``.

    On a CPU, where kernels run in Triton's interpreter, it is 0.
    """
    index = x.get_device()  # -1 if x is on a CPU. ``get_device`` is faster than ``x.device``
    return 0 if index < 0 else current_raw_stream(index)


def stream_of(x: Tensor) -> int | None:
    """Returns ``current_stream(x)``, or None if the device of ``x`` is not the current device.

    A launch runs on the current device. If the result is None, the caller must first make the device of ``x``
    current.
    """
    index = x.get_device()
    if index < 0:
        return 0
    return current_raw_stream(index) if index == current_device() else None


def num_sms(device: torch.device) -> int:
    """Number of multiprocessors of ``device``.

    For a CPU it is 132, the number of an H200, so that tests in Triton's interpreter use the launch
    configurations of a GPU.
    """
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def has_programmatic_launch(device: torch.device) -> bool:
    """True if ``device`` has programmatic dependent launch: NVIDIA from sm_90 on, Triton >= 3.5."""
    return HAS_GDC and compute_capability(device) >= (9, 0)


def is_hopper(device: torch.device) -> bool:
    """True if ``device`` is an NVIDIA GPU of the Hopper generation: H100, H200."""
    return compute_capability(device) == (9, 0)


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of an NVIDIA GPU.

    For the meta device it is ``META_CAPABILITY``, for all other devices (0, 0).
    """
    if device.type != "cuda" or torch.version.hip is not None:  # AMD GPUs have the type "cuda" too
        return META_CAPABILITY.get() if device.type == "meta" else (0, 0)
    return torch.cuda.get_device_capability(device)


def l2_bytes(device: torch.device) -> int:
    """Size of the L2 cache of ``device`` in bytes; 0 if PyTorch does not report it.

    For a CPU it is the size of an H200's cache, so that tests in Triton's interpreter use the launch
    configurations of a GPU.
    """
    if device.type != "cuda":
        return 60 * 2**20
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)


def reads_ahead(device: torch.device) -> bool:
    """True if a kernel on ``device`` may read its input before it calls ``gdc_wait`` (``READS_AHEAD``)."""
    return READS_AHEAD and has_programmatic_launch(device)


def unsupported(device: torch.device) -> str | None:
    """The reason why kernels cannot run on ``device``, or None if they can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= _OLDEST:
        return None
    sm = "".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{torch.cuda.get_device_name(device)} is sm_{sm}, and the kernels need sm_75 or later"


def is_current(device: torch.device) -> bool:
    """True if a launch would run on ``device``, because it is the current device or is not a GPU."""
    return device.type != "cuda" or device.index == current_device()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which kernels are launched on ``device``."""
    return contextlib.nullcontext() if is_current(device) else torch.cuda.device(device)
