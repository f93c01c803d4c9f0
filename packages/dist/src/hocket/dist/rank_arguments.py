"""Expansion of a rank's variables, such as `$RANK`, in the arguments of its script.

Composer's launcher expands them, too. The rank runs this file in front of its own command, because the
launcher cannot know the rank of a process before the rendezvous.
"""

import os
import re
import sys
from collections.abc import Iterable

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_VARIABLE = re.compile(rf"\$(?:({'|'.join(_NAMES)})\b|\{{({'|'.join(_NAMES)})\}})")


def has_variables(arguments: Iterable[str]) -> bool:
    """Return whether an argument names a variable that differs between ranks or jobs."""
    return any(_VARIABLE.search(argument) for argument in arguments)


def expand(argument: str) -> str:
    """Return the argument with the values that the variables have in this process."""
    return _VARIABLE.sub(lambda found: os.environ.get(found[1] or found[2], found[0]), argument)


if __name__ == "__main__":
    command = [expand(argument) for argument in sys.argv[1:]]
    os.execvp(command[0], command)
