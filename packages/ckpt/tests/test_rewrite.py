"""A rewrite finds what an earlier run finished, and writes again what is damaged."""

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
from safetensors.numpy import save_file

import hocket.ckpt
from hocket.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompatibleError,
)
from hocket.ckpt.formats.output_file import ConvertedTensor, OutFile, TensorPayload
from hocket.ckpt.read.prefetch import PayloadReader
from hocket.ckpt.verbs import rewrite as rewriting
from hocket.ckpt.verbs.convert import convert
from hocket.ckpt.verbs.reshard import reshard
from hocket.native import Store, _native


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"layer.{n}.w": rng.random((40, 25), np.float32) for n in range(12)}
    save_file(arrays, tmp_path / "source.safetensors")
    convert(tmp_path / "source.safetensors", tmp_path / "source", to="hocket")
    return str(tmp_path / "source")


def rewrite(verb, source, target, *, compression=None, on_bytes=None):
    """Convert or reshard; return the number of files that were found and of those that were written."""
    if verb == "reshard":
        done = reshard(source, target, ranks=3, compression=compression)
        return done.num_found, done.num_written
    done = convert(
        source, target, to="hocket", max_shard_bytes=9000, compression=compression, on_progress=on_bytes
    )
    num_found = done.files_found
    return num_found, done.files - 1 - num_found


def flip(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("compression", [None, "zstd:1", "planes+zstd:1"])
@pytest.mark.parametrize("verb", ["convert", "reshard"])
def test_damaged_files_are_replaced_and_sound_ones_are_found(source, tmp_path, verb, compression):
    target = tmp_path / "out"
    _, num_files = rewrite(verb, source, target, compression=compression)
    files = sorted((target / "data").iterdir())
    before = {path: path.read_bytes() for path in files}
    # One byte differs, and one file is cut short; nothing is committed.
    (target / "checkpoint.json.zst").unlink()
    flip(files[0])
    files[2].write_bytes(before[files[2]][:-7])
    kept = files[1].stat().st_mtime_ns
    assert rewrite(verb, source, target, compression=compression) == (num_files - 2, 2)
    assert {path: path.read_bytes() for path in sorted((target / "data").iterdir())} == before
    assert files[1].stat().st_mtime_ns == kept
    assert hocket.ckpt.verify(target).is_sound


def test_a_file_that_another_run_finishes_meanwhile_is_found_and_not_removed(source, tmp_path, monkeypatch):
    target = tmp_path / "out"
    other = tmp_path / "other"
    rewrite("reshard", source, other)
    create, is_first = _native.CkptStreamWriter, True

    def created(root, path, **options):
        """Create the writer, and let another run finish the first file before this one does."""
        nonlocal is_first
        writer = create(root, path, **options)
        if is_first and path.endswith(".safetensors"):
            is_first = False
            place = target / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes((other / path).read_bytes())
            created.inode = place.stat().st_ino
            created.place = place
        return writer

    monkeypatch.setattr(rewriting._native, "CkptStreamWriter", created)
    assert rewrite("reshard", source, target) == (1, 2)
    assert created.place.stat().st_ino == created.inode
    assert hocket.ckpt.verify(target).is_sound


def test_a_differing_file_of_another_format_is_kept(source, tmp_path):
    target = tmp_path / "out"
    convert(source, target, to="dcp", max_shard_bytes=9000)
    (target / ".metadata").unlink()
    damaged = target / "__0_1.distcp"
    flip(damaged)
    before = damaged.read_bytes()
    with pytest.raises(CheckpointExistsError, match="was not touched"):
        convert(source, target, to="dcp", max_shard_bytes=9000)
    assert damaged.read_bytes() == before


def test_a_changed_source_replaces_no_file_of_a_committed_checkpoint(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"layer.{n}.w": rng.random((40, 25), np.float32) for n in range(12)}
    source, target = tmp_path / "source.safetensors", tmp_path / "out"
    save_file(arrays, source)
    convert(source, target, to="hocket", max_shard_bytes=9000)
    files = sorted((target / "data").iterdir())
    lost = files[0].read_bytes()
    # The source is overwritten in place: equal names and shapes, other values.
    save_file({name: array + 1 for name, array in arrays.items()}, source)
    files[0].unlink()
    before = {path: path.read_bytes() for path in files[1:]}
    with pytest.raises(CheckpointExistsError):
        convert(source, target, to="hocket", max_shard_bytes=9000)
    assert {path: path.read_bytes() for path in files[1:]} == before
    files[0].write_bytes(lost)
    assert hocket.ckpt.verify(target).is_sound
    # All data files are lost and written from the changed source, which the manifest does not describe.
    for path in files:
        path.unlink()
    with pytest.raises(CheckpointExistsError, match="the source has changed since"):
        convert(source, target, to="hocket", max_shard_bytes=9000)


WORK = """
import sys
from hocket.ckpt import reshard
print(reshard(sys.argv[1], sys.argv[2], ranks=3, memory_bytes=16 << 20).num_written)
"""


def test_two_runs_at_once_repair_a_checkpoint_together(source, tmp_path):
    for attempt in range(4):
        target = tmp_path / f"out-{attempt}"
        reshard(source, target, ranks=3, memory_bytes=16 << 20)
        (target / "checkpoint.json.zst").unlink()
        for path in (target / "data").iterdir():
            flip(path)
        command = [sys.executable, "-c", WORK, source, str(target)]
        pipe = subprocess.PIPE
        runs = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
        for run in runs:
            _, error = run.communicate(timeout=120)
            assert (run.returncode, error) == (0, "")
        assert hocket.ckpt.verify(target).is_sound
        assert not [path for path in target.rglob("*") if "unfinished" in path.name or "running" in path.name]


def test_an_existing_object_is_compared_in_few_requests(tmp_path, server):
    arrays = {f"{n:04}": np.full(16, n, np.float32) for n in range(500)}
    save_file(arrays, tmp_path / "small.safetensors")
    target = server.uri(f"rewriting/{tmp_path.name}")
    convert(tmp_path / "small.safetensors", target, to="hocket")
    store = Store(target)
    store.delete("checkpoint.json.zst")
    before = server.stats()["requests"].get("GetObject", 0)
    assert convert(tmp_path / "small.safetensors", target, to="hocket").files_found == 1
    assert server.stats()["requests"]["GetObject"] - before < 10


def test_a_finished_reader_frees_its_memory(source, tmp_path):
    opened = hocket.ckpt.open(source)
    tensors = [
        ConvertedTensor(source=name, name=name, path=(name,), dtype="F32", shape=opened.record(name).shape)
        for name in opened
    ]
    file = OutFile(path="x", parts=list(map(TensorPayload, tensors)))
    reader = PayloadReader(opened, [file], 16 << 20)
    with reader:
        next(reader.take(file.parts[0]))
    seen = weakref.ref(reader)
    gc.disable()
    try:
        del reader
        assert seen() is None
    finally:
        gc.enable()


def test_the_name_of_a_chunk_must_not_be_that_of_another_tensor(tmp_path):
    array = np.arange(4000, dtype=np.float32).reshape(100, 40)
    save_file({"w": array, "w@0,0": array[:1], "w@25,0": array[:1]}, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "x", to="hocket")
    with pytest.raises(CheckpointIncompatibleError, match=r"two entries of a file would be called `w@"):
        reshard(tmp_path / "x", tmp_path / "y", ranks=4)


def test_the_error_of_one_writer_ends_the_others_and_is_raised(source, tmp_path):
    copy = tmp_path / "copy"
    reshard(source, copy, ranks=4)
    flip(sorted((copy / "data").iterdir())[3])
    with pytest.raises(CheckpointCorruptError, match="digest"):
        reshard(copy, tmp_path / "out", ranks=3)
    assert not (tmp_path / "out/checkpoint.json.zst").exists()


def test_progress_reaches_the_total_and_never_passes_it(source, tmp_path):
    told = []
    target = tmp_path / "out"
    rewrite("convert", source, target)
    (target / "checkpoint.json.zst").unlink()
    flip(sorted((target / "data").iterdir())[0])
    rewrite("convert", source, target, on_bytes=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
