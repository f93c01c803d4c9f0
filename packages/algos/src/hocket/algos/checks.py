"""Checks of arguments and inputs that several methods share."""

from numbers import Real
from typing import Any

import torch

from hocket.algos.errors import AlgorithmConfigError, IncompatibleError


def check_fraction(name: str, value: Any) -> None:
    """Raise `AlgorithmConfigError` unless `value` is a number from 0 to 1."""
    check_number(name, value, least=0, most=1)


def check_number(name: str, value: Any, *, least: float, most: float = float("inf")) -> None:
    """Raise `AlgorithmConfigError` unless `value` is a number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= most:
        expected = f"a number of at least {least}" if most == float("inf") else f"{least} to {most}"
        raise AlgorithmConfigError(f"`{name}` is {value!r}, expected {expected}.")


def check_count(name: str, value: Any, *, least: int = 1) -> None:
    """Raise `AlgorithmConfigError` unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise AlgorithmConfigError(f"`{name}` is {value!r}, expected an integer of at least {least}.")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise `AlgorithmConfigError` unless `value` is one of `choices`."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        expected = ", ".join(map(repr, choices))
        raise AlgorithmConfigError(f"`{name}` is {value!r}, expected one of {expected}.")


def as_tensor_item(method: str, what: str, value: Any, *, least_dims: int = 1) -> torch.Tensor:
    """Return `value` if it is a tensor with enough dims.

    Raises:
        IncompatibleError: The value is something else.
    """
    if not isinstance(value, torch.Tensor):
        raise IncompatibleError(
            f"`{method}` needs one tensor as {what}, but the batch has a {type(value).__name__} there. Give "
            "the key of the tensor, or a pair (getter, setter)."
        )
    if value.ndim < least_dims:
        raise IncompatibleError(
            f"`{method}` needs {what} with at least {least_dims} dims, but its shape is {tuple(value.shape)}."
        )
    return value
