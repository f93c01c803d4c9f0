"""Published weights on every service: one publisher at a time, also when a reply gets lost."""

from __future__ import annotations

import pytest
import torch

from hocket.ckpt import FolderFollower, Follower, list_checkpoints
from hocket.ckpt.errors import CheckpointExistsError
from hocket.ckpt.torch import Publisher
from support.proxy import Fate, Proxy


def weights(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((300, 100), float(step)), "bias": (torch.arange(7) + step).bfloat16()}


def holds(follower: Follower, step: int) -> bool:
    return follower.step == step and (follower.arrays["w"] == weights(step)["w"].numpy()).all()


def test_versions_are_followed_and_a_publisher_that_comes_back_is_refused(place: str, tmp_path) -> None:
    follower, folder = Follower(place), FolderFollower(place, tmp_path / "served")
    with Publisher(place, full_every=3, keep_full=1) as old, Publisher(place, full_every=3) as new:
        for step in range(1, 8):
            old.publish(weights(step), step=step)
            for each in (follower, folder):
                update = each.update()
                assert update is not None
                assert (update.step, update.num_deltas) == (step, int(step % 3 != 1))
            assert holds(follower, step)
        assert [one.name for one in list_checkpoints(place)] == ["version-7"]
        new.publish(weights(8), step=8)
        for step in (8, 9):
            with pytest.raises(CheckpointExistsError, match="has taken over"):
                old.publish(weights(step + 50), step=step)
        new.publish(weights(9), step=9)
    assert [one.name for one in list_checkpoints(place)] == ["version-7", "version-8", "version-9"]
    for each in (follower, Follower(place)):
        each.update()
        assert holds(each, 9)


def test_a_version_whose_record_was_written_without_a_reply_is_published(place: str, proxy: Proxy) -> None:
    def fate(method: str, url: str) -> Fate:
        return "lose" if method in ("PUT", "POST") and "newest.json" in url and not proxy.lost else "pass"

    with Publisher(place) as publisher:
        publisher.publish(weights(1), step=1)
        proxy.fate = fate
        publisher.publish(weights(2), step=2)
        assert len(proxy.lost) == 1
        publisher.publish(weights(3), step=3)
    follower = Follower(place)
    follower.update()
    assert holds(follower, 3)
