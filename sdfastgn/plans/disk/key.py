"""Computes the key under which a plan is kept on disk. A plan is a traced call, rewritten to kernels.

The key is a hash of all that the trace and the rewriting depend on. Two processes have equal keys only if
tracing would give the same plan in both. This needs equal arguments apart from the values of tensors, modules
with equal attributes, weights with equal shapes, the same code, the same GPU and the same versions. Weights
that are one and the same tensor in one process must also be one tensor in the other.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sdfastgn.kernels.common.gpu import triton
from sdfastgn.patches.code.reach import function_in, package_of
from sdfastgn.patches.graphs.watch import attributes_of, hooks_of
from sdfastgn.plans.disk.description import Description, digest_of
from sdfastgn.plans.guard import Guard

# Number of the format of files. It is part of each key, so files of another format are not read.
_FORMAT = 1
# If a file of the model's code belongs to another package than these, a key has the bytecode of all functions
# in the file. For these packages, a key needs only the version, and what the model's code refers to by name.
_BY_VERSION = sys.stdlib_module_names | {"torch", "triton", "numpy", "sdfastgn"}


def key_of(module: nn.Module, call: Any, device: torch.device, guard: Guard) -> str | None:
    """Returns the key for the plan of a call of ``module``.

    Returns None if something that the plan depends on has content that no text can describe, such as a lock.

    Args:
        module: the module.
        call: describes the arguments and settings of the call. It may have objects of any classes.
        device: the device of the call.
        guard: the record of the present state of the module and of its code.
    """
    about = _Model()
    try:
        about.add(call)
        about.add(module)
        code = [_of_entry(about, owner, name, value) for owner, name, value in guard.names()]
        code += [_of_entry(about, "", None, function) for function in guard.functions()]
    except Exception:  # no key: an object cannot be described, or its own code raises an error
        return None
    about.note(*sorted(code))
    files = _files(about)
    about.note(*(f"{name} {_code_of_file(name)}" for name in files))
    about.note(*(f"{name} {_version(name)}" for name in sorted(set(map(package_of, files)))))
    about.note(*surroundings(), *_gpu(device))
    return about.digest()


class _Model(Description):
    """A ``Description`` that leaves out parts of modules on which the modules' calls do not depend."""

    def __init__(self) -> None:
        super().__init__()
        self._is_root = True

    def add(self, value: Any) -> None:
        if not isinstance(value, nn.Module):
            super().add(value)
        elif self.is_new(value):
            is_root, self._is_root = self._is_root, False
            self.add_class(type(value))
            self.add_all(attributes_of(value, is_root=is_root))
            for name in ("_parameters", "_buffers", "_modules"):
                self.add_all(getattr(value, name))
            for hook in () if is_root else hooks_of(value):
                self.add(hook)


def _of_entry(about: _Model, owner: str, name: Any, value: Any) -> str:
    """Returns a hash of a name that code reads, and of its value.

    A ``Description`` numbers objects in the order in which they are added. The order of names differs from
    process to process, so each name gets a ``Description`` of its own.
    """
    own = _Model()
    own.note(owner)
    own.add(name)
    own.add(value)
    about.classes |= own.classes
    about.functions += own.functions
    return own.digest()


def _files(about: _Model) -> list[str]:
    """The names of the Python modules that define the model's classes, their base classes and functions."""
    names = {base.__module__ for kind in about.classes for base in kind.__mro__}
    names |= {str(function.__globals__.get("__name__")) for function in about.functions}
    return sorted(name for name in names if package_of(name) not in _BY_VERSION)


def _code_of_file(name: str) -> str:
    """A hash of the bytecode of all functions and methods in the Python module ``name``, used or not."""
    found = sorted(_functions_in(name, vars(sys.modules.get(name, types)), ""))
    return hashlib.sha256("\0".join(found).encode("utf-8", "surrogatepass")).hexdigest()


def _functions_in(module: str, names: Mapping[str, Any], where: str) -> Iterator[str]:
    for name, value in list(names.items()):
        place = f"{where}.{name}" if where else name
        function = function_in(value)
        if function is not None:
            yield f"{place} {digest_of(function.__code__)}"
        elif isinstance(value, type) and (value.__module__, value.__qualname__) == (module, place):
            yield from _functions_in(module, vars(value), place)


def _version(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__version__", ""))


@functools.cache
def surroundings() -> tuple[str, ...]:
    root = Path(__file__).parents[2]
    found = hashlib.sha256()
    folders = [root / name for name in ("kernels", "patches", "plans")]
    for path in sorted(each for folder in folders for each in folder.rglob("*.py")):
        found.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    versions: Iterable[Any] = (
        _FORMAT, sys.version, sys.flags.optimize, platform.machine(), torch.__version__,
        torch.version.git_version, getattr(triton, "__version__", None),
        found.hexdigest(),
    )  # fmt: skip
    return tuple(map(str, versions))


def _gpu(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return (str(device),)
    kind = torch.cuda.get_device_properties(device)
    numbers = kind.major, kind.minor, kind.multi_processor_count, kind.total_memory
    return str(device), kind.name, str(numbers)
