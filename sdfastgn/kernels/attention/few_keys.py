"""Attention to few keys: ``softmax(q k^T scale) v`` where all keys of a head fit one tile, as of a prompt.

Formula, for each sample, head and query l:

    p[s] = exp(scale * (q[l] . k[s]) - m),  m = max_s of the exponents
    y[l] = sum_s p[s] v[s] / sum_s p[s]

PyTorch's kernels walk over keys in steps and are made for many; with 77 of them they take 10 to 15
us where reading q and writing y is 3. Here a program reads its queries and all keys at once, the
keys as two tiles (77 = 64 + 13, so that little is computed for nothing), and writes y as (N, L, H,
D), which the linear layer behind it takes without a copy.

Numerics: products are accumulated in fp32, the softmax is fp32, p is rounded to the dtype of v
before the second product as in every flash kernel, and y is rounded once. Inference only: there is
no op and no backward; callers ask ``fits`` first and have
``torch.nn.functional.scaled_dot_product_attention`` for everything else.

Source: Vaswani et al., 2017; Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018; Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.plan_cache import PlanCache
from sdfastgn.kernels.common.sizes import ceil_div, next_power_of_2

MAX_KEYS = 128
_MAX_HEAD_DIM = 256
_LEAST = 16  # of a matrix product's sides
_VECTOR = 8  # elements of a 16-byte load

# --- launch configuration -------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionConfig:
    """Tiles of ``block_m`` queries, keys in tiles of ``head`` and ``tail`` (0: none), powers of two."""

    block_m: int
    block_d: int
    head: int
    tail: int
    num_warps: int


def attention_config(D: int, S: int) -> AttentionConfig:
    """How to attend to ``S`` keys, 1 to ``MAX_KEYS``, with heads of ``D`` channels, at most 256."""
    block_d = max(_LEAST, next_power_of_2(D))
    head = max(_LEAST, next_power_of_2(S + 1) // 2)
    tail = max(_LEAST, next_power_of_2(S - head)) if head < S else 0
    if head == tail:
        head, tail = 2 * head, 0
    # 64 queries are what one group of four warps multiplies at once. With 128 a thread had 195
    # registers, and SDXL's 320 programs were two rounds on an H200. Of the widest heads the
    # result's tile alone, fp32 in registers, wants eight warps.
    return AttentionConfig(64, block_d, head, tail, 8 if block_d > 128 else 4)


# --- launcher -------------------------------------------------------------------------------------


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if ``attend_to_few`` takes q (N, H, L, D), k and v (N, H, S, D), and is faster than PyTorch.

    16-bit tensors on an NVIDIA GPU from sm_80 on (heads of more than 128 channels: sm_90 and
    sm_100), or anywhere under Triton's interpreter; at most ``MAX_KEYS`` keys; rows of whole 16-byte
    loads.
    """
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and q.dtype == k.dtype == v.dtype
        and dispatch.runs_in_triton(q)
        and q.dim() == 4
        and k.shape == v.shape == (*q.shape[:2], k.shape[2], q.shape[3])
        and 0 < k.shape[2] <= MAX_KEYS
        and q.shape[3] <= _MAX_HEAD_DIM
        and q.shape[3] % _VECTOR == 0
        and q.numel() > 0
        and all(t.stride(3) == 1 and not any(s % _VECTOR for s in t.stride()[:3]) for t in (q, k, v))
        and (not q.is_cuda or _runs_on(torch.cuda.get_device_capability(q.device), q.shape[3]))
    )


def _runs_on(capability: tuple[int, int], D: int) -> bool:
    # Without Hopper's and Blackwell's products from shared memory both operands are in registers
    # too, and the largest heads spill. On AMD's RDNA 3 heads of 80 do.
    if torch.version.hip is not None:
        return False
    return capability >= (8, 0) if D <= 128 else (9, 0) <= capability < (12, 0)


# None where ``fits`` is false.
_launches: PlanCache[Launch | None] = PlanCache()


def _make_launch(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Launch:
    from sdfastgn.kernels.attention import few_keys_kernels  # needs Triton

    N, H, L, D = q.shape
    config = attention_config(D, k.shape[2])
    pdl = gpu.has_programmatic_launch(q.device)
    programs = N * H * ceil_div(L, config.block_m)
    return Launch(
        few_keys_kernels._short_attention_kernel, programs, config.num_warps, pdl=pdl,
        L=L, H=H, S=k.shape[2], D=D, scale=scale * math.log2(math.e),
        q_n=q.stride(0) // _VECTOR, Q_H=q.stride(1), Q_L=q.stride(2),
        k_n=k.stride(0) // _VECTOR, K_H=k.stride(1), K_L=k.stride(2),
        v_n=v.stride(0) // _VECTOR, V_H=v.stride(1), V_L=v.stride(2),
        VECTOR=_VECTOR, BLOCK_M=config.block_m, BLOCK_D=config.block_d, HEAD=config.head, TAIL=config.tail,
    )  # fmt: skip


def attend_to_few(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor | None:
    """softmax(q k^T scale) v for q (N, H, L, D), k and v (N, H, S, D); None where ``fits`` is false.

    Args:
        scale: 1 / sqrt(D) where it is None.

    Returns:
        (N, H, L, D), a view of contiguous (N, L, H, D).
    """
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
    y = torch.empty((N, L, H, D), dtype=q.dtype, device=q.device)
    try:
        launch.run(q, k, v, y)
    except dispatch.KernelError:
        return None
    return y.transpose(1, 2)
