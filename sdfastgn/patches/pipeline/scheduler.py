"""Makes the steps of schedulers not wait for the GPU: PNDM, DDIM, LCM, Euler, Euler a, DPM++ 2M and UniPC.

A pipeline calls ``step`` with a timestep: an element of ``scheduler.timesteps``, which is on the GPU.
diffusers' PNDM, DDIM and LCM use the timestep as an index into a table on the CPU, and the other schedulers
search for it among the timesteps. To read the timestep, the CPU waits until the UNet is done. Until the CPU
goes on, the GPU has no work.

Here ``set_timesteps`` keeps a copy of the timesteps on the CPU, and ``step`` reads the timestep from this
copy. LCM also computes with the timestep, and the CPU would round differently. So LCM computes with the
timestep on the GPU. All samples have the same bits as those of diffusers' own code. ``pinned_copies.py``
makes the copies to the GPU that are part of a step.

A write through ``timesteps.data`` is not noticed, because PyTorch does not count it. Dynamic thresholding
still waits for the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)
from torch import Tensor

from sdfastgn.patches.pipeline import pinned_copies
from sdfastgn.patches.pipeline.object_fusion import ObjectFusion
from sdfastgn.patches.pipeline.pinned_copies import PinnedCopies
from sdfastgn.patches.swap.tested_sources import tested

# Schedulers whose ``step`` uses the timestep as an index into a table.
_INDEX_WITH_IT = (PNDMScheduler, DDIMScheduler, LCMScheduler)


class _Copy(NamedTuple):
    """A copy of a scheduler's timesteps on the CPU.

    ``on_host``: the copy. ``table``: the scheduler's tensor on the GPU. ``version``: PyTorch's count of
    writes into ``table``, at the time when ``table`` was copied.
    """

    on_host: Tensor
    table: Tensor
    version: int
    # The storage of ``table``. This reference keeps it alive, so that no other storage gets its address.
    storage: torch.UntypedStorage


# Scheduler -> the copy of its timesteps. The copy is not in the scheduler's ``__dict__``, because a deepcopy
# of the scheduler would include it with a wrong ``version``: new tensors count their writes from zero.
_copies: weakref.WeakKeyDictionary[Any, _Copy] = weakref.WeakKeyDictionary()


def _copy_of(scheduler: Any, table: Any, on_host: Tensor | None = None) -> Tensor | None:
    """The copy of the scheduler's timesteps on the CPU. If the timesteps have changed, a new copy is made.

    Returns None if ``table`` is on the CPU, is not 1-d with stride 1, or is an inference tensor, whose writes
    PyTorch does not count.

    Args:
        scheduler: the scheduler.
        table: the scheduler's timesteps.
        on_host: the tensor on the CPU from which ``table`` was just copied; None if there is no such tensor.
    """
    if type(table) is not Tensor or table.device.type not in pinned_copies.WAITED_FOR or table.is_inference():
        return None
    if table.dim() != 1 or table.stride(0) != 1:
        return None
    version, storage = table._version, table.untyped_storage()
    known = _copies.get(scheduler)
    if known is not None:
        same = known.table is table and known.version == version
        if same and known.storage.data_ptr() == storage.data_ptr() and len(known.on_host) == len(table):
            return known.on_host
    if on_host is None:
        on_host = table.to("cpu", copy=True)
    _copies[scheduler] = _Copy(on_host, table, version, storage)
    return on_host


def _index(element: Any, table: Tensor) -> int | None:
    """The index i for which ``element`` is a 0-d tensor in the memory of ``table[i]``; None if there is none.

    ``table`` must have stride 1.
    """
    if type(element) is not Tensor or element.dim():
        return None
    if (element.dtype, element.device) != (table.dtype, table.device):
        return None
    if element.untyped_storage().data_ptr() != table.untyped_storage().data_ptr():
        return None
    index = int(element.storage_offset() - table.storage_offset())
    return index if 0 <= index < len(table) else None


def _on_host(scheduler: Any, timestep: Any) -> Any:
    """Returns ``timestep`` on the CPU if it is an element of ``scheduler.timesteps``, else ``timestep``."""
    table = scheduler.timesteps
    if type(timestep) is not Tensor or (copy := _copy_of(scheduler, table)) is None:
        return timestep
    index = _index(timestep, table)
    return timestep if index is None else copy[index]


def _on_device(scheduler: Any, timestep: Any) -> Any:
    """Returns ``timestep`` on the GPU if it is an element of the copy on the CPU, else ``timestep``."""
    known = _copies.get(scheduler)
    index = None if known is None else _index(timestep, known.on_host)
    return timestep if known is None or index is None else known.table[index]


@contextlib.contextmanager
def _timesteps_on_host(scheduler: Any) -> Iterator[None]:
    """A context in which ``scheduler.timesteps`` is the copy on the CPU.

    LCM's ``step`` reads the next timestep from ``scheduler.timesteps``. From the copy, it reads the timestep
    without waiting for the GPU.
    """
    table = scheduler.timesteps
    copy = _copy_of(scheduler, table)
    scheduler.timesteps = table if copy is None else copy
    try:
        yield
    finally:
        scheduler.timesteps = table


def _copies_to_it(stock: Any, generator: Any) -> bool:
    """True if a step copies tensors to the GPU: noise of a CPU generator, or sigmas (UniPC).

    ``stock``: the scheduler's class. ``generator``: the step's generator, a list of generators, or None.
    ``PinnedCopies`` itself takes time, so it is used only for such steps.
    """
    generators = generator if isinstance(generator, list) else [generator]
    on_host = any(isinstance(each, torch.Generator) and each.device.type == "cpu" for each in generators)
    return on_host or stock is UniPCMultistepScheduler


def _is_recorded() -> bool:
    """True while torch.compile or torch.jit.trace records the call.

    Then diffusers' code must run: with the code here, the timestep would be recorded as a constant.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _overrides(stock: Any) -> dict[str, Any]:
    @functools.wraps(stock.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_recorded():
            return stock.step(self, *args, **kwargs)
        if stock in _INDEX_WITH_IT:
            if "timestep" in kwargs:
                kwargs["timestep"] = _on_host(self, kwargs["timestep"])
            elif len(args) > 1:
                args = (args[0], _on_host(self, args[1]), *args[2:])
        with contextlib.ExitStack() as stack:
            if _copies_to_it(stock, kwargs.get("generator")):
                stack.enter_context(PinnedCopies())
            if stock is LCMScheduler:
                stack.enter_context(_timesteps_on_host(self))
            return stock.step(self, *args, **kwargs)

    @functools.wraps(stock.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_recorded():
            return stock.set_timesteps(self, *args, **kwargs)
        # Inference mode is off here, so that PyTorch counts writes into timesteps. The gradient mode stays.
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grad), PinnedCopies() as copies:
            result = stock.set_timesteps(self, *args, **kwargs)
        _copy_of(self, self.timesteps, copies.on_host(self.timesteps))
        return result

    overrides = {"step": step, "set_timesteps": set_timesteps}
    if stock is LCMScheduler:
        name = "get_scalings_for_boundary_condition_discrete"
        scalings = getattr(stock, name)

        @functools.wraps(scalings)
        def get_scalings(self: Any, timestep: Any) -> Any:
            return scalings(self, _on_device(self, timestep))

        overrides[name] = get_scalings
    elif stock not in _INDEX_WITH_IT:

        @functools.wraps(stock.index_for_timestep)
        def index_for_timestep(self: Any, timestep: Any, schedule_timesteps: Any = None) -> Any:
            if schedule_timesteps is None and not _is_recorded():
                on_host = _on_host(self, timestep)
                if on_host is not timestep:
                    timestep, schedule_timesteps = on_host, _copy_of(self, self.timesteps)
            return stock.index_for_timestep(self, timestep, schedule_timesteps)

        overrides["index_for_timestep"] = index_for_timestep
    return overrides


FUSION = ObjectFusion(
    "host_timesteps",
    module=__name__,
    # The fusion runs only with tested code of these methods: the methods that it replaces, and all others
    # that read the timestep or copy tensors to the GPU.
    sources=(
        tested(PNDMScheduler, "set_timesteps", "step", "step_prk", "step_plms", "_get_prev_sample"),
        tested(DDIMScheduler, "set_timesteps", "step", "_get_variance"),
        tested(
            LCMScheduler,
            "set_timesteps",
            "step",
            "index_for_timestep",
            "_init_step_index",
            "get_scalings_for_boundary_condition_discrete",
        ),
        tested(EulerDiscreteScheduler, "set_timesteps", "step", "index_for_timestep", "_init_step_index"),
        tested(
            EulerAncestralDiscreteScheduler, "set_timesteps", "step", "index_for_timestep", "_init_step_index"
        ),
        tested(
            DPMSolverMultistepScheduler, "set_timesteps", "step", "index_for_timestep", "_init_step_index"
        ),
        tested(
            UniPCMultistepScheduler,
            "set_timesteps",
            "step",
            "index_for_timestep",
            "_init_step_index",
            "multistep_uni_p_bh_update",
            "multistep_uni_c_bh_update",
        ),
    ),
    overrides=_overrides,
)
