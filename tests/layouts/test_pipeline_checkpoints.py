"""A model in stages resumes as one process does, under other layouts, too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hocket.ckpt
from hocket.trainer import Callback, Trainer
from hocket.trainer.errors import TrainerError
from support import layouts
from support.stages import NEEDS_TORCH, Five, check_equal
from support.standing_ranks import StandingRanks

pytestmark = NEEDS_TORCH


class Watching(nn.Module):
    """A block with the running mean of its input and a random number in buffers."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("drawn", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.mean.lerp_(x.abs().mean(), 0.1)
            self.drawn.copy_(torch.rand(()))
        return self.block(x)


def watching() -> Any:
    model: Any = layouts.build("gpt", 5)
    model.blocks = nn.ModuleList(map(Watching, model.blocks))
    return model


class Course(NamedTuple):
    """The tensors of a rank at the start of a training, after two batches, and at its end."""

    start: dict[str, Tensor]
    middle: dict[str, Tensor]
    end: dict[str, Tensor]


class Taken(Callback):
    """A callback that takes a rank's tensors after two batches."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def batch_end(self, state: Any, logger: Any) -> None:
        """Take them."""
        if state.timestamp.counts.batch == 2:
            self.tensors = _tensors(state)


def _tensors(state: Any) -> dict[str, Tensor]:
    """Return parameters, slots and buffers by name, without the buffers of other stages. Collective."""
    found = layouts.whole(state.model)
    (optimizer,) = state.optimizers
    buffers = {
        name: one
        for name, one in state.model.named_buffers()
        if any(key.startswith(f"{name.rpartition('.')[0]}.") for key in found)
    }
    for name, one in state.model.named_parameters():
        for slot, value in optimizer.state.get(one, {}).items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{name} {slot}"] = whole.clone()
    return found | {name: one.clone() for name, one in buffers.items()}


def _go_on(config: Any, num_ranks: int, folder: str, load: str | None) -> Course:
    """Train four batches, and save after two; or load and train the rest. Collective with several ranks."""
    model = watching()
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0}]
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(layouts.samples("gpt", 4), batch_size=layouts.GLOBAL_BATCH // num_ranks),
        optimizers=torch.optim.AdamW(groups, lr=3e-3, eps=1e-4),
        max_duration="4ba",
        gradient_clipping=0.5,
        device_train_microbatch_size=2,
        parallelism_config=config,
        callbacks=[taken := Taken()],
        save_folder=folder,
        save_filename="ba{batch}",
        save_interval="2ba",
        load_path=load,
        progress_bar=False,
        device="cpu",
        seed=7,
    )
    with contextlib.closing(trainer):
        start = _tensors(trainer.state)
        trainer.fit()
        return Course(start, taken.tensors, _tensors(trainer.state))


def _resume(folder: str, of_one: str) -> dict[str, Course]:
    """Train in stages and go on under layouts of four ranks. Collective."""
    stages, copies, sharded = {"pp": 4}, {"pp": 2, "dp_replicate": 2}, {"pp": 2, "dp_shard": 2}
    return {
        "stages": _go_on(stages, 1, f"{folder}/stages", None),
        "stages again": _go_on(stages, 1, f"{folder}/again", f"{folder}/stages/ba2"),
        "shards": _go_on({"dp_shard": 4}, 4, f"{folder}/shards", f"{folder}/stages/ba2"),
        "of one": _go_on(stages, 1, f"{folder}/of_one", of_one),
        "copies": _go_on(copies, 2, f"{folder}/copies", None),
        "copies again": _go_on(copies, 2, f"{folder}/copies_again", f"{folder}/copies/ba2"),
        "sharded": _go_on(sharded, 2, f"{folder}/sharded", None),
        "sharded again": _go_on(sharded, 2, f"{folder}/sharded_again", f"{folder}/sharded/ba2"),
        "sharded of copies": _go_on(sharded, 2, f"{folder}/of", f"{folder}/copies/ba2"),
        "of sharded": _go_on(stages, 1, f"{folder}/of_sharded", f"{folder}/sharded/ba2"),
        "of copies": _go_on(stages, 1, f"{folder}/of_copies", f"{folder}/copies/ba2"),
    }


def _resume_several(folder: str) -> dict[str, Course]:
    """Train with two stages on each rank, and go on with others. Collective."""
    looped = {"pp": {"degree": 2, "schedule": "Interleaved1F1B"}, "dp_shard": 2}
    turned = {"pp": {"degree": 2, "schedule": "ZBVZeroBubble"}, "dp_replicate": 2}
    return {
        "turned": _go_on(turned, 2, f"{folder}/turned", None),
        "turned again": _go_on(turned, 2, f"{folder}/again", f"{folder}/turned/ba2"),
        "looped": _go_on(looped, 2, f"{folder}/looped", f"{folder}/turned/ba2"),
        "stages": _go_on({"pp": 4}, 1, f"{folder}/stages", f"{folder}/turned/ba2"),
        "looped again": _go_on(looped, 2, f"{folder}/new", None),
        "of looped": _go_on(turned, 2, f"{folder}/of", f"{folder}/new/ba2"),
    }


def _joined(found: list[dict[str, Course]], name: str) -> Course:
    """Return the tensors of all stages, each of which one of the ranks has."""
    courses = [one[name] for one in found]
    parts = [[getattr(one, name) for one in courses] for name in Course._fields]
    joined = Course(*({key: value for part in each for key, value in part.items()} for each in parts))
    assert len(joined.end) == sum(len(one.end) for one in courses)
    return joined


def _parameters(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without buffers, which each copy of a stage has of its own samples."""
    return {name: one for name, one in tensors.items() if not name.endswith((".drawn", ".mean"))}


def _check_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare parameters and slots; buffers are of random numbers, and of the samples of one rank."""
    for name in (one for one in expected if not one.endswith((".drawn", ".mean"))):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow(one_run_in=4)
def test_stages_resume_as_one_process(four_ranks: StandingRanks, tmp_path: Path) -> None:
    one = _go_on(None, 1, str(tmp_path / "one"), None)
    found = four_ranks.run(_resume, str(tmp_path), str(tmp_path / "one" / "ba2"))
    stages, again, of_one = (_joined(found, name) for name in ("stages", "stages again", "of one"))
    model = watching()
    assert len(stages.middle) == 3 * len(list(model.parameters())) + len(model.state_dict())
    check_equal(again.start, stages.middle)
    check_equal(again.end, stages.end)
    check_equal(of_one.start, one.middle)
    _check_near(of_one.end, one.end)
    for courses in found:
        check_equal(courses["shards"].start, stages.middle)
        _check_near(courses["shards"].end, stages.end)
    for name in ("copies", "sharded"):
        copies, copies_again = (_joined(found[1::2], one) for one in (name, f"{name} again"))
        of_copies = _joined(found, f"of {name}")
        for courses in (found[0], found[2]):
            check_equal(courses[f"{name} again"].start, courses[name].middle)
        check_equal(_parameters(copies_again.end), _parameters(copies.end))
        check_equal(_parameters(of_copies.start), _parameters(copies.middle))
        _check_near(of_copies.end, copies.end)
    for courses in (found[0], found[2]):
        check_equal(courses["sharded of copies"].start, courses["copies"].middle)
    alone = _go_on(None, 1, str(tmp_path / "alone"), str(tmp_path / "stages" / "ba2"))
    check_equal(alone.start, stages.middle)
    _check_near(alone.end, stages.end)
    folders = [tmp_path / name / "ba2" for name in ("stages", "one")]
    saved, expected = (sorted(hocket.ckpt.open(str(folder))) for folder in folders)
    assert saved == expected
    sizes = [sum(one.stat().st_size for one in folder.rglob("*")) for folder in folders]
    assert sizes[0] < 1.5 * sizes[1], "each tensor is written once"


@pytest.mark.slow(one_run_in=4)
def test_two_stages_on_a_rank_resume_under_other_layouts(four_ranks: StandingRanks, tmp_path: Path) -> None:
    found = four_ranks.run(_resume_several, str(tmp_path))
    names = ("turned", "turned again", "looped", "looped again", "of looped")
    turned, again, looped, new, of_looped = (_joined(found[1::2], name) for name in names)
    for courses in (found[0], found[2]):
        check_equal(courses["turned again"].start, courses["turned"].middle)
    check_equal(_parameters(again.end), _parameters(turned.end))
    check_equal(_parameters(looped.start), _parameters(turned.middle))
    _check_near(looped.end, turned.end)
    check_equal(_parameters(_joined(found, "stages").start), _parameters(turned.middle))
    check_equal(_parameters(of_looped.start), _parameters(new.middle))
    _check_near(of_looped.end, new.end)


def _load(load: str, **options: Any) -> dict[str, Tensor]:
    """Return this rank's tensors after a load in stages. Collective."""
    model = watching()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters()),
        parallelism_config={"pp": 4},
        load_path=load,
        progress_bar=False,
        device="cpu",
        seed=7,
        **options,
    )
    with contextlib.closing(trainer):
        return _tensors(trainer.state)


def _without_head(tree: dict[str, Any]) -> None:
    del tree["model"]["head.weight"]


def _load_parts(folder: str) -> list[dict[str, Tensor]]:
    saved = f"{folder}/saved"
    return [
        _load(saved),
        _load(saved, load_ignore_keys=["model/head.*"]),
        _load(saved, load_ignore_keys=_without_head),
        _load(saved, load_weights_only=True),
        _load(f"{folder}/foreign.pt", load_weights_only=True),
    ]


def _save_alone(folder: Path) -> Any:
    """Save a model with other values than those of a new one."""
    model = watching()
    with torch.no_grad():
        for one in model.state_dict().values():
            one.add_(1)
    options: dict[str, Any] = {"progress_bar": False, "device": "cpu", "seed": 7}
    trainer = Trainer(model=model, optimizers=torch.optim.AdamW(model.parameters()), **options)
    with contextlib.closing(trainer):
        trainer.save_checkpoint(folder / "saved")
    torch.save(model.state_dict(), folder / "foreign.pt")
    return model


def test_parts_of_a_checkpoint_are_loaded_into_stages(four_ranks: StandingRanks, tmp_path: Path) -> None:
    expected = _save_alone(tmp_path).state_dict()
    new = expected | {"head.weight": watching().head.weight.detach()}
    for case, found in enumerate(zip(*four_ranks.run(_load_parts, str(tmp_path)), strict=True)):
        loaded = {name: value for one in found for name, value in one.items()}
        check_equal(loaded, new if case in (1, 2) else expected)


class OwnState(torch.optim.SGD):
    """An optimizer with a `state_dict` of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 1}


class OwnEntries(Five):
    """A model with a `state_dict` of its own."""

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: one.clone() for name, one in super().state_dict(*args, **options).items()}


def _regroup(trainer: Trainer) -> None:
    (optimizer,) = trainer.state.optimizers
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()]})


def _refuse_states(folder: str) -> list[str]:
    """Return the messages of checkpoints that stages do not save or load. Collective."""

    def refused(
        model: Any, kind: Any, *, load: str | None = None, change: Callable[[Trainer], object] = str
    ) -> str:
        parameters = list(model.parameters())
        parts = [parameters] if load is None else [parameters[::2], parameters[1::2]]
        with contextlib.ExitStack() as stack:
            try:
                trainer = Trainer(
                    model=model,
                    optimizers=kind([{"params": one} for one in parts], lr=0.1),
                    parallelism_config={"pp": 4},
                    load_path=load,
                    save_folder=f"{folder}/never_made",
                    progress_bar=False,
                    device="cpu",
                )
                stack.callback(trainer.close)
                change(trainer)
                trainer.save_checkpoint_to_save_folder()
            except TrainerError as error:
                return str(error)
        return "nothing"

    return [
        refused(watching(), OwnState),
        refused(OwnEntries(), torch.optim.SGD),
        refused(watching(), torch.optim.SGD, change=_regroup),
        refused(watching(), torch.optim.AdamW, load=f"{folder}/saved"),
    ]


def test_states_that_stages_cannot_save_are_refused(four_ranks: StandingRanks, tmp_path: Path) -> None:
    _save_alone(tmp_path)
    for own, entries, groups, differing in four_ranks.run(_refuse_states, str(tmp_path)):
        assert "`OwnState` has a state beyond that of single parameters, or a `state_dict` of its own" in own
        assert "`OwnEntries` saves or loads its state in a way of its own" in entries
        assert "`SGD` has 2 groups of parameters that are not those of the start of training, 1" in groups
        assert "the parameter groups of `AdamW` differ from the checkpoint's" in differing
