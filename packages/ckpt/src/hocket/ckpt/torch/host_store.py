"""A store of checkpoints for which each host has a folder of its own, such as one in its memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.ckpt.errors import CheckpointNotFoundError
from hocket.ckpt.torch.ranks.host_folders import HostFolders
from hocket.ckpt.torch.saving.job import SaveJob
from hocket.ckpt.torch.saving.memory_files import MemoryFiles
from hocket.ckpt.torch.store import CheckpointStore
from hocket.native import _native

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["HostCheckpointStore"]


class HostCheckpointStore(CheckpointStore):
    """The newest checkpoint of a job whose hosts share no folder: each keeps its part and that of another.

    A save copies each data file to the host's partner, and is committed when that is done. A load copies the
    files that a rank needs from the hosts that have them. So the checkpoint can be loaded, on any number of
    ranks, as long as of a host and its partner one is left. The partner is the next host of a ring, or one in
    another failure domain where `HOCKET_FAILURE_DOMAIN` names those of the hosts. Opening the store is
    collective: it finds the newest checkpoint of which the hosts have every file, and removes all others.

    In shared memory an asynchronous save needs no staging buffer: it copies the state into the data file, of
    which a rank has two. The digests, the copy on the partner and the commit follow in the background.

    Args:
        uri: The folder of this host, the same for all of its ranks and for no other host's.
        timeout_s: Seconds that a rank may be later than the others.

    Attributes:
        problem: Why the checkpoints that were found cannot be loaded; empty if they can, or without any.
        caution: Which failure domain cannot be lost as a whole, as a sentence; empty if each can.
    """

    def __init__(self, uri: str | os.PathLike[str], *, timeout_s: float = 600) -> None:
        super().__init__(uri, timeout_s=timeout_s)
        self._hosts = HostFolders(self.uri, self._coordinator, timeout_s=self.timeout_s)
        self._memory = MemoryFiles(Path(self.uri), self._coordinator.rank)

    def _leave_parent(self) -> None:
        if self._pid != os.getpid():  # the parent's files are mapped here, too
            self._memory = MemoryFiles(Path(self.uri), self._coordinator.rank)
        super()._leave_parent()

    def _stage(self, job: SaveJob, state: object, peers: Sequence[int] | DeviceMesh | None) -> None:
        if job.background:
            # Until it is settled, the previous save's checkpoint and the one before it have both files.
            self._save_queue.wait("sync", self.timeout_s)
            job.memory = self._memory if self._memory.open() else None
        super()._stage(job, state, peers)

    @property
    def problem(self) -> str:
        """See the class."""
        return "" if self._hosts is None else self._hosts.problem

    @property
    def caution(self) -> str:
        """See the class."""
        return "" if self._hosts is None else self._hosts.shared_domain

    def delete(self, step: int) -> None:
        """Delete the committed checkpoints of a step, on the first rank of each host.

        Raises:
            CheckpointNotFoundError: There is no committed checkpoint of that step.
        """
        if self._hosts is None or not self._hosts.is_lead:
            return
        names = [entry.name for entry in self.list() if entry.status == "committed" and entry.step == step]
        if not names:
            raise CheckpointNotFoundError(f"`{self.uri}` has no committed checkpoint of step {step}")
        for name in names:
            _native.ckpt_delete(self.uri, name)

    def release_memory(self) -> None:
        """Give back the files that the next saves would fill, when no save runs; checkpoints keep theirs."""
        self._memory.release()

    def close(self) -> None:
        """Wait for the running save, at most `timeout_s`, and serve no files any more."""
        try:
            super().close()
            self.release_memory()
        finally:
            if self._hosts is not None:
                self._hosts.close()
