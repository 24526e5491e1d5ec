"""Compiles the kernels for a GPU that need not be there, and prints what each asks of it: one JSON object a line.

A program of its own, because Triton decides at import whether kernels are interpreted. Usage: ``compile_only.py 90``, for sm_90.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import sdfastgn
from sdfastgn.kernels.attention import few_keys as short_attention
from sdfastgn.kernels.attention import wide_heads_kernels as wide_attention_kernels
from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.geglu.op import geglu_grads
from sdfastgn.kernels.group_norm.backward import group_norm_grads
from sdfastgn.kernels.layer_norm import kernels as layer_norm_kernels
from sdfastgn.kernels.layer_norm.backward import layer_norm_grads
from sdfastgn.kernels.statistics import op as channel_statistics
from sdfastgn.kernels.upsample.conv_kernels import launch_interleave, launch_phase_weights

POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
FLOATS = {"eps", "scale"}
# Of the UNet shapes in sdfastgn.bench.kernels.suites: small and split ones, the last two with chunks of several tiles.
SHAPES = [
    (2, 1280, 8, 8),
    (2, 2560, 16, 16),
    (2, 640, 32, 32),
    (2, 320, 64, 64),
    (2, 960, 128, 128),
    (1, 512, 256, 256),
]
# Enough of large groups that the backward walks through each.
WALKED = (34, 512, 56, 56)
# Groups of one channel each, small and split.
ONE_CHANNEL = [(2, 64, 16, 16), (2, 64, 128, 128)]
# The two ways. On the oldest and on the H200's capability every shape, on the rest these only.
REPRESENTATIVE = [(2, 1280, 8, 8), (2, 320, 64, 64)]
# Tokens of a UNet, of a text encoder, rows that are far too short or too long for a warp, and the longest that stay in registers.
TOKENS = [(8192, 320), (2048, 1280), (10**7, 10), (10, 10**7)]
MORE_TOKENS = [(154, 768), (4096, 1000), (64, 8192), (64, 16384), (2048, 333)]
# (rows, D) of the first feed-forward layers of SD1.5 and of SDXL's most frequent block; odd and short rows.
GATED = [(8192, 1280), (2048, 5120)]
MORE_GATED = [(77, 333), (10**6, 10)]
# (N, C, K) of time embeddings: SD1.5's and SDXL's in a ResNet block, with the most rows, and the longest ones.
FEW_ROWS = [(2, 1280, 1280), (2, 320, 1280), (16, 1280, 1280), (2, 1280, 2816)]
MORE_FEW_ROWS = [(1, 640, 1280), (2, 2560, 1280), (3, 1280, 320), (4, 77, 333), (4, 1280, 8192)]
# (queries, keys, channels of a head): SD1.5's and SDXL's cross attention; heads that need products from shared memory.
PROMPTS = [(4096, 77, 40), (1024, 77, 64), (64, 77, 80), (64, 128, 128)]
MORE_PROMPTS = [(256, 77, 160), (256, 128, 256)]
# (tokens, channels) of a VAE's mid block at 512^2, at 1024^2, and at 2048^2, where a row of scores does not fit into registers.
ATTENDED = [(4096, 512), (16384, 512), (65536, 512)]


def cases(capability: int) -> list[tuple[tuple[int, ...], torch.dtype, str]]:
    """(shape, dtype, layout) of what is compiled."""
    small, split = REPRESENTATIVE
    found = [
        (shape, torch.float16, "channels_last")
        for shape in (SHAPES if capability in (75, 90) else REPRESENTATIVE)
    ]
    if capability in (75, 90):
        found += [(split, torch.float32, "channels_last"), (split, torch.float16, "channels_first")]
    found += [
        (shape, torch.float16, "one_channel")
        for shape in (ONE_CHANNEL if capability in (75, 90) else ONE_CHANNEL[:1])
    ]
    if capability == 90:
        found += [(small, torch.float16, "autocast"), (ONE_CHANNEL[0], torch.float32, "one_channel")]
        found += [(split, torch.bfloat16, "channels_last"), (small, torch.float16, "channels_first")]
        found += [(WALKED, dtype, "walked") for dtype in (torch.float32, torch.float16)]
        # Rows that are no whole number of tiles.
        found += [((2, 320, 56, 56), dtype, "channels_first") for dtype in (torch.float16, torch.float32)]
    found += [
        (shape, torch.float16, "tokens")
        for shape in (TOKENS if capability in (75, 90) else (TOKENS[0], TOKENS[-1]))
    ]
    found += [(shape, torch.float16, "gated") for shape in (GATED if capability in (75, 90) else GATED[:1])]
    found += [
        (shape, torch.float16, "few_rows") for shape in (FEW_ROWS if capability in (75, 90) else FEW_ROWS[:1])
    ]
    if capability >= 80:
        found += [(shape, torch.float16, "attention") for shape in PROMPTS]
    if 90 <= capability < 120:
        found += [(shape, torch.bfloat16, "attention") for shape in MORE_PROMPTS]
    if capability == 90:
        found += [(shape, torch.float16, "few_rows") for shape in MORE_FEW_ROWS]
        found += [(shape, torch.float32, "few_rows") for shape in FEW_ROWS]
        found += [(FEW_ROWS[0], torch.bfloat16, "few_rows")]
    found += [
        (shape, torch.float16, "wide") for shape in (ATTENDED if capability in (75, 90) else ATTENDED[1:])
    ]
    if capability == 90:
        found += [(ATTENDED[1], torch.bfloat16, "wide"), ((1111, 264), torch.float16, "wide")]
        found += [(shape, torch.float16, "tokens") for shape in MORE_TOKENS]
        found += [(shape, torch.float16, "gated") for shape in MORE_GATED]
        found += [(GATED[0], dtype, "gated") for dtype in (torch.bfloat16, torch.float32)]
        found += [(shape, torch.float32, "tokens") for shape in (TOKENS[1], TOKENS[2], MORE_TOKENS[2])]
    return found


def launches(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str
) -> Iterator[tuple[Launch, tuple[Any, ...]]]:
    """(launch, its tensors) of every kernel that the public functions launch on ``shape``; nothing runs."""
    made: list[tuple[Launch, tuple[Any, ...]]] = []
    with mock.patch.object(Launch, "__call__", lambda self, stream, *tensors: made.append((self, tensors))):
        kinds = {
            "tokens": layer_norms, "gated": gated, "few_rows": few_rows, "attention": attention, "wide": attended, "walked": walked,
            "one_channel": instance_norms, "autocast": fp32_results,
        }  # fmt: skip
        kinds.get(layout, group_norms)(shape, dtype, layout, made)
    yield from made


def layer_norms(shape: tuple[int, ...], dtype: torch.dtype, layout: str, made: list[Any]) -> None:
    x = torch.empty(shape, dtype=dtype)
    weight = x.new_empty(shape[1])
    sdfastgn.layer_norm(x, weight, weight)
    sdfastgn.add_layer_norm(x, x, weight, weight, add_bias=weight)
    # Past the dispatcher, where alone kernels know of it: the patched ``runs_in_triton`` is not the one that this way asks.
    params = (weight, weight, None, weight)
    plan = layer_norm_kernels.make_plan(("total_bias", x.shape, x.dtype), x, x, params, 1e-5)
    layer_norm_kernels.launch_layer_norm(plan, x, x, params)
    y, mean, rstd = torch.ops.sdfastgn.layer_norm(x, weight, weight, 1e-5, None)
    for dtypes in ((dtype,) * 4, (dtype, None, None, None)):
        layer_norm_grads(y, x, x, mean, rstd, weight, 1e-5, dtypes)


def attention(shape: tuple[int, ...], dtype: torch.dtype, layout: str, made: list[Any]) -> None:
    L, S, D = shape
    q, k = (torch.empty((2, rows, 8, D), dtype=dtype).transpose(1, 2) for rows in (L, S))
    assert short_attention.attend_to_few(q, k, k) is not None


def gated(shape: tuple[int, ...], dtype: torch.dtype, layout: str, made: list[Any]) -> None:
    x = torch.empty((shape[0], 2 * shape[1]), dtype=dtype)
    bias = x.new_empty(2 * shape[1])
    y = sdfastgn.geglu(x, bias)
    sdfastgn.geglu(x)
    for dtypes in ((dtype, dtype), (dtype, None), (None, dtype)):
        geglu_grads(y, x, bias, dtypes)


def few_rows(shape: tuple[int, ...], dtype: torch.dtype, layout: str, made: list[Any]) -> None:
    N, C, K = shape
    x, weight, bias = (torch.empty(size, dtype=dtype) for size in ((N, K), (C, K), (C,)))
    sdfastgn.act_linear(x, weight, bias)
    torch.ops.sdfastgn.act_linear(x, weight, bias, "silu", bias)


def attended(shape: tuple[int, ...], dtype: torch.dtype, layout: str, made: list[Any]) -> None:
    q = torch.empty((1, 1, *shape), dtype=dtype)
    with mock.patch.object(wide_attention_kernels, "_multiply"):  # cuBLAS's
        sdfastgn.wide_attention(q, q, q)
    del made[2:]  # the other chunks are like the first


def group_norms(shape: tuple[int, ...], dtype: torch.dtype, layout: str, made: list[Any]) -> None:
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    x, head, tail = (
        torch.empty((shape[0], C, *shape[2:]), dtype=dtype).to(memory_format=memory_format)
        # The skip connection of an up block: 2x960x64x64 is 640 + 320 channels.
        for C in (shape[1], shape[1] - shape[1] // 3 // 8 * 8, shape[1] // 3 // 8 * 8)
    )
    weight = x.new_empty(shape[1])
    sdfastgn.group_norm(x, 32, weight, weight, activation="silu")
    if len(made) > 1:  # a small tensor has no use for statistics
        sdfastgn.add_with_statistics(x, x, weight)
        sdfastgn.cat_with_statistics(head, tail)
        channel_statistics.add_kernel(x, None, weight, 1.0, out=x)
    channel_statistics.add_kernel(x, x, weight, 1.0, emits=False)
    if layout == "channels_last":
        channel_statistics.cat_kernel(head, tail, emits=False)
    if layout == "channels_last":
        upsampled_convolution(x)
        torch.ops.sdfastgn.upsample_nearest_2x_backward(sdfastgn.upsample_nearest_2x(x))
    y, mean, rstd = torch.ops.sdfastgn.group_norm(
        x, 32, weight, weight, 1e-5, "silu", None, None, None, None, False, None
    )  # fmt: skip
    dy = torch.empty_like(y)
    group_norm_grads(
        dy,
        x,
        mean,
        rstd,
        (weight, weight, None, None, None),
        32,
        1e-5,
        "silu",
        False,
        (True,) * 3 + (False,) * 3,
    )


def instance_norms(shape: tuple[int, ...], dtype: torch.dtype, layout: str, made: list[Any]) -> None:
    weight, mean = torch.empty(shape[1], dtype=dtype), torch.empty(shape[:2])
    for memory_format in (torch.channels_last, torch.contiguous_format):
        x = torch.empty(shape, dtype=dtype, memory_format=memory_format)
        sdfastgn.group_norm(x, shape[1], weight, weight, activation="silu")
        params, wanted = (weight, weight, None, None, None), (True,) * 3 + (False,) * 3
        group_norm_grads(x, x, mean, mean, params, shape[1], 1e-5, "silu", False, wanted)


def fp32_results(shape: tuple[int, ...], dtype: torch.dtype, layout: str, made: list[Any]) -> None:
    x = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
    torch.ops.sdfastgn.group_norm(
        x, 32, None, None, 1e-5, "silu", None, None, None, None, False, torch.float32
    )


def walked(shape: tuple[int, ...], dtype: torch.dtype, layout: str, made: list[Any]) -> None:
    weight = torch.empty(shape[1], dtype=dtype)
    mean = torch.empty((shape[0], 32))
    for memory_format in (torch.channels_last, torch.contiguous_format):
        x = torch.empty(shape, dtype=dtype, memory_format=memory_format)
        for activation in ("identity", "silu", "gelu"):
            params, wanted = (weight, weight, None, None, None), (True,) * 3 + (False,) * 3
            group_norm_grads(x, x, mean, mean, params, 32, 1e-5, activation, False, wanted)
        params, wanted = (weight, weight, weight, None, None), (True,) * 4 + (False,) * 2
        group_norm_grads(x, x, mean, mean, params, 32, 1e-5, "identity", False, wanted)


def upsampled_convolution(x: torch.Tensor) -> None:
    """What runs before and behind the convolution, which would take long here."""
    N, C, H, W = x.shape
    weight, bias = x.new_empty((C, C, 3, 3)), x.new_empty(C)
    for w in (weight, weight.to(memory_format=torch.channels_last)):
        launch_phase_weights(w, x.new_empty((4 * C, 2, 2, C)))
    y = x.new_empty((N, C, 2 * H, 2 * W))
    for statistics in (None, bias):
        launch_interleave(x.new_empty((N, H + 1, W + 1, 4 * C)), bias, y, statistics)


def resources(launch: Launch, tensors: tuple[Any, ...], capability: int) -> dict[str, int]:
    """Registers, stack (where spilled registers go), shared memory and the widest load of a kernel, in registers and bytes."""
    names = launch.kernel.arg_names
    pointers = dict(zip(names, tensors, strict=False))
    constants = {**launch.constants, **{name: None for name, tensor in pointers.items() if tensor is None}}
    signature = {name: "fp32" if name in FLOATS else "i32" for name in names}
    signature |= {name: POINTERS[tensor.dtype] for name, tensor in pointers.items() if tensor is not None}
    signature |= dict.fromkeys(constants, "constexpr")
    # PyTorch's memory starts at multiples of 16 bytes; Triton specialises on that.
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")
    }
    source = ASTSource(
        launch.kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", report)
    if found is None:
        raise ValueError(f"no resource usage in {report!r}")
    loads = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", compiled.asm["ptx"])
    widest = max((int(count or 1) * int(bits) // 8 for count, bits in loads), default=0)
    registers, stack, shared = map(int, found.groups())
    shared = max(shared, compiled.metadata.shared)
    return {"registers": registers, "stack": stack, "shared": shared, "widest_load": widest}


def operation(launch: Launch, tensors: tuple[Any, ...]) -> str:
    """The kernel's name, and for one of several uses which it is."""
    pointers = dict(zip(launch.kernel.arg_names, tensors, strict=False))
    found = [use for use in ("residual", "tail", "bias") if pointers.get(f"{use}_ptr") is not None]
    if launch.kernel.__name__ != "_statistics_kernel":
        found = [use for use in found if use == "residual"]
    use = {"residual": "add", "tail": "cat", "bias": "bias"}[found[0]] if found else ""
    if use and "statistics_ptr" in pointers and pointers["statistics_ptr"] is None:
        use += " alone"
    return launch.kernel.__name__ + (f"[{use}]" if use else "")


def main(capability: int) -> None:
    # As on such a GPU, but for the number of multiprocessors: on the CPU that is an H200's.
    dispatch.runs_in_triton = lambda x: True
    dispatch.has_kernels = lambda x: True
    dispatch.is_plain = lambda x, others: False
    gpu.has_programmatic_launch = lambda device: capability >= 90
    for shape, dtype, layout in cases(capability):
        for launch, tensors in launches(shape, dtype, layout):
            label = {
                "shape": "x".join(map(str, shape)),
                "dtype": str(dtype).removeprefix("torch."),
                "layout": layout,
            }
            found = resources(launch, tensors, capability)
            label["kernel"] = operation(launch, tensors)
            print(
                json.dumps({**label, **found, **launch.options, "pdl": launch.constants["PDL"]}), flush=True
            )


if __name__ == "__main__":
    main(int(sys.argv[1]))
