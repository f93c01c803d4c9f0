"""What the trainer asks of its parts. They are met by shape; nobody has to import them.

Each has at most five methods. Implementations, ours or a user's, are held to them by the suites in
`hocket.trainer.testing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

StateTree = dict[str, Any]
"""Nested dicts and lists; leaves: tensors (plain or sharded), None, bool, int, float, str, tuple, bytes."""


@runtime_checkable
class Stateful(Protocol):
    """Whatever keeps something between steps: data sets, loaders, callbacks, algorithms, schedules."""

    def state_dict(self) -> dict[str, Any]:
        """All that it needs to go on from here."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class Work(Protocol):
    """A reduction under way."""

    def wait(self) -> torch.Tensor:
        """Wait for it, and return the sums; may be called from any thread, and more than once."""


class Parallelism(Protocol):
    """How the model and its gradients are spread over processes.

    Gradients are averaged over the data-parallel ranks; the trainer weights losses accordingly.

    Attributes:
        data_parallel: This process's rank among the data-parallel ones, and how many there are.
    """

    data_parallel: tuple[int, int]

    def lay_out(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        """Put the model on its devices, sharded or replicated, and return the module that the loop calls.

        Collective. Optimizers are given the new parameters in place, by name, with their groups.
        """

    def sync_gradients(self, model: nn.Module, when: bool) -> None:
        """Say whether the coming backward passes reduce gradients; they do until told otherwise."""

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scale gradients down to a global norm of `max_norm`; return the norm before, `()`. Collective."""

    def reduce_async(self, values: torch.Tensor) -> Work:
        """Begin to sum `values` over the data-parallel ranks; it returns at once, and nobody else waits.

        `values` is a one-dimensional float64 CPU tensor, or a tensor on the device. Collective: every rank
        makes the same calls in the same order.
        """


class SaveHandle(Protocol):
    """A save under way.

    Attributes:
        name: The checkpoint's name in its store.
    """

    name: str

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint is committed; raises what the save raised, or `TimeoutError`."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""


class Loaded(Protocol):
    """What `CheckpointStore.load` found.

    Attributes:
        name: The checkpoint's name.
        step: The step it was saved with.
        state: The tree it was loaded into, its tensors filled in place, its other leaves replaced.
        user: What was attached to it.
        per_rank: What this rank gave when saving; None when the number of ranks differs.
    """

    name: str
    step: int
    state: StateTree
    user: Any
    per_rank: dict[str, Any] | None


class Entry(Protocol):
    """A checkpoint in a listing.

    Attributes:
        name: Its name in the store.
        uri: Where it is.
        step: The step it was saved with; None when it is not committed.
        status: `"committed"`, `"partial"` (a save that did not end) or `"foreign"` (no checkpoint of ours).
    """

    name: str
    uri: str
    step: int | None
    status: str


class CheckpointStore(Protocol):
    """Where checkpoints of one run are kept. Every method is called on every rank."""

    def save(
        self,
        state: StateTree,
        *,
        step: int,
        name: str | None = None,
        per_rank: Mapping[str, Any] | None = None,
        user: Any = None,
        mode: Literal["sync", "async"] = "sync",
    ) -> SaveHandle:
        """Save `state` as the checkpoint `name`; with `"async"`, return when its tensors may change again."""

    def load(
        self,
        source: str,
        into: StateTree,
        *,
        strict: bool = True,
        include: Sequence[str] | None = None,
    ) -> Loaded:
        """Load the checkpoint named `source`, or at that URI or path, into the tensors of `into`."""

    def list(self) -> Sequence[Entry]:
        """The checkpoints in the store, the newest last."""

    def delete(self, step: int) -> None:
        """Remove the checkpoints of that step."""
