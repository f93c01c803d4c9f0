"""Loggers and callbacks of the compatibility layer, where they differ from Hocket's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from hocket.compat.composer import Logger, State, Trainer
from hocket.compat.composer.algorithms import LabelSmoothing
from hocket.compat.composer.callbacks import EarlyStopper, ImageVisualizer, SystemMetricsMonitor
from hocket.compat.composer.loggers import InMemoryLogger
from hocket.compat.composer.models import ComposerClassifier
from hocket.trainer import Callback, LoggerDestination, Timestamp


def by_hand() -> tuple[State, InMemoryLogger, Logger]:
    state, kept = State(nn.Linear(2, 2), 0, "run", "cpu"), InMemoryLogger()
    return state, kept, Logger(state, kept)


def test_points_have_the_timestamp_of_their_logging():
    state, kept, logger = by_hand()
    logger.log_metrics({"loss": 2.5})
    state.timestamp = Timestamp(epoch=1, batch=3)
    logger.log_metrics({"loss": torch.tensor(1.5)})
    state.timestamp = Timestamp(epoch=2, batch=3)  # the same step, and a later time
    logger.log_metrics({"loss": 0.5})
    # Reading needs no flush.
    assert [(time.epoch.value, time.batch.value, value) for time, value in kept.data["loss"]] == [
        (0, 0, 2.5),
        (1, 3, 1.5),
        (2, 3, 0.5),
    ]
    assert kept.most_recent_values == {"loss": 0.5}
    assert kept.most_recent_timestamps["loss"].epoch == "2ep"
    logger.close()
    assert len(kept.data["loss"]) == 3


class Store(LoggerDestination):
    """A script's own destination, with Composer's arguments."""

    def __init__(self):
        self.kept: list[Any] = []

    def can_upload_files(self) -> bool:
        return True

    def upload_file(self, state, remote_file_name, file_path, *, overwrite=False):
        self.kept.append((state.run_name, remote_file_name, file_path.name, overwrite))

    def log_images(
        self,
        images,
        name="Images",
        channels_last=False,
        step=None,
        masks=None,
        mask_class_labels=None,
        use_table=True,
    ):
        shapes = [tuple(image.shape) for image in images]
        self.kept.append((shapes, name, channels_last, step, masks, mask_class_labels, use_table))


def test_a_destination_of_the_script_is_called_with_composers_arguments(tmp_path: Path):
    # `upload_file` must get the state, and `log_images` must not get the step as `channels_last`.
    store, path = Store(), tmp_path / "model.pt"
    path.touch()
    for run in ("first", "second"):
        state = State(nn.Linear(2, 2), 0, run, "cpu")
        logger = Logger(state, store)
        logger.upload_file("remote/model.pt", path, overwrite=True)
        store.upload_file(state, "by-hand", path)
        logger.log_images(torch.zeros(2, 3, 4, 5), "Seen", step=7, use_table=False)
        logger.close()
        store.log_images([torch.zeros(3, 4, 5)])
    assert sorted(map(str, store.kept)) == sorted(
        str(one)
        for run in ("first", "second")
        for one in (
            (run, "remote/model.pt", "model.pt", True),
            (run, "by-hand", "model.pt", False),
            ([(4, 5, 3)] * 2, "Seen", True, 7, None, None, False),
            ([(3, 4, 5)], "Images", False, None, None, None, True),
        )
    )


def test_a_script_logs_images_to_a_destination_itself():
    # `log_images(…, channels_last=True)` must not raise a `TypeError`.
    class Seen(LoggerDestination):
        def log_images(self, images: Any, name: str = "Images", step: int = 0) -> None:
            self.seen = [tuple(image.shape) for image in images.images], name, step, images.use_table

    seen = Seen()
    state = State(nn.Linear(2, 2), 0, "run", "cpu")
    logger = Logger(state, seen)
    state.timestamp = Timestamp(batch=5)
    seen.log_images(torch.zeros(2, 4, 5, 3), "Direct", channels_last=True, use_table=False)
    assert seen.seen == ([(4, 5, 3)] * 2, "Direct", 5, False)
    logger.log_images(torch.zeros(1, 3, 4, 5), "Through", step=7)
    logger.close()
    assert seen.seen == ([(4, 5, 3)], "Through", 7, True)


def test_a_time_series_has_the_counts_of_each_value():
    state, kept, logger = by_hand()
    kept.init(state, logger)
    for batch in range(4):
        state.timestamp = Timestamp(batch=batch, batch_in_epoch=batch % 3)
        kept.log_metrics({"accuracy": batch / 2}, step=batch)  # called by the script itself
    series = kept.get_timeseries("accuracy")
    assert series["accuracy"].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert (series["batch"].tolist(), series["batch_in_epoch"].tolist()) == ([0, 1, 2, 3], [0, 1, 2, 0])
    with pytest.raises(KeyError, match="`loss` was not logged; logged was `accuracy`"):
        kept.get_timeseries("loss")


def test_tables_and_settings_are_kept():
    _, kept, logger = by_hand()
    logger.log_table(["prompt", "answer"], [["a", "b"]], name="generations")
    logger.log_hyperparameters({"lr": 0.1})
    table = json.loads(kept.tables["generations"])
    assert table == {"columns": ["prompt", "answer"], "data": [["a", "b"]]}
    assert kept.hyperparameters == {"lr": 0.1}
    logger.close()


class SetAccuracy(Callback):
    """Sets the training metric to a given value after each batch."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def batch_end(self, state: State, logger: Logger) -> None:
        value = self.values[min(state.timestamp.batch.value, len(self.values)) - 1]
        metric = MulticlassAccuracy(2, average="micro")
        ones = round(10 * value)
        metric.update(torch.tensor([1] * ones + [0] * (10 - ones)), torch.ones(10, dtype=torch.int64))
        state.train_metrics["MulticlassAccuracy"] = metric


@pytest.mark.parametrize(("patience", "end"), [("3ba", "6ba"), ("1ep", "24ba")])
def test_patience_in_batches_checks_a_training_metric_after_each_batch(patience: str, end: str):
    model = ComposerClassifier(nn.Linear(2, 2), num_classes=2)
    data: Any = DataLoader(TensorDataset(torch.ones(32, 2), torch.arange(32) % 2), batch_size=4)
    stopper = EarlyStopper("MulticlassAccuracy", "train", patience=patience)
    with Trainer(
        model=model,
        train_dataloader=data,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="8ep",
        callbacks=[SetAccuracy([0.1, 0.5, 0.4]), stopper],
        progress_bar=False,
    ) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == end


def test_system_metrics_have_composers_names():
    model, kept = ComposerClassifier(nn.Linear(2, 2), num_classes=2), InMemoryLogger()
    data: Any = DataLoader(TensorDataset(torch.ones(8, 2), torch.arange(8) % 2), batch_size=4)
    with Trainer(
        model=model,
        train_dataloader=data,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="1ep",
        callbacks=SystemMetricsMonitor(),
        loggers=kept,
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    assert len(kept.data["cpu_percentage"]) == 2
    assert {"cpu_memory_percent", "disk_memory_used", "network_bytes_sent"} <= set(kept.data)
    assert 0 < kept.most_recent_values["cpu_memory_percent"] <= 100


class KeepImages(LoggerDestination):
    """Records the name and number of logged images, and whether they are a table."""

    def __init__(self) -> None:
        self.got: list[tuple[str, int, bool]] = []

    def log_images(self, images: Any, name: str = "Images", step: int = 0) -> None:
        self.got.append((name, len(images.images), images.use_table))


def test_images_are_logged_as_tables_with_composers_names():
    data = DataLoader(TensorDataset(torch.rand(8, 3, 4, 4), torch.arange(8) % 3), batch_size=4)
    model = ComposerClassifier(nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), num_classes=3)
    kept = KeepImages()
    with Trainer(
        model=model,
        train_dataloader=data,
        eval_dataloader=data,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=ImageVisualizer("2ba", num_images=3),
        loggers=kept,
        max_duration="2ep",
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    assert kept.got == [("Images/Train", 3, True), ("Images/Eval", 3, True)] * 2


def test_the_machines_the_seed_and_the_methods_are_logged_under_composers_names(monkeypatch):
    monkeypatch.setenv("NODENAME", "node-7")
    kept = InMemoryLogger()
    dataset = TensorDataset(torch.randn(4, 2), torch.randint(2, (4,)))
    model = ComposerClassifier(nn.Linear(2, 2), num_classes=2)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=DataLoader(dataset, 4),
        max_duration="1ep",
        algorithms=[LabelSmoothing(0.1)],
        loggers=[kept],
        seed=11,
        device="cpu",
    )
    assert kept.hyperparameters == {
        "num_nodes": 1,
        "num_cpus_per_node": 1,
        "node_name": "node-7",
        "rank_zero_seed": 11,
    }
    trainer.fit()
    assert kept.hyperparameters["enabled_algorithms/LabelSmoothing"] is True
