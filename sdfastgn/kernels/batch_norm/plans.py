"""The launches of ``batch_norm``, with kernels of BatchNorm and GroupNorm, and memory for the results."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.batch_norm import kernels
from sdfastgn.kernels.batch_norm.config import Rows, as_rows, merge_config, moments_config, small_config
from sdfastgn.kernels.batch_norm.op import BatchNormCall
from sdfastgn.kernels.batch_norm.plain import empty_moments
from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import dense, dense_is_channels_last
from sdfastgn.kernels.common.plan_cache import PlanCache, plan_key
from sdfastgn.kernels.common.sizes import ceil_div, row_factor
from sdfastgn.kernels.group_norm.config import ApplyConfig, apply_config
from sdfastgn.kernels.group_norm.op import NO_MORE, GroupNormCall
from sdfastgn.kernels.group_norm.plans import merge_launch, pairs_of, small_launch
from sdfastgn.kernels.statistics.kernels import StatisticsLaunch

# If BatchNorm launches GroupNorm's kernels, their pointers shift, ada_scale and ada_shift are None, because
# BatchNorm does not have these operands.
NO_OPERANDS = (None, None, None)


def rows_of(x: Tensor) -> Rows:
    """The numbers of samples, rows and columns with which kernels index x, or the dense copy of x."""
    return as_rows(x.shape[0], x.shape[1], math.prod(x.shape[2:]), dense_is_channels_last(x))


def _one_sample(x: Tensor, eps: float, activation: str) -> GroupNormCall:
    """Makes a GroupNorm call from which launches of GroupNorm's kernels are prepared. Its x has no data.

    The batch is one sample (1, C, N * HW), and each channel is a group.
    """
    C = x.shape[1]
    like_batch = x.new_empty(()).expand(1, C, x.numel() // C)
    return GroupNormCall(like_batch, C, None, None, eps, activation, *NO_MORE)


class Moments:
    """The two launches that compute mean and variance of each channel of x.

    The first computes statistics of chunks of positions, the second merges them.
    """

    __slots__ = ("C", "_merge", "_statistics")

    def __init__(self, x: Tensor) -> None:
        rows, self.C = rows_of(x), x.shape[1]
        config = moments_config(rows, self.C, gpu.num_sms(x.device))
        like_rows = x.new_empty(()).expand(rows.shape)
        self._statistics = StatisticsLaunch(like_rows, rows.channels_last, config=config)
        partials = math.prod(self._statistics.shape[1:]) // self.C
        # For BatchNorm, GroupNorm's ``merge_kernel`` stores only mean and variance, and no scales and
        # offsets. The eps that it gets has therefore no effect.
        sample, no_table = _one_sample(x, 1.0, "identity"), {"table_offset": 0, "table_plane": 0}
        tile = merge_config(partials, self.C)
        self._merge = merge_launch(sample, sample.x.shape[2], partials, tile, no_table)

    def on_stream(self, stream: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Computes mean and variance of each channel of ``x`` on ``stream`` of the current device.

        ``x`` must have no gaps in memory.
        """
        statistics = torch.empty(self._statistics.shape, dtype=torch.float32, device=x.device)
        mean, var = empty_moments(x, self.C)
        self._statistics.on_stream(stream, x, statistics)
        self._merge(stream, statistics, None, mean, var, None, None, *NO_OPERANDS)
        return mean, var


_moments: PlanCache[Moments] = PlanCache()


@dispatch.kernels_of("batch_norm")
def launch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes mean and variance of each channel of ``x`` by Triton kernels. ``x`` must not be empty."""
    key = plan_key((x,))
    found = _moments.get(key)
    if found is None:
        found = _moments[key] = Moments(x)
    with gpu.on_device(x.device):
        return found.on_stream(gpu.current_stream(x), dense(x))


class BatchNormPlan:
    """The launches of ``batch_norm`` for calls with equal shapes, strides, dtypes and options.

    There is either one launch, ``small``, or the launches of ``moments``, which compute mean and variance,
    and after them ``apply``, which computes y. If the call gives mean and var, there is only ``apply``.

    The last launch of a call updates the running averages. If a kernel cannot be compiled, the averages are
    unchanged, and the call can run again in plain PyTorch.
    """

    __slots__ = ("apply", "moments", "small")

    def __init__(self, call: BatchNormCall) -> None:
        x = call.x
        rows, is_given, sms = rows_of(x), call.mean is not None, gpu.num_sms(x.device)
        self.small: Launch | None = None
        self.moments: Moments | None = None
        small = small_config(rows, x.shape[1], sms)
        if small is not None and not is_given:
            sample = _one_sample(x, call.eps, call.activation)
            self.small = small_launch(sample, small, sample.x.shape[2], True, rows.image, call.momentum)
            return
        if not is_given:
            self.moments = Moments(x)
        self.apply = _apply(call, rows)

    def run(self, call: BatchNormCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Launches the kernels, and returns y and mean and variance of the batch.

        If the call gives mean and var, the returned mean and variance are None.
        """
        stream = gpu.stream_of(call.x)
        if stream is None:
            with torch.cuda.device(call.x.device):
                return self.run(call)
        x, weight, bias, residual, mean, var, *_ = call
        running: Any = call.running_mean, call.running_var
        y = torch.empty_like(x)
        if self.small is not None:
            mean, var = empty_moments(x, x.shape[1])
            self.small(stream, x, y, mean, var, weight, bias, *NO_OPERANDS, residual, *running)
            return y, mean, var
        if self.moments is not None:
            mean, var = self.moments.on_stream(stream, x)
        self.apply(stream, x, residual, y, mean, var, weight, bias, *running)
        return (y, None, None) if self.moments is None else (y, mean, var)

    def run_and_save(self, call: BatchNormCall) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, var = self.run(call)
        return (y, *empty_moments(y, 0)) if mean is None or var is None else (y, mean, var)


def _apply(call: BatchNormCall, rows: Rows) -> Launch:
    blocks = apply_config(*rows.shape, rows.channels_last, gpu.num_sms(call.x.device))
    averages = 0 if call.running_mean is None else ceil_div(call.x.shape[1], blocks.block_c)
    tiles, reading = tiles_of(call, rows, blocks)
    return Launch(
        kernels.batch_apply_kernel, averages + tiles, blocks.num_warps, **reading,
        positions=call.x.numel() // call.x.shape[1], momentum=call.momentum, ACTIVATION=call.activation,
        AHEAD=call.mean is None and gpu.reads_ahead(call.x.device), AVERAGE_PROGRAMS=averages,
    )  # fmt: skip


def tiles_of(call: Any, rows: Rows, blocks: ApplyConfig) -> tuple[int, dict[str, Any]]:
    """Computes the number of tiles of x, and arguments that the apply kernels of forward and backward share.

    An apply kernel reads x and stores y or dx. It has one program for each tile.
    """
    programs = rows.samples * ceil_div(rows.width, blocks.block_c) * ceil_div(rows.rows, blocks.block_hw)
    return programs, {
        "pdl": gpu.has_programmatic_launch(call.x.device),
        "HW": rows.rows,
        "eps": call.eps,
        "C": call.x.shape[1],
        "WIDTH": rows.width,
        "CHANNELS_LAST": rows.channels_last,
        "PAIRS": rows.channels_last and pairs_of(call, blocks.block_c),
        "EVEN": rows.width % blocks.block_c == 0 and rows.rows % blocks.block_hw == 0,
        "HW_FACTOR": row_factor(rows.channels_last, rows.rows),
        "BLOCK_HW": blocks.block_hw,
        "BLOCK_C": blocks.block_c,
    }
