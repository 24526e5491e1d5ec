"""The command line: the entry point of ``sdfastgn`` and of the scripts."""

from __future__ import annotations

import importlib
import io
import os
import shlex
import signal
import sys
from collections.abc import Callable
from typing import Any, cast

from sdfastgn.program import OWN_PROCESS, program

# The modules of the commands, in the order of the help.
COMMANDS = (
    "bench", "generate", "report", "kernels", "inspect", "sources", "verify", "info", "demo", "warm_up",
)  # fmt: skip

# The exit code after Ctrl-C, as shells and typer have it: 128 and the signal's number.
INTERRUPTED = 130


def main(doc: str | None = None, command: str | Callable[..., None] = "", **defaults: Any) -> None:
    """Run the command line and exit.

    The exit code is 0, 1 where an output was wrong, nothing could be measured or a source is
    unknown, 2 for bad input, which is named in one line, and 130 after Ctrl-C.

    Args:
        doc: of a script, shown by ``--help``.
        command: of a script: the name of the one command that it runs, or a function that is no
            command of ``sdfastgn``. Without one the first argument names the command.
        defaults: of the command's options, where the script's are its own.
    """
    for stream in (sys.stdout, sys.stderr):  # a terminal may lack a character, and a path be no text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    asked = []

    def interrupt(*_: object) -> None:
        asked.append(True)
        raise KeyboardInterrupt

    # A process may be told to ignore Ctrl-C, as nohup does.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        sys.exit(_run(doc, command, defaults))
    except BaseException as end:
        # A module that is interrupted while it is imported may raise something else.
        if not asked and not isinstance(end, KeyboardInterrupt):
            raise
        print(f"{program()}: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, handler)


def _import_command(name: str) -> None:
    """Import the command's module, or those of all commands: help and a misspelt name are about all."""
    module = name.replace("-", "_")
    for each in [module] if module in COMMANDS else COMMANDS:
        importlib.import_module(f"{__name__}.{each}")


def _run(doc: str | None, command: str | Callable[..., None], defaults: dict[str, Any]) -> Any:
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        sys.exit(f"sdfastgn: the command line needs {error.name}: pip install 'sdfastgn[bench]'")
    from sdfastgn.cli.app import HELP_OPTIONS, app, click_command

    # transformers would advise on optional packages at import.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    chosen: Any
    if callable(command):
        chosen = click_command(command)
    else:
        _import_command(command or next((word for word in sys.argv[1:] if not word.startswith("-")), ""))
        chosen = typer.main.get_command(app)
        chosen = chosen.commands[command] if command else chosen
    chosen.help = doc or chosen.help
    # Typer has a copy of click in some versions; its own name reaches both.
    usage_error = cast("type[Exception]", typer.BadParameter.__mro__[1])
    try:
        return chosen.main(
            prog_name=program(), standalone_mode=False, obj=OWN_PROCESS, default_map=defaults, **HELP_OPTIONS
        )
    except usage_error as error:
        # Without a command typer has shown the help, and the error has no message.
        message = cast(Any, error).format_message()
        if message:
            print(f"{program()}: {message} (given: {shlex.join(sys.argv[1:])})", file=sys.stderr)
        return 2
    except typer.Abort:  # what typer makes of Ctrl-C
        raise KeyboardInterrupt from None
