"""The Markdown table of all fusions, which replace modules' forwards by fused code.

A row has the first paragraph of the docstring of a file with fusions.
"""

from __future__ import annotations

import importlib
from pathlib import Path


def fusions_markdown(_: Path) -> str:
    """Returns a table with a row for each file of ``registry.FUSIONS``: its fusions, and what they change.

    The row's text is the first paragraph of the file's docstring. Raises ValueError if diffusers is not
    installed, or lacks what some fusions replace.
    """
    from sdfastgn.patches import registry  # this import takes seconds, because it imports diffusers

    if registry.MISSING or not registry.OBJECT_FUSIONS:
        raise ValueError(f"the table of fusions needs all of diffusers; it lacks {sorted(registry.MISSING)}")
    rows = ["| fusion | what runs fused |", "| --- | --- |"]
    for file, *variables in (*registry._FUSIONS, *registry._OF_DIFFUSERS):
        module = importlib.import_module(f"sdfastgn.patches.{file}")
        found = (getattr(module, variable) for variable in variables)
        fusions = [one for value in found for one in (value if isinstance(value, tuple) else (value,))]
        text = " ".join(str(module.__doc__).partition("\n\n")[0].split()).replace("``", "`")
        rows.append(f"| {', '.join(f'`{fusion.name}`' for fusion in fusions)} | {text} |")
    return "\n".join(rows)
