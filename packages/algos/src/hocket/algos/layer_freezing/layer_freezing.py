"""LayerFreezing: early layers stop training while the later ones go on."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hocket.algos.checks import check_fraction
from hocket.algos.errors import AlgorithmConfigError
from hocket.algos.order import Order
from hocket.algos.progress import elapsed_fraction
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State


class LayerFreezing(Algorithm):
    """Freezes more and more of the first layers at each epoch's end.

    From `freeze_start` to the end of training the share of frozen layers grows linearly to `freeze_level`.
    Frozen parameters get no gradient and are not updated; they stay in the optimizer, so that checkpoints
    keep their form. A resumed run freezes the layers that were frozen when it was saved. The object may be
    given to one trainer after the other; each trainer starts without frozen layers.

    Args:
        freeze_start: The share of training after which freezing starts, 0 to below 1.
        freeze_level: The share of layers, without the last one, that are frozen at the end, 0 to 1.

    Raises:
        AlgorithmConfigError: A share is out of its range.

    Example:
        >>> LayerFreezing(freeze_start=0.3)
        LayerFreezing(freeze_start=0.3, freeze_level=1.0)
    """

    events: ClassVar[frozenset[Event] | None] = frozenset(
        {Event.BEFORE_LOAD, Event.EPOCH_END, Event.FIT_START, Event.AFTER_TRAIN_BATCH}
    )
    order = Order.LAYER_FREEZING
    find_unused_parameters = True
    """True, since frozen parameters take no part in the backward pass, which DDP has to detect."""

    def __init__(self, freeze_start: float = 0.5, freeze_level: float = 1.0) -> None:
        _check(freeze_start, freeze_level)
        self.freeze_start = freeze_start
        self.freeze_level = freeze_level
        self._depth = 0
        self._frozen: list[nn.Parameter] = []

    def match(self, event: Event, state: "State") -> bool:
        """Return whether to freeze, or to drop the gradients of frozen parameters."""
        if event in (Event.BEFORE_LOAD, Event.EPOCH_END):
            return True
        return bool(self._frozen if event is Event.AFTER_TRAIN_BATCH else self._depth)

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Freeze at an epoch's end, and after a resume; drop gradients that a layout computed anyway."""
        if event is Event.BEFORE_LOAD:
            self._depth, self._frozen = 0, []  # those of an earlier trainer
            return
        if event is Event.AFTER_TRAIN_BATCH:
            for parameter in self._frozen:
                parameter.grad = None
            return
        layers = _layers(state.model)
        if event is Event.EPOCH_END:
            share = _share(elapsed_fraction(state), self.freeze_start, self.freeze_level)
            self._depth = int(share * (len(layers) - 1))
        self._frozen = _freeze(layers[: self._depth])
        logger.log_metrics(
            {
                "layer_freezing/layers_frozen": self._depth,
                "layer_freezing/percentage_frozen": self._depth / max(1, len(layers)),
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of frozen layers."""
        return {"depth": self._depth}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the number of frozen layers; the layers are frozen when `fit` starts."""
        self._depth = int(state["depth"])

    def __repr__(self) -> str:
        return f"LayerFreezing(freeze_start={self.freeze_start}, freeze_level={self.freeze_level})"


def freeze_layers(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None,  # noqa: ARG001 - Composer's position
    current_duration: float,
    freeze_start: float = 0.5,
    freeze_level: float = 1.0,
) -> tuple[int, float]:
    """Freeze the first layers of a model; needs no trainer.

    A layer is a module with parameters and without submodules, in the order in which the model registers
    them. The last layer is never frozen, so that there is always something to train. Sharded parameters keep
    `requires_grad`, which their layout has fixed; call this function at the end of each epoch and drop their
    gradients, as `LayerFreezing` does.

    Args:
        model: Changed in place.
        optimizers: Not used, as torch's optimizers skip parameters without a gradient.
        current_duration: The share of training that is done, 0 to 1.
        freeze_start: The share after which freezing starts.
        freeze_level: The share of layers frozen at the end of training.

    Returns:
        The number of frozen layers, and the share of layers that the schedule asks for.

    Raises:
        AlgorithmConfigError: A share is out of its range.

    Source: Raghu et al., SVCCA, 2017, section 4.
    """
    _check(freeze_start, freeze_level)
    layers = _layers(model)
    share = _share(current_duration, freeze_start, freeze_level)
    depth = max(0, int(share * (len(layers) - 1)))
    _freeze(layers[:depth])
    return depth, share


def _share(current_duration: float, freeze_start: float, freeze_level: float) -> float:
    progress = (current_duration - freeze_start) / (1.0 - freeze_start)
    return min(1.0, max(0.0, progress)) * freeze_level


def _layers(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if not any(module.children()) and any(True for _ in module.parameters(recurse=False))
    ]


def _freeze(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    parameters = [parameter for layer in layers for parameter in layer.parameters(recurse=False)]
    for parameter in parameters:
        parameter.grad = None
        if not isinstance(parameter, DTensor):
            parameter.requires_grad_(False)
    return parameters


def _check(freeze_start: float, freeze_level: float) -> None:
    check_fraction("freeze_start", freeze_start)
    check_fraction("freeze_level", freeze_level)
    if freeze_start == 1:
        raise AlgorithmConfigError("`freeze_start` is 1, expected a share of training below 1")
