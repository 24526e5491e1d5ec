"""The typer app that commands are added to, and how the help of their options is shown."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

HELP_OPTIONS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
# A placeholder in help texts, such as "{variants}" -> the function that returns the words that replace the
# placeholder. The functions are called only when the help is shown, because some of them import torch. Each
# command adds the placeholders of its own help texts.
NAMES: dict[str, Callable[[], Iterable[str]]] = {}


def _complete_help(parameter: Any, context: Any) -> None:
    """Complete the help text of a parameter: replace placeholders, and append the default, if there is one.

    If the default is only computed when the command runs, ``parameter.show_default`` describes it in words.
    """
    if getattr(parameter, "is_flag", False):
        parameter.metavar = ""  # the help names no value for a flag, because a flag takes none
    text = getattr(parameter, "help", None)
    if not text:
        return
    for word, names in NAMES.items():
        if word in text:
            text = text.replace(word, ", ".join(names()))
    value, words = parameter.get_default(context), parameter.show_default
    if isinstance(
        value, bool
    ):  # a flag. Its default is False, unless a script that runs the command has set it
        value = "on" if value else ""
    elif isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    elif value is None:
        value = words if isinstance(words, str) else ""
    parameter.show_default = False  # typer must not append the default, because the text below has it
    parameter.help = text if value == "" else f"{text.removesuffix('.')} (default: {value})."


class Command(typer.core.TyperCommand):
    def get_help(self, ctx: Any) -> str:
        for parameter in self.get_params(ctx):
            _complete_help(parameter, ctx)
        return str(super().get_help(ctx))


class Group(typer.core.TyperGroup):
    def get_help(self, ctx: Any) -> str:
        for parameter in self.get_params(ctx):
            _complete_help(parameter, ctx)
        return str(super().get_help(ctx))


app = typer.Typer(
    cls=Group,
    help="Make Stable Diffusion in diffusers faster, and measure by how much.",
    context_settings=HELP_OPTIONS,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
command = functools.partial(app.command, cls=Command)


def click_command(function: Callable[..., None]) -> Any:
    """A program whose only command is ``function``. Its help looks like the help of sdfastgn's commands."""
    alone = typer.Typer(context_settings=HELP_OPTIONS, add_completion=False, pretty_exceptions_enable=False)
    alone.command(cls=Command)(function)
    return typer.main.get_command(alone)


def _version(asked: bool) -> None:
    if asked:
        from sdfastgn import __version__

        typer.echo(f"sdfastgn {__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
