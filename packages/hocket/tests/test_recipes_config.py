"""A run from a configuration file: sections, names, overrides, `--print`, and resuming."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

from hocket.ckpt import list_checkpoints
from hocket.recipes.cli import app
from hocket.recipes.config import config_of_checkpoint, resolve, trainer_from
from hocket.stream import MDSWriter
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.models import ComposerClassifier
from support.s3d import Server


def classifier(*, width: int = 4) -> ComposerClassifier:
    module = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))
    return ComposerClassifier(module, num_classes=3)


def points(*, count: int = 16) -> TensorDataset:
    return TensorDataset(
        torch.randn(count, 2, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 3
    )


def own_loader(*, batch_size: int) -> DataLoader[Any]:
    return DataLoader(points(), batch_size=batch_size)


HERE = __name__
CONFIG: dict[str, Any] = {
    "model": {"name": f"{HERE}:classifier", "width": 8, "precision": "amp_bf16"},
    "data": {"train": {"name": f"{HERE}:points", "count": 24}, "eval": f"{HERE}:points", "batch_size": 4},
    "training": {"max_duration": "2ep", "seed": 5, "device": "cpu"},
    "optimizer": {"name": "DecoupledAdamW", "lr": 0.01},
    "scheduler": {"name": "LinearWithWarmupScheduler", "warmup_steps": 2},
    "algorithms": {"label_smoothing": {"smoothing": 0.2}, "EMA": {"enabled": False}},
    "callbacks": {"LRMonitor": None, "SpeedMonitor": {"window_size": 2}},
    "loggers": ["InMemoryLogger"],
    "logging": {"progress_bar": False, "run_name": "from-file"},
}


def test_each_section_configures_its_part(tmp_path: Path) -> None:
    with trainer_from(
        CONFIG, ["optimizer.lr=3e-3", "checkpoint.save_folder=" + str(tmp_path / "ckpt")]
    ) as trainer:
        trainer.fit()
    state = trainer.state
    assert state.timestamp.batch == 12
    assert state.precision == "amp_bf16"
    assert state.model.module[0].out_features == 8
    assert [type(one).__name__ for one in state.algorithms] == ["LabelSmoothing"]
    assert state.algorithms[0].smoothing == 0.2
    (optimizer,) = state.optimizers
    assert type(optimizer).__name__ == "DecoupledAdamW"
    assert optimizer.param_groups[0]["initial_lr"] == 3e-3
    (logger,) = trainer.logger.destinations
    rates = [value for _, value in logger.data["lr-DecoupledAdamW/group0"]]
    assert rates[:2] == [0.0, 3e-3 / 2]
    assert "metrics/eval/MulticlassAccuracy" in logger.data

    uri, kept = config_of_checkpoint(tmp_path / "ckpt")
    assert uri.endswith("ep2-ba12")
    assert kept["scheduler"] == [{"name": "LinearWithWarmupScheduler", "t_warmup": "2ba"}]
    with trainer_from(kept, [f"checkpoint.load_path={uri}", "training.max_duration=3ep"]) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 18


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainning": {}}, "`trainning` is unknown in the configuration; did you mean `training`"),
        ({"training": {"max_durations": "1ep"}}, "did you mean `max_duration`"),
        ({"checkpoint": {"folder": "x"}}, "did you mean `save_folder`"),
        ({"optimizer": {"name": "AdamW", "learning_rate": 1}}, "`learning_rate` is unknown in `optimizer`"),
        ({"optimizer": "AdamX"}, "`AdamX` is unknown in `optimizer`; did you mean `Adam"),
        ({"algorithms": {"MixUpp": None}}, "did you mean `MixUp`"),
        ({"callbacks": [{"name": "SpeedMonitor", "window": 3}]}, "did you mean `window_size`"),
        ({"model": {"name": "gpt", "widht": 3}}, "did you mean `width`"),
        ({"model": "nowhere:make"}, "`nowhere:make` cannot be imported"),
        ({"training": {"precision": "fp32"}}, "leave one of them out"),
        ({"data": {}}, "`data` has no `train`"),
        ({"data": {"train": f"{HERE}:own_loader"}}, "`data.train` lacks `batch_size`"),
        ({"data": {"train": f"{HERE}:own_loader", "batch_size": 2, "shuffle": True}}, "for a loader"),
        ({"scheduler": {"warmup_steps": 1, "t_warmup": "1ba"}}, "are both given"),
        ({"training": 3}, "expected a mapping"),
        ({"parallelism": "fsdp"}, "`parallelism` is `fsdp`; expected a mapping"),
        ({"profiler": 3}, "`profiler` is `3`; expected a mapping"),
        ({"profiler": {"torch_prof_foldr": "x"}}, "did you mean `torch_prof_folder`"),
        ({"algorithms": 5}, "`algorithms` is `5`; expected a list of names"),
        ({"algorithms": {"EMA": {"enabled": "no"}}}, "`enabled` of `EMA` in `algorithms` is `no`; expected"),
        ({"algorithms": ["AlgorithmError"]}, "`AlgorithmError` is unknown in `algorithms`"),
        ({"optimizer": {"name": "AdamW", "lr": "fast"}}, "`optimizer`: `AdamW` does not take its settings"),
        ({"scheduler": {"warmup_steps": "abc"}}, "`scheduler.warmup_steps` is `abc`; expected a number of b"),
        ({"model": "hf:/nowhere/at/all"}, "`hf:/nowhere/at/all` cannot be read"),
        ({"data": {**CONFIG["data"], "batch_size": 0}}, "does not take its settings: ValueError: batch_size"),
    ],
)  # fmt: skip
def test_an_unknown_name_raises_with_the_nearest_one(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerConfigError, match=message):
        trainer_from({**CONFIG, **change})


def test_a_part_may_be_given_by_its_name_only() -> None:
    assert resolve({**CONFIG, "callbacks": "SpeedMonitor"})["callbacks"] == [{"name": "SpeedMonitor"}]


def test_duplicate_names_and_settings_without_a_value_raise(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: gpt\noptimizer: {lr: 1}\noptimizer: {lr: 2}\n")
    with pytest.raises(TrainerConfigError, match="`optimizer` is given twice"):
        trainer_from(file)
    file.write_text("base: &base {lr: 1}\noptimizer: {<<: *base, lr: 2}\n")
    with pytest.raises(TrainerConfigError, match="`base` is unknown in the configuration"):
        trainer_from(file)
    with pytest.raises(TrainerConfigError, match=r"`optimizer.lr=\[`: the value is no YAML"):
        trainer_from(CONFIG, ["optimizer.lr=["])


def test_the_readmes_example_resolves() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    found = resolve(yaml.safe_load(example))
    assert found["scheduler"][0]["t_warmup"] == "100ba"
    assert [part["name"] for part in found["algorithms"]] == ["GradientClipping"]
    assert found["training"]["precision"] == "amp_bf16"


def test_defaults_equal_those_of_the_trainer() -> None:
    found = resolve({"model": "gpt", "logging": {"log_every": 3}})
    assert found["training"]["eval_interval"] == 1
    assert found["logging"] == {**resolve({})["logging"], "log_every": 3}
    assert found["checkpoint"]["save_interval"] == "1ep"


def test_the_command_prints_trains_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(CONFIG | {"checkpoint": {"save_folder": str(tmp_path / "ckpt")}}))

    def run(*arguments: str) -> int | None:
        return app(["train", *arguments], standalone_mode=False)

    assert not run(str(file), "optimizer.lr=3e-4", "--print")
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["optimizer"] == {"name": "DecoupledAdamW", "lr": 0.0003}
    assert resolved["training"]["precision"] == "amp_bf16"
    assert not (tmp_path / "ckpt").exists()
    assert not run(str(file), "optimizer.lr=3e-4", "training.max_duration=1ep")
    assert not run("--resume", str(tmp_path / "ckpt"), "training.max_duration=2ep")
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["ep1-ba6", "ep2-ba12"]
    capsys.readouterr()
    assert run(str(file), "optimiser.lr=1") == 1
    assert "did you mean `optimizer`" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(TrainerConfigError, match="no file"):
        trainer_from(tmp_path / "none.yaml")


def test_a_run_in_a_bucket_resumes_from_its_uri_only(
    s3d: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    folder = s3d.uri("runs/from-file")
    with trainer_from(CONFIG, [f"checkpoint.save_folder={folder}", "training.max_duration=1ep"]) as trainer:
        trainer.fit()
    again = ["train", "--resume", f"{folder}/ep1-ba6", "training.max_duration=2ep"]
    assert not app([*again, "--print"], standalone_mode=False)
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["checkpoint"]["load_path"] == f"{folder}/ep1-ba6"
    assert resolved["algorithms"] == [{"name": "label_smoothing", "smoothing": 0.2}]
    assert not app(again, standalone_mode=False)
    assert [entry.uri for entry in list_checkpoints(folder)] == [f"{folder}/ep1-ba6", f"{folder}/ep2-ba12"]


def test_a_recipe_accepts_its_own_settings_and_streamed_data(tmp_path: Path) -> None:
    with MDSWriter(columns={"tokens": "ndarray:uint8:9"}, out=str(tmp_path / "data")) as writer:
        for number in range(16):
            writer.write({"tokens": (torch.arange(9) + number).to(torch.uint8).numpy()})
    config = {
        "model": "gpt",
        "data": {"train": str(tmp_path / "data"), "batch_size": 4, "num_workers": 0},
        "training": {"max_duration": "1ep", "device": "cpu"},
        "logging": {"progress_bar": False},
    }
    settings = ["context=8", "width=8", "num_layers=1", "num_heads=2"]
    with trainer_from(config, [f"model.{setting}" for setting in settings]) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 4
        assert trainer.state.model.config.width == 8


def test_a_hugging_face_model_is_loaded_from_its_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    with trainer_from({**CONFIG, "model": {"name": f"hf:{tmp_path}", "use_logits": True}}) as trainer:
        assert type(trainer.state.model.model).__name__ == "BertForSequenceClassification"
