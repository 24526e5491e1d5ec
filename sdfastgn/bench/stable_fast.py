"""The peer stable-fast: where it is, and how to run its compiler and its kernel without side effects on others."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def find() -> Path | None:
    """The folder of an importable ``sfast`` package, found without importing it; None where there is none."""
    spec = importlib.util.find_spec("sfast")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


def has_extension(folder: Path) -> bool:
    """Whether the C++ extension is built. Importing sfast without it fails, and says so on standard output."""
    return any(path.suffix in (".so", ".pyd") for path in folder.glob("_C*"))


def reason(device: torch.device) -> str | None:
    """Why stable-fast cannot compile a model here; None where it can."""
    folder = find()
    if folder is None:
        return "package sfast (stable-fast) is not installed"
    if not has_extension(folder):
        return f"sfast is at {folder}, but its C++ extension sfast._C is not built"
    return None if device.type == "cuda" else f"stable-fast needs CUDA; the device is {device}"


def kernel_reason(device: torch.device) -> str | None:
    """Why stable-fast's Triton kernel cannot run here; None where it can. The kernel does without the C++ extension."""
    if find() is None:
        return "package sfast (stable-fast) is not installed"
    if importlib.util.find_spec("triton") is None:
        return "stable-fast's kernel needs triton; it is not installed"
    return None if device.type == "cuda" else f"stable-fast's kernel needs CUDA; the device is {device}"


# sfast wraps triton's launch functions at import, for the whole process, which would slow everyone's launches down.
_wrapped: dict[type, Any] = {}


def _runners() -> dict[type, Any]:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    return {owner: vars(owner)["run"] for owner in (JITFunction, Autotuner)}


def _set_runners(runners: dict[type, Any]) -> None:
    for owner, run in runners.items():
        # mypy: `type` has no attribute run.
        owner.run = run  # type: ignore[attr-defined]


@contextlib.contextmanager
def launch_functions() -> Iterator[None]:
    """Triton's launch functions as sfast wraps them, inside the body only."""
    stock = _runners()
    try:
        if _wrapped:
            _set_runners(_wrapped)
        else:
            importlib.import_module("sfast.triton")
            _wrapped.update(_runners())
        yield
    finally:
        _set_runners(stock)


def compile_target(target: Any, part: str) -> None:
    """stable-fast's public compiler on a UNet, a VAE or a pipeline, in place, with its fastest documented settings."""
    compiler = importlib.import_module("sfast.compilers.diffusion_pipeline_compiler")
    config = compiler.CompilationConfig.Default()
    config.enable_xformers = False
    config.enable_triton = True
    config.enable_cuda_graph = True
    {"unet": compiler.compile_unet, "vae": compiler.compile_vae, "pipeline": compiler.compile}[part](
        target, config
    )


def _do_nothing(*args: Any) -> None:
    pass


def group_norm_silu() -> Callable[..., torch.Tensor]:
    """stable-fast's Triton GroupNorm+SiLU: ``(x, num_groups, weight, bias, eps) -> y``.

    Where the C++ extension is not built, an empty stand-in satisfies the package's import: the kernel uses none of it.
    """
    folder = find()
    if folder is not None and "sfast" not in sys.modules and not has_extension(folder):
        stand_in = types.ModuleType("sfast._C")
        vars(stand_in)["_jit_register_custom_python_operator"] = _do_nothing
        sys.modules["sfast._C"] = stand_in
    with launch_functions():
        forward = importlib.import_module("sfast.triton.ops.group_norm").group_norm_silu_forward

    def call(
        x: torch.Tensor, num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return forward(x, num_groups, weight, bias, eps, output_mean=False, output_rstd=False)[0]

    return call
