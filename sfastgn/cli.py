"""The ``sfastgn`` command's entry point. The commands themselves are in :mod:`sfastgn.cli_commands`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line and exits: 0, 1 where a run failed or its output was wrong, 2 for bad input, in one line."""
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        sys.exit(f"sfastgn: the command line needs {error.name}: pip install 'sfastgn[bench]'")
    from sfastgn.cli_commands import app

    # Typer has its own copy of click in some versions and click's in others; both are reached through its own name.
    usage_error = typer.BadParameter.__mro__[1]
    try:
        sys.exit(app(standalone_mode=False))
    except usage_error as error:
        print(f"sfastgn: {error.format_message()}", file=sys.stderr)  # type: ignore[attr-defined]
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        print("sfastgn: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
