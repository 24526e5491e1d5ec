"""A checkout of ComfyUI, imported from its folder."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence

# ComfyUI imports them for models that nobody loads here. Their builds have to be that of torch, so they
# are rarely at hand.
_NOT_NEEDED = ("torchvision", "torchaudio")


class _Empty(types.ModuleType):
    """Stands for a package of which nothing is used: every name in it is an empty class."""

    __path__ = []  # noqa: RUF012  # what makes it a package

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_comfyui(
    folder: str, *arguments: str, modules: Sequence[str] = ("comfy.sample", "comfy.sd")
) -> str:
    """Import ``modules`` of ComfyUI, and return its version. Once a process.

    Args:
        folder: the checkout.
        arguments: of ComfyUI's command line, such as ``--cpu``.
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
    """Within, empty modules stand for what ``_NOT_NEEDED`` names and is not installed."""
    import transformers.utils

    transformers.utils.is_torchvision_available()  # it remembers, and must not find these
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
