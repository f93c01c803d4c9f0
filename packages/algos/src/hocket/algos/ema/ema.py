"""EMA: an exponential moving average of the weights, for evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from hocket.algos.checks import check_fraction, check_number
from hocket.algos.errors import AlgorithmConfigError, IncompatibleError
from hocket.algos.order import Order
from hocket.algos.progress import has_come
from hocket.algos.traits import Trait, has_trait
from hocket.algos.weight_average import WeightAverage
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.checkpoint.optimizer_state import SlotsLike
from hocket.trainer.event import Event
from hocket.trainer.ranks.sharded_tensors import local_part, whole_tensor
from hocket.trainer.time import Time, TimeInput, TimeUnit

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State

_SWAP_IN = (Event.EVAL_BEFORE_ALL, Event.PREDICT_START)
_SWAP_OUT = (Event.EVAL_AFTER_ALL, Event.PREDICT_END)
_STARTS = (Event.AFTER_LOAD, Event.FIT_START)


class EMA(Algorithm):
    """Averages weights over training, and evaluates and predicts with the average.

    The average starts from the weights that the model has when `fit` starts, unless a checkpoint has an
    average. It is of the parameters that train and of the buffers: a parameter that is unfrozen later joins
    it with the value that it had while it was frozen. The object may be given to one trainer after the
    other; each trainer starts a new average.

    Give exactly one of `half_life`, `smoothing` and `sigma_rel`.

    Args:
        half_life: Time in batches or epochs after which a weight's share in the average has halved.
        smoothing: Share of the past average in each update, 0 to 1; the formula is in `compute_ema`.
        ema_start: Time at which averaging starts.
        update_interval: Batches or epochs between updates; by default 1 of the half-life's unit, or `"1ba"`.
        sigma_rel: Relative width of a power-function profile, above 0 to 0.28: the average then covers
            about that share of the training so far, for any length of it. 0.05 to 0.15 are usual.

    Raises:
        AlgorithmConfigError: An argument is out of range, or units do not fit together.

    Example:
        >>> EMA(half_life="100ba")
        EMA(half_life='100ba', smoothing=0.9930924954370359, ema_start='0.0dur', update_interval='1ba')

    Source: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, 2024, section
    3.1, for the power function.
    """

    events: ClassVar[frozenset[Event] | None] = frozenset(
        {
            Event.BEFORE_LOAD,
            *_STARTS,
            Event.AFTER_TRAIN_BATCH,
            Event.BATCH_END,
            Event.EPOCH_END,
            *_SWAP_IN,
            *_SWAP_OUT,
        }
    )
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.AVERAGES_WEIGHTS})
    order = Order.EMA

    def __init__(
        self,
        half_life: TimeInput | None = "1000ba",
        smoothing: float | None = None,
        ema_start: TimeInput = "0.0dur",
        update_interval: TimeInput | None = None,
        *,
        sigma_rel: float | None = None,
    ) -> None:
        given = [value is not None for value in (half_life, smoothing, sigma_rel)]
        if sum(given) != 1:
            raise AlgorithmConfigError(
                f"of `half_life`, `smoothing` and `sigma_rel`, {sum(given)} are given, expected one. "
                "`half_life` has a default: pass `half_life=None` with the others"
            )
        self.half_life = None if half_life is None else _steps("half_life", half_life)
        unit = TimeUnit.BATCH if self.half_life is None else self.half_life.unit
        self.update_interval = (
            Time(1, unit) if update_interval is None else _steps("update_interval", update_interval)
        )
        if self.half_life is not None and self.update_interval.unit != unit:
            raise AlgorithmConfigError(
                f"`half_life` is in `{unit.value}` and `update_interval` in "
                f"`{self.update_interval.unit.value}`, expected the same unit"
            )
        self.ema_start = Time.from_input(ema_start, TimeUnit.BATCH)
        if self.ema_start.value < 0:
            raise AlgorithmConfigError(f"`ema_start` is `{self.ema_start}`, expected a time of zero or more")
        self.sigma_rel = sigma_rel
        self.smoothing = smoothing
        if self.half_life is not None:
            self.smoothing = smoothing_of_half_life(self.update_interval.value, self.half_life.value)
        elif smoothing is not None:
            check_fraction("smoothing", smoothing)
        else:
            check_number("sigma_rel", sigma_rel, least=1e-3, most=MOST_SIGMA_REL)
        self._gamma = None if sigma_rel is None else power_exponent(sigma_rel)
        self._event = Event.BATCH_END if self.update_interval.unit is TimeUnit.BATCH else Event.EPOCH_END
        self._average: WeightAverage | None = None
        self._num_updates = 0
        self._is_started = False
        """Whether training has started with these averages, in this run or in the one that was loaded."""

    def match(self, event: Event, state: State) -> bool:
        """Return whether averages are to be made, updated, or swapped with the model's weights."""
        if event in (Event.BATCH_END, Event.EPOCH_END):
            interval = self.update_interval
            return (
                event == self._event
                and state.timestamp.get(interval.unit).value % interval.value == 0
                and (self._num_updates > 0 or has_come(state, self.ema_start))
            )
        if event == Event.AFTER_TRAIN_BATCH:
            return self._average is not None and self._average.has_new
        if event in (Event.BEFORE_LOAD, *_STARTS):
            return True
        return self._num_updates > 0 and event in (*_SWAP_IN, *_SWAP_OUT)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Make, update, or swap the averages."""
        if event == Event.BEFORE_LOAD:
            self._average = WeightAverage(state.model, has_buffers=True)
            self._num_updates, self._is_started = 0, False
            return
        average = self._made()
        if event in _STARTS:
            self._start(average, event, state)
            return
        if event == Event.AFTER_TRAIN_BATCH:
            average.join()
        elif event in _SWAP_IN:
            average.swap_in()
        elif event in _SWAP_OUT:
            # An evaluation or prediction around this one goes on with the averages.
            if state.evaluation_depth <= 1:
                average.swap_out()
        else:
            self._update(average)

    def _start(self, average: WeightAverage, event: Event, state: State) -> None:
        """Restore the model's own weights, and start the averages from them unless they were loaded."""
        average.check_is_of(state.model, "EMA")
        average.swap_out()
        if not self._is_started:
            average.copy_from_model()
        self._is_started |= event == Event.FIT_START

    def _update(self, average: WeightAverage) -> None:
        self._num_updates += 1
        if self._gamma is not None:
            average.update(1.0 - power_smoothing(self._num_updates, self._gamma))
            return
        assert self.smoothing is not None
        if self._num_updates == 1 and self.ema_start.value > 0:
            average.copy_from_model()  # the average starts here and not from the initial weights
        average.update(1.0 - self.smoothing)

    def conflict_with(self, other: Any) -> str | None:
        """Refuse a second method that averages weights."""
        if has_trait(other, Trait.AVERAGES_WEIGHTS):
            return "each replaces the model's weights by its own average; choose one of them"
        return None

    def abandon_evaluation(self, state: State) -> None:
        """Restore the model's own weights, unless an evaluation around this one goes on."""
        if state.evaluation_depth > 1:
            return
        if self._average is not None and self._average.is_of(state.model):
            self._average.swap_out()

    def get_ema_model(self, model: nn.Module) -> nn.Module:
        """Write the averaged weights into a model with the same parameters, and return it.

        Args:
            model: The trained model (then `get_training_model` restores its weights) or another one.
        """
        average = self._made()
        if average.is_of(model):
            average.swap_in()
        else:
            _load_into(model, average.tensors)
        return model

    def get_training_model(self, model: nn.Module) -> nn.Module:
        """Restore the weights that `get_ema_model` replaced in the trained model, and return it."""
        self._made().swap_out()
        return model

    def averaged_weights(self) -> Mapping[str, torch.Tensor]:
        """Return the averages, which replace the trained weights in a checkpoint of weights alone."""
        return self._average.tensors if self._average is not None and self._num_updates else {}

    def trained_weights(self) -> Mapping[str, torch.Tensor]:
        """Return the trained weights while the averages are in their place."""
        return {} if self._average is None else self._average.kept

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, which are laid out as the parameters, and the number of updates.

        The number is -1 before training starts, so that averages which a checkpoint lacks are told from
        averages that it has.
        """
        if self._average is None:
            return {}
        num_updates = self._num_updates if self._is_started else -1
        return {"average": dict(self._average.tensors), "num_updates": num_updates}

    def state_to_fill(self) -> dict[str, Any]:
        """Return a place for the averages of a checkpoint, which may be of more or fewer tensors."""
        if self._average is None:
            return {}
        return {**self.state_dict(), "average": SlotsLike(self._average.like())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from averages that `state_dict` returned; a state without them changes nothing."""
        if not isinstance(state.get("average"), Mapping) or not state["average"]:
            return
        self._made().load(state["average"])
        self._num_updates, self._is_started = max(0, state["num_updates"]), state["num_updates"] >= 0

    def _made(self) -> WeightAverage:
        if self._average is None:
            raise IncompatibleError("`EMA` has no averages yet; give it to a `Trainer` first")
        return self._average

    def __repr__(self) -> str:
        profile = (
            f"sigma_rel={self.sigma_rel!r}" if self.sigma_rel is not None else f"smoothing={self.smoothing!r}"
        )
        half_life = None if self.half_life is None else self.half_life.to_timestring()
        return (
            f"EMA(half_life={half_life!r}, {profile}, ema_start={self.ema_start.to_timestring()!r}, "
            f"update_interval={self.update_interval.to_timestring()!r})"
        )


@torch.no_grad()
def compute_ema(model: nn.Module, ema_model: nn.Module, smoothing: float = 0.99) -> None:
    """Update averages in place: `average = smoothing * average + (1 - smoothing) * model`; needs no trainer.

    Args:
        model: The trained model.
        ema_model: A copy of it that holds the averages, laid out alike. Floating point buffers are averaged,
            others copied.
        smoothing: 0 to 1.

    Raises:
        AlgorithmConfigError: `smoothing` is not within 0 to 1.
        IncompatibleError: The models have different parameters.
    """
    check_fraction("smoothing", smoothing)
    sources, averages = _tensors(model), _tensors(ema_model)
    if sources.keys() != averages.keys():
        raise IncompatibleError(
            f"`ema_model` and `model` differ in {sorted(sources.keys() ^ averages.keys())[:5]}, expected a "
            "copy"
        )
    floating = [name for name, source in sources.items() if source.is_floating_point()]
    if floating:
        torch._foreach_lerp_(
            [averages[name] for name in floating],
            [sources[name].to(averages[name].dtype) for name in floating],
            1.0 - smoothing,
        )
    for name in sources.keys() - set(floating):
        averages[name].copy_(sources[name])


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: local_part(one.detach()) for name, one in (*model.named_parameters(), *model.named_buffers())
    }


@torch.no_grad()
def _load_into(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    model_tensors = dict((*model.named_parameters(), *model.named_buffers()))
    if missing := tensors.keys() - model_tensors.keys():
        raise IncompatibleError(
            f"the model lacks {sorted(missing)[:5]}, expected the trained model's parameters"
        )
    for name, tensor in tensors.items():
        model_tensors[name].copy_(whole_tensor(tensor))


def _steps(name: str, given: TimeInput) -> Time:
    time = Time.from_input(given, TimeUnit.BATCH)
    if time.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or time.value < 1:
        raise AlgorithmConfigError(
            f"`{name}` is `{time.to_timestring()}`, expected at least 1 in batches (`ba`) or epochs (`ep`)"
        )
    return time


def smoothing_of_half_life(interval: float, half_life: float) -> float:
    """Return the smoothing with which a weight's share halves after `half_life`, updated each `interval`."""
    return math.pow(2.0, -interval / half_life)


def power_exponent(sigma_rel: float) -> float:
    """Return γ of the power-function profile with a given relative width.

    `sigma_rel` is the profile's standard deviation as a share of the training so far:
    σ² = (γ + 1) / ((γ + 2)² (γ + 3)), which falls with γ; bisection inverts it.

    Source: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, 2024, equation
    127 of the appendix.
    """
    low, high = 0.0, 1.0
    while _width(high) > sigma_rel:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _width(middle) > sigma_rel else (low, middle)
    return (low + high) / 2.0


def power_smoothing(num_updates: int, gamma: float) -> float:
    """Return the share of the past in update number `num_updates`, counted from 1.

    Source: Karras et al., 2024, equation 2: β(t) = (1 - 1/t)^(γ + 1).
    """
    return math.pow(1.0 - 1.0 / num_updates, gamma + 1.0)


def _width(gamma: float) -> float:
    return math.sqrt((gamma + 1.0) / ((gamma + 2.0) ** 2 * (gamma + 3.0)))


MOST_SIGMA_REL = _width(0.0)
"""The width at γ = 0, a plain mean of all weights: 0.2887."""
