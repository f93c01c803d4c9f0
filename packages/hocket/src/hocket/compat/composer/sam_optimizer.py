"""`SAMOptimizer`: SAM around an optimizer, for a custom training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hocket.trainer.errors import TrainerConfigError


class SAMOptimizer(Optimizer):
    """An optimizer that steps another with the gradients at the worst point within `rho` of the weights.

    Use it in a custom training loop on one process. With a trainer use the algorithm `SAM`, which leaves the
    optimizer as it is.

    Args:
        base_optimizer: The optimizer that makes the updates; both have the same parameter groups.
        rho: Distance of the point at which gradients are taken.
        epsilon: Added to the gradients' norm.
        interval: Every `interval`-th step is one of SAM; the others are plain steps of `base_optimizer`.

    Example:
        >>> optimizer = SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> optimizer.step(lambda: backward(model(x)))
    """

    def __init__(
        self, base_optimizer: Optimizer, rho: float = 0.05, epsilon: float = 1e-12, interval: int = 1
    ) -> None:
        if rho < 0 or epsilon < 0 or interval < 1:
            raise TrainerConfigError(
                f"`rho` is {rho}, `epsilon` {epsilon}, `interval` {interval}; expected the first two to be "
                "0 or more, and the last 1 or more"
            )
        self.base_optimizer = base_optimizer
        self._num_steps = 0
        settings = {"rho": rho, "epsilon": epsilon, "interval": interval}
        super().__init__(base_optimizer.param_groups, settings)
        self.param_groups = base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights, and return the loss before the update.

        Args:
            closure: Computes the loss and its gradients, and returns the loss. It is called twice in a step
                of SAM, and must not step the optimizer.

        Raises:
            TrainerConfigError: There is no `closure`.
        """
        if closure is None:
            raise TrainerConfigError(
                "`SAMOptimizer.step` needs a closure that computes the loss and its gradients"
            )
        closure = torch.enable_grad()(closure)
        loss = closure()
        self._num_steps += 1
        if self._num_steps % self.param_groups[0]["interval"] == 0:
            previous = self._climb()
            self.base_optimizer.zero_grad()
            try:
                closure()
            finally:
                for parameter, weights in previous:
                    parameter.copy_(weights)
        self.base_optimizer.step()
        return loss

    def _climb(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Move the weights up the gradient; return the parameters with their previous weights."""
        entries = [
            (parameter, group["rho"], group["epsilon"])
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        previous = [(parameter, parameter.clone()) for parameter, _, _ in entries]
        if entries:
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter, _, _ in entries])
            for parameter, rho, epsilon in entries:
                parameter.add_(parameter.grad * (rho / (norm + epsilon)))
        return previous


__all__ = ["SAMOptimizer"]
