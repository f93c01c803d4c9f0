"""The comparison of the losses of ranks that share their data, after the first batch.

They are equal unless a part of the loss comes from activations inside the blocks, or inside cut layers, of
which each rank has its own part.
"""

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hocket.dist.config.axes import CP, TP
from hocket.dist.errors import ModelError

_log = logging.getLogger("hocket.dist")

_LIKENESS = {"cpu": 1e-6, "cuda": 1e-3}
"""The part of the loss by which ranks may differ that have equal inputs; some kernels of GPUs add up in no
fixed order."""


def check_loss(
    loss: torch.Tensor,
    groups: dict[str, dist.ProcessGroup],
    add_up: Callable[[torch.Tensor], torch.Tensor],
    *,
    has_parts: bool,
    is_told: bool,
) -> None:
    """Compare a batch's loss over the ranks that have its data. Collective over all ranks of the job.

    Args:
        loss: The mean loss of this rank's batch, `()`.
        groups: The groups of ranks that share data, by their axis, `tp` or `cp`.
        add_up: Sums a CPU tensor over all ranks of the job.
        has_parts: Whether ranks of `tp` have parts of the sequences.
        is_told: Whether this rank warns.

    Raises:
        ModelError: Ranks of `tp` have different losses, whose gradients would not be those of one process.
    """
    own = loss.full_tensor() if isinstance(loss, DTensor) else loss
    own = own.detach().float().reshape(1)
    others = {axis: _unlike(own, group) for axis, group in groups.items()}
    flags = [float(other is not None) for other in others.values()]
    counts = add_up(torch.tensor(flags, dtype=torch.float64, device="cpu")).tolist()
    for (axis, other), count in zip(others.items(), counts, strict=True):
        if not count:
            continue
        facts = f"ranks of `{axis}` have the same data, and different losses of the first batch"
        if other is not None:
            facts += f" ({own.item():.6g} here, {other:.6g} on another)"
        if axis == TP:
            option = "`sequence_parallel`" if has_parts else f"`{TP}`"
            raise ModelError(
                f"{facts}: a part of the loss comes from activations inside the blocks, such as a penalty, "
                "or from random numbers that differ. Each rank has its part of such activations, and their "
                "gradients are not added up. Compute the part from the model's outputs, or leave "
                f"{option} out"
            )
        if is_told:
            _log.warning(
                "%s: a part of the loss comes from activations inside the blocks, such as the term of a "
                "router, of which each rank has those of its positions. The trainer minimises the mean of "
                "their losses: that is exact for a mean over positions; a sum over positions counts 1/n of "
                "itself over n ranks of `%s`, and other functions are those of parts of sequences",
                facts,
                CP,
            )


def _unlike(own: torch.Tensor, group: dist.ProcessGroup) -> float | None:
    """Return the loss of a rank of a group that differs from this rank's; None if none does."""
    losses = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(losses, own, group=group)
    for other in losses:
        if not torch.allclose(own, other, rtol=_LIKENESS.get(own.device.type, 1e-3), atol=0, equal_nan=True):
            return other.item()
    return None
