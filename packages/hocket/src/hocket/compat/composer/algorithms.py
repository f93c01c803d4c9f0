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
from hocket.compat.composer.mixed_precision import MixedPrecision
from hocket.compat.composer.spellings import translate


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
