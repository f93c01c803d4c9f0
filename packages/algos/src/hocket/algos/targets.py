"""Class targets as probabilities, which methods mix and smooth."""

from typing import Any

import torch
from torch import nn

from hocket.algos.errors import IncompatibleError


def as_probabilities(target: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return targets as class probabilities in the shape of the logits, in fp32 or the logits' wider dtype.

    Args:
        target: `(B, ...)` integer classes, or `(B, C, ...)` probabilities. Classes below 0, such as the
            ignored -100, become zeros, which add nothing to a cross entropy.
        logits: `(B, C, ...)` float.

    Raises:
        IncompatibleError: The shapes do not fit.
    """
    if logits.ndim < 2:
        raise IncompatibleError(f"`logits` has shape {tuple(logits.shape)}, expected (B, C, ...)")
    # Half precision would round a smoothed probability of 0.925 to 0.926.
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if target.shape == logits.shape:
        return target.to(dtype)
    if target.is_floating_point() or target.shape != (logits.shape[0], *logits.shape[2:]):
        raise IncompatibleError(
            f"`target` is {target.dtype} of shape {tuple(target.shape)}, expected integer classes of shape "
            f"{(logits.shape[0], *logits.shape[2:])} or probabilities of shape {tuple(logits.shape)}"
        )
    one_hot = nn.functional.one_hot(target.long().clamp(min=0), logits.shape[1]).movedim(-1, 1)
    return one_hot.to(dtype) * (target >= 0).unsqueeze(1)


def as_logits(method: str, outputs: Any) -> torch.Tensor:
    """Return the model's outputs if they are one tensor.

    Raises:
        IncompatibleError: The outputs are something else.
    """
    if not isinstance(outputs, torch.Tensor):
        raise IncompatibleError(
            f"`{method}` needs logits as the model's outputs, a tensor of shape (B, C, ...), but they are a "
            f"{type(outputs).__name__}. Return the logits from `forward`, or call the method's function in "
            "`loss`"
        )
    return outputs
