"""The launches of LayerNorm's backward: which kernels run, their grids and constants, their scratch memory.

The kernels are in ``layer_norm/backward_kernels.py``, their configurations in ``layer_norm/config.py``.
"""

from __future__ import annotations

import torch

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.declaration import Gradients, empty_row_gradients, gradients_of
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import row_stride
from sdfastgn.kernels.common.sizes import ceil_div, vector_width
from sdfastgn.kernels.common.sums import SUM_WARPS, column_sum_block
from sdfastgn.kernels.layer_norm import backward_kernels as kernels
from sdfastgn.kernels.layer_norm.backward import LayerNormGradCall
from sdfastgn.kernels.layer_norm.config import ChunksConfig, RowsConfig, backward_config, column_groups
from sdfastgn.kernels.layer_norm.plans import rows_constants


class LayerNormGradPlan:
    """The launches of LayerNorm's backward for calls with equal shapes, strides, dtypes and device.

    The calls must also want the same gradients. If rows fit into registers, ``rows_grad`` runs. Otherwise
    ``chunk_sums`` runs (if dx is needed), and then ``chunk_grad``. If a gradient of weight, bias or add_bias
    is wanted, ``columns`` runs last. It adds up the partial sums that the other kernels have written.

    Attributes:
        partials: number of fp32 partial sums; 0 if no gradient of weight, bias or add_bias is wanted.
        rows: number of rows of x.
        chunks: number of chunks of a row, if rows do not fit into registers.
        wanted: names of the operands whose gradients are wanted.
    """

    __slots__ = ("chunk_grad", "chunk_sums", "chunks", "columns", "partials", "rows", "rows_grad", "wanted")

    def __init__(self, call: LayerNormGradCall) -> None:
        x = call.x
        D = x.shape[-1]
        self.rows = x.numel() // D
        self.wanted = tuple(name for name in gradients_of(type(call)) if getattr(call, f"d{name}"))
        x_stride = row_stride(x) or D
        vector = vector_width(x.itemsize, D, x_stride)
        sums = (call.dweight, call.dbias, call.dadded)
        sms = gpu.num_sms(x.device)
        config = backward_config(self.rows, D, vector, sms, column_sums=any(sums))
        pdl = gpu.has_programmatic_launch(x.device)
        uses = {
            "ROW_SUMS": call.dx is not None or call.dadded is not None,
            "WEIGHT_GRAD": call.dweight is not None,
            "BIAS_GRAD": call.dbias is not None,
            "ADDED_GRAD": call.dadded is not None,
        }
        self.chunk_sums: Launch | None = None
        self.rows_grad: Launch | None = None
        if isinstance(config, RowsConfig):
            count = config.programs
            self.rows_grad = Launch(
                kernels._rows_grad_kernel, count, config.num_warps, pdl=pdl,
                rows=self.rows, plane=count * D, D=D, X_STRIDE=x_stride, **uses, **rows_constants(config),
            )  # fmt: skip
        else:
            groups = column_groups(self.rows, D, config.block, sms) if any(sums) else self.rows
            group_rows = ceil_div(self.rows, groups)
            count = ceil_div(self.rows, group_rows)
            self._plan_chunks(config, D, x_stride, (count, group_rows), uses, vector, pdl)
        # ``partials`` has a plane of count * D partial sums for each gradient, in the order weight, bias,
        # add_bias. Planes after the last wanted gradient are left out.
        self.partials = count * D * max((place for place, dtype in enumerate(sums, 1) if dtype), default=0)
        block_p, block_d = column_sum_block(count, D)
        self.columns = Launch(
            kernels._column_sum_kernel, 3 * ceil_div(D, block_d), SUM_WARPS, pdl=pdl,
            count=count, D=D, plane=count * D, BLOCK_P=block_p, BLOCK_D=block_d,
        )  # fmt: skip

    def _plan_chunks(
        self,
        config: ChunksConfig,
        D: int,
        x_stride: int,
        groups: tuple[int, int],
        uses: dict[str, bool],
        vector: int,
        pdl: bool,
    ) -> None:
        """Makes the launches for rows that do not fit into registers.

        ``chunk_grad`` is always made, ``chunk_sums`` only if dx is computed. ``groups``: (number of groups of
        rows, number of rows of a group). ``uses``: the constants of ``_chunk_grad_kernel`` that say which
        gradients are needed.
        """
        count, group_rows = groups
        # VECTOR is the number of elements that a thread loads at once. Kernels get D and the stride of x
        # divided by VECTOR, and multiply them by VECTOR. So the compiler knows that D and the stride are
        # multiples of VECTOR, and can load vectors.
        parts = {"d_parts": D // vector, "x_parts": x_stride // vector}
        tile = {"VECTOR": vector, "BLOCK": config.block}
        self.chunks = config.chunks
        if uses["ROW_SUMS"]:
            programs = self.rows * config.chunks
            self.chunk_sums = Launch(
                kernels._chunk_sums_kernel, programs, config.num_warps, pdl=pdl,
                chunks=config.chunks, blocks=config.length // config.block, plane=programs, **parts, **tile,
            )  # fmt: skip
        self.chunk_grad = Launch(
            kernels._chunk_grad_kernel, count * ceil_div(D, config.block), config.num_warps, pdl=pdl,
            rows=self.rows, group_rows=group_rows, plane=count * D, **parts, **uses, **tile,
        )  # fmt: skip

    def run(self, call: LayerNormGradCall) -> Gradients:
        """Launches the kernels, and returns the wanted gradients."""
        grads = empty_row_gradients(call, self.wanted)
        with gpu.on_device(call.x.device):
            self._launch(call, grads)
        return grads

    def _launch(self, call: LayerNormGradCall, grads: Gradients) -> None:
        """Launches the kernels on the current device, which must be the device of ``call.x``."""
        dy, dtotal, x, centre, rstd, weight, *_ = call
        dx = grads.get("x")
        stream = gpu.current_stream(x)
        partials = sums = None
        if self.partials:
            partials = torch.empty(self.partials, dtype=torch.float32, device=x.device)
        if self.rows_grad is not None:
            self.rows_grad(stream, dy, dtotal, x, centre, rstd, weight, dx, partials)
        else:
            if self.chunk_sums is not None:
                sums = torch.empty((2, self.rows, self.chunks), dtype=torch.float32, device=x.device)
                self.chunk_sums(stream, dy, x, centre, rstd, weight, sums)
                sums = sums.sum(2)
            self.chunk_grad(stream, dy, dtotal, x, centre, rstd, weight, sums, dx, partials)
        if partials is not None:
            self.columns(stream, partials, *map(grads.get, ("weight", "bias", "added")))
