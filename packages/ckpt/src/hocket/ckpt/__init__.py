"""Checkpoints that are committed whole, checked when read, and opened on any number of ranks."""

from hocket.ckpt import errors
from hocket.ckpt.listing import Listing, list_checkpoints
from hocket.ckpt.reader import Checkpoint, open  # noqa: A004 - read as `hocket.ckpt.open`
from hocket.ckpt.verifying import Flaw, Verdict, verify

__all__ = ["Checkpoint", "Flaw", "Listing", "Verdict", "errors", "list_checkpoints", "open", "verify"]
