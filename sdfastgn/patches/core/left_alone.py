"""Models that ``optimize`` leaves as they are, because they would be slower.

Video autoencoders that repeat the border of their 5-D tensors (HunyuanVideo, Mochi) call ``F.pad`` in mode
"replicate" before each convolution. In channels-last PyTorch does that slowly. Its result is
channels-first, so each convolution also copies its input. The padding and the copies take more time than the
fused norms save. "Real sizes" in docs/coverage.md has the times of all models.
"""

from __future__ import annotations

from torch import nn

__all__ = ["reason_to_leave"]


def reason_to_leave(root: nn.Module) -> str | None:
    """Why ``optimize`` must change nothing in the model ``root``; None if it may change the model."""
    if any(map(_repeats_borders, root.modules())):
        return "its model is faster as it is: PyTorch repeats the border of a video slowly in channels-last"
    return None


def _repeats_borders(module: nn.Module) -> bool:
    """True if ``module`` wraps a 3-D convolution and repeats the border of its input (diffusers' classes)."""
    return vars(module).get("pad_mode") == "replicate" and isinstance(
        getattr(module, "conv", None), nn.Conv3d
    )
