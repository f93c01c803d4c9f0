"""Runs of tracking services, with the real libraries, are open while a script trains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hocket.compat.composer import Callback, Logger, State, Trainer
from hocket.compat.composer.loggers import MLFlowLogger, WandBLogger
from hocket.compat.composer.models import ComposerClassifier
from support.ranks import run_ranks

pytestmark = pytest.mark.slow


def train(destination: Any, callback: Callback) -> None:
    """Train for two batches."""
    model = ComposerClassifier(nn.Linear(2, 3), num_classes=3)
    with Trainer(
        model=model,
        train_dataloader=DataLoader(TensorDataset(torch.randn(4, 2), torch.arange(4) % 3), batch_size=2),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="1ep",
        device="cpu",
        progress_bar=False,
        run_name="a-run",
        loggers=destination,
        callbacks=callback,
    ) as trainer:
        trainer.fit()


class LogByMlflow(Callback):
    """A callback that calls MLflow's own functions, as scripts do."""

    def fit_start(self, state: State, logger: Logger) -> None:
        import mlflow

        mlflow.log_param("by_hand", 1)
        self.active = mlflow.active_run().info.run_id


def use_mlflow(folder: str) -> None:
    import mlflow

    uri = f"sqlite:///{folder}/ml.db"
    os.chdir(folder)
    destination = MLFlowLogger(tracking_uri=uri, rank_zero_only=False, model_registry_prefix="main.schema")
    script = LogByMlflow()
    train(destination, script)
    assert mlflow.active_run() is None
    assert (destination.run_name, destination.experiment_name) == ("a-run-rank0", "my-mlflow-experiment")
    run = mlflow.MlflowClient(uri).get_run(script.active)
    assert (run.info.run_id, run.info.run_name) == (destination.run_id, "a-run-rank0")
    assert (run.info.status, run.data.params["by_hand"]) == ("FINISHED", "1")
    assert run.data.tags["run_name"] == "a-run"
    assert "loss/train/total" in run.data.metrics
    folder_of_model = Path(folder, "model")
    example = torch.zeros(1, 2).numpy()
    mlflow.pytorch.save_model(nn.Linear(2, 2), folder_of_model, input_example=example)
    version = destination.register_model(f"file://{folder_of_model}", "line")
    assert (version.name, int(version.version)) == ("main.schema.line", 1)
    with pytest.raises(ValueError, match="`flavor` is `keras`; expected `transformers`"):
        destination.log_model("keras")


class LogByWandb(Callback):
    """A callback that calls W&B's own functions, as scripts do."""

    def fit_start(self, state: State, logger: Logger) -> None:
        import wandb

        wandb.config.update({"by_hand": 1})
        self.run_id = wandb.run.id


def use_wandb(folder: str) -> None:
    os.chdir(folder)
    settings = {"console": "off", "silent": True}
    destination = WandBLogger("digits", init_kwargs={"mode": "offline", "settings": settings})
    script = LogByWandb()
    train(destination, script)
    assert script.run_id == destination.run_id
    assert destination.run_dir is not None
    assert Path(destination.run_dir).is_relative_to(folder)


def test_the_run_is_mlflows_active_run_and_registers_models(tmp_path: Path) -> None:
    pytest.importorskip("alembic", reason="needs mlflow: `uv sync --group loggers`")
    run_ranks(use_mlflow, 1, str(tmp_path), timeout_s=280)


def test_the_run_is_open_for_wandbs_own_functions(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs `uv sync --group loggers`")
    run_ranks(use_wandb, 1, str(tmp_path), timeout_s=150)
