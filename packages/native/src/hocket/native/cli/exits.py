"""One-line messages and exit codes for the exceptions of a command."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence

import typer

from hocket.native.errors import HocketError

__all__ = ["check_arguments", "exit_on_error"]

_STORE_FAILED = 5
_WRONG_USAGE = 2
_INTERRUPTED = 130
_SURROGATES = re.compile("[\ud800-\udfff]")


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
        print(f"{command}: {shown(reword(' '.join(_describe(error).split())))}{code}", file=sys.stderr)
        _settle_output()
        found = (code for kinds, code in codes if isinstance(error, kinds))
        raise typer.Exit(next(found, _STORE_FAILED)) from None


def check_arguments(command: str) -> None:
    """Refuse arguments of the process that the native layer cannot take, which are not UTF-8 for Python.

    Args:
        command: Name of the command, before the message.

    Raises:
        SystemExit: With code 2, after a line on stderr.
    """
    for argument in sys.argv[1:]:
        if _SURROGATES.search(argument):
            print(f"{command}: {_undecoded(argument)}", file=sys.stderr)
            raise SystemExit(_WRONG_USAGE)


def _describe(error: Exception) -> str:
    """Return the message of an exception; for a path that cannot be passed on, the path and what to do."""
    # The working directory is such a path too. UTF-8 lacks only surrogates, which may also come from data.
    if isinstance(error, UnicodeEncodeError) and sys.getfilesystemencoding() != "utf-8":
        return _undecoded(error.object)
    return str(error)


def _undecoded(text: str) -> str:
    """Return the message for a path with bytes or characters that the locale's encoding does not have.

    Python marks such bytes by surrogates.
    """
    data = text.encode("utf-8", "surrogateescape")
    try:
        return (
            f"`{data.decode()}` has characters beyond `{sys.getfilesystemencoding()}`, the encoding of this "
            "environment: set `PYTHONUTF8=1` or `LC_ALL=C.UTF-8`"
        )
    except UnicodeDecodeError:
        return f"`{data.decode(errors='backslashreplace')}` is not UTF-8, which paths have to be: rename it"


def _settle_output() -> None:
    """Redirect stdout after a broken pipe, so that Python's flush at exit does not fail again."""
    if sys.stdout is None:  # the command was started with a closed stdout
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
