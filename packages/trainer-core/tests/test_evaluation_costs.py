"""Evaluation and train metrics read no device, and start only the expected collectives."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from hocket.trainer import ComposerClassifier, Evaluator
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.metrics import Dice, LanguageCrossEntropy, MaskedAccuracy, MIoU
from hocket.trainer.models import HuggingFaceModel
from hocket.trainer.ranks.single_process import SingleProcess
from support.ranks import run_ranks
from support.training import data, make

# Operations that make the host wait for a device: `.item()`, and results whose shape depends on values.
READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.bincount.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.equal.default,
}


class CountReads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func in READS
        return func(*args, **(kwargs or {}))


def segmentation():
    module = nn.Conv2d(1, 4, 1)
    inputs = torch.randn(8, 1, 3, 3)
    batches = list(zip(inputs.split(1), torch.randint(0, 4, (8, 3, 3)).split(1), strict=True))
    return ComposerClassifier(module, val_metrics=[MIoU(4), Dice(4)], train_metrics=[MIoU(4)]), batches


def classification():
    batches = list(DataLoader(data(8), batch_size=1))
    model = ComposerClassifier(nn.Linear(5, 3), num_classes=3)
    model._train_metrics = model.get_metrics()
    return model, batches


def language():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    ids = torch.randint(2, 16, (8, 1, 6))
    metrics = [LanguageCrossEntropy(), MaskedAccuracy()]
    model = HuggingFaceModel(transformers.GPT2LMHeadModel(config), metrics=metrics)
    return model, [{"input_ids": one, "labels": one} for one in ids]


KINDS = [segmentation, classification, language]


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_reads_no_value_per_batch(kind):
    model, batches = kind()
    reads = []
    with make(model=model, train_dataloader=None) as trainer:
        for num in (2, 8):
            with CountReads() as counted:
                trainer.eval(Evaluator(label="eval", dataloader=batches[:num]))
            reads.append(counted.num)
    assert reads[0] == reads[1]


def test_reads_of_a_metric_are_counted():
    model, batches = classification()
    model._val_metrics = {"Validated": MulticlassAccuracy(3, validate_args=True)}
    with make(model=model, train_dataloader=None) as trainer, CountReads() as counted:
        trainer.eval(batches)
    assert counted.num >= len(batches)


@pytest.mark.parametrize("kind", KINDS)
def test_train_metrics_read_no_value_per_batch(kind):
    def reads(with_metrics):
        torch.manual_seed(0)
        model, batches = kind()
        if not with_metrics:
            model._train_metrics = {}
        # On a GPU only the log's thread reads values; on a CPU logging reads a scalar by design.
        with (
            make(model=model, train_dataloader=batches, max_duration="8ba") as trainer,
            CountReads() as counted,
        ):
            trainer.state.model.train()
            trainer.fit()
        return counted.num

    # One read at the end of the epoch and of the fit, whatever the number of batches.
    assert reads(with_metrics=True) - reads(with_metrics=False) <= 2


class CountReductions(SingleProcess):
    """Counts the sums over ranks."""

    def __init__(self, inner):
        self._inner = inner
        self.data_parallel = inner.data_parallel
        self.device = inner.device
        self.num = 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def lay_out(self, model, optimizers):
        return self._inner.lay_out(model, optimizers)

    def reduce_async(self, values):
        self.num += 1
        return self._inner.reduce_async(values)


def evaluate_on_a_rank():
    from hocket.dist import provide

    inner = provide(None, device=torch.device("cpu"), timeout_s=60)
    parallelism = CountReductions(inner)
    counts = []
    with make(
        model=ComposerClassifier(nn.Linear(5, 3), num_classes=3),
        train_dataloader=None,
        parallelism=parallelism,
        loggers=InMemoryLogger(),
    ) as trainer:
        for num in (8, 16):
            before = parallelism.num
            trainer.eval(DataLoader(data(num), batch_size=2))
            counts.append(parallelism.num - before)
    inner.close()
    return counts, int(os.environ["RANK"])


def test_evaluation_takes_one_collective_per_batch_and_two_per_metric_state():
    for counts, _ in run_ranks(evaluate_on_a_rank, 2, init="gloo", timeout_s=120):
        # One exchange for each batch and one to find the end; a metric's state takes its shape and its value:
        # two states of the cross-entropy and four of the accuracy.
        states = 2 * (2 + 4)
        assert counts == [2 + 1 + states, 4 + 1 + states]
