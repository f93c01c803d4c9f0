"""Replays of single steps of a run, and the first step at which two runs part."""

from hocket.recipes.replay.difference import Difference, Side, find_difference
from hocket.recipes.replay.report import StepReport, replay_step

__all__ = ["Difference", "Side", "StepReport", "find_difference", "replay_step"]
