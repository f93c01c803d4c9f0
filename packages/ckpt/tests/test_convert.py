"""Conversions continue after a kill, split large tensors, and keep to their memory limit."""

import fcntl
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import zstandard
from safetensors import safe_open
from safetensors.numpy import save_file

import hocket.ckpt
from hocket.ckpt import collect_garbage, list_checkpoints, verify
from hocket.ckpt.cli.app import app
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointExistsError
from hocket.ckpt.formats.output_file import ConvertedTensor
from hocket.ckpt.formats.pickling import PersistentStorage, PickledCall, PickledGlobal, PickledInstance, dumps
from hocket.ckpt.formats.torch_save import torch_zip
from hocket.ckpt.formats.writers import _size, _tensor_metadata
from hocket.ckpt.verbs.convert import convert
from hocket.ckpt.verbs.diff import diff
from hocket.ckpt.verbs.reshard import reshard
from hocket.native import _native
from support.sampling import cases
from support.stored import check_stored

TARGETS = {"hocket": "h", "dcp": "d", "safetensors": "s", "torch": "t.pt"}


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"layer.{n}.w": rng.random((40, 25), np.float32) for n in range(12)}
    arrays |= {"step": np.array(7), "none": np.empty((0, 3), np.float16)}
    save_file(arrays, tmp_path / "source.safetensors")
    return str(tmp_path / "source.safetensors"), arrays


def files_of(folder):
    """Return the bytes of a file, or of all files below a folder, and manifests without their time."""
    folder = Path(folder)
    paths = [folder] if folder.is_file() else [path for path in folder.rglob("*") if path.is_file()]
    found = {}
    for path in paths:
        found[path.name] = path.read_bytes()
        if path.name == "checkpoint.json.zst":
            document = json.loads(_native.ckpt_manifest_decode(found[path.name]))
            found[path.name] = {**document, "created": ""}
    return found


@pytest.mark.parametrize("to", TARGETS)
def test_finished_files_of_an_earlier_run_are_compared_and_not_rewritten(source, tmp_path, to):
    uri, arrays = source
    whole, again = tmp_path / "whole" / TARGETS[to], tmp_path / "again" / TARGETS[to]
    options = {"to": to, "max_shard_bytes": 9000}
    num_files = convert(uri, str(whole), **options).files
    convert(uri, str(again), **options)
    # The state after a kill: no manifest, some finished files, one unfinished file.
    folder = again if again.is_dir() else again.parent
    kept = {path for path in folder.rglob("*") if path.is_file()}
    if to != "torch":
        kept = set(sorted(path for path in kept if ".0_1." not in path.name)[:3])
        kept = {path for path in kept if path.name not in (".metadata", "checkpoint.json.zst")}
    for path in folder.rglob("*"):
        if path.is_file() and path not in kept:
            path.unlink()
    some = next(iter(kept))
    some.with_name(f".{some.name}.{2**22 + 1}.hocket-unfinished").write_bytes(b"half")
    written_at = {path: path.stat().st_mtime_ns for path in kept}
    done = convert(uri, str(again), **options)
    assert (done.files, done.files_found) == (num_files, len(kept))
    assert {path: path.stat().st_mtime_ns for path in kept} == written_at
    assert files_of(whole) == files_of(again)
    check_stored(again, arrays)
    # A further run finds all files finished.
    assert convert(uri, str(again), **options).files_found >= num_files - 1
    assert {path: path.stat().st_mtime_ns for path in kept} == written_at


def test_paths_are_accepted_in_place_of_strings(source, tmp_path):
    uri, arrays = source
    one, two = tmp_path / "one", tmp_path / "two"
    assert convert(Path(uri), one, to="hocket").destination == str(one)
    reshard(one, two, ranks=2)
    assert diff(one, two).values == {}
    assert hocket.ckpt.open(two).uri == verify(two).uri == str(two)
    check_stored(two, arrays)
    assert {listing.name for listing in list_checkpoints(tmp_path) if listing.step is not None} == {
        "one",
        "two",
    }


@pytest.mark.parametrize("to", TARGETS)
def test_a_target_of_another_conversion_is_refused_and_not_changed(source, tmp_path, to):
    uri, arrays = source
    target = tmp_path / "out" / TARGETS[to]
    convert(uri, str(target), to=to, max_shard_bytes=9000)
    before = files_of(target)
    changed = {**arrays, "layer.3.w": arrays["layer.3.w"] + 1}
    save_file(changed, tmp_path / "other.safetensors")
    for options in ({}, {"max_shard_bytes": 9000}, {"dtype": "BF16"}):
        with pytest.raises(CheckpointExistsError, match="not touched"):
            convert(str(tmp_path / "other.safetensors"), str(target), to=to, **options)
        assert files_of(target) == before


@pytest.mark.parametrize("to", ["hocket", "dcp", "safetensors"])
def test_a_failed_run_removes_no_file_of_another_and_a_missing_file_is_rewritten(source, tmp_path, to):
    uri, arrays = source
    target = tmp_path / TARGETS[to]

    def overtaken(done, total):
        if done > total // 2:
            # A second run of the same conversion finishes it; then the first one fails.
            with work(uri, target, to=to, max_shard_bytes=9000) as other:
                told, failed = other.communicate(timeout=200)
            assert int(told.split()[2]) > 0, failed
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(uri, str(target), to=to, max_shard_bytes=9000, on_progress=overtaken)
    check_stored(target, arrays)
    data = sorted(path for path in target.rglob("*") if path.suffix in (".safetensors", ".distcp"))
    data[0].unlink()
    again = convert(uri, str(target), to=to, max_shard_bytes=9000)
    assert again.files_found < again.files
    check_stored(target, arrays)


def test_gc_spares_the_files_of_a_rerun_and_a_file_that_disappears_raises(source, tmp_path, monkeypatch):
    uri, arrays = source
    one, two, commit = tmp_path / "runs/one", tmp_path / "runs/two", _native.ckpt_commit

    def bring(target, tell=None):
        if target == one:
            return convert(uri, str(one), to="hocket", max_shard_bytes=9000, on_progress=tell).files_found
        return reshard(str(one), str(two), ranks=2, on_file=tell).num_found

    def commit_beside_gc(*args, **options):
        assert collect_garbage(str(tmp_path / "runs"), min_age_s=3600).garbage == ()
        commit(*args, **options)

    for target in (one, two):
        assert bring(target) == 0
        # The state long after a kill before the commit: old files and no manifest.
        (target / "checkpoint.json.zst").unlink()
        files = sorted((target / "data").iterdir())
        for path in files:
            os.utime(path, (1, 1))
        assert len(collect_garbage(str(target.parent), min_age_s=3600, dry_run=True).garbage) == len(files)
        with monkeypatch.context() as patched:
            patched.setattr(_native, "ckpt_commit", commit_beside_gc)
            assert bring(target) == len(files)
        assert sorted((target / "data").iterdir()) == files
        check_stored(target, arrays)
        (target / "checkpoint.json.zst").unlink()
        with pytest.raises(CheckpointError, match=r"is gone.*run it again"):
            bring(target, lambda *_, lost=files[0]: lost.unlink(missing_ok=True))
        assert not (target / "checkpoint.json.zst").exists()
        bring(target)
        check_stored(target, arrays)


def test_diff_reads_small_tensors_together(source, tmp_path, monkeypatch):
    uri, arrays = source
    convert(uri, str(tmp_path / "h"), to="hocket")
    read, num_reads = hocket.ckpt.Checkpoint.read, []

    def counted(self, wanted):
        num_reads.append(len(wanted))
        return read(self, wanted)

    monkeypatch.setattr(hocket.ckpt.Checkpoint, "read", counted)
    found = diff(str(tmp_path / "h"), str(tmp_path / "h"))
    assert (found.num_equal, found.num_bytes) == (len(arrays), sum(array.nbytes for array in arrays.values()))
    assert len(num_reads) == 2


def test_a_file_that_another_run_is_writing_is_refused(source, tmp_path):
    uri, arrays = source
    one, two = tmp_path / "one", tmp_path / "two"
    convert(uri, str(one), to="hocket")
    reshard(str(one), str(two), ranks=2)
    (two / "checkpoint.json.zst").unlink()
    half = sorted((two / "data").iterdir())[0]
    half.write_bytes(half.read_bytes()[:-1])
    with half.open("r+b") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(CheckpointExistsError, match="another run is writing it"):
            reshard(str(one), str(two), ranks=2)
        assert half.exists()
    assert reshard(str(one), str(two), ranks=2).num_written == 1
    check_stored(two, arrays)


@pytest.mark.parametrize("to", ["hocket", "dcp"])
def test_a_large_tensor_is_split_into_chunks(tmp_path, to):
    array = np.arange(30 * 40 * 5, dtype=np.float32).reshape(30, 40, 5)
    save_file({"large": array, "small": array[0, 0]}, tmp_path / "x.safetensors")
    convert(str(tmp_path / "x.safetensors"), str(tmp_path / "out"), to=to, max_shard_bytes=3000)
    chunks = hocket.ckpt.open(str(tmp_path / "out")).record("large").chunks
    assert len(chunks) > array.nbytes // 3000
    assert max(np.prod(chunk.size) * 4 for chunk in chunks) <= 3000
    check_stored(tmp_path / "out", {"large": array, "small": array[0, 0]})
    convert(str(tmp_path / "out"), str(tmp_path / "back"), to="safetensors")
    check_stored(tmp_path / "back", {"large": array, "small": array[0, 0]})


def test_compressed_files_are_written_and_reused_and_refused_for_other_formats(source, tmp_path, capsys):
    uri, arrays = source
    one, two = tmp_path / "one", tmp_path / "two"
    convert(uri, str(one), to="hocket", max_shard_bytes=9000, compression="zstd:3")
    check_stored(one, arrays)
    assert {path.suffix for path in (one / "data").iterdir()} == {".blocks"}
    before = files_of(one)
    (one / "checkpoint.json.zst").unlink()
    sorted((one / "data").iterdir())[1].unlink()
    done = convert(uri, str(one), to="hocket", max_shard_bytes=9000, compression="zstd:3")
    assert done.files - done.files_found == 2
    assert files_of(one) == before
    # `reshard`, which divides tensors over files differently, does the same.
    for expected in [(2, 0), (1, 1)]:
        resharded = reshard(str(one), str(two), ranks=2, compression="zstd:1")
        assert (resharded.num_written, resharded.num_found) == expected
        check_stored(two, arrays)
        (two / "checkpoint.json.zst").unlink()
        sorted((two / "data").iterdir())[0].unlink()
    for arguments in (["--to", "dcp", "--compression", "zstd:3"], ["--to", "hocket", "--compression", "lz4"]):
        with pytest.raises(SystemExit) as ended:
            app(["convert", uri, str(tmp_path / "x"), *arguments])
        assert ended.value.code == 2
    assert "compression" in capsys.readouterr().err


def packed_dcp(folder, array, name="w", order="C"):
    """Write a distributed checkpoint of one tensor in one item, compressed as by torch's zstd extension."""
    folder.mkdir()
    tensor = ConvertedTensor(source=name, name=name, path=(name,), dtype="F32", shape=array.shape)
    stored = np.ascontiguousarray(array if order == "C" else array.T)
    strides = tuple(stride // 4 for stride in (stored if order == "C" else stored.T).strides)
    with mock.patch("hocket.ckpt.formats.torch_save.c_strides", return_value=strides):
        [before, payload, *after] = _joined(torch_zip(tensor, [tensor]))
    payload.crc = _native.crc32(stored.ctypes.data, stored.nbytes)
    compressor = zstandard.ZstdCompressor(level=1)
    with (folder / "__0_0.distcp").open("wb") as file, compressor.stream_writer(file, closefd=False) as out:
        out.write(before)
        out.write(memoryview(stored).cast("B"))
        for part in after:
            out.write(part if isinstance(part, bytes) else part.make())
    length = (folder / "__0_0.distcp").stat().st_size
    kinds = "torch.distributed.checkpoint"
    start = _size((0,) * array.ndim)
    index = PickledInstance(
        PickledGlobal(f"{kinds}.metadata", "MetadataIndex"), {"fqn": name, "offset": start, "index": 0}
    )
    place = {"relative_path": "__0_0.distcp", "offset": 0, "length": length}
    place["transform_descriptors"] = ["stream.zstd/1"]

    class Pairs(dict):
        def items(self):
            return [(index, PickledInstance(PickledGlobal(f"{kinds}.filesystem", "_StorageInfo"), place))]

    metadata = {
        "state_dict_metadata": {name: _tensor_metadata(tensor, [payload])},
        "planner_data": {name: (name,)},
        "storage_data": Pairs(),
    }
    (folder / ".metadata").write_bytes(
        dumps(PickledInstance(PickledGlobal(f"{kinds}.metadata", "Metadata"), metadata))
    )


def _joined(parts):
    """Return the parts, with all bytes before the tensor joined."""
    at = next(number for number, part in enumerate(parts) if not isinstance(part, bytes))
    return [b"".join(parts[:at]), *parts[at:]]


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_compressed_item_is_read_in_any_order_and_a_truncated_one_raises(tmp_path, order):
    array = np.random.default_rng(0).integers(0, 9, (300, 200, 30)).astype(np.float32)  # 7.2 MB
    packed_dcp(tmp_path / "dcp", array, order=order)
    checkpoint = hocket.ckpt.open(str(tmp_path / "dcp"))
    assert hocket.ckpt.verify(str(tmp_path / "dcp")).is_sound
    from hocket.ckpt.document.planning import Box

    for start in [(280, 0, 0), (3, 100, 7), (290, 150, 2), (0, 0, 0)]:
        box = Box(start, (10, 50, 20))
        index = tuple(slice(a, a + n) for a, n in zip(*box, strict=True))
        [part] = checkpoint.read([("w", box)])
        np.testing.assert_array_equal(part, array[index])
    convert(str(tmp_path / "dcp"), str(tmp_path / "st"), to="safetensors")
    with safe_open(str(tmp_path / "st/model.safetensors"), framework="np") as file:
        np.testing.assert_array_equal(file.get_tensor("w"), array)
    path = tmp_path / "dcp/__0_0.distcp"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    assert not hocket.ckpt.verify(str(tmp_path / "dcp")).is_sound
    with pytest.raises(CheckpointCorruptError, match="zstd"):
        hocket.ckpt.open(str(tmp_path / "dcp"))["w"]


def test_a_full_temporary_folder_raises_and_leaves_no_files(tmp_path, monkeypatch):
    packed_dcp(tmp_path / "dcp", np.arange(3_000_000, dtype=np.float32).reshape(3000, 1000), order="F")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="Set `TMPDIR`"):
            convert(str(tmp_path / "dcp"), str(tmp_path / "out"), to="hocket")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert {path.parent.name for path in tmp_path.rglob("*") if path.is_file()} == {"dcp"}
    with monkeypatch.context() as patched:
        patched.setenv("TMPDIR", str(tmp_path / "gone"))
        with pytest.raises(CheckpointError, match=r"12000000 bytes.*below `.*/gone`.*Set `TMPDIR`"):
            convert(str(tmp_path / "dcp"), str(tmp_path / "out"), to="hocket")
    assert {path.parent.name for path in tmp_path.rglob("*") if path.is_file()} == {"dcp"}
    convert(str(tmp_path / "dcp"), str(tmp_path / "out"), to="hocket")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "out"]


WORK = """
import json, sys
from pathlib import Path
from hocket.ckpt.verbs.convert import convert
options = json.loads(sys.argv[3])
done = convert(sys.argv[1], sys.argv[2], **options)
# Not ru_maxrss: that is the parent's until the process has grown beyond it.
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
print(int(status["VmHWM"].split()[0]) * 1024, done.files, done.files_found)
"""


def work(source, target, **options):
    return subprocess.Popen(
        [sys.executable, "-c", WORK, str(source), str(target), json.dumps(options)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("form", ["safetensors", "zstd", "zstd-F", "dcp"])
def test_a_conversion_keeps_to_its_memory_limit_and_continues_after_a_kill(tmp_path, form):
    mib = cases(full=2560, sample=160)
    memory = max(mib // 10, 16) << 20
    array = np.arange(mib << 18, dtype=np.float32).reshape(mib << 8, 1024)
    source, target, whole = tmp_path / "source", tmp_path / "target", tmp_path / "whole"
    if form.startswith("zstd"):
        packed_dcp(source, array, order="F" if form == "zstd-F" else "C")
    else:
        source.mkdir()
        save_file({"w": array}, source / "model.safetensors")
    if form == "dcp":
        source, made = tmp_path / "dcp", source
        convert(str(made), str(source), to="dcp", memory_bytes=memory)
    # The result of an uninterrupted run, for comparison.
    options = {"to": "hocket", "max_shard_bytes": (mib << 20) // 16, "memory_bytes": memory}
    running = work(source, whole, **options)
    said, error = running.communicate(timeout=280)
    assert (running.returncode, error) == (0, "")
    peaks = [int(said.split()[0])]
    for stop in (2, 9):
        killed = work(source, target, **options)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and killed.poll() is None:
            if len(list(target.glob("data/*-r00000-*s"))) >= stop:
                break
            time.sleep(0.001)
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=60)
    running = work(source, target, **options)
    said, error = running.communicate(timeout=280)
    assert (running.returncode, error) == (0, "")
    peak, _, found = map(int, said.split())
    peaks.append(peak)
    assert found >= 9
    assert max(peaks) <= memory + (64 << 20), [peak >> 20 for peak in peaks]
    assert files_of(target).keys() == files_of(whole).keys()  # no leftovers
    for ours, theirs in zip(sorted(whole.rglob("*")), sorted(target.rglob("*")), strict=True):
        if ours.suffix == ".safetensors":
            assert _native.ckpt_sizes(str(ours.parent), [ours.name]) == [theirs.stat().st_size]
            with ours.open("rb") as a, theirs.open("rb") as b:
                for left, right in itertools.zip_longest(
                    *(iter(lambda f=f: f.read(1 << 20), b"") for f in (a, b))
                ):
                    assert left == right
    opened = hocket.ckpt.open(str(target))
    assert np.array_equal(opened["w"], array)


def test_a_conversion_from_a_disk_to_a_store_continues_after_a_kill(source, server, tmp_path):
    uri, arrays = source
    for to in ("hocket", "dcp", "safetensors"):
        target = server.uri(f"converting/{tmp_path.name}/{to}")
        for compression in [None, "zstd:1"] if to == "hocket" else [None]:
            target += "" if compression is None else "-zstd"
            options = {"to": to, "max_shard_bytes": 9000, "compression": compression}
            num_files = convert(uri, target, **options).files
            store = _native.Store(target)
            keys = sorted(found.key for found in store.list())
            last = next(key for key in keys if key.endswith((".zst", ".metadata", ".json")))
            gone = next(key for key in keys if key != last)
            for key in (last, gone):
                store.delete(key)
            assert convert(uri, target, **options).files_found == num_files - 2
            check_stored(target, arrays)


def views_file(path, storages):
    """Write a file as `torch.save` does, of named views of each storage's array."""
    tree = {}
    with zipfile.ZipFile(path, "w") as archive:
        for key, (base, views) in enumerate(storages):
            archive.writestr(f"archive/data/{key}", memoryview(base).cast("B"))
            storage = PersistentStorage(
                ("storage", PickledGlobal("torch", "FloatStorage"), str(key), "cpu", base.size)
            )
            for name, view in views.items():
                offset = (view.ctypes.data - base.ctypes.data) // 4
                strides = tuple(stride // 4 for stride in view.strides)
                none = PickledCall(PickledGlobal("collections", "OrderedDict"), ())
                arguments = (storage, offset, view.shape, strides, False, none)
                tree[name] = PickledCall(PickledGlobal("torch._utils", "_rebuild_tensor_v2"), arguments)
        archive.writestr("archive/data.pkl", dumps(tree))


COMPARE = """
import sys
from pathlib import Path
from hocket.ckpt.verbs.convert import convert
from hocket.ckpt.verbs.diff import diff
convert(sys.argv[1], sys.argv[2], to="safetensors", memory_bytes=int(sys.argv[3]))
found = diff(sys.argv[1], sys.argv[2], memory_bytes=int(sys.argv[3]))
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
print(int(status["VmHWM"].split()[0]) * 1024, found.num_equal)
"""


def test_views_with_large_strides_take_no_more_memory(tmp_path):
    memory = 16 << 20
    rng = np.random.default_rng(0)
    near, far = rng.random((1 << 18, 64), np.float32), rng.random((1 << 10, 1 << 13), np.float32)
    # Rows of `far` are too far apart for one read to span them, and its columns are short.
    of_near, of_far = {"column": near[:, 3], "rows": near[:, ::16].T}, {"all": far.T, "corner": far[5:, :7]}
    path, target = tmp_path / "views.pt", tmp_path / "out.safetensors"
    views_file(path, [(near, of_near), (far, of_far)])
    run = subprocess.run(
        [sys.executable, "-c", COMPARE, path, target, str(memory)],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    peak, num_equal = map(int, run.stdout.split())
    assert peak <= memory + (64 << 20), peak >> 20
    assert num_equal == 4
    with safe_open(target, framework="np") as file:
        for name, view in {**of_near, **of_far}.items():
            np.testing.assert_array_equal(file.get_tensor(name), view)
