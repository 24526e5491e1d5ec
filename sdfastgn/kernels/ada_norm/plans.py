"""The launch of ``ada_norm``, and the memory for its results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.ada_norm import kernels
from sdfastgn.kernels.ada_norm.op import AdaNormCall
from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.e4m3 import E4M3
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.sizes import WARP, vector_width
from sdfastgn.kernels.layer_norm.config import RowsConfig, forward_config
from sdfastgn.kernels.layer_norm.plans import row_numbers, row_strides, rows_constants

# Operands that need not be contiguous. The kernel gets their strides between samples and between rows.
_STRIDED = ("x", "branch", "gate", "factor", "offset")


class AdaNormPlan:
    """The launch of ``ada_norm`` for calls with equal shapes, strides, dtypes, device and other arguments."""

    __slots__ = ("has_total", "has_y", "in_e4m3", "launch", "shape", "strides")

    def __init__(self, call: AdaNormCall) -> None:
        x = call.x
        B, S, D = self.shape = tuple(x.shape)
        self.strides = (S * D, D, 1)
        self.has_total = call.branch is not None and call.keeps_total
        self.has_y, self.in_e4m3 = call.kind != "none", call.in_e4m3
        strides = {name: row_strides(getattr(call, name)) for name in _STRIDED}
        vector = vector_width(x.itemsize, D, *(s for pair in strides.values() for s in pair))
        config: Any = forward_config(B * S, D, x.itemsize, vector, gpu.num_sms(x.device))
        assert isinstance(config, RowsConfig)
        self.launch = Launch(
            kernels._ada_norm_kernel, config.programs, config.num_warps,
            pdl=gpu.has_programmatic_launch(x.device),
            rows=B * S, S=S, branch_eps=call.branch_eps, eps=call.eps, **row_numbers(strides, vector),
            D=D, VECTOR=vector, BRANCH_NORM=call.normalizes_branch, KIND=call.kind, TANH=call.tanh,
            PLUS_ONE=call.plus_one, ONE_ROW=config.lanes * config.block <= WARP * vector,
            **rows_constants(config),
        )  # fmt: skip

    def run(self, call: AdaNormCall) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Launch the kernel, and return (total, y, scales)."""
        x = call.x
        total = x.new_empty_strided(self.shape, self.strides) if self.has_total else None
        y = scales = None
        if self.in_e4m3:
            y = x.new_empty_strided(self.shape, self.strides, dtype=E4M3)
            scales = x.new_empty_strided(self.shape[:2], (self.shape[1], 1), dtype=torch.float32)
        elif self.has_y:
            y = x.new_empty_strided(self.shape, self.strides)
        self.launch.run(*call[:9], total, y, scales)
        return total, y, scales
