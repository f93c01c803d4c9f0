"""One-line messages and exit codes for the exceptions of a command."""

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

import typer

from hocket.native.errors import HocketError
from hocket.native.paths import undecoded

__all__ = ["check_arguments", "exit_on_error", "run"]

_STORE_FAILED = 5
_WRONG_USAGE = 2
_INTERRUPTED = 130
_NO_THREAD = "can't start new thread"
_SURROGATES = re.compile("[\ud800-\udfff]")


@contextlib.contextmanager
def exit_on_error(
    command: str,
    codes: Sequence[tuple[tuple[type[BaseException], ...], int]],
    reword: Callable[[str], str] = str,
) -> Iterator[None]:
    """Turn an exception of Hocket, ValueError or OSError into a line on stderr and an exit code.

    So is Python's error that no thread can be started. Other exceptions propagate. An interrupt ends with
    130.

    Args:
        command: Name of the command, before the message.
        codes: Exit codes by exception; the first match counts, and 5 is for all others.
        reword: Put the message into the command's words.
    """
    try:
        yield
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
    except RuntimeError as error:
        if _NO_THREAD not in str(error):
            raise
        limits = "raise the limit of processes (`ulimit -u`, or `pids.max` of the cgroup)"
        print(f"{command}: {error}; {limits}", file=sys.stderr)
        raise typer.Exit(_STORE_FAILED) from None


def run(command: str, app: Callable[[], object]) -> NoReturn:
    """Run a command. Its exit code does not depend on what can be shown.

    The command goes on where the reader of stdout has closed the pipe (`| head`), and where stderr takes
    nothing. A full disk under stdout is an error.

    Args:
        command: Name of the command, before messages.
        app: The command; it raises SystemExit at its end.
    """
    _forgive_streams()
    check_arguments(command)
    code: Any = 0
    failure: OSError | None = None
    try:
        app()
    except SystemExit as ended:
        code = ended.code
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        failure = error
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        _settle_output()
        failure = failure or error
    if failure is not None:
        print(f"{command}: {failure}", file=sys.stderr)
        code = code or _STORE_FAILED
    raise SystemExit(code)


def check_arguments(command: str) -> None:
    """Refuse arguments of the process that the native layer cannot take, which are not UTF-8 for Python.

    Args:
        command: Name of the command, before the message.

    Raises:
        SystemExit: With code 2, after a line on stderr.
    """
    for argument in sys.argv[1:]:
        if _SURROGATES.search(argument):
            print(f"{command}: {undecoded(argument)}", file=sys.stderr)
            raise SystemExit(_WRONG_USAGE)


class _ForgivingFile(io.FileIO):
    """The file of a standard stream, which takes what it cannot write as written."""

    def __init__(self, number: int, forgiven: type[OSError]) -> None:
        super().__init__(number, "w", closefd=False)
        self._forgiven = forgiven

    def write(self, data: Any, /) -> int:
        """Write to the file, and ignore the errors to be forgiven."""
        try:
            return super().write(data)
        except self._forgiven:
            return len(data)


def _forgive_streams() -> None:
    """Let what cannot be shown be lost: what a closed pipe would take of stdout, and all of stderr."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Another file would have this number, the lowest free one, and be a stream of child processes.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:  # closed, and `print(file=None)` writes to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    sys.stdout = _forgiving(sys.stdout, sys.__stdout__, BrokenPipeError)
    sys.stderr = _forgiving(sys.stderr, sys.__stderr__, OSError)


def _forgiving(stream: TextIO, own: TextIO | None, forgiven: type[OSError]) -> TextIO:
    if stream is not own or not isinstance(stream, io.TextIOWrapper):
        return stream  # closed, or replaced by the caller
    return io.TextIOWrapper(
        io.BufferedWriter(_ForgivingFile(stream.fileno(), forgiven)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _describe(error: Exception) -> str:
    """Return the message of an exception; for a path that cannot be passed on, the path and what to do."""
    # The working directory is such a path too. UTF-8 lacks only surrogates, which may also come from data.
    if isinstance(error, UnicodeEncodeError) and sys.getfilesystemencoding() != "utf-8":
        return undecoded(error.object)
    return str(error)


def _settle_output() -> None:
    """Redirect stdout once it cannot be written, so that Python's flush at exit does not fail again."""
    if sys.stdout is None:  # the command was started with a closed stdout
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
