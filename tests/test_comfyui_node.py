"""The nodes for ComfyUI, without ComfyUI: the folder of ``make comfyui-node``, and the page's script."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import ROOT

pytestmark = pytest.mark.slow

# Imports the folder in ``argv[1]`` as ComfyUI does, from a path without sdfastgn, and prints what it finds.
# The entries of ``argv[2:]`` go on the path: the folders with PyTorch and the other packages.
_IMPORT = """
import importlib.util, json, sys
sys.path += sys.argv[2:]
spec = importlib.util.spec_from_file_location("node", sys.argv[1] + "/__init__.py")
sys.modules["node"] = node = importlib.util.module_from_spec(spec)
spec.loader.exec_module(node)
import sdfastgn
print(json.dumps([sorted(node.NODE_CLASS_MAPPINGS), sdfastgn.__file__]))
"""
_IMPORT_ALL = f"{_IMPORT}import sdfastgn.patches.registry\n"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, built from a copy of the checkout in which an earlier build has left files."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("sdfastgn", "integrations"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / name, copy)
    for name in ("build/comfyui/sdfastgn/package/sdfastgn", "sdfastgn/__pycache__"):
        (copy / name).mkdir(parents=True)
        (copy / name / "removed_since.py").touch()
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    # With this Python nothing can be installed.
    done = subprocess.run(
        ["make", "comfyui-node", "PYTHON=false"], cwd=copy, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not (copy / ".venv").exists()
    return copy / "build" / "comfyui" / "sdfastgn"


def run_import(
    folder: Path, tmp_path: Path, *first: Path, program: str = _IMPORT
) -> subprocess.CompletedProcess[str]:
    """Import ``folder`` in a new process, with the folders ``first`` before the others on the path."""
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    # -I and -S keep the tests' own path and editable installs out. -B writes no files into ``folder``.
    return subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", program, str(folder), *map(str, first), *packages],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )


def test_it_runs_without_an_installed_package(node: Path, tmp_path: Path) -> None:
    done = run_import(node, tmp_path, program=_IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    names, file = json.loads(done.stdout)
    assert names == ["SdfastgnOptimize", "SdfastgnOptimizeVAE", "SdfastgnRunReport"]
    assert Path(file) == node / "package" / "sdfastgn" / "__init__.py"


def test_a_folder_of_the_same_name_is_not_taken_for_the_package(node: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "sdfastgn" / "patches"  # ``patches`` is a link in a checkout
    checkout.parent.mkdir()
    checkout.symlink_to(ROOT / "sdfastgn" / "patches")
    custom_nodes = node.parent  # other nodes put it on the path
    for first in (custom_nodes, tmp_path):
        done = run_import(node, tmp_path, first)
        assert done.returncode == 0, done.stderr
        assert Path(json.loads(done.stdout)[1]) == node / "package" / "sdfastgn" / "__init__.py"
        done = run_import(node, tmp_path, first, ROOT)  # the installed package has precedence
        assert done.returncode == 0, done.stderr
        assert Path(json.loads(done.stdout)[1]) == ROOT / "sdfastgn" / "__init__.py"


def test_without_the_package_it_says_what_to_install(node: Path, tmp_path: Path) -> None:
    shutil.copytree(node, tmp_path / "node", ignore=shutil.ignore_patterns("package"))
    done = run_import(tmp_path / "node", tmp_path)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith(
        "ImportError: sdfastgn is not installed. With the Python that runs ComfyUI, run"
    )


def test_it_has_all_files_and_no_others(node: Path) -> None:
    def files_in(folder: Path) -> set[str]:
        found = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        return {name for name in found if "__pycache__" not in name}

    own = {name for name in files_in(node) if not name.startswith("package/")}
    assert own == files_in(ROOT / "integrations" / "comfyui")
    package = {f"sdfastgn/{name}" for name in files_in(ROOT / "sdfastgn")}
    assert files_in(node / "package") == {"LICENSE", *package}
    assert not list(node.rglob("__pycache__"))


def test_a_search_finds_the_node_that_optimizes_first() -> None:
    spec = importlib.util.spec_from_file_location("nodes", ROOT / "integrations" / "comfyui" / "nodes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    optimize, *others = module.NODES
    assert optimize.id == "SdfastgnOptimize"
    for node in module.NODES:
        assert node.id.lower().startswith("sdfastgn")
        assert node.name.lower().startswith("sdfastgn")
    # Of nodes whose id or name begins with what is searched, ComfyUI's page shows the shortest first.
    lengths = [min(len(node.id), len(node.name)) for node in others]
    assert min(len(optimize.id), len(optimize.name)) < min(lengths)


# Modules in place of those of ComfyUI's page that our script imports.
_APP = """
const node = (type, subgraph) => ({
  type, subgraph, widgets: [], size: [0, 0], computeSize: () => [1, 1], setSize() {}, setDirtyCanvas() {},
});
const graph = (nodes) => ({ getNodeById: (id) => nodes[id], setDirtyCanvas() {} });
const ours = () => node("SdfastgnOptimize");
const inner = graph({ 3: ours(), 8: node("a subgraph", graph({ 4: ours() })) });
export const app = {
  graph: graph({ 3: ours(), 5: node("a subgraph", inner), 7: node("KSampler") }),
  registerExtension: (extension) => (window.extension = extension),
};
window.texts = () => {
  const root = app.graph, first = root.getNodeById(5).subgraph, second = first.getNodeById(8).subgraph;
  return [[root, 3], [first, 3], [second, 4], [root, 7]].map(
    ([graph, id]) => graph.getNodeById(id).widgets.map((widget) => widget.value));
};
"""
_API = "export const api = { addEventListener: (name, heard) => (window.heard = heard) };"
_WIDGETS = """
export const ComfyWidgets = { STRING: (node, name) => {
  const widget = { name, options: {} };
  node.widgets.push(widget);
  return { widget };
} };
"""


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A page with our script, and with some nodes and subgraphs."""
    (tmp_path / "scripts").mkdir()
    for name, text in {"app": _APP, "api": _API, "widgets": _WIDGETS}.items():
        (tmp_path / "scripts" / f"{name}.js").write_text(text)
    (tmp_path / "extensions" / "sdfastgn").mkdir(parents=True)
    shutil.copy(ROOT / "integrations" / "comfyui" / "web" / "text.js", tmp_path / "extensions" / "sdfastgn")
    script = '<script type="module" src="extensions/sdfastgn/text.js"></script>'
    (tmp_path / "index.html").write_text(f"<!doctype html><title>nodes</title>{script}")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.get(f"http://127.0.0.1:{server.server_port}/")
        browser.execute_script("window.extension.setup()")
        yield browser
        server.shutdown()


def test_a_new_text_is_shown_on_its_node(page: Any) -> None:
    for name in ("3", "5:3", "5:8:4", "7", "9", "9:3", "3:3", "5:9"):
        page.execute_script("window.heard({detail: {node: arguments[0], text: arguments[0]}})", name)
    # The node 7 is none of ours: the page may show another workflow by now.
    assert page.execute_script("return window.texts()") == [["3"], ["5:3"], ["5:8:4"], []]
