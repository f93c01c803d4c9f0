"""ChannelsLast: the model's weights in the memory format that convolutions on tensor cores read fastest."""

import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from hocket.algos.errors import NoEffectWarning
from hocket.algos.order import Order
from hocket.algos.traits import Trait
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event
from hocket.trainer.ranks.single_process import SingleProcess

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State


class ChannelsLast(Algorithm):
    """Converts the model to channels-last (NHWC) memory format at INIT.

    The results are the same up to rounding. Inputs need no change: torch propagates the format of the
    weights. Where a layout over ranks shards or replicates the model, also on a single rank, the inputs of
    convolutions are converted instead, since `fully_shard` takes contiguous parameters only.

    Example:
        >>> ChannelsLast()
        ChannelsLast()
    """

    order = Order.CHANNELS_LAST
    events: ClassVar[frozenset[Event] | None] = frozenset({Event.INIT})
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.CHANGES_MODEL})

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Convert `state.model`, or under a layout over ranks the inputs of its convolutions."""
        if isinstance(state.parallelism, SingleProcess):
            apply_channels_last(state.model)
            return
        for module in state.model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_pre_hook(_convert_input)

    def __repr__(self) -> str:
        return "ChannelsLast()"


def _convert_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].contiguous(memory_format=torch.channels_last), *args[1:])


def apply_channels_last(model: nn.Module) -> int:
    """Convert a model's parameters of four dims to channels-last memory format, in place; needs no trainer.

    Parameters stay the same objects. `nn.Module.to` keeps shapes and values, so optimizers and checkpoints
    are not affected.

    Args:
        model: Changed in place.

    Returns:
        The number of parameters and buffers converted. With 0, a `NoEffectWarning` is given.

    Source: PyTorch, Channels Last Memory Format tutorial.
    """
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.ndim == 4]
    if not tensors:
        warnings.warn(
            f"ChannelsLast found no tensor of four dims in {type(model).__name__}: it has an effect on "
            "two-dimensional convolutions only",
            NoEffectWarning,
            stacklevel=2,
        )
    model.to(memory_format=torch.channels_last)
    return len(tensors)
