"""The norms of parameters, gradients, moments and updates of Adam-like optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hocket.trainer.ranks.sharded_tensors import whole_tensor


@torch.no_grad()
def adam_norms(
    param: Tensor, name: str, state: Mapping[str, Tensor], group: Mapping[str, Any], *, decay: float
) -> dict[str, Tensor]:
    """Return the L2 norms of a parameter's gradient, value, first moment and latest update.

    Args:
        param: The parameter.
        name: Its name in the metrics `l2_norm/{moment,param,update,grad}/<name>`.
        state: Its optimizer state; nothing is returned while it is empty.
        group: Its parameter group.
        decay: The weight decay that the kernel multiplies by the learning rate.

    Returns:
        Scalar tensors on the device. Those of a sharded parameter are of the whole (collective).
    """
    if not state:
        return {}
    beta1, beta2 = group["betas"]
    step = state["step"].to(param.device)
    moment = state["exp_avg"]
    second = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    denominator = (second / (1.0 - beta2**step)).sqrt_().add_(group["eps"])
    update = (moment / (1.0 - beta1**step)).div_(denominator).add_(param, alpha=decay).mul_(group["lr"])
    tensors = {"moment": moment, "param": param, "update": update}
    if param.grad is not None:
        tensors["grad"] = param.grad
    # A sharded tensor's norm is a `DTensor`, too.
    return {
        f"l2_norm/{kind}/{name}": whole_tensor(torch.linalg.vector_norm(tensor))
        for kind, tensor in tensors.items()
    }
