"""Names that other trainers have for the arguments of `Trainer`."""

from __future__ import annotations

from collections.abc import Collection

_IN_EPOCHS = ("max_duration", "give `max_duration='{}ep'`")
_IN_BATCHES = ("max_duration", "give `max_duration='{}ba'`")
_OPTIMIZERS = ("optimizers", "give `optimizers={}`")
_RATE = ("optimizers", "give it to the optimizer: `optimizers=torch.optim.AdamW(model.parameters(), lr={})`")
_SCHEDULERS = ("schedulers", "give `schedulers={}`")
_LOADER = ("train_dataloader", "give a data loader: `train_dataloader=DataLoader(…)`")
_EVAL_LOADER = ("eval_dataloader", "give a data loader: `eval_dataloader=DataLoader(…)`")
_BATCH_SIZE = (
    "train_dataloader",
    "give it to the data loader: `train_dataloader=DataLoader(…, batch_size={})`",
)
_MICROBATCHES = (
    "device_train_microbatch_size",
    "give the samples of a microbatch, `device_train_microbatch_size=`; one batch of the loader is an update",
)
_CLIPPING = ("gradient_clipping", "give `gradient_clipping={}`")
_RANKS = ("device", "start the script on the ranks: `hocket-launch -n {} script.py`")
_SHARDING = ("fsdp_config", "give `fsdp_config={{}}` to shard; without it each rank has a copy")

#: The argument that is meant, and the answer, by foreign name.
_ANSWERS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("max_epochs", "num_epochs", "n_epochs", "epochs", "num_train_epochs"), _IN_EPOCHS),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps", "max_iters"), _IN_BATCHES),
    **dict.fromkeys(("optimizer", "optim"), _OPTIMIZERS),
    **dict.fromkeys(("lr", "learning_rate"), _RATE),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_schedulers"), _SCHEDULERS),
    **dict.fromkeys(("train_dataset", "train_data", "dataset", "dataloader", "train_loader"), _LOADER),
    **dict.fromkeys(("train_dataloaders", "datamodule"), _LOADER),
    **dict.fromkeys(("eval_dataset", "val_dataloader", "val_dataloaders", "val_loader"), _EVAL_LOADER),
    **dict.fromkeys(("batch_size", "batchsize", "per_device_train_batch_size"), _BATCH_SIZE),
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps", "grad_accum"), _MICROBATCHES),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm"), _CLIPPING),
    **dict.fromkeys(("devices", "gpus"), _RANKS),
    "strategy": _SHARDING,
    "accelerator": ("device", "give `device={}`"),
    "logger": ("loggers", "give `loggers={}`"),
    **dict.fromkeys(("default_root_dir", "output_dir"), ("save_folder", "give `save_folder={}`")),
    **dict.fromkeys(("ckpt_path", "resume_from_checkpoint"), ("load_path", "give `load_path={}`")),
    **dict.fromkeys(("criterion", "loss"), ("loss_fn", "give `loss_fn={}`")),
}


def foreign_argument(name: str, value: str, known: Collection[str]) -> str | None:
    """Return the argument to give for another trainer's, with its value as text; None for other names."""
    argument, answer = _ANSWERS.get(name, ("", ""))
    return answer.format(value) if argument in known else None
