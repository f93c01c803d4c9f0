"""Training methods for Hocket's trainer, each also a plain function.

- a folder for each method (`alibi`, `mixup`, …): its class, its function, and its page `README.md`
- `surgery`: replacement of a model's modules, for the methods that change models
- `order`, `traits`: in which order methods run, and which cannot be used together
- `augmentations`, `images`, `dataset_transforms`, `input_mixing`: what the methods for images share
- `batches`, `targets`, `draws`, `progress`, `weight_average`: what the others share
- `checks`, `libraries`, `errors`: checks of arguments, optional libraries, and the errors
"""

from hocket.algos.alibi import Alibi, apply_alibi
from hocket.algos.aug_mix import AugmentAndMixTransform, AugMix, augmix_image
from hocket.algos.blurpool import BlurPool, apply_blurpool
from hocket.algos.channels_last import ChannelsLast, apply_channels_last
from hocket.algos.colout import ColOut, ColOutTransform, colout_batch
from hocket.algos.cutmix import CutMix, cutmix_batch
from hocket.algos.cutout import CutOut, cutout_batch
from hocket.algos.ema import EMA, compute_ema
from hocket.algos.errors import (
    AlgorithmConfigError,
    AlgorithmError,
    IncompatibleError,
    MissingLibraryError,
    NoEffectWarning,
    SurgeryError,
    SurgeryWarning,
)
from hocket.algos.factorize import Factorize, FactorizedConv2d, FactorizedLinear, apply_factorization
from hocket.algos.float8 import Float8, apply_float8
from hocket.algos.fused_layernorm import FusedLayerNorm, apply_fused_layernorm
from hocket.algos.gated_linear_units import GatedIntermediate, GatedLinearUnits, apply_gated_linear_units
from hocket.algos.ghost_batchnorm import GhostBatchNorm, GhostBatchNorm_, apply_ghost_batchnorm
from hocket.algos.gradient_clipping import GradientClipping, apply_gradient_clipping
from hocket.algos.gyro_dropout import GyroDropout, GyroDropoutLayer, apply_gyro_dropout
from hocket.algos.label_smoothing import LabelSmoothing, smooth_labels
from hocket.algos.layer_freezing import LayerFreezing, freeze_layers
from hocket.algos.lora import LoRA, QLoRA, apply_lora, apply_qlora, merge_lora
from hocket.algos.low_precision_norm import (
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    apply_low_precision_groupnorm,
    apply_low_precision_layernorm,
)
from hocket.algos.mixup import MixUp, mixup_batch
from hocket.algos.no_op_model import NoOpModel
from hocket.algos.progressive_resizing import ProgressiveResizing, resize_batch
from hocket.algos.qat import QAT, apply_qat, convert_qat
from hocket.algos.rand_augment import RandAugment, RandAugmentTransform, randaugment_image
from hocket.algos.sam import SAM, SAMStep
from hocket.algos.schedule_free import ScheduleFree
from hocket.algos.selective_backprop import SelectiveBackprop, select_using_loss, should_selective_backprop
from hocket.algos.seq_length_warmup import SeqLengthWarmup, set_batch_sequence_length
from hocket.algos.sequence_packing import PackingCollator, SequencePacking, pack_sequences
from hocket.algos.squeeze_excite import (
    SqueezeExcite,
    SqueezeExcite2d,
    SqueezeExciteConv2d,
    apply_squeeze_excite,
)
from hocket.algos.stochastic_depth import StochasticDepth, StochasticResidual, apply_stochastic_depth
from hocket.algos.swa import SWA
from hocket.algos.weight_standardization import WeightStandardization, apply_weight_standardization
from hocket.algos.z_loss import ZLoss, z_loss
from hocket.trainer.checks import check_arguments

__all__ = [
    "EMA",
    "QAT",
    "SAM",
    "SWA",
    "AlgorithmConfigError",
    "AlgorithmError",
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
    "Float8",
    "FusedLayerNorm",
    "GatedLinearUnits",
    "GhostBatchNorm",
    "GradientClipping",
    "GyroDropout",
    "IncompatibleError",
    "LabelSmoothing",
    "LayerFreezing",
    "LoRA",
    "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm",
    "MissingLibraryError",
    "MixUp",
    "NoEffectWarning",
    "NoOpModel",
    "PackingCollator",
    "ProgressiveResizing",
    "QLoRA",
    "RandAugment",
    "RandAugmentTransform",
    "SAMStep",
    "ScheduleFree",
    "SelectiveBackprop",
    "SeqLengthWarmup",
    "SequencePacking",
    "SqueezeExcite",
    "StochasticDepth",
    "SurgeryError",
    "SurgeryWarning",
    "WeightStandardization",
    "ZLoss",
    "apply_alibi",
    "apply_blurpool",
    "apply_channels_last",
    "apply_factorization",
    "apply_float8",
    "apply_fused_layernorm",
    "apply_gated_linear_units",
    "apply_ghost_batchnorm",
    "apply_gradient_clipping",
    "apply_gyro_dropout",
    "apply_lora",
    "apply_low_precision_groupnorm",
    "apply_low_precision_layernorm",
    "apply_qat",
    "apply_qlora",
    "apply_squeeze_excite",
    "apply_stochastic_depth",
    "apply_weight_standardization",
    "augmix_image",
    "colout_batch",
    "compute_ema",
    "convert_qat",
    "cutmix_batch",
    "cutout_batch",
    "freeze_layers",
    "merge_lora",
    "mixup_batch",
    "pack_sequences",
    "randaugment_image",
    "resize_batch",
    "select_using_loss",
    "set_batch_sequence_length",
    "should_selective_backprop",
    "smooth_labels",
    "z_loss",
]

check_arguments(globals()[name] for name in __all__)
# Layers that methods put in, which a model may also be built of.
check_arguments(
    [
        FactorizedLinear,
        GatedIntermediate,
        GhostBatchNorm_,
        GyroDropoutLayer,
        SqueezeExcite2d,
        SqueezeExciteConv2d,
        StochasticResidual,
    ]
)
_OF_A_CONVOLUTION = ("stride", "padding", "dilation", "groups", "padding_mode", "device", "dtype")
check_arguments([FactorizedConv2d], passed_on=_OF_A_CONVOLUTION)
