"""The option `-v` of a command, which shows what Hocket logs."""

import logging
from typing import Annotated

import typer

__all__ = ["Verbose"]


def _show_log(times: int) -> int:
    """Print what the packages log to stderr: from INFO on at 1, from DEBUG on at 2."""
    if times:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("hocket").setLevel(logging.INFO if times == 1 else logging.DEBUG)
    return times


Verbose = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, show_default=False, callback=_show_log, help="Show the log; -vv: all."
    ),
]
"""The type of the option; its default is 0."""
