"""Replacements of Composer's public names that have no counterpart, by module and name."""

from __future__ import annotations

_URI = (
    "give the URI (`s3://…`, `gs://…`) as `save_folder` or `load_path`; the environment has the credentials"
)
_OTHER_DEVICE = "Hocket trains on CPUs, CUDA and MPS devices"

ABSENT: dict[str, dict[str, str]] = {
    "composer.algorithms": {
        "BERTGatedFFOutput": "`GatedLinearUnits` makes a `hocket.algos.gated_linear_units.GatedIntermediate`",
        "make_resnet_bottleneck_stochastic": "use `apply_stochastic_depth`",
    },
    "composer.callbacks": {
        "MLPerfCallback": "log by MLCommons' own package `mlperf_logging` from a callback of your own",
    },
    "composer.devices": {
        "DeviceHPU": _OTHER_DEVICE,
        "DeviceNeuron": _OTHER_DEVICE,
        "DeviceTPU": _OTHER_DEVICE,
    },
    "composer.distributed": {
        "prepare_tp_module": "give `parallelism_config={'tp': TPConfig(...)}` to the trainer"
    },
    "composer.utils": {
        "LibcloudObjectStore": _URI,
        "MLFlowObjectStore": _URI,
        "SFTPObjectStore": _URI,
        "UCObjectStore": _URI,
        "quantize_dynamic": "use torchao's quantization on the exported model",
    },
}
