"""Launch a compiled Triton kernel with little CPU time.

``kernel[grid](...)`` binds, specialises and hashes every argument at each call, which costs more CPU time than the small kernels of a
UNet take on the GPU. A ``Launch`` does that once and then calls the compiled kernel's own launcher. What Triton specialises on must
therefore be the same at each call of one ``Launch``: the dtypes of the tensors and which of them are None (the caller keeps one
``Launch`` per combination and device), and whether every pointer is a multiple of 16 (checked here; if not, Triton's own path runs).
Kernels exempt their run-time integers with ``do_not_specialize``.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = [
    "Launch",
    "current_stream",
    "has_programmatic_launch",
    "is_current",
    "num_sms",
    "on_device",
    "rehearse",
    "remember",
]


class Launch:
    """One kernel with everything fixed but its tensors: a one-dimensional grid, numbers, constants, warps, on one device.

    Args:
        kernel: the ``@triton.jit`` function. Its parameters are tensors, then numbers, then constexpr.
        programs: number of programs, at least 1.
        numbers: the run-time ints and floats, in the order of the signature.
        constants: the constexpr parameters, in the order of the signature.
        num_warps: warps per program.
        pdl: programmatic dependent launch: may start before the kernel ahead of it in the stream has ended, and then must wait by
            itself (``gdc_wait``) before it touches what that one writes. Needs sm_90.
    """

    __slots__ = ("_bound", "_run", "_values", "constants", "kernel", "numbers", "options", "programs")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
        num_warps: int,
        *,
        pdl: bool = False,
    ) -> None:
        self.kernel = kernel
        self.programs = programs
        self.numbers = numbers
        self.constants = constants
        self.options = {"num_warps": num_warps, **({"launch_pdl": True} if pdl else {})}
        self._values = (*numbers, *constants.values())
        self._run: Any = None

    def __call__(self, stream: int, *tensors: Tensor | None) -> None:
        """Launch on ``current_stream`` of the current device, which must be that of the tensors."""
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
        if self._run is None or not aligned:
            wanted = _wanted.get()
            if wanted is not None:
                if aligned:
                    wanted.append((self, tuple(None if t is None else t.dtype for t in tensors)))
                return
            compiled = self.kernel[(self.programs,)](
                *tensors, *self.numbers, **self.constants, **self.options
            )
            if aligned and hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
                self._run, self._bound = _direct_launcher(compiled)
            return
        self._run(self.programs, 1, 1, stream, *self._bound, *pointers, *self._values)

    def run(self, first: Tensor, *others: Tensor | None) -> None:
        """Launch on the current stream of the device of ``first``, whichever device is current."""
        device = first.device
        if is_current(device):  # costs less than a context
            self(current_stream(device), first, *others)
        else:
            with torch.cuda.device(device):
                self(current_stream(device), first, *others)


def _direct_launcher(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """The launcher of a compiled kernel and what it takes between the stream and the kernel's own arguments."""
    run = compiled.run
    bound = (compiled.function, compiled.packed_metadata, None, None, None)
    parameters = list(inspect.signature(type(run).__call__).parameters)
    if parameters == ["self", "gridX", "gridY", "gridZ", "stream", "function", "args"] and not (
        run.global_scratch_size or run.profile_scratch_size
    ):
        # Triton 3.6: the launcher's Python part only looks for scratch memory, which these kernels do not have.
        return run.launch, (bound[0], run.launch_cooperative_grid, run.launch_pdl, None, None, *bound[1:])
    return run, bound


_Wanted = list[tuple[Launch, tuple[torch.dtype | None, ...]]]
# Of the thread that rehearses: what it would have compiled.
_wanted: contextvars.ContextVar[_Wanted | None] = contextvars.ContextVar("sdfastgn_wanted", default=None)
# A compilation holds some 100 MB, and beyond a few the part that Python does under its lock decides.
_MAX_THREADS = 16


def rehearse(call: Callable[[], object], device: torch.device) -> None:
    """Run ``call`` without those kernels on ``device`` that are not compiled yet, and compile these, in threads beside each other.

    So what ``call`` computes is of no use. A kernel that cannot be compiled says so when it is launched.

    Raises whatever ``call`` raises.
    """
    wanted: _Wanted = []
    token = _wanted.set(wanted)
    try:
        call()
    finally:
        _wanted.reset(token)
    # Launches of many sizes share a compiled kernel.
    distinct = {
        (launch.kernel, dtypes, *launch.constants.values(), *launch.options.values()): (launch, dtypes)
        for launch, dtypes in wanted
    }.values()
    for launch, _ in distinct:  # made by the first who asks, and not twice by two threads
        launch.kernel.device_caches[device.index]
    pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "sdfastgn-compile")
    try:
        done = [pool.submit(_compile, launch, dtypes, device) for launch, dtypes in distinct]
        wait(done)
    finally:  # an interrupt waits for no more than what has begun
        pool.shutdown(cancel_futures=True)


def _compile(launch: Launch, dtypes: tuple[torch.dtype | None, ...], device: torch.device) -> None:
    with torch.cuda.device(device):  # each thread has a current one of its own
        # ``run``: the launcher, for which Triton 3.6 runs a C compiler, and the code on the device.
        _ = launch.kernel.warmup(
            *dtypes, *launch.numbers, grid=(1,), **launch.constants, **launch.options
        ).run


_REMEMBERED_MAX = 4096
Value = TypeVar("Value")


def remember(cache: dict[tuple[Any, ...], Value], key: tuple[Any, ...], value: Value) -> Value:
    """Puts ``value`` into ``cache`` and returns it. Bounded: a server that sees ever new shapes must not leak."""
    if len(cache) >= _REMEMBERED_MAX:
        cache.clear()
    cache[key] = value
    return value


def current_stream(device: torch.device) -> int:
    """Raw handle of PyTorch's current stream on ``device``; 0 on a CPU (the interpreter)."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def num_sms(device: torch.device) -> int:
    """Number of multiprocessors of ``device``."""
    # A nominal count in the interpreter, so that tests on the CPU take the same ways as a GPU does.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def has_programmatic_launch(device: torch.device) -> bool:
    """True if kernels on ``device`` can start while the one before them still runs: from sm_90 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def is_current(device: torch.device) -> bool:
    """True if kernels launched now run on ``device``; else the caller makes it current first. Costs less than making sure."""
    return device.type != "cuda" or device.index == torch._C._cuda_getDevice()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which kernels are launched on ``device``."""
    return contextlib.nullcontext() if is_current(device) else torch.cuda.device(device)
