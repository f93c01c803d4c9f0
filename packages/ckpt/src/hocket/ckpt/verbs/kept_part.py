"""The part of a checkpoint that stays when it is thinned, as tensors, values and contents of files."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hocket.ckpt.document.manifest import VERSION_WRITER
from hocket.ckpt.document.records import TensorRecord, state_names
from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.formats.output_file import ConvertedTensor, TensorPayload
from hocket.ckpt.globs import taken
from hocket.ckpt.read.reader import Checkpoint

__all__ = ["KeptPart", "ThinnedCheckpoint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinnedCheckpoint:
    """A checkpoint that was thinned, or would be with `dry_run`."""

    name: str
    step: int
    save_id: str
    """The id that it has now; with `dry_run`, still that of the whole save."""
    num_tensors: int
    """Number of tensors that were dropped."""
    num_bytes: int
    """Their size in bytes."""


class KeptPart:
    """The part of a checkpoint that stays."""

    def __init__(self, opened: Checkpoint, drop: Sequence[str]) -> None:
        self.manifest = manifest = opened.manifest
        self._drop = drop
        self.names = [*state_names(manifest.tensors), *manifest.values]
        self._gone = set(taken(self.names, include=drop))
        self.tensors = dict(self._tensors())
        self.values = {name: leaf for name, leaf in manifest.values.items() if name not in self._gone}
        nodes = {
            record.path[:depth]
            for records in (self.tensors, self.values)
            for record in records.values()
            for depth in range(len(record.path))
        }
        self.integer_keyed = manifest.integer_keyed & nodes
        self.num_bytes = sum(record.num_bytes for record in self.tensors.values() if record.same_as is None)

    def matches(self, glob: str) -> bool:
        """Return whether a glob matches a name, or was dropped before."""
        thinned = self.manifest.thinned
        if thinned is not None and glob in thinned.dropped:
            return True
        return bool(taken(self._gone, include=[glob]))

    def _tensors(self) -> Iterable[tuple[str, TensorRecord]]:
        """Yield the tensors that stay; the first alias of a tensor that is dropped becomes its owner."""
        tensors = self.manifest.tensors
        owners: dict[str, str] = {}
        for name, record in tensors.items():
            if name in self._gone:
                continue
            stored_as = record.same_as or name
            owner = owners.setdefault(stored_as, name) if stored_as in self._gone else stored_as
            yield (
                name,
                TensorRecord(
                    dtype=record.dtype,
                    shape=record.shape,
                    path=record.path,
                    same_as=None if owner == name else owner,
                    data=tensors[stored_as].data if owner == name else None,
                ),
            )

    def dropped(self, name: str) -> ThinnedCheckpoint | None:
        """Describe what is dropped of the checkpoint `name`; None if that is no tensor.

        Nothing is dropped of a version of published weights: deltas would not fit their base any more.

        Raises:
            CheckpointIncompatibleError: Nothing would stay.
        """
        manifest = self.manifest
        tensors = [manifest.tensors[gone] for gone in self._gone if gone in manifest.tensors]
        if not tensors or manifest.writer == VERSION_WRITER:
            return None
        if not self.tensors:
            raise CheckpointIncompatibleError(
                f"`{name}`: {', '.join(f'`{glob}`' for glob in self._drop)} match all of its tensors; "
                "nothing would stay"
            )
        return ThinnedCheckpoint(
            name=name,
            step=manifest.step,
            save_id=manifest.save_id,
            num_tensors=len(tensors),
            num_bytes=manifest.num_bytes - self.num_bytes,
        )

    def shards(self) -> list[tuple[int, list[TensorPayload]]]:
        """Return the rank and the contents of each file, cut as the whole save is."""
        manifest = self.manifest
        shards: list[list[TensorPayload]] = [[] for _ in manifest.files]
        for name, record in self.tensors.items():
            if record.same_as is not None:
                continue
            source = manifest.tensors[name].same_as or name
            for chunk in manifest.tensors[source].chunks:
                tensor = ConvertedTensor(
                    source=source, name=name, path=record.path, dtype=record.dtype, shape=chunk.size
                )
                start = None if chunk.size == record.shape else chunk.start
                shards[chunk.file].append(TensorPayload(tensor, start))
        paths = (file["path"] for file in manifest.files)
        return [(_rank_of(path), shard) for path, shard in zip(paths, shards, strict=True) if shard]


def _rank_of(path: str) -> int:
    """Return the rank in the name of a data file; 0 if it has another form."""
    found = re.search(r"-r(\d+)-\d+\.[a-z]+$", path)
    return int(found[1]) if found else 0
