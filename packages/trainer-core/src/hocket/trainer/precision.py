"""Numeric precision of forward passes, and the scaling of gradients that fp16 needs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hocket.trainer.errors import TrainerConfigError

_DTYPE_OF = {"fp32": None, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}


class Precision:
    """Runs forward passes under `torch.autocast`, scales losses for fp16, and steps optimizers.

    Only fp16 needs the scaling. Its check for overflow is torch's `GradScaler`, which reads one number of the
    device each step; bf16 and fp32 read none.

    Args:
        name: `"fp32"`, `"amp_bf16"` or `"amp_fp16"`.
        device: Where the passes run.

    Raises:
        TrainerConfigError: If the name is none of these.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in _DTYPE_OF:
            known = ", ".join(f"`{known}`" for known in _DTYPE_OF)
            raise TrainerConfigError(f"`precision` is `{name}`; expected one of {known}")
        dtype = _DTYPE_OF[name]
        self.name = name
        self._context: Any = (
            contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
        )
        self._scaler = torch.amp.GradScaler(device.type) if dtype is torch.float16 else None

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which forward passes and losses are computed."""
        context: contextlib.AbstractContextManager[Any] = self._context
        return context

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`, scaled for fp16."""
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]  # of torch

    def unscale(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the gradients those of the loss itself, so that they can be clipped."""
        if self._scaler is not None:
            for optimizer in optimizers:
                self._scaler.unscale_(optimizer)

    def step(self, optimizers: Sequence[Optimizer], *, skip: bool = False) -> None:
        """Step the optimizers and clear gradients; a step that overflowed in fp16 is left out.

        Args:
            optimizers: All of them.
            skip: Clear gradients only: there was nothing to learn from in the batch.
        """
        for optimizer in () if skip else optimizers:
            if self._scaler is None:
                optimizer.step()
            else:
                self._scaler.step(optimizer)
        if self._scaler is not None:
            # After a skipped step too: it is what lets the gradients be unscaled again.
            self._scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """The scale and its history; empty but for fp16."""
        return self._scaler.state_dict() if self._scaler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; what another precision gave is ignored."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


def default_precision(device: torch.device) -> str:
    """`"amp_bf16"` on a GPU that computes in it, else `"fp32"`."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "amp_bf16" if has_bf16 else "fp32"
