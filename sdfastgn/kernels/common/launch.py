"""Launches a compiled Triton kernel with little CPU time.

``kernel[grid](...)`` binds, specializes and hashes every argument at each call. This takes longer than the
small kernels of a UNet run on the GPU. A ``Launch`` does this work only at its first call. Later calls go
directly to the compiled kernel's launcher.

Triton compiles a kernel again if a dtype is different, if a tensor is None that was not None before (or the
other way round), or if a pointer is not a multiple of 16. Therefore

- the caller makes one ``Launch`` for each combination of dtypes, device, and tensors that are None;
- each call checks that all pointers are multiples of 16. If one is not, the call uses ``kernel[grid](...)``.

Triton also compiles again for some values of integers. Kernels prevent that by ``do_not_specialize``.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import archive, failures, gpu
from sdfastgn.kernels.common.compile_ahead import rehearsal
from sdfastgn.kernels.common.observers import observe, observers

# Names of the first parameters of Triton's launchers, in all versions of Triton that this file can call.
_LAUNCHED = ("self", "gridX", "gridY", "gridZ", "stream", "function")
# Names of the parameters of Triton's launchers that follow ``_LAUNCHED``, since Triton 3.7.
_REPORTED = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")
# Maximum number of warps of a program, for 1024 threads. A warp has 32 threads, or 64 on AMD's GPUs.
_MAX_WARPS = 32 if torch.version.hip is None else 16


class Launch:
    """A kernel with a fixed device, grid, number of warps, numbers and constants. Calls pass the tensors.

    Args:
        kernel: the ``@triton.jit`` function. Its parameters are pointers (``*_ptr``), then numbers, then
            constants (annotated ``tl.constexpr``).
        programs: number of programs, at least 1.
        num_warps: warps per program.
        pdl: True to use programmatic dependent launch, which needs sm_90. Then the kernel may start while
            the previous kernel of the stream still runs, and must call ``gdc_wait`` before it accesses memory
            that the previous kernel writes. If the kernel has a constant ``PDL``, it gets this value.
        arguments: the kernel's numbers and its other constants by name.

    Raises:
        TypeError: a number or constant of the kernel is missing, or the kernel has no such name.
    """

    __slots__ = ("_direct", "_values", "constants", "kernel", "numbers", "options", "programs")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        num_warps: int,
        *,
        pdl: bool = False,
        **arguments: Any,
    ) -> None:
        self.kernel = kernel
        self.programs = programs
        _, numbers, constants = _parameters_of(kernel.fn)
        if "PDL" in constants:
            arguments["PDL"] = pdl
        expected = {*numbers, *constants}
        if arguments.keys() != expected:
            missing, unknown = sorted(expected - arguments.keys()), sorted(arguments.keys() - expected)
            raise TypeError(f"{kernel.fn.__name__}: missing {missing}, unknown {unknown}")
        self.numbers = tuple(arguments[name] for name in numbers)
        self.constants = {name: arguments[name] for name in constants}
        self.options = {"num_warps": min(num_warps, _MAX_WARPS), **({"launch_pdl": True} if pdl else {})}
        self._values = (*self.numbers, *self.constants.values())
        # (launcher of the compiled kernel, its arguments between the stream and the pointers); None before
        # the first call.
        # Both are in one tuple, so that another thread never sees a launcher without its arguments.
        self._direct: tuple[Any, tuple[Any, ...]] | None = None

    def __call__(self, stream: int, *tensors: Tensor | None) -> None:
        """Launch the kernel on the current device, which must be the device of the tensors.

        Args:
            stream: raw handle of the current stream of the tensors' device (``gpu.current_stream``).
            tensors: one tensor or None for each pointer, in the order of the kernel's parameters.

        Raises:
            KernelError: the kernel cannot be compiled or loaded, or the GPU is too old.
            torch.OutOfMemoryError: there is no memory for the kernel's code.
        """
        if observers and observe(self, stream, tensors):
            return
        pointers: list[int | None] = []
        bits = 0
        for t in tensors:  # one loop for pointers and alignment takes less CPU time than two
            if t is None:
                pointers.append(None)
            else:
                pointer = t.data_ptr()
                bits |= pointer
                pointers.append(pointer)
        aligned = bits & 15 == 0
        direct = self._direct
        if direct is None or not aligned:
            rehearsed = rehearsal.get()
            if rehearsed is not None:
                if aligned:
                    rehearsed.add(self, tuple(None if t is None else t.dtype for t in tensors))
                return
            compiled = self._through_triton(tensors)
            # Triton's interpreter returns no compiled kernel: all calls go through ``kernel[grid]``.
            if aligned and hasattr(compiled, "packed_metadata"):
                self._direct = _direct_launcher(compiled)
            return
        run, bound = direct
        run(self.programs, 1, 1, stream, *bound, *pointers, *self._values)

    def _through_triton(self, tensors: tuple[Tensor | None, ...]) -> Any:
        """Launch by ``kernel[grid]``, which compiles the kernel if needed. Returns the compiled kernel."""
        device = next(t.device for t in tensors if t is not None)
        if self._direct is None:
            failures.check_gpu(device)
            archive.add_archives(device)
        try:
            return self.kernel[(self.programs,)](*tensors, *self.numbers, **self.constants, **self.options)
        except Exception as error:
            failures.check_error(error, self.kernel, device)
            raise

    def direct(self) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]] | None:
        """Returns (launcher of the compiled kernel, arguments before the pointers, arguments after them).

        The first three arguments are the grid. The caller must insert the stream after the grid. All pointers
        must be multiples of 16. Returns None before the first launch, and if launches go through
        ``kernel[grid]``.
        """
        direct = self._direct
        if direct is None:
            return None
        launcher, bound = direct
        return launcher, (self.programs, 1, 1, *bound), self._values

    def run(self, first: Tensor, *others: Tensor | None) -> None:
        """Launch the kernel on the device of ``first``, current or not, in its current stream."""
        stream = gpu.stream_of(first)
        if stream is not None:  # the device is current, so the slow ``torch.cuda.device`` is not needed
            self(stream, first, *others)
        else:
            with torch.cuda.device(first.device):
                self.run(first, *others)


@functools.cache
def _parameters_of(function: Any) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Returns the names of a kernel's pointers, numbers and constants.

    For example ``("x_ptr", "y_ptr"), ("count",), ("BLOCK",)``.
    """
    parameters = inspect.signature(function).parameters
    pointers = tuple(name for name in parameters if name.endswith("_ptr"))
    constants = tuple(name for name, p in parameters.items() if p.annotation is not p.empty)
    numbers = tuple(name for name in parameters if name not in (*pointers, *constants))
    if (*pointers, *numbers, *constants) != tuple(parameters):
        raise TypeError(f"{function.__name__}: parameters must be pointers, then numbers, then constants")
    return pointers, numbers, constants


def _direct_launcher(compiled: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Returns (launcher, arguments) of a compiled kernel.

    A launch calls ``launcher(*grid, stream, *arguments, *the kernel's own arguments)``. Returns None if this
    file does not know the launcher of this version of Triton. Then ``kernel[grid]`` is used.
    """
    try:
        run = compiled.run
        bound = (compiled.function, compiled.packed_metadata, None, None, None)
        parameters = tuple(inspect.signature(type(run).__call__).parameters)
    except AttributeError:
        return None
    if parameters == (*_LAUNCHED, *_REPORTED, "args"):  # the launcher is from Triton 3.7 or later
        return run, bound
    if parameters != (*_LAUNCHED, "args"):  # the launcher is from an unknown version of Triton
        return None
    sizes = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    # Kernels with scratch memory, and all kernels on AMD's GPUs, need the launcher's Python function.
    if any(sizes) or not hasattr(run, "launch_pdl"):
        return run, bound
    # The launcher for NVIDIA's GPUs is a Python function that allocates scratch memory and calls a C
    # function. This kernel needs no scratch memory, so the C function is called directly. It takes one
    # argument for each kind of scratch memory: Triton 3.4 has one kind, later versions have two.
    scratch = [None for size in sizes if size is not None]
    return run.launch, (compiled.function, run.launch_cooperative_grid, run.launch_pdl, *scratch, *bound[1:])
