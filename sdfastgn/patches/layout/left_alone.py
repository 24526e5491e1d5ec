"""Finds models that ``optimize`` leaves as they are, because they would be slower or could be wrong.

Some versions of cuDNN compute 3-D convolutions in bf16 wrongly, and need gigabytes more memory than others
(https://github.com/pytorch/pytorch/issues/163539 and 166643). With these versions nothing is known about
3-D convolutions in channels-last. So models that have such convolutions in bf16 keep their layout and code.

Video autoencoders that repeat the border of their 5-D tensors (HunyuanVideo 1.5, Mochi) call ``F.pad`` in
mode "replicate" before each convolution. For channels-last tensors this ``F.pad`` is slow, and its result is
channels-first, so that the convolution has to copy it. Together this costs more than the fused norms save.
"Real sizes" in docs/coverage.md has the times of all models. These models can still run as *plans*: traces of
their own code, rewritten to sdfastgn's kernels. There a kernel repeats the border, which is fast.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

# The versions of cuDNN whose 3-D convolutions in bf16 are wrong or need more memory: from 9.8, before 9.15.
# The numbers are as in ``torch.backends.cudnn.version()``.
_BAD_CUDNN = range(90800, 91500)

# What users are told about a model that is left as it is because its own code repeats the border of a video.
SLOW_BORDERS = "its model is faster as it is: PyTorch repeats the border of a video slowly in channels-last"


def reason_to_leave(modules: Collection[nn.Module]) -> str | None:
    """Why ``optimize`` must not change the model that consists of ``modules``; None if it may."""
    reason = reason_of_cudnn(modules)
    if reason is not None:
        return reason
    return SLOW_BORDERS if any(map(_repeats_borders, modules)) else None


def reason_of_cudnn(modules: Iterable[nn.Module]) -> str | None:
    """Why the installed cuDNN cannot be trusted with 3-D convolutions among ``modules``; None if it can."""
    if not any(isinstance(m, nn.Conv3d) and m.weight.dtype is torch.bfloat16 for m in modules):
        return None
    version = torch.backends.cudnn.version()
    if version not in _BAD_CUDNN:  # the version is None if PyTorch has no cuDNN
        return None
    return (
        f"3-D convolutions in bf16 are wrong in some versions of cuDNN, and this is {_text_of(version)}; "
        "install cuDNN 9.15 or later"
    )


def _text_of(version: int) -> str:
    return f"cuDNN {version // 10000}.{version // 100 % 100}.{version % 100}"


def _repeats_borders(module: nn.Module) -> bool:
    """True if ``module`` is one of diffusers' 3-D convolutions that repeat the border of their input."""
    return vars(module).get("pad_mode") == "replicate" and isinstance(
        getattr(module, "conv", None), nn.Conv3d
    )
