"""Every misuse raises an error that says what to change.

`MISUSES` has, for each one, the call and the words that the message must contain.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hocket.trainer import Callback, Evaluator, Trainer
from hocket.trainer.callbacks import EarlyStopper
from hocket.trainer.data.data_spec import DataSpec
from hocket.trainer.errors import TrainerClosedError, TrainerError
from hocket.trainer.step.memory_report import memory_report
from support.training import Net, data, loader, make


class Unsized(IterableDataset):
    def __iter__(self):
        return iter(data())


class Returns(Net):
    """A model whose loss is a function of the outputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def loss(self, outputs, batch):
        return self.function(outputs)


def fit(**arguments):
    duration = arguments.pop("duration", "2ba")
    with make(**arguments) as trainer:
        trainer.fit(duration)


def evaluate(**arguments):
    with make(**arguments) as trainer:
        trainer.eval()


def two_trainers():
    callback = Callback()
    with make(callbacks=callback):
        make(callbacks=callback)


def closed():
    trainer = make()
    trainer.close()
    trainer.fit("1ba")


MISUSES = {
    "an unsized loader with dur": (
        lambda: fit(
            train_dataloader=DataLoader(Unsized(), batch_size=4),
            eval_dataloader=loader(4),
            eval_interval="0.5dur",
            duration="2ep",
        ),
        ["`dur`", "`max_duration` in `ep`", "no length", "`ba`"],
    ),
    "an infinite loader with ep": (
        lambda: fit(train_dataloader=itertools.cycle(list(loader())), duration="1ep"),
        ["`1ep`", "`cycle` never ends", "`ba`, `sp` or `tok`", "train_subset_num_batches"],
    ),
    "an empty run name": (
        lambda: make(run_name=""),
        ["`run_name` is empty", "None for one made of the time"],
    ),
    "a log level that there is not": (
        lambda: make(python_log_level="loud"),
        ["`python_log_level` is 'loud'", "`info`", "`warning`"],
    ),
    "a unit that ends no training": (lambda: fit(duration="10sec"), ["`10sec`", "`ep`, `ba`, `sp`, `tok`"]),
    "a unit that there is not": (lambda: fit(duration="10bananas"), ["`10bananas`", "ba"]),
    "a fraction of a batch": (lambda: fit(duration="1.5ba"), ["1.5ba"]),
    "no duration": (lambda: fit(duration=None), ["no training duration", "`max_duration=`"]),
    "no data": (lambda: fit(train_dataloader=None), ["`train_dataloader` is required"]),
    "no loss": (
        lambda: make(model=nn.Linear(5, 3), optimizers=None),
        ["no `loss(outputs, batch)`", "`loss_fn=`"],
    ),
    "a model that is none": (
        lambda: Trainer(model="resnet50", progress_bar=False),
        ["`model` is a `str`", "torch.nn.Module"],
    ),
    "a loss that is no scalar": (
        lambda: fit(model=Returns(lambda outputs: outputs.sum(1))),
        ["the shape [4]", "return its mean"],
    ),
    "a loss that is none": (
        lambda: fit(model=Returns(lambda outputs: None)),
        ["the loss is a `NoneType`", "expected a scalar tensor"],
    ),
    "an empty loader": (
        lambda: fit(train_dataloader=[]),
        ["yielded no batch in a whole epoch", "at least 1"],
    ),
    "an empty batch": (
        lambda: fit(train_dataloader=[[torch.zeros(0, 5), torch.zeros(0)]]),
        ["a batch without samples"],
    ),
    "an empty evaluation": (lambda: evaluate(eval_dataloader=[]), ["`eval`", "no batch"]),
    "two evaluators of one label": (
        lambda: make(eval_dataloader=[Evaluator(label="a", dataloader=loader(4))] * 2),
        ["`a`", "label"],
    ),
    "evaluators beside loaders": (
        lambda: make(eval_dataloader=[Evaluator(label="a", dataloader=loader(4)), loader(4)]),
        ["`Evaluator`"],
    ),
    "a metric that the model has not": (
        lambda: evaluate(eval_dataloader=Evaluator(label="a", dataloader=loader(4), metric_names=["Bleu"])),
        ["Bleu", "Loss"],
    ),
    "a label that is not evaluated": (
        lambda: fit(
            eval_dataloader=loader(4),
            callbacks=EarlyStopper("Loss", "validation"),
            duration="1ep",
        ),
        ["`validation`", "eval"],
    ),
    "a batch that cannot be divided": (
        lambda: fit(
            model=WithPrior(),
            train_dataloader=DataSpec(
                [{"x": torch.ones(4, 5), "prior": torch.zeros(3), "labels": torch.ones(4).long()}],
                get_num_samples_in_batch=lambda batch: 4,
            ),
            device_train_microbatch_size=2,
            duration="1ba",
        ),
        [
            "`batch['prior']` has the shape [3], and the batch has 4 samples",
            "split_batch=…",
            "leave microbatches out",
        ],
    ),
    "an unknown key of a DataSpec": (
        lambda: make(train_dataloader={"dataloader": loader(), "num_sample": 3}),
        ["`num_sample`", "did you mean"],
    ),
    "an unknown key of the parallelism": (
        lambda: make(parallelism_config={"fdsp": {}}),
        ["fdsp", "fsdp"],
    ),
    "an unknown key of the clipping": (
        lambda: make(gradient_clipping={"max_norms": 1.0}),
        ["max_norms"],
    ),
    "a callback of two trainers": (two_trainers, ["`Callback` still belongs to a trainer", "`close()`"]),
    "a closed trainer": (closed, ["this trainer is closed"]),
    "a class where an instance is expected": (
        lambda: make(callbacks=[EarlyStopper]),
        ["`callbacks` has the class `EarlyStopper`", "pass an instance: `EarlyStopper(…)`"],
    ),
    "an algorithm that is none": (
        lambda: make(algorithms="EMA"),
        ["`algorithms` has a `str`", "no `match`", "pass an instance"],
    ),
    "a logger that is none": (
        lambda: make(loggers=[Callback()]),
        ["`loggers` has a `Callback`", "no `log_metrics`", "pass an instance"],
    ),
    "an optimizer of another model": (
        lambda: make(optimizers=torch.optim.SGD(Net().parameters(), lr=0.1)),
        ["hold no parameter of `model`, a `Net`", "`model.parameters()`"],
    ),
    "an unknown key of the compilation": (
        lambda: make(compile_config={"fullgraf": True}),
        ["`compile_config` has the unknown key `fullgraf`", "did you mean `fullgraph`?"],
    ),
    "a precision of a package that is missing": (
        lambda: make(precision="amp_fp8"),
        ["`amp_fp8`", "GPU", "`amp_bf16`"],
    ),
    "a scaling without its precision": (
        lambda: make(precision_config={"margin": 0}),
        ["`precision_config`", "`precision='amp_fp8'`"],
    ),
    "a device that Hocket has not": (
        lambda: Trainer(model=Net(), device="hpu", progress_bar=False),
        ["`hpu`", "`cpu`, `gpu`"],
    ),
    "a batch that cannot be counted": (
        lambda: fit(train_dataloader=[{"x": torch.zeros(3, 5), "y": torch.zeros(2), "name": "a"}]),
        ["`x` (3)", "`y` (2)", "get_num_samples_in_batch"],
    ),
    "label where the model wants labels": (
        lambda: fit(
            model=Labelled(),
            train_dataloader=[{"x": torch.zeros(3, 5), "label": torch.zeros(3, dtype=torch.long)}],
        ),
        ["`labels`", "`label`", "rename"],
    ),
    "a loader for another number of ranks": (
        lambda: make(train_dataloader=type("Loader", (list,), {"data_parallel": (0, 4)})()),
        ["rank 0 of 4", "rank 0 of 1"],
    ),
}


class Labelled(nn.Module):
    """A module as in `transformers`, which computes the loss if it gets `labels`."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x, labels=None):
        outputs = self.head(x)
        loss = None if labels is None else nn.functional.cross_entropy(outputs, labels)
        return SimpleNamespace(logits=outputs, loss=loss)


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_raises_with_what_to_change(misuse):
    run, words = MISUSES[misuse]
    with pytest.raises(TrainerError) as refused:
        run()
    message = str(refused.value)
    missing = [word for word in words if word not in message]
    assert not missing, message


@pytest.mark.parametrize("call", ["fit", "eval", "predict", "save_checkpoint"])
def test_a_closed_trainer_has_the_code_that_explains_it(call):
    trainer = make()
    trainer.close()
    arguments = {"fit": ["1ba"], "eval": [[]], "predict": [[]], "save_checkpoint": ["a"]}[call]
    with pytest.raises(TrainerClosedError, match="make a new one"):
        getattr(trainer, call)(*arguments)


class WithPrior(Labelled):
    def forward(self, x, prior, labels=None):
        return super().forward(x, labels)


PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
# Errors with tests of their own, here or in the tests of their modules, and words of their messages.
OTHERS = {
    "a hang after the first epoch": ["yielded no batch for", "waits", "DataLoader(timeout="],
    "out of memory with everything sharded": [
        "memory of this rank",
        "`device_train_microbatch_size`",
        "halve",
    ],
    "a barrier that times out at start": ["the first barrier of the job failed within"],
    "resuming on other ranks": ["is of another number of ranks, so random generators start anew"],
    "a key that only one side has": ["Only in the checkpoint"],
    "huge checkpoints": ["`save_num_checkpoints_to_keep=`"],
}


@pytest.mark.parametrize("error", [*MISUSES, *OTHERS])
def test_every_error_has_a_heading_and_its_message_in_the_docs(error):
    sections = re.split(r"^###? ", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    found = [section for section in sections if section.split("\n", 1)[0].lower() == error.lower()]
    assert len(found) == 1, f"docs/errors.md has no heading `{error}`"
    text = " ".join(found[0].replace("\n> ", " ").split())
    words = MISUSES[error][1] if error in MISUSES else OTHERS[error]
    missing = [word for word in words if word not in text]
    assert not missing, text


def test_the_docs_have_no_heading_of_an_error_that_does_not_exist():
    headings = re.findall(r"^### (.*)", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    assert {heading.lower() for heading in headings} == {error.lower() for error in (*MISUSES, *OTHERS)}


def test_a_memory_report_names_uses_and_the_next_remedy():
    with make(optimizers=None, max_duration="1ba") as trainer:
        trainer.fit()
        report = memory_report(trainer.state)
    for use in ("parameters", "optimizer state", "gradients"):
        assert use in report
    assert "`device_train_microbatch_size` is the whole batch of a rank: halve it" in report


class Sleeps(TensorDataset):
    """A data set whose worker blocks in the second epoch."""

    def __getitem__(self, index):
        if os.path.exists(os.environ["HANGS"]):
            import time

            time.sleep(600)
        return super().__getitem__(index)


def test_a_blocked_worker_is_named_within_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGS", str(tmp_path / "now"))

    class Hang(Callback):
        def epoch_end(self, state, logger):
            (tmp_path / "now").touch()

    sleeping = DataLoader(Sleeps(*data(8).tensors), batch_size=4, num_workers=1)
    with make(train_dataloader=sleeping, callbacks=Hang(), dist_timeout=1.5) as trainer:
        with pytest.raises(TrainerError, match=r"1\.5 s.*worker.*waits.*DataLoader\(timeout=") as late:
            trainer.fit("2ep")
        assert "batch" in str(late.value)
    # The error's traceback keeps the iterator, which ends its workers when it goes. torch 2.9 does not wait
    # for the end of one that did not answer, and leaves that to Python.
    del late, trainer
    gc.collect()
    for worker in multiprocessing.active_children():
        worker.join(20)
