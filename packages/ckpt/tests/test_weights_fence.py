"""Two publishers of one prefix: the one that begins last goes on, and the other one is refused by name."""

import sys

import numpy as np
import pytest

from hocket.ckpt import Follower, list_checkpoints
from hocket.ckpt.document.manifest import SaveSummary
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointExistsError
from hocket.ckpt.verbs.remove import collect_garbage
from hocket.native import Store

torch = pytest.importorskip("torch")

from hocket.ckpt.torch import Publisher  # noqa: E402 - after the check for torch

REFUSED = "another publisher, on host .* has taken over"


def state_of(step, run=0):
    """Return the weights of a step in a run; two runs differ in all of them."""
    return {"w": torch.arange(900.0) + 1000 * run + step, "step": torch.tensor(step)}


def assert_follows(follower, step, run):
    assert follower.step == step
    np.testing.assert_array_equal(follower.arrays["w"], state_of(step, run)["w"].numpy())


@pytest.mark.parametrize("unfenced", [False, True])
def test_a_publisher_that_comes_back_is_refused_by_name(prefix, unfenced):
    with Publisher(prefix, unfenced=unfenced) as old, Publisher(prefix, unfenced=unfenced) as new:
        for step in (1, 2, 3):
            old.publish(state_of(step), step=step)
        follower = Follower(prefix)
        follower.update()
        new.publish(state_of(2, run=1), step=2)
        for step in (4, 5):
            with pytest.raises(CheckpointExistsError, match=REFUSED):
                old.publish(state_of(step), step=step)
        assert follower.update().is_whole
        assert_follows(follower, 2, run=1)
        new.publish(state_of(3, run=1), step=3)
        assert follower.update().num_deltas == 1
        assert_follows(follower, 3, run=1)
        assert [one.name for one in list_checkpoints(prefix)] == ["version-1", "version-2", "version-3"]
        assert [one.status for one in list_checkpoints(prefix)] == ["committed"] * 3
        assert collect_garbage(prefix, min_age_s=0).garbage == ()


class Interruption:
    """Calls a function before the `number`-th call of this thread that can change or read the prefix."""

    OPENS = SaveSummary.read.__code__  # the constructor that it calls is no event

    def __init__(self, number, run):
        self.left, self._run = number, run

    def __call__(self, frame, event, called):
        is_ours = event == "c_call" and (
            called.__name__.startswith("ckpt_") or isinstance(getattr(called, "__self__", None), Store)
        )
        if is_ours or (event == "call" and frame.f_code is self.OPENS):
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                self._run()


@pytest.mark.slow
@pytest.mark.parametrize("first", [2, 4, 6])
def test_a_publisher_that_is_overtaken_at_any_point_publishes_nothing(tmp_path, first):
    """The second publisher begins before, with or after the step that the first one publishes."""
    num_refused, number = 0, 1
    while True:
        uri = str(tmp_path / f"weights-{number}")
        follower = Follower(uri)
        with Publisher(uri, full_every=4) as old, Publisher(uri) as new:
            for step in (1, 2, 3):
                old.publish(state_of(step), step=step)
            follower.update()

            def overtake(new=new, follower=follower, uri=uri):
                new.publish(state_of(first, run=1), step=first)
                for each in (follower, Follower(uri)):
                    each.update()
                    assert_follows(each, first, run=1)

            interruption = Interruption(number, overtake)
            sys.setprofile(interruption)
            refused = None
            try:
                old.publish(state_of(4), step=4)
            except CheckpointExistsError as error:
                refused = error
            finally:
                sys.setprofile(None)
            if interruption.left > 0:
                break
            num_refused += refused is not None
            for each in (follower, Follower(uri)):
                each.update()
                assert_follows(each, first, run=1)
            new.publish(state_of(first + 2, run=1), step=first + 2)
            for each in (follower, Follower(uri)):
                each.update()
                assert_follows(each, first + 2, run=1)
            with pytest.raises(CheckpointExistsError, match=REFUSED):
                old.publish(state_of(20), step=20)
        number += 1
    assert num_refused >= 8


def test_a_damaged_record_is_named_and_a_missing_one_is_no_hindrance_to_followers(prefix):
    follower = Follower(prefix)
    with Publisher(prefix) as publisher:
        publisher.publish(state_of(1), step=1)
        for text in (
            b"",
            b"[]",
            b"{}",
            b'{"publisher": "a", "host": "b", "version": "c", "step": "1", "save_id": 2}',
        ):
            Store(prefix).put("newest.json", text)
            with pytest.raises(CheckpointCorruptError, match=r"newest\.json.*expected the record"):
                follower.update()
            with pytest.raises(CheckpointCorruptError, match=r"newest\.json"):
                publisher.publish(state_of(2), step=2)
        Store(prefix).delete("newest.json")
        assert follower.update().step == 1
        with pytest.raises(
            CheckpointExistsError, match=r"newest\.json` was removed while this publisher ran"
        ):
            publisher.publish(state_of(2), step=2)
    with Publisher(prefix) as publisher:
        publisher.publish(state_of(2), step=2)
    assert follower.update().step == 2


@pytest.mark.parametrize("kind", ["lost_reply", "conflict", "500"])
def test_a_record_whose_write_is_disturbed_names_the_version(s3d_faults, monkeypatch, kind):
    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    uri = server.uri("weights")
    with Publisher(uri) as publisher:
        for step in (1, 2, 3):
            server.set_faults(f"kind={kind},op=PutObject,key=*newest.json,times=1")
            publisher.publish(state_of(step), step=step)
            assert server.stats()["faults"], "no request was disturbed"
    follower = Follower(uri)
    assert follower.update().step == 3
    assert_follows(follower, 3, run=0)
