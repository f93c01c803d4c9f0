"""`CudaGraphStep`: forward and backward pass as one captured CUDA graph, for batches of one shape."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from hocket.trainer.data.batch_tree import leaves, map_tensors, tensors
from hocket.trainer.data.prefetch import DeviceBatch
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.step.step import StandardStep

_log = logging.getLogger(__name__)

_IN_STEP = (
    "before_forward",
    "after_forward",
    "before_loss",
    "after_loss",
    "before_backward",
    "after_backward",
)


class GraphRecorder(Protocol):
    """A recorder that runs a function ahead of its capture, and captures it."""

    def warm_up(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a function, which is required before its capture."""

    def capture(self, function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], object]]:
        """Return the function's result, and a call that computes it again in the same memory."""


class CudaRecorder:
    """A recorder of CUDA graphs.

    Args:
        device: The device of the step.

    Raises:
        TrainerConfigError: If `device` is not a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise TrainerConfigError(
                f"`CudaGraphStep` captures the step as a CUDA graph, and the device is `{device}`; leave "
                "`train_step` out, or use `device='gpu'` on a machine with an NVIDIA GPU"
            )
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def warm_up(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a function on the stream of the capture, so that libraries allocate their workspaces for it."""
        current_stream = torch.cuda.current_stream()
        self._stream.wait_stream(current_stream)
        with torch.cuda.stream(self._stream):
            result = function()
        current_stream.wait_stream(self._stream)
        return result

    def capture(self, function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], object]]:
        """Capture a function, without running it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            result = function()
        return result, graph.replay


@dataclass(slots=True)
class _Captured:
    """A captured step: its memory, and the call that computes it."""

    batch: Any
    weights: torch.Tensor | None
    loss: torch.Tensor
    outputs: Any
    parts: dict[str, torch.Tensor]
    gradients: list[tuple[torch.Tensor, torch.Tensor]]
    replay: Callable[[], object]


class CudaGraphStep:
    """A training step that captures forward and backward pass as a CUDA graph for each shape of batches.

    A small model waits for the host to launch kernels; a replay launches all of them at once. Optimizers and
    gradient clipping run as usual, with foreach or fused kernels. The first `warmup_steps` batches of a shape
    run without a graph. Up to `max_graphs` shapes get a graph; batches of further shapes run without one, and
    a warning is logged once. To avoid this, drop the short last batch (`drop_last=True`) and pad sequences to
    one length.

    No Python runs within a graph. So nothing may listen to the events from `BEFORE_FORWARD` to
    `AFTER_BACKWARD`, the model may not branch on values on the device or measure training metrics, and there
    must be only one rank. Random numbers of torch's own generator, such as dropout's, differ in each replay
    as they should.

    Args:
        inner: The standard step.
        warmup_steps: Batches of a shape that run before its capture.
        max_graphs: Maximum number of captured shapes, each of which takes memory.
        recorder: Captures the passes; None for CUDA graphs.

    Raises:
        TrainerConfigError: If the device is not a CUDA device, or a part of the run cannot be captured.
    """

    def __init__(
        self,
        inner: StandardStep,
        *,
        warmup_steps: int = 3,
        max_graphs: int = 2,
        recorder: GraphRecorder | None = None,
    ) -> None:
        self.inner = inner
        self.warmup_steps = max(warmup_steps, 1)
        self.max_graphs = max_graphs
        self.num_replays = 0
        """Number of steps that were computed by a graph."""
        self._recorder = CudaRecorder(inner.context.state.device) if recorder is None else recorder
        self._seen: dict[Any, int] = {}
        self._captured: dict[Any, _Captured] = {}
        self._is_told = False

    def compute_gradients(self, batch: Any) -> torch.Tensor:
        """See `TrainStep`."""
        context = self.inner.context
        self._check()
        facts = context.facts
        assert facts is not None
        weights = _weights(facts, context.state.device)
        shapes = tuple(
            (path, tuple(tensor.shape), tensor.dtype)
            for path, tensor in leaves(batch)
            if isinstance(tensor, torch.Tensor)
        )
        key = (shapes, facts.samples, weights is None, context.state.device_train_microbatch_size)
        if (captured := self._captured.get(key)) is None:
            num_seen = self._seen.get(key, 0)
            if num_seen < self.warmup_steps or len(self._captured) == self.max_graphs:
                return self._run_plainly(batch, key, num_seen)
            self._captured[key] = captured = self._capture(batch, weights, facts)
        return self._replay(captured, batch, weights)

    def update(self) -> None:
        """See `TrainStep`."""
        self.inner.update()

    def _run_plainly(self, batch: Any, key: Any, num_seen: int) -> torch.Tensor:
        self.inner.clear_gradients()
        if num_seen >= self.warmup_steps:
            if not self._is_told:
                self._is_told = True
                _log.warning(
                    "batches come in more than %d shapes, and those beyond run without a CUDA graph; use "
                    "`drop_last=True` and pad to one length, or raise `max_graphs`",
                    self.max_graphs,
                )
            return self.inner.compute_gradients(batch)
        self._seen[key] = num_seen + 1
        return self._recorder.warm_up(lambda: self.inner.compute_gradients(batch))

    def _capture(self, batch: Any, weights: torch.Tensor | None, facts: DeviceBatch) -> _Captured:
        context = self.inner.context
        state = context.state
        static_batch = map_tensors(torch.clone, batch)
        static_weights = None if weights is None else weights.clone()
        self.inner.clear_gradients()

        def run() -> torch.Tensor:
            context.facts = replace(facts, batch=static_batch, weights=static_weights)
            state.batch = static_batch
            return self.inner.compute_gradients(static_batch)

        try:
            loss, replay = self._recorder.capture(run)
        finally:
            context.facts, state.batch = facts, batch
        parameters = [
            parameter
            for optimizer in state.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        parameters += context.unoptimized
        gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        return _Captured(
            static_batch,
            static_weights,
            loss,
            state.outputs,
            dict(context.loss_parts.sums),
            gradients,
            replay,
        )

    def _replay(self, captured: _Captured, batch: Any, weights: torch.Tensor | None) -> torch.Tensor:
        context = self.inner.context
        state = context.state
        for target, source in zip(tensors(captured.batch), tensors(batch), strict=True):
            target.copy_(source, non_blocking=True)
        if captured.weights is not None and weights is not None:
            captured.weights.copy_(weights, non_blocking=True)
        captured.replay()
        self.num_replays += 1
        for parameter, gradient in captured.gradients:
            parameter.grad = gradient
        # Copies, because the next replay writes into the same memory. On one rank, its mean is the total.
        context.mean = None
        context.loss_parts.sums = {name: part.clone() for name, part in captured.parts.items()}
        state.outputs = captured.outputs
        state.loss = loss = captured.loss.detach().clone()
        return loss

    def _check(self) -> None:
        context = self.inner.context
        reason = None
        if context.state.parallelism.world_size > 1:
            reason = "there are several ranks, and it captures no collectives"
        elif context.train_metrics is not None:
            reason = "the model measures training metrics, which are Python (`get_metrics(is_train=True)`)"
        elif listeners := [one for name in _IN_STEP for one in getattr(context.engine.on, name)]:
            reason = f"`{listeners[0].name}` listens to an event within the step, where no Python runs"
        if reason is not None:
            raise TrainerConfigError(f"`CudaGraphStep` cannot capture this step: {reason}; leave it out")


def _weights(facts: DeviceBatch, device: torch.device) -> torch.Tensor | None:
    """Return the rows' loss weights on the device, where they differ between batches; None if each is 1."""
    weights = facts.weights
    if weights is None or isinstance(weights, torch.Tensor):
        return None if weights is None else weights.to(device, torch.float32)
    return torch.tensor(list(weights), dtype=torch.float32, device="cpu").to(device, non_blocking=True)
