"""Archives of compiled kernels: what they take from Triton's cache, and what they refuse."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sdfastgn.kernels.common import archive
from sdfastgn.kernels.common.archive import ArchiveError
from tests.processes import process

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

KEY = "0f" * 32
CODE = {"some_kernel.cubin": b"\x7fELF", "some_kernel.json": json.dumps({"hash": KEY}).encode()}
GPU = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch):
    """A GPU to ask for its name: assign ``name`` to have another."""
    card = SimpleNamespace(name="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return card


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of Triton's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path, card, monkeypatch):
    """An archive of one kernel."""
    files = {}
    for name, data in {**CODE, "some_kernel.ptx": b"text"}.items():
        (tmp_path / name).write_bytes(data)
        files[name] = str(tmp_path / name)
    monkeypatch.setattr(archive, "_launched", {})
    archive.note(SimpleNamespace(hash=KEY, metadata_group=files))
    assert archive.export(tmp_path / "kernels.zip", GPU) == 1
    return tmp_path / "kernels.zip"


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_triton_finds_the_kernel_in_a_cache_at_another_place(path, cache):
    from triton.runtime.cache import get_cache_manager

    assert archive.load(path, GPU) == (1, 0)
    found = get_cache_manager(KEY).get_group("some_kernel.json")
    assert {name: Path(at).read_bytes() for name, at in found.items()} == CODE
    assert all(at.startswith(str(cache)) for at in found.values())
    assert archive.load(path, GPU) == (0, 1)


@pytest.mark.parametrize("complete", [True, False])
def test_what_is_in_the_cache_stays(complete, path, cache):
    from triton.runtime.cache import get_cache_manager

    manager = get_cache_manager(KEY)
    at = manager.put(b"other", "some_kernel.cubin")
    if complete:
        group = {"some_kernel.cubin": at, "some_kernel.json": manager.put(b"{}", "some_kernel.json")}
        manager.put_group("some_kernel.json", group)
    before = files_of(cache)
    assert archive.load(path, GPU) == (0, 1)
    assert files_of(cache) == before


def test_another_gpu_is_an_error_with_both_names(path, card, cache):
    card.name = "NVIDIA L4"
    with pytest.raises(ArchiveError, match="another GPU: 'NVIDIA H200', here it is 'NVIDIA L4'"):
        archive.load(path, GPU)
    assert not cache.exists()


@pytest.mark.parametrize(
    "entry", ["compute capability", "Triton", "torch", "Python", "source of the kernels", "format"]
)
def test_other_versions_are_an_error_with_both(entry, path, cache, monkeypatch):
    here = archive._manifest(GPU)
    monkeypatch.setattr(archive, "_manifest", lambda device: {**here, entry: "mine"})
    with pytest.raises(ArchiveError, match=re.escape(f"another {entry}: {here[entry]!r}, here it is 'mine'")):
        archive.load(path, GPU)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({f"{KEY}/../../evil.json": b"{}"}, "it has a file"),
        ({"/tmp/evil.cubin": b""}, "it has a file"),
        ({f"{KEY}/launcher.so": b""}, "it has a file"),
        ({f"{KEY}/k.cubin": b""}, "is not one kernel with its code"),
        ({f"{KEY}/k.cubin": b"", f"{KEY}/k.json": b"{"}, "is not one kernel with its code"),
        ({f"{KEY}/k.cubin": b"", f"{KEY}/k.json": b'{"hash": "00"}'}, "is not one kernel with its code"),
    ],
)
def test_unsound_files_are_refused_before_anything_is_written(files, text, path, cache):
    with zipfile.ZipFile(path, "a") as file:
        for name, data in files.items():
            file.writestr(name.replace(KEY, "1e" * 32), data)
    with pytest.raises(ArchiveError, match=text):
        archive.load(path, GPU)
    assert not cache.exists()


@pytest.mark.parametrize("data", [b"no zip", b""])
def test_no_archive(data, path, cache):
    path.write_bytes(data)
    with pytest.raises(ArchiveError, match="is no archive of kernels"):
        archive.load(path, GPU)


def test_a_failed_export_leaves_the_file(path, card):
    before = path.read_bytes()
    archive.note(SimpleNamespace(hash="1e" * 32, metadata_group={"k.json": "/missing"}))
    with pytest.raises(OSError, match="missing"):
        archive.export(path, GPU)
    assert path.read_bytes() == before
    assert not list(path.parent.glob(".kernels*"))


def test_the_variable_is_read_once_and_warns_if_the_archive_is_of_no_use(path, card, cache, monkeypatch):
    archive.add_named.cache_clear()
    monkeypatch.setenv(archive.VARIABLE, str(path))
    archive.add_named(torch.device("cpu"))
    assert not cache.exists()
    archive.add_named(GPU)
    assert files_of(cache)
    card.name = "NVIDIA L4"
    with pytest.warns(UserWarning, match="SDFASTGN_KERNEL_ARCHIVE: .* here it is 'NVIDIA L4'"):
        archive.add_named(torch.device("cuda", 1))
    archive.add_named(torch.device("cuda", 1))
    monkeypatch.setenv(archive.VARIABLE, "/missing")
    with pytest.warns(UserWarning, match="No such file"):
        archive.add_named(torch.device("cuda", 2))
    archive.add_named.cache_clear()


@pytest.mark.slow
def test_a_real_kernel_is_not_compiled_again(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}

    def run(what, cache):
        command = [sys.executable, "-m", "tests.kernels.export_one", what, str(tmp_path / "kernels.zip")]
        done = process(*command, **environment, TRITON_CACHE_DIR=str(tmp_path / cache), TRITON_INTERPRET="")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert run("export", "one") == {"compiled": 1, "exported": 1}
    assert run("import", "two") == {"imported": [1, 0], "compiled": 0}
