"""The places of a run's checkpoints, as `save_folder` and `load_path` name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.trainer.callbacks import LoadCheckpoint
from hocket.trainer.errors import TrainerConfigError
from support.training import make


def test_a_save_folder_of_pathlib_that_was_a_uri_is_refused_and_the_home_folder_is_expanded(
    tmp_path, monkeypatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("save_folder", "load_path"):
        with pytest.raises(ValueError, match=r"`s3:/b/run.*has one slash after `s3:`"):
            make(**{name: Path("s3://b/run/ep1")})
        with pytest.raises(ValueError, match=r"/m\\xfc(/ep1)?` is not UTF-8, which paths have to be"):
            make(**{name: tmp_path / "m\udcfc" / "ep1"})
        with pytest.raises(TrainerConfigError, match=f"`{name}` is empty; expected a path, `.` for"):
            make(**{name: ""})
    told = r"is `az:/c/x`, which has one slash after `az:`.*pass the text `az://c/x`, or `\./az:/c/x`"
    with pytest.raises(TrainerConfigError, match=f"`load_path` {told}"):
        make(load_path="az:/c/x", save_folder="~/run")
    with pytest.raises(TrainerConfigError, match=f"`load_path` {told}"):
        LoadCheckpoint(Path("az://c/x"))
    with pytest.raises(TrainerConfigError, match="pass the text `file:///c/x`"):
        make(load_path="file:/c/x")
    with make() as trainer:
        with pytest.raises(TrainerConfigError, match=f"`name` {told}"):
            trainer.save_checkpoint("az:/c/x")
        trainer.save_checkpoint(tmp_path / "own" / "ep{epoch}")
    assert (tmp_path / "own" / "ep0" / "checkpoint.json.zst").exists()
    with make(save_folder="~/run", max_duration="1ba") as trainer:
        trainer.fit()
    with make(load_path="~/run/ep0-ba1") as trainer:
        assert trainer.state.timestamp.batch == 1
    with make(save_folder=Path("~/run"), autoresume=True, run_name="r") as trainer:
        assert trainer.state.timestamp.batch == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == ["ep0-ba1"]
    assert list((tmp_path / "here").iterdir()) == []
