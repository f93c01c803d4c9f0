"""Training methods, as `composer.algorithms`."""

from __future__ import annotations

from typing import Any

import torch

import hocket.algos as _algos
from hocket.algos import (
    SAM,
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
    WeightStandardization,
)
from hocket.algos.squeeze_excite import SqueezeExcite2d, SqueezeExciteConv2d
from hocket.algos.stochastic_depth.layers import StochasticResidual
from hocket.compat.composer.alibi import Alibi
from hocket.compat.composer.ema_parameters import EMAParameters
from hocket.compat.composer.mixed_precision import MixedPrecision
from hocket.compat.composer.spellings import translate
from hocket.trainer import Event, Logger, State


class EMA(_algos.EMA):
    """`hocket.algos.EMA` with Composer's names for its averages."""

    @property
    def ema_model(self) -> EMAParameters | None:
        """The averages, which are not copied; None before a trainer has made them."""
        average = self._average
        if average is None:
            return None
        tensors = average.tensors
        parameters = {name: one for name, one in tensors.items() if average.is_parameter(name)}
        return EMAParameters.of(
            parameters, {name: one for name, one in tensors.items() if name not in parameters}
        )

    @property
    def ema_started(self) -> bool:
        """Whether averaging has begun."""
        return self._num_updates > 0

    @property
    def ema_weights_active(self) -> bool:
        """Whether the model has the averages now."""
        return self._average is not None and self._average.is_in_model


class SWA(_algos.SWA):
    """`hocket.algos.SWA` with Composer's names for its progress."""

    @property
    def swa_started(self) -> bool:
        """Whether averaging has begun."""
        return self._num_averaged > 0

    @property
    def swa_completed(self) -> bool:
        """Whether the model has the mean."""
        return self._is_completed


class StochasticDepth(_algos.StochasticDepth):
    """`hocket.algos.StochasticDepth`, which also counts the blocks."""

    num_stochastic_layers = 0

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Wrap the blocks, or draw which of them are dropped."""
        super().apply(event, state, logger)
        if event is Event.INIT:
            blocks = [one for one in state.model.modules() if isinstance(one, StochasticResidual)]
            self.num_stochastic_layers = len(blocks)


class MixUp(_algos.MixUp):
    """`hocket.algos.MixUp`, which also takes its past arguments."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **translate("MixUp", arguments))

    @property
    def mixing(self) -> float:
        """The share of the partner in each sample of the last microbatch."""
        return self._mixing

    @property
    def indices(self) -> torch.Tensor:
        """The partner of each sample of the last microbatch."""
        return self._indices


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
