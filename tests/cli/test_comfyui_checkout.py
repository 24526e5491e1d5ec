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
    monkeypatch.delitem(sys.modules, "no_such_package.part")
    monkeypatch.delitem(sys.modules, "no_such_package")

    class Own(part.Thing):
        SIZE = 3

    # ComfyUI's tables have members of enums of PyAV, which only newer versions of PyAV know.
    assert (part.Thing.MEMBER, Own.SIZE) == (None, 3)
    with pytest.raises(AttributeError, match="__missing__"):
        part.Thing.__missing__
    with pytest.raises(AttributeError, match="__path_of__"):
        part.__path_of__
