"""The Triton kernels of attention with wide heads, and their launches, for ``attention/wide_heads.py``.

The queries are processed in chunks, one after the other. Each chunk takes four launches:

1. scores = queries x keys, fp32, by cuBLAS;
2. weights = exp(scale * (scores - largest score of the row)) in 16 bits, and the sum of the weights of each
   row (``_softmax_kernel``);
3. products = weights x values, fp32, by cuBLAS. They overwrite the scores;
4. y = products / sums (``_divide_kernel``).

All chunks use the same memory for scores, weights and sums. The CPU never waits for the GPU, so a CUDA graph
can capture the launches.

With programmatic dependent launch (``PDL``, from sm_90 on) a Triton kernel starts while the matrix product
before it still runs. Before the kernel accesses memory, it waits for the end of that product.

Numerics: scores, sums and products are fp32. The weights of a row are between 0 and 1, and the largest weight
is 1. Weights are rounded to 16 bits, and the sum of a row adds up the *rounded* weights. So the weights that
multiply the values are divided by exactly their own sum, and a common offset of the values causes no error.
For example, if the mean of the values is five times their deviation, sums of exact weights would make the
error of y five times as large. y is rounded once. NaN and inf behave as in softmax.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.attention.config import VECTOR, Chunk, chunks_config, divide_config, softmax_config
from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.activation_kernels import exp2
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.plan_cache import PlanCache
from sdfastgn.kernels.common.sizes import ceil_div

# --- kernels --------------------------------------------------------------------------------------


@triton.jit
def _read_scores(scores, c, keys, pitch):
    """Loads the scores of a row in columns ``c``, fp32. Scores after the last key are -inf."""
    # A row has ``keys`` scores, and padding up to ``pitch`` elements. The load's mask is ``c < pitch``,
    # because the compiler knows that ``pitch`` is a multiple of ``VECTOR``, and can load vectors. With the
    # mask ``c < keys`` it would load element by element.
    return tl.where(c < keys, tl.load(scores + c, mask=c < pitch, other=0.0), float("-inf"))


@triton.jit
def _write_weights(weights, scores, top, scale, c, pitch):
    """Stores exp2((scores - top) * scale) in the dtype of ``weights``. Returns the rounded values in fp32.

    ``top``: the largest score of the row.
    """
    # ``scores - top`` is computed before it is multiplied by ``scale``. So the difference is exact for scores
    # close to ``top``. These scores have the largest weights.
    rounded = exp2((scores - top) * scale).to(weights.dtype.element_ty)
    tl.store(weights + c, rounded, mask=c < pitch)
    return rounded.to(tl.float32)


@triton.jit(do_not_specialize=["keys", "parts", "scale"])
def _softmax_kernel(
    scores_ptr, weights_ptr, sums_ptr,
    keys, parts, scale,
    PDL: tl.constexpr, VECTOR: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes weights and the sum of each row of weights. A program processes one row.

    weights = exp2(scale * (scores - largest score of the row)).

    Tensors: ``scores`` fp32 (rows, pitch); ``weights`` fp16 or bf16 (rows, pitch); ``sums`` fp32 (rows,).

    ``pitch``: elements between the starts of rows. ``parts``: pitch / ``VECTOR``. ``scale``: the factor of
    the scores times log2(e), because the kernel computes powers of 2. ``WHOLE``: True if a row fits into one
    block and is read once. Otherwise a row is read twice: for its largest score, and for its weights.
    """
    row = tl.program_id(0).to(tl.int64)
    pitch = parts * VECTOR
    scores = scores_ptr + row * pitch
    weights = weights_ptr + row * pitch
    i = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    if WHOLE:
        s = _read_scores(scores, i, keys, pitch)
        total = _write_weights(weights, s, tl.max(s, 0), scale, i, pitch)
    else:
        largest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for at in range(0, keys, BLOCK):
            largest = tl.maximum(largest, _read_scores(scores, at + i, keys, pitch))
        top = tl.max(largest, 0)
        total = tl.zeros((BLOCK,), tl.float32)
        for at in range(0, keys, BLOCK):
            s = _read_scores(scores, at + i, keys, pitch)
            total += _write_weights(weights, s, top, scale, at + i, pitch)
    tl.store(sums_ptr + row, tl.sum(total, 0))


@triton.jit(do_not_specialize=["rows"])
def _divide_kernel(
    products_ptr, sums_ptr, y_ptr,
    rows,
    D: tl.constexpr, PDL: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes y = products / sums. A program adds up the partial products of a block of a row, and divides.

    Tensors: ``products`` fp32 (SPLITS, rows, D), the partial products weights x values; ``sums`` fp32
    (rows,), the sums of the weights; ``y`` (rows, D), contiguous.
    """
    blocks = tl.cdiv(D, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    c = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    at = row * D + c
    mask = c < D
    if PDL:
        gdc_wait()
    total = tl.load(products_ptr + at, mask=mask)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(products_ptr + rows.to(tl.int64) * (part * D) + at, mask=mask)
    y = total / tl.load(sums_ptr + row)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


# --- launchers ------------------------------------------------------------------------------------


class _Plan:
    """The chunks of queries, and their launches, for calls with equal sizes, scale, dtype and device.

    ``launches`` maps the number of rows of a chunk to (launch of the softmax, launch of the division). The
    last chunk may have fewer rows than the others. ``scratch``: number of fp32 values in the memory for the
    scores of a chunk, which the products later overwrite.
    """

    __slots__ = ("chunks", "config", "launches", "scratch")

    def __init__(self, q: Tensor, k: Tensor, scale: float) -> None:
        count, L, D = q.shape
        keys = k.shape[1]
        self.config = chunks_config(count, L, keys, D, gpu.num_sms(q.device))
        self.chunks = tuple(self.config.chunks(count, L))
        self.scratch = self.config.scratch(D)
        pdl = gpu.has_programmatic_launch(q.device)
        block, warps, whole = softmax_config(keys)
        softmax = {
            "keys": keys,
            "parts": self.config.pitch // VECTOR,
            "scale": scale / math.log(2),  # the kernel uses exp2: exp(x) = exp2(x / log(2))
            "VECTOR": VECTOR,
            "WHOLE": whole,
            "BLOCK": block,
        }
        divide_block, divide_warps = divide_config(D)
        divide = {"D": D, "SPLITS": self.config.splits, "BLOCK": divide_block}
        blocks = ceil_div(D, divide_block)
        self.launches = {
            rows: (
                Launch(_softmax_kernel, rows, warps, pdl=pdl, **softmax),
                Launch(_divide_kernel, rows * blocks, divide_warps, pdl=pdl, rows=rows, **divide),
            )
            for rows in {(b1 - b0) * (r1 - r0) for b0, b1, r0, r1 in self.chunks}
        }


_plans: PlanCache[_Plan] = PlanCache()


@dispatch.kernels_of("wide_attention")
def launch_wide_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Returns softmax(q k^T * scale) v, contiguous (N, heads, L, D) in the dtype of q.

    Args:
        q: (N, heads, L, D).
        k, v: (N, heads, keys, D).
        scale: must be positive.

    The tensors must all be fp16 or all bf16, must not be empty, and must be on one GPU. Under Triton's
    interpreter they may be on any device.
    """
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # cuBLAS needs contiguous channels. A tensor without them is copied once here, instead of in each chunk.
    # ``flatten`` copies a tensor if no view joins the dimensions N and heads.
    q, k, v = (_side_by_side(t).flatten(0, 1) for t in (q, k, v))
    key = (q.shape, k.shape, scale, q.dtype, q.device)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _Plan(q, k, scale)
    rows = plan.config.matrices * plan.config.rows
    scratch = torch.empty(plan.scratch, dtype=torch.float32, device=q.device)
    weights = torch.empty(rows * plan.config.pitch, dtype=q.dtype, device=q.device)
    sums = torch.empty(rows, dtype=torch.float32, device=q.device)
    with gpu.on_device(q.device):
        stream = gpu.current_stream(q)
        for chunk in plan.chunks:
            _launch(plan, stream, chunk, (q, k, v), (scratch, weights, sums), y.view(-1, y.shape[-1]))
    return y


def _side_by_side(t: Tensor) -> Tensor:
    """Returns ``t``, or a contiguous copy if the channels of ``t`` are not contiguous."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _launch(
    plan: _Plan,
    stream: int,
    chunk: Chunk,
    tensors: tuple[Tensor, ...],
    workspace: tuple[Tensor, ...],
    y: Tensor,
) -> None:
    """Launch the four kernels for one chunk of queries, which compute the chunk's rows of y.

    Args:
        tensors: q (count, L, D), k and v (count, keys, D), where ``count`` is the number of heads of all
            samples.
        workspace: (memory for scores and then for products, memory for weights, memory for sums).
        y: (count * L, D).
    """
    q, k, v = tensors
    scratch, weights, sums = workspace
    b0, b1, r0, r1 = chunk
    matrices, rows = b1 - b0, r1 - r0
    keys, D, pitch, splits = k.shape[1], q.shape[-1], plan.config.pitch, plan.config.splits
    softmax, divide = plan.launches[matrices * rows]

    scores = scratch[: matrices * rows * pitch].view(matrices, rows, pitch)
    _multiply(q[b0:b1, r0:r1], k[b0:b1].transpose(1, 2), scores[:, :, :keys])
    softmax(stream, scratch, weights, sums)

    left, right = weights[: matrices * rows * pitch].view(matrices, rows, pitch)[:, :, :keys], v[b0:b1]
    if splits > 1:  # the keys of a head are divided: a batched product, one matrix for each part
        left, right = left[0].unflatten(1, (splits, -1)).transpose(0, 1), right[0].unflatten(0, (splits, -1))
    _multiply(left, right, scratch[: left.shape[0] * rows * D].view(-1, rows, D))
    first = b0 * q.shape[1] + r0
    divide(stream, scratch, sums, y[first : first + matrices * rows])


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Computes out = a @ b for batches of matrices. a and b are 16-bit, out is fp32."""
    if a.is_cuda:
        torch.ops.aten.bmm.dtype_out(a, b, torch.float32, out=out)
    else:  # on a CPU, PyTorch gives fp32 results only for fp32 matrices
        out.copy_(torch.bmm(a.float(), b.float()))
