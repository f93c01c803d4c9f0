"""Support for resuming a killed conversion or reshard: protection from `gc`, size checks."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.ckpt.document.file_names import file_metadata, stored_bytes
from hocket.ckpt.errors import CheckpointError, CheckpointExistsError
from hocket.ckpt.uris import local_path
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = ["check_sizes", "is_whole", "no_empty_folders", "spared"]


@contextlib.contextmanager
def spared(uri: str, save_id: str, paths: Sequence[str]) -> Iterator[None]:
    """Keep `gc` from removing the data files of an earlier, unfinished run while this run works.

    `gc` keeps all files of a save if one of them is young. If some of `paths` exist, an empty file is
    therefore written beside them and removed at the end; one that a killed run left is removed first. Setting
    modification times instead would not work on object stores.
    """
    if all(size is None for size in _native.ckpt_sizes(uri, paths)):
        yield
        return
    marker = f"data/{save_id[:8]}-r0-running.safetensors"
    _native.ckpt_delete_files(uri, [marker])
    # Another run of the same rewrite may write it at the same time; one marker protects both.
    with contextlib.suppress(CheckpointExistsError):
        _native.ckpt_write_file(uri, marker, entries=[], metadata=file_metadata(save_id))
    try:
        yield
    finally:
        # If it is left behind, `gc` removes it.
        with contextlib.suppress(Exception):
            _native.ckpt_delete_files(uri, [marker])


@contextlib.contextmanager
def no_empty_folders(uri: str) -> Iterator[None]:
    """Remove the empty folders of a local checkpoint that a failed or interrupted run created.

    Folders with files stay, because a rerun reuses the files that are finished.
    """
    created: list[Path] = []
    if "://" not in (path := local_path(uri)):
        root = Path(path)
        created = [folder for folder in (root / "data", root, *root.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in created:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def check_sizes(uri: str, sizes: Mapping[str, int]) -> None:
    """Check that all files still exist with their sizes, immediately before the commit.

    Raises:
        CheckpointError: A file is missing or has another size.
    """
    for (path, size), actual_size in zip(sizes.items(), _native.ckpt_sizes(uri, list(sizes)), strict=True):
        if actual_size != size:
            raise CheckpointError(
                f"`{path}` under `{uri}`, which was finished with {size} bytes, "
                f"{'is gone' if actual_size is None else f'has {actual_size}'}: another process removes or "
                "writes files there. Nothing was committed; run it again."
            )


def is_whole(uri: str, files: Sequence["CkptFile"]) -> bool:
    """Return whether every data file of a manifest exists with its size."""
    return _native.ckpt_sizes(uri, [file["path"] for file in files]) == list(map(stored_bytes, files))
