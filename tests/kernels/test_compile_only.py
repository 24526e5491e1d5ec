"""Every kernel compiles for every supported GPU, without one, fits, and keeps its tile in registers."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sdfastgn.kernels.common import launch
from sdfastgn.kernels.common.gpu import HAS_GDC
from tests.kernels.gpus import SHARED_KIB
from tests.kernels.launch_cases import WITH_E4M3

ROOT = Path(__file__).parents[2]
KERNELS = Path(launch.__file__).parents[1]
# Bytes. ptxas moves up to eight registers of the concatenation to the stack on sm_86 and sm_89,
# whose multiprocessors hold 1536 threads. A tile that does not fit, or lies the wrong way round,
# spills hundreds of bytes.
MAX_STACK = 32
# channels_kernel is BatchNorm in one launch with 1024 threads: spilling costs less than reading x twice.
# add_low_rank_kernel keeps the operands of products in registers on Turing, and spills some. On RDNA 3 it
# spills most operands of fp32. It runs only when an adapter changes, so this costs little.
MAX_STACK_OF = {"channels_kernel": 160, "add_low_rank_kernel": 192}
MAX_STACK_ON_RDNA_3 = {**MAX_STACK_OF, "add_low_rank_kernel": 2560}
# Threads of a program on every GPU.
MAX_THREADS = 1024
# Bytes. A scalar a warp, and what the compiler reserves. A row of channels a warp made the three
# launches up to 2.7 times as slow.
MAX_SHARED_OF_A_MERGE = 1024
# Kernels whose threads need only their own elements and the sum of a row. Parameters that were broadcast to
# the tile sent it through shared memory, which tripled the instructions.
ROWS_OF_CHANNELS = {"_frames_kernel", "_channel_norm_kernel"}
# Bytes: a sum for each warp, where warps share a row.
MAX_SHARED_OF_ROWS = 64
# Bytes. The counts of values beyond the range of E4M3, and what the compiler reserves. Threads that store 16
# bytes of E4M3 would get half of them from other threads, through shared memory.
MAX_SHARED_OF_E4M3 = 1024
# Kernels that stream whole rows: they loaded element by element where the compiler was not told
# that rows begin at multiples of 16 bytes.
STREAMING = {
    *("_statistics_kernel", "apply_kernel", "sums_kernel", "apply_grad_kernel", "walk_grad_kernel"),
    *("batch_apply_kernel", "batch_apply_grad_kernel"),
}
# Ends of shapes that have no wide loads: two positions a lane, and 30 channels.
NARROW = ("x8x8", "x30x2x17x19")
# Kernels that run too rarely for programmatic dependent launch, or with models that are too small for it.
WITHOUT_PDL = {"add_low_rank_kernel", "checksum_kernel", "fold_kernel"}
# What one kernel does beside its plain use.
USES = {
    *(f"_statistics_kernel[{use}]" for use in ("add", "cat", "bias", "blend")),
    *(f"_statistics_kernel[{use} alone]" for use in ("add", "cat", "bias")),
    *(f"{name}[add]" for name in ("_rows_kernel", "_chunk_kernel")),
}


def kernels(generation):
    """Names of the ``@triton.jit`` functions that are launched on such a GPU."""
    found = {
        node.name
        for path in KERNELS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
    }
    is_amd = generation.startswith("gfx")
    few_keys = (
        {"_short_attention_kernel", "_frames_attention_kernel"} if is_amd or generation == "sm_75" else set()
    )
    wide_heads = {"_softmax_kernel", "_divide_kernel"} if is_amd else set()
    e4m3 = set() if generation in WITH_E4M3 else {"_quantize_rows_kernel"}
    return found - few_keys - wide_heads - e4m3


@pytest.mark.every_gpu
@pytest.mark.timeout(3600)  # some twenty times what it takes on an idle core
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
# The longest first: two workers then end at about the same time.
@pytest.mark.parametrize("generation", sorted(SHARED_KIB, key=["sm_75", "sm_90"].__contains__, reverse=True))
def test_kernels_compile_fit_and_do_not_spill(generation):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_only", generation]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    compiled = {row["kernel"] for row in rows}
    assert {name.partition("[")[0] for name in compiled} == kernels(generation)
    assert compiled >= USES
    # Programmatic dependent launch is an instruction that older GPUs and AMD's do not have.
    is_hopper = HAS_GDC and generation in ("sm_90", "sm_100", "sm_120")
    dependent = [row for row in rows if row["kernel"] not in WITHOUT_PDL]
    assert {row["pdl"] for row in dependent} == {is_hopper}
    assert {row.get("launch_pdl", False) for row in dependent} == {is_hopper}
    # Before a kernel's own wait L1 may hold what was there before (ADR 7).
    assert not [row for row in rows if row["early_loads"]]
    larger = MAX_STACK_ON_RDNA_3 if generation == "gfx1100" else MAX_STACK_OF
    most = [larger.get(row["kernel"].partition("[")[0], MAX_STACK) for row in rows]
    assert not [row for row, stack in zip(rows, most, strict=True) if row["stack"] > stack]
    assert not [row for row in rows if row["threads"] > MAX_THREADS]
    assert not [row for row in rows if row["shared"] > 1024 * SHARED_KIB[generation]]
    merges = [
        row for row in rows if row["kernel"] == "merge_kernel" and "one_channel" not in str(row["uses"])
    ]
    assert not [row for row in merges if row["shared"] > MAX_SHARED_OF_A_MERGE]
    rows_of_channels = [row for row in rows if row["kernel"] in ROWS_OF_CHANNELS]
    assert {row["kernel"] for row in rows_of_channels} == ROWS_OF_CHANNELS
    assert not [row for row in rows_of_channels if row["shared"] > MAX_SHARED_OF_ROWS]
    e4m3 = [row for row in rows if row["kernel"] != "_chunk_kernel" and "e4m3" in str(row["uses"])]
    assert bool(e4m3) == (generation in WITH_E4M3)
    assert not [row for row in e4m3 if row["shared"] > MAX_SHARED_OF_E4M3]
    streaming = [row for row in rows if row["kernel"].partition("[")[0] in STREAMING]
    larger = [row for row in streaming if not all(use.split()[0].endswith(NARROW) for use in row["uses"])]
    assert larger
    assert not [row for row in larger if row["widest_load"] < 16]


def test_the_page_of_gpus_lists_what_is_compiled():
    page = (ROOT / "docs" / "gpus.md").read_text()
    listed = re.findall(r"^\| (\w+) \| .*? \| (\d+) KiB \|", page, re.MULTILINE)
    assert {name: int(kib) for name, kib in listed} == SHARED_KIB
