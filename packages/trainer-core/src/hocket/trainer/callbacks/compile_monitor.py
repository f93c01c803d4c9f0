"""A callback that reports recompilations of a compiled model."""

from __future__ import annotations

import logging
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hocket.trainer.callback import Callback
from hocket.trainer.data.batch_tree import tensors
from hocket.trainer.log.logger import Logger

if TYPE_CHECKING:
    from hocket.trainer.state import State

log = logging.getLogger(__name__)


class CompileMonitor(Callback):
    """Warns when `torch.compile` compiles again in the middle of training, and names what has changed.

    A compilation takes seconds to minutes. The model is compiled again when an algorithm replaces a module,
    when a batch has a new shape, or when a Python value that the code reads has changed. Each time,
    `compile/count` (compilations so far) and `compile/seconds` (of that batch) are logged.

    Attributes:
        num_compilations: Number of compilations so far.
        messages: The warnings so far.
    """

    reads_outputs = False
    metric_units = MappingProxyType({"compile/seconds": "seconds"})

    def __init__(self) -> None:
        self.num_compilations = 0
        self.messages: list[str] = []
        self._seen = 0
        self._seconds = 0.0
        self._started_s = 0.0
        self._modules: dict[str, str] = {}
        self._shapes: list[str] = []
        self._is_listening = False

    def fit_start(self, state: State, logger: Logger) -> None:
        """Register the callbacks of the compiler."""
        if not self._is_listening:
            handler = _compiler_callbacks()
            handler.register_start_callback(self._start)
            handler.register_end_callback(self._end)
            self._is_listening = True

    def batch_end(self, state: State, logger: Logger) -> None:
        """Report compilations of this batch, from the second batch with one on."""
        if self.num_compilations == self._seen:
            return
        is_first, self._seen = self._seen == 0, self.num_compilations
        modules = {name: type(module).__name__ for name, module in state.model.named_modules()}
        shapes = [str(tuple(tensor.shape)) for tensor in tensors(state.batch)]
        batch = state.timestamp.counts.batch
        logger.log_metrics({"compile/count": self._seen, "compile/seconds": self._seconds})
        if not is_first:
            message = (
                f"the model was compiled again in batch {batch}, which took {self._seconds:.1f} s: "
                f"{self._reason(modules, shapes)}"
            )
            self.messages.append(message)
            log.warning(message)
        self._modules, self._shapes, self._seconds = modules, shapes, 0.0

    def close(self, state: State, logger: Logger) -> None:
        """Remove the callbacks of the compiler."""
        if self._is_listening:
            handler = _compiler_callbacks()
            handler.remove_start_callback(self._start)
            handler.remove_end_callback(self._end)
            self._is_listening = False

    def _reason(self, modules: dict[str, str], shapes: list[str]) -> str:
        changed = [
            f"`{name}` from `{self._modules.get(name, 'nothing')}` to `{modules.get(name, 'nothing')}`"
            for name in dict.fromkeys([*modules, *self._modules])
            if self._modules.get(name) != modules.get(name)
        ]
        if changed:
            return f"modules changed ({', '.join(changed[:5])})"
        if shapes != self._shapes:
            return f"the batch has the shapes {', '.join(shapes)} instead of {', '.join(self._shapes)}"
        return "run with `TORCH_LOGS=recompiles` to see which value has changed"

    def _start(self, *_: Any) -> None:
        self._started_s = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.num_compilations += 1
        self._seconds += time.perf_counter() - self._started_s


def _compiler_callbacks() -> Any:
    # torch has no other way to observe compilations; this module exists in every torch from 2.9 on.
    from torch._dynamo.callback import callback_handler

    return callback_handler
