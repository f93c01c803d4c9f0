"""Folders of safetensors files, local or in an object store, whose tensors are read by rows."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol

import torch

from hocket.dist.errors import WeightsError

INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
#: The longest header that the safetensors library accepts.
_MOST_HEADER_BYTES = 100_000_000
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


class StoredTensor(Protocol):
    """A tensor in a file, as `safetensors.safe_open` returns it by `get_slice`."""

    def get_shape(self) -> list[int]:
        """Return the shape."""

    def __getitem__(self, rows: slice | EllipsisType) -> torch.Tensor:
        """Read some rows, or all of the tensor."""


class StoredFile(Protocol):
    """An open file."""

    def keys(self) -> Collection[str]:
        """Return the names of the tensors."""

    def get_slice(self, name: str) -> StoredTensor:
        """Return one of them; reads no data."""


class WeightsFolder(Protocol):
    """A folder of safetensors files."""

    def find_files(self) -> Mapping[str, set[str]]:
        """Return the files with the tensors that the index places there; an empty set means all.

        Raises:
            WeightsError: There are none, or the index names files that are absent.
        """

    def open(self, file: str) -> contextlib.AbstractContextManager[StoredFile]:
        """Open one of them."""


def open_folder(folder: str) -> WeightsFolder:
    """Return a folder by its path, or by its URI in a store.

    Raises:
        ImportError: The package that reads it is not installed.
    """
    return StoreFolder.of(folder) if "://" in folder else LocalFolder(folder)


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A folder of this machine."""

    path: str

    def find_files(self) -> Mapping[str, set[str]]:
        """See `WeightsFolder`."""
        folder = Path(self.path)
        index = folder / INDEX
        if index.is_file():
            return _indexed(index.read_text(), self.path, lambda file: (folder / file).is_file())
        return _all(sorted(path.name for path in folder.glob(f"*{_SUFFIX}")), self.path)

    @contextlib.contextmanager
    def open(self, file: str) -> Iterator[StoredFile]:
        """See `WeightsFolder`. The pages that were read stay in memory while a file is open."""
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError(
                "`initial_weights` needs the package `safetensors`: `pip install 'hocket-dist[safetensors]'`"
            ) from error
        with safe_open(str(Path(self.path, file)), framework="pt", device="cpu") as opened:
            yield opened


@dataclass(frozen=True, slots=True)
class StoreFolder:
    """A folder in an object store or on a hub, of which all ranks read the same commit."""

    uri: str
    store: Any
    """The `hocket.native.Store` of the folder."""

    opened: dict[str, RemoteFile] = field(default_factory=dict)
    """The headers that were read."""

    @classmethod
    def of(cls, uri: str) -> StoreFolder:
        """Return the folder at a URI.

        Raises:
            ImportError: `hocket-native` is not installed.
        """
        try:
            from hocket.native import Store
            from hocket.native.hub import pin
        except ImportError as error:
            raise ImportError(
                f"`initial_weights` is `{uri}`, and reading it needs the package `hocket-native`: "
                "`pip install 'hocket-dist[stores]'`"
            ) from error
        store = Store(pin(uri))
        return cls(store.uri, store)

    def find_files(self) -> Mapping[str, set[str]]:
        """See `WeightsFolder`."""
        names = {meta.key for meta in self.store.list()}
        if INDEX in names:
            return _indexed(self.store.get(INDEX).decode(), self.uri, names.__contains__)
        top = [name for name in names if name.endswith(_SUFFIX) and "/" not in name]
        return _all(sorted(top), self.uri)

    @contextlib.contextmanager
    def open(self, file: str) -> Iterator[StoredFile]:
        """See `WeightsFolder`."""
        if file not in self.opened:
            self.opened[file] = RemoteFile.read(self.store, file, f"{self.uri}/{file}")
        yield self.opened[file]


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """The header of a file in a store."""

    store: Any
    key: str
    header: Mapping[str, Mapping[str, Any]]
    start: int
    """Offset of the data in the file."""

    @classmethod
    def read(cls, store: Any, key: str, uri: str) -> RemoteFile:
        """Read the header of a file.

        Raises:
            WeightsError: It is not a header of safetensors.
        """
        size = store.head(key).size
        length = int.from_bytes(store.get(key, start=0, end=8), "little") if size >= 8 else 0
        if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
            raise WeightsError(f"{uri} is no safetensors file: its header would have {length} bytes")
        try:
            header = json.loads(store.get(key, start=8, end=8 + length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            for name, entry in tensors.items():
                _check_entry(name, entry, size - 8 - length)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{uri} is no safetensors file: {error}") from None
        return cls(store, key, tensors, 8 + length)

    def keys(self) -> Collection[str]:
        """Return the names of the tensors."""
        return self.header.keys()

    def get_slice(self, name: str) -> RemoteTensor:
        """Return one of them; reads no data.

        Raises:
            WeightsError: Torch has no such dtype.
        """
        entry = self.header[name]
        if (dtype := _DTYPES.get(entry["dtype"])) is None:
            raise WeightsError(
                f"`{name}` in {self.store.uri}/{self.key} has the dtype {entry['dtype']!r}, expected one of "
                f"{sorted(_DTYPES)}"
            )
        first, last = entry["data_offsets"]
        shape = tuple(entry["shape"])
        return RemoteTensor(self.store, self.key, dtype, shape, (self.start + first, self.start + last))


@dataclass(frozen=True, slots=True)
class RemoteTensor:
    """A tensor of a file in a store."""

    store: Any
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    span: tuple[int, int]

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self.shape)

    def __getitem__(self, rows: slice | EllipsisType) -> torch.Tensor:
        """Read some rows, or all of the tensor."""
        start, end = self.span
        shape = self.shape
        if isinstance(rows, slice):
            first, last, _ = rows.indices(shape[0])
            row_bytes = (end - start) // shape[0] if shape[0] else 0
            start, end = start + first * row_bytes, start + max(first, last) * row_bytes
            shape = (max(last - first, 0), *shape[1:])
        if start == end:
            return torch.empty(shape, dtype=self.dtype)
        data = bytearray(self.store.get(self.key, start=start, end=end))
        return torch.frombuffer(data, dtype=torch.uint8).view(self.dtype).reshape(shape)


def _check_entry(name: str, entry: Mapping[str, Any], num_bytes: int) -> None:
    """Refuse an entry of a header whose data are not within the file, or not those of its shape and type."""
    shape, (first, last) = entry["shape"], entry["data_offsets"]
    dtype = _DTYPES.get(entry["dtype"])
    expected = last - first if dtype is None else dtype.itemsize * math.prod(shape)
    if not (0 <= first <= last <= num_bytes and last - first == expected):
        raise ValueError(f"`{name}` is at {first} to {last}, expected {expected} bytes within {num_bytes}")


def _indexed(index: str, folder: str, exists: Callable[[str], bool]) -> Mapping[str, set[str]]:
    files: dict[str, set[str]] = {}
    try:
        for tensor, file in json.loads(index)["weight_map"].items():
            files.setdefault(file, set()).add(tensor)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{folder}/{INDEX} is no index of safetensors files: expected a `weight_map` of names and "
            f"files ({type(error).__name__}: {error})"
        ) from None
    absent = [file for file in files if not exists(file)]
    if absent:
        raise WeightsError(
            f"{folder}/{INDEX} names {len(absent)} files that are absent, the first {folder}/{absent[0]}"
        )
    return files


def _all(names: Collection[str], folder: str) -> Mapping[str, set[str]]:
    if not names:
        raise WeightsError(
            f"{folder} has no safetensors files. Write them with `save_pretrained(folder)`, or download the "
            "folder"
        )
    return {name: set() for name in names}
