"""Schedule-free optimizers: no learning rate schedule, averaged weights for evaluation."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hocket.algos.errors import IncompatibleError
from hocket.algos.order import Order
from hocket.algos.traits import Trait, has_trait
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State

_TO_EVALUATION = (Event.EVAL_BEFORE_ALL, Event.PREDICT_START, Event.FIT_END)
_BACK = (Event.EVAL_AFTER_ALL, Event.PREDICT_END)


class ScheduleFree(Algorithm):
    """Switches the optimizers of the `schedulefree` package between training and evaluation weights.

    During training, such an optimizer keeps the model at a point between its iterate and the average of its
    iterates. The average is the result: the model has it during evaluation and prediction and after training,
    and checkpoints of weights alone contain it.

    Raises:
        IncompatibleError: When the trainer is built, if no optimizer has the methods `train` and `eval`, or a
            learning rate schedule is given.

    Example:
        >>> ScheduleFree()
        ScheduleFree()

    Source: Defazio et al., The Road Less Scheduled, 2024.
    """

    events: ClassVar[frozenset[Event] | None] = frozenset(
        {Event.INIT, Event.FIT_START, *_TO_EVALUATION, *_BACK}
    )
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.AVERAGES_WEIGHTS})
    order = Order.SCHEDULE_FREE

    def __init__(self) -> None:
        self._is_fitting = False
        self._in_training: State | None = None
        """The state of the run while its model has the training weights, else None."""

    def match(self, event: Event, state: "State") -> bool:
        """Return whether to check the optimizers, or to switch them."""
        if event in _BACK:
            # An evaluation or prediction around this one goes on with the averages.
            return self._is_fitting and state.evaluation_depth <= 1
        return event in (Event.INIT, Event.FIT_START, *_TO_EVALUATION)

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Check or switch the optimizers."""
        optimizers: list[Any] = [one for one in state.optimizers if _is_schedule_free(one)]
        if event == Event.INIT:
            _check(state, optimizers)
            return
        if event in (Event.FIT_START, Event.FIT_END):
            self._is_fitting = event == Event.FIT_START
        for optimizer in optimizers:
            if event in _TO_EVALUATION:
                optimizer.eval()
            else:
                optimizer.train()
        self._in_training = None if event in _TO_EVALUATION else state

    def abandon_evaluation(self, state: "State") -> None:
        """Return to the training weights, unless an evaluation around this one goes on."""
        if not self._is_fitting or state.evaluation_depth > 1:
            return
        for optimizer in state.optimizers:
            if _is_schedule_free(optimizer):
                optimizer.train()  # type: ignore[attr-defined]  # of the package `schedulefree`
        self._in_training = state

    @torch.no_grad()
    def averaged_weights(self) -> Mapping[str, torch.Tensor]:
        """Return the averages, which replace the training weights in a checkpoint of weights alone."""
        if self._in_training is None:
            return {}  # the model has the averages
        parameters = dict(self._in_training.model.named_parameters())
        optimizers: list[Any] = [one for one in self._in_training.optimizers if _is_schedule_free(one)]
        # Copied, because switching to the average and back rounds twice, and a save must not change the run.
        trained = [parameter.clone() for parameter in parameters.values()]
        for optimizer in optimizers:
            optimizer.eval()
        averages = {name: parameter.clone() for name, parameter in parameters.items()}
        for optimizer in optimizers:
            optimizer.train()
        for parameter, values in zip(parameters.values(), trained, strict=True):
            parameter.copy_(values)
        return averages

    def conflict_with(self, other: Any) -> str | None:
        """Refuse a second `ScheduleFree`, and a method that averages weights."""
        if isinstance(other, ScheduleFree):
            return "one switches all optimizers; remove the other"
        if has_trait(other, Trait.AVERAGES_WEIGHTS):
            return "each replaces the model's weights by its own average; choose one of them"
        return None

    def __repr__(self) -> str:
        return "ScheduleFree()"


def _is_schedule_free(optimizer: Any) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def _check(state: "State", optimizers: list[Any]) -> None:
    if not optimizers:
        names = ", ".join(f"`{type(one).__name__}`" for one in state.optimizers)
        raise IncompatibleError(
            f"`ScheduleFree` needs an optimizer of the `schedulefree` package, but got {names}. "
            "Install it by `pip install 'hocket-algos[schedulefree]'`, and pass for instance "
            "`schedulefree.AdamWScheduleFree(model.parameters(), lr=2.5e-3)` as `optimizers=`"
        )
    if state.schedulers:
        raise IncompatibleError(
            "`ScheduleFree` replaces learning rate schedules; remove `schedulers=` (warmup is the "
            "optimizer's `warmup_steps=`)"
        )
