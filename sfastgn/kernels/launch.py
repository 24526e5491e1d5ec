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

__all__ = ["Launch", "current_stream", "device_guard"]


class Launch:
    """One kernel with a fixed one-dimensional grid, fixed constants and a fixed number of warps, on one device.

    Args:
        kernel: the ``@triton.jit`` function. Its parameters are tensors, then numbers, then constexpr.
        programs: number of programs, at least 1.
        constants: the constexpr parameters, in the order of the signature.
        num_warps: warps per program.
    """

    __slots__ = ("_constants", "_function", "_metadata", "_run", "constants", "kernel", "num_warps", "programs")

    def __init__(self, kernel: Any, programs: int, constants: dict[str, Any], num_warps: int) -> None:
        self.kernel = kernel
        self.programs = programs
        self.constants = constants
        self.num_warps = num_warps
        self._constants = tuple(constants.values())
        self._run: Any = None

    def __call__(self, stream: int, tensors: tuple[Tensor | None, ...], numbers: tuple[int | float, ...]) -> None:
        """Launch on ``current_stream`` of the current device, which must be that of the tensors."""
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        bits = 0
        for pointer in pointers:
            bits |= pointer or 0
        aligned = bits & 15 == 0
        if self._run is None or not aligned:
            compiled = self.kernel[(self.programs,)](*tensors, *numbers, **self.constants, num_warps=self.num_warps)
            if aligned and hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
                self._function, self._metadata, self._run = compiled.function, compiled.packed_metadata, compiled.run
            return
        self._run(
            self.programs, 1, 1, stream, self._function, self._metadata, None, None, None, *pointers, *numbers, *self._constants
        )  # fmt: skip


def current_stream(device: torch.device) -> int:
    """Raw handle of PyTorch's current stream on ``device``; 0 on a CPU (the interpreter)."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


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
