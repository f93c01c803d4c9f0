"""The state of a run as a dict, as `composer.core.State` returns and loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint import state_dict as torch_states

from hocket.compat.composer import checkpoint
from hocket.compat.composer.utils.parallelism import is_model_fsdp
from hocket.trainer import Timestamp
from hocket.trainer.checkpoint.registry import give_states


class StateDicts:
    """The methods of a `State` that return its contents as a dict, or load them from one."""

    model: Any
    optimizers: Any
    timestamp: Any
    schedulers: Any
    callbacks: Any
    algorithms: Any
    run_name: str
    seed: int

    def get_model_state_dict(self) -> dict[str, Any]:
        """Return the model's whole tensors by name, on rank 0 alone if the model is sharded. Collective."""
        return checkpoint.get_model_state_dict(self.model, cpu_offload=False)

    def get_optim_state_dict(self) -> dict[str, Any]:
        """Return the first optimizer's state under its class name, by parameter names. Collective."""
        optimizer = self.optimizers[0]
        state = checkpoint.get_optim_state_dict(self.model, optimizer, cpu_offload=False)
        return {type(optimizer).__qualname__: state}

    def state_dict(self) -> dict[str, Any]:
        """Return the model, the optimizer, the time and the states of the other parts. Collective."""
        state = {
            "model": self.get_model_state_dict(),
            "optimizers": self.get_optim_state_dict() if self.optimizers else {},
            **checkpoint.get_resumption_state_dict(self),  # type: ignore[arg-type]  # mixed into a `State`
            "rank_zero_seed": self.seed,
        }
        del state["rng"], state["seed"]
        return state

    def load_model_state(
        self,
        state_dict: Mapping[str, Any],
        logger: Any = None,
        strict: bool = True,
        exclude_algorithms: Sequence[str] | None = None,
        algorithm_passes: Any = None,
    ) -> None:
        """Load the model from a dict that `state_dict` returned. Collective.

        Args:
            state_dict: A dict with the entry `model`.
            logger: Accepted for Composer's users.
            strict: Refuse names that only the model or only the dict has.
            exclude_algorithms: Accepted for Composer's users: loading applies no algorithm.
            algorithm_passes: Likewise.
        """
        options = self._options(strict)
        torch_states.set_model_state_dict(self.model, dict(state_dict["model"]), options=options)

    def load_optim_state(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state of the first optimizer from a dict that `state_dict` returned. Collective."""
        if not self.optimizers:
            return
        optimizer = self.optimizers[0]
        saved = state_dict["optimizers"].get(type(optimizer).__qualname__)
        if saved is not None:
            options = self._options(strict)
            torch_states.set_optimizer_state_dict(self.model, optimizer, saved, options=options)

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        logger: Any = None,
        strict: bool = False,
        exclude_algorithms: Sequence[str] | None = None,
        algorithm_passes: Any = None,
    ) -> None:
        """Load a dict that `state_dict` returned; parts that it lacks stay as they are. Collective.

        The run keeps its name. The other arguments are those of `load_model_state`.
        """
        if "model" in state:
            self.load_model_state(state, logger, strict, exclude_algorithms, algorithm_passes)
        if "optimizers" in state:
            self.load_optim_state(state, strict)
        if "timestamp" in state:
            self.timestamp = Timestamp.from_state_dict(state["timestamp"])
        self.seed = state.get("rank_zero_seed", self.seed)
        excluded = set(exclude_algorithms or ())
        for kind in ("schedulers", "callbacks", "algorithms"):
            saved = {name: one for name, one in state.get(kind, {}).items() if name not in excluded}
            give_states(getattr(self, kind), saved)

    def _options(self, strict: bool) -> torch_states.StateDictOptions:
        # If the model is not sharded, the whole tensors are this rank's own. With `full_state_dict=True`,
        # torch would refuse an optimizer without tensors.
        return torch_states.StateDictOptions(strict=strict, full_state_dict=is_model_fsdp(self.model))


__all__ = ["StateDicts"]
