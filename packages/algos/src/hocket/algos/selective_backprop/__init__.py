"""Selective backprop: training on the samples with the largest losses."""

from hocket.algos.selective_backprop.selective_backprop import (
    SelectiveBackprop,
    select_using_loss,
    should_selective_backprop,
)

__all__ = ["SelectiveBackprop", "select_using_loss", "should_selective_backprop"]
