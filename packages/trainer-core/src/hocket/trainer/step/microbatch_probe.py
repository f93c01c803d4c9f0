"""`MemoryProbe`: trial steps that measure memory and do not change the run."""

from __future__ import annotations

import copy
from collections import defaultdict
from types import TracebackType
from typing import Any, Self

import torch
from torch.optim import Optimizer

from hocket.trainer.data.prefetch import DeviceBatch
from hocket.trainer.event import Event
from hocket.trainer.process.devices import is_out_of_memory
from hocket.trainer.process.rng import capture_rng, restore_rng
from hocket.trainer.protocols import TrainStep
from hocket.trainer.ranks.sharded_tensors import local_part
from hocket.trainer.ranks.step_sync import GlobalStep
from hocket.trainer.step.microbatch_search import MemoryMeter
from hocket.trainer.step.step import StepContext


class MemoryProbe:
    """A context in which trial microbatches of a given size measure the peak memory.

    On entry, memory for the state of optimizers that have none is allocated, because training will need it.
    Inside the context, events call no listeners. On exit, the parameters, buffers, optimizers, random
    generators and attributes of the state are bit for bit as they were.

    Collective: every rank enters, measures the same sizes, and leaves.

    Args:
        step: The step that computes the gradients.
        context: The parts of the run.
        batch: A batch on the device, of which the first rows are used.
        meter: The meter of the memory.
    """

    def __init__(self, step: TrainStep, context: StepContext, batch: Any, meter: MemoryMeter) -> None:
        self._step = step
        self._context = context
        self._batch = batch
        self._meter = meter
        self._slots: list[Optimizer] = []

    def __enter__(self) -> Self:
        context, state = self._context, self._context.state
        self._rng = capture_rng(state.device)
        tensors = [*state.model.parameters(), *state.model.buffers()]
        # The copies are on the host, so that they do not count in the measured memory.
        self._values = [(tensor, local_part(tensor.detach()).cpu().clone()) for tensor in tensors]
        self._facts = context.facts, context.step, context.mean, context.train_metrics
        self._attributes = {name: getattr(state, name) for name in ("batch", "outputs", "loss")}
        self._size = state.device_train_microbatch_size
        self._weighing, context.weighing = context.weighing, None
        self._compare, context.compare_uncompiled = context.compare_uncompiled, None
        context.train_metrics = None
        for event in Event:
            setattr(context.engine.on, event.value, ())
        self._slots = [_with_slots(one) for one in state.optimizers if not one.state]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        context, state = self._context, self._context.state
        self._slots.clear()
        self._clear_gradients()
        with torch.no_grad():
            for tensor, value in self._values:
                local_part(tensor.detach()).copy_(value)
        self._values.clear()
        context.facts, context.step, context.mean, context.train_metrics = self._facts
        context.weighing, context.compare_uncompiled = self._weighing, self._compare
        for name, value in self._attributes.items():
            setattr(state, name, value)
        state.device_train_microbatch_size = self._size
        context.engine.prepare()
        restore_rng(self._rng, state.device)

    def peak_bytes(self, size: int) -> int:
        """Return the peak bytes over two microbatches of `size` samples, or fewer if the batch is smaller.

        The second microbatch adds to existing gradients, as most microbatches of a batch do.
        """
        context, spec = self._context, self._context.spec
        num_rows = spec.count_samples(self._batch)
        rows = min(2 * size, num_rows)
        batch = self._batch if rows == num_rows else spec.split(self._batch, 0, rows, num_samples=num_rows)
        num_ranks = context.state.parallelism.data_parallel[1]
        context.facts = DeviceBatch(batch, rows, rows, 0, None, float(rows))
        context.step = GlobalStep(
            False, False, rows * num_ranks, 0, float(rows * num_ranks), min(2 * size, self._most_rows()), None
        )
        context.state.device_train_microbatch_size = size
        self._clear_gradients()
        self._meter.start()
        try:
            self._step.compute_gradients(batch)
            return self._meter.peak_bytes()
        finally:
            context.state.outputs = context.state.loss = None
            self._clear_gradients()

    def _most_rows(self) -> int:
        """Return the rows of the largest batch of any rank, from which all ranks get one microbatch count."""
        step = self._facts[1]
        assert step is not None
        return step.most_samples

    def _clear_gradients(self) -> None:
        standard = self._context.standard
        if standard is not None:
            standard.clear_gradients()
        for parameter in self._context.state.model.parameters():
            parameter.grad = None


def _with_slots(optimizer: Optimizer) -> Optimizer:
    """Return a copy of an optimizer that has its state allocated by one step with zero gradients.

    The step may change parameters (weight decay); the caller restores them. If the step fails, because it
    needs a closure or more than the parameter groups, the copy's state is two tensors as large as each
    parameter.
    """
    parameters = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [dict(group) for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        type(optimizer).step(twin)
    except (TypeError, AttributeError, KeyError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        twin.state = defaultdict(
            dict,
            {
                parameter: {"slots": [torch.zeros_like(parameter), torch.zeros_like(parameter)]}
                for parameter in parameters
            },
        )
    finally:
        for parameter in parameters:
            parameter.grad = None
    return twin
