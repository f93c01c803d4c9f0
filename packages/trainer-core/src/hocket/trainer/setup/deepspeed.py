"""The translation of `deepspeed_config` into the trainer's own arguments, by an installed package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.process.providers import find_provider
from hocket.trainer.process.world import num_ranks

_EXCLUDED = ("fsdp_config", "parallelism_config", "parallelism")


def with_deepspeed(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the trainer's arguments, with a `deepspeed_config` translated into them.

    The configuration's ZeRO stage becomes `fsdp_config`, or `parallelism_config` if it also has tensor,
    sequence or pipeline parallelism. Its precision, microbatch size and gradient clipping become the
    arguments of the trainer where these are not set. `loss_scale`, the options of `torch.amp.GradScaler`, is
    not an argument of the trainer: only a `deepspeed_config` sets it.

    Raises:
        TrainerConfigError: Another argument states the layout as well.
        MissingProviderError: No installed package translates the configuration.
        ConfigError: A key is unknown, or contradicts an argument; raised by that package, with both values.
    """
    config = arguments["deepspeed_config"]
    if config is None:
        return {**arguments, "loss_scale": None}
    for name in _EXCLUDED:
        if arguments[name] is not None:
            raise TrainerConfigError(f"`deepspeed_config` and `{name}` are both set; state one of them")
    microbatch_size = arguments["device_train_microbatch_size"]
    clipping = arguments["gradient_clipping"]
    settings = find_provider("deepspeed", asked_by="`deepspeed_config`")(
        config,
        world_size=num_ranks(),
        precision=arguments["precision"],
        device_train_microbatch_size=microbatch_size,
        train_batch_size=given if isinstance(given := arguments["global_train_batch_size"], int) else None,
        rank_batch_size=_rank_batch_size(arguments),
        gradient_clipping=clipping,
    )
    axes = dict(settings.axes)
    layout = (
        {"parallelism_config": {"fsdp": settings.fsdp, **axes}} if axes else {"fsdp_config": settings.fsdp}
    )
    return {
        **arguments,
        **layout,
        "precision": arguments["precision"] or settings.precision,
        "device_train_microbatch_size": microbatch_size or settings.device_train_microbatch_size,
        "gradient_clipping": settings.max_grad_norm if clipping is None else clipping,
        "loss_scale": settings.loss_scale,
    }


def _rank_batch_size(arguments: Mapping[str, Any]) -> int | None:
    """Return the samples of a rank's batch; None if they are unknown before the first batch."""
    loader = arguments["train_dataloader"]
    per_rank = getattr(getattr(loader, "dataloader", loader), "batch_size", None)
    return per_rank if isinstance(per_rank, int) else None
