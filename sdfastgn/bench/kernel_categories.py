"""Sorts kernels into categories, such as convolution, by the kernel's name and the operator that launched it.

A rule is a pair (category, pattern). The first rule whose pattern is found in a name decides. If there is
none, the category is ``OTHER``.
"""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path

import sdfastgn.kernels

CONVOLUTION, GEMM, ATTENTION = "convolution", "GEMM", "attention"
# The category "pointwise" includes reductions and concatenations. "layout copies" includes changes of dtype.
NORMALIZATION, POINTWISE, COPIES, OTHER = "normalization", "pointwise", "layout copies", "other"
GAPS = "launch gaps"
# Categories that no fusion removes. If all norms, pointwise kernels and copies were fused into kernels of
# these categories, a call would take only the time of these categories: its floor.
FLOOR = (CONVOLUTION, GEMM, ATTENTION)
CATEGORIES = (*FLOOR, NORMALIZATION, POINTWISE, COPIES, OTHER)

# For sdfastgn's own kernels: (text in the name of a Python module, category of the kernels in the module).
_OWN_FILES = (
    ("norm", NORMALIZATION),
    ("pad_frames", NORMALIZATION),
    ("attention", ATTENTION),
    ("statistics", NORMALIZATION),
    ("linear", GEMM),
    ("low_rank", GEMM),
    ("geglu", POINTWISE),
    ("rotate", POINTWISE),
    ("quantize_rows", POINTWISE),
    ("upsample", POINTWISE),  # only upsampling: in upsample_conv2d cuDNN runs the convolution
    ("checksum", POINTWISE),
)

_Rules = tuple[tuple[str, re.Pattern[str]], ...]


def _rules(*rules: tuple[str, str]) -> _Rules:
    # With re.VERBOSE a long pattern can take several lines: spaces and line breaks in it are ignored.
    return tuple((name, re.compile(pattern, re.IGNORECASE | re.VERBOSE)) for name, pattern in rules)


# The name of an Inductor kernel lists the operators that the kernel fuses.
# Only kernels from a template ("tem") compute a convolution or a matrix product.
# Any other kernel whose name contains "convolution" only adds the bias of a convolution.
_INDUCTOR = _rules(
    (CONVOLUTION, r"^triton_tem_\w*convolution"),
    (GEMM, r"^triton_(tem|mm|bmm)_"),
    (NORMALIZATION, r"^triton_[a-z]+_fused_\w*(group|layer|batch|rms)_norm"),
    (ATTENTION, r"^triton_[a-z]+_fused_\w*softmax"),
    (
        COPIES,
        r"""^triton_poi_fused_(
            (_?to_copy|_?unsafe_view|clone|copy|contiguous|permute|transpose|view|t|expand)_
        )+\d+$""",
    ),
    (POINTWISE, r"^triton_(poi|red|per|for|split_scan)_"),
)

# Kernels that change layouts count as copies, even if a convolution launches them. So ``category`` tries
# these rules before the rules for operators.
_MOVES = _rules(
    (
        COPIES,
        r"""direct_copy_kernel|float16_copy_kernel|Memcpy|copy_device_to_device|nchwToNhwc|nhwcToNchw
        |AddPadding|convertTensor|tensorTransform|transpose_?\w*kernel|transpose_readWrite""",
    ),
)

_NAMES = _rules(
    # This rule is before CONVOLUTION, whose "fprop" would also match flash_fprop, cuDNN's attention kernel.
    (ATTENTION, r"flash|fmha|sdpa|MemEffAttention|efficient_attention|_mha|softmax"),
    (
        NORMALIZATION,
        r"""(group|layer|batch|instance|rms)_?norm|\bbn_(fw|bw)|RowwiseMoments|ComputeFusedParams
        |ComputeInternalGradients|ComputeBackwardFusedParams|GammaBeta""",
    ),
    # This rule is before GEMM, because the name of a cuDNN convolution may also contain "gemm".
    (
        CONVOLUTION,
        r"""[fdw](prop|grad)(_|[0-9])|implicit_?gemm|convol|conv[0-9]d|conv_depthwise|winograd|im2col|col2im
        |vol2col|col2vol|fft2d_[rc]2[rc]|_cudnn\b|scudnn|cudnn::(cnn|gemm)|cudnn_generated_\w*_conv""",
    ),
    (GEMM, r"nvjet|gemm|gemv|split_?k_?reduce|cublas|\bdot_kernel"),
    (
        POINTWISE,
        r"""elementwise|upsample|CatArrayBatchedCopy|reduce_kernel|multi_tensor_apply|Memset
        |index_?(select|put|copy|add|fill)\w*|(gather|scatter)\w*kernel|arange""",
    ),
)

_OPERATORS = _rules(
    (ATTENTION, r"scaled_dot_product|(flash|efficient|cudnn)_attention|softmax|multi_head_attention"),
    (NORMALIZATION, r"(group|layer|batch|instance|rms)_norm|^sdfastgn::\w*(norm|statistics)"),
    (CONVOLUTION, r"convolution|conv_transpose|conv[0-9]?d|conv_depthwise"),
    (GEMM, r"::(\w*_)?(addmm|addbmm|baddbmm|bmm|mm|addmv|mv|dot|matmul|linear)(_\w+)?$"),
    (COPIES, r"^aten::(copy_?|_to_copy|to|clone|contiguous)$"),
    (
        POINTWISE,
        r"""^aten::_?(
            upsample_\w+
            |(add|addcmul|addcdiv|r?sub|mul|div|neg|pow|r?sqrt|exp|log|sin|cos|tanh|abs|clamp|maximum|minimum
            |where|lerp|sum|mean|var|var_mean|(silu|gelu|mse_loss)(_backward)?|relu|sigmoid|cat|stack
            |constant_pad_nd|fill|zero|arange|index|index_select|gather|embedding)_?
        )$""",
    ),
)


def _first_match(rules: _Rules, name: str) -> str | None:
    return next((found for found, pattern in rules if pattern.search(name)), None)


@functools.cache
def kernels_of_the_package() -> dict[str, str | None]:
    """Return {name of a Triton kernel of sdfastgn: its category, or None if no category is known}.

    The dict is empty if Triton is not installed.
    """
    found: dict[str, str | None] = {}
    # pkgutil.walk_packages would skip folders without __init__.py, such as the folders of sdfastgn.kernels.
    for folder in map(Path, sdfastgn.kernels.__path__):
        for file in sorted(folder.rglob("*.py")):
            name = ".".join((sdfastgn.kernels.__name__, *file.relative_to(folder).with_suffix("").parts))
            own = next((category for word, category in _OWN_FILES if word in name), None)
            for attribute, value in vars(importlib.import_module(name)).items():
                home = getattr(getattr(value, "fn", None), "__module__", None)
                if attribute.endswith("_kernel") and home == name:
                    found[attribute] = own
    return found


def operator_category(op_name: str) -> str | None:
    """The category of an operator; None if no rule fits it, as for ``aten::view``."""
    return _first_match(_OPERATORS, op_name)


@functools.cache
def category(kernel_name: str, op_name: str = "") -> str:
    """The category of one kernel: an entry of ``CATEGORIES``.

    The kernel's name decides for kernels of sdfastgn, for Inductor's kernels and for copies. For any other
    kernel the operator that launched it decides, because an operator's name is less ambiguous. If no rule
    fits the operator, or if the operator is not known (as in the replay of a CUDA graph), the kernel's name
    decides.

    Args:
        kernel_name: the kernel's name in the profiler; empty for an operator on the CPU.
        op_name: the operator that launched the kernel; empty if it is not known.
    """
    return (
        kernels_of_the_package().get(kernel_name)
        or _first_match(_INDUCTOR, kernel_name)
        or _first_match(_MOVES, kernel_name)
        or operator_category(op_name)
        or _first_match(_NAMES, kernel_name)
        or OTHER
    )
