"""Every kernel compiles for every supported GPU, without one, and keeps its tile in registers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_only.py")
# ptxas moves up to eight registers of the concatenation to the stack on sm_86 and sm_89, whose multiprocessors hold 1536 threads. A tile
# that does not fit, or lies the wrong way round, spills hundreds of bytes.
MAX_STACK_BYTES = 32
MAX_REGISTERS = 255
KERNELS = {
    "small_kernel", "channels_kernel", "merge_kernel", "apply_kernel",
    "_statistics_kernel", "_statistics_kernel[add]", "_statistics_kernel[cat]",
    "_statistics_kernel[bias]", "_statistics_kernel[add alone]", "_statistics_kernel[cat alone]",
    "small_grad_kernel", "sums_kernel", "merge_sums_kernel", "apply_grad_kernel", "parameter_grad_kernel",
    "_rows_kernel", "_rows_kernel[add]", "_chunk_kernel", "_chunk_kernel[add]", "_merge_chunks_kernel", "_normalise_kernel",
    "_rows_grad_kernel", "_chunk_sums_kernel", "_chunk_grad_kernel", "_column_sum_kernel",
    "_act_linear_kernel", "_geglu_kernel", "_geglu_grad_kernel", "_bias_sum_kernel",
    "_upsample_kernel", "_upsample_grad_kernel", "_phase_weights_kernel", "_interleave_kernel", "_interleave_statistics_kernel",
    "_softmax_kernel", "_divide_kernel",
}  # fmt: skip
SINCE_AMPERE = {"_short_attention_kernel"}
ON_HOPPER = {"walk_grad_kernel"}  # compiled for one capability: its shapes are large


@pytest.mark.every_gpu
@pytest.mark.timeout(3600)  # some twenty times what it takes on an idle core
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120], ids=lambda c: f"sm_{c}")
def test_kernels_compile_and_do_not_spill(capability):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in rows} == (
        KERNELS | (SINCE_AMPERE if capability >= 80 else set()) | (ON_HOPPER if capability == 90 else set())
    )
    # Programmatic dependent launch is an instruction that older GPUs do not have.
    assert (
        {row["pdl"] for row in rows} == {row.get("launch_pdl", False) for row in rows} == {capability >= 90}
    )
    # A scalar a warp, and what the compiler reserves. A row of channels a warp made the three launches up to 2.7 times as slow.
    merges = [row for row in rows if row["kernel"] == "merge_kernel" and row["layout"] != "one_channel"]
    assert all(row["shared"] <= 1024 for row in merges)
    # Channels-first kernels loaded element by element where the compiler was not told that rows begin at multiples of 16 bytes.
    streaming = {"_statistics_kernel", "apply_kernel", "sums_kernel", "apply_grad_kernel", "walk_grad_kernel"}
    narrow = [
        row
        for row in rows
        if row["kernel"].partition("[")[0] in streaming and row["widest_load"] < 16
        and not row["shape"].endswith("8x8")  # two positions a lane
    ]  # fmt: skip
    assert not narrow, "\n".join(map(str, narrow))
    spilling = [row for row in rows if row["stack"] > MAX_STACK_BYTES or row["registers"] > MAX_REGISTERS]
    assert not spilling, "\n".join(map(str, spilling))
