"""Leaves PyTorch's inference mode, in which ComfyUI runs all models.

A tensor that is made in inference mode does not count the writes into it. Without this count, a norm cannot
tell whether the mean and variance that were stored for its input are still valid (``layers/statistics.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """A context in which inference mode is off, so that new tensors count their writes. Gradients are off."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
