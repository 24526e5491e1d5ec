"""Write sdfastgn's kernels as a package for Hugging Face's Kernel Hub.

python scripts/build_hub_kernels.py --output build/hub-kernels

The sources are ``sdfastgn/kernels`` and ``integrations/hub``. The output folder is a project for the Hub's
tool kernel-builder (``build.toml``, ``flake.nix``, ``torch-ext``, ``tests``). It also contains the finished
build (``build/torch-cuda``, ``build/torch-cpu``). ``kernels.get_local_kernel`` loads the build, and
``kernel-builder upload`` publishes it.

Source: huggingface.co/docs/kernels, "Kernel requirements", for the layout and metadata.json.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import string
import sys
from pathlib import Path

import sdfastgn
from scripts.publish.pages import filled

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "sdfastgn" / "kernels"
HUB = ROOT / "integrations" / "hub"
NAME = "sdfastgn"
BACKENDS = ("cpu", "cuda")
# Folders of sdfastgn/kernels that the package does not contain: only ``sdfastgn.optimize`` uses their ops.
LEFT_OUT = ("act_linear", "attention", "product")
# The namespace of the package's ops ends in a hash of the files. This is the hash's number of hexadecimal
# digits.
ID_DIGITS = 12


def with_relative_imports(text: str, path: str) -> str:
    """Returns ``text``, the source of the module at ``path`` in the package, with relative imports.

    Raises ValueError if the module imports a part of sdfastgn that is not in the package.
    """
    dots = "." * (path.count("/") + 1)
    text = re.sub(r"^( *)from sdfastgn\.kernels\.", rf"\1from {dots}", text, flags=re.MULTILINE)
    for node in ast.walk(ast.parse(text)):
        absolute = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        absolute += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(name.partition(".")[0] == NAME for name in absolute):
            raise ValueError(f"build_hub_kernels: {path} imports {absolute[0]}, which is not in the package")
    return text


def package() -> dict[str, str]:
    """Returns {path in the package: text of the file} for the files that are the same for all backends."""
    sources = [path for path in sorted(KERNELS.rglob("*.py")) if path.parent.name not in LEFT_OUT]
    paths = {path.relative_to(KERNELS).as_posix(): path for path in sources}
    paths |= {path.name: path for path in sorted((HUB / "package").glob("*.py"))}
    files = {name: with_relative_imports(path.read_text("utf-8"), name) for name, path in paths.items()}
    folders = {name.rpartition("/")[0] for name in files if "/" in name}
    return files | {f"{folder}/__init__.py": "" for folder in folders}


def variant(files: dict[str, str], backend: str) -> dict[str, str]:
    """Returns ``files`` for one backend: with a metadata.json and with a namespace for the package's ops.

    The namespace contains the backend and a hash of ``files``, so that builds can be loaded side by side.
    """
    content = json.dumps(sorted(files.items())).encode()
    identifier = f"_{NAME}_{backend}_{hashlib.sha256(content).hexdigest()[:ID_DIGITS]}"
    old = f'_NAMESPACE = "{NAME}"'
    if files["_ops.py"].count(old) != 1:
        raise ValueError(f"build_hub_kernels: _ops.py must have one line {old}")
    files = files | {"_ops.py": files["_ops.py"].replace(old, f'_NAMESPACE = "{identifier}"')}
    digests = {
        name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for name, text in sorted(files.items())
    }
    metadata = {
        "name": NAME,
        "id": identifier,
        "version": hub_version(),
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    return files | {"metadata.json": json.dumps(metadata, indent=2) + "\n"}


def hub_version() -> int:
    """Returns sdfastgn's major version, because versions on the Hub are whole numbers.

    Version 0 says that the interface may still change.
    """
    return int(sdfastgn.__version__.partition(".")[0])


def project(repo_id: str) -> dict[str, str]:
    """Returns {path in the output folder: text of the file} for all files.

    ``repo_id``: name of the repository on the Hub.
    """

    def template(name: str) -> str:
        text = (HUB / name).read_text("utf-8")
        return string.Template(text).substitute(repo_id=repo_id, version=hub_version())

    files = package()
    card = filled(template("CARD.md"), ROOT / "benchmarks")
    found = {"build.toml": template("build.toml"), "CARD.md": card, "build/CARD.md": card}
    copied = ["flake.nix", *(f"tests/{path.name}" for path in sorted((HUB / "tests").glob("*.py")))]
    found |= {name: (HUB / name).read_text("utf-8") for name in copied}
    # ``_ops.py`` is left out, because kernel-builder writes this file itself, with its own namespace.
    found |= {f"torch-ext/{NAME}/{name}": text for name, text in files.items() if name != "_ops.py"}
    for backend in BACKENDS:
        made = variant(files, backend)
        found |= {f"build/torch-{backend}/{name}": text for name, text in made.items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/hub-kernels"), help="folder to write")
    parser.add_argument("--repo-id", default="sdfastgn/sdfastgn", help="repository on the Hub")
    options = parser.parse_args()
    output: Path = options.output
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", options.repo_id):
        parser.error(f"--repo-id must be owner/name, got {options.repo_id!r}")
    if output.exists() and not (output / "build.toml").exists() and any(output.iterdir()):
        parser.error(f"--output: {str(output)!r} is not empty and holds no earlier build")
    files = project(options.repo_id)
    shutil.rmtree(output, ignore_errors=True)
    for name, text in files.items():
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{len(files)} files in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
