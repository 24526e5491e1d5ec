"""GroupNorm + SiLU kernels of other packages, which are built by hand and seldom installed."""

from __future__ import annotations

import importlib
from typing import Any

from sdfastgn.bench.kernels.suite import Call

# gnNHWC's code for SiLU.
_GNNHWC_SILU = 2
# Largest image, in pixels, for which apex's layer takes its one-pass kernel on sm_80 and later.
_APEX_ONE_PASS = 1024


def gnnhwc(x: Any, groups: int, eps: float) -> Call:
    """channels-last-groupnorm's kernel, whose package compiles itself at its first import."""
    apply = importlib.import_module("gnnhwc").GN_NHWC_Func.apply
    return lambda x, weight, bias: apply(x, weight, bias, groups, eps, _GNNHWC_SILU)


def apex(x: Any, groups: int, eps: float) -> Call:
    """The one of apex's two kernels that its layer takes for ``x``."""
    module = importlib.import_module("apex.contrib.group_norm.group_norm")
    one_pass = x.shape[2] * x.shape[3] <= _APEX_ONE_PASS
    kernel = module.cuda_group_norm_nhwc_one_pass if one_pass else module.cuda_group_norm_nhwc_two_pass
    return lambda x, weight, bias: kernel(x, groups, weight, bias, eps, "silu")
