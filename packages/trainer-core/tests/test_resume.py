"""A run resumed from a checkpoint has the same bits as an uninterrupted run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hocket.trainer import Callback, Event
from hocket.trainer.data.global_batches import GlobalBatchLoader
from hocket.trainer.errors import DurationReachedError, ResumeError, TrainerConfigError
from hocket.trainer.loggers import FileLogger
from hocket.trainer.optim import CosineAnnealingScheduler, CosineAnnealingWithWarmupScheduler
from support.training import FileStore, Net, Watch, data, loader, make, parameters


class Augmented(Dataset):
    """A data set that draws from the process's random generators for each sample."""

    def __init__(self):
        self.samples = data()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        x, y = self.samples[index]
        return x + torch.randn(5) + random.random() + np.random.random(), y


class StatefulLoader:
    """A loader that counts as a streaming loader does, with a position at the end of an epoch."""

    def __init__(self):
        self.epoch = self.batch = 0

    def __len__(self):
        return 5

    def __iter__(self):
        if self.batch == 5:
            self.epoch, self.batch = self.epoch + 1, 0
            return
        while self.batch < 5:
            order = torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch))
            rows = order[self.batch * 4 : self.batch * 4 + 4]
            self.batch += 1
            x, y = data()[rows]
            yield [x + torch.randn(4, 5), y]
        self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state):
        self.epoch, self.batch = state["epoch"], state["batch"]


class SeedingLoader(StatefulLoader):
    """A loader that draws from torch's generator when an iterator is made, as torch's own loaders do."""

    def __iter__(self):
        torch.rand(())
        return super().__iter__()


LOADERS = {
    "shuffled": lambda: loader(shuffle=True),
    "own generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "drawing": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True),
    "stateful": StatefulLoader,
    "seeding": SeedingLoader,
    "global batches": lambda: GlobalBatchLoader(loader(shuffle=True), 4, (0, 1), seed=3),
}
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(
        [
            {"params": [parameter], "weight_decay": 0.1 * index}
            for index, parameter in enumerate(model.parameters())
        ],
        lr=0.01,
    ),
}


def start(folder=None, *, kind="shuffled", optimizer="adamw", losses, **arguments):
    model = Net(dropout=0.3)

    def note(state):
        losses[state.timestamp.counts.batch] = (float(state.loss), state.optimizers[0].param_groups[0]["lr"])

    callbacks = [Watch(note), *arguments.pop("callbacks", [])]
    return make(
        model=model,
        optimizers=OPTIMIZERS[optimizer](model),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="3ba"),
        train_dataloader=LOADERS[kind](),
        callbacks=callbacks,
        save_folder=folder,
        **arguments,
    )


def ends(trainer):
    slots = {
        f"{index}.{name}": torch.as_tensor(value).clone()
        for index, own in trainer.state.optimizers[0].state_dict()["state"].items()
        for name, value in own.items()
        if value is not None
    }
    _, words, position, *_ = np.random.get_state()
    generators = torch.get_rng_state(), random.getstate(), words.tolist(), position
    return parameters(trainer) | slots, *generators, trainer.state.timestamp.counts[:10]


def assert_same(one, other):
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
    assert torch.equal(one[1], other[1])
    assert one[2:] == other[2:]


# 5 batches an epoch: within an epoch, at its last batch, after it, and within the second one.
@pytest.mark.parametrize("at", ["3ba", "5ba", "1ep", "8ba"])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_resumed_run_has_the_same_bits(tmp_path, kind, at):
    whole, losses, resumed = {}, {}, {}
    with start(kind=kind, losses=whole, max_duration="3ep") as trainer:
        trainer.fit()
        end = ends(trainer)

    def die(state):
        if state.timestamp.batch == "9ba":
            raise RuntimeError("killed")

    with (
        pytest.raises(RuntimeError, match="killed"),
        start(
            str(tmp_path / "a"),
            kind=kind,
            losses=losses,
            max_duration="3ep",
            save_interval=at,
            callbacks=[Watch(die)],
        ) as trainer,
    ):
        trainer.fit()
    first = {"3ba": 3, "5ba": 5, "1ep": 5, "8ba": 8}[at]
    name = "ep1-ba5" if at == "1ep" else f"ep{0 if first <= 5 else 1}-ba{first}"
    random.seed(99)
    np.random.seed(99)
    with start(
        str(tmp_path / "b"),
        kind=kind,
        losses=resumed,
        max_duration="3ep",
        save_interval="2ba",
        seed=1,
        load_path=str(tmp_path / "a" / name),
    ) as trainer:
        assert trainer.state.timestamp.batch.value == first
        assert trainer.state.seed == 3
        trainer.fit()
        assert_same(ends(trainer), end)
    assert {**losses, **resumed} == whole
    assert min(resumed) == first + 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resuming_repeatedly_has_the_same_bits(tmp_path, optimizer):
    whole, losses = {}, {}
    with start(losses=whole, optimizer=optimizer, max_duration="12ba") as trainer:
        trainer.fit()
        end = ends(trainer)
    for _ in range(6):
        with start(
            str(tmp_path),
            losses=losses,
            optimizer=optimizer,
            save_interval="1ba",
            max_duration="12ba",
            autoresume=True,
        ) as trainer:
            # Each run trains two batches; the schedule uses the whole duration.
            stop_at = trainer.state.timestamp.counts.batch + 2
            if stop_at < 12:
                trainer.state.callbacks.append(
                    Watch(
                        lambda state, stop_at=stop_at: (
                            state.timestamp.batch >= f"{stop_at}ba" and state.stop_training()
                        )
                    )
                )
            trainer.fit()
            last = ends(trainer)
    assert_same(last, end)
    assert losses == whole


def test_an_asynchronous_save_is_committed_when_fit_returns(tmp_path):
    with start(
        str(tmp_path),
        losses={},
        save_interval="2ba",
        checkpointing={"asynchronous": True},
        max_duration="5ba",
    ) as trainer:
        trainer.fit()
        names = trainer.saved_checkpoints
    assert names == ["ep0-ba2", "ep0-ba4", "ep0-ba5"]


def test_resuming_a_finished_run_logs_that_it_has_finished(tmp_path, capfd):
    with start(str(tmp_path), losses={}, max_duration="5ba") as trainer:
        trainer.fit()
        with pytest.raises(DurationReachedError, match="`5ba`, and `max_duration` is `5ba`"):
            trainer.fit()
    with start(str(tmp_path), losses={}, max_duration="5ba", autoresume=True) as trainer:
        trainer.fit()
        assert "has trained for 5 batches of 5 batches: it is finished" in capfd.readouterr().err
        trainer.fit("2ba")
        assert trainer.state.timestamp.batch == "7ba"
    with start(str(tmp_path), losses={}, max_duration="9ba", autoresume=True) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == "9ba"


def test_a_duration_is_not_added_again_when_a_fit_is_resumed(tmp_path):
    def script(stop_at=None):
        """Train 4 batches, then 3 more, as a restarted script does."""

        def stop(state):
            if state.timestamp.counts.batch == stop_at:
                raise RuntimeError("killed")

        with start(
            str(tmp_path), losses={}, save_interval="1ba", autoresume=True, callbacks=[Watch(stop)]
        ) as trainer:
            trainer.fit("4ba")
            first = trainer.state.timestamp.counts.batch
            trainer.fit("3ba")
            return first, trainer.state.timestamp.counts.batch

    for at in (2, 6):
        with pytest.raises(RuntimeError, match="killed"):
            script(at)
    assert script() == (6 - 1, 7)
    assert script() == (7, 7)


def test_autoresume_without_checkpoints_starts_new_or_from_load_path(tmp_path):
    with start(str(tmp_path / "first"), losses={}, max_duration="2ba", autoresume=True) as trainer:
        assert trainer.state.timestamp.batch == "0ba"
        trainer.fit()
    path = str(tmp_path / "first" / "ep0-ba2")
    with start(
        str(tmp_path / "second"), losses={}, max_duration="4ba", autoresume=True, load_path=path
    ) as trainer:
        assert trainer.state.timestamp.batch == "2ba"
        trainer.fit()
    with start(
        str(tmp_path / "second"), losses={}, max_duration="6ba", autoresume=True, load_path=path
    ) as trainer:
        assert trainer.state.timestamp.batch == "4ba"


def test_a_given_checkpoint_store_is_used_and_hocket_ckpt_not_imported(tmp_path, monkeypatch):
    import hocket.trainer.process.providers as providers

    monkeypatch.setattr(providers, "entry_points", lambda **selection: ())
    whole, losses = {}, {}
    with start(losses=whole, max_duration="8ba") as trainer:
        trainer.fit()
        end = ends(trainer)
    store = FileStore(tmp_path)
    with start(
        losses=losses, max_duration="8ba", checkpointing={"store": store}, save_interval="3ba"
    ) as trainer:
        trainer.fit()
        assert_same(ends(trainer), end)
    assert [entry.name for entry in store.list()] == ["ep0-ba3", "ep1-ba6", "ep1-ba8"]
    store.delete(8)
    with start(
        losses=losses,
        max_duration="8ba",
        checkpointing={"store": store},
        autoresume=True,
        save_filename="again-{batch}",
    ) as trainer:
        assert trainer.state.timestamp.batch == "6ba"
        trainer.fit()
        assert_same(ends(trainer), end)
    assert [entry.name for entry in store.list()][-1] == "again-8"


class Counter(Callback):
    def __init__(self):
        self.count = 0
        self.weights = torch.zeros(2)

    def batch_end(self, state, logger):
        self.count += 1
        self.weights += 1

    def state_dict(self):
        return {"count": self.count, "weights": self.weights}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.weights = state["weights"]


def test_callbacks_states_are_resumed(tmp_path):
    with start(str(tmp_path), losses={}, max_duration="3ba", callbacks=[Counter(), Counter()]) as trainer:
        trainer.fit()
    counters = [Counter(), Counter()]
    with start(str(tmp_path), losses={}, max_duration="4ba", callbacks=counters, autoresume=True) as trainer:
        assert [counter.count for counter in counters] == [3, 3]
        trainer.fit()
    assert [counter.weights.tolist() for counter in counters] == [[4.0, 4.0]] * 2


class Told(Callback):
    def __init__(self, **told):
        self.told = told

    def state_dict(self):
        return self.told

    def load_state_dict(self, state):
        self.told = dict(state)


class Later(Told):
    pass


def test_a_resume_accepts_new_callbacks_and_new_entries_in_their_states(tmp_path):
    with start(str(tmp_path), losses={}, max_duration="1ba", callbacks=[Told(a=1)]) as trainer:
        trainer.fit()
    told, later = Told(a=0, b=2), Later(c=3)
    arguments = {"max_duration": "2ba", "callbacks": [told, later], "autoresume": True}
    start(str(tmp_path), losses={}, **arguments).close()
    assert (told.told, later.told) == ({"a": 1}, {"c": 3})


class Counting(StatefulLoader):
    """A callback of the same name with more state, as in a later release."""

    def state_dict(self):
        return {**super().state_dict(), "drawn": self.epoch * 5 + self.batch}


@pytest.mark.parametrize("before", LOADERS)
def test_a_resume_accepts_new_entries_in_a_loaders_state(tmp_path, before, monkeypatch):
    with start(str(tmp_path), kind=before, losses={}, max_duration="2ba") as trainer:
        trainer.fit()
    loader, losses = Counting(), {}
    monkeypatch.setitem(LOADERS, "counting", lambda: loader)
    arguments = {"max_duration": "3ba", "autoresume": True}
    with start(str(tmp_path), kind="counting", losses=losses, **arguments) as trainer:
        trainer.fit()
    assert list(losses) == [3]
    assert (loader.epoch, loader.batch) == (0, 3)


def test_the_checkpoint_of_another_optimizer_raises(tmp_path):
    with start(str(tmp_path), losses={}, max_duration="1ba") as trainer:
        trainer.fit()
    model = Net()
    two = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises((ResumeError, Exception), match="optimizers"):
        make(model=model, optimizers=two, load_path=str(tmp_path / "ep0-ba1"))


@pytest.mark.parametrize("schedulers", [None, CosineAnnealingScheduler()])
def test_settings_of_an_optimizer_that_the_checkpoint_replaces_are_named(tmp_path, capfd, schedulers):
    def start(folder, duration, **settings):
        model = Net()
        with make(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), **settings),
            schedulers=schedulers,
            save_folder=str(folder),
            autoresume=True,
            max_duration=duration,
        ) as trainer:
            trainer.fit()
        return capfd.readouterr().err

    start(tmp_path, "2ba", lr=0.1, momentum=0.9)
    assert "in place of" not in start(tmp_path, "3ba", lr=0.1, momentum=0.9)
    shown = " ".join(start(tmp_path, "4ba", lr=0.5, momentum=0.0).split())
    assert "`lr` 0.1 in place of 0.5, `momentum` 0.9 in place of 0.0" in shown


def test_checkpoint_names_are_formatted_from_the_time_and_composers_are_accepted(tmp_path, capfd):
    folder = tmp_path / "{run_name}"
    with start(
        str(folder),
        losses={},
        run_name="blue",
        save_filename="{run_name}/at-{epoch}-{batch_in_epoch}-{sample}-rank{rank}.pt".replace("/", "_"),
        max_duration="6ba",
    ) as trainer:
        trainer.fit()
    assert sorted(path.name for path in (tmp_path / "blue").iterdir()) == ["blue_at-1-0-20", "blue_at-1-1-24"]
    assert capfd.readouterr().err.count("one folder for all ranks") == 1
    with pytest.raises(TrainerConfigError, match=r"`save_filename` `a/\{epoch\}` has a `/`.*`save_folder`"):
        start(str(folder), losses={}, save_filename="a/{epoch}")
    with pytest.raises(TrainerConfigError, match=r"unknown fields \['step'\].*`\{epoch\}`"):
        start(str(folder), losses={}, save_filename="s{step}")
    with pytest.raises(TrainerConfigError, match=r"`autoresume`.*`save_folder`"):
        start(losses={}, autoresume=True)


def test_loading_fires_its_events(tmp_path):
    heard = []

    class Hear(Callback):
        def run_event(self, event, state, logger):
            if event in (Event.BEFORE_LOAD, Event.AFTER_LOAD):
                heard.append((event, state.timestamp.counts.batch))

    with start(str(tmp_path), losses={}, max_duration="2ba") as trainer:
        trainer.fit()
    start(str(tmp_path), losses={}, callbacks=[Hear()], autoresume=True).close()
    assert heard == [(Event.BEFORE_LOAD, 0), (Event.AFTER_LOAD, 2)]


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_a_resumed_run_has_its_name_from_the_start(tmp_path, kind):
    names = []
    for duration in ("1ba", "2ba"):
        logger = FileLogger(str(tmp_path / "logs" / "{run_name}"))
        store = {"checkpointing": {"store": FileStore(tmp_path / "saved")}} if kind == "store" else {}
        folder = None if store else str(tmp_path / "saved")
        arguments = {"max_duration": duration, "autoresume": True, "loggers": logger}
        with start(folder, losses={}, **store, **arguments) as trainer:
            names += [logger.path.name, trainer.state.run_name]
            trainer.fit()
    assert len(set(names)) == 1
