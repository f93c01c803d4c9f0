"""Retention counts committed checkpoints only, and always keeps one, whatever fails."""

import contextlib
import itertools
import shutil
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from hocket.ckpt import remove, verify
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.errors import CheckpointError, CheckpointTimeoutError
from hocket.ckpt.torch import CheckpointStore
from hocket.ckpt.torch.functions import provide
from hocket.ckpt.torch.ranks.coordinator import Coordinator
from hocket.ckpt.verbs.list import ListedCheckpoint, list_checkpoints
from hocket.ckpt.verbs.retention import CheckpointRetainer, KeepBest, KeepEvery, KeepLast
from hocket.native import Store, _native


def state(step):
    return {"w": torch.full((100,), float(step))}


def steps(prefix):
    return [listing.step for listing in list_checkpoints(prefix) if listing.status == "committed"]


def test_the_last_every_tenth_and_the_best_are_kept(prefix):
    policies = (KeepLast(num=2), KeepEvery(steps=10), KeepBest(metric="loss", mode="min"))
    losses = {3: 0.5, 10: 2.0, 14: 0.1, 17: float("nan"), 20: 0.3, 21: 0.4, 22: 0.2}
    for step, loss in losses.items():
        # A new store for each save, so that retention depends on the listing and not on the store's memory.
        store = CheckpointStore(prefix, retention=policies)
        store.save(state(step), step=step, user={"loss": loss})
        store.close()
    assert steps(prefix) == [10, 14, 20, 21, 22]


def test_all_are_kept_while_none_has_the_metric(tmp_path, caplog):
    store = CheckpointStore(str(tmp_path), retention=KeepBest(metric="acuracy", mode="max"))
    for step in (1, 2, 3):
        store.save(state(step), step=step, user={"accuracy": 1.0 / step})
    assert steps(str(tmp_path)) == [1, 2, 3]
    assert caplog.text.count("no checkpoint has the metric `acuracy`, so `KeepBest` keeps all") == 1
    assert "have `accuracy`" in caplog.text
    for step in (4, 5):
        store.save(state(step), step=step, user={"acuracy": 1.0 / step})
    store.close()
    assert steps(str(tmp_path)) == [4, 5]


def test_partial_and_foreign_checkpoints_are_neither_counted_nor_deleted(prefix):
    Store(prefix).put("notes/readme.txt", b"not ours")
    Store(prefix).put("step-90/data/0badc0de-r00000-000.safetensors", b"x")
    store = provide(prefix, keep_last=1)
    for step in (1, 2):
        store.save(state(step), step=step)
    assert steps(prefix) == [2]
    assert {listing.name for listing in list_checkpoints(prefix)} == {"notes", "step-90", "step-2"}
    store.close()


def test_a_link_to_a_checkpoint_is_not_counted_and_nothing_is_deleted_through_it(tmp_path):
    store = CheckpointStore(str(tmp_path), retention=KeepLast(num=1))
    (tmp_path / "latest").symlink_to("step-2")
    for step in (1, 2):
        store.save(state(step), step=step)
    assert torch.equal(store.load("latest", state(0)).state["w"], state(2)["w"])
    assert [listing.name for listing in list_checkpoints(str(tmp_path))] == ["step-2"]
    with pytest.raises(ValueError, match="symbolic link"):
        remove(f"{tmp_path}/latest")
    assert verify(f"{tmp_path}/step-2").is_sound
    store.close()


def test_a_checkpoint_with_two_names_is_kept_under_both(tmp_path):
    store = CheckpointStore(str(tmp_path), retention=KeepLast(num=1))
    store.save(state(1), step=1)
    shutil.copytree(tmp_path / "step-1", tmp_path / "again")
    CheckpointRetainer(str(tmp_path), [KeepLast(num=1)]).after("step-1")
    assert steps(str(tmp_path)) == [1, 1]
    store.close()


def test_unreadable_and_undeletable_checkpoints_do_not_stop_retention(tmp_path, caplog):
    store = CheckpointStore(str(tmp_path))
    for step in range(4):
        store.save(state(step), step=step, user={"loss": float(step)})
    (tmp_path / "step-0").rename(tmp_path / "a\nb")  # a name that retention refuses to delete
    spoiled = tmp_path / "step-1" / "checkpoint.json.zst"
    spoiled.write_bytes(spoiled.read_bytes()[:-1] + b"x")
    assert steps(str(tmp_path)) == [0, 1, 2, 3]
    retainer = CheckpointRetainer(str(tmp_path), [KeepBest(metric="loss", mode="max")])
    assert retainer.after("step-3") == ["step-2"]
    assert steps(str(tmp_path)) == [0, 1, 3]
    assert "could not delete the old checkpoint" in caplog.text
    assert f"kept `{tmp_path}/step-1`, which cannot be read" in caplog.text
    store.close()


def test_the_checkpoint_just_saved_is_kept_even_with_a_lower_step(tmp_path):
    store = CheckpointStore(str(tmp_path), retention=KeepLast(num=1))
    store.save(state(30), step=30)
    store.save(state(5), step=5)
    assert steps(str(tmp_path)) == [5, 30]
    assert torch.equal(store.load("step-5", state(0)).state["w"], state(5)["w"])
    store.close()


def test_a_name_that_the_next_save_replaces_is_not_deleted(tmp_path):
    store = CheckpointStore(str(tmp_path), retention=KeepLast(num=1))
    store.save(state(3), step=3, name="old")
    is_queued, retain, deleted = threading.Event(), store._retainer.after, []

    def after(name, **options):
        assert is_queued.wait(20)
        deleted.append(retain(name, **options))

    store._retainer.after = after
    store.save(state(9), step=9, mode="async")
    store.save(state(4), step=4, name="old", mode="async", overwrite=True)
    is_queued.set()
    store.close()
    assert deleted == [[], []]  # of the second save's retention, `old` is the last, and `step-9` the highest
    assert steps(str(tmp_path)) == [4, 9]


def test_no_rank_learns_of_a_commit_before_retention_has_ended(tmp_path):
    handles, is_done = [], []

    class Watch:
        def keeps(self, committed, user_of):
            with contextlib.suppress(CheckpointTimeoutError):
                handles[0].wait(0.3)
            is_done.append(handles[0].done())
            return set()

    shared = HashStore()
    stores = [
        CheckpointStore(
            str(tmp_path),
            retention=Watch(),
            coordinator=Coordinator(shared, rank=rank, world_size=2, nonce=b"\0" * 16),
        )
        for rank in (0, 1)
    ]
    for store in reversed(stores):  # rank 0, which commits, is the last to begin
        handles.append(store.save(state(1), step=1, mode="async"))
    for handle in handles:
        handle.wait(20)
    assert is_done == [False]
    for store in reversed(stores):
        store.close()


def test_policies_may_be_one_or_several(tmp_path):
    for retention in (KeepEvery(steps=2), [KeepEvery(steps=2)]):
        store = provide(tmp_path, keep_last=1, retention=retention)
        for step in range(1, 5):
            store.save(state(step), step=step, overwrite=True)
        assert steps(tmp_path) == [2, 4]
        store.close()


@pytest.mark.parametrize("year", [2001, 2099])
def test_a_run_that_restarts_earlier_keeps_its_own_checkpoints_and_the_newest(tmp_path, year):
    for number, step in enumerate((200, 300)):  # written by a node whose clock was right, or years ahead
        save_id, created = f"{number:032x}", f"{year}-01-01T00:00:0{number}.000000Z"
        manifest = Manifest(
            save_id=save_id, step=step, created=created, version="0.1.0", writer="test", world_size=1
        )
        document = _native.ckpt_manifest_encode(manifest.to_document())
        _native.ckpt_commit(f"{tmp_path}/step-{step}", document, save_id)
    store = CheckpointStore(str(tmp_path), retention=KeepLast(num=2))
    for step, left in ((110, [110, 300]), (120, [110, 120, 300]), (130, [120, 130, 300])):
        store.save(state(step), step=step)
        assert steps(str(tmp_path)) == left
    store.close()
    # Another process orders the checkpoints by their times only.
    again = CheckpointStore(str(tmp_path), retention=KeepLast(num=2))
    again.save(state(140), step=140)
    assert steps(str(tmp_path)) == ([130, 140, 300] if year == 2001 else [140, 300])
    again.save(state(310), step=310)
    assert steps(str(tmp_path)) == [140, 310]
    again.close()


@given(st.lists(st.sampled_from(["save", "async", "fail"]), min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
def test_a_committed_checkpoint_remains_whatever_saves_fail(tmp_path_factory, acts):
    prefix = str(tmp_path_factory.mktemp("always"))
    store = CheckpointStore(prefix, retention=KeepLast(num=1))
    last = None
    for step, act in enumerate(acts):
        if act == "fail":
            # A file named like the save's data folder makes the save fail.
            (folder := Store(f"{prefix}/step-{step}")).put("data", b"in the way")
            with pytest.raises((CheckpointError, OSError)):
                store.save(state(step), step=step)
            folder.delete("data")
        else:
            store.save(state(step), step=step, mode="sync" if act == "save" else "async").wait(60)
            last = step
        assert steps(prefix) == ([] if last is None else [last])
    if last is not None:
        assert torch.equal(store.load(f"step-{last}", state(0)).state["w"], state(last)["w"])
    store.close()


def listing(step):
    return ListedCheckpoint(name=f"step-{step}", uri=f"x/step-{step}", status="committed", step=step)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12, unique=True),
    st.integers(1, 5),
    st.integers(1, 7),
    st.randoms(use_true_random=False),
)
def test_policies_keep_the_expected_checkpoints(numbers, num, every, rng):
    committed = [listing(step) for step in sorted(numbers)]
    metrics = {one.name: {"acc": rng.choice([0, 1, 2, 3])} for one in committed}

    def user_of(one):
        return metrics[one.name]

    assert KeepLast(num=num).keeps(committed, user_of) == {f"step-{n}" for n in sorted(numbers)[-num:]}
    assert KeepEvery(steps=every).keeps(committed, user_of) == {
        f"step-{n}" for n in numbers if n % every == 0
    }
    best = KeepBest(metric="acc", num=num, mode="max").keeps(committed, user_of)
    assert len(best) == min(num, len(numbers))
    for name, other in itertools.product(best, set(metrics) - best):
        assert metrics[name]["acc"] >= metrics[other]["acc"]


def test_the_newest_stated_direction_decides_without_a_mode(caplog):
    values = {1: 0.3, 2: 0.9, 3: 0.5}
    users = {f"step-{step}": {"acc": value} for step, value in values.items()}
    committed, policy = [listing(step) for step in values], KeepBest(metric="acc")
    for _ in range(2):
        assert policy.keeps(committed, lambda one: users[one.name]) == set(users)
    assert caplog.text.count("no checkpoint says whether more of the metric `acc` is better") == 1
    users["step-1"]["higher_is_better"] = {"acc": False}
    assert policy.keeps(committed, lambda one: users[one.name]) == {"step-1"}
    users["step-3"]["higher_is_better"] = {"acc": True, "loss": False}
    assert policy.keeps(committed, lambda one: users[one.name]) == {"step-2"}
    assert KeepBest(metric="acc", mode="min").keeps(committed, lambda one: users[one.name]) == {"step-1"}


@pytest.mark.parametrize(
    ("policy", "options"),
    [(KeepLast, {"num": 0}), (KeepEvery, {"steps": -1}), (KeepBest, {"metric": "x", "mode": "up"})],
)
def test_invalid_policies_raise(policy, options):
    with pytest.raises(ValueError, match="expected"):
        policy(**options)
