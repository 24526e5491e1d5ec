"""LayerNorm of rows that come in groups, such as the tokens of each frame of a video.

Formula, for row i of x (rows, D), with g = i // period % groups:

    u = x + residual + added[g], rounded to the dtype of x
    y = LayerNorm(u) + position[g]

``period`` consecutive rows are a group: they use the same row of ``added`` and of ``position``. For example,
``added`` is the embedding of a frame, or the result of attention to a single token, and ``position`` is the
positional embedding of a frame. diffusers adds ``added`` and ``position`` in two separate passes.

On a GPU ``_rows_kernel`` of ``layer_norm/kernels.py`` computes u and y in one pass. The kernel is for
inference only: no op is registered with PyTorch, and there is no backward. Everywhere else, if gradients are
wanted, if an operand is not contiguous, and for rows that do not fit into registers, PyTorch adds the
vectors, and ``layer_norm`` normalizes the sum.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.plan_cache import PlanCache, plan_key
from sdfastgn.kernels.common.sizes import WARP, vector_width
from sdfastgn.kernels.layer_norm.config import RowsConfig, forward_config
from sdfastgn.kernels.layer_norm.op import layer_norm

# The kernel needs fewer rows than this, because it numbers rows by int32.
_MOST_ROWS = 2**31


class Groups(NamedTuple):
    """Vectors that are added to groups of rows. Row i of x gets the vectors ``i // period % groups``.

    Attributes:
        period: number of consecutive rows that get the same vectors.
        added: (groups, D) or None, added to x before the norm.
        position: (groups, D) or None, added to the norm's result.
    """

    period: int
    added: Tensor | None = None
    position: Tensor | None = None

    @property
    def number(self) -> int:
        given = self.added if self.added is not None else self.position
        return 1 if given is None else len(given)


def grouped_layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    groups: Groups,
    *,
    residual: Tensor | None = None,
    total_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes LayerNorm, and adds vectors to groups of rows before and after it. Returns (y, total).

    For row i, with g = ``i // groups.period % number of groups``:

        u = x + residual + groups.added[g]
        y = LayerNorm(u, rounded to the dtype of x) + groups.position[g]
        total = u + total_bias, rounded once

    Args:
        x: (..., D), fp16, bf16 or fp32.
        weight, bias: (D,) or None.
        eps: added to the variance.
        groups: the vectors that are added to groups of rows, in the dtype and on the device of x. ``added``
            and ``position`` must have the same shape, unless one is None.
        residual: a tensor with the shape, dtype and device of x, or None.
        total_bias: (D,) or None. It is added to total, but not to the sum that is normalized.

    The arguments are not checked. Both results have the shape and dtype of x. They are new tensors, and
    contiguous if x is. But if nothing is added, total may be x itself.
    """
    operands = (x, residual, groups.added, total_bias, weight, bias, groups.position)
    if dispatch.is_plain_inference(x, operands[1:]) and x.numel() < _MOST_ROWS * x.shape[-1]:
        try:
            found = _by_kernel(x, operands, eps, groups)
        except dispatch.KernelError:
            found = None
        if found is not None:
            return found
    return _in_pytorch(x, weight, bias, eps, groups, residual, total_bias)


def _in_pytorch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    groups: Groups,
    residual: Tensor | None,
    total_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    added = None if groups.added is None else _per_row(groups.added, x, groups.period)
    for summand in (residual, added):
        wide = wide if summand is None else wide + summand
    total = wide.to(x.dtype)
    y = layer_norm(total, weight, bias, eps)
    if groups.position is not None:
        y = y + _per_row(groups.position, x, groups.period)
    return y, total if total_bias is None else (wide + total_bias).to(x.dtype)


def _per_row(vectors: Tensor, x: Tensor, period: int) -> Tensor:
    """Repeats ``vectors`` (groups, D) to the shape of x: each row of x gets the vector of its group."""
    rows = torch.arange(math.prod(x.shape[:-1]), device=x.device)
    return vectors[rows // period % len(vectors)].view(x.shape)


# Cache of kernel launches for calls like earlier ones. The key has a call's shapes, strides, dtypes, device
# and numbers. The value is None if the kernel cannot run for such a call.
_launches: PlanCache[Launch | None] = PlanCache()


@dispatch.kernels_of("grouped_layer_norm")
def _by_kernel(
    x: Tensor, operands: tuple[Tensor | None, ...], eps: float, groups: Groups
) -> tuple[Tensor, Tensor] | None:
    """Computes ``grouped_layer_norm`` by the kernel. Returns None if the kernel cannot run.

    ``operands``: (x, residual, added, total_bias, weight, bias, position).
    """
    key = plan_key(operands, eps, groups.period)
    launch = _launches.get(key)
    if launch is None:
        launch = None if key in _launches else _make_launch(operands, eps, groups)
        _launches[key] = launch
        if launch is None:
            return None
    _, residual, added, total_bias, *others = operands
    y = torch.empty_like(x)
    total = None if residual is added is total_bias is None else torch.empty_like(x)
    launch.run(x, residual, None, added, total_bias, *others, None, total, y, None, None)
    return y, x if total is None else total


def _make_launch(operands: tuple[Tensor | None, ...], eps: float, groups: Groups) -> Launch | None:
    from sdfastgn.kernels.layer_norm import kernels  # imported late: kernels.py needs Triton
    from sdfastgn.kernels.layer_norm.plans import rows_constants

    x: Any = operands[0]
    D = x.shape[-1]
    rows = x.numel() // D
    if rows == 0 or not all(t is None or t.is_contiguous() for t in operands):
        return None
    vector = vector_width(x.itemsize, D)
    config = forward_config(rows, D, x.itemsize, vector, gpu.num_sms(x.device))
    if not isinstance(config, RowsConfig):
        return None
    return Launch(
        kernels._rows_kernel, config.programs, config.num_warps,
        pdl=gpu.has_programmatic_launch(x.device),
        rows=rows, period=groups.period, groups=groups.number, biased=1, eps=eps,
        D=D, X_STRIDE=D, RESIDUAL_STRIDE=D, RETRY=False,
        ONE_ROW=config.lanes * config.block <= WARP * vector, **rows_constants(config),
    )  # fmt: skip
