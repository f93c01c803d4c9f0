"""`repr` of the objects that a user holds: short, without tensors and secrets, and without an error."""

import contextlib
import importlib
import inspect
import re
import threading

import numpy as np
import pytest
import torch

import hocket.ckpt
from hocket.algos import CutOut, PackingCollator
from hocket.ckpt import FolderFollower, Follower
from hocket.ckpt.dcp import HocketReader, HocketWriter
from hocket.ckpt.torch import CheckpointStore, Publisher
from hocket.stream import MDSWriter, StreamingDataLoader, StreamingDataset
from hocket.trainer import Callback, CheckpointSaver, DataSpec, Evaluator, LoggerDestination, Time, Trainer
from hocket.trainer.callbacks import EarlyStopper, LRMonitor, SpeedMonitor, ThresholdStopper
from hocket.trainer.loggers import FileLogger
from hocket.trainer.optim import (
    ConstantScheduler,
    CosineAnnealingWithWarmupScheduler,
    DecoupledAdamW,
    ForOptimizer,
    StepScheduler,
)
from support.training import Net, Recorder, loader, make

PACKAGES = (
    "hocket.algos", "hocket.ckpt", "hocket.ckpt.dcp", "hocket.ckpt.torch", "hocket.dist", "hocket.stream",
    "hocket.stream.torch", "hocket.trainer", "hocket.trainer.callbacks", "hocket.trainer.loggers",
    "hocket.trainer.optim",
)  # fmt: skip


def _public_classes():
    for package in map(importlib.import_module, PACKAGES):
        for name in package.__all__:
            cls = getattr(package, name)
            is_class = inspect.isclass(cls) and not issubclass(cls, BaseException)
            # Nobody holds an object of a protocol, of a logger that Hocket lacks, or of a sum in progress.
            is_held = is_class and not getattr(cls, "_is_protocol", False) and name != "Reduction"
            if is_held and not issubclass(
                cls, importlib.import_module("hocket.trainer.loggers.absent")._AbsentLogger
            ):
                yield cls


@pytest.mark.parametrize(
    "cls", sorted(set(_public_classes()), key=lambda cls: (cls.__module__, cls.__name__))
)
def test_every_public_class_has_a_description(cls):
    assert cls.__repr__ is not object.__repr__


def _is_short(thing: object) -> str:
    text = repr(thing)
    assert len(text) <= 260, text
    assert "tensor(" not in text
    assert " at 0x" not in text
    return text


def test_parts_of_a_run(tmp_path):
    callbacks = [LRMonitor(), SpeedMonitor(window_size=7), Recorder()]
    logger = FileLogger(str(tmp_path / "log.txt"))
    evaluator = Evaluator(label="test", dataloader=[next(iter(loader()))], eval_interval="1ep")
    with make(
        callbacks=callbacks, loggers=[logger], max_duration="2ep", eval_dataloader=evaluator
    ) as trainer:
        trainer.fit()
        state = trainer.state
        assert _is_short(state) == "<State of Net: at batch 10 (epoch 2) of 2ep, cpu, fp32, rank 0 of 1>"
        assert _is_short(trainer.logger) == "<Logger: FileLogger, at batch 10>"
        assert _is_short(trainer.engine).startswith("<Engine: 0 algorithms, ")
        assert _is_short(trainer) == "<Trainer of Net: at 10ba of 2ep>"
        assert _is_short(evaluator) == "<Evaluator 'test' on list, every 1ep>"
        assert [_is_short(one) for one in callbacks] == [
            "LRMonitor()", "SpeedMonitor(window_size=7)", "Recorder()"
        ]  # fmt: skip
        assert (
            _is_short(logger) == f"FileLogger(filename={str(tmp_path / 'log.txt')!r})"
            or len(str(tmp_path)) > 52
        )
    assert _is_short(trainer) == "<Trainer of Net: at 10ba of 2ep, closed>"


def test_arguments_are_shown_as_given():
    optimizer = DecoupledAdamW(Net().parameters(), lr=0.1)
    assert repr(CosineAnnealingWithWarmupScheduler("10ba", alpha_f=0.1)) == (
        "CosineAnnealingWithWarmupScheduler(t_warmup='10ba', alpha_f=0.1)"
    )
    assert (
        repr(StepScheduler(Time.from_timestring("3ep"), gamma=0.5))
        == "StepScheduler(step_size='3ep', gamma=0.5)"
    )
    assert repr(ForOptimizer(ConstantScheduler(), optimizer)) == (
        "<ForOptimizer: ConstantScheduler for DecoupledAdamW>"
    )
    assert (
        repr(EarlyStopper("loss", "train", patience="3ba")) == "EarlyStopper(monitor='loss', patience='3ba')"
    )
    assert "threshold=0.5" in repr(ThresholdStopper("loss", "train", threshold=0.5))
    assert "max_seq_length=16" in repr(PackingCollator(16))
    assert repr(CutOut(length=0.3)).startswith("CutOut(")
    saver = CheckpointSaver("run/weights", save_interval="2ep", weights_only=True)
    assert repr(saver) == "CheckpointSaver(folder='run/weights', save_interval='2ep', weights_only=True)"


class _Tracker(LoggerDestination):
    def __init__(self, project: str, api_key: str, retries: int = 3) -> None:
        self.project, self._api_key, self.retries = project, api_key, retries


class _Unfinished(Callback):
    def __init__(self, weights: torch.Tensor, lock: threading.Lock, path: str = "here") -> None:
        self.weights = weights
        self.lock = lock
        raise KeyError(path)


def test_no_secret_no_tensor_no_error():
    assert repr(_Tracker("a project", "hunter2", retries=5)) == "_Tracker(retries=5)"
    assert repr(object.__new__(_Tracker)) == "_Tracker()"
    unfinished = object.__new__(_Unfinished)
    with pytest.raises(KeyError):
        unfinished.__init__(torch.zeros(3), threading.Lock(), path="there")
    assert repr(unfinished) == "_Unfinished()"
    assert "setup" in repr(object.__new__(Trainer))


class _Holder(Callback):
    def __init__(self, value: object = 0) -> None:
        self.value = value


def test_what_has_no_end_is_not_printed():
    circle: list[object] = [1]
    circle.append(circle)
    assert [repr(_Holder(value)) for value in (circle, [[1], (2,)], 10**5000, -7)] == [
        "_Holder()", "_Holder(value=[[1], [2]])", "_Holder()", "_Holder(value=-7)"
    ]  # fmt: skip


def test_data_of_a_user_is_not_printed():
    batches = [torch.randn(4, 5)]
    spec = DataSpec(batches, batch_transforms=lambda batch: batch, is_sharded=True)
    assert repr(spec) == "<DataSpec of list: with its own batch_transforms, is_sharded>"
    assert repr(DataSpec(batches)) == "<DataSpec of list>"


def test_checkpoints_and_published_weights(tmp_path):
    state = {"weight": torch.randn(64, 3), "epoch": 1}
    with contextlib.closing(CheckpointStore(tmp_path / "run")) as store:
        handle = store.save(state, step=7, per_rank={"rng": list(range(500))})
        handle.wait()
        assert _is_short(handle) == "SaveHandle('step-7', done)"
        assert _is_short(store) == f"<CheckpointStore {store.uri!r}: rank 0 of 1>"
        loaded = store.load("step-7", {"weight": torch.zeros(64, 3), "epoch": 0})
        assert re.fullmatch(r"Loaded\(name='step-7', step=7, user=None\)", _is_short(loaded))
    publisher = Publisher(tmp_path / "weights")
    publisher.publish({"weight": state["weight"]}, step=1)
    assert _is_short(publisher) == f"<Publisher {publisher.uri!r}>"
    arrays = {"weight": np.zeros((64, 3), np.float32)}
    follower = Follower(tmp_path / "weights", into=arrays)
    assert _is_short(follower).endswith(": nothing read yet>")
    follower.update()
    assert _is_short(follower).endswith(": at step 1>")
    folder = tmp_path / "folder"
    assert _is_short(FolderFollower(tmp_path / "weights", folder)).endswith(f" in {str(folder)!r}>")
    for made in (HocketReader(tmp_path / "run"), HocketWriter(tmp_path / "run"), HocketReader()):
        _is_short(made)


def test_a_manifest_is_counted_not_printed(tmp_path):
    with contextlib.closing(CheckpointStore(tmp_path / "run")) as store:
        store.save({f"weight.{i}": torch.zeros(2) for i in range(50)}, step=7).wait()
    checkpoint = hocket.ckpt.open(tmp_path / "run" / "step-7")
    assert _is_short(checkpoint).endswith(": step 7, 50 tensors>")
    assert _is_short(checkpoint.contents).startswith("<Manifest of step 7 (hocket): 50 tensors, 0 values, ")


def test_streams(tmp_path):
    with MDSWriter(out=str(tmp_path / "data"), columns={"x": "int"}) as writer:
        for number in range(10):
            writer.write({"x": number})
        assert _is_short(writer) == f"<MDSWriter to {str(tmp_path / 'data')!r}: 0 shards of x>"
    dataset = StreamingDataset(local=str(tmp_path / "data"), batch_size=2)
    assert "10 samples an epoch" in _is_short(dataset)
    assert _is_short(StreamingDataLoader(dataset)).startswith("<StreamingDataLoader of <StreamingDataset ")
