"""Models that ``optimize`` leaves as they are, because they would be slower.

Video autoencoders that repeat the border of their 5-D tensors (HunyuanVideo, Mochi) call ``F.pad`` in mode
"replicate" before each convolution. For channels-last tensors this ``F.pad`` is slow, and its result is
channels-first, so that the convolution has to copy it. Together this costs more than the fused norms save.
"Real sizes" in docs/coverage.md has the times of all models.

Some fusions repeat the border in a kernel, which is fast. These fusions are registered with
``pads_quickly``. If they can fuse all convolutions of a model that repeat the border, ``optimize`` changes
the model.
"""

from __future__ import annotations

from torch import nn

from sdfastgn.patches.core.fusion import Fusion

__all__ = ["pads_quickly", "reason_to_leave"]

# The fusions that were registered with ``pads_quickly``.
_quick: list[Fusion] = []


def pads_quickly(fusion: Fusion) -> None:
    """Register ``fusion`` as one whose fused convolutions repeat the border of their input in a kernel."""
    _quick.append(fusion)


def reason_to_leave(root: nn.Module) -> str | None:
    """Why ``optimize`` must leave the model ``root`` as it is; None if it may change the model."""
    if any(_repeats_borders(module) and not _has_kernel(module) for module in root.modules()):
        return "its model is faster as it is: PyTorch repeats the border of a video slowly in channels-last"
    return None


def _repeats_borders(module: nn.Module) -> bool:
    """True if ``module`` is one of diffusers' 3-D convolutions that repeat the border of their input."""
    return vars(module).get("pad_mode") == "replicate" and isinstance(
        getattr(module, "conv", None), nn.Conv3d
    )


def _has_kernel(module: nn.Module) -> bool:
    """True if ``module`` is fused, or can be, by a fusion that was registered with ``pads_quickly``."""
    return any(
        fusion.claims(module) and (fusion.is_applied(module) or fusion.reason_to_skip(module) is None)
        for fusion in _quick
    )
