"""A small demo checkpoint, as four ranks that train a tiny language model would write it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hocket.ckpt.document.chunks import Chunk
from hocket.ckpt.document.dtypes import DTYPES
from hocket.ckpt.document.file_names import data_path, entry_name, file_metadata
from hocket.ckpt.document.manifest import INLINE_BYTES, Manifest
from hocket.ckpt.document.manifest_builder import build_manifest, commit
from hocket.ckpt.document.records import PathItem, PerRank, TensorRecord, ValueRecord
from hocket.ckpt.document.tree import join as join_path
from hocket.ckpt.errors import CheckpointExistsError, CheckpointNotFoundError
from hocket.ckpt.uris import Place, local_path
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptWritten

__all__ = ["write_demo"]

# torch and NumPy have one name for the dtypes here.
_DTYPES = {names.torch: name for name, names in DTYPES.items()}
_VOCABULARY, _WIDTH, _LAYERS = 257, 64, 4

_Path = tuple[PathItem, ...]
_Array = npt.NDArray[Any]


def write_demo(destination: Place, *, ranks: int = 4, seed: int = 0) -> Manifest:
    """Write and commit a checkpoint of a tiny language model, sharded over ranks as by FSDP2.

    It has the features of a real checkpoint: shards along dim 0, some of them uneven or empty, bf16
    parameters with fp32 optimizer state, tied weights, 0-d step counts, and values that are not tensors.
    About 2 MiB.

    Args:
        destination: The checkpoint's folder or URI; it must not hold a checkpoint yet.
        ranks: The number of ranks, each with a data file of its own.
        seed: The seed of the random tensors.

    Returns:
        The committed manifest.

    Raises:
        CheckpointExistsError: A checkpoint exists already; it is not changed.
    """
    folder = local_path(destination)
    _refuse_existing(folder)
    save_id = secrets.token_hex(16)
    tensors = _tensors(np.random.default_rng(seed))
    shards = [_shards(tensors, rank, ranks) for rank in range(ranks)]

    def write(rank: int) -> CkptWritten:
        return _write_rank(folder, shards[rank], save_id, rank)

    with ThreadPoolExecutor(ranks, thread_name_prefix="hocket-demo") as pool:
        files = list(pool.map(write, range(ranks)))
    records = {
        join_path(path): TensorRecord(
            dtype=_DTYPES[array.dtype.name],
            shape=array.shape,
            path=path,
            data=array.tobytes() if array.nbytes <= INLINE_BYTES else None,
        )
        for path, array in tensors.items()
    }
    chunks = {name: list(_chunks(name, shards, files)) for name in records}
    tied, embedding = ("model", "head.weight"), records["model.embed.weight"]
    records[join_path(tied)] = TensorRecord(
        dtype=embedding.dtype, shape=embedding.shape, path=tied, same_as="model.embed.weight"
    )
    manifest = build_manifest(
        writer="hocket.ckpt.verbs.demo",
        files=files,
        tensors=records,
        chunks=chunks,
        save_id=save_id,
        step=1000,
        world_size=ranks,
        mesh={"shard": ranks},
        values=_values(),
        per_rank=PerRank(
            policy="reseed", ranks=tuple({"generator": rank.to_bytes(8, "little")} for rank in range(ranks))
        ),
        user={"note": "random numbers, for trying the tools on"},
    )
    commit(folder, manifest)
    return manifest


def _refuse_existing(destination: str) -> None:
    """Raise if a checkpoint exists, before a byte is written; the commit checks again."""
    try:
        _native.ckpt_manifest_head(destination)
    except CheckpointNotFoundError:
        return
    raise CheckpointExistsError(
        f"`{destination}` is a checkpoint already, and was not touched. Name another folder, or delete it "
        "first"
    )


def _tensors(rng: np.random.Generator) -> dict[_Path, _Array]:
    """Return parameters, buffers and AdamW state by path in the state tree."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (_VOCABULARY, _WIDTH)}
    for layer in range(_LAYERS):
        shapes |= {
            f"blocks.{layer}.attn.qkv.weight": (3 * _WIDTH, _WIDTH),
            f"blocks.{layer}.attn.out.weight": (_WIDTH, _WIDTH),
            f"blocks.{layer}.mlp.up.weight": (4 * _WIDTH, _WIDTH),
            f"blocks.{layer}.mlp.down.weight": (_WIDTH, 4 * _WIDTH),
            f"blocks.{layer}.norm.weight": (_WIDTH,),
            f"blocks.{layer}.gate": (3, 5),
        }
    tensors: dict[_Path, _Array] = {}
    for name, shape in shapes.items():
        tensors["model", name] = rng.normal(0, 0.02, shape).astype(ml_dtypes.bfloat16)
        state: _Path = ("optimizer", "state", name)
        tensors[*state, "step"] = np.array(1000, np.float32)
        tensors[*state, "exp_avg"] = rng.normal(0, 1e-3, shape).astype(np.float32)
        tensors[*state, "exp_avg_sq"] = rng.normal(0, 1e-3, shape).astype(np.float32) ** 2
    tensors["model", "num_tokens"] = np.array(65_536_000, np.int64)
    tensors["model", "mask"] = np.tri(16, dtype=np.bool_)
    return tensors


def _values() -> dict[str, ValueRecord]:
    values: dict[_Path, Any] = {
        ("optimizer", "param_groups", 0, "lr"): 6e-4,
        ("optimizer", "param_groups", 0, "betas"): (0.9, 0.95),
        ("optimizer", "param_groups", 0, "weight_decay"): 0.1,
        ("timestamp", "epoch"): 0,
        ("timestamp", "batch"): 1000,
        ("best_loss",): float("inf"),
    }
    return {join_path(path): ValueRecord(path=path, value=value) for path, value in values.items()}


class _Shard(NamedTuple):
    """One rank's part of a tensor."""

    entry: str
    """Its name in the data file."""
    first: int
    """Its first row in the whole tensor."""
    array: _Array


def _shards(tensors: Mapping[_Path, _Array], rank: int, ranks: int) -> dict[str, _Shard]:
    """Return this rank's part of each tensor: even row ranges of dim 0, the last ones short or empty."""
    shards: dict[str, _Shard] = {}
    for number, (path, array) in enumerate(tensors.items()):
        name = join_path(path)
        if array.ndim == 0:
            # Replicated tensors are assigned to the ranks in turn.
            if number % ranks == rank:
                shards[name] = _Shard(name, 0, array)
            continue
        rows = -(-len(array) // ranks)
        part = array[rank * rows : (rank + 1) * rows]
        if len(part):
            offsets = (rank * rows, *[0] * (array.ndim - 1))
            entry = entry_name(name, offsets, is_whole=part.shape == array.shape)
            shards[name] = _Shard(entry, rank * rows, part)
    return shards


def _write_rank(destination: str, shards: Mapping[str, _Shard], save_id: str, rank: int) -> CkptWritten:
    return _native.ckpt_write_file(
        destination,
        data_path(save_id, rank),
        entries=[
            (entry, _DTYPES[array.dtype.name], array.shape, array.ctypes.data, array.nbytes)
            for entry, _, array in shards.values()
        ],
        metadata=file_metadata(save_id),
    )


def _chunks(
    name: str, shards: Sequence[Mapping[str, _Shard]], files: Sequence[CkptWritten]
) -> Iterator[Chunk]:
    for rank, shard in enumerate(shards):
        if name in shard:
            entry, first, array = shard[name]
            offset, length = files[rank]["entries"][entry]
            start = (first, *[0] * (array.ndim - 1))[: array.ndim]
            yield Chunk(file=rank, offset=offset, length=length, start=start, size=array.shape)
