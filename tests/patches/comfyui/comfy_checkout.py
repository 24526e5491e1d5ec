"""A real checkout of ComfyUI, named by the environment variable ``COMFYUI``."""

import functools
import os
from pathlib import Path

import pytest

from sdfastgn.cli import comfyui_checkout

__all__ = ["import_for_cpu"]


def import_for_cpu():
    """Make ``import comfy`` and ``import nodes`` possible. Skips the test module without a checkout."""
    folder = os.environ.get("COMFYUI", "")
    if not folder or not (Path(folder) / "comfy").is_dir():
        pytest.skip("no ComfyUI: COMFYUI names no checkout", allow_module_level=True)
    _import(folder)


_import = functools.cache(lambda folder: comfyui_checkout.import_comfyui(folder, "--cpu", modules=["nodes"]))
