"""Optimizers that evaluate the loss within their step, by a closure."""

from __future__ import annotations

import inspect
from typing import Any


def needs_closure(optimizer: Any) -> bool:
    """Return whether an optimizer's `step` calls a closure that computes the loss and its gradients.

    True if `step` has an argument `closure` without a default, as that of `torch.optim.LBFGS`, or if the
    optimizer has the methods `first_step` and `second_step` of SAM, whose closure often has the default None.
    """
    if has_two_steps(optimizer):
        return True
    try:
        parameters = inspect.signature(optimizer.step).parameters.values()
    except (TypeError, ValueError):
        return False
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(
        "closure" in one.name and one.default is one.empty and one.kind not in variable for one in parameters
    )


def has_two_steps(optimizer: Any) -> bool:
    """Return whether an optimizer has the two steps of SAM, between which it calls its closure."""
    return all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step"))
