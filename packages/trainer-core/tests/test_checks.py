"""Classes and data sets where instances and loaders are meant are refused in the words of the trainer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric

from hocket.trainer import CheckpointSaver, ComposerClassifier, DataSpec, Evaluator, Time, Trainer
from hocket.trainer.callbacks import LRMonitor
from hocket.trainer.errors import DataError, TrainerConfigError
from hocket.trainer.optim import ForOptimizer, LinearScheduler
from support.training import Net, loader, make

DATA = TensorDataset(torch.randn(8, 3), torch.zeros(8, dtype=torch.long))


class Keep:
    """A class of a user."""


class StandardStepOf:
    """A step around the standard one."""

    def __init__(self, inner):
        self.compute_gradients, self.update = inner.compute_gradients, inner.update


class OfMappings(Net):
    """A model whose batches are mappings."""

    def forward(self, batch):
        return super().forward([batch["x"]])

    def loss(self, outputs, batch):
        return batch["scale"] * super().loss(outputs, [None, batch["y"]])


class Squares(Dataset):
    def __getitem__(self, number):
        return torch.full((3,), float(number**2)), number % 2


class Table:
    """A data set as `datasets` has it: its iterator yields samples."""

    column_names = ("x",)

    def set_format(self, kind): ...

    def __iter__(self):
        yield {"x": 1}


class Indexed:
    """A data set as torch's `DataLoader` takes it, without a base class."""

    def __len__(self):
        return 8

    def __getitem__(self, number):
        return DATA[number]


SETS = [
    DATA,
    Squares(),
    Indexed(),
    torch.utils.data.Subset(DATA, [0, 1]),
    Table(),
    [DATA[0], DATA[1]],
    DataSpec(DATA),
    {"dataloader": DATA},
]


@pytest.mark.parametrize("given", SETS, ids=lambda given: type(given).__name__)
def test_a_data_set_in_place_of_a_loader_is_refused(given):
    with pytest.raises(TrainerConfigError, match=r"has samples and no batches; .*DataLoader\(dataset"):
        make(train_dataloader=given)
    with make(train_dataloader=loader()) as trainer:
        with pytest.raises(TrainerConfigError, match="has samples and no batches"):
            trainer.fit(train_dataloader=given, duration="1ba")
        with pytest.raises(TrainerConfigError, match=r"has samples and no batches|expected a data loader"):
            trainer.eval(given)


class Samples(torch.utils.data.IterableDataset):
    """A data set that is iterated over its samples."""

    def __init__(self, item):
        self.item = item

    def __iter__(self):
        yield self.item


class Both(Squares):
    """A map-style data set that can be iterated, too."""

    def __iter__(self):
        return (self[number] for number in range(4))


ITEMS = [DATA[0], {"x": torch.zeros(3), "y": 1}, (torch.zeros(3), np.int64(1)), ("a text", "a label")]


@pytest.mark.parametrize(
    "given", [*map(Samples, ITEMS), Both(), torch.utils.data.ChainDataset([Samples(DATA[0])])]
)
def test_samples_of_a_data_set_that_is_iterated_are_no_batches(given):
    with (
        make(train_dataloader=given, max_duration="1ba") as trainer,
        pytest.raises(DataError, match=r"yields samples and no batches; .*`batch_size=None` if its items"),
    ):
        trainer.fit()
    with make(train_dataloader=loader()) as trainer, pytest.raises(DataError, match="yields samples"):
        trainer.eval(given)


@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(4, 2, 3),
        np.zeros((4, 3)),
        "data/train",
        Path("data"),
        b"data",
        loader,
        3,
        [loader(), loader()],
        [DATA],
        SimpleNamespace(batches=[]),
        DataSpec(SimpleNamespace(ndim=2, __iter__=None)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_loader_is_refused_before_training(given):
    with pytest.raises(
        TrainerConfigError, match=r"^the data loader is a `\w+`( of `\w+`s; pass one|; expected)"
    ):
        make(train_dataloader=given)


def test_a_list_of_batches_and_an_iterable_data_set_are_loaders():
    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(loader())

    # A number or text in a batch, which belongs to all its samples.
    named = [{"x": torch.zeros(4, 5), "y": torch.zeros(4, dtype=torch.long), "name": "a", "scale": 2.0}] * 2
    with make(model=OfMappings(), train_dataloader=named, max_duration="2ba") as trainer:
        trainer.fit()
    for given in (list(loader()), Batches()):
        with make(train_dataloader=given, max_duration="2ba") as trainer:
            trainer.fit()
            assert trainer.state.timestamp.batch == 2


@pytest.mark.parametrize(
    ("make_trainer", "told"),
    [
        (lambda: make(schedulers=LinearScheduler), "`schedulers` has the class `LinearScheduler`"),
        (lambda: make(schedulers=[torch.optim.lr_scheduler.StepLR]), "`schedulers` has the class `StepLR`"),
        (lambda: make(optimizers=torch.optim.SGD), "`optimizers` has the class `SGD`"),
        (lambda: make(optimizers={"a": torch.optim.SGD}), "`optimizers` has the class `SGD`"),
        (lambda: make(train_dataloader=DataLoader), "`train_dataloader` has the class `DataLoader`"),
        (lambda: make(train_dataloader=DataSpec(DataLoader)), "`dataloader` has the class `DataLoader`"),
        (lambda: make(eval_dataloader=Evaluator), "`eval_dataloader` has the class `Evaluator`"),
        (
            lambda: make(schedulers=partial(LinearScheduler)),
            "`schedulers` has a partial of the class `LinearScheduler`",
        ),
        (
            lambda: make(loss_fn=partial(nn.CrossEntropyLoss)),
            "`loss_fn` has a partial of the class `CrossEntropyLoss`",
        ),
        (lambda: make(callbacks=[partial(LRMonitor)]), "`callbacks` has a partial of the class `LRMonitor`"),
        (lambda: ForOptimizer(LinearScheduler, None), "`schedule` has the class `LinearScheduler`"),
        (lambda: CheckpointSaver("a", retention=[Keep]), "`retention` has the class `Keep`"),
        (lambda: make(checkpointing={"retention": Keep}), "`retention` has the class `Keep`"),
        (lambda: make(checkpointing={"store": Keep}), "`store` has the class `Keep`"),
        (
            lambda: Evaluator(label="a", dataloader=loader(), eval_interval=Time),
            "`eval_interval` has the class `Time`",
        ),
        (lambda: Trainer(model=Keep), "`model` has the class `Keep`"),
        (lambda: ComposerClassifier(nn.Linear), "`module` has the class `Linear`"),
        *(
            (partial(make, **{name: Keep}), f"`{name}` has the class `Keep`")
            for name in (
                "profiler",
                "parallelism",
                "max_duration",
                "gradient_clipping",
                "save_interval",
            )
        ),
        (
            lambda: Trainer(model=nn.Linear(3, 2), loss_fn=nn.CrossEntropyLoss),
            "`loss_fn` has the class `CrossEntropyLoss`",
        ),
        (
            lambda: ComposerClassifier(nn.Linear(3, 2), num_classes=2, loss_fn=nn.CrossEntropyLoss),
            "`loss_fn` has the class `CrossEntropyLoss`",
        ),
        (
            lambda: ComposerClassifier(nn.Linear(3, 2), train_metrics=MeanMetric, num_classes=2),
            "`metrics` has the class `MeanMetric`",
        ),
    ],
)
def test_a_class_where_an_instance_is_meant_is_refused(make_trainer, told):
    with pytest.raises(TrainerConfigError, match=rf"{told}; pass an instance: `\w+\(…\)`"):
        make_trainer()


@pytest.mark.parametrize(
    "given",
    [
        {"schedulers": LinearScheduler},
        {"schedulers": [partial(LinearScheduler)]},
        {"train_dataloader": DataLoader},
        {"duration": Time},
        {"eval_dataloader": loader(), "eval_interval": Time},
    ],
)
def test_a_class_given_to_fit_is_refused(given):
    with (
        make(max_duration="1ba") as trainer,
        pytest.raises(TrainerConfigError, match=r"has (the|a partial of the) class"),
    ):
        trainer.fit(**given)


def test_a_class_of_a_step_is_called_with_the_standard_one():
    with make(train_step=StandardStepOf, max_duration="1ba") as trainer:
        trainer.fit()
        assert isinstance(trainer.state.train_step, StandardStepOf)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"callbacks": lambda state, logger: None}, "a `function`, which has no method that is called at an"),
        ({"callbacks": [3]}, "`callbacks` has a `int`, which has no method"),
        ({"callbacks": SimpleNamespace(on_batch_end=print)}, "has a `SimpleNamespace`, which has no method"),
        ({"profiler": "simple"}, "`profiler` is a `str`, which has no `attach`; expected a `hocket"),
        ({"parallelism": "ddp"}, "`parallelism` is a `str`, which has no `lay_out`"),
        ({"checkpointing": {"store": "s3://x/y"}}, "`store` is a `str`, which has no `save`"),
        ({"load_exclude_algorithms": [Keep]}, "expected a list of names of classes"),
        ({"load_exclude_algorithms": "EMA"}, "expected a list of names of classes"),
    ],
)
def test_an_object_that_is_no_part_of_a_trainer_is_refused(given, told):
    with pytest.raises(TrainerConfigError, match=told):
        make(**given)


def test_an_object_with_the_method_of_one_event_is_a_callback():
    class Watcher:
        def batch_end(self, state, logger):
            seen.append(state.timestamp.counts.batch)

    seen = []
    with make(callbacks=Watcher(), max_duration="2ba") as trainer:
        trainer.fit()
    assert seen == [1, 2]
