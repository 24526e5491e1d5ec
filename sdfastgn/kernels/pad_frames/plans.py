"""The launches of ``pad_frames``, and the memory for its results."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sdfastgn.kernels.channel_norm.config import rows_config
from sdfastgn.kernels.channel_norm.plans import norm_constants
from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import empty_laid_out
from sdfastgn.kernels.common.sizes import ceil_div, vector_width
from sdfastgn.kernels.group_norm.plans import TablePlan
from sdfastgn.kernels.pad_frames import kernels
from sdfastgn.kernels.pad_frames.op import (
    PadFramesCall,
    group_norm_call,
    modulation_times,
    normalized_together,
)


class PadFramesPlan:
    """The launches of ``pad_frames`` for one combination of shapes, dtypes, device and other arguments.

    Attributes:
        launch: the launch of ``_frames_kernel``, which computes the results.
        table: for a GroupNorm, the launches that compute mean and variance and write the table of scales and
            offsets, which ``_frames_kernel`` reads. None for other norms.
        shape, kept_shape: the shapes of the results: y, the padded frames; and kept, the last frames.
    """

    __slots__ = ("kept_shape", "launch", "shape", "table")

    def __init__(self, call: PadFramesCall) -> None:
        x = call.x
        N, C = x.shape[:2]
        frames, height, width = call.upsampled
        self.shape = call.padded
        self.kept_shape = (N, C, call.keep, height, width)
        self.table: TablePlan | None = None
        if call.norm == "group":
            self.table = TablePlan(group_norm_call(call), normalized_together(call), True)
        times, apart = (call.times_t, call.times_h, call.times_w), True
        if call.modulation is not None:
            times, apart = modulation_times(x.shape, call.modulation.shape) or (times, apart)
        rows = (call.front + frames + call.back) * math.prod(self.shape[3:])
        config = rows_config(N * rows, C, x.itemsize, vector_width(x.itemsize, C), gpu.num_sms(x.device))
        self.launch = Launch(
            kernels._frames_kernel, N * ceil_div(rows, config.rows), config.num_warps,
            pdl=gpu.has_programmatic_launch(x.device),
            rows=rows, frames=frames, height=height, width=width,
            front=call.front, back=call.back, cached=call.cached, keep=call.keep,
            pad_h=call.pad_h, pad_w=call.pad_w,
            **({"table_offset": 0, "table_plane": 0} if self.table is None else self.table.memory),
            scale=call.scale, eps=call.eps, added=call.added,
            C=C, NORM=call.norm, FRAMEWISE=call.framewise,
            FOLD=x.dtype != torch.float32, BORDER=bool(call.pad_h or call.pad_w), MODE=call.mode,
            APART=apart, TIMES_T=times[0], TIMES_H=times[1], TIMES_W=times[2],
            WINDOW=call.window, **norm_constants(call, config),
        )  # fmt: skip

    def run(self, call: PadFramesCall) -> tuple[Tensor, Tensor | None]:
        x = call.x
        y = empty_laid_out(x, self.shape, channels_last=True)
        kept = empty_laid_out(x, self.kept_shape, channels_last=True) if call.keep else None
        with gpu.on_device(x.device):
            stream = gpu.current_stream(x)
            if self.table is None:
                self.launch(stream, x, call.shift, call.weight, call.bias, None, None, call.cache, y, kept)
            else:
                table = self.table.run(stream, group_norm_call(call))
                self.launch(stream, x, None, None, None, table, call.modulation, call.cache, y, kept)
        return y, kept
