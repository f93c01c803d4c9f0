"""One cell of `tests/bench/ckpt.py`: one system saves or loads one state, in a process of its own.

Runs in that system's own environment, so it imports nothing of this repository but the system itself. Prints
one JSON object. Loads fill existing tensors whose memory was touched, as in a trainer that resumes; every
17th value is compared with the saved one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from states import SHAPES, State, forget_peak, make_state, num_bytes, peak_kib, sync, warm_memory

# --- saving; `sync` makes files durable that the system does not flush --------------------------


def save_hocket(state: State, folder: Path) -> None:
    from hocket.ckpt.torch import save

    save(state, str(folder / "checkpoint"), step=0)


def save_torch(state: State, folder: Path) -> None:
    torch.save(state, folder / "state.pt")
    sync(folder)


def save_safetensors(state: State, folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(state, folder / "state.safetensors")
    sync(folder)


def save_dcp(state: State, folder: Path) -> None:
    from torch.distributed import checkpoint

    writer = checkpoint.FileSystemWriter(folder / "dcp", thread_count=2)
    checkpoint.save(state, storage_writer=writer, no_dist=_is_alone())


def save_dcp_hf(state: State, folder: Path) -> None:
    """Save with DCP's writer of safetensors files, one file per rank."""
    from torch.distributed import checkpoint

    writer = checkpoint.HuggingFaceStorageWriter(str(folder / "hf"), save_distributed=True, thread_count=2)
    checkpoint.save(state, storage_writer=writer, no_dist=_is_alone())


def save_torch_checkpointing(state: State, folder: Path) -> None:
    with _torch_checkpointing() as manager:
        manager.save(str(folder / "checkpoint"), {"state": state})
    sync(folder)


def save_torchsnapshot(state: State, folder: Path) -> None:
    from torchsnapshot import Snapshot, StateDict

    Snapshot.take(str(folder / "snapshot"), {"state": StateDict(**state)})
    sync(folder)


# --- to and from an S3 server, whose address is in the environment; `uri` is an empty prefix ------


def save_hocket_s3(state: State, uri: str) -> None:
    from hocket.ckpt.torch import save

    save(state, f"{uri}/checkpoint", step=0)


def load_hocket_s3(into: State, uri: str) -> None:
    from hocket.ckpt.torch import load

    load(f"{uri}/checkpoint", into)


def save_s3torchconnector_s3(state: State, uri: str) -> None:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageWriter
    from torch.distributed import checkpoint

    config = S3ClientConfig(force_path_style=True)
    writer = S3StorageWriter("us-east-1", f"{uri}/dcp", s3client_config=config, thread_count=2)
    checkpoint.save(state, storage_writer=writer, no_dist=_is_alone())


def load_s3torchconnector_s3(into: State, uri: str) -> None:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader
    from torch.distributed import checkpoint

    config = S3ClientConfig(force_path_style=True)
    reader = S3StorageReader("us-east-1", f"{uri}/dcp", s3client_config=config)
    checkpoint.load(into, storage_reader=reader, no_dist=_is_alone())


def save_runai_s3(state: State, uri: str) -> None:
    """Upload a safetensors file for the streamer, which only reads."""
    import boto3
    from safetensors.torch import save_file

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    with tempfile.TemporaryDirectory() as folder:
        save_file(state, Path(folder, "state.safetensors"))
        boto3.client("s3").upload_file(f"{folder}/state.safetensors", bucket, f"{prefix}/state.safetensors")


def load_runai_s3(into: State, uri: str) -> None:
    _stream(f"{uri}/state.safetensors", into)


def save_obstore_s3(state: State, uri: str) -> None:
    """Upload the same bytes as plain objects of 32 MiB at most, eight at once: the limit."""
    import obstore

    store, pieces = _bucket(uri), _pieces(state)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda p: obstore.put(store, p[0], p[1], use_multipart=False), pieces))


def load_obstore_s3(into: State, uri: str) -> None:
    import obstore

    store = _bucket(uri)

    def fetch(piece: tuple[str, memoryview]) -> None:
        name, memory = piece
        memory[:] = memoryview(obstore.get(store, name).bytes())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fetch, _pieces(into)))


def _bucket(uri: str) -> Any:
    from obstore.store import S3Store

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return S3Store(
        bucket,
        prefix=prefix,
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        client_options={"allow_http": True},
        virtual_hosted_style_request=False,
    )


def _pieces(state: State) -> list[tuple[str, memoryview]]:
    pieces = []
    for name, value in state.items():
        memory = memoryview(value.view(-1).view(torch.uint8).numpy())
        for start in range(0, len(memory), 32 << 20):
            pieces.append((f"{name}.{start}", memory[start : start + (32 << 20)]))
    return pieces


# --- loading into `into` -------------------------------------------------------------------------


def load_hocket(into: State, folder: Path) -> None:
    from hocket.ckpt.torch import load

    load(str(folder / "checkpoint"), into)


def load_hocket_unchecked(into: State, folder: Path) -> None:
    from hocket.ckpt.torch import load

    load(str(folder / "checkpoint"), into, check=False)


def load_torch(into: State, folder: Path) -> None:
    _copy(torch.load(folder / "state.pt", weights_only=True, mmap=True), into)


def load_safetensors(into: State, folder: Path) -> None:
    from safetensors import safe_open

    with safe_open(folder / "state.safetensors", "pt") as source:
        for name, value in into.items():
            value.copy_(source.get_tensor(name))


def load_dcp(into: State, folder: Path) -> None:
    from torch.distributed import checkpoint

    reader = checkpoint.FileSystemReader(folder / "dcp")
    checkpoint.load(into, storage_reader=reader, no_dist=_is_alone())


def load_dcp_hf(into: State, folder: Path) -> None:
    from torch.distributed import checkpoint

    reader = checkpoint.HuggingFaceStorageReader(str(folder / "hf"))
    checkpoint.load(into, storage_reader=reader, no_dist=_is_alone())


def load_torch_checkpointing(into: State, folder: Path) -> None:
    with _torch_checkpointing() as manager:
        loaded = manager.load(str(folder / "checkpoint"), into={"state": into})["state"]
    if any(loaded[name] is not value for name, value in into.items()):
        _copy(loaded, into)


def _torch_checkpointing() -> Any:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # Direct writes, its default, end with EINVAL on ext4.
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    config = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage)
    return contextlib.closing(CheckpointManager(config))


def load_runai(into: State, folder: Path) -> None:
    """Load the file that safetensors saved, with RunAI's streamer."""
    _stream(str(folder / "state.safetensors"), into)


def _stream(path: str, into: State) -> None:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path, owned=False)
        for name, value in streamer.get_tensors():
            into[name].copy_(value)


def load_torchsnapshot(into: State, folder: Path) -> None:
    from torchsnapshot import Snapshot, StateDict

    Snapshot(str(folder / "snapshot")).restore({"state": StateDict(**into)})


def load_memcpy(into: State, folder: Path) -> None:
    """Copy the state from memory: the limit."""
    _copy(_source, into)


def _copy(source: State, into: State) -> None:
    for name, value in into.items():
        value.copy_(source[name])


def _is_alone() -> bool:
    return not torch.distributed.is_initialized()


_source: State = {}


def main() -> None:
    """Run one cell and print what it measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=["save", "load"])
    parser.add_argument("system")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--uri", help="a prefix on an S3 server instead of the folder")
    parser.add_argument("--cold", action="store_true", help="drop the page cache first (needs root)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kind = "_s3" if options.uri else ""
    function: Callable[[State, Any], None] = globals()[f"{options.phase}_{options.system}{kind}"]
    state = make_state(options.shape)
    size = num_bytes(state)
    into = {name: torch.zeros_like(value) for name, value in state.items()}
    if options.uri:
        # A first, small save and load are not measured: they include imports and the start of threads.
        small = {"a": torch.ones(4)}
        globals()[f"save_{options.system}_s3"](small, f"{options.uri}-warm-{options.phase}")
        globals()[f"load_{options.system}_s3"](small, f"{options.uri}-warm-{options.phase}")
        _source.update(state)
    elif options.phase == "save":
        shutil.rmtree(options.folder, ignore_errors=True)
        options.folder.mkdir(parents=True)
        # A first, small save is not measured: it includes imports and the start of threads.
        function({"a": torch.ones(4)}, options.folder)
        shutil.rmtree(options.folder)
        options.folder.mkdir()
        os.sync()
    else:
        _source.update(state)
        if options.cold:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")
        else:
            for path in options.folder.rglob("*"):
                if path.is_file():
                    path.read_bytes()
    warm_memory()
    forget_peak()
    before = peak_kib()
    cpu, start = time.process_time(), time.perf_counter()
    function(state if options.phase == "save" else into, options.uri or options.folder)
    seconds = time.perf_counter() - start
    cpu, grown = time.process_time() - cpu, peak_kib() - before
    again = math.inf
    if options.phase == "load":
        start = time.perf_counter()
        function(into, options.uri or options.folder)
        again = time.perf_counter() - start
    if options.phase == "load":
        for name, value in state.items():
            if not torch.equal(value.view(-1)[::17], into[name].view(-1)[::17]):
                raise SystemExit(f"{name} is not what was saved")
    figures = {
        "seconds": seconds, "gb_s": size / seconds / 1e9, "again_gb_s": size / again / 1e9, "cpu_s": cpu,
        "extra_mib": grown / 1024,
    }  # fmt: skip
    print(json.dumps(figures), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
