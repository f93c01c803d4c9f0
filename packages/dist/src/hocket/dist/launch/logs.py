"""The files to which ranks write, by the format strings of `--stdout` and `--stderr`."""

import json
import os
import string
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from hocket.dist.errors import ConfigError
from hocket.dist.ranks.failures import FAILURE

FIELDS = ("rank", "local_rank", "world_size", "node_rank", "local_world_size")
_VARIABLES = dict(
    zip(FIELDS, ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE"), strict=True)
)


class RankLogs(DefaultLogsSpecs):
    """The outputs of the ranks: the machine's first rank writes to the terminal, the others to files.

    Args:
        log_dir: The folder of files that have no format, and of error records.
        local_world_size: Ranks on this machine.
        stdout: Format of the files of standard output; None for the folder.
        stderr: Same as `stdout`.
        redirects: Torch's own option, used if it was given.
        tee: Same as `redirects`.

    Attributes:
        has_started: Set once ranks are started.
        attempt: The number of the attempt that all hosts count; None where each host counts by itself.
        pids: Returns the processes of the ranks that were started last.
    """

    def __init__(
        self,
        log_dir: str | None,
        *,
        local_world_size: int,
        stdout: str | None = None,
        stderr: str | None = None,
        redirects: Any = Std.NONE,
        tee: Any = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        if redirects == Std.NONE and tee == Std.NONE:
            redirects = {local: Std.ALL if local else Std.NONE for local in range(local_world_size)}
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        self._formats = (stdout, stderr)
        self.has_started = threading.Event()
        self.attempt: int | None = None
        self.pids: Callable[[], list[int]] = list

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of every local rank, and create those that a format names.

        Also sets `NODE_RANK` for each rank, as Composer's launcher does: the machine's number is not known
        before the rendezvous.

        Raises:
            ConfigError: A file cannot be created.
        """
        self.has_started.set()
        for env in envs.values():
            env["NODE_RANK"] = env["GROUP_RANK"]
            if self.attempt is not None:
                env["TORCHELASTIC_RESTART_COUNT"] = str(self.attempt)
        if failure := os.environ.pop(FAILURE, None):
            times = json.dumps({**json.loads(failure), "started": time.time()})
            for env in envs.values():
                env[FAILURE] = times
        dest = super().reify(envs)
        for template, files in zip(self._formats, (dest.stdouts, dest.stderrs), strict=True):
            for local_rank, env in envs.items():
                if template is not None and local_rank > 0:
                    numbers = {field: int(env[name]) for field, name in _VARIABLES.items()}
                    path = Path(template.format(**numbers))
                    _create(path, numbers["rank"])
                    files[local_rank] = str(path)
        return dest


def _create(path: Path, rank: int) -> None:
    """Create the file of a rank, so that a file that cannot be written ends the launch with a message."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ConfigError(
            f"`--stdout` or `--stderr` names {path} for rank {rank}, which cannot be written: {error}. Name "
            "a file for each rank, such as `logs/{rank}.txt`"
        ) from error


def check_format(option: str, template: str | None, local_world_size: int) -> str | None:
    """Return a message about an invalid format string, or None if it is valid."""
    if template is None:
        return None
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        return f"`{option} {template}` is not a valid format string: {error}"
    if unknown := fields - set(FIELDS):
        known_fields = ", ".join(f"{{{field}}}" for field in FIELDS)
        return f"`{option} {template}` has the unknown field {{{min(unknown)}}}; known are {known_fields}"
    try:
        template.format(**dict.fromkeys(FIELDS, 0))
    except ValueError as error:
        return f"`{option} {template}` cannot format a rank: {error}"
    if local_world_size > 2 and not fields & {"rank", "local_rank"}:
        return f"`{option} {template}` names one file for several ranks; add {{rank}}"
    return None
