"""Events: their order, which components receive them, and errors of a component."""

from __future__ import annotations

import re
from unittest.mock import Mock

import pytest
import torch

from hocket.trainer import Algorithm, Callback, Event, LoggerDestination, Time
from hocket.trainer.callback import PeriodicCallback
from hocket.trainer.errors import CallbackReuseError
from support.training import Recorder, Watch, loader, make

MICROBATCH = [
    Event.BEFORE_FORWARD,
    Event.AFTER_FORWARD,
    Event.BEFORE_LOSS,
    Event.AFTER_LOSS,
    Event.BEFORE_BACKWARD,
    Event.AFTER_BACKWARD,
]
BATCH = [
    Event.BEFORE_DATALOADER,
    Event.AFTER_DATALOADER,
    Event.BATCH_START,
    Event.BEFORE_TRAIN_BATCH,
    *MICROBATCH,
    *MICROBATCH,
    Event.AFTER_TRAIN_BATCH,
    Event.BATCH_END,
    Event.BATCH_CHECKPOINT,
]
EPOCH = [
    Event.EPOCH_START,
    *BATCH,
    *BATCH,
    Event.BEFORE_DATALOADER,
    Event.EPOCH_END,
    Event.EPOCH_CHECKPOINT,
]
SETUP = [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD]


def two_batches():
    return loader(8, 4)


def test_events_fire_in_the_documented_order_over_epochs():
    recorder = Recorder()
    with make(
        train_dataloader=two_batches(), callbacks=recorder, device_train_microbatch_size=2, max_duration="2ep"
    ) as trainer:
        trainer.fit()
    assert recorder.events == [
        *SETUP,
        Event.FIT_START,
        Event.ITERATION_START,
        *EPOCH,
        *EPOCH,
        Event.FIT_END,
    ]


def test_the_docstring_places_every_event_in_the_order_in_which_it_fires():
    placed = re.findall(r"<(\w+)>", Event.__doc__)
    assert sorted(placed) == sorted(event.name for event in Event)
    assert len(Event) == 40
    recorder = Recorder()
    with make(train_dataloader=loader(4, 4), callbacks=recorder, max_duration="1ep") as trainer:
        trainer.state.iteration_length = Time(1, "ep")
        trainer.fit()
    fired = [event.name for event in recorder.events]
    fired.pop(len(fired) - 1 - fired[::-1].index("BEFORE_DATALOADER"))  # the one at the epoch's end
    assert fired == [name for name in placed if not name.startswith(("EVAL", "PREDICT"))]


def test_an_epoch_that_ends_with_the_training_fires_its_end_events():
    recorder = Recorder()
    with make(train_dataloader=two_batches(), callbacks=recorder, max_duration="2ba") as trainer:
        trainer.fit()
        assert recorder.events[-3:] == [Event.EPOCH_END, Event.EPOCH_CHECKPOINT, Event.FIT_END]
        assert trainer.state.timestamp.counts[:3] == (0, 1, 2)
        trainer.fit("1ba")
        assert trainer.state.timestamp.counts.batch_in_epoch == 1


def test_time_advances_before_the_end_of_a_batch():
    recorder = Recorder()
    with make(train_dataloader=two_batches(), callbacks=recorder, max_duration="1ep") as trainer:
        trainer.fit()
    seen = list(zip(recorder.events, recorder.batches, strict=True))
    assert [batch for event, batch in seen if event is Event.BATCH_START] == [0, 1]
    assert [batch for event, batch in seen if event is Event.AFTER_TRAIN_BATCH] == [0, 1]
    assert [batch for event, batch in seen if event is Event.BATCH_END] == [1, 2]


class Note(Algorithm):
    def __init__(self, name, notes):
        self.name = name
        self.notes = notes

    def match(self, event, state):
        return event is not Event.EPOCH_END

    def apply(self, event, state, logger):
        self.notes.append((event, self.name))


class NoteCallback(Callback):
    def __init__(self, name, notes):
        self.name = name
        self.notes = notes

    def init(self, state, logger):
        self.notes.append((Event.INIT, self.name))

    def batch_start(self, state, logger):
        self.notes.append((Event.BATCH_START, self.name))

    def close(self, state, logger):
        self.notes.append(("close", self.name))

    def post_close(self):
        self.notes.append(("post_close", self.name))


class NoteLogger(LoggerDestination, NoteCallback):
    pass


def heard(notes, event):
    return "".join(name for at, name in notes if at is event or at == event)


def test_algorithms_run_before_callbacks_and_nest_and_loggers_run_first_at_init():
    notes = []
    with make(
        algorithms=[Note("A", notes), Note("B", notes)],
        callbacks=[NoteCallback("c", notes), NoteCallback("d", notes)],
        loggers=NoteLogger("L", notes),
        max_duration="1ba",
    ) as trainer:
        trainer.fit()
    assert heard(notes, Event.INIT) == "LcdAB"
    assert heard(notes, Event.BATCH_START) == "ABcdL"
    assert heard(notes, Event.BEFORE_FORWARD) == "AB"
    assert heard(notes, Event.AFTER_FORWARD) == "BA"
    assert heard(notes, Event.AFTER_TRAIN_BATCH) == "BA"
    assert heard(notes, Event.AFTER_DATALOADER) == "AB"
    assert heard(notes, Event.EPOCH_END) == ""


class Restores(Algorithm):
    def __init__(self, notes, error=None):
        self.notes = notes
        self.error = error

    def match(self, event, state):
        return event in (Event.EVAL_AFTER_ALL, Event.PREDICT_END)

    def apply(self, event, state, logger):
        self.notes.append(event)

    def abandon_evaluation(self, state):
        self.notes.append("abandoned")
        if self.error is not None:
            raise self.error


class Fails(Callback):
    def eval_before_all(self, state, logger):
        raise KeyboardInterrupt

    def predict_batch_end(self, state, logger):
        raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["eval", "predict"])
def test_algorithms_restore_the_model_after_an_evaluation_that_fails(method):
    notes = []
    algorithms = [Restores(notes, ValueError("no weights")), Restores(notes)]
    with (
        make(algorithms=algorithms, callbacks=Fails()) as trainer,
        pytest.raises(KeyboardInterrupt) as caught,
    ):
        getattr(trainer, method)(two_batches())
    assert notes == ["abandoned", "abandoned"]
    assert "and then: ValueError: no weights" in caught.value.__notes__


def test_an_algorithm_is_asked_only_at_the_events_it_states():
    class Asked(Algorithm):
        events = frozenset({Event.BATCH_END})

        def __init__(self):
            self.asked = []

        def match(self, event, state):
            self.asked.append(event)
            return False

        def apply(self, event, state, logger):
            raise AssertionError

    algorithm = Asked()
    with make(algorithms=algorithm, max_duration="2ba") as trainer:
        trainer.fit()
    assert algorithm.asked == [Event.BATCH_END, Event.BATCH_END]


def test_callbacks_are_prepared_only_for_events_that_they_implement():
    with make(callbacks=Watch(lambda state: None), max_duration="1ba") as trainer:
        on = trainer.engine.on
        assert [event.value for event in Event if getattr(on, event.value)] == ["batch_end"]


def test_changing_a_list_of_callbacks_prepares_the_events_again():
    late = Recorder()

    def join(state):
        if state.timestamp.batch == "1ba":
            state.callbacks.append(late)
        elif state.timestamp.batch == "3ba":
            state.callbacks.remove(late)

    with make(callbacks=Watch(join), max_duration="5ba") as trainer:
        trainer.fit()
    seen = zip(late.events, late.batches, strict=True)
    assert [batch for event, batch in seen if event is Event.BATCH_START] == [1, 2]


def test_assigning_a_list_of_callbacks_prepares_the_events_again():
    first, second, stand_in = Recorder(), Recorder(), Mock(match=Mock(return_value=True))

    def swap(state):
        if state.timestamp.batch == "2ba":
            state.callbacks = [second]
            state.algorithms = [stand_in]

    with make(callbacks=[first, Watch(swap)], max_duration="3ba") as trainer:
        trainer.fit()
        assert trainer.state.callbacks == [second]
    heard = [
        [one.batches[i] for i, event in enumerate(one.events) if event is Event.BATCH_START]
        for one in (first, second)
    ]
    assert heard == [[0, 1], [2]]
    # A mock has every attribute, so it counts as implementing every event.
    assert stand_in.apply.call_args_list[0].args[0] is Event.BATCH_CHECKPOINT


def test_a_callback_needs_the_methods_and_not_the_base_class():
    class Shape:
        heard = 0

        def batch_end(self, state, logger):
            self.heard += 1

    shape = Shape()
    with make(callbacks=shape, max_duration="2ba") as trainer:
        trainer.fit()
    assert shape.heard == 2


def test_callbacks_see_the_changes_of_earlier_ones():
    seen = []

    class Mark(Callback):
        def batch_start(self, state, logger):
            state.batch = [state.batch[0] * 0, state.batch[1]]

    class See(Callback):
        def batch_start(self, state, logger):
            seen.append(float(state.batch[0].abs().sum()))

    with make(callbacks=[Mark(), See()], max_duration="1ba") as trainer:
        trainer.fit()
    assert seen == [0.0]


def test_an_error_names_its_callback_and_event_and_all_components_are_closed():
    notes = []

    class Fail(Callback):
        def before_loss(self, state, logger):
            if state.timestamp.batch == "2ba":
                raise KeyboardInterrupt

    trainer = make(callbacks=[Fail(), NoteCallback("c", notes)], max_duration="4ba")
    with pytest.raises(KeyboardInterrupt) as raised:
        trainer.fit()
    (note,) = raised.value.__notes__
    assert "`Fail` at `Event.BEFORE_LOSS`" in note
    assert "batch 2" in note
    assert heard(notes, "close") == heard(notes, "post_close") == "c"


def test_an_error_of_the_model_names_the_time():
    class Broken(Recorder):
        def run_event(self, event, state, logger):
            if event is Event.BEFORE_FORWARD and state.timestamp.batch == "1ba":
                state.batch = None

    with pytest.raises(TypeError) as raised:
        make(callbacks=Broken(), max_duration="2ba").fit()
    assert any("raised while training, at epoch 0, batch 1" in note for note in raised.value.__notes__)


def test_a_callback_that_fails_to_close_does_not_stop_others_from_closing():
    notes = []

    class Stuck(NoteCallback):
        def close(self, state, logger):
            raise OSError("disk full")

    trainer = make(callbacks=[Stuck("s", notes), NoteCallback("c", notes)], max_duration="1ba")
    with pytest.raises(OSError, match="disk full") as raised:
        trainer.close()
    assert "`Stuck.close`" in raised.value.__notes__[0]
    assert heard(notes, "close") == "c"
    assert heard(notes, "post_close") == "c"
    trainer.close()


def test_a_callback_of_an_open_trainer_raises_in_another_trainer():
    callback = Recorder()
    with make(callbacks=callback), pytest.raises(CallbackReuseError, match=r"`Recorder`.*`close\(\)`"):
        make(callbacks=callback)
    make(callbacks=callback).close()


def test_stop_training_ends_with_the_current_batch():
    def stop(state):
        if state.timestamp.batch == "3ba":
            state.stop_training()

    recorder = Recorder()
    with make(callbacks=[Watch(stop), recorder], max_duration="2ep") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == "3ba"
        assert recorder.events[-2:] == [Event.BATCH_CHECKPOINT, Event.FIT_END]
        trainer.fit("1ba")
        assert trainer.state.timestamp.batch == "4ba"


def test_state_keeps_the_whole_batch_and_the_mean_loss_after_a_step():
    seen = []
    with make(
        callbacks=Watch(lambda state: seen.append((state.batch[0].shape[0], state.loss, state.outputs))),
        device_train_microbatch_size=3,
        max_duration="1ba",
    ) as trainer:
        with torch.no_grad():
            before = trainer.state.model.loss(trainer.state.model(next(iter(loader()))), next(iter(loader())))
        trainer.fit()
    ((samples, loss, outputs),) = seen
    assert samples == 4
    assert outputs.shape == (1, 3)  # the outputs of the last microbatch
    torch.testing.assert_close(loss, before)


def test_events_before_and_after_an_action_come_in_pairs_of_one_name():
    before = [event for event in Event if event.is_before_event]
    after = [event for event in Event if event.is_after_event]
    assert not set(before) & set(after)
    assert sorted(event.canonical_name for event in before) == sorted(event.canonical_name for event in after)
    assert (Event.EPOCH_START.canonical_name, Event.EPOCH_END.canonical_name) == ("epoch", "epoch")
    assert Event.EVAL_BEFORE_FORWARD.canonical_name == "eval_forward"
    assert not Event.BATCH_CHECKPOINT.is_after_event


def test_a_periodic_callback_acts_at_its_interval_and_at_the_end():
    class Acts(PeriodicCallback):
        def __init__(self, interval, **arguments):
            super().__init__(interval, **arguments)
            self.batches = []

        def act(self, state, logger):
            self.batches.append(state.timestamp.counts.batch)

    by_batch, by_epoch, with_end = Acts("2ba"), Acts("1ep"), Acts("4ba", at_end=True)
    with make(
        train_dataloader=loader(12, 4), callbacks=[by_batch, by_epoch, with_end], max_duration="7ba"
    ) as trainer:
        trainer.fit()
    assert (by_batch.batches, by_epoch.batches, with_end.batches) == ([2, 4, 6], [3, 6], [4, 7])
