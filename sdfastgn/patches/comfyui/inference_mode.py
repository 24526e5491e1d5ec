"""Leaves inference mode, in which ComfyUI runs everything.

In inference mode tensors do not count their writes. Without this count no statistics can be handed from the
producer of a tensor to the norm that reads it (``core/statistics.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["outside_inference_mode"]


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Inside, inference mode is off, so that tensors count their writes. Gradients stay off."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
