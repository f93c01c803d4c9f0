"""The options of a subcommand, in messages that name arguments of Python."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import typer
import typer.core
import typer.main

__all__ = ["Advice", "in_options", "options_of"]


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice for callers from Python, and the same for the command."""

    phrase: str
    """The advice as the package or the native layer words it."""

    option: str
    """The option that the advice is about; empty if no subcommand has one."""

    with_option: str
    """The advice of subcommands that have the option."""

    without: str
    """The advice of the others."""


REGION = Advice(", or give the option `region`", "", "", "")


def options_of(app: typer.Typer, verb: str) -> frozenset[str]:
    """Return the options of a subcommand, such as `--json`."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return frozenset(name for param in group.commands[verb].params for name in param.opts)


def in_options(
    message: str, options: Collection[str], *, names: Mapping[str, str], advice: Collection[Advice]
) -> str:
    """Return a message with options in place of arguments, and without advice that has no option.

    Args:
        message: The message.
        options: The options of the subcommand.
        names: The option of each argument, among those of all subcommands.
        advice: Advice that takes more than another name.
    """
    for item in (*advice, REGION):
        message = message.replace(item.phrase, item.with_option if item.option in options else item.without)
    known = "|".join(name for name, option in names.items() if option in options)
    if not known:
        return message
    # A column, a tensor or a file may have the name of an argument.
    argument = re.compile(rf"(?<!column )(?<!tensor )(?<!file )(?<!name )(?<!named )`({known})(?:=True)?`")
    return argument.sub(lambda found: f"`{names[found[1]]}`", message)
