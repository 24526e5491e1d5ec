"""The modules that replace packages which ComfyUI imports, but does not need here."""

import importlib
import sys

import pytest

from sdfastgn.cli import comfyui_checkout


def test_a_missing_package_is_imported_as_empty_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfyui_checkout, "_NOT_NEEDED", ("no_such_package", "json"))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    with comfyui_checkout.stand_ins():
        part = importlib.import_module("no_such_package.part")
        assert importlib.import_module("json").loads("1") == 1

    class Own(part.Thing):
        SIZE = 3

    # ComfyUI's tables have members of enums of PyAV, which only newer versions of PyAV know.
    assert (part.Thing.MEMBER, Own.SIZE) == (None, 3)
    for holder in (part, part.Thing):
        with pytest.raises(AttributeError, match="__all__"):
            holder.__all__.clear()
