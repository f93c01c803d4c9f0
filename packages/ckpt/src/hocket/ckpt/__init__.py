"""Sharded checkpoints: atomic commits, verified reads, loading on any number of ranks."""

from hocket.ckpt import errors
from hocket.ckpt.listing import Listing, list_checkpoints
from hocket.ckpt.opener import open  # noqa: A004 - read as `hocket.ckpt.open`
from hocket.ckpt.reader import Checkpoint
from hocket.ckpt.removing import Collected, Garbage, Removed, collect_garbage, remove
from hocket.ckpt.resharding import Resharded, reshard
from hocket.ckpt.verifying import Flaw, Verdict, verify

__all__ = [
    "Checkpoint",
    "Collected",
    "Flaw",
    "Garbage",
    "Listing",
    "Removed",
    "Resharded",
    "Verdict",
    "collect_garbage",
    "errors",
    "list_checkpoints",
    "open",
    "remove",
    "reshard",
    "verify",
]
