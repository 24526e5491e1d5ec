"""Compiles a kernel for sm_90 without a GPU and exports it, or loads an archive and looks for the kernel.

A program of its own, because Triton decides at import whether kernels are interpreted.
Usage: ``python -m tests.kernels.export_one export FILE`` or ``import FILE``. Prints JSON.
"""

import json
import sys
from pathlib import Path
from unittest import mock

# First: it makes Triton compile.
from tests.kernels.compile_only import compiled  # isort: skip

import torch

from sdfastgn.kernels.common import archive, dispatch
from sdfastgn.kernels.geglu.op import geglu
from tests.kernels.launch_cases import launches


def main(what, path):
    dispatch.is_plain = dispatch.runs_in_triton = lambda x, *_: True
    torch.cuda.get_device_capability = lambda device: (9, 0)
    torch.cuda.get_device_name = lambda device: "a card"
    device = torch.device("cuda", 0)
    found = {}
    if what == "import":
        found["imported"] = archive.load(path, device)
    import triton

    misses = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: misses.append(not cache_hit)
    with mock.patch.dict(
        "tests.kernels.launch_cases.KINDS", one=lambda shape, dtype: geglu(torch.empty(shape, dtype=dtype))
    ):
        ((launch, tensors),) = launches((4, 32), torch.float16, "one")
    archive.note(compiled(launch, tensors, "sm_90"))
    found["compiled"] = sum(misses)
    if what == "export":
        found["exported"] = archive.export(path, device)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
