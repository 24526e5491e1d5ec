"""A real checkout of ComfyUI, named by the environment variable ``COMFYUI``, imported for its CPU."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["CHECKOUT", "import_comfyui"]

CHECKOUT = os.environ.get("COMFYUI", "")
# ComfyUI imports them for models that no test has. Their builds have to be that of torch, so they are
# rarely at hand.
_NOT_NEEDED = ("torchvision", "torchaudio")


class _Empty(types.ModuleType):
    """Stands for a package of which nothing is used: every name in it is an empty class."""

    __path__ = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_comfyui(*arguments: str) -> str:
    """Make ``import comfy`` possible and return ComfyUI's version; skip where there is none.

    arguments: of ComfyUI's command line.
    """
    if not CHECKOUT or not (Path(CHECKOUT) / "comfy").is_dir():
        pytest.skip("no ComfyUI: COMFYUI names no checkout", allow_module_level=True)
    if CHECKOUT not in sys.path:
        sys.path.insert(0, CHECKOUT)
    before, sys.argv = sys.argv, ["comfyui", *arguments]
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        with _stand_ins():
            import comfy.sd
            import nodes  # noqa: F401
    finally:
        sys.argv = before
    import comfyui_version

    return comfyui_version.__version__


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    # It remembers what it finds, and must not find these.
    import transformers.utils

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
