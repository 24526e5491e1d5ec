"""A CUDA graph for the CPU: the operations of a call on the memory that it had, repeated without
the Python that made them.

Tensors without dimensions that the call finds are taken by value, as a graph takes those that are
not on the GPU.

In a pool of its own, a later graph may write into what its capture has freed of an earlier graph's
memory. The replay of a tape fills this memory with NaN.
"""

import contextlib
import threading
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Four bytes of this value are NaN as fp32, two are NaN as fp16 or bf16, and eight are -1 as int64.
_BYTE_OF_NAN = 255


class _Tape(TorchDispatchMode):
    """Records every operation.

    Tensors are kept as aliases: if a parameter gets another storage later, the tape has the old one.
    """

    def __init__(self, allocated):
        super().__init__()
        self.entries = []
        self.own = {*allocated}

    def _alias(self, tensor):
        is_number = tensor.dim() == 0 and tensor.untyped_storage().nbytes() == tensor.element_size()
        return tensor.clone() if is_number and tensor.data_ptr() not in self.own else tensor.detach()

    def _aliases(self, tree):
        if isinstance(tree, torch.Tensor):
            return self._alias(tree)
        if isinstance(tree, list | tuple):
            return type(tree)(map(self._aliases, tree))
        return {key: self._aliases(value) for key, value in tree.items()} if isinstance(tree, dict) else tree

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        returns = func._schema.returns
        may_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        # A view needs no repeating. ``aten.to`` and others return a view of their input or a copy.
        if not (may_view and _storages(out).keys() <= _storages((args, kwargs)).keys()):
            written = any(r.alias_info is not None and r.alias_info.is_write for r in returns) or not returns
            self.own.update(t.data_ptr() for t in _tensors(out))
            self.entries.append(
                (func, self._aliases(args), self._aliases(kwargs), None if written else self._aliases(out))
            )
        return out


def _storages(tree):
    """The storages of all tensors in ``tree``, by address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage() for t in _tensors(tree)}


def _tensors(tree):
    """All tensors in ``tree``, which may have lists, tuples and dicts."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple | dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(part)


class _Allocations(TorchDispatchMode):
    """The storages of scalars that operations have made, by address."""

    def __init__(self):
        super().__init__()
        self.storages = {}  # alive, so that no address comes twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 0:
            self.storages[out.data_ptr()] = out.untyped_storage()
        return out


def _freed(tapes):
    """The storages of all but the last of ``tapes`` to which nothing else refers any more."""
    made = _storages([out for tape in tapes[:-1] for *_, out in tape.entries if out is not None])
    uses = Counter(t.untyped_storage().data_ptr() for tape in tapes for t in _tensors(tape.entries))
    # Each storage has one more reference, in ``made``.
    return [s for at, s in made.items() if torch._C._storage_Use_Count(s._cdata) == uses[at] + 1]


class TapeHandle:
    def __init__(self, entries, output, reused):
        self.entries, self.output, self.reused = entries, output, reused

    def replay(self):
        for func, args, kwargs, out in self.entries:
            new = func(*args, **kwargs)
            if out is not None:
                for old, value in zip(_tensors(out), _tensors(new), strict=True):
                    old.copy_(value)
        for storage in self.reused:
            storage.fill_(_BYTE_OF_NAN)


class TapeBackend:
    """``Backend`` for the CPU, which counts its calls; ``fail`` is raised by the next captures."""

    def __init__(self):
        self.lock = threading.RLock()
        self.captures = self.rehearsals = 0
        self.fail = None
        self.busy = False
        self.room = True
        self._allocations = _Allocations()
        self.kept = self._allocations.storages

    def is_busy(self):
        return self.busy

    def allocating(self):
        return self._allocations

    def ordered(self):
        return contextlib.nullcontext()

    def rehearse(self, fn):
        self.rehearsals += 1
        fn()

    def new_pool(self):
        return []  # the tapes in it

    def capture(self, fn, pool=None):
        if self.fail is not None:
            raise self.fail
        self.captures += 1
        with _Tape(self.kept) as tape:
            output = fn()
        pool = [] if pool is None else pool
        pool.append(tape)
        return TapeHandle(tape.entries, output, _freed(pool))

    def wait(self):
        pass

    def memory(self):
        return 1 << 20

    def has_room(self):
        return self.room
