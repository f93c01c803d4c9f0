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

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_CONSEQUENCES = re.compile(
    r"\b(CollectiveError|RankFailedError|AbsentRanksError|DistBackendError|DistNetworkError"
    r"|Connection closed by peer|Connection reset by peer|Broken pipe)\b"
)


def is_consequence(text: str) -> bool:
    """Return whether the last lines of a traceback are those of a rank whose peer has ended."""
    return bool(_CONSEQUENCES.search("\n".join(text.rstrip().splitlines()[-3:])))


def install_excepthook() -> None:
    """Install a hook that records an uncaught error for the launcher; only in ranks of `hocket-launch`.

    A traceback that only reports the end of another rank is not printed: the launcher prints the cause.
    """
    path = os.environ.get(ERROR_FILE)
    if not path or LAUNCHER not in os.environ or getattr(sys.excepthook, "is_hocket", False):
        return
    previous_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        if issubclass(kind, KeyboardInterrupt):
            return
        is_secondary = is_consequence(text)
        _record(Path(path), text, is_secondary)
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


def _record(path: Path, text: str, is_secondary: bool) -> None:
    record = {
        "message": {
            "message": text.rstrip().splitlines()[-1],
            "errorCode": 1,
            "extraInfo": {
                "py_callstack": text,
                "timestamp": str(int(time.time())),
                "is_consequence": is_secondary,
            },
        }
    }
    # torch's agent reads whole seconds; the file's modification time orders the ranks.
    with contextlib.suppress(OSError):  # without a record, the report uses the log
        part_path = path.with_suffix(".part")
        part_path.write_text(json.dumps(record))
        part_path.replace(path)
