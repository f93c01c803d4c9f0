"""Functions that open a checkpoint of any format for reading."""

import builtins
import codecs
import os
import shlex

from hocket.ckpt.document.contents import CheckpointContents
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
    CheckpointPartialError,
)
from hocket.ckpt.formats.companions import check_whole
from hocket.ckpt.formats.table import FORMATS
from hocket.ckpt.read.reader import Checkpoint
from hocket.ckpt.uris import local_path
from hocket.native import _native

__all__ = ["open", "open_hocket"]

_START_BYTES = 256
_SHOWN_CHARS = 40
_EXPECTED = (
    "expected a file of `torch.save` (a zip), a `.safetensors` file, or the folder of a checkpoint; "
    "`hocket-ckpt ls` lists the checkpoints of a folder"
)


def open(  # noqa: A001 - read as `hocket.ckpt.open`
    source: str | os.PathLike[str], *, check: bool = True, follow: bool = True, allow_expand: bool = False
) -> Checkpoint:
    """Open a committed checkpoint; reads its manifest and no data.

    Foreign formats are recognised by their files: a distributed checkpoint of torch, a file of `torch.save`
    (never unpickled: its opcodes are parsed as data), safetensors, single or sharded.

    Args:
        source: A folder or file, or a URI such as `s3://bucket/run/ep0-ba1000` or `hf://owner/name@revision`,
            which is read at the commit that its revision is now, the same on all ranks.
        check: Verify the digest of every block that is read. Other formats have no digests.
        follow: If another save replaced the checkpoint and the old files are gone, read the new save; if
            False, raise instead.
        allow_expand: Read tensors of other formats that are far larger in memory than in their file, because
            a stride is 0.

    Raises:
        CheckpointNotFoundError: There is no checkpoint; a `CheckpointPartialError` if the save never
            finished.
        CheckpointCorruptError: The manifest does not match its digest, or breaks a rule of the format.
        CheckpointIncompatibleError: A later format; the message names the version that reads it.
        CheckpointUnsafeError: A foreign pickle refers to anything but data.

    Example:
        >>> checkpoint = hocket.ckpt.open(folder + "/demo")
        >>> checkpoint["model.embed.weight"].shape
        (257, 64)
    """
    source = _pinned(local_path(source))
    try:
        opened = _native.Checkpoint(source)
    except CheckpointPartialError:
        raise
    except CheckpointNotFoundError:
        return _open_foreign(source, allow_expand=allow_expand)
    return _with_bases(source, opened, check=check, follow=follow)


def _pinned(source: str) -> str:
    """Return a hub's URI with the commit that is read, the same on all ranks; any other source as it is."""
    if not source.startswith("hf://"):
        return source
    from hocket.native.hub import pin

    return pin(source)


def _with_bases(source: str, opened: _native.Checkpoint, *, check: bool, follow: bool) -> Checkpoint:
    opened.open_bases()
    # A manifest has no strides, so no tensor is larger in memory than in its files.
    return Checkpoint(source, opened, Manifest.of(opened), check=check, follow=follow, allow_expand=True)


def _open_foreign(source: str, *, allow_expand: bool) -> Checkpoint:
    try:
        opened = _native.Checkpoint.open_foreign(source)
    except (CheckpointNotFoundError, CheckpointCorruptError) as error:
        if (problem := _describe_file(source)) is None:
            raise
        file = os.path.basename(source)
        is_corrupt = isinstance(error, CheckpointCorruptError)
        raise (CheckpointCorruptError(problem, file) if is_corrupt else type(error)(problem)) from error
    contents = CheckpointContents.of(opened)
    is_named = source.rstrip("/").rpartition("/")[2] in (file["path"] for file in contents.files)
    if FORMATS[contents.format].has_companions and not is_named:
        check_whole(source, contents)  # a folder may have one file of several, whose others are missing
    return Checkpoint(source, opened, contents, allow_expand=allow_expand)


def open_hocket(
    source: str | os.PathLike[str], *, follow: bool = True, stored: bytes | None = None
) -> Checkpoint:
    """Open a checkpoint of Hocket's format; the other arguments are those of `open`.

    Args:
        source: As for `open`.
        follow: As for `open`.
        stored: The bytes of the manifest, if they were read before; they are checked as usual.

    Raises:
        CheckpointNotFoundError: There is no checkpoint; a `CheckpointPartialError` if the save never
            finished.
        CheckpointCorruptError: The manifest does not match its digest, or breaks a rule of the format.
        CheckpointIncompatibleError: A later format or a foreign one; the message names what reads it.
    """
    if stored is not None:
        source = local_path(source)
        return _with_bases(source, _native.Checkpoint(source, stored), check=True, follow=follow)
    checkpoint = open(source, follow=follow)
    if checkpoint.has_manifest:
        return checkpoint
    raise CheckpointIncompatibleError(
        f"`{source}` is a {FORMATS[checkpoint.format].title}, where a Hocket checkpoint was expected. "
        f"`hocket-ckpt convert {shlex.quote(str(source))} DST --to hocket` makes one of it; "
        "`torch.distributed.checkpoint.load` reads it as it is, with `hocket.ckpt.dcp.HocketReader`"
    )


def _describe_file(path: str) -> str | None:
    """Return why a local file is no checkpoint, and what was expected; None for any other path or contents.

    Args:
        path: A path or a URI; only files of the local file system are read.
    """
    if not os.path.isfile(path):
        return None
    try:
        with builtins.open(path, "rb") as file:
            start = file.read(_START_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    if (found := _name_contents(start)) is None:
        return None
    return f"`{path}` is no checkpoint: {found}; {_EXPECTED} ({size} bytes were found)"


def _name_contents(start: bytes) -> str | None:
    if not start:
        return "the file is empty: it was never written, or its copy did not finish"
    if not any(start):
        return "the file begins with zeros: its contents were lost when it was written or copied"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start)  # the last character may be cut
    except UnicodeDecodeError:
        return None
    if not all(char.isprintable() or char.isspace() for char in text):
        return None
    line = text.strip().partition("\n")[0][:_SHOWN_CHARS].strip()
    if line.lower().startswith(("<!doctype html", "<html", "<?xml")):
        return "it is a web page, as a server sends in place of a file that it refuses or does not have"
    return f"it is a text file, which begins with {line!r}"
