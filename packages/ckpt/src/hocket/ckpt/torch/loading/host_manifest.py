"""Opening of a checkpoint by all ranks, of which one rank of each host reads the manifest.

The first rank of a host to come reads the manifest from the disk or the store, and keeps its bytes in memory
that belongs to no folder. The other ranks of the host copy them from there, and check them as usual.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.ckpt.errors import CheckpointNotFoundError
from hocket.ckpt.read.opener import open_hocket
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.ckpt.read.reader import Checkpoint
    from hocket.ckpt.torch.ranks.coordinator import Coordinator

__all__ = ["HostManifest"]

_WAIT_S = 60
"""The most seconds that a rank waits for another one's read before it reads the manifest itself."""


class HostManifest:
    """The manifest of one load, on this rank.

    A rank that cannot take the manifest from another one, or in time, reads it itself. So does every rank if
    the first one fails, to raise its own error, and every rank of a system without `memfd_create`.

    Args:
        coordinator: Connects the ranks.
        key: Identifies the load; the same on all ranks, and used once.
        timeout_s: Seconds that the ranks of the load wait for each other.
    """

    def __init__(self, coordinator: Coordinator, key: str, *, timeout_s: float) -> None:
        self._coordinator = coordinator
        self._key = key
        self._wait_s = min(_WAIT_S, timeout_s / 4)
        self._memory: int | None = None
        self._is_first = False

    def open(self, uri: str) -> Checkpoint:
        """Open a checkpoint of Hocket's format; the errors are those of `open_hocket`."""
        host = _host()
        if not host:
            return open_hocket(uri)
        # Ranks that name different checkpoints fail later, by the saves that they have read.
        self._key = f"{self._key}/manifest/{host}/{_native.xxh3_128(uri.encode()).hex()}"
        self._is_first = self._coordinator.store.add(f"{self._key}/ranks", 1) == 1
        stored = self._read(uri) if self._is_first else self._take()
        return open_hocket(uri, stored=stored)

    def forget(self) -> None:
        """Remove what was posted; only after all ranks have opened the checkpoint."""
        if self._is_first:
            self._coordinator.forget(f"{self._key}/ranks", f"{self._key}/place")

    def close(self) -> None:
        """Free the memory."""
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def _read(self, uri: str) -> bytes | None:
        """Return the manifest's bytes, and post where they are; None if there is no manifest."""
        stored, place = None, ""
        try:
            with contextlib.suppress(CheckpointNotFoundError):  # perhaps it is of another format
                stored = _native.ckpt_manifest_stored(uri)
                place = self._keep(stored)
        finally:
            self._coordinator.post(f"{self._key}/place", place.encode())
        return stored

    def _keep(self, stored: bytes) -> str:
        """Copy bytes to memory that other processes can open; return its place, empty if there is none."""
        try:
            self._memory = os.memfd_create("hocket-ckpt-manifest", os.MFD_CLOEXEC)
            rest = memoryview(stored)
            while rest:
                rest = rest[os.write(self._memory, rest) :]
        except OSError:
            return ""
        return f"{os.getpid()} {self._memory} {_native.xxh3_128(stored).hex()}"

    def _take(self) -> bytes | None:
        """Return the bytes that the first rank has read; None if it failed, is late or cannot be reached."""
        place = self._coordinator.await_value(f"{self._key}/place", timeout_s=self._wait_s)
        if not place:
            return None
        pid, descriptor, digest = place.decode().split()
        try:
            # Without O_NONBLOCK, a pipe that has the number by now would block.
            memory = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(memory, "rb") as file:
                stored = file.read() or b""
        except OSError:
            return None
        return stored if _native.xxh3_128(stored).hex() == digest else None


def _host() -> str:
    """Return a name that processes share if they see the same files and each other's memory; else empty."""
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "mnt"))
        return "-".join(map(str, (boot, *spaces, os.getuid())))
    except OSError:
        return ""
