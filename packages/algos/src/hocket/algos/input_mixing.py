"""Base of the methods that combine each sample of a microbatch with another one: MixUp and CutMix."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hocket.algos.batches import ItemKey, get_item, with_item
from hocket.algos.checks import as_tensor_item, check_choice, check_number
from hocket.algos.errors import IncompatibleError
from hocket.algos.targets import as_logits, as_probabilities
from hocket.algos.traits import Trait, has_trait
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State


class InputMixing(Algorithm):
    """Mixes inputs before the forward pass, and either targets before the loss or losses after it.

    After the loss, the microbatch has its own targets again, for metrics; its inputs stay mixed.

    Args:
        alpha: Parameter of the Beta distribution that the share of each image is drawn from; at least 0.
        interpolate_loss: Interpolate the losses of both targets instead of the targets; for a loss that does
            not take probabilities.
        input_key: Key of the inputs in the batch.
        target_key: Key of the targets.
    """

    events: ClassVar[frozenset[Event] | None] = frozenset(
        {Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS}
    )
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.NEEDS_OUTPUTS})

    def __init__(self, alpha: float, interpolate_loss: bool, input_key: ItemKey, target_key: ItemKey) -> None:
        check_number("alpha", alpha, least=0)
        check_choice("interpolate_loss", interpolate_loss, (False, True))
        self.alpha = alpha
        self.interpolate_loss = interpolate_loss
        self.input_key = input_key
        self.target_key = target_key
        self._original: Any = None
        self._target: torch.Tensor | None = None

    @abstractmethod
    def mix_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """Draw partners and shares, keep them for the targets, and return the mixed inputs."""

    @abstractmethod
    def mix_targets(self, target: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Mix targets as the inputs were mixed."""

    @abstractmethod
    def mix_losses(self, loss: torch.Tensor, target: torch.Tensor, state: "State") -> torch.Tensor:
        """Mix the loss of the samples' own targets with the loss of their partners' targets."""

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Mix the inputs of `state.batch`, its targets or the loss; restore the targets after the loss."""
        name = type(self).__name__
        if event == Event.BEFORE_FORWARD:
            inputs = as_tensor_item(name, "the inputs", get_item(state.batch, self.input_key))
            if not inputs.is_floating_point():
                raise IncompatibleError(
                    f"`{name}` needs floating point inputs, but they are {inputs.dtype}. Convert and "
                    "normalize them in the data set, or embed token ids first"
                )
            mixed = self.mix_inputs(inputs)
            state.batch = with_item(state.batch, self.input_key, mixed)
        elif event == Event.BEFORE_LOSS:
            logits = as_logits(name, state.outputs)
            target = as_tensor_item(name, "the targets", get_item(state.batch, self.target_key))
            self._original, self._target = state.batch, target
            if not self.interpolate_loss:
                mixed = self.mix_targets(target, logits.detach())
                state.batch = with_item(state.batch, self.target_key, mixed)
        else:
            assert self._target is not None
            if self.interpolate_loss:
                state.loss = self.mix_losses(self._plain_loss(state), self._target, state)
            state.batch = self._original
            self._original = self._target = None

    def conflict_with(self, other: Any) -> str | None:
        """Refuse a second method that mixes samples, and smoothed labels with interpolated losses."""
        if isinstance(other, InputMixing):
            return "each mixes every sample with another one; choose one of them"
        if self.interpolate_loss and has_trait(other, Trait.SMOOTHS_LABELS):
            return (
                "with `interpolate_loss=True` the second loss would be one of unsmoothed labels; leave "
                "`interpolate_loss` at False"
            )
        return None

    def loss_with(self, target: torch.Tensor, state: "State") -> torch.Tensor:
        """Compute the model's loss for other targets."""
        model: Any = state.model
        loss: torch.Tensor = model.loss(state.outputs, with_item(state.batch, self.target_key, target))
        return loss

    def _plain_loss(self, state: "State") -> torch.Tensor:
        if not isinstance(state.loss, torch.Tensor):
            raise IncompatibleError(
                f"`{type(self).__name__}(interpolate_loss=True)` needs one tensor as the loss, but the model "
                f"returns a {type(state.loss).__name__}. Leave `interpolate_loss` at False"
            )
        return state.loss


def mix_probabilities(
    target: torch.Tensor, logits: torch.Tensor, indices: torch.Tensor, mixing: float
) -> torch.Tensor:
    """Return `(1 - mixing) * target + mixing * target[indices]` as class probabilities."""
    probabilities = as_probabilities(target, logits)
    return torch.lerp(probabilities, probabilities[indices], mixing)
