"""The ``sfastgn`` command's entry point. The commands themselves are in :mod:`sfastgn.cli_commands`."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any, cast


def main() -> None:
    """Runs the command line and exits: 0, 1 where an output was wrong, 2 for bad input, which it names in one line."""
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        sys.exit(f"sfastgn: the command line needs {error.name}: pip install 'sfastgn[bench]'")
    from sfastgn.cli_commands import app

    # transformers advises on optional packages at import, which is no news to a user of this command.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    # Typer has its own copy of click in some versions and click's in others; both are reached through its own name.
    usage_error = cast("type[Exception]", typer.BadParameter.__mro__[1])
    try:
        sys.exit(app(standalone_mode=False))
    except usage_error as error:
        # Without a command typer has shown the help, and the error has no message.
        message = cast(Any, error).format_message()
        if message:
            print(f"sfastgn: {message} (given: {shlex.join(sys.argv[1:])})", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        print("sfastgn: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
