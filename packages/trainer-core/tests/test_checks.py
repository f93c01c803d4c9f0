"""Classes and data sets where instances and loaders are meant are refused in the words of the trainer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric

from hocket.trainer import ComposerClassifier, DataSpec, Trainer
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim import LinearScheduler
from support.training import loader, make

DATA = TensorDataset(torch.randn(8, 3), torch.zeros(8, dtype=torch.long))


class Squares(Dataset):
    def __getitem__(self, number):
        return torch.full((3,), float(number**2)), number % 2


class Table:
    """A data set as `datasets` has it: its iterator yields samples."""

    column_names = ("x",)

    def set_format(self, kind): ...

    def __iter__(self):
        yield {"x": 1}


SETS = [DATA, Squares(), torch.utils.data.Subset(DATA, [0, 1]), Table(), DataSpec(DATA), {"dataloader": DATA}]


@pytest.mark.parametrize("given", SETS, ids=lambda given: type(given).__name__)
def test_a_data_set_in_place_of_a_loader_is_refused(given):
    with pytest.raises(TrainerConfigError, match=r"has samples and no batches; .*DataLoader\(dataset"):
        make(train_dataloader=given)
    with make(train_dataloader=loader()) as trainer:
        with pytest.raises(TrainerConfigError, match="has samples and no batches"):
            trainer.fit(train_dataloader=given, duration="1ba")
        with pytest.raises(TrainerConfigError, match=r"has samples and no batches|expected a data loader"):
            trainer.eval(given)


def test_a_list_of_batches_and_an_iterable_data_set_are_loaders():
    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(loader())

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
        (lambda: make(train_dataloader=DataLoader), "`dataloader` has the class `DataLoader`"),
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


def test_a_class_given_to_fit_as_schedule_is_refused():
    with make(max_duration="1ba") as trainer, pytest.raises(TrainerConfigError, match="has the class"):
        trainer.fit(schedulers=LinearScheduler)
