"""Attention to few keys, such as the tokens of a prompt: ``softmax(q k^T scale) v``.

Formula, for each sample, head and query l:

    p[s] = exp(scale * (q[l] . k[s]) - m),  m = max_s scale * (q[l] . k[s])
    y[l] = sum_s p[s] v[s] / sum_s p[s]

PyTorch's kernels process keys in steps, and are made for many keys. With 77 keys they take 10 to 15 us,
although reading q and writing y takes only 3 us. Here a program reads its queries and all keys of a head at
once. The keys are divided into one or two tiles, so that there is little padding: 77 keys become tiles of 64
and 16 keys. In memory y is (N, L, H, D), which is what the next linear layer reads.

Numerics: products are accumulated in fp32, and the softmax is fp32. p is rounded to the dtype of v before
the second product, as in every flash kernel. y is rounded once.

This is for inference only: there is no registered op and no backward. If ``attend_to_few`` returns None,
callers use ``torch.nn.functional.scaled_dot_product_attention``.

Source: Vaswani et al., 2017; Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018; Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sdfastgn.kernels.attention.config import VECTOR
from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.plan_cache import PlanCache
from sdfastgn.kernels.common.sizes import ceil_div, next_power_of_2

# Maximum number of keys. A program holds all keys of a head in registers at once.
MAX_KEYS = 128
# Maximum number of channels of a head. For wider heads the kernel does not run.
_MAX_HEAD_DIM = 256
# Minimum number of rows, and of columns, of an operand of ``tl.dot``. Smaller tiles are padded.
LEAST = 16

# --- launch configuration -------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes of tiles, all powers of 2.

    ``block_m``: number of queries of a program. ``block_d``: number of channels, with padding. ``head``:
    number of keys in the first tile of keys. ``tail``: number of keys in the second tile; 0 if there is none.
    """

    block_m: int
    block_d: int
    head: int
    tail: int
    num_warps: int


def attention_config(D: int, S: int) -> AttentionConfig:
    """The tiles for ``S`` keys, 1 to ``MAX_KEYS``, and heads of ``D`` channels, at most 256."""
    block_d = max(LEAST, next_power_of_2(D))
    head = max(LEAST, next_power_of_2(S + 1) // 2)
    tail = max(LEAST, next_power_of_2(S - head)) if head < S else 0
    if head == tail:
        head, tail = 2 * head, 0
    # A program has 64 queries. With 128 queries a thread took 195 registers, and SDXL's 320 programs did not
    # all run at once on an H200. Four warps are enough for up to 128 channels. For more channels, the fp32
    # results alone would take half of the registers of four warps. Then a program has eight warps.
    return AttentionConfig(64, block_d, head, tail, 8 if block_d > 128 else 4)


# --- launcher -------------------------------------------------------------------------------------


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if the kernel can run for q (N, H, L, D), k and v (N, H, S, D), and is faster than PyTorch.

    The kernel needs:

    - tensors of the same dtype, fp16 or bf16;
    - at most ``MAX_KEYS`` keys, and a multiple of 8 channels, at most 256;
    - contiguous channels, and all other strides multiples of 16 bytes;
    - an NVIDIA GPU of sm_80 or newer; for more than 128 channels sm_90 or newer, but older than sm_120. Under
      Triton's interpreter the device may be any.

    This function does not check whether the tensors are on one device.
    """
    return (
        dispatch.runs_in_triton(q)
        and q.dim() == 4
        and k.shape == v.shape == (*q.shape[:2], k.shape[2], q.shape[3])
        and 0 < k.shape[2] <= MAX_KEYS
        and fits_heads(q, k, v, _MAX_HEAD_DIM, _MAX_HEAD_DIM)
    )


def fits_heads(q: Tensor, k: Tensor, v: Tensor, most: int, at_once: int) -> bool:
    """True if q, k and v suit the kernels of attention to few keys and of attention over frames.

    Checks dtypes, channels, strides and GPU, but not the number of tokens. q, k and v are (samples, heads,
    tokens, channels).

    Args:
        most: maximum number of channels of a head that the kernel supports.
        at_once: a program holds all channels of a head at once, but not more than this number. The GPU must
            have enough registers for them (``runs_on``).
    """
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and q.dtype == k.dtype == v.dtype
        and q.numel() > 0
        and q.shape[3] <= most
        and q.shape[3] % VECTOR == 0
        and all(t.stride(3) == 1 and not any(s % VECTOR for s in t.stride()[:3]) for t in (q, k, v))
        and (q.is_cpu or runs_on(gpu.compute_capability(q.device), min(q.shape[3], at_once)))
    )


def runs_on(capability: tuple[int, int], D: int) -> bool:
    """True if a kernel does not spill registers on a GPU of this compute capability.

    ``D``: number of channels that a program of the kernel holds at once.

    On Hopper and on Blackwell's server GPUs, matrix products read operands from shared memory. On other GPUs
    both operands must be in registers, so heads of more than 128 channels spill registers. The result is
    False for GPUs older than sm_80, and for all AMD GPUs, because on RDNA 3 even heads of 80 channels spill.
    """
    if torch.version.hip is not None:
        return False
    return capability >= (8, 0) if D <= 128 else (9, 0) <= capability < (12, 0)


# Maps shapes, strides, dtypes, device and scale of a call to the kernel launch for such calls, or to None if
# the kernel cannot run for them or is not faster than PyTorch.
_launches: PlanCache[Launch | None] = PlanCache()


def _make_launch(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Launch:
    """Make the launch with one program for each ``block_m`` queries of each head."""
    from sdfastgn.kernels.attention import few_keys_kernels  # imported late: few_keys_kernels.py needs Triton

    N, H, L, D = q.shape
    config = attention_config(D, k.shape[2])
    pdl = gpu.has_programmatic_launch(q.device)
    programs = N * H * ceil_div(L, config.block_m)
    return Launch(
        few_keys_kernels._short_attention_kernel, programs, config.num_warps, pdl=pdl,
        L=L, H=H, S=k.shape[2], D=D, scale=scale * math.log2(math.e),
        q_n=q.stride(0) // VECTOR, Q_H=q.stride(1), Q_L=q.stride(2),
        k_n=k.stride(0) // VECTOR, K_H=k.stride(1), K_L=k.stride(2),
        v_n=v.stride(0) // VECTOR, V_H=v.stride(1), V_L=v.stride(2),
        VECTOR=VECTOR, BLOCK_M=config.block_m, BLOCK_D=config.block_d, HEAD=config.head, TAIL=config.tail,
    )  # fmt: skip


def attend_to_few(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor | None:
    """Returns softmax(q k^T scale) v, or None if the kernel cannot run or is not faster than PyTorch.

    Args:
        q: (N, H, L, D).
        k, v: (N, H, S, D), the dtype and device of q.
        scale: by default 1 / sqrt(D).

    The result is (N, L, H * D) in the dtype of q, contiguous, as the next linear layer takes it. ``fits`` has
    the conditions under which the kernel runs.
    """
    try:
        return _by_kernel(q, k, v, scale)
    except dispatch.KernelError:
        return None


@dispatch.kernels_of("attend_to_few")
def _by_kernel(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor | None:
    key = (
        q.shape,
        q.stride(),
        k.shape,
        k.stride(),
        v.shape,
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        scale,
    )
    launch = _launches.get(key)
    if launch is None:
        if key in _launches or not fits(q, k, v):
            _launches[key] = None
            return None
        launch = _make_launch(q, k, v, 1 / math.sqrt(q.shape[3]) if scale is None else scale)
        _launches[key] = launch
    N, H, L, D = q.shape
    y = q.new_empty_strided((N, L, H * D), (L * H * D, H * D, 1))
    launch.run(q, k, v, y)
    return y
