"""Arguments of Composer that Hocket's own classes do not have, or treat differently."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import hocket.compat.composer as composer
from hocket.compat.composer import algorithms, callbacks, loggers, methods, optim, profiler, utils
from hocket.compat.composer.models import ComposerClassifier
from hocket.trainer.errors import ResumeError, TrainerConfigError


def make_trainer(**arguments: Any) -> composer.Trainer:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(16, 2), torch.arange(16) % 3)
    model = arguments.pop("model", None) or ComposerClassifier(nn.Linear(2, 3), num_classes=3)
    settings: dict[str, Any] = {
        "train_dataloader": DataLoader(data, batch_size=4),
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "max_duration": "4ba",
        "device": "cpu",
        "progress_bar": False,
    }
    return composer.Trainer(model=model, **(settings | arguments))


def fit(**arguments: Any) -> composer.Trainer:
    with make_trainer(**arguments) as trainer:
        trainer.fit()
    return trainer


class Rates(composer.Callback):
    """A callback that records the learning rate after each batch, which is that of the next one."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def batch_end(self, state: composer.State, logger: composer.Logger) -> None:
        self.seen.append(state.optimizers[0].param_groups[0]["lr"])


@pytest.fixture
def saved(tmp_path: Path) -> str:
    with make_trainer(save_folder=str(tmp_path / "saved")) as trainer:
        trainer.fit()
        (path,) = trainer.saved_checkpoints
    return path


def test_a_load_ignore_key_that_matches_nothing_warns(saved: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"`state/modle/\*` of `load_ignore_keys` matches nothing"):
        trainer = make_trainer(load_path=saved, load_ignore_keys=["state/modle/*", "state/optimizers"])
    with trainer:
        assert trainer.state.timestamp.batch == 4
    with pytest.warns(UserWarning, match="`nothing` of `save_ignore_keys` matches nothing"):
        fit(save_folder=str(tmp_path / "more"), save_ignore_keys=["nothing"])


def test_a_load_ignore_key_may_be_in_the_checkpoint_only(saved: str) -> None:
    with pytest.warns(UserWarning, match="matches nothing in this run"):
        trainer = make_trainer(
            model=(model := ComposerClassifier(nn.Linear(2, 3, bias=False), num_classes=3)),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            load_path=saved,
            load_weights_only=True,
            load_strict_model_weights=True,
            load_ignore_keys=["state/model/module.bias"],
        )
    trainer.close()


def test_a_run_loaded_from_another_runs_checkpoint_has_its_own_name(tmp_path: Path) -> None:
    # The run must not log and save under the other run's name.
    with make_trainer(save_folder=str(tmp_path), run_name="first") as trainer:
        trainer.fit()
        (path,) = trainer.saved_checkpoints
    for keys in (None, ["state/callbacks/*"], lambda tree: None):
        with make_trainer(load_path=path, load_ignore_keys=keys, callbacks=[Rates()]) as trainer:
            assert trainer.state.timestamp.batch == 4
            assert trainer.state.run_name != "first"
    with make_trainer(save_folder=str(tmp_path), run_name="first", autoresume=True) as trainer:
        assert trainer.state.run_name == "first"


def test_load_ignore_keys_use_the_models_names(saved: str) -> None:
    settings: dict[str, Any] = {"load_path": saved, "load_weights_only": True}
    with make_trainer(**settings, load_ignore_keys=["state/model/module.bias"]) as trainer:
        kept = trainer.state.model.state_dict()
    with make_trainer(**settings) as trainer:
        loaded = trainer.state.model.state_dict()
    assert torch.equal(kept["module.weight"], loaded["module.weight"])
    assert not torch.equal(kept["module.bias"], loaded["module.bias"])


def test_a_load_ignore_function_gets_the_tree_under_the_key_state(saved: str) -> None:
    fresh = make_trainer(load_path=None)
    weight = fresh.state.model.state_dict()["module.weight"].clone()
    fresh.close()

    def ignore(tree: dict[str, Any]) -> None:
        del tree["state"]["model"]["module.weight"]

    with make_trainer(load_path=saved, load_weights_only=True, load_ignore_keys=ignore) as trainer:
        assert torch.equal(trainer.state.model.state_dict()["module.weight"], weight)


def test_a_schedule_may_be_a_function_of_the_state_only() -> None:
    rates = Rates()
    fit(schedulers=lambda state: 1.0 if state.timestamp.batch < 2 else 0.5, callbacks=[rates])
    assert rates.seen == pytest.approx([0.1, 0.1, 0.05, 0.05])

    class Halves:
        def __call__(self, state: composer.State) -> float:
            return 0.5

    rates = Rates()
    fit(schedulers=[Halves(), optim.ConstantScheduler()], callbacks=[rates])
    assert rates.seen == pytest.approx([0.1] * 4)  # the last schedule decides
    with pytest.raises(TrainerConfigError, match="`Halves` takes the state alone"):
        fit(schedulers=Halves(), scale_schedule_ratio=2.0)


def test_a_warmup_over_the_whole_run_ends_at_its_highest_rate() -> None:
    rates = Rates()
    trainer = fit(schedulers=optim.LinearWithWarmupScheduler("4ba", 1.0, 0.0, "4ba"), callbacks=[rates])
    assert rates.seen == pytest.approx([0.0, 0.025, 0.05, 0.075])
    schedule = trainer.state.schedulers[0]
    assert schedule(trainer.state) == 1.0


def test_load_checkpoint_accepts_composers_arguments_and_names(saved: str) -> None:
    latest = f"{saved.rpartition('/')[0]}/latest-rank0.pt"
    load = callbacks.LoadCheckpoint(latest, load_weights_only=True, strict_model_weights=False)
    with make_trainer() as trained:
        before = trained.state.model.state_dict()["module.weight"].clone()
    with make_trainer(callbacks=[load]) as trainer:
        after = trainer.state.model.state_dict()["module.weight"]
        assert not torch.equal(before, after)
        assert trainer.state.timestamp.batch == 0
    assert load.strict is False
    assert load.load_path == saved


def test_save_metrics_restores_train_and_eval_metrics(tmp_path: Path) -> None:
    data = DataLoader(TensorDataset(torch.randn(16, 2), torch.arange(16) % 3), batch_size=4)
    settings: dict[str, Any] = {"eval_dataloader": data, "max_duration": "1ep"}
    first = fit(**settings, save_folder=str(tmp_path), save_metrics=True)
    with make_trainer(**settings, load_path=str(tmp_path / "latest-rank0.pt")) as trainer:
        state = trainer.state
        for found, before in (
            (state.train_metrics, first.state.train_metric_values),
            (state.eval_metrics["eval"], first.state.eval_metric_values),
        ):
            name = "MulticlassAccuracy"
            assert isinstance(found[name], MulticlassAccuracy)
            assert float(found[name].compute()) == pytest.approx(float(before[name]))


def test_mlflow_logger_accepts_composers_arguments(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    made = loggers.MLFlowLogger(
        "experiment",
        "run",
        None,
        uri,
        True,
        10,
        "",
        None,
        True,
        False,
        {"a": "b"},
        None,
        None,
        "group",
        False,
        5,
        7,
    )
    assert vars(made).items() >= {"experiment_name": "experiment", "run_name": "run"}.items()


def test_export_accepts_composers_arguments(saved: str, tmp_path: Path) -> None:
    torch.manual_seed(9)
    model = ComposerClassifier(nn.Linear(2, 3), num_classes=3)
    before = model.state_dict()["module.weight"].clone()
    sample = (torch.ones(4, 2), torch.zeros(4, dtype=torch.long))
    path = str(tmp_path / "model.pt2")
    axes = {"input": {0: "batch"}}
    utils.export_for_inference(
        model, "torch_export", path, None, sample, axes, load_path=saved, load_strict=True
    )
    exported = torch.export.load(path)
    (weight,) = (value for name, value in exported.state_dict.items() if name.endswith("weight"))
    assert not torch.equal(weight, before)
    assert torch.equal(model.state_dict()["module.weight"], before)
    with pytest.raises(TrainerConfigError, match="`onnx_opset_version` of `export_for_inference` is"):
        utils.export_for_inference(model, "onnx", path, None, sample, onnx_opset_version=9)
    with pytest.raises(TrainerConfigError, match="`input_names` and `output_names` are for ONNX"):
        utils.export_for_inference(model, "torch_export", path, None, sample, input_names=["x"])


def test_weights_are_exported_into_a_model_after_its_surgery(tmp_path: Path) -> None:
    def images() -> ComposerClassifier:
        layers = nn.Sequential(nn.Conv2d(4, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
        return ComposerClassifier(layers, num_classes=3)

    model = images()
    data = TensorDataset(torch.randn(8, 4, 6, 6), torch.arange(8) % 3)
    with make_trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
        algorithms=[composer.algorithms.SqueezeExcite(min_channels=4)],
        save_folder=str(tmp_path),
    ) as trainer:
        trainer.fit()
        saved = trainer.saved_checkpoints[-1]
        sample = tuple(data[:4])
        expected = trainer.state.model.eval()(sample)
    path = str(tmp_path / "model.pt2")
    fresh = images()
    surgery = functools.partial(composer.functional.apply_squeeze_excite, min_channels=4)
    utils.export_for_inference(
        fresh,
        "torch_export",
        path,
        sample_input=sample,
        surgery_algs=[surgery],
        load_path=saved,
        load_strict=True,
    )
    torch.testing.assert_close(torch.export.load(path).module()(sample), expected)
    assert len(list(fresh.modules())) == len(list(images().modules()))
    with pytest.raises(ResumeError, match="a model that `SqueezeExcite` changed"):
        utils.export_for_inference(fresh, "torch_export", path, sample_input=sample, load_path=saved)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_onnx_programs_have_composers_names_and_no_unused_inputs(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs `uv sync --group onnx`")
    reference = pytest.importorskip("onnx.reference", reason="needs `uv sync --group onnx`")

    def names(model: nn.Module, sample: Any, **arguments: Any) -> tuple[list[str], list[str]]:
        path = str(tmp_path / "model.onnx")
        utils.export_for_inference(model, "onnx", path, sample_input=sample, **arguments)
        session = reference.ReferenceEvaluator(path)
        return session.input_names, session.output_names

    model = ComposerClassifier(nn.Linear(2, 3), num_classes=3)
    sample = (torch.ones(4, 2), torch.zeros(4, dtype=torch.long))
    assert names(model, (sample, {})) == (["input"], ["output"])
    given = {"input_names": ["pixels", "label"], "output_names": ["logits"]}
    assert names(model, sample, **given) == (["pixels"], ["logits"])
    batch = {"a": torch.ones(4, 2), "labels": torch.ones(4, 2), "b": torch.ones(4, 2)}
    assert names(Product(), batch) == (["a", "b"], ["output"])


class Product(nn.Module):
    """A model of named inputs that does not use all of them."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["a"] * batch["b"]


def test_torchprofiler_is_a_callback_that_configures_the_profiler(tmp_path: Path) -> None:
    with pytest.raises(TrainerConfigError, match="`TorchProfiler` follows the schedule of a profiler"):
        make_trainer(callbacks=[profiler.TorchProfiler()])
    fit(
        profiler=profiler.Profiler(
            profiler.cyclic_schedule(wait=0, warmup=1, active=2, repeat=1),
            trace_handlers=[profiler.JSONTraceHandler(folder=str(tmp_path / "json"))],
            torch_prof_profile_memory=False,
            torch_prof_with_flops=False,
        ),
        callbacks=[
            profiler.TorchProfiler(str(tmp_path / "traces"), record_shapes=True, num_traces_to_keep=1)
        ],
    )
    (trace,) = (tmp_path / "traces").iterdir()
    assert "Input Dims" in trace.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_inner_names_without_counterpart_raise_with_the_alternative() -> None:
    for name in ("BERTGatedFFOutput", "make_resnet_bottleneck_stochastic"):
        with pytest.raises(NotImplementedError, match=f"Hocket has no `composer.algorithms.{name}`; "):
            getattr(methods, name)()
    assert not hasattr(algorithms, "BERTGatedFFOutput")


def test_images_are_logged_every_second_epoch() -> None:
    logger = loggers.InMemoryLogger()
    images = TensorDataset(torch.rand(8, 1, 2, 2), torch.arange(8) % 3)
    fit(
        model=(model := ComposerClassifier(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), num_classes=3)),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=DataLoader(images, batch_size=4),
        max_duration="5ep",
        callbacks=[callbacks.ImageVisualizer("2ep")],
        loggers=[logger],
    )
    assert [step for step, _ in logger.images["Images/Train"]] == [0, 4, 8]


@pytest.mark.parametrize(("interval", "asks_at"), [("3ba", [3, 4]), ("2ba", [2, 4])])
def test_an_interval_may_have_its_own_final_event(interval: str, asks_at: list[int]) -> None:
    is_time = utils.create_interval_scheduler(
        interval, checkpoint_events=False, final_events={composer.Event.FIT_END}
    )
    seen: list[tuple[str, int]] = []

    class Asks(composer.Callback):
        def run_event(self, event: Any, state: composer.State, logger: composer.Logger) -> None:
            if is_time(state, event):
                seen.append((event.value, state.timestamp.batch.value))

    fit(callbacks=[Asks()])
    assert [batch for _, batch in seen] == asks_at
    assert seen[0][0] == "batch_end"
    assert seen[-1][0] == ("fit_end" if interval == "3ba" else "batch_end")


def test_the_run_name_replaces_its_field_in_load_path(tmp_path: Path) -> None:
    folder = str(tmp_path / "{run_name}")
    fit(run_name="a-run", save_folder=folder, max_duration="2ba")
    again = fit(run_name="a-run", load_path=f"{folder}/ep0-ba2-rank0.pt", max_duration="3ba")
    assert again.state.timestamp.batch == "3ba"


def test_a_schedule_with_two_units_raises_a_value_error_as_in_composer() -> None:
    schedule = optim.LinearWithWarmupScheduler(t_warmup="10tok", t_max="4ba")
    with pytest.raises(ValueError, match="give both in one unit"):
        fit(schedulers=schedule)


def test_an_evaluators_fields_may_be_assigned_before_a_trainer_gets_it() -> None:
    rows = [(torch.zeros(2), 0)] * 4
    evaluator = composer.Evaluator(label="test", dataloader=DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    with pytest.raises(TrainerConfigError, match="subset_num_batches"):
        evaluator.subset_num_batches = 0  # type: ignore[misc]
    assert evaluator.subset_num_batches is None
    evaluator.eval_interval = "3ba"  # type: ignore[misc]
    with make_trainer(eval_dataloader=evaluator) as trainer:
        (own,) = trainer.state.evaluators
        assert own.eval_interval == "3ba"
        assert own.label == "test"
