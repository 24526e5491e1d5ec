"""For the API page: modules in folders without ``__init__.py`` (ADR 1), which griffe does not look for."""

from __future__ import annotations

from typing import Any

import griffe


class Namespaces(griffe.Extension):
    """Adds each folder without ``__init__.py`` in a package, and the modules in the folder."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        root = pkg.filepath.parent
        for path in sorted(root.rglob("*.py")):
            *folders, name = path.relative_to(root).with_suffix("").parts
            parent = pkg
            for folder in folders:
                if folder not in parent.members:
                    parent.set_member(folder, griffe.Module(folder, filepath=path.parent / "__init__.py"))
                parent = parent[folder]
            if name != "__init__" and name not in parent.members:
                module = griffe.visit(
                    name,
                    path,
                    path.read_text(encoding="utf-8"),
                    parent=parent,
                    lines_collection=loader.lines_collection,
                    modules_collection=loader.modules_collection,
                )
                parent.set_member(name, module)
