"""The trainer's checks of arguments with the error of this package, and checks of batches."""

from functools import partial
from typing import Any

import torch

from hocket.algos.errors import AlgorithmConfigError, IncompatibleError
from hocket.trainer import checks

check_count = partial(checks.check_count, error=AlgorithmConfigError)
check_number = partial(checks.check_number, error=AlgorithmConfigError)
check_choice = partial(checks.check_choice, error=AlgorithmConfigError)
check_fraction = partial(check_number, least=0, most=1)


def as_tensor_item(method: str, what: str, value: Any, *, least_dims: int = 1) -> torch.Tensor:
    """Return `value` if it is a tensor with enough dims.

    Raises:
        IncompatibleError: The value is something else.
    """
    if not isinstance(value, torch.Tensor):
        raise IncompatibleError(
            f"`{method}` needs one tensor as {what}, but the batch has a {type(value).__name__} there. Give "
            "the key of the tensor, or a pair (getter, setter)"
        )
    if value.ndim < least_dims:
        raise IncompatibleError(
            f"`{method}` needs {what} with at least {least_dims} dims, but its shape is {tuple(value.shape)}"
        )
    return value
