"""Followers of uncommon trainings: other shapes, new and frozen tensors, moved folders, removed versions."""

import shutil

import numpy as np
import pytest

import hocket.ckpt
from hocket.ckpt import FolderFollower, Follower, list_checkpoints
from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointNotFoundError
from hocket.native import Store, _native

torch = pytest.importorskip("torch")

from hocket.ckpt.torch import Publisher, TensorFollower  # noqa: E402 - after the check for torch


def bytes_of(memory):
    return np.ascontiguousarray(memory).tobytes()


def test_tensors_may_change_their_shape_and_dtype_and_appear_and_vanish(tmp_path):
    uri = tmp_path / "weights"
    states = [
        {"a": torch.ones(3, 4), "b": torch.zeros(9)},
        {"a": torch.ones(5, 4), "b": torch.ones(9)},
        {"a": torch.ones(5, 4).bfloat16(), "b": torch.ones(9), "new": torch.ones(2)},
        {"a": torch.ones(5, 4).bfloat16(), "new": torch.ones(2)},
        {"a": torch.zeros(5, 4).bfloat16(), "new": torch.ones(2)},
    ]
    own, served = Follower(uri), FolderFollower(uri, tmp_path / "served")
    into = {"a": torch.zeros(3, 4)}
    array = {"a": np.zeros((3, 4), np.float32)}
    fixed = [TensorFollower(uri, into), Follower(uri, into=array)]
    with Publisher(uri) as publisher:
        for step, state in enumerate(states):
            publisher.publish(state, step=step)
            for follower in (own, served):
                assert follower.update().is_whole == (step < 4)
            assert own.arrays.keys() == set(hocket.ckpt.open(tmp_path / "served")) == state.keys()
            for name, tensor in state.items():
                expected = tensor.view(torch.uint8).numpy().tobytes()
                assert bytes_of(own.arrays[name]) == expected
                assert bytes_of(hocket.ckpt.open(tmp_path / "served")[name]) == expected
            for follower in fixed:
                if step == 0:
                    follower.update()
                else:
                    with pytest.raises(CheckpointIncompatibleError, match=r"`a`.*5, 4"):
                        follower.update()
                assert follower.step == 0
    assert into["a"].eq(1).all()
    assert (array["a"] == 1).all()


def test_frozen_weights_take_few_bytes(tmp_path):
    frozen, head = torch.randn(1 << 20).bfloat16(), torch.zeros(64)
    with Publisher(tmp_path) as publisher:
        for step in range(3):
            publisher.publish({"frozen": frozen, "head": head + step}, step=step)
    whole, *deltas = [one.num_bytes for one in list_checkpoints(tmp_path)]
    assert whole > 2 << 20
    assert max(deltas) < 10_000


def test_a_renamed_folder_is_followed_and_its_versions_go_on(tmp_path):
    served = tmp_path / "served"
    with Publisher(tmp_path / "old") as publisher:
        for step in (1, 2):
            publisher.publish({"w": torch.full((500,), step)}, step=step)
            FolderFollower(tmp_path / "old", served).update()
    shutil.move(tmp_path / "old", tmp_path / "new")
    follower, before = Follower(tmp_path / "new"), Follower(tmp_path / "old")
    with pytest.raises(CheckpointNotFoundError, match="old` holds no version"):
        before.update()
    assert follower.update().step == 2
    with Publisher(tmp_path / "new") as publisher:
        publisher.publish({"w": torch.full((500,), 3)}, step=3)
    assert follower.update().step == 3
    # The folder's file is of other versions, as far as its follower knows, and is read whole.
    assert FolderFollower(tmp_path / "new", served).update().is_whole
    assert (hocket.ckpt.open(served)["w"] == 3).all()


def test_what_killed_publishers_left_is_removed_with_the_versions_of_its_time(prefix):
    with Publisher(prefix, full_every=1, keep_full=9) as publisher:
        for step in (1, 2, 5):
            publisher.publish({"w": torch.full((500,), step)}, step=step)
    for step in (2, 5):  # as if their publisher had been killed before the commit
        Store(prefix).delete(f"version-{step}/checkpoint.json.zst")
    Store(prefix).put("notes/data/readme", b"not a version")
    with Publisher(prefix, full_every=1, keep_full=2) as publisher:
        left = []
        for step in (3, 4, 6, 7):
            publisher.publish({"w": torch.full((500,), step)}, step=step)
            left.append([one.step or one.status for one in list_checkpoints(prefix) if one.name != "notes"])
    # Those up to the oldest version that stays are removed with the versions before it.
    assert left == [["partial", "partial", 1, 3], ["partial", 3, 4], ["partial", 4, 6], [6, 7]]
    assert Store(prefix).get("notes/data/readme") == b"not a version"


def test_followers_only_read_the_store(s3d_faults, monkeypatch):
    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    uri = server.uri("weights")
    followers = [Follower(uri), TensorFollower(uri, {"w": torch.zeros(500)})]
    with Publisher(uri) as publisher:
        for step in (1, 2):
            publisher.publish({"w": torch.full((500,), float(step))}, step=step)
            server.reset()
            for follower in followers:
                assert follower.update().is_whole == (step == 1)
            operations = set(server.stats()["requests"])
            assert {"GetObject"} <= operations <= {"GetObject", "HeadObject", "ListObjectsV2"}


@pytest.mark.parametrize("call", ["check_boxes", "apply_delta", "read_boxes"])
@pytest.mark.parametrize("kind", ["arrays", "folder"])
def test_versions_that_are_removed_while_they_are_read_are_passed_over(
    prefix, tmp_path, monkeypatch, call, kind
):
    """A slow follower: its next versions are removed just before it reads them."""
    publisher = Publisher(prefix, full_every=2, keep_full=1)
    publisher.publish({"w": torch.full((500,), 1.0)}, step=1)
    follower = Follower(prefix) if kind == "arrays" else FolderFollower(prefix, tmp_path / "served")
    if call != "read_boxes":
        follower.update()
    publisher.publish({"w": torch.full((500,), 2.0)}, step=2)
    native, num_removed = _native.Checkpoint, 0

    class SlowCheckpoint:
        def __init__(self, uri):
            self._opened = native(uri)

        def __getattr__(self, name):
            nonlocal num_removed
            if name == call and num_removed == 0:
                num_removed += 1
                for step in (3, 4, 5):
                    publisher.publish({"w": torch.full((500,), float(step))}, step=step)
            return getattr(self._opened, name)

    with monkeypatch.context() as patch:
        patch.setattr(_native, "Checkpoint", SlowCheckpoint)
        update = follower.update()
    publisher.close()
    assert num_removed == 1
    # On a disk, files that were opened before their removal are still read.
    assert update.step in (2, 5)
    follower.update()
    held = follower.arrays["w"] if kind == "arrays" else hocket.ckpt.open(tmp_path / "served")["w"]
    assert (held == 5).all()
    assert [one.step for one in list_checkpoints(prefix)] == [5]
