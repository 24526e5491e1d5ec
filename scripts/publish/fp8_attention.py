"""Time cuDNN's attention in E4M3 beside PyTorch's in fp16, at the sizes of a UNet's self-attention.

python -m scripts.publish.fp8_attention --json benchmarks/by_hand/fp8_attention.json

cuDNN's attention in E4M3 needs the package ``nvidia-cudnn-frontend``. Its inputs and its result are in E4M3.
The time does not include the kernels that would convert them. Times are those of CUDA graphs, with a hot L2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.publish.tables.fp8 import ATTENTION, AttentionRow
from sdfastgn.bench import documents, timing
from sdfastgn.bench.environment import environment
from sdfastgn.bench.images import relative_error
from sdfastgn.cli.session import exit_code
from sdfastgn.kernels.common.failures import one_line

# Each kind of layer is timed at batch 2 (one image with guidance) and at batch 64.
LAYERS = (
    AttentionRow("SDXL 1024²", 10, 2, 10, 4096, 64),
    AttentionRow("SDXL 1024²", 60, 2, 20, 1024, 64),
    AttentionRow("SDXL 1024²", 10, 64, 10, 4096, 64),
    AttentionRow("SDXL 1024²", 60, 64, 20, 1024, 64),
)
# The backends of PyTorch's attention that are tried. The fastest counts.
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
# The largest number of E4M3.
MOST = 448.0


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (``x / scale`` in E4M3, ``scale``). The scale is an fp32 tensor (1, 1, 1, 1)."""
    scale = x.abs().amax().float().clamp_min(1e-12).view(1, 1, 1, 1) / MOST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def in_e4m3(q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[Any], Tensor], Tensor]:
    """Returns (a function that computes attention by cuDNN, the scale of its result in E4M3).

    q, k, v: (N, heads, tokens, channels). The function computes with these, and ignores the argument that
    ``time_kernel`` gives it. Raises ImportError without
    ``nvidia-cudnn-frontend``, and any error of cuDNN.
    """
    import cudnn

    kind, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=kind, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle
    )
    inputs = [quantized(x) for x in (q, k, v)]
    result_scale = v.abs().amax().float().view(1, 1, 1, 1) / MOST
    # The last scale is that of the softmax's results. They are at most 1, which becomes the largest number.
    scales = [scale for _, scale in inputs] + [torch.full_like(result_scale, 1 / MOST)]
    scales += [1 / scales[-1], 1 / result_scale]
    tensors = [graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=kind) for x, _ in inputs]
    numbers = [graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=fp32) for _ in scales]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    output, _, *largest = graph.sdpa_fp8(
        q=tensors[0], k=tensors[1], v=tensors[2], **dict(zip(names, numbers, strict=True)),
        is_inference=True, attn_scale=q.shape[-1] ** -0.5,
    )  # fmt: skip
    y = torch.empty_like(inputs[0][0])
    output.set_output(True).set_dim(list(y.shape)).set_stride(list(y.stride())).set_data_type(kind)
    amax = [torch.zeros_like(result_scale) for _ in largest]
    for each in largest:
        each.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(fp32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)
    given = dict(zip(tensors, (x for x, _ in inputs), strict=True))
    given |= {output: y, **dict(zip(numbers, scales, strict=True)), **dict(zip(largest, amax, strict=True))}

    def call(_: Any) -> Tensor:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(given, workspace, handle=handle)
        return y

    return call, result_scale


def measured(row: AttentionRow, device: torch.device) -> AttentionRow:
    """Returns ``row`` with its times and errors. The inputs are normally distributed."""
    shape = row.batch, row.tokens, row.heads, row.channels
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.float16).transpose(1, 2)
        for _ in range(3)
    )

    def in_fp16(backend: SDPBackend) -> float:
        def call(_: Any) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v)

        return timing.time_kernel(call, [None], device, cold=False, calls=20, repeats=10)

    exact = F.scaled_dot_product_attention(q[:1].float(), k[:1].float(), v[:1].float())
    error = relative_error(F.scaled_dot_product_attention(q, k, v)[:1], exact)
    row = replace(row, fp16_us=min(map(in_fp16, BACKENDS)), fp16_error=error)
    try:
        call, scale = in_e4m3(q, k, v)
        error = relative_error(call(None)[:1].float() * scale, exact)
        us = timing.time_kernel(call, [None], device, cold=False, calls=20, repeats=10)
    except Exception as error_of_cudnn:  # cuDNN may not support a size
        return replace(row, status=documents.FAILED, reason=one_line(error_of_cudnn))
    return replace(row, fp8_us=us, fp8_error=error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 1 if every row failed, else 0."""
    parser = argparse.ArgumentParser(
        "python -m scripts.publish.fp8_attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    options = parser.parse_args(arguments)
    device = torch.device("cuda")
    rows: list[AttentionRow] = []
    with timing.global_switches() as switches:
        where = environment(device, switches)
    timing.spin_up(device)
    for each in LAYERS:
        rows.append(measured(each, device))
        print(rows[-1], flush=True)
        documents.write_json(options.json, documents.document(ATTENTION, where, {}, rows))
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
