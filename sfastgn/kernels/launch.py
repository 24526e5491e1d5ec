"""Launch a compiled Triton kernel with little CPU time.

``kernel[grid](...)`` binds, specialises and hashes every argument at each call, which costs more CPU time than the small kernels of a
UNet take on the GPU. A ``Launch`` does that once and then calls the compiled kernel's own launcher. What Triton specialises on must
therefore be the same at each call of one ``Launch``: the dtypes of the tensors and which of them are None (the caller keeps one
``Launch`` per combination and device), and whether every pointer is a multiple of 16 (checked here; if not, Triton's own path runs).
Kernels exempt their run-time integers with ``do_not_specialize``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Launch", "device_guard"]

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Launch:
    """One kernel with a fixed one-dimensional grid, fixed constants and a fixed number of warps, on one device.

    Args:
        kernel: the ``@triton.jit`` function. Its parameters are tensors, then numbers, then constexpr.
        programs: number of programs, at least 1.
        constants: the constexpr parameters, in the order of the signature.
        num_warps: warps per program.
    """

    __slots__ = ("_compiled", "constants", "kernel", "num_warps", "programs")

    def __init__(self, kernel: Any, programs: int, constants: dict[str, Any], num_warps: int) -> None:
        self.kernel = kernel
        self.programs = programs
        self.constants = constants
        self.num_warps = num_warps
        self._compiled: Any = None

    def __call__(self, tensors: tuple[Tensor | None, ...], numbers: tuple[int | float, ...]) -> None:
        """Launch on the current stream of the current device, which must be that of the tensors."""
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        aligned = not any(p is not None and p & 15 for p in pointers)
        compiled = self._compiled
        if compiled is None or not aligned:
            compiled = self.kernel[(self.programs,)](*tensors, *numbers, **self.constants, num_warps=self.num_warps)
            if aligned and hasattr(compiled, "run"):  # the interpreter compiles nothing
                self._compiled = compiled
            return
        stream = _raw_stream(torch.cuda.current_device())
        compiled.run(
            self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *pointers, *numbers, *self.constants.values(),
        )  # fmt: skip


class device_guard:  # noqa: N801 - used like torch.cuda.device
    """``torch.cuda.device`` that costs next to nothing when the device is current already, as it nearly always is."""

    __slots__ = ("_guard",)

    def __init__(self, device: torch.device) -> None:
        current = device.type != "cuda" or device.index == torch.cuda.current_device()
        self._guard = None if current else torch.cuda.device(device)

    def __enter__(self) -> None:
        if self._guard is not None:
            self._guard.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self._guard is not None:
            self._guard.__exit__(*exc)
