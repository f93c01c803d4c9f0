"""Files that the trainer writes itself: `~/` is the home folder, and URIs in place of paths are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hocket.trainer.callbacks import ExportForInferenceCallback, MemorySnapshot, OOMObserver, RunReport
from hocket.trainer.checks import local_path
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.loggers import FileLogger, TensorboardLogger
from hocket.trainer.models import HuggingFaceModel
from hocket.trainer.models.export import export_for_inference
from hocket.trainer.profiler import JSONTraceHandler, Profiler, cyclic_schedule
from support.training import make


def _export(place):
    return export_for_inference(nn.Linear(2, 2), place, sample_input=torch.ones(3, 2))


def _pretrained(place):
    transformers = pytest.importorskip("transformers", reason="needs `uv sync --group transformers`")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8)
    HuggingFaceModel(transformers.GPT2LMHeadModel(config)).save_pretrained(place)
    return next(Path.home().rglob("config.json")).parent


def _torch_profiler(place):
    return Profiler(torch_prof_folder=place).torch_config.folder


# The argument, and a function that gives it a place and returns where the files go.
PLACES = {
    "FileLogger": ("filename", lambda place: FileLogger(place).filename),
    "TensorboardLogger": ("log_dir", lambda place: TensorboardLogger(place).log_dir),
    "RunReport": ("filename", lambda place: RunReport(place).filename),
    "OOMObserver": ("folder", lambda place: OOMObserver(folder=place).folder),
    "MemorySnapshot": ("folder", lambda place: MemorySnapshot(folder=place).folder),
    "MemorySnapshot file": ("filename", lambda place: MemorySnapshot(filename=str(place)).filename),
    "ExportForInference": ("save_path", lambda place: ExportForInferenceCallback(save_path=place).save_path),
    "export_for_inference": ("save_path", _export),
    "save_pretrained": ("folder", _pretrained),
    "JSONTraceHandler": ("folder", lambda place: JSONTraceHandler(place).folder),
    "Profiler": ("torch_prof_folder", _torch_profiler),
}


@pytest.mark.parametrize("case", PLACES)
def test_a_home_folder_is_expanded_and_a_uri_refused(case, tmp_path, monkeypatch):
    if case == "TensorboardLogger":
        pytest.importorskip("tensorboard", reason="needs `uv sync --group loggers`")
    name, given_to = PLACES[case]
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for place in ("~/runs/a.pt2", Path("~/runs/a.pt2")):
        assert Path(given_to(place)) == tmp_path / "home/runs/a.pt2"
    for place, reason in {
        Path("s3://bucket/a.pt2"): "is `s3:/bucket/a.pt2`, which has one slash after `s3:`",
        "gs://bucket/a.pt2": "is `gs://bucket/a.pt2`, which is a URI",
        "~nobody/a.pt2": "is `~nobody/a.pt2`; only `~/` is expanded",
    }.items():
        with pytest.raises(TrainerConfigError, match=f"`{name}` {reason}"):
            given_to(place)
    assert {path.name for path in tmp_path.iterdir()} <= {"home"}


@pytest.mark.parametrize("path", ["runs/a:/b", "./s3:/b", "c:/b", "{run_name}/x", "/a/~/b", "./~", "a~"])
def test_local_paths_are_kept(path):
    assert local_path("folder", path) == path


def test_a_password_in_a_uri_is_not_shown():
    with pytest.raises(TrainerConfigError) as raised:
        local_path("folder", "https://me:secret@host/a")
    assert "secret" not in str(raised.value)


def test_the_files_of_a_training_are_written_to_the_home_folder(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="needs `uv sync --group loggers`")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    trainer = make(
        max_duration="4ba",
        run_name="r",
        loggers=[FileLogger("~/{run_name}/log.txt"), TensorboardLogger("~/board")],
        callbacks=[RunReport("~/report.html")],
        profiler=Profiler(
            cyclic_schedule(skip_first=0, wait=0, warmup=1, active=1, repeat=1),
            [JSONTraceHandler("~/traces", "rank{rank}.json")],
            torch_prof_folder="~/torch",
        ),
    )
    trainer.fit()
    trainer.close()
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"home/r/log.txt", "home/report.html", "home/traces/rank0.json"} <= written
    assert any(path.startswith("home/board/r/") for path in written)
    assert any(path.startswith("home/torch/") for path in written)
    assert {path.name for path in tmp_path.iterdir()} == {"home"}
