"""Compiles a kernel for sm_90 without a GPU and exports it, or loads an archive and looks for the kernel.

A program of its own, because Triton decides at import whether kernels are interpreted. Prints JSON.
Usage: ``python -m tests.kernels.export_one export FILE``, or ``find``, which takes the archive of the
package, in several threads. With ``TRITON_BUILD`` it has a Triton that was built for another Python.
"""

import json
import os
import sys
import threading
import warnings
from pathlib import Path
from unittest import mock

import torch
import triton

from scripts.build_compiled import CompilerDriver
from sdfastgn.kernels.common import archive, dispatch
from sdfastgn.kernels.geglu.op import geglu
from tests.kernels.launch_cases import launches


def main(what, *path):
    capability = (9, 0)
    dispatch.is_plain = dispatch.runs_in_triton = lambda x, *_: True
    torch.cuda.get_device_capability = lambda device: capability
    triton.runtime.driver.set_active(CompilerDriver("sm_90"))
    if "TRITON_BUILD" in os.environ:
        triton.runtime.cache.triton_key = lambda: os.environ["TRITON_BUILD"]
    device = torch.device("cuda", 0)
    found = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if what == "find":
            threads = [threading.Thread(target=archive.add_archives, args=(device,)) for _ in range(4)]
            for step in (threading.Thread.start, threading.Thread.join):
                for thread in threads:
                    step(thread)
            found["state"] = archive.state(device)
    found["warnings"] = [str(w.message) for w in caught]
    misses = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: misses.append(not cache_hit)
    with mock.patch.dict(
        "tests.kernels.launch_cases.KINDS", one=lambda shape, dtype: geglu(torch.empty(shape, dtype=dtype))
    ):
        ((launch, tensors),) = launches((4, 32), torch.float16, "one")
    dtypes = [None if t is None else t.dtype for t in tensors]
    with archive.recording() as recorded:
        launch.kernel.warmup(*dtypes, *launch.numbers, grid=(1,), **launch.constants, **launch.options)
    found["compiled"] = sum(misses)
    if what == "export":
        found["exported"] = archive.export(Path(*path), capability, recorded)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
