"""One load, as each rank runs it: match its tree, fill it, and end as all ranks end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.manifest import Manifest
from hocket.ckpt.reader import of_one_save, read_manifest
from hocket.ckpt.torch.failures import agree
from hocket.ckpt.torch.filling import fill
from hocket.ckpt.torch.matching import Selection, select
from hocket.ckpt.torch.rendezvous import Rendezvous
from hocket.ckpt.torch.sharing import fill_sharing
from hocket.ckpt.torch.stages import agree_on_rest, as_peers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["LoadJob", "Loaded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a load brought."""

    name: str
    """The checkpoint's name: the last part of its URI."""
    step: int
    state: Any
    """The tree that was loaded into: the same tensors, filled, and the checkpoint's values."""
    user: Any
    """What the user attached."""
    per_rank: dict[str, Any] | None
    """This rank's own values; None where there are none, or where the world has another size."""


@dataclass(slots=True, eq=False, kw_only=True)
class LoadJob:
    """A load on this rank: `match`, for stages `agree_on_match`, `fill`, and then what it `brought`."""

    key: str
    """Names the load among the ranks; the same on all of them."""
    uri: str
    rendezvous: Rendezvous
    timeout_s: float
    strict: bool
    """Refuse what only one side has; in stages, what no rank takes."""
    stage: tuple[int, ...] | None = None
    """The ranks that load this rank's tree, where not all do."""
    manifest: Manifest | None = None
    selection: Selection | None = None
    per_rank: dict[str, Any] | None = None
    error: BaseException | None = None
    """What went wrong on this rank so far; the other ranks are told by `agree_on_match` or `fill`."""

    def match(
        self,
        into: object,
        peers: Sequence[int] | DeviceMesh | None,
        *,
        cast: bool,
        include: Sequence[str] | None,
    ) -> None:
        """Finds what the tree takes. No tensor is changed, and no other rank is told."""
        rank, world_size = self.rendezvous.rank, self.rendezvous.world_size
        self.stage = as_peers(peers, rank=rank, world_size=world_size)
        self.manifest = read_manifest(self.uri)
        self.selection = select(
            self.manifest,
            into,
            strict=self.strict,
            cast=cast,
            include=include,
            source=self.uri,
            is_part=self.stage is not None,
        )
        self.per_rank = _own_values(self.manifest, self.uri, rank, world_size)

    def agree_on_match(self) -> None:
        """Where ranks load trees that differ: raises on all if one does not fit, or if all leave something.

        Collective; before a byte of a tensor changes.

        Raises:
            CheckpointIncompatibleError: No stage takes what is named.
            CheckpointError: This rank's error, or another's, which is named.
        """
        self._agree(f"{self.key}/match")
        assert self.stage is not None
        _, selection = self._matched
        left = selection.left if self.rendezvous.rank == self.stage[0] else None
        agree_on_rest(
            self.rendezvous,
            f"{self.key}/rest",
            left if self.strict else [],
            timeout_s=self.timeout_s,
            what=self._what,
        )

    def fill(self, *, check: bool, read_once: bool) -> None:
        """Reads this rank's parts, or shares the reading with those that hold the same; collective.

        Raises:
            CheckpointError: The load failed, here or on the rank that is named.
        """
        rank, world_size = self.rendezvous.rank, self.rendezvous.world_size
        is_shared = read_once and world_size > 1
        if self.error is None and not is_shared:
            manifest, selection = self._matched
            try:
                with of_one_save(self.uri, manifest.save_id):
                    fill(self.uri, manifest, selection.fills, rank=rank, world_size=world_size, check=check)
            except BaseException as error:  # noqa: BLE001 - the other ranks are told, then it is raised
                self.error = error
        self._agree(self.key)
        if is_shared:
            manifest, selection = self._matched
            fill_sharing(
                self.uri,
                manifest,
                selection.fills,
                rendezvous=self.rendezvous,
                key=self.key,
                timeout_s=self.timeout_s,
                check=check,
            )

    def brought(self) -> Loaded:
        """What came of it."""
        manifest, selection = self._matched
        return Loaded(
            name=self.uri.rpartition("/")[2],
            step=manifest.step,
            state=selection.state,
            user=manifest.user,
            per_rank=self.per_rank,
        )

    @property
    def _matched(self) -> tuple[Manifest, Selection]:
        assert self.manifest is not None
        assert self.selection is not None
        return self.manifest, self.selection

    @property
    def _what(self) -> str:
        return f"load of `{self.uri}`"

    def _agree(self, key: str) -> None:
        save_id = "" if self.manifest is None else self.manifest.save_id
        agree(self.rendezvous, key, self.error, timeout_s=self.timeout_s, what=self._what, save_id=save_id)


def _own_values(manifest: Manifest, uri: str, rank: int, world_size: int) -> dict[str, Any] | None:
    own = manifest.per_rank
    if own is None:
        return None
    if len(own.ranks) == world_size:
        values: dict[str, Any] | None = own.ranks[rank]
        return values
    if own.policy == "require":
        raise CheckpointIncompatibleError(
            f"`{uri}` was saved by {len(own.ranks)} ranks and requires as many, for its `per_rank` values; "
            f"here are {world_size}. Save with `per_rank_policy='reseed'` or 'drop' to be free of that."
        )
    return None
