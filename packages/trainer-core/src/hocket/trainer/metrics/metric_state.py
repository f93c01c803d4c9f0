"""The state of metrics as plain values, which a checkpoint stores for each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchmetrics import Metric


def metric_states(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Return the states of metrics as dicts, lists, bytes and numbers. Waits for the device."""
    return {
        name: [{key: _packed(getattr(part, key)) for key in part._defaults} for part in _parts(metric)]
        for name, metric in metrics.items()
    }


def load_metric_states(metrics: Mapping[str, Metric], states: Mapping[str, Any]) -> None:
    """Load the states that `metric_states` returned; a metric without a matching state starts empty."""
    for name, metric in metrics.items():
        parts = _parts(metric)
        saved = states.get(name, [])
        metric.reset()
        if [sorted(part._defaults) for part in parts] != [sorted(packed_state) for packed_state in saved]:
            continue
        for part, packed_state in zip(parts, saved, strict=True):
            for key, packed in packed_state.items():
                setattr(part, key, _unpacked(packed, part.device))
            # With a count of 0, torchmetrics warns that `compute` ran before `update`.
            part._update_count = max(1, part._update_count)


def were_updated(metric: Metric) -> bool:
    """Return whether a metric, or one of a collection, has values."""
    return any(part.update_called for part in _parts(metric))


def _parts(metric: Metric) -> list[Any]:
    """Return a metric and the metrics inside it, such as the base metric of a wrapper."""
    return [part for part in metric.modules() if hasattr(part, "_defaults")]


def _packed(value: Any) -> Any:
    if isinstance(value, list):
        return [_packed(one) for one in value]
    host = value.detach().cpu().contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""
    return {"dtype": str(host.dtype).removeprefix("torch."), "shape": list(host.shape), "data": data}


def _unpacked(packed: Any, device: torch.device) -> Any:
    if isinstance(packed, list):
        return [_unpacked(one, device) for one in packed]
    dtype, shape = getattr(torch, packed["dtype"]), list(packed["shape"])
    if not packed["data"]:
        return torch.zeros(shape, dtype=dtype, device=device)
    flat = torch.frombuffer(bytearray(packed["data"]), dtype=torch.uint8).view(dtype)
    return flat.reshape(shape).to(device)
