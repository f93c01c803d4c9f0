"""The start of ranks: `hocket-launch`, its plan of memory, and the launcher for notebooks."""

from hocket.dist.launch.command import main

__all__ = ["main"]
