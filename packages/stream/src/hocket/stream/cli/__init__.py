"""The command `hocket-stream`: data sets looked at, checked and made, without torch."""

from hocket.stream.cli.app import main

__all__ = ["main"]
