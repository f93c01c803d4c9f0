"""A whole copy of the model on every rank, gradients averaged by torch's `DistributedDataParallel`.

DDP is a module around the model and so changes the names of its parameters, its type and its methods. Here
the model stays the module that the caller uses, and only its `forward` goes through DDP.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_UNUSED = (
    "The step before left parameters without gradients. Freeze them with `requires_grad_(False)` before the "
    "training, or have them searched for in each step: "
    "`fsdp_config={'sharding_strategy': 'NO_SHARD', 'find_unused_parameters': True}`, or "
    "`parallelism=hocket.dist.provide(None, device=..., find_unused_parameters=True)`. An algorithm that "
    "freezes layers asks for it with the attribute `find_unused_parameters = True`."
)


class _Forward(nn.Module):
    """The module that DDP wraps: the model's parameters and the forward of its class."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.model).forward(self.model, *args, **kwargs)


class Replica:
    """A model whose forward goes through DDP.

    In training, with gradients, a call averages the gradients of its backward over the ranks. In evaluation,
    or without gradients, no rank waits for another, so ranks may run forward unequally often.

    Args:
        model: Its parameters and buffers are set to those of rank 0. Collective.
        device: The device of the model.
        find_unused_parameters: Let a forward leave parameters unused, at the cost of a search in each step.
    """

    def __init__(
        self, model: nn.Module, *, device: torch.device, find_unused_parameters: bool = False
    ) -> None:
        self._model = model
        self._ddp = DistributedDataParallel(
            _Forward(model),
            device_ids=[device.index] if device.type == "cuda" else None,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=True,
        )
        # On the instance, so that the class, its name and `state_dict()` stay as they are.
        model.forward = self

    def sync_gradients(self, when: bool) -> None:
        """Average the gradients of the next backward over the ranks, or accumulate them locally."""
        self._ddp.require_backward_grad_sync = when

    def detach(self) -> None:
        """Restore the model's own forward."""
        self._model.__dict__.pop("forward", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward: through DDP in training, with gradients."""
        if self._model.training and torch.is_grad_enabled():
            try:
                return self._ddp(*args, **kwargs)
            except RuntimeError as error:
                if "find_unused_parameters" in str(error):
                    error.add_note(_UNUSED)
                raise
        return type(self._model).forward(self._model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the forward of the class for a copy of the model, in which no other rank takes part."""
        model = copy.deepcopy(self._model, memo)
        return MethodType(type(model).forward, model)
