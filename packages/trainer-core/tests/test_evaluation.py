"""Evaluation and prediction: events, intervals, results, and the state that they do not change."""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.utilities import dim_zero_cat

from hocket.trainer import Callback, DataSpec, Evaluator, Event
from hocket.trainer.errors import DataError, TrainerConfigError
from hocket.trainer.loggers import InMemoryLogger
from support.live_bytes import LiveBytes
from support.training import Net, Recorder, Watch, data, loader, make, parameters


class Median(Metric):
    """A metric that keeps every prediction, as ranking metrics do."""

    def __init__(self):
        super().__init__()
        self.add_state("kept", default=[], dist_reduce_fx="cat")

    def update(self, outputs, targets):
        self.kept.append(outputs.gather(1, targets[:, None]).double())

    def compute(self):
        return dim_zero_cat(self.kept).flatten().sort().values[::2].mean()


class Measured(Net):
    """A classifier with two metrics, one of which keeps every prediction."""

    def get_metrics(self, is_train=False):
        return {"Accuracy": MulticlassAccuracy(3, average="micro"), "Median": Median()}

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs, batch[1])


def expected(model, dataset, count=None):
    """Compute the metrics by hand, over all samples at once."""
    inputs, targets = dataset[: count or len(dataset)]
    model.eval()
    with torch.no_grad():
        outputs = model.layers(inputs)
    metrics = Measured().get_metrics()
    for metric in metrics.values():
        metric.update(outputs, targets)
    return approx({name: float(metric.compute()) for name, metric in metrics.items()})


def approx(numbers):
    return pytest.approx(numbers, rel=1e-5, abs=1e-6)


def values(trainer, label="eval"):
    return {name: float(metric.compute()) for name, metric in trainer.state.eval_metrics[label].items()}


EVAL_BATCH = [
    Event.EVAL_BATCH_START,
    Event.EVAL_BEFORE_FORWARD,
    Event.EVAL_AFTER_FORWARD,
    Event.EVAL_BATCH_END,
]
EVAL = [
    Event.EVAL_BEFORE_ALL,
    Event.EVAL_START,
    *EVAL_BATCH,
    *EVAL_BATCH,
    Event.EVAL_END,
    Event.EVAL_AFTER_ALL,
]


def test_eval_measures_and_logs_every_sample_once():
    logger, recorder = InMemoryLogger(), Recorder()
    with make(
        model=Measured(), eval_dataloader=loader(7, 4), loggers=logger, callbacks=recorder, max_duration="3ba"
    ) as trainer:
        trainer.fit()
        recorder.events.clear()
        trainer.eval()
        assert recorder.events == [Event.EVAL_STANDALONE_START, *EVAL, Event.EVAL_STANDALONE_END]
        assert values(trainer) == expected(trainer.state.model, data(7))
        assert {name: float(value) for name, value in trainer.state.eval_metric_values.items()} == approx(
            values(trainer)
        )
        assert trainer.state.eval_timestamp.counts[2:4] == (2, 7)
    assert logger.data["metrics/eval/Accuracy"][-1] == (3, pytest.approx(values(trainer)["Accuracy"]))


def test_evaluation_in_a_fit_comes_between_batch_end_and_checkpoint():
    recorder = Recorder()
    with make(
        model=Measured(),
        train_dataloader=loader(8, 4),
        eval_dataloader=loader(8, 4),
        eval_interval="1ba",
        callbacks=recorder,
        max_duration="1ep",
    ) as trainer:
        trainer.fit()
    events = recorder.events
    starts = [at for at, event in enumerate(events) if event is Event.EVAL_BEFORE_ALL]
    assert len(starts) == 2
    for at in starts:
        assert events[at - 1] is Event.BATCH_END
        assert events[at : at + len(EVAL)] == EVAL
        assert events[at + len(EVAL)] is Event.BATCH_CHECKPOINT


def evaluated_at(interval, max_duration, **arguments):
    seen = []

    class Note(Callback):
        def eval_start(self, state, logger):
            seen.append(state.timestamp.counts.batch)

    with make(
        model=Measured(),
        train_dataloader=loader(12, 4),
        eval_dataloader=loader(4, 4),
        eval_interval=interval,
        callbacks=[Note(), *arguments.pop("callbacks", [])],
        max_duration=max_duration,
        **arguments,
    ) as trainer:
        trainer.fit()
    return seen


@pytest.mark.parametrize(
    ("interval", "max_duration", "batches"),
    [
        (1, "2ep", [3, 6]),
        ("2ba", "2ep", [2, 4, 6]),
        ("4ba", "2ep", [4, 6]),
        ("2ep", "3ep", [6, 9]),
        ("0.5dur", "4ba", [2, 4]),
        ("10sp", "2ep", [3, 5, 6]),
        (0, "2ep", []),
        ("0ba", "2ep", []),
        (lambda state, event: event is Event.BATCH_END and state.timestamp.counts.batch == 2, "2ep", [2]),
    ],
    ids=lambda one: one.__name__ if callable(one) else str(one),
)
def test_evaluations_run_at_the_interval(interval, max_duration, batches):
    assert evaluated_at(interval, max_duration) == batches


def test_a_stopped_fit_is_evaluated_where_it_ends():
    def stop(state):
        if state.timestamp.batch == "4ba":
            state.stop_training()

    assert evaluated_at("1ep", "5ep", callbacks=[Watch(stop)]) == [3, 4]


def test_evaluation_changes_no_bit_of_the_training():
    def run(**arguments):
        torch.manual_seed(0)
        clocks = []
        with make(
            model=(model := type("M", (Measured,), {})(dropout=0.3)),
            train_dataloader=loader(20, 4, shuffle=True),
            max_duration="2ep",
            callbacks=Watch(lambda state: clocks.append(model.training)),
            **arguments,
        ) as trainer:
            trainer.fit()
            assert all(clocks)
            return parameters(trainer), torch.get_rng_state()

    plain, state = run()
    evaluated, other_state = run(eval_dataloader=loader(9, 2, shuffle=True), eval_interval="1ba")
    assert all(torch.equal(plain[name], evaluated[name]) for name in plain)
    assert torch.equal(state, other_state)


def test_a_module_kept_in_evaluation_mode_stays_there():
    model = Measured(dropout=0.5)
    dropout = model.layers[2]
    with make(model=model, eval_dataloader=loader(4, 4), max_duration="1ba") as trainer:
        trainer.state.model.train()
        dropout.eval()
        trainer.eval()
        assert model.training
        assert not dropout.training


class SlowEvaluation(Callback):
    """A callback that sleeps before each evaluation."""

    def __init__(self):
        self.began_s, self.slept_s = time.monotonic(), 0.0

    def eval_start(self, state, logger):
        began_s = time.monotonic()
        time.sleep(0.3)
        self.slept_s += time.monotonic() - began_s

    def seconds_beside(self):
        """Return the seconds since this callback was made, without its sleeps."""
        return time.monotonic() - self.began_s - self.slept_s


def test_the_training_clock_excludes_evaluation():
    slow = SlowEvaluation()
    with make(
        model=Measured(),
        eval_dataloader=loader(4, 4),
        eval_interval="1ba",
        callbacks=slow,
        max_duration="3ba",
    ) as trainer:
        trainer.fit()
        assert 0 < trainer.state.timestamp.total_wct.total_seconds() <= slow.seconds_beside()


@pytest.mark.parametrize("size", [1, 3, 4, "auto"])
def test_evaluation_in_microbatches_measures_the_same(size):
    recorder = Recorder()
    with make(
        model=Measured(),
        eval_dataloader=Evaluator(label="val", dataloader=loader(7, 4), device_eval_microbatch_size=size),
        device_train_microbatch_size=2,
        callbacks=recorder,
        max_duration="1ba",
    ) as trainer:
        trainer.eval()
        assert values(trainer, "val") == expected(trainer.state.model, data(7))
    forwards = {1: 7, 3: 3, 4: 2, "auto": 4}
    assert recorder.events.count(Event.EVAL_BEFORE_FORWARD) == forwards[size]


def test_evaluators_have_their_own_metrics_subsets_and_intervals():
    logger = InMemoryLogger()
    with make(
        model=Measured(),
        train_dataloader=loader(12, 4),
        eval_dataloader=[
            Evaluator(label="a", dataloader=loader(8, 4), metric_names=["acc"], eval_interval="1ba"),
            Evaluator(label="b", dataloader=loader(8, 2), subset_num_batches=2),
        ],
        loggers=logger,
        max_duration="1ep",
    ) as trainer:
        trainer.fit()
        assert list(trainer.state.eval_metrics["a"]) == ["Accuracy"]
        assert values(trainer, "b") == expected(trainer.state.model, data(8), 4)
    assert [step for step, _ in logger.data["metrics/a/Accuracy"]] == [1, 2, 3]
    assert [step for step, _ in logger.data["metrics/b/Accuracy"]] == [3]
    assert "metrics/a/Median" not in logger.data


def test_eval_of_another_loader_keeps_the_trainers_evaluators():
    with make(model=Measured(), eval_dataloader=loader(4, 4), max_duration="1ba") as trainer:
        own = trainer.state.evaluators
        trainer.eval(Evaluator(label="test", dataloader=loader(9, 2)))
        assert trainer.state.evaluators is own
        assert values(trainer, "test") == expected(trainer.state.model, data(9))
        trainer.eval(loader(9, 2), subset_num_batches=2)
        assert values(trainer, "eval") == expected(trainer.state.model, data(9), 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([Evaluator(label="a", dataloader=[]), loader()], "mixes `Evaluator`s with a `DataLoader`"),
        ([loader(), loader()], "2 loaders without labels"),
        ([Evaluator(label="a", dataloader=[])] * 2, "several evaluators have the label `a`"),
        (3, "`eval_dataloader` is a `int`"),
        (
            Evaluator(label="a", dataloader=loader(), metric_names=["F1"]),
            re.escape(
                "metric `F1`, which the model does not have; `get_metrics(is_train=False)` has: "
                "`Accuracy`, `Median`"
            ),
        ),
        (Evaluator(label="a", dataloader=loader(), metric_names=["("]), "not a regular expression"),
    ],
)
def test_invalid_evaluators_raise(given, message):
    with pytest.raises(TrainerConfigError, match=message):
        make(model=Measured(), eval_dataloader=given)


def test_invalid_fields_of_evaluators_raise():
    with pytest.raises(TrainerConfigError, match=r"expected a list of names: \['Accuracy'\]"):
        Evaluator(label="a", dataloader=[], metric_names="Accuracy")
    with pytest.raises(TrainerConfigError, match="`subset_num_batches` is 0"):
        Evaluator(label="a", dataloader=[], subset_num_batches=0)
    with pytest.raises(TrainerConfigError, match="`device_eval_microbatch_size` of the evaluator `a` is 0"):
        Evaluator(label="a", dataloader=[], device_eval_microbatch_size=0)
    with pytest.raises(TrainerConfigError, match="nothing to evaluate on"), make() as trainer:
        trainer.eval()


def test_an_evaluation_loader_without_batches_raises_with_its_label():
    with make(model=Measured()) as trainer:
        with pytest.raises(DataError, match="evaluator `test` yielded no batch") as raised:
            trainer.eval(Evaluator(label="test", dataloader=[]))
        assert "raised while evaluating `test`" in raised.value.__notes__[-1]
        with pytest.raises(DataError, match="`predict` yielded no batch"):
            trainer.predict([])


def test_predict_returns_outputs_by_batch_on_the_cpu():
    recorder = Recorder()
    with make(model=Measured(dropout=0.5), callbacks=recorder, max_duration="1ba") as trainer:
        trainer.state.model.train()
        recorder.events.clear()
        outputs = trainer.predict(loader(7, 4))
        assert [len(part) for part in outputs] == [4, 3]
        model = trainer.state.model
        assert model.training
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(torch.cat(outputs), model.layers(data(7)[:][0]))
        batch = [
            Event.PREDICT_BATCH_START,
            Event.PREDICT_BEFORE_FORWARD,
            Event.PREDICT_AFTER_FORWARD,
            Event.PREDICT_BATCH_END,
        ]
        assert recorder.events == [Event.PREDICT_START, *batch, *batch, Event.PREDICT_END]
        assert trainer.state.predict_timestamp.counts[2:4] == (2, 7)


def test_predict_without_return_outputs_passes_them_to_callbacks():
    seen = []

    class See(Callback):
        def predict_batch_end(self, state, logger):
            seen.append(state.outputs.clone())
            assert state.dataloader_len == 3

    with make(model=Measured(), callbacks=See()) as trainer:
        assert trainer.predict(loader(8, 2), subset_num_batches=3, return_outputs=False) == []
        assert len(seen) == 3
        assert trainer.state.outputs is None


def test_predict_without_return_outputs_takes_no_more_memory_for_more_batches():
    def peak_of(num_batches, **options):
        with make(model=Measured()) as trainer, LiveBytes() as live:
            trainer.predict(loader(4000, 400), num_batches, **options)
        return live.peak

    assert peak_of(10, return_outputs=False) == peak_of(4, return_outputs=False)
    assert peak_of(10) - peak_of(4) == 6 * 400 * 3 * 4  # 6 more batches of 400 samples, 3 floats each


def test_a_data_spec_with_its_own_functions_is_evaluated():
    batches = [{"x": inputs, "y": targets} for inputs, targets in loader(7, 4)]

    class Named(Measured):
        def forward(self, batch):
            return self.layers(batch["x"])

        def update_metric(self, batch, outputs, metric):
            metric.update(outputs, batch["y"])

    spec = DataSpec(dataloader=batches, get_num_tokens_in_batch=lambda batch: 10 * len(batch["y"]))
    with make(model=Named()) as trainer:
        trainer.eval(Evaluator(label="named", dataloader=spec, device_eval_microbatch_size=3))
        assert values(trainer, "named") == expected(trainer.state.model, data(7))
        assert trainer.state.eval_timestamp.counts.token == 70


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # raised by torchdata
def test_a_stateful_training_loader_cannot_be_evaluated_within_its_epoch():
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    shared = torchdata.StatefulDataLoader(data(8), batch_size=4)
    with pytest.raises(TrainerConfigError, match="evaluator `eval` has the loader that is trained on"):
        make(train_dataloader=shared, eval_dataloader=shared, eval_interval="1ba", max_duration="2ba").fit()
    plain = loader(8, 4)
    with make(
        model=Measured(),
        train_dataloader=plain,
        eval_dataloader=plain,
        eval_interval="1ba",
        max_duration="2ep",
    ) as trainer:
        trainer.fit()
        assert values(trainer) == expected(trainer.state.model, data(8))


def test_evaluation_does_not_advance_the_loaders_own_generator():
    generator = torch.Generator().manual_seed(5)
    evaluated = DataLoader(TensorDataset(*data(8)[:]), batch_size=2, shuffle=True, generator=generator)
    before = generator.get_state()
    with make(model=Measured()) as trainer:
        trainer.eval(evaluated)
    assert torch.equal(generator.get_state(), before)


def test_a_model_without_metrics_is_evaluated_by_its_loss():
    logger = InMemoryLogger()
    with make(eval_dataloader=loader(7, 4), loggers=logger, max_duration="1ba") as trainer:
        trainer.fit()
        model = trainer.state.model.eval()
        with torch.no_grad():
            inputs, targets = data(7)[:]
            expected = torch.nn.functional.cross_entropy(model.layers(inputs), targets)
    assert logger.data["metrics/eval/Loss"] == [(1, pytest.approx(float(expected), rel=1e-5))]


def test_a_plain_module_may_have_its_own_metrics_and_eval_forward():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = Net().layers

        def forward(self, inputs):
            return self.layers(inputs)

        def eval_forward(self, batch, outputs=None):
            return self.layers(batch[0]).flip(1)

        def get_metrics(self, is_train=False):
            return {} if is_train else {"Accuracy": MulticlassAccuracy(3, average="micro")}

    model = Own()
    with make(
        model=model,
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    ) as trainer:
        trainer.eval(loader(7, 4))
        found = trainer.state.eval_metrics["eval"]["Accuracy"].compute()
    inputs, targets = data(7)[:]
    assert found == (model(inputs).flip(1).argmax(1) == targets).float().mean()


def test_the_evaluation_loss_of_a_plain_module_is_weighted_by_its_labels():
    class Tagger(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = torch.nn.Embedding(9, 4)

        def forward(self, input_ids):
            return self.table(input_ids)

    def entropy(outputs, targets):
        return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 9, (6, 5), generator=generator)
    labels = ids % 4
    labels[0, 1:] = labels[4] = -100
    batches = [{"input_ids": ids[at : at + 2], "labels": labels[at : at + 2]} for at in (0, 2, 4)]
    model = Tagger()
    with make(
        model=model,
        loss_fn=entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=batches,
        eval_dataloader=Evaluator(label="eval", dataloader=batches, device_eval_microbatch_size=1),
    ) as trainer:
        trainer.eval()
        found = trainer.state.eval_metrics["eval"]["Loss"].compute()
    torch.testing.assert_close(found, entropy(model(ids), labels).detach())


def test_the_time_of_a_batch_excludes_the_evaluation_before_it():
    durations = []

    slow = SlowEvaluation()
    with make(
        model=Measured(),
        eval_dataloader=loader(4, 4),
        eval_interval="1ba",
        callbacks=[slow, Watch(lambda state: durations.append(state.timestamp.batch_wct.total_seconds()))],
        max_duration="4ba",
    ) as trainer:
        trainer.fit()
    assert len(durations) == 4
    assert all(duration >= 0 for duration in durations)
    assert sum(durations) <= slow.seconds_beside()


class Slow(Callback):
    """Takes 20 ms in each forward pass of an evaluation or prediction, and keeps their times."""

    def __init__(self):
        self.times = []

    def eval_after_forward(self, state, logger):
        time.sleep(0.02)

    predict_after_forward = eval_after_forward

    def eval_batch_end(self, state, logger):
        self.times.append(state.eval_timestamp.counts)

    def predict_batch_end(self, state, logger):
        self.times.append(state.predict_timestamp.counts)


@pytest.mark.parametrize("method", ["eval", "predict"])
def test_the_time_of_evaluation_and_prediction_is_counted(method):
    slow = Slow()
    with make(callbacks=[slow]) as trainer:
        getattr(trainer, method)(loader(12))
    assert [counts.batch for counts in slow.times] == [1, 2, 3]
    assert all(counts.batch_wct >= 0.02 for counts in slow.times)
    assert slow.times[-1].total_wct == pytest.approx(sum(counts.batch_wct for counts in slow.times))
