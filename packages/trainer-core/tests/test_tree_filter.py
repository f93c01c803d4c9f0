"""Keys to ignore whose names have `/` in them, as modules and metrics may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hocket.trainer import Callback
from hocket.trainer.callbacks import LoadCheckpoint
from hocket.trainer.errors import TrainerConfigError
from support.training import Net, make, parameters


class Heads(Net):
    """A net with a second head, whose module has a `/` in its name."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(8, size), "rest": nn.Linear(8, 2)})
        self.name = name

    def forward(self, batch: Any) -> Any:
        return super().forward(batch) + 0 * sum(one.weight.sum() for one in self.heads.values())


@pytest.mark.parametrize("is_foreign", [False, True], ids=["own", "foreign"])
@pytest.mark.parametrize(
    ("name", "glob"),
    [
        ("de/en", "model/heads.de/en.*"),
        ("de/en", "state/*/heads.de/en.*"),
        ("de/en", "model/heads.d*"),
        ("a/b/c", "model/heads.a/b/c.*"),
        ("/a", "model/heads./a.*"),
        ("en", "model/heads.en.*"),
    ],
)
def test_a_module_with_a_slash_in_its_name_is_ignored(
    name: str, glob: str, is_foreign: bool, tmp_path: Any
) -> None:
    with make(model=Heads(name, 3), save_folder=str(tmp_path), max_duration="1ba") as trainer:
        trainer.fit()
        end = {key: value.clone() for key, value in trainer.state.model.state_dict().items()}
    path = str(tmp_path / "ep0-ba1")
    if is_foreign:
        path = str(tmp_path / "weights.pt")
        torch.save(end, path)
    with make(model=Heads(name, 5), load_path=path, load_ignore_keys=[glob, "optimizers"]) as trainer:
        loaded = parameters(trainer)
        assert torch.equal(loaded["heads.rest.weight"], end["heads.rest.weight"])
        assert loaded[f"heads.{name}.weight"].shape == (5, 8)


class Counts(Callback):
    """A callback whose saved state has names with `/`."""

    def __init__(self, start: int) -> None:
        self.counts = {"metrics/eval/loss": start, "other": start}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state: Any) -> None:
        self.counts.update(state)


def test_an_entry_of_a_callback_s_state_with_a_slash_in_its_name_is_ignored(tmp_path: Any) -> None:
    with make(callbacks=Counts(1), save_folder=str(tmp_path), max_duration="1ba") as trainer:
        trainer.fit()
    counts = Counts(7)
    keys = ["callbacks/Counts/metrics/eval/*"]
    with make(callbacks=counts, load_path=str(tmp_path / "ep0-ba1"), load_ignore_keys=keys):
        assert counts.counts == {"metrics/eval/loss": 7, "other": 1}


@pytest.mark.parametrize("keys", ["model/head.*", [Path("model/head.*")], (one for one in ["model"]), 3])
def test_what_is_no_list_of_globs_is_refused_before_the_training(keys: Any, tmp_path: Path) -> None:
    message = "are no keys to ignore; expected a list of globs"
    with pytest.raises(TrainerConfigError, match=message):
        make(save_folder=tmp_path / "run", save_ignore_keys=keys)
    with make(save_folder=tmp_path / "first", max_duration="1ba") as first:
        first.fit()
    with pytest.raises(TrainerConfigError, match=message):
        make(load_path=tmp_path / "first", load_ignore_keys=keys)
    with pytest.raises(TrainerConfigError, match=message):
        LoadCheckpoint(tmp_path / "first", ignore_keys=keys)
