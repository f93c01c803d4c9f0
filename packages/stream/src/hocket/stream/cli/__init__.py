"""The command `hocket-stream`: inspects, checks and writes data sets, without torch."""

from hocket.stream.cli.app import main

__all__ = ["main"]
