"""The base of the modes in which `scaled_dot_product_attention` takes sequences that are cut."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from hocket.dist.errors import ModelError
from hocket.dist.layout.sequence.exchange import Axis


class SequenceAttention(TorchFunctionMode):
    """A mode in which `scaled_dot_product_attention` takes the positions of each rank.

    Args:
        axis: The ranks that share a sequence.
        blocks: The name of the blocks, for messages.
    """

    def __init__(self, axis: Axis, blocks: str) -> None:
        super().__init__()
        self._axis, self._blocks = axis, blocks
        self._is_on = self._has_attended = False

    def enter(self) -> None:
        """Begin a block."""
        self._has_attended = False
        self._is_on = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """End a block, also one that has failed. Does nothing without a begin."""
        if self._is_on:
            self._is_on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Refuse a block that has not called attention.

        Raises:
            ModelError: It has not.
        """
        if not self._has_attended:
            raise ModelError(
                f"a block of `{self._blocks}` has not called `scaled_dot_product_attention`, by which ranks "
                f"of `{self._axis.name}` see each other's positions. With transformers, load the model with "
                "`attn_implementation='sdpa'`; otherwise call it, or leave "
                f"`{self._axis.name}` out"
            )

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, and attention with the positions of all ranks."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs or {})
        self._has_attended = True
        return self._attend(*args, **kwargs or {})

    @abstractmethod
    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Attend over whole sequences, and return the output at this rank's positions."""

    def _check_positions(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Refuse attention to another sequence than that of the queries.

        Raises:
            ModelError: It is to another one.
        """
        axis = self._axis.name
        if query.ndim != 4 or key.ndim != 4 or query.shape[2] != key.shape[2]:
            raise ModelError(
                f"attention has queries {tuple(query.shape)} and keys {tuple(key.shape)}, expected (batch, "
                f"heads, positions, features) of the same positions with `{axis}`; attention to another "
                f"sequence, or with a cache, is not implemented. Leave `{axis}` out"
            )

    def _check_mask(self, mask: torch.Tensor, length: int) -> None:
        """Refuse a mask that is not one of whole sequences.

        Raises:
            ModelError: It is none.
        """
        if not {*mask.shape[-2:]} <= {1, length}:
            raise ModelError(
                f"attention has a mask of the shape {tuple(mask.shape)}, expected one for the {length} "
                f"positions of the whole sequence: with `{self._axis.name}` a block is not to make masks "
                "from its own input. Pass the mask to the blocks"
            )


def check_attention(model: nn.Module, axis: str) -> None:
    """Refuse models of transformers whose attention is not `scaled_dot_product_attention`.

    Args:
        model: The model.
        axis: The axis of ranks that share a sequence.

    Raises:
        ModelError: The attention is another one.
    """
    for module in model.modules():
        chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if chosen not in (None, "sdpa"):
            raise ModelError(
                f"{type(module).__name__} has the attention {chosen!r}, and `{axis}` goes with 'sdpa'. Load "
                "the model with `attn_implementation='sdpa'`"
            )
