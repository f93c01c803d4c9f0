"""The conformance suites of `hocket.trainer.testing`: correct classes pass, each kind of error is named."""

from __future__ import annotations

import copy
import json
import random
from fnmatch import fnmatch

import pytest
import torch

from hocket.trainer.algorithm import Algorithm
from hocket.trainer.callback import Callback
from hocket.trainer.callbacks import LRMonitor, SpeedMonitor
from hocket.trainer.event import Event
from hocket.trainer.loggers import ConsoleLogger, FileLogger, InMemoryLogger, ProgressBarLogger
from hocket.trainer.loggers.logger_destination import LoggerDestination
from hocket.trainer.ranks.single_process import SingleProcess
from hocket.trainer.testing import (
    check_algorithm,
    check_callback,
    check_checkpoint_store,
    check_data_plan,
    check_logger,
    check_parallelism,
    check_stateful,
    check_train_step,
)


class Deck:
    """An endless card dealer with a correct state."""

    def __init__(self):
        self.dealt = []
        self.random = random.Random(3)

    def deal(self):
        self.dealt.append(self.random.randrange(52))
        return self.dealt[-1]

    def state_dict(self):
        return {"dealt": list(self.dealt), "random": self.random.getstate()}

    def load_state_dict(self, state):
        self.dealt = list(state["dealt"])
        self.random.setstate(state["random"])


class LiveDeck(Deck):
    def state_dict(self):
        return {**super().state_dict(), "dealt": self.dealt}


class KeepingDeck(Deck):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.dealt = state["dealt"]


class ForgetfulDeck(Deck):
    def state_dict(self):
        return {"dealt": list(self.dealt)}

    def load_state_dict(self, state):
        self.dealt = list(state["dealt"])


class AddingDeck(Deck):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "dealt": self.dealt + state["dealt"]})


def test_check_stateful_names_each_error():
    check_stateful(Deck, Deck.deal, observe=lambda deck: [deck.deal() for _ in range(5)])
    for wrong, message in [
        (LiveDeck, "returned live parts"),
        (KeepingDeck, "keeps and changes the dict"),
        (ForgetfulDeck, "goes on differently"),
        (AddingDeck, "leaves a trace"),
        (object, "no method `state_dict`"),
    ]:
        with pytest.raises(AssertionError, match=message):
            check_stateful(
                wrong, lambda deck: deck.deal(), observe=lambda deck: [deck.deal() for _ in range(5)]
            )


class Misspelt(Callback):
    def batch_end(self, state, logger): ...

    def on_epoch_end(self, state, logger): ...


class Deaf(Callback):
    pass


class Narrow(Callback):
    def batch_end(self, state): ...


def test_check_callback_names_each_error():
    for make in (LRMonitor, SpeedMonitor, ConsoleLogger):
        check_callback(make)
    for wrong, message in [
        (Misspelt, "did you mean `epoch_end`"),
        (Deaf, "listens to nothing"),
        (Narrow, r"`Narrow.batch_end` cannot be called with \(state, logger\)"),
    ]:
        with pytest.raises(AssertionError, match=message):
            check_callback(wrong)


def test_check_logger_names_each_error(tmp_path, capsys):
    path = tmp_path / "log.txt"

    def lines():
        records = [json.loads(line) for line in path.read_text().splitlines()]
        return [
            (record["step"], name, number)
            for record in records
            for name, number in record.items()
            if name not in ("step", "hyperparameters")
        ]

    check_logger(lambda: FileLogger(str(path)), lines)
    check_logger(ConsoleLogger)
    check_logger(ProgressBarLogger)
    memory = InMemoryLogger()
    check_logger(
        lambda: memory,
        lambda: sorted(
            ((step, name, number) for name, points in memory.data.items() for step, number in points),
            key=lambda point: (point[0], "loss count odd".index(point[1])),
        ),
    )
    assert "loss" in capsys.readouterr().err

    class Picky(InMemoryLogger):
        def log_metrics(self, metrics, step):
            raise ValueError("no room")

        def fit_start(self, state, logger): ...

    with pytest.raises(AssertionError, match=r"`Picky` failed: .*no room"):
        check_logger(Picky)
    path.unlink()
    with pytest.raises(AssertionError, match="logged was"):
        check_logger(lambda: FileLogger(str(path), overwrite=True), lines)


class Doubling(SingleProcess):
    def reduce_async(self, values):
        return super().reduce_async(values * 2)


class Single(SingleProcess):
    def reduce_async(self, values):
        return super().reduce_async(values.float())


class Norms(SingleProcess):
    def clip_grad_norm_(self, parameters, max_norm):
        return torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])


class Copies(SingleProcess):
    def lay_out(self, model, optimizers):
        return copy.deepcopy(model)


def test_check_parallelism_names_each_error():
    def make(cls):
        return lambda: cls(torch.device("cpu"))

    check_parallelism(make(SingleProcess))
    for wrong, message in [
        (Doubling, "does not sum"),
        (Single, "made torch.float32 of float64"),
        (Norms, "after a clipped step over 1 microbatches"),
        (Copies, "expected the laid out parameters"),
    ]:
        with pytest.raises(AssertionError, match=message):
            check_parallelism(make(wrong))


class FolderStore:
    """A correct store of pickles in a folder, which saves synchronously in every mode."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, state, *, step, name=None, per_rank=None, user=None, mode="sync"):
        name = name or f"step-{step}"
        facts = {"state": state, "step": step, "name": name, "per_rank": per_rank, "user": user}
        torch.save(facts, self.folder / f"{name}.pt")
        return Handle(name)

    def load(self, source, into, *, strict=True, include=None, ignore=None):
        self.ignore = ignore or ()
        path = self.folder / f"{source.rsplit('/', 1)[-1]}.pt"
        if not path.exists():
            raise FileNotFoundError(f"no checkpoint `{source}`")
        facts = torch.load(path, weights_only=False)
        facts["state"] = self.fill(into, facts["state"], strict, "")
        return Loaded(facts)

    def fill(self, into, saved, strict, path):
        if isinstance(into, torch.Tensor):
            if into.shape != saved.shape:
                raise ValueError(f"`{path}` has another shape")
            return into.copy_(saved)
        if isinstance(into, dict):
            ignored = {key for key in saved if any(fnmatch(f"{path}.{key}", one) for one in self.ignore)}
            if strict and into.keys() != saved.keys() - (ignored - into.keys()):
                raise ValueError(f"`{path}` differs in {into.keys() ^ saved.keys()}")
            return {
                key: self.fill(value, saved[key], strict, key) if key in saved else value
                for key, value in into.items()
            }
        if isinstance(into, list):
            return [self.fill(one, other, strict, path) for one, other in zip(into, saved, strict=True)]
        return saved

    def list(self):
        entries = [torch.load(path, weights_only=False) for path in self.folder.iterdir()]
        return [Entry(self.folder, facts) for facts in sorted(entries, key=lambda facts: facts["step"])]

    def delete(self, step):
        for entry in self.list():
            if entry.step == step:
                (self.folder / f"{entry.name}.pt").unlink()


class Handle:
    def __init__(self, name):
        self.name = name

    def wait(self, timeout_s=None): ...

    def done(self):
        return True


class Loaded:
    def __init__(self, facts):
        self.__dict__.update(facts)


class Entry:
    def __init__(self, folder, facts):
        self.name, self.step, self.status = facts["name"], facts["step"], "committed"
        self.uri = str(folder / facts["name"])


class NewTensors(FolderStore):
    def fill(self, into, saved, strict, path):
        return super().fill(into, saved, strict, path) if not isinstance(into, torch.Tensor) else saved


class Lenient(FolderStore):
    def load(self, source, into, *, strict=True, include=None, ignore=None):
        return super().load(source, into, strict=False, include=include)


class Backwards(FolderStore):
    def list(self):
        return super().list()[::-1]


class Late(FolderStore):
    """Reads the tensors of an asynchronous save only when the caller waits for it."""

    def save(self, state, *, mode="sync", **options):
        if mode == "sync":
            return super().save(state, **options)
        handle = super().save({}, **options)
        handle.wait = lambda timeout_s=None: FolderStore.save(self, state, **options) and None
        return handle


def test_check_checkpoint_store_names_each_error(tmp_path_factory):
    def make(cls):
        folder = tmp_path_factory.mktemp("store")
        return lambda: cls(folder)

    check_checkpoint_store(make(FolderStore))
    for wrong, message in [
        (NewTensors, "it is to fill those of `into`|a tensor of another shape"),
        (Lenient, "not saved without an error"),
        (Backwards, "expected the newest last"),
        (Late, "took in later changes"),
    ]:
        with pytest.raises(AssertionError, match=message):
            check_checkpoint_store(make(wrong))


def test_check_logger_rejects_misnamed_methods():
    class Misnamed(LoggerDestination):
        def batch_ends(self, state, logger): ...

        def batch_start(self, state, logger): ...

    with pytest.raises(AssertionError, match="did you mean `batch_end`"):
        check_logger(Misnamed)


class Adds:
    """A step whose second computation of the gradients adds to the first one."""

    def __init__(self, standard):
        self.standard = standard

    def compute_gradients(self, batch):
        model = self.standard.context.state.model
        loss = model.loss(model(batch), batch)
        loss.backward()
        return loss.detach()

    def update(self):
        self.standard.update()


class Leaves:
    """A step that does not clear the gradients."""

    def __init__(self, standard):
        self.standard = standard

    def compute_gradients(self, batch):
        return self.standard.compute_gradients(batch)

    def update(self):
        for optimizer in self.standard.context.state.optimizers:
            optimizer.step()


def test_check_train_step_names_each_error():
    check_train_step(lambda standard: standard)
    with pytest.raises(AssertionError, match="it must replace the first"):
        check_train_step(Adds)
    with pytest.raises(AssertionError, match="left gradients of"):
        check_train_step(Leaves)


class Planned:
    """A loader that divides batches of 4 of 10 rows over its ranks; the last batch has 2 rows."""

    def __init__(self, rank, size, *, forgets=False):
        self.data_parallel, self.forgets, self.share = (rank, size), forgets, (0, 0)

    def __iter__(self):
        rank, size = self.data_parallel
        for num in (4, 4, 2):
            mine = (rank + 1) * num // size - rank * num // size
            self.share = (mine + (1 if self.forgets else 0), num)
            yield torch.zeros(max(mine, 1) + self.forgets, 3)

    def batch_share(self):
        return self.share


def test_plans_whose_shares_do_not_add_up_raise():
    check_data_plan(Planned)
    check_data_plan(Planned, num_ranks=3)
    with pytest.raises(AssertionError, match="add up to 6, which is not the global batch"):
        check_data_plan(lambda rank, size: Planned(rank, size, forgets=True))
    with pytest.raises(AssertionError, match="no `data_parallel` and `batch_share"):
        check_data_plan(lambda rank, size: [torch.zeros(2)])


class FadingNoise(Algorithm):
    """Adds noise to the inputs that shrinks with every batch."""

    events = frozenset({Event.AFTER_DATALOADER})

    def __init__(self):
        self.size = 0.5

    def match(self, event, state):
        return True

    def apply(self, event, state, logger):
        x, y = state.batch
        state.batch = (x + self.size * torch.randn_like(x), y)
        self.size *= 0.5

    def state_dict(self):
        return {"size": self.size}

    def load_state_dict(self, state):
        self.size = state["size"]


class Forgets(FadingNoise):
    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


class DrawsItsOwn(FadingNoise):
    def apply(self, event, state, logger):
        self.size = random.SystemRandom().random()
        super().apply(event, state, logger)


class NeverMatches(FadingNoise):
    def match(self, event, state):
        return False


class AnswersNone(FadingNoise):
    def match(self, event, state): ...


class LacksTheLogger(FadingNoise):
    def apply(self, event, state): ...


class NamesEvents(FadingNoise):
    events = frozenset({"after_dataloader"})


def test_check_algorithm_names_each_error():
    check_algorithm(FadingNoise())
    for wrong, message in [
        (Forgets, "continues after batch 2 differs"),
        (DrawsItsOwn, "a second run with a copy of `DrawsItsOwn`"),
        (NeverMatches, "never ran in 4 batches: `match` was asked at"),
        (AnswersNone, "`AnswersNone.match` returned None"),
        (LacksTheLogger, r"`LacksTheLogger.apply` cannot be called with \(event, state, logger\)"),
        (NamesEvents, "expected a frozenset of `Event`"),
    ]:
        with pytest.raises(AssertionError, match=message):
            check_algorithm(wrong())
