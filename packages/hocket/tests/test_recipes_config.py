"""A run from a configuration file: sections, names, overrides, `--print`, and resuming."""

from __future__ import annotations

import datetime as dt
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

from hocket.ckpt import list_checkpoints
from hocket.recipes.cli import app
from hocket.recipes.config import config_of_checkpoint, read_config, resolve, trainer_from
from hocket.recipes.config.reading import with_overrides
from hocket.recipes.config.resolving import regrouped
from hocket.recipes.config.resume import config_to_resume
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


def command(*arguments: str) -> int | None:
    return app(["train", *arguments], standalone_mode=False)


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
        ({"max_duration": "1ep"}, "`max_duration` is unknown .* in a section: `training.max_duration`"),
        ({"save_folder": "run"}, "`save_folder` is unknown .* in a section: `checkpoint.save_folder`"),
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
        ({"data": {**CONFIG["data"], "batch_size": 0}}, "does not take its settings: ValueError: batch_size"),
        ({"training": {"seed": "x"}}, "`training.seed` is `'x'`; expected a whole number or null"),
        ({"checkpoint": {"save_filename": None}}, "`checkpoint.save_filename` is `None`; expected text"),
        ({"logging": {"run_name": 1.5}}, "`logging.run_name` is `1.5`; expected text or null; put it in"),
        ({"parallelism": {"dist_timeout": "1h"}}, "`parallelism.dist_timeout` is `'1h'`; expected a number"),
        ({"algorithms": {"Factorize": {"min_features": "a"}}}, "min_features` is `'a'`; expected a whole"),
        ({"algorithms": {"LabelSmoothing": {"smoothing": True}}}, "smoothing` is `True`; expected a number"),
        ({"algorithms": {"GhostBatchNorm": {"ghost_batch_size": True}}}, "is `True`; expected a whole"),
        ({"model": {"name": f"{HERE}:classifier", "width": [8]}}, r"`model.width` is `\[8\]`; expected"),
    ],
)  # fmt: skip
def test_a_wrong_name_or_value_raises_a_message_about_it(change: dict[str, Any], message: str) -> None:
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


def test_values_that_their_arguments_accept_are_kept() -> None:
    given = {"training": {"seed": None, "gradient_clipping": 1}, "logging": {"run_name": 20260102}}
    found = resolve({**given, "checkpoint": {"save_folder": Path("run"), "save_interval": 2}})
    assert (found["training"]["seed"], found["training"]["gradient_clipping"]) == (None, 1)
    assert found["logging"]["run_name"] == "20260102"
    assert (found["checkpoint"]["save_folder"], found["checkpoint"]["save_interval"]) == (Path("run"), 2)
    with trainer_from({**CONFIG, "algorithms": {"LabelSmoothing": {"smoothing": 1}}}) as trainer:
        assert trainer.state.algorithms[0].smoothing == 1


@pytest.mark.parametrize("given", ["EMA", ["EMA"], [{"name": "EMA", "smoothing": 0.5}], {"EMA": None}, None])
def test_a_setting_of_a_named_part_applies_in_each_form_of_the_section(given: Any) -> None:
    changed = with_overrides(
        {"algorithms": given}, ["algorithms.EMA.half_life=5ba", "algorithms.ema.smoothing=2"]
    )
    (found,) = resolve(changed)["algorithms"]
    assert found == {"name": "EMA", "half_life": "5ba", "smoothing": 2}
    assert not resolve(with_overrides({"algorithms": ["EMA"]}, ["algorithms.ema=false"]))["algorithms"]


def test_a_setting_that_names_no_part_raises() -> None:
    for given in ("EMA", ["EMA"]):
        with pytest.raises(TrainerConfigError, match=r"expected `algorithms\.EMA\.SETTING=VALUE`"):
            with_overrides({"algorithms": given}, ["algorithms.half_life=5ba"])
    with pytest.raises(TrainerConfigError, match="`algorithms` has `EMA` twice"):
        with_overrides({"algorithms": ["EMA", "EMA"]}, ["algorithms.EMA.half_life=5ba"])


def test_a_date_is_text_and_a_value_that_cannot_be_stored_raises_before_training(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("logging: {run_name: 2026-01-02}\n")
    assert resolve(read_config(file))["logging"]["run_name"] == "2026-01-02"
    data = {**CONFIG["data"], "eval": {"name": f"{HERE}:points", "count": dt.date(2026, 1, 2)}}
    with pytest.raises(TrainerConfigError, match=r"`data\.eval\.count` is a `date` that the checkpoints of"):
        trainer_from({**CONFIG, "data": data, "checkpoint": {"save_folder": str(tmp_path / "ckpt")}})


def test_a_timeout_alone_does_not_shard_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.recipes.config.trainer.Trainer", dict)
    arguments: Any = trainer_from({**CONFIG, "parallelism": {"dist_timeout": 60}})
    assert arguments["dist_timeout"] == 60
    assert not {"fsdp_config", "parallelism_config"} & set(arguments)


@pytest.mark.parametrize(
    ("section", "expected"),
    [({}, {"fsdp_config": {}}), ({"fsdp": 2}, {"parallelism_config": {"fsdp": 2}}), (None, {})],
)
def test_an_empty_section_shards_as_an_empty_argument_does(
    monkeypatch: pytest.MonkeyPatch, section: Any, expected: dict[str, Any]
) -> None:
    monkeypatch.setattr("hocket.recipes.config.trainer.Trainer", dict)
    arguments: Any = trainer_from({**CONFIG, "parallelism": section})
    assert {
        name: arguments[name] for name in ("fsdp_config", "parallelism_config") if name in arguments
    } == expected


def test_a_file_is_named_by_text_and_path_with_the_home_folder_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("training: {max_duration: 3ba}\n")
    found = [read_config(place) for place in ("~/run.yaml", Path("~/run.yaml"), tmp_path / "run.yaml")]
    assert found == [{"training": {"max_duration": "3ba"}}] * 3
    for place in ("s3://bucket/run.yaml", Path("s3://bucket/run.yaml")):
        with pytest.raises(
            TrainerConfigError, match=r"there is no file `s3:/.*a URI is not read here, so copy"
        ):
            trainer_from(place)


def test_a_file_takes_its_parts_from_the_modules_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "parts_beside.py").write_text(f"from {HERE} import classifier, points\n")
    (folder / "run.yaml").write_text(
        "model: {name: 'parts_beside:classifier', width: 8}\n"
        "data: {train: {name: 'parts_beside:points', count: 32}, batch_size: 4}\n"
        "training: {max_duration: 1ba, device: cpu}\n"
        "logging: {progress_bar: false}\n"
    )
    save = f"checkpoint.save_folder={tmp_path}/ckpt"
    resume = ("--resume", f"{tmp_path}/ckpt")
    monkeypatch.chdir(elsewhere)
    usual = list(sys.path)
    # The file, then the newest checkpoint, and that of the run that was resumed.
    for given in (
        ("../runs/run.yaml", save),
        (*resume, "training.max_duration=2ba"),
        (*resume, "training.max_duration=3ba"),
    ):
        monkeypatch.setattr("sys.path", list(usual))
        assert not command(*given)
        assert Path(sys.modules.pop("parts_beside").__file__ or "").parent == folder
    assert len(list_checkpoints(tmp_path / "ckpt")) == 3
    monkeypatch.setattr("sys.path", list(usual))
    with trainer_from("../runs/run.yaml"):
        assert Path(sys.modules.pop("parts_beside").__file__ or "").parent == folder
    # On another machine, where the folder does not exist, the modules may be on the path.
    folder.rename(elsewhere / "moved")
    monkeypatch.setattr("sys.path", list(usual))
    assert command(*resume, "training.max_duration=4ba") == 1
    assert "of a module beside the run's file or on `PYTHONPATH`" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr("sys.path", [*usual, str(elsewhere / "moved")])
    assert not command(*resume, "training.max_duration=4ba")
    del sys.modules["parts_beside"]


def test_the_readmes_example_resolves() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    found = resolve(yaml.safe_load(example))
    assert found["scheduler"][0]["t_warmup"] == "100ba"
    assert [part["name"] for part in found["algorithms"]] == ["GradientClipping"]
    assert found["training"]["precision"] == "amp_bf16"


def test_defaults_equal_those_of_the_trainer() -> None:
    found = resolve({"model": "gpt", "training": {"loop": {"log_every": 3}}})
    assert found["training"]["eval_interval"] == 1
    assert found["training"]["loop"] == {**resolve({})["training"]["loop"], "log_every": 3}
    assert found["checkpoint"]["save_interval"] == "1ep"


def test_the_command_prints_trains_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(CONFIG | {"checkpoint": {"save_folder": str(tmp_path / "ckpt")}}))

    assert not command(str(file), "optimizer.lr=3e-4", "--print")
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["optimizer"] == {"name": "DecoupledAdamW", "lr": 0.0003}
    assert resolved["training"]["precision"] == "amp_bf16"
    assert not (tmp_path / "ckpt").exists()
    assert not command(str(file), "optimizer.lr=3e-4", "training.max_duration=1ep")
    assert not command("--resume", str(tmp_path / "ckpt"), "training.max_duration=2ep")
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["ep1-ba6", "ep2-ba12"]
    capsys.readouterr()
    assert command(str(file), "optimiser.lr=1") == 1
    assert "did you mean `optimizer`" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(TrainerConfigError, match="no file"):
        trainer_from(tmp_path / "none.yaml")


def test_a_resumed_fine_tune_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    # A name that YAML would read as a mapping.
    pretrained, tuned = tmp_path / "pretrained", tmp_path / "tuned: 1"
    file = tmp_path / "run.yaml"
    changes = [f"checkpoint={{save_folder: {pretrained}}}", "training.max_duration=1ep"]
    with trainer_from(CONFIG, changes) as trainer:
        trainer.fit()
    load = {
        "load_path": f"{pretrained}/ep1-ba6",
        "load_weights_only": True,
        "load_strict_model_weights": False,
        "load_ignore_keys": ["state/model/module.2*"],
        "load_exclude_algorithms": ["LabelSmoothing"],
        "load_progress_bar": False,
    }
    file.write_text(yaml.safe_dump({**CONFIG, "checkpoint": {"save_folder": str(tuned), **load}}))
    assert not command(str(file), "training.max_duration=1ep")
    config, folder = config_to_resume(tuned)
    resumed = config["checkpoint"]
    assert folder == str(tmp_path)
    defaults = resolve({})["checkpoint"]
    expected = {"load_path": f"{tuned}/ep1-ba6", "load_progress_bar": False, "save_folder": str(tuned)}
    assert resolve({"checkpoint": resumed})["checkpoint"] == defaults | expected
    assert not command("--resume", str(tuned), "training.max_duration=2ep")
    assert [entry.name for entry in list_checkpoints(tuned)] == ["ep1-ba6", "ep2-ba12"]


def test_resume_of_a_checkpoint_is_stronger_than_autoresume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, other = tmp_path / "ckpt", tmp_path / "other"
    with trainer_from(CONFIG, [f"checkpoint={{save_folder: {folder}, autoresume: true}}"]) as trainer:
        trainer.fit()
    capsys.readouterr()
    assert command("--resume", f"{folder}/ep1-ba6", "training.max_duration=3ep") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "has checkpoints up to batch 12, and this training starts at batch 6" in said
    assert not command("--resume", f"{folder}/ep1-ba6", f"checkpoint.save_folder={other}")
    assert [entry.name for entry in list_checkpoints(other)] == ["ep2-ba12"]
    # The newest checkpoint of the folder is the one that `autoresume` finds, and the run is finished.
    assert not command("--resume", f"{folder}/")
    assert "it is finished" in " ".join(capsys.readouterr().err.split())
    assert not command("--resume", str(folder), "training.max_duration=3ep")
    assert [entry.name for entry in list_checkpoints(folder)] == ["ep1-ba6", "ep2-ba12", "ep3-ba18"]


def test_a_finished_run_is_no_failure_however_it_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ckpt"
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, "checkpoint": {"save_folder": str(folder)}}))
    assert not command(str(file))
    names = [entry.name for entry in list_checkpoints(folder)]
    capsys.readouterr()
    for given in (
        (str(file), "checkpoint.autoresume=true"),
        ("--resume", str(folder)),
        ("--resume", f"{folder}/{names[-1]}"),
        ("--resume", str(folder), "training.max_duration=1ba"),
    ):
        assert not command(*given), given
        told = " ".join(capsys.readouterr().err.split())
        assert re.search(r"it is finished; a longer `(training\.)?max_duration` goes on", told), told
    assert [entry.name for entry in list_checkpoints(folder)] == names
    # A run that starts from another's weights, and would not train, is not finished but wrong.
    start = f"checkpoint={{load_path: {folder}/{names[-1]}}}"
    assert command(str(file), start) == 1
    assert not command("--resume", str(folder), "training.max_duration=3ep")


def test_the_command_prints_the_message_of_a_training_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, "algorithms": {"Alibi": {"max_sequence_length": 8}}}))
    assert command(str(file)) == 1
    assert "hocket train: Alibi found no attention" in capsys.readouterr().err
    # Square brackets are no markup.
    assert command(str(file), "lr[b]") == 1
    assert "`lr[b]` is no setting" in capsys.readouterr().err


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


def test_a_folder_without_a_hugging_face_model_raises_a_message_about_it() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(TrainerConfigError, match="`hf:/nowhere/at/all` cannot be read"):
        trainer_from({**CONFIG, "model": "hf:/nowhere/at/all"})


def test_a_hugging_face_model_is_loaded_from_its_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    with trainer_from({**CONFIG, "model": {"name": f"hf:{tmp_path}", "use_logits": True}}) as trainer:
        assert type(trainer.state.model.model).__name__ == "BertForSequenceClassification"
    settings = {"hidden_dropout_prob": 0.3, "local_files_only": True}
    with trainer_from({**CONFIG, "model": {"name": f"hf:{tmp_path}", **settings}}) as trainer:
        assert trainer.state.model.model.config.hidden_dropout_prob == 0.3
    with pytest.raises(
        TrainerConfigError, match="`hiden_dropout_prob` is unknown in `model`; did you mean `hid"
    ):
        trainer_from({**CONFIG, "model": {"name": f"hf:{tmp_path}", "hiden_dropout_prob": 0.3}})
    with pytest.raises(
        TrainerConfigError, match="`use_logit` is unknown in `model`; did you mean `use_logits`"
    ):
        trainer_from({**CONFIG, "model": {"name": f"hf:{tmp_path}", "use_logit": True}})


def test_the_groups_of_the_trainer_are_the_groups_of_the_file() -> None:
    loop = resolve({"training": {"loop": {"fast_dev_run": 2}}})["training"]["loop"]
    assert loop == {**resolve({})["training"]["loop"], "fast_dev_run": 2}
    for section, name, place in (
        ("training", "prefetch_depth", "training.loop.prefetch_depth"),
        ("logging", "log_every", "training.loop.log_every"),
        ("checkpoint", "save_async", "checkpoint.checkpointing.asynchronous"),
    ):
        with pytest.raises(TrainerConfigError, match=f"`{section}.{name}` is now `{place}`"):
            resolve({section: {name: 1}})
    with pytest.raises(TrainerConfigError, match=r"`prefetch` is unknown in `training.loop`; did you mean"):
        resolve({"training": {"loop": {"prefetch": 1}}})
    with pytest.raises(TrainerConfigError, match=r"`training.loop.prefetch_depth` is `'a'`; expected a"):
        resolve({"training": {"loop": {"prefetch_depth": "a"}}})


def test_a_stored_configuration_with_flat_settings_is_regrouped() -> None:
    stored = {
        "training": {"prefetch_depth": 0, "seed": 3},
        "checkpoint": {"save_async": True, "fast_dev_run": False, "save_folder": "run"},
        "logging": {"log_every": 5},
    }
    assert regrouped(stored) == {
        "training": {
            "seed": 3,
            "loop": {"prefetch_depth": 0, "log_every": 5, "fast_dev_run": False},
        },
        "checkpoint": {"save_folder": "run", "checkpointing": {"asynchronous": True}},
        "logging": {},
    }
    assert resolve(regrouped(stored))["training"]["loop"]["log_every"] == 5
