"""Building and committing of manifests, for every writer of Hocket checkpoints."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from hocket.ckpt.document.chunks import Chunk
from hocket.ckpt.document.manifest import Manifest, SaveSummary
from hocket.ckpt.document.records import TensorRecord
from hocket.ckpt.errors import CheckpointExistsError
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = ["build_manifest", "commit", "commit_over"]


def build_manifest(
    *,
    writer: str,
    files: Sequence["CkptFile"],
    tensors: Mapping[str, TensorRecord],
    chunks: Mapping[str, Sequence[Chunk]],
    created: str | None = None,
    **fields: Any,
) -> Manifest:
    """Build the manifest of a save whose files are written.

    Args:
        writer: The function that wrote the files, by its public name.
        files: The records of the data files.
        tensors: The tensors' records, without chunks.
        chunks: The chunks of each tensor that has any, in any order.
        created: The time of the save, if it is not now.
        fields: The other fields of `Manifest`.
    """
    records = {
        # In place of `replace`, which takes three times as long and is most of the cost of a small tensor.
        name: TensorRecord(
            dtype=record.dtype,
            shape=record.shape,
            path=record.path,
            same_as=record.same_as,
            chunks=tuple(sorted(chunks.get(name, ()), key=lambda chunk: chunk.start)),
            data=record.data,
        )
        for name, record in tensors.items()
    }
    return Manifest(
        writer=writer,
        created=created or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        version=_native.__version__,
        files=tuple(files),
        tensors=records,
        **fields,
    )


def commit(
    uri: str,
    manifest: Manifest,
    replaces: str | None = None,
    *,
    unfenced: bool = False,
    must_exist: bool = False,
) -> None:
    """Write the manifest, validated as a reader would; this is the commit.

    Args:
        uri: The checkpoint.
        manifest: Its manifest.
        replaces: The save id of an existing checkpoint, to be replaced atomically. Its files are kept.
        unfenced: Also commit to a store that ignores or rejects conditional writes.
        must_exist: Raise if the checkpoint to replace was removed meanwhile.

    Raises:
        CheckpointExistsError: Another save committed first.
        CheckpointNotFoundError: With `must_exist`, the checkpoint to replace does not exist.
        CheckpointUnfencedError: The store ignores conditional writes, and `unfenced` is False.
    """
    _native.ckpt_commit(
        uri,
        _native.ckpt_manifest_encode(manifest.to_document()),
        manifest.save_id,
        unfenced=unfenced,
        replaces=replaces,
        must_exist=must_exist,
    )


def commit_over(
    uri: str, encoded: bytes, save_id: str, replaces: SaveSummary | None, *, unfenced: bool = False
) -> SaveSummary | None:
    """Commit an encoded manifest in place of a save that was found earlier, also if it was thinned since.

    Returns:
        The save that was replaced, whose files are kept; None if `replaces` is None.

    Raises:
        CheckpointExistsError: Another save committed first.
        CheckpointUnfencedError: As for `commit`.
    """
    while True:
        try:
            _native.ckpt_commit(
                uri,
                encoded,
                save_id,
                unfenced=unfenced,
                replaces=None if replaces is None else replaces.save_id,
            )
        except CheckpointExistsError:
            if replaces is None:
                raise
            thinned = Manifest.read(uri).thinned
            if thinned is None or thinned.save_id != replaces.save_id:
                raise
            replaces = SaveSummary.read(uri)
        else:
            return replaces
