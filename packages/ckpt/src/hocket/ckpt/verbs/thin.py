"""Thinning: drops the optimizer state of older checkpoints, which keep their weights.

What stays is written into new files beside those of the whole save, and the manifest is replaced in one step;
the old files are removed after that. A checkpoint is whole or thinned whenever the process is killed, and a
rerun reuses the finished files and removes those that were left over.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.ckpt.document.file_names import Compression
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.records import ThinnedState
from hocket.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
)
from hocket.ckpt.formats.hocket import plan_hocket
from hocket.ckpt.globs import check_globs, unmatched
from hocket.ckpt.read.opener import open_hocket
from hocket.ckpt.uris import Place, local_path
from hocket.ckpt.verbs.kept_part import KeptPart, ThinnedCheckpoint
from hocket.ckpt.verbs.list import ListedCheckpoint, list_checkpoints
from hocket.ckpt.verbs.rewrite import rewrite
from hocket.native import Store, _native
from hocket.native.errors import StoreError

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = [
    "OPTIMIZER_STATE",
    "Thin",
    "ThinReport",
    "ThinnedCheckpoint",
    "is_committed",
    "thin",
    "thin_checkpoint",
]

OPTIMIZER_STATE = ("optimizers.*", "optimizer.*", "optim.*", "optimizer_states.*", "state.optimizers.*")
"""Globs of the optimizer state in checkpoints of Hocket, torch's recipes, Lightning and Composer."""

_MEMORY_BYTES = 256 << 20
_LEVEL = 3  # of compressed files, which stay compressed; theirs is not recorded
# After these errors of one checkpoint, the others are still thinned.
_OF_ONE_CHECKPOINT = (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Thin:
    """A retention policy that drops the optimizer state of older checkpoints, which keep their weights.

    The checkpoint with the highest step, which autoresume loads, stays whole.
    """

    after: int = 1
    """The number of the most recently saved checkpoints that stay whole."""
    every: int | None = None
    """Checkpoints whose step is a multiple of it stay whole, too."""
    drop: Sequence[str] = OPTIMIZER_STATE
    """Globs of the names to drop."""

    def __post_init__(self) -> None:
        for name, value in (("after", self.after), ("every", 1 if self.every is None else self.every)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` is {value!r}; expected an integer from 1 on")
        check_globs(drop=self.drop)
        object.__setattr__(self, "drop", tuple(self.drop))
        if not self.drop:
            raise ValueError("`drop` is empty; expected globs of names, such as ['optimizers.*']")

    def thins(self, committed: Sequence[ListedCheckpoint]) -> list[ListedCheckpoint]:
        """Return the checkpoints to thin of all committed ones, given in save order."""
        newest = max(committed, key=lambda it: (it.step or 0, it.created or "", it.name), default=None)
        return [
            listing
            for listing in committed[: -self.after]
            if listing is not newest and (self.every is None or (listing.step or 0) % self.every)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinReport:
    """The result of `thin`."""

    thinned: tuple[ThinnedCheckpoint, ...]
    whole: tuple[str, ...]
    """Names of the checkpoints that stay whole as asked."""
    unchanged: tuple[str, ...]
    """Names of those that have nothing to drop, such as those that were thinned before."""
    skipped: Mapping[str, str]
    """Checkpoints that were skipped because they cannot be read or were changed meanwhile: name → reason."""


def thin(
    prefix: Place,
    *,
    after: int = 1,
    every: int | None = None,
    drop: Sequence[str] = OPTIMIZER_STATE,
    dry_run: bool = False,
    memory_bytes: int = _MEMORY_BYTES,
    unfenced: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> ThinReport:
    """Drop the optimizer state of the older checkpoints under a prefix; their weights stay as they are.

    Every checkpoint is whole or thinned at any time, also if the process is killed; a rerun finishes. What
    stays is verified, written anew, and committed in place of the whole checkpoint if no other process
    replaced or removed that meanwhile. Other formats and unfinished checkpoints are not counted or changed.

    Args:
        prefix: A folder of checkpoints, or a URI.
        after: The number of the most recently saved checkpoints that stay whole. The one with the highest
            step always does.
        every: Checkpoints whose step is a multiple of it stay whole, too.
        drop: Globs of the names to drop.
        dry_run: Change nothing.
        memory_bytes: Memory limit for tensor data.
        unfenced: Also write to a store that ignores or rejects conditional writes; no other process may write
            there then.
        on_progress: Called with the bytes written so far and the bytes of all tensors that stay.

    Raises:
        CheckpointNotFoundError: There is no such prefix, or a glob of `drop` (other than the default ones)
            matches no name of the checkpoints to thin. Nothing was changed.
        CheckpointUnfencedError: The store ignores conditional writes, and `unfenced` is False.
        StoreError, OSError: The place cannot be written to.
        ValueError: An argument is invalid, or `prefix` is itself a checkpoint.

    Example:
        >>> [found.name for found in thin(folder, after=1, dry_run=True).thinned]
        []
    """
    policy = Thin(after=after, every=every, drop=drop)
    if memory_bytes < 16 << 20:
        raise ValueError(f"`memory_bytes` is {memory_bytes}; expected at least {16 << 20}")
    prefix = local_path(prefix)
    listings = list_checkpoints(prefix)
    committed = sorted(
        (listing for listing in listings if listing.status == "committed"),
        key=lambda listing: (listing.created or "", listing.step or 0),
    )
    if not committed and is_committed(prefix):
        raise ValueError(
            f"`{prefix}` is itself a checkpoint, and `thin` takes the folder above, of which the newest "
            "checkpoints stay whole"
        )
    chosen = policy.thins(committed)
    skipped: dict[str, str] = {}
    found = list[tuple[ListedCheckpoint, ThinnedCheckpoint | None, int]]()
    idle, names = dict.fromkeys(policy.drop), list[str]()
    for listing in chosen:
        try:
            part = KeptPart(open_hocket(listing.uri, follow=False), policy.drop)
            found.append((listing, part.dropped(listing.name), part.num_bytes))
        except _OF_ONE_CHECKPOINT as error:
            skipped[listing.name] = str(error)
            continue
        names = max(names, part.names, key=len)
        for glob in [glob for glob in idle if part.matches(glob)]:
            del idle[glob]
    if idle and policy.drop != OPTIMIZER_STATE and names:
        problem = unmatched(next(iter(idle)), names).replace("`include` has", "`drop` has")
        raise CheckpointNotFoundError(f"`{prefix}`: {problem}. Nothing was changed")
    total = sum(num_bytes for _, one, num_bytes in found if one is not None)
    done = 0

    def passed(num_bytes: int) -> None:
        nonlocal done
        done = min(done + num_bytes, total)
        if on_progress is not None:
            on_progress(done, total)

    thinned, unchanged = [], []
    for listing, one, _ in found:
        try:
            if not dry_run:
                one = thin_checkpoint(
                    listing, policy.drop, memory_bytes=memory_bytes, unfenced=unfenced, on_bytes=passed
                )
        except _OF_ONE_CHECKPOINT as error:
            skipped[listing.name] = str(error)
            continue
        except (OSError, StoreError) as error:
            if is_committed(listing.uri):
                raise
            skipped[listing.name] = str(error)  # another process has removed it
            continue
        if one is None:
            unchanged.append(listing.name)
        else:
            thinned.append(one)
    chosen_names = {listing.name for listing in chosen}
    return ThinReport(
        thinned=tuple(thinned),
        whole=tuple(listing.name for listing in committed if listing.name not in chosen_names),
        unchanged=tuple(unchanged),
        skipped=skipped,
    )


def thin_checkpoint(
    listing: ListedCheckpoint,
    drop: Sequence[str],
    *,
    memory_bytes: int,
    unfenced: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> ThinnedCheckpoint | None:
    """Thin one checkpoint, or finish what a killed run began; return None if it has nothing to drop.

    Args:
        listing: The checkpoint.
        drop: Globs of the names to drop.
        memory_bytes: Memory limit for tensor data.
        unfenced: As for `thin`.
        on_bytes: Called with the bytes of each piece. After its `CancelledError`, finished files stay.

    Raises:
        CheckpointExistsError: Another save has replaced the checkpoint meanwhile.
        CheckpointNotFoundError: It was removed meanwhile.
        CheckpointIncompatibleError: Nothing would stay.
        CheckpointError: As for `rewrite`. The checkpoint is as it was.
    """
    uri = listing.uri
    opened = open_hocket(uri, follow=False)
    part = KeptPart(opened, drop)
    manifest = part.manifest
    dropped = part.dropped(listing.name)
    if dropped is None:
        if manifest.thinned is not None:
            _remove_left_over(uri, manifest, manifest.thinned.save_id)
        return None
    # Files hold the writer's version, so it is part of the identity.
    identity = ["thin", 1, _native.__version__, *opened.identity(), *drop]
    save_id = _native.xxh3_128(json.dumps(identity).encode()).hex()
    before = manifest.thinned
    plan = plan_hocket(
        uri,
        part.shards(),
        part.tensors,
        save_id=save_id,
        compression=_encoding_of(manifest.files),
        unfenced=unfenced,
        replaces=manifest.save_id,
        writer=manifest.writer,
        created=manifest.created,
        step=manifest.step,
        world_size=manifest.world_size,
        mesh=manifest.mesh,
        values=part.values,
        integer_keyed=part.integer_keyed,
        per_rank=manifest.per_rank,
        user=manifest.user,
        thinned=ThinnedState(
            save_id=manifest.save_id,
            dropped=tuple(dict.fromkeys([*(before.dropped if before else ()), *drop])),
            num_tensors=dropped.num_tensors + (before.num_tensors if before else 0),
            num_bytes=dropped.num_bytes + (before.num_bytes if before else 0),
        ),
    )
    commit = plan.commit
    assert commit is not None

    def commit_if_there(records: Sequence["CkptFile"]) -> Manifest:
        # The commit of a checkpoint that was removed would leave its lock.
        if not is_committed(uri, manifest.save_id):
            raise CheckpointNotFoundError(f"`{uri}` was removed or replaced while it was thinned")
        return commit(records)

    plan.commit = commit_if_there
    try:
        rewrite(opened, plan, memory_bytes=memory_bytes, on_bytes=on_bytes)
    except CancelledError:
        raise
    except Exception:
        # The next save may need the room on a full disk, and a checkpoint that was removed leaves nothing.
        if not is_committed(uri, save_id):
            _native.ckpt_delete_files(uri, [file.path for file in plan.files])
        raise
    _native.ckpt_delete_files(uri, [file["path"] for file in manifest.files])
    return ThinnedCheckpoint(
        name=listing.name,
        step=manifest.step,
        save_id=save_id,
        num_tensors=dropped.num_tensors,
        num_bytes=dropped.num_bytes,
    )


def _encoding_of(files: Sequence["CkptFile"]) -> Compression | None:
    """Return the encoding of a checkpoint's files, which the thinned ones keep."""
    if not any("frames" in file for file in files):
        return None
    return Compression(_LEVEL, planes=any("planes" in file for file in files))


def is_committed(uri: str, save_id: str | None = None) -> bool:
    """Return whether a save, or any, is or may be committed; the outcome of a commit may be unknown."""
    try:
        head = json.loads(_native.ckpt_manifest_head(uri))
        return save_id is None or bool(head["save_id"] == save_id)
    except CheckpointNotFoundError:
        return False
    except Exception:  # noqa: BLE001 - whatever it is, the manifest may be there
        return True


def _remove_left_over(uri: str, manifest: Manifest, save_id: str) -> None:
    """Remove the files of the whole save that a run killed after its commit has left."""
    own = {file["path"] for file in manifest.files}
    listed = (file.key for file in Store(uri).list("data"))
    paths = [key for key in listed if key.startswith(f"data/{save_id[:8]}-r") and key not in own]
    if paths:
        _native.ckpt_delete_files(uri, paths)
