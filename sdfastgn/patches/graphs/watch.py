"""Records the Python state of a model at a capture, and checks quickly that none of it has changed.

A CUDA graph repeats the kernels of its capture with the same addresses and numbers. A ``Watch`` records
everything that determines these kernels, addresses and numbers:

- the modules, their classes, attributes and hooks;
- parameters and buffers: the objects, their storages and addresses;
- everything that attributes refer to, as deep as it goes: attention processors, LoRA's dicts of scales,
  lists.

In-place writes into a weight on the GPU are not watched, because a replay reads the new values. In-place
writes into a tensor on the CPU are watched, because the capture may have used its old value as a Python
number or as an argument of a kernel.

*Factors*, numbers such as the scale of an IP-Adapter, may get new values, because a graph reads them from
memory (``factors.py``). Attributes that pipelines switch during an image (``switches_of`` in ``models.py``)
may change too, because there is a graph for each combination of their values.

A model with code of an unknown package is not captured, because such code may keep its state anywhere.
A function belongs to the package in which its code was written. Its ``__module__`` may name another package,
because ``functools.wraps`` copies it.

Class attributes, and functions and variables of Python modules, are compared by ``code/guard.py``.

Three changes are not noticed:

- the ``.data`` of a tensor becomes another view of the same memory;
- a number or list is replaced by an equal one of a user's class;
- a module's dict of buffers or hooks is replaced as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common.failures import one_line
from sdfastgn.patches.code.checked import CALL
from sdfastgn.patches.graphs.changes import Place, changed, difference_of, joined
from sdfastgn.patches.graphs.comparisons import (
    Attributes,
    Cells,
    Empty,
    Identities,
    Kinds,
    Memory,
    Numbers,
    Types,
    Values,
    Writes,
)
from sdfastgn.patches.graphs.factors import Factors
from sdfastgn.patches.graphs.models import switched, switches_of
from sdfastgn.patches.lora.adapter_survey import AdapterSurvey
from sdfastgn.patches.swap.class_forward import has_foreign_forward, is_offloaded_whole
from sdfastgn.patches.swap.instance_entries import GUARDS
from sdfastgn.patches.swap.numpy_numbers import is_numpy_constant

# Packages whose forwards read state only from tensors and attributes. Code of other packages may read global
# variables, which a Watch does not find.
TRUSTED = sys.stdlib_module_names | {
    "torch",
    "diffusers",
    "peft",
    "accelerate",
    "transformers",
    "comfy",
    "sdfastgn",
}
_TENSOR_TYPES = (Tensor, nn.Parameter)
_NUMBERS_AND_NAMES = (bool, int, float, complex, str, bytes, range, type(None), uuid.UUID)
_KINDS_OF_TENSORS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
# Classes of leaves: values that refer to no other object that must be watched.
_LEAVES = (*_NUMBERS_AND_NAMES, *_KINDS_OF_TENSORS, type, types.ModuleType, weakref.ref)
# Values of exactly these classes refer to no other object and contain no code. So the package of their class
# is not checked.
_LEAVES_OF_NO_PACKAGE = frozenset((*_NUMBERS_AND_NAMES, *_KINDS_OF_TENSORS, weakref.ref))
# Packages whose numbers, and other values without references to objects, may occur in a captured model.
_TRUSTED_LEAVES = TRUSTED | {"numpy"}
_CONTAINERS = (dict, list, tuple, set, frozenset)
# Attributes through which functions, methods and partials refer to other objects.
_PARTS = ("__self__", "__func__", "func", "args", "keywords", "__closure__", "__defaults__", "__kwdefaults__")
# Methods and built-in functions. They refer to other objects only through the attributes in ``_PARTS``.
_BOUND = (types.MethodType, types.BuiltinFunctionType)
# A model that refers to an object of these classes is not captured: the content of an ``lru_cache`` cannot be
# read, and a ``threading.local`` has another content in each thread.
_HIDDEN = (type(functools.lru_cache(len)), threading.local)
# A model with more objects than this is not captured, because checking them would take too long.
_MAX_OBJECTS = 50_000
# CPU tensors with at most this many elements are compared by value. Larger ones are compared by the number of
# writes into them, which PyTorch counts.
_FEW = 16

# The key of a module's ``__dict__`` under which sdfastgn usually puts the object that runs the module's calls
# as CUDA graphs. A Watch does not look into this object. If the object replaces another method than
# ``forward``, ``unwatched`` names that method.
_OUR_ENTRY = "forward"
# Name of a module's dict -> word for its items, for messages.
_ENTRIES = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}
_FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# Attributes of modules that are not compared:
# - the attributes of ``nn.Module()`` that no forward reads, such as the dicts of hooks for gradients;
# - sdfastgn's own entries: ``_apply``, which runs when a module is moved; ``_call_impl``, which looks for
#   replaced code; and those that GUARDS names, which run when a module is copied;
# - the dicts of forward hooks and of buffers. ``_see_hooks`` and ``_see_module`` watch their content.
_INERT = frozenset((*vars(nn.Module()), "_apply", CALL, *GUARDS)) - {"training", "_parameters", "_modules"}
# Attributes that diffusers' loader of LoRAs sets in the root of a model. They may change, because no forward
# reads them.
_NOTES = frozenset(("peft_config", "_hf_peft_config_loaded", "lora_scale", "_safe_fusing"))
# Attributes that accelerate sets in a model that it offloads as a whole. They may change, because the hook
# that moves the model runs outside of the graph. (The hook also refers to another model of the pipeline.)
_OF_OFFLOADING = frozenset(("_hf_hook", "_old_forward"))


class Watch:
    """A record of the state of a module and of everything below it, at the time when the Watch is made.

    A Watch keeps the objects that it watches alive, so that no other object gets their ids. But it does not
    keep ``root`` or the memory of tensors alive, so that a model that moves to another device can free its
    memory.

    Args:
        root: the module that is captured. Its own forward hooks, and the hook that offloads it as a whole,
            are not watched, because they run outside of the graph.
        is_harmless: called with each forward hook of an inner module. Returns True if all effects of the
            hook are part of the graph.
        device: the device of the capture. If it is not the CPU, a write into a tensor on the CPU counts as a
            change.
        survey: the layers of ``root`` that run with merged weights of adapters. The Watch only checks the
            classes of these layers, and the addresses of the merged weights. ``survey`` itself notices all
            other changes of these layers.
        has_factors: True if the numbers in attributes that ``factors.py`` lists may get new values, because
            they are inputs of the graphs. False if a new value of such a number counts as a change.
        unwatched: attributes of ``root`` that a captured call does not read before it sets them.
        apart: module -> names of its attributes that the caller compares itself.
        may_move: True if weights may move to other memory, because calls look them up by name. Then only
            their shapes, strides, dtypes and devices are compared.
        trusted: further packages whose code keeps state only in tensors and attributes. Those in ``TRUSTED``
            are always included.

    Attributes:
        device: the device of the capture.
        factors: the numbers in the model's attributes that are inputs of its graphs.
        reason: why the module must not be captured, or None. The constructor stops at the object that gives
            the reason, so later objects are not recorded. ``unchanged`` returns False as soon as the reason
            no longer holds.
    """

    def __init__(
        self,
        root: nn.Module,
        is_harmless: Callable[[Any], bool] = lambda hook: False,
        device: torch.device | None = None,
        survey: AdapterSurvey | None = None,
        has_factors: bool = True,
        unwatched: frozenset[str] = frozenset(),
        apart: Mapping[nn.Module, frozenset[str]] = types.MappingProxyType({}),
        may_move: bool = False,
        trusted: frozenset[str] = frozenset(),
    ) -> None:
        self.reason: str | None = None
        self._merged = set() if survey is None else set(survey.layers)
        self._is_harmless, self._has_factors, self._apart = is_harmless, has_factors, dict(apart)
        self._has_switches = bool(switched(root))
        self._unwatched_in_root = _NOTES | unwatched | self._apart.get(root, frozenset())
        if is_offloaded_whole(root):
            self._unwatched_in_root |= _OF_OFFLOADING
        self.device = torch.device("cpu") if device is None else device
        self._seen: set[int] = set()
        self._objects: list[Any] = []  # visited objects, kept alive so that their ids stay unique
        self._keys: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._lora_scales: set[int] = set()  # ids of the dicts with the scales of LoRA layers
        self._empty, self._types, self._held = Empty(), Types(), Identities()
        self._trusted = TRUSTED | trusted
        self._memory: Memory | Kinds = Kinds() if may_move else Memory()
        self._numbers, self._writes = Numbers(), Writes()
        self._cells, self._attributes, self._plain = Cells(), Attributes(_INERT, _ENTRIES), Values()
        self.factors = Factors()
        # Quick comparisons come first: ``unchanged`` stops at the first one that finds a change. The
        # comparison of addresses, ``_memory``, comes before those that read tensors: if the memory of a
        # tensor was freed, the tensor must not be read.
        self._comparisons: tuple[Comparison, ...] = (
            self._empty, self._types, self._held, self._memory, self._numbers, self._writes, self._cells,
            self._attributes, self.factors, self._plain,
        )  # fmt: skip
        self._root_type = type(root)
        self._walk(root)
        for weight in () if survey is None else survey.parameters:
            self._memory.add(weight, "merged weights of adapters")
        for walked in (self._seen, self._objects, self._keys, self._lora_scales, self._merged, self._apart):
            walked.clear()  # all objects of the model were visited, so the lists for the visit can be freed
        self._root_values = _own_values(root, self._unwatched_in_root)
        if self.reason is not None:  # the reason may be a tensor without an address: compare no tensors
            for tensors in (self._memory, self._numbers, self._writes):
                tensors.clear()
        for comparison in self._comparisons:
            comparison.freeze()
        self._checks = [comparison.same for comparison in self._comparisons]

    def is_in_place(self) -> bool:
        """True if all weights are at the addresses that the graphs read.

        Then a replay reads no freed memory. But its result is wrong if something else has changed.
        """
        return self._memory.is_in_place()

    def addresses(self) -> frozenset[int]:
        """The addresses of all watched tensors whose memory must not change."""
        return self._memory.addresses()

    def writes(self) -> list[int]:
        """For each watched tensor, PyTorch's count of in-place writes into it (``_version``).

        Inference tensors have no such count and are left out.
        """
        return [tensor._version for tensor in self._memory.tensors if not tensor.is_inference()]

    def unchanged(self, root: nn.Module) -> bool:
        """True if nothing that is watched has changed since the Watch was made.

        The comparisons run in C. For the 1900 modules of SDXL's UNet they take less than a millisecond.
        """
        try:
            return (
                type(root) is self._root_type
                and all(same() for same in self._checks)
                and _same(_own_values(root, self._unwatched_in_root), self._root_values)
            )
        except Exception:
            # A comparison raises only if there was a change: an attribute was removed, a number was replaced
            # by a tensor, or another thread is changing a container.
            return False

    def what_changed(self, root: nn.Module) -> str:
        """Says in words what has changed: the first difference that is found.

        This is slow. It is called after ``unchanged`` has returned False.
        """
        if type(root) is not self._root_type:
            return changed("the class of the model", self._root_type, type(root))

        def own_attributes() -> str | None:
            old, new = self._root_values, _own_values(root, self._unwatched_in_root)
            before, now = (dict(zip(pairs[::2], pairs[1::2], strict=True)) for pairs in (old, new))
            return difference_of(Place("", "attribute", {}, ()), before, now, operator.is_)

        for difference in (*(comparison.difference for comparison in self._comparisons), own_attributes):
            # A comparison raises, for example, if an attribute was removed.
            with contextlib.suppress(Exception):
                found = difference()
                if found is not None:
                    return found
        return "something in the model changed"

    def _walk(self, root: nn.Module) -> None:
        """Record ``root`` and everything that it refers to. Stops at an object that forbids a capture."""
        todo: list[tuple[str, Any]] = [("", root)]
        while todo and self.reason is None:
            path, value = todo.pop()
            if type(value) in _LEAVES_OF_NO_PACKAGE or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._objects.append(value)
            if len(self._seen) > _MAX_OBJECTS:
                self.reason = f"it has more than {_MAX_OBJECTS} objects to watch"
            elif isinstance(value, Tensor):
                self._see_tensor(path, value)
            elif isinstance(value, nn.Module):
                todo += self._see_module(path, value, is_root=value is root)
            elif isinstance(value, types.CellType):
                self._cells.add(value, path)
                todo.append((path, value.cell_contents))
            elif type(value) in _CONTAINERS:
                todo += self._see_container(path, value)
            elif self._is_trusted(path, value) and not _is_leaf(value):
                todo += self._see_object(path, value)

    def _place(self, name: str, kind: str, container: Any) -> Place:
        keys = tuple(container) if isinstance(container, dict) else ()
        # Modules of one class have the same attribute names, so they share one tuple of names.
        return Place(name, kind, container, self._keys.setdefault(keys, keys))

    def _is_trusted(self, path: str, value: Any) -> bool:
        """True if ``value`` is of a package whose code keeps no hidden state. Otherwise sets ``reason``."""
        package = _package_of(value)
        is_known = package in self._trusted or (package in _TRUSTED_LEAVES and _is_leaf(value))
        if not is_known:
            name = (value if isinstance(value, (types.FunctionType, type)) else type(value)).__qualname__
            self.reason = f"{path or 'it'} has {name} of {package}, whose state cannot be watched"
        return self.reason is None

    def _see_object(self, path: str, value: Any) -> list[tuple[str, Any]]:
        if isinstance(value, _CONTAINERS):
            return self._see_container(path, value)
        found = [(joined(path, name), getattr(value, name)) for name in _PARTS if hasattr(value, name)]
        if isinstance(value, _BOUND):
            return found
        if isinstance(value, _HIDDEN) or not hasattr(value, "__dict__") or _has_slots(type(value)):
            self.reason = f"{path or 'it'} has a {type(value).__qualname__}, whose state cannot be watched"
        self._types.add(value, path)
        return found + self._see_container(path, vars(value), "attribute") if self.reason is None else []

    def _see_tensor(self, path: str, tensor: Tensor) -> None:
        if type(tensor) not in _TENSOR_TYPES or tensor.device.type == "meta":
            self.reason = f"{path} is a {type(tensor).__name__} on {tensor.device}"
            return
        self._memory.add(tensor, path)
        # A capture may have stored the value of a CPU tensor, for instance as an argument of a kernel. Then
        # its value, or the number of writes into it, is watched too. A capture on a GPU may store the value
        # of any CPU tensor. A capture on the CPU, as in tests, stores only values of 0-d tensors.
        if tensor.device.type != "cpu" or (tensor.dim() and self.device.type == "cpu"):
            return
        if tensor.numel() <= _FEW:
            self._numbers.add(tensor, path)
        elif tensor.is_inference():
            self.reason = f"{path} is on the CPU and does not count what is written into it"
        else:
            self._writes.add(tensor, path)

    def _see_module(self, path: str, module: nn.Module, *, is_root: bool) -> list[tuple[str, Any]]:
        attributes = vars(module)
        if module in self._merged:
            self._types.add(module, path)
            return []
        unwatched: tuple[str, ...] = ()
        if not is_root:
            # The module's state is recorded before ``_reason_of`` is called. So if there is a reason against
            # a capture, ``unchanged`` notices when the reason no longer holds.
            self._types.add(module, path)
            unwatched = self.factors.add(path, module) if self._has_factors else ()
            unwatched += switches_of(module) if self._has_switches else ()
            unwatched += tuple(self._apart.get(module, ()))
            self._see_attributes(path, attributes, unwatched)
            self._see_hooks(path, module)
        self.reason = self.reason or _reason_of(path or "it", module, is_root=is_root)
        if self.reason is not None or not self._is_trusted(path, module):
            return []
        if "scaling" in attributes and _is_lora(module):
            self._lora_scales.add(id(attributes["scaling"]))
        found: list[tuple[str, Any]] = []
        for name, kind in _ENTRIES.items():
            entries = attributes[name]
            place = self._place(path, kind, entries)
            (self._held if entries else self._empty).add(entries.values() if entries else entries, place)
            found += ((joined(path, key), value) for key, value in entries.items())
        inert = {*_INERT, *_ENTRIES, *unwatched, _OUR_ENTRY, *(self._unwatched_in_root if is_root else ())}
        return found + [(joined(path, key), value) for key, value in attributes.items() if key not in inert]

    def _see_attributes(self, path: str, attributes: dict[str, Any], unwatched: tuple[str, ...]) -> None:
        place = self._place(path, "attribute", attributes)
        self._attributes.add(place, unwatched)
        if any(isinstance(value, Tensor) for name, value in attributes.items() if name not in unwatched):
            self._held.add(attributes.values(), place)

    def _see_hooks(self, path: str, module: nn.Module) -> None:
        for name in _FORWARD_HOOKS:
            hooks = getattr(module, name)
            place = self._place(path, "forward hook", hooks)
            (self._plain if hooks else self._empty).add(hooks.values() if hooks else hooks, place)
            if not all(map(self._is_harmless, hooks.values())):
                self.reason = f"there is a forward hook on {path}"

    def _see_container(self, path: str, value: Any, kind: str = "item") -> list[tuple[str, Any]]:
        """Record a container, and return (dotted path, item) for each of its items.

        ``path``: the container's dotted path. ``kind``: the word for its items in messages.
        """
        place = self._place(path, "LoRA scale" if id(value) in self._lora_scales else kind, value)
        pairs = list(dict.items(value) if isinstance(value, dict) else enumerate(value))
        if isinstance(value, (dict, list, set)):
            items: Any = value
            if isinstance(value, dict):
                self._plain.add(value, None)  # iterating over the dict gives its keys; its values come below
                items = dict.values(value)
            if not pairs:
                self._empty.add(value, place)
            elif any(isinstance(item, Tensor) for _, item in pairs):
                self._held.add(items, place)
            else:
                self._plain.add(items, place)
        found = [(place.child(key), item) for key, item in pairs]
        if hasattr(value, "__dict__"):  # a dict of a subclass, such as diffusers' configs, has attributes too
            found += self._see_container(path, vars(value), "attribute")
        return found


def reason_of_error(error: Exception) -> str:
    """Says why the state of a model cannot be recorded now, if ``Watch`` has raised ``error``.

    The constructor of ``Watch`` reads properties of users' classes, which may raise any error.
    """
    return f"its state cannot be watched: {one_line(error)}"


class Comparison(Protocol):
    """An object with which a ``Watch`` records one kind of a model's state, and later compares the model."""

    def freeze(self) -> None: ...

    def same(self) -> bool: ...

    def difference(self) -> str | None: ...


def attributes_of(module: nn.Module, *, is_root: bool) -> dict[str, Any]:
    """The attributes of ``module`` in which a Watch notices changes.

    Parameters, buffers, child modules and hooks are not among them.
    """
    inert = {*_INERT, *_ENTRIES, _OUR_ENTRY}
    if is_root:
        inert |= _NOTES | (_OF_OFFLOADING if is_offloaded_whole(module) else frozenset())
    return {name: value for name, value in vars(module).items() if name not in inert}


def hooks_of(module: nn.Module) -> list[Any]:
    """The forward hooks of ``module``, in the order in which they run."""
    return [hook for name in _FORWARD_HOOKS for hook in getattr(module, name).values()]


def _reason_of(path: str, module: nn.Module, *, is_root: bool) -> str | None:
    """Why a model that contains ``module`` cannot be captured; None if ``module`` gives no reason."""
    attributes = vars(module)
    if isinstance(module, torch.jit.ScriptModule):
        return f"{path} is compiled by TorchScript"
    if attributes.get("_compiled_call_impl") is not None or type(module).__module__.startswith(
        "torch._dynamo"
    ):
        return f"{path} is compiled by torch.compile"
    if "_hf_hook" in attributes and not (is_root and is_offloaded_whole(module)):
        return f"accelerate's hooks are on {path}"
    if not is_root and has_foreign_forward(module):
        return f"other code replaced the forward of {path}"
    if module.training and _learns_in_forward(module):
        return f"{path} is in training mode"
    return None


def _learns_in_forward(module: nn.Module) -> bool:
    """True if each forward in training mode changes buffers of ``module``.

    These are the running statistics of a norm, or the vectors of a spectral norm.
    """
    return getattr(module, "track_running_stats", False) or type(module).__name__ == "_SpectralNorm"


def _is_leaf(value: Any) -> bool:
    """True if ``value`` refers to no other object that must be watched."""
    return isinstance(value, _LEAVES) or is_numpy_constant(type(value))


def _package_of(value: Any) -> str:
    """The package in which ``value`` was written, if it is a function, Python module or class.

    For other objects, the package in which their class was written.
    """
    if isinstance(value, types.FunctionType):
        name = value.__globals__.get("__name__")
    elif isinstance(value, types.ModuleType):
        name = value.__name__
    else:
        name = (value if isinstance(value, type) else type(value)).__module__
    return (name or "?").partition(".")[0]


def _is_lora(module: nn.Module) -> bool:
    return any(base.__module__.startswith("peft.tuners.lora.") for base in type(module).__mro__)


def _has_slots(kind: type) -> bool:
    """True if objects of ``kind`` keep attributes outside of their ``__dict__``."""
    slots = chain.from_iterable(vars(base).get("__slots__", ()) for base in kind.__mro__)
    return not {"__dict__", "__weakref__"}.issuperset(slots)


def _own_values(root: nn.Module, skipped: frozenset[str]) -> list[Any]:
    # Each comparison makes a new list of the root's attributes. If a Watch kept the root's ``__dict__``
    # instead, the Watch and the dict would form a reference cycle, and a deleted model would stay in memory
    # until the next garbage collection.
    return [
        part
        for name, value in vars(root).items()
        if name != _OUR_ENTRY and name not in _INERT and name not in skipped
        for part in (name, value)
    ]


def _same(values: list[Any], others: list[Any]) -> bool:
    return len(values) == len(others) and all(map(operator.is_, values, others))
