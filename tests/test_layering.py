"""House rules that neither ruff nor import-linter checks: sizes of functions, names, imports, a marker."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for folder in ("sdfastgn", "scripts") for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_FUNCTION_LINES = 50
# A kernel's body may be longer: cut in two, some compile to other code.
MAX_KERNEL_LINES = 60

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(code: str) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(code)) if isinstance(node, Function))


@functools.cache
def imports(path: Path) -> list[ast.ImportFrom]:
    """The statements ``from ... import ...`` of a file, also those inside of functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def function_lines(function: Function) -> int:
    """Lines without the docstring. A kernel's parameters do not count either: it has dozens."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    if is_kernel(function):
        total -= first.lineno - function.lineno
    return total


def is_kernel(function: Function) -> bool:
    return any("jit" in ast.unparse(decorator).split("(")[0] for decorator in function.decorator_list)


def test_no_function_is_long() -> None:
    assert not {
        f"{name_of(path)}:{function.lineno} {function.name}": function_lines(function)
        for path in SOURCES
        for function in functions(path.read_text(encoding="utf-8"))
        if function_lines(function) > (MAX_KERNEL_LINES if is_kernel(function) else MAX_FUNCTION_LINES)
    }


def test_no_file_is_called_utils() -> None:
    assert not [name_of(path) for path in SOURCES + TESTS if path.stem in {"utils", "helpers", "misc"}]


def test_tests_and_scripts_import_public_names() -> None:
    private = [
        f"{name_of(path)} imports {node.module}.{alias.name}"
        for path in [*TESTS, *sorted((ROOT / "scripts").rglob("*.py"))]
        for node in imports(path)
        if (node.module or "").startswith("sdfastgn")
        for alias in node.names
        if any(
            part.startswith("_") and part != "__version__" for part in (*node.module.split("."), alias.name)
        )
    ]
    assert not private


def test_no_test_imports_a_test() -> None:
    assert not [
        f"{name_of(path)} imports {node.module}"
        for path in TESTS
        for node in imports(path)
        if any(
            part.startswith("test_")
            for part in [*(node.module or "").split("."), *(a.name for a in node.names)]
        )
    ]


def test_the_tests_of_patches_run_fused_code() -> None:
    """Without the marker they would compare stock's code with itself, and pass."""
    marks = ("pytest.mark.fused_on_cpu", "pytestmark = pytest.mark.gpu\n")
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in TESTS
        if "patches" in path.parts and path.name.startswith("test_")
    }
    assert len(texts) > 0
    assert not [name_of(path) for path, text in texts.items() if not any(mark in text for mark in marks)]


@pytest.mark.slow
def test_the_comfyui_node_needs_neither_diffusers_nor_fork() -> None:
    """It imports what the node imports, except ComfyUI and the files that need ComfyUI.

    Windows has no ``fork``, and so no ``os.register_at_fork``.
    """
    folders = [ROOT / "sdfastgn" / "patches" / "comfyui", ROOT / "integrations" / "comfyui"]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for each in folders for path in each.glob("*.py")]
    nodes = [node for tree in trees for node in tree.body if isinstance(node, ast.ImportFrom)]
    lines = {ast.unparse(node) for node in nodes if (node.module or "").startswith("sdfastgn.")}
    lines = {line for line in lines if "comfyui" not in line}
    assert any("patches.layers.tokens" in line for line in lines)
    # If ``sys.modules`` has None for a package, an import of the package raises ImportError.
    missing = "import os, sys; sys.modules['diffusers'] = None; import torch; del os.register_at_fork"
    code = "\n".join([missing, *sorted(lines)])
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
def test_a_plain_module_needs_neither_diffusers_nor_numpy() -> None:
    """Of the packages that sdfastgn imports, only torch is a requirement."""
    code = """
import importlib.util, sys
import torch
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("diffusers", "numpy") else found(name, *more)
sys.modules.update(diffusers=None, numpy=None)
import sdfastgn
model = sdfastgn.optimize(torch.nn.Sequential(torch.nn.GroupNorm(1, 2), torch.nn.SiLU()))
assert len(sdfastgn.report(model).fused) > 0
model(torch.zeros(1, 2, 4, 4))
try:
    sdfastgn.optimize(model, precision="fp8")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert "is impossible" in done.stdout


@pytest.mark.slow
def test_the_tests_of_kernels_are_collected_without_other_packages() -> None:
    """They can run beside a package that has the kernels alone."""
    code = """
import importlib.util, sys
import pytest, torch
absent = "accelerate", "diffusers", "peft", "rich", "safetensors", "transformers", "typer"
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in absent else found(name, *more)
sys.modules.update(dict.fromkeys(absent))
sys.exit(pytest.main(["tests/kernels", "--collect-only", "-qq", "-p", "no:cacheprovider"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_docstrings_do_not_count_as_lines() -> None:
    (function,) = functions('def f():\n    """One.\n\n    Two.\n    """\n    return 1\n')
    assert function_lines(function) == 2
