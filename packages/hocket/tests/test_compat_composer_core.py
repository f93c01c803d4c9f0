"""`composer.core` of the layer: states, engines and data specs that a script makes itself, and devices."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from hocket.compat.composer import DataSpec, Engine, Logger, State, Trainer
from hocket.compat.composer.core import (
    Precision,
    Trace,
    default_split_batch,
    ensure_data_spec,
    get_precision_context,
    sort_to_back,
    sort_to_front,
)
from hocket.compat.composer.devices import Device, DeviceCPU, DeviceGPU
from hocket.compat.composer.loggers import ProgressBarLogger
from hocket.compat.composer.models import ComposerClassifier
from hocket.compat.composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule
from hocket.compat.composer.utils import get_device
from hocket.trainer import Algorithm, Callback, Event, Time, Timestamp, TimeUnit
from hocket.trainer.errors import TrainerConfigError


def loader(rows: int = 8, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(rows, 2), torch.arange(rows) % 2), batch_size=batch_size)


def make_state(**arguments: Any) -> State:
    given = {"model": nn.Linear(2, 2), "rank_zero_seed": 7, "run_name": "by-hand", "device": DeviceCPU()}
    return State(**given | arguments)


def make_trainer(**arguments: Any) -> Trainer:
    model = ComposerClassifier(nn.Linear(2, 2))
    given = {"model": model, "train_dataloader": loader(), "max_duration": "1ep", "progress_bar": False}
    return Trainer(**given | {"optimizers": torch.optim.SGD(model.parameters(), lr=0.1)} | arguments)


class Noting(Algorithm):
    def __init__(self, name: str, notes: list[str], *, matches: bool = True) -> None:
        self.name, self.notes, self.matches = name, notes, matches

    def match(self, event: Event, state: Any) -> bool:
        self.notes.append(f"{self.name}?")
        return self.matches

    def apply(self, event: Event, state: Any, logger: Any) -> Any:
        self.notes.append(self.name)
        return len(self.notes)


class Closing(Callback):
    is_closed = False

    def close(self, state: Any, logger: Any) -> None:
        self.is_closed = True


def test_a_state_is_made_with_composers_arguments():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = make_state(
        model=model,
        max_duration="10ep",
        precision=Precision.AMP_BF16,
        optimizers=optimizer,
        device_train_microbatch_size=2,
        dataloader=loader(),
        dataloader_label="train",
    )
    assert (state.seed, state.rank_zero_seed, state.run_name) == (7, 7, "by-hand")
    assert state.device == torch.device("cpu")
    assert (state.max_duration, state.dataloader_len, state.dataloader_label) == (Time(10, "ep"), 2, "train")
    assert (state.precision, state.optimizers, state.schedulers) == ("amp_bf16", [optimizer], [])
    state.schedulers = schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    state.max_duration = "3ba"
    state.callbacks = one = Closing()
    assert (state.schedulers, state.max_duration, state.callbacks) == ([schedule], Time(3, "ba"), [one])
    assert state.timestamp == "0ba"
    assert not state.is_model_ddp
    assert state.scaler is None
    assert not state.fsdp_enabled


def test_a_state_is_saved_to_and_loaded_from_a_dict():
    class Counting(Callback):
        count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: Any) -> None:
            self.count = state["count"]

    with make_trainer(callbacks=[first := Counting()], run_name="first") as trainer:
        trainer.fit()
        first.count = 3
        saved = trainer.state.state_dict()
        expected = copy.deepcopy(trainer.state.model.state_dict())
    with make_trainer(callbacks=[second := Counting()], run_name="second") as trainer:
        trainer.state.load_state_dict({"timestamp": saved["timestamp"]}, trainer.logger)
        assert trainer.state.timestamp.batch == 2
        trainer.state.load_state_dict(saved, trainer.logger, strict=True)
        assert (trainer.state.run_name, second.count) == ("second", 3)
        for name, value in trainer.state.model.state_dict().items():
            torch.testing.assert_close(value, expected[name])
    model = nn.Linear(2, 2)
    state = make_state(model=model, optimizers=torch.optim.Adam(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    state.optimizers[0].step()
    moments = state.state_dict()["optimizers"]["Adam"]["state"]["weight"]["exp_avg"]
    other = nn.Linear(2, 2)
    taken = make_state(model=other, optimizers=torch.optim.Adam(other.parameters(), lr=0.1))
    taken.load_state_dict(state.state_dict())
    torch.testing.assert_close(taken.optimizers[0].state[other.weight]["exp_avg"], moments)


def test_the_active_loader_of_a_state_has_a_label_and_a_length():
    state = make_state()
    state.set_dataloader(loader(), "train", 1)
    assert (state.dataloader_label, state.dataloader_len) == ("train", 1)
    with pytest.warns(UserWarning, match="`dataloader_len` is 5, and the data loader has 2 batches"):
        state.set_dataloader(loader(), "eval", 5)
    assert state.dataloader_len == 2
    state.set_dataloader(iter([1, 2]), "train")
    assert state.dataloader_len is None
    with pytest.raises(TrainerConfigError, match="without `dataloader_label`"):
        state.set_dataloader(loader())
    state.set_dataloader()
    assert (state.dataloader, state.dataloader_label, state.dataloader_len) == (None, None, None)


def test_arguments_that_a_scripts_own_state_cannot_use_raise():
    with pytest.raises(TrainerConfigError, match="`scaler` of a `State` made by hand has no effect"):
        make_state(scaler=object())
    with pytest.raises(TrainerConfigError, match="`State` has no argument `max_epochs`"):
        make_state(max_epochs=3)
    make_state(scaler=None, save_metrics=False)


def test_a_scripts_own_engine_runs_all_algorithms_and_returns_their_traces():
    notes: list[str] = []
    state = make_state(algorithms=[Noting("a", notes), Noting("b", notes, matches=False), Noting("c", notes)])
    engine = Engine(state, Logger(state))
    traces = engine.run_event("before_loss")
    assert notes == ["a?", "b?", "c?", "a", "c"]
    told = [(one.name, one.event, one.exit_code, one.order, one.run) for one in traces.values()]
    assert told == [("Noting", Event.BEFORE_LOSS, 4, 0, True), ("Noting", Event.BEFORE_LOSS, 5, 1, True)]
    assert all(isinstance(one, Trace) for one in traces.values())
    notes.clear()
    engine.run_event(Event.AFTER_LOSS)
    assert notes[3:] == ["c", "a"]
    engine.close()
    with pytest.raises(RuntimeError, match="`FIT_START` was fired on an engine that is closed"):
        engine.run_event(Event.FIT_START)


def test_loggers_run_first_at_init_and_last_at_other_events():
    heard: list[str] = []

    class Destination(Closing):
        def run_event(self, event: Event, state: Any, logger: Any) -> None:
            heard.append(f"{type(self).__name__} {event.value}")

    from hocket.trainer import LoggerDestination

    class ToFile(LoggerDestination):
        run_event = Destination.run_event

    state = make_state(callbacks=Destination())
    engine = Engine(state, Logger(state, ToFile()))
    engine.run_event(Event.INIT)
    engine.run_event(Event.BATCH_END)
    engine.close()
    assert heard == ["ToFile init", "Destination init", "Destination batch_end", "ToFile batch_end"]


def test_a_garbage_collected_engine_is_closed():
    callback = Closing()
    state = make_state(callbacks=[callback])
    engine = Engine(state, Logger(state))
    del engine
    gc.collect()
    assert callback.is_closed


def test_a_users_pass_runs_after_the_default_ones_as_in_composer():
    def by_name(algorithms: Any, event: Event) -> Any:
        return sorted(algorithms, key=lambda one: one.name)

    state = make_state()
    plain = Engine(state, Logger(state)).algorithm_passes
    for given, place in ((by_name, 2), ([by_name, 0], 0), ((by_name, 0), 0), ([(by_name, 1)], 1)):
        expected = [*plain[:place], by_name, *plain[place:]]
        assert Engine(make_state(), Logger(state), given).algorithm_passes == expected
    with pytest.raises(TrainerConfigError, match="`algorithm_passes` has 'no'; expected a function"):
        Engine(state, Logger(state), ["no"])
    notes: list[str] = []
    algorithms = [Noting("b", notes), Noting("a", notes)]
    with make_trainer(algorithms=algorithms, algorithm_passes=by_name) as trainer:
        assert isinstance(trainer.state, State)
        assert isinstance(trainer.engine, Engine)
        notes.clear()
        # If the user's pass ran before the reversing one, `b` would run first here.
        trainer.engine.run_event(Event.AFTER_LOSS)
    assert [note for note in notes if "?" not in note][:2] == ["a", "b"]


def test_mocks_are_accepted_as_algorithms():
    stand_ins = [Mock(match=Mock(return_value=True), apply=Mock(return_value=n)) for n in range(3)]
    state = make_state(algorithms=stand_ins)
    traces = Engine(state, Logger(state)).run_event(Event.BATCH_START)
    assert [one.exit_code for one in traces.values()] == [0, 1, 2]


def test_devices_move_batches_and_modules():
    device = DeviceCPU()
    assert isinstance(get_device("cpu"), DeviceCPU)
    assert get_device(device) is device
    assert (device.name, device.dist_backend) == ("cpu", "gloo")
    # A trainer's device is a `torch.device`.
    assert isinstance(torch.device("cpu"), DeviceCPU)
    assert isinstance(torch.device("cuda"), (DeviceGPU, Device))
    assert not isinstance(torch.device("cuda"), DeviceCPU)
    assert not isinstance("cpu", Device)
    batch = {"x": torch.ones(2), "more": [torch.ones(1), ("text", torch.ones(1))]}
    moved = Device(torch.device("meta")).batch_to_device(batch)
    assert moved["x"].is_meta
    assert moved["more"][1][0] == "text"
    assert moved["more"][1][1].is_meta
    optimizer = torch.optim.SGD([weight := nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    weight.sum().backward()
    optimizer.step()
    Device(torch.device("meta")).optimizer_to_device(optimizer)
    assert optimizer.state[weight]["momentum_buffer"].is_meta
    assert next(Device(torch.device("meta")).module_to_device(nn.Linear(1, 1)).parameters()).is_meta


def test_the_functions_of_a_data_spec_work_with_and_without_arguments():
    plain = DataSpec(loader(), 8)
    batch = (torch.ones(5, 2), torch.zeros(5))
    assert plain.num_samples == 8
    assert DataSpec(loader()).num_samples == len(loader().dataset)
    assert DataSpec([]).num_samples is None
    assert plain.get_num_samples_in_batch(batch) == 5
    assert plain.get_num_samples_in_batch({"a": [1, 2], "b": [3, 4]}) == 2
    assert plain.get_num_tokens_in_batch(batch) == 0
    assert plain.get_num_tokens_in_batch({"input_ids": torch.ones(3, 4)}) == 12
    assert [len(part[0]) for part in plain.split_batch(batch, 2)] == [2, 2, 1]
    counted = DataSpec([], get_num_tokens_in_batch=lambda batch: {"total": 8, "loss_generating": 4})
    assert counted.get_num_tokens_in_batch({}) == 8
    assert counted.get_num_tokens_in_batch({}, token_type="loss_generating") == 4
    whole = DataSpec([], get_num_tokens_in_batch=lambda batch: 8)
    assert whole.get_num_tokens_in_batch({}, token_type="loss_generating") == 8
    assert [len(part[0]) for part in default_split_batch(batch, 3)] == [3, 2]
    assert ensure_data_spec(dataloader=plain) is plain
    assert ensure_data_spec({"dataloader": [], "num_tokens": 3}).num_tokens == 3


def test_a_trainer_uses_the_counts_of_a_users_data_spec():
    spec = DataSpec(
        loader(8, 4),
        get_num_tokens_in_batch=lambda batch: {"total": 10, "loss_generating": len(batch[0])},
        split_batch=lambda batch, size: [
            [part[start : start + size] for part in batch] for start in range(0, len(batch[0]), size)
        ],
    )
    with make_trainer(
        train_dataloader=spec,
        eval_dataloader=DataSpec(loader(4, 4)),
        device_train_microbatch_size=3,
        accumulate_train_batch_on_tokens=True,
    ) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.counts[3:5] == (8, 20)


def test_several_evaluation_loaders_need_no_labels():
    with make_trainer(eval_dataloader=(loader(), loader(4))) as trainer:
        trainer.fit()
        assert sorted(trainer.state.eval_metrics) == ["eval", "eval_1"]
        trainer.eval([loader(), loader(4), loader(4)])
        assert sorted(trainer.state.eval_metrics) == ["eval", "eval_1", "eval_2"]


def test_a_profiler_can_be_bound_to_a_state_without_a_trainer(tmp_path: Any):
    profiler = Profiler(
        trace_handlers=[JSONTraceHandler(folder=str(tmp_path))],
        schedule=cyclic_schedule(),
        torch_prof_folder=None,
    )
    state = make_state()
    profiler.bind_to_state(state)
    assert state.profiler is profiler
    assert state.callbacks == [profiler]


def test_precisions_are_contexts_with_composers_arguments():
    for settings in ((), ({"margin": 0},), (None, False)):
        with get_precision_context("amp_bf16", *settings):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    with get_precision_context(Precision.AMP_FP8, fp8_autocast_enabled=False):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16


def test_trace_handlers_and_progress_bars_accept_composers_arguments(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
):
    handler = JSONTraceHandler(
        str(tmp_path), "rank{rank}.json", "remote.json", None, "merged.json", overwrite=True
    )
    assert (handler.folder, handler.merged_trace_filename) == (str(tmp_path), None)
    with make_trainer(loggers=[ProgressBarLogger("stdout", True)]) as trainer:
        trainer.fit()
    assert "[train" in capsys.readouterr().out


def test_sorting_helpers_of_passes_sort_by_class():
    assert sort_to_back([1, "a", "c", 2, 3.0], int) == ["a", "c", 3.0, 1, 2]
    assert sort_to_front([1, "a", "c", 2, 3.0], int) == [1, 2, "a", "c", 3.0]


def test_a_timestamp_advances_by_composers_arguments():
    now = Timestamp().to_next_batch(10, 20, timedelta(seconds=5)).to_next_epoch(duration=timedelta(seconds=5))
    assert (now.sample, now.token, now.epoch) == ("10sp", "20tok", "1ep")
    assert (now.total_wct.seconds, now.iteration_wct.seconds, now.epoch_wct.seconds) == (10, 10, 0)
    assert now.to_next_iteration(duration=1).total_wct.seconds == 11
    # Scripts compare a timestamp with a time, whose unit decides.
    assert now == "1ba"
    assert now == Time(1, "ep")
    assert now != "2ba"
    assert isinstance(Time(1, "ba"), Time[int].__origin__)


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from hocket.compat.composer import Callback, Trainer
from hocket.compat.composer.models import ComposerClassifier

class Tells(Callback):
    def close(self, state, logger):
        print("closed at", state.timestamp.batch, flush=True)

    def post_close(self):
        print("closed after the others", flush=True)

model = ComposerClassifier(torch.nn.Linear(2, 2))
data = DataLoader(TensorDataset(torch.ones(8, 2), torch.arange(8) % 2), batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = Trainer(model=model, train_dataloader=data, optimizers=optimizer, max_duration="1ep",
                  callbacks=[Tells()], progress_bar=False)
trainer.fit()
print("end", flush=True)
"""


def test_an_unclosed_trainer_is_closed_when_the_script_ends():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["end", "closed at 2ba", "closed after the others"]


def test_a_classifiers_metrics_are_attributes_that_may_be_replaced():
    model = ComposerClassifier(nn.Linear(2, 3), num_classes=3)
    assert type(model.train_metrics) is MulticlassAccuracy
    assert sorted(model.val_metrics.keys()) == ["CrossEntropy", "MulticlassAccuracy"]
    model.val_metrics = MulticlassF1Score(3)
    assert list(model.get_metrics(is_train=False)) == ["MulticlassF1Score"]
    assert type(model.val_metrics) is MulticlassF1Score
    model.train_metrics = None
    assert model.get_metrics(is_train=True) == {}
    assert model.train_metrics is None
    with pytest.raises(AttributeError):
        model.no_such_attribute  # noqa: B018


def test_keeping_0_checkpoints_keeps_the_newest(tmp_path: Any):
    settings = {"save_folder": str(tmp_path), "save_interval": "1ba", "save_num_checkpoints_to_keep": 0}
    with pytest.warns(UserWarning, match="the newest checkpoint is kept"):
        trainer = make_trainer(**settings)
    with trainer:
        trainer.fit()
        assert len(trainer.saved_checkpoints) == 1


def test_the_length_of_a_data_loader_is_a_number_and_a_time():
    state = State(nn.Linear(1, 1), 0, "run", "cpu")
    assert state.dataloader_len is None
    state.set_dataloader([1, 2, 3], "train")
    length = state.dataloader_len
    assert length == 3
    assert (length.value, length.unit, length * 2, str(length)) == (3, TimeUnit.BATCH, 6, "3")
    state.dataloader_len = Time(5, "ba")
    assert state.dataloader_len == 5
