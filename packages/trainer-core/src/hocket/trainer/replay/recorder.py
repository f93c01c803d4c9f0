"""`StepRecorder`: the callback that measures each tensor of a step, and ends the replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor, nn

from hocket.trainer.callback import Callback
from hocket.trainer.data.batch_tree import leaves
from hocket.trainer.errors import ReplayError
from hocket.trainer.log.logger import Logger
from hocket.trainer.process.world import global_rank
from hocket.trainer.ranks.rank_gather import gather_objects
from hocket.trainer.ranks.sharded_tensors import tensor_norms
from hocket.trainer.replay.request import Replay, ReplayFinished
from hocket.trainer.replay.tensor_record import Kind, StepRecord, measure
from hocket.trainer.step.losses.losses import is_compiled

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from hocket.trainer.protocols import TrainStep
    from hocket.trainer.state import State


class StepRecorder(Callback):
    """Measures the tensors of the steps of a replay, and raises `ReplayFinished` after the last step.

    The order of a record is that of the computation: the batch, parameters and buffers before the step, the
    outputs of modules, the gradients of these outputs, the gradients of parameters before they are clipped,
    the loss, and parameters and optimizer state after the update.

    Args:
        replay: The replay, which takes the records.
    """

    reads_outputs = False

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self._record: StepRecord | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Put the measurements around the step of this run."""
        self.replay.num_ranks = state.parallelism.data_parallel[1]
        if not isinstance(state.train_step, _MeasuredStep):
            state.train_step = _MeasuredStep(state.train_step, state, self._begin)

    def _begin(self, step: int) -> StepRecord | None:
        """Return the record of a step; None for a step that is not measured."""
        if not self.replay.records_all and step != self.replay.step:
            return None
        self._record = StepRecord(step=step, rank=global_rank())
        return self._record

    def batch_end(self, state: State, logger: Logger) -> None:
        """Measure the updated parameters, and end the replay after its last step. Collective."""
        replay, step = self.replay, state.timestamp.counts.batch
        self._check_samples(state)
        if (record := self._record) is not None:
            _measure_named(record, "updated parameter", dict(state.model.named_parameters()))
            _measure_optimizers(record, state)
            record.loss = replay.losses.losses().get(step)
            replay.records.append(record)
            self._record = None
        if step >= replay.step:
            replay.last = gather_objects(replay.records[-1])
            raise ReplayFinished

    def _check_samples(self, state: State) -> None:
        """Refuse steps of other samples than those of the run, which had another number of ranks.

        Raises:
            ReplayError: The global batch is not as large as those of the run.
        """
        replay, num = self.replay, state.counts.sample - state.previous_counts.sample
        if state.counts.batch_in_epoch == state.dataloader_len and num < (replay.saved_samples or 0):
            return  # the short batch at the end of an epoch
        if replay.is_other_ranks and replay.saved_samples not in (None, num):
            raise ReplayError(
                f"the run had {replay.saved_samples} samples in each global batch, and the replay has {num}: "
                "the data are divided by the number of ranks. Replay on as many ranks, with `-n`, or let the "
                "loader state the size of the global batch"
            )


class _MeasuredStep:
    """A train step between measurements.

    Args:
        inner: The step of the run.
        state: The state of the run.
        begin: Returns the record of a step by its number, or None.
    """

    def __init__(self, inner: TrainStep, state: State, begin: Callable[[int], StepRecord | None]) -> None:
        self.inner = inner
        self._state = state
        self._begin = begin
        self._is_first = True

    def compute_gradients(self, batch: Any) -> Tensor:
        """See `TrainStep`."""
        state = self._state
        record = self._begin(state.timestamp.counts.batch + 1)
        if record is None:
            return self.inner.compute_gradients(batch)
        _measure_tree(record, "batch", "", batch)
        _measure_named(record, "parameter", dict(state.model.named_parameters()))
        _measure_named(record, "buffer", dict(state.model.named_buffers()))
        if self._is_first:
            # Later steps have it from the update before.
            _measure_optimizers(record, state)
            self._is_first = False
        handles = list(_hook_modules(record, state.model))
        try:
            loss = self.inner.compute_gradients(batch)
        finally:
            for handle in handles:
                handle.remove()
        named = state.model.named_parameters()
        _measure_named(record, "gradient", {name: one.grad for name, one in named if one.grad is not None})
        _add(record, "loss", "", loss)
        return loss

    def update(self) -> None:
        """See `TrainStep`."""
        self.inner.update()


def _hook_modules(record: StepRecord, model: nn.Module) -> Iterator[RemovableHandle]:
    """Measure the outputs of all modules, and the gradients of these outputs, until the hooks are removed."""
    if is_compiled(model):
        record.notices.append(
            "the model is compiled, so the outputs of its modules are not measured: hooks would compile "
            "another program. Leave the compilation out to see them"
        )
        return
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        yield module.register_forward_hook(_output_hook(record, name))


def _output_hook(record: StepRecord, name: str) -> Callable[[nn.Module, Any, Any], None]:
    def measure_outputs(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        # Within a backward pass, a checkpointed part computes the outputs of its forward pass again.
        is_repeated = torch._C._current_graph_task_id() != -1
        for path, value in leaves(outputs):
            if not isinstance(value, Tensor):
                continue
            full_name = name + _as_path(path)
            if not is_repeated:
                _add(record, "activation", full_name, value)
            if value.requires_grad and not value.is_leaf:
                value.register_hook(_gradient_hook(record, full_name))  # type: ignore[no-untyped-call]

    return measure_outputs


def _gradient_hook(record: StepRecord, name: str) -> Callable[[Tensor], None]:
    def measure_gradient(gradient: Tensor) -> None:
        _add(record, "gradient of activation", name, gradient)

    return measure_gradient


def _measure_tree(record: StepRecord, kind: Kind, name: str, tree: Any) -> None:
    for path, value in leaves(tree):
        if isinstance(value, Tensor):
            _add(record, kind, name + _as_path(path), value)


def _measure_named(record: StepRecord, kind: Kind, tensors: dict[str, Tensor]) -> None:
    """Measure tensors of the model, which may be sharded. Collective for those."""
    sharded = {name: one for name, one in tensors.items() if hasattr(one, "placements")}
    norms = {name: float(norm) for name, norm in tensor_norms(sharded).items()}
    for name, tensor in tensors.items():
        _add(record, kind, name, tensor, norm=norms.get(name))


def _measure_optimizers(record: StepRecord, state: State) -> None:
    """Measure the slots of the optimizers, each under the name of its parameter."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in state.model.named_parameters()}
    for optimizer in state.optimizers:
        for parameter, slots in optimizer.state.items():
            for slot, value in slots.items() if isinstance(slots, dict) else ():
                if isinstance(value, Tensor):
                    name = names.get(parameter, "(a parameter that is not the model's)")
                    _add(record, "optimizer state", f"{name} ({slot})", value)


def _add(record: StepRecord, kind: Kind, name: str, tensor: Tensor, *, norm: float | None = None) -> None:
    if (measured := measure(kind, name, tensor, norm=norm)) is not None:
        record.tensors.append(measured)


def _as_path(path: tuple[Any, ...]) -> str:
    """Return the keys and indices that lead to a tensor as Python would write them, `['x'][0]`."""
    return "".join(f"[{key!r}]" for key in path)
