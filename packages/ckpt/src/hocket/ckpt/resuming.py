"""What runs that go on after a kill need: what they are a run of, `gc` kept off, a look before the commit."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hocket.ckpt.datafiles import file_metadata, stored_bytes
from hocket.ckpt.errors import CheckpointError
from hocket.ckpt.manifest import Manifest
from hocket.ckpt.reader import replaced_error
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = ["check_sizes", "identity_of", "is_whole", "spared"]


def identity_of(uri: str, manifest: Manifest) -> list[str]:
    """What tells a source from every other: the id of its save, and the digest of its manifest.

    Raises:
        CheckpointNotFoundError: Another save has taken the manifest's place since it was read.
    """
    head = json.loads(_native.ckpt_manifest_head(uri))
    if head["save_id"] != manifest.save_id:
        raise replaced_error(uri)
    return [head["save_id"], head["digest"]]


@contextlib.contextmanager
def spared(uri: str, save_id: str, paths: Sequence[str]) -> Iterator[None]:
    """Keeps `gc` from the data files that an earlier run of a save left, as long as this one works.

    One young file keeps all of its save's: where some of `paths` stand there, an empty one is written beside
    them, and removed in the end; that of a run that was killed goes first. An object's time cannot be set, so
    this is the one way for all stores.
    """
    if all(size is None for size in _native.ckpt_sizes(uri, paths)):
        yield
        return
    young = f"data/{save_id[:8]}-r0-running.safetensors"
    _native.ckpt_delete_files(uri, [young])
    _native.ckpt_write_file(uri, young, entries=[], metadata=file_metadata(save_id))
    try:
        yield
    finally:
        # Left behind, it is waste that `gc` takes.
        with contextlib.suppress(Exception):
            _native.ckpt_delete_files(uri, [young])


def check_sizes(uri: str, sizes: Mapping[str, int]) -> None:
    """Looks for all files once more, just before the commit.

    Raises:
        CheckpointError: One is gone or has another size.
    """
    for (path, size), found in zip(sizes.items(), _native.ckpt_sizes(uri, list(sizes)), strict=True):
        if found != size:
            raise CheckpointError(
                f"`{path}` under `{uri}`, which was finished with {size} bytes, "
                f"{'is gone' if found is None else f'has {found}'}: somebody else removes or writes files "
                "there. Nothing was committed; run it again."
            )


def is_whole(uri: str, files: Sequence["CkptFile"]) -> bool:
    """Whether each data file of a manifest is there with its size."""
    return _native.ckpt_sizes(uri, [file["path"] for file in files]) == list(map(stored_bytes, files))
