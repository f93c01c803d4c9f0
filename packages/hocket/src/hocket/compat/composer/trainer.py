"""`Trainer` with Composer's arguments, past and present, and its defaults."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from hocket.compat.composer.composer_files import (
    ComposerFile,
    is_composer_file,
    load_composer_file,
    read_composer_file,
)
from hocket.compat.composer.console_logger import ConsoleLogger
from hocket.compat.composer.devices import as_torch_device
from hocket.compat.composer.engine import Engine, Logger
from hocket.compat.composer.ignore_keys import and_key, as_lenient
from hocket.compat.composer.load_paths import find_checkpoint
from hocket.compat.composer.mixed_precision import MixedPrecision
from hocket.compat.composer.models import HasLogger
from hocket.compat.composer.optim.one_argument import as_schedules
from hocket.compat.composer.pretrained import HuggingFaceRecord
from hocket.compat.composer.progress_log import ProgressLog
from hocket.compat.composer.spellings import translate
from hocket.compat.composer.state import State
from hocket.compat.composer.utils import dist
from hocket.compat.composer.utils.inference import ExportFormat, Transform, export_with_logger
from hocket.dist import read_world, translate_deepspeed
from hocket.trainer import DataSpec, Evaluator
from hocket.trainer import Trainer as _Trainer
from hocket.trainer.checks import as_list
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.evaluation.evaluator import DEFAULT_LABEL
from hocket.trainer.models import HuggingFaceModel as _HuggingFaceModel
from hocket.trainer.optim import DecoupledSGDW
from hocket.trainer.setup.assembly import PartClasses
from hocket.trainer.step.losses.losses import as_model

#: Composer's defaults where Hocket's differ.
DEFAULTS: dict[str, Any] = {
    "accumulate_train_batch_on_tokens": False,
    "loop": {"nonfinite_loss": "ignore"},
    "save_filename": "ep{epoch}-ba{batch}-rank{rank}.pt",
}


class Trainer(_Trainer):
    """`hocket.trainer.Trainer` with Composer's arguments and defaults.

    A script need not close the trainer, which is closed when the script ends, or when nothing refers to it
    any more. Without `optimizers` it trains with `DecoupledSGDW(lr=0.1)`, and on a GPU without `precision` in
    fp16.

    Args:
        **arguments: Those of `hocket.trainer.Trainer`, and past spellings, as `spellings.SPELLINGS` lists
            them. `deepspeed_config` is translated to FSDP2. `load_path` may name the newest checkpoint.

    Raises:
        TrainerConfigError: If an argument is unknown, or does not fit the others.
    """

    part_classes = PartClasses(state=State, engine=Engine, logger=Logger)

    def __init__(self, **arguments: Any) -> None:
        given = DEFAULTS | translate("Trainer", arguments)
        if isinstance(given["loop"], Mapping):
            given["loop"] = {**DEFAULTS["loop"], **given["loop"]}
        given["device"] = as_torch_device(given.get("device"))
        # Made here, the process group outlives the trainer: scripts use it after `close`.
        dist.initialize_dist(given.get("device"), given.get("dist_timeout", 300.0))
        given["eval_dataloader"] = label_loaders(given.get("eval_dataloader"))
        given["schedulers"] = as_schedules(given.get("schedulers"))
        _run_name(given)
        _parallelism(given)
        _numerics(given)
        _checkpoints(given)
        if given.get("optimizers") is None and "model" in given:
            warnings.warn("no `optimizers`: training with `DecoupledSGDW(lr=0.1)`", stacklevel=2)
            given["model"] = as_model(given["model"], given.pop("loss_fn", None))
            given["optimizers"] = DecoupledSGDW(given["model"].parameters(), lr=0.1)
        given["callbacks"] = [*as_list(given.get("callbacks")), ProgressLog()]
        _console(given)
        if isinstance(given.get("model"), _HuggingFaceModel):
            given["callbacks"].append(HuggingFaceRecord())
        file = _composer_file(given)
        super().__init__(**given)
        _close_at_exit(self)
        self.logger.log_hyperparameters(_run_facts(self.state.seed, self.state.device))
        for module in self.state.model.modules():
            if isinstance(module, HasLogger):
                module.logger = self.logger
        if file is not None:
            self._go_on_from(file, given)

    def fit(self, *args: Any, **arguments: Any) -> None:
        """Train, as `hocket.trainer.Trainer.fit`."""
        given = translate("fit", arguments)
        given["eval_dataloader"] = label_loaders(given.get("eval_dataloader"))
        given["schedulers"] = as_schedules(given.get("schedulers"))
        names = [type(algorithm).__name__ for algorithm in self.state.algorithms]
        self.logger.log_hyperparameters({f"enabled_algorithms/{name}": True for name in names})
        super().fit(*args, **given)

    def eval(self, eval_dataloader: Any = None, subset_num_batches: int = -1) -> None:
        """Evaluate, as `hocket.trainer.Trainer.eval`."""
        super().eval(label_loaders(eval_dataloader), subset_num_batches)

    def export_for_inference(  # type: ignore[override]  # Composer's arguments
        self,
        save_format: str | ExportFormat,
        save_path: str,
        save_object_store: Any = None,
        sample_input: Any = None,
        transforms: Transform | Sequence[Transform] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
    ) -> None:
        """Write the model as a program, by default for the last batch, as `utils.export_with_logger`."""
        export_with_logger(
            self.state.model,
            save_format,
            save_path,
            self.logger,
            save_object_store,
            self.state.batch if sample_input is None else sample_input,
            transforms,
            input_names,
            output_names,
        )

    @property
    def saved_checkpoints(self) -> list[str]:
        """The paths or URIs of the committed checkpoints in `save_folder`, the newest last."""
        checkpointer = self._run.checkpointer
        folder = None if checkpointer is None else getattr(checkpointer.store, "uri", None)
        names = super().saved_checkpoints
        return names if folder is None else [f"{folder.rstrip('/')}/{name}" for name in names]

    def _go_on_from(self, file: ComposerFile, given: dict[str, Any]) -> None:
        """Load a file of Composer's, unless `autoresume` found a checkpoint of this run."""
        run = self._run
        if run.is_own_checkpoint:
            return
        weights_only = bool(given.get("load_weights_only"))
        run.notices += load_composer_file(
            file,
            self.state,
            weights_only=weights_only,
            strict=given.get("load_strict_model_weights", True),
            ignore_keys=given.get("load_ignore_keys"),
        )
        if run.loader is not None and not weights_only:
            run.loader.resume(None, num_batches=self.state.timestamp.counts.batch_in_epoch)
            run.loader.skip()
        if run.checkpointer is not None and not weights_only:
            run.checkpointer.start_from_loaded()


def _run_facts(seed: int, device: torch.device) -> dict[str, Any]:
    """Return the hyperparameters of the machines and the seed that Composer logs in each run."""
    kind = "cpu" if device.type == "cpu" else "gpu"
    return {
        "num_nodes": dist.get_world_size() // dist.get_local_world_size(),
        f"num_{kind}s_per_node": dist.get_local_world_size(),
        "node_name": os.environ.get("NODENAME", "unknown"),
        "rank_zero_seed": seed,
    }


def _close_at_exit(trainer: Trainer) -> None:
    """Close a trainer before the interpreter ends, because Composer's scripts do not close it."""
    trainer_ref = weakref.ref(trainer)

    def close() -> None:
        if (open_trainer := trainer_ref()) is not None:
            open_trainer.close()

    atexit.register(close)
    weakref.finalize(trainer, atexit.unregister, close)


def label_loaders(given: Any) -> Any:
    """Label several loaders without labels `eval`, `eval_1`, `eval_2`; return any other value unchanged."""
    loaders = list(given) if isinstance(given, (list, tuple)) else []
    if len(loaders) < 2 or not all(isinstance(loader, (DataLoader, DataSpec)) for loader in loaders):
        return given
    return [
        Evaluator(label=DEFAULT_LABEL if index == 0 else f"{DEFAULT_LABEL}_{index}", dataloader=loader)
        for index, loader in enumerate(loaders)
    ]


def _composer_file(given: dict[str, Any]) -> ComposerFile | None:
    path = given.get("load_path")
    if path is None or not is_composer_file(path):
        return None
    given["load_path"] = None
    return read_composer_file(path)


def _run_name(given: dict[str, Any]) -> None:
    if given.get("run_name") is None:
        given["run_name"] = os.environ.get("COMPOSER_RUN_NAME") or os.environ.get("RUN_NAME")


def _console(given: dict[str, Any]) -> None:
    """Add a logger that prints lines in Composer's form, if `log_to_console` is set."""
    loggers = as_list(given.get("loggers"))
    if given.get("log_to_console") and not any(isinstance(one, ConsoleLogger) for one in loggers):
        interval, stream = given.get("console_log_interval", "1ba"), given.get("console_stream", "stderr")
        loggers.append(ConsoleLogger(interval, stream, log_traces=bool(given.get("log_traces"))))
    given["loggers"] = loggers


def _numerics(given: dict[str, Any]) -> None:
    algorithms = as_list(given.get("algorithms"))
    for algorithm in algorithms:
        if getattr(algorithm, "backwards_create_graph", False):
            raise TrainerConfigError(
                f"`{type(algorithm).__name__}.backwards_create_graph` is set, and the trainer's backward "
                "pass keeps no graph of itself; leave it out, and compute second derivatives in the "
                "algorithm by `torch.autograd.grad(…, create_graph=True)`"
            )
    if given.get("precision") is None and any(isinstance(one, MixedPrecision) for one in algorithms):
        has_bf16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
        given["precision"] = "amp_bf16" if has_bf16 else "amp_fp16"
    if given.get("precision") is None:
        device = given.get("device")
        on_gpu = torch.cuda.is_available() and (device is None or str(device).startswith(("gpu", "cuda")))
        given["precision"] = "amp_fp16" if on_gpu else "fp32"
    given["precision"] = str(given["precision"])


def _parallelism(given: dict[str, Any]) -> None:
    layout = given.get("parallelism_config")
    if layout is not None and not isinstance(layout, Mapping):
        given["parallelism_config"], given["fsdp_config"] = None, layout
    config = given.pop("deepspeed_config", None)
    if config is None or config is False:
        return
    if given.get("fsdp_config") is not None or given.get("parallelism_config") is not None:
        raise TrainerConfigError(
            "`deepspeed_config` is set beside a configuration of FSDP; state one of them"
        )
    settings = translate_deepspeed(
        {} if config is True else config,
        world_size=read_world().world_size,
        precision=given.get("precision"),
        device_train_microbatch_size=given.get("device_train_microbatch_size"),
    )
    given["fsdp_config"] = settings.fsdp
    for name, value in (
        ("precision", settings.precision),
        ("device_train_microbatch_size", settings.device_train_microbatch_size),
        ("gradient_clipping", settings.max_grad_norm),
    ):
        if given.get(name) is None:
            given[name] = value


def _checkpoints(given: dict[str, Any]) -> None:
    if given.get("save_num_checkpoints_to_keep") == 0:
        # Composer's scripts set 0 if a logger uploads the checkpoints; here the folder has the only copy.
        warnings.warn("`save_num_checkpoints_to_keep` is 0: the newest checkpoint is kept", stacklevel=3)
        given["save_num_checkpoints_to_keep"] = 1
    for name in ("load_ignore_keys", "save_ignore_keys"):
        given[name] = as_lenient(given.get(name), name)
    if given.get("load_path") is not None:
        path = os.fspath(given["load_path"])
        if given.get("run_name") is not None:
            path = path.replace("{run_name}", given["run_name"])
        given["load_path"] = find_checkpoint(path, autoresume=bool(given.get("autoresume")))
        if given.get("run_name") is None and not given.get("autoresume"):
            # A run that starts from another one's checkpoint has a name of its own, as in Composer.
            given["load_ignore_keys"] = and_key(given["load_ignore_keys"], "run_name")


__all__ = ["Trainer"]
