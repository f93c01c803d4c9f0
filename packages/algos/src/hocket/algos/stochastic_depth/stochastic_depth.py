"""Stochastic depth: networks that train with a random subset of their residual blocks."""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from hocket.algos.checks import check_choice, check_fraction
from hocket.algos.errors import AlgorithmConfigError
from hocket.algos.progress import elapsed_fraction
from hocket.algos.stochastic_depth.layers import StochasticResidual
from hocket.algos.surgery import SurgeryAlgorithm, SurgeryReport, replace_module_classes
from hocket.algos.surgery.optimizers import Optimizers
from hocket.algos.surgery.replace import IfNone
from hocket.trainer.event import Event
from hocket.trainer.time import Time

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State

_METHODS = ("block", "sample")
_DISTRIBUTIONS = ("linear", "uniform")
# The last layer before the addition, by the names of torchvision's blocks.
_LAST = {"Bottleneck": "bn3", "BasicBlock": "bn2"}
_TARGETS = {"ResNetBottleneck": "Bottleneck", "ResNetBasicBlock": "BasicBlock"}


class StochasticDepth(SurgeryAlgorithm):
    """Drops residual branches at random in training: wraps the blocks at INIT, and draws at each batch.

    With `"block"` all ranks draw alike, from the run's seed and the batch's number. With `"sample"` every
    rank draws from its own generator.

    Args:
        target_layer_name: `"ResNetBottleneck"` or `"ResNetBasicBlock"`: torchvision's blocks.
        stochastic_method: `"block"` drops a branch for the whole batch, `"sample"` for each sample.
        drop_rate: Probability of dropping a branch, 0 to 1; for the last block if `"linear"`.
        drop_distribution: `"linear"` raises the rate from the first block to the last, `"uniform"` gives all
            blocks the same.
        drop_warmup: A share of training such as `0.1` or `"0.1dur"` over which rates rise from 0.
        reapply: Same as for every `SurgeryAlgorithm`.

    Raises:
        AlgorithmConfigError: A setting is unknown or out of its range.

    Example:
        >>> StochasticDepth("ResNetBottleneck", drop_rate=0.1)
        StochasticDepth('ResNetBottleneck', stochastic_method='block', drop_rate=0.1)
    """

    events: ClassVar[frozenset[Event] | None] = frozenset(
        {Event.INIT, Event.AFTER_LOAD, Event.EPOCH_START, Event.EVAL_BEFORE_ALL, Event.BATCH_START}
    )

    def __init__(
        self,
        target_layer_name: str,
        stochastic_method: str = "block",
        drop_rate: float = 0.2,
        drop_distribution: str = "linear",
        drop_warmup: float | str | Time = 0.0,
        *,
        reapply: bool = False,
    ) -> None:
        super().__init__(reapply=reapply)
        _check(target_layer_name, stochastic_method, drop_rate, drop_distribution)
        self.target_layer_name = target_layer_name
        self.stochastic_method = stochastic_method
        self.drop_rate = drop_rate
        self.drop_distribution = drop_distribution
        self.drop_warmup = _warmup(drop_warmup)
        self._classes: tuple[type[nn.Module], ...] = ()
        self._blocks: list[StochasticResidual] | None = None
        """The model's wrapped blocks, searched again after each event at which blocks may be swapped."""

    @property
    def targets(self) -> tuple[type[nn.Module], ...]:
        """The classes of the wrapped blocks, which are found by name."""
        return self._classes

    def operate(self, state: "State") -> SurgeryReport:
        """Wrap the residual blocks of `state.model`."""
        report = apply_stochastic_depth(
            state.model,
            self.target_layer_name,
            self.stochastic_method,
            self.drop_rate,
            self.drop_distribution,
            state.optimizers,
        )
        self._classes = tuple({*self._classes, *(type(one.old) for one in report.replacements)})
        return report

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Wrap at INIT; at each batch set the rates of warmup and draw the blocks to drop."""
        if event is not Event.BATCH_START:
            super().apply(event, state, logger)
            self._blocks = None
            return
        if self._blocks is None:
            self._blocks = [it for it in state.model.modules() if isinstance(it, StochasticResidual)]
        scale = min(1.0, elapsed_fraction(state) / self.drop_warmup) if self.drop_warmup else 1.0
        generator = torch.Generator().manual_seed(state.seed + 1_000_003 * state.timestamp.counts.batch)
        drawn = torch.rand(len(self._blocks), generator=generator, device="cpu").tolist()
        for block, number in zip(self._blocks, drawn, strict=True):
            block.scale = scale
            if block.method == "block":
                block.drop = number < block.drop_rate * scale

    def __repr__(self) -> str:
        return (
            f"StochasticDepth({self.target_layer_name!r}, stochastic_method={self.stochastic_method!r}, "
            f"drop_rate={self.drop_rate})"
        )


def apply_stochastic_depth(
    model: nn.Module,
    target_layer_name: str,
    stochastic_method: str = "block",
    drop_rate: float = 0.2,
    drop_distribution: str = "linear",
    optimizers: Optimizers | None = None,
    *,
    if_none: IfNone = "warn",
) -> SurgeryReport:
    """Wrap a model's residual blocks so that branches are dropped at random, in place; needs no trainer.

    Args:
        model: Changed in place.
        target_layer_name: Same as for `StochasticDepth`.
        stochastic_method: Same as for `StochasticDepth`.
        drop_rate: Same as for `StochasticDepth`.
        drop_distribution: Same as for `StochasticDepth`.
        optimizers: Built over the model's parameters; nothing in them has to change.
        if_none: Action if there is no such block: warn, raise, or neither.

    Returns:
        The report of the surgery.

    Raises:
        AlgorithmConfigError: A setting is unknown or out of its range.

    Source: Huang et al., Deep Networks with Stochastic Depth, 2016; for `"sample"` Tan and Le, EfficientNet,
        2019.
    """
    _check(target_layer_name, stochastic_method, drop_rate, drop_distribution)
    kind = _TARGETS[target_layer_name]
    wrapped = {id(module.block) for module in model.modules() if isinstance(module, StochasticResidual)}
    blocks = [module for module in model.modules() if type(module).__name__ == kind]
    rates = {
        id(block): drop_rate * ((number + 1) / len(blocks) if drop_distribution == "linear" else 1)
        for number, block in enumerate(blocks)
    }

    def wrap(module: Any, index: int) -> nn.Module | None:  # noqa: ARG001 - the policy's form
        if id(module) in wrapped or id(module) not in rates:
            return None
        last = getattr(module, _LAST[kind])
        return StochasticResidual(module, last, rates[id(module)], stochastic_method)

    policies = dict.fromkeys((type(block) for block in blocks), wrap) or {StochasticResidual: wrap}
    return replace_module_classes(model, policies, optimizers, if_none=if_none, title="StochasticDepth")


def _warmup(given: float | str | Time) -> float:
    time = Time.from_input(given, "dur") if not isinstance(given, float | int) else Time(given, "dur")
    if time.unit.value != "dur" or not 0 <= time.value < 1:
        raise AlgorithmConfigError(
            f"`drop_warmup` is {given!r}, expected a share of training such as 0.1 or '0.1dur'"
        )
    return float(time.value)


def _check(target: str, method: str, drop_rate: float, distribution: str) -> None:
    check_choice("target_layer_name", target, tuple(_TARGETS))
    check_choice("stochastic_method", method, _METHODS)
    check_choice("drop_distribution", distribution, _DISTRIBUTIONS)
    check_fraction("drop_rate", drop_rate)
