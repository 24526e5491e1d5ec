"""Archives of compiled kernels: what they take from Triton's cache, and what they refuse."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sdfastgn.kernels.common import archive
from sdfastgn.kernels.common.archive import ArchiveError, Kernel
from tests.processes import ROOT, process

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not archive.can_record(),
    reason="Triton is not installed, or older than archives need",
)

KERNEL = Kernel("some_kernel", "source", "backend", "options", {"NVPTX_ENABLE": "1"})
GPU = torch.device("cuda", 0)
OTHER_GPU = torch.device("cuda", 1)


def key_of(build):
    """The hash under which Triton, of this build, looks for ``KERNEL``."""
    return archive._digest(f"{build}-source-backend-options-[('NVPTX_ENABLE', '1')]")


KEY = key_of("build")
CODE = b"\x7fELF"


def described(key):
    return json.dumps({"hash": key, "num_warps": 4}).encode()


@pytest.fixture
def card(monkeypatch):
    """A GPU: assign ``capability`` to have another."""
    card = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card.capability)
    return card


@pytest.fixture
def build(monkeypatch):
    """This Triton: call it to have one that was built for another Python."""

    def make(name):
        monkeypatch.setattr("triton.runtime.cache.triton_key", lambda: name)

    make("build")
    return make


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of Triton's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path, card, build, monkeypatch):
    """An archive of one kernel."""
    from triton.runtime.cache import get_cache_manager

    with monkeypatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path / "made"))
        manager = get_cache_manager(KEY)
        files = {"some_kernel.cubin": CODE, "some_kernel.json": described(KEY), "some_kernel.ptx": b"text"}
        manager.put_group("some_kernel.json", {name: manager.put(files[name], name) for name in files})
        recorded = {KEY: KERNEL, "1e" * 32: KERNEL._replace(name="not_compiled")}
        assert archive.export(tmp_path / "kernels.zip", (9, 0), recorded) == 1
    return tmp_path / "kernels.zip"


@pytest.fixture
def package(path, monkeypatch):
    """The folder of the package ``sdfastgn_compiled``, which has the archive."""
    folder = path.parent / "site" / archive.PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    path.rename(folder / archive.file_name((9, 0)))
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setattr(archive, "_states", {})
    return folder


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", ["build", "of another Python"])
def test_triton_finds_the_kernel_in_a_cache_at_another_place(name, path, cache, build):
    from triton.runtime.cache import get_cache_manager

    build(name)
    assert archive.load(path, GPU) == (1, 0)
    found = get_cache_manager(key_of(name)).get_group("some_kernel.json")
    files = {"some_kernel.cubin": CODE, "some_kernel.json": described(key_of(name))}
    assert {name: Path(at).read_bytes() for name, at in found.items()} == files
    assert all(at.startswith(str(cache)) for at in found.values())
    assert archive.load(path, GPU) == (0, 1)


@pytest.mark.parametrize("complete", [True, False])
def test_what_is_complete_in_the_cache_stays(complete, path, cache):
    from triton.runtime.cache import get_cache_manager

    manager = get_cache_manager(KEY)
    at = manager.put(b"other", "some_kernel.cubin")
    if complete:
        group = {"some_kernel.cubin": at, "some_kernel.json": manager.put(b"{}", "some_kernel.json")}
        manager.put_group("some_kernel.json", group)
    assert archive.load(path, GPU) == ((0, 1) if complete else (1, 0))
    assert Path(at).read_bytes() == (b"other" if complete else CODE)


@pytest.mark.parametrize("entry", ["compute capability", "Triton", "source of the kernels", "format"])
def test_other_conditions_are_an_error_with_both(entry, path, cache, monkeypatch):
    here = archive._conditions((9, 0))
    monkeypatch.setattr(archive, "_conditions", lambda capability: {**here, entry: "mine"})
    with pytest.raises(ArchiveError, match=re.escape(f"another {entry}: {here[entry]!r}, here it is 'mine'")):
        archive.load(path, GPU)
    assert not cache.exists()


@pytest.mark.parametrize(
    "files",
    [
        {"../../evil.json": b"{}"},
        {"/tmp/evil.cubin": b""},
        {f"{KEY}/launcher.so": b""},
        {f"{KEY}/other.cubin": b""},
        {f"{KEY}/some_kernel.json": b"{"},
        {f"{KEY}/some_kernel.json": b'{"hash": "00"}'},
        {f"{'2d' * 32}/k.cubin": b""},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_unsound_files_are_refused_before_anything_is_written(files, path, cache):
    with zipfile.ZipFile(path, "a") as file:
        for name, data in files.items():
            file.writestr(name, data)
    with pytest.raises(ArchiveError, match="is no archive of kernels"):
        archive.load(path, GPU)
    assert not cache.exists()


@pytest.mark.parametrize("entry", [{}, {"name": 1}, {"variables": "x"}, {"more": "x"}], ids=str)
def test_unsound_manifests_are_refused(entry, path, cache):
    with zipfile.ZipFile(path) as file:
        manifest = json.loads(file.read("manifest.json"))
        others = {name: file.read(name) for name in file.namelist() if name != "manifest.json"}
    kernel = {**manifest["kernels"][KEY], **entry} if entry else {}
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("manifest.json", json.dumps({**manifest, "kernels": {KEY: kernel}}))
        for name, data in others.items():
            file.writestr(name, data)
    with pytest.raises(ArchiveError, match="is no archive of kernels"):
        archive.load(path, GPU)
    assert not cache.exists()


def damaged(data):
    """The archive with another byte in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :]


@pytest.mark.parametrize(
    "damage", [lambda data: b"no zip", lambda data: b"", lambda data: data[:-9], damaged]
)
def test_no_archive(damage, path, cache):
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ArchiveError, match="is no archive of kernels"):
        archive.load(path, GPU)
    assert not cache.exists()


def test_no_wrong_byte_raises_another_error(path, cache):
    data = path.read_bytes()
    for place in range(0, len(data), 5):
        path.write_bytes(data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :])
        with contextlib.suppress(ArchiveError):
            archive.load(path, GPU)
        archive.is_of_these_kernels(path)


def test_a_failed_export_leaves_the_file(path, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "made"))
    before = path.read_bytes()
    for file in (tmp_path / "made").rglob("*.cubin"):
        file.unlink()
        file.mkdir()  # reading it fails
    with pytest.raises(OSError, match="directory"):
        archive.export(path, (9, 0), {KEY: KERNEL})
    assert path.read_bytes() == before
    assert not list(path.parent.glob(".kernels*"))


def test_the_variable_is_read_once_and_warns_if_the_archive_is_of_no_use(path, card, cache, monkeypatch):
    monkeypatch.setattr(archive, "_states", {})
    monkeypatch.setenv(archive.VARIABLE, str(path))
    archive.add_archives(torch.device("cpu"))
    assert not cache.exists()
    archive.add_archives(GPU)
    assert files_of(cache)
    assert archive.state(GPU) == "compiled kernels from SDFASTGN_KERNEL_ARCHIVE: 1"
    monkeypatch.setattr(archive, "current_device", lambda: GPU.index)
    assert archive.state(torch.device("cuda")) == archive.state(GPU)
    card.capability = (8, 9)
    with pytest.warns(UserWarning, match="SDFASTGN_KERNEL_ARCHIVE: .* here it is '8.9'"):
        archive.add_archives(OTHER_GPU)
    archive.add_archives(OTHER_GPU)
    monkeypatch.setenv(archive.VARIABLE, "/missing")
    with pytest.warns(UserWarning, match="No such file"):
        archive.add_archives(torch.device("cuda", 2))


def test_without_the_package_nothing_is_loaded_or_said(card, cache, monkeypatch):
    monkeypatch.setattr(archive, "_states", {})
    monkeypatch.setattr(archive, "PACKAGE", "sdfastgn_missing")
    archive.add_archives(GPU)
    assert archive.state(GPU) is None
    assert not cache.exists()


def test_the_package_is_found_once_by_several_threads(package, cache, monkeypatch):
    loads, real = [], archive.load
    monkeypatch.setattr(archive, "load", lambda *arguments: loads.append(1) or real(*arguments))
    threads = [threading.Thread(target=archive.add_archives, args=(GPU,)) for _ in range(8)]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)
    assert len(loads) == 1
    assert archive.state(GPU) == "compiled kernels from sdfastgn_compiled: 1"
    assert files_of(cache)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("capability", "has no 'sm_120-triton-.*', only sm_90-triton-"),
        ("Triton", "has no 'sm_90-triton-9.9.9.zip', only sm_90-triton-"),
        ("source", "made for another source of the kernels"),
        ("damage", "is no archive of kernels"),
        ("an error of Triton", "unexpected"),
    ],
)
def test_a_package_of_no_use_is_said_once(name, text, package, card, cache, monkeypatch):
    (path,) = package.glob("*.zip")
    if name == "capability":
        card.capability = (12, 0)
    elif name == "Triton":
        monkeypatch.setattr(archive.triton, "__version__", "9.9.9")
    elif name == "source":
        monkeypatch.setattr(archive, "_source_hash", lambda: "other")
    elif name == "damage":
        path.write_bytes(damaged(path.read_bytes()))
    else:
        monkeypatch.setattr("triton.runtime.cache.get_cache_key", lambda: "unexpected arguments")
        text = "arguments"
    with pytest.warns(UserWarning, match=f"^sdfastgn_compiled: .*{text}.*compiled instead"):
        archive.add_archives(GPU)
    archive.add_archives(GPU)  # a second warning would be an error
    assert re.search(f"^compiled kernels of sdfastgn_compiled not used: .*{text}", archive.state(GPU))
    assert not cache.exists()


@pytest.mark.slow
def test_real_kernels_are_not_compiled_again_by_several_processes(tmp_path):
    """Those that were compiled with a Triton for another Python, too."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = (sys.executable, "-m", "tests.kernels.export_one")
    path = tmp_path / archive.PACKAGE / archive.file_name((9, 0))
    path.parent.mkdir()
    (path.parent / "__init__.py").touch()
    environment |= {"TRITON_INTERPRET": "", "TRITON_CACHE_DIR": str(tmp_path / "one")}
    done = process(*program, "export", str(path), **environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"compiled": 1, "exported": 1, "warnings": []}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "two"), "TRITON_BUILD": "of another Python"}
    environment["PYTHONPATH"] = str(tmp_path)
    started = [
        subprocess.Popen([*program, "find"], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    for each in started:
        found = json.loads(each.communicate(timeout=300)[0])
        state = "compiled kernels from sdfastgn_compiled: 1"
        assert found == {"compiled": 0, "state": state, "warnings": []}
