"""A running average of a model's weights, whole or sharded, updated with foreach kernels."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hocket.algos.errors import IncompatibleError
from hocket.trainer.ranks.sharded_tensors import local_part


class WeightAverage:
    """An average of a model's trainable parameters and, on request, of its buffers, as the model is now.

    Tensors are looked up by name at each update. A parameter joins the average when it becomes trainable (see
    `has_new`), and stays in it when it is frozen again. A tensor that is new, or has another shape than
    before, joins with the value that it has then; one that the model lost leaves the average.

    Averages are laid out as the parameters (a shard averages its own part, without communication), in fp32
    where parameters are of a smaller floating dtype. Complex tensors are averaged, too; integer buffers are
    copied.

    Args:
        model: The model, laid out already.
        has_buffers: Whether floating point buffers are averaged and others copied.
    """

    def __init__(self, model: nn.Module, *, has_buffers: bool) -> None:
        self._model = model
        self._has_buffers = has_buffers
        self.tensors: dict[str, torch.Tensor] = {}
        self._kept: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._waiting: list[nn.Parameter] = []
        self.join()

    @property
    def is_in_model(self) -> bool:
        """Whether the model has the averaged weights now."""
        return self._kept is not None

    @property
    def has_new(self) -> bool:
        """Whether a parameter that was frozen, or not initialized, trains now and is not averaged yet.

        Cheap, and of all parameters only where some are frozen. Asked between the backward pass and the
        update, when the parameter still has the value that it had while it was frozen.
        """
        return any(one.requires_grad and not is_lazy(one) for one in self._waiting)

    def join(self) -> None:
        """Add the tensors that belong to the average and are not in it; drop those that the model lost."""
        self._follow(self._sources())

    def is_parameter(self, name: str) -> bool:
        """Return whether an average belongs to a parameter, and not to a buffer."""
        return name in dict(self._model.named_parameters())

    def is_of(self, model: nn.Module) -> bool:
        """Return whether the averages are of this model object, or of one with the same parameters."""
        parameter_ids = {id(parameter) for parameter in model.parameters()}
        return model is self._model or any(id(source) in parameter_ids for source in self._model.parameters())

    def check_is_of(self, model: nn.Module, title: str) -> None:
        """Refuse a model other than the one that the averages were made from.

        Args:
            model: The model that is about to be trained.
            title: The name of the method, for the message.

        Raises:
            IncompatibleError: The averages are of another model.
        """
        if not self.is_of(model):
            raise IncompatibleError(
                f"`{title}` has the averages of another trainer's model, because that trainer was built "
                f"later with the same `{title}` object. Make a `{title}` for each of two trainers that are "
                "used in turn"
            )

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Move averages towards the model: `average += weight * (model - average)`."""
        sources = self._sources()
        self._follow(sources)
        averages, targets = self._averaged(sources)
        if averages and weight == 1:
            # A copy, since interpolation keeps averages that are NaN or infinite.
            torch._foreach_copy_(averages, targets)
        elif averages:
            torch._foreach_lerp_(averages, targets, weight)

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """Set the averages to the model's weights."""
        self.update(1.0)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Set the model's weights to the averages, permanently."""
        for name, source in self._fitting().items():
            local_part(source.detach()).copy_(local_part(self.tensors[name].detach()))

    @torch.no_grad()
    def swap_in(self) -> None:
        """Copy the averages into the model, and keep its own weights; takes the memory of another copy."""
        if self._kept is None:
            self._kept = {name: (one, one.detach().clone()) for name, one in self._fitting().items()}
            self.copy_to_model()

    @torch.no_grad()
    def swap_out(self) -> None:
        """Restore the model's own weights, in the place of a buffer that a forward pass replaced, too."""
        kept, self._kept = self._kept, None
        if not kept:
            return
        buffers = dict(self._model.named_buffers()) if self._has_buffers else {}
        for name, (source, value) in kept.items():
            local_part(source.detach()).copy_(local_part(value.detach()))
            if name in buffers and buffers[name] is not source:
                owner, _, key = name.rpartition(".")
                self._model.get_submodule(owner)._buffers[key] = source

    @property
    def kept(self) -> dict[str, torch.Tensor]:
        """The model's own weights while the averages are in their place, by name; else empty."""
        return {name: value for name, (_, value) in (self._kept or {}).items()}

    def load(self, tensors: Mapping[str, Any]) -> None:
        """Load averages from a checkpoint; a tensor without one joins with the value that the model has.

        Raises:
            IncompatibleError: The averages are of another model.
        """
        sources = self._model_tensors()
        if unknown := sorted(tensors.keys() - sources.keys()):
            raise IncompatibleError(
                f"the averaged weights in the checkpoint are of another model, which has {unknown[:5]}"
            )
        with torch.no_grad():
            for name, given in tensors.items():
                average = self.tensors.get(name)
                if average is None or average.shape != given.shape:
                    self.tensors[name] = _copy(given)
                elif given is not average:
                    average.copy_(given)
        self.join()

    def like(self) -> dict[str, torch.Tensor]:
        """Return a tensor of the model for each name that averages of a checkpoint may have."""
        return self._model_tensors()

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        buffers = self._model.named_buffers() if self._has_buffers else ()
        return dict((*self._model.named_parameters(), *buffers))

    def _sources(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model that belong to the average, by name."""
        sources: dict[str, torch.Tensor] = {}
        self._waiting = []
        for name, parameter in self._model.named_parameters():
            if is_lazy(parameter) or not (parameter.requires_grad or name in self.tensors):
                self._waiting.append(parameter)
            else:
                sources[name] = parameter
        if self._has_buffers:
            sources.update((name, one) for name, one in self._model.named_buffers() if not is_lazy(one))
        return sources

    @torch.no_grad()
    def _follow(self, sources: Mapping[str, torch.Tensor]) -> None:
        """Give each source an average of its shape, and no other tensor one."""
        tensors = self.tensors
        for name, source in sources.items():
            if name not in tensors or tensors[name].shape != source.shape:
                tensors[name] = _copy(source.detach())
        if len(tensors) > len(sources):
            for name in tensors.keys() - sources.keys():
                del tensors[name]

    def _fitting(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model that have an average of their shape."""
        tensors = self.tensors
        return {
            name: one
            for name, one in self._model_tensors().items()
            if name in tensors and tensors[name].shape == one.shape
        }

    def _averaged(self, sources: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the local parts to average, each with the model's in its dtype; copy integer buffers."""
        averages, targets = [], []
        for name, source in sources.items():
            average, source_part = local_part(self.tensors[name].detach()), local_part(source.detach())
            if average.is_floating_point() or average.is_complex():
                averages.append(average)
                targets.append(
                    source_part if source_part.dtype == average.dtype else source_part.to(average.dtype)
                )
            else:
                average.copy_(source_part)
        return averages, targets


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in the dtype in which a tensor is averaged."""
    if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
        return tensor.float()
    return tensor.to(torch.complex64) if tensor.dtype is torch.complex32 else tensor.clone()
