"""``sdfastgn demo``: draws images with a small trained pipeline, first stock, then optimized."""

from __future__ import annotations

from typing import Annotated

import typer

from sdfastgn.cli.app import command
from sdfastgn.cli.errors import one_line_errors


@command()
def demo(
    output: Annotated[str, typer.Option("--output", help="Folder for the picture.")] = "demo-output",
) -> None:
    """Draw digits with a small trained pipeline, stock and optimized. Needs no GPU and no network."""
    from sdfastgn.cli import checks, terminal
    from sdfastgn.cli.digits import PICTURE, run_demo
    from sdfastgn.cli.digits_pipeline import find_folder

    with one_line_errors():
        pipeline = find_folder()
        folder = checks.folder("--output", output)
        checks.folder_file("--output", folder, PICTURE)
        code = run_demo(folder, terminal.console(), pipeline)
    raise typer.Exit(code)
