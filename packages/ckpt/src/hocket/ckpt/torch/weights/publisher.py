"""The publisher of weights: whole versions, and deltas between them, written by all ranks."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import torch
import torch.distributed as dist

from hocket.ckpt.document.file_names import Compression
from hocket.ckpt.document.manifest import VERSION_WRITER, SaveSummary
from hocket.ckpt.document.records import DeltaBase
from hocket.ckpt.errors import CheckpointNotFoundError
from hocket.ckpt.torch.saving.async_save import SaveHandle, close_quietly
from hocket.ckpt.torch.saving.plan import MemoryRange
from hocket.ckpt.torch.store import CheckpointStore
from hocket.ckpt.uris import absolute
from hocket.ckpt.weights.newest import PublisherFence
from hocket.ckpt.weights.versions import Versions, version_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hocket.ckpt.torch.saving.job import SaveJob

__all__ = ["Publisher", "publish"]

_log = logging.getLogger(__name__)

_DELTA_COMPRESSION = Compression(3, planes=True)

_MOST_DELTAS = 1000
"""The most deltas that a reader goes through."""


class Publisher:
    """Publishes versions of a state, such as a model's weights, under a prefix that followers read.

    A version is a checkpoint, committed whole or not at all. Every `full_every`-th is stored whole; the
    others store the XOR of their bytes with those of the version before. Each rank writes its own part, so
    nothing is gathered, and keeps a copy of its part of the last version in host memory; of the last two
    where it publishes asynchronously, or from a device.

    After a restart, or a failure on any rank, the next version is whole. The first version of a publisher
    takes the prefix over from the publisher before, which is refused from then on, and removes versions of
    later steps, which an abandoned run has left.

    Args:
        uri: A folder or a prefix (`s3://bucket/weights`). Other checkpoints may be there and are not touched.
            Choose another one than that of the training's checkpoints: retention policies and `thin` count
            versions as checkpoints.
        full_every: Number of versions from one that is stored whole to the next, at most 1000.
        keep_full: Number of newest whole versions to keep, with all versions after the oldest of them. Older
            ones, which no follower needs, are removed after each commit.
        compression: The encoding of whole versions, as for `CheckpointStore`.
        timeout_s: Seconds that a rank may be later than the others.
        unfenced: Also publish to a store that ignores or rejects conditional writes.

    Example:
        >>> publisher = Publisher(folder + "/weights")
        >>> weights = {"weight": torch.arange(3.0)}
        >>> publisher.publish(weights, step=1)
        'version-1'
        >>> weights["weight"][2] = 4
        >>> publisher.publish(weights, step=2)
        'version-2'
        >>> publisher.close()
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        full_every: int = 20,
        keep_full: int = 2,
        compression: str | None = None,
        timeout_s: float = 600,
        unfenced: bool = False,
    ) -> None:
        for name, number in (("full_every", full_every), ("keep_full", keep_full)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"`{name}` is {number!r}; expected an integer from 1 on")
        if full_every > _MOST_DELTAS:
            raise ValueError(f"`full_every` is {full_every}; expected at most {_MOST_DELTAS}")
        self._store = _VersionStore(
            uri, full_every=full_every, keep_full=keep_full,
            compression=compression, timeout_s=timeout_s, unfenced=unfenced,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Publisher {self.uri!r}>"

    @property
    def uri(self) -> str:
        """The folder or prefix."""
        return self._store.uri

    def publish(
        self, state: object, *, step: int, user: object = None, mode: Literal["sync", "async"] = "sync"
    ) -> str:
        """Publish a state tree as the version of a step; collective. Returns the version's name.

        A synchronous call returns after the commit. An asynchronous one returns when this rank's part is
        copied; the state may change at once, and a thread writes the version. The next call waits for it.

        Args:
            state: As for `CheckpointStore.save`.
            step: The step, greater than that of the version before.
            user: A plain value to store with the version; rank 0's value is used.
            mode: `sync` or `async`. The error of an asynchronous call is raised by `wait`, by `close`, or by
                the next call, which then publishes nothing.

        Raises:
            ValueError: The step is not greater than that of the version before.
            CheckpointExistsError: Another publisher has taken the prefix over. Nothing was published.
            CheckpointError: As for `CheckpointStore.save`; the next version is whole.
        """
        return self._store.publish(state, step=step, user=user, mode=mode)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the version of the last asynchronous call is committed.

        Args:
            timeout_s: Seconds to wait; None for no limit (each step has its own deadline).

        Raises:
            CheckpointTimeoutError: It is still being written.
            CheckpointError: It was not published; the next version is whole.
        """
        self._store.settle(timeout_s)

    def close(self) -> None:
        """Wait for the running call, and release the coordination with the other ranks and the copies."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _VersionStore(CheckpointStore):
    """A store whose saves are versions."""

    def __init__(
        self, uri: str | os.PathLike[str], *, full_every: int, keep_full: int, **options: object
    ) -> None:
        super().__init__(uri, **options)  # type: ignore[arg-type]
        self._full_every = full_every
        self._keep_full = keep_full
        self._fence = PublisherFence(self.uri, unfenced=self._unfenced)
        self._last_step: int | None = None
        self._base: _LastVersion | None = None
        self._next: _LastVersion | None = None
        self._pending: _PendingVersion | None = None
        self._spare = self._staging.like()

    def publish(
        self, state: object, *, step: int, user: object, mode: Literal["sync", "async"] = "sync"
    ) -> str:
        self.settle()
        last, base = self._last_step, self._base
        if last is not None and step <= last:
            raise ValueError(f"`step` is {step}; expected one after {last}, the step of the version before")
        name = version_name(step)
        try:
            handle = self.save(state, step=step, name=name, user=user, mode=mode, overwrite=True)
        except BaseException:
            self._base = self._next = None
            raise
        assert self._next is not None or mode == "async"  # an asynchronous save that failed has none
        # The base becomes the difference, so that the version after one that fails is whole.
        self._pending = _PendingVersion(handle, self._next, base)
        self._base = self._next = None
        if mode == "sync":
            self.settle()
        return name

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for the version that is being written, and make it the base of the next one."""
        self._leave_parent()  # only a thread of the parent writes that version
        if self._pending is None:
            return
        handle, version, base = self._pending
        try:
            handle.wait(timeout_s)
        except BaseException:
            if handle.is_heard:  # otherwise it may have been published since
                self._pending = None
            raise
        self._pending = None
        assert version is not None
        version.remember(base)
        self._base, self._last_step = version, handle.step

    def _leave_parent(self) -> None:
        if self._pid != os.getpid():
            self._spare, self._pending = self._spare.like(), None
        super()._leave_parent()

    def _stage(self, job: SaveJob, state: object, peers: Sequence[int] | DeviceMesh | None) -> None:
        super()._stage(job, state, peers)
        assert job.snapshot is not None
        job.writer = VERSION_WRITER
        signature = job.snapshot.plan.signature
        parts = [_bytes_of(tensor) for tensor in job.held]
        base = self._base
        if base is not None and (base.signature != signature or base.num_deltas + 1 >= self._full_every):
            base = None
        version = DeltaBase(version_name(job.step), job.save_id)
        num_deltas = 0 if base is None else base.num_deltas + 1
        self._next = _LastVersion(version, signature, parts, num_deltas, is_own=job.is_staged)
        if job.is_staged:
            # The staged bytes stay as the next base, and the next version is staged where this base was.
            self._staging, self._spare = self._spare, self._staging
        job.prepare = partial(self._prepare, job, base, parts)
        if base is None:
            return
        job.delta, job.compression = base.version, _DELTA_COMPRESSION
        job.entries = [
            MemoryRange(entry.part, entry.dtype, copy.data_ptr(), copy.nbytes)
            for entry, copy in zip(job.entries, base.parts, strict=True)
        ]
        job.held = list(base.parts)

    def _prepare(self, job: SaveJob, base: _LastVersion | None, parts: Sequence[torch.Tensor]) -> None:
        if self._coordinator.is_rank_0:
            self._claim(job)
        if base is not None:
            base.subtract(parts)

    def _claim(self, job: SaveJob) -> None:
        """Prepare the place of a version, on rank 0, if no other publisher has taken over."""
        if self._last_step is None:
            # The list is made before this publisher takes the right, so it has no version of a later one.
            versions = Versions.find(self.uri)
            self._fence.take()
            abandoned = versions.after(job.step)
            if abandoned:
                _log.warning(
                    "removing %d versions under `%s` after step %d, of a run that was abandoned",
                    len(abandoned), self.uri, job.step,
                )  # fmt: skip
                versions.remove(abandoned)
        # Only this save is replaced. It is read before the check, so that it is of no later publisher.
        with contextlib.suppress(CheckpointNotFoundError):
            job.replaces = SaveSummary.read(job.uri)
        job.overwrite = job.replaces is not None
        self._fence.check()
        job.seal = partial(self._fence.name, job.name, job.step, job.save_id)

    def _retain(self, name: str) -> None:
        try:
            versions = Versions.find(self.uri)
            versions.remove_older_than_whole(self._keep_full)
        except Exception as error:  # noqa: BLE001 - the version is committed; the next one tries again
            _log.warning("could not remove old versions under `%s`: %s", self.uri, error)

    def close(self) -> None:
        self._base = self._next = self._pending = None
        super().close()


class _PendingVersion(NamedTuple):
    """A version that is being written, and the base that it is a difference from, if it is one."""

    handle: SaveHandle
    version: _LastVersion | None
    base: _LastVersion | None


class _LastVersion:
    """A rank's part of the version before, in host memory."""

    def __init__(
        self,
        version: DeltaBase,
        signature: tuple[object, ...],
        parts: list[torch.Tensor],
        num_deltas: int,
        *,
        is_own: bool,
    ) -> None:
        self.version = version
        self.signature = signature
        self.parts = parts
        self.num_deltas = num_deltas
        """Number of deltas from the last whole version to this one."""
        self._is_own = is_own

    @torch.no_grad()
    def subtract(self, parts: Sequence[torch.Tensor]) -> None:
        """Replace the parts by their difference from those of the next version."""
        for copy, part in zip(self.parts, parts, strict=True):
            torch.bitwise_xor(copy, part, out=copy)

    @torch.inference_mode(False)  # tensors made in inference mode could not be changed outside of it
    @torch.no_grad()
    def remember(self, before: _LastVersion | None) -> None:
        """Copy the parts, unless their memory is the publisher's own.

        The memory of the version before is reused if its layout is the same.
        """
        if self._is_own:
            return
        if before is not None and before.signature == self.signature:
            for copy, part in zip(before.parts, self.parts, strict=True):
                copy.copy_(part)
            self.parts = before.parts
        else:
            self.parts = [part.clone() for part in self.parts]


@torch.inference_mode(False)  # a view as another dtype is a tensor made in that mode, too
def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    # `view(-1)` keeps the stride of a tensor of one item, which is contiguous to torch whatever its stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


_publishers: dict[tuple[str, int], Publisher] = {}

_MOST_PUBLISHERS = 4


def publish(
    state: object,
    uri: str | os.PathLike[str],
    step: int,
    *,
    user: object = None,
    full_every: int = 20,
    mode: Literal["sync", "async"] = "sync",
) -> str:
    """Publish a state tree under a prefix; collective. See `Publisher`, of which the last ones used are kept.

    `full_every` is that of the first call for a prefix.

    Example:
        >>> publish({"weight": torch.arange(3.0)}, folder + "/stream", 1)
        'version-1'
    """
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
    key = (absolute(uri), world_size)
    publisher = _publishers.pop(key, None) or Publisher(uri, full_every=full_every)
    _publishers[key] = publisher
    while len(_publishers) > _MOST_PUBLISHERS:  # the same on all ranks, because they make the same calls
        close_quietly(_publishers.pop(next(iter(_publishers)))._store)
    return publisher.publish(state, step=step, user=user, mode=mode)
