"""`Parts`: the parts of a run, wired together, and the changes that `fit` makes to them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from hocket.trainer.checkpoint.checkpointing import Checkpointer
from hocket.trainer.checkpoint.registry import Part
from hocket.trainer.checkpoint.run_state import RunState
from hocket.trainer.data.train_loader import TrainLoader
from hocket.trainer.engine.engine import Engine
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.evaluation.evaluation import EvaluationLoop
from hocket.trainer.log.logger import Logger
from hocket.trainer.precision import Precision
from hocket.trainer.process.clock import TrainingClock
from hocket.trainer.process.providers import find_provider
from hocket.trainer.protocols import CheckpointStore
from hocket.trainer.ranks.step_sync import StepSync
from hocket.trainer.setup.arguments import check_microbatch_size
from hocket.trainer.setup.settings import DataConfig, TrainerConfig
from hocket.trainer.state import State
from hocket.trainer.step.microbatch_search import MicrobatchSearch
from hocket.trainer.step.microbatch_step import AutoMicrobatchStep
from hocket.trainer.step.step import StepContext


@dataclass(frozen=True, slots=True, kw_only=True)
class PartClasses:
    """The classes of a trainer's parts, for a subclass of `Trainer` that extends them."""

    state: type[State] = State
    engine: type[Engine] = Engine
    logger: type[Logger] = Logger


@dataclass(slots=True, kw_only=True)
class Parts:
    """The parts of a run, wired together."""

    config: TrainerConfig
    data: DataConfig
    """The arguments about the training data, with those of the calls of `fit`."""
    sync: StepSync
    state: State
    logger: Logger
    engine: Engine
    precision: Precision
    context: StepContext
    run_state: RunState
    evaluation: EvaluationLoop
    checkpointer: Checkpointer | None
    clock: TrainingClock = field(default_factory=TrainingClock)
    loader: TrainLoader | None = None
    data_source: str = ""
    """The source of the data's rank and world size, in words."""
    notices: list[str] = field(default_factory=list)
    """Sentences for the user, printed when `fit` starts."""
    is_own_checkpoint: bool = False
    """Whether the run continues from a checkpoint that `autoresume` found."""
    store: CheckpointStore | None = None
    """The store of `save_folder`, or of the folder that contains `load_path`."""
    auto_step: AutoMicrobatchStep | None = None
    """The step that finds the microbatch size; None if the size is fixed."""
    microbatch_limit: int | None = None
    """The most samples in a microbatch, after an attempt that ran out of memory."""

    def set_precision(self, name: str) -> None:
        """Compute in another precision from here on.

        Raises:
            TrainerConfigError: If the name is unknown, or the model is sharded, which fixes the precision.
        """
        state = self.state
        if name == state.precision:
            return
        if any(hasattr(parameter, "device_mesh") for parameter in state.model.parameters()):
            raise TrainerConfigError(
                f"the model was sharded for `{state.precision}`, which fixes the precision of what ranks "
                f"exchange; pass `precision='{name}'` to `Trainer`"
            )
        self.precision.change(name)
        state.precision = name

    def set_microbatch_size(self, given: Any) -> None:
        """Set a microbatch size, or search for one before the next step.

        Raises:
            TrainerConfigError: If `given` is neither a size nor a search.
        """
        check_microbatch_size(given)
        search = MicrobatchSearch.of(given)
        self.state.device_train_microbatch_size = None if search is not None else given
        if self.auto_step is not None:
            self.auto_step.start(search)
        elif search is not None:
            self.state.train_step = self.auto_step = AutoMicrobatchStep(
                self.state.train_step, self.context, search, self.sync, self.logger
            )

    def keep_found_size(self) -> None:
        """Register the size that was found for checkpoints; a run on as many ranks reuses it."""
        num_ranks = self.sync.num_ranks

        def save() -> dict[str, int]:
            size = None if self.auto_step is None else self.auto_step.found
            return {} if size is None else {"size": size, "num_ranks": num_ranks}

        def load(found: Mapping[str, int]) -> None:
            if self.auto_step is not None and found.get("num_ranks") == num_ranks:
                self.auto_step.remembered = found["size"]

        self.run_state.registry.add(
            Part(name="microbatch_search", save=save, load=load, placement="rank_zero")
        )

    def save_once(self, name: str, *, weights_only: bool) -> None:
        """Save one checkpoint at a path, or under a name in the store, and wait for it. Collective.

        Raises:
            TrainerConfigError: If a batch was fetched ahead that the checkpoint cannot restore.
        """
        if not weights_only and not self.run_state.can_save():
            raise TrainerConfigError(
                "a batch was fetched ahead, which a checkpoint could not give back; save after `fit`, use "
                "`save_checkpoint_to_save_folder`, or `weights_only=True`"
            )
        folder, _, stem = name.rpartition("/")
        with ExitStack() as exit_stack:
            store = self.store
            if folder or store is None:
                provide = find_provider("checkpoints", asked_by="`save_checkpoint`")
                store = provide(folder or ".", timeout_s=self.config.parallel.dist_timeout)
                own(store, exit_stack)
            checkpointer = Checkpointer(
                store, self.run_state, self.state, save_filename=stem, weights_only=weights_only
            )
            checkpointer.save()

    def save_soon(self) -> None:
        """Save in `save_folder`, now or at the next step boundary of a fit. Collective.

        Raises:
            TrainerConfigError: If there is no `save_folder`.
        """
        checkpointer = self.checkpointer
        if checkpointer is None and self.config.trial.num_batches is not None:
            return  # a `fast_dev_run` saves nothing
        if checkpointer is None:
            raise TrainerConfigError(
                "there is no `save_folder` to save in; set it, or use `save_checkpoint(path)`"
            )
        if self.run_state.can_save():
            checkpointer.save()
        else:
            checkpointer.request_save()


def own(part: Any, made: ExitStack) -> None:
    """Register the `close` method of a part, if it has one, with `made`."""
    if hasattr(part, "close"):
        made.callback(part.close)
