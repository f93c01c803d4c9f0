"""Writes small golden checkpoints of the formats 1 to 4, which every later version must read.

Run it with `uv run python tools/golden_checkpoints.py packages/ckpt/tests/golden NUMBER`; the folder
`format-NUMBER` in it must not exist. Golden checkpoints are committed, and those of a released format are
never written again: a difference from them is a change of the format.
"""

import sys
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import torch

from hocket.ckpt.document.chunks import Chunk
from hocket.ckpt.document.file_names import Compression, data_path, entry_name, file_metadata
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.records import PerRank, TensorRecord, ValueRecord
from hocket.ckpt.torch import Publisher
from hocket.ckpt.verbs.list import list_checkpoints
from hocket.ckpt.verbs.thin import thin_checkpoint
from hocket.native import _native

CREATED = "2026-01-02T03:04:05.678901Z"


def boxes(array: np.ndarray, ranks: int) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Return each rank's start and rows, cut as by FSDP: the last ranks may have fewer rows, or none."""
    step = -(-len(array) // ranks) if array.ndim else 1
    if not array.ndim:
        return [((), array)]
    starts = range(0, len(array), step)
    return [((row, *(0 for _ in array.shape[1:])), array[row : row + step]) for row in starts]


def write(folder: Path, save_id: str, compression: Compression | None) -> None:
    """Write one checkpoint of two ranks."""
    tensors = {
        "model.weight": np.arange(35, dtype=np.float32).reshape(7, 5) / 4,
        "model.bias": (np.arange(5) - 2).astype(ml_dtypes.bfloat16),
        "model.scale": np.arange(4).astype(ml_dtypes.float8_e4m3fn).reshape(2, 2),
        "model.mask": np.array([True, False, True]),
        "model.none": np.empty((0, 3), np.float16),
        "optimizer.state.weight.step": np.array(9, np.int64),
    }
    dtypes = ["F32", "BF16", "F8_E4M3", "BOOL", "F16", "I64"]
    kinds = dict(zip(tensors, dtypes, strict=True))
    parts = {name: boxes(array, 2) if array.size else [] for name, array in tensors.items()}
    inlined = "model.mask"
    files, chunks = [], {}
    for rank in range(2):
        rank_boxes = {
            entry_name(name, start, is_whole=box.shape == tensors[name].shape): (name, start, box.copy())
            for name, cut in parts.items()
            for start, box in cut[rank : rank + 1]
            if name != inlined
        }
        written = _native.ckpt_write_file(
            str(folder),
            data_path(save_id, rank, is_compressed=compression is not None),
            entries=[
                (entry, kinds[name], box.shape, box.ctypes.data, box.nbytes)
                for entry, (name, _, box) in rank_boxes.items()
            ],
            metadata=file_metadata(save_id),
            compression=compression,
        )
        for entry, (name, start, box) in rank_boxes.items():
            offset, length = written["entries"][entry]
            chunk = Chunk(file=rank, offset=offset, length=length, start=start, size=box.shape)
            chunks.setdefault(name, []).append(chunk)
        files.append(written)
    records = {
        name: TensorRecord(
            dtype=kinds[name],
            shape=array.shape,
            path=tuple(name.split(".")),
            chunks=tuple(chunks.get(name, ())),
            data=array.tobytes() if name == inlined else None,
        )
        for name, array in tensors.items()
    }
    records["model.tied"] = TensorRecord(
        dtype="F32", shape=(7, 5), path=("model", "tied"), same_as="model.weight"
    )
    values = {
        "optimizer.param_groups.0": {"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]},
        "loss": float("inf"),
        "large": 2**80,
        "raw": b"\x00\xff",
        "by number": {1: "one", -2: None},
        "note": "naïve é 音",
    }
    paths = {name: (name,) for name in values} | {
        "optimizer.param_groups.0": ("optimizer", "param_groups", 0)
    }
    manifest = Manifest(
        save_id=save_id,
        step=1234,
        created=CREATED,
        version=_native.__version__,
        writer="tools/golden_checkpoints.py",
        world_size=2,
        mesh={"shard": 2},
        files=tuple(files),
        tensors=records,
        values={name: ValueRecord(path=paths[name], value=value) for name, value in values.items()},
        per_rank=PerRank(policy="require", ranks=({"seed": 1}, {"seed": 2})),
        user={"loss": 0.5},
    )
    _native.ckpt_commit(str(folder), _native.ckpt_manifest_encode(manifest.to_document()), save_id)


def thin(folder: Path) -> None:
    """Drop the optimizer state of the only checkpoint in a folder."""
    [listing] = list_checkpoints(str(folder))
    thin_checkpoint(listing, ["optimizer.*"], memory_bytes=16 << 20)
    (folder / "thinned" / ".checkpoint.json.zst.lock").unlink()


def publish(folder: Path) -> None:
    """Publish a whole version and two deltas; each changes one item of each tensor."""
    weight, bias = torch.arange(35.0).reshape(7, 5) / 4, (torch.arange(5.0) - 2).bfloat16()
    # The record of the newest version names the publisher's host.
    with (
        mock.patch("socket.gethostname", return_value="golden"),
        Publisher(folder, compression="zstd:3") as publisher,
    ):
        for step in (1, 2, 3):
            state = {"model": {"weight": weight, "bias": bias, "tied": weight}, "step": step}
            publisher.publish(state, step=step, user={"loss": 1 / step})
            weight[step, 0] += step
            bias[step] += step


def main() -> None:
    """Write the checkpoints of one format."""
    number = sys.argv[2]
    if number not in ("1", "2", "3", "4"):
        raise SystemExit(f"format {number!r}: expected 1 to 4")
    folder = Path(sys.argv[1]) / f"format-{number}"
    folder.mkdir(parents=True)
    if number == "1":
        write(folder / "plain", "00112233445566778899aabbccddeeff", None)
        write(folder / "compressed", "ffeeddccbbaa99887766554433221100", Compression(3))
    elif number == "2":
        write(folder / "thinned", "0f1e2d3c4b5a69788796a5b4c3d2e1f0", Compression(3))
        thin(folder)
    elif number == "3":
        write(folder / "planes", "f0e1d2c3b4a5968778695a4b3c2d1e0f", Compression(3, planes=True))
    else:
        publish(folder)


if __name__ == "__main__":
    main()
