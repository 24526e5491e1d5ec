"""Finds out whether an error of a launch means that Triton cannot compile or load a kernel.

If Triton can run no kernel on this machine, all kernels are turned off (``dispatch.turn_off``). If Triton
fails only for the launched kernel, the op that launched it turns its own kernels off
(``dispatch.turn_op_off``).
"""

from __future__ import annotations

import subprocess
import textwrap
from typing import Any

import torch

from sdfastgn.kernels.common import dispatch, gpu

# If the text of a RuntimeError contains one of these words, Triton can run no kernel: it finds no C compiler,
# ptxas, driver or folder for its cache; or the GPU or its driver refuses the code.
_OF_MACHINE = ("compiler", "ptxas", "active drivers", "cache dir", "kernel image", "PTX")
# The word in the text of a RuntimeError if a pass of Triton's compiler fails for one kernel. A RuntimeError
# with neither this word nor one of ``_OF_MACHINE`` is raised as usual, because an earlier kernel may have
# caused it.
_OF_KERNEL = "PassManager"
# Text of Triton's error if the GPU has no memory for a kernel's code.
_NO_MEMORY = "Triton Error [CUDA]: out of memory"
# Maximum length of an error's text in characters. The text is shown as one line of a report.
_MAX_TEXT = 300


def one_line(error: BaseException) -> str:
    """Format an exception as one line: its type, and the first line of its text that is not empty."""
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next(filter(None, lines), 'no message')}"[:_MAX_TEXT]


def check_gpu(device: torch.device) -> None:
    """Turn kernels off and raise ``KernelError`` if ``device`` is too old for them."""
    reason = gpu.unsupported(device)
    if reason is not None:
        raise dispatch.turn_off(reason)


def check_error(error: Exception, kernel: Any, device: torch.device) -> None:
    """Raise a clearer error in place of ``error``, which a launch of ``kernel`` has raised.

    Returns None if there is no clearer error. Then the caller raises ``error`` itself.

    Raises:
        KernelError: Triton cannot compile or load ``kernel`` here. If Triton can run no kernel at all, all
            kernels are turned off.
        torch.OutOfMemoryError: there is no memory for the kernel's code. A later call may succeed.
    """
    if _NO_MEMORY in str(error):
        forget(kernel, device)
        raise torch.OutOfMemoryError(f"sdfastgn: no memory for the code of a kernel: {error}") from error
    name = getattr(kernel, "__name__", "a kernel")
    # ``error_message`` is used if there is one, because ``str`` of a CompilationError begins with the
    # kernel's source.
    text = getattr(error, "error_message", None) or str(error)
    said = textwrap.shorten(f"{type(error).__name__}: {text}", _MAX_TEXT, placeholder=" ...")
    reason = f"Triton cannot compile {name} here ({said})"
    if _is_of_machine(error):
        raise dispatch.turn_off(reason) from error
    if _is_of_kernel(error):
        raise dispatch.KernelError(reason) from error


def forget(kernel: Any, device: torch.device) -> None:
    """Remove ``kernel`` from Triton's cache of loaded kernels, so that the next launch loads it again."""
    kernel.device_caches.pop(device.index, None)


def _is_of_machine(error: Exception) -> bool:
    if type(error) is RuntimeError:
        return any(word in str(error) for word in _OF_MACHINE)
    # Triton's compilation raises OSError for files of its cache, SubprocessError for a compiler that it runs,
    # and ImportError for a launcher that it has built.
    return isinstance(error, (OSError, subprocess.SubprocessError, ImportError))


def _is_of_kernel(error: Exception) -> bool:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    if type(error) is RuntimeError:
        return _OF_KERNEL in str(error)
    return isinstance(error, (CompilationError, OutOfResources, PTXASError))
