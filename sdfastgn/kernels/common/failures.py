"""What keeps Triton from running kernels, told apart from bugs and from CUDA's own errors."""

from __future__ import annotations

import subprocess
import textwrap
from typing import Any

import torch

from sdfastgn.kernels.common import dispatch, gpu

# What a plain RuntimeError of Triton's says where it finds no C compiler, ptxas, driver or folder
# for its cache, where a pass of its compiler fails, and where the GPU or its driver refuses the
# code. Any other is left alone: what CUDA reports may be the fault of an earlier kernel.
_WORDS = ("compiler", "ptxas", "active drivers", "cache dir", "PassManager", "kernel image", "PTX")
_NO_MEMORY = "Triton Error [CUDA]: out of memory"
# Characters of what an error says: a reason is a line of a report.
_MAX_TEXT = 300


def one_line(error: BaseException) -> str:
    """An exception as one line: its type and the first line that says something."""
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next(filter(None, lines), 'no message')}"[:_MAX_TEXT]


def check_gpu(device: torch.device) -> None:
    """Turn kernels off and raise ``KernelError`` where ``device`` is too old for them."""
    reason = gpu.unsupported(device)
    if reason is not None:
        raise dispatch.turn_off(reason)


def check_error(error: Exception, kernel: Any, device: torch.device) -> None:
    """Return if ``error``, which a launch through Triton has raised, is about something else.

    Raises:
        KernelError: Triton cannot compile or load ``kernel`` here; kernels are turned off.
        torch.OutOfMemoryError: there is no memory for its code; another call may find some.
    """
    if _NO_MEMORY in str(error):
        forget(kernel, device)
        raise torch.OutOfMemoryError(f"sdfastgn: no memory for the code of a kernel: {error}") from error
    if _is_of_compiling(error):
        name = getattr(kernel, "__name__", "a kernel")
        # A CompilationError's text begins with the kernel's source.
        text = getattr(error, "error_message", None) or str(error)
        said = textwrap.shorten(f"{type(error).__name__}: {text}", _MAX_TEXT, placeholder=" ...")
        raise dispatch.turn_off(f"Triton cannot compile {name} here ({said})") from error


def forget(kernel: Any, device: torch.device) -> None:
    """Drop what Triton has compiled of ``kernel``: it takes one that could not be loaded for loaded."""
    kernel.device_caches.pop(device.index, None)


def _is_of_compiling(error: Exception) -> bool:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    if type(error) is RuntimeError:
        return any(word in str(error) for word in _WORDS)
    # Files of the cache, commands that fail, a compiled launcher that cannot be loaded.
    machine = (OSError, subprocess.SubprocessError, ImportError)
    return isinstance(error, (CompilationError, OutOfResources, PTXASError, *machine))
