"""Changes to a run between the calls of `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.trainer.checkpoint.registry import CheckpointEntry
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.loop.run import Run
from hocket.trainer.setup.arguments import check_microbatch_size
from hocket.trainer.step.microbatch_search import MicrobatchSearch
from hocket.trainer.step.microbatch_step import AutoMicrobatchStep


def set_precision(run: Run, name: str) -> None:
    """Compute in another precision from here on.

    Raises:
        TrainerConfigError: If the name is unknown, or the model is sharded, which fixes the precision.
    """
    state = run.state
    if name == state.precision:
        return
    if any(hasattr(parameter, "device_mesh") for parameter in state.model.parameters()):
        raise TrainerConfigError(
            f"the model was sharded for `{state.precision}`, which fixes the precision of what ranks "
            f"exchange; pass `precision='{name}'` to `Trainer`"
        )
    run.precision.change(name)
    state.precision = name


def set_microbatch_size(run: Run, given: Any) -> None:
    """Set a microbatch size, or search for one before the next step.

    Raises:
        TrainerConfigError: If `given` is neither a size nor a search.
    """
    check_microbatch_size("device_train_microbatch_size", given)
    state, search = run.state, MicrobatchSearch.of(given)
    state.device_train_microbatch_size = None if search is not None else given
    if run.auto_step is not None:
        run.auto_step.start(search)
    elif search is not None:
        state.train_step = run.auto_step = AutoMicrobatchStep(
            state.train_step, run.context, search, run.sync, run.logger
        )


def keep_found_size(run: Run) -> None:
    """Register the microbatch size that was found for checkpoints; a run on as many ranks reuses it."""
    num_ranks = run.sync.num_ranks

    def save() -> dict[str, int]:
        size = None if run.auto_step is None else run.auto_step.found
        return {} if size is None else {"size": size, "num_ranks": num_ranks}

    def load(found: Mapping[str, int]) -> None:
        if run.auto_step is not None and found.get("num_ranks") == num_ranks:
            run.auto_step.remembered = found["size"]

    run.run_state.registry.add(
        CheckpointEntry(name="microbatch_search", save=save, load=load, placement="rank_zero")
    )
