"""One call as on a GPU whose machine may lack something: Triton compiles for it, and the kernel is not run.

A program of its own, because Triton decides at import whether kernels are interpreted. Prints JSON:
the warnings, whether the result is right, and the hash of what was compiled.
Usage: ``one_call.py kernel`` or ``one_call.py launcher``, the C code for which Triton 3.6 needs a compiler;
``one_call.py gpu`` runs it on a GPU.
"""

import json
import sys
import warnings

# First: it makes Triton compile.
from tests.kernels.compile_only import compiled  # isort: skip

import torch
import triton
from torch import Tensor
from triton.runtime.build import compile_module_from_src

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.geglu.op import geglu, reference_geglu


def main(what):
    hashes = []

    def run(kernel, *args, grid, warmup, num_warps, **constants):
        if what == "launcher":
            compile_module_from_src("int launch(void) { return 0; }", "launcher")
        tensors = tuple(t for t in args if t is None or isinstance(t, Tensor))
        numbers = dict(zip(kernel.arg_names[len(tensors) :], args[len(tensors) :], strict=False))
        pdl = constants.pop("PDL")
        launch = Launch(kernel, *grid, num_warps, pdl=pdl, **numbers, **constants)
        hashes.append(compiled(launch, tensors, "sm_90").hash)

    x = torch.randn(3, 16, device="cuda" if what == "gpu" else "cpu")
    if what != "gpu":
        triton.JITFunction.run = run
        dispatch.is_plain = dispatch.runs_in_triton = lambda x, *_: dispatch.is_on()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = [geglu(x) for _ in range(2)]
    right = all(torch.equal(y, reference_geglu(x)) for y in found)
    texts = [str(w.message) for w in seen]  # Triton 3.9 has one of its own
    print(
        json.dumps(
            {"warnings": [text for text in texts if "sdfastgn" in text], "right": right, "hashes": hashes}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
