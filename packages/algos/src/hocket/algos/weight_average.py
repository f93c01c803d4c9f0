"""A running average of a model's weights, whole or sharded, updated with foreach kernels."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hocket.algos.errors import IncompatibleError

_HALF = (torch.float16, torch.bfloat16)


class WeightAverage:
    """An average of a model's trainable parameters and, on request, of its buffers.

    Averages are laid out as the parameters (a shard averages its own part, without communication), in fp32
    where parameters are fp16 or bf16. Integer buffers are copied.

    Args:
        model: Laid out already: its parameters must stay the same objects.
        has_buffers: Whether floating point buffers are averaged and others copied.
    """

    def __init__(self, model: nn.Module, *, has_buffers: bool) -> None:
        self._sources: dict[str, torch.Tensor] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        if has_buffers:
            self._sources.update(model.named_buffers())
        self.tensors: dict[str, torch.Tensor] = {
            name: _copy(source.detach()) for name, source in self._sources.items()
        }
        self._kept: dict[str, torch.Tensor] | None = None

    @property
    def is_in_model(self) -> bool:
        """Whether the model has the averaged weights now."""
        return self._kept is not None

    def is_parameter(self, name: str) -> bool:
        """Return whether an average belongs to a parameter, and not to a buffer."""
        return isinstance(self._sources[name], nn.Parameter)

    def is_of(self, model: nn.Module) -> bool:
        """Return whether the averages were made from the parameters of this model object."""
        parameter_ids = {id(parameter) for parameter in model.parameters()}
        return any(id(source) in parameter_ids for source in self._sources.values())

    def check_is_of(self, model: nn.Module, title: str) -> None:
        """Refuse a model other than the one that the averages were made from.

        Args:
            model: The model that is about to be trained.
            title: The name of the method, for the message.

        Raises:
            IncompatibleError: The averages are of another model.
        """
        if self._sources and not self.is_of(model):
            raise IncompatibleError(
                f"`{title}` has the averages of another trainer's model, because that trainer was built "
                f"later with the same `{title}` object. Make a `{title}` for each of two trainers that are "
                "used in turn."
            )

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Move averages towards the model: `average += weight * (model - average)`."""
        averages, sources = self._local()
        if averages and weight == 1:
            # A copy, since interpolation keeps averages that are NaN or infinite.
            torch._foreach_copy_(averages, sources)
        elif averages:
            torch._foreach_lerp_(averages, sources, weight)

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """Set the averages to the model's weights."""
        self.update(1.0)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Set the model's weights to the averages, permanently."""
        for name, source in self._sources.items():
            local_part(source).copy_(local_part(self.tensors[name]))

    @torch.no_grad()
    def swap_in(self) -> None:
        """Copy the averages into the model, and keep its own weights; takes the memory of another copy."""
        if self._kept is None:
            self._kept = {name: local_part(source).clone() for name, source in self._sources.items()}
            self.copy_to_model()

    @torch.no_grad()
    def swap_out(self) -> None:
        """Restore the model's own weights."""
        saved, self._kept = self._kept, None
        for name, value in (saved or {}).items():
            local_part(self._sources[name]).copy_(value)

    def load(self, tensors: Mapping[str, Any]) -> None:
        """Load averages from a checkpoint.

        Raises:
            IncompatibleError: The averages are of another model.
        """
        if tensors.keys() != self.tensors.keys():
            differing = sorted(tensors.keys() ^ self.tensors.keys())
            raise IncompatibleError(
                f"The averaged weights in the checkpoint are of another model: they differ in "
                f"{differing[:5]}."
            )
        with torch.no_grad():
            for name, average in self.tensors.items():
                if tensors[name] is not average:
                    average.copy_(tensors[name])

    def _local(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the local parts to average, each with the model's in its dtype; copy integer buffers."""
        averages, sources = [], []
        for name, source in self._sources.items():
            average, source_part = local_part(self.tensors[name]), local_part(source)
            if average.is_floating_point():
                averages.append(average)
                sources.append(
                    source_part if source_part.dtype == average.dtype else source_part.to(average.dtype)
                )
            else:
                average.copy_(source_part)
        return averages, sources


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a sharded tensor that this rank holds; a plain tensor itself."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor.clone()
