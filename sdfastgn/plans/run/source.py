"""``generate`` turns the recording of a plan's run into straight-line Python code.

A plan is the rewritten graph of a traced call. The recording lists all allocations, calls of ops and kernel
launches of one run (``record.py``). The generated function gets a list of the tensors among a call's
arguments, and empties the list. It repeats the recorded allocations, calls and launches, and drops each
tensor after its last use.

Weights, constants and their addresses are global names of the function. If weights have moved to other
memory, ``Code.bound`` makes a function from the same code with the new weights.
"""

from __future__ import annotations

import math
import types
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common.private import allocators, current_raw_stream, view_at
from sdfastgn.kernels.product import packed
from sdfastgn.plans.run.record import Action, Memory, Place, Recording, Unrecordable, places_in

# Alignment in bytes. Triton compiles one kernel for pointers that are divisible by 16, and another one for
# other pointers.
ALIGNMENT = 16
# How a global tensor of the generated function is made from *operands*, the tensors that the plan reads. The
# first item has the index of one operand, or the indices of several that lie side by side. The second item is
# their place in memory. The third item is the place of the tensor, or None if it is the operand itself.
_Source = tuple[tuple[int, ...], Place, Place | None]


class Code(NamedTuple):
    """The code of a generated function, before weights are bound to it.

    Attributes:
        source: the Python source code.
        code: the compiled body.
        names: global names and their values, except for weights, constants and addresses.
        tensors: for the global name of each weight or constant, how it is made from the tensors that the
            plan reads (``_Source``).
        addresses: for each global name of an address: the global name of the tensor that has this address.
        device: the GPU on which all tensors lie; None if they are on the CPU.
    """

    source: str
    code: types.CodeType
    names: dict[str, Any]
    tensors: dict[str, _Source]
    addresses: dict[str, str]
    device: torch.device | None

    def bound(self, fixed: Sequence[Tensor], aliases: Sequence[Tensor]) -> types.FunctionType | None:
        """Makes the function for the weights and constants ``fixed``.

        ``aliases``: views of these without gradients. The weights and constants must have the recorded shapes
        and strides, and the recorded distances in memory from each other. Returns None if weights that lay
        side by side in the recording do not any more.
        """
        names = dict(self.names)
        for name, (row, own, place) in self.tensors.items():
            t = packed.joined([aliases[i] for i in row]) if row[1:] else aliases[row[0]]
            if t is None:
                return None
            names[name] = fixed[row[0]] if place is None else _view(t, own, place)
        for name, tensor in self.addresses.items():
            names[name] = names[tensor].data_ptr()
        return types.FunctionType(self.code, names)


def generate(recording: Recording) -> Code:
    """Generates Python code that repeats ``recording``: the allocations and launches of a plan's run.

    Raises Unrecordable if the tensors lie on several GPUs.
    """
    return _Writer(recording).code()


def _view(t: Tensor, own: Place, place: Place) -> Tensor:
    """Makes a view of the memory of ``t``.

    In the recording, ``t`` was at the place ``own``, and the view was at ``place``.
    """
    if place == own:
        return t
    if place.dtype is own.dtype:
        return _at(t, place.shape, place.stride, place.offset - own.offset)
    more = place.offset * place.dtype.itemsize - own.offset * own.dtype.itemsize
    return _reread(t, place.dtype, place.shape, place.stride, more)


def _reread(t: Tensor, dtype: torch.dtype, shape: Any, stride: Any, more: int) -> Tensor:
    """Makes a view of the memory of ``t`` in another dtype, which begins ``more`` bytes after ``t``."""
    start, rest = divmod(int(t.storage_offset()) * t.itemsize + more, dtype.itemsize)
    if rest:
        raise RuntimeError(f"a view in {dtype} cannot begin inside of an element")
    view = torch.empty(0, dtype=dtype, device=t.device)
    return view.set_(t.untyped_storage(), start, shape, stride)


def _at(t: Tensor, shape: Any, stride: Any, more: int) -> Tensor:
    """Makes a view that begins ``more`` elements after ``t``.

    It does what ``private.view_at`` does, but with PyTorch's checks, for views that live longer than a call.
    """
    return t.as_strided(shape, stride, t.storage_offset() + more)


class _Writer:
    """Writes the lines of the generated function.

    Local names in it: ``t3`` is the first tensor in memory number 3, ``p3`` its address, and ``v4`` a view.
    Global names: ``w5`` is a weight or constant, or a view of one, ``p_w5`` its address, and ``g6`` any other
    object, such as a kernel.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.memories = recording.memories
        self.actions = _needed(recording)
        self.last = self._last_reads()
        self.roots = _roots(self.actions, self.memories)
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.tensors: dict[str, _Source] = {}
        self.addresses: dict[str, str] = {}
        self.known: dict[Any, str] = {}  # place, memory or object -> its name in the function
        # Finds an operand of the graph from which a tensor's memory is reached. Keys: places, (memory, dtype)
        # and memories. Values: ((index of the first operand there,), its place). The common place of
        # operands that lie side by side is a key too. Its value is (all their indices, this place).
        self.owners: dict[Any, tuple[tuple[int, ...], Place]] = {}
        rows = [((i,), place) for i, place in enumerate(recording.operands)]
        for row, place in (*rows, *((row, place) for place, row in recording.rows.items())):
            for key in (place, (place.memory, place.dtype), place.memory):
                self.owners.setdefault(key, (row, place))
        self.alive: dict[int, list[str]] = {}  # memory that an action made -> the local names that hold it
        gpus = {m.device for m in self.memories if m.device.type == "cuda"}
        if len(gpus) > 1:
            raise Unrecordable("its tensors lie on several GPUs")
        self.device = next(iter(gpus), None)

    def code(self) -> Code:
        fixed = len(self.recording.operands) - self.recording.inputs
        inputs = [place.memory for place in self.recording.operands[fixed:]]
        self.alive.update({m: [f"t{m}"] for m in inputs})
        if inputs:
            self.lines += [f"{', '.join(f't{m}' for m in inputs)}, = inputs", "inputs.clear()"]
        self.delete(m for m in inputs if m not in self.last)
        if any(a.kind == "launch" for a in self.actions):
            index = None if self.device is None else self.device.index
            stream = "0" if index is None else f"{self.name(current_raw_stream)}({index})"
            self.lines.append(f"stream = {stream}")
        for i, action in enumerate(self.actions):
            self.write(action)
            self.drop(action, i)
        self.lines.append(f"return [{', '.join(map(self.result, self.recording.results))}]")
        source = "def run(inputs):\n" + "\n".join(f"    {line}" for line in self.lines)
        module = compile(source, "<plan>", "exec")
        body = next(c for c in module.co_consts if isinstance(c, types.CodeType))
        return Code(source, body, self.names, self.tensors, self.addresses, self.device)

    # ---- actions

    def write(self, action: Action) -> None:
        if action.kind == "launch":
            self.lines.append(self.launch(action))
        elif action.kind == "allocate":
            for place in action.made:
                root = self.roots[place.memory]
                self.lines.append(f"t{place.memory} = {self.allocation(root)}")
        else:
            arguments = [self.argument(a) for a in action.args]
            arguments += [f"{key}={self.argument(a)}" for key, a in action.kwargs.items()]
            call = f"{self.name(action.function)}({', '.join(arguments)})"
            targets = _targets(action.results)
            self.lines.append(f"{targets} = {call}" if targets else call)
            if "_" in targets:
                self.lines.append("_ = None")
        for place in action.made:
            self.alive.setdefault(place.memory, []).append(f"t{place.memory}")

    def launch(self, action: Action) -> str:
        """The code of a launch.

        If the kernel is compiled, its launcher is called with addresses, which takes the least CPU time.
        Otherwise the ``Launch`` is called with tensors.
        """
        direct = action.function.direct()
        if direct is None or not all(map(self.is_aligned, places_in(action.args))):
            tensors = [self.argument(a) for a in action.args]
            return f"{self.name(action.function)}({', '.join(['stream', *tensors])})"
        launcher, before, after = direct
        grid, bound = before[:3], before[3:]
        pointers = ["None" if a is None else self.address(a) for a in action.args]
        values = [
            *map(self.value, grid),
            "stream",
            *map(self.value, bound),
            *pointers,
            *map(self.value, after),
        ]
        return f"{self.name(launcher)}({', '.join(values)})"

    def is_aligned(self, place: Place) -> bool:
        memory = self.memories[place.memory]
        offset = place.offset * place.dtype.itemsize
        if memory.operand is not None:
            offset += memory.start - memory.root.offset * memory.root.dtype.itemsize
        return offset % ALIGNMENT == 0

    def allocation(self, place: Place) -> str:
        device = self.memories[place.memory].device
        sizes = f"{self.value(place.shape)}, {self.value(place.stride)}"
        if device.type in allocators:
            return f"{self.name(allocators[device.type])}({sizes}, {self.name(place.dtype)})"
        of = f"dtype={self.name(place.dtype)}, device={self.name(device)}"
        return f"{self.name(torch.empty_strided)}({sizes}, {of})"

    def drop(self, action: Action, i: int) -> None:
        """Writes a ``del`` for the tensors in all memories that no action reads after action ``i``."""
        self.delete(m for m in {*action.reads, *(p.memory for p in action.made)} if self.last[m] == i)

    def delete(self, memories: Iterable[int]) -> None:
        names = [name for m in sorted(memories) for name in self.alive.pop(m, ())]
        if names:
            self.lines.append(f"del {', '.join(names)}")

    def _last_reads(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for i, action in enumerate(self.actions):
            last.update(dict.fromkeys((*action.reads, *(p.memory for p in action.made)), i))
        results = self.recording.results
        returned = [self.recording.operands[r] for r in results if isinstance(r, int)]
        last.update({p.memory: len(self.actions) for p in (*places_in(results), *returned)})
        return last

    # ---- expressions

    def name(self, value: Any) -> str:
        """Returns the global name of ``value``. An object without a name gets a new one."""
        key = ("object", id(value))
        if key not in self.known:
            self.known[key] = name = f"g{len(self.names)}"
            self.names[name] = value
        return self.known[key]

    def value(self, value: Any) -> str:
        """The code for an argument that contains no tensor: a literal, or a global name."""
        if (
            value is None
            or type(value) in (bool, int, str)
            or (type(value) is float and math.isfinite(value))
        ):
            return repr(value)
        if type(value) is tuple and value:
            return f"({', '.join(map(self.value, value))},)"
        return self.name(value)

    def argument(self, value: Any) -> str:
        if isinstance(value, Place):
            return self.tensor(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self.name(type(value))}({', '.join(map(self.argument, value))})"
        if isinstance(value, (tuple, list)):
            items = ", ".join(map(self.argument, value))
            # A list of numbers, such as sizes, becomes a tuple: Python makes tuples of literals only once.
            is_tuple = isinstance(value, tuple) or all(isinstance(item, (int, float)) for item in value)
            return f"({items},)" if items and is_tuple else f"[{items}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self.argument(v)}' for key, v in value.items())}}}"
        return self.value(value)

    def tensor(self, place: Place) -> str:
        memory, root = self.memories[place.memory], self.roots[place.memory]
        if memory.operand is not None and not memory.is_input:
            return self.fixed(place)
        if place == root:
            return f"t{place.memory}"
        if place not in self.known:
            self.known[place] = name = f"v{len(self.known)}"
            self.lines.append(f"{name} = {self.view(place, view_at)}")
            self.alive[place.memory].append(name)
        return self.known[place]

    def view(self, place: Place, function: Any) -> str:
        root = self.roots[place.memory]
        sizes = f"{self.value(place.shape)}, {self.value(place.stride)}"
        if place.dtype is root.dtype:
            return f"{self.name(function)}(t{place.memory}, {sizes}, {place.offset - root.offset})"
        more = place.offset * place.dtype.itemsize - root.offset * root.dtype.itemsize
        return f"{self.name(_reread)}(t{place.memory}, {self.name(place.dtype)}, {sizes}, {more})"

    def fixed(self, place: Place) -> str:
        if place not in self.known:
            self.known[place] = name = f"w{len(self.tensors)}"
            self.tensors[name] = (*self.owner(place), place)
        return self.known[place]

    def owner(self, place: Place) -> tuple[tuple[int, ...], Place]:
        """Finds an operand, or operands side by side, in the memory of ``place``.

        Prefers operands with the dtype of ``place``. Returns their indices and their place.
        """
        keys = place, (place.memory, place.dtype), place.memory
        return next(self.owners[key] for key in keys if key in self.owners)

    def address(self, place: Place) -> str:
        memory = self.memories[place.memory]
        if memory.operand is not None and not memory.is_input:
            tensor = self.fixed(place)
            self.addresses[f"p_{tensor}"] = tensor
            return f"p_{tensor}"
        key = ("address", place.memory)
        if key not in self.known:
            self.known[key] = f"p{place.memory}"
            self.lines.append(f"p{place.memory} = t{place.memory}.data_ptr()")
        root = self.roots[place.memory]
        more = place.offset * place.dtype.itemsize - root.offset * root.dtype.itemsize
        return f"{self.known[key]} + {more}" if more else self.known[key]

    def result(self, result: Any) -> str:
        if not isinstance(result, (int, Place)):
            return "None"
        if isinstance(result, int):
            place = self.recording.operands[result]
            if result >= len(self.recording.operands) - self.recording.inputs:
                return f"t{place.memory}"
            name = f"r{result}"
            self.tensors[name] = (result,), place, None
            return name
        is_root = result == self.roots[result.memory]
        if self.memories[result.memory].operand is not None and not self.memories[result.memory].is_input:
            return self.fixed(result)
        return f"t{result.memory}" if is_root else self.view(result, _at)


def _needed(recording: Recording) -> list[Action]:
    """Lists the actions that must run: those with side effects, and those whose results are read later."""
    read = {place.memory for place in places_in(recording.results)}
    needed = []
    for action in reversed(recording.actions):
        if action.is_kept or any(place.memory in read for place in action.made):
            needed.append(action)
            read |= action.reads
    return needed[::-1]


def _roots(actions: list[Action], memories: list[Memory]) -> list[Place]:
    """Chooses for each memory the shape and strides of the tensor that is allocated there. Returns places.

    It is the shape in which most calls of ops read the memory, because each other shape needs a view.
    Launches do not count: they take an address, and no tensor.
    """
    roots = [memory.root for memory in memories]
    reads = Counter(place for a in actions if a.kind == "call" for place in places_in((a.args, a.kwargs)))
    best: dict[int, Place] = {}
    for place, count in reads.items():
        if count > reads.get(best.get(place.memory, roots[place.memory]), 0):
            best[place.memory] = place
    for action in actions:
        for place in action.made if action.kind == "allocate" else ():
            other = best.get(place.memory, place)
            is_alike = math.prod(other.shape) == math.prod(place.shape) and other.dtype is place.dtype
            if is_alike and _is_whole(place) and _is_whole(other):
                roots[place.memory] = other
    return roots


def _is_whole(place: Place) -> bool:
    """True if a tensor at ``place`` begins where its memory begins, and has no gaps between elements."""
    expected = 1
    for size, stride in sorted(zip(place.shape, place.stride, strict=True), key=lambda axis: axis[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return place.offset == 0


def _targets(results: Any) -> str:
    """The left side of an assignment of a call's results. Empty if no result is a new tensor."""
    if not any(True for _ in places_in(results)):
        return ""

    def target(result: Any) -> str:
        if isinstance(result, Place):
            return f"t{result.memory}"
        return f"({', '.join(map(target, result))},)" if isinstance(result, tuple) else "_"

    return target(results)
