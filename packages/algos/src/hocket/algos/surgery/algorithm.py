"""`SurgeryAlgorithm`: the base of training methods that change the model's modules."""

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.distributed.tensor import DTensor

from hocket.algos.errors import IncompatibleError, SurgeryError, SurgeryWarning
from hocket.algos.surgery.optimizers import named_parameters, repair_optimizers
from hocket.algos.surgery.report import SurgeryReport
from hocket.algos.surgery.watch import SurgeryWatch
from hocket.algos.traits import Trait
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State

_COMPARED_AT = frozenset({Event.EPOCH_START, Event.EVAL_BEFORE_ALL})
_SAVED_AFTER = frozenset(
    {Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT, Event.FIT_END}
)


class SurgeryAlgorithm(Algorithm):
    """Changes modules once, at INIT, and detects modules that are swapped later.

    A subclass makes its change in `operate` and lists the classes that it treats in `targets`. At each
    epoch's start, before evaluation and at each save the model is compared with its state after the surgery:
    modules that were swapped or added since are named in a `SurgeryWarning`, or with `reapply=True` treated
    as well. The object may be given to one trainer after the other; it treats the model of each.

    Args:
        reapply: Treat modules that appear later, instead of naming them. Possible only in one process: a
            sharded or replicated model cannot be changed.

    Attributes:
        report: The report of the surgery; None before it.
        can_reapply: Whether the method can treat a model that it has treated in part.
    """

    can_reapply: ClassVar[bool] = True

    events: ClassVar[frozenset[Event] | None] = frozenset({Event.INIT, Event.AFTER_LOAD, *_COMPARED_AT})
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.CHANGES_MODEL})
    operates_at: Event = Event.INIT

    def __init__(self, *, reapply: bool = False) -> None:
        self.reapply = reapply
        self.report: SurgeryReport | None = None
        self._watch: SurgeryWatch | None = None
        self._model: nn.Module | None = None
        self._named: set[str] = set()
        # Weak references, since sharding replaces the parameters.
        self._parameters: weakref.WeakValueDictionary[str, nn.Parameter] = weakref.WeakValueDictionary()
        if reapply:
            # A save must find the modules treated, and saves happen at these events, after the algorithms.
            self.events: frozenset[Event] | None = (type(self).events or frozenset()) | _SAVED_AFTER  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings; what refers weakly to the model of a run cannot go into another process.

        Raises:
            TypeError: The method has changed a model.
        """
        if self._watch is not None:
            raise TypeError(
                f"`{type(self).__name__}` has changed a model, which it watches, and cannot be copied or "
                "pickled any more. Copy or pickle it before it is given to a trainer, or make a new one"
            )
        settings = {**self.__dict__}
        del settings["_parameters"]
        return settings

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the settings over."""
        self.__dict__.update(state, _parameters=weakref.WeakValueDictionary())

    @abstractmethod
    def operate(self, state: "State") -> SurgeryReport:
        """Change the modules of `state.model`, repair `state.optimizers`, and return the report."""

    @property
    @abstractmethod
    def targets(self) -> tuple[type[nn.Module], ...]:
        """The classes of modules that the method treats."""

    @staticmethod
    def required_on_load() -> bool:
        """Return True: the method must be applied before its checkpoints are loaded, since names differ."""
        return True

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:  # the protocol's
        """Operate at `operates_at`; at the other events compare the model with its state after that."""
        if event is Event.INIT:
            self._forget_other_model(state.model)
        if event is self.operates_at and self.report is None:
            self.report = self.operate(state)
            self._model = state.model
            self._watch = SurgeryWatch(self.report, self.targets)
            self._settle(state.model)
            logger.log_hyperparameters(
                {f"{type(self).__name__}/num_{kind}": count for kind, count in self.report.counts.items()}
            )
        elif event is Event.AFTER_LOAD:
            # All surgeries at INIT are done: the modules that they put in are known from here on.
            self._settle(state.model)
        else:
            if self.report is None and event in _COMPARED_AT:
                raise SurgeryError(
                    f"`{type(self).__name__}` was added after the trainer was built, so it never changed the "
                    "model. Pass it to `Trainer(algorithms=...)`, which applies it at INIT"
                )
            self._compare(state.model, state)

    def _forget_other_model(self, model: nn.Module) -> None:
        """Forget the surgery if it was made in a model of an earlier trainer that is not the present one."""
        if self.report is None:
            return
        inside = set(model.modules())
        if model is not self._model and not any(one.new in inside for one in self.report.replacements):
            self.report = self._watch = None
            self._named = set()
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the treated modules, by name and class; warn of those that were swapped since."""
        if self._watch is None or self._model is None:
            return {}
        self._compare(self._model, None)
        return {"modules": self._watch.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare the treated modules with those of the run that was saved.

        Raises:
            IncompatibleError: The modules differ, so that weights would be loaded into the wrong modules.
        """
        if self._watch is None or "modules" not in state:
            return
        saved, current = dict(state["modules"]), self._watch.fingerprint
        if saved == current:
            return
        differing = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
        raise IncompatibleError(
            f"`{type(self).__name__}` treated other modules in the run that was saved: "
            + "; ".join(
                f"`{name}` is {current.get(name, 'untreated')} here and {saved.get(name, 'untreated')} there"
                for name in differing[:5]
            )
            + ". Make the model and the algorithm with the arguments of that run"
        )

    def _compare(self, model: nn.Module, state: "State | None") -> None:
        if self._watch is None or not (changes := self._watch.changes(model)):
            return
        if self.reapply and state is not None:
            self._operate_again(state, changes)
            return
        unnamed = [change for change in changes if change not in self._named]
        if unnamed:
            self._named |= set(unnamed)
            hint = ", or pass `reapply=True` to have them treated" * self.can_reapply
            warnings.warn(
                f"modules changed after `{type(self).__name__}` was applied: {'; '.join(unnamed[:5])}. Swap "
                f"modules before the trainer is made{hint}",
                SurgeryWarning,
                stacklevel=3,
            )

    def _operate_again(self, state: "State", changes: list[str]) -> None:
        if state.parallelism.data_parallel[1] > 1 or any(
            isinstance(parameter, DTensor) for parameter in state.model.parameters()
        ):
            raise IncompatibleError(
                f"modules changed after `{type(self).__name__}` was applied: {'; '.join(changes[:5])}. They "
                "cannot be treated now, as the model is laid out over ranks; swap modules before the trainer "
                "is made"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            new_report = self.operate(state)
        state.model.to(state.device)
        # Parameters that were swapped in are in no optimizer: they take the places of those they replaced.
        changed = repair_optimizers(state.optimizers, dict(self._parameters), named_parameters(state.model))
        new_report.optimizer_changes = changed
        if self.report is not None:
            inside = set(state.model.modules())
            self.report.replacements = [one for one in self.report.replacements if one.new in inside]
            self.report.merge(new_report)
            self._watch = SurgeryWatch(self.report, self.targets)
            self._settle(state.model)

    def _settle(self, model: nn.Module) -> None:
        """Record the present modules and parameters of the model as known."""
        if self._watch is not None:
            self._watch.settle(model)
            self._parameters = weakref.WeakValueDictionary(named_parameters(model))
