"""Selective backprop: training on the samples with the largest losses."""

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from hocket.algos.batches import ItemKey, get_item, select_rows, with_item
from hocket.algos.checks import as_tensor_item, check_count, check_fraction
from hocket.algos.errors import AlgorithmConfigError, IncompatibleError
from hocket.algos.order import Order
from hocket.algos.progress import elapsed_fraction
from hocket.algos.traits import Trait
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.evaluation.forward_only import restore_modes
from hocket.trainer.event import Event
from hocket.trainer.precision import Precision
from hocket.trainer.ranks.rank_gather import gather_async

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.protocols import Parallelism
    from hocket.trainer.state import State

_INTERPOLATION = {3: "linear", 4: "bilinear", 5: "trilinear"}


class SelectiveBackprop(Algorithm):
    """Skips samples with small losses: a forward pass finds the losses, and the samples to keep are drawn.

    Args:
        start: Share of the training before which all samples are kept.
        end: Share of the training from which all samples are kept again.
        keep: Share of the samples of a batch to keep, above 0, to 1.
        scale_factor: Scale of the images' sides in the forward pass that finds the losses, above 0, to 1.
        interrupt: Keep all samples of every batch whose number is a multiple of this; 0 for no such batch.
        input_key: Key of the inputs in the batch: an index, a key, an attribute's name, or a pair of
            functions (getter, setter).
        target_key: Key of the targets.
        loss_fn: `(outputs, target) -> losses`, one for each sample or position; by default the model's
            `loss(outputs, batch, reduction="none")`, or its `_loss_fn` or `loss_fn` with
            `reduction="none"`.

    Raises:
        AlgorithmConfigError: An argument is out of range.

    Example:
        >>> SelectiveBackprop(start=0.5, end=0.9, keep=0.5)
        SelectiveBackprop(start=0.5, end=0.9, keep=0.5, scale_factor=1.0, interrupt=2)

    Source: Jiang et al., Accelerating Deep Learning by Focusing on the Biggest Losers, 2019.
    """

    events: ClassVar[frozenset[Event] | None] = frozenset({Event.INIT, Event.AFTER_DATALOADER})
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.NEEDS_OUTPUTS})
    order = Order.SELECTIVE_BACKPROP

    def __init__(
        self,
        start: float = 0.5,
        end: float = 0.9,
        keep: float = 0.5,
        scale_factor: float = 1.0,
        interrupt: int = 2,
        input_key: ItemKey = 0,
        target_key: ItemKey = 1,
        *,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    ) -> None:
        check_fraction("start", start)
        check_fraction("end", end)
        if start > end:
            raise AlgorithmConfigError(f"`start` is {start!r} and `end` {end!r}, expected a later end")
        _check_share("keep", keep)
        _check_share("scale_factor", scale_factor)
        check_count("interrupt", interrupt, least=0)
        self.start = start
        self.end = end
        self.keep = keep
        self.scale_factor = scale_factor
        self.interrupt = interrupt
        self.input_key = input_key
        self.target_key = target_key
        self.loss_fn = loss_fn

    def match(self, event: Event, state: "State") -> bool:
        """Return whether to check the model, or to select samples of this batch."""
        if event != Event.AFTER_DATALOADER:
            return event == Event.INIT
        return self.keep < 1 and should_selective_backprop(
            elapsed_fraction(state),
            state.timestamp.counts.batch_in_epoch,
            self.start,
            self.end,
            self.interrupt,
        )

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Select samples of `state.batch`, in all its entries that have one item for each sample.

        The model runs on microbatches, as in training, and keeps the mode of each of its modules.

        Raises:
            IncompatibleError: At `INIT`, the model has no loss for each sample.
        """
        if event == Event.INIT:
            if self.loss_fn is None:
                _sample_loss(state.model)
            return
        batch = state.batch
        inputs = as_tensor_item("SelectiveBackprop", "the inputs", get_item(batch, self.input_key))
        target = as_tensor_item("SelectiveBackprop", "the targets", get_item(batch, self.target_key))
        modes = [(module, module.training) for module in state.model.modules()]
        # In evaluation mode, so that batch norm's statistics do not change and dropout draws nothing.
        state.model.eval()
        try:
            with torch.no_grad(), Precision(state.precision, state.device).forward():
                losses = [self._losses(state.model, part) for part in self._parts(state, len(inputs))]
        finally:
            restore_modes(modes)
        chosen = _draw(torch.cat(losses)[: len(inputs)], self.keep)
        state.batch = self._selected(batch, chosen, inputs, target)

    def _parts(self, state: "State", num_rows: int) -> Iterator[Any]:
        """Yield the microbatches of `state.batch`, as many on every rank, since a pass may be collective."""
        size = state.device_train_microbatch_size
        num_parts = 1 if size is None else -(-_most_rows(state.parallelism, num_rows) // size)
        if size is None or num_parts == 1:
            yield state.batch
            return
        inputs, target = get_item(state.batch, self.input_key), get_item(state.batch, self.target_key)
        for start in range(0, num_parts * size, size):
            # A rank with fewer samples repeats its last one, whose loss `apply` drops.
            first = min(start, num_rows - 1)
            yield self._selected(state.batch, slice(first, start + size), inputs, target)

    def _selected(self, batch: Any, rows: Any, inputs: torch.Tensor, target: torch.Tensor) -> Any:
        """Return a copy of a batch with some of its samples in all its entries."""
        selected = select_rows(batch, rows, len(inputs))
        for key, value in ((self.input_key, inputs), (self.target_key, target)):
            if len(get_item(selected, key)) == len(value):  # the batch is an object that cannot be searched
                selected = with_item(selected, key, value[rows])
        return selected

    def _losses(self, model: Any, batch: Any) -> torch.Tensor:
        inputs, target = get_item(batch, self.input_key), get_item(batch, self.target_key)
        scaled = with_item(batch, self.input_key, _scaled(inputs, self.scale_factor))
        outputs = model(scaled)
        if self.loss_fn is not None:
            return self.loss_fn(outputs, target)
        return _sample_loss(model)(outputs, scaled, target)

    def __repr__(self) -> str:
        return (
            f"SelectiveBackprop(start={self.start!r}, end={self.end!r}, keep={self.keep!r}, "
            f"scale_factor={self.scale_factor!r}, interrupt={self.interrupt!r})"
        )


def _most_rows(parallelism: "Parallelism", num_rows: int) -> int:
    """Return the largest number of samples of any rank's batch. Collective with several ranks."""
    if parallelism.data_parallel[1] == 1:
        return num_rows
    return int(max(rows for (rows,) in gather_async([num_rows], parallelism).read()))


def should_selective_backprop(
    current_duration: float, batch_idx: int, start: float = 0.5, end: float = 0.9, interrupt: int = 2
) -> bool:
    """Return whether samples are to be selected in a batch.

    Args:
        current_duration: Share of the training that is done, 0 to 1.
        batch_idx: The batch's index in its epoch.
        start: Share of the training from which samples are selected.
        end: Share of the training up to which samples are selected, exclusive.
        interrupt: No selection in batches whose number, from 1, is a multiple of this; 0 for no such batch.
    """
    is_interrupted = interrupt != 0 and (batch_idx + 1) % interrupt == 0
    return start <= current_duration < end and not is_interrupted


def select_using_loss(
    input: torch.Tensor,  # noqa: A002 - Composer's name
    target: torch.Tensor,
    model: Callable[[torch.Tensor], Any],
    loss_fun: Callable[..., torch.Tensor],
    keep: float = 0.5,
    scale_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw samples of a batch, those with larger losses more likely; needs no trainer.

    The probability of the sample with the r-th smallest of B losses is proportional to
    `((r - 0.5) / B) ** (1 / keep - 1)`. The losses stay on the device.

    Args:
        input: `(B, ...)`.
        target: `(B, ...)`.
        model: Maps inputs to outputs; called without gradients.
        loss_fun: `(outputs, target, reduction="none") -> losses`.
        keep: Share of the samples to keep, above 0, to 1; at least one is kept.
        scale_factor: Scale of the inputs' sides for the model, above 0, to 1.

    Returns:
        The samples kept and their targets.

    Raises:
        AlgorithmConfigError: An argument is out of range, or `loss_fun` has no `reduction`.
        IncompatibleError: The inputs cannot be scaled.

    Source: Jiang et al., Accelerating Deep Learning by Focusing on the Biggest Losers, 2019.
    """
    _check_share("keep", keep)
    _check_share("scale_factor", scale_factor)
    if not _has_reduction(loss_fun):
        raise AlgorithmConfigError("`loss_fun` must be a function with the argument `reduction`")
    with torch.no_grad():
        losses = loss_fun(model(_scaled(input, scale_factor)), target, reduction="none")
        chosen = _draw(losses, keep)
    return input[chosen], target[chosen]


def _draw(losses: torch.Tensor, keep: float) -> torch.Tensor:
    """Draw the indices of the samples to keep, on the device of the losses."""
    size = losses.shape[0]
    ranked = losses.float().flatten(1).mean(1) if losses.ndim > 1 else losses
    order = torch.argsort(ranked)
    shares = (torch.arange(size, dtype=torch.float64, device=losses.device) + 0.5) / size
    drawn = torch.multinomial(shares ** (1.0 / keep - 1.0), max(int(keep * size), 1))
    return order[drawn]


def _scaled(inputs: torch.Tensor, scale: float) -> torch.Tensor:
    if scale == 1:
        return inputs
    mode = _INTERPOLATION.get(inputs.ndim)
    if mode is None or not inputs.is_floating_point():
        raise IncompatibleError(
            f"`scale_factor` {scale} needs floating point inputs with 3 to 5 dims, but they are "
            f"{inputs.dtype} of shape {tuple(inputs.shape)}; leave it at 1"
        )
    return nn.functional.interpolate(
        inputs, scale_factor=scale, mode=mode, align_corners=False, recompute_scale_factor=False
    )


def _sample_loss(model: Any) -> Callable[[Any, Any, Any], torch.Tensor]:
    """Return a function (outputs, batch, target) -> losses of the samples."""
    if _has_reduction(model.loss):
        return lambda outputs, batch, _: model.loss(outputs, batch, reduction="none")
    for name in ("_loss_fn", "loss_fn"):
        function = getattr(model, name, None)
        if callable(function) and _has_reduction(function):
            return lambda outputs, _, target: function(outputs, target, reduction="none")
    raise IncompatibleError(
        f"`SelectiveBackprop` needs the loss of each sample, but `{type(model).__name__}.loss` has no "
        "argument `reduction`. Add `reduction='mean'` to it and heed 'none', or give "
        "`SelectiveBackprop(loss_fn=lambda outputs, target: ...)`"
    )


def _has_reduction(function: Any) -> bool:
    try:
        return "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _check_share(name: str, value: float) -> None:
    check_fraction(name, value)
    if value == 0:
        raise AlgorithmConfigError(f"`{name}` is 0, expected a number above 0")
