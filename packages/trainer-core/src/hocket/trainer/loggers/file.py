"""A logger that writes JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hocket.trainer.capture import Number
from hocket.trainer.logger import Logger, LoggerDestination, global_rank

if TYPE_CHECKING:
    from hocket.trainer.state import State


class FileLogger(LoggerDestination):
    """Writes one JSON object a line: `{"step": 12, "loss/train/total": 2.31}`.

    Settings are a line `{"hyperparameters": {…}}`. A number that is not finite is written as Python's `json`
    does: `NaN`, `Infinity`. Lines are handed to the system at once, so what was written survives a killed
    process. A file that exists is continued: a resumed run adds to the log of the run before, in which steps
    after the checkpoint then come twice, the later line being the one that counts.

    Args:
        filename: Where to write; `{run_name}` and `{rank}` are replaced. Without `{rank}`, only rank 0
            writes.
        overwrite: Empty a file that exists.

    Example:
        >>> trainer = Trainer(..., loggers=[FileLogger("logs/{run_name}.jsonl")])  # doctest: +SKIP
    """

    def __init__(self, filename: str = "{run_name}/logs-rank{rank}.txt", *, overwrite: bool = False) -> None:
        self.filename = filename
        self.overwrite = overwrite
        self.rank_zero_only = "{rank}" not in filename
        self.path: Path | None = None
        """The file, from `INIT` on."""
        self._file: IO[str] | None = None

    def init(self, state: State, logger: Logger) -> None:
        """Open the file."""
        if self not in logger.destinations:
            return
        self.path = Path(self.filename.format(run_name=state.run_name, rank=global_rank()))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w" if self.overwrite else "a+", encoding="utf-8", buffering=1)
        if not self.overwrite and not _ends_with_newline(self.path):
            # A killed process may have left half a line behind; what follows must not be joined to it.
            self._file.write("\n")

    def log_metrics(self, metrics: dict[str, Number], step: int) -> None:
        """Write one line."""
        self._write({"step": step, **metrics})

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Write one line; a setting that JSON does not know is written as its text."""
        self._write({"hyperparameters": parameters})

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            raise RuntimeError(f"`{self.filename}` is not open; `init` opens it, when a `Trainer` is made")
        self._file.write(json.dumps(record, default=str) + "\n")

    def post_close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"
