"""The commit of a repository on a hub of Hugging Face, the same on all ranks of a job."""

from __future__ import annotations

import sys
from typing import Any

from hocket.native._native import Store

__all__ = ["SCHEME", "pin"]

SCHEME = "hf://"


def pin(uri: str, *, deadline_s: float | None = None) -> str:
    """Return a hub's URI with the commit that its branch or tag is now; any other URI as it is.

    With torch's process group, all ranks get the commit that the first of them has found, also later in the
    run. Does not wait for other ranks, and does not import torch.

    Args:
        uri: `hf://datasets/owner/name@revision/path`, `hf://owner/name`, or any other place.
        deadline_s: Seconds for all attempts of one request together.

    Raises:
        StoreError: There is no such repository or revision, or no access to it.
    """
    if not uri.startswith(SCHEME):
        return uri
    store = Store(uri, deadline_s=deadline_s)
    pinned = store.pinned_uri()
    assert pinned is not None
    if pinned == store.uri:
        return pinned
    return _first_over_ranks(f"hocket/hub/{store.uri}", pinned)


def _first_over_ranks(key: str, value: str) -> str:
    """Return the value that the first rank of torch's process group passed under this key."""
    torch_dist: Any = sys.modules.get("torch.distributed")
    if torch_dist is None or not (torch_dist.is_available() and torch_dist.is_initialized()):
        return value
    # The only name that torch has for the store behind the group.
    store = torch_dist.distributed_c10d._get_default_store()
    found: bytes = store.compare_set(key, "", value)
    return found.decode()
