"""One-line messages and exit codes for the exceptions of a command."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import typer

from hocket.native.errors import HocketError

__all__ = ["exit_on_error"]

_STORE_FAILED = 5
_INTERRUPTED = 130


@contextlib.contextmanager
def exit_on_error(
    command: str,
    codes: Sequence[tuple[tuple[type[BaseException], ...], int]],
    reword: Callable[[str], str] = str,
) -> Iterator[None]:
    """Turn an exception of Hocket, ValueError or OSError into a line on stderr and an exit code.

    Other exceptions propagate. An interrupt ends with 130, a pipe that its reader has closed with 0.

    Args:
        command: Name of the command, before the message.
        codes: Exit codes by exception; the first match counts, and 5 is for all others.
        reword: Put the message into the command's words.
    """
    try:
        yield
    except BrokenPipeError:
        # The reader closed the pipe (`| head`), which is not an error.
        _settle_output()
        raise typer.Exit from None
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    except (HocketError, ValueError, OSError) as error:
        # Only an error is worth the time that importing rich takes.
        from hocket.native.cli.text import shown

        code = f" [{error.code}]" if isinstance(error, HocketError) else ""
        print(f"{command}: {shown(reword(' '.join(str(error).split())))}{code}", file=sys.stderr)
        _settle_output()
        found = (code for kinds, code in codes if isinstance(error, kinds))
        raise typer.Exit(next(found, _STORE_FAILED)) from None


def _settle_output() -> None:
    """Redirect stdout after a broken pipe, so that Python's flush at exit does not fail again."""
    if sys.stdout is None:  # the command was started with a closed stdout
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
