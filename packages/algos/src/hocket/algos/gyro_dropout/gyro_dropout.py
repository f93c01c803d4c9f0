"""Gyro dropout: dropout that draws from a small set of masks, each of which trains for longer."""

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from hocket.algos.checks import check_count
from hocket.algos.errors import IncompatibleError
from hocket.algos.gyro_dropout.layers import GyroDropoutLayer, check, mask_period
from hocket.algos.progress import num_batches_in_all
from hocket.algos.surgery import SurgeryAlgorithm, SurgeryReport, is_plain, replace_module_classes
from hocket.algos.surgery.optimizers import Optimizers
from hocket.algos.surgery.replace import IfNone
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State


class GyroDropout(SurgeryAlgorithm):
    """Replaces dropout layers by gyro dropout at INIT, and puts other masks into use as training goes on.

    Args:
        p: Probability of dropping a number.
        sigma: Number of masks that are selected beforehand.
        tau: Number of masks that are in use at once.
        reapply: Same as for every `SurgeryAlgorithm`.

    Raises:
        AlgorithmConfigError: A setting is out of its range.

    Example:
        >>> GyroDropout(sigma=64)
        GyroDropout(p=0.5, sigma=64, tau=16)
    """

    events: ClassVar[frozenset[Event] | None] = frozenset(
        {Event.INIT, Event.AFTER_LOAD, Event.EPOCH_START, Event.EVAL_BEFORE_ALL, Event.BATCH_START}
    )

    def __init__(self, p: float = 0.5, sigma: int = 256, tau: int = 16, *, reapply: bool = False) -> None:
        super().__init__(reapply=reapply)
        check(p, sigma, tau)
        self.p = p
        self.sigma = sigma
        self.tau = tau
        self._period_index: int | None = None

    @property
    def targets(self) -> tuple[type[nn.Module], ...]:
        """Dropout layers."""
        return (nn.Dropout,)

    def operate(self, state: "State") -> SurgeryReport:
        """Replace the dropout layers of `state.model`."""
        self._period_index = None
        return _replace(state.model, (self.p, self.sigma, self.tau), None, state.optimizers, seed=state.seed)

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Replace at INIT; at a batch that begins a period, put the period's masks into use.

        Raises:
            IncompatibleError: The number of batches does not follow from the duration of the training.
        """
        if event is not Event.BATCH_START:
            super().apply(event, state, logger)
            return
        num_batches = num_batches_in_all(state)
        if num_batches is None:
            raise IncompatibleError(
                "`GyroDropout` shares the batches of a training among its masks, and `max_duration` is "
                f"`{state.max_duration}`, which tells no number of batches. Give it in batches ('1000ba'), "
                "or in epochs of a data loader with a length"
            )
        index = state.timestamp.counts.batch // mask_period(num_batches, self.sigma, self.tau)
        if index != self._period_index:
            self._period_index = index
            for module in state.model.modules():
                if isinstance(module, GyroDropoutLayer):
                    module.select(index)

    def __repr__(self) -> str:
        return f"GyroDropout(p={self.p}, sigma={self.sigma}, tau={self.tau})"


def apply_gyro_dropout(
    model: nn.Module,
    iters_per_epoch: int,
    max_epoch: int,
    p: float = 0.5,
    sigma: int = 256,
    tau: int = 16,
    optimizers: Optimizers | None = None,
    *,
    seed: int = 0,
    if_none: IfNone = "warn",
) -> SurgeryReport:
    """Replace a model's `nn.Dropout` layers by gyro dropout, in place; needs no trainer.

    Each layer counts the batches that it sees in training.

    Args:
        model: Changed in place.
        iters_per_epoch: Batches in an epoch.
        max_epoch: Epochs in the training.
        p: Probability of dropping a number.
        sigma: Number of masks that are selected beforehand.
        tau: Number of masks that are in use at once.
        optimizers: Built over the model's parameters; nothing in them has to change.
        seed: Seed of the masks; layer `i` takes `seed + i`.
        if_none: Action if there is no dropout: warn, raise, or neither.

    Returns:
        The report of the surgery.

    Raises:
        AlgorithmConfigError: A setting is out of its range.

    Source: Lee et al., Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training, MLSys 2022.
    """
    check(p, sigma, tau)
    check_count("iters_per_epoch", iters_per_epoch)
    check_count("max_epoch", max_epoch)
    period = mask_period(iters_per_epoch * max_epoch, sigma, tau)
    return _replace(model, (p, sigma, tau), period, optimizers, seed=seed, if_none=if_none)


def _replace(
    model: nn.Module,
    settings: tuple[float, int, int],
    period: int | None,
    optimizers: Optimizers | None,
    *,
    seed: int,
    if_none: IfNone = "warn",
) -> SurgeryReport:
    def replace(module: nn.Dropout, index: int) -> nn.Module | None:
        return GyroDropoutLayer(*settings, seed + index, period) if is_plain(module, nn.Dropout) else None

    return replace_module_classes(
        model, {nn.Dropout: replace}, optimizers, if_none=if_none, title="GyroDropout"
    )
