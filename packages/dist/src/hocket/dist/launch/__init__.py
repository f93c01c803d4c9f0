"""The start of ranks: `hocket-launch`, its plan of memory, and the launcher for notebooks.

The package itself imports nothing, so that the launcher can prepare its process before torch is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hocket.dist.launch.streams import forgive_streams

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hocket-launch`, in a process of its own.

    Args:
        argv: The arguments after the command's name; `sys.argv[1:]` by default.

    Returns:
        The exit code: 0, that of the rank which failed first, or 128 + the signal that ended the job.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["plan"]:
        forgive_streams(stdout=BrokenPipeError)
        from hocket.dist.launch.plan import plan

        return plan(arguments[1:])
    forgive_streams()
    from hocket.dist.launch.warm.starter import fork_server

    # Libraries read it when they are loaded: N ranks with as many threads as cores slow one another down.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    server = fork_server("hocket.dist.launch.command")  # does not return in ranks
    from hocket.dist.launch.command import main as command

    return command(arguments, server=server)
