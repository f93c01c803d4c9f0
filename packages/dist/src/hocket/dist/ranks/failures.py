"""Recording of the error that ends a rank, for the launcher's report."""

import contextlib
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from hocket.dist.ranks.rank_command import LAUNCHER
from hocket.dist.ranks.stack_dump import write_on_request

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
FAILURE = "HOCKET_FAILURE"
"""A variable of restarted ranks: when the launcher found a failure, had ended all ranks, and started these.

A JSON object of seconds since 1970, `{"found": …, "ended": …, "started": …}`.
"""

DIAGNOSIS = "hocket_diagnosis"
"""The attribute of an error that holds the diagnosis of the collective, as a dict.

Errors of other packages that wait for ranks have it, too, with `late` and `waited_s` alone.
"""

_CONSEQUENCES = {
    "CollectiveError",
    "RankFailedError",
    "AbsentRanksError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
}
"""Classes of errors by which a rank reports the end of another one: of Hocket's packages and of torch."""
_GLOO = re.compile(
    r"gloo/.*\b(Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting|"
    r"Application timeout)\b",
    re.DOTALL,
)
"""The message of gloo's errors, plain `RuntimeError`s, when a rank is silent or its connection is lost."""
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
"""The sentences by which Python joins the tracebacks of an error and of those that led to it."""
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)


def is_consequence(error: BaseException) -> bool:
    """Return whether an error only reports the end of another rank.

    An error with a diagnosis that names ranks which are late does, of whatever class it is. So does one that
    was raised from such an error, or while such an error was handled, and a group of them.
    """
    cause: BaseException | None = error
    while cause is not None:
        names = {kind.__name__ for kind in type(cause).__mro__}
        if names & _CONSEQUENCES or (type(cause) is RuntimeError and _GLOO.search(str(cause))):
            return True
        if (getattr(cause, DIAGNOSIS, None) or {}).get("late"):
            return True
        if isinstance(cause, BaseExceptionGroup) and all(map(is_consequence, cause.exceptions)):
            return True
        is_hidden = cause.__suppress_context__
        cause = cause.__cause__ or (None if is_hidden else cause.__context__)
    return False


def is_trace_of_consequence(text: str) -> bool:
    """Return what `is_consequence` returns, for the last traceback of a text, with those that led to it.

    Notes below a traceback do not count.
    """
    *earlier, last = _RANK_PREFIX.sub("", text).split("Traceback (most recent call last):")
    while not _is_consequence_at_end(last):
        if not earlier or not earlier[-1].rstrip().endswith(_CHAINED):
            return False
        last = earlier.pop()
    return True


def _is_consequence_at_end(trace: str) -> bool:
    """Return whether the error below the frames of a traceback only reports the end of another rank."""
    lines = iter(trace.splitlines())
    name, _, message = next((line for line in lines if line[:1].strip()), "").partition(":")
    if name.rpartition(".")[2] in _CONSEQUENCES:
        return True
    return name == "RuntimeError" and bool(_GLOO.search("\n".join((message, *lines))))


def install_excepthook() -> None:
    """Install a hook that records an uncaught error for the launcher; only in ranks of `hocket-launch`.

    A traceback that only reports the end of another rank is not printed: the launcher prints the cause.
    The launcher can also ask the rank for its line from here on.
    """
    path = os.environ.get(ERROR_FILE)
    if not path or LAUNCHER not in os.environ or getattr(sys.excepthook, "is_hocket", False):
        return
    write_on_request(Path(path).parent)
    previous_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        if issubclass(kind, KeyboardInterrupt):
            return
        is_secondary = is_consequence(error)
        summary = traceback.format_exception_only(error)[0].rstrip()
        _record(Path(path), text, summary, is_secondary, _diagnosis_of(error))
        if is_secondary:
            rank = os.environ.get("RANK", "?")
            print(
                f"rank {rank}: {kind.__name__}: another rank has ended; see the launcher's report",
                file=sys.stderr,
            )
        else:
            previous_hook(kind, error, trace)

    hook.is_hocket = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _diagnosis_of(error: BaseException | None) -> dict[str, object] | None:
    """Return the diagnosis that `ProcessGroup.explain` has made of an error, or of one that led to it."""
    while error is not None:
        if (diagnosis := getattr(error, DIAGNOSIS, None)) is not None:
            return dict(diagnosis)
        error = error.__cause__ or error.__context__
    return None


def _record(
    path: Path, text: str, summary: str, is_secondary: bool, diagnosis: dict[str, object] | None
) -> None:
    record = {
        "message": {
            "message": summary,
            "errorCode": 1,
            "extraInfo": {
                "py_callstack": text,
                "timestamp": str(int(time.time())),
                "is_consequence": is_secondary,
                "diagnosis": diagnosis,
            },
        }
    }
    # torch's agent reads whole seconds; the file's modification time orders the ranks.
    with contextlib.suppress(OSError):  # without a record, the report uses the log
        part_path = path.with_suffix(".part")
        part_path.write_text(json.dumps(record))
        part_path.replace(path)
