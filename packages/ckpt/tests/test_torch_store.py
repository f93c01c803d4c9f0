"""Saving and loading in one process: round trips, asynchronous saves, and errors with their messages."""

import copy
import operator
import os
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore
from torch.nn.parameter import UninitializedParameter

import hocket.ckpt
from hocket.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointPartialError,
    CheckpointStateError,
    CheckpointTimeoutError,
)
from hocket.ckpt.torch import CheckpointStore, load, provide, save
from hocket.ckpt.torch.layout import DTYPES
from hocket.ckpt.torch.ranks.coordinator import Coordinator
from hocket.ckpt.torch.saving.plan import SavePlanner, StagingBuffer, stage
from hocket.native import _native


def some(dtype, *shape):
    numbers = torch.arange(int(torch.Size(shape).numel()) if shape else 1).reshape(shape)
    return numbers.to(torch.float32).to(dtype)


def same_bytes(one, other):
    return torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


def test_tensors_of_every_dtype_and_layout_round_trip(tmp_path):
    store = CheckpointStore(str(tmp_path))
    state = {str(dtype): some(dtype, 5, 7) for dtype in DTYPES}
    state |= {"0-d": torch.tensor(3.5), "empty": torch.zeros(0, 4), "column": torch.randn(6, 5).t()}
    state |= {
        "big": torch.randn(700, 700),
        "view": torch.randn(40, 30)[3:20:2, 4:9],
        "complex": torch.zeros(()),
    }
    state["conjugate"] = torch.randn(3, 2, dtype=torch.complex64).conj()
    store.save(state, step=0)
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    into["column"], into["view"] = torch.empty(6, 5).t(), torch.zeros(99, 99)[1:35:4, 2:12:2]
    assert store.load("step-0", into).state is not into
    for name, tensor in state.items():
        assert same_bytes(into[name], tensor.resolve_conj()), name


def test_values_round_trip_with_their_types_and_replace_those_of_the_state(tmp_path):
    store = CheckpointStore(str(tmp_path))
    values = {
        "a": (1, [2.5, None]),
        "b": b"\x00",
        "c": 2**70,
        "d": {3: "x"},
        "e": [{}, []],
        "f": float("-inf"),
    }
    store.save({"model": {"w": torch.ones(2)}, "loop": values, "lr": 0.1}, step=4, user=[1, (2,)])
    loaded = store.load("step-4", {"model": {"w": torch.zeros(2)}, "loop": {"a": 1}, "lr": None})
    assert loaded.state["loop"] == values
    assert loaded.state["lr"] == 0.1
    assert (loaded.name, loaded.step, loaded.user, loaded.per_rank) == ("step-4", 4, [1, (2,)], None)


def test_changes_after_an_asynchronous_save_are_not_in_it(tmp_path):
    store = CheckpointStore(str(tmp_path))
    weight, column, losses = torch.full((1 << 20,), 1.0), torch.ones(500, 400).t(), [1, [2]]
    handles = []
    for number in (1, 2, 3):
        weight.fill_(number)
        column.fill_(number)
        losses[1][0] = number
        state = {"w": weight, "c": column, "losses": losses}
        handles.append(store.save(state, step=number, mode="async"))
        weight.fill_(-1)
        column.fill_(-1)
        losses[1][0] = -1
    for handle in handles:
        handle.wait(30)
        assert handle.done()
    for number in (1, 2, 3):
        loaded = store.load(
            f"step-{number}", {"w": torch.zeros(1 << 20), "c": torch.zeros(400, 500), "losses": []}
        )
        assert loaded.state["w"].eq(number).all()
        assert loaded.state["c"].eq(number).all()
        assert loaded.state["losses"] == [1, [number]]
    assert store.num_plans == 1
    assert store._staging.num_allocations == 1
    store.close()


def test_threads_that_share_a_store_each_commit_their_own_bytes(tmp_path):
    store = CheckpointStore(str(tmp_path), timeout_s=60)

    def save(number):
        for step in range(number, 24, 6):
            store.save({"w": torch.full((1 << 18,), float(step))}, step=step, mode="async").wait(60)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(save, range(6)))
    store.close()
    found = {entry.step: hocket.ckpt.open(entry.uri)["w"] for entry in store.list()}
    assert sorted(found) == list(range(24))
    assert all((weight == step).all() for step, weight in found.items())


def test_a_relative_prefix_is_resolved_when_the_store_is_made(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    store, gate = CheckpointStore("runs", timeout_s=60), threading.Event()
    store._save_queue._worker.submit(lambda: gate.wait(60))
    store.save({"w": torch.ones(3)}, step=1, mode="async")
    save({"w": torch.ones(3)}, "one", step=1)
    monkeypatch.chdir(elsewhere)
    gate.set()
    store.close()
    save({"w": torch.zeros(3)}, "one", step=2)
    assert load("one", {"w": torch.ones(3)}).step == 2
    assert [entry.uri for entry in store.list()] == [f"{tmp_path}/runs/step-1"]
    assert {entry.name for entry in CheckpointStore("..").list() if entry.step == 1} == {"one"}
    assert CheckpointStore("s3://bucket/runs/").uri == "s3://bucket/runs"


def test_staged_tensors_have_the_layout_of_their_file(tmp_path):
    state = {
        "b": torch.arange(1001),
        "a": torch.randn(33, 3, dtype=torch.float64),
        "z": torch.randn(7).bfloat16(),
        "m": torch.randn(5),
        "flag": torch.tensor(True),
    }
    snapshot = SavePlanner(rank=0, world_size=1).snapshot(state)
    entries, held = stage(snapshot, StagingBuffer())
    assert [entry.part.name for entry in entries] == ["a", "b", "m", "z", "flag"]
    starts = [entry.address for entry in entries]
    ends = [entry.address + entry.num_bytes for entry in entries]
    assert starts[0] % 4096 == 0
    assert starts[1:] == ends[:-1]
    del held


def test_the_staging_buffer_is_reused_for_other_layouts(tmp_path):
    store = CheckpointStore(str(tmp_path))
    layouts = [
        {"a": torch.randn(300, 200), "b": torch.arange(7)},
        {"a": torch.randn(200, 300), "b": torch.arange(7)},  # the same number of bytes in another shape
        {"a": torch.randn(200, 300).t().bfloat16(), "c": torch.tensor(2.5)},
        {"note": "no tensors"},
        {"a": torch.randn(300, 200), "b": torch.arange(7)},
    ]
    kept = [{name: copy.deepcopy(value) for name, value in state.items()} for state in layouts]
    for step, state in enumerate(layouts):
        handle = store.save(state, step=step, mode="async")
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    handle.wait(60)
    assert store._staging.num_allocations == 1
    for step, (state, saved) in enumerate(zip(layouts, kept, strict=True)):
        loaded = store.load(f"step-{step}", state).state
        for name, value in saved.items():
            assert (same_bytes if isinstance(value, torch.Tensor) else operator.eq)(loaded[name], value), name
    store.close()


def test_a_default_device_and_inference_mode_change_neither_saves_nor_loads(tmp_path):
    store, state = CheckpointStore(str(tmp_path)), {"w": torch.arange(300.0), "none": torch.zeros(0, 3)}
    with torch.device("meta"), torch.inference_mode():
        store.save(state, step=1, mode="async").wait()
    with torch.no_grad():
        state["w"] += 1
    store.save(state, step=2, mode="async").wait()
    for step in (1, 2):
        into = {"w": torch.zeros(300, dtype=torch.float64), "none": torch.ones(0, 3)}
        with torch.device("meta"):
            store.load(f"step-{step}", into, cast=True)
        assert torch.equal(into["w"], torch.arange(300.0, dtype=torch.float64) + step - 1)


def test_the_staging_buffer_keeps_to_its_budget(tmp_path):
    budget = 1 << 16
    store = CheckpointStore(str(tmp_path), staging_bytes=budget)
    fits, over = torch.arange(budget // 8), torch.arange(budget // 8 + 1)
    store.save({"w": fits}, step=0, mode="async").wait(60)
    refused = store.save({"w": over}, step=1, mode="async")
    with pytest.raises(CheckpointStateError, match=f"writes {over.nbytes} bytes.* {budget}.*`staging_bytes`"):
        refused.wait(60)
    assert [entry.step for entry in store.list() if entry.status != "foreign"] == [0]
    store.save({"w": over}, step=1)  # a synchronous save writes from the tensor's own memory
    store.save({"w": fits + 1}, step=2, mode="async").wait(60)
    for step, saved in enumerate((fits, over, fits + 1)):
        assert torch.equal(store.load(f"step-{step}", {"w": torch.zeros_like(saved)}).state["w"], saved)
    assert store._staging.num_allocations == 1
    assert budget <= store._staging._buffer.untyped_storage().nbytes() <= budget + 4096
    store.close()


def test_background_writing_changes_neither_the_bytes_nor_the_callers_priority(tmp_path):
    memory = torch.randn(1 << 22)
    priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    for compression, name in (
        (None, "data/f.safetensors"), ((1, False), "data/f.safetensors.blocks"), ((1, True), "data/f.blocks"),
    ):  # fmt: skip
        files = [
            _native.ckpt_write_file(
                str(tmp_path / f"{compression}-{background}"), name,
                entries=[("w", "F32", tuple(memory.shape), memory.data_ptr(), memory.nbytes)],
                metadata={}, compression=compression, background=background,
            )
            for background in (False, True)
        ]  # fmt: skip
        assert files[0] == files[1]
        assert (tmp_path / f"{compression}-False" / name).read_bytes() == (
            tmp_path / f"{compression}-True" / name
        ).read_bytes()
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == priority


def test_a_failed_asynchronous_save_raises_in_wait(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save({"w": torch.ones(3)}, step=1)
    handle = store.save({"w": torch.ones(3)}, step=1, mode="async")
    with pytest.raises(CheckpointExistsError, match="step-1"):
        handle.wait(30)
    store.save({"w": torch.ones(3)}, step=2, mode="async").wait(30)
    store.close()


def test_a_failure_without_wait_is_raised_by_the_next_call(tmp_path):
    store = CheckpointStore(str(tmp_path))
    for step in (1, 3):
        store.save({"w": torch.ones(3)}, step=step)
    failed = store.save({"w": torch.ones(3)}, step=1, mode="async")
    with pytest.raises(CheckpointError, match=r"step-1`, step 1, failed, .*CheckpointExistsError"):
        store.save({"w": torch.ones(3)}, step=2)
    assert [entry.step for entry in store.list()] == [1, 2, 3]
    with pytest.raises(CheckpointExistsError):
        failed.wait(60)
    store.save({"w": torch.ones(3)}, step=3, mode="async")
    with pytest.raises(CheckpointError, match="step-3`, step 3, failed"):
        store.close()
    store.close()


def test_a_changed_layout_is_planned_again(tmp_path):
    store = CheckpointStore(str(tmp_path))
    for step, rows in enumerate([3, 3, 4, 4]):
        store.save({"w": torch.ones(rows)}, step=step)
    assert store.num_plans == 2


def test_tied_tensors_are_written_once_and_stay_tied(tmp_path):
    store = CheckpointStore(str(tmp_path))
    weight = torch.randn(300, 300)
    store.save({"a": weight, "b": weight, "c": weight[:100]}, step=0)
    written = sum(path.stat().st_size for path in (tmp_path / "step-0/data").iterdir())
    assert weight.nbytes * 4 // 3 < written < weight.nbytes * 1.5
    tied = torch.zeros(300, 300)
    store.load("step-0", {"a": tied, "b": tied, "c": torch.zeros(100, 300)})
    assert torch.equal(tied, weight)
    apart = {"a": torch.zeros(300, 300), "b": torch.zeros(300, 300), "c": torch.zeros(100, 300)}
    store.load("step-0", apart)
    assert torch.equal(apart["b"], weight)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_conjugate_view_is_not_stored_as_an_alias(tmp_path, mode):
    store = CheckpointStore(str(tmp_path))
    t = torch.randn(300, dtype=torch.complex64)
    state = {"t": t, "conj": t.conj(), "imag": t.imag, "minus": t.conj().imag, "again": t.conj()}
    before = {name: tensor.resolve_conj().resolve_neg().clone() for name, tensor in state.items()}
    store.save(state, step=0, mode=mode).wait(60)
    into = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    store.load("step-0", into)
    assert all(torch.equal(into[name], tensor) for name, tensor in before.items())
    views = {"conj": into["t"].conj(), "minus": torch.zeros(300, dtype=torch.complex64).conj().imag}
    store.load("step-0", views, include=list(views))
    assert all(torch.equal(tensor, before[name]) for name, tensor in views.items())
    store.close()


def test_a_flipped_byte_raises_with_its_tensor_and_offset(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save({"a": torch.ones(1000), "b": torch.ones(1 << 20)}, step=0)
    (file,) = (tmp_path / "step-0/data").iterdir()
    content = bytearray(file.read_bytes())
    content[4096 + (3 << 20)] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match="Tensor `b`") as caught:
        store.load("step-0", {"a": torch.zeros(1000), "b": torch.zeros(1 << 20)})
    assert caught.value.file == f"data/{file.name}"
    assert caught.value.offset == 3 << 20
    assert file.name in str(caught.value)
    assert str(3 << 20) in str(caught.value)
    assert store.load("step-0", {"a": torch.zeros(1000)}, strict=False).state["a"].eq(1).all()
    store.load("step-0", {"a": torch.zeros(1000), "b": torch.zeros(1 << 20)}, check=False)


def test_an_unfinished_save_does_not_load_and_can_be_repeated(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save({"a": torch.ones(10)}, step=0)
    (tmp_path / "step-0/checkpoint.json.zst").unlink()
    assert [entry.status for entry in store.list()] == ["partial"]
    with pytest.raises(CheckpointPartialError, match="step-0"):
        store.load("step-0", {"a": torch.ones(10)})
    store.save({"a": torch.ones(10)}, step=0)
    assert [entry.status for entry in store.list()] == ["committed"]


def test_a_truncated_manifest_raises(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save({"a": torch.ones(1000)}, step=0)
    manifest = tmp_path / "step-0/checkpoint.json.zst"
    manifest.write_bytes(manifest.read_bytes()[:-40])
    with pytest.raises(CheckpointCorruptError):
        store.load("step-0", {"a": torch.ones(1000)})


def test_checkpoints_under_a_prefix_are_listed_and_deleted(tmp_path):
    store = provide(f"{tmp_path}/run/")
    assert store.list() == []
    for step in (3, 20, 1):
        store.save({"a": torch.ones(1)}, step=step)
    (tmp_path / "run/notes").mkdir()
    assert [(entry.step, entry.status) for entry in store.list()] == [
        (None, "foreign"),
        (1, "committed"),
        (3, "committed"),
        (20, "committed"),
    ]
    store.delete(3)
    assert [entry.step for entry in store.list()] == [None, 1, 20]
    with pytest.raises(CheckpointNotFoundError, match="step 3"):
        store.delete(3)
    with pytest.raises(CheckpointNotFoundError, match="step-3"):
        store.load("step-3", {})


def test_functions_save_and_load_by_uri(tmp_path):
    save({"a": torch.ones(2)}, f"{tmp_path}/x", step=1, mode="async").wait(30)
    assert load(f"{tmp_path}/x", {"a": torch.zeros(2)}).state["a"].eq(1).all()
    with pytest.raises(CheckpointExistsError):
        save({"a": torch.ones(2)}, f"{tmp_path}/x", step=2)
    save({"a": torch.ones(2)}, tmp_path / "y", step=1)
    store = CheckpointStore(tmp_path)
    for opened in (
        load(tmp_path / "y", {"a": torch.zeros(2)}),
        store.load(tmp_path / "y", {"a": torch.zeros(2)}),
    ):
        assert opened.state["a"].eq(1).all()
    assert store.uri == str(tmp_path)


@pytest.mark.parametrize("name", ["..%2f..%2fx", "a%41", "50%", "x#1", "q?x", "a b"])
def test_a_name_under_a_file_uri_is_not_percent_decoded(tmp_path, name):
    uri = f"file://{tmp_path}/the%20runs"
    store = CheckpointStore(uri + "/")
    store.save({"w": torch.ones(2)}, step=1, name=name)
    assert [found.name for found in (tmp_path / "the runs").iterdir()] == [name]
    (listing,) = hocket.ckpt.list_checkpoints(uri)
    assert (listing.name, listing.uri) == (name, f"{tmp_path}/the runs/{name}")
    for source in (name, f"{uri}/{quote(name, safe='')}"):
        assert store.load(source, {"w": torch.zeros(2)}).name == name
    hocket.ckpt.remove(f"{uri}/{quote(name, safe='')}")
    save({"w": torch.ones(2)}, f"{uri}/{quote(name, safe='')}")
    assert [found.name for found in store.list()] == [name]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, 2).to_sparse(), "layout `torch.sparse_coo`"),
        (torch.zeros(2, device="meta"), "`meta` device"),
        (torch.zeros(2, dtype=torch.complex128), "dtype `torch.complex128`"),
        (torch.zeros([1] * 65), "has 65 dims; expected at most 64"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "dtype `torch.float4_e2m1fn_x2`"),
    ],
)
def test_unsupported_tensors_raise_with_their_name(tmp_path, tensor, message):
    with pytest.raises(CheckpointStateError, match=f"`model.w` .*{re.escape(message)}"):
        CheckpointStore(str(tmp_path)).save({"model": {"w": tensor}}, step=0)
    assert not list(tmp_path.iterdir())


def freed():
    tensor = torch.ones(4000)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake():
    with FakeTensorMode():
        return torch.ones(4000)


def nested():
    with warnings.catch_warnings(action="ignore"):  # torch warns that nested tensors are a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def test_tensors_without_memory_or_shape_raise_in_save_and_load(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save({"model": {"w": torch.ones(4000)}}, step=0)
    for make, message in (
        (freed, "`model.w` reaches over 16000 bytes of a storage that has 0"),
        (fake, "`model.w` is a fake tensor on `cpu`"),
        (nested, "`model.w` is a nested tensor"),
        (UninitializedParameter, "`model.w` is not initialised"),
    ):
        with pytest.raises(CheckpointStateError, match=message):
            store.save({"model": {"w": make()}}, step=1)
        with pytest.raises(CheckpointStateError, match=message):
            store.load("step-0", {"model": {"w": make()}})
    with pytest.raises(CheckpointStateError, match=r"`model\.w` is an expanded view"):
        store.load("step-0", {"model": {"w": torch.zeros(1).expand(4000)}})
    assert [entry.step for entry in store.list()] == [0]


@pytest.mark.parametrize("name", ["a/b", "..", "a\\b", "a\nb", "\ud800"])
def test_a_name_of_several_path_components_raises(tmp_path, name):
    with pytest.raises(ValueError, match="one path component"):
        CheckpointStore(str(tmp_path)).save({}, step=0, name=name)


def test_numbers_beyond_the_formats_range_raise_before_anything_is_written(tmp_path):
    store = CheckpointStore(str(tmp_path))
    with pytest.raises(ValueError, match=r"`step` is 18446744073709551616; expected .* 2\^64 - 1"):
        store.save({"w": torch.zeros(2)}, step=2**64)
    with pytest.raises(CheckpointStateError, match="`model` holds tensors under an integer of 71 bits"):
        store.save({"model": {2**70: torch.zeros(2)}}, step=0)
    assert store.list() == []
    store.save({"model": {-(2**63): torch.ones(2)}}, step=2**64 - 1)
    into = {"model": {-(2**63): torch.zeros(2)}}
    assert store.load(store.list()[0].name, into).step == 2**64 - 1
    assert into["model"][-(2**63)].eq(1).all()


def test_a_rank_missing_in_a_load_is_named(tmp_path):
    CheckpointStore(tmp_path).save({}, step=1)
    coordinator = Coordinator(HashStore(), rank=0, world_size=2, nonce=b"\0" * 16)
    store = CheckpointStore(tmp_path, timeout_s=0.01, coordinator=coordinator)
    said = "^the load of `.*` failed: rank 1 did not report its part of the load of `.*` within"
    with pytest.raises(CheckpointTimeoutError, match=said):
        store.load("step-1", {})


def test_the_policy_for_per_rank_values_is_in_the_manifest(tmp_path):
    store = CheckpointStore(str(tmp_path))
    for policy in ("reseed", "require", "drop"):
        store.save({}, step=0, name=policy, per_rank={"seed": 1}, per_rank_policy=policy)
        own = hocket.ckpt.open(str(tmp_path / policy)).manifest.per_rank
        assert (own.policy, own.ranks) == (policy, ({"seed": 1},))
    store.save({}, step=0, name="unsaid", per_rank={"seed": 1})
    assert hocket.ckpt.open(str(tmp_path / "unsaid")).manifest.per_rank.policy == "reseed"
    with pytest.raises(ValueError, match=r"`per_rank_policy` is 'keep'; expected 'reseed'"):
        store.save({}, step=0, name="bad", per_rank={"seed": 1}, per_rank_policy="keep")
    assert not (tmp_path / "bad").exists()


def test_user_values_are_copied_and_checked_before_anything_is_written(tmp_path):
    store = CheckpointStore(str(tmp_path))
    user = {"tags": ["a"]}
    handle = store.save({}, step=0, user=user, mode="async")
    user["tags"].append("b")
    handle.wait(30)
    assert store.load("step-0", {}).user == {"tags": ["a"]}
    with pytest.raises(CheckpointStateError, match="`user`"):
        store.save({}, step=1, user=object())
    assert not (tmp_path / "step-1").exists()
    store.close()
