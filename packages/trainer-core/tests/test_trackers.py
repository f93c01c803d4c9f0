"""Loggers of tracking services with the real libraries: offline, in SQLite, and with a real server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from hocket.trainer import Callback
from hocket.trainer.errors import AbsentLoggerError, LoggerError, MissingExtraError
from hocket.trainer.loggers import (
    CometMLLogger,
    MLFlowLogger,
    RemoteUploaderDownloader,
    TrackioLogger,
    WandBLogger,
)
from support.ranks import run_ranks
from support.training import FileStore, make


class Media(Callback):
    """Logs an image, a table and a file at the end of training."""

    def __init__(self, file):
        self.file = file

    def fit_end(self, state, logger):
        self.file.write_text("kept")
        logger.log_images(torch.rand(2, 3, 8, 8), "inputs", masks={"truth": torch.ones(2, 8, 8)})
        logger.log_table(["a", "b"], [[1, "x"]], "rows")
        logger.upload_file("notes/final.txt", self.file)


def train_twice(folder, make_logger):
    """Train for 4 batches, then resume from batch 3 and train to 6; return the ids of the runs."""
    ids = []
    for duration, source in (("4ba", None), ("6ba", "ep0-ba3")):
        destination = make_logger()
        store = FileStore(Path(folder, "checkpoints"))
        with make(
            loggers=destination,
            callbacks=Media(Path(folder, "local.txt")),
            max_duration=duration,
            run_name="first",
            checkpointing={"store": store},
            save_interval="3ba",
            load_path=source,
        ) as trainer:
            trainer.logger.log_hyperparameters({"width": 8, "nested": {"rate": 0.1}})
            trainer.fit()
            assert trainer.logger.flush(60)
        ids.append(destination.run_id)
        store.delete(4)  # simulates a kill of the first run before its last save
    return ids


def use_wandb(folder):
    os.chdir(folder)

    def make_logger():
        settings = {"console": "off", "silent": True}
        return WandBLogger(
            "digits", tags=["t"], log_artifacts=True, init_kwargs={"mode": "offline", "settings": settings}
        )

    ids = train_twice(folder, make_logger)
    return ids, [read_wandb(path) for path in sorted(Path(folder).glob("wandb/offline*/*.wandb"))]


def read_wandb(path):
    """Return the content of a run file, once W&B's own process has written all of it."""
    deadline = time.monotonic() + 60
    while "exit" not in [record.WhichOneof("record_type") for record in wandb_records(path)]:
        assert time.monotonic() < deadline, f"`{path}` has no record of the run's end"
        time.sleep(0.1)
    records = wandb_records(path)
    found = {"history": [], "artifacts": [], "config": {}, "names": []}
    for record in records:
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            found["history"].append({key: json.loads(value) for key, value in items.items()})
        elif kind == "config":
            found["config"] |= {item.key: json.loads(item.value_json) for item in record.config.update}
        elif kind == "run":
            found["names"].append(record.run.display_name)
        elif kind == "artifact":
            found["artifacts"].append(record.artifact.name)
    return found


def wandb_records(path):
    """Return the complete records of a run file, which is in LevelDB's log format after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole, records = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            break  # the record is not complete yet
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            records.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return records


@pytest.mark.slow
def test_wandb_logs_offline_and_continues_one_run_after_a_resume(tmp_path):
    pytest.importorskip("wandb", reason="needs `uv sync --group loggers`")
    # The library's process and threads end with this one.
    ((ids, runs),) = run_ranks(use_wandb, 1, str(tmp_path), timeout_s=150)
    assert ids[0] == ids[1]
    assert [run["names"][0] for run in runs] == ["first", "first"]
    losses = [
        [
            (row["trainer/batch"], row["loss/train/total"])
            for row in run["history"]
            if "loss/train/total" in row
        ]
        for run in runs
    ]
    assert [step for step, _ in losses[0]] == [1, 2, 3, 4]
    assert [step for step, _ in losses[1]] == [4, 5, 6]
    assert losses[0][3] == losses[1][0]
    assert runs[0]["config"]["width"] == 8
    assert any("rows/path" in row for row in runs[0]["history"])
    assert any("inputs/path" in row for row in runs[0]["history"])
    assert "notes_final.txt" in runs[0]["artifacts"]


@contextlib.contextmanager
def mlflow_server(folder):
    """Run MLflow's server on loopback, over SQLite."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/server.db"]
    command += ["--artifacts-destination", f"{folder}/artifacts"]
    with Path(folder, "server.log").open("w") as log:
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )
    try:
        deadline = time.monotonic() + 200
        while True:
            assert server.poll() is None, Path(folder, "server.log").read_text()
            assert time.monotonic() < deadline, Path(folder, "server.log").read_text()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(20)


def use_mlflow(folder, kind):
    os.chdir(folder)
    with contextlib.ExitStack() as stack:
        uri = f"sqlite:///{folder}/ml.db" if kind == "sqlite" else stack.enter_context(mlflow_server(folder))

        def make_logger():
            return MLFlowLogger(
                "digits",
                tracking_uri=uri,
                tags={"team": "x"},
                run_group="g",
                rename_metrics={"loss/train/total": "loss"},
                ignore_hyperparameters=["width"],
                flush_interval=0.0,
            )

        ids = train_twice(folder, make_logger)
        broken = make_logger()
        with contextlib.suppress(ZeroDivisionError), make(loggers=broken, max_duration="1ba") as trainer:
            trainer.fit()
            raise ZeroDivisionError
        from mlflow import MlflowClient

        client = MlflowClient(uri)
        run = client.get_run(ids[0])
        points = [(point.step, point.value) for point in client.get_metric_history(ids[0], "loss")]
        last = MLFlowLogger("digits", run_name="first", tracking_uri=uri, resume=True)
        last._open("other")
        last.download_file("notes/final.txt", f"{folder}/got.txt")
        return {
            "ids": [*ids, last.run_id],
            "status": [run.info.status, client.get_run(broken.run_id).info.status],
            "name": run.info.run_name,
            "params": run.data.params,
            "tags": {name: run.data.tags.get(name) for name in ("team", "run_group")},
            "points": points,
            "artifacts": sorted(
                part.path
                for name in ("images", "rows", "notes")
                for part in client.list_artifacts(ids[0], name)
            ),
            "file": Path(folder, "got.txt").read_text(),
        }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "server"])
def test_mlflow_continues_one_run_after_a_resume(tmp_path, kind):
    pytest.importorskip("alembic", reason="needs mlflow: `uv sync --group loggers`")
    (found,) = run_ranks(use_mlflow, 1, str(tmp_path), kind, timeout_s=280)
    assert len(set(found["ids"])) == 1
    assert found["status"] == ["FINISHED", "FAILED"]
    assert found["name"] == "first"
    assert found["params"] == {"nested/rate": "0.1"}
    assert found["tags"] == {"team": "x", "run_group": "g"}
    steps = [step for step, _ in found["points"]]
    assert steps == [1, 2, 3, 4, 4, 5, 6]
    assert found["points"][3][1] == found["points"][4][1]
    assert any(path.startswith("images/inputs-0") for path in found["artifacts"])
    assert {"rows/step4.json", "rows/step6.json", "notes/final.txt"} <= set(found["artifacts"])
    assert found["file"] == "kept"


@pytest.mark.parity
@pytest.mark.timeout(900)
def test_trackio_continues_one_run_after_a_resume(tmp_path):
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("`uv` was not found: it makes the environment with Trackio, which needs `pillow<13`")
    # Installing needs the version without the local label, such as `+cpu`.
    ours = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "torchmetrics", "rich")]
    options = [option for package in ("trackio==0.43.0", *ours) for option in ("--with", package)]
    python = ".".join(map(str, sys.version_info[:2]))
    script = Path(__file__).with_name("trackio_peer.py")
    root = script.parents[3]
    completed = subprocess.run(
        [uv, "run", "--isolated", "--no-project", "--python", python, *options, "python", script, tmp_path],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={
            **{
                name: value for name, value in os.environ.items() if name not in ("UV_NO_SYNC", "VIRTUAL_ENV")
            },
            "PYTHONPATH": f"{root}/packages/trainer-core/src{os.pathsep}{root}/tests",
        },
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["names"][:2] == ["first", "first"]
    # A new training with the name of an old run is a run of its own.
    assert found["names"][2].startswith("first-")
    assert found["runs"] == sorted(set(found["names"]))
    assert found["config"]["width"] == 8
    assert found["config"]["nested"] == "{'rate': 0.1}"
    assert found["file"] == "kept"
    losses = [(row["step"], row["loss/train/total"]) for row in found["logs"] if "loss/train/total" in row]
    assert sorted(step for step, _ in losses) == [1, 2, 3, 4, 4, 5, 6]
    assert len({value for step, value in losses if step == 4}) == 1
    last = {key: value for row in found["logs"] if row["step"] == 6 for key, value in row.items()}
    assert last["weights"]["_type"] == "trackio.histogram"
    assert last["note"]["_value"] == "at the end"
    assert last["rows"]["_value"] == [{"a": 1, "b": "x"}, {"a": 2, "b": "torch.float32"}]
    assert [sorted(row) for row in last["inputs"]["_value"]] == [["Image", "truth"]] * 2
    assert last["grey/0"]["_type"] == "trackio.image"
    assert last["trace/plan"]["_value"] == "two steps"
    assert last["trace/hyperparameters"]["_value"] == "late: 1"


class Unreachable(WandBLogger):
    """A logger that cannot be opened, as when the service is down."""

    def __init__(self):
        super().__init__()
        self.opened_on = None

    def _open(self, run_name):
        import threading

        self.opened_on = threading.current_thread().name
        raise ConnectionError("no route to the service")


def test_an_unreachable_tracker_does_not_affect_the_training(caplog):
    pytest.importorskip("wandb", reason="needs `uv sync --group loggers`")
    dead = Unreachable()
    trainer = make(loggers=dead, max_duration="5ba")
    trainer.fit()
    assert trainer.state.timestamp.batch == "5ba"
    assert dead.opened_on.startswith("hocket-")
    with pytest.raises(LoggerError, match="no route to the service"):
        trainer.close()
    assert "training goes on" in caplog.text
    assert dead._early == []


def test_absent_loggers_raise_with_the_alternative():
    with pytest.raises(AbsentLoggerError, match="no `CometMLLogger`; use `WandBLogger`, `MLFlowLogger`"):
        CometMLLogger(project_name="x")
    with pytest.raises(AbsentLoggerError, match=r"save_folder='s3://bucket/folder'"):
        RemoteUploaderDownloader(bucket_uri="s3://bucket")


def test_missing_tracking_libraries_raise_with_their_extra(monkeypatch):
    for name, logger in (("wandb", WandBLogger), ("mlflow", MLFlowLogger)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingExtraError, match=rf"pip install 'hocket-trainer-core\[{name}\]'"):
            logger()
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingExtraError, match=r"`TrackioLogger` needs `trackio`.*: pip install trackio\n"):
        TrackioLogger()
