"""A launcher of ranks for notebooks, where there is no script to launch."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hocket.dist.errors import ConfigError, RankFailedError
from hocket.dist.ranks import rank_command
from hocket.dist.ranks.rank_command import LAUNCHER

_KEPT_LINES = 200


def notebook_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), *, num_processes: int
) -> list[Any]:
    """Call a function on several ranks of this machine, and return their results.

    `hocket-launch` starts the ranks, each a new process; its output and that of rank 0 are printed here.
    cloudpickle copies the function and its arguments, so a function defined in a notebook works, with the
    variables that it uses. Tensors on a device and open files cannot be copied: make them in the function.

    Args:
        function: Builds the trainer and calls `fit`. Its result is copied back, so return numbers or tensors
            on the CPU.
        args: Its positional arguments.
        num_processes: Ranks, usually one for each device.

    Returns:
        The results of the function, in the order of the ranks.

    Raises:
        ConfigError: If `num_processes` is below 1, cloudpickle is missing, or this process is a rank itself.
        RankFailedError: If a rank failed; the message holds the launcher's report with its traceback.
    """
    if num_processes < 1:
        raise ConfigError(f"`num_processes` is {num_processes}; expected at least 1")
    if "RANK" in os.environ:
        raise ConfigError("this process is a rank of a job already: call the function itself")
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            "`notebook_launcher` needs cloudpickle: `pip install 'hocket-dist[notebook]'`"
        ) from error
    with tempfile.TemporaryDirectory(prefix="hocket-notebook-") as name:
        folder = Path(name)
        (folder / "call").write_bytes(cloudpickle.dumps((function, tuple(args))))
        rank_module = "hocket.dist.launch.notebook_rank"
        launcher = [sys.executable, "-m", "hocket.dist"]
        # The launcher ends with this process, as a rank does with the launcher: a kernel may be killed.
        start = [sys.executable, "-P", rank_command.__file__]
        _run([*start, *launcher, "-n", str(num_processes), "-m", rank_module, name])
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(num_processes)]


def _run(command: list[str]) -> None:
    """Run the launcher and print its output as it comes: a notebook does not show a subprocess's output."""
    lines: list[str] = []
    env = {**os.environ, LAUNCHER: str(os.getpid())}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                with contextlib.suppress(OSError, ValueError):  # a notebook that is gone does not end the job
                    print(line, end="")
                lines = [*lines[-_KEPT_LINES:], line]
        except BaseException:
            process.terminate()  # Ctrl-C: the launcher ends its ranks
            raise
    if process.returncode:
        raise RankFailedError(
            f"the launcher ended with exit code {process.returncode}:\n{''.join(lines).rstrip()}"
        )
