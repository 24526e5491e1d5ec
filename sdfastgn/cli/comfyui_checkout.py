"""Imports ComfyUI from a checkout."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Packages that ComfyUI imports, but that are only needed for models and nodes that are not used here. They
# are often not installed, because most of them must be built for the installed version of torch.
_NOT_NEEDED = ("av", "kornia", "spandrel", "torchaudio", "torchsde", "torchvision")


class _EmptyClass(type):
    """The metaclass of empty classes, which replace missing classes. Their public attributes are None."""

    def __getattr__(cls, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Empty(types.ModuleType):
    """An empty Python module, which replaces a module that is imported but not used.

    Every public name in it is an empty class.
    """

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _EmptyClass(name, (), {})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook with which code that imports ``packages`` runs although they are not installed.

    The import of one of ``packages``, or of a module in it, gives an ``_Empty`` module.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_comfyui(
    folder: str, *arguments: str, modules: Sequence[str] = ("comfy.sample", "comfy.sd")
) -> str:
    """Import ComfyUI, and return its version. Call it only once in a process.

    Args:
        folder: the checkout.
        arguments: arguments of ComfyUI's command line, such as ``--cpu``.
        modules: the modules of ComfyUI to import.
    """
    sys.path.insert(0, folder)
    before, sys.argv = sys.argv, ["comfyui", *arguments]
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        if has_dynamic_vram(Path(folder)):
            _load_aimdo()
        with stand_ins():
            for name in modules:
                importlib.import_module(name)
    finally:
        sys.argv = before
    return str(importlib.import_module("comfyui_version").__version__)


def _load_aimdo() -> None:
    """Load comfy-aimdo's C library if ComfyUI's arguments turn DynamicVRAM on.

    With DynamicVRAM, ComfyUI's layers request their weights at each call, through the package comfy-aimdo.
    The modules of this package look for their library when they are imported, and modules of ComfyUI import
    them. So call this function before any module of ComfyUI is imported except ``comfy.options`` and
    ``comfy.cli_args``.
    """
    from comfy.cli_args import enables_dynamic_vram

    if enables_dynamic_vram():
        importlib.import_module("comfy_aimdo.control").init(nvml_pressure=True)


def release_of(folder: Path) -> str:
    """The release of the ComfyUI in the checkout ``folder``, which is read from a file and not imported."""
    text = (folder / "comfyui_version.py").read_text(encoding="utf-8")
    return text.partition('__version__ = "')[2].partition('"')[0]


def has_dynamic_vram(folder: Path) -> bool:
    """True if the ComfyUI in the checkout ``folder`` is new enough to have DynamicVRAM.

    With DynamicVRAM, ComfyUI's layers request their weights at each call.
    """
    return "enables_dynamic_vram" in (folder / "comfy" / "cli_args.py").read_text(encoding="utf-8")


def start_dynamic_vram() -> bool:
    """Turn DynamicVRAM on for models that are loaded later, as ComfyUI's ``main.py`` does when it starts.

    With DynamicVRAM, layers request their weights at each call. ComfyUI must be imported. Returns False if
    the package comfy-aimdo does not work on this machine. Then DynamicVRAM stays off.
    """
    names = (
        "comfy.memory_management",
        "comfy.model_management",
        "comfy.model_patcher",
        "comfy_aimdo.control",
    )
    modules: list[Any] = [importlib.import_module(name) for name in names]
    memory, management, patcher, control = modules
    devices = [device.index for device in management.get_all_torch_devices()]
    if not control.init_devices(devices):
        return False
    patcher.CoreModelPatcher = patcher.ModelPatcherDynamic
    memory.aimdo_enabled = True
    return True


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """A context in which empty modules replace the packages of ``_NOT_NEEDED`` that are not installed."""
    import transformers.utils

    # transformers checks once whether torchvision is installed, and remembers the result. It must check now:
    # later it would take the empty module for torchvision.
    transformers.utils.is_torchvision_available()
    missing = [name for name in _NOT_NEEDED if importlib.util.find_spec(name) is None]
    finder = _StandIns(missing)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
            del sys.modules[name]
