"""The first checkpoint of a run is refused if it lacks what training changes; the message names the parts."""

from __future__ import annotations

import pytest
import torch

from hocket.trainer import Algorithm, Callback
from hocket.trainer.errors import IncompleteCheckpointError
from support.training import Net, make


class Headless(Net):
    """Leaves a trained layer out of its state."""

    def state_dict(self, *args, **options):
        state = super().state_dict(*args, **options)
        return {name: value for name, value in state.items() if ".3." not in name}


class Statistics(Net):
    """Has a buffer that training changes and one that it does not, both of which a hook leaves out."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.arange(3.0))
        self.register_state_dict_post_hook(self.leave_out)

    @staticmethod
    def leave_out(module, state, prefix, local_metadata):
        del state["seen"], state["table"]

    def forward(self, batch):
        self.seen += 1
        return super().forward(batch) + self.table


class Renaming(Net):
    """Saves converted copies of all but one tensor in a form of its own."""

    def state_dict(self, *args, **options):
        values = list(super().state_dict(*args, **options).values())
        return {"flat": torch.cat([value.flatten().double() for value in values[:-1]])}

    def load_state_dict(self, state_dict):
        pass


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer whose state it does not save, as implementations of SAM do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        self.base.step()


class Attributes(torch.optim.SGD):
    """Keeps a count, tensors and a deque as attributes; other attributes stay as they are, or are flags."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.count, self.past, self.scale, self.is_ready, self.note = 0, [], 2.0, False, ""
        self.constant = torch.ones(3)

    def step(self, closure=None):
        self.count += 1
        self.is_ready, self.note = True, "stepped"
        self.past = [parameter.grad.clone() for parameter in self.param_groups[0]["params"]]
        super().step(closure)


class Partial(Attributes):
    """Saves one of two attributes."""

    def state_dict(self):
        return {**super().state_dict(), "number": self.count}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.count = state_dict["number"]


class Complete(Attributes):
    """Saves all attributes that change, converted and under other names."""

    def state_dict(self):
        return {**super().state_dict(), "own": {"n": self.count, "p": [one.double() for one in self.past]}}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.count, self.past = state_dict["own"]["n"], state_dict["own"]["p"]


class Forgetful(torch.optim.SGD):
    """Leaves the slots out of its state."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)

    def state_dict(self):
        return {**super().state_dict(), "state": {}}


class Recorder(Callback):
    """Returns a state that it cannot take back."""

    def state_dict(self):
        return {"best": 1.0}


class Method(Algorithm):
    """Returns a state that it cannot take back."""

    def match(self, event, state):
        return False

    def apply(self, event, state, logger):
        pass

    def state_dict(self):
        return {"best": 1.0}


class Ramp(torch.optim.lr_scheduler.LRScheduler):
    """Keeps a value that a checkpoint cannot store."""

    def __init__(self, optimizer):
        self.past = {1}
        super().__init__(optimizer)

    def get_lr(self):
        return self.base_lrs


def run(model=Net, optimizer=None, *, schedulers=None, **arguments):
    made = model()
    optimizer = optimizer(made.parameters()) if optimizer else torch.optim.SGD(made.parameters(), lr=0.1)
    schedulers = None if schedulers is None else schedulers(optimizer)
    with make(
        model=made, optimizers=optimizer, schedulers=schedulers, max_duration="3ba", **arguments
    ) as trainer:
        trainer.fit()
        return trainer.saved_checkpoints


LACKS = {
    "parameters": ({"model": Headless}, ["model/layers.3.weight", "model/layers.3.bias"]),
    "a changed buffer": ({"model": Statistics}, ["model/seen"]),
    "one of converted tensors": ({"model": Renaming}, ["model/layers.3.bias"]),
    "the state of an inner optimizer": ({"optimizer": Wrapper}, ["optimizers/0/base"]),
    "attributes": ({"optimizer": Attributes}, ["optimizers/0/count", "optimizers/0/past"]),
    "one attribute": ({"optimizer": Partial}, ["optimizers/0/past"]),
    "slots": ({"optimizer": Forgetful}, ["optimizers/0/state"]),
    "a callback's state": ({"callbacks": [Recorder()]}, ["callbacks/Recorder"]),
    "an algorithm's state": ({"algorithms": [Method()]}, ["algorithms/Method"]),
    "a scheduler's value": ({"schedulers": Ramp}, ["schedulers/Ramp/past"]),
}


@pytest.mark.parametrize("kind", LACKS)
def test_a_checkpoint_that_lacks_what_training_changes_is_refused(tmp_path, kind):
    arguments, names = LACKS[kind]
    with pytest.raises(IncompleteCheckpointError) as caught:
        run(save_folder=str(tmp_path / "a"), **arguments)
    assert f"`save_ignore_keys={names}`" in str(caught.value)
    assert [path for path in (tmp_path / "a").rglob("*") if path.is_file()] == []
    saved = run(save_folder=str(tmp_path / "a"), save_interval="1ba", save_ignore_keys=names, **arguments)
    assert len(saved) == 3


def test_a_function_lists_what_is_missing_too(tmp_path):
    def leave_out(tree):
        del tree["optimizers"][0]["count"], tree["optimizers"][0]["past"]
        tree.pop("seed", None)

    def keep(tree):
        del tree["optimizers"][0]["count"]

    saved = run(optimizer=Attributes, save_folder=str(tmp_path / "a"), save_ignore_keys=leave_out)
    assert len(saved) == 1
    with pytest.raises(IncompleteCheckpointError, match="`optimizers/0/past`"):
        run(optimizer=Attributes, save_folder=str(tmp_path / "b"), save_ignore_keys=keep)
