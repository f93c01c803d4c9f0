"""Misspelt and foreign names in the constructors of all public classes."""

import functools
import importlib
import inspect

import pytest
import torch

import hocket.stream
from hocket.native import Store
from hocket.stream import MDSWriter, StreamingDataset
from hocket.stream.simulate import Cluster
from hocket.trainer import DataSpec, Evaluator, Trainer
from hocket.trainer.setup.settings import CheckpointingSettings, LoopSettings
from hocket.trainer.step.gradient_clipping import GradientClippingConfig

PACKAGES = (
    "hocket.trainer", "hocket.trainer.callbacks", "hocket.trainer.loggers", "hocket.trainer.loss",
    "hocket.trainer.models", "hocket.trainer.optim", "hocket.trainer.profiler", "hocket.trainer.step",
    "hocket.trainer.evaluation", "hocket.trainer.metrics", "hocket.algos", "hocket.algos.factorize",
    "hocket.algos.gated_linear_units", "hocket.algos.ghost_batchnorm", "hocket.algos.gyro_dropout",
    "hocket.algos.squeeze_excite", "hocket.algos.stochastic_depth", "hocket.dist", "hocket.ckpt.dcp",
    "hocket.ckpt.torch", "hocket.ckpt.weights", "hocket.compat.streaming", "hocket.stream",
    "hocket.stream.encodings", "hocket.stream.mosaic",
)  # fmt: skip

# Values and results that Hocket makes, some of them at each step; Python's own message names the class.
MADE_BY_HOCKET = {
    "Finding", "FSDPParallelism", "ListedCheckpoint", "Loaded", "LossSum", "LowRankSolution", "Marker",
    "ProcessGroup", "ProfileReport", "Reduction", "ReplicatedParallelism", "SaveHandle", "State",
    "StepContext", "Time", "Timestamp", "Trace", "WeightUpdate", "World",
}  # fmt: skip


def _takes_arguments(cls):
    owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
    if not owner.__module__.startswith("hocket.") or getattr(cls, "_is_protocol", False):
        return False
    parameters = list(inspect.signature(cls).parameters.values())
    # mosaicml-streaming's writers raise its ValueError, which lists all arguments.
    if owner.__module__ == "hocket.compat.streaming.writers":
        return False
    # `Generate` takes what a model's `generate` takes, so a name cannot be unknown to it.
    if (
        cls.__name__ in {"Event", "Generate", "TimeUnit", "ProfilerAction"}
        or owner.__name__ == "_AbsentLogger"
    ):
        return False
    return any(one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


def _public_classes():
    found = set()
    for package in map(importlib.import_module, PACKAGES):
        for name in package.__all__:
            cls = getattr(package, name)
            if inspect.isclass(cls) and not issubclass(cls, BaseException) and name not in MADE_BY_HOCKET:
                found.add(cls)
    return sorted(filter(_takes_arguments, found), key=lambda cls: (cls.__name__, cls.__module__))


@pytest.mark.parametrize("cls", _public_classes(), ids=lambda cls: cls.__name__)
def test_a_misspelt_argument_is_refused_with_the_class_and_the_nearest_one(cls):
    parameters = inspect.signature(cls).parameters.values()
    names = [one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    name = max(names, key=len)
    with pytest.raises(TypeError) as refused:
        cls(**{f"{name}x": 1})
    assert f"`{cls.__name__}` has no" in str(refused.value)
    assert f"id you mean `{name}`?" in str(refused.value)


@pytest.mark.parametrize(
    ("cls", "name", "answer"),
    [
        (StreamingDataset, "seed", "give `shuffle_seed=`"),
        (StreamingDataset, "batchsize", "did you mean `batch_size`?"),
        (StreamingDataset, "shuffle_algorithm", "did you mean `shuffle_algo`?"),
        (StreamingDataset, "qqq", "`help(StreamingDataset)` lists the arguments"),
        (hocket.stream.StreamingDataLoader, "batchsize", "did you mean `batch_size`?"),
        (MDSWriter, "cols", "did you mean `columns`?"),
        (functools.partial(Store, "memory://x"), "max_retry", "did you mean `max_retries`?"),
        (functools.partial(Store, "memory://x"), "access_key", "`help(Store)` lists the arguments"),
        (Evaluator, "loader", "did you mean `dataloader`?"),
        (DataSpec, "loader", "did you mean `dataloader`?"),
        (Trainer, "max_epochs", "give `max_duration='3ep'`"),
        (Trainer, "num_epochs", "give `max_duration='3ep'`"),
        (Trainer, "max_steps", "give `max_duration='3ba'`"),
        (Trainer, "optimizer", "give `optimizers=3`"),
        (Trainer, "batchsize", "`train_dataloader=DataLoader(…, batch_size=3)`"),
        (Trainer, "accumulate_grad_batches", "`device_train_microbatch_size=`"),
        (Trainer, "gradient_accumulation_steps", "`device_train_microbatch_size=`"),
        (Trainer, "strategy", "give `fsdp_config={}`"),
        (Trainer, "nb_epoch", "give `max_duration='3ep'`"),
        (Trainer, "eval_steps", "give `eval_interval='3ba'`"),
        (Trainer, "save_steps", "give `save_interval='3ba'`"),
        (Trainer, "logging_steps", "give `loop={'log_every': 3}`"),
        (Trainer, "limit_train_batches", "give a number, `train_subset_num_batches=`"),
        (Trainer, "weight_decay", "AdamW(model.parameters(), weight_decay=3)`"),
        (Trainer, "n_gpus", "`hocket-launch -n 3 script.py`"),
        (Trainer, "checkpoint_dir", "give `save_folder=3`"),
        (Trainer, "bf16", "give `precision='amp_bf16'`"),
        (LoopSettings, "prefetch", "did you mean `prefetch_depth`?"),
        (CheckpointingSettings, "retain", "`help(CheckpointingSettings)` lists the arguments"),
        (GradientClippingConfig, "threshold", "did you mean `clipping_threshold`?"),
        (Cluster, "batchsize", "did you mean `batch_size`?"),
    ],
)  # fmt: skip
def test_a_name_of_another_library_gets_hockets(cls, name, answer):
    with pytest.raises(TypeError) as refused:
        cls(**{name: 3})
    owner = getattr(cls, "func", cls).__name__
    assert f"`{owner}` has no argument `{name}`; " in str(refused.value)
    assert answer in str(refused.value)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("max_epochs", "give `duration='3ep'`"),
        ("max_steps", "give `duration='3ba'`"),
        ("durations", "did you mean `duration`?"),
        ("datamodule", "give a data loader: `train_dataloader=DataLoader(…)`"),
    ],
)
def test_a_name_of_another_library_gets_the_one_of_fit(name, answer):
    trainer = Trainer(model=torch.nn.Linear(2, 2), loss_fn=torch.nn.MSELoss(), progress_bar=False)
    with trainer, pytest.raises(TypeError) as refused:
        trainer.fit(**{name: 3})
    assert f"`Trainer.fit` has no argument `{name}`; {answer}" in str(refused.value)


def test_a_subclass_is_named_where_it_was_called():
    class Mine(StreamingDataset):
        pass

    class Wrong(MDSWriter):
        def __init__(self):
            super().__init__(out="x", colums={})

    with pytest.raises(TypeError, match="`Mine` has no argument `locale`; did you mean `local`"):
        Mine(locale="x")
    with pytest.raises(TypeError, match="`MDSWriter` has no argument `colums`; did you mean `columns`"):
        Wrong()
