"""``sdfastgn report``: shows results that earlier runs wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdfastgn.cli.app import command
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.cli.options import HtmlOption


@command()
def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="JSON files that bench or kernels wrote. Several are compared with the first."),
    ],
    html: HtmlOption = None,
) -> None:
    """Show results that --json wrote. Compares several, and writes a page with --html."""
    from sdfastgn.bench import documents
    from sdfastgn.cli import checks, session

    with one_line_errors():
        checks.file_paths({"--html": html}, read=[*results, *map(documents.images_path, results)])
        session.show_results(results, html=html)
