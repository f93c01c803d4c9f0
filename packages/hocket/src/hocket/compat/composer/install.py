"""Replacement of Composer by this package in `import composer`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OURS = "hocket.compat.composer"

_MODULES = (
    "",
    "algorithms",
    "callbacks",
    "checkpoint",
    "core",
    "devices",
    "distributed",
    "functional",
    "loggers",
    "loss",
    "metrics",
    "models",
    "optim",
    "optim.scheduler",
    "profiler",
    "trainer",
    "utils",
    "utils.dist",
    "utils.module_surgery",
    "utils.reproducibility",
)

#: Modules of Composer that scripts import from, and the module here that has all their names.
_PARTS = {
    "core": (
        "algorithm", "callback", "data_spec", "engine", "evaluator", "event", "passes", "precision",
        "serializable", "state", "time", "types",
    ),
    "models": ("base", "huggingface", "initializers", "resnet", "tasks", "tasks.classification"),
    "optim": ("decoupled_weight_decay",),
    "trainer": ("trainer",),
    "callbacks": (
        "activation_monitor", "early_stopper", "export_for_inference", "free_outputs", "generate",
        "image_visualizer", "load_checkpoint", "lr_monitor", "memory_monitor", "memory_snapshot",
        "nan_monitor", "oom_observer", "optimizer_monitor", "runtime_estimator", "speed_monitor",
        "system_metrics_monitor", "threshold_stopper", "checkpoint_saver", "eval_output_logging_callback",
        "mlperf",
    ),
    "loggers": (
        "cometml_logger", "console_logger", "file_logger", "in_memory_logger", "logger", "logger_destination",
        "mlflow_logger", "mosaicml_logger", "neptune_logger", "progress_bar_logger",
        "remote_uploader_downloader", "slack_logger", "tensorboard_logger", "wandb_logger",
    ),
    "loss": ("loss", "utils"),
    "metrics": ("map", "metrics", "nlp"),
    "profiler": ("json_trace_handler", "marker", "profiler", "profiler_action", "profiler_schedule",
                 "system_profiler", "torch_profiler", "trace_handler"),
    "checkpoint": ("download", "state_dict", "upload"),
    "utils": ("misc", "iter_helpers", "string_enum", "import_helpers", "batch_helpers", "parallelism",
              "auto_log_hparams", "checkpoint", "collect_env", "compression", "device", "file_helpers",
              "inference", "object_store", "object_store.gcs_object_store", "object_store.object_store",
              "object_store.oci_object_store", "object_store.s3_object_store", "remote_uploader", "retrying",
              "warnings", *(f"object_store.{name}" for name in (
                  "libcloud_object_store", "mlflow_object_store", "sftp_object_store", "uc_object_store",
                  "utils"))),
    "devices": ("device", "device_cpu", "device_gpu", "device_hpu", "device_mps", "device_neuron",
                "device_tpu"),
    "distributed": ("dist_strategy", "prepare_distributed", "shared_utils"),
}  # fmt: skip

#: Modules of the training methods; each has a module of its own name within.
_METHODS = (
    "alibi", "augmix", "blurpool", "channels_last", "colout", "cutmix", "cutout", "ema", "factorize",
    "gated_linear_units", "ghost_batchnorm", "gradient_clipping", "gyro_dropout", "label_smoothing",
    "layer_freezing", "low_precision_groupnorm", "low_precision_layernorm", "mixup", "no_op_model",
    "progressive_resizing", "randaugment", "sam", "selective_backprop", "seq_length_warmup",
    "squeeze_excite", "stochastic_depth", "swa", "weight_standardization",
)  # fmt: skip

#: Modules of Composer and their replacements.
MODULES = {
    **{f"composer.{name}".rstrip("."): f"{_OURS}.{name}".rstrip(".") for name in _MODULES},
    **{f"composer.{above}.{part}": f"{_OURS}.{above}" for above, parts in _PARTS.items() for part in parts},
    **{f"composer.algorithms.{name}{within}": f"{_OURS}.methods"
       for name in _METHODS for within in ("", f".{name}")},
    **{f"composer.algorithms.{name}": f"{_OURS}.methods" for name in (
        "alibi.attention_surgery_functions", "alibi.attention_surgery_functions.utils",
        "blurpool.blurpool_layers", "factorize.factorize_core", "factorize.factorize_modules",
        "gated_linear_units.gated_linear_unit_layers", "stochastic_depth.stochastic_layers", "warnings",
    )},
    "composer.algorithms.utils": "hocket.algos.augmentations",
    "composer.algorithms.utils.augmentation_primitives": "hocket.algos.augmentations",
    "composer.utils.dist_checkpoint": f"{_OURS}.utils.checkpoint",
    "composer._version": _OURS,
    "composer.trainer._scale_schedule": f"{_OURS}.optim.scheduler",
}  # fmt: skip


def install(*, force: bool = False) -> None:
    """Make `import composer` load `hocket.compat.composer` in this process and its forked children.

    Call it before anything imports `composer`. A second call changes nothing.

    Args:
        force: Replace Composer itself, if it was imported already. Objects made with it do not change.

    Raises:
        TrainerConfigError: Composer itself was imported already, and `force` is not set.
    """
    present = sys.modules.get("composer")
    if present is not None and present.__name__ != _OURS:
        if not force:
            # Imported here: torch would come with it, and the `composer` command forks ranks before torch is
            # imported.
            from hocket.trainer.errors import TrainerConfigError

            raise TrainerConfigError(
                "`composer` was imported already: expected `hocket.compat.composer.install()` before "
                "anything imports it; call it first, or with `force=True`"
            )
        for name in [name for name in sys.modules if name.partition(".")[0] == "composer"]:
            del sys.modules[name]
    sys.modules["composer"] = importlib.import_module(_OURS)
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, Loader):
    """An import finder that loads submodules such as `composer.metrics` from this package on first use."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a direct submodule of `composer`, if `composer` is this package."""
        parent, _, part = fullname.partition(".")
        is_ours = parent == "composer" and getattr(sys.modules.get(parent), "__name__", None) == _OURS
        if not is_ours or "." in part or fullname not in MODULES:
            return None
        return ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module by this package's module, and register its submodules."""
        top = module.__name__
        for name, hocket_name in MODULES.items():
            if name == top or name.startswith(f"{top}."):
                loaded = sys.modules[name] = importlib.import_module(hocket_name)
                parent, _, last = name.rpartition(".")
                if not hasattr(sys.modules[parent], last):
                    # `import a.b as m` and `from a import b` look up this attribute.
                    setattr(sys.modules[parent], last, loaded)
