"""Writes distributed checkpoints as torch and Python of other versions pickle them, without those versions.

The script defines the classes that a `.metadata` file names, under torch's module names, and pickles them
with Python's own pickle. It must run in its own process, without torch:

    python tools/old_checkpoints.py DIR

It makes a folder for each form under DIR. Each contains `w` = 0…11 as float32 (3, 4), cut in two rows and
one row, and `lr` = 0.5. Readers must refuse folders whose name begins with `bad-`.
"""

import enum
import io
import pathlib
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path

DCP = "torch.distributed.checkpoint.metadata"
OLD = "torch.distributed._shard.sharded_tensor.metadata"
FILES = "torch.distributed.checkpoint.filesystem"


def place(module: str, name: str, thing: object) -> None:
    """Register a class or function under the module and name by which pickle finds it."""
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    thing.__module__, thing.__qualname__, thing.__name__ = module, name, name
    setattr(sys.modules[module], name, thing)


def record(module: str, name: str) -> type:
    """Return a class whose instances pickle their attributes."""

    def build(self, **state):
        self.__dict__.update(state)

    made = type(name, (), {"__init__": build})
    place(module, name, made)
    return made


class Size(tuple):
    """`torch.Size`."""

    def __reduce__(self):
        return Size, (tuple(self),)


class Dtype:
    """A dtype, pickled as a name in `torch`."""

    def __reduce__(self):
        return "float32"


class Storage:
    """A typed storage, pickled by a persistent id."""


class MemoryFormat(enum.Enum):
    """The memory format of a tensor."""

    TORCH_CONTIGUOUS_FORMAT = 0


def _get_layout(_name):
    return None


def _rebuild_tensor_v2(*_):
    return None


class Tensor:
    """A contiguous float32 tensor, whose storage has the key 0."""

    def __init__(self, shape):
        self.shape = shape

    def __reduce__(self):
        return _rebuild_tensor_v2, (Storage(), 0, self.shape, (self.shape[1], 1), False, OrderedDict())


class Layout:
    """`torch.strided`."""

    def __reduce__(self):
        return _get_layout, ("torch.strided",)


class FloatStorage:
    """The storage class that a persistent id names."""


place("torch", "Size", Size)
place("torch", "FloatStorage", FloatStorage)
place("torch.serialization", "_get_layout", _get_layout)
place("torch._utils", "_rebuild_tensor_v2", _rebuild_tensor_v2)
FLOAT32 = Dtype()
Dtype.__module__ = "torch"
sys.modules["torch"].float32 = FLOAT32
Metadata = record(DCP, "Metadata")
TensorStorage = record(DCP, "TensorStorageMetadata")
BytesStorage = record(DCP, "BytesStorageMetadata")
ChunkStorage = record(DCP, "ChunkStorageMetadata")
StorageMeta = record(DCP, "StorageMeta")
Index = record(DCP, "MetadataIndex")
StorageInfo = record(FILES, "_StorageInfo")


def torch_zip(value: object, storage: bytes | None) -> bytes:
    """Return a file as `torch.save` writes it, made with Python's `zipfile`."""
    pickled = io.BytesIO()
    num_items = len(storage) // 4 if storage else 0
    storage_id = ("storage", FloatStorage, "0", "cpu", num_items)

    class Pickler(pickle.Pickler):
        def persistent_id(self, thing: object) -> object:
            return storage_id if isinstance(thing, Storage) else None

    Pickler(pickled, 2).dump(value)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as zip_:
        zip_.writestr("archive/data.pkl", pickled.getvalue())
        if storage is not None:
            zip_.writestr("archive/data/0", storage)
        zip_.writestr("archive/version", "3\n")
    return file.getvalue()


class Properties:
    """`TensorProperties`, whose state is a tuple that has more items in newer versions."""

    def __init__(self, state):
        self.state = state

    def __getstate__(self):
        return self.state


def write(folder: Path, *, protocol: int, old: bool, path: object = None, **changes) -> None:
    """Write one checkpoint, corrupted by `changes` as in `main`."""
    folder.mkdir(parents=True)
    numbers = struct.pack("<12f", *range(12))
    items = [
        torch_zip(0.5, None),
        torch_zip(Tensor((2, 4)), numbers[:32]),
        torch_zip(Tensor((1, 4)), numbers[32:]),
    ]
    (folder / "__0_0.distcp").write_bytes(b"".join(items))
    relative_path = changes.get("relative_path", "__0_0.distcp")
    offsets = [0, len(items[0]), len(items[0]) + len(items[1])]
    infos = [
        StorageInfo(relative_path=relative_path, offset=offset, length=len(item))
        for offset, item in zip(offsets, items, strict=True)
    ]
    infos[2].offset += changes.get("shift", 0)
    module, encoding = (OLD, "MEM_FORMAT_ENCODING") if old else (DCP, "_MEM_FORMAT_ENCODING")
    place(module, "TensorProperties", Properties)
    place(module, encoding, MemoryFormat)
    state = (FLOAT32, Layout(), False, MemoryFormat(0), False) + (() if old else (None,))
    second = changes.get("second", (2, 0))
    chunks = [
        ChunkStorage(offsets=Size((0, 0)), sizes=Size((2, 4))),
        ChunkStorage(offsets=Size(second), sizes=Size((1, 4))),
    ]
    storage = {Index(fqn="lr"): infos[0], Index(fqn="w", offset=Size((0, 0)), index=0): infos[1]}
    if not changes.get("lost"):
        storage[Index(fqn="w", offset=Size(second), index=1)] = infos[2]
    tables = {
        "state_dict_metadata": {
            "lr": BytesStorage(),
            "w": TensorStorage(properties=Properties(state), size=Size((3, 4)), chunks=chunks),
        },
        "planner_data": {"lr": ("lr",), "w": ("w",)},
        "storage_data": storage,
    }
    if not old:
        meta = StorageMeta(checkpoint_id=path, save_id="0" * 8, load_id=None, modules=[])
        tables |= {"storage_meta": meta, "version": "1.0.0"}
    tables |= changes.get("more", {})
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(**tables), protocol))


def main(root: Path) -> None:
    """Write every form."""
    new = {"protocol": 4, "old": False, "path": "/run/step-1"}
    write(root / "torch-2.2", protocol=4, old=True)
    write(root / "python-3.12", **{**new, "path": pathlib.PurePosixPath("/run/step-1")})
    write(root / "windows", **{**new, "path": pathlib.PureWindowsPath("C:/run")})
    pathlib.PurePosixPath.__module__ = "pathlib._local"
    place("pathlib._local", "PurePosixPath", pathlib.PurePosixPath)
    write(root / "python-3.13", **{**new, "path": pathlib.PurePosixPath("/run/step-1")})
    write(root / "python-3.14", **{**new, "protocol": 5})

    class Bomb:
        def __reduce__(self):
            import os

            return os.system, (f"touch {root}/executed",)

    write(root / "bad-call", **new, more={"version": Bomb()})
    write(root / "bad-path", **new, relative_path="../torch-2.2/__0_0.distcp")
    write(root / "bad-absolute-path", **new, relative_path="/etc/passwd")
    write(root / "bad-negative-offset", **new, shift=-(1 << 40))
    write(root / "bad-far-offset", **new, shift=1 << 40)
    write(root / "bad-overlap", **new, second=(1, 0))
    write(root / "bad-outside", **new, second=(3, 0))
    write(root / "bad-lost-item", **new, lost=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
