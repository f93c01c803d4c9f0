"""The averaged weights of `EMA` in a file that Composer saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hocket.algos import EMA
from hocket.trainer import State


def algorithm_states(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the states of a file's algorithms by class name, without algorithms that have no state."""
    pairs = [(pair[0], pair[1]) for pair in saved.get("algorithms", {}).values()]
    return {name: state for name, state in pairs if state.keys() - {"repr"}}


def take_average(
    saved: dict[str, Any], state: State, lay_out: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> bool:
    """Load the averages of a file into a run's `EMA`, and put the trained weights into the file's `model`.

    Composer saves while the averages are in the model; the trained weights are then in the state of `EMA`.
    A run without `EMA` starts from the averages, as in Composer.

    Args:
        saved: The `state` of the file; changed in place.
        state: The run's state.
        lay_out: Returns the first tensor with the device and the sharding of the second.

    Returns:
        Whether both the file and the run have averages.
    """
    ema = next((one for one in state.algorithms if isinstance(one, EMA)), None)
    record = algorithm_states(saved).get("EMA", {})
    if ema is None or "ema_model" not in record:
        return False
    stored = record["ema_model"]
    averages = {**stored.get("named_parameters_dict", {}), **stored.get("named_buffers_dict", {})}
    model = saved.get("model", {})
    if record.get("ema_weights_active"):
        saved["model"] = {name: averages.get(name, value) for name, value in model.items()}
        averages = model
    if record.get("ema_started", True):
        average = {
            name: lay_out(averages[name], like) if name in averages else like
            for name, like in ema.state_dict()["average"].items()
        }
        ema.load_state_dict({"average": average, "num_updates": 1})
    return True


__all__ = ["algorithm_states", "take_average"]
