"""One load as each rank runs it: match the tree, read the tensors, and agree on the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hocket.ckpt.gc_pause import gc_paused
from hocket.ckpt.read.opener import open_hocket
from hocket.ckpt.read.reader import Checkpoint
from hocket.ckpt.torch.loading.host_manifest import HostManifest
from hocket.ckpt.torch.loading.plan import LoadSelection, select
from hocket.ckpt.torch.loading.replicated_read import fill_sharing
from hocket.ckpt.torch.loading.tensor_reads import fill, needed_files
from hocket.ckpt.torch.ranks.coordinator import Coordinator
from hocket.ckpt.torch.ranks.error_propagation import agree
from hocket.ckpt.torch.ranks.host_folders import HostFolders
from hocket.ckpt.torch.ranks.pipeline import agree_on_rest, as_peers
from hocket.ckpt.torch.saving.rank_values import read_rank_values

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["LoadJob", "Loaded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The result of a load."""

    name: str
    """The checkpoint's name: the last part of its URI."""
    step: int
    state: Any = field(repr=False)
    """The tree that was passed as `into`: its tensors filled in place, its values replaced."""
    user: Any
    """The `user` value that was saved with the checkpoint."""
    per_rank: dict[str, Any] | None = field(repr=False)
    """This rank's own values; None if none were saved or if the world size differs."""


@dataclass(slots=True, eq=False, kw_only=True)
class LoadJob:
    """A load on this rank. Call `match` and, even if it failed, `finish`."""

    key: str
    """Identifier of the load; the same on all ranks."""
    uri: str
    coordinator: Coordinator
    timeout_s: float
    strict: bool
    """Refuse names that only one side has; with `stage`, names that no rank loads."""
    stage: tuple[int, ...] | None = None
    """The ranks that load the same tree as this rank, or None if all ranks do."""
    hosts: HostFolders | None = None
    """The folders of the hosts, if each has only a part of the checkpoint."""
    host_manifest: HostManifest | None = None
    """The manifest that ranks share, if there are several."""
    checkpoint: Checkpoint | None = None
    selection: LoadSelection | None = None
    per_rank: dict[str, Any] | None = None
    error: BaseException | None = None
    """The error on this rank so far; `finish` reports it to the other ranks."""

    @gc_paused()
    def match(
        self,
        into: object,
        peers: Sequence[int] | DeviceMesh | None,
        *,
        cast: bool,
        include: Sequence[str] | None,
        ignore: Sequence[str] | None = None,
    ) -> None:
        """Match the tree with the manifest; changes no tensor.

        One rank of each host reads the manifest; the others wait for it.

        Where each host has only a part of the checkpoint, the files that this rank reads are copied here.
        """
        rank, world_size = self.coordinator.rank, self.coordinator.world_size
        self.stage = as_peers(peers, rank=rank, world_size=world_size)
        if world_size == 1:
            self.checkpoint = open_hocket(self.uri)
        else:
            self.host_manifest = HostManifest(self.coordinator, self.key, timeout_s=self.timeout_s)
            self.checkpoint = self.host_manifest.open(self.uri)
        manifest = self.checkpoint.manifest
        self.selection = select(
            manifest,
            into,
            strict=self.strict,
            cast=cast,
            include=include,
            ignore=ignore,
            source=self.uri,
            is_part=self.stage is not None,
        )
        if self.hosts is not None:
            paths = needed_files(manifest, self.selection.fills, rank=rank, world_size=world_size)
            self.hosts.bring(self.uri.rpartition("/")[2], paths)
        self.per_rank = read_rank_values(self.checkpoint, manifest, rank, world_size)

    def finish(self, *, is_part: bool, check: bool, read_once: bool) -> Loaded:
        """Read what was matched, and return the result; collective.

        Args:
            is_part: Whether the ranks load different trees.
            check: Verify the digest of each block that is read.
            read_once: Share the reads with the ranks that hold the same parts.

        Raises:
            CheckpointIncompatibleError: With `is_part`, no rank loads the tensors that the message names.
            CheckpointError: The load failed on this rank, or on the rank that the message names.
        """
        try:
            if is_part:
                self._agree_on_match()
            self._fill(check=check, read_once=read_once)
            return self._result()
        finally:
            if self.host_manifest is not None:
                self.host_manifest.close()

    def _agree_on_match(self) -> None:
        """Raise on all ranks if one tree does not match, or if no rank loads some part of the checkpoint.

        Collective. For ranks that load different trees; runs before any tensor changes.

        Raises:
            CheckpointIncompatibleError: No rank loads the tensors or values that the message names.
            CheckpointError: This rank's error, or one that names the failed rank.
        """
        self._agree(f"{self.key}/match")
        assert self.stage is not None
        _, selection = self._matched
        unloaded = selection.left if self.coordinator.rank == self.stage[0] else None
        agree_on_rest(
            self.coordinator,
            f"{self.key}/rest",
            unloaded if self.strict else [],
            timeout_s=self.timeout_s,
            what=self._what,
        )

    def _fill(self, *, check: bool, read_once: bool) -> None:
        """Read this rank's parts, or share the reads with the ranks that hold the same parts; collective.

        Raises:
            CheckpointError: The load failed on this rank, or on the rank that the message names.
        """
        rank, world_size = self.coordinator.rank, self.coordinator.world_size
        is_shared = read_once and world_size > 1
        if self.error is None and not is_shared:
            checkpoint, selection = self._matched
            try:
                with checkpoint.one_save():
                    fill(checkpoint, selection.fills, rank=rank, world_size=world_size, check=check)
            except BaseException as error:  # noqa: BLE001 - reported to the other ranks, then raised
                self.error = error
        self._agree(self.key)
        if self.host_manifest is not None:
            self.host_manifest.forget()
        if is_shared:
            checkpoint, selection = self._matched
            fill_sharing(
                checkpoint,
                selection.fills,
                coordinator=self.coordinator,
                key=self.key,
                timeout_s=self.timeout_s,
                check=check,
            )

    def _result(self) -> Loaded:
        """Return the result of the load."""
        checkpoint, selection = self._matched
        manifest = checkpoint.manifest
        return Loaded(
            name=self.uri.rpartition("/")[2],
            step=manifest.step,
            state=selection.state,
            user=manifest.user,
            per_rank=self.per_rank,
        )

    @property
    def _matched(self) -> tuple[Checkpoint, LoadSelection]:
        assert self.checkpoint is not None
        assert self.selection is not None
        return self.checkpoint, self.selection

    @property
    def _what(self) -> str:
        return f"load of `{self.uri}`"

    def _agree(self, key: str) -> None:
        save_id = "" if self.checkpoint is None else self.checkpoint.manifest.save_id
        agree(self.coordinator, key, self.error, timeout_s=self.timeout_s, what=self._what, save_id=save_id)
