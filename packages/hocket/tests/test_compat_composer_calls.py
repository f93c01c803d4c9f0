"""Calls from Composer's guides and tutorials run with the layer."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import hocket.compat.composer as composer
from hocket.compat.composer.algorithms import EMA, GradientClipping, MixedPrecision
from hocket.compat.composer.callbacks import (
    EarlyStopper,
    LRMonitor,
    MemoryMonitor,
    RuntimeEstimator,
    SpeedMonitor,
    ThresholdStopper,
)
from hocket.compat.composer.install import MODULES
from hocket.compat.composer.loggers import FileLogger, InMemoryLogger, TQDMLogger
from hocket.compat.composer.metrics import CrossEntropy
from hocket.compat.composer.models import ComposerClassifier, ComposerResNet, HuggingFaceModel
from hocket.compat.composer.optim import DecoupledAdamW, MultiStepScheduler
from hocket.compat.composer.profiler import JSONTraceHandler, Profiler, SystemProfiler, cyclic_schedule
from hocket.trainer.errors import ResumeError, TrainerConfigError
from support.ranks import run_ranks


def make_loader(rows: int = 16) -> DataLoader[Any]:
    data = torch.randn(rows, 2, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(data, torch.arange(rows) % 3), batch_size=4)


def make_model() -> ComposerClassifier:
    torch.manual_seed(3)
    return ComposerClassifier(
        torch.nn.Linear(2, 3),
        num_classes=3,
        train_metrics=[CrossEntropy(), MulticlassAccuracy(3, average="micro")],
    )


def make_trainer(**arguments: Any) -> composer.Trainer:
    model = arguments.pop("model", None) or make_model()
    if "optimizers" not in arguments:
        arguments["optimizers"] = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {
        "train_dataloader": make_loader(),
        "max_duration": "2ep",
        "device": "cpu",
        "progress_bar": False,
    }
    return composer.Trainer(model=model, **(settings | arguments))


def fit(**arguments: Any) -> composer.Trainer:
    with make_trainer(**arguments) as trainer:
        trainer.fit()
    return trainer


def test_load_object_store_and_fp8_arguments_reach_the_trainer() -> None:
    with pytest.raises(TrainerConfigError, match=r"`load_object_store` is a `object`"):
        make_trainer(load_path="run/ep0-ba2", load_object_store=object())
    with pytest.raises(TrainerConfigError, match=r"`precision_config` has the scaling of fp8"):
        make_trainer(precision_config={"margin": 0})


def test_gradient_clipping_is_by_norm() -> None:
    clipping = GradientClipping(clipping_threshold=1.0)
    fit(algorithms=[clipping])
    assert clipping.clipping_type == "norm"


def test_stoppers_read_the_label_from_the_metrics_name() -> None:
    stopped = fit(
        optimizers=torch.optim.SGD((model := make_model()).parameters(), lr=0.0),
        model=model,
        max_duration="9ep",
        callbacks=[EarlyStopper(monitor="metrics/train/CrossEntropy", patience="2ep")],
    )
    assert stopped.state.timestamp.epoch == 4
    reached = fit(
        max_duration="9ep",
        eval_dataloader=make_loader(),
        callbacks=[ThresholdStopper("metrics/eval/MulticlassAccuracy", threshold=0.0)],
    )
    assert reached.state.timestamp.epoch == 1
    with pytest.raises(TrainerConfigError, match=r"there are: `CrossEntropy`, `MulticlassAccuracy`"):
        fit(callbacks=[EarlyStopper(monitor="metrics/train/Accuracy", patience="2ep")])


def test_a_hugging_face_model_measures_its_tasks_metrics() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=3,
    )
    model = HuggingFaceModel(
        transformers.BertForSequenceClassification(config), tokenizer=None, use_logits=True
    )
    rows = [{"input_ids": torch.arange(4) + row, "labels": torch.tensor(row % 3)} for row in range(6)]
    trainer = fit(
        model=model,
        train_dataloader=DataLoader(rows, batch_size=3),  # type: ignore[arg-type]
        eval_dataloader=DataLoader(rows, batch_size=3),  # type: ignore[arg-type]
        max_duration="1ep",
    )
    assert "MulticlassAccuracy" in trainer.state.eval_metrics["eval"]


def test_mixed_precision_sets_half_precision() -> None:
    assert fit(algorithms=[MixedPrecision()]).state.precision == "amp_bf16"
    with pytest.raises(TrainerConfigError, match="leave one of them out"):
        make_trainer(algorithms=[MixedPrecision()], precision="fp32")


def test_the_profiler_writes_a_memory_page_with_everything_else_at_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    profiler = Profiler(
        trace_handlers=[JSONTraceHandler(folder="traces")],
        schedule=cyclic_schedule(wait=0, warmup=1, active=2, repeat=1),
        torch_prof_memory_filename="memory_timeline.html",
    )
    fit(
        run_name="profiled",
        profiler=profiler,
        callbacks=[SystemProfiler(profile_cpu=True, stats_thread_interval_seconds=0.01)],
    )
    assert list((tmp_path / "profiled" / "torch_traces").rglob("memory_timeline.html"))
    assert list((tmp_path / "traces").iterdir())
    told = [line for line in caplog.messages if "memory timeline needs" in line]
    assert told == ["the memory timeline needs record_shapes, with_stack, which are on now"]
    with pytest.raises(TrainerConfigError, match="set `Trainer"):
        fit(callbacks=[SystemProfiler()])


def log_to_files(folder: str) -> list[str]:
    for _ in range(2):
        logger = FileLogger(filename=f"{folder}/training_log.txt", flush_interval=50)
        fit(loggers=[logger], max_duration=1, run_name="again", train_dataloader=make_loader(16))
    return sorted(os.listdir(folder))


def test_a_file_logger_continues_a_file_under_the_runs_name(tmp_path: Path) -> None:
    log_to_files(str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "training_log.txt").read_text().splitlines()]
    assert [line for line in lines if "run_name" in line] == [{"run_name": "again"}]
    at = lines.index({"run_name": "again"})
    assert [line["step"] for line in lines[:at] if "loss/train/total" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines[at:] if "loss/train/total" in line] == [1, 2, 3, 4]


@pytest.mark.slow
def test_other_ranks_log_to_files_of_their_own(tmp_path: Path) -> None:
    run_ranks(log_to_files, 2, str(tmp_path), init="gloo", timeout_s=200)
    assert sorted(os.listdir(tmp_path)) == ["training_log-rank1.txt", "training_log.txt"]


class SwappedLoss(composer.ComposerModel):
    """A model whose `loss` has the batch as first argument, and whose `__init__` does not call `super`'s."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(2, 3)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0])

    def loss(self, batch: Any, outputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch[1])


def test_a_loss_with_the_batch_first_is_recognized_by_its_argument_names() -> None:
    trainer = fit(model=SwappedLoss())
    assert trainer.state.timestamp.batch == 8


@pytest.mark.parametrize(("duration", "batches"), [(3, 12), ("3ep", 12), ("5ba", 5)])
def test_durations_may_be_integers_and_strings(duration: Any, batches: int) -> None:
    assert fit(max_duration=duration).state.timestamp.batch == batches


def test_the_default_optimizer_is_decoupled_sgd() -> None:
    with pytest.warns(UserWarning, match="DecoupledSGDW"):
        trainer = fit(optimizers=None)
    assert type(trainer.state.optimizers[0]).__name__ == "DecoupledSGDW"
    assert trainer.state.optimizers[0].param_groups[0]["lr"] == 0.1


def test_schedules_of_torch_and_composer_work_together() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    logger = InMemoryLogger()
    fit(
        model=model,
        optimizers=optimizer,
        max_duration="10ep",
        schedulers=[
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2),
            MultiStepScheduler(milestones=["0.3dur", "0.5dur", "0.9dur"]),
        ],
        callbacks=[LRMonitor()],
        loggers=[logger],
    )
    rates = [value for _, value in logger.data["lr-SGD/group0"]][::4]
    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01, 0.001])


def test_monitors_and_loggers_of_tutorials_run() -> None:
    logger = InMemoryLogger()
    fit(
        max_duration="10ep",
        callbacks=[SpeedMonitor(window_size=8), RuntimeEstimator(), LRMonitor(), MemoryMonitor()],
        loggers=[logger, TQDMLogger()],
    )
    assert {"throughput/batches_per_sec", "lr-SGD/group0", "loss/train/total"} <= set(logger.data)
    assert any(name.startswith("time/remaining") for name in logger.data)


def test_checkpoint_names_of_tutorials_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saving = {
        "save_folder": "./checkpoints",
        "save_filename": "ep{epoch}-ba{batch}-rank{rank}.pt",
        "save_latest_filename": "latest-rank{rank}.pt",
        "save_interval": "1ep",
        "save_num_checkpoints_to_keep": 3,
        "save_overwrite": True,
    }
    fit(max_duration="5ep", **saving)
    assert sorted(os.listdir("checkpoints")) == ["ep3-ba12", "ep4-ba16", "ep5-ba20"]
    for path in (
        "checkpoints/latest-rank0.pt",
        "checkpoints",
        "checkpoints/latest",
        "checkpoints/ep5-ba20-rank0.pt",
        f"file://{tmp_path}/checkpoints/latest-rank0.pt",
    ):
        with make_trainer(load_path=path, max_duration="6ep") as trainer:
            assert trainer.state.timestamp.batch == 20
    with pytest.raises(TrainerConfigError, match="there is none"):
        make_trainer(load_path="elsewhere/latest-rank0.pt")
    with make_trainer(load_path="checkpoints/ep4-ba16-rank0.pt", load_weights_only=True) as trainer:
        assert trainer.state.timestamp.batch == 0


def composer_file(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint file in the layout of Composer's trainer."""
    names = [name for name, _ in model.named_parameters()]
    given = optimizer.state_dict()
    state = {
        "model": model.state_dict(),
        "optimizers": {
            type(optimizer).__name__: {
                "state": {name: given["state"][index] for index, name in enumerate(names)},
                "param_groups": [{**given["param_groups"][0], "params": names}],
            }
        },
        "timestamp": {"Timestamp": {"epoch": 1, "batch": 4, "sample": 16, "batch_in_epoch": 0}},
        "rank_zero_seed": 11,
        "run_name": "old",
        "callbacks": [("SpeedMonitor", {"total": 1})],
    }
    torch.save({"state": state, "rng": []}, path)


def test_a_run_resumes_from_a_checkpoint_of_composer(tmp_path: Path) -> None:
    model = make_model()
    optimizer = DecoupledAdamW(model.parameters(), lr=0.01)
    half = fit(model=model, optimizers=optimizer, max_duration="1ep", train_dataloader=make_loader())
    composer_file(tmp_path / "ep1-ba4-rank0.pt", half.state.model, optimizer)
    (model := make_model()).requires_grad_(True)
    resumed = fit(
        model=model,
        optimizers=DecoupledAdamW(model.parameters(), lr=0.5),
        load_path=str(tmp_path / "ep1-ba4-rank0.pt"),
    )
    assert resumed.state.timestamp.batch == 8
    assert resumed.state.seed == 11
    whole = fit(model=(model := make_model()), optimizers=DecoupledAdamW(model.parameters(), lr=0.01))
    torch.testing.assert_close(resumed.state.model.state_dict(), whole.state.model.state_dict())
    with make_trainer(load_path=str(tmp_path / "ep1-ba4-rank0.pt"), load_weights_only=True) as trainer:
        assert trainer.state.timestamp.batch == 0
        torch.testing.assert_close(trainer.state.model.state_dict(), half.state.model.state_dict())
    with pytest.raises(ResumeError, match="make the same one"):
        make_trainer(load_path=str(tmp_path / "ep1-ba4-rank0.pt"))
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(ResumeError, match="cannot be read"):
        make_trainer(load_path=str(tmp_path / "text.pt"))


def test_composers_checkpoint_with_averages_in_the_model_resumes_from_the_trained_weights(
    tmp_path: Path,
) -> None:
    def run(**arguments: Any) -> tuple[composer.Trainer, EMA]:
        average, model = EMA(half_life="2ba"), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return fit(model=model, optimizers=optimizer, algorithms=[average], **arguments), average

    half, average = run(max_duration="1ep")
    trained = copy.deepcopy(half.state.model.state_dict())
    composer_file(path := tmp_path / "ep1.pt", half.state.model, half.state.optimizers[0])
    saved = torch.load(path)
    saved["state"]["model"] = dict(average.averaged_weights())
    kept = {"named_parameters_dict": trained, "named_buffers_dict": {}}
    record = {"ema_model": kept, "ema_weights_active": True, "ema_started": True}
    saved["state"]["algorithms"] = [("EMA", record)]
    torch.save(saved, path)
    whole, whole_average = run()
    resumed, resumed_average = run(load_path=str(path))
    assert resumed.state.timestamp.batch == 8
    torch.testing.assert_close(resumed.state.model.state_dict(), whole.state.model.state_dict())
    torch.testing.assert_close(
        dict(resumed_average.averaged_weights()), dict(whole_average.averaged_weights())
    )
    # Without `EMA` the run starts from the averages, as in Composer.
    with make_trainer(load_path=str(path)) as trainer:
        torch.testing.assert_close(dict(trainer.state.model.state_dict()), saved["state"]["model"])


def test_a_composer_file_of_a_hugging_face_model_becomes_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    inner = transformers.BertForSequenceClassification(config)
    saved = {
        "config": {
            "file_extension": ".json",
            "content": inner.config.to_dict() | {"model_type": "bert"},
            "class": "transformers.models.bert.modeling_bert.BertForSequenceClassification",
        }
    }
    tokenizer = {"vocab": {"file_extension": ".txt", "content": ["[PAD]", "a", "b"]}}
    state = {
        "model": {f"model.{name}": value for name, value in inner.state_dict().items()},
        "integrations": {"huggingface": {"model": saved, "tokenizer": tokenizer}},
    }
    torch.save({"state": state, "rng": []}, tmp_path / "hf.pt")
    composer.models.write_huggingface_pretrained_from_composer_checkpoint(
        tmp_path / "hf.pt", tmp_path / "out"
    )
    back = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(back.state_dict(), inner.state_dict())
    assert (tmp_path / "out" / "vocab.txt").read_text() == "[PAD]\na\nb"


def test_composers_resnet_uses_torchvision() -> None:
    pytest.importorskip("torchvision", reason="needs `uv sync --group models`")
    model = ComposerResNet(
        model_name="resnet18", num_classes=7, initializers=["kaiming_normal", "bn_uniform"]
    )
    data = TensorDataset(torch.randn(2, 3, 32, 32), torch.tensor([1, 6]))
    trainer = fit(model=model, train_dataloader=DataLoader(data, batch_size=2), max_duration="1ba")
    assert trainer.state.outputs.shape == (2, 7)
    with pytest.raises(TrainerConfigError, match="`resnet50`"):
        ComposerResNet("resnet_fifty")


def test_a_data_spec_works_with_composers_functions() -> None:
    def split(batch: Any, microbatch_size: int) -> list[Any]:
        starts = range(0, len(batch[0]), microbatch_size)
        return [tuple(part[start : start + microbatch_size] for part in batch) for start in starts]

    spec = composer.DataSpec(
        make_loader(),
        split_batch=split,
        get_num_samples_in_batch=lambda batch: len(batch[0]),
        get_num_tokens_in_batch=lambda batch: {"total": 5 * len(batch[0]), "loss_generating": len(batch[0])},
    )
    trainer = fit(train_dataloader=spec, device_train_microbatch_size=3, max_duration="1ep")
    assert trainer.state.timestamp.token == 80
    assert trainer.state.timestamp.sample == 16


def test_a_users_own_algorithm_matches_and_applies() -> None:
    times: list[str] = []

    class Scale(composer.Algorithm):
        def match(self, event: Any, state: Any) -> bool:
            return event == composer.Event.AFTER_LOSS and state.timestamp.batch % 2 == 0

        def apply(self, event: Any, state: Any, logger: Any) -> None:
            times.append(str(state.timestamp.batch))

    fit(algorithms=[Scale()], max_duration="1ep")
    assert times == ["0ba", "2ba"]
    Scale.backwards_create_graph = True  # type: ignore[attr-defined]  # of no effect, and without a word
    with pytest.raises(TrainerConfigError, match=r"`Scale\.backwards_create_graph` is set"):
        make_trainer(algorithms=[Scale()])


def test_a_users_own_loop_works_with_functional_methods() -> None:
    import hocket.compat.composer.functional as cf

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, stride=2), torch.nn.Flatten(), torch.nn.LazyLinear(3)
    )
    inputs, targets = torch.randn(8, 3, 8, 8), torch.arange(8) % 3
    model(inputs)
    cf.apply_blurpool(model, min_channels=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in itertools.repeat(None, 8):
        mixed, permuted, share = cf.mixup_batch(inputs, targets, alpha=0.2)[:3]
        logits = model(mixed)
        smoothed = cf.smooth_labels(logits, targets, smoothing=0.1)
        loss = composer.loss.soft_cross_entropy(logits, smoothed)
        assert len(permuted) == 8
        assert 0 <= share <= 1
        optimizer.zero_grad()
        loss.backward()
        cf.apply_gradient_clipping(model, clipping_type="norm", clipping_threshold=1.0, fsdp_enabled=False)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


class Logging(SwappedLoss):
    """A model that logs values in its forward pass."""

    def forward(self, batch: Any) -> torch.Tensor:
        outputs = super().forward(batch)
        self.logger.log_metrics({"outputs/mean": outputs.detach().mean()})
        return outputs


def test_a_model_has_its_trainers_logger_which_copies_share_and_pickles_drop() -> None:
    model, logger = Logging(), InMemoryLogger()
    assert model.logger is None
    trainer = fit(model=model, loggers=[logger], max_duration="1ep")
    assert len(logger.data["outputs/mean"]) == 4
    assert model.logger is trainer.logger
    copied = copy.deepcopy(model)
    assert copied.logger is copy.copy(model).logger is trainer.logger
    assert copied.state_dict().keys() == model.state_dict().keys()
    assert all(one is not own for one, own in zip(copied.parameters(), model.parameters(), strict=True))
    assert pickle.loads(pickle.dumps(model)).logger is None
    assert model.logger is trainer.logger


def test_modules_of_methods_have_their_functions_and_layers() -> None:
    for name, target in MODULES.items():
        importlib.import_module(target)
        assert name.startswith("composer")
    methods = importlib.import_module(MODULES["composer.algorithms.blurpool.blurpool"])
    assert MODULES["composer.algorithms.mixup"] == methods.__name__
    for name in ("BlurConv2d", "BlurPool", "apply_blurpool", "mixup_batch", "FactorizedLinear"):
        assert callable(getattr(methods, name))
    layer = torch.nn.Conv2d(3, 4, 3)
    before = layer.weight.detach().clone()
    methods.apply_weight_standardization(module=torch.nn.Sequential(layer), n_last_layers_ignore=0)
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize("interval", ["6ba", composer.Time.from_batch(6)])
def test_a_save_interval_may_be_in_batches(tmp_path: Path, interval: Any) -> None:
    fit(save_folder=str(tmp_path), save_interval=interval, max_duration="14ba")
    assert sorted(os.listdir(tmp_path)) == ["ep1-ba6", "ep2-ba12", "ep3-ba14"]


def test_an_interval_longer_than_the_run_saves_at_its_end(tmp_path: Path) -> None:
    fit(save_folder=str(tmp_path), save_interval="1000ba", max_duration="2ep")
    assert os.listdir(tmp_path) == ["ep2-ba8"]


def test_dist_checkpoint_saves_and_loads_a_state(tmp_path: Path) -> None:
    from hocket.compat.composer.utils import dist_checkpoint

    with make_trainer() as trainer:
        trainer.fit()
        path = dist_checkpoint.save_checkpoint(trainer.state, str(tmp_path / "ep{epoch}-ba{batch}"))
        weights = {name: value.clone() for name, value in trainer.state.model.state_dict().items()}
    assert path == str(tmp_path / "ep2-ba8")
    with make_trainer() as trainer:
        dist_checkpoint.load_checkpoint(path, trainer.state)
        assert trainer.state.timestamp.batch == 8
        torch.testing.assert_close(trainer.state.model.state_dict(), weights)
