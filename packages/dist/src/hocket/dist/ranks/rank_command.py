"""The start of a rank's process, which then becomes the rank's own command.

It ties the rank to its launcher: a launcher that is sent SIGKILL cannot end its ranks, and they would train
on and write checkpoints beside those of the next start. And it expands the rank's variables, such as `$RANK`,
in the arguments of the script, as Composer's launcher does; the launcher cannot know the rank of a process
before the rendezvous.
"""

import os
import re
import signal
import sys
from collections.abc import Iterable

LAUNCHER = "HOCKET_LAUNCH"
"""The variable with the process id of the launcher."""

_PR_SET_PDEATHSIG = 1  # of `prctl`, in linux/prctl.h

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_VARIABLE = re.compile(rf"\$(?:({'|'.join(_NAMES)})\b|\{{({'|'.join(_NAMES)})\}})")


def has_variables(arguments: Iterable[str]) -> bool:
    """Return whether an argument names a variable that differs between ranks or jobs."""
    return any(_VARIABLE.search(argument) for argument in arguments)


def expand(argument: str) -> str:
    """Return the argument with the values that the variables have in this process."""
    return _VARIABLE.sub(lambda found: os.environ.get(found[1] or found[2], found[0]), argument)


def end_with_launcher() -> None:
    """Have the kernel end this process when the launcher that started it ends; on Linux only."""
    launcher = os.environ.get(LAUNCHER, "")
    if launcher.isdigit():
        end_with_parent(int(launcher))


def end_with_wrapper() -> None:
    """Have the kernel end this process with the one between it and the launcher, such as a shell or `uv run`.

    The launcher's own children end with it, and theirs end so.
    """
    launcher, parent = os.environ.get(LAUNCHER, ""), os.getppid()
    if launcher.isdigit() and parent != int(launcher):
        end_with_parent(parent)


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when the thread that started it ends; on Linux only."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        sys.exit(f"the launcher, process {parent}, has ended; this process ends, too")


if __name__ == "__main__":
    end_with_launcher()
    command = [expand(argument) for argument in sys.argv[1:]]
    os.execvp(command[0], command)
