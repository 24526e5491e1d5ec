"""Tells whether the fused modules of a model run Triton kernels or their original code, and why."""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path

import torch
from torch import nn

from sdfastgn.kernels.common import archive, dispatch, gpu
from sdfastgn.kernels.common.dispatch import KERNEL_DTYPES
from sdfastgn.kernels.common.gpu import triton

_STOCK_CODE = "plain PyTorch, stock's own code at stock's speed"


def backend_text(roots: list[nn.Module], why_stock: list[str | None]) -> str:
    """Returns the report's text on what runs in the models ``roots``: Triton kernels or original code.

    For weights on the meta device the text is empty if this machine has a GPU, because the weights may be
    moved to any device.

    ``why_stock``: for each of the models, why its modules run their original code; None if they run kernels.
    """
    reasons = [reason for reason in dict.fromkeys(why_stock) if reason is not None]
    if triton is None or None not in why_stock:
        return f"{_STOCK_CODE} ({'; '.join(reasons)})"
    if any(p.is_meta for root in roots for p in root.parameters()):
        return ""  # what will run is not known: weights on the meta device may go to any device
    devices = {p.device for root in roots for p in root.parameters()}
    used = filter(None, map(archive.state, sorted(devices, key=str)))
    return "; ".join([f"Triton {triton.__version__} on {torch.cuda.get_device_name()}", *dict.fromkeys(used)])


def why_stock_runs(root: nn.Module) -> str | None:
    """Why the fused modules of ``root`` run their original code; None if they run kernels.

    For a model on the meta device None is returned if this machine has a GPU.
    """
    tensors = list(root.parameters())
    if any(p.is_meta for p in tensors):
        return dispatch.why_off or (None if torch.cuda.is_available() else "no CUDA GPU")
    # With accelerate's offloading, weights are not where they are used: for each call a hook moves them to
    # its ``execution_device``.
    offload = getattr(getattr(root, "_hf_hook", None), "execution_device", None)
    if isinstance(offload, int):
        offload = torch.device("cuda", offload)
    devices = {p.device for p in tensors} if offload is None else {torch.device(offload)}
    if (reason := why_no_kernel(devices)) is not None:
        return reason
    dtypes = {p.dtype for p in tensors if p.is_floating_point()}
    return None if dtypes & set(KERNEL_DTYPES) else f"no kernel for {', '.join(sorted(map(str, dtypes)))}"


def why_no_kernel(devices: Set[torch.device]) -> str | None:
    """Why no kernel can run for a model with tensors on ``devices``; None if no reason is known.

    One supported GPU among ``devices`` is enough. This function launches no kernel, so it does not find out
    whether Triton can compile kernels here.
    """
    if dispatch.why_off is not None:
        return dispatch.why_off
    unsupported = next(filter(None, map(gpu.unsupported, devices)), None)
    if unsupported is not None:
        return unsupported
    types = {device.type for device in devices}
    if "cuda" in types:
        return None
    return f"the kernels need an NVIDIA GPU; the device is {', '.join(sorted(types)) or 'unknown'}"


def triton_cache() -> Path:
    """The folder in which Triton keeps compiled kernels."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
