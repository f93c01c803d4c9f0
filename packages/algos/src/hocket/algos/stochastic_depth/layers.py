"""A residual block whose residual branch is dropped at random."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class StochasticResidual(nn.Module):
    """Wraps a residual block `y = act(shortcut(x) + branch(x))` and drops `branch(x)` at random in training.

    The block's own `forward` runs with hooks on its last layer before the addition, so that any block with
    torchvision's attribute names works. A branch that a whole batch drops is not computed if the shortcut and
    the activation are known, as in torchvision's blocks, and a single process trains: with several ranks
    every rank must make the same collectives. A compiled model multiplies the branch by 0 instead, since each
    choice of branches would be compiled anew.

    Args:
        block: The block, whose parameters are used as they are.
        last: The last layer of the branch before the addition, a submodule of `block`.
        drop_rate: Probability of dropping the branch, 0 to 1.
        method: `"block"` drops the branch for the whole batch, `"sample"` for each sample on its own.
    """

    def __init__(self, block: nn.Module, last: nn.Module, drop_rate: float, method: str) -> None:
        super().__init__()
        self.block = block
        self.drop_rate = drop_rate
        self.method = method
        self.scale = 1.0
        """The share of `drop_rate` in effect, which warmup raises from 0 to 1."""
        self.drop: bool | None = None
        """Whether the whole batch drops the branch, as `StochasticDepth` sets it; None draws in `forward`."""
        self._skips = isinstance(getattr(block, "relu", None), nn.Module) and hasattr(block, "downsample")
        self._is_dropped = False
        last.register_forward_hook(self._mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block on `(B, ...)`."""
        if self.training and self.method == "block":
            rate = self.drop_rate * self.scale
            self._is_dropped = bool(torch.rand((), device="cpu") < rate) if self.drop is None else self.drop
            if self._is_dropped and self._skips and not torch.compiler.is_compiling() and _is_alone():
                return self._shortcut(x)
        out: torch.Tensor = self.block(x)
        return out

    def _shortcut(self, x: torch.Tensor) -> torch.Tensor:
        block: Any = self.block
        if block.downsample is not None:
            x = block.downsample(x)
        elif getattr(block.relu, "inplace", False):
            x = x.clone()  # the layer before needs its output in the backward pass
        out: torch.Tensor = block.relu(x)
        return out

    def _mask(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        rate = self.drop_rate * self.scale
        if not self.training:
            return output * (1 - rate) if self.method == "block" else output
        if self.method == "block":
            return output * 0 if self._is_dropped else output
        is_kept = torch.rand(len(output), *[1] * (output.ndim - 1), device=output.device) >= rate
        return output * is_kept / (1 - rate if rate < 1 else 1)  # with 1, `is_kept` has no sample

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"drop_rate={self.drop_rate:.4g}, method={self.method!r}"


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
