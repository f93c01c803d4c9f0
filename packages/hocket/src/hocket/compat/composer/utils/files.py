"""Folders, links and compressed files, as `composer.utils`."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hocket.compat.composer.utils.names import format_name_with_dist
from hocket.compat.composer.utils.object_store import get_file
from hocket.trainer import Timestamp

_TIMES = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch", "epoch", "batch", "sample", "token")


def is_tar(name: str | os.PathLike[str]) -> bool:
    """Return whether a file's name is that of a tar archive."""
    parts = os.fspath(name).split(".")
    return len(parts) > 1 and ("tar" in parts[-2:] or parts[-1] in ("tgz", "tbz", "tbz2", "tlz", "txz"))


def ensure_folder_is_empty(folder_name: str | os.PathLike[str]) -> None:
    """Raise `FileExistsError` if a folder has a file, at any depth."""
    for folder, _, files in os.walk(folder_name):
        if files:
            raise FileExistsError(
                f"`{os.fspath(folder_name)}` is not empty: it has `{os.path.join(folder, files[0])}`; "
                "give another folder"
            )


def ensure_folder_has_no_conflicting_files(
    folder_name: str | os.PathLike[str], filename: str, timestamp: Timestamp
) -> None:
    """Raise `FileExistsError` if a folder has a file of a later time than `timestamp`.

    Args:
        folder_name: The folder.
        filename: File name with fields such as `{epoch}` and `{batch}`.
        timestamp: The time of the run.
    """
    pattern = re.escape(format_name_with_dist(filename, "{run_name}"))
    for name in _TIMES:
        pattern = pattern.replace(re.escape(f"{{{name}}}"), rf"(?P<{name}>\d+)", 1)
    for file in sorted(os.listdir(folder_name)):
        found = re.fullmatch(pattern, file)
        times = {} if found is None else found.groupdict()
        is_same_epoch = times.get("epoch") in (None, str(timestamp.counts.epoch))
        for name, value in times.items():
            if name.endswith("_in_epoch") and not is_same_epoch:
                continue
            if int(value) > getattr(timestamp.counts, name):
                raise FileExistsError(
                    f"`{os.path.join(folder_name, file)}` is of a later time than `{timestamp}` and may "
                    "be in the way of a checkpoint; remove it, or give another folder"
                )


def create_symlink_file(existing_path: str, destination_filename: str | os.PathLike[str]) -> None:
    """Write a small file that holds a path, for stores without links; its name ends in `.symlink`.

    Raises:
        ValueError: If the name does not end in `.symlink`.
    """
    destination = Path(destination_filename)
    if destination.suffix != ".symlink":
        raise ValueError(f"`{destination}` is to hold a path; expected a name that ends in `.symlink`")
    destination.write_text(existing_path)


def extract_path_from_symlink(source_path: str, object_store: Any = None) -> str:
    """Return the path that a file of `create_symlink_file` holds."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "link.symlink"
        get_file(source_path, local, object_store)
        return local.read_text().strip()


class IteratorFileStream(io.RawIOBase):
    """A readable stream of the bytes that an iterator yields."""

    def __init__(self, iterator: Iterator[bytes]) -> None:
        self._iterator = iterator
        self._left = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes; return their number, 0 at the end."""
        while not self._left:
            chunk = next(self._iterator, None)
            if chunk is None:
                return 0
            self._left = chunk
        part, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


class CompressorNotFound(FileNotFoundError, ValueError):  # noqa: N818 - Composer's name
    """No compressor is known for a file's name, or its command is not installed."""


class CliCompressor:
    """A compressor that is a command, such as `gzip`, which reads standard input and writes standard output.

    Args:
        extension: Extension of the compressed files, without the dot.
        cmd: The command; the extension if None.
    """

    def __init__(self, extension: str, cmd: str | None = None) -> None:
        self.extension = extension
        self.cmd = cmd or extension

    @property
    def exists(self) -> bool:
        """Whether the command is installed."""
        return shutil.which(self.cmd) is not None

    def check_exists(self) -> None:
        """Raise `CompressorNotFound` if the command is not installed."""
        if not self.exists:
            raise CompressorNotFound(f"the command `{self.cmd}` was not found; install it")

    @contextlib.contextmanager
    def compress(self, out_filename: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
        """Open a stream whose bytes are written to a file, compressed."""
        self.check_exists()
        with open(out_filename, "wb") as file:
            process = subprocess.Popen([self.cmd, "-c"], stdin=subprocess.PIPE, stdout=file)
            assert process.stdin is not None
            try:
                yield process.stdin
            finally:
                process.stdin.close()
                status = process.wait()
        if status:
            raise OSError(f"`{self.cmd}` ended with {status} while it compressed `{out_filename}`")

    @contextlib.contextmanager
    def decompress(self, in_filename: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
        """Open a stream of a compressed file's bytes."""
        self.check_exists()
        with open(in_filename, "rb") as file:
            process = subprocess.Popen([self.cmd, "-dc"], stdin=file, stdout=subprocess.PIPE)
            assert process.stdout is not None
            try:
                yield process.stdout
            finally:
                process.stdout.close()
                process.wait()

    def __repr__(self) -> str:
        """Return the call that makes this compressor."""
        return f"CliCompressor({self.extension!r}, {self.cmd!r})"


#: Compressors by the extension of a file's name.
KNOWN_COMPRESSORS = [
    CliCompressor("bz2", "bzip2"),
    CliCompressor("gz", "gzip"),
    CliCompressor("lz4"),
    CliCompressor("lzma"),
    CliCompressor("lzo", "lzop"),
    CliCompressor("xz"),
    CliCompressor("zst", "zstd"),
]


def get_compressor(filename: str | os.PathLike[str]) -> CliCompressor:
    """Return the compressor for a file's name.

    Raises:
        CompressorNotFound: If its extension is not known.
    """
    extension = os.fspath(filename).rpartition(".")[2]
    for compressor in KNOWN_COMPRESSORS:
        if compressor.extension == extension:
            return compressor
    extensions = ", ".join(f"`.{compressor.extension}`" for compressor in KNOWN_COMPRESSORS)
    raise CompressorNotFound(
        f"no compressor is known for `{os.fspath(filename)}`; expected one of {extensions}"
    )


def is_compressed_pt(filename: str | os.PathLike[str]) -> bool:
    """Return whether a file's name is that of a `.pt` file compressed by any compressor."""
    parts = os.fspath(filename).split(".")
    return len(parts) > 1 and parts[-2] == "pt" and parts[-1] != "symlink"
