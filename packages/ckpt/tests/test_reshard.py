"""`reshard` keeps all tensors, writes each rank's files separately, and keeps to its memory limit."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hocket.ckpt
from hocket.ckpt.cli.app import app
from hocket.ckpt.document.chunks import Chunk
from hocket.ckpt.document.file_names import data_path, file_metadata
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.planning import TensorPlacement, boxes, local_box
from hocket.ckpt.document.records import PerRank, TensorRecord
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointIncompatibleError
from hocket.ckpt.verbs import reshard as resharding
from hocket.ckpt.verbs.demo import write_demo
from hocket.ckpt.verbs.diff import diff
from hocket.native import _native
from support.sampling import cases

SAVE_ID = "fedcba98" * 4


def write(uri, arrays, placings, per_rank=None):
    """Write arrays as a job would whose tensors have these placements on meshes, with one file a rank."""
    world_size = max(len(placing.ranks) for placing in placings.values())
    files, chunks = [], {name: [] for name in arrays}
    for rank in range(world_size):
        parts = []
        for name, array in arrays.items():
            for box, ranks in boxes(array.shape, placings[name]):
                if ranks[0] == rank:
                    index = tuple(slice(a, a + n) for a, n in zip(*box, strict=True))
                    parts.append((name, box, np.ascontiguousarray(array[(*index, ...)]).reshape(box.size)))
        written = _native.ckpt_write_file(
            uri,
            data_path(SAVE_ID, rank),
            entries=[
                (f"{name}@{box.start}", "F32", box.size, part.ctypes.data, part.nbytes)
                for name, box, part in parts
            ],
            metadata=file_metadata(SAVE_ID),
            sync=False,
        )
        files.append(written)
        for name, box, _ in parts:
            offset, length = written["entries"][f"{name}@{box.start}"]
            chunks[name].append(
                Chunk(file=rank, offset=offset, length=length, start=box.start, size=box.size)
            )
    manifest = Manifest(
        save_id=SAVE_ID,
        step=7,
        created="2026-01-01T00:00:00.000000Z",
        version="0.1.0",
        writer="test",
        world_size=world_size,
        files=tuple(files),
        tensors={
            name: TensorRecord(dtype="F32", shape=array.shape, path=(name,), chunks=tuple(chunks[name]))
            for name, array in arrays.items()
        },
        per_rank=per_rank,
    )
    _native.ckpt_commit(uri, _native.ckpt_manifest_encode(manifest.to_document()), SAVE_ID)
    return manifest


@st.composite
def placed_shapes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
    mesh = draw(st.sampled_from([(1,), (3,), (4,), (2, 2), (2, 3)]))
    cut = st.none() | st.integers(0, len(shape) - 1) if shape else st.none()
    late = (0,) if len(mesh) == 2 and draw(st.booleans()) else ()
    ranks = tuple(range(int(np.prod(mesh))))
    return shape, TensorPlacement(mesh, ranks, tuple(draw(cut) for _ in mesh), late)


@pytest.mark.slow
@given(st.lists(placed_shapes(), min_size=1, max_size=5), st.integers(1, 8), st.integers(40, 400), st.data())
@settings(max_examples=cases(full=1000, sample=30), deadline=None)
def test_any_layout_is_resharded_to_any_number_of_ranks(tmp_path_factory, placed, ranks, file_bytes, data):
    folder = tmp_path_factory.mktemp("reshard")
    rng = np.random.default_rng(len(placed))
    arrays = {f"t{n}": rng.random(shape, np.float32) for n, (shape, _) in enumerate(placed)}
    placings = {f"t{n}": placing for n, (_, placing) in enumerate(placed)}
    source, target = str(folder / "source"), str(folder / "target")
    write(source, arrays, placings)
    least, resharding._LEAST_MEMORY_BYTES = resharding._LEAST_MEMORY_BYTES, 0
    try:
        memory_bytes = file_bytes * resharding._FILES_IN_MEMORY
        done = hocket.ckpt.reshard(source, target, ranks=ranks, memory_bytes=memory_bytes)
    finally:
        resharding._LEAST_MEMORY_BYTES = least
    out = hocket.ckpt.open(target)
    assert (out.manifest.step, out.manifest.world_size, done.num_found) == (7, ranks, 0)
    for name, array in arrays.items():
        assert out[name].tobytes() == array.tobytes()
        assert out[name].shape == array.shape
    assert hocket.ckpt.verify(target).is_sound
    placing = TensorPlacement((ranks,), tuple(range(ranks)), (0,))
    for file in out.manifest.files:
        assert file["size"] - file["data_start"] <= file_bytes
    for name, record in out.manifest.tensors.items():
        for chunk in record.chunks:
            owner = int(out.manifest.files[chunk.file]["path"].split("-r")[1][:5])
            mine = local_box(arrays[name].shape, placing, owner) if record.shape else None
            if mine is not None:
                assert mine.start[0] <= chunk.start[0]
                assert chunk.start[0] + chunk.size[0] <= mine.start[0] + mine.size[0]


def call(capsys, *args):
    with pytest.raises(SystemExit) as ended:
        app([str(arg) for arg in args])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_the_command_continues_after_an_interrupted_run(tmp_path, capsys):
    source, target = str(tmp_path / "demo"), str(tmp_path / "three")
    write_demo(source)
    code, out, _ = call(capsys, "reshard", source, target, "--ranks", "3", "--json")
    document = json.loads(out)
    assert (code, document["files_written"], document["files_found"]) == (0, 3, 0)
    # A second run finds all files finished.
    document = json.loads(call(capsys, "reshard", source, target, "--ranks", "3", "--json")[1])
    assert (document["files_written"], document["files_found"]) == (0, 3)
    # The state after a kill: no manifest, one truncated file, one missing file.
    before = hocket.ckpt.open(target).manifest
    (tmp_path / "three" / "checkpoint.json.zst").unlink()
    paths = [tmp_path / "three" / file["path"] for file in before.files]
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    paths[1].unlink()
    code, out, _ = call(capsys, "reshard", source, target, "--ranks", "3")
    assert (code, "1 file of them from an earlier run" in out) == (0, True)
    after = hocket.ckpt.open(target)
    assert (after.manifest.files, after.manifest.save_id) == (before.files, before.save_id)
    for name, array in ((name, hocket.ckpt.open(source)[name]) for name in after):
        assert after[name].tobytes() == array.tobytes()
    code, _, error = call(capsys, "reshard", source, target, "--ranks", "4")
    assert (code, "was not touched" in error) == (4, True)
    assert call(capsys, "reshard", source, tmp_path / "x", "--ranks", "0")[0] == 2
    assert call(capsys, "reshard", source, tmp_path / "x", "--ranks", "2", "--memory", "much")[0] == 2
    assert call(capsys, "reshard", tmp_path / "no", tmp_path / "x", "--ranks", "2")[0] == 3


def test_reshard_works_from_a_disk_to_a_store_and_back(tmp_path, server):
    source, there, back = (
        str(tmp_path / "demo"),
        server.uri(f"reshard/{tmp_path.name}"),
        str(tmp_path / "back"),
    )
    write_demo(source)
    hocket.ckpt.reshard(source, there, ranks=5)
    hocket.ckpt.reshard(there, back, ranks=2)
    first, last = hocket.ckpt.open(source), hocket.ckpt.open(back)
    for name in first:
        assert last[name].tobytes() == first[name].tobytes()
    assert last.manifest.values == first.manifest.values
    assert last.manifest.user == first.manifest.user


def test_ranks_beyond_the_number_of_rows_get_no_files(tmp_path):
    source, target = str(tmp_path / "demo"), str(tmp_path / "many")
    write_demo(source)
    done = resharding.reshard(source, target, ranks=100_000)
    assert done.manifest.world_size == 100_000
    assert len(done.manifest.files) == 257  # the rows of the embedding
    found = diff(source, target)
    assert (found.tensors, found.only_a, found.only_b) == ([], [], [])


def test_per_rank_values_are_dropped_or_forbid_resharding(tmp_path):
    arrays = {"t": np.ones(4, np.float32)}
    for policy in ("drop", "require"):
        own = PerRank(policy=policy, ranks=({"seed": 0}, {"seed": 1}))
        uri = str(tmp_path / policy)
        write(uri, arrays, {"t": TensorPlacement((2,), (0, 1), (0,))}, own)
        same = hocket.ckpt.reshard(uri, f"{uri}-2", ranks=2).manifest
        assert same.per_rank == own
    assert (
        hocket.ckpt.reshard(str(tmp_path / "drop"), str(tmp_path / "drop-3"), ranks=3).manifest.per_rank
        is None
    )
    with pytest.raises(CheckpointIncompatibleError, match="requires as many"):
        hocket.ckpt.reshard(str(tmp_path / "require"), str(tmp_path / "require-3"), ranks=3)


def test_a_corrupt_source_raises_and_nothing_is_committed(tmp_path):
    source, target = tmp_path / "demo", tmp_path / "two"
    write_demo(str(source))
    file = hocket.ckpt.open(str(source)).manifest.files[1]
    content = bytearray((source / file["path"]).read_bytes())
    content[-1] ^= 1
    (source / file["path"]).write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match=file["path"]):
        hocket.ckpt.reshard(str(source), str(target), ranks=2)
    assert not (target / "checkpoint.json.zst").exists()


WORK = """
import resource, sys
import hocket.ckpt
from pathlib import Path
done = hocket.ckpt.reshard(sys.argv[1], sys.argv[2], ranks=3, memory_bytes=int(sys.argv[3]))
# Not ru_maxrss: that is the parent's until the process has grown beyond it.
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
print(int(status["VmHWM"].split()[0]) * 1024, done.num_written, done.num_found)
"""


def work(*args):
    return subprocess.Popen(
        [sys.executable, "-c", WORK, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_reshard_keeps_to_its_memory_and_continues_after_a_kill(tmp_path):
    mib = cases(full=2560, sample=48)
    memory = max(mib // 10, 16) << 20
    rows = mib << 8  # of 4 KiB
    array = np.arange(rows * 1024, dtype=np.float32).reshape(rows, 1024)
    source, target = str(tmp_path / "source"), tmp_path / "target"
    write(source, {"w": array}, {"w": TensorPlacement((4,), (0, 1, 2, 3), (1,))})
    killed = work(source, target, memory)
    deadline = time.monotonic() + 60
    # Files get their names before they are complete, and several are written at once.
    while len(list(target.glob("data/*"))) < 10 and time.monotonic() < deadline and killed.poll() is None:
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    again = work(source, target, memory)
    said, error = again.communicate(timeout=600)
    assert (again.returncode, error) == (0, "")
    peak, written, found = map(int, said.split())
    assert written + found == len(hocket.ckpt.open(str(target)).manifest.files)
    assert found >= 1
    assert peak <= memory + (64 << 20)
    assert np.array_equal(hocket.ckpt.open(str(target))["w"], array)
