"""The repository's layout: links at the root, namespace folders, what a wheel holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import sdfastgn
from tests.command_line import ROOT
from tests.processes import process

LINKS = {"kernels": "sdfastgn/kernels", "patches": "sdfastgn/patches"}
SHIPPED = {
    "sdfastgn/__init__.py",
    "sdfastgn/__main__.py",
    "sdfastgn/bench/report.html",
    "sdfastgn/cli/__init__.py",
    "sdfastgn/kernels/group_norm/op.py",
    "sdfastgn/patches/tested_sources.json",
    "sdfastgn/py.typed",
}
MADE = {"build", "dist", "demo-output"}
MOST_WHEEL_BYTES = 1_100_000
BUILD = "import sys, setuptools.build_meta as backend; getattr(backend, 'build_' + sys.argv[1])(sys.argv[2])"

SMOKE = """
import importlib.metadata, torch, sdfastgn
print(sdfastgn.__file__)
print(importlib.metadata.version("sdfastgn"))
x = torch.randn(2, 8, 4, 4)
norm, stock = sdfastgn.GroupNorm(4, 8), torch.nn.GroupNorm(4, 8)
print(torch.allclose(norm(x), stock(x), atol=1e-6))
"""


def python(code: str, *args: str, cwd: Path = ROOT) -> str:
    """Standard output of ``code`` in a new interpreter."""
    done = process(sys.executable, "-c", code, *args, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- the tree


@pytest.mark.parametrize(("link", "target"), LINKS.items())
def test_root_folders_are_relative_links(link: str, target: str) -> None:
    path = ROOT / link
    assert path.is_symlink(), f"{link} must be a link; a copy would drift from {target}"
    assert path.readlink() == Path(target)
    assert path.is_dir()


@pytest.mark.parametrize("folder", LINKS.values())
def test_linked_folders_are_namespaces(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists(), (
        f"with {folder}/__init__.py the root's link shadows installed packages"
    )


def test_installed_package_wins_over_the_links(tmp_path: Path) -> None:
    """diffusers imports Hugging Face's ``kernels``; this root may come first on sys.path."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    code = "import sys; sys.path[:0] = sys.argv[1:]; import kernels; print(kernels.__file__)"
    assert Path(python(code, str(ROOT), str(tmp_path), cwd=tmp_path)) == tmp_path / "kernels" / "__init__.py"


@pytest.mark.parametrize(
    "path", [ROOT / "CITATION.cff", *(ROOT / ".github").rglob("*.yml")], ids=lambda path: path.name
)
def test_what_github_reads_can_be_read(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


# ---- what is built from it


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree: a build writes into its source and would reuse what is stale.

    Its folder has the name that git gives a clone.
    """
    copy = tmp_path_factory.mktemp("source") / "sdfastgn"
    copy.mkdir()
    for path in ROOT.iterdir():
        made = path.name.startswith(".") or path.suffix == ".egg-info" or path.name in MADE
        if made or (path / "pyvenv.cfg").exists():
            continue
        if path.is_symlink():
            (copy / path.name).symlink_to(path.readlink())
        elif path.is_dir():
            shutil.copytree(
                path, copy / path.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy2(path, copy)
    return copy


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    python(BUILD, "sdist", str(out), cwd=source)
    return next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_files(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def _wheel(source: Path, out: Path) -> Path:
    python(BUILD, "wheel", str(out), cwd=source)
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_wheel_has_the_package_whole_and_alone(wheel_files: set[str], source: Path) -> None:
    tops = {name.split("/")[0] for name in wheel_files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sdfastgn"}
    assert len(tops) == 2
    files = {p.relative_to(source).as_posix() for p in (source / "sdfastgn").rglob("*") if p.is_file()}
    assert {name for name in wheel_files if name.startswith("sdfastgn/")} == files
    assert files >= SHIPPED
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_files)


@pytest.mark.slow
def test_wheel_has_only_the_package(wheel: Path) -> None:
    """The weights of the demo, which only a checkout has, would be eight megabytes more."""
    assert wheel.stat().st_size <= MOST_WHEEL_BYTES


@pytest.mark.slow
def test_sdist_builds_the_same_wheel(sdist: Path, wheel_files: set[str], tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert not (unpacked / "tests").exists()
    assert set(zipfile.ZipFile(_wheel(unpacked, tmp_path / "wheel")).namelist()) == wheel_files


@dataclass(frozen=True)
class Clean:
    """An environment of its own. The dependencies are this environment's: nothing is downloaded."""

    path: Path

    @property
    def packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.path)}))

    def run(self, program: str, *arguments: str, cwd: Path) -> str:
        return self._output(self.path / "bin" / program, *arguments, cwd=cwd)

    def install(self, *what: str | Path, cwd: Path) -> None:
        options = ("--no-deps", "--no-index", "--no-build-isolation")
        pip = (sys.executable, "-m", "pip", "--python", self.path / "bin" / "python")
        self._output(*pip, "install", *options, *what, cwd=cwd)

    def _output(self, *command: str | Path, cwd: Path) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run(command, cwd=cwd, env=environment, **options)
        assert done.returncode == 0, done.stderr
        return str(done.stdout).strip()


@pytest.fixture
def clean(tmp_path: Path) -> Clean:
    made = Clean(tmp_path / "clean")
    venv.create(made.path)
    (made.packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return made


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(clean: Clean, wheel: Path, tmp_path: Path) -> None:
    clean.install(wheel, cwd=tmp_path)
    found, version, agrees = clean.run("python", "-c", SMOKE, cwd=tmp_path).splitlines()
    assert Path(found).is_relative_to(clean.packages)
    assert version == sdfastgn.__version__
    assert agrees == "True"
    assert f"sdfastgn {version}, Python" in clean.run("sdfastgn", "info", cwd=tmp_path)


@pytest.mark.slow
def test_an_editable_install_works_in_the_folder_of_the_checkout(clean: Clean, source: Path) -> None:
    """There the checkout's folder, which is called sdfastgn too, comes first on sys.path."""
    clean.install("-e", source, cwd=source)
    found, *_ = clean.run("python", "-c", SMOKE, cwd=source.parent).splitlines()
    assert Path(found) == source / "sdfastgn" / "__init__.py"
    assert f"sdfastgn {sdfastgn.__version__}" in clean.run(
        "python", "-m", "sdfastgn", "--version", cwd=source.parent
    )


# ---- importing it


def test_import_needs_neither_diffusers_nor_triton() -> None:
    code = "import sys, sdfastgn; print(*{name.partition('.')[0] for name in sys.modules})"
    assert {"diffusers", "transformers", "triton", "typer", "rich"}.isdisjoint(python(code).split())


@pytest.mark.slow
def test_plain_call_works_without_triton_and_diffusers() -> None:
    code = (
        "import sys; sys.modules.update(triton=None, diffusers=None)\n"
        "import torch, sdfastgn\n"
        "x = torch.randn(2, 8, 4, 4)\n"
        "y = sdfastgn.group_norm(x, 4, activation='silu')\n"
        "print(torch.allclose(y, torch.nn.functional.silu(torch.nn.functional.group_norm(x, 4)), atol=1e-6))"
    )
    assert python(code) == "True"


@pytest.mark.slow
def test_import_takes_no_longer_than_torch() -> None:
    code = (
        "from time import perf_counter as now\n"
        "start = now(); import torch; middle = now(); import sdfastgn; print(middle - start, now() - middle)"
    )
    # Both in one process, and the better of two: the first may read the disk, and other tests run beside.
    runs = (map(float, python(code).split()) for _ in range(2))
    assert min(ours - 0.1 * torchs for torchs, ours in runs) < 0.1
