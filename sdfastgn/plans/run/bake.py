"""``Baked`` turns a plan into straight-line Python, with fixed grids, strides and addresses of weights.

A plan is the rewritten graph of a traced call. The first call runs the graph node by node, and records all
allocations, ops and kernel launches (``record.py``). ``source.py`` turns the recording into the text of a
Python function. Later calls run this function. It gives the same bits as the plan in less CPU time.

Each call compares the addresses of all weights with those in the function. The function also keeps its
weights alive. So if a weight is replaced, no other tensor can get its address before the next call has
noticed the replacement.
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
    """The generated function with its weights, and the conditions under which it may run.

    If a thread still runs an older function, that function keeps its own weights alive.

    Attributes:
        run: the function; None after ``release``.
        code: the generated code, to which other weights can be bound.
        addresses: the addresses of the weights.
        layouts: shapes, strides and dtypes of the weights, and which of them share memory.
        inputs: for each argument, the shape, strides, dtype, device and alignment that the function needs.
        has_kernels: whether this package's kernels were turned on when the function was recorded.
    """

    run: Any
    code: Code
    addresses: list[int]
    layouts: list[tuple[Any, ...]]
    inputs: list[tuple[Any, ...]]
    has_kernels: bool


class _Operands(NamedTuple):
    """All tensors that a plan reads besides arguments, at one moment. Other threads may move weights later.

    Attributes:
        fixed: parameters, other tensors of the model's code, copies of weights in E4M3, and constants.
        aliases: views of the tensors in ``fixed``, without gradients. If a weight is moved, its view stays in
            the old memory.
        addresses: the addresses of all these tensors except constants.
        layouts: shapes, strides and dtypes of the tensors, and which of them share memory (``_layouts``).
    """

    fixed: list[Tensor]
    aliases: list[Tensor]
    addresses: list[int]
    layouts: list[tuple[Any, ...]]


class Baked:
    """Runs ``plan`` with less CPU time, by generated Python code. Several threads may call it at once.

    Attributes:
        plan: the rewritten graph of a traced call. It runs the calls for which the generated function is not
            valid.
        declined: for each reason why the function was not valid, the number of such calls.
        left: for each reason why a node of the graph could not be recorded as single ops and launches, the
            number of such nodes. The function calls them as a whole.
        recorded: number of recordings so far.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.declined: collections.Counter[str] = collections.Counter()
        self.left: collections.Counter[str] = collections.Counter()
        self.recorded = 0
        self._bound: _Bound | None = None
        self._failure: str | None = None  # why no function can be generated for the plan; else None
        self._lock = threading.Lock()
        others = ((plan.others, i) for i in range(len(plan.others)))
        held = [*plan.parameters, *others, *plan.copies]
        self._holders: list[Any] = [holder for holder, _ in held]
        self._keys: list[Any] = [key for _, key in held]

    @property
    def source(self) -> str:
        """The source code of the generated function. Empty before the first call."""
        return "" if self._bound is None else self._bound.code.source

    def run(self, inputs: list[Tensor], *, frees: bool = False) -> list[Any]:
        """Computes what ``plan.run(inputs)`` computes, to the same bits, as new tensors in each call.

        ``frees``: True empties the list ``inputs``, so that each tensor can be freed after its last use. It
        has no effect on a plan that runs a batch in slices, because each slice reads the tensors.
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
        """Drops all references to the weights until the next call.

        Code that moves weights to other memory, for instance to put several side by side, first makes sure
        that no other tensor shares the weights' memory (``private.is_alone``). The views of weights that the
        generated function keeps would share it.
        """
        with self._lock:
            if self._bound is not None:
                self._bound = self._bound._replace(run=None, addresses=[])

    def _why_not(self) -> str | None:
        """Returns why no call at all can run the generated function now.

        None if there is no such reason. Then the call's arguments decide.
        """
        if self._failure is not None:
            return self._failure
        if product_op.is_choosing() or rehearsal.get() is not None:
            # In the capture of a CUDA graph, each matrix product runs with an algorithm that was chosen for
            # it in the rehearsal, a run before the capture. The generated function has recorded PyTorch's own
            # choice. So the plan itself runs. Its CPU time does not matter in a capture.
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
        """Runs the plan node by node, and generates the function from what it executes."""
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
                # The call returns a parameter itself, so the caller must not get the recorded view of it.
                results[i] = operands.fixed[operand]
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
        if run is None:  # another thread has moved weights: the next call records again
            return
        where = operands.addresses, operands.layouts, signature
        self._bound = _Bound(run, code, *where, has_kernels=dispatch.is_on())
        self.recorded += 1
        self.left = recording.left

    def _renewed(self) -> _Bound | None:
        """Returns the generated function with present weights. None if the plan must be recorded again."""
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
    """Returns why the generated function cannot run with these arguments. None if it can."""
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
    """Describes weights and constants, apart from their addresses, as far as a generated function needs it.

    The description has shape, strides, dtype, device and alignment of each tensor, because kernels are
    compiled for an alignment. It also says which tensors share memory, and which lie side by side, because
    one matrix product may read several weights as one.
    """
    first: dict[int, tuple[int, int]] = {}  # address of a storage -> (its number, address of a tensor in it)
    found = []
    for t, is_packed in zip(fixed, packed.are_packed(fixed), strict=True):
        address = t.data_ptr()
        number, start = first.setdefault(t.untyped_storage().data_ptr(), (len(first), address))
        found.append((*_kind(t), address % ALIGNMENT, number, address - start, is_packed))
    return found
