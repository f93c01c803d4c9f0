"""Checks of a conversion's destination, before its source is read and before a file is written."""

import contextlib
import os
from pathlib import Path

from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.errors import CheckpointExistsError, CheckpointNotFoundError
from hocket.ckpt.formats.hocket import CONVERSION_WRITER
from hocket.ckpt.formats.table import FORMATS, Format
from hocket.ckpt.formats.writers import FilePlan
from hocket.ckpt.verbs.rewrite import committed, write_file
from hocket.native import Store, _native
from hocket.native.errors import StoreConfigError, StoreNotFoundError, StorePermissionError
from hocket.native.paths import is_uri, read_only_problem

__all__ = ["check_destination", "is_finished"]


def check_destination(destination: str, to: Format, *, unfenced: bool) -> None:
    """Refuse a destination where no conversion to a format can be written, whatever its source.

    Raises:
        CheckpointExistsError: It holds a checkpoint of another format, or one that no conversion has written,
            or is a folder in place of a file.
        CheckpointNotFoundError: A file or a dangling link is in place of a folder.
        CheckpointUnfencedError: The store ignores conditional writes, and `unfenced` is False.
        StoreConfigError: It is not a location that can be written to.
        StorePermissionError: The folder cannot be written to.
        ValueError: The format is always one file, and the name has none of its suffixes.
    """
    is_file = FORMATS[to].is_file(destination)
    uri = Store(destination).uri
    if not is_uri(uri):
        _check_folder(Path(uri), to, is_file=is_file)
    elif (problem := read_only_problem(uri)) is not None:
        raise StoreConfigError(problem)
    _check_writer(destination, to, is_file=is_file)
    if is_file:  # it may have neighbours
        return
    if FORMATS[to].has_manifest and not _has_conversion(destination) and not unfenced:
        _native.ckpt_check_fence(destination, _native.xxh3_128(destination.encode()).hex())
    own = FORMATS[to].markers
    others = [path for each in FORMATS.values() for path in each.markers if path not in own]
    if any(size is not None for size in _native.ckpt_sizes(destination.rstrip("/"), others)):
        raise _in_use(destination)


def _check_writer(destination: str, to: Format, *, is_file: bool) -> None:
    """Refuse a file that begins otherwise than one that a conversion writes."""
    start = FORMATS[to].start
    path = destination if is_file else f"{destination.rstrip('/')}/{FORMATS[to].markers[0]}"
    root, _, name = path.rpartition("/")
    if not start:  # a file of another program may have these very bytes
        return
    store = Store(root or ("/" if path.startswith("/") else "."))
    with contextlib.suppress(StoreNotFoundError):
        if store.head(name).size < len(start) or store.get(name, start=0, end=len(start)) != start:
            raise _in_use(destination)


def _has_conversion(destination: str) -> bool:
    """Return whether there is a checkpoint of Hocket's format, and refuse one of another writer."""
    try:
        found = Manifest.read(destination)
    except CheckpointNotFoundError:
        return False
    if found.writer != CONVERSION_WRITER:
        raise CheckpointExistsError(
            f"`{destination}` holds another checkpoint already, of step {found.step}, and was not touched. "
            "Name another destination, or delete it first"
        )
    return True


def _check_folder(path: Path, to: Format, *, is_file: bool) -> None:
    """Check that files can be written at a local path; those of a finished conversion are only read."""
    if is_file and os.path.isdir(path):
        raise CheckpointExistsError(
            f"`{path}` is a folder; expected the name of a file, such as `{path / path.name}`"
        )
    found = [path] if is_file else [path / name for name in FORMATS[to].markers]
    if any(map(os.path.exists, found)):
        return
    folder = path.parent if is_file else path
    while not os.path.lexists(folder):
        folder = folder.parent
    if not os.path.isdir(folder):
        raise CheckpointNotFoundError(
            f"nothing found at `{path}`: expected a folder, but `{folder}` is a file or a dangling link"
        )
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise StorePermissionError(
            f"no access to `{path}`: the folder `{folder}` cannot be written to; name another destination, "
            "or have its permissions changed"
        )


def is_finished(plan: FilePlan, destination: str) -> bool:
    """Return whether an earlier run finished; check for foreign files before anything is written.

    A committed checkpoint with missing files is completed by writing these again.

    Raises:
        CheckpointExistsError: The destination holds something else.
    """
    if plan.save_id is not None and (found := committed(plan.root, plan.save_id)) is not None:
        return found[1]
    files = {file.path: file for file in plan.files if plan.save_id is None}
    if plan.last is not None:
        files[plan.last.path] = plan.last
    # Such as an index beside which there is now to be one file.
    is_folder = plan.root == destination.rstrip("/")
    markers = [path for each in FORMATS.values() for path in each.markers] if is_folder else []
    others = [path for path in markers if path not in files]
    sizes = _native.ckpt_sizes(plan.root, [*files, *others])
    for path, size in zip([*files, *others], sizes, strict=True):
        if size is not None and (path not in files or files[path].size != size):
            raise _in_use(destination)
    if plan.last is not None and _native.ckpt_sizes(plan.root, [plan.last.path])[0] is not None:
        write_file(plan.root, plan.last)  # the file exists, so this only compares
    return False


def _in_use(destination: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"`{destination}` holds another checkpoint already, or a part of one, and was not touched. "
        "Name another destination, or delete it first"
    )
