"""The launches of LayerNorm: which kernels run, their grids and constants, and their scratch memory.

The kernels are in ``layer_norm/kernels.py``, their configurations in ``layer_norm/config.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.e4m3 import E4M3, launches_of
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import row_stride
from sdfastgn.kernels.common.sizes import WARP, ceil_div, next_power_of_2, tile_constants, vector_width
from sdfastgn.kernels.layer_norm import kernels
from sdfastgn.kernels.layer_norm.config import ChunksConfig, RowsConfig, forward_config
from sdfastgn.kernels.layer_norm.op import AddCall, LayerNormCall, empty_saved, result_dtype

# Maximum number of warps of a program that merges the results of a long row's chunks.
_MERGE_MAX_WARPS = 4
# A program that merges the results of a long row's chunks has one warp for this many chunks.
_MERGE_PER_WARP = 128


class LayerNormPlan:
    """The launches of LayerNorm for calls with equal shapes, strides, dtypes, device, eps and dtype of y.

    If rows fit into registers, there is one launch, ``rows``. Otherwise there are three launches: ``chunk``,
    ``merge`` and ``normalise``. If y is wanted in E4M3, ``retry`` follows. It writes y again with a larger
    scale if values were beyond the range of E4M3 (``common/e4m3.py``). ``partials``: number of fp32 values
    that ``chunk`` writes and ``merge`` reads. ``row_count``: number of rows of x.
    """

    __slots__ = ("chunk", "is_contiguous", "merge", "normalise", "partials", "retry", "row_count", "rows")

    def __init__(self, call: LayerNormCall | AddCall) -> None:
        x, residual = call.x, call.residual
        D = x.shape[-1]
        self.is_contiguous = x.is_contiguous()
        self.row_count = x.numel() // D
        x_stride, residual_stride = (D if t is None else row_stride(t) or D for t in (x, residual))
        vector = vector_width(x.itemsize, D, x_stride, residual_stride)
        config = forward_config(self.row_count, D, x.itemsize, vector, gpu.num_sms(x.device))
        pdl = gpu.has_programmatic_launch(x.device)
        self.rows: Launch | None = None
        if isinstance(config, ChunksConfig):
            self._plan_chunks(call, config, (x_stride, residual_stride), vector, pdl)
            return
        self.rows, self.retry = (
            Launch(
                kernels._rows_kernel, count, config.num_warps, pdl=pdl, RETRY=retries,
                rows=self.row_count, period=1, groups=1, biased=int(call.total_bias is not None),
                eps=call.eps, D=D, X_STRIDE=x_stride, RESIDUAL_STRIDE=residual_stride,
                ONE_ROW=config.lanes * config.block <= WARP * vector, **rows_constants(config),
            )
            for count, retries in launches_of(config.programs)
        )  # fmt: skip

    def _plan_chunks(
        self,
        call: LayerNormCall | AddCall,
        config: ChunksConfig,
        strides: tuple[int, int],
        vector: int,
        pdl: bool,
    ) -> None:
        """Makes the launches for rows that do not fit into registers.

        ``strides``: elements between the starts of rows, in x and in residual.
        """
        D = call.x.shape[-1]
        is_complete, exact = call.residual is None, result_dtype(call) == torch.float32
        count = self.row_count * config.chunks
        self.partials = (3 if exact else 2) * count
        # VECTOR is the number of elements that a thread loads at once. Kernels get D and strides divided by
        # VECTOR, and multiply them by VECTOR. So the compiler knows that D and the strides are multiples of
        # VECTOR, and can load vectors.
        d_parts, x_parts, residual_parts = (size // vector for size in (D, *strides))
        tile = {"VECTOR": vector, "BLOCK": config.block}
        self.chunk = Launch(
            kernels._chunk_kernel, count, config.num_warps, pdl=pdl,
            chunks=config.chunks, blocks=config.length // config.block, plane=count,
            d_parts=d_parts, x_parts=x_parts, residual_parts=residual_parts, EXACT=exact, **tile,
        )  # fmt: skip
        block = next_power_of_2(config.chunks)
        merge_warps = max(1, min(_MERGE_MAX_WARPS, block // _MERGE_PER_WARP))
        self.merge = Launch(
            kernels._merge_chunks_kernel, self.row_count, merge_warps, pdl=pdl,
            chunks=config.chunks, length=config.length, D=D, plane=count, eps=call.eps,
            EXACT=exact, BLOCK=block,
        )  # fmt: skip
        reads_ahead = is_complete and gpu.reads_ahead(call.x.device)
        self.normalise, self.retry = (
            Launch(
                kernels._normalise_kernel, programs, config.num_warps, pdl=pdl, RETRY=retries,
                rows=self.row_count, d_parts=d_parts, x_parts=x_parts if is_complete else d_parts,
                AHEAD=reads_ahead and not retries, **tile,
            )
            for programs, retries in launches_of(self.row_count * ceil_div(D, config.block))
        )  # fmt: skip

    def run_and_save(self, call: LayerNormCall | AddCall) -> tuple[Tensor, ...]:
        """Launches the kernels, and returns y, the sum if there is a residual, centre and rstd.

        The backward needs centre (the mean of each row) and rstd (1 / deviation).
        """
        centre, rstd = empty_saved(call.x, result_dtype(call))
        found = self.run(call, centre, rstd)
        return (found, centre, rstd) if isinstance(found, Tensor) else (*found, centre, rstd)

    def run(
        self, call: LayerNormCall | AddCall, centre: Tensor | None = None, rstd: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Launches the kernels, and returns y, or y and the sum if there is a residual.

        The kernels also fill ``centre`` (means) and ``rstd`` (1 / deviations), unless these are None.
        """
        x = call.x
        stream = gpu.stream_of(x)
        if stream is None:
            with torch.cuda.device(x.device):
                return self.run(call, centre, rstd)
        # Options of ``torch.empty_like``. An option is passed only if it is needed, because each option takes
        # CPU time: a tenth of the time of a launch.
        options: dict[str, Any] = {} if self.is_contiguous else {"memory_format": torch.contiguous_format}
        total = None if call.residual is None else torch.empty_like(x, **options)
        if call.quantizer is not None:
            options["dtype"] = E4M3
        elif call.out_dtype is not None:
            options["dtype"] = call.out_dtype
        y = torch.empty_like(x, **options)
        if self.rows is None:
            self._launch_chunks(stream, call, y, total, centre, rstd)
        else:
            # If there is no total_bias, the kernel gets the weight's pointer in place of the pointer of
            # total_bias. It then reads nothing through this pointer, because its argument ``biased`` is 0. So
            # sums with and without a total_bias share one compiled kernel, if they have a weight.
            bias = call.weight if total is not None and call.total_bias is None else call.total_bias
            summed = (call.x, call.residual, call.add_bias, None, bias)
            operands = (call.weight, call.bias, None, call.quantizer)
            self.rows(stream, *summed, *operands, total, y, centre, rstd)
            if call.quantizer is not None:
                # The retry, a second launch for y in E4M3, writes y again. It gets no total_bias and no
                # memory for the sum, because the first launch has stored the sum.
                self.retry(stream, *summed[:-1], None, *operands, None, y, None, None)
        return y if total is None else (y, total)

    def _launch_chunks(
        self,
        stream: int,
        call: LayerNormCall | AddCall,
        y: Tensor,
        total: Tensor | None,
        centre: Tensor | None,
        rstd: Tensor | None,
    ) -> None:
        """Launches the kernels for rows that do not fit into registers.

        The kernels fill ``y``, and also ``total`` (the sum), ``centre`` (means) and ``rstd`` (1 /
        deviations), unless these are None.
        """
        x = call.x
        if centre is None:
            centre, rstd = empty_saved(x, result_dtype(call))
        partials = torch.empty(self.partials, dtype=torch.float32, device=x.device)
        kept = None
        if total is not None and call.total_bias is not None:
            total, kept = torch.empty_like(total), total
        self.chunk(stream, x, call.residual, call.add_bias, call.total_bias, total, kept, partials)
        self.merge(stream, partials, centre, rstd)
        affine = call.weight, call.bias, call.quantizer
        operands = (x if total is None else total, *affine, centre, rstd, y)
        self.normalise(stream, *operands)
        if call.quantizer is not None:
            self.retry(stream, *operands)


def rows_constants(config: RowsConfig) -> dict[str, Any]:
    """The constants that describe the tile in ``config``, for all kernels that load whole rows."""
    return {
        "WIDE": config.wide,
        **tile_constants(config),
    }


def row_strides(t: Tensor | None) -> tuple[int, int]:
    """The strides of ``t`` along its first two axes, samples and rows, in elements.

    The stride is 0 along an axis of one element. None has the strides 0 and 0.
    """
    if t is None:
        return 0, 0
    a, b = (0 if size == 1 else stride for size, stride in zip(t.shape[:2], t.stride()[:2], strict=True))
    return a, b


def row_numbers(strides: dict[str, tuple[int, int]], vector: int) -> dict[str, int]:
    """Names the strides of operands as a kernel's arguments, for example ``x_sample`` and ``x_row`` for x.

    ``strides``: a dict from the name of each operand to its strides along samples and rows, in elements. The
    results are strides in units of ``vector`` elements.
    """
    return {
        f"{name}_{axis}": stride // vector
        for name, pair in strides.items()
        for axis, stride in zip(("sample", "row"), pair, strict=True)
    }
