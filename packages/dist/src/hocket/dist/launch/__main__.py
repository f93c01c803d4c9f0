"""`python -m hocket.dist.launch` is `hocket-launch`."""

from typing import NoReturn

from hocket.dist.launch import main
from hocket.dist.ranks.process_end import end


def run() -> NoReturn:
    """Run the command, and end the process with its code."""
    end(main())


if __name__ == "__main__":
    run()
