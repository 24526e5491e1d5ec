"""Runs stable-fast, a competitor, and prevents its side effects on other measurements."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def reason(device: torch.device) -> str | None:
    """Why stable-fast cannot run on ``device``; None if it can."""
    # This module is imported only here, because it imports torch. The command line's help imports the present
    # file, and must not wait for torch.
    from sdfastgn.bench.environment import cuda_package_reason

    # stable-fast's package sfast is not imported here: without its C++ extension the import raises an error.
    spec = importlib.util.find_spec("sfast")
    for folder in map(Path, spec.submodule_search_locations or () if spec else ()):
        if not any(path.suffix in (".so", ".pyd") for path in folder.glob("_C*")):
            return f"sfast is at {folder}, but its C++ extension sfast._C is not built"
    return cuda_package_reason("sfast", device, "stable-fast")


# Class of Triton -> stable-fast's replacement of the class's method ``run``, which launches a kernel. The
# import of stable-fast installs these replacements, which make all launches slower. So they are removed after
# stable-fast has run.
_wrapped: dict[type, Any] = {}


def _runners() -> dict[type, Any]:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    return {owner: vars(owner)["run"] for owner in (JITFunction, Autotuner)}


@contextlib.contextmanager
def launch_functions() -> Iterator[None]:
    """A context in which Triton launches kernels with sfast's (stable-fast's) methods.

    At its end Triton's own methods are back, so that other variants launch kernels at full speed.
    """
    stock = _runners()
    try:
        if not _wrapped:
            importlib.import_module("sfast.triton")
            _wrapped.update(_runners())
        for owner, run in _wrapped.items():
            owner.run = run  # type: ignore[attr-defined]
        yield
    finally:
        for owner, run in stock.items():
            owner.run = run  # type: ignore[attr-defined]


def compile_target(target: Any, part: str) -> None:
    """Compile a UNet, a VAE or a pipeline in place with stable-fast: with Triton and CUDA graphs."""
    compiler = importlib.import_module("sfast.compilers.diffusion_pipeline_compiler")
    config = compiler.CompilationConfig.Default()
    config.enable_xformers = False
    config.enable_triton = True
    config.enable_cuda_graph = True
    name = "compile" if part == "pipeline" else f"compile_{part}"
    getattr(compiler, name)(target, config)


def group_norm_silu() -> Callable[..., torch.Tensor]:
    """Returns stable-fast's Triton GroupNorm+SiLU, a function ``(x, num_groups, weight, bias, eps) -> y``."""
    with launch_functions():
        forward = importlib.import_module("sfast.triton.ops.group_norm").group_norm_silu_forward

    return lambda *arguments: forward(*arguments, output_mean=False, output_rstd=False)[0]
