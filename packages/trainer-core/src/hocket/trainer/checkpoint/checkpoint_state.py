"""The state of a run in a checkpoint: collecting it, and continuing a run from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hocket.trainer.checkpoint.loader_position import LoaderPosition
from hocket.trainer.checkpoint.model_state import (
    RESHAPED,
    buffer_shapes,
    loads_itself,
    model_state,
    model_state_to_fill,
    take_model_state,
    tied_names,
)
from hocket.trainer.checkpoint.optimizer_state import (
    optimizer_state,
    optimizer_state_to_fill,
    take_optimizer_state,
    with_all_names,
    with_own_names,
    without_slots,
)
from hocket.trainer.checkpoint.registry import (
    CheckpointEntry,
    StateRegistry,
    give_states,
    has_tensors,
    named,
    states_of,
)
from hocket.trainer.checkpoint.state_guard import StateGuard
from hocket.trainer.checkpoint.tree_filter import without_loaded
from hocket.trainer.data.train_loader import TrainLoader
from hocket.trainer.errors import ResumeError, TrainerConfigError
from hocket.trainer.optim.parameter_names import plain_name
from hocket.trainer.optim.torch_schedulers import set_rate
from hocket.trainer.precision import Precision
from hocket.trainer.process.rng import capture_rng, reseed, restore_rng
from hocket.trainer.protocols import Loaded, Pipelined, StateTree
from hocket.trainer.state import State
from hocket.trainer.timestamp import Timestamp

WEIGHTS_ONLY = ("model", "timestamp", "run_name", "seed")
"""The parts of a weights-only checkpoint."""


class CheckpointState:
    """The state of a run for a checkpoint, collected for a save and restored after a load.

    Shared by all ranks: the model, optimizers, time, callbacks and algorithms, and the loader's position if
    the loader has a plan for the whole job (an attribute `data_parallel`) or the job is one process.

    Per rank: the random generators, the position of any other loader, and, on several ranks, each rank's own
    state of callbacks and algorithms, which may differ. A run on another number of ranks uses the state of
    rank 0 for callbacks and algorithms.

    Args:
        state: The state of the run.
        precision: The precision, whose gradient scale is saved.
        keeps_run_name: Whether the run keeps its own name when it continues from a checkpoint.
    """

    def __init__(self, state: State, precision: Precision, *, keeps_run_name: bool = False) -> None:
        self._state = state
        self._precision = precision
        self._keeps_run_name = keeps_run_name
        self.destinations: Sequence[Any] = ()
        """The logger destinations of this rank."""
        self.loader: TrainLoader | None = None
        self._loaded_position: LoaderPosition | None = None
        self._loaded_schedulers: dict[str, Any] = {}
        self._positioned: tuple[TrainLoader, bool] | None = None
        self._position = LoaderPosition()
        self._name = ""
        self._optimizer_notices: list[str] = []
        self._first_shapes = buffer_shapes(state.model)
        self._reshaped: Sequence[str] = ()
        self.guard = StateGuard(state)
        """Finds what checkpoints would lack."""
        self.registry = StateRegistry()
        self._register()

    def _register(self) -> None:
        state, add = self._state, self.registry.add
        add(
            CheckpointEntry(
                name="model",
                save=lambda: model_state(state.model),
                load=self._take_model,
                to_fill=lambda: model_state_to_fill(state.model),
            )
        )
        add(
            CheckpointEntry(
                name="optimizers",
                save=lambda: self._optimizer_states(optimizer_state),
                load=self._take_optimizers,
                to_fill=lambda: self._optimizer_states(optimizer_state_to_fill),
            )
        )
        for kind in ("schedulers", "callbacks", "algorithms"):
            self._add_group(kind)
        self._add_loggers()
        add(CheckpointEntry(name="precision", save=self._precision.state_dict, load=self._take_precision))
        add(
            CheckpointEntry(
                name="timestamp", save=lambda: state.timestamp.state_dict(), load=self._take_timestamp
            )
        )
        add(
            CheckpointEntry(
                name="loader",
                save=lambda: self._loader_state() if self._is_loader_shared() else None,
                load=self._take_loader,
                may_change=True,
            )
        )
        for placement in ("rank_zero", "per_rank"):
            # On another number of ranks, the position of rank 0 stands for all.
            add(
                CheckpointEntry(
                    name="loader_position",
                    save=lambda: {} if self.loader is None else self.loader.position(),
                    load=self._take_position,
                    placement=placement,
                )
            )
        add(CheckpointEntry(name="run_name", save=lambda: state.run_name, load=self._take_run_name))
        add(
            CheckpointEntry(
                name="seed", save=lambda: state.seed, load=lambda seed: setattr(state, "seed", seed)
            )
        )
        size_name = "device_train_microbatch_size"
        add(
            CheckpointEntry(
                name=size_name, save=lambda: state.device_train_microbatch_size, load=lambda _: None
            )
        )

    def _add_group(self, kind: str) -> None:
        """Register schedulers, callbacks or algorithms.

        Tensors are shared. On several ranks, plain values may differ between ranks: those of each rank are
        stored for a run on the same number of ranks, and those of rank 0 for any other number.
        """

        def states(*, with_tensors: bool | None = None) -> dict[str, Any]:
            all_states = states_of(getattr(self._state, kind), of_rank_zero=False)
            if with_tensors is None or self._state.parallelism.world_size == 1:
                return all_states if with_tensors in (None, True) else {}
            return {name: state for name, state in all_states.items() if has_tensors(state) == with_tensors}

        def rank_zero_states() -> dict[str, Any]:
            own_states = states_of(getattr(self._state, kind), of_rank_zero=True)
            return own_states | states(with_tensors=False)

        def to_fill() -> dict[str, Any]:
            all_states = states_of(getattr(self._state, kind), of_rank_zero=False, to_fill=True)
            return {name: state if has_tensors(state) else {} for name, state in all_states.items()}

        def load(states: Any) -> None:
            give_states(getattr(self._state, kind), states)
            if kind == "schedulers":
                self._loaded_schedulers |= states

        def shared() -> dict[str, Any]:
            return states(with_tensors=True)

        def own() -> dict[str, Any]:
            return states(with_tensors=False)

        add = self.registry.add
        add(CheckpointEntry(name=kind, save=shared, load=load, may_change=True, to_fill=to_fill))
        add(CheckpointEntry(name=kind, save=rank_zero_states, load=load, placement="rank_zero"))
        add(CheckpointEntry(name=kind, save=own, load=load, placement="per_rank"))

    def _add_loggers(self) -> None:
        def load(states: Any) -> None:
            give_states(self.destinations, states)

        part = CheckpointEntry(
            name="loggers", save=lambda: states_of(self.destinations), load=load, placement="rank_zero"
        )
        self.registry.add(part)

    @property
    def state(self) -> State:
        """The state of the run."""
        return self._state

    def can_save(self) -> bool:
        """Return whether a save is possible: no batch is in a step, or ahead without a resume point."""
        loader = self.loader
        if loader is None:
            return True
        return not loader.is_in_step and (not loader.has_batch_ahead or loader.resume_point() is not None)

    def tree(self) -> StateTree:
        """Return the tree to save, with the tensors in use, not copies.

        Within an evaluation too, the model's tensors are those of the training.
        """
        self._check_entries()
        tree = self.registry.collect("shared")
        self._replace_weights(tree["model"], "trained_weights")
        return tree

    def weights_tree(self) -> StateTree:
        """Return the tree of a weights-only checkpoint, with an algorithm's averages in place of weights."""
        tree = self.tree()
        self._replace_weights(tree["model"], "averaged_weights")
        return {name: tree[name] for name in WEIGHTS_ONLY}

    def _replace_weights(self, model: dict[str, Any], method: str) -> None:
        """Replace tensors of the model's state by those that a method of an algorithm returns."""
        for algorithm in self._state.algorithms:
            tensors: Mapping[str, Any] = getattr(algorithm, method, dict)()
            if not tensors:
                continue
            by_name = {plain_name(name): tensor for name, tensor in tensors.items()}
            by_name |= {
                name: by_name[first]
                for name, first in tied_names(self._state.model).items()
                if first in by_name
            }
            # A model may leave tensors out of its state: frozen ones beside adapters, transient buffers.
            model |= {name: one.to(model[name].dtype) for name, one in by_name.items() if name in model}

    def tree_to_fill(self) -> StateTree:
        """Return the tree to load into: `tree`, but parts without tensors take any entries of a checkpoint.

        A callback may be new in this run, or may have other entries than in the checkpoint. The loader may be
        another one.
        """
        self._check_entries()
        return self.registry.to_fill()

    def _check_entries(self) -> None:
        """Refuse a model in stages whose state is more than its parameters and buffers by name.

        Raises:
            TrainerConfigError: The entries of a stage are not known.
        """
        model = self._state.model
        if isinstance(self._state.parallelism, Pipelined) and loads_itself(model, model_state(model)):
            raise TrainerConfigError(
                f"`{type(model).__name__}` saves or loads its state in a way of its own (`state_dict`, "
                "`load_state_dict` or hooks of them), and with `pp` each stage saves its parameters and "
                "buffers by name. Leave that out, or leave `pp` out of `parallelism_config`"
            )

    @property
    def store_options(self) -> dict[str, Any]:
        """The arguments of a store's `save` and `load` beside those of any layout."""
        parallelism = self._state.parallelism
        return {"peers": parallelism.peers} if isinstance(parallelism, Pipelined) else {}

    @property
    def elsewhere(self) -> list[str]:
        """The names of the model's parameters that only other ranks have."""
        parallelism = self._state.parallelism
        return list(map(plain_name, parallelism.elsewhere)) if isinstance(parallelism, Pipelined) else []

    @property
    def ties(self) -> dict[str, str]:
        """The later plain names of tied parameters, those of other ranks too, with the first name of each."""
        parallelism = self._state.parallelism
        over_stages = parallelism.ties if isinstance(parallelism, Pipelined) else {}
        named = {plain_name(name): plain_name(first) for name, first in over_stages.items()}
        return tied_names(self._state.model) | named

    def own_part(self, tree: StateTree) -> StateTree:
        """Return a tree to save without the buffers and tied weights that ranks of other stages save.

        Call `reshaped_buffers` before, in which stages agree on the buffers of each.
        """
        parallelism = self._state.parallelism
        if not isinstance(parallelism, Pipelined):
            return tree
        names = self._state.model.state_dict()
        others = {plain_name(name) for name in names if not parallelism.is_own(name)}
        rest = {name: part for name, part in tree.items() if name != "model"}
        if "optimizers" in rest:
            rest["optimizers"] = [without_slots(one, others) for one in rest["optimizers"]]
        model = {name: value for name, value in tree.get("model", {}).items() if name not in others}
        return {"model": model, **rest} if model else rest

    def per_rank(self) -> dict[str, Any]:
        """Return the state that only this rank has."""
        loader = self.loader
        point = None if loader is None else loader.resume_point()
        own_loader = None if loader is None else loader.loader
        rng = self._rng(own_loader) if point is None else point.rng
        own_state: dict[str, Any] = {"generators": rng}
        if (shared := self._shared_data()) is not None:
            own_state["data_parallel"] = shared
        if loader is not None:
            if not self._is_loader_shared():
                own_state["loader"] = self._loader_state()
            if loader.epoch_rng is not None:
                own_state["epoch_generators"] = loader.epoch_rng
        collected = self.registry.collect("per_rank")
        return own_state | {name: states for name, states in collected.items() if states}

    def _shared_data(self) -> list[int] | None:
        """Return the data-parallel rank and size if ranks share their data; None if each has its own."""
        parallelism = self._state.parallelism
        is_shared = parallelism.data_parallel[1] < parallelism.world_size
        return list(parallelism.data_parallel) if is_shared else None

    def _rng(self, loader: Any) -> dict[str, Any]:
        """Return the generator states of the training, which an evaluation has set aside."""
        training_rng = self._state.training_rng
        return capture_rng(self._state.device, loader) if training_rng is None else training_rng(loader)

    def rank_zero(self) -> dict[str, Any]:
        """Return the states of placement `"rank_zero"`, which a checkpoint keeps from rank 0 alone."""
        return self.registry.collect("rank_zero")

    def reshaped_buffers(self) -> list[str]:
        """Return the names of the buffers whose shape is not that at the start of the run.

        Collective for a model in stages.
        """
        shapes = buffer_shapes(self._state.model)
        names = [name for name, shape in shapes.items() if shape != self._first_shapes.get(name, shape)]
        parallelism = self._state.parallelism
        return parallelism.agree_on_buffers(names) if isinstance(parallelism, Pipelined) else names

    @property
    def num_batches(self) -> int:
        """The number of batches trained on so far."""
        return self._state.timestamp.counts.batch

    def take_weights(self, tree: Mapping[str, Any], user: Any = None) -> None:
        """Take the model of a loaded tree, and no other part."""
        self._take_user(user)
        self._take_model(tree["model"])

    def _take_user(self, user: Any) -> None:
        self._reshaped = tuple(user.get(RESHAPED, ())) if isinstance(user, Mapping) else ()

    def take(
        self,
        loaded: Loaded,
        *,
        exclude_algorithms: Sequence[str] = (),
        ignore_keys: Any = None,
        keeps_rng: bool = False,
    ) -> list[str]:
        """Continue from the state that was loaded into `tree()`.

        Args:
            loaded: The state.
            exclude_algorithms: The names of algorithms that keep the state they have.
            ignore_keys: Parts that keep the state they have, as `tree_filter.without` takes them.
            keeps_rng: Whether the random generators keep the state they have.

        Returns:
            Sentences for the user about what could not be restored.

        Raises:
            ResumeError: If the optimizers differ.
        """
        state, notices = self._state, list[str]()
        self._position, self._name = LoaderPosition(), loaded.name
        self.forget_loaded()
        self._optimizer_notices = notices

        def kept(states: Any) -> Any:
            return _without(without_loaded(states, ignore_keys), exclude_algorithms)

        self._take_user(loaded.user)
        self.registry.load(kept(loaded.state), "shared")
        if isinstance(loaded.user, Mapping):
            self.registry.load(kept(loaded.user), "rank_zero")
        per_rank = loaded.per_rank
        if per_rank is not None and per_rank.get("data_parallel") != self._shared_data():
            per_rank = None  # as many ranks, which divide the data in another way
        if per_rank is None:
            self._position.is_of_other_ranks = True
        if per_rank is None and not keeps_rng:
            rank = state.parallelism.data_parallel[0]
            reseed(state.seed, step=state.timestamp.counts.batch, rank=rank)
            notices.append(
                "the checkpoint is of another number of ranks, so random generators start anew from the seed "
                f"({state.seed}), the step and the rank"
            )
        if per_rank is not None:
            if not keeps_rng:
                restore_rng(per_rank["generators"], state.device)
                self._position.rng = per_rank["generators"]
            self.registry.load(kept(per_rank), "per_rank")
            if self._position.loader_state is None:
                self._position.loader_state = per_rank.get("loader")
            self._position.epoch_rng = per_rank.get("epoch_generators")
        self._loaded_position = self._position
        return notices

    @property
    def has_loaded(self) -> bool:
        """Whether a checkpoint was loaded, and nothing was trained since."""
        return self._loaded_position is not None

    def forget_loaded(self) -> None:
        """Discard the loaded position and scheduler states; called when the training goes on."""
        self._loaded_position = self._positioned = None
        self._loaded_schedulers = {}

    def resume_schedulers(self) -> None:
        """Give the loaded states to schedulers that were made after the load."""
        give_states(self._state.schedulers, self._loaded_schedulers)
        for name, scheduler in named(self._state.schedulers):
            if name in self._loaded_schedulers and isinstance(scheduler, LRScheduler):
                # The constructor of a torch scheduler changes the rates that were loaded.
                groups = scheduler.optimizer.param_groups
                for group, rate in zip(groups, scheduler.get_last_lr(), strict=True):
                    set_rate(group, rate)

    def resume_loader(self, *, spins: bool = True) -> list[str]:
        """Move `loader` to the loaded position, unless it is there already.

        The position is kept for a later loader until `forget_loaded`.

        Args:
            spins: Whether a loader without a state fetches and discards the batches that were trained on;
                False starts its epoch's data anew.

        Returns:
            Sentences for the user.
        """
        position, loader = self._loaded_position, self.loader
        if position is None or loader is None or self._positioned == (loader, spins):
            return []
        self._positioned = loader, spins
        is_spun = spins or loader.is_stateful
        return position.restore(
            loader,
            device=self._state.device,
            num_batches=self._state.timestamp.counts.batch_in_epoch if is_spun else 0,
            is_shared=self._is_loader_shared(),
        )

    def _take_model(self, states: Any) -> None:
        take_model_state(self._state.model, states, reshaped=self._reshaped)

    def _optimizer_states(self, state_of: Callable[[Optimizer, nn.Module], dict[str, Any]]) -> list[Any]:
        state = self._state
        states = [state_of(optimizer, state.model) for optimizer in state.optimizers]
        return [with_all_names(tree, state.parallelism, index) for index, tree in enumerate(states)]

    def _take_optimizers(self, states: Any) -> None:
        optimizers = self._state.optimizers
        if len(states) != len(optimizers):
            raise ResumeError(
                f"the checkpoint `{self._name}` has {len(states)} optimizers and this run {len(optimizers)}; "
                "make the same ones"
            )
        for index, (optimizer, saved) in enumerate(zip(optimizers, states, strict=True)):
            own = with_own_names(saved, self._state.parallelism, index)
            self._optimizer_notices += take_optimizer_state(optimizer, self._state.model, own)

    def _take_loader(self, state: Any) -> None:
        self._position.loader_state = state

    def _take_position(self, counted: Any) -> None:
        self._position.counted = counted

    def _take_precision(self, states: Any) -> None:
        self._precision.load_state_dict(dict(states))

    def _take_timestamp(self, numbers: Any) -> None:
        self._state.timestamp = self._state.previous_timestamp = Timestamp.from_state_dict(numbers)

    def _take_run_name(self, name: Any) -> None:
        if not self._keeps_run_name:
            self._state.run_name = name

    def _loader_state(self) -> Mapping[str, Any] | None:
        return None if self.loader is None else self.loader.state_dict()

    def _is_loader_shared(self) -> bool:
        is_alone = self._state.parallelism.data_parallel[1] == 1
        return is_alone or (self.loader is not None and hasattr(self.loader.loader, "data_parallel"))


def _without(states: Mapping[str, Any], algorithms: Sequence[str]) -> dict[str, Any]:
    """Return states without those of some algorithms."""
    if not algorithms or "algorithms" not in states:
        return dict(states)
    remaining = {name: state for name, state in states["algorithms"].items() if name not in algorithms}
    return {**states, "algorithms": remaining}
