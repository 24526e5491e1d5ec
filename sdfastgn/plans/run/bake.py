"""``Baked``: a plan as straight-line Python, with fixed grids, strides and addresses of weights.

The first call runs the plan node by node, and records what it executes (``record.py``). Later calls run the
function that ``source.py`` makes of the recording. It gives the same bits as the plan in less CPU time.

Each call compares the addresses of all weights with those in the function. The function refers to its
weights. So no other tensor can get the address of a weight that was replaced, until the next call has noticed
it.
"""

from __future__ import annotations

import collections
import operator
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.compile_ahead import rehearsal
from sdfastgn.kernels.common.garbage import without_collections
from sdfastgn.kernels.common.private import any_autocast, current_device
from sdfastgn.kernels.product import op as product_op
from sdfastgn.kernels.product import packed
from sdfastgn.plans.run.plan import Plan, without_autocast
from sdfastgn.plans.run.record import Recording, Unrecordable, record
from sdfastgn.plans.run.source import ALIGNMENT, Code, generate


class _Bound(NamedTuple):
    """A function with its weights, and for what it is valid.

    A thread that still runs an older function keeps the weights of that one.
    """

    run: Any
    code: Code
    addresses: list[int]
    layouts: list[tuple[Any, ...]]
    inputs: list[tuple[Any, ...]]
    has_kernels: bool


class _Operands(NamedTuple):
    """The fixed operands of a plan at one moment. Another thread may move weights at any time.

    Attributes:
        fixed: parameters, tensors from elsewhere, copies and constants.
        aliases: views of them without gradients. They stay where the weights were at that moment.
        addresses: the addresses of parameters, tensors from elsewhere and copies.
        layouts: see ``_layouts``.
    """

    fixed: list[Tensor]
    aliases: list[Tensor]
    addresses: list[int]
    layouts: list[tuple[Any, ...]]


class Baked:
    """Runs ``plan`` with less CPU time. Several threads may call it at once.

    Attributes:
        plan: runs the calls for which the function is not valid.
        declined: why a call ran the plan, and how many calls did.
        left: why a step of the plan stayed one call, and how many steps did.
        recorded: number of recordings.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.declined: collections.Counter[str] = collections.Counter()
        self.left: collections.Counter[str] = collections.Counter()
        self.recorded = 0
        self._bound: _Bound | None = None
        self._failure: str | None = None  # why the plan cannot be baked at all
        self._lock = threading.Lock()
        others = ((plan.others, i) for i in range(len(plan.others)))
        held = [*plan.parameters, *others, *plan.copies]
        self._holders: list[Any] = [holder for holder, _ in held]
        self._keys: list[Any] = [key for _, key in held]

    @property
    def source(self) -> str:
        """The text of the function. Empty before the first call."""
        return "" if self._bound is None else self._bound.code.source

    def run(self, inputs: list[Tensor], *, frees: bool = False) -> list[Any]:
        """``plan.run(inputs)``: the same bits, and new tensors in each call.

        ``frees``: empties the list, so that each input can be freed after its last use. Slices read it until
        the last one.
        """
        if self.plan.slices is not None:
            return self.plan.slices.run(self._run, inputs)
        return self._run(inputs, frees)

    def _run(self, inputs: list[Tensor], frees: bool = True) -> list[Any]:
        bound, why = self._bound, self._why_not()
        if why is None and (bound is None or bound.run is None or self._addresses() != bound.addresses):
            with self._lock:
                bound = self._renewed()
                if bound is None:
                    return self._record(inputs)
        why = why or _misfit(bound, inputs)  # type: ignore[arg-type]
        if why is not None:
            self.declined[why] += 1
            return self.plan.run_slice(inputs)
        given = inputs if frees else [*inputs]
        if not torch.is_grad_enabled() and not any_autocast():
            return bound.run(given)  # type: ignore[union-attr]
        with torch.no_grad(), without_autocast():
            return bound.run(given)  # type: ignore[union-attr]

    def release(self) -> None:
        """Lets go of the weights until the next call.

        In the meantime no tensor of this object shares their memory, so ``private.is_alone`` can return
        True. Code that gives weights other memory, such as packing, needs that.
        """
        with self._lock:
            if self._bound is not None:
                self._bound = self._bound._replace(run=None, addresses=[])

    def _why_not(self) -> str | None:
        """Why no call can run the function now. None if it depends on the call's arguments."""
        if self._failure is not None:
            return self._failure
        if product_op.is_choosing() or rehearsal.get() is not None:
            # A graph must use the algorithms that were chosen for its products, and the function has those
            # of PyTorch. The CPU time of a capture does not matter.
            return "it is a rehearsal or the capture of a CUDA graph"
        if self._bound is not None and self._bound.has_kernels is not dispatch.is_on():
            return "kernels have been turned on or off"
        return "a dispatch mode is active" if dispatch.dispatch_modes() else None

    def _addresses(self) -> list[int]:
        found: Any = map(operator.getitem, self._holders, self._keys)
        return list(map(Tensor.data_ptr, found))

    # ---- recordings

    @without_collections()
    def _record(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Runs the plan, and makes the function."""
        operands = self._operands()
        try:
            with torch.no_grad(), without_autocast():
                results, recording = record(self.plan.graph, operands.aliases, inputs)
        except Unrecordable as why:
            self.declined[str(why)] += 1
            return self.plan.run_slice(inputs)
        self._bake(recording, operands, inputs)
        returned = [] if isinstance(recording, str) else enumerate(recording.results)
        for i, operand in returned:
            if isinstance(operand, int) and operand < len(operands.fixed):
                results[i] = operands.fixed[operand]  # and not its alias
        return results

    def _bake(self, recording: Recording | str, operands: _Operands, inputs: Sequence[Tensor]) -> None:
        try:
            if isinstance(recording, str):
                raise Unrecordable(recording)
            code = generate(recording)
        except Unrecordable as why:
            self._failure = str(why)
            return
        signature = [(*_kind(x), x.data_ptr() % ALIGNMENT if x.is_cuda else None) for x in inputs]
        run = code.bound(*operands[:2])
        if run is None:  # another thread has moved weights meanwhile
            return
        where = operands.addresses, operands.layouts, signature
        self._bound = _Bound(run, code, *where, has_kernels=dispatch.is_on())
        self.recorded += 1
        self.left = recording.left

    def _renewed(self) -> _Bound | None:
        """The function, bound to the present weights. None if the plan must be recorded again."""
        bound = self._bound
        if bound is not None and (bound.run is None or self._addresses() != bound.addresses):
            operands = self._operands()
            self._bound = None
            run = bound.code.bound(*operands[:2]) if operands.layouts == bound.layouts else None
            if run is not None:
                self._bound = bound._replace(run=run, addresses=operands.addresses)
        return self._bound

    def _operands(self) -> _Operands:
        fixed = self.plan.operands(())
        with torch.no_grad():
            aliases = [t.detach() for t in fixed]
        addresses = [t.data_ptr() for t in aliases[: len(self._keys)]]
        return _Operands(fixed, aliases, addresses, _layouts(aliases))


def _kind(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.dtype, x.device


def _misfit(bound: _Bound, inputs: Sequence[Tensor]) -> str | None:
    """The reason why the function is not valid for these arguments, or None if it is."""
    for x, (shape, stride, dtype, device, aligned) in zip(inputs, bound.inputs, strict=True):
        if x.stride() != stride or x.shape != shape or x.dtype is not dtype or x.device != device:
            return "an argument has other sizes, strides, dtype or device"
        if aligned is not None and x.data_ptr() % ALIGNMENT != aligned:
            return "an argument has another alignment"
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return "an argument is of a subclass of Tensor"
        if x.is_neg() or x.is_conj():
            return "an argument is a conjugate or negative view"
    device = bound.code.device
    return "another GPU is current" if device is not None and current_device() != device.index else None


def _layouts(fixed: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """What a function takes for granted of its fixed operands, apart from their addresses.

    Kernels are compiled for an alignment. Several operands may lie in one memory, and one product may read
    packed operands.
    """
    first: dict[int, tuple[int, int]] = {}  # address of a memory -> its number, address of its first operand
    found = []
    for t, is_packed in zip(fixed, packed.are_packed(fixed), strict=True):
        address = t.data_ptr()
        number, start = first.setdefault(t.untyped_storage().data_ptr(), (len(first), address))
        found.append((*_kind(t), address % ALIGNMENT, number, address - start, is_packed))
    return found
