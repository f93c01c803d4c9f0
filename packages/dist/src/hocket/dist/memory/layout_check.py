"""The refusal of layouts that a model cannot have, as training would refuse them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from hocket.dist.config.axes import CP, EP, TP
from hocket.dist.config.context_parallel import ContextParallelConfig
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.config.tensor_parallel import TensorParallelConfig
from hocket.dist.errors import ConfigError, ModelError
from hocket.dist.layout.experts import check_experts
from hocket.dist.layout.sequence.attention import check_attention
from hocket.dist.layout.sequence.blocks import find_blocks
from hocket.dist.layout.tensor_parallelism.plans import check_sequence_heads


def check_layout(
    model: nn.Module,
    sizes: Mapping[str, int],
    config: FSDPConfig,
    tensor_parallel: TensorParallelConfig,
    context_parallel: ContextParallelConfig,
    *,
    boundary: Sequence[int],
) -> None:
    """Refuse experts and sequences that ranks cannot share.

    Args:
        model: Plain.
        sizes: The ranks along each axis.
        config: The sharding.
        tensor_parallel: Whether ranks of `tp` share sequences.
        context_parallel: How ranks of `cp` attend.
        boundary: The shape of the activations between blocks.

    Raises:
        ConfigError, ModelError: They cannot.
    """
    if sizes[EP] > 1:
        check_experts(model, sizes[EP])
        if config.cpu_offload:
            raise ConfigError(f"`cpu_offload` in `--fsdp-config` does not work with `{EP}`. Leave one out")
    context, tensor = sizes[CP], sizes[TP]
    has_parts = tensor > 1 and tensor_parallel.sequence_parallel
    if context > 1:
        find_blocks(model, f"`{CP}`")
        check_attention(model, CP)
        check_sequence_heads(model, replace(context_parallel, degree=context), tensor)
    parts = context * (tensor if has_parts else 1)
    if context_parallel.is_ring and context > 1:
        parts = math.lcm(parts, 2 * context)  # each has a part of the head and one of the tail
    length = boundary[1] if len(boundary) > 1 else 0
    if length % parts:
        raise ModelError(
            f"sequences of {length} positions cannot be shared evenly in {parts} parts by the ranks of "
            f"{f'`{CP}`' if context > 1 else ''}{' × ' if context > 1 and has_parts else ''}"
            f"{f'`{TP}`' if has_parts else ''}"
        )
