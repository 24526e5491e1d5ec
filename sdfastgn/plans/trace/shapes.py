"""Finds the metadata of the results of ops: shapes, strides, dtypes and devices.

A trace needs it, because its tensors have no memory and ops do not really run. Metadata of results depends on
the op, on metadata of the op's tensors, on its other arguments and on a few settings of PyTorch. For each
such combination, PyTorch computes it once in a process, with meta tensors or fake tensors. Then it is in a
table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import private
from sdfastgn.plans.trace.refusals import refuse
from sdfastgn.plans.trace.tensors import Metadata, TracedTensor, forget_metadata, metadata, metadata_of

aten = torch.ops.aten
# Maximum number of entries of the table of metadata. If it has more, it is emptied. A model needs about 100
# to 400 entries for each image size.
_MOST = 100_000
_table: dict[Any, Any] = {}
# For these ops, and for views, results have the same strides on the device "meta" as on every other device.
# Computing metadata with meta tensors takes a tenth of the time that fake tensors take.
_SAME_ON_META = {
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.sub.Tensor,
    aten.div.Tensor,
    aten.silu.default,
    aten.gelu.default,
    aten.cat.default,
    aten.clone.default,
    aten.linear.default,
    aten.layer_norm.default,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._unsafe_view.default,
    aten.group_norm.default,
}
# If the name of an op begins with one of these texts, the strides of its results count as guesses: they
# depend on the backend, or fake tensors may give other strides than the device. Strides of ops from other
# packages than PyTorch count as guesses too. For all other ops, strides are certain.
_GUESSED = (
    "_fft_", "_linalg_", "adaptive_", "avg_pool", "batch_norm", "cudnn_batch_norm", "fft_", "grid_sampler",
    "index", "instance_norm", "linalg_", "max_pool", "miopen_batch_norm", "native_batch_norm",
    "reflection_pad", "replication_pad", "roll", "scaled_dot_product_attention", "upsample_",
)  # fmt: skip
# The results of these ops are contiguous, whatever strides their arguments have.
_CONTIGUOUS = {
    aten.linear.default,
    aten.layer_norm.default,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
}
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def is_guess(op: Any, args: Any, kwargs: Any) -> bool:
    """True if the results of ``op`` may have other strides on the device than this file finds."""
    if op in _CONTIGUOUS or kwargs.get("memory_format") in _FORMATS:
        return False
    tensors = _tensors((*args, *kwargs.values()))
    return _is_guessed(op) or any(
        type(t) is TracedTensor and t.memory is not None and t.memory.is_guess for t in tensors
    )


@functools.cache
def _is_guessed(op: Any) -> bool:
    schema = private.schema_of(op)
    namespace, _, name = schema.name.partition("::")
    return namespace != "aten" or name.startswith(_GUESSED)


def _tensors(args: Any) -> Iterator[Tensor]:
    for a in args:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, list | tuple):
            yield from _tensors(a)


def surroundings() -> tuple[Any, ...]:
    """Returns the settings of PyTorch on which the metadata of results depends.

    Which backends of attention are allowed counts, because each has its own strides.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    switches = tuple(switch() for switch in private.switches)
    return torch.get_default_dtype(), device, switches, tuple(private.sdp_priority_order())


class Inference:
    """Finds the metadata of the results of ops. ``known``: returns the metadata of an argument of an op."""

    def __init__(self, known: Callable[[Tensor], Metadata]) -> None:
        self.known = known
        self.fake: Any = None

    def __call__(self, op: Any, key: list[Any], args: Any, kwargs: Any, *, is_view: bool = False) -> Any:
        """Returns the metadata of the result of ``op``, or a tuple of it if there are several results.

        ``key``: describes the op, its arguments and the settings, for the table. Raises what the op would
        raise for wrong arguments.
        """
        at = tuple(key)
        found = _table.get(at)
        if found is None:
            devices = {m.device for m in key if type(m) is Metadata}
            device = devices.pop() if len(devices) == 1 else None
            if device is not None and (is_view or _is_as_on_meta(op, device)):
                out = op(
                    *self._on_meta(args), **dict(zip(kwargs, self._on_meta(kwargs.values()), strict=True))
                )
                if op is aten.group_norm.default and device.type == "cpu":
                    # On the CPU a GroupNorm keeps the memory format. On other devices the result is
                    # contiguous, as on the device "meta".
                    x = args[0]
                    out = torch.empty_like(out, memory_format=private.suggest_memory_format(x))
                found = _described(op, out, device)
            else:
                found = _described(op, self._faked(op, args, kwargs), None)
            if len(_table) > _MOST:
                _table.clear()
                forget_metadata()
            _table[at] = found
        return found

    def _faked(self, op: Any, args: Any, kwargs: Any) -> Any:
        if self.fake is None:
            self.fake = private.fake_tensor_mode()
        with self.fake:
            a, k = self._like(args, None), dict(zip(kwargs, self._like(kwargs.values(), None), strict=True))
            try:
                # Attention chooses its backend, and so its strides, in code above the ops that fake tensors
                # see. So that code must run too.
                return private.run_composite(op, a, k) if private.is_composite(op) else op(*a, **k)
            except NotImplementedError as error:
                refuse(f"PyTorch does not know the shape of the result of {op}: {str(error)[:200]}")
            except RuntimeError as error:
                if private.is_of_fake_tensors(error):
                    refuse(f"the shape of the result of {op} depends on the values of a tensor")
                raise

    def _on_meta(self, args: Any) -> list[Any]:
        return self._like(args, "meta")

    def _like(self, args: Any, device: str | None) -> list[Any]:
        """Replaces the tensors in ``args`` by empty ones with equal metadata."""
        made: list[Any] = []
        for a in args:
            if isinstance(a, Tensor):
                m = self.known(a)
                made.append(torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device=device or m.device))
            else:
                made.append(self._like(a, device) if isinstance(a, list | tuple) else a)
        return made


def _is_as_on_meta(op: Any, device: torch.device) -> bool:
    return device.type == "meta" or op in _SAME_ON_META


def _described(op: Any, out: Any, device: torch.device | None) -> Any:
    if isinstance(out, Tensor):
        return metadata(out.shape, out.stride(), out.dtype, device) if device else metadata_of(out)
    if isinstance(out, list | tuple) and all(t is None or isinstance(t, Tensor) for t in out):
        return tuple(None if t is None else _described(op, t, device) for t in out)
    return refuse(f"{op} returns a {type(out).__name__}")
