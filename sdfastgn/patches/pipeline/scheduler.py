"""PNDM and DDIM schedulers that do not wait for the GPU to read which timestep it is.

A pipeline hands ``step`` an element of ``scheduler.timesteps``, which lies on the GPU. PNDM and DDIM
index a table on the CPU with it and ask whether the previous one is negative. So the host waits for the
UNet at every step, and the GPU then for the host. Here ``step`` gets the same number from a copy on the
CPU that ``set_timesteps`` makes. These two only index and compare with it, so the samples are the same
bits.

Schedulers that compute on the GPU with the timestep (LCM, TCD) would round differently and are left
alone; Euler and DPM++ wait once an image. Not seen: in-place writes to ``timesteps.data``, which nothing
counts.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch
from diffusers import DDIMScheduler, PNDMScheduler
from torch import Tensor

from sdfastgn.patches.core.tested_sources import tested
from sdfastgn.patches.pipeline.object_fusion import ObjectFusion

__all__ = ["FUSION"]

# Devices for whose kernels the host waits when it reads a number.
_WAITED_FOR = ("cuda",)


class _Copy(NamedTuple):
    """A scheduler's timesteps on the CPU, and what they were copied from."""

    on_host: Tensor
    table: Tensor
    version: int
    storage: torch.UntypedStorage  # held, so that no other gets its address


# By scheduler. In no __dict__: a deepcopy's tensors count their writes from zero.
_copies: weakref.WeakKeyDictionary[Any, _Copy] = weakref.WeakKeyDictionary()


def _copy_of(scheduler: Any, table: Any) -> Tensor | None:
    """The scheduler's timesteps ``table`` on the CPU, copied again if it changed. None if that is unknown."""
    if type(table) is not Tensor or table.device.type not in _WAITED_FOR or table.is_inference():
        return None
    if table.dim() != 1 or table.stride(0) != 1:
        return None
    version, storage = table._version, table.untyped_storage()
    known = _copies.get(scheduler)
    if known is not None:
        same = known.table is table and known.version == version
        if same and known.storage.data_ptr() == storage.data_ptr() and len(known.on_host) == len(table):
            return known.on_host
    on_host = table.to("cpu", copy=True)
    _copies[scheduler] = _Copy(on_host, table, version, storage)
    return on_host


def _on_host(scheduler: Any, timestep: Any) -> Any:
    """``timestep`` on the CPU if it is an element of ``scheduler.timesteps``, else itself."""
    if (
        type(timestep) is not Tensor
        or timestep.dim()
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
    ):
        return timestep
    table = scheduler.timesteps
    copy = _copy_of(scheduler, table)
    if copy is None or (timestep.dtype, timestep.device) != (table.dtype, table.device):
        return timestep
    index = timestep.storage_offset() - table.storage_offset()
    is_element = (
        timestep.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
        and 0 <= index < len(table)
    )
    return copy[index] if is_element else timestep


def _overrides(stock: Any) -> dict[str, Any]:
    @functools.wraps(stock.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "timestep" in kwargs:
            kwargs["timestep"] = _on_host(self, kwargs["timestep"])
        elif len(args) > 1:
            args = (args[0], _on_host(self, args[1]), *args[2:])
        return stock.step(self, *args, **kwargs)

    @functools.wraps(stock.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False):  # its tensors count how often they are written
            result = stock.set_timesteps(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            _copy_of(self, self.timesteps)  # it has just waited for the GPU anyway
        return result

    return {"step": step, "set_timesteps": set_timesteps}


FUSION = ObjectFusion(
    "host_timesteps",
    module=__name__,
    # What hands the timestep on, and what computes with it.
    sources=(
        tested(
            PNDMScheduler,
            set_timesteps="e8c82b59788d9130",
            step="391059072a888511",
            step_prk="756d88ea7a7d9da1",
            step_plms="be8431d0f51cf9de",
            _get_prev_sample="605cf3c2203d0359",
        ),
        tested(
            DDIMScheduler,
            set_timesteps="44e806504d93aecc",
            step="6943fa91a35dc5fe",
            _get_variance="11bc68662774a3fb",
        ),
    ),
    overrides=_overrides,
)
