"""Evaluation: within a fit when it is due, or by `Trainer.eval`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hocket.trainer.data.data_spec import DataSpec, as_data_spec, with_model_weights
from hocket.trainer.data.loader_checks import loader_length
from hocket.trainer.data.sampling import shard
from hocket.trainer.engine.engine import Engine
from hocket.trainer.errors import DataError, TrainerConfigError
from hocket.trainer.evaluation.evaluator import (
    Evaluator,
    as_evaluators,
    as_interval,
    check_subset,
    select_metrics,
)
from hocket.trainer.evaluation.forward_only import evaluating, forward_only
from hocket.trainer.evaluation.rank_batches import RankBatches
from hocket.trainer.event import Event
from hocket.trainer.interval import IsTime
from hocket.trainer.log.logger import Logger
from hocket.trainer.metrics.metric_state import load_metric_states, metric_states, were_updated
from hocket.trainer.metrics.metric_sync import check_values, compute_metrics, copy_metric
from hocket.trainer.models.base import ComposerModel, LossSum
from hocket.trainer.optim import step_metric_schedulers
from hocket.trainer.precision import Precision
from hocket.trainer.process.clock import LapClock
from hocket.trainer.protocols import Stateful
from hocket.trainer.state import State
from hocket.trainer.step.losses.losses import ModuleWithLoss, of_last_stage, total_of
from hocket.trainer.timestamp import Timestamp

if TYPE_CHECKING:
    from torchmetrics import Metric

# ruff: noqa: E701 - an event is one line, as in the training loop
# fmt: off


@dataclass(slots=True)
class _Prepared:
    """An evaluator, ready to run."""

    evaluator: Evaluator
    spec: DataSpec
    metrics: dict[str, Metric]
    is_due: IsTime | None
    evaluated_at: int = -1
    """Batches trained on when it last ran."""
    is_settled: bool = False
    """Whether the metrics are those that the model states after its first batch of labels."""


class EvaluationLoop:
    """The evaluation of the model on `state.evaluators`.

    Results are in `state.eval_metrics[label]` as metrics, in `state.eval_metric_values` as tensors on the
    device, and in the log as `metrics/<label>/<Name>`. Metrics are updated on the device, which is not read
    while batches run. On several ranks every sample counts once, however the samples are divided.

    Args:
        state: The state of the run.
        engine: Fires the events.
        logger: Receives the results.
        precision: The precision of the forward passes.
        auto_shard: Whether plain loaders are divided over the ranks (see `hocket.trainer.data.sampling`).
        most_batches: Returns the maximum number of batches of a loader to evaluate; None for no limit.
    """

    def __init__(
        self,
        state: State,
        engine: Engine,
        logger: Logger,
        precision: Precision,
        *,
        auto_shard: bool = True,
        most_batches: Callable[[Any], int | None] | None = None,
    ) -> None:
        self.notices: list[str] = []
        """Sentences for the user about the loaders."""
        self._auto_shard = auto_shard
        self._most_batches = most_batches
        self._state = state
        self._engine = engine
        self._logger = logger
        self._precision = precision
        self._prepared: dict[int, _Prepared] = {}
        for evaluator in state.evaluators:
            self.prepare(evaluator)

    def prepare(self, evaluator: Evaluator) -> None:
        """Check an evaluator and make its metrics, unless this was done before.

        Raises:
            TrainerConfigError: If the model lacks a metric that the evaluator names.
            DataError: If its loader serves other ranks.
        """
        if (prepared := self._prepared.get(id(evaluator))) is not None and prepared.evaluator is evaluator:
            return
        state = self._state
        spec, _, notice, _ = shard(
            with_model_weights(as_data_spec(evaluator.dataloader), state.model),
            state.parallelism,
            seed=state.seed,
            auto_shard=self._auto_shard,
            argument=f"the loader of the evaluator `{evaluator.label}`",
        )
        if notice is not None:
            self.notices.append(notice)
        interval = None if evaluator.eval_interval is None else as_interval(evaluator.eval_interval)
        self._prepared[id(evaluator)] = prepared = _Prepared(evaluator, spec, {}, interval)
        self._choose_metrics(prepared)

    def _choose_metrics(self, prepared: _Prepared) -> None:
        """Make the metrics of an evaluator, unless it has those that the model states now."""
        state, evaluator = self._state, prepared.evaluator
        available = _metrics_of(state.model)
        names = select_metrics(available, evaluator.metric_names, label=evaluator.label)
        if list(prepared.metrics) != names:
            check_values({name: available[name] for name in names})
            prepared.metrics = {
                name: copy_metric(available[name], state.device, state.parallelism) for name in names
            }
        state.eval_metrics[evaluator.label] = prepared.metrics

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's metric states of the last evaluations, by label; none before the first."""
        return {
            label: metric_states(metrics)
            for label, metrics in self._state.eval_metrics.items()
            if any(were_updated(metric) for metric in metrics.values())
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the metrics of `state.eval_metrics` from what `state_dict` returned."""
        for label, metrics in self._state.eval_metrics.items():
            if label in states:
                load_metric_states(metrics, states[label])

    def forget_last(self) -> None:
        """Discard the batches at which evaluators last ran; called when the time starts again at 0."""
        for prepared in self._prepared.values():
            prepared.evaluated_at = -1

    def run_if_due(self, event: Event) -> float:
        """Run the evaluators that are due; return the seconds that this took.

        At `FIT_END`, every evaluator with an interval that is a time is due, unless it has just run.
        Collective if any evaluator is due.
        """
        state = self._state
        if not state.evaluators:
            return 0.0
        due = [evaluator for evaluator in state.evaluators if self._is_due(evaluator, event)]
        if not due:
            return 0.0
        seconds = self.run(due)
        if state.schedulers and event is not Event.FIT_END:
            # One at the end of a fit is out of its interval: a run that goes on would not have had it.
            prefixes = tuple(f"metrics/{evaluator.label}/" for evaluator in due)
            values = {name: one for name, one in state.metric_values.items() if name.startswith(prefixes)}
            step_metric_schedulers(state.schedulers, values)
        return seconds

    def _is_due(self, evaluator: Evaluator, event: Event) -> bool:
        self.prepare(evaluator)
        prepared = self._prepared[id(evaluator)]
        if prepared.is_due is None:
            return False
        is_due = prepared.is_due(self._state, event)
        if event is Event.FIT_END and not callable(evaluator.eval_interval):
            is_due = True
        return is_due and prepared.evaluated_at != self._state.timestamp.counts.batch

    def run(self, evaluators: Sequence[Evaluator]) -> float:
        """Run evaluators one after the other; return the seconds that this took. Collective."""
        start = time.perf_counter()
        with evaluating(self._state):
            self._run_all(evaluators)
        return time.perf_counter() - start

    def _run_all(self, evaluators: Sequence[Evaluator]) -> None:
        on, fire = self._engine.on, self._engine.fire
        if on.eval_before_all: fire(Event.EVAL_BEFORE_ALL)
        for evaluator in evaluators:
            self.prepare(evaluator)
            prepared = self._prepared[id(evaluator)]
            _check_apart(prepared.spec.dataloader, self._state, evaluator.label)
            self._state.eval_metrics[evaluator.label] = prepared.metrics
            try:
                with forward_only(self._state, prepared.spec.dataloader):
                    self._run_one(prepared)
            except BaseException as error:
                now = self._state.timestamp.describe()
                error.add_note(f"raised while evaluating `{evaluator.label}`, at {now}")
                raise
        if on.eval_after_all: fire(Event.EVAL_AFTER_ALL)

    def rehearse(self, num_batches: int) -> None:
        """Evaluate a few batches without events and without results, to find errors early. Collective.

        Args:
            num_batches: Number of batches of each evaluator; -1 for all.
        """
        for evaluator in self._state.evaluators:
            self.prepare(evaluator)
            prepared = self._prepared[id(evaluator)]
            limits = [one for one in (num_batches, self._limit(prepared)) if one not in (None, -1)]
            limited_evaluator = replace(evaluator, subset_num_batches=min(limits, default=-1))
            try:
                with forward_only(self._state, prepared.spec.dataloader):
                    self._rehearse_one(replace(prepared, evaluator=limited_evaluator))
            except BaseException as error:
                error.add_note(f"raised in the sanity evaluation of `{evaluator.label}`, before the training")
                raise

    def _rehearse_one(self, prepared: _Prepared) -> None:
        state, size = self._state, self._microbatch_size(prepared.evaluator)
        self._start(prepared)
        for batch in self._batches(prepared):
            for state.batch, is_counted in batch.microbatches(prepared.spec, size):
                with self._precision.forward():
                    state.outputs = self._outputs()
                    if not prepared.is_settled: self._settle(prepared)
                    if is_counted: self._measure(prepared.metrics, prepared.spec)
            state.eval_timestamp = state.eval_timestamp.to_next_batch(
                samples=batch.global_samples, tokens=batch.global_tokens
            )
        _check_not_empty(prepared.evaluator, state)
        compute_metrics(prepared.metrics)
        for metric in prepared.metrics.values():
            metric.reset()

    def run_standalone(self, eval_dataloader: Any = None, subset_num_batches: int = -1) -> None:
        """Evaluate outside of a fit, between the `EVAL_STANDALONE_*` events. Collective.

        Args:
            eval_dataloader: The data, as `as_evaluators` takes it; None for `state.evaluators`.
            subset_num_batches: Number of batches on each rank; -1 for the number that each evaluator states.

        Raises:
            TrainerConfigError: If there is nothing to evaluate on.
        """
        own_evaluators = self._state.evaluators
        evaluators = own_evaluators if eval_dataloader is None else as_evaluators(eval_dataloader)
        if subset_num_batches != -1:
            check_subset(subset_num_batches)
            evaluators = [replace(one, subset_num_batches=subset_num_batches) for one in evaluators]
        if not evaluators:
            raise TrainerConfigError(
                "there is nothing to evaluate on; pass `eval_dataloader=` to `eval` or to `Trainer`"
            )
        prepared, self._prepared = self._prepared, dict(self._prepared)
        self._state.evaluators = evaluators
        try:
            self._engine.fire(Event.EVAL_STANDALONE_START)
            self.run(evaluators)
            self._engine.fire(Event.EVAL_STANDALONE_END)
        finally:
            self._state.evaluators, self._prepared = own_evaluators, prepared

    def _run_one(self, prepared: _Prepared) -> None:
        state, on, fire = self._state, self._engine.on, self._engine.fire
        evaluator = prepared.evaluator
        size = self._microbatch_size(evaluator)
        self._start(prepared)
        if on.eval_start: fire(Event.EVAL_START)
        laps = LapClock()
        for batch in self._batches(prepared):
            state.batch = batch.batch
            if on.eval_batch_start: fire(Event.EVAL_BATCH_START)
            for state.batch, is_counted in batch.microbatches(prepared.spec, size):
                self._forward(prepared, is_counted=is_counted)
            state.batch = batch.batch
            state.eval_timestamp = state.eval_timestamp.to_next_batch(
                samples=batch.global_samples, tokens=batch.global_tokens, duration=laps.read()
            )
            if on.eval_batch_end: fire(Event.EVAL_BATCH_END)
        _check_not_empty(evaluator, state)
        self._finish(prepared)
        if on.eval_end: fire(Event.EVAL_END)

    def _settle(self, prepared: _Prepared) -> None:
        """Choose the metrics anew once the model has seen labels, from which it may infer its problem."""
        prepared.is_settled = True
        self._choose_metrics(prepared)

    def _forward(self, prepared: _Prepared, *, is_counted: bool) -> None:
        """Run `state.batch` through the model, and add it to the metrics if it is counted."""
        state, on, fire = self._state, self._engine.on, self._engine.fire
        with self._precision.forward():
            if on.eval_before_forward: fire(Event.EVAL_BEFORE_FORWARD)
            state.outputs = self._outputs()
            if on.eval_after_forward: fire(Event.EVAL_AFTER_FORWARD)
            if not prepared.is_settled: self._settle(prepared)
            if is_counted: self._measure(prepared.metrics, prepared.spec)

    def _outputs(self) -> Any:
        """Return the model's outputs for `state.batch`."""
        model: Any = self._state.model
        return getattr(model, "eval_forward", model)(self._state.batch)

    def _measure(self, metrics: dict[str, Metric], spec: DataSpec) -> None:
        """Add `state.batch` and `state.outputs` to `metrics`."""
        state = self._state
        model: Any = state.model
        for name, metric in metrics.items():
            if name == "Loss" and hasattr(metric, "add_sum"):
                self._add_loss(metric, spec)
            else:
                model.update_metric(state.batch, state.outputs, metric)

    def _start(self, prepared: _Prepared) -> None:
        state, loader, label = self._state, prepared.spec.dataloader, prepared.evaluator.label
        state.dataloader, state.dataloader_label = loader, label
        limits = [number for number in (self._limit(prepared), loader_length(loader)) if number is not None]
        state.dataloader_len = min(limits, default=None)
        state.eval_timestamp = Timestamp()
        for metric in prepared.metrics.values():
            metric.reset()
        for sampler in (getattr(loader, name, None) for name in ("sampler", "batch_sampler")):
            if set_epoch := getattr(sampler, "set_epoch", None):
                set_epoch(state.timestamp.counts.batch)

    def _finish(self, prepared: _Prepared) -> None:
        state, label = self._state, prepared.evaluator.label
        prepared.evaluated_at = state.timestamp.counts.batch
        values = compute_metrics(prepared.metrics)
        state.eval_metric_values.update(values)
        named = {f"metrics/{label}/{name}": value for name, value in values.items()}
        state.metric_values.update(named)
        self._logger.log_metrics(named, keep=True)

    def _batches(self, prepared: _Prepared) -> RankBatches:
        limit = self._limit(prepared)
        return RankBatches(
            prepared.spec,
            device=self._state.device,
            parallelism=self._state.parallelism,
            max_batches=-1 if limit is None else limit,
        )

    def _limit(self, prepared: _Prepared) -> int | None:
        """Return the maximum number of batches to evaluate; None for all."""
        max_batches = None if self._most_batches is None else self._most_batches(prepared.spec.dataloader)
        limits = (prepared.evaluator.subset_num_batches, max_batches)
        return min((number for number in limits if number not in (None, -1)), default=None)

    def _microbatch_size(self, evaluator: Evaluator) -> int | None:
        size = evaluator.device_eval_microbatch_size
        if size != "auto":
            return size
        train_size: Any = self._state.device_train_microbatch_size
        return train_size if isinstance(train_size, int) else None

    def _add_loss(self, metric: Any, spec: DataSpec) -> None:
        """Add the loss of `state.batch`, for a model without metrics."""
        state = self._state
        model: Any = state.model
        loss = of_last_stage(total_of(model.loss(state.outputs, state.batch)), state.parallelism)
        if isinstance(loss, LossSum):
            metric.add_sum(loss.total, loss.weight)
            return
        weights = spec.loss_weights(state.batch)
        if weights is None:
            metric.update(loss, float(spec.count_samples(state.batch)))
        else:
            metric.update(loss, weights.sum() if isinstance(weights, torch.Tensor) else float(sum(weights)))


def _metrics_of(model: Any) -> dict[str, Metric]:
    """Return the model's metrics; its loss where it states none and has no `eval_forward` of its own."""
    get_metrics = getattr(model, "get_metrics", None)
    metrics = {} if get_metrics is None else dict(get_metrics(is_train=False))
    # A plain module is wrapped in a model that the trainer made.
    owner = model.module if isinstance(model, ModuleWithLoss) else model
    if metrics or getattr(type(owner), "eval_forward", None) not in (None, ComposerModel.eval_forward):
        return metrics
    # Imported when needed: torchmetrics takes a second to import.
    from hocket.trainer.metrics.model_loss import Loss

    return {"Loss": Loss()}


def _check_not_empty(evaluator: Evaluator, state: State) -> None:
    if not state.eval_timestamp.counts.batch:
        raise DataError(
            f"the data loader of the evaluator `{evaluator.label}` yielded no batch; expected at least 1"
        )


def _check_apart(loader: Any, state: State, label: str) -> None:
    """Refuse the training's own loader within an epoch if it keeps a single position.

    Raises:
        TrainerConfigError: If `loader` is such a loader.
    """
    has_one_position = isinstance(loader, Stateful) or getattr(loader, "persistent_workers", False)
    if has_one_position and loader is state.train_dataloader and state.timestamp.counts.batch_in_epoch:
        raise TrainerConfigError(
            f"the evaluator `{label}` has the loader that is trained on, and its evaluation would start the "
            "training's epoch anew, since that loader keeps one position; make a second loader"
        )
