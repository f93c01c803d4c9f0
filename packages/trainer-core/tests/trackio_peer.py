"""Trains with `TrackioLogger` and the real library; prints as JSON what Trackio then has in its database.

`test_trackers.py` runs it in an environment with Trackio: python trackio_peer.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

folder = Path(sys.argv[1])
os.environ |= {"TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402

from hocket.trainer import Callback  # noqa: E402
from hocket.trainer.loggers import TrackioLogger  # noqa: E402
from support.training import FileStore, make  # noqa: E402


class Media(Callback):
    """Logs one value of each kind at the end of training."""

    def fit_end(self, state, logger):
        file = folder / "local.txt"
        file.write_text("kept")
        masks = {"truth": torch.ones(2, 8, 8, dtype=torch.int64)}
        logger.log_images(torch.rand(2, 3, 8, 8), "inputs", masks=masks)
        logger.log_images(torch.rand(1, 1, 8, 8), "grey", use_table=False)
        logger.log_table(["a", "b"], [[1, "x"], [2, torch.float32]], "rows")
        logger.log_metrics({"weights": torch.arange(4.0), "note": "at the end", "nothing": float("nan")})
        logger.log_traces({"plan": "two steps"})
        logger.log_hyperparameters({"late": 1})
        logger.upload_file("notes/final.txt", file)


def train(duration, source=None, checkpoints="checkpoints"):
    """Train, and return the name of Trackio's run."""
    destination = TrackioLogger("digits", log_artifacts=True, init_kwargs={"auto_log_cpu": False})
    store = FileStore(folder / checkpoints)
    with make(
        loggers=destination,
        callbacks=Media(),
        max_duration=duration,
        run_name="first",
        checkpointing={"store": store},
        save_interval="3ba",
        load_path=source,
    ) as trainer:
        trainer.logger.log_hyperparameters({"width": 8, "_hidden": 1, "nested": {"rate": 0.1}})
        trainer.fit()
        assert trainer.logger.flush(60)
    return destination.run_id


names = [train("4ba")]
FileStore(folder / "checkpoints").delete(4)  # simulates a kill of the first run before its last save
names += [train("6ba", "ep0-ba3"), train("2ba", checkpoints="others")]

import trackio  # noqa: E402
from trackio.sqlite_storage import SQLiteStorage  # noqa: E402

runs = {run.name: run for run in trackio.Api().runs("digits")}
trackio.init("digits", name="reader", auto_log_cpu=False).use_artifact("notes_final.txt").download(
    folder / "got"
)
found = {
    "names": names,
    "runs": sorted(runs),
    "config": runs["first"].config,
    "logs": SQLiteStorage.get_logs("digits", "first"),
    "file": (folder / "got" / "local.txt").read_text(),
}
(folder / "found.json").write_text(json.dumps(found, default=str))
