"""Imports ComfyUI from a checkout."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence

# Packages that ComfyUI imports only for models that are not loaded here. They must be built for the installed
# torch, so they are often missing.
_NOT_NEEDED = ("torchvision", "torchaudio")


class _Empty(types.ModuleType):
    """Replaces a package that is imported but not used: every name in it is an empty class."""

    __path__ = []  # noqa: RUF012  # what makes it a package

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


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
        with _stand_ins():
            for name in modules:
                importlib.import_module(name)
    finally:
        sys.argv = before
    return str(importlib.import_module("comfyui_version").__version__)


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Inside, each package of ``_NOT_NEEDED`` that is not installed is replaced by empty modules."""
    import transformers.utils

    # transformers remembers the answer. It must not take the empty module for an installed torchvision.
    transformers.utils.is_torchvision_available()
    missing = [name for name in _NOT_NEEDED if importlib.util.find_spec(name) is None]
    names = [name for package in missing for name in (package, f"{package}.transforms")]
    for name in names:
        sys.modules[name] = empty = _Empty(name)
        empty.__spec__ = importlib.machinery.ModuleSpec(name, None)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
