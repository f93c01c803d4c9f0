"""NoOpModel: replaces the model by one without computation, to measure the data loader and the trainer."""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from hocket.algos.surgery import update_params_in_optimizer
from hocket.algos.traits import Trait, has_trait
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event
from hocket.trainer.models import ComposerModel

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State


class NoOpModelClass(ComposerModel):
    """A model with one weight, whose loss is 0 times that weight for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, device="cpu"))

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the weight times 0."""
        return (self.weight * 0).sum()

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return `outputs`, a 0 with a gradient."""
        return outputs


class NoOpModel(Algorithm):
    """Replaces `state.model` by a `NoOpModelClass` at INIT, so that a step costs what loading data costs.

    Example:
        >>> NoOpModel()
        NoOpModel()
    """

    events: ClassVar[frozenset[Event] | None] = frozenset({Event.INIT})

    @staticmethod
    def required_on_load() -> bool:
        """Return whether the method must be applied before a checkpoint made with it is loaded."""
        return True

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Replace the model and its parameters in optimizers; the first one's first group gets the weight."""
        old = state.model
        new = NoOpModelClass()
        update_params_in_optimizer(old.parameters(), [], state.optimizers)
        if state.optimizers:
            group = state.optimizers[0].param_groups[0]
            group["params"].append(new.weight)
            if "param_names" in group:
                group["param_names"].append("weight")
        state.model = state.module = new

    def conflict_with(self, other: Any) -> str | None:
        """Refuse methods that change the replaced model, or that need outputs, which the new one lacks."""
        if has_trait(other, Trait.CHANGES_MODEL):
            return f"`{type(other).__name__}` changes the model that `NoOpModel` replaces; leave it out"
        if has_trait(other, Trait.NEEDS_OUTPUTS):
            return (
                f"`{type(other).__name__}` needs the outputs or losses of samples, and `NoOpModel` computes "
                "none; leave it out"
            )
        return None

    def __repr__(self) -> str:
        return "NoOpModel()"
