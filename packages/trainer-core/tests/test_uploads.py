"""Checkpoints of a training in a faulty object store, a real server on loopback."""

from __future__ import annotations

import time

import pytest
import torch

from hocket.trainer import Callback
from support.training import make, parameters

pytest.importorskip("boto3")

PUTS = "op=PutObject|CreateMultipartUpload|UploadPart|CompleteMultipartUpload"


@pytest.fixture
def serve(s3d_faults, monkeypatch):
    def start(*faults):
        server = s3d_faults(*faults, seed=3)
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        return server

    return start


class Batches(Callback):
    """Records the trained batches, and calls a function after one of them."""

    def __init__(self, at=None, function=None):
        self.at, self.function = at, function
        self.seen = []

    def batch_end(self, state, logger):
        self.seen.append(state.timestamp.counts.batch)
        if self.seen[-1] == self.at:
            self.function()


def test_uploads_are_retried_and_fit_waits_for_them_at_its_end(serve):
    server = serve(
        f"kind=slowdown,rate=0.4,{PUTS}", f"kind=reset,rate=0.2,{PUTS}", f"kind=latency,ms=50,{PUTS}"
    )
    folder = server.uri("run")
    with make(
        save_folder=folder, checkpointing={"asynchronous": True}, save_interval="2ba", max_duration="5ba"
    ) as trainer:
        trainer.fit()
        # All saves are committed before the trainer closes, even the one started at the end of the training.
        assert trainer.saved_checkpoints == ["ep0-ba2", "ep0-ba4", "ep0-ba5"]
        end = parameters(trainer)
    assert sum(server.stats()["faults"].get(kind, 0) for kind in ("slowdown", "reset")) > 3
    with make(save_folder=folder, autoresume=True, max_duration="5ba") as trainer:
        assert all(torch.equal(end[name], value) for name, value in parameters(trainer).items())


@pytest.mark.slow
def test_an_upload_that_keeps_failing_ends_the_training_within_a_batch(serve):
    server = serve()

    class Waits(Callback):
        """Waits until the asynchronous save has ended, so that the next batch must raise its error."""

        def batch_end(self, state, logger):
            handle = trainer._run.checkpointer._handle
            limit = time.monotonic() + 120
            while handle is not None and not handle.done() and time.monotonic() < limit:
                time.sleep(0.05)

    broken = Batches(at=3, function=lambda: server.set_faults(f"kind=500,{PUTS}"))
    with (
        make(
            save_folder=server.uri("run"),
            checkpointing={"asynchronous": True},
            save_interval="2ba",
            max_duration="50ba",
            callbacks=[Waits(), broken],
        ) as trainer,
        pytest.raises(Exception, match=r"failed \d+ times") as failed,
    ):
        trainer.fit()
    # The save of batch 4 fails; its error is raised at the end of batch 5, where the training ends.
    assert broken.seen == [1, 2, 3, 4, 5]
    assert "ep0-ba4" in str(failed.value)
    server.set_faults()
    with make(save_folder=server.uri("run"), autoresume=True, max_duration="3ba") as trainer:
        assert trainer.state.timestamp.batch == 2
