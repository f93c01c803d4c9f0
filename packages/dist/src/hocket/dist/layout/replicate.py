"""A whole copy of the model on every rank, gradients averaged by torch's `DistributedDataParallel`.

DDP is a module around the model and so changes the names of its parameters, its type and its methods. Here
the model stays the module that the caller uses, and only its `forward` goes through DDP.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hocket.dist.layout.fsdp import broadcast_values

_UNUSED = (
    "The step before left parameters without gradients. Freeze them with `requires_grad_(False)` before the "
    "training, or have them searched for in each step: "
    "`fsdp_config={'sharding_strategy': 'NO_SHARD', 'find_unused_parameters': True}`, or "
    "`parallelism=hocket.dist.provide(None, device=..., find_unused_parameters=True)`. An algorithm that "
    "freezes layers asks for it with the attribute `find_unused_parameters = True`."
)


class Replication:
    """A model whose forward goes through DDP, until `detach`.

    In training, with gradients, a call averages the gradients of its backward over the ranks. In evaluation,
    or without gradients, no rank waits for another, so ranks may run forward unequally often.

    Parameters that need gradients only later, since a callback unfreezes them, are averaged from the next
    call on. All ranks have to unfreeze them at the same step.

    Args:
        model: Its parameters and buffers are set to those of rank 0. Collective.
        device: The device of the model.
        find_unused_parameters: Let a forward leave parameters unused, at the cost of a search in each step.
    """

    def __init__(
        self, model: nn.Module, *, device: torch.device, find_unused_parameters: bool = False
    ) -> None:
        self.front: Replica | None = None
        self._model = model
        self._device = device
        self._find_unused_parameters = find_unused_parameters
        self._is_syncing = True
        self._ddp: DistributedDataParallel | None = None
        self._frozen = list(model.parameters())
        if any(parameter.requires_grad for parameter in self._frozen):
            self._wrap()
        else:
            broadcast_values(model, device)
        self._set_front()
        self._hook = model.register_forward_pre_hook(self._keep_front)

    def sync_gradients(self, when: bool) -> None:
        """Average the gradients of the next backward over the ranks, or accumulate them locally."""
        self._is_syncing = when
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = when

    def detach(self) -> None:
        """Restore the model's own forward."""
        front, self.front = self.front, None
        self._hook.remove()
        self._unwrap()
        if front is not None and front.is_set():
            del self._model.forward
            if front.own is not None:
                self._model.forward = front.own

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward: through DDP in training, with gradients."""
        if not (self._model.training and torch.is_grad_enabled()):
            return self._run(*args, **kwargs)
        if self._frozen and any(parameter.requires_grad for parameter in self._frozen):
            self._wrap()
        if self._ddp is None:
            return self._run(*args, **kwargs)
        try:
            return self._ddp.forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "find_unused_parameters" in str(error):
                error.add_note(_UNUSED)
            raise

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        assert self.front is not None
        return self.front.run(*args, **kwargs)

    def _set_front(self) -> None:
        # On the instance, so that the class, its name and `state_dict()` stay as they are.
        self.front = self._model.forward = Replica(self, self._model)

    def _keep_front(self, model: nn.Module, inputs: Any) -> None:
        """Take in a forward that was set on the object since; without DDP, ranks would drift apart."""
        if self.front is not None and not self.front.is_set():
            self._set_front()

    def _wrap(self) -> None:
        """Let DDP average the gradients of the parameters that need them now. Collective."""
        self._unwrap()
        self._ddp = DistributedDataParallel(
            _Forward(self._model, self._run),
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            find_unused_parameters=self._find_unused_parameters,
            gradient_as_bucket_view=True,
        )
        self._ddp.require_backward_grad_sync = self._is_syncing
        self._frozen = [parameter for parameter in self._model.parameters() if not parameter.requires_grad]

    def _unwrap(self) -> None:
        ddp, self._ddp = self._ddp, None
        if ddp is not None:
            # The hooks would go on averaging for as long as anything refers to DDP's module.
            ddp._remove_autograd_hooks()  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return an object that has no effect on a copy of the model, in which no other rank takes part."""
        inert = object.__new__(Replication)
        inert.front = None
        return inert


class Replica:
    """The forward that is set on a replicated model.

    Attributes:
        own: The forward that was set on the object before (`model.forward = …`); None for that of its class.
    """

    def __init__(self, replication: Replication, model: nn.Module) -> None:
        self.own: Callable[..., Any] | None = model.__dict__.get("forward")
        self._replication = replication
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward through DDP, or directly where a forward that was set since calls this one."""
        replication = self._replication
        return replication.run(*args, **kwargs) if replication.front is self else self.run(*args, **kwargs)

    def is_set(self) -> bool:
        """Return whether this object is the model's forward, and not one that was set since."""
        return self._model.forward is self

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self._model).forward(self._model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the own forward for a copy of the model."""
        model = copy.deepcopy(self._model, memo)
        return MethodType(type(model).forward, model) if self.own is None else copy.deepcopy(self.own, memo)


class _Forward(nn.Module):
    """The module that DDP wraps: the model's parameters and its own forward."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)
