"""Traits of methods, by which methods that cannot be used together refuse each other."""

from enum import Enum, auto
from typing import Any

from hocket.trainer.engine.passes import averages_weights


class Trait(Enum):
    """A property of a method that matters to other methods; `traits` of a method is a set of them."""

    AVERAGES_WEIGHTS = auto()
    """It replaces the model's weights by averages, during evaluations or at the end."""
    ROUNDS_LINEAR_LAYERS = auto()
    """It replaces linear layers by ones that round their weights."""
    CUTS_SEQUENCES = auto()
    """It cuts the rows of a batch to another length."""
    SMOOTHS_LABELS = auto()
    """It replaces the targets by smoothed ones while the loss is computed."""
    CHANGES_MODEL = auto()
    """It changes the modules of the model, or their memory format."""
    NEEDS_OUTPUTS = auto()
    """It needs the outputs or losses of samples."""


def has_trait(method: Any, trait: Trait) -> bool:
    """Return whether a method, of this package or another one, states a trait, or averages weights."""
    averages = trait is Trait.AVERAGES_WEIGHTS and averages_weights(method)
    return averages or trait in getattr(method, "traits", ())
