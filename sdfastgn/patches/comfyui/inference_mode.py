"""Leaves inference mode, in which ComfyUI runs everything.

A tensor that is made in inference mode does not count the writes into it. Without this count the kernel that
writes a tensor cannot hand its statistics to the norm that reads it (``core/statistics.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["outside_inference_mode"]


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """A context in which inference mode is off, so that new tensors count their writes. Gradients are off."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
