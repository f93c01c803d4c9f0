"""Corrupt files, changes after asynchronous saves, leaks, partial loads, and files replaced while read."""

import ctypes
import gc
import json
import os
import threading
from itertools import pairwise

import pytest
import torch

import hocket.ckpt
from hocket.ckpt import reshard, verify
from hocket.ckpt.cli.app import app
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointIncompatibleError, CheckpointNotFoundError
from hocket.ckpt.torch import CheckpointStore, KeepLast
from hocket.ckpt.torch.layout import DTYPES
from hocket.ckpt.verbs.convert import convert
from hocket.ckpt.verbs.diff import diff
from hocket.native import Store, _native
from hocket.native.cli.text import size
from support.sampling import cases

BLOCK = _native.CKPT_BLOCK_BYTES


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(str(tmp_path))
    yield store
    store.close()


def data_file(folder, step):
    (file,) = (folder / f"step-{step}/data").iterdir()
    return file


def state(fill):
    return {"first": torch.full((BLOCK,), float(fill)), "second": torch.full((BLOCK,), float(-fill))}


def spoil(folder, how):
    """Corrupt step 1; return the affected tensors, and the offset of the bad block, if there is one."""
    file, other = data_file(folder, 1), data_file(folder, 2)
    content = bytearray(file.read_bytes())
    data_start = len(content) - 8 * BLOCK
    if how == "flipped":
        content[data_start + 5 * BLOCK + 77] ^= 16
        file.write_bytes(content)
        return {"second"}, 5 * BLOCK
    if how == "truncated":
        file.write_bytes(content[:-1])
    elif how == "appended":
        file.write_bytes(bytes(content) + b"\0")
    else:
        file.write_bytes(other.read_bytes())
        return {"first", "second"}, 0
    return {"first", "second"}, None


@pytest.mark.parametrize("how", ["flipped", "truncated", "appended", "swapped"])
def test_a_corrupt_file_raises_with_tensor_and_offset(store, tmp_path, how):
    for step in (1, 2):
        store.save(state(step), step=step)
    file = data_file(tmp_path, 1)
    tensors, offset = spoil(tmp_path, how)
    with pytest.raises(CheckpointCorruptError) as caught:
        store.load("step-1", state(0))
    message = str(caught.value)
    assert file.name in message
    assert caught.value.file == f"data/{file.name}"
    assert any(f"`{name}`" in message for name in tensors)
    if how == "swapped":
        assert caught.value.offset % BLOCK == 0
        assert str(caught.value.offset) in message
    elif offset is not None:
        assert caught.value.offset == offset
        assert str(offset) in message
    verdict = hocket.ckpt.verify(str(tmp_path / "step-1"))
    assert {flaw.file for flaw in verdict.flaws} == {f"data/{file.name}"}
    assert set(verdict.bad_tensors) == tensors
    if how == "swapped":
        assert {flaw.offset for flaw in verdict.flaws if flaw.offset is not None} == {
            block * BLOCK for block in range(8)
        }


def test_changes_to_any_tensor_after_an_asynchronous_save_are_not_in_it(store):
    weight = torch.randn(40, 30)
    held = {str(dtype): torch.ones(5, 7, dtype=torch.uint8).to(dtype) for dtype in DTYPES}
    held |= {"0-d": torch.tensor(1.5), "turned": torch.randn(600, 500).t(), "rows": weight[3:20:2, 4:9]}
    held |= {"weight": weight, "tied": weight, "large": torch.randn(1 << 20)}
    held["conjugate"] = torch.randn(3, 2, dtype=torch.complex64).conj()
    before = {name: tensor.resolve_conj().clone() for name, tensor in held.items()}
    handle = store.save(held, step=1, mode="async")
    for tensor in held.values():
        tensor.contiguous().view(-1)  # reading a tensor must not matter either
        tensor.zero_()
    handle.wait(30)
    into = {name: torch.empty_like(tensor) for name, tensor in before.items()}
    store.load("step-1", into)
    for name, tensor in before.items():
        one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (into[name], tensor))
        assert torch.equal(one, other), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_saves_wait_for_the_kernels_of_every_device(store):
    devices = range(torch.cuda.device_count())  # one of them is the current device
    held = {f"on{index}": torch.ones(1 << 20, device=f"cuda:{index}") for index in devices}
    for mode in ("async", "sync"):
        for index, tensor in zip(devices, held.values(), strict=True):
            with torch.cuda.device(index):
                torch.cuda._sleep(int(1e9))
                tensor.mul_(2)
        store.save(held, step=int(mode == "sync"), mode=mode).wait(60)
    for step, expected in ((0, 2.0), (1, 4.0)):
        into = {name: torch.zeros(1 << 20) for name in held}
        store.load(f"step-{step}", into)
        assert all(tensor.eq(expected).all() for tensor in into.values())


def told(capsys, *arguments):
    """Return the output of the command."""
    with pytest.raises(SystemExit) as ended:
        app(list(arguments))
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_command_prints_the_stored_bytes_of_compressed_files(tmp_path, capsys):
    store = CheckpointStore(str(tmp_path), compression="zstd:1")
    store.save({"w": torch.zeros(3 * BLOCK)}, step=1)
    uri, stored = str(tmp_path / "step-1"), data_file(tmp_path, 1).stat().st_size
    assert stored < BLOCK
    (file,) = json.loads(told(capsys, "inspect", uri, "--json"))["files"]
    assert (file["stored"], file["size"]) == (stored, 4096 + 12 * BLOCK)
    assert f"{size(stored)}  1 chunk  zstd, of 12.0 MiB" in told(capsys, "inspect", uri)
    assert json.loads(told(capsys, "verify", uri, "--json"))["bytes"] == stored
    assert f"{size(stored)} read" in told(capsys, "verify", uri)


def held_now():
    """Return open files, threads of all languages, and resident bytes after free memory is returned."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


@pytest.mark.slow
def test_many_saves_leak_no_files_threads_or_memory(tmp_path):
    threads = set(threading.enumerate())
    store = CheckpointStore(str(tmp_path), retention=KeepLast(num=2))
    weight = torch.randn(1 << 18)

    def save(step):
        mode = "async" if step % 2 else "sync"
        store.save({"w": weight, "small": torch.ones(3), "step": step}, step=step, mode=mode).wait(30)

    # A leak grows with each save; other activity of the process does not.
    rounds, held = cases(full=100, sample=20), []
    for step in range(4 * rounds):
        if step % rounds == 0 and step:
            held.append(held_now())
        save(step)
    held.append(held_now())
    # Fewer files are no leak: idle connections of earlier tests are closed after a while.
    assert held[-1][0] <= held[0][0], held
    assert held[-1][1] <= held[0][1], held
    assert min(after[2] - before[2] for before, after in pairwise(held)) < 1 << 20
    store.close()
    assert set(threading.enumerate()) <= threads


def test_a_partial_load_reads_little_more_than_its_tensors(server):
    store = CheckpointStore(server.uri("partial"))
    sizes = {f"model.layer{number}.weight": 2_600_000 + 7_919 * number for number in range(10)}
    store.save({name: torch.arange(float(size)) for name, size in sizes.items()}, step=1)
    wanted = ["model.layer[2-9].*"]
    chosen = list(sizes)[2:]
    into = {name: torch.zeros(size) for name, size in sizes.items()}
    manifest = len(_native.ckpt_manifest_decode(Store(f"{store.uri}/step-1").get("checkpoint.json.zst")))
    before = _native.counters()["bytes_received"]
    store.load("step-1", into, include=wanted)
    read = _native.counters()["bytes_received"] - before
    needed = sum(4 * sizes[name] for name in chosen)
    for name, tensor in into.items():
        assert torch.equal(tensor, torch.arange(float(sizes[name]))) == (name in chosen), name
    # With digests, the first and the last block of the run are read whole.
    assert needed <= read <= 1.05 * needed + manifest
    bare = {name: torch.zeros(size) for name, size in sizes.items()}
    before = _native.counters()["bytes_received"]
    store.load("step-1", bare, include=wanted, check=False)
    assert needed <= _native.counters()["bytes_received"] - before <= 1.05 * needed + manifest
    store.close()


def test_dtypes_are_converted_only_when_asked(store):
    store.save({"w": torch.arange(6.0), "n": torch.arange(3)}, step=1)
    into = {"w": torch.zeros(6, dtype=torch.bfloat16), "n": torch.zeros(3, dtype=torch.int32)}
    with pytest.raises(CheckpointIncompatibleError) as caught:
        store.load("step-1", into)
    for words in ("`w`: dtype F32 in the checkpoint, BF16 here", "`n`: dtype I64", "cast=True"):
        assert words in str(caught.value)
    store.load("step-1", into, cast=True)
    assert torch.equal(into["w"], torch.arange(6.0).bfloat16())
    assert torch.equal(into["n"], torch.arange(3, dtype=torch.int32))


def test_keys_of_one_side_only_are_listed_with_similar_names(store):
    store.save({"model": {"fc1.weight": torch.ones(2), "fc1.bias": torch.ones(2)}, "epoch": 1}, step=1)
    into = {"model": {"fc1.weights": torch.zeros(2), "fc1.bias": torch.zeros(2)}, "epoche": 0}
    with pytest.raises(CheckpointIncompatibleError) as caught:
        store.load("step-1", into)
    message = str(caught.value)
    missing, unexpected = message.index("Not in the checkpoint"), message.index("Only in the checkpoint")
    assert "`model.fc1.weights` (near: `model.fc1.weight`)" in message[missing:unexpected]
    assert "`epoche` (near: `epoch`)" in message[missing:unexpected]
    assert "`model.fc1.weight` (near: `model.fc1.weights`)" in message[unexpected:]
    assert all(tensor.eq(0).all() for tensor in into["model"].values())


def test_tied_and_strided_tensors_round_trip(store, tmp_path):
    weight = torch.randn(64, 48)
    held = {
        "embed": weight,
        "head": weight,
        "turned": weight.t(),
        "rows": weight[::2],
        "cols": weight[:, 5:9],
    }
    store.save(held, step=1)
    records = hocket.ckpt.open(str(tmp_path / "step-1")).manifest.tensors
    assert records["head"].same_as == "embed"
    assert [name for name, record in records.items() if record.same_as] == ["head"]
    tied = torch.zeros(64, 48)
    into = {
        "embed": tied,
        "head": tied,
        "turned": torch.zeros(64, 48).t(),
        "rows": torch.zeros(99, 48)[1:64:2],
    }
    into["cols"] = torch.zeros(4, 64).t()
    store.load("step-1", into)
    for name, tensor in held.items():
        assert torch.equal(into[name], tensor), name


@pytest.mark.parametrize("work", ["convert", "diff", "reshard", "verify"])
def test_an_operation_on_a_checkpoint_replaced_meanwhile_raises(store, tmp_path, work):
    last, out = str(tmp_path / "last"), str(tmp_path / "out")

    def save(step, name):
        state = {name: torch.full((6 << 18,), float(step)) for name in ("a", "b", "c", "d")}  # 6 MiB each
        store.save(state, step=step, name=name, overwrite=True)

    one_at_a_time = threading.Lock()

    def replace(*_):
        with one_at_a_time:
            if hocket.ckpt.open(last).manifest.step == 1:
                save(2, "last")

    memory = {"memory_bytes": 16 << 20}
    run = {
        "convert": lambda: convert(last, out, to="hocket", on_progress=replace, **memory),
        "diff": lambda: diff(last, last, on_progress=replace, **memory),
        "reshard": lambda: reshard(last, out, ranks=2, on_file=replace, **memory),
        "verify": lambda: verify(last, on_file=replace),
    }[work]
    save(1, "one")
    reshard(str(tmp_path / "one"), last, ranks=2)
    with pytest.raises(CheckpointNotFoundError, match="was replaced by another save meanwhile"):
        run()
    assert not (tmp_path / "out/checkpoint.json.zst").exists()
    run()


def test_an_open_checkpoint_reads_the_new_manifest_after_a_replacement(store, tmp_path):
    store.save({"w": torch.ones(BLOCK)}, step=1, name="last")
    opened = hocket.ckpt.open(str(tmp_path / "last"))
    assert opened["w"][0] == 1
    store.save({"w": torch.full((BLOCK,), 2.0)}, step=2, name="last", overwrite=True)
    assert (opened["w"] == 2).all()
    assert opened.manifest.step == 2
    store.save({"w": torch.zeros(BLOCK, dtype=torch.int32)}, step=2, name="last", overwrite=True)
    with pytest.raises(CheckpointIncompatibleError, match=r"was F32 of shape .* and is now I32 of"):
        opened["w"]
    store.save({"other": torch.ones(BLOCK)}, step=3, name="last", overwrite=True)
    with pytest.raises(CheckpointNotFoundError, match="no tensor `w`"):
        opened["w"]
    data_file_of_last = next((tmp_path / "last/data").iterdir())
    data_file_of_last.unlink()
    with pytest.raises(CheckpointNotFoundError, match=data_file_of_last.name):
        opened["other"]
