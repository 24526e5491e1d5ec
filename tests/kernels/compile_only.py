"""Compiles the kernels for a GPU that need not be there: one JSON object a kernel with what it asks of it.

A program of its own, because Triton decides at import whether kernels are interpreted, and the
kernels for whose GPUs they are.
Usage: ``python -m tests.kernels.compile_only sm_90``, or ``gfx942`` for one of AMD's.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

os.environ.pop("TRITON_INTERPRET", None)

import torch

if sys.argv[-1].startswith("gfx"):
    torch.version.hip = "compiled for only"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.gpu import HAS_GDC
from tests.kernels.gpus import smallest
from tests.kernels.launch_cases import cases, launches

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# Numbers of the kernels that are floats; all others are integers.
FLOATS = {"branch_eps", "eps", "momentum", "scale"}


def _compiled_by(launch, tensors):
    """What decides the compiled code: two launches with the same share a kernel."""
    dtypes = tuple(None if t is None else t.dtype for t in tensors)
    return launch.kernel, dtypes, tuple(launch.constants.items()), tuple(launch.options.items())


def _target(generation):
    if generation.startswith("sm_"):
        return GPUTarget("cuda", int(generation.removeprefix("sm_")), 32)
    return GPUTarget("hip", generation, 64 if generation.startswith("gfx9") else 32)


def compiled(launch, tensors, generation):
    """What Triton makes of a launch. ptxas refuses instructions that the generation lacks."""
    names = launch.kernel.arg_names
    pointers = dict(zip(names, tensors, strict=False))
    constants = {**launch.constants, **{name: None for name, tensor in pointers.items() if tensor is None}}
    signature = {name: "fp32" if name in FLOATS else "i32" for name in names}
    signature |= {name: POINTERS[tensor.dtype] for name, tensor in pointers.items() if tensor is not None}
    signature |= dict.fromkeys(constants, "constexpr")
    # PyTorch's memory starts at multiples of 16 bytes; Triton specializes on that.
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")
    }
    source = ASTSource(
        launch.kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes
    )
    return triton.compile(source, target=_target(generation), options=launch.options)


def resources(kernel):
    """Threads, stack (where spilled registers go), shared memory and the widest load of a kernel, and how
    many loads are served by L1 before it waits for the kernel ahead of it.

    Shared memory, stack and load are in bytes.
    """
    if "amdgcn" in kernel.asm:
        code = kernel.asm["amdgcn"]
        (stack,) = map(int, re.findall(r"\.private_segment_fixed_size:\s*(\d+)", code))
        shared, early, widest = 0, [], 16 * bool(re.search(r"_load_(dwordx4|b128)\b", code))
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(kernel.asm["cubin"])
            cubin.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
            report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"STACK:(\d+) SHARED:(\d+)", report)
        if found is None:
            raise ValueError(f"no resource usage in {report!r}")
        stack, shared = map(int, found.groups())
        loads = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", kernel.asm["ptx"])
        widest = max((int(count or 1) * int(bits) // 8 for count, bits in loads), default=0)
        # In the whole code and in each of its branches.
        parts = [kernel.asm["ptx"], *re.split(r"\n\$\w+:", kernel.asm["ptx"])]
        ahead = [before for before, wait, _ in (p.partition("griddepcontrol.wait") for p in parts) if wait]
        early = re.findall(r"ld\.global(?!\.cg\b)", "".join(ahead))
    threads = kernel.metadata.num_warps * kernel.metadata.target.warp_size
    shared = max(shared, kernel.metadata.shared)
    return {
        "threads": threads, "stack": stack, "shared": shared, "widest_load": widest,
        "early_loads": len(early),
    }  # fmt: skip


def operation(launch, tensors):
    """The kernel's name, and for one of several uses which it is."""
    pointers = dict(zip(launch.kernel.arg_names, tensors, strict=False))
    found = [use for use in ("factors", "residual", "tail", "bias") if pointers.get(f"{use}_ptr") is not None]
    if launch.kernel.__name__ != "_statistics_kernel":
        found = [use for use in found if use == "residual"]
    use = {"factors": "blend", "residual": "add", "tail": "cat", "bias": "bias"}[found[0]] if found else ""
    if use and "statistics_ptr" in pointers and pointers["statistics_ptr"] is None:
        use += " alone"
    return launch.kernel.__name__ + (f"[{use}]" if use else "")


def main(generation):
    # As on such a GPU.
    dispatch.runs_in_triton = lambda x: True
    dispatch.has_kernels = lambda x: True
    dispatch.is_plain = lambda x, others: True
    is_hopper = HAS_GDC and generation.startswith("sm_") and int(generation.removeprefix("sm_")) >= 90
    gpu.has_programmatic_launch = lambda device: is_hopper
    gpu.num_sms = lambda device: smallest(generation).multiprocessors
    distinct = {}
    for shape, dtype, kind in cases(generation):
        use = f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')} {kind}"
        for launch, tensors in launches(shape, dtype, kind):
            # The tensors' dtypes are all that compiling needs; their memory is given back.
            bare = tuple(None if t is None else t.new_empty(0) for t in tensors)
            *_, uses = distinct.setdefault(_compiled_by(launch, bare), (launch, bare, []))
            uses.append(use)
    for launch, tensors, uses in distinct.values():
        found = resources(compiled(launch, tensors, generation))
        label = {"kernel": operation(launch, tensors), "uses": sorted(set(uses))}
        pdl = {"pdl": launch.constants["PDL"]} if "PDL" in launch.constants else {}
        print(json.dumps({**label, **found, **launch.options, **pdl}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
