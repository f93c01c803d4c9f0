"""What the trainer asks of its parts. They are met by shape; nobody has to import them.

Each has at most five methods. Implementations, ours or a user's, are held to them by the suites in
`hocket.trainer.testing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        """Return all that the object needs to continue from here."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class Work(Protocol):
    """A reduction under way."""

    def wait(self) -> torch.Tensor:
        """Wait for it, and return the sums; may be called from any thread, and more than once."""


GradientSync = Literal["every", "last", "replicas_last"]
"""When gradients are synchronised while microbatches accumulate.

`"every"`: in each backward pass, which needs the least memory. `"last"`: in the last one, which sends least
and holds whole gradients in between. `"replicas_last"`: sharded in each, between the copies of a shard in
the last.
"""


class Layout(Protocol):
    """How a model and its gradients are laid out over processes.

    Gradients are averaged over the data-parallel ranks; the trainer weights losses accordingly.

    Attributes:
        device: The device of this process.
    """

    device: torch.device

    def lay_out(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        """Put the model on its devices, sharded or replicated, and return the module that the loop calls.

        Collective. Optimizers are given the new parameters in place, by name, with their groups.
        """

    def sync_gradients(self, model: nn.Module, when: bool) -> None:
        """State whether the coming backward passes are the last of a batch; they are until stated otherwise.

        Args:
            model: The return value of `lay_out`.
            when: True for the last microbatch. Gradients are whole after its backward pass; whether earlier
                passes synchronise too is the layout's policy, a `GradientSync`.
        """

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scale gradients down to a global norm of `max_norm`; return the norm before, `()`. Collective."""

    def describe(self) -> str:
        """Return the layout in one line."""


class Collectives(Protocol):
    """The exchanges between the processes of a job.

    Attributes:
        data_parallel: This process's rank among the data-parallel ones, and how many there are.
        global_rank: This process's rank among all.
        world_size: The number of processes.
    """

    data_parallel: tuple[int, int]

    @property
    def global_rank(self) -> int:
        """The rank among all processes."""

    @property
    def world_size(self) -> int:
        """The number of processes."""

    def reduce_async(self, values: torch.Tensor) -> Work:
        """Start a sum of `values` over the data-parallel ranks and return at once.

        `values` is a one-dimensional float64 CPU tensor, or a tensor on the device. Collective: every rank
        makes the same calls in the same order.
        """

    def close(self) -> None:
        """Leave the process group, if it was joined here. A second call does nothing."""


class Parallelism(Layout, Collectives, Protocol):
    """How the model is spread over processes: its layout, and their exchanges."""


class ProvidesParallelism(Protocol):
    """The entry point `parallelism` of the group `hocket.providers`."""

    def __call__(
        self,
        config: Any,
        *,
        device: torch.device,
        timeout_s: float,
        precision: str | None,
        find_unused_parameters: bool = False,
        gradient_sync: GradientSync | None = None,
    ) -> Parallelism:
        """Join the other ranks and return the layout that `config` asks for. Collective.

        Args:
            config: The user's `fsdp_config` or `parallelism_config`; None replicates the model.
            device: The device of training.
            timeout_s: Seconds to wait for absent ranks, and for each collective afterwards.
            precision: The trainer's, from which the precision of communication follows.
            find_unused_parameters: Whether backward passes may leave parameters unused.
            gradient_sync: When gradients are synchronised; None for what suits the layout.
        """


@runtime_checkable
class TrainStep(Protocol):
    """One update of the model. The loop calls `compute_gradients` and then `update` for each batch."""

    def compute_gradients(self, batch: Any) -> torch.Tensor:
        """Leave the gradients of the batch's mean loss in the parameters, replacing earlier ones.

        May be called several times before `update`. Collective: every rank calls it equally often.

        Args:
            batch: This rank's whole batch, on the device.

        Returns:
            The mean loss over this rank's batch, a scalar on the device without gradients.
        """

    def update(self) -> None:
        """Step the optimizers with the gradients that are there, and clear the gradients."""


@runtime_checkable
class DataPlan(Protocol):
    """A loader that divides the data of the whole job by itself; its position is the same on every rank.

    Attributes:
        data_parallel: The rank that it serves, and the number of ranks.
    """

    data_parallel: tuple[int, int]

    def batch_share(self) -> tuple[int, int]:
        """Return the rows of the last batch with a share in the global batch, and the global batch's rows.

        Rows beyond the share keep the rank in step with the others and weigh nothing.
        """


class SlotsLike(Protocol):
    """A leaf of a state tree in place of the state of an optimizer that has not stepped.

    A checkpoint store fills it with slots made from the checkpoint, laid out as their parameters are.

    Attributes:
        slots_like: The parameters by name.
    """

    @property
    def slots_like(self) -> Mapping[str, torch.Tensor]:
        """The parameters by name."""


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
        overwrite: bool = False,
    ) -> SaveHandle:
        """Save `state` as the checkpoint `name`; with `"async"`, return when its tensors may change again.

        With `overwrite`, it replaces a checkpoint of that name; else one that exists is an error.
        """

    def load(
        self,
        source: str,
        into: StateTree,
        *,
        strict: bool = True,
        include: Sequence[str] | None = None,
        ignore: Sequence[str] | None = None,
    ) -> Loaded:
        """Load the checkpoint named `source`, or at that URI or path, into the tensors of `into`.

        With `strict`, a name that only one side has is an error, but for names of the checkpoint that match
        one of the globs in `ignore`. A name is the keys on the way, joined by `.`.
        """

    def list(self) -> Sequence[Entry]:
        """The checkpoints in the store, the newest last."""

    def delete(self, step: int) -> None:
        """Remove the checkpoints of that step."""


class ForeignTensors(Protocol):
    """The tensors of a checkpoint of another program; iterates over their names.

    Attributes:
        format: The format in words.
    """

    format: str

    def __iter__(self) -> Iterator[str]: ...

    def record(self, name: str) -> Any:
        """Return an object with the global `shape` of a tensor."""

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read tensors in place, by their names in the checkpoint."""


@runtime_checkable
class ReadsForeign(Protocol):
    """A checkpoint store that reads checkpoints of other programs, too."""

    def foreign_weights(self, source: str) -> ForeignTensors | None:
        """Open a checkpoint of another program; None for one of the store's own format."""


class ProvidesCheckpoints(Protocol):
    """The entry point `checkpoints` of the group `hocket.providers`."""

    def __call__(
        self,
        uri: str,
        *,
        keep_last: int | None = None,
        timeout_s: float | None = None,
        retention: Sequence[Any] = (),
    ) -> CheckpointStore:
        """Open the checkpoints of a run.

        Args:
            uri: A folder or an object prefix.
            keep_last: How many of the newest checkpoints stay; None for all.
            timeout_s: Seconds to wait for other ranks.
            retention: Further policies of the package; a checkpoint stays if one of them keeps it.
        """
