"""Launch a compiled Triton kernel with little CPU time.

``kernel[grid](...)`` binds, specializes and hashes every argument at each call, which costs more
CPU time than the small kernels of a UNet take on the GPU. A ``Launch`` does that once and then
calls the compiled kernel's own launcher. What Triton specializes on must therefore be the same at
each call of one ``Launch``: the dtypes of the tensors and which of them are None (the caller keeps
one ``Launch`` per combination and device), and whether every pointer is a multiple of 16 (checked
here; if not, Triton's own path runs). Kernels exempt their run-time integers with
``do_not_specialize``.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import failures, gpu
from sdfastgn.kernels.common.compile_ahead import rehearsal

# Parameters of the launchers that are known: what they launch, and what they pass to hooks.
_LAUNCHED = ("self", "gridX", "gridY", "gridZ", "stream", "function")
_REPORTED = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")
# Warps of a program, at most: an AMD warp can have 64 threads, and a program 1024.
_MAX_WARPS = 32 if torch.version.hip is None else 16


class Launch:
    """One kernel on one device with everything fixed but its tensors: grid, numbers, constants, warps.

    Args:
        kernel: the ``@triton.jit`` function. Its parameters are pointers (``*_ptr``), then numbers, then
            constants (annotated ``tl.constexpr``).
        programs: number of programs, at least 1.
        num_warps: warps per program.
        pdl: programmatic dependent launch: may start before the kernel ahead of it in the stream
            has ended, and then must wait by itself (``gdc_wait``) before it touches what that one
            writes. Needs sm_90. A kernel's constant ``PDL`` says the same.
        arguments: the kernel's numbers and its other constants by name. Each call gives the tensors
            for its pointers, in the order of the signature.

    Raises:
        TypeError: a name is missing, or the kernel has none such.
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
        # The compiled kernel's launcher and what it takes. One attribute, so that another thread
        # that launches meanwhile finds both or neither.
        self._direct: tuple[Any, tuple[Any, ...]] | None = None

    def __call__(self, stream: int, *tensors: Tensor | None) -> None:
        """Launch on ``current_stream`` of the current device, which must be that of the tensors.

        Raises ``dispatch.KernelError`` where the kernel cannot be compiled.
        """
        pointers: list[int | None] = []
        bits = 0
        for t in tensors:  # one loop: every microsecond is one of each kernel of an eager step
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
            if aligned and hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
                self._direct = _direct_launcher(compiled)
            return
        run, bound = direct
        run(self.programs, 1, 1, stream, *bound, *pointers, *self._values)

    def _through_triton(self, tensors: tuple[Tensor | None, ...]) -> Any:
        """The compiled kernel, after a launch."""
        device = next(t.device for t in tensors if t is not None)
        if self._direct is None:
            failures.check_gpu(device)
        try:
            return self.kernel[(self.programs,)](*tensors, *self.numbers, **self.constants, **self.options)
        except Exception as error:
            failures.check_error(error, self.kernel, device)
            raise

    def run(self, first: Tensor, *others: Tensor | None) -> None:
        """Launch on the current stream of the device of ``first``, whichever device is current."""
        device = first.device
        if gpu.is_current(device):  # costs less than a context
            self(gpu.current_stream(device), first, *others)
        else:
            with torch.cuda.device(device):
                self(gpu.current_stream(device), first, *others)


@functools.cache
def _parameters_of(function: Any) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Names of a kernel's pointers, numbers and constants: ``("x_ptr", "y_ptr"), ("count",), ("BLOCK",)``"""
    parameters = inspect.signature(function).parameters
    pointers = tuple(name for name in parameters if name.endswith("_ptr"))
    constants = tuple(name for name, p in parameters.items() if p.annotation is not p.empty)
    numbers = tuple(name for name in parameters if name not in (*pointers, *constants))
    if (*pointers, *numbers, *constants) != tuple(parameters):
        raise TypeError(f"{function.__name__}: parameters must be pointers, then numbers, then constants")
    return pointers, numbers, constants


def _direct_launcher(compiled: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """A compiled kernel's launcher, and what it takes between the stream and the kernel's own arguments.

    None if this Triton's launcher is not one of those known here: Triton's own path then runs.
    """
    try:
        run = compiled.run
        bound = (compiled.function, compiled.packed_metadata, None, None, None)
        parameters = tuple(inspect.signature(type(run).__call__).parameters)
    except AttributeError:
        return None
    if parameters == (*_LAUNCHED, *_REPORTED, "args"):  # since Triton 3.7
        return run, bound
    if parameters != (*_LAUNCHED, "args"):  # up to Triton 3.6
        return None
    sizes = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if any(sizes) or not hasattr(run, "launch_pdl"):  # AMD's
        return run, bound
    # NVIDIA's: its Python part only looks for scratch memory, which these kernels do not have. Triton
    # 3.4 knows one kind of it.
    scratch = [None for size in sizes if size is not None]
    return run.launch, (compiled.function, run.launch_cooperative_grid, run.launch_pdl, *scratch, *bound[1:])
