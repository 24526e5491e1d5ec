"""The command line: the entry point of ``sdfastgn`` and of the scripts.

A new command needs a file ``sdfastgn/cli/<command>.py``, its name in ``COMMANDS``, a place in import-linter's
layers (``pyproject.toml``), and a line in ``docs/command-line.md``. The command's file imports torch only
inside of the command's function. So ``--help`` need not wait for the import of torch.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, cast

from sdfastgn.program import OWN_PROCESS, program

# The modules of the commands, in the order in which the help lists the commands.
COMMANDS = (
    "bench", "generate", "report", "kernels", "inspect", "plan", "sources", "verify", "info", "demo",
    "warm_up",
)  # fmt: skip

# The exit code after Ctrl-C. As in shells, it is 128 plus the number of the signal SIGINT, 2.
INTERRUPTED = 130
# Numbers of the errors that a write to standard output raises: the disk or the quota is full, the file is too
# large, the device fails, or the pipe is closed.
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


def main(doc: str | None = None, command: str | Callable[..., None] = "", **defaults: Any) -> None:
    """Run the command line and exit.

    The exit code is 0 after success, 2 after bad input or if a file cannot be written (one line says what is
    wrong), and 130 after Ctrl-C. It is 1 if the command ran but something failed, for example if an output
    was wrong or nothing could be measured.

    Args:
        doc: the description that ``--help`` shows; empty for the command's own description.
        command: the command that runs: its name, or a function that is no command of ``sdfastgn``. If it is
            empty, the first argument of the command line names the command.
        defaults: option -> default. It replaces the command's own default of this option.

    Only scripts pass these arguments.
    """
    # Output must not fail if the terminal cannot show a character, or if a path has bytes that are no text.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    asked = []

    def interrupt(*_: object) -> None:
        asked.append(True)
        raise KeyboardInterrupt

    # Only Python's own handler of Ctrl-C is replaced. Any other handler is kept: for instance, the parent
    # process may have made this process ignore Ctrl-C.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = _run(doc, command, defaults)
        sys.stdout.flush()  # standard output is written now, so that an error is caught below
        sys.exit(code)
    except BaseException as end:
        # If Ctrl-C is pressed during an import, the imported module may raise another exception instead of
        # KeyboardInterrupt. So ``asked`` is looked at too: it is not empty after Ctrl-C.
        if asked or isinstance(end, KeyboardInterrupt):
            print(f"{program()}: interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)
        if not isinstance(end, OSError) or end.errno not in CANNOT_WRITE:
            raise
        _end_without_output(end)
    finally:
        signal.signal(signal.SIGINT, handler)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, without the file that raised it. Replaces ``warnings.showwarning``."""
    # PyTorch appends the line of its C++ code to a warning, in brackets. It is cut off.
    text = str(message).partition(" (Triggered internally at ")[0]
    print(f"warning: {' '.join(text.split())}", file=sys.stderr)


def _end_without_output(error: OSError) -> NoReturn:
    """End the process because standard output cannot be written. Prints the reason, unless a pipe was closed.

    If another file cannot be written, ``program.writing`` raises an OptionError instead.
    """
    # Some text is still in the buffer of standard output. Python would write it at the end of the process,
    # and fail again. So this text is sent to the null device.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:  # the reader (``| head -1``) closed the pipe; the code is 1 as in typer
        sys.exit(1)
    where = error.filename or "to standard output"
    print(f"{program()}: cannot write {where}: {error.strerror}", file=sys.stderr)
    sys.exit(2)


def _import_command(name: str) -> None:
    """Import the module of the command ``name``.

    If there is no such command, import the modules of all commands, so that the help lists them.
    """
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

    # Without this setting, transformers prints advice on optional packages when it is imported.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    chosen: Any
    if callable(command):
        chosen = click_command(command)
    else:
        _import_command(command or next((word for word in sys.argv[1:] if not word.startswith("-")), ""))
        chosen = typer.main.get_command(app)
        chosen = chosen.commands[command] if command else chosen
    chosen.help = doc or chosen.help
    # click's class UsageError. It is taken from a base of typer's class, because some versions of typer
    # contain a copy of click, and raise the copy's UsageError.
    usage_error = cast("type[Exception]", typer.BadParameter.__mro__[1])
    try:
        return chosen.main(
            prog_name=program(), standalone_mode=False, obj=OWN_PROCESS, default_map=defaults, **HELP_OPTIONS
        )
    except usage_error as error:
        # If no command was given, typer has already shown the help. Then the error has no message.
        message = cast(Any, error).format_message()
        if message:
            print(f"{program()}: {message} (given: {shlex.join(sys.argv[1:])})", file=sys.stderr)
        return 2
    except typer.Abort:  # after Ctrl-C, typer raises Abort
        raise KeyboardInterrupt from None
