"""A follower that keeps a folder with the newest weights as one safetensors file, for serving engines."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.ckpt.document.dtypes import ITEM_BYTES, numpy_dtype
from hocket.ckpt.document.file_names import in_entry_order
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointNotFoundError
from hocket.ckpt.formats.companions import companions
from hocket.ckpt.uris import absolute
from hocket.ckpt.verbs.list import ListedCheckpoint
from hocket.ckpt.weights.follower import Follower, WeightUpdate, move_to_newest, record_of, wait_for
from hocket.ckpt.weights.versions import Versions
from hocket.native.paths import is_uri

__all__ = ["FolderFollower"]

_FILE = "model.safetensors"
_PAGE_BYTES = 4096
_COPY_BYTES = 16 << 20
_MAX_HEADER_BYTES = 100_000_000
"""The limit of readers of safetensors."""

_log = logging.getLogger(__name__)


class FolderFollower:
    """A folder whose `model.safetensors` is the newest version published under a prefix. Needs no torch.

    An update copies the file, brings the copy to the newest version and gives it the file's name in one step,
    so that a reader finds one version or the next, whole. The file's metadata say which version it holds; a
    new follower continues from there. Do not edit the file: its contents are not compared with that version
    before deltas are applied.

    Args:
        uri: The folder or prefix of a `Publisher`.
        folder: The local folder to keep; created by the first update.
        name_prefix: The beginning of the names of the tensors to take, which their names in the file lack:
            `model.` for weights published as `{"model": model.state_dict()}`.
        model_folder: A folder with the model's config and tokenizer, which are copied beside the weights.
        scratch_bytes: Memory limit for the bytes that are read.

    Attributes:
        step: The step of the version in the folder; None if there is none.

    Example:
        >>> follower = FolderFollower(versions, folder + "/served")
        >>> follower.update().step
        2
        >>> hocket.ckpt.open(folder + "/served")["weight"]
        array([0., 1., 4.], dtype=float32)
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        folder: str | os.PathLike[str],
        *,
        name_prefix: str = "",
        model_folder: str | os.PathLike[str] | None = None,
        scratch_bytes: int = 64 << 20,
    ) -> None:
        self.uri = absolute(uri)
        folder = absolute(folder)
        if is_uri(folder):
            raise ValueError(f"`folder` is `{folder}`; expected a folder of this machine")
        self.folder = Path(folder)
        self._name_prefix = name_prefix
        self._model_folder = None if model_folder is None else absolute(model_folder)
        self._scratch_bytes = scratch_bytes

    def __repr__(self) -> str:
        return f"<FolderFollower of {self.uri!r} in {str(self.folder)!r}>"

    @property
    def step(self) -> int | None:
        """The step of the version in the folder; None if there is none."""
        held = self._held()
        return None if held is None else held.step

    def update(self) -> WeightUpdate | None:
        """Bring the folder to the newest version; return None if it is there already.

        Raises:
            CheckpointError, StoreError: As for `Follower.update`; the folder keeps the version that it has.
            OSError: The folder cannot be written.
        """

        def held_id() -> str | None:
            held = self._held()
            return None if held is None else held.save_id

        return move_to_newest(self.uri, held_id, self._move)

    def wait(self, *, timeout_s: float | None = None, interval_s: float = 1.0) -> WeightUpdate:
        """Wait for a version that the folder does not hold, and bring it there; as `Follower.wait`."""
        return wait_for(self.update, self.uri, timeout_s=timeout_s, interval_s=interval_s)

    @property
    def _path(self) -> Path:
        return self.folder / _FILE

    def _unfinished(self, name: str) -> Path:
        """Return the path of a file until it is whole."""
        # Followers in several containers may have one process id.
        return self.folder / f".{name}.{socket.gethostname()}-{os.getpid()}.unfinished"

    def _held(self) -> _HeldFile | None:
        return _HeldFile.read(self._path, self.uri, self._name_prefix)

    def _move(self, versions: Versions, newest: ListedCheckpoint) -> WeightUpdate:
        manifest = Manifest.read(newest.uri)
        metadata = {
            "format": "pt",
            "step": str(manifest.step),
            "save_id": manifest.save_id,
            "source": self.uri,
            "name_prefix": self._name_prefix,
        }
        layout = _FileLayout.of(manifest, self._name_prefix, metadata)
        if not layout.arrays:
            raise CheckpointIncompatibleError(
                f"`{newest.uri}` has no tensor whose name begins with `name_prefix` {self._name_prefix!r}"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._copy_model_files()
        copy = self._unfinished(_FILE)
        _remove_abandoned(self.folder)
        with _held_by_this_process(copy):
            try:
                update = self._write(copy, layout, versions, newest, manifest)
                os.replace(copy, self._path)
                _sync(self.folder)
            finally:
                copy.unlink(missing_ok=True)
        return update

    def _write(
        self,
        copy: Path,
        layout: _FileLayout,
        versions: Versions,
        newest: ListedCheckpoint,
        manifest: Manifest,
    ) -> WeightUpdate:
        """Write the file of a version, starting from the current file if deltas lead from its version."""
        held = self._held()
        if held is not None and (
            held.entries != layout.entries or versions.deltas_since(held.save_id, newest) is None
        ):
            held = None
        with copy.open("wb") as file:
            file.write(layout.header)
            if held is not None:
                with self._path.open("rb") as old:
                    old.seek(held.data_start)
                    shutil.copyfileobj(old, file, _COPY_BYTES)
                if file.tell() != layout.size:
                    _log.warning("`%s` has another size than its header says; it is read whole", self._path)
                    held = None
            file.truncate(layout.size)
        memory = np.memmap(copy, dtype=np.uint8, mode="r+", shape=(layout.size,))
        follower = Follower(self.uri, into=layout.views(memory), scratch_bytes=self._scratch_bytes)
        if held is not None:
            follower.hold(manifest, held.step, held.save_id)
        update = follower.move_to(versions, newest)
        if follower.save_id != manifest.save_id:
            raise CheckpointNotFoundError(f"`{newest.uri}` was replaced meanwhile")
        memory.flush()
        _sync(copy)
        return update

    def _copy_model_files(self) -> None:
        if self._model_folder is None:
            return
        for file in companions(self._model_folder):
            path = self.folder / file.path
            if not path.exists():
                copy = self._unfinished(file.path)
                try:
                    copy.write_bytes(b"".join(part for part in file.parts if isinstance(part, bytes)))
                    os.replace(copy, path)
                finally:
                    copy.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _HeldFile:
    """The version that a file holds, read from its metadata, and the places of its tensors."""

    step: int
    save_id: str
    data_start: int
    entries: dict[str, Any]

    @classmethod
    def read(cls, path: Path, uri: str, name_prefix: str) -> _HeldFile | None:
        """Read the header of a file; return None if no follower of `uri` wrote the file."""
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > _MAX_HEADER_BYTES:
                    return None
                entries = json.loads(file.read(length))
            metadata = entries.pop("__metadata__")
            if (metadata["source"], metadata["name_prefix"]) != (uri, name_prefix):
                return None
            return cls(int(metadata["step"]), metadata["save_id"], 8 + length, entries)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None  # another program's file, which the first update replaces


@dataclass(frozen=True, slots=True)
class _FileLayout:
    """The layout of a safetensors file with some tensors of a version."""

    header: bytes
    entries: dict[str, Any]
    arrays: dict[str, tuple[int, str, tuple[int, ...]]]
    """Offset in the file, dtype and shape of each tensor, by its name in the version."""
    size: int

    @classmethod
    def of(cls, manifest: Manifest, name_prefix: str, metadata: Mapping[str, str]) -> _FileLayout:
        """Lay out the tensors whose names begin with the prefix; those that share storage are stored once."""
        taken = [name for name in manifest.tensors if name.startswith(name_prefix) and name != name_prefix]
        owners = {name: manifest.tensors[name].same_as or name for name in taken}
        names = [name for name in taken if owners[name] == name or owners[name] not in owners]
        records = {name: record_of(manifest, name) for name in names}
        entries: dict[str, Any] = {}
        places, end = {}, 0
        for name in in_entry_order(names, lambda name: (records[name].dtype, name)):
            record = records[name]
            places[name] = end
            entry = {"dtype": record.dtype, "shape": list(record.shape)}
            entries[name.removeprefix(name_prefix)] = entry | {"data_offsets": [end, end + record.num_bytes]}
            end += record.num_bytes
        text = json.dumps({"__metadata__": dict(metadata), **entries}, separators=(",", ":")).encode()
        start = -(-(8 + len(text)) // _PAGE_BYTES) * _PAGE_BYTES
        header = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
        arrays = {name: (start + places[name], records[name].dtype, records[name].shape) for name in places}
        return cls(header, entries, arrays, start + end)

    def views(self, memory: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """Return the tensors as views of the file's bytes."""
        return {
            name: memory[start : start + math.prod(shape) * ITEM_BYTES[dtype]]
            .view(numpy_dtype(dtype))
            .reshape(shape)
            for name, (start, dtype, shape) in self.arrays.items()
        }


@contextlib.contextmanager
def _held_by_this_process(path: Path) -> Iterator[None]:
    """Create a file and hold a lock on it, which ends with the process, however that ends."""
    with path.open("wb") as file:
        with contextlib.suppress(OSError):  # a file system without locks, where nothing is removed either
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_abandoned(folder: Path) -> None:
    """Remove the unfinished weights of followers that were killed, which no process holds."""
    for path in folder.glob(f".{_FILE}.*.unfinished"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            # A lock that a living follower holds raises `BlockingIOError`.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
