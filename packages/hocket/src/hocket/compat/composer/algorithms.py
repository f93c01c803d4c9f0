"""Training methods, as `composer.algorithms`."""

from __future__ import annotations

from typing import Any

import hocket.algos as _algos
from hocket.algos import (
    EMA,
    SAM,
    SWA,
    Alibi,
    AugmentAndMixTransform,
    AugMix,
    BlurPool,
    ChannelsLast,
    ColOut,
    ColOutTransform,
    CutOut,
    Factorize,
    FusedLayerNorm,
    GatedLinearUnits,
    GhostBatchNorm,
    GradientClipping,
    GyroDropout,
    LayerFreezing,
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    NoOpModel,
    ProgressiveResizing,
    RandAugment,
    RandAugmentTransform,
    SelectiveBackprop,
    SeqLengthWarmup,
    SqueezeExcite,
    StochasticDepth,
    WeightStandardization,
)
from hocket.algos.squeeze_excite import SqueezeExcite2d, SqueezeExciteConv2d
from hocket.compat.composer.spellings import translate
from hocket.trainer import Algorithm, Event, Logger, State
from hocket.trainer.errors import TrainerConfigError


class MixedPrecision(Algorithm):
    """Has the trainer compute in half precision: in bf16, or in fp16 on a GPU that has no bf16.

    `hocket.compat.composer.Trainer` reads it where `precision` is not given.

    Raises:
        TrainerConfigError: At `INIT`, if the trainer's precision is another one.
    """

    events = frozenset({Event.INIT})

    def match(self, event: Event, state: State) -> bool:
        """Return whether the run is being made."""
        return event is Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Check that the run computes in half precision."""
        if state.precision not in ("amp_bf16", "amp_fp16"):
            raise TrainerConfigError(
                f"`MixedPrecision` is among the algorithms and `precision` is `{state.precision}`; leave "
                "one of them out, or set `precision='amp_bf16'`"
            )


class MixUp(_algos.MixUp):
    """`hocket.algos.MixUp`, which also takes its past arguments."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **translate("MixUp", arguments))


class CutMix(_algos.CutMix):
    """`hocket.algos.CutMix`, which also takes its past arguments."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **translate("CutMix", arguments))


class LabelSmoothing(_algos.LabelSmoothing):
    """`hocket.algos.LabelSmoothing`, which also takes its past arguments."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **translate("LabelSmoothing", arguments))


__all__ = [
    "EMA",
    "SAM",
    "SWA",
    "Alibi",
    "AugMix",
    "AugmentAndMixTransform",
    "BlurPool",
    "ChannelsLast",
    "ColOut",
    "ColOutTransform",
    "CutMix",
    "CutOut",
    "Factorize",
    "FusedLayerNorm",
    "GatedLinearUnits",
    "GhostBatchNorm",
    "GradientClipping",
    "GyroDropout",
    "LabelSmoothing",
    "LayerFreezing",
    "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm",
    "MixUp",
    "MixedPrecision",
    "NoOpModel",
    "ProgressiveResizing",
    "RandAugment",
    "RandAugmentTransform",
    "SelectiveBackprop",
    "SeqLengthWarmup",
    "SqueezeExcite",
    "SqueezeExcite2d",
    "SqueezeExciteConv2d",
    "StochasticDepth",
    "WeightStandardization",
]
