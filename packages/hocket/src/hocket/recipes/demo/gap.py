"""The gap in a save: its data files are in the store, but its manifest, the commit, is not."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable

from hocket.native import Store

MANIFEST = "checkpoint.json.zst"
_DATA_FILE = re.compile(r"^data/[0-9a-f]+-r(\d+)-\d+\.")


def find_gap(store: Store, ranks: int) -> str | None:
    """Return the name of a checkpoint that is in the gap, if an earlier one is committed.

    Args:
        store: The save folder.
        ranks: Writers whose data files must be there.
    """
    writers: dict[str, set[str]] = defaultdict(set)
    committed: set[str] = set()
    for entry in store.list():
        name, _, key = entry.key.partition("/")
        if key == MANIFEST:
            committed.add(name)
        elif match := _DATA_FILE.match(key):
            writers[name].add(match[1])
    if not committed:
        return None
    return next((name for name, who in writers.items() if name not in committed and len(who) >= ranks), None)


def wait_for_gap(save_folder: str, ranks: int, *, keep_waiting: Callable[[], bool]) -> str | None:
    """Watch a save folder until a checkpoint is in the gap.

    Args:
        save_folder: Path or URI.
        ranks: Writers whose data files must be there.
        keep_waiting: Called about every 0.2 s; False ends the watch.

    Returns:
        The checkpoint's name, or None when the watch ended without one.
    """
    store = Store(save_folder)
    ask_again = 0.0
    while True:
        if name := find_gap(store, ranks):
            return name
        if time.monotonic() > ask_again:
            if not keep_waiting():
                return None
            ask_again = time.monotonic() + 0.2
        # The gap is a few milliseconds wide on a fast disk.
        time.sleep(0.001)
