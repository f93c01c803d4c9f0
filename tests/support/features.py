"""Features of the trainer, each trained under one axis of a layout on two ranks and on one process.

A feature says how a trainer uses it, and reads facts from the trained trainer that show that it acted: a
feature that is ignored would train as one process does, too.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hocket.dist import DistError
from hocket.trainer import Callback, Trainer
from hocket.trainer.errors import TrainerError
from hocket.trainer.loggers import InMemoryLogger
from support import layouts

AXES: dict[str, tuple[dict[str, Any], int]] = {
    "dp_replicate": ({"dp_replicate": 2}, 2),
    "dp_shard": ({"dp_shard": 2}, 2),
    "tp": ({"dp_shard": 1, "tp": 2}, 1),
    "cp": ({"dp_shard": 1, "cp": 2}, 1),
    "pp": ({"pp": 2}, 1),
    "ep": ({"dp_shard": 2, "ep": 2}, 2),
}
"""The layout of two ranks that has each axis, and the ranks that have data of their own."""
STEPS = 3
MICROBATCH = 2
EXACT = {"loss": 1e-5, "norm": 1e-5, "update": 1e-5}


class Outcome(NamedTuple):
    """The numbers of a training and the facts that a feature reads from it, on one rank."""

    numbers: layouts.Numbers
    facts: Any


class Refusal(NamedTuple):
    """An error on one rank, and the updates of the model before it."""

    message: str
    num_updates: int


class Feature:
    """A trainer that uses a feature, and the facts that show it.

    Attributes:
        dense: The kind of the model of `layouts`.
        mixture: The same where ranks share experts.
        beside: Further keys of `parallelism_config`.
        bounds: The largest relative differences from one process.
        bounds_of_mixture: The same where ranks share experts.
        changes_numbers: Whether the one process trains with the feature, too; without it otherwise.
        num_rounds: Trainings one after the other with new models; the last one is compared.
        needs: A module without which the feature is not tested.
    """

    dense: ClassVar[str] = "gpt"
    mixture: ClassVar[str] = "mixture"
    beside: ClassVar[dict[str, Any]] = {}
    bounds: ClassVar[dict[str, float]] = EXACT
    bounds_of_mixture: ClassVar[dict[str, float]] = EXACT
    changes_numbers: ClassVar[bool] = True
    num_rounds: ClassVar[int] = 1
    needs: ClassVar[str] = "torch"

    def build(self, kind: str) -> nn.Module:
        """Return the model."""
        return layouts.build(kind)

    def options(self) -> dict[str, Any]:
        """Return arguments of the trainer."""
        return {}

    def facts(self, trainer: Trainer, memory: InMemoryLogger) -> Any:
        """Return what shows that the feature acted. Collective with several ranks."""
        return None

    def check(self, found: list[Outcome], alone: Outcome, num_ranks: int) -> None:
        """Fail if the feature has not acted on the ranks as on one process."""


class Recorder(Callback):
    """Records the parameters at the start of training, and counts the updates."""

    reads_outputs = False

    def __init__(self) -> None:
        self.num_updates = 0
        self.initial: dict[str, Tensor] = {}

    def fit_start(self, state: Any, logger: Any) -> None:
        self.initial = layouts.whole(state.model)
        state.optimizers[0].register_step_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.num_updates += 1


def train(feature: Feature, axis: str | None, has_experts: bool) -> Outcome:
    """Train with a feature, on one process without an axis. Collective with an axis."""
    torch._dynamo.reset()
    for _ in range(feature.num_rounds):
        memory, recorder = InMemoryLogger(), Recorder()
        with contextlib.closing(_trainer(feature, axis, has_experts, memory, recorder)) as trainer:
            trainer.fit()
            facts = feature.facts(trainer, memory)
            outcome = Outcome(layouts.numbers(trainer, memory, recorder.initial), facts)
    torch._dynamo.reset()
    return outcome


def refuse(feature: Feature, axis: str) -> Refusal:
    """Train with a feature that a layout refuses, and return the error."""
    memory, recorder, message = InMemoryLogger(), Recorder(), ""
    try:
        with contextlib.closing(_trainer(feature, axis, axis == "ep", memory, recorder)) as trainer:
            trainer.fit()
    except (DistError, TrainerError) as error:
        message = str(error)
    return Refusal(message, recorder.num_updates)


def _trainer(
    feature: Feature, axis: str | None, has_experts: bool, memory: InMemoryLogger, recorder: Recorder
) -> Trainer:
    config, num_ranks = (None, 1) if axis is None else AXES[axis]
    kind = feature.mixture if has_experts else feature.dense
    is_plain = axis is None and not feature.changes_numbers
    model = feature.build(kind.removesuffix(", checkpointed") if is_plain else kind)
    options = {} if is_plain else feature.options()
    return Trainer(
        model=model,
        train_dataloader=DataLoader(
            layouts.samples(kind, STEPS), batch_size=layouts.GLOBAL_BATCH // num_ranks
        ),
        optimizers=torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4),
        callbacks=[recorder, *options.pop("callbacks", ())],
        loggers=[memory],
        **{
            "max_duration": f"{STEPS}ba",
            "gradient_clipping": 0.5,
            "device_train_microbatch_size": MICROBATCH,
            "parallelism_config": None if config is None else {**copy.deepcopy(config), **feature.beside},
            "progress_bar": False,
            "device": "cpu",
            "seed": 7,
        }
        | options,
    )


def check(feature: Feature, axis: str, found: list[Outcome], alone: Outcome) -> None:
    """Compare a training on two ranks with that of one process, and look at what the feature did."""
    bounds = feature.bounds_of_mixture if axis == "ep" else feature.bounds
    numbers = [one.numbers for one in found]
    trained, initial = {}, {}
    for one in numbers:
        trained |= one.trained
        initial |= one.initial
    assert sorted(trained) == sorted(alone.numbers.trained)
    trained = {key: trained[key] for key in alone.numbers.trained}
    for one in numbers:
        assert one.losses == numbers[0].losses
        assert one.norms == numbers[0].norms
        for key, value in one.trained.items():
            assert torch.equal(value, trained[key]), key
        differences = one._replace(trained=trained, initial=initial).largest_differences(alone.numbers)
        shown = " | ".join(f"{value:.1e}" for value in differences.values())
        print(f"{type(feature).__name__} | {axis} | {shown}")  # with `-rP`
        assert all(differences[key] <= bound for key, bound in bounds.items()), differences
    feature.check(found, alone, AXES[axis][1])
