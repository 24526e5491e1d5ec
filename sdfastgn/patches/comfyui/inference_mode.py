"""Leaving inference mode, in which ComfyUI runs everything, without gradients.

In it no tensor counts how often it is written, and without that count no statistics are handed from the
producer of a tensor to the norm that reads it (``core/statistics.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["outside_inference_mode"]


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Within, tensors count their writes; no gradient is recorded that was not before."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
