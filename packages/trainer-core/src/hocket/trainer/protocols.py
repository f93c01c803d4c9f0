"""The protocols of the trainer's parts, which an implementation meets by structure, without an import.

Each protocol has at most five methods. The suites in `hocket.trainer.testing` check implementations, ours or
a user's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

StateTree = dict[str, Any]
"""Nested dicts and lists of tensors (plain or sharded), None, bool, int, float, str, tuple and bytes."""


@runtime_checkable
class Stateful(Protocol):
    """An object with a state between steps: a data set, loader, callback, algorithm or schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which the object can continue."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""


class Work(Protocol):
    """An all-reduce in progress."""

    def wait(self) -> torch.Tensor:
        """Wait for the all-reduce and return the sums; callable from any thread, and more than once."""


GradientSync = Literal["every", "last", "replicas_last"]
"""The backward passes that synchronise gradients during gradient accumulation.

`"every"`: each pass, which needs the least memory. `"last"`: the last pass, which sends the least data and
holds unsharded gradients until then. `"replicas_last"`: each pass among the shards of one replica, and the
last pass between replicas.
"""


class Layout(Protocol):
    """The layout of a model and its gradients over processes.

    Gradients are averaged over the data-parallel ranks; the trainer weights losses accordingly.

    Attributes:
        device: The device of this process.
    """

    device: torch.device

    def lay_out(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        """Put the model on its devices, sharded or replicated, and return the module that the loop calls.

        Collective. The new parameters replace the old ones in the optimizers, by name and in their groups.
        """

    def sync_gradients(self, model: nn.Module, when: bool) -> None:
        """Set whether the next backward passes are the last of a batch; without a call, they are.

        Args:
            model: The return value of `lay_out`.
            when: True for the last microbatch, after whose backward pass the gradients are complete. Whether
                earlier passes synchronise too is the layout's policy, a `GradientSync`.
        """

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scale gradients down to a global norm of `max_norm`; return the norm before, `()`. Collective."""

    def describe(self) -> str:
        """Return the layout in one line."""


class Collectives(Protocol):
    """The exchanges between the processes of a job.

    Attributes:
        data_parallel: This process's data-parallel rank, and the number of data-parallel ranks.
        global_rank: This process's rank among all processes.
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

        A parallelism with fewer data-parallel ranks than processes also has `reduce_all_async`, the same sum
        over all processes; one that cannot generate with every model has
        `check_generation(has_cache=…)`, and one whose ranks can differ in the loss of data that they share
        `check_loss(loss)`, which refuse. One that compares what its first passes compute has
        `compare_uncompiled(forward)`, called before the batches of a compiled model: it calls `forward` for
        an uncompiled pass if the comparison is due, and returns whether it may be due again.
        """

    def close(self) -> None:
        """Leave the process group, if this object joined it. A second call does nothing."""


class Parallelism(Layout, Collectives, Protocol):
    """The distribution of the model over processes: its layout, and the exchanges between processes."""


@runtime_checkable
class Pipelined(Protocol):
    """The further parts of a parallelism that has the model in stages, one on each rank.

    A run with one gives `peers` also to `save` and `load` of its `CheckpointStore`, since ranks have other
    trees.

    Attributes:
        peers: The ranks that have this rank's stage.
        group_names: The names of the parameters of all stages in each group of each optimizer.
        elsewhere: The names of the parameters that only other stages have.
        ties: For each later name of a weight that is tied over two stages its first name.
    """

    peers: Sequence[int]
    group_names: Sequence[Sequence[Sequence[str]]]
    elsewhere: Sequence[str]
    ties: Mapping[str, str]

    def is_own(self, name: str) -> bool:
        """Return whether this rank's stage saves an entry of the model's state.

        It does not save buffers of other stages, nor a weight of its own that another stage has and saves.
        """

    def agree_on_buffers(self, reshaped: Collection[str]) -> list[str]:
        """Let all ranks know which stage changes each buffer; called before each save. Collective.

        It returns the names of reshaped buffers that any stage gives.
        """

    def check_microbatches(self, count: int) -> None:
        """Refuse a number of microbatches in a batch that the schedule of the stages does not take."""

    def skip_blocks(self) -> AbstractContextManager[None]:
        """Let forward passes skip what is in stages: outputs have the right shapes and the wrong values."""

    def check_skipped(self, results: Any) -> torch.Tensor:
        """Refuse a model that cannot be cut, by the results of a pass; return one like the activations."""

    def run_pipeline(
        self,
        microbatches: Sequence[Any],
        activations: torch.Tensor,
        loss_of: Callable[[Any, int], torch.Tensor],
        forward_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Run both passes on microbatches; the last stage calls `loss_of(outputs, index)`. Collective."""

    def tell_from_last(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of the last stage on every rank. Collective."""


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
        model: Any = None,
    ) -> Parallelism:
        """Join the other ranks and return the layout that `config` states. Collective.

        Args:
            config: The user's `fsdp_config` or `parallelism_config`; None replicates the model.
            device: The device of training.
            timeout_s: Seconds to wait for absent ranks, and for each collective afterwards.
            precision: The trainer's precision, which determines the precision of communication.
            find_unused_parameters: Whether backward passes may leave parameters unused.
            gradient_sync: The passes that synchronise gradients; None for the default of the layout.
            model: The model if its parameters are sharded already; without a config it is taken as it is.
        """


@runtime_checkable
class TrainStep(Protocol):
    """One update of the model. The loop calls `compute_gradients` and then `update` for each batch."""

    def compute_gradients(self, batch: Any) -> torch.Tensor:
        """Set the gradients of the parameters to those of the batch's mean loss.

        May be called several times before `update`. Collective: every rank calls it equally often.

        Args:
            batch: This rank's whole batch, on the device.

        Returns:
            The mean loss over this rank's batch, a scalar on the device without gradients.
        """

    def update(self) -> None:
        """Step the optimizers with the present gradients, and clear the gradients."""


@runtime_checkable
class DataPlan(Protocol):
    """A loader that divides the data of the whole job itself; its position is the same on every rank.

    Attributes:
        data_parallel: The rank that the loader serves, and the number of ranks.
    """

    data_parallel: tuple[int, int]

    def batch_share(self) -> tuple[int, int]:
        """Return the number of rows of the last batch that count, and the rows of its global batch.

        Further rows of the batch keep the rank in step with the other ranks and have weight 0.
        """


@runtime_checkable
class FollowsRanks(Protocol):
    """A loader or data set that divides its data by numbers which it found itself, and takes better ones.

    Processes that share a sample, as in tensor parallelism, are known to the parallelism alone.
    """

    def follow_ranks(self, rank: int, num_ranks: int) -> None:
        """Serve this data-parallel rank of so many; do nothing if the user has given other numbers."""


@runtime_checkable
class EndsEpochs(Protocol):
    """A loader with a state whose epochs the trainer may end early, as `train_subset_num_batches` does.

    A loader whose next iteration is of the next epoch in any case needs this method to say so in its state.
    """

    def end_epoch(self) -> None:
        """Move to the start of the next epoch; called at most once in an epoch, after its last batch."""


class SlotsLike(Protocol):
    """A leaf of a state tree in place of the state of an optimizer that has not stepped, or of averages.

    A checkpoint store replaces it with slots from the checkpoint, with the layout of their parameters: a dict
    that has, for each parameter that the checkpoint has, a dict of slots, or a tensor where it has a tensor.

    Attributes:
        slots_like: The parameters by name.
    """

    @property
    def slots_like(self) -> Mapping[str, torch.Tensor]:
        """The parameters by name."""


class OpenMapping(Protocol):
    """A mapping of a state tree to load into, of which some keys take what the checkpoint has.

    At these keys, a tensor of another shape or dtype and an entry that the mapping lacks become new tensors.
    An empty one may be absent from the checkpoint.

    Attributes:
        open_names: The keys that take what the checkpoint has.
        layouts: Tensors by key; a new tensor below such a key is laid out like it if the shapes are equal.
    """

    open_names: Container[object]
    layouts: Mapping[Any, torch.Tensor]


class SaveHandle(Protocol):
    """A save in progress.

    Attributes:
        name: The checkpoint's name in its store.
    """

    name: str

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint is committed; raise the error of the save, or `TimeoutError`."""

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error."""


class Loaded(Protocol):
    """The result of `CheckpointStore.load`.

    Attributes:
        name: The checkpoint's name.
        step: The step of the checkpoint.
        state: The tree that was loaded into, with its tensors filled in place and its other leaves replaced.
        user: The `user` value of the save.
        per_rank: The `per_rank` values that this rank saved; None if the number of ranks differs.
    """

    name: str
    step: int
    state: StateTree
    user: Any
    per_rank: dict[str, Any] | None


class Entry(Protocol):
    """A checkpoint in a listing.

    An entry may also have a `problem`: the reason why a checkpoint cannot be read, in words, else None. A run
    that resumes from another checkpoint then says so.

    Attributes:
        name: The checkpoint's name in the store.
        uri: The checkpoint's URI.
        step: The step of the checkpoint; None if it is not committed.
        status: `"committed"`, `"partial"` (a save that did not end) or `"foreign"` (no checkpoint of ours).
    """

    name: str
    uri: str
    step: int | None
    status: str


class CheckpointStore(Protocol):
    """A store of one run's checkpoints. Every method is called on every rank."""

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

        With `overwrite`, the save replaces a checkpoint of that name; else an existing one is an error.
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

        A leaf of `into` may be a `SlotsLike`, and a mapping an `OpenMapping`. With `strict`, a name that only
        one side has is an error, except names of the checkpoint that match one of the globs in `ignore`. A
        name is the path of keys in the tree, joined by `.`.
        """

    def list(self) -> Sequence[Entry]:
        """Return the checkpoints in the store, the newest last."""

    def delete(self, step: int) -> None:
        """Delete the checkpoints of a step."""


class ForeignTensors(Protocol):
    """The tensors of a checkpoint of another program; an iteration yields their names.

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
    """A checkpoint store that also reads checkpoints of other programs."""

    def foreign_weights(self, source: str) -> ForeignTensors | None:
        """Open a checkpoint of another program; return None for one in the store's own format."""


class ProvidesCheckpoints(Protocol):
    """The entry point `checkpoints` of the group `hocket.providers`."""

    def __call__(
        self,
        uri: str,
        *,
        keep_last: int | None = None,
        timeout_s: float | None = None,
        retention: Sequence[Any] = (),
        for_saving: bool = False,
        per_host: bool = False,
    ) -> CheckpointStore:
        """Open the checkpoints of a run.

        Args:
            uri: A folder or an object prefix.
            keep_last: Number of the newest checkpoints to keep; None for all.
            timeout_s: Seconds to wait for other ranks.
            retention: Further policies of the package; a checkpoint is kept if any policy keeps it.
            for_saving: Whether checkpoints will be saved there; a place that cannot be written to is refused.
            per_host: Whether each machine has a folder of its own at `uri`. The store keeps the newest
                checkpoint there, also if any one machine is lost. Its attribute `problem`, if there is one,
                says why what was found there cannot be loaded.
        """
