"""Training methods as functions, as `composer.functional`."""

from __future__ import annotations

from torch import nn

import hocket.algos as _algos
from hocket.algos import (
    apply_blurpool,
    apply_channels_last,
    apply_factorization,
    apply_fused_layernorm,
    apply_gated_linear_units,
    apply_ghost_batchnorm,
    apply_gyro_dropout,
    apply_low_precision_groupnorm,
    apply_low_precision_layernorm,
    apply_squeeze_excite,
    apply_stochastic_depth,
    augmix_image,
    colout_batch,
    cutmix_batch,
    cutout_batch,
    freeze_layers,
    mixup_batch,
    randaugment_image,
    resize_batch,
    select_using_loss,
    set_batch_sequence_length,
    should_selective_backprop,
)
from hocket.algos.gradient_clipping.gradient_clipping import ClippingType
from hocket.compat.composer.alibi import apply_alibi
from hocket.compat.composer.ema_parameters import compute_ema
from hocket.compat.composer.signatures import in_order

smooth_labels = in_order(_algos.smooth_labels, "logits target smoothing")


def apply_gradient_clipping(
    model: nn.Module,
    clipping_type: ClippingType,
    clipping_threshold: float,
    fsdp_enabled: bool = False,  # noqa: ARG001 - sharded gradients are seen as such
) -> None:
    """Limit the gradients of a model in place, by `norm`, `value` or `adaptive`."""
    _algos.apply_gradient_clipping(model, clipping_type, clipping_threshold=clipping_threshold)


def apply_weight_standardization(module: nn.Module, n_last_layers_ignore: int = 0) -> None:
    """Standardize the weights of a module's convolutions, in place; the last ones may be left out."""
    _algos.apply_weight_standardization(module, n_last_layers_ignore)


__all__ = [
    "apply_alibi",
    "apply_blurpool",
    "apply_channels_last",
    "apply_factorization",
    "apply_fused_layernorm",
    "apply_gated_linear_units",
    "apply_ghost_batchnorm",
    "apply_gradient_clipping",
    "apply_gyro_dropout",
    "apply_low_precision_groupnorm",
    "apply_low_precision_layernorm",
    "apply_squeeze_excite",
    "apply_stochastic_depth",
    "apply_weight_standardization",
    "augmix_image",
    "colout_batch",
    "compute_ema",
    "cutmix_batch",
    "cutout_batch",
    "freeze_layers",
    "mixup_batch",
    "randaugment_image",
    "resize_batch",
    "select_using_loss",
    "set_batch_sequence_length",
    "should_selective_backprop",
    "smooth_labels",
]
