"""A model with a way of its own to save and load its state resumes as it does with torch alone."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.ao import quantization as ao
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import DataLoader

from hocket.trainer.callbacks import LoadCheckpoint
from hocket.trainer.checkpoint.model_state import loads_itself, model_state, model_state_to_fill
from hocket.trainer.errors import ResumeError
from hocket.trainer.optim.parameter_names import plain_name
from support.training import Net, Watch, data, make


class Halved(Net):
    """Returns converted copies of its tensors, and takes them back."""

    def state_dict(self, *args, **options):
        return {name: value.double() / 2 for name, value in super().state_dict(*args, **options).items()}

    def load_state_dict(self, state_dict):
        return super().load_state_dict({name: (value * 2).float() for name, value in state_dict.items()})


class Nested(Net):
    """Has a state of its own form: a dict in a dict, a list of tensors and a count."""

    def state_dict(self, *args, **options):
        state = {name: value.clone() for name, value in super().state_dict(*args, **options).items()}
        return {"net": state, "list": [value * 2 for value in state.values()], "version": 3}

    def load_state_dict(self, state_dict, strict=True):
        assert state_dict["version"] == 3
        net = {name: value / 2 for name, value in zip(state_dict["net"], state_dict["list"], strict=True)}
        return super().load_state_dict(net, strict=strict)


class Hooked(Net):
    """Saves one weight transposed under another name by a hook, and takes it back by a hook."""

    def __init__(self):
        super().__init__()
        self.layers[0].register_state_dict_post_hook(self.rename)
        self.layers[0].register_load_state_dict_pre_hook(self.name_back)

    @staticmethod
    def rename(module, state, prefix, local_metadata):
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight").t().contiguous()

    @staticmethod
    def name_back(module, state, prefix, *rest):
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel").t()


class Exchanged(Net):
    """Saves each of two buffers under the name of the other one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.zeros(3))
        self.register_buffer("second", torch.zeros(3))
        self.register_state_dict_post_hook(self.exchange)
        self.register_load_state_dict_pre_hook(self.exchange)

    def forward(self, batch):
        self.first += 1
        self.second -= 1
        return super().forward(batch) + self.first - self.second

    @staticmethod
    def exchange(module, state, prefix, *rest):
        state["first"], state["second"] = state["second"], state["first"]


class Extra(Net):
    """Has an extra state that is a tensor, as Transformer Engine has, in a module inside."""

    class Counter(nn.Module):
        count = 0

        def get_extra_state(self):
            return torch.tensor(self.count)

        def set_extra_state(self, state):
            self.count = int(state)

    def __init__(self):
        super().__init__()
        self.counter = self.Counter()

    def forward(self, batch):
        self.counter.count += self.training
        return super().forward(batch) * (1 + 0.1 * self.counter.count)


class Bank(Net):
    """Has a memory bank that grows, and that it takes in any shape."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 3))

    def forward(self, batch):
        out = super().forward(batch)
        if self.training:
            self.grow(out.detach())
        return out + self.bank.mean(0)

    def grow(self, rows):
        self.bank = torch.cat([self.bank, rows])

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.bank = state_dict[f"{prefix}bank"].clone()
        super()._load_from_state_dict(state_dict, prefix, *rest)


class PlainBank(Bank):
    """Has a memory bank that grows, which torch would not load."""

    _load_from_state_dict = nn.Module._load_from_state_dict


class LateBank(PlainBank):
    """Has a memory bank that is None at first, and a dtype of its own."""

    def __init__(self):
        super().__init__()
        self.bank = None

    def grow(self, rows):
        self.bank = rows.double() if self.bank is None else torch.cat([self.bank, rows.double()])

    def forward(self, batch):
        return super().forward(batch).float()


class Observed(Net):
    """Trains for quantisation: the observers' buffers get their shapes from the first batch."""

    def __init__(self):
        super().__init__()
        per_channel = {"observer": ao.MovingAveragePerChannelMinMaxObserver, "ch_axis": 0}
        self.layers.qconfig = ao.QConfig(
            activation=ao.FakeQuantize.with_args(quant_min=0, quant_max=255, observer=ao.HistogramObserver),
            weight=ao.FakeQuantize.with_args(
                **per_channel,
                quant_min=-128,
                quant_max=127,
                dtype=torch.qint8,
                qscheme=torch.per_channel_symmetric,
            ),
        )
        ao.prepare_qat(self.layers.train(), inplace=True)


class Fixed(Net):
    """Has a buffer of a given length."""

    def __init__(self, length):
        super().__init__()
        self.register_buffer("table", torch.zeros(length))


KINDS = [Halved, Nested, Hooked, Exchanged, Extra, Bank, PlainBank, LateBank, Observed]
# Kinds that torch's own `load_state_dict` refuses.
BEYOND_TORCH = [PlainBank, LateBank]


def start(kind, folder=None, **arguments):
    model = kind()
    return make(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        train_dataloader=DataLoader(data(), batch_size=4, shuffle=True),
        save_folder=folder,
        **arguments,
    )


def tensors(model):
    named = (*model.named_parameters(), *model.named_buffers())
    found = {name: value.detach().clone() for name, value in named}
    return found | ({"count": torch.tensor(model.counter.count)} if isinstance(model, Extra) else {})


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_a_state_of_its_own_resumes(tmp_path, kind):
    torchs = {}

    def load_with_torch(state):
        """Load the state at the save into a new model by torch alone."""
        if state.timestamp.counts.batch == 7 and kind not in BEYOND_TORCH:
            model = kind()
            model.load_state_dict(copy.deepcopy(state.model.state_dict()))
            torchs.update(tensors(model))

    arguments = {"max_duration": "10ba", "callbacks": Watch(load_with_torch)}
    with start(kind, str(tmp_path / "a"), save_interval="7ba", **arguments) as trainer:
        trainer.fit()
        whole = tensors(trainer.state.model)
    with start(kind, max_duration="10ba", load_path=str(tmp_path / "a" / "ep1-ba7")) as trainer:
        if kind not in BEYOND_TORCH:
            assert_same(tensors(trainer.state.model), torchs)
        trainer.fit()
        assert_same(tensors(trainer.state.model), whole)


def checkpointed():
    model = Net()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    return model


def compiled():
    model = Net()
    model.layers[3] = torch.compile(model.layers[3])
    return model


class Tied(Net):
    """Has tied weights, a batch norm, and a buffer that torch does not save."""

    def __init__(self):
        super().__init__()
        self.layers.append(nn.BatchNorm1d(3))
        self.head = nn.Linear(5, 8)
        self.head.weight = self.layers[0].weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


@pytest.mark.parametrize("build", [Net, Tied, checkpointed, compiled])
def test_the_tree_of_an_ordinary_model_has_its_own_tensors_and_no_other(build):
    model = build()
    tree, to_fill = model_state(model), model_state_to_fill(model)
    assert not loads_itself(model, tree)
    own = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    assert list(tree) == list(to_fill) == list(own)
    assert all(tree[name].data_ptr() == to_fill[name].data_ptr() == own[name].data_ptr() for name in own)


class Untaken(Net):
    """Saves an entry that nothing takes back."""

    def state_dict(self, *args, **options):
        return {**super().state_dict(*args, **options), "seen": torch.tensor(5)}


class Broken(Halved):
    def load_state_dict(self, state_dict):
        raise AttributeError("no `scale`")


@pytest.mark.parametrize(
    ("saved", "kind", "error"),
    [
        (Untaken, Untaken, r"`load_state_dict` of `Untaken` takes no `seen`, which the checkpoint has"),
        (Halved, Broken, r"`load_state_dict` of `Broken` failed on the checkpoint's state: no `scale`"),
        # A buffer of another shape that did not change its shape in the run that saved it.
        (functools.partial(Fixed, 4), functools.partial(Fixed, 3), r"the buffer `table` has the shape \[4\]"),
    ],
)
def test_a_state_that_the_model_does_not_take_is_refused_by_name(tmp_path, saved, kind, error):
    with start(saved, str(tmp_path / "a"), max_duration="1ba") as trainer:
        trainer.fit()
    with pytest.raises(ResumeError, match=error):
        start(kind, load_path=str(tmp_path / "a" / "latest"))


def test_other_ways_of_loading_reach_the_model_too(tmp_path):
    """Weights alone, a file of torch, an ignored part, and a callback that loads at the start."""
    with start(Halved, str(tmp_path / "a"), max_duration="2ba") as trainer:
        trainer.fit()
        whole = tensors(trainer.state.model)
        torch.save(trainer.state.model.state_dict(), tmp_path / "weights.pt")
    latest = str(tmp_path / "a" / "latest")
    for arguments in (
        {"load_path": latest, "load_weights_only": True},
        {"load_path": str(tmp_path / "weights.pt")},
        {"callbacks": LoadCheckpoint(latest)},
        {"callbacks": LoadCheckpoint(str(tmp_path / "weights.pt"))},
    ):
        with start(Halved, **arguments) as trainer:
            assert_same(tensors(trainer.state.model), whole)
    new = tensors(Halved())
    with start(Halved, load_path=latest, load_ignore_keys=["model/layers.0.*"]) as trainer:
        found = tensors(trainer.state.model)
    assert_same(found, {name: (new if ".0." in name else whole)[name] for name in found})


def test_an_ignored_bank_stays_as_it_is(tmp_path):
    with start(LateBank, str(tmp_path / "a"), max_duration="2ba") as trainer:
        trainer.fit()
    with start(
        LateBank, load_path=str(tmp_path / "a" / "latest"), load_ignore_keys=["model/bank"]
    ) as trainer:
        assert trainer.state.model.bank is None
