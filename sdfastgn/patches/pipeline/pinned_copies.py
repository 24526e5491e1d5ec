"""Copies small tensors of diffusers' schedulers to the GPU, without making the CPU wait for the GPU.

Schedulers of diffusers copy noise from a CPU generator (Euler a, LCM) and sigmas (UniPC) out of pageable
memory. For such a copy the CPU waits until the GPU has finished its earlier work, which is the UNet. For a
copy out of pinned memory the CPU does not wait: the GPU makes the copy once its earlier work is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Types of device for which the CPU waits when it reads from the device or copies pageable memory to it.
WAITED_FOR = ("cuda",)


class PinnedCopies(TorchFunctionMode):
    """A mode in which ``Tensor.to`` and ``torch.tensor`` copy to the GPU through pinned memory.

    ``to("cpu")`` of a tensor that was copied in this way does not wait either: it clones the pinned tensor.
    ``torch.linalg.solve`` on the GPU does not check whether a solution exists, because the CPU would wait for
    the result of the check. If no solution exists, the result has infinities or NaN.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # id of a copy on the GPU -> (copy, pinned tensor)

    def on_host(self, copy: Any) -> Tensor | None:
        """The pinned tensor from which this mode made ``copy``; None if other code made ``copy``."""
        known = self._known.get(id(copy))
        return None if known is None else known[1]

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to:
            return self._moved(*args, **kwargs)
        if func is torch.tensor and "device" in kwargs:
            device = kwargs.pop("device")
            return self._moved(torch.tensor(*args, **kwargs), device=device)
        if func is torch.linalg.solve and args and args[0].device.type in WAITED_FOR:
            return torch.linalg.solve_ex(*args, **kwargs).result
        return func(*args, **kwargs)

    def _moved(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        known = self.on_host(tensor)
        if known is not None and args == ("cpu",) and not kwargs:
            return known.clone()
        device = kwargs.get("device", args[0] if args else None)
        goes_there = isinstance(device, str | torch.device) and torch.device(device).type in WAITED_FOR
        if not goes_there or tensor.device.type != "cpu":
            return tensor.to(*args, **kwargs)
        pinned: Any = _pinned(tensor.to(kwargs.pop("dtype", tensor.dtype)))
        copy = pinned.to(*args, **kwargs, non_blocking=True)
        self._known[id(copy)] = (copy, pinned)
        return copy


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory()
