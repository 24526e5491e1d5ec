"""Who may import whom, and the house rules that need no run to check: all over the AST of every file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = sorted((ROOT / "sdfastgn").rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60

# What patches may not reach: the layers above it, also under the names that the package's root gives them.
ABOVE_PATCHES = {"api", "bench", "cli", "__main__", "optimize", "optimized", "report", "restore"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(tree: ast.AST, package: str = "") -> Iterator[str]:
    """Dotted names that ``tree`` imports at any depth: ``from a import b`` is ``a.b``, and ``package`` resolves ``.``."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*parents, *([node.module] if node.module else [])])
                yield from (f"{base}.{alias.name}" for alias in node.names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def imports_of(path: Path) -> set[str]:
    return set(imports(parse(path), ".".join(path.relative_to(ROOT).parent.parts)))


def under(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def offenders(paths: list[Path], is_wrong: object) -> list[str]:
    assert callable(is_wrong)
    return [
        f"{name_of(path)} imports {name}"
        for path in paths
        for name in sorted(imports_of(path))
        if is_wrong(name)
    ]


def in_folder(folder: str) -> list[Path]:
    return [path for path in PACKAGE if path.is_relative_to(ROOT / "sdfastgn" / folder)]


# ---- layers


def test_every_part_has_files() -> None:
    assert all((PACKAGE, SCRIPTS, TESTS, in_folder("kernels"), in_folder("patches"), in_folder("bench")))


def test_kernels_import_torch_triton_and_themselves() -> None:
    allowed = sys.stdlib_module_names | {"torch", "triton"}
    assert not offenders(
        in_folder("kernels"),
        lambda name: name.partition(".")[0] not in allowed and not under(name, "sdfastgn.kernels"),
    )


def test_patches_never_import_the_layers_above() -> None:
    assert not offenders(
        in_folder("patches"),
        lambda name: under(name, "sdfastgn") and (*name.split("."), "")[1] in ABOVE_PATCHES,
    )


def test_only_the_command_line_needs_typer_and_rich() -> None:
    rest = [
        path
        for path in PACKAGE
        if path not in in_folder("bench")
        and not path.relative_to(ROOT / "sdfastgn").parts[0].startswith("cli")
    ]
    assert not offenders(rest, lambda name: name.partition(".")[0] in {"typer", "rich", "click"})


def test_the_package_imports_no_script_test_or_link() -> None:
    assert not offenders(
        PACKAGE, lambda name: name.partition(".")[0] in {"scripts", "tests", "kernels", "patches"}
    )


def test_scripts_are_thin_over_the_harness() -> None:
    def is_inner(name: str) -> bool:
        inner = name.split(".")[1:]
        # `from sdfastgn import optimize` has one part after the package; what has more must come from the harness or the command line.
        return under(name, "sdfastgn") and len(inner) > 1 and inner[0] not in ("bench", "cli")

    assert not offenders(SCRIPTS, is_inner)


def test_scripts_and_tests_use_public_names() -> None:
    def is_private(name: str) -> bool:
        parts = name.split(".")
        return parts[0] == "sdfastgn" and any(
            part.startswith("_") and not part.endswith("__") for part in parts
        )

    assert not offenders(SCRIPTS + TESTS, is_private)


# ---- house rules


def test_no_file_is_long() -> None:
    lines = {
        name_of(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in PACKAGE + SCRIPTS + TESTS
    }
    assert not {name: count for name, count in lines.items() if count > MAX_FILE_LINES}


def function_lines(function: Function) -> int:
    """Lines of the body, without the docstring: a documented signature is not a long function."""
    first = function.body[0]
    total = (function.end_lineno or first.lineno) - first.lineno + 1
    if ast.get_docstring(function) is not None:
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def test_no_function_is_long() -> None:
    long = {}
    for path in PACKAGE:
        for node in ast.walk(parse(path)):
            if isinstance(node, Function) and function_lines(node) > MAX_FUNCTION_LINES:
                long[f"{name_of(path)}:{node.lineno} {node.name}"] = function_lines(node)
    assert not long


def test_no_file_is_called_utils() -> None:
    assert not [
        name_of(path) for path in PACKAGE + SCRIPTS + TESTS if path.stem in {"utils", "helpers", "misc"}
    ]


def asserts(node: ast.AST) -> Iterator[ast.Assert]:
    """``assert`` statements below ``node``, less those of Triton kernels, where they are checks on the device."""
    if isinstance(node, Function) and any(
        "jit" in ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list
    ):
        return
    if isinstance(node, ast.Assert):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from asserts(child)


def test_errors_are_raised_not_asserted() -> None:
    assert not [f"{name_of(path)}:{node.lineno}" for path in PACKAGE for node in asserts(parse(path))]


# ---- the checks themselves


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import a.b as c", {"a.b"}),
        ("from a import b, c", {"a.b", "a.c"}),
        ("from .b import c", {"sdfastgn.kernels.b.c"}),
        ("from ..api import optimize", {"sdfastgn.api.optimize"}),
        ("def f():\n    import a", {"a"}),
        ("importlib.import_module('a.b')", {"a.b"}),
    ],
)
def test_imports_are_found(code: str, expected: set[str]) -> None:
    assert set(imports(ast.parse(code), "sdfastgn.kernels")) == expected


def test_asserts_are_found_outside_triton_kernels() -> None:
    kernels = "@triton.jit\ndef g():\n    assert x\n@triton.jit(noinline=True)\ndef h():\n    assert x\n"
    code = "def f():\n    assert x\n" + kernels
    assert [node.lineno for node in asserts(ast.parse(code))] == [2]


def test_docstrings_do_not_count_as_lines() -> None:
    function = ast.parse('def f():\n    """One.\n\n    Two.\n    """\n    return 1\n').body[0]
    assert isinstance(function, Function)
    assert function_lines(function) == 2
